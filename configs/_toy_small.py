"""Base of the toy tasks for two cores: rows of whole episodes, each with a fresh memory.

The layers have keys and values of their own, as in the paper, which shares them "on large datasets"
(4). With shared ones copying and reversing took longer to learn (docs/feedback.md).
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_feedback_small"),
        {
            "model.feedback.shared_kv": False,
            "data.task": "copy",  # each config based on this one sets its own
            "data.tokenizer": "task",
            "data.keep_whole": True,
            "data.toy.concatenate": False,
            "data.toy.episodes": 100_000,
        },
    )
