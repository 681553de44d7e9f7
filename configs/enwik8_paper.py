"""enwik8 at the paper's size: 77M parameters, adaptive span to 8,192 (v3 4.3.3, 7.6, Table 9).

Command:  famjax train enwik8_paper
          famjax train enwik8_paper model.stack=transformer name=enwik8_transformer
          famjax train enwik8_paper init=runs/enwik8_paper optimizer.learning_rate=1.5e-4 \
              optimizer.warmup_steps=0 train.steps=10000 train.bptt_start=0 \
              train.bptt_double_every=0 name=enwik8_finetuned
          famjax eval runs/enwik8_finetuned --tasks text:enwik8.test
Cost:     needs an accelerator; not run here
Expected: last run, after 10,000 more steps at a tenth of the rate: 0.96 bits per byte of the test
          set (paper)

Trains on the whole file, as the paper does; nothing is held out. Validate with
--tasks text:enwik8.valid.

Tokens are bytes, 258 with the special ones. Each layer has its own keys and values: with shared
ones (model.feedback.shared_kv=true), which the paper has "on large datasets" (4), there would be
65M parameters, and Table 9 has 77M. For departures of the model and the optimizer see
`_feedback_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_feedback_paper"),
        {
            "name": "enwik8_paper",
            "model.layers": 12,
            "model.width": 512,
            "model.heads": 8,
            "model.head_dim": 128,
            "model.mlp_width": 4096,
            "model.feedback.span": 8192,
            "model.feedback.adaptive_span": True,
            "model.feedback.span_loss": 5e-7,
            "model.dropout.attention": 0.5,
            "model.dropout.hidden": 0.5,
            "data.files": "enwik8.train",
            "data.batch": 1024,
            "data.length": 128,
            "data.holdout": 0,
            "optimizer.learning_rate": 1.5e-3,
            "optimizer.warmup_steps": 8000,
            "train.steps": 100000,
            "train.bptt_start": 64,
            "train.bptt_double_every": 50_000,
        },
    )
