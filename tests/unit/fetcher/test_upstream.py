"""When a reader connects to its upstream."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from penstock.errors import PeerLost
from penstock.fetcher import upstream
from penstock.fetcher.upstream import UNNAMED, UpstreamReader
from penstock.timing import Timing


class Peer:
    """A peer that refuses every lease."""

    def __init__(self) -> None:
        self.upstream = SimpleNamespace(member="P")
        self.has_asked = threading.Event()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def lease(self) -> None:
        self.has_asked.set()
        raise PeerLost("no lease")


class RunState:
    def wake(self) -> None:
        pass


def follow(peer: Peer, ranks: tuple[int, ...], timing: Timing | None = None) -> UpstreamReader:
    chunks = SimpleNamespace(num_chunks=8, chunk_bytes=1)
    weights = SimpleNamespace(layout=SimpleNamespace(chunks=chunks))
    reader = UpstreamReader(peer, ranks, weights, None, RunState(), timing=timing or Timing())
    reader.start()
    return reader


@pytest.mark.parametrize("ranks", [(0,), (1,), (3,), (0, 1), (1, 1), (1, 2), (UNNAMED, 1)])
def test_parent_and_next_upstream_connect_immediately(ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "PROBE_S", 0.05)
    peer = Peer()
    reader = follow(peer, ranks)
    try:
        assert peer.has_asked.wait(30)
    finally:
        reader.close()


@pytest.mark.parametrize("ranks", [(2, 2), (UNNAMED, 2), (UNNAMED, UNNAMED)])
def test_lower_ranked_upstream_connects_only_on_request(
    ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "PROBE_S", 0.0)
    peer = Peer()
    reader = follow(peer, ranks, Timing(spare_pause_s=0.01))
    try:
        assert not peer.has_asked.wait(0.1)
        reader.request_news()
        assert peer.has_asked.wait(30)
    finally:
        reader.close()
