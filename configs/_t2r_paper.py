"""Base of the T2R configs on WikiText-103 at the paper's sizes (A.1.1, Tables 3 and 4).

The rate warms up from 0, in the paper (A.1.1, Tables 3 and 4) from 1e-7. Everything is computed in
float32; the paper has mixed precision.
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    DropoutConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        model=ModelConfig(
            dropout=DropoutConfig(
                attention=0.1, hidden=0.1, residual=0.2, embedding=0.2, output=0.2, layer=0.2
            ),
        ),
        data=DataConfig(files="wiki.train.tokens", layout="packed", length=512, holdout=0),
        optimizer=OptimizerConfig(name="nag", final_fraction=1e-4, beta1=0.99, clip_norm=0.1),
        train=TrainConfig(log_every=100, checkpoint_every=1000),
    )
