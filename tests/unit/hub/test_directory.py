"""The hub's logic on a manual clock: claims, dead members, restarts, late members, complaints and process identity."""

from __future__ import annotations

import itertools
import threading

import msgspec
import numpy as np
import pytest
from tests.support.hubs import IDENTITY, HubBench, chunks, key_state

from penstock.errors import HubUnavailable, PermissionDenied, PlanError, SourceBusy, UnknownMember
from penstock.hub.auth import Caller
from penstock.hub.grants import Grant, GrantChecker
from penstock.hub.job_state import MAX_TEXT, MAX_WORKERS, JobState, WorkerState
from penstock.hub.messages import (
    Beat,
    FailureReport,
    FaultReport,
    Hello,
    HoldingState,
    Proof,
    UpstreamsReply,
    UpstreamsRequest,
    WhyRequest,
)
from penstock.phases import Boot, BootError, Phase
from penstock_hub import explain
from penstock_hub.complaints import COMPLAINT_TTL_S, COMPLAINTS_AT_ONCE, WRONG_BYTES_TTL_S
from penstock_hub.conversions import JOB_TTL_S
from penstock_hub.directory import Directory
from penstock_hub.failures import FAILURE_TTL_S
from penstock_hub.store import ANY, MemoryStore

WHOLE = ((0, 100),)


@pytest.fixture
def bench() -> HubBench:
    return HubBench()


@pytest.fixture
def hub(bench) -> Directory:
    return bench.hub()


def complain(hub: Directory, member: str, of: str, fault: str = "unreachable", *, caller: str = "") -> None:
    hub.complain(FaultReport(member=member, of=of, key=IDENTITY.key(), fault=fault), Caller(name=caller or member))


def fill(bench: HubBench, hubs: list[Directory], members: list[str]) -> dict[str, set[int]]:
    """Read assigned chunks until the hub assigns no more. Return the chunks that each member read."""
    read: dict[str, set[int]] = {member: set() for member in members}
    have: dict[str, tuple[tuple[int, int], ...]] = dict.fromkeys(members, ())
    for turn in range(200):
        given = {}
        for i, member in enumerate(members):
            reply = bench.claim(hubs[(turn + i) % len(hubs)], member, key_state(have[member]))
            given[member] = chunks(reply.ranges)
        for member, new in given.items():
            assert not new & set().union(*read.values()), "given twice"
            read[member] |= new
            have[member] = tuple((chunk, chunk + 1) for chunk in sorted(read[member]))
        if not any(given.values()):
            return read
    raise AssertionError("goes on for ever")


def test_single_reader_claims_chunks_immediately(bench, hub) -> None:
    bench.join(hub, "a")
    assert bench.claim(hub, "a", key_state()).ranges == ((0, 25),)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_members_together_read_each_chunk_once_from_storage(bench, hub, count) -> None:
    members = [f"m{i}" for i in range(count)]
    bench.join(hub, *members)
    read = fill(bench, [hub], members)
    assert set().union(*read.values()) == set(range(100))
    if count <= 5:
        assert min(len(part) for part in read.values()) > 0


def request_upstreams_and_claim(hub: Directory, member: str, state: HoldingState) -> UpstreamsReply:
    return hub.upstreams(UpstreamsRequest(member=member, holding=state, can_read_storage=True, claim=True))


def test_claim_in_upstreams_request_behaves_like_separate_claim(bench, hub) -> None:
    bench.join(hub, "a", "b", "c")
    bench.beat(hub, "a", key_state(((0, 50),)))
    reply = request_upstreams_and_claim(hub, "b", key_state())
    assert [upstream.member for upstream in reply.upstreams] == ["a"]
    assert reply.claim is not None and chunks(reply.claim.ranges) and min(chunks(reply.claim.ranges)) == 50
    other = bench.claim(hub, "c", key_state())
    assert other.ranges and not chunks(other.ranges) & chunks(reply.claim.ranges)
    # A claim with upstreams is returned like any other claim.
    bench.claim(hub, "b", key_state(), ask=False)
    assert min(chunks(bench.claim(hub, "c", key_state(claims=other.ranges)).ranges)) == 50
    # A request without chunks or without `claim` assigns nothing.
    assert request_upstreams_and_claim(hub, "b", key_state(num_chunks=0)).claim is None
    plain = UpstreamsRequest(member="b", holding=key_state(), can_read_storage=True)
    assert hub.upstreams(plain).claim is None


def test_new_hub_assigns_no_chunks_in_upstreams_reply(bench) -> None:
    hub = bench.hub(fresh=False)
    bench.join(hub, "a")
    claim = request_upstreams_and_claim(hub, "a", key_state()).claim
    assert claim is not None and not claim.ranges and "new" in claim.why


