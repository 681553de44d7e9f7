"""TransformerFAM, Figure 6: parts of the recipe by the base of RoPE (B.4.2 to B.4.4)."""

from __future__ import annotations

from famjax.reproduce import _text
from famjax.reproduce.experiment import Experiment, Ordering, Variant

_BASES = (1_000, 10_000, 500_000)
_FAM, _PREFIX, _ZERO = "FAM", "FAM+Prefix", "FAM-POS"
_NO_RPO, _NO_RSP = "FAM-RPO", "FAM-RSP"
# the paper's rows are packed, and its memory is passed on to later steps
_PACKED = ("data.layout=packed",)
_RSP, _RPO = ("train.rsp=0.8", "train.rsp_ramp=100"), ("train.rpo=true",)
_PARTS = {
    _FAM: (*_RSP, *_RPO),
    _NO_RPO: _RSP,
    _NO_RSP: _RPO,
    _PREFIX: (*_RSP, *_RPO, "model.fam_init=prefix"),
    _ZERO: (*_RSP, *_RPO, "model.fam_position=zero"),
}
_MARGIN = 0.01


def _name(line: str, base: int) -> str:
    return f"{line} {base}"


def _variant(line: str, base: int) -> Variant:
    own = (f"model.rope_base={base}", *_PACKED, *_PARTS[line])
    memory = (*_text.CONTINUED, *_text.FAM, "model.fam_len=8")
    return Variant(
        _name(line, base), (*memory, *own), x=base, line=line, at_paper=(*own, "train.rsp_ramp=0")
    )


FAM_FIGURE_6 = Experiment(
    id="fam-figure-6",
    title="Offsets, passed memories, prefixes and positions by the base of RoPE",
    source="TransformerFAM, Figure 6",
    config="text_bswa",
    variants=tuple(_variant(line, base) for line in _PARTS for base in _BASES),
    measure=_text.CODE,
    orderings=(
        Ordering(_name(_FAM, 10_000), _name(_NO_RSP, 10_000)),
        Ordering(_name(_FAM, 10_000), _name(_PREFIX, 10_000)),
        Ordering(_name(_FAM, 10_000), _name(_ZERO, 10_000)),
        Ordering(_name(_NO_RPO, 10_000), _name(_FAM, 10_000), margin=_MARGIN),
        Ordering(_name(_FAM, 10_000), _name(_FAM, 500_000)),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    paper_config="fam_1b",
    axis="base of RoPE",
    note=_text.NOTE + " The base of RoPE changes when a variant continues the window. The paper "
    "gives a figure, in which FAM without offsets is better than with them at 10,000.",
    minutes=2.0,
)
