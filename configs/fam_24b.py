"""TransformerFAM 3.1, Tables 5 and 6: the Flan-PaLM 24B shape.

    famjax train fam_24b init=FOLDER data.files='flan/*.jsonl.gz'

FOLDER holds pretrained weights converted by famjax convert, and determines shape and tokenizer. The
paper's weights, vocabulary and instruction data are not public, so do not expect the numbers
below. Without init, and with model.lora.rank=0 data.tokenizer=FILE, this shape trains from
scratch.

From the paper: 56 layers of width 4096, 32 heads that share one set of keys and values,
feed-forward multiplier 8; blocks of 1024, 3 memory segments, 64 FAM tokens; RSP 0.8, RPO;
Adafactor at a constant 3e-3; 50k steps of 128 rows packed to 8.5k tokens, 256 of them repeated at
the end with weight 0.1; LoRA of rank 64.
Ours, where the paper says nothing: rows of 9216 tokens, 9 blocks, the fewest that hold 8.5k, the
prompt and the repetition; SwiGLU, as in PaLM, which gives 24.5B parameters without the embedding
table; RMSNorm; gradients clipped at norm 1; bfloat16.

Nothing is held out of the instructions, as in the paper. Next-token accuracy, as for its PG-19:
famjax eval runs/fam_24b --tasks text:'pg19/test/*.txt'

Cost: the paper used 128 TPUv5 cores and reports no time; not measured by us.
Expected: in the paper, finetuned from Flan-PaLM 24B, PG-19 accuracy 57.2, NarrativeQA 23.0
(Table 1).
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="fam_24b",
        model=ModelConfig(
            vocab_size=256_000,
            layers=56,
            width=4096,
            heads=32,
            kv_heads=1,
            mlp_width=8 * 4096,
            mlp="swiglu",
            mixer="fam",
            block_len=1024,
            memory_segments=3,
            fam_len=64,
            remat="attention",
            dtype="bfloat16",
            lora=LoraConfig(rank=64, base="bfloat16"),
        ),
        data=DataConfig(
            files="flan/*.jsonl.gz",
            tokenizer="flan.model",
            layout="packed",
            batch=128,
            length=9 * 1024,
            repeat_len=256,
            repeat_weight=0.1,
            holdout=0,
        ),
        optimizer=OptimizerConfig(
            name="adafactor",
            learning_rate=3e-3,
            schedule="constant",
            warmup_steps=0,
            beta1=0.9,
            beta2=0.99,
            clip_norm=1.0,
        ),
        train=TrainConfig(steps=50_000, rsp=0.8, rpo=True, checkpoint_every=1000),
        mesh=MeshConfig(data=1, fsdp=-1),
    )