def test_upstreams_are_returned_despite_claim_write_conflict(bench, monkeypatch) -> None:
    class Raced(MemoryStore):
        def write(self, name, value, *, ttl_s=None, expected=ANY):
            if name.startswith("claim/"):
                return False
            return super().write(name, value, ttl_s=ttl_s, expected=expected)

    bench.store = Raced(clock=lambda: bench.now)
    hub = bench.hub()
    bench.join(hub, "a", "b")
    bench.beat(hub, "a", key_state(((0, 50),)))
    reply = request_upstreams_and_claim(hub, "b", key_state())
    assert [upstream.member for upstream in reply.upstreams] == ["a"] and reply.claim is None
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(HubUnavailable, match="same moment"):
        bench.claim(hub, "b", key_state())


def test_grant_for_older_holder_is_signed_separately(bench, hub) -> None:
    bench.join(hub, "new", "reader")
    hub.hello(Hello(member="old", host="host-old", doors=("unix:///old",), protocol="2.4"))
    checkers = {name: GrantChecker(hub._grants().public_key, name) for name in ("new", "old")}
    for name, checker in checkers.items():
        bench.beat(hub, name, key_state(((0, 50),), grant_epoch=checker.epoch()))
    reply = hub.upstreams(UpstreamsRequest(member="reader", holding=key_state()))
    grants = {upstream.member: upstream.grant for upstream in reply.upstreams}
    assert set(grants) == {"new", "old"}
    for name, checker in checkers.items():
        checker.check(grants[name], key=IDENTITY.key(), reader="reader")
    # Releases before 2.5 read the bytes after the signature as the grant.
    assert msgspec.msgpack.decode(grants["old"][64:], type=Grant).source == "old"
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.decode(grants["new"][64:], type=Grant)


def test_two_hubs_sharing_store_assign_each_chunk_once(bench, hub) -> None:
    members = [f"m{i}" for i in range(6)]
    bench.join(hub, *members)
    read = fill(bench, [hub, bench.hub()], members)
    assert set().union(*read.values()) == set(range(100))


def test_released_chunks_are_claimed_again(bench) -> None:
    seconds = itertools.count()
    hub = Directory(bench.store, fresh=True, clock=lambda: bench.now, timer=lambda: float(next(seconds)) / 1000)
    readers = [f"r{i}" for i in range(4)]
    bench.join(hub, *readers, "a", "b")
    given: dict[str, tuple[tuple[int, int], ...]] = dict.fromkeys(readers, ())
    while sum(len(chunks(ranges)) for ranges in given.values()) < 100:
        for reader, ranges in given.items():
            given[reader] = tuple(sorted((*ranges, *bench.claim(hub, reader, key_state(claims=ranges)).ranges)))
    for _ in range(3):
        assert all(not bench.claim(hub, member, key_state()).ranges for member in ("a", "b"))
    # A claimant that no longer reads its chunks returns them, even if it reports no chunk and no claim.
    again = chunks(bench.claim(hub, "r1", key_state()).ranges)
    assert again and again <= chunks(given["r1"])
    assert bench.claim(hub, "r0", key_state(), ask=False).ranges == ()
    new = chunks(bench.claim(hub, "a", key_state()).ranges)
    assert new and new <= chunks(given["r0"]) | chunks(given["r1"]) - again


