"""Characters of Penn Treebank, sized for 2 cores (Feedback Transformer v3 4.3.2, 6.4, Figure 9).

The data file has one character per byte: lines are stripped, and every space is written as `_`.

Command:  famjax train char_ptb_feedback data.files=ptb.char.train.txt
          famjax train char_ptb_feedback data.files=ptb.char.train.txt model.stack=transformer \
              name=char_ptb_transformer
          # fewer layers with equally many parameters (Figure 9): wider heads and feed-forwards
          famjax train char_ptb_feedback data.files=ptb.char.train.txt model.layers=2 \
              model.head_dim=64 model.mlp_width=1024 name=char_ptb_2
          famjax train char_ptb_feedback data.files=ptb.char.train.txt model.layers=1 \
              model.head_dim=128 model.mlp_width=2048 name=char_ptb_1
          # finetuning at a tenth of the learning rate (7.6)
          famjax train char_ptb_feedback data.files=ptb.char.train.txt \
              init=runs/char_ptb_feedback optimizer.learning_rate=2e-4 \
              optimizer.schedule=constant optimizer.warmup_steps=0 train.steps=300 \
              name=char_ptb_finetuned
Cost:     4 minutes on one core
Expected: 2.03 bits per character of the validation set, the Transformer 2.04; for fewer layers see
          docs/feedback.md
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_feedback_small"),
        {
            "name": "char_ptb_feedback",
            "model.layers": 4,
            "model.width": 128,
            "model.head_dim": 32,
            "model.mlp_width": 512,
            "model.feedback.span": 64,
            # as many parameters as the Transformer
            "model.feedback.shared_kv": False,
            "data.length": 64,
            "data.holdout": 0,
            "optimizer.clip_norm": 1.0,
            "train.steps": 1200,
        },
    )
