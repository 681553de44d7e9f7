"""The thread that waits for the failure of another process."""

from __future__ import annotations

from typing import Any

import pytest

from famjax.processes import collective
from famjax.processes.failure_monitor import FailureMonitor


@pytest.mark.parametrize("last", ["1 process 1 of 2 stopped: a bug", RuntimeError("CANCELLED")])
def test_the_wait_for_a_failure_outlasts_its_time_limit(
    last: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out"), last]
    ended: list[tuple[str, int]] = []

    class Ended(Exception):
        pass

    class Client:
        def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

    def end(self: FailureMonitor, line: str, status: int) -> None:
        ended.append((line, status))
        raise Ended

    monkeypatch.setattr(collective, "client", Client)
    monkeypatch.setattr(FailureMonitor, "_end", end)
    monitor = object.__new__(FailureMonitor)
    if isinstance(last, str):
        with pytest.raises(Ended):
            monitor._await_failure()
        assert ended == [("process 1 of 2 stopped: a bug", 1)]
    else:
        monitor._await_failure()
        assert ended == []
    assert not answers
