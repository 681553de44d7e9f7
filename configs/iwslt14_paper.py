"""IWSLT14 German-English at the paper's size (Feedback Transformer v3 6.2, Table 8, Figure 7).

Command:  famjax tokenizer train train.de train.en --vocab-size 10000 --out joint.model
          famjax train iwslt14_paper
          famjax eval runs/iwslt14_paper --tasks translate:test.de=test.en --beam 5 \
              --tokenized
          famjax train iwslt14_paper model.stack=feedback model.feedback.span=256 \
              model.feedback.shared_kv=false name=iwslt14_paper_feedback
Cost:     needs an accelerator; not run here
Expected: tokenized BLEU (compounds not split) by decoder depth in Figure 7 of the paper, no
          checkpoints averaged

The files are those of fairseq's preparation, lower case and tokenized by Moses, hence --tokenized.
The paper gives neither the number of steps, the batch size nor the vocabulary; 50,000 steps of
4,096 target tokens, and 10,000 pieces, are fairseq's for this data set, whose weight decay of 1e-4
is left out. For departures of the model, the tokens and the optimizer see `_seq2seq_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_seq2seq_paper"),
        {
            "name": "iwslt14_paper",
            "model.width": 512,
            "model.heads": 4,
            "model.mlp_width": 1024,
            "model.capacity": 256,
            "data.source": "train.de",
            "data.target": "train.en",
            "data.batch": 16,
            "data.length": 256,
            "train.accumulate": 1,
            "train.steps": 50000,
        },
    )
