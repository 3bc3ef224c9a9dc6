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
from penstock.sync.membership import Roster
from penstock.sync.receive.transfer import Take

TELL_S = 0.5
"""How often the planner is told how far we are."""


@contextlib.contextmanager
def telling(roster: Roster, planner: str, version: int, take: Take) -> Iterator[None]:
    """While inside, tell how far we are; at the end, that we have it, whole and verified."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(TELL_S):
            _tell(roster, planner, Progress(version=version, moved_bytes=take.moved_bytes))

    teller = threading.Thread(target=work, name="penstock-tell", daemon=True)
    teller.start()
    try:
        yield
        _tell(roster, planner, Progress(version=version, moved_bytes=take.moved_bytes, outcome="committed"))
    finally:
        over.set()
        teller.join()


def tell_failed(roster: Roster, asked: tuple[str, int] | None, error: BaseException) -> None:
    """Tell the planner that was asked last, of which version, that we failed: so nobody waits for us."""
    if asked is not None:
        planner, version = asked
        _tell(roster, planner, Progress(version=version, outcome="failed", why=str(error)[:1024]))


def _tell(roster: Roster, planner: str, progress: Progress) -> None:
    """Who cannot be told counts us as late; the update goes on."""
    with contextlib.suppress(PenstockError):
        roster.ask(planner, lambda talk: talk.progress(progress), line="progress")
