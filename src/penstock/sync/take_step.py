"""The steps of a take, which executors carry out: ask and read, verify, hand on.

In: a cut of the part. Out: its bytes in place and verified; failures told with the source whose they are.
Not here: which steps, and when (`take`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.engine.executors import Pending
from penstock.errors import PenstockError
from penstock.sync.source_read import SourceRead
from penstock.sync.steps import Step
from penstock.types import U64

if TYPE_CHECKING:
    from penstock.sync.take import _Run


class ReadStep:
    """Ask a source for a step's digests, then read it."""

    __slots__ = ("_run", "_source", "_step", "_wanted", "name", "nbytes", "priority", "ticket")

    def __init__(self, run: _Run, source: SourceRead, step: Step) -> None:
        self._run, self._source, self._step = run, source, step
        self._wanted: U64 | None = None
        self.priority, self.ticket, self.nbytes = step.lap, run.ticket, step.nbytes
        self.name = f"{source.member} lap {step.lap}"

    def start(self) -> Pending | None:
        """See `Step.start`."""
        run, source, tally = self._run, self._source, self._run.tally
        begun = time.perf_counter()
        try:
            self._wanted = source.ask(self._step, stall_s=run.stall_s, is_over=lambda: run.ticket.stopped)
            asked = time.perf_counter()
            with tally.reading(source.member):
                failed, is_touched = source.read(self._step, stall_s=run.stall_s)
            tally.is_touched |= is_touched
            if failed is not None:
                raise failed
        except PenstockError as error:
            run.lost(source.member, error)
            raise
        tally.took(source.member, self.nbytes, asked - begun)
        return None

    def finish(self) -> None:
        """See `Step.finish`."""
        assert self._wanted is not None
        self._run.arrived(self._step, self._wanted)

    def abandon(self) -> None:
        """The run is over."""


class VerifyStep:
    """Digest a step's bytes, and compare."""

    __slots__ = ("_run", "_step", "_wanted", "name", "nbytes", "priority", "ticket")

    def __init__(self, run: _Run, step: Step, wanted: U64) -> None:
        self._run, self._step, self._wanted = run, step, wanted
        self.priority, self.ticket, self.nbytes = step.lap, run.ticket, step.nbytes
        self.name = f"verify lap {step.lap}"

    def start(self) -> Pending | None:
        """See `Step.start`."""
        self._run.verify(self._step, self._wanted)
        return None

    def finish(self) -> None:
        """See `Step.finish`."""
        self._run.verified(self._step)

    def abandon(self) -> None:
        """The run is over."""


class BucketStep:
    """Hand the buckets of a lap on."""

    __slots__ = ("_buckets", "_run", "name", "nbytes", "priority", "ticket")

    def __init__(self, run: _Run, lap: int, buckets: range) -> None:
        self._run, self._buckets = run, buckets
        self.priority, self.ticket, self.nbytes = lap, run.ticket, 0
        self.name = f"buckets {buckets.start} to {buckets.stop}"

    def start(self) -> Pending | None:
        """See `Step.start`."""
        self._run.install(self._buckets)
        return None

    def finish(self) -> None:
        """See `Step.finish`."""
        self._run.installed()

    def abandon(self) -> None:
        """The run is over."""
