"""`cuda_ipc` between processes without a device: holders that die or fence, and devices that hang.

tests/gpu/test_transport_cuda_ipc.py tests the same on devices.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
import weakref

import msgspec
import numpy as np
import pytest
from tests.support.fake_cuda import FakeCuda
from tests.support.holder import HolderProcess, pattern

from penstock.cuda import driver as cuda_driver
from penstock.cuda.driver import never_freed
from penstock.errors import (
    Cancelled,
    ConfigError,
    DestinationError,
    DeviceOutOfMemory,
    FormatError,
    PeerLost,
    PenstockError,
    PlanError,
    SourceStalled,
    StaleDescriptor,
)
from penstock.segments import Rectangles
from penstock.testing.transport_suite import segments
from penstock.transport import cuda_ipc, fd_server
from penstock.transport.choose import PeerLinks
from penstock.transport.cuda_ipc import CudaIpcTransport, CudaPayload, map_peer, refusal
from penstock.transport.protocol import Memory, encode
from penstock.transport.shm import ShmTransport

NBYTES = 5_000_011


class Reader:
    def __init__(self) -> None:
        self.driver = FakeCuda()
        self.transport = CudaIpcTransport(self.driver)
        self.into = self.transport.register(self.driver.allocate(NBYTES))

    def post(self, descriptor, rows=((0, 0, NBYTES),)):
        return self.transport.post_read(self.into, descriptor, segments(rows))

    def read(self, descriptor, rows=((0, 0, NBYTES),)) -> bytes:
        self.transport.wait(self.post(descriptor, rows), stall_s=5)
        return ctypes.string_at(self.into.memory.address, NBYTES)


@pytest.fixture
def reader():
    made = Reader()
    yield made
    made.driver.is_stuck = False
    made.transport.close()
    gc.collect()
    assert made.driver.num_opened == 0


@pytest.fixture(params=["fake_cuda", "fake_virtual"])
def holder(request):
    with HolderProcess(request.param, nbytes=NBYTES) as child:
        yield child


class HostReader:
    """A reader whose target is host memory at an odd address."""

    def __init__(self, memory: bytearray) -> None:
        self.driver = FakeCuda()
        self.links = PeerLinks({"cuda_ipc": lambda: CudaIpcTransport(self.driver), "shm": ShmTransport})
        self.links.add_derived(self.driver)
        self.memory = np.frombuffer(memory, np.uint8)[1:]
        address = int(self.memory.ctypes.data)
        self.into = self.links.register_into(Memory(address=address, nbytes=NBYTES, owner=memory), {})

    def choose(self, descriptor):
        offered = {"cuda_ipc": encode(descriptor)}
        return self.links.choose(self.into, offered, same_host=True, same_process=False)

    def post(self, descriptor, rows=((0, 0, NBYTES),)):
        transport, theirs, _ = self.choose(descriptor)
        return transport, transport.post_read(self.into[transport.name], theirs, segments(rows))

    def read(self, descriptor, rows=((0, 0, NBYTES),), stall_s=5.0) -> bytes:
        transport, pending = self.post(descriptor, rows)
        transport.wait(pending, stall_s=stall_s)
        return self.memory.tobytes()


@pytest.fixture
def host_reader():
    made = HostReader(bytearray(NBYTES + 1))
    yield made
    made.driver.is_stuck = False
    made.links.close()
    gc.collect()


def test_device_memory_is_read_into_host_memory(host_reader, holder) -> None:
    assert host_reader.choose(holder.descriptor)[0].name == "staged_cuda_ipc"
    assert host_reader.read(holder.descriptor) == pattern(NBYTES)
    rows = [(at, at, min(997, NBYTES - at)) for at in range(0, NBYTES, 997)]
    np.random.default_rng(1).shuffle(rows)
    assert host_reader.read(holder.fence(2), rows) == pattern(NBYTES, 2)


def test_fence_during_read_into_host_memory_raises_stale_descriptor(host_reader, holder) -> None:
    transport, pending = host_reader.post(holder.descriptor)
    holder.fence(2)
    with pytest.raises(StaleDescriptor):
        transport.wait(pending, stall_s=5)


def test_read_into_host_memory_on_hanging_device_raises_and_keeps_staging(host_reader, holder) -> None:
    host_reader.driver.is_stuck = True
    before, began = len(never_freed), time.monotonic()
    with pytest.raises(SourceStalled):
        host_reader.read(holder.descriptor, stall_s=0.5)
    # The device may write to the buffer later, so no other read gets it.
    assert len(never_freed) > before and time.monotonic() - began < 5
    assert not any(host_reader.memory)
    host_reader.driver.is_stuck = False
    assert host_reader.read(holder.descriptor) == pattern(NBYTES)
    del never_freed[before:]


def test_host_memory_is_filled_by_device_that_reaches_peer(host_reader, holder, monkeypatch) -> None:
    """The holder's number names another device here, and the device in use does not reach the memory."""
    tried = []

    def reach(driver, device, *arguments):
        tried.append(device)
        if device != 5:
            raise ConfigError(f"cuda:{device} does not reach it")
        return map_peer(driver, device, *arguments)

    monkeypatch.setattr(cuda_ipc, "map_peer", reach)
    assert host_reader.read(holder.descriptor) == pattern(NBYTES)
    assert tried[0] == 2 and tried[-1] == 5
    assert host_reader.read(holder.descriptor) == pattern(NBYTES)
    assert tried.count(5) == 1 and tried.count(2) == 1


