"""States of a weight cache and of its models, with a source and a fleet in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from penstock.cache import weight_cache
from penstock.cache.resident_model import ResidentModel, ResidentState
from penstock.cache.weight_cache import CacheState, WeightCache
from penstock.errors import (
    BudgetTooSmall,
    ConfigError,
    IntegrityError,
    NotFound,
    PeerLost,
    PenstockError,
    PermissionDenied,
    SourceBusy,
    SourceStalled,
)
from penstock.holding.weight_layout import WeightLayout, layout_of_tensors, tabulate
from penstock.hub.messages import Identity
from penstock.memory.tier_host import ArenaTier
from penstock.memory.tiers import Level, Tiers
from penstock.peer.local_weights import LocalWeights
from penstock.timing import Timing
from penstock.types import DType

NBYTES = 256
TIMING = Timing(cache_drain_s=0.1, recall_wait_s=0.05, tier_pause_s=0.001)


class Source:
    """The source of every model. It sends bytes, fails, or waits."""

    def __init__(self) -> None:
        self.error: PenstockError | None = None
        self.revision = "w1-a"
        self.may_send = threading.Event()
        self.may_send.set()
        self.num_fetches = 0


class Server:
    """The server of a member with a number of engines and readers that tests set."""

    def __init__(self) -> None:
        self.recall: Any = None
        self.users = 0
        self.handlers: dict[str, object] = {}

    def num_attached(self, key: str) -> int:
        return self.users

    num_readers = num_attached

    def drain(self, key: str, drain_s: float) -> int:
        return self.users

    def retire(self, key: str) -> bool:
        return not self.users

    def show(self, weights: LocalWeights) -> None: ...


class Member:
    """A member without a hub."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.server = Server()
        self.weights: list[LocalWeights] = []
        self.on_damaged: Any = None
        self.on_leave: Callable[[], None] = lambda: None

    def show(self, weights: LocalWeights) -> None:
        self.weights = [*(old for old in self.weights if old.key != weights.key), weights]

    announce = show

    def hide(self, weights: LocalWeights, drain_s: float) -> None:
        self.weights = [old for old in self.weights if old is not weights]

    def beat_now(self) -> None: ...

    def report_now(self) -> None: ...

    def leave(self, drain_s: float) -> None:
        self.on_leave()


class HolderFleet:
    """A fleet whose only member is `Source`."""

    def __init__(self, identity: Identity, member: Member, settings: object, *, max_readers: int) -> None:
        self.identity = identity
        self.member = member

    def fetch(self, target: Any, **_: object) -> Any:
        source = self.member.source
        source.num_fetches += 1
        assert source.may_send.wait(30)
        if source.error is not None:
            raise source.error
        tensors = {"t": torch.arange(NBYTES, dtype=torch.uint8)}
        layout = WeightLayout.of(tabulate(["t"], [DType.U8], [(NBYTES,)]), leaf_bytes=16, chunk_bytes=32)
        rows = target.place(layout)
        for row, data in zip(rows, layout_of_tensors(tensors)[1], strict=True):
            row.copy_(data)
        identity = msgspec.structs.replace(self.identity, revision=source.revision)
        weights = LocalWeights(identity, layout, rows, arenas=target.arenas)
        weights.set_state("whole")
        self.member.show(weights)
        return msgspec.defstruct("Report", [("key", str)])(key=weights.key)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def member(source: Source) -> Member:
    return Member(source)


def make_cache(member: Member) -> WeightCache:
    tiers = Tiers([Level(tier=ArenaTier(), budget_bytes=1 << 20)], stall_s=0.2)
    return WeightCache().start(tiers, member, TIMING)  # type: ignore[arg-type]


@pytest.fixture
def cache(member: Member, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightCache]:
    """A cache that serves one model, `m`."""
    table = tabulate(["t"], [DType.U8], [(NBYTES,)])
    manifest = type("Manifest", (), {"tensors": table})
    monkeypatch.setattr(weight_cache, "inspect", lambda *_, **__: type("Found", (), {"manifest": manifest, "uri": "u"}))
    monkeypatch.setattr(weight_cache, "revision_of", lambda _: "w1-a")
    monkeypatch.setattr(weight_cache, "Fleet", HolderFleet)
    with make_cache(member) as cache:
        cache.keep("m", "u")
        yield cache
        member.source.may_send.set()


def state_of(cache: WeightCache) -> str:
    (model,) = cache.models()
    return model.state


def wait_until(cache: WeightCache, state: ResidentState) -> None:
    deadline = time.monotonic() + 30
    while state_of(cache) != state:
        assert time.monotonic() < deadline, f"{state_of(cache)}, not {state}"
        time.sleep(0.002)


def damage(member: Member) -> None:
    """Report that the model's memory changed, as the member's heartbeat does."""
    (weights,) = member.weights
    member.on_damaged(weights, weights.mark_damaged(0))


def recall(cache: WeightCache, member: Member) -> str:
    """Request a lease. Return the reason for a refusal."""
    with member.server.recall(cache.models()[0].key) as why:
        return str(why)


def test_cache_that_was_never_opened_has_no_member() -> None:
    cache = WeightCache()
    assert cache.state is CacheState.NEW
    with pytest.raises(ConfigError, match="not open"):
        _ = cache.member
    cache.leave()
    assert cache.state is CacheState.LEFT
    with pytest.raises(ConfigError, match="already opened"):
        cache.open()


