"""Data: documents from files, tasks and seqio or TFDS sets, tokenized and laid out as batches.

A `Source` names and opens documents; `lanes` and `packing` turn them into rows of tokens, targets
and weights; `famjax.pipeline` builds both from a config and prefetches batches in a thread. Every
iterator has a JSON-serializable state, so that a resumed run reads the same tokens.
"""