def test_host_memory_without_cuda_driver_states_reason(holder) -> None:
    with PeerLinks({"shm": ShmTransport}) as links:
        links.refused["staged_cuda_ipc"] = "no CUDA driver"
        into = links.register_into(Memory.of_buffer(bytearray(NBYTES)), {})
        offered = {"cuda_ipc": encode(holder.descriptor)}
        with pytest.raises(PlanError, match="staged_cuda_ipc: no CUDA driver"):
            links.choose(into, offered, same_host=True, same_process=False)


def test_repeated_reads_map_peer_memory_once(reader, holder) -> None:
    assert reader.read(holder.descriptor) == pattern(NBYTES)
    new = holder.fence(2)
    rows = [(at, at, min(99_991, NBYTES - at)) for at in range(0, NBYTES, 99_991)]
    np.random.default_rng(1).shuffle(rows)
    assert reader.read(new, rows) == pattern(NBYTES, 2)
    assert reader.driver.num_opened == 1


def test_peer_device_memory_is_mapped_before_targets_exist(holder) -> None:
    driver = FakeCuda()
    with PeerLinks({"cuda_ipc": lambda: CudaIpcTransport(driver)}) as links:
        links.reach_device("cuda:0", [{"cuda_ipc": encode(holder.descriptor)}, {"http": b"of another kind"}])
        assert driver.num_opened == 1
        memory = driver.allocate(NBYTES)
        handles = links.register(memory)
        transport, descriptor, _ = links.choose(
            handles, {"cuda_ipc": encode(holder.descriptor)}, same_host=True, same_process=False
        )
        transport.wait(transport.post_read(handles["cuda_ipc"], descriptor, segments([(0, 0, NBYTES)])), stall_s=20)
        assert ctypes.string_at(memory.address, NBYTES) == pattern(NBYTES)
        assert driver.num_opened == 1
    with PeerLinks({}) as without:
        without.reach_device("cuda:0", [{"cuda_ipc": encode(holder.descriptor)}])


def test_premapped_memory_is_not_mapped_again_by_read(reader, holder) -> None:
    reader.transport.reach(reader.into.memory.device, holder.descriptor)
    assert reader.driver.num_opened == 1
    assert ctypes.string_at(reader.into.memory.address, NBYTES) != pattern(NBYTES)
    assert reader.read(holder.descriptor) == pattern(NBYTES)
    assert reader.driver.num_opened == 1


