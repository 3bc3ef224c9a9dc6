"""The states of a subscriber in memory: transitions, failed sources, cancellation, and withdrawn versions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from tests.support.memory_holder import QUICK, MemoryHolder, MemorySync, memory_sync

from penstock.errors import (
    Cancelled,
    ConfigError,
    IntegrityError,
    NotFound,
    PeerLost,
    PenstockError,
    SourceStalled,
    StaleDescriptor,
    VersionRefused,
)
from penstock.hub.messages import FleetDecision
from penstock.sync.commit.outcome import Withdrawn
from penstock.sync.receive.released import StoredVersion
from penstock.sync.receive.states import AT_REST, InvalidTransition, LiveVersion, SubscriberState, SubscriberStates
from penstock.sync.receive.subscriber import Subscriber
from penstock.sync.receive.transfer import Transfer

S = SubscriberState
MODES = pytest.mark.parametrize("mode", ["staged", "direct"])


@pytest.fixture
def sync() -> Iterator[MemorySync]:
    with memory_sync() as made:
        yield made


@pytest.fixture
def holder(sync: MemorySync) -> MemoryHolder:
    made = sync.holder("p0")
    made.publish(1, 1.0)
    return made


def state(subscriber: Subscriber) -> SubscriberState:
    return subscriber.state


def is_served(subscriber: Subscriber) -> bool:
    return subscriber._update_loop.status.now.is_open


@contextmanager
def replaced_copy(subscriber: Subscriber, copy: Callable[[object], None]) -> Iterator[None]:
    """Replace the copy from the staging copy to the target by `copy`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subscriber._update_loop, "copy_staged", copy)
        yield


def refused_copy(staged: object) -> None:
    raise PeerLost("the driver refused")


def assert_live(sync: MemorySync, subscriber: Subscriber, version: int) -> None:
    """Check that the version is live, served and reported, and that readers are admitted."""
    assert (state(subscriber), subscriber.version, sync.value) == (S.LIVE, version, float(version))
    assert is_served(subscriber) and not subscriber.is_dirty
    assert sync.member.syncs[-1]().state == "open"
    with subscriber.pinned(version, ttl_s=0.1):
        pass


def at(*path: SubscriberState) -> SubscriberStates:
    states = SubscriberStates()
    for one in path:
        states.enter(one, LiveVersion(epoch="r", version=1) if one is S.LIVE else None)
    return states


LIVE_PATH = (S.RECEIVING, S.FLIPPING, S.WRITING, S.LIVE)
ALLOWED: dict[SubscriberState, set[SubscriberState]] = {
    S.IDLE: {S.RECEIVING, S.RELEASED},
    S.LIVE: {S.RECEIVING, S.RELEASED, S.MOVED},
    S.MOVED: {S.RECEIVING, S.RELEASED},
    S.DIRTY: {S.RECEIVING, S.RELEASED},
    S.RELEASED: {S.RECEIVING, S.WRITING},
    S.RECEIVING: {S.STAGED, S.PREPARED, S.FLIPPING},
    S.STAGED: {S.RECEIVING, S.FLIPPING, S.RELEASED},
    S.PREPARED: {S.RECEIVING, S.FLIPPING, S.RELEASED},
    S.FLIPPING: {S.WRITING, S.STAGED, S.PREPARED},
    S.WRITING: {S.LIVE, S.IDLE, S.DIRTY},
}
"""A copy of the table, so that a new transition must be added here too."""
PATHS: dict[SubscriberState, tuple[SubscriberState, ...]] = {
    S.IDLE: (),
    S.LIVE: LIVE_PATH,
    S.MOVED: (*LIVE_PATH, S.MOVED),
    S.DIRTY: (S.RECEIVING, S.FLIPPING, S.WRITING, S.DIRTY),
    S.RELEASED: (*LIVE_PATH, S.RELEASED),
    S.RECEIVING: (*LIVE_PATH, S.RECEIVING),
    S.STAGED: (*LIVE_PATH, S.RECEIVING, S.STAGED),
    S.PREPARED: (*LIVE_PATH, S.RECEIVING, S.PREPARED),
    S.FLIPPING: (*LIVE_PATH, S.RECEIVING, S.FLIPPING),
    S.WRITING: (*LIVE_PATH, S.RECEIVING, S.FLIPPING, S.WRITING),
    S.CLOSED: (S.CLOSED,),
}


