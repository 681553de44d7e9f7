"""Base of the Feedback Transformer's configs for two cores."""

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
        model=ModelConfig(
            stack="feedback",
            layers=2,
            width=64,
            heads=4,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            feedback=FeedbackConfig(span=128),
        ),
        data=DataConfig(batch=16),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, schedule="cosine", warmup_steps=100, beta2=0.99, clip_norm=0.1
        ),
        train=TrainConfig(steps=3000, log_every=50, checkpoint_every=500),
    )
