"""WikiText-103, the large model at the paper's size (v3 4.3.3, 7.6, Table 9).

Command:  famjax tokenizer train wiki.train.tokens --kind words --out wikitext103.txt   # first
          famjax train wikitext103_large_paper
          famjax train wikitext103_large_paper model.stack=transformer \
              model.feedback.shared_kv=false \
              name=wikitext103_large_transformer
          famjax train wikitext103_large_paper init=runs/wikitext103_large_paper \
              optimizer.learning_rate=7e-5 optimizer.warmup_steps=0 train.steps=10000 \
              train.bptt_start=0 train.bptt_double_every=0 name=wikitext103_large_finetuned
          famjax eval runs/wikitext103_large_finetuned --tasks text:wiki.test.tokens
Cost:     needs an accelerator; not run here
Expected: last run, finetuned: perplexity of the test set 18.3 (v3 Table 3, 126M parameters;
          its Transformer 19.9, 140M). v1 Table 4 has 18.2 with keys and values for each layer:
          model.feedback.shared_kv=false, the 139M of Table 9.

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
        name="wikitext103_large_paper",
        model=ModelConfig(
            stack="feedback",
            layers=8,
            width=1024,
            heads=8,
            mlp="relu",
            norm="layernorm",
            block_len=1,
            feedback=FeedbackConfig(span=2048, adaptive_span=True, span_loss=1e-5),
            dropout=DropoutConfig(attention=0.3, hidden=0.3, embedding=0.2, output=0.2),
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
