"""Reverse 40 digits, sized for 2 cores (Feedback Transformer v3 4.1.1, Table 1).

Command:  famjax train reverse_feedback
          famjax train reverse_feedback model.stack=transformer model.feedback.shared_kv=false \
              name=reverse_transformer
Cost:     4 minutes on one core
Expected: all of 40 digits; the Transformer 79% of them and no whole sequence (docs/feedback.md)

The paper tests on 400 digits. The span of 128 here is too short for that: 400 digits need
model.feedback.span=1024 and an accelerator (`reverse_paper`).
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
        name="reverse_feedback",
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
            task="reverse",
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
