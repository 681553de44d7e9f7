"""T2R, Table 1: linear attention from scratch and from a pretrained Transformer (3.3)."""

from __future__ import annotations

from famjax.reproduce import _t2r
from famjax.reproduce.experiment import Experiment, Ordering, Variant


def _map(name: str) -> tuple[str, ...]:
    return (*_t2r.LINEAR, f"model.linear.map={name}")


def _scratch(name: str, feature_map: str, paper: float) -> Variant:
    own = _map(feature_map)
    return Variant(f"{name} from scratch", own, {"perplexity": paper}, continues=False)


def _pretrained(name: str, mixer: tuple[str, ...], paper: float) -> Variant:
    return Variant(f"{name} pretrained", (*_t2r.FINETUNED, *mixer), {"perplexity": paper})


T2R_TABLE_1 = Experiment(
    id="t2r-table-1",
    title="Linear attention from scratch and from a Transformer",
    source="T2R, Table 1",
    config=_t2r.CONFIG,
    variants=(
        _scratch("ELU", "elu", 22.8),
        _scratch("RFA", "rfa", 21.3),
        _scratch("T2R", "relu", 20.8),
        _pretrained("ELU", _map("elu"), 22.2),
        _pretrained("RFA", _map("rfa"), 21.6),
        _pretrained("T2R", _map("relu"), 19.6),
        _pretrained("T2R 75%", ("model.mixer=linear,linear,linear,full",), 18.5),
        Variant("Transformer", (), {"perplexity": 18.5}, continues=False),
    ),
    measure=_t2r.WINDOWS,
    orderings=(
        Ordering("T2R pretrained", "T2R from scratch"),
        Ordering("T2R pretrained", "ELU pretrained"),
        Ordering("T2R pretrained", "RFA pretrained"),
        Ordering("T2R 75% pretrained", "T2R pretrained"),
        Ordering("Transformer", "T2R pretrained"),
    ),
    base=_t2r.TEACHING,
    base_config=_t2r.TEACHER,
    note=_t2r.NOTE,
    minutes=_t2r.MINUTES,
)
