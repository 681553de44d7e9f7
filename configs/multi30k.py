"""German-English captions of Multi30k (29,000 pairs) on two cores.

Command:  famjax tokenizer train train.de train.en --vocab-size 4000 --out joint.model
          famjax train multi30k
          famjax average runs/multi30k --last 5 --out runs/multi30k_average
          famjax eval runs/multi30k_average --tasks translate:test.de=test.en --beam 5
Cost:     32 minutes on two slow cores, all commands (docs/seq2seq.md)
Expected: BLEU 39.0 on test 2016 with beam 5; 37.9 with greedy decoding (seed 0)

The files are those of the Multi30k data set, one caption on each line. Set data.source and
data.target for other files.
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
        name="multi30k",
        model=ModelConfig(
            mixer="full",
            layers=2,
            width=192,
            heads=4,
            mlp_width=512,
            block_len=1,
            capacity=128,
            encoder=EncoderConfig(layers=3),
            dropout=DropoutConfig(residual=0.15, embedding=0.1),
        ),
        data=DataConfig(
            task="translate",
            layout="pairs",
            tokenizer="joint.model",
            source="train.de",
            target="train.en",
            batch=32,
            length=128,
            source_length=144,
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=200, beta2=0.98),
        train=TrainConfig(
            steps=1000, label_smoothing=0.1, log_every=20, checkpoint_every=100, keep=5
        ),
    )
