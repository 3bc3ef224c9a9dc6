"""All ranks of a trainer start with the same version, in any order and after restarts."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from tests.integration.conftest import Host
from tests.integration.sync.test_faults import assert_has_version
from tests.integration.sync.test_sync import step
from tests.support.ranks import run_ranks

import penstock as ps
from penstock.errors import ConfigError

Step = tuple[str, int]


@pytest.fixture
def stack(host: Host) -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def orders(world_size: int, count: int | None = None) -> list[tuple[Step, ...]]:
    """Return orders in which each rank starts and then publishes."""
    steps = [(kind, rank) for rank in range(world_size) for kind in ("start", "publish")]
    if count is None:
        found = itertools.permutations(steps)
        return [
            one for one in found if all(one.index(("start", r)) < one.index(("publish", r)) for r in range(world_size))
        ]
    chance, some = random.Random(world_size), []
    for _ in range(count):
        ranks = [rank for rank in range(world_size) for _ in range(2)]
        chance.shuffle(ranks)
        seen: set[int] = set()
        some.append(tuple(("publish" if rank in seen or seen.add(rank) else "start", rank) for rank in ranks))
    return some


class Trainer:
    """Ranks of one trainer, each in a thread, with rows of one tensor."""

    def __init__(self, stack: ExitStack, world_size: int, value: float, **options: object) -> None:
        self.publishers: dict[int, ps.sync.Publisher] = {}
        self.errors: list[BaseException] = []
        self._stack = stack
        self._world_size = world_size
        self._options = {"mode": "snapshot", **options}
        self._value = value
        self._threads: list[threading.Thread] = []
        self._is_started = [threading.Event() for _ in range(world_size)]

    def start(self, rank: int) -> None:
        self._is_started[rank].clear()

        def work() -> None:
            part = ps.Shard(
                tensor=torch.full((3, 5), self._value), global_shape=(3 * self._world_size, 5), offset=(3 * rank, 0)
            )
            try:
                made = ps.publisher("ranks", {"w": part}, rank=(rank, self._world_size), **self._options)  # type: ignore[arg-type]
                self.publishers[rank] = self._stack.enter_context(made)
            except BaseException as error:
                self.errors.append(error)
                raise
            finally:
                self._is_started[rank].set()

        thread = threading.Thread(target=work)
        self._threads.append(thread)
        thread.start()
        if rank == 0 or 0 in self.publishers:
            assert self._is_started[rank].wait(20)
            assert not self.errors

    def publish(self, rank: int, version: int) -> None:
        assert self._is_started[rank].wait(20)
        assert not self.errors
        self.publishers[rank].publish(version)

    def run(self, order: tuple[Step, ...], version: int) -> None:
        started: set[int] = set()
        for kind, rank in order:
            # Rank 0 starts before the first publish of a rank, which waits for it.
            for one in [rank, 0] if kind == "publish" else [rank]:
                if one not in started:
                    self.start(one)
                    started.add(one)
            if kind == "publish":
                self.publish(rank, version)
        for thread in self._threads:
            thread.join(20)

    def latest(self) -> list[int]:
        return [publisher.latest for publisher in self.publishers.values()]


def received(stack: ExitStack, world_size: int) -> tuple[int, torch.Tensor]:
    target = {"w": torch.zeros(3 * world_size, 5)}
    with ps.subscriber("ranks", target) as subscriber:
        return subscriber.update().version, target["w"]


@pytest.mark.parametrize("order", orders(2) + orders(3, 6) + orders(4, 6))
def test_first_publish_succeeds_in_any_rank_order(stack: ExitStack, order: tuple[Step, ...]) -> None:
    world_size = len(order) // 2
    trainer = Trainer(stack, world_size, 7.0)
    trainer.run(order, 1)
    assert trainer.latest() == [-1] * world_size
    version, values = received(stack, world_size)
    assert version == 1
    assert bool((values == 7).all())


@pytest.mark.parametrize(("former", "order"), [*zip([1, 3, 4, 2, 2], orders(2)[::2] + orders(3, 2), strict=True)])
def test_restarted_ranks_continue_version_numbering(stack: ExitStack, order: tuple[Step, ...], former: int) -> None:
    with ExitStack() as first:
        old = Trainer(first, former, 1.0)
        old.run(tuple(("start", rank) for rank in range(former)), 0)
        for rank in range(former):
            old.publish(rank, 5)
        target = {"w": torch.zeros(3 * former, 5)}
        # The subscriber keeps the version when the trainer is closed.
        stack.enter_context(ps.subscriber("ranks", target)).update()
    world_size = len(order) // 2
    trainer = Trainer(stack, world_size, 2.0)
    trainer.run(order, 6)
    assert trainer.latest() == [5] * world_size
    assert received(stack, world_size)[0] == 6


def test_all_ranks_reject_already_published_version(stack: ExitStack) -> None:
    with ExitStack() as first:
        old = Trainer(first, 2, 1.0)
        old.run((("start", 0), ("start", 1), ("publish", 0), ("publish", 1)), 3)
        stack.enter_context(ps.subscriber("ranks", {"w": torch.zeros(6, 5)})).update()
    trainer = Trainer(stack, 3, 2.0)
    trainer.run((("start", 1), ("start", 2), ("start", 0)), 0)
    for publisher in trainer.publishers.values():
        with pytest.raises(ConfigError, match="not above 3"):
            publisher.publish(3)


def test_single_restarted_rank_continues_version_numbering(stack: ExitStack) -> None:
    trainer = Trainer(stack, 2, 1.0)
    trainer.run((("start", 0), ("publish", 0), ("start", 1), ("publish", 1)), 1)
    assert trainer.latest() == [-1, -1]
    trainer.publishers.pop(1).close()
    trainer.start(1)
    assert trainer.latest() == [-1, 1]
    for rank in range(2):
        trainer.publish(rank, 2)
    assert received(stack, 2)[0] == 2


def test_rank_reconnects_to_restarted_rank_0(stack: ExitStack) -> None:
    trainer = Trainer(stack, 2, 1.0)
    trainer.run((("start", 0), ("start", 1), ("publish", 0), ("publish", 1)), 4)
    trainer.publishers.pop(0).close()
    trainer.start(0)
    # No other process has version 4, and rank 1 belongs to the old run.
    assert trainer.publishers[0].latest == 4
    for rank in (1, 0):
        trainer.publish(rank, 5)
    assert received(stack, 2)[0] == 5


@pytest.mark.parametrize("world_size", [1, 3])
def test_killed_trainer_restarts_with_different_world_size(host: Host, world_size: int) -> None:
    old = host.start_ranks("publisher", 2, mode="snapshot")
    for one in old:
        one.call("publish 3")
    for one in old:
        one.kill()
    # Only the hub's list of the dead ranks contains version 3.
    new = host.start_ranks("publisher", world_size, mode="snapshot")
    latest = [one.events["joined"]["latest"] for one in new]
    assert len(set(latest)) == 1
    subscriber = host.start_ranks("subscriber", 1)
    assert_has_version(subscriber[0], step(new, subscriber, 4)[0], 4)


def _publish(rank: int, world_size: int) -> int:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Linear(64, 64)
    fully_shard(module)
    dist.barrier()
    with ps.publisher("policy", module, mode="snapshot") as publisher:
        publisher.publish(1)
        dist.barrier()
        return publisher.latest


def test_fsdp_ranks_publish_after_barrier(host: Host) -> None:
    outcomes = run_ranks(_publish, 2, environ={**host.environ, "GLOO_SOCKET_IFNAME": "lo"})
    assert [(one.ended, one.value) for one in outcomes] == [("returned", -1)] * 2, outcomes
