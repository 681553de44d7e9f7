"""Base of the configs with the shapes of the TransformerFAM paper (3.1, Tables 5 and 6)."""

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
        model=ModelConfig(
            vocab_size=256_000,
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