def test_read_does_not_wait_for_mapping_of_another_peer(reader, holder, monkeypatch) -> None:
    assert reader.read(holder.descriptor) == pattern(NBYTES)
    is_mapping, may_end = threading.Event(), threading.Event()

    def slow(*arguments):
        is_mapping.set()
        assert may_end.wait(30)
        return map_peer(*arguments)

    monkeypatch.setattr(cuda_ipc, "map_peer", slow)
    with HolderProcess("fake_cuda", nbytes=NBYTES) as second:
        descriptor = second.fence(3)
        mapping = threading.Thread(target=reader.transport.reach, args=(reader.into.memory.device, descriptor))
        mapping.start()
        assert is_mapping.wait(30)
        assert reader.read(holder.descriptor) == pattern(NBYTES)
        may_end.set()
        mapping.join(30)
        assert reader.read(descriptor) == pattern(NBYTES, 3)


def test_grouped_copies_transfer_every_byte_once(reader, holder, monkeypatch) -> None:
    monkeypatch.setattr(cuda_ipc, "GROUP_BYTES", 100_000)
    monkeypatch.setattr(cuda_ipc, "SHORT_BYTES", 80_000)
    monkeypatch.setattr(cuda_ipc, "MANY", 10)
    chance, rows, at = np.random.default_rng(5), [], 0
    while at < NBYTES:
        nbytes = min(int(chance.choice([1, 3, 70_000, 100_000, 350_001])), NBYTES - at)
        rows.append((at, at, nbytes))
        at += nbytes + 1
    pending = reader.post(holder.descriptor, rows)
    assert len(pending.events) > 20
    reader.transport.wait(pending, stall_s=5)
    got, expected = np.frombuffer(ctypes.string_at(reader.into.memory.address, NBYTES), np.uint8), np.zeros(NBYTES)
    for src, dst, nbytes in rows:
        expected[dst : dst + nbytes] = np.frombuffer(pattern(NBYTES), np.uint8)[src : src + nbytes]
    assert (got == expected).all()
    assert pending.moved_bytes == sum(row[2] for row in rows)


def test_fence_during_read_raises_stale_descriptor(reader, holder) -> None:
    reader.read(holder.descriptor, [(0, 0, 1)])
    pending = reader.post(holder.descriptor)
    holder.fence(2)
    for _ in range(2):
        with pytest.raises(StaleDescriptor) as caught:
            reader.transport.wait(pending, stall_s=5)
        assert caught.value.mutated
    assert reader.driver.num_opened == 1  # the memory is the same
    assert reader.read(holder.descriptor) == pattern(NBYTES, 2)
    assert reader.driver.num_opened == 1
    holder.call("close")
    reader.transport.sweep()
    assert reader.driver.num_opened == 0


def test_killed_holder_raises_peer_lost(reader, holder) -> None:
    pending = reader.post(holder.descriptor)
    holder.process.kill()
    holder.process.wait(10)
    began = time.monotonic()
    with pytest.raises(PeerLost):
        reader.transport.wait(pending, stall_s=5)
    with pytest.raises(PeerLost) as caught:
        reader.post(holder.descriptor)
    assert not caught.value.mutated
    assert time.monotonic() - began < 5


def test_holder_killed_before_mapping_raises_peer_lost(reader, holder) -> None:
    holder.process.kill()
    holder.process.wait(10)
    with pytest.raises(PeerLost):
        reader.post(holder.descriptor)


def test_read_on_hanging_device_raises_source_stalled(reader, holder, monkeypatch) -> None:
    reader.driver.is_stuck = True
    pending = reader.post(holder.descriptor)
    with pytest.raises(SourceStalled) as caught:
        reader.transport.wait(pending, stall_s=0.05)
    assert caught.value.mutated
    monkeypatch.setattr(cuda_ipc, "SETTLE_S", 0.05)
    reader.transport.close()
    assert never_freed[-1][0] == {pending}
    never_freed.clear()
    reader.driver.num_opened = 0


