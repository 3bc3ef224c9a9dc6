"""The decision to compress a link, on a fake clock."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.http import compression
from penstock.http.compression import AGAIN_S, MARGIN, CompressionChoice, Planes
from penstock.types import GB, MIB

RATIO = 1.5


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    thread_time = monotonic


class Slow(Planes):
    """A codec with a fixed rate, which compresses to two thirds."""

    def __init__(self, clock: Clock, gb_per_s: float) -> None:
        self.clock, self.gb_per_s = clock, gb_per_s

    def encode(self, block):
        self.clock.now += len(block) / GB / self.gb_per_s
        return [memoryview(bytes(int(len(block) / RATIO)))]

    def decode(self, frame, into) -> None:
        self.clock.now += len(into) / GB / self.gb_per_s / 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(compression, "time", found)
    return found


def read(
    choice: CompressionChoice,
    clock: Clock,
    mb: int,
    *,
    raw: float,
    coded: float,
    codec: float = 1.0,
    idle_s: float = 0.5,
):
    """Send requests of 4 MiB over a link of these rates. Return which of them were compressed."""
    asked, planes, piece = [], Slow(clock, codec), memoryview(np.zeros(MIB, np.uint8))
    for _ in range(mb // 4):
        is_coded = choice.begin()
        for _ in range(4):
            clock.now += MIB / GB / (coded if is_coded else raw)
            choice.add_bytes(MIB, int(MIB / RATIO) if is_coded else MIB, is_coded=is_coded)
            if not is_coded:
                before = clock.now
                choice.sample(piece, planes)
                clock.now = before  # the link fills the socket in the meantime
        choice.end(is_coded)
        asked.append(is_coded)
        clock.now += idle_s  # no request is in flight, so this pause must not count
    return asked


def test_compression_is_chosen_for_slow_link(clock: Clock) -> None:
    choice = CompressionChoice()
    assert "too few" in choice.decision()[1]
    asked = read(choice, clock, 200, raw=0.125, coded=0.125 * RATIO)
    assert asked == [False] * asked.count(False) + [True] * asked.count(True)
    assert asked.count(False) * 4 <= 60
    is_coded, why = choice.decision()
    assert is_coded
    assert why == "1.50x by byte planes: 0.19 GB/s, raw 0.12"


def test_compression_is_never_tried_on_fast_link(clock: Clock) -> None:
    choice = CompressionChoice()
    assert not any(read(choice, clock, 200, raw=1.2, coded=0.9))
    assert choice.decision() == (False, "not compressed: the link has 1.20 GB/s, the codec 1.50x at 1.00 GB/s")


def test_compression_with_small_gain_is_never_tried(clock: Clock) -> None:
    choice = CompressionChoice()
    assert not any(read(choice, clock, 200, raw=1.0, coded=2.0, codec=MARGIN - 0.01))


def test_unprofitable_codec_is_no_longer_used(clock: Clock) -> None:
    choice = CompressionChoice()
    asked = read(choice, clock, 200, raw=0.5, coded=0.51)
    assert 0 < asked.count(True) * 4 <= 60
    assert not asked[-1]
    assert choice.decision() == (False, "not compressed: compressed 0.51 GB/s, raw 0.50")


def test_slow_codec_is_no_longer_used(clock: Clock) -> None:
    choice = CompressionChoice()
    assert read(choice, clock, 400, raw=0.125, coded=0.18)[-1]
    asked = read(choice, clock, 100, raw=0.125, coded=0.08)
    assert 0 < asked.count(True) * 4 <= 68
    assert choice.decision() == (False, "not compressed: compressed 0.08 GB/s, raw 0.12")


def test_compression_is_measured_again_later(clock: Clock) -> None:
    choice = CompressionChoice()
    assert not read(choice, clock, 100, raw=1.2, coded=0.9)[-1]
    clock.now += AGAIN_S
    assert read(choice, clock, 120, raw=0.1, coded=0.15)[-1]
    clock.now += AGAIN_S
    assert not read(choice, clock, 100, raw=1.2, coded=0.9)[-1]


def test_declining_peer_disables_compression(clock: Clock) -> None:
    choice = CompressionChoice(always=True)
    is_coded = choice.begin()
    assert is_coded
    choice.declined()
    choice.end(is_coded)
    assert not choice.begin()
    assert choice.decision() == (False, "not compressed: the peer does not compress")


def test_compression_rate_ignores_mixed_transfers(clock: Clock) -> None:
    """A connection still receives uncompressed bytes, so the rate is of both kinds."""
    choice = CompressionChoice()
    straggler = choice.begin()
    assert straggler is False
    read(choice, clock, 60, raw=0.1, coded=0.01, idle_s=0)
    assert choice.is_coded
    read(choice, clock, 200, raw=0.1, coded=0.01, idle_s=0)
    assert choice.is_coded
    choice.end(straggler)
    read(choice, clock, 200, raw=0.1, coded=0.01, idle_s=0)
    assert not choice.is_coded
