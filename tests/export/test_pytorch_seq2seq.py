"""The exported PyTorch code of an encoder-decoder computes the same function as famjax."""

from __future__ import annotations

import copy
import importlib
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from contracts.harness import FAMILIES, jit, perturb_params
from flax import nnx
from safetensors.torch import load_file

from famjax.config.schema import (
    ArchConfig,
    EncoderConfig,
    FeedbackConfig,
    LinearConfig,
    ModelConfig,
)
from famjax.convert.families.famjax import FAMJAX, pytorch_class
from famjax.convert.save import save_tensors
from famjax.core.types import Context
from famjax.export.pytorch.configuration_famjax import FamjaxConfig
from famjax.export.pytorch.modeling_famjax_seq2seq import FamjaxForConditionalGeneration
from famjax.models.seq2seq import Seq2Seq

pytestmark = pytest.mark.usefixtures("one_device")
BASE = ModelConfig(
    vocab_size=19,
    layers=2,
    width=12,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=10,
    block_len=4,
    fam_len=2,
    window=5,
    capacity=32,
    mixer="full",
    encoder=EncoderConfig(layers=3),
)
LINEAR_CROSS = EncoderConfig(layers=2, cross="linear", features=3)
# of all families, with positions and a feed-forward that an encoder can have
ARCH = replace(FAMILIES["full, families"].arch, positions="none", parallel=False)


def absolute(positions: str, **changes: Any) -> ArchConfig:
    """Return positions at the embedding, and the further parts of Marian and BART."""
    arch = ArchConfig(positions=positions, rotary_fraction=0.0, pre_norm=False)  # type: ignore[arg-type]
    return replace(arch, embed_norm=True, logit_bias=True, qkv_bias=True, **changes)


MODELS = {
    "full": BASE,
    "own embedding": replace(BASE, encoder=replace(BASE.encoder, shared=False), tied=False),
    "families": replace(BASE, arch=ARCH, norm="layernorm", mlp="gelu"),
    "pattern": replace(BASE, mixer="swa,bswa", window=3),
    # Marian and BART with another attention
    "marian": replace(
        BASE, mixer="bswa", arch=absolute("sinusoidal_halves"), norm="layernorm", mlp="swish"
    ),
    "bart": replace(BASE, mixer="full", arch=absolute("learned", position_offset=2)),
    "vaswani": replace(BASE, mixer="delta", memory_segments=1, arch=absolute("sinusoidal")),
    "stop-gradient": replace(BASE, mixer="bswa_sg"),
    "conv": replace(BASE, mixer="bswa", short_conv=4),
    "n-grams": replace(BASE, mixer="bswa", ngram_memory=2, ngram_slots=64),
    "fam": replace(BASE, mixer="fam", fam_update="gated", smeared_keys=True),
    "delta": replace(BASE, mixer="delta", memory_segments=1),
    "linear": replace(BASE, mixer="linear", encoder=LINEAR_CROSS),
    "rfa": replace(
        BASE, mixer="linear", encoder=LINEAR_CROSS, linear=LinearConfig(map="rfa", features=6)
    ),
    "linear, families": replace(
        BASE, mixer="linear,swa", encoder=LINEAR_CROSS, arch=ARCH, norm="layernorm"
    ),
    "feedback": replace(BASE, stack="feedback", feedback=FeedbackConfig(span=5)),
    "transformer": replace(BASE, stack="transformer", feedback=FeedbackConfig(span=5)),
    "feedback, linear cross": replace(
        BASE, stack="feedback", feedback=FeedbackConfig(span=5), encoder=LINEAR_CROSS
    ),
    "feedback, sinusoids": replace(
        BASE,
        stack="feedback",
        feedback=FeedbackConfig(span=5, composition="same_and_lower", shared_kv=False),
        arch=absolute("sinusoidal"),
    ),
}
# the second source is shorter, and so is the second target
SOURCE = np.random.default_rng(1).integers(3, 19, (2, 7))
SOURCE_LENGTHS, TARGET_LENGTHS = np.array([7, 4]), np.array([11, 9])
TARGET = np.random.default_rng(2).integers(3, 19, (2, 11))
START = 1


@cache
def famjax_and_pytorch(name: str) -> tuple[np.ndarray, Any]:
    """Return famjax's logits [b t v] of TARGET, and the PyTorch model."""
    config = MODELS[name]
    graph, params = nnx.split(Seq2Seq(config, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), params, perturb_params(params))
    padded = np.pad(TARGET, ((0, 0), (0, -TARGET.shape[1] % config.block_len)))

    def apply(params: Any, tokens: Any, source: Any, lengths: Any, valid: Any) -> Any:
        model = nnx.merge(graph, params)
        segment = (jnp.arange(source.shape[1]) < lengths[:, None]).astype(jnp.int32)
        ctx = Context(valid=valid, source=model.read_source(source, segment))
        return model(tokens, model.init_state(len(tokens)), ctx)[0]

    valid = np.arange(padded.shape[1]) < TARGET_LENGTHS[:, None]
    arguments = [jnp.asarray(a, jnp.int32) for a in (padded, SOURCE, SOURCE_LENGTHS)]
    logits = np.asarray(jit(apply)(params, *arguments, valid))
    return logits[:, : TARGET.shape[1]], pytorch(config, nnx.merge(graph, params))


