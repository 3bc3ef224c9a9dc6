"""Staged versions go live by an exchange of memory, on a driver of host memory. tests/gpu tests the device driver."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.fake_cuda import FakeCuda
from tests.support.sync import SyncTask, SyncWorker, whole

import penstock as ps
from penstock.cuda.device_memory import DeviceMemory, memory_of
from penstock.digest.strip import Strips
from penstock.errors import DestinationError
from penstock.holding.regions import VersionRegions
from penstock.memory.arena import ALIGN_BYTES, Arena
from penstock.sync import copy_plan
from penstock.sync.copy_plan import StagingCopy, aliases_of, rest_of
from penstock.transport.choose import open_links
from penstock.transport.protocol import Memory

NUM_LAYERS, ROWS, COLUMNS = 6, 64, 48
SETTINGS = ps.ConnectionSettings(stall_s=20.0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Let remappable arenas map host memory."""
    made = FakeCuda()
    allocate = Arena.allocate

    def over(memory: DeviceMemory) -> Arena:
        raw = (ctypes.c_ubyte * memory.nbytes).from_address(memory.address)
        # The tensor holds the object, as in torch's CUDA array interface.
        raw.memory = memory
        return Arena("cpu", memory.address, memory.nbytes, torch.frombuffer(raw, dtype=torch.uint8))

    def fake(nbytes: int, device: Any = "cpu", *, is_remappable: bool = False) -> Arena:
        if not is_remappable:
            return allocate(nbytes, device)
        return over(DeviceMemory(max(nbytes, ALIGN_BYTES), 0, driver=made))

    monkeypatch.setattr(Arena, "over", staticmethod(over))
    monkeypatch.setattr(Arena, "allocate", staticmethod(fake))
    return made


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ExitStack]:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as found:
        yield found


