"""A caller's share of the hub: a flood from one caller displaces no entries of others and reveals nothing hidden."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.hubs import IDENTITY, HubBench, key_state

from penstock.errors import PermissionDenied, SourceBusy, UnknownMember
from penstock.hub.auth import Caller
from penstock.hub.job_state import JobState
from penstock.hub.messages import (
    Beat,
    ClaimRequest,
    DecideRequest,
    Drain,
    FailureReport,
    FleetDecision,
    Hello,
    HoldingState,
    Identity,
    SyncState,
    UpstreamsRequest,
)
from penstock_hub.directory import Directory
from penstock_hub.limits import LEAVES_AT_ONCE, MEMBER_BYTES

FLOODING_CALLER, OTHER_CALLER = Caller(models=("other-*",), name="token:flood"), Caller(name="token:quiet")


@pytest.fixture
def bench() -> HubBench:
    return HubBench()


@pytest.fixture
def hub(bench: HubBench) -> Directory:
    return bench.hub()


def join(hub: Directory, member: str, caller: Caller) -> None:
    hub.hello(Hello(member=member, host="h", doors=("http://127.0.0.1:1",), name=member), caller)


def fails(model: str, message: str) -> tuple[FailureReport, ...]:
    return (FailureReport(age_s=0.0, verb="load", model=model, error="SourceError", message=message, blame="source"),)


def job(name: str) -> JobState:
    return JobState(
        name=name, operation="cast", sources=("s3://b/m",), destination="/out", process="h:1", phase="running",
        num_tasks=4,
    )  # fmt: skip


def test_failure_flood_does_not_hide_other_callers_failures(bench) -> None:
    hub = bench.hub(failing_members=20)
    for number in range(25):
        bench.now += 0.01
        join(hub, f"f{number}", FLOODING_CALLER)
        hub.beat(f"f{number}", Beat(failures=fails("other-a", f"nothing {number}")), FLOODING_CALLER)
    for member in ("q", "r"):
        join(hub, member, OTHER_CALLER)
        hub.beat(member, Beat(failures=fails("llama", f"the failure of {member}")), OTHER_CALLER)
    for number in range(25, 50):
        join(hub, f"f{number}", FLOODING_CALLER)
        hub.beat(f"f{number}", Beat(failures=fails("other-a", f"nothing {number}")), FLOODING_CALLER)
    shown = [failure.message for failure in hub.status().failures]
    assert len(shown) == 20 and {"the failure of q", "the failure of r", "nothing 49"} <= set(shown)


def test_conversion_flood_does_not_block_other_callers_conversion(bench) -> None:
    hub = bench.hub(conversions=5)
    for number in range(5):
        hub.job(f"f{number}", job("other-a"), FLOODING_CALLER)
    with pytest.raises(SourceBusy):
        hub.job("f5", job("other-a"), FLOODING_CALLER)
    hub.job("q", job("llama"), OTHER_CALLER)
    with pytest.raises(SourceBusy):
        hub.job("f5", job("other-a"), FLOODING_CALLER)
    assert "q" in {entry.job for entry in hub.status().jobs}


def test_members_per_caller_are_limited(bench) -> None:
    hub = bench.hub(members_bytes=10 * MEMBER_BYTES)
    for number in range(10):
        join(hub, f"f{number}", FLOODING_CALLER)
    with pytest.raises(SourceBusy):
        join(hub, "f10", FLOODING_CALLER)
    for number in range(5):
        join(hub, f"q{number}", OTHER_CALLER)
        hub.beat(f"q{number}", Beat(), OTHER_CALLER)
    with pytest.raises(SourceBusy):
        join(hub, "q5", OTHER_CALLER)
    with pytest.raises(UnknownMember):
        hub.beat("f0", Beat(), FLOODING_CALLER)
    hub.beat("f9", Beat(), FLOODING_CALLER)
    hub.leave("q0", OTHER_CALLER)
    join(hub, "q6", OTHER_CALLER)


def test_hubs_sharing_store_apply_one_member_limit(bench) -> None:
    hubs = [bench.hub(members_bytes=10 * MEMBER_BYTES) for _ in range(3)]

    def beat() -> None:
        bench.now += 2.0
        for hub in hubs:
            hub.begin()

    for number in range(4):
        for at, hub in enumerate(hubs):
            join(hub, f"f{at}-{number}", FLOODING_CALLER)
        bench.now += 0.1
    beat()
    # 12 members join within one interval, and the hub that counts first removes the two oldest.
    assert set(bench.store.scan("member/")) == {f"f{at}-{number}" for at in range(3) for number in range(4)} - {
        "f0-0", "f1-0"
    }  # fmt: skip
    beat()
    for hub in hubs:
        with pytest.raises(SourceBusy):
            join(hub, "f9", FLOODING_CALLER)
    # A token with members at one hub gets its half, also against members that other hubs admitted.
    for number in range(5):
        join(hubs[2], f"q{number}", OTHER_CALLER)
    with pytest.raises(SourceBusy):
        join(hubs[2], "q5", OTHER_CALLER)
    beat()
    left = bench.store.scan("member/")
    assert sum(name.startswith("q") for name in left) == 5 and len(left) == 10


def test_member_limit_counts_syncs_reported_to_other_hubs(bench) -> None:
    one, other = bench.hub(members_bytes=4 * MEMBER_BYTES), bench.hub(members_bytes=4 * MEMBER_BYTES)
    join(other, "f", FLOODING_CALLER)
    many = tuple(SyncState(name=f"other-{number}", side="subscriber", rank=0) for number in range(16))
    other.beat("f", Beat(syncs=many), FLOODING_CALLER)
    join(one, "f1", FLOODING_CALLER)
    bench.now += 2.0
    one.begin()
    # Each member takes 32 KiB, and the syncs take 64 KiB.
    with pytest.raises(SourceBusy):
        join(one, "f2", FLOODING_CALLER)
    join(one, "q", OTHER_CALLER)


def test_hub_with_few_members_skips_store_scan(bench, hub, monkeypatch) -> None:
    join(hub, "f", FLOODING_CALLER)
    monkeypatch.setattr(type(bench.store), "scan", None)
    hub.begin()


def test_silent_members_stop_counting_against_caller_limit(bench) -> None:
    hub = bench.hub(members_bytes=3 * MEMBER_BYTES)
    for number in range(3):
        join(hub, f"f{number}", FLOODING_CALLER)
    bench.now += 11
    join(hub, "f3", FLOODING_CALLER)


def test_large_heartbeat_above_caller_limit_is_rejected(bench) -> None:
    hub = bench.hub(members_bytes=10 * MEMBER_BYTES)
    join(hub, "f", FLOODING_CALLER)
    named = [Identity(model=f"other-{number}") for number in range(200)]
    large = tuple(HoldingState(key=of.key(), identity=of, num_chunks=1, nbytes=1) for of in named)
    with pytest.raises(SourceBusy):
        hub.beat("f", Beat(holdings=large), FLOODING_CALLER)
    assert not hub.status().members[0].holdings
    many = tuple(SyncState(name=f"other-{number}", side="subscriber", rank=0) for number in range(100))
    with pytest.raises(SourceBusy):
        hub.beat("f", Beat(syncs=many), FLOODING_CALLER)
    join(hub, "q", OTHER_CALLER)


def test_claims_for_fake_models_do_not_evict_real_claims(bench) -> None:
    hub = bench.hub(tables_bytes=100_000)
    join(hub, "f", FLOODING_CALLER)
    join(hub, "q", OTHER_CALLER)
    ours = key_state()
    assert hub.claim(ClaimRequest(member="q", holding=ours), OTHER_CALLER).ranges
    for number in range(30):
        of = Identity(model=f"other-{number}")
        state = HoldingState(key=of.key(), identity=of, num_chunks=5_000, nbytes=5_000 << 20)
        assert hub.claim(ClaimRequest(member="f", holding=state), FLOODING_CALLER).ranges
    tables = bench.store.scan("claim/")
    assert len(tables) < 30 and any(name.startswith(IDENTITY.key()) for name in tables)


def test_models_per_member_are_limited(bench) -> None:
    hub = bench.hub(member_models=3)
    join(hub, "f", FLOODING_CALLER)
    states = [key_state(identity=Identity(model=f"other-{number}")) for number in range(4)]
    for state in states[:3]:
        hub.upstreams(UpstreamsRequest(member="f", holding=state), FLOODING_CALLER)
    with pytest.raises(SourceBusy, match="3 models"):
        hub.upstreams(UpstreamsRequest(member="f", holding=states[3]), FLOODING_CALLER)


def test_sync_decisions_per_caller_are_limited(bench) -> None:
    hub = bench.hub(decisions=4)
    join(hub, "f", FLOODING_CALLER)
    hub.beat("f", Beat(syncs=(SyncState(name="other-a", side="publisher", rank=0),)), FLOODING_CALLER)
    for version in range(10):
        decision = FleetDecision(epoch="f", version=version, outcome="committed", by="f")
        hub.decide(DecideRequest(member="f", name="other-a", decision=decision), FLOODING_CALLER)
    assert len(bench.store.scan("decision/")) == 4


def test_leave_requests_from_fake_members_are_limited(bench, hub) -> None:
    for number in range(LEAVES_AT_ONCE + 50):
        hub.leave(f"f{number}", FLOODING_CALLER)
    assert len(bench.store.scan("gone/")) <= LEAVES_AT_ONCE
    join(hub, "q", OTHER_CALLER)
    hub.leave("q", OTHER_CALLER)
    assert "q" in bench.store.scan("gone/")


def test_operator_cannot_detect_members_with_hidden_models(bench, hub) -> None:
    operator = Caller(models=("other-*",), name="token:o", is_operator=True)
    join(hub, "q", OTHER_CALLER)
    hub.beat("q", Beat(holdings=(key_state(),)), OTHER_CALLER)
    for order in (Drain(by="", reason=""), None):
        with pytest.raises(UnknownMember) as hidden:
            hub.drain("q", order, operator)
        with pytest.raises(UnknownMember) as absent:
            hub.drain("x", order, operator)
        assert str(hidden.value).replace("member q", "member x") == str(absent.value)
    assert hub.status().members[0].drain is None
    seen = key_state(identity=msgspec.structs.replace(IDENTITY, model="other-a"))
    hub.beat("q", Beat(holdings=(key_state(), seen)), OTHER_CALLER)
    with pytest.raises(PermissionDenied):
        hub.drain("q", Drain(by="", reason=""), operator)
