"""Names of attention and memory in the papers and in other libraries: what to write here."""

from __future__ import annotations

import re
from collections.abc import Collection

from famjax.core.errors import did_you_mean

_XL = "model.mixer=swa with model.window equal to model.block_len (TransformerFAM B.4.5)"
_LINEAR = "model.mixer=linear with model.linear.map={map}"
_OTHER_NAMES = {
    "attention": "model.mixer=full",
    "autocompressor": "model.stack=autocompressor",
    "autocompressors": "model.stack=autocompressor",
    "blockrecurrenttransformer": "model.mixer=block_recurrent",
    "blockslidingwindow": "model.mixer=bswa",
    "brt": "model.mixer=block_recurrent",
    "deltanet": "model.mixer=delta",
    "deltarule": "model.mixer=delta",
    "elu": _LINEAR.format(map="elu"),
    "feedback": "model.stack=feedback with model.block_len=1",
    "feedbacktransformer": "model.stack=feedback with model.block_len=1",
    "local": "model.mixer=swa",
    "lstm": "model.stack=lstm with model.block_len=1",
    "performer": _LINEAR.format(map="performer"),
    "recurrentmemorytransformer": "model.stack=rmt",
    "rfa": _LINEAR.format(map="rfa"),
    "rmt": "model.stack=rmt",
    "slidingwindow": "model.mixer=swa",
    "softmax": "model.mixer=full",
    "t2r": _LINEAR.format(map="relu"),
    "transformer": "model.mixer=full",
    "transformerbswa": "model.mixer=bswa",
    "transformerfam": "model.mixer=fam",
    "transformerxl": _XL,
    "txl": _XL,
    "xl": _XL,
}


def suggest_mixer(name: str, known: Collection[str]) -> str:
    """Return what to write for an unknown mixer, as the end of an error, or "" if none is near."""
    plain = _letters(name).removesuffix("attention") or _letters(name)
    if plain in _OTHER_NAMES:
        return f"; here that is {_OTHER_NAMES[plain]}"
    for mixer in known:
        if plain == _letters(mixer):
            return f"; here that is model.mixer={mixer}"
    if named := re.fullmatch(r"(m|fm)(\d+)|m(\d+)sg", plain):
        mixer = {"m": "bswa", "fm": "fm", None: "bswa_sg"}[named[1]]
        count = int(named[2] or named[3])
        return f"; here that is model.mixer={mixer} with model.memory_segments={count}"
    return did_you_mean(name, known)


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
