"""Base of the encoder-decoders at the papers' sizes: Transformer big of Vaswani et al. (2017).

Norms come after the residual sums, projections have biases, and sinusoids are added to the
embeddings: first all sines, then all cosines, as in fairseq, in which the papers' experiments are
written; fairseq's wavelengths and first position differ a little. The norms' epsilon is famjax's
default of 1e-6; the papers do not give theirs. Dropout is of embeddings and of what a sublayer
adds, as in fairseq; the papers give the rate alone. The paper does not say what positions its
feedback decoders have; here they are relative, as in its language models, and only the encoder has
sinusoids. The papers' batches are pairs of similar lengths; here a batch is rows of whole pairs,
with about as many target tokens. Everything is computed in float32; T2R has mixed precision.

The Feedback Transformer's paper does not give label smoothing, schedule, warm-up and Adam's betas:
these are T2R's (Table 5).

The tokens are those of a SentencePiece BPE trained on the given text; the papers use the BPE of
Sennrich et al. (2016), or do not say. The rate warms up from 0, in T2R's Tables 5 and 6 from 1e-7.
Weight decay is 0, as in these tables; T2R's text (A.1.2) has 0.01. Gradients are not clipped; the
papers name no clipping for these models.
"""

from famjax.config.schema import (
    ArchConfig,
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
            arch=ArchConfig(
                pre_norm=False,
                positions="sinusoidal_halves",
                rotary_fraction=0.0,
                qkv_bias=True,
                out_bias=True,
                mlp_bias=True,
            ),
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
