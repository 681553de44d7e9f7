"""Base of the encoder-decoders at the papers' sizes: Transformer big of Vaswani et al. (2017).

Departures from the papers: norms come before the sublayers, not after the residual sums; positions
are rotary in self-attention, not sinusoids at the embedding; a batch is rows of whole pairs, with
about as many target tokens as in the papers, not pairs of similar lengths. The Feedback Transformer
has relative positions only; a Transformer as in Vaswani et al. needs model.arch.pre_norm=false
model.arch.positions=sinusoidal_halves model.arch.rotary_fraction=0 model.arch.qkv_bias=true
model.arch.out_bias=true model.arch.mlp_bias=true.
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    DropoutConfig,
    EncoderConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        model=ModelConfig(
            mixer="full",
            layers=6,
            width=1024,
            heads=16,
            mlp_width=4096,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            capacity=1024,
            encoder=EncoderConfig(layers=6),
            dropout=DropoutConfig(residual=0.3, embedding=0.3),
        ),
        data=DataConfig(
            task="translate",
            layout="pairs",
            tokenizer="joint.model",
            source="train.en",
            target="train.de",
            batch=448,
            length=1024,
        ),
        optimizer=OptimizerConfig(
            learning_rate=5e-4,
            schedule="inverse_sqrt",
            warmup_steps=4000,
            beta2=0.98,
            clip_norm=0.0,
        ),
        train=TrainConfig(
            steps=30000,
            accumulate=8,
            label_smoothing=0.1,
            log_every=100,
            checkpoint_every=1000,
            keep=10,
        ),
    )
