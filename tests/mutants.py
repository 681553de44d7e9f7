"""Mutation testing: deliberate bugs, each of which the listed tests must catch.

    python tests/mutants.py            # `make test-mutants`: all of them, in a copy of the sources
    python tests/mutants.py fam lora   # those with one of these words in their names

A bug that survives gives exit status 1. `tests/test_mutants.py` checks quickly that each still
applies to the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SCAN, DEFERRED = "tests/ops/test_token_scan.py", "tests/ops/test_deferred_scan.py"
BEAM = "tests/eval/test_beam.py"
SEQ2SEQ, PAIRS = "tests/models/test_seq2seq.py", "tests/data/test_pairs.py"
ENCODER_DROPOUT = "tests/models/test_encoder_dropout.py"
STREAM, LANES = "tests/contracts/test_stream.py", "tests/contracts/test_lanes.py"


class Mutant(NamedTuple):
    """A deliberate bug.

    Attributes:
      name: description.
      path: file in famjax/.
      good, bad: text that occurs once, and its replacement.
      tests: arguments of pytest; at least one test must fail.
    """

    name: str
    path: str
    good: str
    bad: str
    tests: str


MUTANTS = (
    Mutant(
        "attention: scores are not divided by sqrt(e)",
        "ops/attention.py",
        "return x * e**-0.5",
        "return x",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "rotary: pairs are rotated the other way",
        "ops/rotary.py",
        "(x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest)",
        "(x1 * cos + x2 * sin, x2 * cos - x1 * sin, rest)",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "rotary: far positions lose their highest digits",
        "ops/rotary.py",
        "_DIGITS, _BITS = 8, 4",
        "_DIGITS, _BITS = 4, 4",
        "tests/contracts/test_numerics.py -k precision",
    ),
    Mutant(
        "window: keys of memory segments stay in their own frame",
        "mixers/window.py",
        "sequence_parallel.halo_exchange(old_k, k), shift)",
        "sequence_parallel.halo_exchange(old_k, k), 0 * shift)",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "window: a block sees segments of the document before",
        "mixers/window.py",
        "blocks.blocks_since_reset(state.blocks)[..., None] >= distance",
        "blocks.blocks_since_reset(state.blocks)[..., None] >= 0 * distance",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "rmt: memory tokens attend to each other causally",
        "stacks/rmt.py",
        "mutual=True",
        "mutual=False",
        f"{STREAM} -k rmt",
    ),
    Mutant(
        "rmt: an incomplete segment writes its memory",
        "stacks/segments.py",
        "y, state = self._process(x, state, valid, valid.all(-1))",
        "y, state = self._process(x, state, valid, valid.any(-1))",
        f"{LANES} -k rmt",
    ),
    Mutant(
        "autocompressor: a segment forgets the summaries before the last",
        "stacks/autocompressor.py",
        "jnp.minimum(read, self.max_read - self.memory_len)",
        "jnp.zeros_like(read)",
        f"{STREAM} -k autocompressor",
    ),
    Mutant(
        "smeared keys: a document's first key is smeared with the last of the one before",
        "mixers/window.py",
        "before = jnp.where(blocks.reset[..., None, None], 0, before)",
        "pass",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "ngrams: a document begins with the table of the one before",
        "ops/ngrams.py",
        "return jnp.where(is_new, 0, hashes), jnp.where(is_new, ABSENT, followers)",
        "return jnp.where(is_new, 0, hashes), followers",
        "tests/ops/test_ngrams.py",
    ),
    Mutant(
        "ngrams: a context that was overwritten in the chunk is still found",
        "ops/ngrams.py",
        "written[..., None, :] == slot[..., None]",
        "chunk.before[..., None, :] == chunk.hashes[..., None]",
        "tests/ops/test_ngrams.py",
    ),
    Mutant(
        "ngrams: contexts reach into the document before",
        "ops/ngrams.py",
        "exists.append(is_known & (last(documents, k) == last(documents, 1)))",
        "exists.append(is_known)",
        "tests/ops/test_ngrams.py",
    ),
    Mutant(
        "ngrams: the first of several writes to a slot counts",
        "ops/ngrams.py",
        "(index > index[:, None])\n    is_last",
        "(index < index[:, None])\n    is_last",
        "tests/ops/test_ngrams.py",
    ),
    Mutant(
        "ngrams: what is recalled is not in the embedding's scale",
        "layers/ngram_memory.py",
        "embedded = jax.lax.stop_gradient(embedded)",
        "embedded = jax.lax.stop_gradient(embedded) / 2",
        f"{STREAM} -k ngrams",
    ),
    Mutant(
        "delta: keys in memory have positions",
        "mixers/delta.py",
        "return select_heads(self.window.unrotate(k)), select_heads(v)",
        "return select_heads(k), select_heads(v)",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "delta: a block reads the memory that it writes",
        "mixers/delta.py",
        "return write(s, memory.make_updates(writes)), memory.recall(q, s)",
        "return (s := write(s, memory.make_updates(writes))), memory.recall(q, s)",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "delta: S is read with rotated queries",
        "mixers/delta.py",
        "memory, every_q = self.delta_memory, inputs.unrotated_q",
        "memory, every_q = self.delta_memory, inputs.q",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "delta: the first key heads have the memory, not the last",
        "layers/delta_memory.py",
        "return k[..., -self.rate_bias.shape[0] :, :]",
        "return k[..., : self.rate_bias.shape[0], :]",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "delta: an offset reaches S",
        "mixers/delta.py",
        "writes = self.make_writes(inputs.k, inputs.v)",
        "writes = self.make_writes(self.qkv.shift(inputs.k, ctx.offset), inputs.v)",
        "tests/contracts/test_numerics.py -k offsets",
    ),
    Mutant(
        "delta: chunks are written in reverse order",
        "layers/delta_memory.py",
        "jax.lax.scan(body, s, chunk_major, unroll=_UNROLLED)",
        "jax.lax.scan(body, s, chunk_major, unroll=_UNROLLED, reverse=True)",
        "tests/mixers/test_delta.py",
    ),
    Mutant(
        "delta: the halves of an inverse are not joined",
        "ops/delta_rule.py",
        "below = -_product(_product(last, a[..., n:, :n]), first)",
        "below = -a[..., n:, :n]",
        "tests/ops/test_delta_rule.py",
    ),
    Mutant(
        "attention kernel: earlier tiles keep their weight",
        "ops/attention_kernel.py",
        "out = out * shrink[:, None] + _dot(",
        "out = out + _dot(",
        "tests/ops/test_attention_kernel.py",
    ),
    Mutant(
        "attention kernel: no delta in the gradient of the keys",
        "ops/attention_kernel.py",
        "d_x = p * (_dot(d_out, v, 1, 1) - delta[:, None])",
        "d_x = p * _dot(d_out, v, 1, 1)",
        "tests/ops/test_attention_kernel.py",
    ),
    Mutant(
        "delta: half of the inverse's derivative",
        "ops/delta_rule.py",
        "inverse, -_product(_product(inverse, tangents[0]), inverse)",
        "inverse, -0.5 * _product(_product(inverse, tangents[0]), inverse)",
        "tests/ops/test_delta_rule.py",
    ),
    Mutant(
        "delta: rates do not close",
        "layers/delta_memory.py",
        "jax.nn.relu(jax.nn.sigmoid(logits) - _RATE_THRESHOLD) / (1 - _RATE_THRESHOLD)",
        "jax.nn.sigmoid(logits)",
        "tests/mixers/test_delta.py",
    ),
    Mutant(
        "fam: the first residual is the prompt",
        "mixers/fam.py",
        "residual = select_rows(updates > 0, fam, 0)",
        "residual = fam",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "fam: queries and keys one position late",
        "mixers/fam.py",
        "positions = jnp.arange(-f, 0)",
        "positions = jnp.arange(-f, 0) + 1",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "fam: fractional positions begin at the block's last token",
        "mixers/fam.py",
        "positions = jnp.arange(1, f + 1) / (f + 1) - 1",
        "positions = jnp.arange(f) / (f + 1) - 1",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "fam: a position of zero is known for p blocks only",
        "mixers/fam.py",
        'at_zero = self.position == "zero"',
        "at_zero = False",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "fam: a document in a call begins with the last one's memory instead of the prefix",
        "mixers/fam.py",
        "return prompt if self.prefix is None else self.prefix[...]",
        "return prompt",
        f"{LANES} -k fam-zero",
    ),
    Mutant(
        "fam: the gated update adds the residual",
        "mixers/fam.py",
        "self.memory_gate(attended) * (new - residual - fam)",
        "self.memory_gate(attended) * (new - fam)",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "fam: a static query is that of the last memory",
        "mixers/fam.py",
        "projected = (self.project(summary, updates)[0], *projected[1:])",
        "pass",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "fam: static summary tokens have no residual",
        "mixers/fam.py",
        "self.attend_block(summary, projected, k, v, key, offset), summary, key)",
        "self.attend_block(0 * summary, projected, k, v, key, offset), summary, key)",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "fam: static summary tokens of a call are those of an earlier prompt",
        "stacks/residual.py",
        "encode_prompt = self.reads_prompt or ctx.reset is not None",
        "encode_prompt = ctx.reset is not None",
        f"{STREAM} -k static",
    ),
    Mutant(
        "fam losses: queries of FAM do not count",
        "mixers/fam_measures.py",
        "queries = q.shape[2] + fam_q.shape[2]",
        "queries = q.shape[2]",
        "tests/contracts/test_memory_losses.py",
    ),
    Mutant(
        "fam losses: a block is rebuilt from the memory before it",
        "mixers/fam_measures.py",
        "mixer.project(fams.after, fams.updates + 1)",
        "mixer.project(fams.before, fams.updates + 1)",
        "tests/contracts/test_memory_losses.py",
    ),
    Mutant(
        "fam losses: a block is drawn to what its memory says",
        "mixers/fam_measures.py",
        "rebuilt - jax.lax.stop_gradient(y)",
        "rebuilt - y",
        "tests/contracts/test_memory_losses.py",
    ),
    Mutant(
        "fam losses: the memory is in the frame of the next block",
        "mixers/fam_measures.py",
        "after_k = mixer.qkv.rotate(after_k, jnp.full(mixer.fam_len, mixer.block_len))",
        "pass",
        "tests/contracts/test_memory_losses.py",
    ),
    Mutant(
        "block_recurrent: states read keys with positions",
        "mixers/block_recurrent.py",
        "by_block = (self.window.unrotate(inputs.k), inputs.v, reset, full)",
        "by_block = (inputs.k, inputs.v, reset, full)",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "block_recurrent: states have no ids",
        "layers/recurrent_cell.py",
        "(self.norm(states, param_dtype()) + self.ids[...])",
        "(self.norm(states, param_dtype()))",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "block_recurrent: the gate forgets what it should keep",
        "layers/recurrent_cell.py",
        "return g * states + (1 - g) * z",
        "return (1 - g) * states + g * z",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "block_recurrent: a document in a call begins with the last one's states",
        "mixers/block_recurrent.py",
        "states = select_rows(reset, initial, states)",
        "pass",
        f"{LANES} -k block_recurrent",
    ),
    Mutant(
        "blocks: a call resets the memory that a document is passed",
        "mixers/blocks.py",
        "return blocks.reset & ~ctx.pass_state[:, ::block_len]",
        "return blocks.reset",
        f"{LANES} -k pass_state",
    ),
    Mutant(
        "blocks: a step resets the memory that a document is passed",
        "mixers/blocks.py",
        "select_state(ctx.pass_state[:, 0], mixer.pass_state(fresh, state), fresh)",
        "fresh",
        f"{LANES} -k pass_state",
    ),
    Mutant(
        "blocks: extra keys come after the block's own",
        "mixers/blocks.py",
        "for a in (segments, extra, block)",
        "for a in (segments, block, extra)",
        "tests/eval/test_attention_maps.py",
    ),
    Mutant(
        "fm: memory segments are of inputs",
        "mixers/fm.py",
        "_, out_k, out_v = self.qkv.project(y)",
        "_, out_k, out_v = self.qkv.project(x)",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "fm: memory segments are of outputs before the feed-forward",
        "mixers/fm.py",
        "_, out_k, out_v = self.qkv.project(y)",
        "_, out_k, out_v = self.qkv.project(self.qkv.output_projection(attended, x, key))",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "fm: the feed-forward is applied twice",
        "stacks/residual.py",
        "return a if self.applies_mlp else self.mlp(a, x, key)",
        "return self.mlp(a, x, key)",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "fm: the inputs of a full block stay",
        "mixers/fm.py",
        "select_rows(full, 0, a[:, m])",
        "a[:, m]",
        f"{STREAM} -k fm",
    ),
    Mutant(
        "fm: all blocks have the same dropout",
        "mixers/fm.py",
        "split_key(ctx.key, FEEDBACK, n))",
        "split_key(ctx.key, FEEDBACK, 1).repeat(n, 0))",
        "tests/mixers/test_fm.py -k dropout",
    ),
    Mutant(
        "fam: a gate never closes",
        "layers/memory_gate.py",
        "jax.nn.sigmoid(logits)[..., None] - c) / (1 - c)",
        "jax.nn.sigmoid(logits)[..., None])",
        "tests/layers/test_memory_gate.py",
    ),
    Mutant(
        "memory trace: the gradient of the block itself counts as reach",
        "eval/memory_trace.py",
        "*(a[first:] for a in blocks)))[::-1]",
        "*(a[first:] for a in blocks)))",
        "tests/eval/test_memory_trace.py",
    ),
    Mutant(
        "memory trace: the loss of the answer is that of the whole block",
        "eval/memory_trace.py",
        "weights = jnp.where(answer.any(), answer, 1)",
        "weights = jnp.ones_like(answer, int)",
        "tests/eval/test_memory_trace.py",
    ),
    Mutant(
        "n-gram trace: the shortest context counts, not the longest",
        "eval/ngram_trace.py",
        "o - 1 - found[:, ::-1].argmax(1)",
        "found.argmax(1)",
        "tests/eval/test_ngram_trace.py",
    ),
    Mutant(
        "FLOPs: sources have as many tokens as targets",
        "train/flops.py",
        "return SourceTokens(length / data.length, length if computed else 0)",
        "return SourceTokens(1.0, length if computed else 0)",
        "tests/train/test_flops.py",
    ),
    Mutant(
        "pairs: a source is cut a word too late",
        "data/pairs.py",
        "text.split(None, words) if words else []",
        "text.split(None, words + 1) if words else []",
        "tests/data/test_pairs.py",
    ),
    Mutant(
        "reproduce: what a base continued is not counted",
        "reproduce/cell.py",
        "found[key] + found.get(name, 0)",
        "found[key]",
        "tests/reproduce/test_reproduce.py -k continued_counts",
    ),
    Mutant(
        "export: the threshold of gates is always the default",
        "export/pytorch/attention_famjax.py",
        "self.threshold = config.fam_gate_threshold",
        "self.threshold = 0.01",
        "tests/mixers/test_gated_memory.py -k have_the_threshold",
    ),
    Mutant(
        "reproduce: a base at the paper's size costs nothing",
        "reproduce/cost.py",
        "return [base, *(make(v)",
        "return [*(make(v)",
        "tests/reproduce/test_cost.py",
    ),
    Mutant(
        "fam: a document starts with the window of the one before",
        "mixers/fam.py",
        "return saved._replace(window=fresh.window, summary=fresh.summary)",
        "return saved",
        "tests/train/test_step.py",
    ),
    Mutant(
        "token_scan: entries before a block have no gradient",
        "ops/token_scan.py",
        "lambda a, new: _add_entries(a, new, index), d_history, d_past",
        "lambda a, new: a, d_history, d_past",
        SCAN,
    ),
    Mutant(
        "token_scan: only the first block has a weight gradient",
        "ops/token_scan.py",
        "d_weights = [a + b for a, b in zip(d_weights, d_weights_i, strict=True)]",
        "d_weights = d_weights_i",
        SCAN,
    ),
    Mutant(
        "token_scan: a token's own entries have no gradient",
        "ops/token_scan.py",
        "vjp((d_y, d_entries))",
        "vjp((d_y, jax.tree.map(jnp.zeros_like, d_entries)))",
        SCAN,
    ),
    Mutant(
        "einsum_tape: weight gradients are transposed",
        "ops/einsum_tape.py",
        "grad = grad if fan_in <= fan_out else grad.T",
        "grad = grad.T if fan_in <= fan_out else grad",
        DEFERRED,
    ),
    Mutant(
        "deferred_scan: the carry's gradient ends at each iteration",
        "ops/deferred_scan.py",
        "vjp((d_carry, d_y))",
        "vjp((jax.tree.map(jnp.zeros_like, d_carry), d_y))",
        DEFERRED,
    ),
    Mutant(
        "linear: sums are not carried within a document",
        "ops/linear_attention.py",
        "return Sums(s + _narrow_einsum",
        "return Sums(_narrow_einsum",
        "tests/ops/test_linear_attention.py tests/contracts/test_sharded.py",
    ),
    Mutant(
        "linear: softmax without its denominator",
        "ops/linear_attention.py",
        "return num / jnp.maximum(den, EPS)[..., None]",
        "return num",
        f"{STREAM} -k transcription",
    ),
    Mutant(
        "adaptive span: the mask fades too early",
        "ops/relative.py",
        "(ramp + span[:, None] - distance) / ramp",
        "(span[:, None] - distance) / ramp",
        "tests/stacks/test_feedback.py",
    ),
    Mutant(
        "lora: alpha is multiplied by the rank",
        "layers/lora.py",
        "return config.alpha / (config.rank**0.5 if config.rs else config.rank)",
        "return config.alpha * (config.rank**0.5 if config.rs else config.rank)",
        "tests/train/test_lora.py",
    ),
    Mutant(
        "step: the carried memory has a gradient",
        "train/step.py",
        "return total, (jax.lax.stop_gradient(memory), sums)",
        "return total + sum(a.sum() for a in jax.tree.leaves(memory) if a.dtype == total.dtype), "
        "(memory, sums)",
        "tests/train/test_step.py",
    ),
    Mutant(
        "step: microbatches are averaged, not summed",
        "train/step.py",
        "return jax.tree.map(jnp.add, total, (grads, sums)), memory",
        "return jax.tree.map(lambda a, b: (a + b) / 2, total, (grads, sums)), memory",
        "tests/train/test_step.py",
    ),
    Mutant(
        "objective: a memory is passed at the first step",
        "train/objective.py",
        "jax.random.bernoulli(key, train.rsp * ramp) & (step > 0)",
        "jax.random.bernoulli(key, train.rsp * ramp)",
        "tests/train/test_step.py",
    ),
    Mutant(
        "objective: the loss ignores the weights of tokens",
        "train/objective.py",
        '"loss": nll * weights,',
        '"loss": nll,',
        "tests/train/test_step.py",
    ),
    Mutant(
        "losses: label smoothing is spread over the other words only",
        "ops/losses.py",
        "(select_logit(logits, targets) - logits.mean(-1))",
        "(select_logit(logits, targets) - logits.mean(-1)) * logits.shape[-1] / 257",
        "tests/ops/test_losses.py",
    ),
    Mutant(
        "objective: bits per byte have label smoothing",
        "train/objective.py",
        "return sum_metrics(nll, correct, batch, token_bytes)._replace(loss=loss)",
        "return sum_metrics(smoothed, correct, batch, token_bytes)._replace(loss=loss)",
        "tests/train/test_step.py",
    ),
    Mutant(
        "data: the last token of a document is predicted from nothing",
        "data/lanes.py",
        "count = len(span.tokens) - span.last",
        "count = len(span.tokens)",
        "tests/data/test_lanes.py",
    ),
    Mutant(
        "data: documents start inside a block",
        "data/lanes.py",
        "at += -at % block_len",
        "at += 0",
        "tests/data/test_lanes.py",
    ),
    Mutant(
        "optimizer: no rise of the learning rate",
        "optimizers.py",
        "optax.linear_schedule(0.0, rate, warmup)",
        "optax.linear_schedule(rate, rate, warmup)",
        "tests/test_optimizers.py",
    ),
    Mutant(
        "optimizer: the inverse square root is of the steps since the warm-up",
        "optimizers.py",
        "jnp.sqrt(warmup / (warmup + jnp.maximum(step, 0)))",
        "jnp.sqrt(warmup / (1 + jnp.maximum(step, 0)))",
        "tests/test_optimizers.py",
    ),
    Mutant(
        "resume: the step after a checkpoint is made twice",
        "train/resume.py",
        "session.step = session.saved_step = step",
        "session.step = session.saved_step = step - 1",
        "tests/train/test_old_runs.py",
    ),
    Mutant(
        "beam search: states stay with their beams",
        "eval/beam.py",
        "state = copy_rows(state, axes, (first_rows + search.parents).reshape(-1))",
        "state = state",
        f"{BEAM} -k lists",
    ),
    Mutant(
        "beam search: the stop token is no part of the length",
        "eval/beam.py",
        "_penalty(alpha, ended.lengths[0, 0])",
        "_penalty(alpha, ended.lengths[0, 0] - 1)",
        f"{BEAM} -k lists",
    ),
    Mutant(
        "beam search: hypotheses beyond the first n are finished too",
        "eval/beam.py",
        "counted = ends & (jnp.arange(count) < n)",
        "counted = ends & (jnp.arange(count) < 2 * n)",
        f"{BEAM} -k lists",
    ),
    Mutant(
        "beam search: it ends as if hypotheses got no longer",
        "eval/beam.py",
        "length = jnp.where(alpha > 0, settings.max_tokens, search.length + 1)",
        "length = search.length + 1",
        f"{BEAM} -k overtakes",
    ),
    Mutant(
        "beam search: an n-gram may come twice next to each other",
        "eval/beam.py",
        "same = jnp.arange(windows) + size - 1 < end\n",
        "same = jnp.arange(windows) + size < end\n",
        f"{BEAM} -k twice",
    ),
    Mutant(
        "beam search: a free place is given to a beam that has one",
        "eval/beam.py",
        "unassigned = jnp.argsort(~is_unassigned, 1)",
        "unassigned = jnp.argsort(is_unassigned, 1)",
        f"{BEAM} -k follow",
    ),
    Mutant(
        "encoder: a source attends to the others of its row",
        "stacks/encoder.py",
        "mask = segment[:, :, None] == segment[:, None, :]",
        "mask = jnp.ones((*segment.shape, segment.shape[1]), bool)",
        f"{SEQ2SEQ} -k one_row",
    ),
    Mutant(
        "encoder: LayerDrop keeps the layers that it should leave out",
        "layers/dropout.py",
        "jax.random.bernoulli(jax.random.fold_in(key, LAYER), rate)",
        "jax.random.bernoulli(jax.random.fold_in(key, LAYER), 1 - rate)",
        ENCODER_DROPOUT,
    ),
    Mutant(
        "encoder: all layers have the same dropout",
        "stacks/encoder.py",
        "xs = (params, split_key(key, LAYER, self.count))",
        "xs = (params, None if key is None else jnp.repeat(key[None], self.count))",
        ENCODER_DROPOUT,
    ),
    Mutant(
        "encoder: embeddings are not dropped",
        "stacks/encoder.py",
        "x = apply_dropout(x, make_dropout(self.rates.embedding, key, EMBEDDING))",
        "pass",
        ENCODER_DROPOUT,
    ),
    Mutant(
        "positions: those of a packed source go on from the source before",
        "layers/positions.py",
        "position = jnp.where(segment > 0, segment_positions(segment), 0)",
        "position = jnp.broadcast_to(jnp.arange(segment.shape[1]), segment.shape)",
        f"{SEQ2SEQ} -k one_row",
    ),
    Mutant(
        "cross attention: queries are not normalized",
        "layers/cross_attention.py",
        "q = self.qkv.project_query(self.qkv.normalize(x))",
        "q = self.qkv.project_query(x)",
        f"{SEQ2SEQ} -k transcriptions",
    ),
    Mutant(
        "cross attention: the sums of linear attention contain padding",
        "layers/cross_attention.py",
        "k = jnp.where(mask[:, 0, :, None, None], kv.k, 0).astype(dtype)",
        "k = kv.k.astype(dtype)",
        f"{SEQ2SEQ} -k pairs_of_a_batch",
    ),
    Mutant(
        "cross attention: sums over the source in bfloat16",
        "layers/cross_attention.py",
        "dtype = acc_dtype(kv.k)",
        "dtype = kv.k.dtype",
        f"{SEQ2SEQ} -k bfloat16 --slow",
    ),
    Mutant(
        "cross attention: the masks of dropout are those of self-attention",
        "layers/cross_attention.py",
        "key = None if key is None else jax.random.fold_in(key, CROSS_ATTENTION)",
        "pass",
        ENCODER_DROPOUT,
    ),
    Mutant(
        "cross attention: a target sees all sources of its row",
        "models/seq2seq.py",
        "mask = segment[:, :, None] == source_segment[:, None, :]",
        "mask = source_segment[:, None, :] > 0 * segment[:, :, None]",
        f"{SEQ2SEQ} -k own_source_alone",
    ),
    Mutant(
        "feedback: all layers attend to the source by the keys of the first",
        "stacks/feedback/parts.py",
        "own = None if source is None else layer_source(source, i)",
        "own = None if source is None else layer_source(source, 0)",
        f"{SEQ2SEQ} -k transcriptions",
    ),
    Mutant(
        "beam: all rows continue the beams of the first ones",
        "eval/beam.py",
        "first_rows = n * jnp.arange(b)[:, None]",
        "first_rows = jnp.arange(b)[:, None]",
        f"{BEAM} -k lists",
    ),
    Mutant(
        "pairs: targets do not begin on blocks",
        "data/pair_rows.py",
        "at += target_size(pair, lengths.block)",
        "at += n",
        f"{PAIRS} -k begins_on_a_block",
    ),
    Mutant(
        "pairs: after a window all rows of a batch are the same",
        "data/pair_rows.py",
        "self._window, self._row = self._window + 1, self._row - count",
        "self._window, self._row = self._window + 1, 0",
        f"{PAIRS} -k every_row_once",
    ),
    Mutant(
        "pairs: a source that fills its row is left out",
        "data/pair_rows.py",
        "len(pair.source) <= lengths.source",
        "len(pair.source) < lengths.source",
        f"{PAIRS} -k may_fill",
    ),
    Mutant(
        "best: of equal values the last",
        "train/best.py",
        "value > self._value",
        "value >= self._value",
        "tests/train/test_eval_tasks.py -k equal_values",
    ),
    Mutant(
        "losses: the gradient of the table is reduced in each chunk",
        "ops/losses.py",
        "return shard_map_rows(score_rows, b, (None, 0, 0), 0)(arrays, x, targets)",
        "return score_rows(arrays, x, targets)",
        "tests/ops/test_losses.py -k reduce",
    ),
)


def run(mutant: Mutant, home: Path) -> tuple[bool, float]:
    """Return whether the tests caught a bug in the copy at `home`, and the duration in seconds."""
    path = home / "famjax" / mutant.path
    source, start = path.read_text(), time.monotonic()
    path.write_text(source.replace(mutant.good, mutant.bad))
    try:
        argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
        # a bug may be caught by a long test, which `make test` leaves out
        environment["CI"] = "1"
        status = subprocess.run(
            [*argv, *mutant.tests.split()],
            cwd=home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    finally:
        path.write_text(source)
    # 1: tests failed. Any other status, such as no tests collected, does not count as caught.
    return status == 1, time.monotonic() - start


def main(words: list[str]) -> int:
    wanted = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name in ("famjax", "tests", "configs", "data"):
            shutil.copytree(ROOT / name, home / name)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, home)
        for number, mutant in enumerate(wanted, 1):
            print(f"{number}/{len(wanted)} {mutant.name}: ", end="", flush=True)
            is_caught, seconds = run(mutant, home)
            alive += not is_caught
            print(f"{'caught' if is_caught else 'SURVIVED'}, {seconds:.0f} s", flush=True)
    print(f"mutants: {len(wanted) - alive} of {len(wanted)} caught")
    return min(alive, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
