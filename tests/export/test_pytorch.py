"""The PyTorch code that a folder takes along is famjax's mathematics, written a second time."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from contracts.harness import CASES, FAMILIES, TOKENS, VOCAB, jit, perturb_params
from flax import nnx
from safetensors.torch import load_file

from famjax.convert.families.famjax import FAMJAX
from famjax.convert.save import save_tensors
from famjax.export.pytorch.configuration_famjax import FamjaxConfig
from famjax.export.pytorch.modeling_famjax import FamjaxForCausalLM
from famjax.models.language_model import LanguageModel

MODELS = (
    # other stacks are in no format of Hugging Face's
    # linear layers are refused
    {
        name: config
        for name, config in (CASES | FAMILIES).items()
        if config.stack == "residual" and "linear" not in config.mixer
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


@cache
def both(name):
    """Return famjax's logits [b t v] of TOKENS, and the PyTorch model."""
    config = MODELS[name]
    graph, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), params, perturb_params(params))

    def read(params, tokens):
        model = nnx.merge(graph, params)
        return model(tokens, model.init_state(len(tokens)))[0]

    logits = np.asarray(jit(read)(params, jnp.asarray(TOKENS, jnp.int32)))
    return logits, pytorch(config, nnx.merge(graph, params))


def pytorch(config, model):
    with tempfile.TemporaryDirectory() as folder:
        save_tensors(model, config, FAMJAX.tensors(config), Path(folder), "float32")
        tensors = load_file(Path(folder, "model.safetensors"))
    theirs = FamjaxForCausalLM(FamjaxConfig(**FAMJAX.serialize(config)))
    missing, extra = theirs.load_state_dict(tensors, strict=False)
    assert (missing, extra) == (["head.weight"] if config.tied else [], [])
    theirs.tie_weights()
    return theirs.eval()


def close(theirs, ours):
    apart = np.abs(theirs.numpy() - ours).max()
    assert apart < 1e-4 * (ours.max() - ours.min())


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_those_of_famjax(name):
    ours, model = both(name)
    close(model(torch.tensor(TOKENS)).logits, ours)


@pytest.mark.parametrize("name", [name for name in MODELS if "," not in name or name in CASES])
@pytest.mark.parametrize("sizes", [[1] * 24, [3, 1, 9, 4, 7]])
@torch.no_grad()
def test_pieces_of_any_length_are_one_call(name, sizes):
    ours, model = both(name)
    state, logits = None, []
    for piece in torch.tensor(TOKENS).split(sizes, 1):
        output = model(piece, state=state)
        if len(piece[0]) > 1:
            # a state may be read from twice
            assert torch.equal(model(piece, state=state).logits, output.logits)
        state = output.state
        logits.append(output.logits)
    close(torch.cat(logits, 1), ours)


def size(state):
    return sum(x.numel() for layer in state.layers for x in layer if x is not None)


@pytest.mark.parametrize("name", ["swa-6", "bswa-3", "fam-1-3", "bswa,fam"])
@torch.no_grad()
def test_memory_does_not_grow(name):
    model = both(name)[1]
    tokens = torch.tensor(np.random.default_rng(0).integers(VOCAB, size=(1, 96)))
    early = model(tokens[:, :48]).state
    late = model(tokens[:, 48:], state=early).state
    assert size(early) == size(late)


@torch.no_grad()
def test_the_last_logits_alone():
    model = both("fam-1-3")[1]
    tokens = torch.tensor(TOKENS)
    assert torch.equal(model(tokens, logits_to_keep=5).logits, model(tokens).logits[:, -5:])


@torch.no_grad()
def test_generate_is_the_likeliest_token_each_time_and_goes_on_from_a_state():
    model = both("bswa,fam")[1]
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


def test_what_it_cannot_do_is_said():
    tokens = torch.tensor(TOKENS)
    with pytest.raises(ValueError, match="25 tokens do not fit its capacity of 24"):
        both("full")[1](torch.cat([tokens, tokens[:, :1]], 1))


def test_a_loss_and_its_gradient_reach_the_initial_memory():
    model = both("fam-2-1")[1]
    tokens = torch.tensor(TOKENS)
    output = model(tokens, labels=tokens)
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    assert torch.equal(output.loss, expected)
    output.loss.backward()
    assert model.prompt.grad.abs().sum() > 0


@torch.no_grad()
def test_bfloat16():
    ours, model = both("fam-1-3")
    short = FamjaxForCausalLM(model.config).to(torch.bfloat16)
    short.load_state_dict(model.state_dict())
    logits, state = short(torch.tensor(TOKENS), return_dict=False)[:2]
    assert (logits.dtype, state.layers[0].k.dtype) == (torch.float32, torch.bfloat16)
    assert state.layers[0].fam.dtype == torch.float32
    assert np.abs(logits.numpy() - ours).max() < 0.1 * (ours.max() - ours.min())