def test_abandoned_read_keeps_memory_until_device_finishes(reader, holder) -> None:
    into = reader.transport.register(reader.driver.allocate(NBYTES))
    alive = weakref.ref(into.memory.owner)
    reader.driver.is_stuck = True
    pending = reader.transport.post_read(into, holder.descriptor, segments([(0, 0, NBYTES)]))
    into.close()
    with pytest.raises(Cancelled):
        reader.transport.wait(pending, stall_s=5)
    del pending, into
    gc.collect()
    assert alive() is not None
    reader.driver.is_stuck = False
    reader.read(holder.descriptor)
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("is_mapped", [False, True], ids=["before it is mapped", "once it is mapped"])
def test_descriptor_beyond_memory_is_refused(reader, holder, is_mapped: bool) -> None:
    if is_mapped:
        reader.read(holder.descriptor)
    far = holder.lie(4 * NBYTES)
    with pytest.raises(FormatError) as caught:
        reader.post(far, [(3 * NBYTES, 0, NBYTES)])
    assert not caught.value.mutated
    holder.lie(NBYTES)
    assert reader.read(holder.descriptor) == pattern(NBYTES)


def test_failed_copy_keeps_memory_of_queued_copies_allocated(reader, holder, monkeypatch) -> None:
    queue = reader.driver.copy

    def refuse(*columns) -> None:
        queue(*columns)
        raise DestinationError("a later copy is refused")

    with monkeypatch.context() as patched:
        patched.setattr(reader.driver, "copy", refuse)
        with pytest.raises(DestinationError) as caught:
            reader.post(holder.descriptor)
    assert caught.value.mutated
    assert any(isinstance(kept[0], cuda_ipc.CudaRead) and kept[0].source is not None for kept in never_freed)
    for _ in range(2):  # one for each stream
        assert reader.read(holder.descriptor) == pattern(NBYTES)
    del caught
    never_freed.clear()


def test_descriptor_with_impossible_piece_count_is_refused(reader) -> None:
    with HolderProcess("fake_virtual", nbytes=NBYTES) as holder:
        for runs in (((1 << 59, 1),), ((1 << 20, 1), (1, 1)), ()):
            payload = {**msgspec.msgpack.decode(holder.descriptor.payload), "pieces": runs}
            lie = msgspec.structs.replace(holder.descriptor, payload=msgspec.msgpack.encode(payload))
            with pytest.raises(FormatError):
                map_peer(reader.driver, 0, lie, msgspec.msgpack.decode(lie.payload, type=CudaPayload))


def test_handle_from_another_pid_namespace_is_refused(reader) -> None:
    """A handle names a process id, which a different process or this one has in another container."""
    for transport, is_refused in (("fake_cuda", True), ("fake_virtual", False)):
        with HolderProcess(transport, nbytes=NBYTES) as holder:
            payload = msgspec.msgpack.decode(holder.descriptor.payload, type=CudaPayload)
            assert refusal(reader.into, holder.descriptor) == ""
            page = msgspec.structs.replace(payload.page, pid_namespace=payload.page.pid_namespace + 1)
            payload = msgspec.structs.replace(payload, page=page)
            source = msgspec.structs.replace(holder.descriptor, payload=msgspec.msgpack.encode(payload))
            if is_refused:
                assert "expandable_segments:True" in refusal(reader.into, source)
                with pytest.raises(ConfigError, match="no file descriptors"):
                    map_peer(reader.driver, 0, source, payload)
            else:
                assert refusal(reader.into, source) == ""
                assert map_peer(reader.driver, 0, source, payload).nbytes >= NBYTES


def test_unshareable_memory_is_refused(reader) -> None:
    reader.driver.is_shareable = False
    with pytest.raises(ConfigError, match="expandable_segments:False"):
        reader.transport.register(reader.driver.allocate_virtual(100))
    for device in ("cpu", "cuda", "cuda:x"):
        with pytest.raises(ConfigError, match="cuda:0"):
            reader.transport.register(Memory(address=0, nbytes=0, device=device))
    whole = reader.driver.allocate(4096)
    with pytest.raises(ConfigError, match="two allocations"):
        reader.transport.register(Memory(address=whole.address + 1, nbytes=4096, device="cuda:0"))
    reader.driver.num_opened -= 1  # the virtual memory above


