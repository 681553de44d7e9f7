"""A delta-rule memory in every second layer, on text; not in the papers.

    famjax train text_delta                                  # Python's standard library
    famjax train text_delta data.files='books/*.txt' name=books_delta

`text_bswa` with an associative memory (docs/memory.md) in layers 2 and 4; layers 1 and 3 are
windows.

Cost: first command: about 11 minutes on one core, 1.4 times as much as `text_bswa` (from the time
of single steps of 4 rows of 1,024 tokens).
Expected: not measured. In docs/results.md, models of two layers have 0.07 bits per byte fewer on
source code than windows trained for the same time. On books an earlier setting did not help.
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
