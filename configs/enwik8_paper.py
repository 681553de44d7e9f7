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
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    DropoutConfig,
    FeedbackConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="enwik8_paper",
        model=ModelConfig(
            stack="feedback",
            layers=12,
            width=512,
            heads=8,
            head_dim=128,
            mlp_width=4096,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            feedback=FeedbackConfig(span=8192, shared_kv=False, adaptive_span=True, span_loss=5e-7),
            dropout=DropoutConfig(attention=0.5, hidden=0.5),
        ),
        data=DataConfig(files="enwik8.train", batch=1024, length=128, holdout=0),
        # Adam with a linear warm-up, then constant (Table 9 and the authors' code)
        optimizer=OptimizerConfig(
            learning_rate=1.5e-3,
            schedule="constant",
            warmup_steps=8000,
            beta2=0.999,
            clip_norm=0.1,
        ),
        train=TrainConfig(
            steps=100000,
            bptt_start=64,
            bptt_double_every=50_000,
            log_every=100,
            checkpoint_every=1000,
        ),
    )
