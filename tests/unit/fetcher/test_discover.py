"""Frequency of the requests to the hub while no member holds the model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.config import Settings
from penstock.errors import NotFound
from penstock.fetcher import discover
from penstock.fetcher.discover import REQUEST_PAUSE_S, Discovery
from penstock.hub.messages import HoldingState, Identity


@pytest.mark.parametrize(
    ("rest_s", "wait_s", "pause_s"),
    [(0.0, 30.0, REQUEST_PAUSE_S), (2.0, 30.0, 2.0), (5.0, 16.0, 2.0), (5.0, 0.8, REQUEST_PAUSE_S)],
)
def test_slow_hub_is_polled_less_frequently(
    rest_s: float, wait_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(discover, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    identity = Identity(model="m", revision="r", layout="l")
    state = HoldingState(key=identity.key(), identity=identity, num_chunks=1, nbytes=1)
    answers = [[], [], [SimpleNamespace(member="other", holdings=[state])]]

    def status(model: str, *, within_s: float | None) -> SimpleNamespace:
        return SimpleNamespace(members=answers.pop(0))

    member = SimpleNamespace(id="me", hub=SimpleNamespace(rest_s=rest_s, status=status))
    discovery = Discovery(identity, member, Settings(), lambda words: None)
    assert discovery._state_of(identity, set(), wait_s) == state
    assert pauses == [pause_s] * 2


def test_discovery_stops_at_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(discover, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    hub = SimpleNamespace(rest_s=5.0, status=lambda model, *, within_s: SimpleNamespace(members=[]))
    discovery = Discovery(Identity(model="m"), SimpleNamespace(id="me", hub=hub), Settings(), lambda words: None)
    with pytest.raises(NotFound):
        discovery._state_of(Identity(model="m"), set(), 8.0)
    assert pauses == [1.0] * 8
