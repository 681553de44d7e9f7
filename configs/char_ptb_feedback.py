"""Characters of Penn Treebank, sized for 2 cores (Feedback Transformer v3 4.3.2, 6.4, Figure 9).

The file has one character per byte: lines stripped, every space written as `_`.

Command:  famjax train char_ptb_feedback data.files=ptb.char.train.txt
          famjax train char_ptb_feedback data.files=ptb.char.train.txt model.stack=transformer \
              name=char_ptb_transformer
          # less depth with equally many parameters (Figure 9): wider heads and feed-forwards
          famjax train char_ptb_feedback data.files=ptb.char.train.txt model.layers=2 \
              model.head_dim=64 model.mlp_width=1024 name=char_ptb_2
          famjax train char_ptb_feedback data.files=ptb.char.train.txt model.layers=1 \
              model.head_dim=128 model.mlp_width=2048 name=char_ptb_1
          # then at a tenth of the rate (7.6)
          famjax train char_ptb_feedback data.files=ptb.char.train.txt \
              init=runs/char_ptb_feedback optimizer.learning_rate=2e-4 \
              optimizer.schedule=constant optimizer.warmup_steps=0 train.steps=300 \
              name=char_ptb_finetuned
Cost:     4 minutes on one core
Expected: 2.03 bits per character of the validation set, the Transformer 2.04; fewer
          layers: docs/feedback.md
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    FeedbackConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="char_ptb_feedback",
        model=ModelConfig(
            stack="feedback",
            layers=4,
            width=128,
            heads=4,
            head_dim=32,
            mlp_width=512,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            # as many parameters as the Transformer
            feedback=FeedbackConfig(span=64, shared_kv=False),
        ),
        data=DataConfig(batch=16, length=64, holdout=0),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, schedule="cosine", warmup_steps=100, beta2=0.99, clip_norm=1.0
        ),
        train=TrainConfig(steps=1200, log_every=50, checkpoint_every=500),
    )
