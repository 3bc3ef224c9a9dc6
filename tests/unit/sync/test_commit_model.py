"""An exhaustive search of the commit protocol: three engines, one publisher rank 0 and the hub.

The search visits every order of events. A message may be lost, delivered twice, late, or after its sender died. Any
engine and rank 0 may die, and the hub may restart without its records. All decisions are made by the real rules:
`Ballot`, `recorded`, `Inquiry`, `KnownOutcomes` and the hub's `standing`. The world only carries their messages.

Engines are interchangeable, so worlds that differ only in the order of the engines count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec
import pytest

from penstock.hub.messages import SyncState
from penstock.sync.commit import ballot as ballot_rules
from penstock.sync.commit import outcome as outcome_rules
from penstock.sync.commit.ballot import Ballot
from penstock.sync.commit.learned import Inquiry, KnownOutcomes
from penstock.sync.commit.outcome import (
    Committed,
    Decided,
    Granted,
    Open,
    Outcome,
    Received,
    Reported,
    Unknown,
    Withdrawn,
    of_decision,
    of_record,
    to_decision,
)
from penstock.sync.messages import PartRequest, RankProgress
from penstock_hub import snapshot

EPOCH, VERSION = "zero", 7
COMMITTED = Committed(epoch=EPOCH, version=VERSION)
WITHDRAWN = Withdrawn(epoch=EPOCH, version=VERSION)
SILENT, GONE = Unknown(), Open(is_begun=False)
NOW, LATE = 1.0, 100.0
"""Times before and after every deadline of a wait that began at 0."""
MAX_DEATHS = 1


class Engine(NamedTuple):
    """An engine. An `old` engine serves the previous version, and a `staged` engine also waits for the outcome."""

    phase: str = "old"  # "staged", "live", "dead"
    sent: tuple[str, ...] = ()  # the votes in the network, each of which may arrive at any time and several times
    counted: str = ""  # the last vote that rank 0 received
    knows: str = ""  # "committed", "withdrawn", or "refused" after a check that failed here
    is_listed: bool = True  # whether the current hub has its newest heartbeat


class World(NamedTuple):
    """The state of all processes and of the network."""

    terms: tuple[str, bool] = ("", False)  # stragglers, and whether a check must pass. Empty once rank 0 has proposed
    engines: tuple[Engine, ...] = (Engine(), Engine(), Engine())
    proposal: str = ""  # rank 0's proposal, which the hub has not answered yet
    outcome: str = ""  # rank 0's outcome: "committed", "withdrawn" or "unknown"
    is_dead: bool = False
    is_zero_listed: bool = True
    record: str = ""
    in_flight: tuple[str, ...] = ()  # proposals to the hub that may still arrive
    is_recent: bool = False
    has_restarted: bool = False


class Rules:
    """The real rules, memoised on the model's words for their arguments."""

    def __init__(self) -> None:
        self.decide = cache(self._decide)
        self.after = cache(self._after)
        self.hub = cache(self._hub)
        self.may_read = cache(self._may_read)
        self.asks = cache(self._asks)
        self.waits_for_ever = cache(self._waits_for_ever)

    def ballot(self, terms: tuple[str, bool], votes: tuple[str, ...] = ("", "", "")) -> Ballot:
        stragglers, needs_check = terms
        ballot = Ballot(stragglers=stragglers, needs_check=needs_check, epoch=EPOCH, timeout_s=10.0)  # type: ignore[arg-type]
        ballot = ballot.begun("abc", VERSION)
        for member, vote in zip("abc", votes, strict=True):
            if vote == "gone":
                ballot = ballot.lost(member, has_left=False)
            elif vote:
                ballot = ballot.ended(member, report_of(vote))
        return ballot

    def _decide(self, terms: tuple[str, bool], votes: tuple[str, ...], is_due: bool, is_cancelled: bool) -> str:
        ballot = msgspec.structs.replace(self.ballot(terms, votes), cancelled="closed" if is_cancelled else "")
        proposal = ballot.decide(is_due=is_due)
        assert not isinstance(proposal, Received)
        return word_of(proposal)

    def recorded(self, proposal: str, record: str) -> str:
        found = None if record == "" else decided(record)
        return word_of(outcome_rules.recorded(decided(proposal), found))

    def reply(self, world: World) -> Reported:
        """Return what rank 0 replies to a question for the outcome."""
        outcome = decided(world.outcome) if world.outcome in ("committed", "withdrawn") else Open()
        return of_decision(
            msgspec.msgpack.decode(msgspec.msgpack.encode(to_decision(outcome)), type=type(to_decision(outcome)))
        )

    def _after(self, question: str, reply: str, at: float) -> str:
        inquiry = Inquiry(begun=0.0, limit_s=10.0, stall_s=5.0, last_reply=0.0)
        inquiry = msgspec.structs.replace(inquiry, question=question)  # type: ignore[arg-type]
        step = inquiry.after(REPLIES[reply], at)
        return step.question if isinstance(step, Inquiry) else word_of(step)

    def _asks(self, question: str) -> bool:
        """Return whether a wait whose questions nobody answers ever asks this process."""
        asked, fresh = set(), {"coordinator"}
        while fresh:
            asked |= fresh
            fresh = {self.after(one, "silent", at) for one in asked for at in (NOW, LATE)} & {"coordinator", "hub"}
            fresh -= asked
        return question in asked

    def _waits_for_ever(self) -> bool:
        """Return whether a wait goes on after many replies that are all late and never name an outcome."""
        limits = {"limit_s": 10.0, "stall_s": 5.0}
        for reply in (SILENT, GONE, Open()):
            step: Inquiry | Outcome = Inquiry(begun=0.0, last_reply=0.0, **limits)
            for at in range(1, 40):
                is_of_hub = isinstance(step, Inquiry) and step.question == "hub"
                step = step.after(SILENT if is_of_hub else reply, float(at)) if isinstance(step, Inquiry) else step
            if isinstance(step, Inquiry):
                return True
        return False

    def _hub(self, reports: tuple[tuple[str, str], ...], proposal: str, is_zero: bool, is_recent: bool) -> str:
        states = {}
        for member, knows in reports:
            by = member if knows == "refused" else ""
            outcome = COMMITTED if knows == "committed" else Withdrawn(epoch=EPOCH, version=VERSION, by=by)
            states[member] = SyncState(
                name="policy",
                side="publisher" if member == EPOCH else "subscriber",
                epoch=EPOCH,
                version=VERSION if knows in ("live", "committed") and member != EPOCH else VERSION - 1,
                decision=None if knows in ("", "live") else outcome.record(),
            )
        reply = snapshot.standing(decided(proposal).record(), states, EPOCH if is_zero else "a", is_recent=is_recent)
        assert not reply.is_past
        return word_of(of_record(reply.decision))

    def _may_read(self, source: str, knows: str) -> str:
        """Return whether an engine that requests the version stages it ("staged"), goes live, or keeps its version."""
        if source == "peer":  # a live engine plans, as in `Participant.terms`
            terms = known("committed").withdrawn(EPOCH, VERSION) or Granted(epoch=EPOCH, version=VERSION)
        else:
            outcome = decided(source) if source in ("committed", "withdrawn") else Open()
            ballot = msgspec.structs.replace(self.ballot(("withdraw", False)), outcome=outcome)
            terms = ballot.terms(PartRequest(version=-1, digest="0" * 32, can_wait=True), NOW)  # type: ignore[assignment]
        if known(knows).refused(terms) is not None:
            return "refused"
        assert isinstance(terms, Granted)
        return "live" if terms.decide_s is None else "staged"


