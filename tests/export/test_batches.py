"""The exported PyTorch code in use: padded batches, generate, resizing, training."""

from functools import cache

import pytest
import torch

from famjax.export.pytorch.configuration_famjax import FamjaxConfig, FamjaxFeedbackConfig
from famjax.export.pytorch.modeling_famjax import FamjaxForCausalLM
from famjax.export.pytorch.modeling_famjax_feedback import FamjaxFeedbackForCausalLM

VOCAB, PAD = 29, 28
LENGTHS = (23, 9, 14, 4, 1)
MODELS = {
    "full": {"mixer": "full"},
    "swa": {"mixer": "swa", "window": 6},
    "swa-in-block": {"mixer": "swa", "window": 3, "tie_word_embeddings": False},
    "bswa": {"mixer": "bswa", "memory_segments": 2},
    "conv": {"mixer": "fam", "memory_segments": 0, "short_conv": 6},
    "ngrams": {"mixer": "bswa", "memory_segments": 0, "ngram_memory": 2, "ngram_slots": 16},
    "bswa_sg": {"mixer": "bswa_sg", "arch": {"positions": "learned"}, "capacity": 10},
    "fam": {"mixer": "fam", "memory_segments": 1, "fam_previous": 3},
    "fam-0": {"mixer": "fam", "memory_segments": 0, "tie_word_embeddings": False},
    "fam-static": {"mixer": "fam", "memory_segments": 0, "fam_update": "static"},
    "mixed": {"mixer": "full,fam,swa", "layers": 3, "norm": "layernorm"},
    "linear": {"mixer": "linear", "linear": {"map": "learned_elu", "features": 3, "rope": True}},
    "feedback": {
        "stack": "feedback",
        "feedback": {
            "span": 6,
            "composition": "all",
            "shared_kv": True,
            "positions": "learned",
            "adaptive_span": False,
            "span_ramp": 4,
        },
    },
}
every = pytest.mark.parametrize("name", MODELS)


@cache
def model(name):
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "block_len": 4, "fam_len": 2, "capacity": 64, "kv_heads": 1}
    is_feedback = name == "feedback"
    config = FamjaxFeedbackConfig if is_feedback else FamjaxConfig
    kind = FamjaxFeedbackForCausalLM if is_feedback else FamjaxForCausalLM
    found = kind(config(**shape | MODELS[name])).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return found


def test_configs_without_what_their_stack_needs_are_errors():
    with pytest.raises(ValueError, match="mixer=linear: the config needs linear"):
        FamjaxForCausalLM(FamjaxConfig(mixer="linear"))
    with pytest.raises(ValueError, match="use the classes of modeling_famjax_feedback"):
        FamjaxForCausalLM(FamjaxConfig(**MODELS["feedback"]))
    with pytest.raises(ValueError, match="needs stack=feedback or transformer, and feedback"):
        FamjaxFeedbackForCausalLM(FamjaxFeedbackConfig(stack="feedback"))


def test_new_feature_maps_can_learn():
    linear = {"map": "relu", "features": 3, "rope": True}
    new = FamjaxForCausalLM(FamjaxConfig(mixer="linear", linear=linear))
    ids = torch.arange(24)[None]
    new(ids, labels=ids).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in new.parameters())


def texts(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(PAD, (1, length), generator=generator) for length in lengths]


def pad_rows(rows, side="left"):
    """Return tokens [b t] and the mask of tokens that are not padding."""
    width = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        n = row.shape[1]
        at = slice(width - n, None) if side == "left" else slice(0, n)
        ids[i, at], mask[i, at] = row[0], 1
    return ids, mask


def close(a, b):
    assert a.shape == b.shape
    assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@every
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_padded_row_equals_the_row_alone_and_continues_equally(name, side):
    rows, more = texts(), texts([10] * len(LENGTHS), seed=2)
    ids, mask = pad_rows(rows, side)
    output = model(name)(ids, attention_mask=mask)
    following = model(name)(torch.cat(more), state=output.state)
    assert output.logits.isfinite().all()
    for i, row in enumerate(rows):
        alone = model(name)(row)
        close(output.logits[i][mask[i].bool()], alone.logits[0])
        close(following.logits[i], model(name)(more[i], state=alone.state).logits[0])


