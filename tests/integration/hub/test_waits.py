"""Calls that need the hub wait for it until their own deadline, not until the deadline of one question."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.integration.conftest import STALL_S, Host, check
from tests.support.fleet import Worker
from tests.support.fork_server import Forked

from penstock.errors import SourceStalled

QUESTION_S = STALL_S / 3
"""After this a member gives one question to the hub up."""


def stop(process: Forked) -> None:
    """Stop a process, and return once the kernel says that it is."""
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_waits(worker: Worker, seconds: float) -> None:
    """Assert that a fetch neither ends nor fails for so long."""
    with pytest.raises(SourceStalled, match="did not say"):
        worker.say_until("fetched", timeout_s=seconds)


def test_fetch_without_fallback_waits_for_hub(host: Host, made: Path, truth) -> None:
    hub, url = host.start_hub()
    check(host.start(fallback=str(made), hub=url), truth)
    reader = host.start(hub=url, wait_s=60.0, is_held=True, asks_before_fetch=True)
    reader.say_until("ready")
    reader.begin()
    reader.say_until("joined")
    stop(hub)
    reader.tell("fetch")
    assert_waits(reader, 2 * QUESTION_S)
    hub.send_signal(signal.SIGCONT)
    assert check(reader, truth)["storage_bytes"] == 0


def test_fetch_without_wait_reports_missing_hub_soon(host: Host, made: Path) -> None:
    hub, url = host.start_hub()
    reader = host.start(hub=url, wait_s=0.5, is_held=True, asks_before_fetch=True)
    reader.say_until("ready")
    reader.begin()
    reader.say_until("joined")
    stop(hub)
    begun = time.monotonic()
    reader.tell("fetch")
    assert reader.say_until("failed")["error"] == "HubUnavailable"
    assert time.monotonic() - begun < QUESTION_S
    hub.send_signal(signal.SIGCONT)


def test_join_waits_for_replacement_hub(host: Host, made: Path, truth) -> None:
    hosting = host.start(fallback=str(made))
    check(hosting, truth)
    stop(hosting.process)
    check(host.start(fallback=str(made)), truth)
    hosting.kill(signal.SIGCONT)


def test_subscriber_waits_for_replacement_hub(host: Host, made: Path) -> None:
    hosting = host.start(fallback=str(made))
    hosting.say_until("fetched")
    stop(hosting.process)
    host.start_rank("subscriber").say_until("joined")
    hosting.kill(signal.SIGCONT)
