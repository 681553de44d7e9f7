"""Random walk at the paper's size (Feedback Transformer v3 7.1, Table 9).

Command:  famjax train random_walk_paper
          famjax train random_walk_paper model.stack=transformer \
              name=random_walk_paper_transformer
Cost:     needs an accelerator; not run here
Expected: 100% (paper; its Transformer 68%)
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
        name="random_walk_paper",
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
        data=DataConfig(task="random_walk", tokenizer="task", batch=512, length=64),
        # Adam with a linear warm-up, then constant (Table 9 and the authors' code)
        optimizer=OptimizerConfig(
            learning_rate=1e-4,
            schedule="constant",
            warmup_steps=1000,
            beta2=0.999,
            clip_norm=0.1,
        ),
        train=TrainConfig(steps=20000, log_every=100, checkpoint_every=1000),
    )
