"""Algorithmic 5 at the paper's size (Feedback Transformer v3 7.4, Table 9).

Command:  famjax train algorithmic_5_paper
          famjax train algorithmic_5_paper model.stack=transformer \
              name=algorithmic_5_paper_transformer
Cost:     needs an accelerator; not run here
Expected: 92.6% (paper; its Transformer 37.5%, 8 layers 29.1%, LSTM 32.1%)
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    DropoutConfig,
    FeedbackConfig,
    ModelConfig,
    OptimizerConfig,
    ToyConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="algorithmic_5_paper",
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
        data=DataConfig(
            task="algorithmic", tokenizer="task", batch=512, length=64, toy=ToyConfig(variables=5)
        ),
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
