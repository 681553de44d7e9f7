"""Random walk with turns, sized for 2 cores (Feedback Transformer v3 4.1.2, 7.1, Table 1).

Command:  famjax train random_walk_feedback
          famjax train random_walk_feedback model.stack=transformer \
              name=random_walk_transformer
Cost:     10 minutes on one core
Expected: 99.8% of answers, 95% of whole episodes; the Transformer 29.0%, and 38.8% with
          data.toy.start_steps=0 train.steps=5950 (docs/feedback.md; Feedback with
          model.feedback.shared_kv=true)

The paper trains on 10,000 episodes joined into one stream. Here there are 100,000 episodes, each
with a fresh memory; their length grows from 25 actions during training (docs/tasks.md).
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_toy_small"),
        {
            "name": "random_walk_feedback",
            "model.feedback.span": 100,
            "data.task": "random_walk",
            "data.length": 102,
            "data.toy.start_steps": 25,
            "data.toy.threshold": 0.85,
            "train.steps": 6000,
        },
    )