def report_of(vote: str) -> RankProgress:
    outcome = "prepared" if vote == "checked" else vote
    return RankProgress(version=VERSION, outcome=outcome, why=vote, is_checked=vote == "checked")  # type: ignore[arg-type]


def decided(word: str) -> Decided:
    return COMMITTED if word == "committed" else WITHDRAWN


def word_of(outcome: Outcome | None) -> str:
    return "" if outcome is None else type(outcome).__name__.lower()


def known(word: str) -> KnownOutcomes:
    if not word:
        return KnownOutcomes()
    return KnownOutcomes().noted(COMMITTED if word == "committed" else WITHDRAWN)


REPLIES: dict[str, Outcome] = {
    "open": Open(),
    "gone": GONE,
    "silent": SILENT,
    "committed": COMMITTED,
    "withdrawn": WITHDRAWN,
}


def asked(rules: Rules, world: World, proposal: str, *, is_zero: bool) -> World:
    """Return the world after the hub processed a proposal. `record` is its reply, or empty."""
    if world.record:
        return world
    reports = [
        (name, engine.knows or engine.phase * (engine.phase == "live"))
        for name, engine in zip("abc", world.engines, strict=True)
        if engine.is_listed and engine.phase != "dead"
    ]
    if world.is_zero_listed and not world.is_dead:
        reports.append((EPOCH, world.outcome * (world.outcome in ("committed", "withdrawn"))))
    return world._replace(record=rules.hub(tuple(reports), proposal, is_zero, world.is_recent))