def test_request_for_stale_generation_receives_no_file_descriptors(reader) -> None:
    with HolderProcess("fake_virtual", nbytes=NBYTES) as holder:
        payload = msgspec.msgpack.decode(holder.descriptor.payload)
        path = payload["page"]["socket"]
        assert len(list(fd_server.receive_fds(path, holder.descriptor.generation, 5, "here"))) == 5
        for generation, count in ((99, 1), (holder.descriptor.generation, 7)):
            with pytest.raises(StaleDescriptor):
                list(fd_server.receive_fds(path, generation, count, "here"))
        with pytest.raises(PeerLost):
            list(fd_server.receive_fds(f"{path}.none", 1, 1, "here"))
        assert reader.read(holder.descriptor) == pattern(NBYTES)


def test_silent_holder_raises_source_stalled(reader, monkeypatch) -> None:
    monkeypatch.setattr(fd_server, "TIMEOUT_S", 0.1)
    with HolderProcess("fake_virtual", nbytes=NBYTES) as holder:
        os.kill(holder.process.pid, signal.SIGSTOP)
        os.waitpid(holder.process.pid, os.WUNTRACED)
        with pytest.raises(SourceStalled) as caught:
            reader.post(holder.descriptor)
        assert not caught.value.mutated
        os.kill(holder.process.pid, signal.SIGCONT)


@pytest.mark.parametrize(("code", "kind"), [(2, DeviceOutOfMemory), (217, ConfigError), (719, DestinationError)])
def test_driver_error_code_raises_matching_error_class(code: int, kind: type[PenstockError]) -> None:
    driver = object.__new__(cuda_driver.CudaDriver)
    driver._calls = {"cuGetErrorName": lambda _code, _name: 0}
    with pytest.raises(kind, match=str(code)) as caught:
        driver.fail("cuCall", code)
    assert type(caught.value) is kind
    assert caught.value.hint


def test_short_rows_are_copied_as_one_rectangle(reader) -> None:
    rows = [(5, 100, 40, 300, 1000, 40), (400_000, 20_000, 300_000, 3, 400_000, 300_001)]
    rows.append((7, 2_000_000, 100, 9, 100, 100))
    columns = dict(
        zip(("src", "dst", "run_bytes", "num_rows", "src_pitch", "dst_pitch"), np.array(rows).T, strict=True)
    )
    with HolderProcess("fake_virtual", nbytes=NBYTES) as holder:
        given, expected = pattern(NBYTES), bytearray(ctypes.string_at(reader.into.memory.address, NBYTES))
        for src, dst, run, count, src_pitch, dst_pitch in rows:
            for i in range(count):
                expected[dst + i * dst_pitch : dst + i * dst_pitch + run] = given[src + i * src_pitch :][:run]
        before, rectangles = ctypes.string_at(reader.into.memory.address, NBYTES), Rectangles(**columns)
        elsewhere = reader.transport.register(reader.driver.allocate(NBYTES))
        for into in (reader.into, reader.into, elsewhere):  # laid out once for each pair of addresses
            ctypes.memmove(into.memory.address, before, NBYTES)
            pending = reader.transport.post_rectangles(into, holder.descriptor, rectangles)
            reader.transport.wait(pending, stall_s=5)
            assert pending.moved_bytes == pending.nbytes == sum(row[2] * row[3] for row in rows)
            assert ctypes.string_at(into.memory.address, NBYTES) == bytes(expected)
        with pytest.raises(PlanError):
            outside = columns | {"src_pitch": columns["src"] + NBYTES}
            reader.transport.post_rectangles(reader.into, holder.descriptor, Rectangles(**outside))
