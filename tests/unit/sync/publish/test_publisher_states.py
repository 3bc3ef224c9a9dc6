"""Every state of a publisher and every transition, with a hub and members in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from tests.support.memory_sync import Hub, MemoryMember, MemoryMembership, MemorySubscriber, registered

from penstock.errors import (
    Cancelled,
    ConfigError,
    DestinationError,
    HubUnavailable,
    PeerLost,
    SourceStalled,
    VersionRefused,
)
from penstock.hub.messages import FleetDecision
from penstock.sync.publish.publisher import Publisher
from penstock.sync.publish.state import NEXT, PublisherState
from penstock.sync.report import PublishMode, PublishReport

S = PublisherState


class Rank:
    """A publisher rank in memory, before it is opened."""

    def __init__(
        self,
        hub: Hub,
        name: str = "p0",
        *,
        mode: PublishMode = "snapshot",
        rank: int = 0,
        world_size: int = 1,
        stall_s: float = 5.0,
    ) -> None:
        self.member = MemoryMember(hub, name)
        self.membership = MemoryMembership(hub, self.member, stall_s=stall_s)
        self.params = {f"w{rank}": torch.arange(8.0)}
        self._tensors = registered(self.member, self.params, is_live=mode == "live", world_size=world_size)
        self._options: dict[str, Any] = {"mode": mode, "rank": rank, "world_size": world_size}

    def make_publisher(self) -> Publisher:
        return Publisher(self.membership, self._tensors, **self._options)

    def open(self) -> Publisher:
        return Publisher.open(self.membership, self._tensors, **self._options)


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def wait_until(condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.002)


def wait_for(publisher: Publisher, state: PublisherState) -> None:
    wait_until(lambda: publisher.state is state)


def publishing(pool: ThreadPoolExecutor, publisher: Publisher, version: int, **terms: Any) -> Future[PublishReport]:
    return pool.submit(publisher.publish, version, **terms)


def listed(publisher: Publisher, hub: Hub) -> tuple[int, str]:
    """Return the version and the state that the hub lists."""
    (found,) = [other.state for other in publisher.member.sync("policy").members if other.member == publisher.member.id]
    return found.version, found.state


def fail_once(rank: Rank, publisher: Publisher, state: PublisherState) -> None:
    """Make the next report to the hub in this state fail."""

    def report() -> None:
        if publisher.state is state:
            rank.member.on_report = lambda: None
            raise DestinationError("the device failed")

    rank.member.on_report = report


def test_publisher_constructor_registers_nothing(hub: Hub) -> None:
    rank = Rank(hub)
    publisher = rank.make_publisher()
    assert publisher.state is S.OPENING
    assert not rank.member.server.handlers and not rank.member.syncs
    assert not rank.member.sync("policy").members


def test_transition_table_includes_every_state() -> None:
    assert set(NEXT) == set(PublisherState)
    assert all(S.CLOSED in following for state, following in NEXT.items() if state is not S.CLOSED)
    assert not NEXT[S.CLOSED]


def test_opened_publisher_is_listed_as_idle(hub: Hub) -> None:
    publisher = Rank(hub).open()
    assert publisher.state is S.IDLE
    assert listed(publisher, hub) == (-1, "idle")


def test_second_publisher_raises_while_first_is_alive(hub: Hub) -> None:
    first = Rank(hub).open()
    rank = Rank(hub, "p1")
    first_beats = iter(range(100))
    rank.membership.on_look = lambda: (next(first_beats), first.member.report_now())
    with pytest.raises(ConfigError, match="already published"):
        rank.open()
    assert first.state is S.IDLE


def test_publisher_opens_after_previous_publisher_died(hub: Hub) -> None:
    first = Rank(hub)
    first.open()
    first.member.die()
    assert Rank(hub, "p1").open().state is S.IDLE


def test_second_publisher_raises_source_stalled_if_first_is_silent(hub: Hub) -> None:
    Rank(hub).open()
    rank = Rank(hub, "p1", stall_s=0.1)
    registration = rank.member.registration
    registration.welcome = msgspec.structs.replace(registration.welcome, ttl_s=0.1)
    publisher = rank.make_publisher()
    with pytest.raises(SourceStalled, match="silent"):
        publisher = rank.open()
    assert publisher.state is S.OPENING


def test_opening_without_rank_0_raises_source_stalled(hub: Hub) -> None:
    with pytest.raises(SourceStalled, match="no rank 0"):
        Rank(hub, "p1", rank=1, world_size=2, stall_s=0.1).open()


def test_rank_1_cannot_open_after_rank_0_died(hub: Hub) -> None:
    first = Rank(hub, world_size=2, stall_s=0.2)
    first.open()
    first.member.die()
    with pytest.raises((PeerLost, SourceStalled)):
        Rank(hub, "p1", rank=1, world_size=2, stall_s=0.2).open()


def test_published_snapshot_is_served(hub: Hub) -> None:
    publisher = Rank(hub).open()
    for version in (3, 5):
        report = publisher.publish(version)
        assert (publisher.state, report.version, report.outcome) == (S.SERVING, version, "")
        assert listed(publisher, hub) == (version, "open")


def test_publishing_same_version_again_raises_and_keeps_state(hub: Hub) -> None:
    publisher = Rank(hub).open()
    publisher.publish(3)
    with pytest.raises(ConfigError, match="not above 3"):
        publisher.publish(3)
    assert publisher.state is S.SERVING and listed(publisher, hub) == (3, "open")


def test_failed_snapshot_copy_is_not_served(hub: Hub) -> None:
    rank = Rank(hub)
    publisher = rank.open()
    publisher.publish(1)
    fail_once(rank, publisher, S.SHOWING)
    with pytest.raises(DestinationError):
        publisher.publish(2)
    assert publisher.state is S.IDLE and listed(publisher, hub) == (2, "idle")
    publisher.publish(3)
    assert publisher.state is S.SERVING


def test_publish_of_moved_parameters_withdraws_previous_version(hub: Hub) -> None:
    rank = Rank(hub)
    publisher = rank.open()
    publisher.publish(1)
    seen: list[PublisherState] = []
    rank.member.on_report = lambda: seen.append(publisher.state)
    rank.params["w0"] = torch.arange(8.0) + 1
    publisher.publish(2)
    assert seen[0] is S.IDLE and publisher.state is S.SERVING


def test_publish_raises_if_parameter_shape_changed(hub: Hub) -> None:
    rank = Rank(hub)
    publisher = rank.open()
    publisher.publish(1)
    rank.params["w0"] = torch.arange(9.0)
    with pytest.raises(ConfigError, match="changed their dtype or shape"):
        publisher.publish(2)
    assert publisher.state is S.SERVING and listed(publisher, hub) == (1, "open")


def test_live_publish_waits_for_subscriber(hub: Hub, pool: ThreadPoolExecutor) -> None:
    publisher, subscriber = Rank(hub, mode="live").open(), MemorySubscriber(hub, "s0")
    report = publishing(pool, publisher, 1)
    wait_for(publisher, S.WAITING)
    assert listed(publisher, hub) == (1, "open") and not report.done()
    subscriber.report(publisher.member.id, 1, "committed")
    assert report.result(10).committed == (subscriber.member.id,)
    assert publisher.state is S.IDLE and listed(publisher, hub) == (1, "idle")


def test_dead_subscriber_in_live_mode_is_reported_as_failed(hub: Hub, pool: ThreadPoolExecutor) -> None:
    publisher, subscriber = Rank(hub, mode="live", stall_s=60.0).open(), MemorySubscriber(hub, "s0")
    report = publishing(pool, publisher, 1)
    wait_for(publisher, S.WAITING)
    subscriber.member.die()
    assert report.result(10).failed == {subscriber.member.id: "its process is gone"}
    assert publisher.state is S.IDLE


def test_stalled_subscriber_in_live_mode_is_reported_as_late(hub: Hub) -> None:
    publisher, subscriber = Rank(hub, mode="live", stall_s=0.1).open(), MemorySubscriber(hub, "s0")
    assert publisher.publish(1).late == (subscriber.member.id,)
    assert publisher.state is S.IDLE


def test_failed_live_version_is_not_readable(hub: Hub) -> None:
    rank = Rank(hub, mode="live")
    publisher = rank.open()
    fail_once(rank, publisher, S.SHOWING)
    with pytest.raises(DestinationError):
        publisher.publish(1)
    assert publisher.state is S.IDLE and listed(publisher, hub) == (1, "idle")


def test_hub_loss_during_announcement_aborts_version(hub: Hub) -> None:
    rank = Rank(hub, mode="live")
    publisher = rank.open()

    def look() -> None:
        if publisher.state is S.SHOWING:
            raise HubUnavailable("the hub does not answer")

    rank.membership.on_look = look
    with pytest.raises(HubUnavailable):
        publisher.publish(1)
    assert publisher.state is S.IDLE and publisher.version == -1


def test_prepared_snapshot_is_committed(hub: Hub) -> None:
    publisher, subscriber = Rank(hub).open(), MemorySubscriber(hub, "s0")
    assert publisher.publish(1, commit="all").outcome == "pending"
    assert publisher.state is S.DECIDING and listed(publisher, hub) == (1, "open")
    subscriber.report(publisher.member.id, 1, "prepared")
    report = publisher.wait_decision()
    assert (report.outcome, report.committed) == ("committed", (subscriber.member.id,))
    wait_for(publisher, S.SERVING)
    decision = subscriber.decision(publisher.member.id, 1).fleet
    assert decision is not None and decision.outcome == "committed"


def test_snapshot_refused_by_subscriber_is_withdrawn(hub: Hub) -> None:
    publisher, subscriber = Rank(hub).open(), MemorySubscriber(hub, "s0")
    publisher.publish(1)
    publisher.publish(2, commit="all")
    subscriber.report(publisher.member.id, 2, "refused", why="wrong log-probs")
    with pytest.raises(VersionRefused, match="wrong log-probs"):
        publisher.wait_decision()
    assert publisher.state is S.WITHDRAWN and listed(publisher, hub) == (1, "idle")
    publisher.publish(3)
    assert publisher.state is S.SERVING and listed(publisher, hub) == (3, "open")


def test_stalled_subscriber_is_excluded_from_commit(hub: Hub) -> None:
    publisher = Rank(hub).open()
    subscribers = [MemorySubscriber(hub, name) for name in ("s0", "s1")]
    publisher.publish(1, commit="all", timeout_s=0.2)
    subscribers[0].report(publisher.member.id, 1, "prepared")
    report = publisher.wait_decision()
    assert (report.committed, report.late) == ((subscribers[0].member.id,), (subscribers[1].member.id,))
    wait_for(publisher, S.SERVING)


def test_version_is_withdrawn_after_subscriber_stalls(hub: Hub) -> None:
    publisher = Rank(hub).open()
    subscribers = [MemorySubscriber(hub, name) for name in ("s0", "s1")]
    publisher.publish(1, commit="all", timeout_s=0.2, stragglers="withdraw")
    subscribers[0].report(publisher.member.id, 1, "prepared")
    with pytest.raises(VersionRefused, match="before the deadline"):
        publisher.wait_decision()
    assert publisher.state is S.WITHDRAWN


def test_version_is_withdrawn_after_subscriber_dies(hub: Hub) -> None:
    publisher, subscriber = Rank(hub).open(), MemorySubscriber(hub, "s0")
    publisher.publish(1, commit="all", timeout_s=60.0)
    subscriber.member.die()
    with pytest.raises(VersionRefused, match="process is gone"):
        publisher.wait_decision()
    assert publisher.state is S.WITHDRAWN


def test_withdrawal_recorded_at_hub_overrides_commit(hub: Hub) -> None:
    publisher, subscriber = Rank(hub).open(), MemorySubscriber(hub, "s0")
    publisher.publish(1, commit="all")
    decision = FleetDecision(epoch=publisher.member.id, version=1, outcome="withdrawn", why="rank 0 was silent")
    subscriber.member.decide("policy", decision)
    subscriber.report(publisher.member.id, 1, "prepared")
    with pytest.raises(VersionRefused, match="rank 0 was silent"):
        publisher.wait_decision()
    assert publisher.state is S.WITHDRAWN


def test_snapshot_stays_readable_if_hub_dies_while_deciding(hub: Hub) -> None:
    publisher, subscriber = Rank(hub, stall_s=0.2).open(), MemorySubscriber(hub, "s0")
    publisher.publish(1, commit="all", timeout_s=60.0)
    subscriber.decision(publisher.member.id, 1)  # opens the session, which the hub grants
    hub.is_away = True
    subscriber.report(publisher.member.id, 1, "prepared")
    with pytest.raises(HubUnavailable, match="unknown whether"):
        publisher.wait_decision()
    wait_for(publisher, S.SERVING)


def test_other_ranks_stop_waiting_if_rank_0_learns_no_outcome(hub: Hub) -> None:
    _, first, other, second = two_ranks(hub, "snapshot", stall_s=0.2)
    subscriber = MemorySubscriber(hub, "s0")
    for each in (first, second):
        each.publish(1, commit="all", timeout_s=60.0)
    subscriber.decision(first.member.id, 1)  # opens the session, which the hub grants
    other.membership.ask(first.member.id, lambda client: client.decision(1, 0.0), channel="decision")
    hub.is_away = True
    subscriber.report(first.member.id, 1, "prepared")
    with pytest.raises(HubUnavailable, match="unknown whether"):
        first.wait_decision()
    with pytest.raises(SourceStalled, match="learned no outcome"):
        second.wait_decision()
    assert not subscriber.decision(first.member.id, 1).is_begun


def test_failed_two_phase_version_is_withdrawn(hub: Hub) -> None:
    rank = Rank(hub)
    publisher, subscriber = rank.open(), MemorySubscriber(hub, "s0")
    publisher.publish(1)
    fail_once(rank, publisher, S.SHOWING)
    with pytest.raises(DestinationError):
        publisher.publish(2, commit="all")
    assert publisher.state is S.WITHDRAWN and listed(publisher, hub) == (1, "idle")
    decision = subscriber.decision(publisher.member.id, 2).fleet
    assert decision is not None and "the device failed" in decision.why


def test_next_publish_waits_for_decision(hub: Hub, pool: ThreadPoolExecutor) -> None:
    publisher, subscriber = Rank(hub).open(), MemorySubscriber(hub, "s0")
    publisher.publish(1, commit="all", timeout_s=60.0)
    second = publishing(pool, publisher, 2)
    time.sleep(0.1)
    assert publisher.state is S.DECIDING and not second.done()
    subscriber.report(publisher.member.id, 1, "prepared")
    second.result(10)
    assert publisher.state is S.SERVING and publisher.version == 2


@pytest.mark.parametrize(("outcome", "state"), [("prepared", S.IDLE), ("refused", S.WITHDRAWN)])
def test_subscriber_report_decides_two_phase_live_version(
    hub: Hub, pool: ThreadPoolExecutor, outcome: str, state: PublisherState
) -> None:
    publisher, subscriber = Rank(hub, mode="live").open(), MemorySubscriber(hub, "s0")
    report = publishing(pool, publisher, 1, commit="all")
    wait_for(publisher, S.WAITING)
    subscriber.report(publisher.member.id, 1, outcome, why="wrong log-probs")
    if outcome == "prepared":
        assert report.result(10).outcome == "committed"
    else:
        with pytest.raises(VersionRefused, match="wrong log-probs"):
            report.result(10)
    assert publisher.state is state and listed(publisher, hub)[1] == "idle"


def two_ranks(hub: Hub, mode: PublishMode, stall_s: float = 5.0) -> tuple[Rank, Publisher, Rank, Publisher]:
    zero = Rank(hub, mode=mode, world_size=2, stall_s=stall_s)
    first = zero.open()
    other = Rank(hub, "p1", mode=mode, rank=1, world_size=2, stall_s=stall_s)
    return zero, first, other, other.open()


def test_second_rank_applies_rank_0_decision(hub: Hub, pool: ThreadPoolExecutor) -> None:
    _, first, _, second = two_ranks(hub, "snapshot")
    subscriber = MemorySubscriber(hub, "s0")
    reports = [publishing(pool, each, 1, commit="all") for each in (first, second)]
    assert [report.result(10).outcome for report in reports] == ["pending", "pending"]
    assert second.state is S.DECIDING
    subscriber.report(first.member.id, 1, "refused", why="wrong log-probs")
    with pytest.raises(VersionRefused, match="wrong log-probs"):
        second.wait_decision()
    assert second.state is S.WITHDRAWN


def test_rank_0_loss_while_waiting_aborts_version(hub: Hub, pool: ThreadPoolExecutor) -> None:
    zero, first, _, second = two_ranks(hub, "live", stall_s=60.0)
    MemorySubscriber(hub, "s0")
    publishing(pool, first, 1)
    report = publishing(pool, second, 1)
    wait_for(second, S.WAITING)
    zero.member.die()
    with pytest.raises(PeerLost, match="rank 0 of the publishers is gone"):
        report.result(10)
    assert second.state is S.IDLE
    first.close()


def test_snapshot_survives_loss_of_rank_0_while_deciding(hub: Hub) -> None:
    zero, first, _, second = two_ranks(hub, "snapshot", stall_s=60.0)
    MemorySubscriber(hub, "s0")
    for each in (first, second):
        each.publish(1, commit="all")
    zero.member.die()
    with pytest.raises(PeerLost):
        second.wait_decision()
    wait_for(second, S.SERVING)
    first.close()


def test_rank_0_loss_between_versions_raises_source_stalled(hub: Hub) -> None:
    zero, _, _, second = two_ranks(hub, "snapshot", stall_s=0.2)
    second.publish(1)
    zero.member.leave()
    with pytest.raises(SourceStalled, match="no rank 0"):
        second.publish(2)
    assert second.state is S.SERVING and second.version == 1


def test_rank_1_raises_if_rank_0_does_not_publish(hub: Hub) -> None:
    _, _, _, second = two_ranks(hub, "live", stall_s=0.2)
    with pytest.raises(SourceStalled, match="did not begin version 1"):
        second.publish(1)
    assert second.state is S.IDLE


def test_stall_error_lists_missing_ranks(hub: Hub) -> None:
    publisher = Rank(hub, world_size=2, stall_s=0.1).open()
    with pytest.raises(SourceStalled, match=r"ranks \[1\]"):
        publisher.wait_ranks()
    with pytest.raises(SourceStalled, match="0 of 1 subscribers"):
        publisher.wait_subscribers(1, timeout_s=0.05)
    assert publisher.state is S.IDLE


def test_close_before_open_is_idempotent(hub: Hub) -> None:
    publisher = Rank(hub).make_publisher()
    publisher.close()
    publisher.close()
    assert publisher.state is S.CLOSED


@pytest.mark.parametrize("state", [S.IDLE, S.SERVING, S.WITHDRAWN])
def test_closed_publisher_is_removed_from_fleet(hub: Hub, state: PublisherState) -> None:
    rank = Rank(hub)
    publisher = rank.open()
    if state is S.SERVING:
        publisher.publish(1)
    if state is S.WITHDRAWN:
        fail_once(rank, publisher, S.SHOWING)
        with pytest.raises(DestinationError):
            publisher.publish(1, commit="all")
    assert publisher.state is state
    publisher.close()
    assert publisher.state is S.CLOSED
    with pytest.raises(Cancelled):
        publisher.publish(2)
    assert not MemoryMember(hub, "other").sync("policy").members


@pytest.mark.parametrize("mode", ["live", "snapshot"])
def test_close_during_announcement_raises_cancelled(hub: Hub, pool: ThreadPoolExecutor, mode: PublishMode) -> None:
    rank = Rank(hub, mode=mode)
    publisher = rank.open()
    MemorySubscriber(hub, "s0")
    is_showing, may_go_on = threading.Event(), threading.Event()

    def report() -> None:
        if publisher.state is S.SHOWING:
            is_showing.set()
            may_go_on.wait(10)

    rank.member.on_report = report
    published = publishing(pool, publisher, 1)
    assert is_showing.wait(10)
    publisher.close()
    may_go_on.set()
    with pytest.raises(Cancelled):
        published.result(10)
    assert publisher.state is S.CLOSED


def test_close_while_awaiting_subscribers_raises_cancelled(hub: Hub, pool: ThreadPoolExecutor) -> None:
    publisher = Rank(hub, mode="live", stall_s=60.0).open()
    MemorySubscriber(hub, "s0")
    published = publishing(pool, publisher, 1)
    wait_for(publisher, S.WAITING)
    publisher.close()
    with pytest.raises(Cancelled):
        published.result(10)
    assert publisher.state is S.CLOSED


def test_close_before_decision_withdraws_version(hub: Hub) -> None:
    publisher, subscriber = Rank(hub).open(), MemorySubscriber(hub, "s0")
    publisher.publish(1, commit="all", timeout_s=60.0)
    publisher.close()
    with pytest.raises(VersionRefused, match="closed before the decision"):
        publisher.wait_decision()
    assert publisher.state is S.CLOSED
    decision = FleetDecision(epoch=publisher.member.id, version=1, outcome="committed")
    standing = subscriber.member.decide("policy", msgspec.structs.replace(decision, outcome="withdrawn")).decision
    assert standing is not None and "closed before" in standing.why


def test_wait_decision_raises_without_two_phase_commit(hub: Hub) -> None:
    publisher = Rank(hub).open()
    publisher.publish(1)
    with pytest.raises(ConfigError, match="no decision"):
        publisher.wait_decision()
