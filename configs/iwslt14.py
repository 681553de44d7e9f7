"""German-English talks on two cores: 6,000 pairs, such as the validation set of IWSLT14.

Command:  famjax tokenizer train train.de train.en --vocab-size 4000 --out joint.model
          famjax train iwslt14
          famjax average runs/iwslt14 --last 5 --out runs/iwslt14_average
          famjax eval runs/iwslt14_average --tasks translate:test.de=test.en --beam 5 --tokenized
Cost:     about 15 minutes on two cores, estimated from multi30k by the number of tokens; not run
          here
Expected: not measured; with so few pairs, BLEU is far below the paper's

The files are those of fairseq's preparation, lower case and tokenized by Moses, hence --tokenized.
docs/seq2seq.md shows how to split one pair of files into train and test. `iwslt14_paper` has the
paper's size.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("multi30k"),
        {
            "name": "iwslt14",
            "model.width": 128,
            "model.mlp_width": 384,
            "model.dropout.residual": 0.3,
            "data.source_length": 128,
            "data.batch": 16,
            "train.steps": 1200,
        },
    )
