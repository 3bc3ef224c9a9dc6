"""Calls that need the hub wait until their own deadline, not until the timeout of one request."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.integration.conftest import STALL_S, Host, assert_fetched
from tests.support.fleet import Worker
from tests.support.fork_server import Forked

from penstock.errors import SourceStalled

REQUEST_S = STALL_S / 3
"""Timeout of one request from a member to the hub."""


def stop(process: Forked) -> None:
    """Stop a process and wait until the kernel reports it stopped."""
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_waits(worker: Worker, seconds: float) -> None:
    """Assert that a fetch neither ends nor fails within this time."""
    with pytest.raises(SourceStalled, match="sent no 'fetched' event"):
        worker.wait_for("fetched", timeout_s=seconds)


def test_fetch_without_fallback_waits_for_hub(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    hub, url = host.start_hub()
    assert_fetched(host.start(fallback=str(small_checkpoint), hub=url), expected_tensors)
    reader = host.start(hub=url, wait_s=60.0, waits_for_input=True, waits_before_fetch=True)
    reader.wait_for("ready")
    reader.proceed()
    reader.wait_for("joined")
    stop(hub)
    reader.send("fetch")
    assert_waits(reader, 2 * REQUEST_S)
    hub.send_signal(signal.SIGCONT)
    assert assert_fetched(reader, expected_tensors)["storage_bytes"] == 0


def test_fetch_with_short_wait_reports_missing_hub_early(host: Host, small_checkpoint: Path) -> None:
    hub, url = host.start_hub()
    reader = host.start(hub=url, wait_s=0.5, waits_for_input=True, waits_before_fetch=True)
    reader.wait_for("ready")
    reader.proceed()
    reader.wait_for("joined")
    stop(hub)
    begun = time.monotonic()
    reader.send("fetch")
    assert reader.wait_for("failed")["error"] == "HubUnavailable"
    assert time.monotonic() - begun < REQUEST_S
    hub.send_signal(signal.SIGCONT)


def test_join_waits_for_replacement_hub(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    hosting = host.start(fallback=str(small_checkpoint))
    assert_fetched(hosting, expected_tensors)
    stop(hosting.process)
    assert_fetched(host.start(fallback=str(small_checkpoint)), expected_tensors)
    hosting.kill(signal.SIGCONT)


def test_subscriber_waits_for_replacement_hub(host: Host, small_checkpoint: Path) -> None:
    hosting = host.start(fallback=str(small_checkpoint))
    hosting.wait_for("fetched")
    stop(hosting.process)
    host.start_rank("subscriber").wait_for("joined")
    hosting.kill(signal.SIGCONT)
