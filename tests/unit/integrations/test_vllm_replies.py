"""An executor of several workers is in step with them after a call that failed."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.integrations.vllm_replies import receive_all_replies


class Queue:
    """A worker's answers, as vLLM's message queue gives them."""

    def __init__(self) -> None:
        self.answers: deque[tuple[bool, str]] = deque()

    def dequeue(self, timeout: float | None = None) -> tuple[bool, str]:
        return self.answers.popleft()


class Executor:
    """Asks and hears as vLLM 0.32's executor does: it raises at the first worker that failed."""

    def __init__(self, backend: str, workers: int) -> None:
        self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))
        self.response_mqs = [Queue() for _ in range(workers)]
        self.is_failed = False

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[str, ...] = (), **_: Any
    ) -> list[str]:
        if self.is_failed:
            raise RuntimeError("executor failed")
        queues = self.response_mqs
        for number, queue in enumerate(queues):
            inner = getattr(queue, "_queue", queue)
            inner.answers.append((method != f"fail {number}" and method != "fail", f"{method} {number}"))
        found = []
        for queue in queues:
            is_good, text = queue.dequeue(timeout=timeout)
            if not is_good:
                raise RuntimeError(text)
            found.append(text)
        return found


@pytest.mark.parametrize("which", ["fail", "fail 0", "fail 1", "fail 2"])
def test_the_call_after_one_that_failed_gets_its_own_answers(which: str) -> None:
    class Mine(Executor):
        pass

    one = Mine("penstock", 3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="fail"):
            Executor.collective_rpc(one, which)
    if which != "fail 2":  # what is put right: vLLM's own reads the call before's
        with pytest.raises((RuntimeError, AssertionError)):
            assert Executor.collective_rpc(one, "next") == ["next 0", "next 1", "next 2"]

    receive_all_replies(Mine, "penstock")
    receive_all_replies(Mine, "penstock")
    one = Mine("penstock", 3)
    queues = one.response_mqs
    for _ in range(2):
        with pytest.raises(RuntimeError, match="fail"):
            one.collective_rpc(which)
    assert one.collective_rpc("next") == ["next 0", "next 1", "next 2"]
    assert one.response_mqs is queues


def test_what_was_never_asked_is_not_waited_for_and_others_are_left_alone() -> None:
    class Mine(Executor):
        pass

    receive_all_replies(Mine, "penstock")
    one = Mine("penstock", 2)
    one.is_failed = True
    with pytest.raises(RuntimeError, match="executor failed"):
        one.collective_rpc("next")
    other = Mine("nccl", 2)
    with pytest.raises(RuntimeError, match="fail 0"):
        other.collective_rpc("fail")
    assert len(other.response_mqs[1].answers) == 1