def put(world: World, i: int, **changes: Any) -> World:
    engines = list(world.engines)
    engines[i] = engines[i]._replace(**changes)
    return world._replace(engines=tuple(engines))


def learned(world: World, i: int, step: str) -> World:
    """Return the world after an engine's wait went on or ended."""
    # After `unknown`, the call raises SourceStalled, the version stays staged, and the caller calls `commit` again.
    if step in ("coordinator", "hub", "unknown"):
        return world
    return put(world, i, phase="live" if step == "committed" else "old", knows=step, is_listed=True)


def events_of_engine(rules: Rules, world: World, i: int) -> Iterator[World]:
    engine = world.engines[i]
    if sum(other.phase == "dead" for other in world.engines) < MAX_DEATHS:
        yield put(world, i, phase="dead", knows="", is_listed=True)
    if not engine.is_listed:
        yield put(world, i, is_listed=True)
    if engine.phase == "old":
        sources = [] if world.is_dead else [world.outcome]
        sources += ["peer"] * any(other.phase == "live" for other in world.engines)
        for source in sources:
            found = rules.may_read(source, engine.knows)
            if found == "live":
                yield put(world, i, phase="live", is_listed=True)
            elif found == "refused" and not engine.knows:
                yield put(world, i, knows="withdrawn", is_listed=True)
            elif found == "staged":
                # One engine that checks is enough, because only whether there is one matters.
                is_first = not any("checked" in (*other.sent, other.counted) for other in world.engines)
                prepared = ("prepared", "checked") if world.terms[1] and is_first else ("prepared",)
                for vote in prepared:
                    yield put(world, i, phase="staged", sent=sent(engine, vote))
                if not engine.sent:
                    yield put(world, i, sent=sent(engine, "failed"))
                refused = {"sent": sent(engine, "refused"), "knows": "refused", "is_listed": True}
                yield put(world, i, **refused)
    if engine.phase == "staged":
        yield from questions(rules, world, i)


def sent(engine: Engine, vote: str) -> tuple[str, ...]:
    return tuple(sorted({*engine.sent, vote}))


def questions(rules: Rules, world: World, i: int) -> Iterator[World]:
    """Yield the worlds after a staged engine asked a process. Silence lets it ask the other one at any time."""
    if rules.asks("coordinator"):
        replies = ["silent", "gone"] if world.is_dead else ["silent"]
        # A reply of rank 0 may arrive after its death, but not after a hub that started later has settled.
        if not (world.is_dead and world.has_restarted):
            replies.append("open" if world.outcome == "unknown" else word_of(rules.reply(world)))
        for reply in replies:
            for at in (NOW, LATE):
                yield learned(world, i, rules.after("coordinator", reply, at))
    if not rules.asks("hub"):
        return
    after = asked(rules, world, "withdrawn", is_zero=False)
    if after.record:
        yield learned(after, i, rules.after("hub", after.record, NOW))
    for at in (NOW, LATE):
        step = rules.after("hub", "silent", at)
        yield learned(after, i, step)  # the hub's reply is lost
        yield learned(world._replace(in_flight=flying(world, "withdrawn")), i, step)


