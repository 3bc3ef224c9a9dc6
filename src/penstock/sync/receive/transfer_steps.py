"""The steps of a take, which executors carry out: ask and read, verify, hand on.

In: a cut of the part. Out: its bytes in place and verified; failures told with the source whose they are.
Not here: which steps, and when (`transfer`).

A source that had all rows from the start is asked for the digests of many steps at once (`AskStep`), while they are
read; another one for those of each step before it is read.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.engine.executors import Pending, Work
from penstock.errors import PenstockError
from penstock.sync.receive.batches import Asked, Step
from penstock.sync.receive.source_read import SourceRead
from penstock.types import U64

if TYPE_CHECKING:
    from penstock.sync.receive.transfer import _Run


class AskStep(Work):
    """Ask a source for the digests of some steps."""

    __slots__ = ("_asked", "_run", "_source", "_wanted")

    def __init__(self, run: _Run, source: SourceRead, asked: Asked) -> None:
        super().__init__(run.ticket, asked.steps[0].lap, f"ask {source.member}")
        self._run, self._source, self._asked = run, source, asked
        self._wanted: U64 | None = None

    def start(self) -> Pending | None:
        """See `Step.start`."""
        run, begun = self._run, time.perf_counter()
        try:
            strips = self._asked.theirs
            self._wanted = self._source.ask(strips, stall_s=run.stall_s, is_over=lambda: run.ticket.stopped)
        except PenstockError as error:
            run.lost(self._source.member, error)
            raise
        run.tally.answered(self._source.member, time.perf_counter() - begun)
        return None

    def finish(self) -> None:
        """See `Step.finish`."""
        assert self._wanted is not None
        for step, wanted in zip(self._asked.steps, self._asked.split(self._wanted), strict=True):
            self._run.told(step, wanted)


class ReadStep(Work):
    """Read what of a step is not here; ask its source for its digests before, unless all are asked for beside."""

    __slots__ = ("_run", "_source", "_step", "_wanted")

    def __init__(self, run: _Run, source: SourceRead, step: Step) -> None:
        super().__init__(run.ticket, step.lap, f"{source.member} lap {step.lap}", step.nbytes)
        self._run, self._source, self._step = run, source, step
        self._wanted: U64 | None = None

    def start(self) -> Pending | None:
        """See `Step.start`."""
        run, source = self._run, self._source
        if run.asks_first or not source.is_ready:
            begun = time.perf_counter()
            try:
                strips = self._step.theirs
                self._wanted = source.ask(strips, stall_s=run.stall_s, is_over=lambda: run.ticket.stopped)
            except PenstockError as error:
                run.lost(source.member, error)
                raise
            run.tally.answered(source.member, time.perf_counter() - begun)
        lacking = run.lacking(self._step, self._wanted)
        if lacking is not None:
            run.read(self._step, lacking)
        return None

    def finish(self) -> None:
        """See `Step.finish`."""
        self._run.arrived(self._step)
        if self._wanted is not None:
            self._run.told(self._step, self._wanted)


class VerifyStep(Work):
    """Digest a step's bytes, and compare."""

    __slots__ = ("_run", "_step", "_wanted")

    def __init__(self, run: _Run, step: Step, wanted: U64) -> None:
        super().__init__(run.ticket, step.lap, f"verify lap {step.lap}", step.nbytes)
        self._run, self._step, self._wanted = run, step, wanted

    def start(self) -> Pending | None:
        """See `Step.start`."""
        self._run.verify(self._step, self._wanted)
        return None

    def finish(self) -> None:
        """See `Step.finish`."""
        self._run.verified(self._step)


class BucketStep(Work):
    """Hand the buckets of a lap on."""

    __slots__ = ("_buckets", "_run")

    def __init__(self, run: _Run, lap: int, buckets: range) -> None:
        super().__init__(run.ticket, lap, f"buckets {buckets.start} to {buckets.stop}")
        self._run, self._buckets = run, buckets

    def start(self) -> Pending | None:
        """See `Step.start`."""
        self._run.install(self._buckets)
        return None

    def finish(self) -> None:
        """See `Step.finish`."""
        self._run.installed()
