"""Decisions on a version for the whole fleet, in every order of events, with lost messages, dead processes and a new
hub."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import pytest

from penstock.errors import VersionRefused
from penstock.hub.messages import FleetDecision, SyncState
from penstock.sync.commit.ballot import Ballot
from penstock.sync.commit.learned import Inquiry
from penstock.sync.commit.outcome import Committed, Open, Outcome, Unknown, Withdrawn, to_record
from penstock_hub.snapshot import standing

EPOCH, VERSION = "zero", 7
OUTCOMES = ("prepared", "failed", "gone", "late", "refused")


def test_every_vote_combination_returns_documented_decision() -> None:
    for stragglers in ("leave_out", "withdraw"):
        for votes in itertools.product((*OUTCOMES, "waiting"), repeat=3):
            ballot = Ballot(stragglers=stragglers).begun(["a", "b", "c"])
            for member, vote in zip("abc", votes, strict=True):
                ballot = ballot.reported(member, vote, f"{vote} {member}") if vote != "waiting" else ballot
            bad = {"failed", "gone", "late"} & set(votes)
            now, due = ballot.decide(is_due=False), ballot.decide(is_due=True)
            assert due is not None
            if "refused" in votes:
                assert now == due and not due.is_commit
                assert due.by == "abc"[votes.index("refused")] and due.why == f"refused {due.by}"
            elif "waiting" in votes:
                assert (now is None) == (stragglers == "leave_out" or not bad)
                assert set(due.late) == {m for m, vote in zip("abc", votes, strict=True) if vote in ("waiting", "late")}
                assert due.is_commit == (stragglers == "leave_out" and "prepared" in votes)
            else:
                assert now == due
                assert due.is_commit == ("prepared" in votes and (stragglers == "leave_out" or not bad))
            if due.is_commit:
                assert due.committed == tuple(m for m, vote in zip("abc", votes, strict=True) if vote == "prepared")


def test_latest_report_replaces_any_earlier_report_except_refusal() -> None:
    ballot = (
        Ballot(stragglers="withdraw").begun(["a", "b"]).reported("a", "failed", "no room").reported("a", "prepared")
    )
    assert ballot.reported("b", "prepared").decide(is_due=False).is_commit
    ballot = ballot.reported("b", "refused", "not finite").reported("b", "prepared").lost("b", has_left=True)
    assert ballot.decide(is_due=False).by == "b"


def test_vote_of_late_joiner_is_not_awaited() -> None:
    ballot = Ballot(stragglers="withdraw").begun(["a"]).reported("new", "failed", "x").reported("a", "prepared")
    assert ballot.decide(is_due=False).committed == ("a",)
    assert ballot.reported("new", "prepared").decide(is_due=False).committed == ("a", "new")
    assert ballot.reported("new", "refused", "bad").decide(is_due=False).by == "new"


def test_departed_subscriber_is_not_counted() -> None:
    ballot = Ballot(stragglers="withdraw").begun(["a", "b"]).reported("a", "prepared").lost("b", has_left=True)
    assert ballot.decide(is_due=False).is_commit
    assert Ballot(stragglers="withdraw").begun([]).decide(is_due=False).is_commit, "nobody can disagree"


def test_commit_requires_subscriber_with_check() -> None:
    ballot = Ballot(stragglers="leave_out", needs_check=True).begun(["a", "b"]).reported("a", "prepared")
    unchecked = ballot.reported("b", "prepared").decide(is_due=False)
    assert not unchecked.is_commit and "no prepared subscriber checks" in unchecked.why
    assert ballot.reported("b", "prepared", is_checked=True).decide(is_due=False).is_commit
    assert not ballot.decide(is_due=True).is_commit, "the subscriber that checks is late"


def test_refused_version_error_names_replica() -> None:
    withdrawn = Withdrawn(epoch=EPOCH, version=VERSION, by="abcdefghij", why="not finite")
    with pytest.raises(
        VersionRefused, match="version 7 of 'policy' was refused by subscriber abcdefgh: not finite"
    ) as e:
        raise withdrawn.error("policy")
    assert (e.value.version, e.value.member, e.value.reason) == (7, "abcdefghij", "not finite")


COMMITTED = Committed(epoch=EPOCH, version=VERSION)
WITHDRAWN = Withdrawn(epoch=EPOCH, version=VERSION)
SILENT, GONE, PAST = Unknown(), Open(is_begun=False), Unknown(is_past=True)


def ends(*replies: tuple[float, Outcome]) -> tuple[list[str], Outcome | None]:
    """Return the questions and the result of the wait, after replies with their times."""
    step: Inquiry | Outcome = Inquiry.begin(0.0, limit_s=10.0, stall_s=5.0)
    questions = ["coordinator"]
    for at, reply in replies:
        assert isinstance(step, Inquiry)
        step = step.after(reply, at)
        if not isinstance(step, Inquiry):
            return questions, step
        questions.append(step.question)
    return questions, None


def test_responsive_rank_0_is_polled_again() -> None:
    replies = [(at, Open()) for at in (1.0, 2.0, 3.0)]
    assert ends(*replies, (4.0, COMMITTED)) == (["coordinator"] * 4, COMMITTED)


def test_silent_rank_0_is_retried_until_deadline() -> None:
    silent = [(2.0, Open()), (6.9, SILENT), (7.1, SILENT)]
    assert ends(*silent)[0] == ["coordinator"] * 3 + ["hub"]
    assert ends(*silent, (7.2, WITHDRAWN))[1] == WITHDRAWN
    assert ends((1.0, GONE), (1.1, COMMITTED)) == (["coordinator", "hub"], COMMITTED)


def test_undecided_rank_0_is_polled_until_time_limit() -> None:
    questions, end = ends((9.0, Open()), (10.5, Open()), (10.6, WITHDRAWN))
    assert (questions[-1], end) == ("hub", WITHDRAWN)


def test_decision_wait_without_reply_times_out() -> None:
    replies = []
    for at in range(1, 8):
        replies += [(float(at), GONE), (at + 0.5, SILENT)]
    questions, end = ends(*replies)
    assert end == SILENT and len(questions) == 10, "at 5.5 s"
    assert ends((1.0, GONE), (1.1, PAST))[1] == PAST


# A search through every order of events of a coordinator, a hub and subscribers.


@dataclass(frozen=True)
class Subscriber:
    vote: str = ""  # sent, perhaps not delivered
    knows: str = ""  # the decision that it acts on
    is_alive: bool = True
    is_reported: bool = False  # to the current hub


@dataclass(frozen=True)
class World:
    stragglers: str
    subscribers: tuple[Subscriber, ...]
    delivered: tuple[str, ...]  # the votes that rank 0 received
    phase: str = "collecting"  # "proposing", "committed", "withdrawn", "dead"
    record: str = ""
    is_recent: bool = False
    num_restarts: int = 0
    is_zero_reported: bool = False


def hub(world: World, outcome: str, caller: str) -> tuple[World, str]:
    """Return the world after a proposal to the hub, and the hub's reply."""
    if world.record:
        return world, world.record
    states = {}
    for i, one in enumerate(world.subscribers):
        by = str(i) if one.vote == "refused" else ""
        known = FleetDecision(epoch=EPOCH, version=VERSION, outcome=one.knows, by=by)
        known = known if one.knows and one.is_reported else None
        states[str(i)] = SyncState(name="policy", side="subscriber", decision=known)
    if world.is_zero_reported and world.phase in ("committed", "withdrawn"):
        known = FleetDecision(epoch=EPOCH, version=VERSION, outcome=world.phase)
        states[EPOCH] = SyncState(name="policy", side="publisher", decision=known)
    proposal = FleetDecision(epoch=EPOCH, version=VERSION, outcome=outcome)
    reply = standing(proposal, states, caller, is_recent=world.is_recent)
    assert not reply.is_past
    found = "" if reply.decision is None else reply.decision.outcome
    return replace(world, record=found), found


