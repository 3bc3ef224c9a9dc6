"""A short soak: what members leave behind in long-lived processes, at rest after twenty seconds."""

from __future__ import annotations

from tests.chaos.soak import run
from tests.support.long_running import long_running


@long_running
def test_members_joining_and_dying_leak_no_resources() -> None:
    outcome = run(20.0, seed=1)
    assert outcome.holds, "\n".join(outcome.lines())
    assert min(outcome.counts.get(what, 0) for what in ("fetches", "attachments", "updates", "client's turns")) > 0
