"""Blocked random walk, sized for 2 cores (Feedback Transformer v1 4.1, B.1, Table 1).

Command:  famjax train blocked_walk_feedback
          famjax train blocked_walk_feedback model.stack=transformer \
              model.feedback.shared_kv=false name=blocked_walk_transformer
Cost:     2 minutes on one core
Expected: 100% of answers and of episodes (3 seeds); the Transformer 52 and 54%, no episode

10,000 episodes, as in the paper, each with a fresh memory; the paper joins them into one stream.
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
        name="blocked_walk_feedback",
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
            task="blocked_walk",
            tokenizer="task",
            batch=16,
            length=102,
            keep_whole=True,
            toy=ToyConfig(concatenate=False),
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, schedule="cosine", warmup_steps=100, beta2=0.99, clip_norm=0.1
        ),
        train=TrainConfig(steps=1000, log_every=50, checkpoint_every=500),
    )
