"""WikiText-103, the small model at the paper's size (v3 4.3.3, 7.6, Table 9).

Command:  famjax tokenizer train wiki.train.tokens --kind words --out wikitext103.txt   # first
          famjax train wikitext103_small_paper
          famjax train wikitext103_small_paper model.stack=transformer \
              model.feedback.shared_kv=false \
              name=wikitext103_small_transformer
          famjax train wikitext103_small_paper init=runs/wikitext103_small_paper \
              optimizer.learning_rate=7e-5 optimizer.warmup_steps=0 train.steps=10000 \
              train.bptt_start=0 train.bptt_double_every=0 name=wikitext103_small_finetuned
Cost:     an accelerator; not run here
Expected: perplexity of the test set 22.4 (the paper, v1 Table 4; its Transformer 25.2)
"""

from famjax.core.config import (
    AdaptiveConfig,
    Config,
    DataConfig,
    DropoutConfig,
    FeedbackConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="wikitext103_small_paper",
        model=ModelConfig(
            stack="feedback",
            layers=4,
            width=512,
            heads=8,
            head_dim=128,
            mlp_width=4096,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            feedback=FeedbackConfig(span=512),
            dropout=DropoutConfig(attention=0.1, hidden=0.1, embedding=0.1, output=0.1),
            adaptive=AdaptiveConfig(cutoffs="20000,60000"),
        ),
        data=DataConfig(
            files="wiki.train.tokens", tokenizer="wikitext103.txt", batch=512, length=256
        ),
        # Adam with a linear warm-up, then constant (Table 9 and the authors' code)
        optimizer=OptimizerConfig(
            learning_rate=7e-4,
            schedule="constant",
            warmup_steps=8000,
            beta2=0.999,
            clip_norm=0.1,
        ),
        train=TrainConfig(
            steps=200000,
            bptt_start=32,
            bptt_double_every=50_000,
            log_every=100,
            checkpoint_every=1000,
        ),
    )
