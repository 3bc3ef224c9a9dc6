"""Faults of ranks that die, stop, are late, or do not match: a receiver has a complete version or none."""

from __future__ import annotations

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.integration.conftest import Host
from tests.integration.sync.test_sync import step
from tests.support.sync import SyncTask, SyncWorker, expected_digest, whole
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.main import app
from penstock.errors import PeerLost, PenstockError, SourceStalled


def members(workers: list[SyncWorker]) -> set[str]:
    return {worker.events["joined"]["member"] for worker in workers}


def assert_has_version(worker: SyncWorker, result: dict[str, Any], version: int) -> None:
    assert "error" not in result, result
    assert (result["version"], result["is_dirty"]) == (version, False)
    assert result["digests"] == expected_digest(worker.task, version)


def short_stall(seconds: float) -> dict[str, Any]:
    return {"environ": {"PENSTOCK_STALL_S": str(seconds)}}


def test_killed_receiver_is_reported_immediately(host: Host) -> None:
    publishers = host.start_ranks("publisher", 2)
    subscribers = [*host.start_ranks("subscriber", 1), *host.start_ranks("subscriber", 1, pause_s=60.0)]
    publishers[0].call("subscribers 2")
    for one in publishers:
        one.send("publish 1")
    for one in subscribers:
        one.send("wait 1")
        one.send("update")
    assert_has_version(subscribers[0], subscribers[0].result("update"), 1)
    subscribers[1].kill()
    for one in publishers:
        result = one.result("publish 1")
        assert set(result["committed"]) == members(subscribers[:1])
        assert set(result["failed"]) == members(subscribers[1:])
    *got, zero, _ = step(publishers, subscribers[:1], 2)
    assert_has_version(subscribers[0], got[0], 2)
    assert set(zero["committed"]) == members(subscribers[:1])


def test_stopped_receiver_is_reported_as_late_then_recovers(host: Host) -> None:
    publishers = host.start_ranks("publisher", 1, **short_stall(5.0))
    subscribers = host.start_ranks("subscriber", 1) + host.start_ranks("subscriber", 1)
    idle = host.start_ranks("subscriber", 1)  # a live subscriber without requests
    publishers[0].call("subscribers 3")
    subscribers[1].kill(signal.SIGSTOP)
    got, zero = step(publishers, subscribers[:1], 1)
    assert_has_version(subscribers[0], got, 1)
    assert (set(zero["committed"]), set(zero["late"])) == (members(subscribers[:1]), members(subscribers[1:] + idle))
    got, zero = step(publishers, subscribers[:1], 2)
    assert_has_version(subscribers[0], got, 2)
    assert not zero["late"], "who was late is waited for again"
    subscribers[1].kill(signal.SIGCONT)
    result = subscribers[1].call("update")  # reads from the other receiver, because the trainer is past it
    assert_has_version(subscribers[1], result, 2)
    assert set(result["sources"]) == members(subscribers[:1])
    assert_has_version(idle[0], idle[0].call("update"), 2)
    *got, zero = step(publishers, subscribers + idle, 3)
    for worker, result in zip(subscribers + idle, got, strict=True):
        assert_has_version(worker, result, 3)
    assert set(zero["committed"]) == members(subscribers + idle)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_publisher_lost_during_read_fails_update(host: Host, mode: str, number: int) -> None:
    # The budget is a MiB, so larger tensors are read in pieces.
    options = {"memory_bytes": 1 << 20} if mode == "direct" else {}
    big = {"num_layers": 4, "rows": 1024, "columns": 1024}
    publishers = host.start_ranks("publisher", 2, **big, **short_stall(8.0))
    subscriber = host.start_ranks("subscriber", 1, mode=mode, options=options, **big, **short_stall(8.0))[0]
    publishers[0].call("subscribers 1")
    assert_has_version(subscriber, step(publishers, [subscriber], 1)[0], 1)
    before = subscriber.call("digests")["digests"]
    publishers[0].send("publish 2")  # the rows of rank 1 are missing
    subscriber.send("wait 2")
    subscriber.send("update")
    subscriber.result("wait 2")
    publishers[1].kill(number)
    result = subscriber.result("update")
    assert result["error"] in ("PeerLost", "SourceStalled"), result
    after = subscriber.call("digests")
    assert after["version"] == 1
    if mode == "staged":
        assert (after["digests"], after["is_dirty"], result["mutated"]) == (before, False, False)
    assert after["is_dirty"] == result["mutated"]
    assert set(publishers[0].result("publish 2")["failed"]) == members([subscriber])
    for one in publishers:
        one.kill(signal.SIGKILL)
    again = host.start_ranks("publisher", 1, **big)
    again[0].call("subscribers 1")
    assert_has_version(subscriber, step(again, [subscriber], 3)[0], 3)


