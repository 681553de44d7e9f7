"""Random walk with turns, sized for 2 cores (Feedback Transformer v3 4.1.2, 7.1, Table 1).

Command:  famjax train random_walk_feedback
          famjax train random_walk_feedback model.stack=transformer \
              model.feedback.shared_kv=false name=random_walk_transformer
Cost:     10 minutes on one core
Expected: 99.8% of answers, 95% of whole episodes; the Transformer 29.0%, and 38.8% with
          data.toy.start_steps=0 train.steps=5950 (docs/feedback.md)

The paper trains on 10,000 episodes joined into one stream. Here there are 100,000, which grow from
25 actions, each with a fresh memory (docs/tasks.md).
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
        name="random_walk_feedback",
        model=ModelConfig(
            stack="feedback",
            layers=2,
            width=64,
            heads=4,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            feedback=FeedbackConfig(span=100),
        ),
        data=DataConfig(
            task="random_walk",
            tokenizer="task",
            batch=16,
            length=102,
            keep_whole=True,
            toy=ToyConfig(concatenate=False, episodes=100_000, start_steps=25, threshold=0.85),
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, schedule="cosine", warmup_steps=100, beta2=0.99, clip_norm=0.1
        ),
        train=TrainConfig(steps=6000, log_every=50, checkpoint_every=500),
    )
