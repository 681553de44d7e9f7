"""A run: its model and tokenizer, opened from its folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from famjax.config.schema import Config, LoraConfig, ModelConfig
from famjax.core.errors import UserError, did_you_mean_path
from famjax.core.types import Params, PyTree
from famjax.experiment.checks import validate
from famjax.experiment.memory import check_model_fits
from famjax.models.cast_weights import cast_weights
from famjax.models.fold_feature_maps import fold_feature_maps, why_not_foldable
from famjax.models.language_model import LanguageModel
from famjax.models.remap_checks import check_compatible
from famjax.models.remap_params import (
    abstract_inference_model,
    merge_adapters,
    remap_params,
)
from famjax.models.seq2seq import make_model
from famjax.parallel import sharding
from famjax.parallel.sharding import path_name, weight_shards
from famjax.parallel.traced import target_device
from famjax.stacks.feedback import Feedback
from famjax.tokenizers.tokenizer import Tokenizer
from famjax.train.checkpoint import Checkpoints, wrap_extra_errors
from famjax.train.checkpoint_checks import check_constants, check_not_edited
from famjax.train.partition import (
    Frozen,
    check_base,
    combine_fingerprints,
    fingerprint,
    frozen_weights,
    has_frozen_params,
    inference_config,
    partition_trainable,
)
from famjax.train.run_folder import CHECKPOINTS, CONFIG, read_run_config, run_tokenizer


@dataclass(frozen=True)
class Run:
    """A trained model with everything needed to use it.

    Attributes:
      config: the config as it was given, with the vocabulary size filled in.
      tokenizer: the tokenizer it was trained with.
      model: NNX module with restored parameters.
      step: step of the checkpoint.
      base: fingerprint of the model that the frozen weights come from; "" if nothing is frozen.
      original_fingerprint: what `famjax.eval.state_file.model_fingerprint` returned before the
        model was changed for inference; "" for an unchanged model.
    """

    config: Config
    tokenizer: Tokenizer
    model: LanguageModel
    step: int
    base: str = ""
    original_fingerprint: str = ""

    def fingerprint(self) -> str:
        """Return a hash of the run's weights, the same on all devices."""
        _, trained, _ = partition_trainable(
            inference_config(self.config.model), self.model, self.config.train.only
        )
        return combine_fingerprints(fingerprint(trained), self.base)

    def merge_adapters(self) -> Run:
        """Return the run with its adapters merged into the weights; it no longer needs `init`."""
        params, model = merge_adapters(nnx.state(self.model, nnx.Param), self.config.model)
        model = inference_config(model)
        train = replace(self.config.train, only="all", match=False)
        config = replace(self.config, model=model, train=train, init="")
        return replace(
            self,
            config=config,
            model=nnx.merge(abstract_inference_model(model)[0], params),
            base="",
        )

    def with_folded_maps(self) -> Run:
        """Return the run with folded feature maps, for inference; itself if none can be folded."""
        model = replace(self.config.model, lora=LoraConfig())
        if all(why_not_foldable(model).values()):
            return self
        run = self.merge_adapters() if self.config.model.lora.rank else self
        return replace(run, model=fold_feature_maps(run.model, model))

    def for_inference(self) -> Run:
        """Return the run for generation: `with_folded_maps`, then `cast_weights`.

        The weights of this run may change, so it must not be used for anything else afterwards.
        """
        run = self.with_folded_maps()
        run.cast_weights()
        return run

    def cast_weights(self) -> None:
        """Convert weights to the dtype in which they are used, on accelerators and in place.

        A copy would not do, since a large model may not fit the device twice. On CPU products of
        bfloat16 are computed in float32, so that narrow weights are not faster.
        """
        if target_device().platform != "cpu":
            cast_weights(self.model)

    def with_small_cache(self) -> Run:
        """Return the run with a model that caches memories, not keys and values (FT v1 5.3)."""
        stack = self.model.stack
        if not isinstance(stack, Feedback):
            raise UserError(
                f"model.stack={self.config.model.stack}: has no memory of one vector a token; "
                "leave out --small-cache"
            )
        stack.use_memory_cache()
        feedback = replace(self.config.model.feedback, cache="memory")
        model = replace(self.config.model, feedback=feedback)
        return replace(self, config=replace(self.config, model=model))