def test_error_names_rank_lost_before_update(host: Host) -> None:
    """Rank 0 plans and cannot reach rank 1, so the error names rank 1."""
    publishers = host.start_ranks("publisher", 2, mode="snapshot", **short_stall(8.0))
    step(publishers, [], 1)
    # Start the subscriber first, because the version expires while its process imports on a loaded machine.
    subscriber = host.start_ranks("subscriber", 1, **short_stall(8.0))[0]
    publishers[1].kill(signal.SIGKILL)
    result = subscriber.call("update 1")
    if result["error"] == "NotFound":
        # On a loaded machine the hub has already dropped the rank that is silent.
        assert "publisher ranks 1 of 2 are missing" in result["message"]
    else:
        assert result["error"] == "PeerLost", result
        assert publishers[1].events["joined"]["member"] in result["message"]
        assert publishers[0].events["joined"]["member"] not in result["message"]
    assert publishers[0].process.poll() is None


def test_interrupted_direct_update_leaves_target_dirty_until_retry(host: Host) -> None:
    task = SyncTask(side="subscriber")
    mine = {name: torch.zeros_like(one) for name, one in whole(task, 1).items()}
    publishers = [host.start_rank("publisher", rank=rank, world_size=2, pause_s=60.0 * rank) for rank in range(2)]
    for one in publishers:
        one.wait_for("joined")
    with ps.subscriber("policy", mine, mode="direct") as subscriber, ThreadPoolExecutor(1) as pool:
        publishers[0].call("subscribers 1")
        for one in publishers:
            one.send("publish 1")
        subscriber.wait(1)
        taking = pool.submit(subscriber.update)
        while not any(one.any() for one in mine.values()):  # rows of rank 0
            assert not taking.done()
            time.sleep(0.01)
        publishers[1].kill()
        with pytest.raises((PeerLost, SourceStalled)) as caught:
            taking.result()
        assert (caught.value.mutated, subscriber.is_dirty, subscriber.version) == (True, True, -1)
        publishers[0].kill()
        host.start_ranks("publisher", 1, mode="snapshot")[0].call("publish 2")
        assert subscriber.update(timeout_s=60.0).version == 2
        assert not subscriber.is_dirty
        assert all(torch.equal(mine[name], one) for name, one in whole(task, 2).items())


def test_late_receiver_reads_version_from_another_receiver(host: Host) -> None:
    publishers = host.start_ranks("publisher", 2)
    first = host.start_ranks("subscriber", 2, dim=1)
    publishers[0].call("subscribers 2")
    step(publishers, first, 1)
    late = host.start_ranks("subscriber", 1)[0]
    result = late.call("update")
    assert_has_version(late, result, 1)
    assert set(result["sources"]) == members(first)
    for one in publishers:
        one.kill()
    later = host.start_ranks("subscriber", 1, mode="direct")[0]  # only receivers remain, and one of them plans
    result = later.call("update")
    assert_has_version(later, result, 1)
    assert set(result["sources"]) <= members([*first, late])


def test_receiver_with_changed_weights_stops_serving(host: Host) -> None:
    publishers = host.start_ranks("publisher", 1)
    first = host.start_ranks("subscriber", 1)
    publishers[0].call("subscribers 1")
    step(publishers, first, 1)
    first[0].call("spoil")
    late = host.start_ranks("subscriber", 1)[0]
    before = late.call("digests")["digests"]
    result = late.call("update")
    assert result["error"] == "StaleDescriptor" and not result["mutated"]
    assert late.call("digests")["digests"] == before
    *got, _ = step(publishers, [*first, late], 2)
    for worker, result in zip([*first, late], got, strict=True):
        assert_has_version(worker, result, 2)


def test_restarted_trainer_can_change_world_size(host: Host) -> None:
    subscribers = host.start_ranks("subscriber", 2, dim=1)
    for version, world_size in enumerate((2, 3, 1), start=1):
        publishers = host.start_ranks("publisher", world_size)
        assert publishers[0].events["joined"]["latest"] == (version - 1 or -1)
        publishers[0].call("subscribers 2")
        if version > 1:
            result = publishers[0].call(f"publish {version - 1}")
            assert result["error"] == "ConfigError" and f"not above {version - 1}" in result["message"], result
        got = step(publishers, subscribers, version)[:2]
        for worker, result in zip(subscribers, got, strict=True):
            assert_has_version(worker, result, version)
        # The next trainer learns the version from the hub.
        host.wait_for_versions([version, version])
        for one in publishers:
            one.kill()


