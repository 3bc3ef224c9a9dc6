"""`prepare` does the one-time work of the first update before a version is published."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.integration.conftest import Host

import penstock as ps
from penstock.errors import Cancelled, ConfigError, PeerLost, PlanError
from penstock.plan.sync import SyncPlan
from penstock.sync import planner
from penstock.sync.membership import Membership


class Model(torch.nn.Module):
    """A model whose loader transposes one of two tensors and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Parameter(torch.full((6, 4), -1.0))
        self.turned = torch.nn.Parameter(torch.full((4, 8), -1.0))
        self.num_loads = 0

    def load_weights(self, weights) -> None:
        self.num_loads += 1
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor.t() if name == "turned" else tensor)

    def has(self, trained: dict[str, torch.Tensor]) -> bool:
        return torch.equal(self.plain, trained["plain"]) and torch.equal(self.turned, trained["turned"].t())

    def is_untouched(self) -> bool:
        return bool((self.plain == -1).all() and (self.turned == -1).all())


def trained() -> dict[str, torch.Tensor]:
    return {"plain": torch.randn(6, 4), "turned": torch.randn(8, 4)}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[SyncPlan]:
    made: list[SyncPlan] = []
    plan_sync = planner.plan_sync

    def noted(*arguments, **options) -> SyncPlan:
        made.append(plan_sync(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(planner, "plan_sync", noted)
    return made


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_first_update_reuses_preparation(host: Host, mode: str, plans: list[SyncPlan]) -> None:
    model, weights = Model(), trained()
    with ps.publisher("p", weights, mode="snapshot") as publisher, ps.subscriber("p", model, mode=mode) as subscriber:
        assert subscriber.wanted is None
        assert subscriber.prepare()
        assert subscriber.wanted is not None and len(subscriber.wanted.rows) == 2
        assert model.is_untouched() and subscriber.version == -1
        assert (model.num_loads, len(plans)) == (1, 1)
        assert subscriber.prepare()
        publisher.publish(1)
        assert subscriber.update().version == 1
        assert model.has(weights)
        assert (model.num_loads, len(plans)) == (1, 1)


def test_preparation_stays_valid_after_second_engine_joins(host: Host, plans: list[SyncPlan]) -> None:
    models, weights = [Model(), Model()], trained()
    with (
        ps.publisher("p", weights, mode="snapshot") as publisher,
        ps.subscriber("p", models[0]) as first,
        ps.subscriber("p", models[1]) as second,
    ):
        assert first.prepare() and second.prepare()
        assert [len(plan.receivers) for plan in plans] == [1, 2]
        publisher.publish(1)
        for subscriber, model in ((first, models[0]), (second, models[1])):
            subscriber.update()
            assert model.has(weights) and model.num_loads == 1
        # Both engines use the plan that contains both.
        assert len(plans) == 2


def test_prepare_without_publisher_returns_false(host: Host) -> None:
    model, weights = Model(), trained()
    with ps.subscriber("p", model) as subscriber:
        assert not subscriber.prepare(0.0)
        assert (model.num_loads, subscriber.wanted) == (0, None)
        with ps.publisher("p", weights, mode="snapshot") as publisher:
            publisher.publish(1)
            subscriber.update()
            assert model.has(weights)


def test_prepare_waits_for_publisher(host: Host) -> None:
    model = Model()
    with ps.subscriber("p", model) as subscriber, ThreadPoolExecutor(1) as threads:
        preparing = threads.submit(subscriber.prepare)
        with ps.publisher("p", trained(), mode="snapshot"):
            assert preparing.result()
        assert model.num_loads == 1


def test_prepare_returns_false_while_rank_is_missing(host: Host) -> None:
    with ps.subscriber("p", Model()) as subscriber, ps.publisher("p", trained(), rank=(0, 2)):
        assert not subscriber.prepare(0.3)


@pytest.mark.parametrize("wait_s", [-1, float("nan"), "5"])
def test_invalid_wait_duration_is_refused(host: Host, wait_s) -> None:
    live = {"w": torch.full((64,), -1.0)}
    with (
        ps.publisher("p", {"w": torch.ones(64)}, mode="snapshot") as publisher,
        ps.subscriber("p", live, mode="staged") as subscriber,
    ):
        publisher.publish(1)
        waits = [
            lambda: publisher.wait_subscribers(1, wait_s),
            lambda: subscriber.prepare(wait_s),
            lambda: subscriber.update(timeout_s=wait_s),
            lambda: subscriber.stage(timeout_s=wait_s),
            lambda: subscriber.wait(1, wait_s),
            lambda: subscriber.pinned(ttl_s=wait_s).__enter__(),
        ]
        for wait in waits:
            with pytest.raises(ConfigError, match="_s is"):
                wait()
        assert (live["w"] == -1).all() and subscriber.update().version == 1


def test_prepare_rejects_mismatched_tensors_before_first_version(host: Host) -> None:
    mine = {"plain": torch.zeros(6, 4), "turned": torch.zeros(8, 4, dtype=torch.bfloat16)}
    with ps.publisher("p", trained(), mode="snapshot"), ps.subscriber("p", mine) as subscriber:
        with pytest.raises(PlanError, match="turned"):
            subscriber.prepare()
        assert not mine["plain"].any() and subscriber.version == -1
    with pytest.raises(Cancelled):
        subscriber.prepare()


def test_failed_prepare_keeps_staged_version(host: Host) -> None:
    live = {"w": torch.full((64,), -1.0)}
    with ps.subscriber("p", live, mode="staged") as subscriber:
        with ps.publisher("p", {"w": torch.ones(64)}, mode="snapshot") as publisher:
            publisher.publish(1)
            subscriber.stage()
        # The restarted trainer's checkpoint needs different memory from the staged version.
        with ps.publisher("p", {"w": torch.zeros(64), "more": torch.zeros(8)}, mode="snapshot"):
            with pytest.raises(ConfigError, match="version 1 of 'p' is already staged"):
                subscriber.prepare()
            assert subscriber.commit().version == 1
        assert torch.equal(live["w"], torch.ones(64))


def test_live_version_is_served_after_trainer_restart(host: Host) -> None:
    live, late = {"w": torch.full((64,), -1.0)}, {"w": torch.zeros(64)}
    with ps.subscriber("p", live) as subscriber:
        with ps.publisher("p", {"w": torch.ones(64)}, mode="snapshot") as publisher:
            publisher.publish(1)
            subscriber.update()
        with ps.publisher("p", {"w": torch.zeros(64), "more": torch.zeros(8)}, mode="snapshot"):
            assert subscriber.prepare()
        # The trainer is gone, so the subscriber is the only source.
        with ps.subscriber("p", late) as other:
            assert other.update(1, timeout_s=20.0).version == 1
    assert torch.equal(late["w"], torch.ones(64))


def test_mismatched_update_keeps_live_version_served(host: Host) -> None:
    weights, late = trained(), Model()
    with ps.subscriber("p", Model()) as subscriber:
        with ps.publisher("p", weights, mode="snapshot") as publisher:
            publisher.publish(1)
            subscriber.update()
        with ps.publisher("p", {"plain": torch.zeros(6, 4)}, mode="snapshot") as publisher:
            publisher.publish(2)
            subscriber.wait(2, timeout_s=20.0)
            with pytest.raises(PlanError, match="turned"):
                subscriber.update()
        assert subscriber.wanted is not None and subscriber.version == 1
        with ps.subscriber("p", late) as other:
            assert other.update(1, timeout_s=20.0).version == 1
        assert late.has(weights)
        assert subscriber.release() > 0


def test_plan_is_requested_from_another_member_after_planner_dies(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = Membership.ask

    def lost_first(self: Membership, member: str, *arguments, **options):
        if self is subscriber._membership:
            asked.append(member)
            if member == asked[0]:
                raise PeerLost("the trainer was killed", uri=member)
        return ask(self, member, *arguments, **options)

    live = {"w": torch.zeros(64)}
    with ps.publisher("p", {"w": torch.ones(64)}, mode="snapshot") as publisher, ps.subscriber("p", live) as having:
        publisher.publish(1)
        having.update()
        with ps.subscriber("p", {"w": torch.zeros(64)}) as subscriber:
            monkeypatch.setattr(Membership, "ask", lost_first)
            assert subscriber.prepare(0.0)
    assert len(set(asked)) == 2