def open_run(
    run_dir: str | Path,
    step: int | None = None,
    report: Callable[[str], None] | None = None,
    mesh: Mesh | None = None,
) -> Run:
    """Return the run in a folder, with the parameters of its newest valid checkpoint.

    Args:
      run_dir: folder of the run.
      step: use the checkpoint of this step instead of the newest valid one.
      report: called with a line for each damaged checkpoint that is skipped; None writes to
        standard error.
      mesh: devices to shard the parameters over; None uses the first device only.

    Raises:
      UserError: the folder has no run, or no valid checkpoint.
    """
    folder = Path(run_dir)
    config = read_run_config(folder)
    if config is None:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder{did_you_mean_path(str(folder))}")
        within = sorted(str(path.parent) for path in folder.glob(f"*/{CHECKPOINTS}"))
        hint = f"give one of {', '.join(within)}" if within else "train one with famjax train"
        raise UserError(f"{folder} is not a run: it has no {CONFIG}; {hint}")
    try:
        validate(config)  # it may have been edited by hand
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None
    tokenizer = run_tokenizer(folder, config)
    model, only = inference_config(config.model), config.train.only
    check_model_fits(model, weight_shards(mesh), only)
    graph, shapes, _ = abstract_model(model, only=only)
    template = _with_shardings(shapes, mesh)
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    check_not_edited(config, checkpoints, step, folder)
    restored, tree, extra = checkpoints.restore({"params": template}, step, report)
    check_not_edited(config, checkpoints, restored, folder)
    with wrap_extra_errors(checkpoints.path(restored)):
        check_constants(extra, model, checkpoints.path(restored))
    frozen: Frozen = ()
    base = ""
    if has_frozen_params(config):
        weights, base, _ = initial_weights(config, folder, report, mesh)
        check_base(extra.get("base", ""), base, config.init, folder)
        frozen = freeze(model, weights, only)
    module = nnx.merge(graph, tree["params"], *frozen)
    if config.model.feedback.adaptive_span:
        module.stack.set_attention_span(module.stack.attention_span())
    return Run(config, tokenizer, module, restored, base)


def _with_shardings(shapes: PyTree, mesh: Mesh | None) -> PyTree:
    """Return the shapes of parameters with shardings on the mesh, or on the first device."""
    if mesh is None:
        first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: first, shapes)
    else:
        shardings = sharding.parameter_shardings(mesh, shapes)
    return jax.tree.map(
        lambda a, sharding_: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding_),
        shapes,
        shardings,
    )


def initial_weights(
    config: Config,
    folder: Path,
    report: Callable[[str], None] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Any, str, int]:
    """Return the parameters of the model in `config.init`, in the layout of `config.model`.

    Adapters of the model in `config.init` are merged; the result has no adapters. Parameters that
    are frozen have the dtype in which they are kept.

    Args:
      folder: folder of the run that starts from these parameters.

    Returns:
      The parameters, the fingerprint of the model in `config.init`, and the step of its checkpoint.

    Raises:
      UserError: there is no usable model, or its sizes differ from those of `config.model`.
    """
    if not Path(config.init).is_dir():
        raise UserError(
            f"init={config.init}: there is no such folder; if it was moved, set init in "
            f"{folder / CONFIG} to its new path"
        )
    run = open_run(config.init, report=report, mesh=mesh)
    base, step, model = run.fingerprint(), run.step, run.config.model
    params = nnx.state(run.model, nnx.Param)
    del run  # so that an array is freed when it is converted
    params, model = merge_adapters(params, model)
    params = remap_params(params, model, config.model)
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    leaves, tree = jax.tree.flatten(params)
    del params
    _cast_frozen(leaves, paths, config)
    return jax.tree.unflatten(tree, leaves), base, step


def _cast_frozen(leaves: list[jax.Array], paths: Sequence[str], config: Config) -> None:
    """Convert the parameters that are frozen to the dtype `lora.base`, in place.

    One at a time, since a large model may not fit a device in both dtypes.
    """
    frozen = frozen_weights(abstract_model(config.model, only=config.train.only)[2])
    dtypes = {
        path_name(path[1:]): leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path(frozen)
    }
    for i, path in enumerate(paths):
        leaves[i] = leaves[i].astype(dtypes.get(path, leaves[i].dtype))


def check_initial_model(config: Config) -> None:
    """Raise a `UserError` if the model in `config.init` has other sizes, before it is loaded."""
    init_config = read_run_config(Path(config.init))
    if init_config is not None:
        check_compatible(init_config.model, config.model)


@functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=1)
def freeze(config: ModelConfig, weights: Params, only: str = "all") -> Frozen:
    """Return the frozen part of a model with these weights, see `partition_trainable`.

    The weights are donated.
    """
    # XLA removes this initialization, since all of its values are replaced
    model = make_model(config, rngs=nnx.Rngs(0))
    nnx.update(model, weights)
    return partition_trainable(config, model, only)[2]


def abstract_model(
    model: ModelConfig, attention_span: tuple[int, ...] = (), only: str = "all"
) -> tuple[Any, Any, Frozen]:
    """Return `partition_trainable` of an abstract model, whose arrays are `jax.ShapeDtypeStruct`.

    Args:
      attention_span: see `Feedback.set_attention_span`; () means all.
      only: `train.only`, which parameters are trained.
    """
    module = nnx.eval_shape(lambda: make_model(model, rngs=nnx.Rngs(0)))
    if attention_span:
        module.stack.set_attention_span(attention_span)
    return partition_trainable(model, module, only)