def test_updates_succeed_while_receivers_join_and_leave(host: Host) -> None:
    publishers = host.start_ranks("publisher", 2)
    running = host.start_ranks("subscriber", 2, dim=1)
    gone = set[str]()
    publishers[0].call("subscribers 2")
    step(publishers, running, 1)
    for version, world_size in enumerate((4, 1, 3), start=2):
        for one in publishers:
            one.send(f"publish {version}")  # while receivers join
        more = [host.start_rank("subscriber", rank=rank, world_size=world_size, dim=1) for rank in range(world_size)]
        for one in (*running, *more):
            one.send(f"wait {version}")
            one.send("update")
        for one in (*running, *more):
            assert_has_version(one, one.result("update"), version)
        for one in publishers:
            result = one.result(f"publish {version}")
            assert "error" not in result and set(result["failed"]) <= gone, result
        gone |= members(running)
        for one in running:
            if version == 2:
                one.kill()
            else:
                assert one.leave() == 0
        running = more
    publishers[0].call("subscribers 3")
    *got, zero, _ = step(publishers, running, 5)
    for worker, result in zip(running, got, strict=True):
        assert_has_version(worker, result, 5)
    assert members(running) <= set(zero["committed"])


def test_publisher_rank_leaving_fails_version(host: Host) -> None:
    """The rank's trainer raised an error between two steps and left, so no process waits until a deadline."""
    publishers = host.start_ranks("publisher", 2)
    subscriber = host.start_ranks("subscriber", 1)[0]
    publishers[0].call("subscribers 1")
    assert_has_version(subscriber, step(publishers, [subscriber], 1)[0], 1)
    publishers[0].send("publish 2")
    subscriber.send("wait 2")
    subscriber.send("update")
    subscriber.result("wait 2")
    assert publishers[1].leave() == 0
    result = subscriber.result("update")
    assert result["error"] in ("PeerLost", "StaleDescriptor") and not result["mutated"], result
    assert_has_version(subscriber, subscriber.call("digests"), 1)
    result = publishers[0].result("publish 2")
    assert result.get("error") == "PeerLost" or set(result["failed"]) == members([subscriber]), result


def test_only_one_concurrent_publisher_group_succeeds(host: Host) -> None:
    subscriber = host.start_ranks("subscriber", 1)[0]
    pair = [host.start_rank("publisher", mode="snapshot") for _ in range(2)]
    for one in pair:
        one.send("publish 1")
    results = []
    for one in pair:
        with contextlib.suppress(PenstockError):
            results.append(one.result("publish 1"))
        assert "failed" not in one.events or one.events["failed"]["error"] == "ConfigError", one.events
    done = [one for one in results if "error" not in one]
    assert len(done) == 1 and all(one.get("error", "ConfigError") == "ConfigError" for one in results), results
    assert_has_version(subscriber, subscriber.call("update"), 1)


def test_receiver_with_mismatched_tensors_is_rejected_before_reading(host: Host) -> None:
    publishers = host.start_ranks("publisher", 2)
    good = host.start_ranks("subscriber", 1)[0]
    bad = [
        host.start_ranks("subscriber", 1, **task)[0]
        for task in ({"rename": "model."}, {"dtype": "float32"}, {"rows": 32}, {"num_layers": 7})
    ]
    publishers[0].call("subscribers 5")
    before = [worker.call("digests")["digests"] for worker in bad]
    *got, zero, _ = step(publishers, [good, *bad], 1)
    assert_has_version(good, got[0], 1)
    words = ("model.layers.0.weight", "F32", "[32, 96]", "layers.6.weight")
    for worker, result, word, digest in zip(bad, got[1:], words, before, strict=True):
        assert result["error"] == "PlanError" and word in result["message"], result
        assert not result["mutated"]
        assert worker.call("digests")["digests"] == digest
    assert (set(zero["committed"]), set(zero["failed"])) == (members([good]), members(bad))


def test_second_publisher_group_for_sync_name_is_refused(host: Host) -> None:
    first = host.start_ranks("publisher", 1)[0]
    second = host.start_rank("publisher")
    result = second.wait_for("failed")
    assert result["error"] == "ConfigError" and first.events["joined"]["member"][:8] in result["message"]
    subscribers = host.start_ranks("subscriber", 1)
    first.call("subscribers 1")
    assert_has_version(subscribers[0], step([first], subscribers, 1)[0], 1)
    first.kill()
    third = host.start_rank("publisher")  # a group that left does not own the name
    third.wait_for("joined")
    third.call("subscribers 1")
    assert_has_version(subscribers[0], step([third], subscribers, 2)[0], 2)


