"""A small Transformer on bytes that `t2r_finetune` turns into an RNN (T2R 2.2).

    famjax train t2r_teacher data.files='books/*.txt' data.holdout=0
    famjax eval runs/t2r_teacher --tasks text:HELD --window 256 --score 128

Full attention over rows of 256 bytes. Queries and keys are rotated: with learned positions, as in
the paper, the model learns no more than pairs of bytes in so few steps. With rotation, feature maps
cannot be folded into projections (Equation 8); `t2r_lm_paper` has no rotation.

Cost: 14 minutes on one core.
Expected: 2.27 bits per byte of held-out novels (docs/t2r.md).
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="t2r_teacher",
        model=ModelConfig(
            layers=4,
            width=128,
            heads=4,
            mlp_width=512,
            mlp="relu",
            norm="layernorm",
            mixer="full",
            capacity=256,
        ),
        data=DataConfig(layout="packed", batch=16, length=256),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
        train=TrainConfig(steps=800),
    )