def changed(world: World, i: int, **changes) -> World:
    some = list(world.subscribers)
    some[i] = replace(some[i], **changes)
    return replace(world, subscribers=tuple(some))


def following(world: World) -> Iterator[World]:
    """Yield every possible next world. A lost message is an event that does not happen."""
    for i, one in enumerate(world.subscribers):
        if not one.is_alive:
            continue
        yield changed(world, i, is_alive=False)
        if not one.vote:
            yield from (changed(world, i, vote=vote) for vote in ("prepared", "failed"))
            # As in `Subscriber`, a replica whose check failed never goes live.
            yield changed(world, i, vote="refused", knows="withdrawn")
        elif world.phase == "collecting" and world.delivered[i] != one.vote:
            delivered = (*world.delivered[:i], one.vote, *world.delivered[i + 1 :])
            yield replace(world, delivered=delivered)
        if one.vote == "prepared" and not one.knows:
            if world.phase in ("committed", "withdrawn"):
                yield changed(world, i, knows=world.phase)
            # The subscriber gave up on rank 0, and the reply may be lost.
            after, found = hub(world, "withdrawn", str(i))
            yield after
            if found:
                yield changed(after, i, knows=found)
        if not one.is_reported or one.knows:
            yield changed(world, i, is_reported=True)
    if world.phase != "dead":
        yield replace(world, phase="dead", is_zero_reported=False)
        if not world.is_zero_reported:
            yield replace(world, is_zero_reported=True)
    if world.phase == "collecting":
        ballot = Ballot(stragglers=world.stragglers).begun(map(str, range(len(world.subscribers))))
        for i, vote in enumerate(world.delivered):
            ballot = ballot.reported(str(i), vote) if vote else ballot
        for is_due in (False, True):
            verdict = ballot.decide(is_due=is_due)
            if verdict is not None:
                yield replace(world, phase="proposing" if verdict.is_commit else "withdrawn")
    if world.phase == "proposing":
        after, found = hub(world, "committed", EPOCH)
        yield after  # the reply is lost, and rank 0 retries or dies
        if found:
            yield replace(after, phase=found)
    if world.num_restarts < 1:
        unreported = tuple(replace(one, is_reported=False) for one in world.subscribers)
        yield replace(world, record="", is_recent=True, num_restarts=1, subscribers=unreported, is_zero_reported=False)
    if world.is_recent:
        # The hub is no longer new when every live member has reported.
        everyone = all(one.is_reported for one in world.subscribers if one.is_alive)
        if everyone and (world.is_zero_reported or world.phase == "dead"):
            yield replace(world, is_recent=False)