def test_concurrent_claims_do_not_overlap(bench, hub) -> None:
    hubs = [hub, bench.hub()]
    members = [f"m{i}" for i in range(8)]
    bench.join(hub, *members)
    given: dict[str, list[int]] = {member: [] for member in members}

    def read(number: int) -> None:
        mine = given[members[number]]
        for _ in range(40):
            have = tuple((chunk, chunk + 1) for chunk in sorted(mine))
            reply = bench.claim(hubs[number % 2], members[number], key_state(have))
            mine += sorted(chunks(reply.ranges))

    threads = [threading.Thread(target=read, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(chunk for mine in given.values() for chunk in mine) == list(range(100))


def test_usable_complete_holder_makes_all_chunks_readable(bench, hub, monkeypatch) -> None:
    bench.join(hub, "w", "a", "b")
    bench.beat(hub, "w", key_state(WHOLE))
    bench.beat(hub, "a", key_state(tuple((chunk, chunk + 1) for chunk in range(0, 100, 2))))
    bench.beat(hub, "b", key_state())
    counts, count = [], np.bincount
    monkeypatch.setattr(np, "bincount", lambda *args, **options: (counts.append(1), count(*args, **options))[1])
    assert hub._view(IDENTITY.key()).readable_chunks("b", 100).all()
    assert not counts
    # A holder that its reader cannot use does not count.
    complain(hub, "b", "w")
    assert list(np.flatnonzero(hub._view(IDENTITY.key()).readable_chunks("b", 100))) == list(range(0, 100, 2))
    assert hub._view(IDENTITY.key()).readable_chunks("a", 100).all()


def test_claim_covers_quarter_of_equal_share_within_limits(bench, hub) -> None:
    bench.join(hub, "a", "b", "c", "d")
    for member in "abcd":
        hub.upstreams(UpstreamsRequest(member=member, holding=key_state(num_chunks=1600), can_read_storage=True))
    assert bench.claim(hub, "a", key_state(num_chunks=1600)).ranges == ((0, 64),)  # 1 GiB at most
    bench.join(hub, *(f"x{i}" for i in range(96)))
    for i in range(96):
        hub.upstreams(UpstreamsRequest(member=f"x{i}", holding=key_state(num_chunks=1600), can_read_storage=True))
    assert bench.claim(hub, "b", key_state(num_chunks=1600)).ranges == ((64, 68),)  # 64 MiB at least


def test_remaining_chunks_are_divided_among_last_claims(bench, hub) -> None:
    bench.join(hub, "a", "b", "c", "d")
    for member in "abcd":
        hub.upstreams(UpstreamsRequest(member=member, holding=key_state(num_chunks=1600), can_read_storage=True))
    bench.beat(hub, "d", key_state(((0, 1520),), num_chunks=1600))
    sizes = []
    for member in "abcabcabcabc":
        reply = bench.claim(hub, member, key_state(num_chunks=1600))
        sizes.append(len(chunks(reply.ranges)))
        if reply.ranges:
            bench.beat(hub, "d", key_state(((0, reply.ranges[-1][1]),), num_chunks=1600))
    assert sizes[:3] == [20, 15, 11]
    given = [size for size in sizes if size]
    assert sum(given) == 80 and min(given[:-1]) >= 6  # a 64th of an equal share


def test_chunks_held_by_members_are_not_claimed(bench, hub) -> None:
    bench.join(hub, "a", "b")
    bench.beat(hub, "a", key_state(((0, 90),)))
    assert bench.claim(hub, "b", key_state()).ranges == ((90, 100),)
    reply = bench.claim(hub, "b", key_state(claims=((90, 100),)))
    assert reply.ranges == () and "every missing chunk" in reply.why


def test_repeated_claim_returns_same_chunks(bench, hub) -> None:
    bench.join(hub, "a")
    first = bench.claim(hub, "a", key_state())
    assert bench.claim(hub, "a", key_state()) == first


def test_released_chunks_go_to_another_member(bench, hub) -> None:
    bench.join(hub, "a", "b")
    assert bench.claim(hub, "a", key_state()).ranges == ((0, 25),)
    assert bench.claim(hub, "a", key_state(((0, 5),)), ask=False).ranges == ()
    assert min(chunks(bench.claim(hub, "b", key_state()).ranges)) == 5


def test_chunks_of_dead_reader_are_reassigned(bench, hub) -> None:
    bench.join(hub, "a", "b")
    bench.claim(hub, "a", key_state())
    for _ in range(7):
        bench.now += 2
        bench.beat(hub, "b", key_state())
    assert bench.claim(hub, "b", key_state()).ranges[0] == (0, 25)
    with pytest.raises(UnknownMember):
        bench.beat(hub, "a", key_state())


def test_chunks_received_from_dead_reader_are_not_claimed_again(bench, hub) -> None:
    bench.join(hub, "a", "b", "c")
    bench.claim(hub, "a", key_state())
    bench.beat(hub, "a", key_state(((0, 20),)))
    bench.beat(hub, "b", key_state(((0, 10),)))
    hub.leave("a")
    assert min(chunks(bench.claim(hub, "c", key_state()).ranges)) == 10


def test_stalled_reader_loses_its_claim(bench, hub) -> None:
    bench.join(hub, "a", "b")
    bench.claim(hub, "a", key_state())
    given = bench.claim(hub, "b", key_state()).ranges
    for _ in range(20):
        bench.now += 2
        bench.beat(hub, "a", key_state(claims=((0, 25),)))
        bench.beat(hub, "b", key_state(given))
    assert bench.claim(hub, "b", key_state(given)).ranges[0][0] == 0


def test_claim_of_slow_reader_is_kept_for_one_hour(bench, hub) -> None:
    bench.join(hub, "a")
    bench.claim(hub, "a", key_state())
    for minute in range(60):
        for _ in range(12):
            bench.now += 5
            bench.beat(
                hub,
                "a",
                key_state(((0, minute // 3),), claims=((minute // 3, 25),)) if minute > 2 else key_state(),
            )
    bench.join(hub, "b")
    assert min(chunks(bench.claim(hub, "b", key_state()).ranges)) == 25


def test_slow_reader_with_progress_keeps_claim(bench, hub) -> None:
    bench.join(hub, "a", "b")
    bench.claim(hub, "a", key_state())
    for step in range(20):
        bench.now += 2
        bench.beat(hub, "a", key_state(((0, step + 1),), claims=((step + 1, 25),)))
        assert not chunks(bench.claim(hub, "b", key_state(((25, 100),))).ranges)


def test_new_hub_assigns_no_chunks_before_members_report(bench) -> None:
    hub = bench.hub(fresh=False)
    hub.begin()
    bench.join(hub, "a", "b")
    reply = bench.claim(hub, "b", key_state())
    assert reply.ranges == () and "new" in reply.why
    bench.now += 2.0
    bench.beat(hub, "a", key_state(((0, 40),), claims=((40, 60),)))
    assert bench.claim(hub, "b", key_state()).ranges == ()
    bench.now += 1.1
    assert min(chunks(bench.claim(hub, "b", key_state()).ranges)) == 60  # `a` only sends heartbeats
    assert bench.claim(hub, "a", key_state(((0, 40),), claims=((40, 60),))).ranges


def test_members_register_again_at_hub_with_empty_store(bench, hub) -> None:
    bench.join(hub, "a", "b")
    bench.beat(hub, "a", key_state(WHOLE))
    new = HubBench(now=bench.now)
    again = new.hub(fresh=False)
    with pytest.raises(UnknownMember):
        again.beat("a", Beat())
    new.join(again, "a", "b")
    new.beat(again, "a", key_state(WHOLE))
    assert new.parents(again, [("b", key_state())]) == {"b": ("a",)}


def test_hub_replicas_share_grant_key_after_store_loss() -> None:
    bench = HubBench()
    first, second = bench.hub(), bench.hub(fresh=False)

    def key(hub: Directory, member: str) -> bytes:
        return hub.hello(Hello(member=member, host=f"host-{member}", doors=(f"unix:///{member}",))).grant_key

    assert key(first, "a") == key(second, "b")
    assert isinstance(bench.store, MemoryStore)
    bench.store._folders.clear()  # like a Redis server that was killed and restarted
    third = bench.hub(fresh=False)
    assert key(third, "c") == key(first, "a") == key(second, "b")


def test_hub_assigns_no_chunks_after_life_mark_expires(bench, hub) -> None:
    hub.begin()
    bench.join(hub, "a")
    assert bench.claim(hub, "a", key_state()).ranges
    bench.now += 60
    bench.join(hub, "a")
    assert bench.claim(hub, "a", key_state()).ranges == ()


def test_overlapping_claims_after_restart_stay_valid(bench, hub) -> None:
    bench.join(hub, "a", "b")
    bench.claim(hub, "a", key_state(claims=((0, 10),)))
    reply = bench.claim(hub, "b", key_state(claims=((5, 15),)))
    assert not chunks(reply.ranges) & set(range(10))


def test_late_member_receives_upstreams_and_claim(bench, hub) -> None:
    bench.join(hub, "a", "b")
    states = [("a", key_state(((0, 50),))), ("b", key_state(((50, 80),)))]
    assert bench.parents(hub, states) == {"a": ("b",), "b": ("a",)}
    bench.join(hub, "late")
    found = bench.parents(hub, [*states, ("late", key_state())])
    assert found["late"] and min(chunks(bench.claim(hub, "late", key_state()).ranges)) >= 80


def test_reader_receives_complete_and_partial_holders_as_upstreams(bench, hub) -> None:
    bench.join(hub, "w", "a", "b")
    welcome = hub.hello(Hello(member="b", host="host-b", doors=("unix:///b",)))
    checkers = {name: GrantChecker(welcome.grant_key, name) for name in "wa"}
    bench.beat(hub, "w", key_state(WHOLE, grant_epoch=checkers["w"].epoch()))
    bench.now += 1
    filling = key_state(((0, 9),), parent="w", grant_epoch=checkers["a"].epoch())
    found = bench.parents(hub, [("a", filling), ("b", key_state())])
    assert found == {"a": ("w",), "b": ("a", "w")}
    reply = hub.upstreams(UpstreamsRequest(member="b", holding=key_state()))
    for upstream in reply.upstreams:
        checkers[upstream.member].check(upstream.grant, key=IDENTITY.key(), reader="b")
        assert upstream.doors == (f"unix:///{upstream.member}",)


def test_status_query_cost_is_independent_of_other_models(bench, hub, monkeypatch) -> None:
    other = msgspec.structs.replace(IDENTITY, model="other/llama")
    bench.join(hub, "w", "idle", *(f"m{i}" for i in range(20)))
    bench.beat(hub, "w", key_state(WHOLE))
    for i in range(20):
        bench.beat(hub, f"m{i}", key_state(WHOLE, identity=other))
    complain(hub, "m0", "w")
    looked = []
    for name in ("scan", "read"):
        real = getattr(MemoryStore, name)

        def counted(store, at, real=real):
            found = real(store, at)
            looked.extend(found if isinstance(found, dict) else [at])
            return found

        monkeypatch.setattr(MemoryStore, name, counted)
    (only,) = hub.status("llama").members
    assert (only.member, only.complaints, only.holdings[0].state) == ("w", 1, "whole")
    assert "w" in hub.why(WhyRequest(model="llama")).lines[-1]
    assert len(looked) < 12
    assert len(hub.status("other/llama").members) == 20 and not hub.status("llam").members
    assert len(hub.status().members) == 22


def test_reader_that_lacks_layout_receives_upstreams(bench, hub) -> None:
    bench.join(hub, "w", "a")
    bench.beat(hub, "w", key_state(WHOLE))
    asked = msgspec.structs.replace(key_state(), num_chunks=0, nbytes=0)
    reply = hub.upstreams(UpstreamsRequest(member="a", holding=asked))
    assert [upstream.member for upstream in reply.upstreams] == ["w"]
    assert [member.member for member in hub.status("llama").members] == ["w"]


@pytest.mark.parametrize("fault", ["unreachable", "stalled"])
def test_several_complaints_redirect_all_readers_to_another_holder(bench, hub, fault) -> None:
    bench.join(hub, "w", "v", "a", "b", "c")
    bench.beat(hub, "w", key_state(WHOLE))
    bench.beat(hub, "v", key_state(WHOLE))
    asks = [(member, key_state(max_readers=1)) for member in "abc"]
    before = bench.parents(hub, asks)
    child = next(member for member in "abc" if before[member][0] == "w")
    others = [member for member in "abc" if member != child]
    for _ in range(3):  # a repeated complaint counts once
        complain(hub, others[0], "w", fault)
    parents = bench.parents(hub, asks)
    assert parents[others[0]][0] != "w" and parents[child][0] == "w"
    complain(hub, others[1], "w", fault)
    assert all(upstreams[0] != "w" for upstreams in bench.parents(hub, asks).values())
    bench.now += 9
    for member in "wvabc":
        bench.beat(hub, member, key_state(WHOLE if member in "wv" else ()))
    assert hub.status().members[-1].complaints == 2


def test_unproven_complaint_redirects_only_the_complaining_reader(bench, hub) -> None:
    bench.join(hub, "w", "v", "honest", "a", "b")
    bench.beat(hub, "w", key_state(WHOLE))
    for liar in "ab":
        complain(hub, liar, "w", "wrong bytes")
    asks = [("honest", key_state(max_readers=1)), ("a", key_state(max_readers=1))]
    assert bench.parents(hub, asks)["honest"] == ("w",)
    assert bench.claim(hub, "honest", key_state()).ranges == ()  # its chunks count
    assert bench.claim(hub, "a", key_state()).ranges


def test_older_release_complaint_with_proof_counts_as_unproven(bench, hub) -> None:
    bench.join(hub, "w", "v", "a", "b")
    bench.beat(hub, "w", key_state(WHOLE))
    proof = Proof(epoch=7, signature=b"s", leaf_bytes=1, spans=b"", at=b"", said=b"", table=b"t" * 4096, leaves=b"")
    report = FaultReport(member="a", of="w", key=IDENTITY.key(), fault="wrong bytes", proof=proof)
    hub.complain(report, Caller(name="token:1"))
    assert not bench.claim(hub, "b", key_state()).ranges  # it moves only its reader
    assert "demoted" not in "\n".join(hub.why(WhyRequest(model="llama")).lines)
    entry = bench.store.read(f"complaint/{IDENTITY.key()}/w~a")
    assert entry is not None and len(entry.value) < 500  # the proof is not stored


def test_wrong_bytes_complaint_is_kept_after_lesser_complaint(bench, hub) -> None:
    bench.join(hub, "w", "a")
    bench.beat(hub, "w", key_state(WHOLE))
    complain(hub, "a", "w", "wrong bytes")
    graver = bench.store.read(f"complaint/{IDENTITY.key()}/w~a").value
    complain(hub, "a", "w", "unreachable")
    assert bench.store.read(f"complaint/{IDENTITY.key()}/w~a").value == graver


def test_complaints_from_one_caller_count_once(bench, hub) -> None:
    liars = [f"liar{i}" for i in range(20)]
    bench.join(hub, "w", "v", "honest", *liars)
    bench.beat(hub, "w", key_state(WHOLE))
    asks = [("honest", key_state(max_readers=1))]
    for liar in liars:
        complain(hub, liar, "w", "unreachable", caller="token:of the liar")
    assert bench.parents(hub, asks) == {"honest": ("w",)}
    assert bench.claim(hub, "honest", key_state()).ranges == ()  # its chunks count


def test_unauthorised_or_too_frequent_complaint_raises(bench, hub) -> None:
    bench.join(hub, "w", "a")
    bench.beat(hub, "w", key_state(WHOLE))
    complaint = FaultReport(member="a", of="w", key=IDENTITY.key(), fault="wrong bytes")
    with pytest.raises(PermissionDenied, match="may not access models with the key"):
        hub.complain(complaint, Caller(models=("qwen*",), name="token:q"))
    hub.complain(msgspec.structs.replace(complaint, key="0" * 32), Caller())  # no member holds this key
    assert not any(one.complaints for one in hub.status().members)
    with pytest.raises(SourceBusy, match="too many"):
        for _ in range(COMPLAINTS_AT_ONCE + 1):
            complain(hub, "a", "w", caller="token:a")
    complain(hub, "a", "w", caller="token:b")


def test_members_with_revoked_token_are_removed(bench, hub) -> None:
    for name in ("good", "bad"):
        hello = Hello(member=name, host="h", doors=("unix:///d",))
        hub.hello(hello, Caller(name=f"token:{name}"))
        bench.beat(hub, name, key_state(WHOLE))
    bench.join(hub, "reader")  # from a hub that required no token
    assert hub.expel({"token:good", "token:new"}) == 1
    assert [one.member for one in hub.status().members] == ["good", "reader"]
    assert bench.parents(hub, [("reader", key_state())]) == {"reader": ("good",)}
    with pytest.raises(UnknownMember):
        bench.beat(hub, "bad")


def test_complaints_expire_after_their_ttl(bench, hub) -> None:
    bench.join(hub, "w", "a", "b")
    bench.beat(hub, "w", key_state(WHOLE))
    complain(hub, "a", "w", "stalled")
    complain(hub, "b", "w", "wrong bytes")

    def counted() -> int:
        return next(member.complaints for member in hub.status().members if member.member == "w")

    assert counted() == 2
    for seconds, left in ((COMPLAINT_TTL_S, 1), (WRONG_BYTES_TTL_S, 0)):
        stop = bench.now + seconds
        while bench.now < stop:
            bench.now += 5
            for member in "wab":
                bench.beat(hub, member, *([key_state(WHOLE)] if member == "w" else []))
        assert counted() == left


def test_lesser_complaint_does_not_shorten_graver_complaint_lifetime(bench, hub) -> None:
    bench.join(hub, "w", "a")
    bench.beat(hub, "w", key_state(WHOLE))
    complain(hub, "a", "w", "wrong bytes")
    complain(hub, "a", "w", "refused")
    for _ in range(8):
        bench.now += 5
        bench.beat(hub, "w", key_state(WHOLE))
        bench.beat(hub, "a")
    assert hub.status().members[-1].complaints == 1


def test_reader_of_unreachable_holder_can_claim_its_chunks(bench, hub) -> None:
    bench.join(hub, "w", "a", "b")
    bench.beat(hub, "w", key_state(WHOLE))
    assert bench.claim(hub, "a", key_state()).ranges == ()
    complain(hub, "a", "w")
    assert bench.claim(hub, "a", key_state()).ranges
    assert bench.claim(hub, "b", key_state()).ranges == ()


def test_departed_member_cannot_rejoin_hub(bench, hub) -> None:
    bench.join(hub, "w", "a")
    bench.beat(hub, "w", key_state(WHOLE))
    hub.leave("w")
    hub.leave("w")
    assert bench.parents(hub, [("a", key_state())]) == {"a": ()}
    with pytest.raises(UnknownMember):
        bench.beat(hub, "w", key_state(WHOLE))
    with pytest.raises(PermissionDenied):
        bench.join(hub, "w")


def test_member_id_used_by_another_process_is_rejected(bench, hub) -> None:
    bench.join(hub, "a")
    bench.join(hub, "a")
    with pytest.raises(PermissionDenied, match="another process"):
        bench.join(hub, "a", host="elsewhere")


def test_weights_missing_from_heartbeat_are_removed(bench, hub) -> None:
    bench.join(hub, "w", "a")
    bench.beat(hub, "w", key_state(WHOLE))
    bench.now += 3
    bench.beat(hub, "w")
    assert hub.status("llama").members == ()
    hub.upstreams(UpstreamsRequest(member="a", holding=key_state()))
    bench.beat(hub, "a")  # created before the request for upstreams, sent afterwards
    assert [member.member for member in hub.status("llama").members] == ["a"]


@pytest.mark.parametrize(
    "bad",
    [
        {"key": "0" * 32},
        {"have": ((5, 5),)},
        {"have": ((0, 101),)},
        {"have": ((10, 20), (15, 30))},
        {"claims": ((30, 20),)},
        {"state": "whole"},
    ],
)
def test_contradictory_weights_report_raises_plan_error(bench, hub, bad) -> None:
    bench.join(hub, "a")
    with pytest.raises(PlanError):
        bench.beat(hub, "a", msgspec.structs.replace(key_state(), **bad))


def test_unknown_member_is_asked_to_register(bench, hub) -> None:
    for ask in (
        lambda: bench.beat(hub, "x"),
        lambda: bench.claim(hub, "x", key_state()),
        lambda: hub.upstreams(UpstreamsRequest(member="x", holding=key_state())),
        lambda: complain(hub, "x", "y"),
    ):
        with pytest.raises(UnknownMember):
            ask()


def test_why_query_lists_identity_differences_and_complaints(bench, hub) -> None:
    other = msgspec.structs.replace(IDENTITY, quantization="fp8", parallel={"tp": "0/2"})
    bench.join(hub, "w", "v", "q", "a")
    bench.beat(hub, "w", key_state(WHOLE))
    bench.beat(hub, "v", key_state(((0, 50),), num_chunks=50))
    bench.beat(hub, "q", key_state(WHOLE, identity=other, max_readers=1, num_readers=1))
    complain(hub, "a", "w", "stalled")
    assert hub.why(WhyRequest(model="none")).lines == (
        "no member has, fetches, publishes or receives none. "
        "`penstock status` lists the names in use. If it is right, a first fetch with a fallback reads storage",
    )
    assert any("no member is fetching" in line for line in hub.why(WhyRequest(model="llama")).lines)
    hub.upstreams(UpstreamsRequest(member="a", holding=key_state(path="shm <- w")))
    text = "\n".join(hub.why(WhyRequest(model="llama")).lines)
    assert "a is filling with 0 of 100 chunks and reads from w; path of its bytes: shm <- w" in text
    assert "a complains: stalled" in text
    assert "divides the weights into 50 chunks and not 100" in text
    assert "quantization: empty is not fp8; parallel: {} is not {'tp': '0/2'}" in text
    assert hub.why(WhyRequest(model="llama", member="w")).lines == ("w is whole and needs no upstream",)
    assert "does not have or fetch" in hub.why(WhyRequest(model="llama", member="zz")).lines[0]
    asked = hub.why(WhyRequest(model="llama", identity=other)).lines
    assert "q is whole: the identities are equal, it can be read" in asked
    assert sum("the identities differ" in line for line in asked) == 3


def test_why_query_returns_limited_number_of_lines(bench, hub, monkeypatch) -> None:
    members = [f"m{i}" for i in range(60)]
    bench.join(hub, "w", *members)
    bench.beat(hub, "w", key_state(WHOLE))
    for member in members:
        bench.beat(hub, member, key_state())
    made = 0

    def count(*_: object) -> str:
        nonlocal made
        made += 1
        return ""

    monkeypatch.setattr(explain, "_between", count)
    lines = hub.why(WhyRequest(model="llama")).lines
    assert len(lines) == 201 and lines[-1] == "... and more lines. Name a member to see fewer."
    assert made <= 201


def test_hub_status_shows_every_field(bench, hub) -> None:
    bench.join(hub, "w", "idle", rack="r7")
    bench.now += 3
    bench.beat(hub, "w", key_state(WHOLE))
    bench.now += 1
    (only,) = hub.status("llama").members
    assert (only.member, only.rack, only.age_s, only.silent_s) == ("w", "r7", 4.0, 1.0)
    assert [member.member for member in hub.status().members] == ["idle", "w"]
    assert hub.counts["hellos"] == 2


@pytest.mark.parametrize("num_chunks", [0, 100])
def test_upstreams_request_with_mismatched_key_raises(bench, hub, num_chunks) -> None:
    bench.join(hub, "holder", "reader")
    bench.beat(hub, "holder", key_state(WHOLE))
    other = msgspec.structs.replace(IDENTITY, model="allowed")
    asked = msgspec.structs.replace(key_state(num_chunks=num_chunks), identity=other)
    with pytest.raises(PlanError, match="key"):
        hub.upstreams(UpstreamsRequest(member="reader", holding=asked))


def test_departed_members_are_removed_from_hub(bench) -> None:
    # The hub once kept `gone/ID` for every member that left, which took 38 MB for 100,000 members.
    hub = bench.hub()

    def join_and_leave(count: int) -> None:
        for number in range(count):
            member = f"m{bench.now:g}-{number}"
            bench.join(hub, member)
            hub.leave(member)

    join_and_leave(2_000)
    bench.now += 61
    join_and_leave(400)
    assert isinstance(bench.store, MemoryStore)
    assert sum(map(len, bench.store._folders.values())) < 500


def failure(message: str = "no holder", age_s: float = 1.0) -> FailureReport:
    return FailureReport(age_s=age_s, verb="fetch", model="llama", error="NotFound", message=message, blame="source")


def test_failures_of_departed_member_are_listed_once(bench, hub) -> None:
    bench.join(hub, "a", "b")
    for member in "ab":  # members of one process, which both report its failures
        hub.beat(member, Beat(failures=(failure(),)))
    hub.leave("a")
    bench.now += 60
    listed = hub.status().failures
    assert [(entry.message, entry.blame) for entry in listed] == [("no holder", "source")] and listed[0].age_s >= 60
    assert hub.status("llama").failures == listed and hub.status("other").failures == ()
    bench.now += JOB_TTL_S
    assert hub.status().failures == ()


def test_repeatedly_reported_failure_is_listed_for_one_hour(bench, hub) -> None:
    bench.join(hub, "a")
    hub.beat("a", Beat(failures=(failure("old", FAILURE_TTL_S), failure("newer", 3000.0), failure())))
    assert [entry.message for entry in hub.status().failures] == ["no holder", "newer"]
    bench.now += 5
    hub.beat("a", Beat(failures=(failure("newer", 3005.0), failure(age_s=6.0))))
    bench.now += FAILURE_TTL_S - 3005
    assert [entry.message for entry in hub.status().failures] == ["no holder"]


def test_failures_for_forbidden_models_are_discarded(bench, hub) -> None:
    bench.join(hub, "a")
    hub.beat("a", Beat(failures=(failure(),)), Caller(models=("other",)))
    assert hub.status().failures == ()


def test_status_shows_startup_state_and_phase(bench, hub) -> None:
    bench.join(hub, "a")
    assert hub.status().members[0].boot == ""
    # A member of the previous release reports its phases and its error too. The hub stores neither.
    error = BootError(error="no holder", model="secret")
    boot = Boot(started_at=1.0, state="failed", phase="move", phases=(Phase(name="x"),), error=error)
    hub.beat("a", Beat(boot=boot))
    assert hub.status().members[0].boot == "failed: move"
    assert b"secret" not in bench.store.read("member/a").value


def job(phase: str = "running") -> JobState:
    return JobState(
        name="llama", operation="cast", sources=("/in",), destination="/out", process="h:1", phase=phase, num_tasks=4
    )


def test_oversized_conversion_state_raises_plan_error(bench, hub) -> None:
    lost = WorkerState(worker="w0", device="cuda:0", state="lost", end="e" * MAX_TEXT)
    hub.job("a", msgspec.structs.replace(job(), workers=(lost,) * MAX_WORKERS))
    huge = WorkerState(worker="w" * MAX_TEXT, device="d" * MAX_TEXT, end="e" * MAX_TEXT)
    with pytest.raises(PlanError):
        hub.job("b", msgspec.structs.replace(job(), workers=(huge,) * MAX_WORKERS))
    assert [entry.job for entry in hub.status().jobs] == ["a"]


def test_number_of_conversions_is_limited(bench) -> None:
    hub = bench.hub(conversions=3)
    for name, phase in (("a", "running"), ("b", "done"), ("c", "running")):
        bench.now += 1
        hub.job(name, job(phase))
    hub.job("d", job())  # replaces the finished conversion
    assert {entry.job for entry in hub.status().jobs} == {"a", "c", "d"}
    with pytest.raises(SourceBusy):
        hub.job("e", job())
    hub.job("a", job("done"))  # a known conversion may always report
    bench.now += 5
    hub.job("e", job())
    assert {entry.job for entry in hub.status().jobs} == {"c", "d", "e"}
