"""Blocked random walk, sized for 2 cores (Feedback Transformer v1 4.1, B.1, Table 1).

Command:  famjax train blocked_walk_feedback
          famjax train blocked_walk_feedback model.stack=transformer \
              name=blocked_walk_transformer
Cost:     2 minutes on one core
Expected: 100% of answers and of episodes (3 seeds); the Transformer 52 and 54% of answers, no
          episode

There are 10,000 episodes, as in the paper, but each with a fresh memory; the paper joins them into
one stream.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_toy_small"),
        {
            "name": "blocked_walk_feedback",
            "model.feedback.span": 100,
            "data.task": "blocked_walk",
            "data.length": 102,
            "data.toy.episodes": 10_000,
            "optimizer.learning_rate": 1e-3,
            "train.steps": 1000,
        },
    )
