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

Adaptive input and softmax are tied, as in the authors' earlier code
(facebookresearch/adaptive-span), with clusters from 20,000, 40,000 and 200,000, each a quarter as
wide as the one before. The papers name no clusters; with these the model sizes are theirs:
docs/papers.md.
The dropout of the last layer's output (7.6) has no rate in Table 9; it is that of the embedding.
Ends of lines are in the text from the first step; the paper trains without them, and finetunes the
trained models with them (7.6). For departures of the model and the optimizer see `_feedback_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_wikitext103_paper"),
        {
            "name": "wikitext103_small_paper",
            "model.layers": 4,
            "model.width": 512,
            "model.head_dim": 128,
            "model.mlp_width": 4096,
            "model.feedback.span": 512,
            "model.dropout.attention": 0.1,
            "model.dropout.hidden": 0.1,
            "model.dropout.embedding": 0.1,
            "model.dropout.output": 0.1,
        },
    )
