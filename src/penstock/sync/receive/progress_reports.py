"""Progress reports of a receiver to the planner of its part, during a transfer.

In: a running transfer. Out: `Progress`, twice a second and at the end.
Not here: the planner's use of it (`sync.publish.progress`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from penstock.errors import PenstockError
from penstock.hub.sync_messages import Progress
from penstock.sync.membership import Membership
from penstock.sync.receive.transfer import Transfer

REPORT_S = 0.5
"""Interval of reports: well below the smallest stall deadline, and cheap for a rank 0 with hundreds of receivers."""


@contextlib.contextmanager
def reporting_progress(membership: Membership, planner: str, version: int, transfer: Transfer) -> Iterator[None]:
    """Report progress while the body runs; at its end, report that the version is complete and verified."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(REPORT_S):
            _report(membership, planner, Progress(version=version, moved_bytes=transfer.moved_bytes))

    # A thread of its own: the transfer's threads wait for the wire, and a silent receiver would count as late.
    reporter = threading.Thread(target=work, name="penstock-tell", daemon=True)
    reporter.start()
    try:
        yield
        _report(membership, planner, Progress(version=version, moved_bytes=transfer.moved_bytes, outcome="committed"))
    finally:
        over.set()
        reporter.join()  # so that no report of this attempt arrives after the next one has begun


def tell_failed(membership: Membership, request: tuple[str, int] | None, error: BaseException) -> None:
    """Report a failure to the planner that was asked last, so that a publish does not wait for this receiver."""
    if request is not None:
        planner, version = request
        _report(
            membership, planner, Progress(version=version, outcome="failed", why=str(error)[:1024])
        )  # the field's limit


def _report(membership: Membership, planner: str, progress: Progress) -> None:
    """Send a report. A planner that cannot be reached counts this receiver as late; the update goes on."""
    with contextlib.suppress(PenstockError):
        membership.ask(planner, lambda sync_client: sync_client.progress(progress), channel="progress")
