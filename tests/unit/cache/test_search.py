"""The choice among the weights of several caches on one host, with a fake hub and fake GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.hubs import key_state

from penstock.cache import attached as attach
from penstock.cache.attached import _Search, _SeveralRevisions
from penstock.errors import ConfigError, NotFound
from penstock.hub.messages import HoldingState
from penstock.net.unix_sockets import host_id

GPUS = ("GPU-a", "GPU-b")


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "device_id", lambda device: GPUS[device.index] if device.type == "cuda" else "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))


def kept(gpu: int, revision: str = "w1-a", tier: str = "") -> HoldingState:
    # Each cache sees only its own GPU, so both caches report cuda:0.
    state: Any = "filling" if tier else "whole"
    device = {"device": "cuda:0", "device_id": GPUS[gpu]}
    return key_state(((0, 100),), kept=True, tier=tier, state=state, revision=revision, **device)


def found(device: torch.device | None, *holdings: HoldingState) -> list[HoldingState]:
    members = [SimpleNamespace(member=str(n), host=host_id(), holdings=(h,)) for n, h in enumerate(holdings)]
    hub: Any = SimpleNamespace(member="me", status=lambda model: SimpleNamespace(members=members))
    return [holding for _, holding in _Search(hub, "llama", "", device, 1.0)._caches()]


def test_cache_search_returns_only_weights_on_requested_gpu() -> None:
    first, second = kept(0), kept(1, "w1-b")
    assert found(torch.device("cuda", 0), first, second) == [first]
    assert found(torch.device("cuda", 1), first, second) == [second]
    assert found(torch.device("cuda", 1), first, kept(1, tier="host")) == [kept(1, tier="host")]
    with pytest.raises(_SeveralRevisions):
        found(None, first, second)


def test_cache_error_names_device_that_holds_model() -> None:
    with pytest.raises(ConfigError, match=r"kept on cuda:0 and not on cuda:1"):
        found(torch.device("cuda", 1), kept(0))
    with pytest.raises(NotFound, match=r"here: kept, whole, on cuda:0"):
        found(torch.device("cpu"), kept(0))
