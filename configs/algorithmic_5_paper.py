"""Algorithmic 5 at the paper's size (Feedback Transformer v3 7.4, Table 9).

Command:  famjax train algorithmic_5_paper
          famjax train algorithmic_5_paper model.stack=transformer \
              name=algorithmic_5_paper_transformer
Cost:     needs an accelerator; not run here
Expected: 92.6% (paper; its Transformer 37.5%, 8 layers 29.1%, LSTM 32.1%)
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_toy_paper"),
        {
            "name": "algorithmic_5_paper",
            "data.task": "algorithmic",
            "data.toy.variables": 5,
        },
    )
