"""When one worker of a vLLM engine fails in a call, all are heard out, so that the next call gets its own answers.

In: vLLM's executor of several workers. Out: the same, in step after a weight update that failed.
Not here: that all workers fail where one does (`vllm_sync`).

vLLM 0.32 raises at the first worker that failed and leaves the answers of those after it in their queues, untagged:
what the next call reads then is the last one's. Source: github.com/vllm-project/vllm/pull/57846.
"""

from __future__ import annotations

import functools
from typing import Any


def receive_all_replies(executor: type[Any], backend: str) -> None:
    """Have this class of executor do so where weights come by `backend`; again is harmless."""
    if hasattr(executor, "_penstock_hears"):
        return
    executor._penstock_hears = True
    call = executor.collective_rpc

    @functools.wraps(call)
    def collective_rpc(self: Any, method: Any, timeout: float | None = None, *arguments: Any, **named: Any) -> Any:
        config = self.vllm_config.weight_transfer_config
        is_waited_for = not named.get("non_block") and named.get("unique_reply_rank") is None and not arguments[2:]
        if config is None or config.backend != backend or not is_waited_for:
            return call(self, method, timeout, *arguments, **named)
        queues = self.response_mqs
        asked = self.response_mqs = [_ReplyQueue(queue) for queue in queues]
        try:
            return call(self, method, timeout, *arguments, **named)
        except RuntimeError:
            if any(one.has_answered for one in asked):
                for one in asked:
                    if not one.has_answered:
                        one.dequeue(timeout=timeout)
            raise
        finally:
            if self.response_mqs is asked:
                self.response_mqs = queues

    executor.collective_rpc = collective_rpc


class _ReplyQueue:
    """A worker's queue of answers, and whether it was read."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.has_answered = queue, False

    def dequeue(self, *arguments: Any, **named: Any) -> Any:
        found = self._queue.dequeue(*arguments, **named)
        self.has_answered = True
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
