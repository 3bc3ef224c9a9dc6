"""Patience counts progress: a byte restores it, and silence and consecutive failures use it up."""

from __future__ import annotations

import pytest

from penstock.config import Settings
from penstock.errors import SourceStalled, SourceUnavailable
from penstock.http.range_request import Patience, RequestFailed


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.pauses_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def patience(clock: Clock, *, retries: int = 5, stall_s: float = 30.0) -> Patience:
    return Patience("s3://b/k", Settings(retries=retries, stall_s=stall_s), clock=clock, sleep=clock.sleep)


def test_retry_delay_doubles_with_jitter_up_to_limit(clock: Clock) -> None:
    one = patience(clock, retries=12)
    for _ in range(12):
        one.pause(RequestFailed("503"), (0, 1))
    for number, pause_s in enumerate(clock.pauses_s):
        whole_s = min(5.0, 0.1 * 2**number)
        assert whole_s / 2 <= pause_s <= whole_s


def test_retries_stop_after_configured_number_of_failures(clock: Clock) -> None:
    one, cause = patience(clock, retries=2), OSError("reset")
    one.pause(RequestFailed("reset", cause=cause), (5, 9))
    one.pause(RequestFailed("reset", cause=cause), (5, 9))
    with pytest.raises(SourceUnavailable, match="3 attempts") as caught:
        one.pause(RequestFailed("reset", cause=cause), (5, 9))
    assert (caught.value.uri, caught.value.byte_range, caught.value.__cause__) == ("s3://b/k", (5, 9), cause)


def test_received_byte_resets_retry_count(clock: Clock) -> None:
    one = patience(clock, retries=1)
    for _ in range(50):
        one.progress()
        one.pause(RequestFailed("reset"), (0, 1))
    assert len(clock.pauses_s) == 50 and max(clock.pauses_s) <= 0.1, "each is the first failure, with its short pause"
    with pytest.raises(SourceUnavailable):
        one.pause(RequestFailed("reset"), (0, 1))


def test_repeated_silence_raises_source_stalled(clock: Clock) -> None:
    one = patience(clock, retries=50)
    for _ in range(2):
        clock.now_s += 10
        one.pause(RequestFailed("timed out", silent=True), (0, 1))
    clock.now_s += 10
    with pytest.raises(SourceStalled, match="timed out"):
        one.pause(RequestFailed("timed out", silent=True), (0, 1))


def test_retry_after_header_is_honoured_within_limit(clock: Clock) -> None:
    one = patience(clock, stall_s=7.0)
    one.pause(RequestFailed("429", wait_s=2.0), (0, 1))
    one.pause(RequestFailed("429", wait_s=86_400.0), (0, 1))
    assert clock.pauses_s == [2.0, 5.0]
    with pytest.raises(SourceUnavailable, match="asked to wait"):
        one.pause(RequestFailed("429", wait_s=86_400.0), (0, 1))
