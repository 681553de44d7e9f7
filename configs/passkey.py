"""Passkey retrieval with FAM, trained in lanes (TransformerFAM 3.2, D.1, Figure 3).

Command:  make demo (trains the tokenizer, this config, and BSWA M1 and M2)
          famjax train passkey data.tokenizer=runs/demo/tokenizer.model
Cost:     94 seconds on one core
Expected: every key at every length to 262,144 tokens (the paper: 100% to 260k), after training on
          at most 4,096, with seed 0 and questions that end their block; other seeds and other
          positions of the question: docs/results.md
"""

from famjax.config.schema import (
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
            heads=2,
            # slow rotations: a token finds a FAM slot by content, at any position in its block
            rope_base=1e5,
            mlp_width=128,
            mlp="gelu",
            tied=False,
            mixer="fam",
            block_len=32,
            memory_segments=0,
            fam_len=16,
            # two layers compile quickly, and unrolled they run a fifth faster on CPU
            scan_layers=False,
        ),
        data=DataConfig(
            task="passkey",
            tokenizer="runs/demo/tokenizer.model",
            layout="lanes",
            batch=2,
            # The FAM grows with every block, so it rotates by 1/n at block n: information is lost
            # with the logarithm of the length. A row must hold most of the octaves.
            length=4096,
            keep_whole=True,
            passkey=PasskeyConfig(
                digits=5,
                min_length=96,
                multiple=32,
                start_length=96,
                max_length=4096,
                threshold=0.9,
                ask_every=512,
                other_weight=0.02,
            ),
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-3, schedule="cosine", warmup_steps=20, beta2=0.99, final_fraction=0.0
        ),
        train=TrainConfig(steps=500, log_every=5, checkpoint_every=100),
    )
