"""The exported PyTorch code computes the same function as famjax."""

import importlib
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from contracts.harness import CASES, FAMILIES, KINDS, TOKENS, VOCAB, jit, perturb_params
from flax import nnx
from safetensors.torch import load_file

from famjax.convert.families.famjax import FAMJAX, FEEDBACK, pytorch_class
from famjax.convert.save import save_tensors
from famjax.export.pytorch.modeling_famjax import FamjaxForCausalLM
from famjax.mixers import mixer_specs
from famjax.models.language_model import LanguageModel

MODELS = (
    # no Hugging Face format has the other stacks
    # other layers are rejected
    {
        name: config
        for name, config in (CASES | FAMILIES).items()
        if config.stack in ("residual", *FEEDBACK)
        and not config.adaptive.cutoffs
        and all("hf" in s.formats for s in mixer_specs(config))
        and not any(s.unexportable_setting(config) for s in mixer_specs(config))
    }
    | {
        f"bswa-1, {kind}": replace(
            CASES["bswa-1"],
            arch=replace(FAMILIES["full, families"].arch, rope_scaling=kind),
        )
        for kind in ("linear", "none")
    }
    | {"bswa-1, relu": replace(CASES["bswa-1"], mlp="relu")}
)


# in quick runs one variant of each mixer, and all options of families
def some(names):
    names = list(names)
    slow = [name for name in names if name in CASES and name not in KINDS]
    quick = [name for name in names if name not in slow]
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


@cache
def logits_and_pytorch(name):
    """Return famjax's logits [b t v] of TOKENS, and the PyTorch model."""
    config = MODELS[name]
    graph, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), params, perturb_params(params))

    def apply(params, tokens):
        model = nnx.merge(graph, params)
        return model(tokens, model.init_state(len(tokens)))[0]

    logits = np.asarray(jit(apply)(params, jnp.asarray(TOKENS, jnp.int32)))
    return logits, pytorch(config, nnx.merge(graph, params))


def pytorch(config, model):
    with tempfile.TemporaryDirectory() as folder:
        save_tensors(model, config, FAMJAX.tensors(config), Path(folder), "float32")
        tensors = load_file(Path(folder, "model.safetensors"))
    module, name = pytorch_class(config)
    kind = getattr(importlib.import_module(f"famjax.export.pytorch.{module}"), name)
    theirs = kind(kind.config_class(**FAMJAX.serialize(config)))
    missing, extra = theirs.load_state_dict(tensors, strict=False)
    assert (missing, extra) == (["head.weight"] if config.tied else [], [])
    theirs.tie_weights()
    return theirs.eval()


def close(theirs, ours):
    apart = np.abs(theirs.numpy() - ours).max()
    assert apart < 1e-4 * (ours.max() - ours.min())


@pytest.mark.parametrize("name", some(MODELS))
@torch.no_grad()
def test_logits_equal_famjax(name):
    ours, model = logits_and_pytorch(name)
    close(model(torch.tensor(TOKENS)).logits, ours)


@pytest.mark.parametrize("name", some(n for n in MODELS if "," not in n or n in CASES))
@pytest.mark.parametrize("sizes", [[1] * 24, [3, 1, 9, 4, 7]])
@torch.no_grad()
def test_pieces_of_any_length_equal_one_call(name, sizes):
    ours, model = logits_and_pytorch(name)
    state, logits = None, []
    for piece in torch.tensor(TOKENS).split(sizes, 1):
        output = model(piece, state=state)
        if len(piece[0]) > 1:
            # a state may be used twice
            assert torch.equal(model(piece, state=state).logits, output.logits)
        state = output.state
        logits.append(output.logits)
    close(torch.cat(logits, 1), ours)


def size(state):
    return sum(x.numel() for layer in state.layers for x in layer if x is not None)


@pytest.mark.parametrize(
    "name", ["swa-2", "bswa-1", "fam-1-3", "bswa,fam", "linear", "feedback-all"]
)
@torch.no_grad()
def test_the_state_does_not_grow(name):
    model = logits_and_pytorch(name)[1]
    tokens = torch.tensor(np.random.default_rng(0).integers(VOCAB, size=(1, 96)))
    early = model(tokens[:, :48]).state
    late = model(tokens[:, 48:], state=early).state
    assert size(early) == size(late)


@torch.no_grad()
def test_last_logits_only():
    model = logits_and_pytorch("fam-1-3")[1]
    tokens = torch.tensor(TOKENS)
    assert torch.equal(model(tokens, logits_to_keep=5).logits, model(tokens).logits[:, -5:])


@pytest.mark.parametrize("name", ["bswa,fam", "bswa-conv", "bswa-ngrams"])
@torch.no_grad()
def test_generate_is_greedy_and_continues_from_a_state(name):
    model = logits_and_pytorch(name)[1]
    tokens = torch.tensor(TOKENS)
    expected = tokens
    for _ in range(7):
        last = model(expected, logits_to_keep=1).logits[:, -1]
        expected = torch.cat([expected, last.argmax(-1, keepdim=True)], 1)
    made = model.generate(tokens, max_new_tokens=7, do_sample=False)
    assert torch.equal(made, expected)
    state = model(tokens[:, :15]).state
    made = model.generate(tokens[:, 15:], state=state, max_new_tokens=7, do_sample=False)
    assert torch.equal(made, expected[:, 15:])


def test_unsupported_arguments_are_errors():
    tokens = torch.tensor(TOKENS)
    with pytest.raises(ValueError, match="25 tokens do not fit its capacity of 24"):
        logits_and_pytorch("full")[1](torch.cat([tokens, tokens[:, :1]], 1))


def test_the_gradient_of_the_loss_reaches_the_initial_memory():
    model = logits_and_pytorch("fam-2-1")[1]
    tokens = torch.tensor(TOKENS)
    output = model(tokens, labels=tokens)
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    assert torch.equal(output.loss, expected)
    output.loss.backward()
    assert model.prompt.grad.abs().sum() > 0


@torch.no_grad()
def test_bfloat16_is_supported():
    ours, model = logits_and_pytorch("fam-1-3")
    short = FamjaxForCausalLM(model.config).to(torch.bfloat16)
    short.load_state_dict(model.state_dict())
    logits, state = short(torch.tensor(TOKENS), return_dict=False)[:2]
    assert (logits.dtype, state.layers[0].k.dtype) == (torch.float32, torch.bfloat16)
    assert state.layers[0].fam.dtype == torch.float32
    assert np.abs(logits.numpy() - ours).max() < 0.1 * (ours.max() - ours.min())
