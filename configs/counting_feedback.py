"""Count up to 50 A's, sized for 2 cores (Feedback Transformer v3 4.1.1, Table 1).

Command:  famjax train counting_feedback train.steps=1000
          famjax train counting_feedback train.steps=1000 model.stack=transformer \
              model.feedback.shared_kv=false name=counting_transformer
          famjax train counting_feedback data.toy.steps=1000 model.feedback.span=2048 \
              data.length=2004 name=counting_1000
Cost:     4 minutes for 1,000 steps on one core of a shared machine
Expected: 100% for the first two commands (docs/feedback.md); the third was not run
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
        name="counting_feedback",
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
            task="counting",
            tokenizer="task",
            batch=16,
            length=104,
            keep_whole=True,
            toy=ToyConfig(concatenate=False, episodes=100_000),
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, schedule="cosine", warmup_steps=100, beta2=0.99, clip_norm=0.1
        ),
        train=TrainConfig(steps=2000, log_every=50, checkpoint_every=500),
    )
