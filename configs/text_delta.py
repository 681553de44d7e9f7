"""A delta-rule memory in every second layer, on text; not in the papers.

    famjax train text_delta                                  # Python's standard library
    famjax train text_delta data.files='books/*.txt' name=books_delta

`text_bswa` with an associative memory (docs/memory.md) in layers 2 and 4; layers 1 and 3 are
windows.

Cost: first command: 16 minutes on one core, 2.1 times as much as `text_bswa`.
Expected: not measured; fewer bits per byte than `text_bswa` on source code, as many on books. See
docs/results.md for models of two layers.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("text_fam"),
        {
            "name": "text_delta",
            "model.mixer": "bswa,delta",
            # text needs more features than passkeys, and no more than one head with a memory
            # (docs/memory.md)
            "model.delta_order": 8,
            "model.delta_heads": 1,
        },
    )