@pytest.mark.parametrize("before", list(S))
@pytest.mark.parametrize("after", list(S))
def test_subscriber_state_follows_listed_transitions(before: SubscriberState, after: SubscriberState) -> None:
    states = at(*PATHS[before])
    rest = states.at_rest
    is_back = before not in AT_REST and before is not S.WRITING and after is rest
    # A busy subscriber that detects moved tensors stays busy.
    is_found = after is S.MOVED and rest is S.LIVE
    if before is S.CLOSED:
        states.enter(after)
        assert states.now is S.CLOSED
    elif after in (before, S.CLOSED, *ALLOWED[before]) or is_back or is_found:
        states.enter(after)
        assert states.now is (before if is_found and before not in AT_REST else after)
        assert states.at_rest is (after if after in AT_REST else rest)
    else:
        with pytest.raises(InvalidTransition, match=f"from {before.value} to {after.value}"):
            states.enter(after)
        assert (states.now, states.at_rest) == (before, rest)


def test_failed_restore_never_marks_released_target_dirty() -> None:
    states = at(*LIVE_PATH, S.RELEASED, S.RECEIVING, S.FLIPPING, S.WRITING)
    assert (states.version, states.damaged) == (-1, S.RELEASED)
    with pytest.raises(InvalidTransition):
        states.enter(S.DIRTY)
    states.enter(S.RELEASED)
    assert states.now is S.RELEASED


def test_target_being_written_has_no_current_version() -> None:
    states = at(*LIVE_PATH)
    assert states.is_current
    for one in (S.RECEIVING, S.FLIPPING):
        states.enter(one)
        assert states.is_current
    states.enter(S.WRITING)
    assert not states.is_current and states.version == 1


@MODES
def test_each_version_becomes_live(sync: MemorySync, holder: MemoryHolder, mode: str) -> None:
    with sync.subscriber(mode) as subscriber:
        assert (state(subscriber), subscriber.version, subscriber.revision) == (S.IDLE, -1, "")
        for version in (1, 2):
            if version > 1:
                holder.publish(version, float(version), {"step": str(version)})
            report = subscriber.update()
            assert (report.version, report.attempts, report.lost) == (version, 1, {})
            assert_live(sync, subscriber, version)
        assert subscriber.metadata == {"step": "2"}
        names = [name for name, _, _ in sync.calls[4:]]
        assert names == ["before_read", "before_pause", "at_commit", "after_resume"]
        # The target changes only between the pause and the commit.
        assert [value for _, _, value in sync.calls[4:]] == [1.0, 1.0, 2.0, 2.0]


@MODES
def test_live_version_is_not_reread(sync: MemorySync, holder: MemoryHolder, mode: str) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        sync.calls.clear()
        assert subscriber.update().nbytes == 0
        assert not sync.calls
        assert_live(sync, subscriber, 1)


def test_staged_update_passes_documented_states(sync: MemorySync, holder: MemoryHolder) -> None:
    seen: list[SubscriberState] = []
    with sync.subscriber() as subscriber:
        holder.at["map"] = lambda: seen.append(state(subscriber))
        sync.at = {name: lambda: seen.append(state(subscriber)) for name in ("before_pause", "at_commit")}
        assert subscriber.stage() == 1
        assert (state(subscriber), sync.value) == (S.STAGED, -1.0)
        subscriber.commit()
        assert seen == [S.RECEIVING, S.STAGED, S.LIVE]
        with pytest.raises(ConfigError, match="no version is staged"):
            subscriber.commit()