def flying(world: World, proposal: str) -> tuple[str, ...]:
    return tuple(sorted({*world.in_flight, proposal}))


def votes_of(world: World) -> tuple[str, ...]:
    return tuple(engine.counted for engine in world.engines)


def events_of_zero(rules: Rules, world: World) -> Iterator[World]:
    if world.is_dead:
        return
    yield world._replace(is_dead=True, is_zero_listed=True)
    if not world.is_zero_listed:
        yield world._replace(is_zero_listed=True)
    if world.outcome:
        return
    if world.proposal:
        after = asked(rules, world, world.proposal, is_zero=True)
        for record in {after.record, ""}:  # an empty record: the reply is lost until the deadline
            yield settled(after, rules.recorded(world.proposal, record))
        yield settled(
            world._replace(in_flight=flying(world, "zero " + world.proposal)), rules.recorded(world.proposal, "")
        )
        yield after  # the reply is lost, and rank 0 asks again
        return
    for i, engine in enumerate(world.engines):
        for vote in engine.sent:
            if vote != engine.counted:
                yield put(world, i, counted=count(rules, world, i, vote))
        if engine.phase == "dead" and not engine.counted:
            yield put(world, i, counted="gone")
    for is_due, is_cancelled in ((False, False), (True, False), (False, True)):
        proposal = rules.decide(world.terms, votes_of(world), is_due, is_cancelled)
        if proposal:
            yield world._replace(proposal=proposal)


def count(rules: Rules, world: World, i: int, vote: str) -> str:
    """Return the vote that counts after `vote` arrived, by the real ballot."""
    member = "abc"[i]
    votes = rules.ballot(world.terms, votes_of(world)).ended(member, report_of(vote)).votes
    return "checked" if votes[member].is_checked else votes[member].standing


def settled(world: World, outcome: str) -> World:
    return world._replace(proposal="", outcome=outcome, is_zero_listed=True)


def events_of_hub(rules: Rules, world: World) -> Iterator[World]:
    for proposal in world.in_flight:
        yield asked(rules, world, proposal.removeprefix("zero "), is_zero=proposal.startswith("zero"))
    # A restart before the hub has a record loses nothing, and rank 0 counts votes without the hub.
    if world.record and not world.terms[0] and not world.has_restarted:
        # Its connections end, so nothing is in flight any more.
        engines = tuple(engine._replace(is_listed=engine.phase == "dead") for engine in world.engines)
        yield world._replace(
            engines=engines, is_zero_listed=world.is_dead, record="", in_flight=(), is_recent=True, has_restarted=True
        )
    if world.is_recent and world.is_zero_listed and all(engine.is_listed for engine in world.engines):
        yield world._replace(is_recent=False)


def following(rules: Rules, world: World) -> Iterator[World]:
    """Yield every possible next world. A lost message is an event that does not happen."""
    for i, engine in enumerate(world.engines):
        if engine.phase != "dead":
            yield from events_of_engine(rules, world, i)
    yield from events_of_zero(rules, world)
    yield from events_of_hub(rules, world)


def fault_of(world: World) -> str:
    """Return which promise the world breaks, or an empty text."""
    alive = [engine for engine in world.engines if engine.phase != "dead"]
    is_live = any(engine.phase == "live" for engine in alive)
    if is_live and any(engine.knows == "withdrawn" for engine in alive):
        return "one engine is live, and another was told that the version is withdrawn"
    if is_live and world.outcome == "withdrawn":
        return "an engine is live with a version that the publisher reported as withdrawn"
    if is_live and world.record == "withdrawn":
        return "an engine is live with a version that the hub recorded as withdrawn"
    if any(engine.phase == "live" and engine.knows == "refused" for engine in alive):
        return "an engine is live with a version that failed its check"
    if world.outcome == "committed" and not world.has_restarted:
        if world.record != "committed":
            return "the publisher reported success before the hub had recorded the commit"
        if any(engine.knows == "withdrawn" for engine in alive):
            return "an engine withdrew the version after the publisher reported success"
    if is_live and world.record != "committed" and not world.has_restarted:
        return "an engine is live before the hub has recorded the commit"
    return ""


