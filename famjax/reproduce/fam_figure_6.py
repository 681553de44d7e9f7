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
    _NO_RPO: (*_RSP, "train.rpo=false"),
    _NO_RSP: ("train.rsp=0.0", *_RPO),
    _PREFIX: (*_RSP, *_RPO, "model.fam_init=prefix"),
    _ZERO: (*_RSP, *_RPO, "model.fam_position=zero"),
}


def _name(line: str, base: int) -> str:
    return f"{line} {base}"


def _variant(line: str, base: int) -> Variant:
    own = (f"model.rope_base={base}", *_PACKED, *_PARTS[line])
    memory = (*_text.CONTINUED, *_text.FAM, "model.fam_len=8")
    at_paper = tuple(key for key in own if "rsp_ramp" not in key)
    return Variant(_name(line, base), (*memory, *own), x=base, line=line, at_paper=at_paper)


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
        Ordering(_name(_FAM, 10_000), _name(_NO_RPO, 10_000)),
        Ordering(_name(_FAM, 10_000), _name(_FAM, 500_000)),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    paper_config="fam_1b",
    axis="base of RoPE",
    note=_text.NOTE + " The base of RoPE changes when a variant continues the window. The paper "
    "gives a figure. Offsets can make no difference here but by rounding: the same number is added "
    "to all positions of a row, memory included (docs/design.md).",
    minutes=2.0,
)
