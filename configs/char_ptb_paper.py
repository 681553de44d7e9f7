"""Character-level Penn Treebank at the paper's size: 10.7M parameters (v3 4.3.2, Table 9).

Command:  famjax train char_ptb_paper
          famjax train char_ptb_paper model.stack=transformer name=char_ptb_paper_transformer
          # the best: 2 layers with equally many parameters
          famjax train char_ptb_paper model.layers=2 model.head_dim=288 model.mlp_width=4608 \
              name=char_ptb_paper_2
          famjax train char_ptb_paper init=runs/char_ptb_paper_2 optimizer.learning_rate=1.5e-4 \
              optimizer.warmup_steps=0 train.steps=1000 name=char_ptb_paper_finetuned
          famjax eval runs/char_ptb_paper_finetuned --tasks text:ptb.char.test.txt
Cost:     needs an accelerator; not run here
Expected: last run, with 2 layers and finetuned: 1.160 bits per character of the test set
          (v1 Table 2; its Transformer 1.227)

Trains on the whole file, as the paper does; nothing is held out. Validate with
--tasks text:ptb.char.valid.txt.
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
        name="char_ptb_paper",
        model=ModelConfig(
            stack="feedback",
            layers=6,
            width=384,
            heads=4,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            feedback=FeedbackConfig(span=512, shared_kv=False),
            dropout=DropoutConfig(attention=0.5, hidden=0.5),
        ),
        data=DataConfig(files="ptb.char.train.txt", batch=2048, length=128, holdout=0),
        # Adam with a linear warm-up, then constant (Table 9 and the authors' code)
        optimizer=OptimizerConfig(
            learning_rate=1.5e-3,
            schedule="constant",
            warmup_steps=1000,
            beta2=0.999,
            clip_norm=1.0,
        ),
        train=TrainConfig(steps=15000, log_every=100, checkpoint_every=1000),
    )
