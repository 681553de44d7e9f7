"""Keys that do nothing: given by a user, they would be passed over without a word."""

from __future__ import annotations

from collections.abc import Iterable

from famjax.core.checks import mixer_pattern
from famjax.core.config import Config
from famjax.core.errors import UserError

# of the residual stack alone
_RESIDUAL = tuple(
    f"model.{name}"
    for name in ("mixer", "memory_segments", "window", "capacity", "fam_len", "fam_previous")
)


def refuse_idle(config: Config, given: Iterable[str]) -> None:
    """Raise a `UserError` for the first of the keys given that does nothing in this config."""
    stack, mixer = config.model.stack, config.model.mixer
    for key in given:
        if key.startswith("model.feedback.") and stack not in ("feedback", "transformer"):
            mend = "set model.stack=feedback"
        elif key in _RESIDUAL and stack != "residual":
            mend = "set model.stack=residual"
        elif key.startswith("model.linear.") and "linear" not in mixer_pattern(config.model):
            where = f"model.mixer={mixer}" if stack == "residual" else f"model.stack={stack}"
            raise UserError(
                f"{key}: does nothing with {where}; take it away, or set model.mixer=linear"
            )
        elif key == "model.linear.features" and config.model.linear.map == "elu":
            raise UserError(
                f"{key}: does nothing with model.linear.map=elu, which has as many as a head has "
                "elements; take it away, or set another map"
            )
        else:
            continue
        raise UserError(f"{key}: does nothing with model.stack={stack}; take it away, or {mend}")
