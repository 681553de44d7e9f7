"""A delta-rule memory in every second layer, on text; not in the papers.

    famjax train text_delta                                  # Python's standard library
    famjax train text_delta data.files='books/*.txt' name=books_delta

`text_fam` with another memory: layers 2 and 4 have an associative memory (docs/memory.md), layers 1
and 3 are windows.

Cost: not measured; 1.28 times as much as `text_bswa` at the size of `make demo-text`.
Expected: not measured. With two layers at that size, 0.05 bits per byte of code fewer than the
window's (docs/results.md).
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("text_fam"),
        {
            "name": "text_delta",
            "model.mixer": "bswa,delta",
        },
    )
