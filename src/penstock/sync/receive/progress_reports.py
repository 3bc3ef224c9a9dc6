"""A receiver tells the planner of its part how far it is, while it reads.

In: a take that runs. Out: `Progress`, twice a second and at the end.
Not here: what the planner makes of it (`sync.publish.progress`).
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
"""How often the planner is told how far we are."""


@contextlib.contextmanager
def reporting_progress(membership: Membership, planner: str, version: int, transfer: Transfer) -> Iterator[None]:
    """While inside, tell how far we are; at the end, that we have it, whole and verified."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(REPORT_S):
            _report(membership, planner, Progress(version=version, moved_bytes=transfer.moved_bytes))

    teller = threading.Thread(target=work, name="penstock-tell", daemon=True)
    teller.start()
    try:
        yield
        _report(membership, planner, Progress(version=version, moved_bytes=transfer.moved_bytes, outcome="committed"))
    finally:
        over.set()
        teller.join()


def tell_failed(membership: Membership, asked: tuple[str, int] | None, error: BaseException) -> None:
    """Tell the planner that was asked last, of which version, that we failed: so nobody waits for us."""
    if asked is not None:
        planner, version = asked
        _report(membership, planner, Progress(version=version, outcome="failed", why=str(error)[:1024]))


def _report(membership: Membership, planner: str, progress: Progress) -> None:
    """Send a report. A planner that cannot be reached counts us as late; the update goes on."""
    with contextlib.suppress(PenstockError):
        membership.ask(planner, lambda sync_client: sync_client.progress(progress), line="progress")
