"""Arenas: placement of tensors, lifetime of the memory, and live tensors that are moved into an arena."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.errors import BudgetTooSmall, ConfigError, DestinationError, PeerLost, PlanError
from penstock.memory import arena as arenas
from penstock.memory.arena import ALIGN_BYTES, Arena, needed_bytes, populate
from penstock.memory.mapping import HUGE_PAGE_BYTES, Mapping
from penstock.memory.memfd import check_peer_memfd, create_memfd, shared_at
from penstock.memory.rehome import rehome


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def page_kilobytes(field: str) -> int:
    """Return a field of the arenas' mappings in `/proc/self/smaps`."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = "memfd:penstock-arena" in line
        elif ours and line.startswith(f"{field}:"):
            total += int(line.split()[1])
    return total


def test_arena_offsets_are_ordered_and_aligned() -> None:
    lengths = [1, 512, 0, 513, 7]
    arena = Arena.allocate(needed_bytes(lengths))
    assert arena.place(lengths) == [0, 512, 1024, 1024, 2048]
    assert arena.free_bytes == 0
    assert arena.address % ALIGN_BYTES == 0


def test_full_arena_error_states_needed_bytes() -> None:
    arena = Arena.allocate(1000)
    arena.place([100])
    with pytest.raises(BudgetTooSmall) as caught:
        arena.place([400, 100])
    assert caught.value.minimum_bytes == 1124
    assert arena.place([400]) == [512]


def test_runs_at_returns_views_of_arena_memory() -> None:
    lengths = [1, 512, 0, 513, 7, 0]
    arena = Arena.allocate(needed_bytes(lengths) + 100)
    offsets = arena.place(lengths)
    runs = arena.runs_at(offsets, lengths)
    for number, (run, offset, length) in enumerate(zip(runs, offsets, lengths, strict=True)):
        run.fill_(number + 1)
        assert run.dtype is torch.uint8 and run.shape == (length,)
        assert arena.bytes_at(offset, length).tolist() == [number + 1] * length
        assert not length or run.data_ptr() == arena.address + offset
    assert arena.runs_at([], []) == []
    with pytest.raises(ConfigError, match="outside an arena"):
        arena.runs_at([0, 2048], [100, 1000])


def test_arena_views_keep_memory_alive_until_dropped() -> None:
    gc.collect()  # what other tests left
    before = fds()
    arena = Arena.allocate(10_000)
    address = arena.address
    view = arena.bytes_at(512, 100)
    view.fill_(7)
    del arena
    gc.collect()
    assert shared_at(address, 10_000) is not None
    assert view.tolist() == [7] * 100
    del view
    gc.collect()
    assert shared_at(address, 1) is None
    assert fds() == before


def test_arena_lookup_succeeds_during_concurrent_allocations() -> None:
    """Switch threads every microsecond, so that a lookup runs in the middle of a change."""
    arenas = [Arena.allocate(512) for _ in range(50)]
    address, until, interval = arenas[-1].address, time.monotonic() + 0.5, sys.getswitchinterval()
    stopped = threading.Event()

    def change() -> None:
        while not stopped.is_set():
            made = [Arena.allocate(512) for _ in range(20)]
            del made

    changing = threading.Thread(target=change)
    sys.setswitchinterval(1e-6)
    changing.start()
    try:
        while time.monotonic() < until:
            assert shared_at(address, 512) is not None
    finally:
        sys.setswitchinterval(interval)
        stopped.set()
        changing.join(10)


