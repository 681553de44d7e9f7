"""Base of the Feedback Transformer's configs at the papers' sizes.

With pre-norm there is also a norm after the last layer, which the papers do not mention and their
authors' code has (docs/papers.md). The norms' epsilon is famjax's default of 1e-6; the papers do
not give theirs. Nor do they give Adam's decay rates, here 0.9 and 0.999, or the rate after the
warm-up, here constant, as in the authors' code. "Gradient clip" (Table 9) is taken to be of the
global norm.
"""

from famjax.config.schema import (
    Config,
    DropoutConfig,
    FeedbackConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        model=ModelConfig(
            stack="feedback",
            layers=4,
            width=256,
            heads=4,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            feedback=FeedbackConfig(shared_kv=False),
            dropout=DropoutConfig(attention=0.2, hidden=0.2),
        ),
        # Adam with a linear warm-up, then a constant rate (Table 9 and the authors' code)
        optimizer=OptimizerConfig(
            learning_rate=1e-4, schedule="constant", warmup_steps=1000, beta2=0.999, clip_norm=0.1
        ),
        train=TrainConfig(steps=20000, log_every=100, checkpoint_every=1000),
    )
