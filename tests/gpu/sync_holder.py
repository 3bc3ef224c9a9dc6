"""A publisher's rank as another process: `python -m tests.gpu.sync_holder NAME RANK WORLD DEVICE`.

Messages on stdin and stdout are a length and msgpack. It sends its map, then replies to strips with digests, and to
`fence`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

import msgspec
import numpy as np
import torch
from tests.unit.sync.parts import sharded

from penstock.digest.strip import Strips
from penstock.errors import PeerLost, StaleDescriptor
from penstock.memory.arena import Arena
from penstock.plan.layout import Layout
from penstock.sync.local_version import Answer, LocalVersion, VersionMap
from penstock.transport.choose import open_links
from penstock.transport.protocol import Memory

SHAPES = [(1024, 4096), (512, 512), (4096, 1000), (256, 96)]


def bytes_of(one: Layout, device: str) -> list[torch.Tensor]:
    """Return random bytes for each region, the same in every process."""
    chance = np.random.default_rng(sum(one.member.encode()))
    return [torch.from_numpy(chance.integers(0, 256, n, np.uint8)).to(device) for n in one.regions]


def on_device(one: Layout, device: str) -> list[Memory]:
    """Return arenas filled with those bytes."""
    found = []
    for data in bytes_of(one, device):
        made = Arena.allocate(max(data.numel(), 1), device)
        made.bytes_at(0, data.numel()).copy_(data)
        found.append(Memory(address=made.address, nbytes=data.numel(), device=made.device, owner=made))
    torch.cuda.synchronize()
    return found


def _send(pipe: IO[bytes], value: object) -> None:
    raw = msgspec.msgpack.encode(value)
    pipe.write(len(raw).to_bytes(8, "little") + raw)
    pipe.flush()


def _receive(pipe: IO[bytes], kind: Any) -> Any:
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    return msgspec.msgpack.decode(pipe.read(int.from_bytes(head, "little")), type=kind)


class Holder:
    """See `SourceLink`. This is the client of such a process."""

    same_host, same_process = True, False

    def __init__(self, name: str, rank: int, world_size: int, device: str) -> None:
        command = [sys.executable, "-m", "tests.gpu.sync_holder", name, str(rank), str(world_size), device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        self.map: VersionMap = _receive(self.process.stdout, VersionMap)
        self.member = self.map.member

    def call(self, *request: object) -> tuple[str, bytes]:
        """Send a request and return its response."""
        try:
            with self._lock:
                _send(self.process.stdin, request)
                return _receive(self.process.stdout, tuple[str, bytes])
        except (EOFError, OSError) as error:
            raise PeerLost("the holder is gone", uri=self.member) from error

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        columns = (strips.at, strips.run_bytes, strips.num_rows, strips.pitch)
        said, raw = self.call("digests", *(column.tobytes() for column in columns))
        if said == "stale":
            raise StaleDescriptor("fenced", uri=self.member)
        return Answer(digests=np.frombuffer(raw, np.uint64), num_ready=1)

    def close(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


def serve(name: str, rank: int, world_size: int, device: str) -> None:
    one = sharded(name, SHAPES, 0, world_size, 2)[rank]
    with open_links(only=["cuda_ipc"]) as links:
        held = LocalVersion(one, on_device(one, device), links)
        held.begin(1)
        held.ready()
        told = held.map()
        _send(sys.stdout.buffer, told)
        while True:
            try:
                what, *columns = _receive(sys.stdin.buffer, list)
            except EOFError:
                return
            if what == "fence":
                held.fence()
                _send(sys.stdout.buffer, ("fenced", b""))
                continue
            _send(sys.stdout.buffer, _digests(held, told, columns))


def _digests(held: LocalVersion, told: VersionMap, columns: Sequence[bytes]) -> tuple[str, bytes]:
    at, run_bytes, num_rows, pitch = (np.frombuffer(column, np.int64) for column in columns)
    strips = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
    try:
        answer = held.digests(strips, version=told.version, generation=told.generation, wait_s=5)
    except StaleDescriptor:
        return "stale", b""
    assert answer.digests is not None
    return "digests", answer.digests.tobytes()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
