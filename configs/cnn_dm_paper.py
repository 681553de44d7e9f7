"""Summaries of CNN-Dailymail at the paper's size (Feedback Transformer v3 6.3, Table 8, Figure 7).

Command:  famjax tokenizer train train.articles train.summaries --vocab-size 32000 \
              --out joint.model
          famjax train cnn_dm_paper
          # find the length penalty with the best ROUGE-Lsum on the development set, and use it for
          # the test set
          famjax eval runs/cnn_dm_paper --tasks summarize:val.articles=val.summaries --beam 5 \
              --no-repeat-ngram 3 --tune
          famjax eval runs/cnn_dm_paper --tasks summarize:test.articles=test.summaries --beam 5 \
              --no-repeat-ngram 3 --length-penalty 1.0
          famjax train cnn_dm_paper model.stack=feedback model.feedback.span=256 \
              model.feedback.shared_kv=false name=cnn_dm_paper_feedback
          # both decoders with 1, 2, 4 and 6 layers
          famjax reproduce ft-figure-7-summaries --size paper data.source=train.articles \
              data.target=train.summaries data.tokenizer=joint.model
Cost:     needs accelerators; not run here
Expected: ROUGE-Lsum by decoder depth in Figure 7 of the paper

train.articles has one article per line; so have val.articles and test.articles. The first 400 words
of each are read (See et al., 2017). The paper gives neither the number of steps, the batch size,
the vocabulary nor the beam; they are chosen here, as is that each layer of the feedback decoder has
its own keys and values: the paper shares them "on large datasets" (4). For departures of the model,
the tokens and the optimizer see `_seq2seq_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_seq2seq_paper"),
        {
            "name": "cnn_dm_paper",
            "model.width": 512,
            "model.heads": 8,
            "model.mlp_width": 2048,
            "model.capacity": 256,
            "data.source": "train.articles",
            "data.target": "train.summaries",
            "data.batch": 256,
            "data.length": 256,
            # assumes that an article of 400 words is seven times as long as its summary; training
            # reports the padding, and which value would suit
            "data.source_length": 1792,
            "data.source_words": 400,
        },
    )