def pytorch(config: ModelConfig, model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        save_tensors(model, config, FAMJAX.tensors(config), Path(folder), "float32")
        tensors = load_file(Path(folder, "model.safetensors"))
    ends = {"decoder_start_token_id": START, "eos_token_id": 2, "pad_token_id": 0}
    module, name = pytorch_class(config)
    kind = getattr(importlib.import_module(f"famjax.export.pytorch.{module}"), name)
    theirs = kind(kind.config_class(**FAMJAX.serialize(config), **ends))
    missing, extra = theirs.load_state_dict(tensors, strict=False)
    assert (missing, extra) == (["head.weight"] if config.tied else [], [])
    theirs.tie_weights()
    return theirs.eval()


def test_a_source_longer_than_the_positions_is_refused() -> None:
    config = MODELS["bart"]
    ends = {"decoder_start_token_id": START, "eos_token_id": 2, "pad_token_id": 0}
    model = FamjaxForConditionalGeneration(FamjaxConfig(**FAMJAX.serialize(config), **ends))
    model.encode(torch.ones((1, 32), dtype=torch.long))
    with pytest.raises(ValueError, match="33 tokens, more than the 32 positions"):
        model.encode(torch.ones((1, 33), dtype=torch.long))


def mask(lengths: np.ndarray, count: int) -> torch.Tensor:
    return torch.tensor(np.arange(count) < lengths[:, None]).long()


def source(padded_left: bool = False) -> dict[str, torch.Tensor]:
    ids, seen = torch.tensor(SOURCE), mask(SOURCE_LENGTHS, SOURCE.shape[1])
    if padded_left:
        # rotary positions are relative
        ids[1], seen[1] = ids[1].roll(3), seen[1].roll(3)
    return {"input_ids": ids, "attention_mask": seen}


def assert_close(theirs: torch.Tensor, ours: np.ndarray) -> None:
    for row, count in enumerate(TARGET_LENGTHS):
        apart = np.abs(theirs[row, :count].numpy() - ours[row, :count]).max()
        assert apart < 1e-4 * (ours.max() - ours.min())


# combinations of what the others have
COMBINED = ("own embedding", "pattern", "vaswani", "rfa", "linear, families")
COMBINED += ("feedback, linear cross", "feedback, sinusoids")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long) if n in COMBINED else n for n in MODELS],
)
@torch.no_grad()
def test_logits_equal_famjax(name: str) -> None:
    ours, model = famjax_and_pytorch(name)
    targets = torch.tensor(TARGET)
    seen = mask(TARGET_LENGTHS, TARGET.shape[1])
    for left in (False, True):
        given = source(left) | {"decoder_input_ids": targets, "decoder_attention_mask": seen}
        assert_close(model(**given).logits, ours)
    # a source that is not padded changes nothing of the one that is
    alone = model(input_ids=torch.tensor(SOURCE[:1]), decoder_input_ids=targets[:1])
    assert np.abs(alone.logits[0].numpy() - ours[0]).max() < 1e-4 * (ours.max() - ours.min())


@pytest.mark.parametrize("name", ["full", "fam", "linear", "feedback"])
@torch.no_grad()
def test_a_state_goes_on_with_its_source(name: str) -> None:
    _, model = famjax_and_pytorch(name)
    targets = torch.tensor(TARGET)
    whole = model(**source(), decoder_input_ids=targets).logits
    first = model(**source(), decoder_input_ids=targets[:, :5])
    rest = model(decoder_input_ids=targets[:, 5:], state=first.state)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole)


@pytest.mark.parametrize("name", ["own embedding", "fam", "delta", "linear", "feedback", "n-grams"])
@torch.no_grad()
def test_generate_is_greedy_and_searches(name: str) -> None:
    _, model = famjax_and_pytorch(name)
    written = torch.full((2, 1), START)
    for _ in range(9):
        logits = model(**source(), decoder_input_ids=written).logits
        written = torch.cat([written, logits[:, -1].argmax(-1, keepdim=True)], 1)
    exact = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    assert model.generate(**source(), **exact, eos_token_id=None).tolist() == written.tolist()
    # beams follow their hypotheses
    beams = {"num_beams": 3, "eos_token_id": None, "return_dict_in_generate": True}
    best = model.generate(**source(), **exact, **beams, output_scores=True)
    ids = best.sequences
    logits = model(**source(), decoder_input_ids=ids[:, :-1]).logits.log_softmax(-1)
    total = logits.gather(-1, ids[:, 1:, None])[..., 0].sum(-1)
    torch.testing.assert_close(best.sequences_scores, total / 9)
    greedy = model(**source(), decoder_input_ids=written[:, :-1]).logits.log_softmax(-1)
    assert (total >= greedy.gather(-1, written[:, 1:, None])[..., 0].sum(-1) - 1e-5).all()


