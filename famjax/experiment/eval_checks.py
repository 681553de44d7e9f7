"""Checks of `eval.*`, the evaluation while a run trains."""

from __future__ import annotations

from collections.abc import Iterator

from famjax.config.derived import holds_out_text
from famjax.config.schema import Config
from famjax.core.errors import UserError, format_multiples
from famjax.mixers import is_bounded
from famjax.tasks import TASKS
from famjax.tasks.parse import HOLDOUT, parse_lengths, parse_tasks


def check_eval(config: Config) -> Iterator[str]:
    d, t, every = config.data, config.train, config.eval.every
    named, off = f"eval.every={every}", "set eval.every=0"
    if not every:
        return
    if every > t.steps:
        yield f"{named} is beyond train.steps={t.steps}; take at most that, or {off}"
    if every % t.log_every:
        steps = format_multiples(every, t.log_every)
        yield f"{named} is not a multiple of train.log_every={t.log_every}; take {steps}, or {off}"
    if t.match:
        yield f"{named} measures predictions, train.match=true makes none; {off}"
    yield from _check_eval_tasks(config)
    if config.eval.tasks and not holds_out_text(config):
        return
    instead = f"name eval.tasks, or {off}"
    if d.task != "text" and not d.text_rows:
        yield f"{named} reads held-out text, data.task={d.task} has none; {instead}"
    if d.seqio or d.tfds:
        yield f"{named} reads held-out text, seqio and TFDS sets have none; {instead}"
    if not d.holdout:
        yield f"{named}: data.holdout=0 holds out no text; set data.holdout=20, {instead}"
    yield from _check_eval_capacity(config)


def _check_eval_tasks(config: Config) -> Iterator[str]:
    e = config.eval
    names = []
    try:
        if e.lengths:
            parse_lengths(e.lengths, "eval.lengths")
        for name, files in parse_tasks(e.tasks, "eval.tasks"):
            names.append(name)
            if name == "text" and files == HOLDOUT:
                yield (
                    f"eval.tasks={e.tasks}: eval.every measures the text that is held out without "
                    "it; write text:FILES"
                )
            if TASKS[name].has_own_words and name != config.data.task:
                yield f"eval.tasks={e.tasks}: {name} has its own vocabulary; train on it"
    except UserError as error:
        yield str(error)
        return
    if len(set(names)) < len(names):
        yield f"eval.tasks={e.tasks}: names a task twice; leave one out"
    known = [*(["heldout_bits_per_byte"] if holds_out_text(config) else []), *names]
    if e.best == "lm_eval":
        yield "eval.best=lm_eval: for some of its metrics lower is better; name another task"
    if e.best and e.best not in known:
        yield f"eval.best={e.best}: is not measured; take one of {', '.join(known) or 'eval.tasks'}"


def _check_eval_capacity(config: Config) -> Iterator[str]:
    count, length, capacity = config.eval.batches, config.data.length, config.model.capacity
    if count * length > capacity and is_bounded(config.model):
        max_batches = capacity // length
        fix = f"take at most {max_batches}" if max_batches else "set eval.every=0"
        yield (
            f"eval.batches={count}: reading {count * length} tokens of a document exceeds "
            f"model.capacity={capacity}, all that the model holds; {fix}"
        )
