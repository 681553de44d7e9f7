"""The model card of an exported folder."""

from __future__ import annotations

from famjax.config.schema import ModelConfig
from famjax.convert.families.common import Family
from famjax.convert.families.famjax import FAMJAX, FEEDBACK
from famjax.core.units import counted
from famjax.export.source import ExportSource
from famjax.mixers import mixer_specs

_LOAD = """\
```
pip install torch 'transformers>=5'
```

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER{trust})
model = AutoModelForCausalLM.from_pretrained(FOLDER{trust}).eval()

ids = [{bos}, *tokenizer.encode("Once upon a time", add_special_tokens=False)]  # bos, the text
print(tokenizer.decode(model.generate(torch.tensor([ids]), max_new_tokens=20)[0]))
```
"""

_LOAD_PAIRS = """\
```
pip install torch 'transformers>=5'
```

```python
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER, trust_remote_code=True).eval()

text = tokenizer.encode("Once upon a time", add_special_tokens=False)
ids = [{before}*text, {eos}]  # a source
written = model.generate(torch.tensor([ids]), num_beams=5, max_new_tokens=20)[0]
print(tokenizer.decode(written, skip_special_tokens=True))
```

Sources of different lengths are padded; `attention_mask` is 0 there. For finetuning, `labels` are
the tokens of a target, with eos. Not supported (an error): `inputs_embeds`, `output_attentions`,
`past_key_values` (`forward` has `state`), assisted generation and prompt lookup.
"""

_STREAM = """
It processes text of any length in pieces of any length; its memory has constant size:

```python
state = None
for piece in torch.tensor([ids]).split(7, 1):
    logits, state = model(piece, state=state, return_dict=False)[:2]
```
"""

_BATCHES = """
Texts of different lengths are padded, on the left for `generate`, without changing the results:

```python
texts = tokenizer(["Once upon a time", "The end"], add_special_tokens=False)["input_ids"]
batch = {{"input_ids": [[{bos}, *text] for text in texts]}}  # bos, the text
batch = tokenizer.pad(batch, padding_side="left", return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**batch, num_beams=2, max_new_tokens=20)))
```

Not supported (an error): padding within a row, `inputs_embeds`, `output_attentions`,
`cache` and `past_key_values` (give `state`), texts packed into one row by `position_ids`,
assisted generation and prompt lookup, which would have to roll back the state.
"""


def model_card(source: ExportSource, family: Family, pretrained: bool) -> str:
    """Return the text of README.md.

    Args:
      pretrained: training started from a converted model's weights.
    """
    own = family is FAMJAX
    trust = ", trust_remote_code=True" if own else ""
    config, tokenizer = source.run.config, source.run.tokenizer
    has_encoder = config.model.encoder.layers > 0
    kind = "sequence-to-sequence" if has_encoder else "language"
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {'text2text' if has_encoder else 'text'}-generation",
        "---",
        "",
        f"# {config.name}",
        "",
        f"A {kind} model trained with famjax: {describe(source)}",
        "",
        _describe_training(source, pretrained),
        "",
        "Licence: to be filled in by whoever publishes it.",
        "",
    ]
    if has_encoder:
        *before, eos = tokenizer.encode_source("").tolist()
        example = _LOAD_PAIRS.format(before="".join(f"{token}, " for token in before), eos=eos)
        return "\n".join([*lines, example]) + describe_cut(source)
    bos = tokenizer.bos_id
    text = "\n".join([*lines, _LOAD.format(trust=trust, bos=bos)])
    remembers = own and not any(spec.is_bounded for spec in mixer_specs(config.model))
    return text + (_STREAM if remembers else "") + (_BATCHES.format(bos=bos) if own else "")


def describe_cut(source: ExportSource) -> str:
    """Return what `data.source_words` means for whoever writes sources; "" for whole ones."""
    words = source.run.config.data.source_words
    if not words:
        return ""
    return f"\nCut sources to their first {words:,} words, as famjax does (`data.source_words`).\n"


def describe(source: ExportSource) -> str:
    """Return a sentence about the model."""
    model = source.model
    shape = f"{counted(model.layers, 'layer')}, width {model.width}, {model.vocab_size:,} tokens"
    if model.encoder.layers:
        shape = f"an encoder of {counted(model.encoder.layers, 'layer')}, a decoder of {shape}"
    if model.stack in FEEDBACK:
        span = model.feedback.span
        return f"{shape}, `{model.stack}` layers that attend to the last {span:,} tokens."
    return f"{shape}, attention `{model.mixer}`{_describe_memory(model)}."


def _describe_memory(model: ModelConfig) -> str:
    phrases = dict.fromkeys(p for spec in mixer_specs(model) for p in spec.describe(model))
    return "".join(f", {phrase}" for phrase in phrases)


def _describe_training(source: ExportSource, pretrained: bool) -> str:
    """Return a sentence about the training, and the origin of the weights."""
    step, data = source.run.step, source.run.config.data
    if not step:
        return "Pretrained weights, converted and not trained since."
    tokens = data.batch * data.length
    began = " on top of pretrained weights" if pretrained else ""
    return f"Training: {step:,} steps of {tokens:,} tokens, {step * tokens:,} in total{began}."
