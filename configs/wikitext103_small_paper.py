"""WikiText-103, the small model at the paper's size (v3 4.3.3, 7.6, Table 9).

Command:  famjax tokenizer train wiki.train.tokens --kind words --out wikitext103.txt   # first
          famjax train wikitext103_small_paper
          famjax train wikitext103_small_paper model.stack=transformer \
              name=wikitext103_small_transformer
          famjax train wikitext103_small_paper init=runs/wikitext103_small_paper \
              optimizer.learning_rate=7e-5 optimizer.warmup_steps=0 train.steps=10000 \
              train.bptt_start=0 train.bptt_double_every=0 name=wikitext103_small_finetuned
          famjax eval runs/wikitext103_small_finetuned --tasks text:wiki.test.tokens
Cost:     needs an accelerator; not run here
Expected: last run, finetuned: perplexity of the test set 22.4 (v1 Table 4; its Transformer
          25.2). v1 has keys and values for each layer, and so does this config.

Trains on the whole file, as the paper does; nothing is held out. Validate with
--tasks text:wiki.valid.tokens.

Adaptive input and softmax as in the authors' earlier code (facebookresearch/adaptive-span):
clusters from 20,000, 40,000 and 200,000, each a quarter as wide, tied. The papers name no clusters;
with these the model sizes are theirs: docs/papers.md.
"""

from famjax.config.schema import (
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
            feedback=FeedbackConfig(span=512, shared_kv=False),
            dropout=DropoutConfig(attention=0.1, hidden=0.1, embedding=0.1, output=0.1),
            adaptive=AdaptiveConfig(cutoffs="20000,40000,200000"),
        ),
        data=DataConfig(
            files="wiki.train.tokens",
            tokenizer="wikitext103.txt",
            batch=512,
            length=256,
            holdout=0,
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