def test_live_version_staged_again_commits_no_bytes(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber() as subscriber:
        subscriber.update()
        subscriber.stage()
        assert state(subscriber) is S.STAGED
        assert subscriber.commit().nbytes == 0
        assert_live(sync, subscriber, 1)


def test_active_readers_delay_flip(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber() as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        subscriber.stage()
        thread = threading.Thread(target=subscriber.commit)
        with subscriber.pinned(1, ttl_s=5.0):
            thread.start()
            thread.join(0.1)
            assert thread.is_alive() and sync.value == 1.0
        thread.join(5.0)
        assert_live(sync, subscriber, 2)


def together(holder: MemoryHolder, outcome: str = "") -> None:
    holder.decide_s = 5.0
    if outcome:
        holder.decision = FleetDecision(epoch="p0", version=holder.status.now.version, outcome=outcome, why="so it is")  # type: ignore[arg-type]


def test_prepared_version_awaits_commit_decision(sync: MemorySync, holder: MemoryHolder) -> None:
    together(holder)
    with sync.subscriber() as subscriber:
        subscriber.stage()
        assert (state(subscriber), subscriber.prepared, sync.value) == (S.PREPARED, 1, -1.0)
        assert "progress prepared" in holder.asked
        together(holder, "committed")
        subscriber.commit()
        assert subscriber.prepared == -1
        assert_live(sync, subscriber, 1)


def test_withdrawn_prepared_version_is_discarded(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber() as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        together(holder, "withdrawn")
        with pytest.raises(VersionRefused):
            subscriber.update()
        assert subscriber.prepared == -1
        assert_live(sync, subscriber, 1)
        with pytest.raises(ConfigError, match="no version is staged"):
            subscriber.commit()


def test_unknown_decision_keeps_version_prepared(sync: MemorySync, holder: MemoryHolder) -> None:
    holder.decide_s = 0.0
    with sync.subscriber() as subscriber:
        subscriber.stage()

        def silence() -> None:
            raise PeerLost("silent")

        holder.at["decision"] = silence
        sync.member.decide = lambda *_: silence()  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(SourceStalled, match="cannot learn the fleet"):
            subscriber.commit()
        assert (state(subscriber), subscriber.prepared, sync.value) == (S.PREPARED, 1, -1.0)
        del holder.at["decision"]
        together(holder, "committed")
        subscriber.commit()
        assert_live(sync, subscriber, 1)


def test_version_failing_its_check_is_refused(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber(check=lambda version, staged: "bad" if version == 2 else "") as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        with pytest.raises(VersionRefused, match="bad"):
            subscriber.update()
        assert_live(sync, subscriber, 1)
        # The withdrawn version is not requested again.
        holder.publish(3, 3.0)
        subscriber.update()
        assert_live(sync, subscriber, 3)


def lose_sources(holder: MemoryHolder) -> None:
    holder.is_gone = True


def stall(holder: MemoryHolder) -> None:
    holder.silent = True


def send_wrong_bytes(holder: MemoryHolder) -> None:
    holder.spoils = True


def restore_sources(holder: MemoryHolder) -> None:
    holder.is_gone = holder.silent = holder.spoils = False
    holder.at.clear()


FAILURES = [(lose_sources, PeerLost), (stall, SourceStalled), (send_wrong_bytes, IntegrityError)]


@MODES
@pytest.mark.parametrize(("fail", "kind"), FAILURES)
def test_losing_the_sole_source_fails_update(
    sync: MemorySync, holder: MemoryHolder, mode: str, fail: Callable[[MemoryHolder], None], kind: type[PenstockError]
) -> None:
    """The previous version stays live, or a direct update that wrote bytes is dirty until an update succeeds."""
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        holder.at["digests"] = lambda: fail(holder)
        sync.calls.clear()
        with pytest.raises(kind) as caught:
            subscriber.update()
        assert "p0" in str(caught.value.uri)
        is_touched = sync.value != 1.0
        assert (caught.value.mutated, subscriber.is_dirty) == (is_touched, is_touched)
        assert is_touched is False or mode == "direct"
        if is_touched:
            assert (state(subscriber), subscriber.version) == (S.DIRTY, 1)
            assert not is_served(subscriber) and sync.member.reports[-1].state == "dirty"
        else:
            assert_live(sync, subscriber, 1)
            if mode == "direct":
                assert sync.calls[-1][:2] == ("after_resume", 1)
        restore_sources(holder)
        subscriber.update()
        assert_live(sync, subscriber, 2)


def test_corrupt_received_bytes_mark_target_dirty(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber("direct") as subscriber:
        holder.spoils = True
        with pytest.raises(IntegrityError) as caught:
            subscriber.update()
        assert (caught.value.mutated, subscriber.is_dirty, subscriber.version) == (True, True, -1)
        assert state(subscriber) is S.DIRTY and not is_served(subscriber)
        assert [name for name, _, _ in sync.calls] == ["before_read", "before_pause"]
        holder.spoils = False
        # The partly written version is read again.
        subscriber.update()
        assert_live(sync, subscriber, 1)


@MODES
def test_engine_keeps_running_if_source_dies_before_pause(sync: MemorySync, holder: MemoryHolder, mode: str) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        sync.calls.clear()
        holder.at["map"] = lambda: lose_sources(holder)
        with pytest.raises(PeerLost) as caught:
            subscriber.update()
        assert not caught.value.mutated and not sync.calls
        assert_live(sync, subscriber, 1)


@MODES
@pytest.mark.parametrize(("fail", "kind"), FAILURES)
def test_failed_source_is_replaced_and_reported(
    sync: MemorySync,
    holder: MemoryHolder,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    fail: Callable[[MemoryHolder], None],
    kind: type[PenstockError],
) -> None:
    """A restarted trainer is listed after its old process, which does not reply."""
    with sync.subscriber(mode) as subscriber:
        other = sync.holder("p1")
        other.publish(1, 1.0)
        holder.at["digests"] = lambda: fail(holder)
        with caplog.at_level("WARNING", logger="penstock"):
            report = subscriber.update()
        assert report.attempts == 2 and dict(report.sources) == {"p1": report.nbytes}
        assert list(report.lost) == ["p0"] and "p0" in report.lost["p0"]
        assert "without p0" in report.summary()
        assert len([one for one in caplog.records if "attempt 1" in one.message and "p0" in one.message]) == 1
        # Several attempts pause the engine only once.
        assert [name for name, _, _ in sync.calls].count("before_pause") == 1
        assert_live(sync, subscriber, 1)


def test_partly_written_target_is_reread(sync: MemorySync, holder: MemoryHolder) -> None:
    """The source of version 2 is lost after its first bytes, and version 1 is the remaining one."""
    with sync.subscriber("direct") as subscriber:
        subscriber.update()
        former = sync.holder("p1")
        former.is_listed = False
        holder.publish(2, 2.0)

        def replace() -> None:
            holder.spoils = former.is_listed = True
            holder.is_listed = False
            former.publish(1, 1.0)
            former.status.post("p0", 1, is_open=True)

        holder.at["digests"] = replace
        report = subscriber.update()
        assert report.nbytes > 0
        assert_live(sync, subscriber, 1)


@MODES
@pytest.mark.parametrize("step", ["part", "map", "digests"])
def test_fenced_version_is_replaced_by_next(sync: MemorySync, holder: MemoryHolder, mode: str, step: str) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        left = [3]

        def replace() -> None:
            if left:
                holder.publish(left[0], float(left.pop()))

        holder.at[step] = replace
        report = subscriber.update()
        assert report.version == 3 and not report.lost
        assert_live(sync, subscriber, 3)


@MODES
@pytest.mark.parametrize("step", ["part", "map", "before_read", "before_pause", "digests"])
def test_withdrawal_during_update_keeps_previous_version(
    sync: MemorySync, holder: MemoryHolder, mode: str, step: str
) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        sync.calls.clear()
        (sync.at if step.startswith("before") else holder.at)[step] = holder.withdraw
        if mode == "staged" and step == "before_pause":
            # All bytes have arrived and are verified.
            assert subscriber.update().version == 2
            assert_live(sync, subscriber, 2)
            return
        with pytest.raises(StaleDescriptor):
            subscriber.update()
        if subscriber.is_dirty:
            # Loopback reads before it requests digests.
            assert (mode, step, state(subscriber)) == ("direct", "digests", S.DIRTY)
            return
        assert_live(sync, subscriber, 1)
        if ("before_pause", 2, 1.0) in sync.calls:
            assert sync.calls[-1] == ("after_resume", 1, 1.0)


def test_version_withdrawn_by_fleet_is_skipped(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber() as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        holder.refused = Withdrawn(epoch="p0", version=2, why="a check failed")
        with pytest.raises(VersionRefused, match="a check failed"):
            subscriber.update()
        assert_live(sync, subscriber, 1)


@MODES
def test_update_without_publisher_times_out(sync: MemorySync, mode: str) -> None:
    with sync.subscriber(mode) as subscriber:
        with pytest.raises(NotFound, match="has not joined yet"):
            subscriber.update(timeout_s=0.02)
        assert (state(subscriber), sync.value) == (S.IDLE, -1.0)
        assert subscriber.prepare(timeout_s=0.02) is False


@MODES
def test_update_after_publisher_vanished_says_so(sync: MemorySync, holder: MemoryHolder, mode: str) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        sync.holders.clear()
        with pytest.raises(NotFound, match="is not reachable any more"):
            subscriber.update(timeout_s=0.02)
        assert_live(sync, subscriber, 1)


def test_update_to_withdrawn_version_times_out(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber() as subscriber:
        holder.withdraw()
        with pytest.raises(StaleDescriptor):
            subscriber.update(timeout_s=0.02)
        assert state(subscriber) is S.IDLE


@MODES
def test_closing_subscriber_aborts_update(sync: MemorySync, mode: str) -> None:
    subscriber = sync.subscriber(mode)
    raised: list[BaseException] = []

    def update() -> None:
        try:
            subscriber.update(timeout_s=30.0)
        except Cancelled as error:
            raised.append(error)

    thread = threading.Thread(target=update)
    thread.start()
    thread.join(0.05)
    subscriber.close()
    thread.join(5.0)
    assert len(raised) == 1 and state(subscriber) is S.CLOSED and sync.member.has_left
    calls: tuple[Callable[[], Any], ...] = (subscriber.update, subscriber.commit, subscriber.release)
    for call in calls:
        with pytest.raises(Cancelled):
            call()


@MODES
def test_subscriber_closed_during_flip_keeps_version(sync: MemorySync, holder: MemoryHolder, mode: str) -> None:
    subscriber = sync.subscriber(mode)
    sync.at["at_commit"] = subscriber.close
    subscriber.update()
    assert (state(subscriber), subscriber.version, sync.value) == (S.CLOSED, 1, 1.0)


@MODES
@pytest.mark.parametrize("hook", ["before_read", "before_pause"])
def test_hook_error_before_flip_leaves_target_unchanged(
    sync: MemorySync, holder: MemoryHolder, mode: str, hook: str
) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        sync.calls.clear()
        sync.fails[hook] = ValueError("not now")
        with pytest.raises(ValueError, match="not now"):
            subscriber.update()
        assert sync.calls[-1][0] == hook and sync.value == 1.0
        assert is_served(subscriber) and not subscriber.is_dirty
        with subscriber.pinned(1, ttl_s=0.1):
            pass
        sync.fails.clear()
        subscriber.update()
        assert_live(sync, subscriber, 2)


@MODES
@pytest.mark.parametrize("hook", ["at_commit", "after_resume"])
def test_hook_error_after_flip_keeps_version_live(sync: MemorySync, holder: MemoryHolder, mode: str, hook: str) -> None:
    with sync.subscriber(mode) as subscriber:
        sync.fails[hook] = ValueError("too late")
        with pytest.raises(ValueError, match="too late"):
            subscriber.update()
        assert (state(subscriber), subscriber.version, sync.value, subscriber.is_dirty) == (S.LIVE, 1, 1.0, False)
        with subscriber.pinned(1, ttl_s=0.1):
            pass


@pytest.mark.parametrize("error", [PeerLost("a device", mutated=True), KeyboardInterrupt()])
def test_failed_copy_marks_target_dirty(sync: MemorySync, holder: MemoryHolder, error: BaseException) -> None:
    def broken(staged: object) -> None:
        raise error

    with sync.subscriber() as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        subscriber.stage()
        with replaced_copy(subscriber, broken):
            with pytest.raises(type(error)):
                subscriber.commit()
            assert (state(subscriber), subscriber.version, is_served(subscriber)) == (S.DIRTY, 1, False)
            with pytest.raises(ConfigError, match="no version is staged"):
                subscriber.commit()
        subscriber.update()
        assert_live(sync, subscriber, 2)


def test_interrupted_direct_update_marks_target_dirty(
    sync: MemorySync, holder: MemoryHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt the update after the reads have written to the target."""
    with sync.subscriber("direct") as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        run = Transfer.run

        def interrupted(transfer: Transfer, sources: Any) -> None:
            run(transfer, sources)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Transfer, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                subscriber.update()
        assert sync.value != 1.0
        assert (state(subscriber), subscriber.is_dirty, is_served(subscriber)) == (S.DIRTY, True, False)
        assert sync.calls[-1][0] == "before_pause"
        subscriber.update()
        assert_live(sync, subscriber, 2)


def test_refused_copy_keeps_version_staged(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber() as subscriber:
        subscriber.update()
        holder.publish(2, 2.0)
        subscriber.stage()
        with replaced_copy(subscriber, refused_copy):
            with pytest.raises(PeerLost) as caught:
                subscriber.commit()
            assert not caught.value.mutated and state(subscriber) is S.STAGED
            assert (subscriber.version, sync.value, is_served(subscriber)) == (1, 1.0, True)
            assert sync.calls[-1] == ("after_resume", 1, 1.0)
        subscriber.commit()
        assert_live(sync, subscriber, 2)


def test_failed_first_flip_resumes_engine(sync: MemorySync, holder: MemoryHolder) -> None:
    # The engine serves weights from files, and no version is live yet.
    with sync.subscriber() as subscriber:
        subscriber.stage()
        with replaced_copy(subscriber, refused_copy):
            with pytest.raises(PeerLost, match="the driver refused"):
                subscriber.commit()
            assert [name for name, _, _ in sync.calls][-2:] == ["before_pause", "after_resume"]
            assert (state(subscriber), subscriber.version, subscriber.is_dirty) == (S.STAGED, -1, False)
        subscriber.commit()
        assert_live(sync, subscriber, 1)


@MODES
def test_moved_target_is_reread(sync: MemorySync, holder: MemoryHolder, mode: str) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        sync.target["b"] = torch.full((32,), 9.0)
        holder.at["part"] = lambda: lose_sources(holder)
        with pytest.raises(PeerLost):
            subscriber.update()
        assert (state(subscriber), subscriber.version, is_served(subscriber)) == (S.MOVED, 1, False)
        restore_sources(holder)
        assert subscriber.update().nbytes > 0
        assert_live(sync, subscriber, 1)


@MODES
def test_released_weights_are_restored(sync: MemorySync, holder: MemoryHolder, mode: str) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        subscriber.release(free=False)
        assert (state(subscriber), subscriber.version, subscriber.is_released) == (S.RELEASED, -1, True)
        assert not is_served(subscriber)
        calls: tuple[Callable[[], Any], ...] = (subscriber.update, subscriber.prepare, subscriber.release)
        for call in calls:
            with pytest.raises(ConfigError, match="released"):
                call()
        subscriber.restore()
        assert_live(sync, subscriber, 1)
        with pytest.raises(ConfigError, match="not released"):
            subscriber.restore()


@MODES
def test_weights_stay_released_after_failed_restore(sync: MemorySync, holder: MemoryHolder, mode: str) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        subscriber.release(free=False)
        holder.spoils = True
        with pytest.raises(IntegrityError):
            subscriber.restore()
        assert (state(subscriber), subscriber.version, subscriber.is_dirty) == (S.RELEASED, -1, False)
        restore_sources(holder)
        subscriber.restore()
        assert_live(sync, subscriber, 1)


@MODES
def test_stored_version_is_restored_if_members_are_lost(sync: MemorySync, holder: MemoryHolder, mode: str) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        subscriber.release(free=False)
        lose_sources(holder)
        stored = {"a": torch.full((64, 8), 1.0), "b": torch.full((32,), 1.0)}
        report = subscriber.restore(stored=StoredVersion(version=1, weights=lambda: iter(stored.items())))
        assert "outside the sync" in report.why[0]
        assert_live(sync, subscriber, 1)


@MODES
def test_weights_stay_released_if_stored_version_differs(sync: MemorySync, holder: MemoryHolder, mode: str) -> None:
    with sync.subscriber(mode) as subscriber:
        subscriber.update()
        subscriber.release(free=False)
        lose_sources(holder)
        stored = {"a": torch.full((64, 8), 7.0), "b": torch.full((32,), 1.0)}
        with pytest.raises(IntegrityError, match="differs from the version that was live"):
            subscriber.restore(stored=StoredVersion(version=1, weights=lambda: iter(stored.items())))
        assert (state(subscriber), subscriber.version) == (S.RELEASED, -1)


def test_corrupt_bytes_restored_by_engine_are_detected(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber() as subscriber:
        subscriber.update()
        subscriber.release(free=False, returns=True)
        sync.target["a"][3, 3] = 5.0
        with pytest.raises(IntegrityError):
            subscriber.restore(in_place=True)
        assert state(subscriber) is S.RELEASED
        sync.target["a"][3, 3] = 1.0
        subscriber.restore(in_place=True)
        assert_live(sync, subscriber, 1)


def test_dirty_target_is_not_restored(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber("direct") as subscriber:
        holder.spoils = True
        with pytest.raises(IntegrityError):
            subscriber.update()
        with pytest.raises(ConfigError, match="parts of several versions"):
            subscriber.release(free=False, returns=True)
        assert state(subscriber) is S.DIRTY


def test_release_drops_staged_version(sync: MemorySync, holder: MemoryHolder) -> None:
    with sync.subscriber() as subscriber:
        subscriber.stage()
        subscriber.release(free=False)
        with pytest.raises(ConfigError, match="no version is staged"):
            subscriber.commit()
        subscriber.restore()
        assert_live(sync, subscriber, 1)


@MODES
@pytest.mark.parametrize("version", [2, None])
def test_waiting_update_receives_version_as_soon_as_it_begins(sync: MemorySync, mode: str, version: int | None) -> None:
    # An update that only tried again after each pause would need 20 s.
    holder = sync.holder("p0")
    timing = msgspec.structs.replace(QUICK, version_pause_s=20.0, news_wait_s=20.0)
    with sync.subscriber(mode, timing=timing) as subscriber, ThreadPoolExecutor(1) as pool:
        update = pool.submit(subscriber.update, version, 30.0)
        with pytest.raises(TimeoutError):
            update.result(0.2)
        holder.publish(2, 2.0)
        assert update.result(10).version == 2
    assert holder.asked.count("news") == 1


def test_update_pauses_while_a_begun_version_is_incomplete(sync: MemorySync, holder: MemoryHolder) -> None:
    def refuse() -> None:
        raise NotFound("another rank has not begun version 1 yet")

    holder.at["part"] = refuse
    with sync.subscriber() as subscriber, pytest.raises(NotFound):
        subscriber.update(1, 0.1)
    # The pause is 5 ms. Without it, there would be thousands of attempts.
    assert 3 <= holder.asked.count("part") <= 40
