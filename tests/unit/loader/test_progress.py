"""The text of the progress bar, and waits with a bar."""

from __future__ import annotations

import threading

import pytest

from penstock.engine.run import RunState
from penstock.errors import SourceStalled, SourceTruncated
from penstock.loader import progress
from penstock.loader.progress import Progress


def test_wait_with_progress_bar_raises_at_deadline() -> None:
    ticket = RunState(100, is_busy=lambda: False)
    with Progress(True, "weights") as progress, pytest.raises(SourceStalled):
        progress.follow(ticket, stall_s=0.3)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_wait_returns_when_condition_is_met(is_drawn: bool) -> None:
    ticket, calls = RunState(100, is_busy=lambda: False), list[tuple[int, int]]()
    wanted = (lambda done, total: calls.append((done, total))) if is_drawn else False
    with Progress(wanted, "weights") as shown:
        timer = threading.Timer(0.02, lambda: (setattr(ticket, "moved_bytes", 60), ticket.wake()))
        timer.start()
        shown.follow(ticket, stall_s=10, reached=lambda: ticket.moved_bytes >= 50)
        assert not ticket.done and (60, 100) not in calls
        timer.join()


def test_wait_raises_error_of_failed_run() -> None:
    ticket = RunState(100, is_busy=lambda: False)
    timer = threading.Timer(0.02, ticket.fail, [SourceTruncated("the file ended")])
    timer.start()
    with Progress(True, "weights") as shown, pytest.raises(SourceTruncated):
        shown.follow(ticket, stall_s=10, reached=lambda: False)
    timer.join()


class Clock:
    """The clock that `Progress` reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def text(shown: Progress) -> str:
    assert shown._bar is not None
    return str(shown._bar.tasks[0].fields["text"])


def test_progress_bar_shows_percentage_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with Progress(True, "weights") as shown:
        shown(0, 4_000_000_000)
        assert text(shown) == "0 % of 4.00 GB"
        clock.now += 2
        shown(500_000_000, 4_000_000_000)
        assert text(shown) == "12 % of 4.00 GB, 250.00 MB/s, 0:14 left"
        # The rate covers the last seconds only.
        for _ in range(20):
            clock.now += 1
            shown(600_000_000, 4_000_000_000)
        clock.now += 1
        shown(700_000_000, 4_000_000_000)
        assert text(shown) == "17 % of 4.00 GB, 10.00 MB/s, 5:30 left"
        clock.now += 7
        shown(4_000_000_000, 4_000_000_000)
        assert text(shown) == "100 % of 4.00 GB, 133.33 MB/s, in 0:30"


def test_tasks_done_before_resume_are_excluded_from_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with Progress(True, "out", unit="tasks") as shown:
        shown.state("starting workers", 90, 100)
        assert text(shown) == "starting workers"
        clock.now += 4
        shown(92, 100)
        assert text(shown) == "92 % of 100 tasks, 0.5 tasks/s, 0:16 left"
        # The percentage is rounded down.
        shown(99_999, 100_000)
        assert text(shown).startswith("99 % of")
        shown(100, 100)
        shown.state("publishing")
        assert text(shown) == "publishing"


def test_progress_bar_shows_last_path_component(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(True, "s3://bucket/models/[llama]/") as shown:
        shown(1, 1)
    with Progress(True, "/") as shown:
        shown(1, 1)
    err = capsys.readouterr().err
    assert "[llama]" in err and "bucket" not in err


def test_error_removes_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SourceStalled), Progress(True, "weights") as shown:
        shown(1, 2)
        raise SourceStalled("no more")
    with Progress(True, "nothing"):
        pass
    assert capsys.readouterr().err == ""


def test_progress_bar_writes_nothing_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(True, "weights") as shown:
        print("data")
        shown(1, 1)
    assert capsys.readouterr().out == "data\n"
