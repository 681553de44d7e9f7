"""Blocked walk at the paper's size (Feedback Transformer v1 B.1, Table 9).

Command:  famjax train blocked_walk_paper
          famjax train blocked_walk_paper model.stack=transformer \
              name=blocked_walk_paper_transformer
          famjax train blocked_walk_paper data.toy.episodes=1000000 \
              name=blocked_walk_paper_million
Cost:     needs an accelerator; not run here
Expected: 100% (paper; its Transformer 88.1% with 10,000 episodes, 97.1% with 1,000,000)
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    DropoutConfig,
    FeedbackConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="blocked_walk_paper",
        model=ModelConfig(
            stack="feedback",
            layers=4,
            width=256,
            heads=4,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            feedback=FeedbackConfig(span=100, shared_kv=False),
            dropout=DropoutConfig(attention=0.2, hidden=0.2),
        ),
        data=DataConfig(task="blocked_walk", tokenizer="task", batch=512, length=64),
        # Adam with a linear warm-up, then constant (Table 9 and the authors' code)
        optimizer=OptimizerConfig(
            learning_rate=3e-4,
            schedule="constant",
            warmup_steps=1000,
            beta2=0.999,
            clip_norm=1.0,
        ),
        train=TrainConfig(steps=20000, log_every=100, checkpoint_every=1000),
    )
