"""No mixer without its variants here and its oracle."""

from __future__ import annotations

from oracles import transformer as oracle

from famjax.core import checks
from famjax.mixers import MIXERS

from .harness import CASES, KINDS, ORACLES


def test_every_mixer_has_a_case_an_oracle_and_a_place_in_the_schema():
    for cases in (CASES, KINDS):
        named = {mixer for case in cases for mixer in CASES[case].mixer.split(",")}
        assert named == set(MIXERS)
    assert set(ORACLES) == set(MIXERS)
    assert {ORACLES[name](CASES["full"])[0] for name in MIXERS} == set(oracle.LAYERS)
    assert set(checks.MIXERS) == set(MIXERS)


def test_the_variants_meet_every_norm_feed_forward_and_kind_of_head():
    def seen(field: str) -> set:
        return {getattr(config, field) for config in CASES.values()}

    assert seen("norm") == {"rmsnorm", "layernorm"}
    assert seen("mlp") == {"gelu", "swiglu", "geglu"}
    assert seen("kv_heads") == {1, 2, 4}
    assert seen("tied") == {True, False}
