"""Folders in Hugging Face format, with tokenizers small enough to train in a test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

CORPUS = ["The quick brown fox, 1234 times.\n\tdef f(x):\n        return x  # naïve 😀 café"] * 20
CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message['role'] not in ('system', 'user', 'assistant') %}\n"
    "        {{ raise_exception('unknown role ' + message['role']) }}\n"
    "    {% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# eos ends the answer; bos occurs only at the start
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)


def write(folder: Path, name: str, content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def edit(folder: Path, **changes: Any) -> None:
    """Change parts of the folder's tokenizer.json."""
    data = json.loads((folder / "tokenizer.json").read_text())
    write(folder, "tokenizer.json", {**data, **changes})


def byte_level(folder: Path, awkward: bool = False, corpus: Sequence[str] = CORPUS) -> Path:
    """Write a tokenizer like Qwen's, with a ChatML template, that is trained on a corpus.

    Awkward: it also splits by a pattern, puts a space in front of the text, composes characters,
    adds bos, truncates and pads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=awkward)
    if awkward:
        words = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken("<think>", lstrip=awkward, rstrip=awkward), "    "])
    if awkward:
        tokenizer.normalizer = normalizers.NFC()
        bos = [("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
        tokenizer.post_processor = TemplateProcessing("<|bos|> $A", special_tokens=bos)
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=16)
    write(folder, "tokenizer.json", tokenizer.to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": {"__type": "AddedToken", "content": "<|eos|>", "special": True},
        "chat_template": CHATML,
    }
    write(folder, "tokenizer_config.json", config)
    ends = [tokenizer.token_to_id(name) for name in ("<|eos|>", "<|im_end|>")]
    write(folder, "generation_config.json", {"eos_token_id": ends})
    return folder


def sentencepiece_like(folder: Path, awkward: bool = False, metaspace: bool = False) -> Path:
    """Write a tokenizer like Gemma's; awkward, as Llama 2's, with a space before the text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        scheme = "first" if awkward else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    else:
        steps = [normalizers.Prepend("▁")] if awkward else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * awkward)])
    specials = ["<unk>", "<s>", "</s>"]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    data = json.loads(tokenizer.to_str())
    # the trainer takes byte tokens for control tokens
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] in specials]
    write(folder, "tokenizer.json", data)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write(folder, "tokenizer_config.json", config)
    write(folder, "chat_template.jinja", LLAMA)
    return folder