class Model(torch.nn.Module):
    """Layers, and a buffer of the engine in the same arena."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(NUM_LAYERS))
        self.register_buffer("angles", torch.arange(64.0), persistent=False)

    def check(self, task: SyncTask, version: int) -> None:
        """Return whether the target is bit-identical to the version."""
        live = dict(self.named_parameters())
        for name, one in whole(task, version).items():
            assert torch.equal(live[name], one), name


def trainer(stack: ExitStack, directory: Path, **options: Any) -> tuple[SyncTask, SyncWorker]:
    task = SyncTask(
        side="publisher",
        mode="snapshot",
        num_layers=NUM_LAYERS,
        rows=ROWS,
        columns=COLUMNS,
        dtype="float32",
        environ={"PENSTOCK_RUNTIME_DIR": str(directory), "PENSTOCK_STALL_S": "20"},
        **options,
    )
    worker = stack.enter_context(SyncWorker(task))
    worker.wait_for("joined", timeout_s=90)
    return task, worker


def publish(worker: SyncWorker, version: int) -> None:
    assert "error" not in worker.call(f"publish {version}", timeout_s=90)


@pytest.mark.parametrize("serve", [True, False])
def test_exchanged_versions_become_live_without_copy(
    driver: FakeCuda, stack: ExitStack, tmp_path: Path, serve: bool
) -> None:
    task, worker = trainer(stack, tmp_path, frozen=2)
    served = Model()
    engine = stack.enter_context(
        ps.subscriber(
            "policy",
            served,
            connection=SETTINGS,
            rank=(0, 1),
            settings=ps.sync.SubscriberSettings(arena=True, serve=serve),
        )
    )
    places = {name: tensor.data_ptr() for name, tensor in served.state_dict().items()}
    for version in range(1, 7):
        publish(worker, version)
        served.angles.add_(1.0)  # the engine's bytes change between versions, and stay
        report = engine.update(version)
        served.check(task, version)
        assert torch.equal(served.angles, torch.arange(64.0) + version)
        assert report.version_bytes == NUM_LAYERS * ROWS * COLUMNS * 4
        assert driver.num_waits == version
    assert {name: tensor.data_ptr() for name, tensor in served.state_dict().items()} == places


def test_second_engine_reads_exchanged_memory(driver: FakeCuda, stack: ExitStack, tmp_path: Path) -> None:
    task, worker = trainer(stack, tmp_path)
    first, second = Model(), Model()
    engine = stack.enter_context(
        ps.subscriber(
            "policy", first, connection=SETTINGS, rank=(0, 2), settings=ps.sync.SubscriberSettings(arena=True)
        )
    )
    for version in (1, 2, 3):
        publish(worker, version)
        engine.update(version)
    # Without a trainer the version comes from the first engine, whose live memory was its staging copy.
    worker.kill()
    late = stack.enter_context(
        ps.subscriber(
            "policy", second, connection=SETTINGS, rank=(1, 2), settings=ps.sync.SubscriberSettings(arena=True)
        )
    )
    late.update(3)
    second.check(task, 3)
    first.check(task, 3)


def test_check_hook_receives_staged_version(driver: FakeCuda, stack: ExitStack, tmp_path: Path) -> None:
    task, worker = trainer(stack, tmp_path)
    served, seen = Model(), dict[int, bool]()

    def check(version: int, staged: Any) -> bool:
        wanted = whole(task, version)
        seen[version] = all(torch.equal(staged.tensors[name], one) for name, one in wanted.items())
        return version != 2

    engine = stack.enter_context(
        ps.subscriber(
            "policy",
            served,
            connection=SETTINGS,
            rank=(0, 1),
            hooks=ps.Hooks(check=check),
            settings=ps.sync.SubscriberSettings(arena=True),
        )
    )
    publish(worker, 1)
    engine.update(1)
    publish(worker, 2)
    with pytest.raises(ps.VersionRefused):
        engine.update(2)
    served.check(task, 1)
    for version in (3, 4):
        publish(worker, version)
        engine.update(version)
        served.check(task, version)
    assert seen == {1: True, 2: True, 3: True, 4: True}


def test_refused_exchange_keeps_previous_version(driver: FakeCuda, stack: ExitStack, tmp_path: Path) -> None:
    task, worker = trainer(stack, tmp_path)
    served, resumed = Model(), list[int]()
    hooks = ps.Hooks(after_resume=resumed.append)
    engine = stack.enter_context(
        ps.subscriber(
            "policy",
            served,
            connection=SETTINGS,
            rank=(0, 1),
            hooks=hooks,
            settings=ps.sync.SubscriberSettings(arena=True),
        )
    )
    publish(worker, 1)
    engine.update(1)
    publish(worker, 2)
    engine.stage()
    driver.refuses = "allow"
    with pytest.raises(DestinationError) as caught:
        engine.commit()
    assert not caught.value.mutated
    assert (engine.is_dirty, engine.version, resumed) == (False, 1, [1, 1])
    served.check(task, 1)
    assert driver.num_handles == 0
    # The version is still staged.
    assert engine.commit().version == 2
    served.check(task, 2)
    publish(worker, 3)
    engine.update(3)
    served.check(task, 3)


def test_update_of_target_with_freed_memory_raises(
    driver: FakeCuda, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, worker = trainer(stack, tmp_path)
    served = Model()
    engine = stack.enter_context(
        ps.subscriber(
            "policy", served, connection=SETTINGS, rank=(0, 1), settings=ps.sync.SubscriberSettings(arena=True)
        )
    )
    publish(worker, 1)
    engine.update(1)
    live = memory_of(next(served.parameters()).untyped_storage().data_ptr())
    assert live is not None

    def refuse(*_: object) -> None:
        raise DestinationError("fake: cuMemMap")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "map_handle", refuse)
        publish(worker, 2)
        with pytest.raises(DestinationError) as caught:
            engine.update(2)
    assert (caught.value.mutated, engine.is_dirty, live.is_mapped, driver.num_handles) == (True, True, False, 0)
    with pytest.raises(DestinationError, match="without memory") as caught:
        engine.update(2)
    assert caught.value.mutated


def test_reused_plan_copies_current_staging_memory(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy with plan B, exchange with plan A, and copy with plan B again from the current staging memory."""
    size = 8 * ALIGN_BYTES
    arena = Arena.allocate(size, is_remappable=True)
    live = [Memory(address=arena.address, nbytes=size, device="cpu", owner=arena)]
    aliases = aliases_of(live)
    assert aliases is not None
    whole_part = Strips(at=np.array([0]), run_bytes=np.array([size]), num_rows=np.array([1]), pitch=np.array([size]))
    monkeypatch.setattr(copy_plan, "received", lambda part: whole_part)
    monkeypatch.setattr(copy_plan, "rest_of", lambda filled, first, nbytes: None if nbytes == 1 else filled[:0])
    with (
        open_links(only=["http"]) as links,
        VersionRegions(aliases, links) as served,
        StagingCopy(live, links, served=served) as staging,
    ):
        for key, nbytes, value in (("b", 1, 1), ("a", 2, 2), ("b", 1, 3), ("a", 2, 4), ("b", 1, 5)):
            into = staging.regions.memories[0].owner
            assert isinstance(into, Arena)
            into.bytes_at(0, size).fill_(value)
            assert staging.flip(SimpleNamespace(key=key, nbytes=nbytes)) == (key == "a")
            assert arena.bytes_at(0, size).unique().tolist() == [value]
            assert served.memories[0].owner.bytes_at(0, size).unique().tolist() == [value]


