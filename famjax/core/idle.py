"""Keys that do nothing: given by a user, they would be passed over without a word."""

from __future__ import annotations

from collections.abc import Iterable

from famjax.core.checks import mixer_pattern
from famjax.core.config import Config, ModelConfig
from famjax.core.errors import UserError

# of the residual stack alone
_RESIDUAL = tuple(
    f"model.{name}"
    for name in ("mixer", "memory_segments", "window", "capacity", "fam_len", "fam_previous")
)


def refuse_idle(config: Config, given: Iterable[str]) -> None:
    """Raise a `UserError` for the first of the keys given that does nothing in this config."""
    for key in given:
        if found := _idle_with(config.model, key):
            value, mend = found
            raise UserError(f"{key}: does nothing with {value}; take it away, or set {mend}")


def _idle_with(model: ModelConfig, key: str) -> tuple[str, str] | None:
    """Return what a key does nothing with, and what would mend it; None for a key that is used."""
    stack = f"model.stack={model.stack}"
    if key.startswith("model.feedback.") and model.stack not in ("feedback", "transformer"):
        return stack, "model.stack=feedback"
    if key in _RESIDUAL and model.stack != "residual":
        return stack, "model.stack=residual"
    if key.startswith("model.linear.") and "linear" not in mixer_pattern(model):
        where = stack if model.stack != "residual" else f"model.mixer={model.mixer}"
        return where, "model.mixer=linear"
    if key == "model.dropout.attention" and set(mixer_pattern(model)) == {"linear"}:
        return f"model.mixer={model.mixer}, which has no attention weights", "another mixer"
    if key == "model.linear.features" and model.linear.map == "elu":
        return "model.linear.map=elu, which has as many as a head has elements", "another map"
    return None
