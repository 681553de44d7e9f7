"""Hooks: objects that are called around the steps of a run."""

from __future__ import annotations

from typing import Any

import jax

from famjax.core.errors import StopRequested
from famjax.pipeline import halve_lanes
from famjax.stacks.feedback import Feedback
from famjax.train import hosts
from famjax.train.partition import merge_for_inference
from famjax.train.profile import Profiler
from famjax.train.saving import save
from famjax.train.session import Session
from famjax.train.warmup import halve_memory, row_length_at


class Hook:
    """Base class of hooks; each method does nothing by default."""

    def after_resume(self, session: Session) -> None:
        """Called once the state is restored from a checkpoint, even if no step is left to run."""

    def before_first_step(self, session: Session) -> None:
        """Called once the state is created or restored, before this process runs a step."""

    def before_log(self, session: Session, row: dict[str, float]) -> dict[str, float]:
        """Called before a row of metrics is written; return fields to add to it."""
        return {}

    def after_step(self, session: Session, is_logged: bool) -> None:
        """Called when `session.step` steps are done; `is_logged`: a metrics row was written."""

    def state_dict(self, session: Session) -> dict[str, Any]:
        """Return JSON fields to save in a checkpoint; no two hooks may use the same name."""
        return {}

    def load_state_dict(self, session: Session, saved: dict[str, Any]) -> None:
        """Restore this hook from the fields that the `state_dict` of all hooks returned."""


class Curriculum(Hook):
    """Advances a source's curriculum, such as passkey's document length, by an interval's accuracy.

    When it advances, prefetched batches are dropped, so that later batches depend on the step alone
    and not on how far the loading thread had got.
    """

    def before_log(self, session: Session, row: dict[str, float]) -> dict[str, float]:
        state = session.batches.get_state()
        # if nothing is predicted (train.match), there is no accuracy and the curriculum does not
        # advance
        after = session.source.advance(state["source"], row.get("accuracy", 0.0))
        if after != state["source"]:
            session.batches.set_state({**state, "source": after})
        return {"longest": float(after["longest"])} if "longest" in after else {}


class AttentionSpans(Hook):
    """Adapts the number of entries that layers with learned spans attend to, as the spans change.

    The margin by which spans can grow until the next update follows from the bound of Adam's steps
    (Kingma & Ba, 2015, section 2.1). With another optimizer it is an estimate: a span that grows
    faster is cut off at the margin until the next update.
    """

    def __init__(self) -> None:
        # whether the spans may grow further than they were given room for
        self._is_stale = True

    def before_first_step(self, session: Session) -> None:
        if self._is_stale:
            self._update(session)

    def after_step(self, session: Session, is_logged: bool) -> None:
        if is_logged:
            self._update(session)

    def _update(self, session: Session) -> None:
        if not session.config.model.feedback.adaptive_span:
            return
        state = session.state
        graph = session.program.inference_graph
        stack = merge_for_inference(graph, state.params, state.frozen).stack
        assert isinstance(stack, Feedback)  # no other stack has adaptive spans
        c = session.config.optimizer
        # the number of learning rates by which Adam can move a parameter in a step
        rates = max(1.0, (1 - c.beta1) / (1 - c.beta2) ** 0.5)
        growth = rates * c.learning_rate * session.config.train.log_every
        needed, now = stack.attention_span(growth * stack.spec.span), stack.spec.spans
        # a slightly shorter span is not worth compiling another program
        if any(a > b for a, b in zip(needed, now, strict=True)) or sum(needed) <= 0.75 * sum(now):
            entries = f"up to {max(needed):,} tokens"
            session.progress.note(f"step {session.step:,}: layers attend to {entries}")
            session.set_attention_span(needed)

    def state_dict(self, session: Session) -> dict[str, Any]:
        return {"looked": session.attention_span}  # this name is in existing checkpoints

    def load_state_dict(self, session: Session, saved: dict[str, Any]) -> None:
        if saved.get("looked"):
            session.set_attention_span(tuple(saved["looked"]))
            before, now = saved["config"]["train"], session.config.train
            self._is_stale = before["log_every"] < now.log_every


class Profiling(Hook):
    """Starts and stops the profiler, after waiting until the device has finished the step."""

    def __init__(self, profiler: Profiler):
        self._profiler = profiler

    def before_first_step(self, session: Session) -> None:
        self.after_step(session, is_logged=False)

    def after_step(self, session: Session, is_logged: bool) -> None:
        if self._profiler.wants(session.step):
            with session.clock.waiting("device"):
                jax.block_until_ready(session.state)
        with session.clock.stopped():
            self._profiler.tick(session.step)


class BpttWarmup(Hook):
    """Doubles the length of the rows and halves their number; the remaining rows continue."""

    def after_step(self, session: Session, is_logged: bool) -> None:
        length = row_length_at(session.config, session.step)
        if length == session.length:
            return
        before, rows = session.length, session.rows
        data = halve_lanes(hosts.gather_cursors(session.batches.get_state()))
        session.batches.release()
        session.set_length(length)
        session.batches.set_state(data)
        session.progress.note(
            f"step {session.step:,}: rows of {session.length:,} tokens, {session.rows:,} of them "
            f"(were {before:,} and {rows:,})"
        )
        halve = jax.jit(halve_memory, out_shardings=session.program.shardings.memory)
        session.state = session.state._replace(memory=halve(session.state.memory))


class Saving(Hook):
    """Saves every `train.checkpoint_every` steps, and when SIGTERM or SIGINT asks to stop.

    Args:
      signals: the received stop signal; `signals.at` has to be called after every step.
      hooks: the hooks whose `state_dict` is saved.
    """

    def __init__(self, signals: hosts.StopSignal, hooks: list[Hook]):
        self._signals, self._hooks = signals, hooks

    def after_step(self, session: Session, is_logged: bool) -> None:
        if session.step % session.config.train.checkpoint_every == 0:
            save(session, self._hooks)
        if number := self._signals.at(session.step):
            save(session, self._hooks)
            session.checkpoints.wait()
            raise StopRequested(number, session.step)
