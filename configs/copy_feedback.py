"""Copy 40 digits, sized for 2 cores (Feedback Transformer v3 4.1.1, Table 1).

Command:  famjax train copy_feedback train.steps=1000
          famjax train copy_feedback train.steps=1000 model.stack=transformer \
              model.feedback.shared_kv=false name=copy_transformer
          famjax eval runs/copy_feedback --lengths 40,60
Cost:     4 minutes for 1,000 steps on one core of a shared machine
Expected: 100% of 40 digits, also for the Transformer; 60 digits at chance (docs/feedback.md)

The paper tests on 400 digits. The span of 128 here is too short for that: 400 digits need
model.feedback.span=1024 and an accelerator (`copy_paper`).
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    FeedbackConfig,
    ModelConfig,
    OptimizerConfig,
    ToyConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="copy_feedback",
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
        data=DataConfig(
            task="copy",
            tokenizer="task",
            batch=16,
            length=82,
            keep_whole=True,
            toy=ToyConfig(concatenate=False, episodes=100_000, start_steps=5),
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, schedule="cosine", warmup_steps=100, beta2=0.99, clip_norm=0.1
        ),
        train=TrainConfig(steps=3000, log_every=50, checkpoint_every=500),
    )