def count_fault(before: World, after: World) -> str:
    """Return which promise rank 0 breaks when it counts a vote or proposes an outcome, or an empty text."""
    for old, new in zip(before.engines, after.engines, strict=True):
        if old.counted == "refused" != new.counted:
            return "rank 0 forgets a refusal"
    if after.proposal != "committed" or before.proposal:
        return ""
    votes = votes_of(before)
    if "refused" in votes:
        return "rank 0 proposes a commit although it has a refusal"
    stragglers, needs_check = before.terms
    if stragglers == "withdraw" and any(vote not in ("prepared", "checked") for vote in votes):
        return "rank 0 proposes a commit although not every engine prepared the version"
    if needs_check and "checked" not in votes:
        return "rank 0 proposes a commit although no engine checked the version"
    return ""


def canonical(world: World) -> World:
    """Return the world without details that nothing depends on any more. The order of the engines is one of them."""
    engines, terms = world.engines, world.terms
    if world.proposal or world.outcome or world.is_dead:  # rank 0 counts no more votes
        terms = ("", False)
        engines = tuple(engine._replace(sent=(), counted="") for engine in engines)
    in_flight = () if world.record else world.in_flight
    return world._replace(terms=terms, engines=tuple(sorted(engines)), in_flight=in_flight)


def stuck(rules: Rules, world: World) -> str:
    """Return which call does not end although all its timers have fired and no process replies."""
    if not world.is_dead and not world.outcome:
        if not (world.proposal or rules.decide(world.terms, votes_of(world), True, False)):
            return "rank 0 does not decide at its deadline"
        if world.proposal and not rules.recorded(world.proposal, ""):
            return "rank 0 does not stop asking a hub that does not reply"
    if any(engine.phase == "staged" for engine in world.engines) and rules.waits_for_ever():
        return "an engine waits for ever"
    return ""


TERMS = [(stragglers, needs_check) for stragglers in ("leave_out", "withdraw") for needs_check in (False, True)]


def search() -> tuple[int, str, set[str]]:
    """Return the number of searched worlds, the first broken promise, and which results were reached."""
    rules = Rules()
    front = [World(terms) for terms in TERMS]
    seen, reached = set(front), set()
    while front:
        fresh = []
        for world in front:
            for after in following(rules, world):
                fault = count_fault(world, after)
                after = canonical(after)
                if after in seen and not fault:
                    continue
                seen.add(after)
                fresh.append(after)
                fault = fault or fault_of(after) or stuck(rules, after)
                if fault:
                    return len(seen), f"{fault}: {after}", reached
                reached.add(after.outcome)
                if all(engine.phase == "live" for engine in after.engines):
                    reached.add("live")
        front = fresh
    return len(seen), "", reached


def test_protocol_keeps_promises_in_every_order() -> None:
    num_worlds, fault, reached = search()
    print(f"{num_worlds} worlds")
    assert not fault
    assert {"live", "committed", "withdrawn", "unknown"} <= reached
    assert num_worlds > 50_000


# Each mutation breaks one real rule, and the search must notice.

REAL_AFTER, REAL_DECIDE, REAL_TERMS, REAL_REPORTED = Inquiry.after, Ballot.decide, Ballot.terms, Ballot.reported
REAL_RECORDED, REAL_STANDING = outcome_rules.recorded, snapshot.standing


def live_when_rank_0_is_silent(wait: Inquiry, reply: Outcome, at: float) -> Any:
    return COMMITTED if reply == SILENT and at == LATE else REAL_AFTER(wait, reply, at)


def withdrawn_when_nobody_replies(wait: Inquiry, reply: Outcome, at: float) -> Any:
    step = REAL_AFTER(wait, reply, at)
    return WITHDRAWN if step == SILENT else step