def test_decreasing_version_is_rejected_by_publisher_and_subscriber(host: Host) -> None:
    publisher = host.start_ranks("publisher", 1, mode="snapshot")[0]
    subscriber = host.start_ranks("subscriber", 1)[0]
    publisher.call("publish 5")
    assert_has_version(subscriber, subscriber.call("update"), 5)
    for version in (5, 4):
        result = publisher.call(f"publish {version}")
        assert result["error"] == "ConfigError" and "5" in result["message"]
    result = subscriber.call("update 4")
    assert result["error"] == "ConfigError"
    result = subscriber.call("update 5")
    assert_has_version(subscriber, result, 5)
    assert result["nbytes"] == 0


def test_staged_version_stays_invisible_until_commit(host: Host) -> None:
    publishers = host.start_ranks("publisher", 2)
    subscribers = host.start_ranks("subscriber", 2, dim=1)
    publishers[0].call("subscribers 2")
    step(publishers, subscribers, 1)
    for one in publishers:
        one.send("publish 2")
    for one in subscribers:
        one.send("wait 2")
        one.send("stage")
    for one in subscribers:
        result = one.result("stage")
        assert result["digests"] == expected_digest(one.task, 1) and result["version"] == 1
    assert set(publishers[0].result("publish 2")["committed"]) == members(subscribers)
    for one in subscribers:
        assert_has_version(one, one.call("commit"), 2)


def test_error_for_too_small_budget_states_minimum(host: Host) -> None:
    nbytes = 6 * 64 * 96 * 2
    one = host.start_rank("publisher", mode="snapshot", options={"memory_bytes": 1 << 10})
    assert f"memory_bytes >= {nbytes}" in one.wait_for("failed")["message"]
    publisher = host.start_ranks("publisher", 1, mode="snapshot")[0]
    publisher.call("publish 1")
    subscriber = host.start_ranks("subscriber", 1, options={"memory_bytes": 1 << 10})[0]
    result = subscriber.call("update")
    assert result["error"] == "BudgetTooSmall" and "memory_bytes >= " in result["message"] and not result["mutated"]
    direct = host.start_rank("subscriber", mode="direct", options={"memory_bytes": 1 << 10})
    assert "memory_bytes >= " in direct.wait_for("failed")["message"]


def test_versions_sync_while_hub_is_down(host: Host) -> None:
    hub, url = host.start_hub()
    publishers = host.start_ranks("publisher", 2, hub=url, **short_stall(6.0))
    subscribers = host.start_ranks("subscriber", 2, dim=1, hub=url, **short_stall(6.0))
    publishers[0].call("subscribers 2")
    step(publishers, subscribers, 1)
    hub.send_signal(signal.SIGKILL)
    for version in (2, 3):
        *got, zero, _ = step(publishers, subscribers, version)
        for worker, result in zip(subscribers, got, strict=True):
            assert_has_version(worker, result, version)
        assert set(zero["committed"]) == members(subscribers)
    late = host.start_rank("subscriber", hub=url, **short_stall(6.0))
    assert late.wait_for("failed")["error"] == "HubUnavailable"


def test_status_shows_sync_ranks(host: Host) -> None:
    publisher = host.start_ranks("publisher", 1, mode="snapshot")[0]
    subscriber = host.start_ranks("subscriber", 1)[0]
    publisher.call("publish 7")
    assert_has_version(subscriber, subscriber.call("update"), 7)
    deadline = time.monotonic() + 30
    while sum(state.version == 7 for one in host.hub().status().members for state in one.syncs) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = CliRunner().invoke(app, ["status", "policy", "--hub", host.hub_url()])
    rows = [line.split() for line in found.stdout.splitlines()]
    assert rows[0][:6] == ["member", "host", "sync", "rank", "version", "epoch"]
    (row,) = [row for row in rows if "publisher" in row]
    (taken,) = [row for row in rows if "subscriber" in row]
    run = publisher.events["joined"]["member"][:8]
    assert row[4:] and {"policy", "0/1", "7", run, "open"} <= set(row)
    assert {"policy", "0/1", "7", run, "open", "shm"} <= set(taken)


def test_bytes_overwritten_during_read_are_never_committed(host: Host) -> None:
    publishers = host.start_ranks("publisher", 1, mode="snapshot")
    subscriber = host.start_ranks("subscriber", 1)[0]
    publishers[0].call("publish 1")
    assert_has_version(subscriber, subscriber.call("update"), 1)
    for version in range(2, 30, 2):  # fenced and overwritten repeatedly during the read
        for one in (version, version + 1):
            publishers[0].send(f"publish {one}")
        result = subscriber.call("update")
        if "error" not in result:
            assert result["digests"] == expected_digest(subscriber.task, result["version"])
        publishers[0].result(f"publish {version + 1}")
    assert_has_version(subscriber, subscriber.call("update"), 29)
