"""Counting at the size of the other toy tasks (Feedback Transformer v3 4.1.1; it gives no sizes).

Command:  famjax train counting_paper
          famjax train counting_paper model.stack=transformer name=counting_paper_transformer
          famjax train counting_paper data.toy.steps=1000 model.feedback.span=2048 \
              data.length=256 name=counting_paper_1000
Cost:     needs an accelerator; not run here
Expected: 99.7% (paper; its Transformer 99.6%; up to 1,000: 95.3% and 82.4%)
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
        name="counting_paper",
        model=ModelConfig(
            stack="feedback",
            layers=4,
            width=256,
            heads=4,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            feedback=FeedbackConfig(span=128, shared_kv=False),
            dropout=DropoutConfig(attention=0.2, hidden=0.2),
        ),
        data=DataConfig(
            task="counting",
            tokenizer="task",
            batch=512,
            length=64,
            toy=ToyConfig(concatenate=False),
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
