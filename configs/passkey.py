"""Passkey retrieval with FAM, trained in lanes (TransformerFAM 3.2, D.1, Figure 3).

Command:  make demo (which makes the tokenizer and trains this config, and BSWA M1 and M2)
          famjax train passkey data.tokenizer=runs/demo/tokenizer.model
Cost:     see docs/results.md
Expected: the aim is whole keys at every length to 262,144 tokens (the paper: 100% to 260k). So far
          56% at 256, 66% at 1,024 and 44% at 4,096 tokens: docs/results.md.
"""

from famjax.core.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PasskeyConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="passkey",
        model=ModelConfig(
            layers=2,
            width=96,
            heads=4,
            # slow rotations: a token finds a FAM slot by content, wherever in its block it stands
            rope_base=1e5,
            mlp_width=192,
            mlp="gelu",
            tied=False,
            mixer="fam",
            block_len=64,
            memory_segments=0,
            fam_len=16,
        ),
        data=DataConfig(
            task="passkey",
            tokenizer="runs/demo/tokenizer.model",
            layout="lanes",
            batch=2,
            length=2048,
            keep_whole=True,
            passkey=PasskeyConfig(
                digits=5,
                min_length=96,
                start_length=96,
                max_length=4096,
                threshold=0.85,
                other_weight=0.02,
            ),
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-3, schedule="wsd", warmup_steps=20, beta2=0.99, decay_fraction=0.4
        ),
        train=TrainConfig(steps=600, log_every=10, checkpoint_every=200),
    )
