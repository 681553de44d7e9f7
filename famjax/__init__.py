"""Transformers with feedback memory: train, stream and generate with a carried state.

    import famjax

    config = famjax.load_config("text_fam", ["data.files=book.txt", "train.steps=500"])
    run = famjax.fit(config, "runs/book")          # or famjax.open_run("runs/book")

    state = run.model.init_state(1)                # the model is a function of segment and state
    logits, state = run.model(tokens, state)

    print("".join(famjax.Generator(run).generate("Once upon a time")))

The names of this package are imported when they are first used, so `import famjax` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from famjax.config.keys import replace_values
    from famjax.config.schema import Config
    from famjax.convert.load import load_pretrained
    from famjax.convert.open import open_model as open_run
    from famjax.core.errors import UserError
    from famjax.eval.generate import Generator
    from famjax.eval.streaming import Streamer
    from famjax.experiment.load import load_config
    from famjax.train.loop import train as fit
    from famjax.train.run import Run

    __version__: str

__all__ = [
    "Config",
    "Generator",
    "Run",
    "Streamer",
    "UserError",
    "__version__",
    "fit",
    "load_config",
    "load_pretrained",
    "open_run",
    "replace_values",
]

# name -> (module, name in the module). Training is named `fit`, since `famjax.train` is a package.
_HOMES = {
    "Config": ("famjax.config.schema", "Config"),
    "Generator": ("famjax.eval.generate", "Generator"),
    "Run": ("famjax.train.run", "Run"),
    "Streamer": ("famjax.eval.streaming", "Streamer"),
    "UserError": ("famjax.core.errors", "UserError"),
    "fit": ("famjax.train.loop", "train"),
    "load_config": ("famjax.experiment.load", "load_config"),
    "load_pretrained": ("famjax.convert.load", "load_pretrained"),
    "open_run": ("famjax.convert.open", "open_model"),
    "replace_values": ("famjax.config.keys", "replace_values"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("famjax")
    elif name in _HOMES:
        module, attribute = _HOMES[name]
        value = getattr(importlib.import_module(module), attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