def test_started_cache_serves_until_with_block_exits(member: Member) -> None:
    with make_cache(member) as cache:
        assert cache.state is CacheState.SERVING
        with pytest.raises(ConfigError, match="already opened"):
            cache.open()
    assert cache.state is CacheState.LEFT
    cache.leave()
    assert cache.state is CacheState.LEFT
    with pytest.raises(ConfigError):
        cache.start(cache.tiers, cache.member)


def test_next_call_completes_interrupted_leave(cache: WeightCache, member: Member) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    member.on_leave = interrupt
    with pytest.raises(KeyboardInterrupt):
        cache.leave()
    assert cache.state is CacheState.LEAVING
    member.on_leave = lambda: None
    cache.leave()
    assert cache.state is CacheState.LEFT and cache.models() == []


ALLOWED = {
    "kept": {"reloading", "dropping", "dropped"},
    "reloading": {"kept", "lost", "dropped"},
    "lost": {"dropping", "dropped"},
    "dropping": {"kept", "lost", "dropped"},
    "dropped": set[str](),
}


@pytest.mark.parametrize("before", list(ResidentState))
@pytest.mark.parametrize("after", list(ResidentState))
def test_cached_model_accepts_only_allowed_state_transitions(
    before: ResidentState, after: ResidentState, member: Member
) -> None:
    fleet = HolderFleet(Identity(model="m"), member, None, max_readers=1)
    model = ResidentModel(fleet, "w1-a", NBYTES)  # type: ignore[arg-type]
    paths = {"kept": (), "lost": ("reloading", "lost")}
    for step in paths.get(before, (before,)):
        assert model.become(ResidentState(step), "first")
    assert model.become(after, "second") is (after in ALLOWED[before])
    assert model.state == (after if after in ALLOWED[before] else before)
    assert (model.why == "second") is (after in ALLOWED[before])


def test_corrupt_model_is_reloaded(cache: WeightCache, member: Member, source: Source) -> None:
    source.may_send.clear()
    damage(member)
    wait_until(cache, ResidentState.RELOADING)
    assert "it is being loaded again" in recall(cache, member)
    cache.check()
    source.may_send.set()
    wait_until(cache, ResidentState.KEPT)
    assert cache.models()[0].num_reloads == 1 and source.num_fetches == 2
    assert recall(cache, member) == "" and member.weights[0].damage is None


@pytest.mark.parametrize(
    "error",
    [
        PeerLost("lost"),
        SourceStalled("stalled"),
        IntegrityError("wrong digest"),
        SourceBusy("full"),
        PermissionDenied("refused"),
        BudgetTooSmall("no space", minimum_bytes=1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_failed_reload_marks_cached_model_lost(
    cache: WeightCache, member: Member, source: Source, error: PenstockError
) -> None:
    source.error = error
    damage(member)
    wait_until(cache, ResidentState.LOST)
    with pytest.raises(IntegrityError, match=error.message):
        cache.check()
    # Readers wait for a busy member, so the error for a lost model must be permanent.
    with pytest.raises(NotFound, match=error.message):
        recall(cache, member)
    cache.drop("m")
    assert cache.models() == []
    cache.check()


def test_reload_with_changed_revision_marks_model_lost(cache: WeightCache, member: Member, source: Source) -> None:
    source.revision = "w1-b"
    damage(member)
    wait_until(cache, ResidentState.LOST)
    assert "was kept in revision w1-a, but storage has w1-b" in cache.models()[0].why


def test_dropped_model_stays_cached_while_used(cache: WeightCache, member: Member) -> None:
    member.server.users = 1
    with pytest.raises(SourceBusy, match="still use"):
        cache.drop("m")
    assert state_of(cache) == "kept" and member.weights[0].state == "whole"
    member.server.users = 0
    cache.drop("m")
    assert cache.models() == [] and member.weights == []
    with pytest.raises(NotFound):
        cache.drop("m")


def test_drop_waits_for_reload(cache: WeightCache, member: Member, source: Source) -> None:
    source.may_send.clear()
    damage(member)
    with pytest.raises(SourceBusy, match="being loaded again"):
        cache.drop("m", drain_s=0.02)
    source.may_send.set()
    cache.drop("m", drain_s=30.0)
    assert cache.models() == []


def test_corruption_during_drop_starts_no_reload(cache: WeightCache, member: Member, source: Source) -> None:
    (weights,) = member.weights

    def drain(key: str, drain_s: float) -> int:
        assert state_of(cache) == "dropping"
        assert recall(cache, member) == ""
        damage(member)
        return 0

    member.server.drain = drain  # type: ignore[method-assign]
    cache.drop("m")
    assert source.num_fetches == 1 and weights.damage is not None


def test_leaving_fleet_cancels_reload_without_error(cache: WeightCache, member: Member, source: Source) -> None:
    source.may_send.clear()
    damage(member)
    (resident,) = cache.models()
    assert resident.state == "reloading"
    source.error = PeerLost("cancelled")
    member.on_leave = source.may_send.set
    cache.leave()
    assert cache.state is CacheState.LEFT and cache.models() == []
    # After `leave`, lost models are no longer reported.
    cache.check()


def test_using_unopened_cache_raises_config_error() -> None:
    cache = WeightCache(memory_bytes="64M")
    for use in (cache.stats, lambda: cache.tiers, lambda: cache.member):
        with pytest.raises(ConfigError, match="not open"):
            use()
