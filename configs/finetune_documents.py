"""Finetuning of a pretrained model and its new memory with LoRA, on long documents.

    famjax convert HF_FOLDER models/mine --to delta model.block_len=512 model.memory_segments=1
    famjax train finetune_documents init=models/mine data.files='books/*.txt' \
        train.write_loss=0.1 name=mine

Shape, tokenizer and weights come from `init`. Each of the 8 rows reads one document from beginning
to end, 2,048 tokens a step, and the memory is carried from step to step (docs/finetune.md). The
write penalty, train.write_loss, is for the delta rule; leave it out with FAM.

Chosen here: AdamW at 2e-4, a usual learning rate for LoRA, not tuned for this config; the demos'
models, of 0.15 and 1.1 million parameters, use 5e-3.

Cost: depends on your model, not measured
Expected: depends on your model and text; this config was not measured
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("finetune"),
        {
            "name": "finetune_documents",
            "data.layout": "lanes",
            "data.batch": 8,
            "data.length": 2048,
            "data.repeat_len": 0,
            "optimizer.name": "adamw",
            "optimizer.learning_rate": 2e-4,
            "optimizer.schedule": "cosine",
            "optimizer.warmup_steps": 20,
            "train.rsp": 0.0,
            "train.rpo": False,
        },
    )