@torch.no_grad()
def test_the_loss_is_of_the_labels() -> None:
    _, model = famjax_and_pytorch("full")
    labels = torch.tensor(TARGET)
    labels[1, 9:] = -100
    output = model(**source(), labels=labels)
    inputs = torch.cat([torch.full((2, 1), START), labels[:, :-1].clamp_min(0)], 1)
    logits = model(**source(), decoder_input_ids=inputs).logits.log_softmax(-1)
    nats = -logits.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    torch.testing.assert_close(output.loss, nats[labels >= 0].mean())


@torch.no_grad()
def test_padding_of_targets_has_no_loss() -> None:
    _, model = famjax_and_pytorch("full")
    labels, seen = torch.tensor(TARGET), mask(TARGET_LENGTHS, TARGET.shape[1])
    ignored = model(**source(), labels=labels.masked_fill(seen == 0, -100)).loss
    output = model(**source(), labels=labels, decoder_attention_mask=seen)
    torch.testing.assert_close(output.loss, ignored)


@pytest.mark.parametrize("name", ["full", "fam", "linear", "feedback, linear cross"])
@torch.no_grad()
def test_generate_continues_padded_targets(name: str) -> None:
    _, model = famjax_and_pytorch(name)
    begun = torch.tensor([[START, 7, 8], [0, START, 9]])
    written = model.generate(
        **source(),
        decoder_input_ids=begun,
        decoder_attention_mask=(begun > 0).long(),
        max_new_tokens=4,
        min_new_tokens=4,
        eos_token_id=None,
    )
    one = {key: value[1:] for key, value in source().items()}
    alone = model.generate(
        **one,
        decoder_input_ids=begun[1:, 1:],
        max_new_tokens=4,
        min_new_tokens=4,
        eos_token_id=None,
    )
    assert written[1, 1:].tolist() == alone[0].tolist()


@torch.no_grad()
def test_hidden_states_of_generated_tokens() -> None:
    _, model = famjax_and_pytorch("full")
    kept = {"return_dict_in_generate": True, "output_hidden_states": True}
    found = model.generate(**source(), **kept, max_new_tokens=2, min_new_tokens=2)
    assert len(found.decoder_hidden_states) == 2
    assert len(found.decoder_hidden_states[0]) == 3  # the embedding, and two layers


@pytest.mark.parametrize("name", ["full", "own embedding"])
@torch.no_grad()
def test_new_ids_are_encoded_after_resizing(name: str) -> None:
    model = copy.deepcopy(famjax_and_pytorch(name)[1])
    before = model(**source(), decoder_input_ids=torch.tensor(TARGET)).logits
    model.resize_token_embeddings(23, mean_resizing=False)
    after = model(**source(), decoder_input_ids=torch.tensor(TARGET)).logits
    torch.testing.assert_close(after[..., :19], before)
    new = torch.tensor([[22, 4]])
    assert model(input_ids=new, decoder_input_ids=new).logits.shape == (1, 2, 23)


def test_gradients_of_recomputed_layers_are_equal() -> None:
    model = copy.deepcopy(famjax_and_pytorch("fam")[1]).train()
    labels, calls = torch.tensor(TARGET), []
    model.encoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        calls.clear()
        model(**source(), labels=labels).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    kept = gradients()
    assert len(calls) == 1
    model.gradient_checkpointing_enable()
    recomputed = gradients()
    assert len(calls) == 2
    assert recomputed.keys() == kept.keys()
    assert any(name.startswith("encoder.") for name in kept)
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient)


def test_missing_inputs_are_errors() -> None:
    _, model = famjax_and_pytorch("full")
    state = model(**source(), decoder_input_ids=torch.tensor(TARGET)).state
    with pytest.raises(ValueError, match="pass the source, and no state"):
        model.generate(**source(), state=state)
    with pytest.raises(ValueError, match="give input_ids of the sources, or encoder_outputs"):
        model.generate(decoder_input_ids=torch.tensor(TARGET))
    with pytest.raises(ValueError, match="labels need all logits"):
        model(**source(), labels=torch.tensor(TARGET), logits_to_keep=1)
    with pytest.raises(ValueError, match="give input_ids of the sources"):
        model(decoder_input_ids=torch.tensor(TARGET))
    with pytest.raises(ValueError, match="give decoder_input_ids, or labels"):
        model(**source())
