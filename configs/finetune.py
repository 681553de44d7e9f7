"""TransformerFAM 3.1: finetuning of a pretrained model and its new memory with LoRA.

    famjax convert HF_FOLDER models/mine --to fam model.fam_update=sum model.fam_len=64 \
        model.block_len=1024 model.memory_segments=3
    famjax train finetune init=models/mine data.files='conversations/*.jsonl' name=mine

Shape, tokenizer and weights come from `init`, which may also be a run of your own. The data is text
files, or .jsonl with {"messages": [...]}, {"prompt": ..., "response": ...} or {"text": ...} on each
line; in conversations only the assistant's messages have a loss.

From the paper: adapters of rank 64; Adafactor at a constant rate (3e-3 for 8B, 1e-4 for 1B);
rows packed to 8.5k tokens, of which 256 are repeated at the end with weight 0.1; RSP 0.8, RPO.
Chosen here: 4 rows of 9216 tokens and 1,000 steps, for one GPU; gradients clipped at norm 1. For
long documents set data.layout=lanes train.rsp=0 data.repeat_len=0: the memory is then carried from
step to step, and nothing is cut. Adafactor scales an update by the magnitude of the weights, and
adapters start at 0: for few steps use optimizer.name=adamw.

Cost: depends on your model, not measured; `make demo-finetune` takes 7 to 12 minutes on two cores.
Expected: depends on your model and text; this config was not measured. The paper's figures
are in `fam_1b`, `fam_8b` and `fam_24b`; docs/finetune.md has a small run of another config.
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="finetune",
        model=ModelConfig(remat="block", lora=LoraConfig(rank=64)),
        data=DataConfig(
            layout="packed", batch=4, length=9 * 1024, repeat_len=256, repeat_weight=0.1
        ),
        optimizer=OptimizerConfig(
            name="adafactor",
            learning_rate=3e-3,
            schedule="constant",
            warmup_steps=0,
            beta1=0.9,
            beta2=0.99,
        ),
        train=TrainConfig(steps=1000, rsp=0.8, rpo=True),
    )
