"""The clock of the hub's store."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock_hub import store
from penstock_hub.store import MemoryStore, RunningTimeClock


def test_hub_resumed_after_suspension_keeps_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    kept = MemoryStore(RunningTimeClock(most_s=1.0))
    kept.write("member/a", b"here", ttl_s=5.0)
    now[0] += 60.0  # a stopped process receives no heartbeat
    assert kept.read("member/a") is not None
    for _ in range(5):
        now[0] += 0.9
        kept.write("member/b", b"here")
    assert kept.read("member/a") is None, "while it runs, silence counts"