def endless_wait(wait: Inquiry, reply: Outcome, at: float) -> Any:
    step = REAL_AFTER(wait, reply, at)
    return wait if step == SILENT else step


def success_before_record(proposal: Decided, record: Decided | None) -> Any:
    return proposal if record is None else REAL_RECORDED(proposal, record)


def success_against_record(proposal: Decided, record: Decided | None) -> Any:
    return proposal


def live_before_decision(ballot: Ballot, request: PartRequest, now: float) -> Any:
    terms = REAL_TERMS(ballot, request, now)
    return msgspec.structs.replace(terms, decide_s=None) if isinstance(terms, Granted) else terms


def withdrawn_version_is_granted(ballot: Ballot, request: PartRequest, now: float) -> Any:
    return Granted(epoch=EPOCH, version=VERSION) if ballot.is_over else REAL_TERMS(ballot, request, now)


def later_report_replaces_refusal(ballot: Ballot, member: str, standing: Any, why: str = "", **more: Any) -> Ballot:
    votes = {**ballot.votes, member: ballot_rules.Vote(standing=standing, why=why, **more)}
    return msgspec.structs.replace(ballot, votes=votes)


def commit_without_all(ballot: Ballot, *, is_due: bool) -> Any:
    return REAL_DECIDE(msgspec.structs.replace(ballot, stragglers="leave_out"), is_due=is_due)


def commit_without_check(ballot: Ballot, *, is_due: bool) -> Any:
    return REAL_DECIDE(msgspec.structs.replace(ballot, needs_check=False), is_due=is_due)


def no_deadline(ballot: Ballot, *, is_due: bool) -> Any:
    return REAL_DECIDE(ballot, is_due=False)


def refused_version_is_read_again(known: KnownOutcomes, terms: Any) -> Withdrawn | None:
    return terms if isinstance(terms, Withdrawn) else None


def hub_that_trusts_its_loss(proposal: Any, states: Any, caller: str, *, is_recent: bool) -> Any:
    return REAL_STANDING(proposal, states, caller, is_recent=False)


def hub_that_ignores_live_versions(proposal: Any, states: Any, caller: str, *, is_recent: bool) -> Any:
    states = {name: msgspec.structs.replace(state, version=-1) for name, state in states.items()}
    return REAL_STANDING(proposal, states, caller, is_recent=is_recent)


MUTATIONS: list[tuple[Any, str, Callable[..., Any], str]] = [
    (Inquiry, "after", live_when_rank_0_is_silent, "live before the hub has recorded"),
    (Inquiry, "after", withdrawn_when_nobody_replies, "an engine withdrew the version"),
    (Inquiry, "after", endless_wait, "an engine waits for ever"),
    (outcome_rules, "recorded", success_before_record, "success before the hub had recorded"),
    (outcome_rules, "recorded", success_against_record, "success before the hub had recorded"),
    (Ballot, "terms", live_before_decision, "live before the hub has recorded"),
    (Ballot, "terms", withdrawn_version_is_granted, "reported as withdrawn"),
    (Ballot, "reported", later_report_replaces_refusal, "rank 0 forgets a refusal"),
    (Ballot, "decide", commit_without_all, "although not every engine prepared"),
    (Ballot, "decide", commit_without_check, "although no engine checked"),
    (Ballot, "decide", no_deadline, "rank 0 does not decide at its deadline"),
    (KnownOutcomes, "refused", refused_version_is_read_again, "a version that failed its check"),
    (snapshot, "standing", hub_that_trusts_its_loss, "withdrawn"),
    (snapshot, "standing", hub_that_ignores_live_versions, "withdrawn"),
]


@pytest.mark.parametrize(
    ("owner", "name", "mutation", "promise"), MUTATIONS, ids=[mutation.__name__ for _, _, mutation, _ in MUTATIONS]
)
def test_search_detects_broken_rule(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mutation: Callable[..., Any], promise: str
) -> None:
    monkeypatch.setattr(owner, name, mutation)
    num_worlds, fault, _ = search()
    print(f"found after {num_worlds} worlds: {fault}")
    assert promise in fault
