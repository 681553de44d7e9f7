"""A small Transformer that becomes an RNN (T2R 2.2), with a fifth of its teacher's steps.

    famjax convert runs/t2r_teacher models/t2r_student --to t2r --feature-size 32
    famjax train t2r_finetune init=models/t2r_student data.files='books/*.txt'
    famjax eval runs/t2r_finetune --tasks text:HELD --window 256 --score 128
    famjax analyze runs/t2r_finetune --teacher runs/t2r_teacher --tasks text:HELD --length 256

Shape, tokenizer and weights are those of `init`. `--keep-every 4` in the first command keeps the
top layer's attention (T2R 75%). As in the paper (Tables 3 and 4) the rate is half of the teacher's.

Cost: not measured yet.
Expected: nothing measured yet; the paper's students lose 1.1 of perplexity, and nothing at 75%.
"""

from famjax.core.config import Config, DataConfig, OptimizerConfig, TrainConfig


def config() -> Config:
    return Config(
        name="t2r_finetune",
        data=DataConfig(layout="packed", batch=16, length=256),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=30),
        train=TrainConfig(steps=160),
    )
