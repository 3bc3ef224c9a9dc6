"""A live publish waits for its subscribers, and reports the outcome of each subscriber."""

from __future__ import annotations

import threading
import time

from penstock.sync.commit.coordinator import CommitCoordinator
from penstock.sync.commit.outcome import Open, Received, Reported
from penstock.sync.messages import RankProgress
from penstock.timing import Timing


def start_wait(
    progress: CommitCoordinator, version: int, *, stall_s: float = 5.0, gone: str = ""
) -> tuple[list[Reported], threading.Thread]:
    found: list[Reported] = []

    def work() -> None:
        found.append(
            progress.propose(version, stall_s=stall_s, whereabouts=lambda member: "gone" if member == gone else "there")
        )

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return found, thread


def report_progress(
    progress: CommitCoordinator, member: str, version: int, outcome: str = "", *, moved: int = 0, why: str = ""
) -> None:
    progress.note_progress(member, RankProgress(version=version, moved_bytes=moved, outcome=outcome, why=why))  # type: ignore[arg-type]


def test_wait_returns_outcome_of_every_subscriber() -> None:
    progress = CommitCoordinator()
    progress.begin(3, ["a", "b"])
    found, thread = start_wait(progress, 3)
    report_progress(progress, "a", 3, "committed")
    report_progress(progress, "c", 3, "committed")  # joined during the publish
    assert isinstance(progress.outcome(3, 0.1), Open)
    report_progress(progress, "b", 3, "failed", why="no space")
    thread.join(10)
    (decision,) = found
    assert (decision.committed, decision.late, decision.failed) == (("a", "c"), (), {"b": "no space"})
    assert progress.outcome(3, 0.0) == decision
    assert progress.outcome(4, 0.0) == Open(is_begun=False)


def test_wait_without_subscribers_returns_immediately() -> None:
    progress = CommitCoordinator()
    progress.begin(1, [])
    assert progress.propose(1, stall_s=60.0, whereabouts=lambda _: "there") == Received()


def test_stalled_subscriber_is_counted_late_until_next_request() -> None:
    progress = CommitCoordinator()
    progress.begin(1, ["a", "b"])
    found, thread = start_wait(progress, 1, stall_s=2.0)
    for moved in range(8):  # slow progress
        report_progress(progress, "a", 1, moved=moved + 1)
        time.sleep(0.3)
    report_progress(progress, "a", 1, "committed")
    thread.join(10)
    assert (found[0].committed, found[0].late) == (("a",), ("b",))
    progress.begin(2, ["a", "b"])
    found, thread = start_wait(progress, 2)
    report_progress(progress, "a", 2, "committed")
    thread.join(10)
    assert (found[0].committed, found[0].late) == (("a",), ())
    progress.note_request("b")
    progress.begin(3, ["b"])
    assert isinstance(progress.outcome(3, 0.0), Open)


def test_dead_subscriber_is_reported_as_failed() -> None:
    progress = CommitCoordinator(Timing(probe_interval_s=0.05))
    progress.begin(1, ["a"])
    found, thread = start_wait(progress, 1, stall_s=60.0, gone="a")
    thread.join(10)
    assert found[0].failed == {"a": "its process is gone"}


def test_failure_report_without_version_applies_to_newest_version() -> None:
    progress = CommitCoordinator()
    progress.begin(1, ["a"])
    report_progress(progress, "a", -1, "failed", why="names differ")
    assert progress.propose(1, stall_s=60.0, whereabouts=lambda _: "there").failed == {"a": "names differ"}


def test_later_success_clears_subscriber_failure() -> None:
    progress = CommitCoordinator()
    progress.begin(1, ["a", "b"])
    report_progress(progress, "a", 1, "failed", why="a source was lost")
    report_progress(progress, "a", 1, "committed")
    report_progress(progress, "b", 1, "committed")
    decision = progress.propose(1, stall_s=60.0, whereabouts=lambda _: "there")
    assert (set(decision.committed), decision.failed) == ({"a", "b"}, {})
