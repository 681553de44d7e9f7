"""TransformerFAM, Figure 6: parts of the recipe by the base of RoPE (B.4.2 to B.4.4)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.paper_measures import PG19

_BASES = (1_000, 10_000, 500_000)
_FAM, _PREFIX, _ZERO, _NO_RSP = "FAM", "FAM+Prefix", "FAM-POS", "FAM-RSP"
_SCALED = "FAM scaled positions"
_RSP, _RPO = _text.passed(0.8), ("train.rpo=true",)
_PARTS = {
    _FAM: (*_RSP, *_RPO),
    _NO_RSP: (*_text.passed(0), *_RPO),
    _PREFIX: (*_RSP, *_RPO, "model.fam_init=prefix"),
    _ZERO: (*_RSP, *_RPO, "model.fam_position=zero"),
}
# multiplies distances by 1024 / 4096
_SCALING = ("model.arch.rope_scaling=linear", "model.arch.rope_factor=4")


def _name(line: str, base: int) -> str:
    return f"{line} {base}"


def _variant(line: str, base: int, parts: tuple[str, ...]) -> Variant:
    # the paper's rows are packed, and its memory is passed on to later steps
    own = (f"model.rope_base={base}", *_text.PACKED, *parts)
    memory = (*_text.CONTINUED, *_text.FAM, "model.fam_len=8")
    at_paper = (*_text.FAM_AT_PAPER, *(key for key in own if "rsp_ramp" not in key))
    return Variant(_name(line, base), (*memory, *own), x=base, line=line, at_paper=at_paper)


FAM_FIGURE_6 = Experiment(
    id="fam-figure-6",
    title="Passed memories, prefixes and positions by the base of RoPE",
    source="TransformerFAM, Figure 6",
    config="text_bswa",
    variants=(
        *(_variant(line, base, parts) for line, parts in _PARTS.items() for base in _BASES),
        _variant(_SCALED, 10_000, (*_PARTS[_FAM], *_SCALING)),
    ),
    measure=_text.CODE,
    orderings=(
        *(
            Ordering(_name(_FAM, 10_000), _name(line, 10_000))
            for line in (_NO_RSP, _PREFIX, _ZERO, _SCALED)
        ),
        # "outperforming FAM-POS [...] over most base frequencies"
        *(Ordering(_name(_FAM, base), _name(_ZERO, base)) for base in _BASES if base != 10_000),
        Ordering(_name(_FAM, 10_000), _name(_FAM, 500_000)),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    at_paper=PaperSize(
        config="fam_1b",
        measure=PG19,
    ),
    axis="base of RoPE",
    note=_text.FAM_NOTE + " The base of RoPE, or its scaling, changes when a variant continues the "
    "window. The paper gives a figure. Its line without random offsets (FAM-RPO) is left out: here "
    "offsets make no difference but by rounding, since the same number is added to all positions "
    "of a row, memory included (docs/design.md).",
    minutes=4.0,
)
