"""Passkey retrieval with feedback memory, trained in lanes (TransformerFAM 3.2, D.1, Figure 3).

Command:  make demo (which makes the tokenizer and trains this config, and BSWA M1 and M2)
          famjax train passkey data.tokenizer=runs/demo/tokenizer.model
Cost:     see docs/results.md
Expected: whole keys at every length to 262,144 tokens. The paper: 100% to 260k.
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
            width=64,
            heads=4,
            mlp_width=256,
            mlp="gelu",
            tied=False,
            mixer="fam",
            block_len=32,
            memory_segments=0,
            fam_len=16,
        ),
        data=DataConfig(
            task="passkey",
            tokenizer="runs/demo/tokenizer.model",
            layout="lanes",
            batch=4,
            length=2048,
            keep_whole=True,
            passkey=PasskeyConfig(
                digits=5,
                min_length=96,
                start_length=96,
                climb_length=1536,
                max_length=32_768,
                threshold=0.95,
                other_weight=0.02,
            ),
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-3, schedule="wsd", warmup_steps=20, beta2=0.99, decay_fraction=0.4
        ),
        train=TrainConfig(steps=400, log_every=10, checkpoint_every=400),
    )
