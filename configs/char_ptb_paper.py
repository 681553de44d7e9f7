"""Character-level Penn Treebank at the paper's size: 10.7M parameters (v3 4.3.2, Table 9).

Command:  famjax train char_ptb_paper
          famjax train char_ptb_paper model.stack=transformer name=char_ptb_paper_transformer
          # the paper's best: 2 layers with equally many parameters, then finetuned
          famjax train char_ptb_paper model.layers=2 model.head_dim=288 model.mlp_width=4608 \
              name=char_ptb_paper_2
          famjax train char_ptb_paper init=runs/char_ptb_paper_2 optimizer.learning_rate=1.5e-4 \
              optimizer.warmup_steps=0 train.steps=1000 name=char_ptb_paper_finetuned
          famjax eval runs/char_ptb_paper_finetuned --tasks text:ptb.char.test.txt
Cost:     needs an accelerator; not run here
Expected: last run, with 2 layers and finetuned: 1.160 bits per character of the test set
          (v1 Table 2; its Transformer 1.227)

Trains on the whole file, as the paper does; nothing is held out. Validate with
--tasks text:ptb.char.valid.txt: the paper stops "earlier if the validation loss stops decreasing",
this config only after all steps.

Tokens are bytes, 258 with the special ones, where the text has about 50 different characters. For
departures of the model and the optimizer see `_feedback_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_feedback_paper"),
        {
            "name": "char_ptb_paper",
            "model.layers": 6,
            "model.width": 384,
            "model.feedback.span": 512,
            "model.dropout.attention": 0.5,
            "model.dropout.hidden": 0.5,
            "data.files": "ptb.char.train.txt",
            "data.batch": 2048,
            "data.length": 128,
            "data.holdout": 0,
            "optimizer.learning_rate": 1.5e-3,
            "optimizer.clip_norm": 1.0,
            "train.steps": 15000,
        },
    )
