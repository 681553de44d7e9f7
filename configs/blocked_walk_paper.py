"""Blocked walk at the paper's size (Feedback Transformer v1 B.1, Table 9).

Command:  famjax train blocked_walk_paper
          famjax train blocked_walk_paper model.stack=transformer \
              name=blocked_walk_paper_transformer
          famjax train blocked_walk_paper data.toy.episodes=1000000 \
              name=blocked_walk_paper_million
Cost:     needs an accelerator; not run here
Expected: 100% (paper; its Transformer 88.1% with 10,000 episodes, 97.1% with 1,000,000)

The number of steps is chosen here, and the last finetuning at a tenth of the rate (v3 7.6) is left
out: see `_toy_paper`. For departures of the model and the optimizer see `_feedback_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_toy_paper"),
        {
            "name": "blocked_walk_paper",
            "data.task": "blocked_walk",
            "optimizer.learning_rate": 3e-4,
            "optimizer.clip_norm": 1.0,
        },
    )