def fault(world: World) -> str:
    # Dead processes do not serve, and restart as new members.
    alive = [(one, vote) for one, vote in zip(world.subscribers, world.delivered, strict=True) if one.is_alive]
    if all(one.knows != "committed" for one, _ in alive):
        return ""
    # A replica that refused after the fleet's commit reports that it is behind.
    if any(one.knows == "withdrawn" and one.vote != "refused" for one, _ in alive):
        return "one is live, and another was told that the version is withdrawn"
    if world.phase == "withdrawn":
        return "one is live, and rank 0 says that the version is withdrawn"
    if "refused" in world.delivered:
        return "one is live with a version whose refusal rank 0 had"
    if world.stragglers == "withdraw" and any(vote != "prepared" for vote in world.delivered):
        return "one is live without all"
    return ""


@pytest.mark.parametrize("stragglers", ["leave_out", "withdraw"])
def test_subscribers_never_act_on_conflicting_decisions(stragglers: str) -> None:
    first = World(stragglers=stragglers, subscribers=(Subscriber(), Subscriber()), delivered=("", ""))
    seen, front, num_live = {first}, [first], 0
    while front:
        world = front.pop()
        assert not fault(world), f"{fault(world)}: {world}"
        num_live += all(one.knows == "committed" for one in world.subscribers)
        for after in following(world):
            if after not in seen:
                seen.add(after)
                front.append(after)
    assert len(seen) > 10_000 and num_live, "the model reaches a commit on all"


def test_model_checker_detects_hub_losing_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search detects a hub that withdraws a version although it may have lost a commit."""
    first = World(stragglers="leave_out", subscribers=(Subscriber(), Subscriber()), delivered=("", ""))

    careful = standing

    def careless(*arguments, is_recent: bool):
        return careful(*arguments, is_recent=False)

    monkeypatch.setitem(hub.__globals__, "standing", careless)
    seen, front, faults = {first}, [first], set()
    while front and not faults:
        world = front.pop()
        faults |= {fault(world)} - {""}
        fresh = set(following(world)) - seen
        seen |= fresh
        front += fresh
    assert faults


def test_fleet_decision_round_trips_through_encoding() -> None:
    state = SyncState(name="policy", side="subscriber", prepared=8, decision=to_record(COMMITTED))
    assert msgspec.json.decode(msgspec.json.encode(state), type=SyncState) == state
