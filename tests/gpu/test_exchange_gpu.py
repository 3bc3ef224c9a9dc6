"""Staged versions become live by an exchange of physical memory. Graphs and addresses stay valid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.gpu.test_sleep_gpu import DEVICE, SETTINGS, WIDTH, Model, Trainer

import penstock as ps
from penstock.cuda.device_memory import DeviceMemory, memory_of
from penstock.cuda.driver import load_driver
from penstock.memory.arena import Arena

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ExitStack]:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as found:
        yield found


@pytest.mark.alone
def test_exchange_swaps_physical_memory_under_tensor() -> None:
    arenas = [Arena.allocate(50_000_000, DEVICE, is_remappable=True) for _ in range(2)]
    live, staged = (arena.bytes_at(0, 50_000_000) for arena in arenas)
    live.fill_(1)
    staged.fill_(2)
    mine, new = (memory_of(arena.address) for arena in arenas)
    assert mine is not None and new is not None
    former = Arena.over(mine.alias())
    mine.take(new)
    assert (int(live.min()), int(live.max()), int(former.bytes_at(0, 10).max())) == (2, 2, 1)
    staged.fill_(3)
    assert (int(live.min()), int(live.max())) == (3, 3)
    free = torch.cuda.mem_get_info()[0]
    del former
    assert torch.cuda.mem_get_info()[0] - free >= 40_000_000
    mine.unmap()
    del staged, new
    arenas.pop()
    assert torch.cuda.mem_get_info()[0] - free >= 80_000_000
    mine.renew()
    live.fill_(4)
    assert int(live.sum()) == 4 * 50_000_000


@pytest.mark.alone
def test_memory_is_freed_after_pending_kernels() -> None:
    free = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        arena = Arena.allocate(200_000_000, DEVICE, is_remappable=True)
        whole = arena.bytes_at(0, arena.nbytes)
        for value in range(50):
            whole.fill_(value)
        del arena, whole
    # This raises if a kernel used freed memory.
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free - 200_000_000


def test_second_device_reads_exchanged_memory() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    memory = DeviceMemory(10_000_000, 0)
    whole = torch.as_tensor(memory, device=DEVICE)
    whole.fill_(7)
    torch.cuda.synchronize()
    memory.allow(1)
    # Use a kernel of the other device, because copies also work without `allow`.
    seen = torch.zeros(6400, dtype=torch.uint8, device="cuda:1")
    # The driver's stream does not wait for torch's stream, which writes the zeros.
    torch.cuda.synchronize(1)
    at, driver = np.arange(0, 6400, 100, dtype=np.uint64), load_driver()
    dst, src = at + np.uint64(seen.data_ptr()), at + np.uint64(memory.address)
    with driver.entered(1):
        driver.gather(dst, src, np.full(64, 100, np.uint64), 1, driver.make_stream())
    torch.cuda.synchronize(1)
    assert seen.tolist() == [7] * 6400


@pytest.mark.parametrize("serve", [True, False])
def test_captured_graph_runs_with_new_version(stack: ExitStack, tmp_path: Path, serve: bool) -> None:
    trainer, served = Trainer(stack, tmp_path, arena=True), Model()
    engine = stack.enter_context(
        ps.subscriber(
            "policy",
            served,
            connection=SETTINGS,
            rank=(0, 1),
            settings=ps.sync.SubscriberSettings(arena=True, serve=serve),
        )
    )
    assert memory_of(next(served.parameters()).untyped_storage().data_ptr()) is not None
    places = [parameter.data_ptr() for parameter in served.parameters()]
    given = torch.randn(8, WIDTH, device=DEVICE)
    with torch.no_grad():
        served.layers[5](given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = served.layers[5](given)
    waits = []
    for version in range(1, 6):
        trainer.publish(version)
        with torch.no_grad():
            served.angles.add_(1.0)
        waits.append(engine.update().pause_s)
        assert served.has(trainer.task, version)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(out, served.layers[5](given))
        assert torch.equal(served.angles, torch.arange(64.0, device=DEVICE) + version)
    assert [parameter.data_ptr() for parameter in served.parameters()] == places


def test_engines_receive_versions_from_each_other(stack: ExitStack, tmp_path: Path) -> None:
    trainer, first, second = Trainer(stack, tmp_path, arena=True), Model(), Model()
    engine = stack.enter_context(
        ps.subscriber(
            "policy", first, connection=SETTINGS, rank=(0, 2), settings=ps.sync.SubscriberSettings(arena=True)
        )
    )
    for version in (1, 2, 3):
        trainer.publish(version)
        engine.update(version)
    trainer._process.kill()
    late = stack.enter_context(
        ps.subscriber(
            "policy", second, connection=SETTINGS, rank=(1, 2), settings=ps.sync.SubscriberSettings(arena=True)
        )
    )
    report = late.update(3)
    assert second.has(trainer.task, 3) and first.has(trainer.task, 3)
    assert list(report.sources) == [engine.member.id]


def test_sleep_and_wake_keep_addresses(stack: ExitStack, tmp_path: Path) -> None:
    trainer, served = Trainer(stack, tmp_path, arena=True), Model()
    engine = stack.enter_context(
        ps.subscriber(
            "policy", served, connection=SETTINGS, rank=(0, 1), settings=ps.sync.SubscriberSettings(arena=True)
        )
    )
    places = [parameter.data_ptr() for parameter in served.parameters()]
    for version in (1, 3, 5):
        trainer.publish(version)
        engine.update(version)
        engine.release()
        trainer.publish(version + 1)
        assert engine.restore().version == version + 1
        assert served.has(trainer.task, version + 1)
    assert [parameter.data_ptr() for parameter in served.parameters()] == places
