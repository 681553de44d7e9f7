"""Copy at the size of the other toy tasks (Feedback Transformer v3 4.1.1; it gives no sizes).

Command:  famjax train copy_paper
          famjax train copy_paper model.stack=transformer name=copy_paper_transformer
Cost:     needs an accelerator; not run here
Expected: 76.2% of digits, 23.6% of sequences at 400 (paper; its Transformer 59.1%, 6.2%)
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
        name="copy_paper",
        model=ModelConfig(
            stack="feedback",
            layers=4,
            width=256,
            heads=4,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            feedback=FeedbackConfig(span=1024, shared_kv=False),
            dropout=DropoutConfig(attention=0.2, hidden=0.2),
        ),
        data=DataConfig(
            task="copy", tokenizer="task", batch=512, length=64, toy=ToyConfig(concatenate=False)
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
