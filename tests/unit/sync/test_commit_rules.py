"""The rules of a commit, one by one. `test_commit_model` searches every order of events."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from penstock.errors import VersionRefused
from penstock.hub.messages import SyncState
from penstock.sync.commit.ballot import Ballot
from penstock.sync.commit.learned import Inquiry
from penstock.sync.commit.outcome import Committed, Open, Outcome, Unknown, Withdrawn

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
    step: Inquiry | Outcome = Inquiry(begun=0.0, limit_s=10.0, stall_s=5.0, last_reply=0.0)
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


def test_fleet_decision_round_trips_through_encoding() -> None:
    state = SyncState(name="policy", side="subscriber", prepared=8, decision=COMMITTED.record())
    assert msgspec.json.decode(msgspec.json.encode(state), type=SyncState) == state
