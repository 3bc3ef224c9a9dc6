"""Placement: every task ends once, whatever workers do; a slow or dead one costs little."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock_convert.plan.placement import DEPTH, Placement


def play(
    placement: Placement,
    cost: list[int],
    pace: dict[str, float],
    *,
    dies: dict[str, float] | None = None,
    slows: dict[str, tuple[float, float]] | None = None,
) -> float:
    """Run a job: workers carry out what they are given one after another, until they die; seconds until all is done.

    `slows`: from this time on, so many times slower.
    """
    sequence = itertools.count()
    events: list[tuple[float, int, str, int, int]] = []
    queue: dict[str, list[int]] = {name: [] for name in pace}
    turn = dict.fromkeys(pace, 0)
    ended: set[int] = set()
    for name in pace:
        placement.join(name, 0.0)
    for name, at in (dies or {}).items():
        heapq.heappush(events, (at, next(sequence), name, -1, 0))
    now = 0.0

    def rate(name: str) -> float:
        at, times = (slows or {}).get(name, (float("inf"), 1.0))
        return pace[name] / (times if now >= at else 1.0)

    def begin(name: str) -> None:
        if queue[name]:
            heapq.heappush(
                events, (now + cost[queue[name][0]] / rate(name), next(sequence), name, queue[name][0], turn[name])
            )

    def revoke(taken: tuple[tuple[str, int], ...]) -> None:
        for name, task in taken:
            if name in queue and task in queue[name]:
                was_first = queue[name][0] == task
                queue[name].remove(task)
                if was_first:
                    turn[name] += 1
                    begin(name)

    def feed() -> None:
        for name in list(queue):
            got = placement.next(name, now)
            revoke(got.revoked)
            idle = not queue[name]
            queue[name].extend(got.tasks)
            if idle:
                begin(name)

    feed()
    while not placement.is_done:
        if not events or events[0][0] > now + 1.0:
            now += 1.0  # whoever is idle asks again
            feed()
            continue
        now, _, name, task, at_turn = heapq.heappop(events)
        if name not in queue or (task >= 0 and at_turn != turn[name]):
            continue
        if task < 0:
            placement.remove(name)
            del queue[name]
        else:
            queue[name].remove(task)
            turn[name] += 1
            outcome = placement.done(name, task, now)
            assert outcome.first == (task not in ended)
            ended.add(task)
            revoke(outcome.revoked)
            begin(name)
        feed()
    assert ended == set(range(len(cost)))
    return now


COSTS = [100] * 400
FOUR = {f"w{i}": 100.0 for i in range(4)}


def test_equal_workers_finish_simultaneously():
    assert play(Placement(COSTS), COSTS, FOUR) == pytest.approx(100.0)


def test_slow_worker_adds_little_total_time():
    slow = {"w0": 20.0, "w1": 100.0, "w2": 100.0, "w3": 100.0}
    ideal = sum(COSTS) / sum(slow.values())
    assert play(Placement(COSTS), COSTS, slow) <= 1.05 * ideal


def test_queue_of_slowing_worker_is_reassigned():
    ideal = 50.0 + (sum(COSTS) - 50.0 * 400) / 320
    placement = Placement(COSTS)
    assert play(placement, COSTS, FOUR, slows={"w2": (50.0, 5.0)}) <= 1.1 * ideal
    assert placement.num_stolen or placement.num_twice


def test_tasks_of_stalled_worker_are_duplicated():
    placement = Placement(COSTS)
    assert play(placement, COSTS, FOUR, slows={"w2": (98.5, 1e6)}) <= 105.0
    assert placement.num_twice >= 1


def test_tasks_of_dead_worker_run_on_other_workers():
    ideal = 50.0 + (sum(COSTS) - 50.0 * 400) / 300
    assert play(Placement(COSTS), COSTS, FOUR, dies={"w1": 50.0}) <= 1.05 * ideal


def test_large_task_does_not_delay_small_tasks():
    costs = [4000] + [10] * 1200
    assert play(Placement(costs), costs, FOUR) <= 1.05 * sum(costs) / 400


def test_worker_first_receives_tasks_with_cached_input():
    placement = Placement([10] * 40)
    placement.join("a", 0.0, holds=range(20, 40))
    placement.join("b", 0.0)
    assert placement.next("a", 0.0).tasks == (20, 21, 22, 23)
    assert placement.next("b", 0.0).tasks == (0, 1, 2, 3)


def test_idle_workers_steal_reserved_tasks():
    placement = Placement([10] * 20)
    placement.join("a", 0.0, holds=range(20))
    placement.join("b", 0.0)
    placement.next("a", 0.0)
    given_b = placement.next("b", 0.0)
    assert given_b.tasks == (19, 18, 17, 16)
    assert given_b.revoked == ()  # it had not been told of them
    assert placement.num_stolen == 4


def test_workers_on_one_host_share_its_reserved_tasks():
    placement = Placement([10] * 24)
    placement.join("a", 0.0, holds=range(12, 24), at="host 1")
    placement.join("b", 0.0, holds=range(12, 24), at="host 1")
    placement.join("c", 0.0, at="host 2")
    assert placement.next("a", 0.0).tasks == (12, 13, 14, 15)
    assert placement.next("c", 0.0).tasks == (0, 1, 2, 3)
    assert placement.next("b", 0.0).tasks == (16, 17, 18, 19)
    placement.remove("a")  # its host is still there, and what is kept there
    for task in (0, 1, 2, 3):
        placement.done("c", task, 1.0)
    assert placement.next("c", 1.0).tasks == (12, 13, 14, 15)
    assert placement.num_stolen == 0
    for task in (16, 17, 18, 19):
        placement.done("b", task, 1.0)
    assert placement.next("b", 1.0).tasks == (20, 21, 22, 23)
    placement.remove("b")  # the last of the host: what was kept there is anybody's
    for task in (12, 13, 14, 15):
        placement.done("c", task, 2.0)
    assert placement.next("c", 2.0).tasks == (20, 21, 22, 23)


def test_tasks_cached_on_two_hosts_do_not_count_as_stolen():
    placement = Placement([10] * 8)
    placement.join("a", 0.0, holds=range(8), at="host 1")
    placement.join("b", 0.0, holds=range(4, 8), at="host 2")
    assert placement.next("b", 0.0).tasks == (4, 5, 6, 7)
    assert placement.next("a", 0.0).tasks == (0, 1, 2, 3)
    assert placement.num_stolen == 0


def test_busy_hosts_do_not_steal_remote_tasks():
    """Two hosts of two, each with half of the bytes: they steal only when their own is done."""
    placement = Placement([100] * 400)
    where = {task: f"host {task % 2}" for task in range(400)}
    pace = dict.fromkeys("abcd", 100.0)
    given = {name: [] for name in pace}
    for i, name in enumerate(pace):
        at = f"host {i // 2}"
        placement.join(name, 0.0, holds=[task for task in where if where[task] == at], at=at)
    now = 0.0
    while not placement.is_done:
        for name in pace:
            given[name] += placement.next(name, now).tasks
        now += 1.0
        for name in pace:
            placement.done(name, placement.assigned(name)[0], now)
    assert now == pytest.approx(100.0)
    assert all(where[task] == f"host {i // 2}" for i, name in enumerate(pace) for task in given[name])


def test_task_runs_at_most_twice_concurrently():
    placement = Placement([10])
    for name in "abc":
        placement.join(name, 0.0)
    assert placement.next("a", 0.0).tasks == (0,)
    assert placement.next("b", 0.0).tasks == ()  # it has only just begun
    assert placement.next("b", 100.0).tasks == (0,)
    assert placement.next("c", 1000.0).tasks == ()
    outcome = placement.done("b", 0, 101.0)
    assert outcome.first and outcome.revoked == (("a", 0),)
    assert not placement.done("a", 0, 102.0).first
    assert placement.is_done


def test_completion_from_lost_worker_is_accepted():
    placement = Placement([10, 10])
    placement.join("a", 0.0)
    placement.next("a", 0.0)
    placement.remove("a")
    assert placement.done("a", 0, 1.0).first
    placement.join("b", 1.0)
    assert placement.next("b", 1.0).tasks == (1,)


def test_resumed_job_runs_only_remaining_tasks():
    placement = Placement([10] * 5, done=[0, 2, 4])
    placement.join("a", 0.0)
    assert placement.next("a", 0.0).tasks == (1, 3)
    assert placement.num_left == 2


def test_queue_depth_is_limited_and_duplicate_join_raises():
    placement = Placement([1] * 100)
    placement.join("a", 0.0)
    assert len(placement.next("a", 0.0).tasks) == DEPTH
    assert placement.next("a", 0.0).tasks == ()
    assert len(placement.assigned("a")) == DEPTH
    with pytest.raises(PlanError, match="joined twice"):
        placement.join("a", 1.0)


@settings(deadline=None, max_examples=150)
@given(
    costs=st.lists(st.integers(0, 1000), min_size=1, max_size=60),
    paces=st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 30),
)
def test_every_task_completes_once_despite_failures(costs, paces, seed):
    chance = random.Random(seed)
    pace = {f"w{i}": p for i, p in enumerate(paces)}
    costs = [max(1, cost) for cost in costs]
    dies = {name: chance.uniform(0.0, 50.0) for name in list(pace)[1:] if chance.random() < 0.5}
    play(Placement(costs, depth=chance.randint(1, 6)), costs, pace, dies=dies)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 1 << 30))
def test_random_call_order_completes_every_task(seed):
    chance = random.Random(seed)
    count = chance.randint(1, 30)
    placement = Placement([chance.randint(1, 9) for _ in range(count)])
    here: list[str] = []
    given_to: dict[str, set[int]] = {}
    gone: list[tuple[str, int]] = []
    firsts: set[int] = set()
    for step in range(300):
        what, now = chance.random(), float(step)
        if what < 0.15 or not here:
            name = f"w{step}"
            holds = chance.sample(range(count), chance.randint(0, count // 2))
            placement.join(name, now, holds=holds, at=chance.choice(["", "here", "there"]))
            here.append(name)
            given_to[name] = set()
        elif what < 0.25 and len(here) > 1:
            name = here.pop(chance.randrange(len(here)))
            gone += [(name, task) for task in given_to.pop(name)]
            placement.remove(name)
        elif what < 0.6:
            name = chance.choice(here)
            got = placement.next(name, now)
            given_to[name].update(got.tasks)
        else:
            ends = [(name, task) for name in here for task in given_to[name]] + gone
            if ends:
                name, task = chance.choice(ends)
                first = placement.done(name, task, now).first
                assert first == (task not in firsts)
                firsts.add(task)
        assert placement.num_left == count - len(firsts)
    now = 1000.0
    while not placement.is_done:
        now += 100.0
        for name in here:
            placement.next(name, now)
            for task in placement.assigned(name):
                firsts.add(task)
                placement.done(name, task, now)
    assert firsts == set(range(count))
