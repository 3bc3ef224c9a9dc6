"""Two-phase commits with real processes that may die: all subscribers go live or none does."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from examples.rl.log_prob_check import log_prob_check
from tests.integration.conftest import Host
from tests.integration.sync.test_faults import assert_has_version, members, short_stall
from tests.support.sync import SyncWorker, expected_digest

import penstock as ps


def begin(publishers: list[SyncWorker], subscribers: list[SyncWorker], version: int) -> None:
    for one in publishers:
        one.send(f"together {version}")
    for one in subscribers:
        one.send(f"wait {version}")
        one.send("update")


def refused(worker: SyncWorker, version: int) -> str:
    """Return the VersionRefused error of waiting for a withdrawn version, or of receiving it."""
    results = [worker.result(f"wait {version}"), worker.result("update")]
    errors = [one["message"] for one in results if "error" in one]
    assert len(errors) == 1 and {one.get("error", "VersionRefused") for one in results} == {"VersionRefused"}, results
    return errors[0]


def together(publishers: list[SyncWorker], subscribers: list[SyncWorker], version: int) -> list[dict[str, Any]]:
    """Return the subscribers' results for a version with a two-phase commit, and then the publishers' decisions."""
    begin(publishers, subscribers, version)
    results = [one.result("update") for one in subscribers]
    ends = [one.result(f"together {version}") for one in publishers]
    if any(end.get("outcome") == "pending" for end in ends):
        ends = [one.call("decision") for one in publishers]
    return results + ends


def assert_keeps_version(worker: SyncWorker, version: int) -> None:
    result = worker.call("digests")
    assert (result["version"], result["is_dirty"], result["prepared"]) == (version, False, -1)
    assert result["digests"] == expected_digest(worker.task, version)


@pytest.mark.parametrize("source", ["live", "snapshot"])
def test_subscribers_commit_atomically(host: Host, source: str) -> None:
    publishers = host.start_ranks("publisher", 2, mode=source, terms={"stragglers": "withdraw", "timeout_s": 8.0})
    subscribers = host.start_ranks("subscriber", 2, dim=1) + host.start_ranks("subscriber", 1, refuses=(2,))
    publishers[0].call("subscribers 3")
    *got, zero, one = together(publishers, subscribers, 1)
    for worker, result in zip(subscribers, got, strict=True):
        assert_has_version(worker, result, 1)
    assert set(zero["committed"]) == set(one["committed"]) == members(subscribers)
    assert zero["outcome"] == one["outcome"] == "committed"
    # A replica refuses version 2, and all members learn its id and reason.
    together(publishers, subscribers, 2)
    why = f"refused by subscriber {subscribers[2].events['joined']['member'][:8]}: it is refused"
    assert all(why in refused(worker, 2) for worker in subscribers)
    for one in publishers:
        result = one.result("together 2" if source == "live" else "decision")
        assert result["error"] == "VersionRefused" and why in result["message"]
    for worker in subscribers:
        assert_keeps_version(worker, 1)
        # A request for this number is refused again without a read.
        assert worker.call("update 2")["error"] == "VersionRefused"
    # A new subscriber reads the served version from its peers, and never the withdrawn one.
    late = host.start_ranks("subscriber", 1)[0]
    assert_has_version(late, late.call("update"), 1)
    *got, zero, one = together(publishers, [*subscribers, late], 3)
    for worker, result in zip([*subscribers, late], got, strict=True):
        assert_has_version(worker, result, 3)


def test_late_subscriber_is_skipped_and_catches_up(host: Host) -> None:
    publishers = host.start_ranks("publisher", 1, mode="snapshot", terms={"timeout_s": 1.5})
    subscribers = host.start_ranks("subscriber", 1)
    slow, direct = host.start_ranks("subscriber", 1)[0], host.start_ranks("subscriber", 1, mode="direct")[0]
    publishers[0].call("subscribers 3")
    begin(publishers, [*subscribers, direct], 1)
    assert_has_version(subscribers[0], subscribers[0].result("update"), 1)
    assert_has_version(
        direct, direct.result("update"), 1
    )  # without a staging copy, it reads the version after the decision
    publishers[0].result("together 1")
    end = publishers[0].call("decision")
    assert (set(end["committed"]), set(end["late"])) == (members(subscribers), members([slow]))
    assert set(end["failed"]) == members([direct])
    assert_has_version(slow, slow.call("update"), 1)


def test_stalled_subscriber_causes_withdrawal_of_version(host: Host) -> None:
    publishers = host.start_ranks("publisher", 1, terms={"timeout_s": 1.0, "stragglers": "withdraw"})
    subscribers = host.start_ranks("subscriber", 1)
    idle = host.start_ranks("subscriber", 1)[0]
    publishers[0].call("subscribers 2")
    *_, zero = together(publishers, subscribers, 1)
    assert zero["error"] == "VersionRefused" and zero["message"].split(";")[0] in refused(subscribers[0], 1)
    assert idle.events["joined"]["member"][:8] in zero["message"] and "before the deadline" in zero["message"]
    # The subscriber leaves after it prepared, so all remaining subscribers have prepared.
    begin(publishers, subscribers, 2)
    idle.process.stdin.close()
    assert_has_version(subscribers[0], subscribers[0].result("update"), 2)
    assert publishers[0].result("together 2")["committed"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_losing_rank_0_before_decision_withdraws_version(host: Host, number: int) -> None:
    """Prepared subscribers withdraw the version at the hub, and the next trainer continues."""
    first = host.start_ranks("subscriber", 1, **short_stall(4.0))  # hosts the hub
    publishers = host.start_ranks("publisher", 1, mode="snapshot", terms={"timeout_s": 60.0}, **short_stall(4.0))
    subscribers = first + host.start_ranks("subscriber", 1, **short_stall(4.0))
    idle = host.start_ranks("subscriber", 1)[0]  # awaited
    publishers[0].call("subscribers 3")
    begin(publishers, subscribers, 1)
    publishers[0].result("together 1")
    for one in subscribers:
        one.result("wait 1")
    time.sleep(1.0)  # let them prepare and wait
    begun = time.monotonic()
    publishers[0].kill(number)
    for one in subscribers:
        assert "could not learn the decision" in refused(one, 1)
    assert time.monotonic() - begun < 4.0 + 4.0 + 5.0
    publishers[0].kill(signal.SIGKILL)
    # The restarted trainer publishes the version after the withdrawn one.
    again = host.start_ranks("publisher", 2, mode="snapshot")
    again[0].call("subscribers 3")
    *got, zero, _ = together(again, [*subscribers, idle], 2)
    for worker, result in zip([*subscribers, idle], got, strict=True):
        assert_has_version(worker, result, 2)
    assert zero["outcome"] == "committed"


def test_withdrawn_version_raises_error_once(host: Host) -> None:
    """The hub still lists the dead rank 0 with the version, and the planning subscriber does not know the
    withdrawal."""
    hub = host.start_rank("subscriber", name="other")
    hub.wait_for("joined")
    publishers = host.start_ranks("publisher", 1, mode="snapshot", terms={"timeout_s": 60.0}, **short_stall(4.0))
    subscriber, other = (host.start_ranks("subscriber", 1, **short_stall(4.0))[0] for _ in range(2))
    publishers[0].call("subscribers 2")
    publishers[0].call("publish 1")
    for one in (subscriber, other):
        assert_has_version(one, one.call("update"), 1)
    # Both subscribers are sources after the publisher has left.
    host.wait_for_versions([-1, 1, 1])
    publishers[0].call("together 2")
    assert subscriber.call("stage 2")["prepared"] == 2
    publishers[0].kill(signal.SIGKILL)
    assert subscriber.call("commit")["error"] == "VersionRefused"
    for _ in range(2):
        assert_has_version(subscriber, subscriber.call("update"), 1)
    assert_keeps_version(subscriber, 1)


def test_subscriber_joining_before_commit_receives_version(host: Host) -> None:
    publishers = host.start_ranks("publisher", 2, mode="snapshot", terms={"timeout_s": 30.0, "stragglers": "withdraw"})
    first, awaited = (host.start_ranks("subscriber", 1)[0] for _ in range(2))
    publishers[0].call("subscribers 2")
    begin(publishers, [first], 1)
    first.result("wait 1")
    joins = host.start_ranks("subscriber", 1)[0]
    joins.send("update 1")
    time.sleep(0.5)
    assert "update done" not in first.events and "update 1 done" not in joins.events, "the decision waits for `awaited`"
    assert_has_version(awaited, awaited.call("update"), 1)
    assert_has_version(first, first.result("update"), 1)
    assert_has_version(joins, joins.result("update 1"), 1)
    for one in publishers:
        one.result("together 1")
        assert set(one.call("decision")["committed"]) >= members([first, awaited])
    # The new subscriber counts from the next version on, and one that leaves does not count.
    awaited.process.stdin.close()
    awaited.process.wait(20)
    *got, zero, _ = together(publishers, [first, joins], 2)
    for worker, result in zip((first, joins), got, strict=True):
        assert_has_version(worker, result, 2)
    assert set(zero["committed"]) == members([first, joins])


def test_hub_returns_decision_after_rank_0_dies(host: Host) -> None:
    first = host.start_ranks("subscriber", 1)  # hosts the hub
    publishers = host.start_ranks("publisher", 1, mode="snapshot", terms={"timeout_s": 2.0})
    slow = host.start_ranks("subscriber", 1)[0]
    publishers[0].call("subscribers 2")
    publishers[0].call("together 1")
    for one in (*first, slow):
        one.call("wait 1")
        assert one.call("stage 1")["prepared"] == 1
    assert publishers[0].call("decision")["outcome"] == "committed"
    publishers[0].kill(signal.SIGKILL)
    for one in (*first, slow):
        assert_has_version(one, one.call("commit"), 1)


def test_subscriber_without_decision_keeps_previous_version(host: Host) -> None:
    hub = host.start_rank("subscriber", name="other")  # hosts the hub
    hub.wait_for("joined")
    publishers = host.start_ranks("publisher", 1, mode="snapshot", terms={"timeout_s": 60.0}, **short_stall(3.0))
    subscriber, idle = (host.start_ranks("subscriber", 1, **short_stall(3.0))[0] for _ in range(2))
    publishers[0].call("subscribers 2")
    begin(publishers, [subscriber, idle], 1)
    for one in (subscriber, idle):
        assert_has_version(one, one.result("update"), 1)
    publishers[0].result("together 1")
    publishers[0].call("together 2")
    subscriber.call("wait 2")
    subscriber.call("stage 2")
    hub.kill(signal.SIGSTOP)
    publishers[0].kill(signal.SIGKILL)
    result = subscriber.call("commit")
    assert result["error"] == "SourceStalled" and "cannot learn the fleet" in result["message"], result
    after = subscriber.call("digests")
    assert (after["version"], after["prepared"]) == (1, 2)
    hub.kill(signal.SIGCONT)
    # A restarted hub has no record, and decides nothing until it knows all members.
    while (result := subscriber.call("commit"))["error"] == "SourceStalled":
        keeps_staged = subscriber.call("digests")
        assert (keeps_staged["version"], keeps_staged["prepared"]) == (1, 2)
    assert result["error"] == "VersionRefused"
    assert_keeps_version(subscriber, 1)


def test_status_shows_serving_version_per_member(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(host.directory))
    publishers = host.start_ranks("publisher", 1, mode="snapshot", terms={"timeout_s": 20.0})
    subscribers = host.start_ranks("subscriber", 1) + host.start_ranks("subscriber", 1)
    publishers[0].call("subscribers 2")
    together(publishers, subscribers, 1)
    publishers[0].call("together 2")
    subscribers[0].call("wait 2")
    subscribers[0].call("stage 2")

    def states() -> dict[str, Any]:
        return {member.member: member.syncs[0] for member in ps.hub.status().members if member.syncs}

    first, second, zero = (worker.events["joined"]["member"] for worker in (*subscribers, *publishers))
    deadline = time.monotonic() + 10.0
    while states()[first].prepared != 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    shown = states()
    assert (shown[first].version, shown[first].prepared) == (1, 2)
    assert (shown[second].version, shown[second].prepared) == (1, -1)
    assert (shown[zero].decision.version, shown[zero].decision.outcome) == (1, "committed")


def test_check_hook_receives_staged_weights_and_trainer_values() -> None:
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens))

        def load_weights(self, weights: Any) -> None:
            # A transposed tensor arrives in scratch memory, and another tensor has a padded row.
            for name, tensor in weights:
                own = dict(self.named_parameters())[name]
                if name == "head.weight":
                    own.data.copy_(tensor.t())
                else:
                    own.data[: len(tensor)].copy_(tensor)

    trained, served = Model(), Model()
    with torch.no_grad():
        served.embedding = torch.nn.Embedding(12, 8)
    params = {
        "embedding.weight": trained.embedding.weight,
        "head.weight": torch.empty(8, 11),
        "head.bias": trained.head.bias,
    }
    tokens = torch.randint(0, 11, (2, 5))

    def values() -> dict[str, torch.Tensor]:
        params["head.weight"].copy_(trained.head.weight.detach().t())
        log_probs = trained(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return {"tokens": tokens, "log_probs": log_probs.detach()}

    seen: list[ps.sync.StagedVersion] = []
    ready = log_prob_check(1e-5)

    def check(version: int, staged: ps.sync.StagedVersion) -> object:
        seen.append(staged)
        assert served.head.weight.data_ptr() != staged.tensors["head.weight"].data_ptr()
        return ready(version, staged)

    with (
        ps.publisher("policy", params, mode="snapshot") as publisher,
        ps.subscriber("policy", served, hooks=ps.Hooks(check=check), strict=False) as subscriber,
    ):
        publisher.wait_subscribers(1)
        publisher.publish(1, commit="all", check=values())
        subscriber.update()
        assert publisher.wait_decision().outcome == "committed"
        assert torch.equal(served(tokens), trained(tokens)[..., :11])
        before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
        torch.nn.init.normal_(trained.head.weight)
        good = values()
        publisher.publish(2, commit="all", check=good | {"log_probs": good["log_probs"] + 0.5})
        with pytest.raises(ps.VersionRefused, match=r"differs from the trainer's by 0.5") as caught:
            subscriber.update()
        assert (caught.value.version, caught.value.member) == (2, subscriber.member.id)
        with pytest.raises(ps.VersionRefused, match=r"differs from the trainer's by 0.5"):
            publisher.wait_decision()
        assert all(torch.equal(tensor, before[name]) for name, tensor in served.state_dict().items())
        with torch.no_grad():
            trained.head.bias[3] = float("nan")
        publisher.publish(3, commit="all", check={"n": 3, "text": "x"})
        with pytest.raises(ps.VersionRefused, match=r"head.bias has values that are not finite"):
            subscriber.update()
        assert seen[-1].expected == {"n": 3, "text": "x"}
        # Without a two-phase commit, a refusal affects only this replica.
        publisher.publish(4)
        with pytest.raises(ps.VersionRefused, match="refused by subscriber"):
            subscriber.update()
        assert subscriber.version == 1


def test_pinned_version_is_not_replaced_until_released() -> None:
    trained, served = torch.zeros(8), torch.zeros(8)
    with (
        ps.publisher("pins", {"w": trained}, mode="snapshot") as publisher,
        ps.subscriber("pins", {"w": served}) as subscriber,
        ThreadPoolExecutor(1) as pool,
    ):
        with pytest.raises(ps.errors.VersionNotLive, match="there is none"), subscriber.pinned():
            pass
        publisher.publish(1)
        subscriber.update()
        trained.fill_(2)
        publisher.publish(2)
        with (
            pytest.raises(ps.errors.VersionNotLive, match=r"version 2 is not live: version 1 is"),
            subscriber.pinned(2),
        ):
            pass
        with subscriber.pinned(1) as version:
            updating = pool.submit(subscriber.update)
            time.sleep(0.3)
            assert (version, float(served[0]), updating.done()) == (1, 0.0, False)
        assert updating.result().version == 2 and float(served[0]) == 2.0
        # A reader with an expired lease gets an error and does not delay the flip.
        publisher.publish(3)
        ended = pytest.raises(ps.errors.VersionNotLive, match=r"ended after 0.2 s, and another version")
        with ended, subscriber.pinned(2, ttl_s=0.2):
            assert pool.submit(subscriber.update).result().version == 3
        # A reader that arrives while a flip waits gets the next version.
        publisher.publish(4)
        with ThreadPoolExecutor(1) as other:
            with subscriber.pinned(3):
                updating = pool.submit(subscriber.update)
                while not subscriber._leases._is_closed_to_readers:
                    time.sleep(0.01)
                late = other.submit(lambda: subscriber.pinned().__enter__())
            assert (updating.result().version, late.result()) == (4, 4)


def test_live_version_is_served_while_next_is_staged() -> None:
    trained, first, second = ({"w": torch.full((64,), float(i))} for i in (1, 0, 0))
    with ps.subscriber("served", first) as holder:
        with ps.publisher("served", trained, mode="snapshot") as publisher:
            publisher.publish(1)
            holder.update()
            trained["w"].fill_(2)
            publisher.publish(2)
            assert holder.stage() == 2
        with ps.subscriber("served", second) as joins:
            assert joins.update(timeout_s=20.0).sources == {holder.member.id: 256}
        assert float(second["w"][0]) == 1.0
        assert holder.commit().version == 2