@every
@torch.no_grad()
def test_rows_may_be_padded_within_a_stream(name):
    """Pieces whose rows start at different positions, and rows that a piece does not change."""
    before, rows = texts([6] * 5, seed=3), texts((3, 9, 0, 4, 1))
    ids, mask = pad_rows(rows, "right")
    state = model(name)(torch.cat(before)).state
    whole = torch.cat([torch.ones(5, 6), mask], 1)  # as in generate
    output = model(name)(ids, attention_mask=whole, state=state)
    last = model(name)(ids[:, :2], state=output.state).logits
    for i in range(5):
        text = torch.cat([before[i], rows[i]], 1)
        alone = model(name)(text)
        close(output.logits[i][mask[i].bool()], alone.logits[0, 6:])
        close(last[i], model(name)(ids[i : i + 1, :2], state=alone.state).logits[0])


@every
@torch.no_grad()
def test_last_logits_and_hidden_states_of_padded_rows(name):
    ids, mask = pad_rows(texts())
    whole = model(name)(ids, attention_mask=mask, output_hidden_states=True)
    some = model(name)(ids, attention_mask=mask, logits_to_keep=3)
    close(some.logits[:3], whole.logits[:3, -3:])
    close(some.logits[:, -1], whole.logits[:, -1])
    chosen = torch.tensor([22, 21])
    close(
        model(name)(ids, attention_mask=mask, logits_to_keep=chosen).logits[:3],
        whole.logits[:3][:, chosen],
    )
    assert len(whole.hidden_states) == model(name).config.layers + 1
    assert torch.equal(model(name).logits(whole.hidden_states[-1]), whole.logits)
    embedded = model(name).embed(ids) * model(name).embed_scale
    config = model(name).config
    if config.arch["positions"] == "none" and not (config.ngram_memory or config.short_conv):
        assert torch.equal(whole.hidden_states[0][mask.bool()], embedded[mask.bool()])
    assert some.hidden_states is None


# generate

GREEDY = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None, "pad_token_id": PAD}


@every
def test_a_padded_batch_generates_the_same_as_separate_rows(name):
    ids, mask = pad_rows(texts())
    made = model(name).generate(ids, attention_mask=mask, **GREEDY)
    for row, text in zip(made, texts(), strict=True):
        alone = model(name).generate(text, **GREEDY)
        assert torch.equal(row[-9:], alone[0, -9:])
    again = model(name).generate(ids, attention_mask=mask, use_cache=False, **GREEDY)
    assert torch.equal(made, again)


@every
def test_beam_search_equals_recomputation_of_all_tokens(name):
    ids, mask = pad_rows(texts())
    beams = GREEDY | {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True}
    beams |= {"output_scores": True}
    made = model(name).generate(ids, attention_mask=mask, **beams)
    again = model(name).generate(ids, attention_mask=mask, use_cache=False, **beams)
    assert torch.equal(made.sequences, again.sequences)
    close(made.sequences_scores, again.sequences_scores)
    # a beam was replaced by a continuation of another, or there was nothing to reorder
    assert (made.beam_indices % 3 != 0).any()
    for i, text in enumerate(texts()):
        alone = model(name).generate(text, **beams)
        assert torch.equal(made.sequences[2 * i : 2 * i + 2, -9:], alone.sequences[:, -9:])


@pytest.mark.parametrize("name", ["fam", "mixed"])
def test_samples_and_beams_continue_from_a_state(name):
    text = texts([17])[0]
    state = model(name)(text[:, :11]).state
    for more in ({"num_beams": 2}, {"do_sample": True, "num_return_sequences": 3}):
        for cached in (True, False):
            torch.manual_seed(4)
            whole = model(name).generate(text, **GREEDY | more, use_cache=cached)
            torch.manual_seed(4)
            given = GREEDY | more | {"use_cache": cached, "state": state}
            made = model(name).generate(text[:, 11:], **given)
            assert torch.equal(made, whole[:, 11:])


def test_sampled_sequences_differ():
    text = texts([17])[0]
    torch.manual_seed(0)
    given = GREEDY | {"do_sample": True, "num_return_sequences": 4}
    made = model("fam").generate(text, **given)
    assert len({tuple(row) for row in made.tolist()}) == 4
    for row in made:
        logits = model("fam")(row[None, :-1]).logits.log_softmax(-1)
        assert logits.isfinite().all()


# training


@pytest.mark.parametrize("name", ["full", "fam"])
def test_loss_of_padded_rows(name):
    rows = texts()
    ids, mask = pad_rows(rows)
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 5:9] = -100
    total, count = 0.0, 0
    for i, row in enumerate(rows):
        targets = labels[i, -row.shape[1] :][1:]
        kept = targets != -100
        scores = model(name)(row).logits[0, :-1].log_softmax(-1)[kept]
        total = total - scores.gather(1, targets[kept][:, None]).sum()
        count += int(kept.sum())
    found = model(name)(ids, attention_mask=mask, labels=labels).loss
    assert abs(found - total / count) < 1e-5
    found = model(name)(ids, attention_mask=mask, labels=labels, num_items_in_batch=7).loss
    assert abs(found - total / 7) < 1e-4


