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
            "name": "wikitext103_large_paper",
            "model.layers": 8,
            "model.width": 1024,
            "model.feedback.span": 2048,
            "model.feedback.shared_kv": True,
            "model.feedback.adaptive_span": True,
            "model.feedback.span_loss": 1e-5,
            "model.dropout.attention": 0.3,
            "model.dropout.hidden": 0.3,
            "model.dropout.embedding": 0.2,
            "model.dropout.output": 0.2,
        },
    )