def has_shared_huge_pages() -> bool:
    """Return whether this kernel collapses pages of a memfd: Linux 6.1, unless huge pages are denied."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    major, minor = (int(number) for number in os.uname().release.split(".")[:2])
    return (major, minor) >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


@pytest.mark.skipif(not has_shared_huge_pages(), reason="this kernel has no huge pages for memfds on request")
def test_populated_arena_has_huge_pages() -> None:
    gc.collect()
    before = page_kilobytes("ShmemPmdMapped")
    arena = Arena.allocate(4 * HUGE_PAGE_BYTES + 5000)
    populate(arena.address, arena.nbytes)
    assert arena.address % HUGE_PAGE_BYTES == 0
    # The kernel may have no free huge page for some blocks.
    assert page_kilobytes("ShmemPmdMapped") >= before + HUGE_PAGE_BYTES // 1024
    peer = Mapping.map(shared_at(arena.address, 1).fd, 0, arena.nbytes, mmap.PROT_READ, mmap.MAP_SHARED)
    assert peer.address % HUGE_PAGE_BYTES == 0


@pytest.mark.parametrize("missing", ["", "_MADV_COLLAPSE", "_MADV_POPULATE_WRITE"])
def test_populate_keeps_bytes_on_every_kernel(missing: str, monkeypatch) -> None:
    if missing:
        monkeypatch.setattr(arenas, missing, 9999)
    monkeypatch.setattr(arenas, "_SLOW_S", 60.0)
    gc.collect()
    before = page_kilobytes("Rss")
    arena = Arena.allocate(4 * HUGE_PAGE_BYTES + 5000)
    whole, places = arena.bytes_at(0, arena.nbytes), [0, 4095, HUGE_PAGE_BYTES - 1, 3 * HUGE_PAGE_BYTES + 77]
    whole[places] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    populate(arena.address + 100, arena.nbytes - 200)
    if missing != "_MADV_POPULATE_WRITE":
        assert page_kilobytes("Rss") >= before + arena.nbytes // 1024 - 8
    assert whole[places].tolist() == [1, 2, 3, 4]
    assert int(whole.count_nonzero()) == 4


def test_populate_beside_writers_loses_no_byte() -> None:
    arena = Arena.allocate(8 * HUGE_PAGE_BYTES)
    whole = arena.bytes_at(0, arena.nbytes)

    def write(first: int) -> None:
        for at in range(first, arena.nbytes, 4096):
            whole[at] = 7

    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 2048)]
    for writer in writers:
        writer.start()
    populate(arena.address, arena.nbytes)
    for writer in writers:
        writer.join(30)
    assert int(whole.count_nonzero()) == arena.nbytes // 2048
    assert bool((whole[::2048] == 7).all())


def test_populate_leaves_populated_memory_as_is() -> None:
    memory = mmap.mmap(-1, 4 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    flat.fill_(3)
    before = faults()
    populate(flat.data_ptr(), flat.numel())
    # A collapse would fault every page again.
    assert faults() - before < 100
    assert bool((flat == 3).all())


def test_invalid_arena_size_device_or_range_raises() -> None:
    with pytest.raises(DestinationError, match="available"):
        Arena.allocate(1 << 60)
    with pytest.raises(ConfigError):
        Arena.allocate(-1)
    with pytest.raises(ConfigError, match="meta"):
        Arena.allocate(1, "meta")
    with pytest.raises(ConfigError):
        Arena.allocate(100).bytes_at(50, 51)
    assert Arena.allocate(0).bytes_at(0, 0).numel() == 0


def test_exhausted_file_descriptors_raise_destination_error(monkeypatch) -> None:
    def full(*_) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(DestinationError):
        Arena.allocate(100)


def test_unsealed_or_invalid_peer_memory_raises_peer_lost(tmp_path) -> None:
    sealed = create_memfd("sealed", 4096)
    readable = sealed.readable()
    check_peer_memfd(readable, 4096, "here")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(readable, b"x")
    unsealed, pipe = os.memfd_create("loose"), os.pipe()
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    gc.collect()
    try:
        for fd, nbytes in ((readable, 4097), (unsealed, 0), (pipe[0], 0), (file, 0)):
            with pytest.raises(PeerLost):
                check_peer_memfd(fd, nbytes, "here")
    finally:
        for fd in (readable, unsealed, *pipe, file):
            os.close(fd)


def test_arena_is_writable_by_other_processes_until_sealed() -> None:
    arena = Arena.allocate(5000)
    mapping = shared_at(arena.address, arena.nbytes)
    assert mapping is not None
    writer = os.open(arena.path, os.O_RDWR)
    try:
        os.pwrite(writer, b"made elsewhere", 100)
        assert arena.bytes_at(100, 14).numpy().tobytes() == b"made elsewhere"
        with pytest.raises(PeerLost):
            check_peer_memfd(mapping.fd, 5000, "here")
        mapping.seal()
        mapping.seal()
        with pytest.raises(PermissionError):
            os.pwrite(writer, b"x", 100)
        arena.bytes_at(100, 1)[0] = ord("M")
        assert os.pread(writer, 14, 100) == b"Made elsewhere"
        check_peer_memfd(mapping.fd, 5000, "here")
    finally:
        os.close(writer)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.body = nn.Linear(8, 24)
        self.register_buffer("table", torch.arange(7, dtype=torch.int16))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("turned", torch.randn(4, 6).t())
        self.register_buffer("one", torch.tensor(3.0))


def test_model_moved_into_arena_keeps_values() -> None:
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    strides = {name: tensor.stride() for name, tensor in model.state_dict().items()}
    objects = {name: id(parameter) for name, parameter in model.named_parameters()}
    (arena,) = rehome(model)
    after = model.state_dict()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name])
        assert tensor.stride() == strides[name]
        assert not tensor.numel() or arena.address <= tensor.data_ptr() < arena.address + arena.nbytes
        assert not tensor.numel() or tensor.data_ptr() % ALIGN_BYTES == 0
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == objects
    assert after["head.weight"].data_ptr() == after["embed.weight"].data_ptr()
    del arena
    gc.collect()
    model.head(model.embed(torch.tensor([1]))).sum().backward()
    assert model.embed.weight.grad is not None


def test_views_moved_into_arena_share_memory() -> None:
    fused = torch.randn(9, 4, dtype=torch.float16)
    tensors = {"q": fused[1:3], "k": fused[4:6], "all": fused[1:6]}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    (arena,) = rehome(tensors)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    assert arena.nbytes < fused.nbytes
    tensors["all"].fill_(1)
    assert bool((tensors["k"] == 1).all())
    assert bool((fused != 1).any())


def test_every_dtype_is_moved_into_arena() -> None:
    tensors = {str(t): torch.zeros(3, dtype=t) for t in (torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int8)}
    rehome(tensors)
    assert all(tensor.numel() == 3 for tensor in tensors.values())
    assert rehome({}) == ()
    assert rehome({"none": torch.empty(0)}) == ()


def test_moving_non_dense_tensor_into_arena_raises() -> None:
    kept = torch.ones(3)
    address = kept.data_ptr()
    for odd in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(PlanError) as caught:
            rehome({"kept": kept, "odd": odd})
        assert caught.value.tensor == "odd"
    assert kept.data_ptr() == address
