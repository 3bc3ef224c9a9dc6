"""Pauses after failures and refusals of members."""

from __future__ import annotations

import math

import pytest

from penstock.errors import PeerLost, SourceStalled
from penstock.fetcher.retries import BUSY_TRIES, RetryTimes
from penstock.timing import Timing

TIMING = Timing()
BUSY_S, FORGIVE_S, SILENT_S = TIMING.full_pause_s, TIMING.failed_pause_s, TIMING.silent_pause_s


@pytest.fixture
def times() -> RetryTimes:
    return RetryTimes(10.0, TIMING)


def fail(times: RetryTimes, now: float, error: type = PeerLost, **options: bool) -> None:
    given = {"can_read_storage": False, "is_too_slow": False} | options
    times.note_failure("a", error("gone"), now, **given)


def test_retry_pauses_double_up_to_deadline(times: RetryTimes) -> None:
    assert times.may_try("a", 0.0)
    for pause_s in (FORGIVE_S, 4.0, 8.0, 10.0, 10.0):
        fail(times, 100.0)
        assert times.has_failed("a", 99.9 + pause_s) and not times.may_try("a", 99.9 + pause_s)
        assert times.may_try("a", 100.0 + pause_s) and times.may_be_parent("a", 100.0 + pause_s)
    assert times.may_try("b", 100.0)


def test_silent_member_is_retried_later_if_storage_is_readable(times: RetryTimes) -> None:
    fail(times, 0.0, SourceStalled)
    assert times.may_try("a", FORGIVE_S)
    fail(times, 0.0, SourceStalled, can_read_storage=True)
    assert times.has_failed("a", SILENT_S - 0.1) and times.may_try("a", SILENT_S)


def test_slow_member_is_not_retried(times: RetryTimes) -> None:
    fail(times, 0.0, is_too_slow=True)
    assert times.has_failed("a", 1e9) and not times.may_be_parent("a", 1e9)
    assert times.full_s("a", 1e9) == 0.0 < math.inf


def test_full_member_stays_parent_until_repeated_refusals(times: RetryTimes) -> None:
    for refusals in range(1, BUSY_TRIES + 1):
        times.note_full("a", 5.0)
        assert times.full_s("a", 5.0) == BUSY_S and not times.may_try("a", 5.0)
        assert times.may_try("a", 5.0 + BUSY_S)
        assert times.may_be_parent("a", 5.0) == (refusals < BUSY_TRIES)
    times.note_place("a")
    assert times.may_be_parent("a", 5.0) and times.may_try("a", 5.0)