@pytest.mark.parametrize("name", ["bswa_sg", "fam", "mixed"])
def test_gradients_of_padded_rows_and_checkpointed_layers(name):
    rows = texts()
    ids, mask = pad_rows(rows)
    own = model(name)

    def gradients(*losses):
        own.zero_grad()
        for loss in losses:
            loss().backward()
        return [p.grad.clone() for p in own.parameters() if p.grad is not None]

    def loss(ids, mask=None):
        return own(ids, attention_mask=mask, labels=ids, num_items_in_batch=1).loss

    alone = gradients(*(lambda row=row: loss(row) for row in rows if row.shape[1] > 1))
    together = gradients(lambda: loss(ids, mask))
    own.gradient_checkpointing_enable()
    own.train()
    again = gradients(lambda: loss(ids, mask))
    own.eval()
    own.gradient_checkpointing_disable()
    for a, b, c in zip(alone, together, again, strict=True):
        close_to_scale(b, a)
        close_to_scale(c, a)


def close_to_scale(a, b):
    """Small elements of a gradient are sums of large ones, so rounding is relative to those."""
    assert (a - b).abs().max() <= 2e-5 * b.abs().max()


# embeddings


@pytest.mark.parametrize("name", ["fam", "fam-0"])
@pytest.mark.parametrize("size", [VOCAB + 5, VOCAB - 4])
@torch.no_grad()
def test_embeddings_can_be_resized(name, size, tmp_path):
    tied = model(name).config.tie_word_embeddings
    model(name).save_pretrained(tmp_path / "before")
    changed = FamjaxForCausalLM.from_pretrained(tmp_path / "before").eval()
    text = texts([13])[0] % (VOCAB - 4)
    expected = changed(text).logits
    close(expected, model(name)(text).logits)
    changed.resize_token_embeddings(size, mean_resizing=False)
    assert changed.config.vocab_size == size
    assert changed.get_input_embeddings().weight.shape[0] == size
    assert changed.get_output_embeddings().weight.shape[0] == size
    shared = changed.get_output_embeddings().weight is changed.get_input_embeddings().weight
    assert shared == tied
    found = changed(text).logits
    assert torch.equal(found[..., : min(size, VOCAB)], expected[..., : min(size, VOCAB)])
    changed.save_pretrained(tmp_path / "after")
    again = FamjaxForCausalLM.from_pretrained(tmp_path / "after")
    assert torch.equal(again(text).logits, found)
    assert again.get_output_embeddings().weight.shape[0] == size
    both = (again.get_output_embeddings().weight, again.get_input_embeddings().weight)
    assert (both[0] is both[1]) == tied


# unsupported use


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1]])}, "padding within a row is not supported"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"attention_mask: shape \[1, 1, 4, 4\]"),
        ({"attention_mask": torch.ones(1, 6)}, "pass the state of the previous tokens"),
        ({"attention_mask": torch.zeros(1, 4)}, "every token is padding"),
        ({"inputs_embeds": torch.zeros(1, 4, 16)}, "inputs_embeds is not supported"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        ({"past_key_values": object()}, "past_key_values is not supported: pass state"),
        ({"cache": object()}, "cache is not supported: pass state"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "put each packed text in its own row"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4])}, "cu_seq_lens_q is not supported"),
        ({"labels": torch.ones(1, 4, dtype=torch.long), "logits_to_keep": 1}, "need all logits"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "have no token"),
    ],
)
def test_unsupported_arguments_are_one_line_errors(given, said):
    ids = torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(ValueError, match=said) as caught:
        model("fam")(**{"input_ids": ids} | given)
    assert "\n" not in str(caught.value)


def test_redundant_arguments_are_accepted():
    ids, mask = pad_rows(texts())
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    more = {"position_ids": positions, "token_type_ids": mask, "use_cache": False}
    output = model("fam")(ids, attention_mask=mask, output_attentions=False, **more)
    assert output.state is None
    assert torch.equal(output.logits, model("fam")(ids, attention_mask=mask).logits)


def test_states_of_another_batch_are_rejected():
    ids, mask = pad_rows(texts())
    state = model("fam")(ids, attention_mask=mask).state
    with pytest.raises(ValueError, match="the state has 5 rows and input_ids have 1"):
        model("fam")(ids[:1], state=state)
    ids, mask = pad_rows(texts(), "right")
    with pytest.raises(ValueError, match="padding_side='left'"):
        model("fam").generate(ids, attention_mask=mask, **GREEDY)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model("fam").generate(ids[:1], prompt_lookup_num_tokens=2, **GREEDY)
