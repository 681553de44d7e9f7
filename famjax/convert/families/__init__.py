"""The families of pretrained models: what their config.json says, and where their weights lie.

To add one: a file here, a line in `FAMILIES`, a case in tests/convert/test_parity.py.
"""

from __future__ import annotations

from famjax.convert.families.common import HF, Family
from famjax.convert.families.gemma import GEMMA, GEMMA2, GEMMA3
from famjax.convert.families.gpt2 import GPT2
from famjax.convert.families.gpt_neox import GPT_NEOX
from famjax.convert.families.llama import LLAMA
from famjax.convert.families.mistral import MISTRAL
from famjax.convert.families.qwen import QWEN2, QWEN3
from famjax.core.errors import UserError, nearest

# by model_type
FAMILIES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt_neox": GPT_NEOX,
    "gpt2": GPT2,
}


def family(hf: HF) -> Family:
    """Return the family that a config.json names."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise UserError(
            f"config.json: model_type={kind!r} is not supported{nearest(str(kind), FAMILIES)} "
            f"(known: {', '.join(FAMILIES)})"
        )
    return FAMILIES[kind]