def test_released_memory_is_freed_without_garbage_collector(driver: FakeCuda, stack: ExitStack, tmp_path: Path) -> None:
    """Another process waits for the memory, so freeing it must not depend on Python's cycle collector."""
    _, worker = trainer(stack, tmp_path)
    engine = stack.enter_context(
        ps.subscriber(
            "policy", Model(), connection=SETTINGS, rank=(0, 1), settings=ps.sync.SubscriberSettings(arena=True)
        )
    )
    for version in (1, 2):
        publish(worker, version)
        engine.update(version)
    gc.collect()
    gc.disable()
    try:
        engine.release()
        assert not driver._pieces
    finally:
        gc.enable()
    with pytest.raises(ps.ConfigError, match="already released"):
        engine.release(returns=True)


def test_restored_memory_keeps_its_addresses(driver: FakeCuda, stack: ExitStack, tmp_path: Path) -> None:
    task, worker = trainer(stack, tmp_path)
    served = Model()
    engine = stack.enter_context(
        ps.subscriber(
            "policy", served, connection=SETTINGS, rank=(0, 1), settings=ps.sync.SubscriberSettings(arena=True)
        )
    )
    places = {name: tensor.data_ptr() for name, tensor in served.state_dict().items()}
    for version in (1, 2):
        publish(worker, version)
        engine.update(version)
    before = driver.num_opened
    assert engine.release() >= NUM_LAYERS * ROWS * COLUMNS * 4
    assert driver.num_opened < before
    publish(worker, 3)
    assert engine.restore().version == 3
    served.check(task, 3)
    assert torch.equal(served.angles, torch.arange(64.0))
    publish(worker, 4)
    engine.update(4)
    served.check(task, 4)
    assert {name: tensor.data_ptr() for name, tensor in served.state_dict().items()} == places


def strips(*rows: tuple[int, int, int, int]) -> Strips:
    at, run_bytes, num_rows, pitch = np.array(rows, np.int64).reshape(-1, 4).T
    return Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)


@pytest.mark.parametrize("seed", range(5))
def test_remaining_ranges_cover_all_unfilled_bytes(seed: int) -> None:
    chance = np.random.default_rng(seed)
    sizes = [int(n) for n in chance.integers(1000, 3000, 3)]
    first = np.cumsum([0, *sizes])
    filled = np.zeros(first[-1], bool)
    rows = []
    for begin, stop in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        at = begin + int(chance.integers(0, 9))
        while at + 300 < stop:
            run, count = int(chance.integers(20, 40)), int(chance.integers(1, 5))
            pitch = run + int(chance.integers(0, 3))
            rows.append((at, run, count, pitch))
            for i in range(count):
                filled[at + i * pitch :][:run] = True
            at += count * pitch + int(chance.integers(0, 5))
    rest = rest_of(strips(*rows), first, int(filled.sum()))
    assert rest is not None
    rest.check(int(first[-1]))
    for at, nbytes in zip(rest.at.tolist(), rest.run_bytes.tolist(), strict=True):
        assert not filled[at : at + nbytes].any()
        filled[at : at + nbytes] = True
        assert np.searchsorted(first, at, side="right") == np.searchsorted(first, at + nbytes - 1, side="right")
    assert filled.all()


def test_small_unfilled_remainder_is_copied() -> None:
    first = np.array([0, 10_000])
    assert rest_of(strips((0, 7000, 1, 7000)), first, 7000) is None
    rest = rest_of(strips((0, 9000, 1, 9000)), first, 9000)
    assert rest is not None
    assert (rest.at.tolist(), rest.run_bytes.tolist()) == ([9000], [1000])
    whole_part = rest_of(strips((0, 10_000, 1, 10_000)), first, 10_000)
    assert whole_part is not None
    assert len(whole_part) == 0
