"""The thread of a fetch that claims chunks at the hub and starts their reads from storage.

Without the hub, chunks are read without a claim after the fetch has received nothing for some time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from penstock.engine.run import Executor, Item, StallTimer
from penstock.errors import PenstockError
from penstock.fetcher.hub_poller import HubPoller, HubState
from penstock.fetcher.storage_reader import StorageReader
from penstock.hub.messages import Ranges
from penstock.plan.schedule import to_ranges
from penstock.types import I64

ALONE_CHUNKS = 16
"""Number of chunks read without a claim before the next request to the hub (256 MiB)."""


class ClaimLoop(msgspec.Struct, eq=False):
    """Claims chunks and reads them from storage, until all chunks are present or storage fails."""

    hub: HubPoller
    storage: StorageReader
    reads: Executor
    starved: StallTimer
    """Measures the time in which nothing feeds the fetch. `run` updates it."""
    before_read: Callable[[], None]
    add_received: Callable[[I64, str], None]
    _closing: threading.Event = msgspec.field(default_factory=threading.Event)
    _wanted: threading.Event = msgspec.field(default_factory=threading.Event)

    def run(self) -> None:
        """Claim and read until all chunks are present, as the body of the claiming thread."""
        # The hub's first reply contains the first claim, which saves one request for each starting member.
        while not (self.hub.answered.wait(self.hub.timing.fetch_turn_s) or self._should_skip_claims()):
            pass
        first = self.hub.pop_first_claim()
        while not (self._closing.is_set() or self.hub.weights.is_whole) and self.hub.assignment.can_read_storage:
            wait_s = self.hub.timing.hub_retry_s
            ranges: Ranges = ()
            try:
                if first is None and self._should_skip_claims():
                    ranges = to_ranges(self.hub.assignment.missing(ALONE_CHUNKS))
                    wait_s = self.hub.timing.fetch_turn_s
                else:
                    reply, first = first or self.hub.member.claim(self.hub.weights), None
                    ranges, wait_s, self.hub.answer = reply.ranges, reply.ask_again_s, reply.why
                    if self.hub.state is HubState.AWAY:
                        self.hub.become(HubState.ANSWERS)
                if ranges:
                    wait_s = 0.0 if self._read(ranges) else self.hub.timing.fetch_turn_s
            except PenstockError as error:
                self.hub.note_failure(error)
                wait_s = 0.0 if self.hub.state is HubState.REFUSES else wait_s
            self._closing.wait(wait_s if ranges else max(wait_s, self.hub.rest_s))
        # Return the claim after storage has failed.
        while not self.hub.assignment.can_read_storage and not self._closing.is_set():
            try:
                self.hub.member.claim(self.hub.weights, ask=False)
                return
            except PenstockError:
                self._closing.wait(self.hub.timing.hub_retry_s)

    def _should_skip_claims(self) -> bool:
        state = self.hub.state
        # Wait longer than `read_stall_s`, after which the hub grants claims on the chunks of a silent holder.
        patience_s = self.hub.stall_s / 2 if state is HubState.AWAY else 0.75 * self.hub.stall_s
        must_skip = state is HubState.REFUSES or self.starved.seconds > patience_s
        if must_skip and self.hub.become(HubState.UNUSED):
            self.hub.provenance.faults.append(f"hub: {self.hub.answer}; storage is read without a claim")
            self.hub.provenance.why_storage = f"read without a claim, the hub: {self.hub.answer}"
        return self.hub.state is HubState.UNUSED

    def _read(self, ranges: Ranges) -> bool:
        if not self.hub.assignment.claim(np.concatenate([np.arange(*span) for span in ranges]), self._post):
            return False
        # No deadline is needed here, because each storage read has a deadline, and its end sets the event.
        while not (self._wanted.wait(self.hub.stall_s) or self._closing.is_set()):
            pass
        return True

    def _post(self, chunks: I64) -> None:
        self._wanted.clear()
        first, nbytes = int(chunks[0]), int(self.hub.weights.layout.chunks.nbytes[chunks].sum())
        self.reads.post(Item(first, f"storage {first}", nbytes, start=partial(self._read_storage, chunks)))

    def _read_storage(self, chunks: I64) -> None:
        unread = set(chunks.tolist())
        # Set `_wanted` once for each claim. Setting it again could end the wait for the next claim.
        is_near_end = threading.Event()

        def near_end() -> None:
            is_near_end.set()
            self._wanted.set()

        self.before_read()
        try:
            for complete in self.storage.read(chunks, near_end):
                unread -= set(complete.tolist())
                self.add_received(complete, f"storage {self.storage.uri}")
                if self.hub.ticket.done:
                    break
        except PenstockError as error:
            if error.blame != "source":
                raise
            self.fail(error, np.array(sorted(unread), np.int64))
        if not is_near_end.is_set():
            self._wanted.set()

    def fail(self, error: PenstockError, chunks: I64) -> None:
        """Stop reading storage permanently and release these chunks. The fetch fails if no upstream is left."""
        self.hub.provenance.faults.append(f"storage: {error}")
        self.hub.assignment.can_read_storage = False
        if not self.hub.assignment.readers:
            self.hub.ticket.fail(error)
        self.hub.assignment.release(chunks)
        self.hub.ticket.wake()

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        self._wanted.set()
