"""The source to blame for a failure, and pauses after failures and refusals."""

from __future__ import annotations

import math

import pytest

from penstock.engine.run import RunState
from penstock.errors import (
    Cancelled,
    DestinationError,
    PeerLost,
    PenstockError,
    PlanError,
    SourceBusy,
    SourceStalled,
)
from penstock.timing import Timing
from penstock.transfer.blame import BUSY_TRIES, FailedSources, blamed

TIMING = Timing()
BUSY_S, FORGIVE_S, SILENT_S = TIMING.full_pause_s, TIMING.failed_pause_s, TIMING.silent_pause_s


@pytest.fixture
def times() -> FailedSources:
    return FailedSources(stall_s=10.0, timing=TIMING)


def fail(times: FailedSources, now: float, error: type = PeerLost, **options: bool) -> None:
    given = {"can_read_storage": False, "is_too_slow": False} | options
    times.note("a", error("gone"), now, **given)


def test_retry_pauses_double_up_to_deadline(times: FailedSources) -> None:
    assert times.may_try("a", 0.0)
    for pause_s in (FORGIVE_S, 4.0, 8.0, 10.0, 10.0):
        fail(times, 100.0)
        assert times.has_failed("a", 99.9 + pause_s) and not times.may_try("a", 99.9 + pause_s)
        assert times.may_try("a", 100.0 + pause_s) and times.may_be_parent("a", 100.0 + pause_s)
    assert times.may_try("b", 100.0)


def test_silent_member_is_retried_later_if_storage_is_readable(times: FailedSources) -> None:
    fail(times, 0.0, SourceStalled)
    assert times.may_try("a", FORGIVE_S)
    fail(times, 0.0, SourceStalled, can_read_storage=True)
    assert times.has_failed("a", SILENT_S - 0.1) and times.may_try("a", SILENT_S)


def test_slow_member_is_not_retried(times: FailedSources) -> None:
    fail(times, 0.0, is_too_slow=True)
    assert times.has_failed("a", 1e9) and not times.may_be_parent("a", 1e9)
    assert times.full_s("a", 1e9) == 0.0 < math.inf


def test_full_member_stays_parent_until_repeated_refusals(times: FailedSources) -> None:
    for refusals in range(1, BUSY_TRIES + 1):
        fail(times, 5.0, SourceBusy)
        assert times.full_s("a", 5.0) == BUSY_S and not times.may_try("a", 5.0)
        assert times.may_try("a", 5.0 + BUSY_S)
        assert times.may_be_parent("a", 5.0) == (refusals < BUSY_TRIES)
    times.note_place("a")
    assert times.may_be_parent("a", 5.0) and times.may_try("a", 5.0)


def test_request_failure_blames_named_member_once() -> None:
    failed = FailedSources()
    assert failed.at_fault("a", PeerLost("gone")) == "a"
    assert failed.at_fault("a", PeerLost("gone", uri="http://a")) == "a"
    gone = PeerLost("gone", uri="penstock:b")
    assert failed.at_fault("a", gone) == "b"
    failed.errors["b"] = gone
    assert failed.at_fault("a", gone) == "a" and failed.last is gone


def test_first_fault_stops_run_and_names_source() -> None:
    ticket = RunState(0, lambda: False)
    for member, error in (("a", PeerLost("gone", uri="shm:1")), ("b", PeerLost("gone"))):
        with pytest.raises(PeerLost), blamed(member, ticket):
            raise error
        assert error.uri is not None and member in error.uri
    assert ticket.stopped and ticket.blamed == "a"


@pytest.mark.parametrize("error", [Cancelled("over"), DestinationError("full"), PlanError("no transport")])
def test_fault_of_another_side_blames_no_source(error: PenstockError) -> None:
    ticket = RunState(0, lambda: False)
    with pytest.raises(type(error)), blamed("a", ticket):
        raise error
    assert not ticket.stopped and ticket.blamed is None and error.uri is None


def test_failure_is_unreported_until_complaint_or_progress(times: FailedSources) -> None:
    times.since_progress.add("a")
    assert times.has_unreported()
    times.reported.add("a")
    assert not times.has_unreported()
    times.since_progress.add("b")
    times.note_progress()
    assert not times.has_unreported() and not times.since_progress
