"""Every `Transport` passes the one suite."""

from __future__ import annotations

from penstock.memory.arena import Arena
from penstock.testing.transport_suite import TransportTests
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Memory, Transport
from penstock.transport.shm import ShmTransport


class TestLoopback(TransportTests):
    def make(self) -> Transport:
        return LoopbackTransport()


class TestShm(TransportTests):
    def make(self) -> Transport:
        return ShmTransport()

    def allocate(self, nbytes: int) -> Memory:
        arena = Arena.allocate(nbytes)
        memory = Memory(address=arena.address, nbytes=nbytes, owner=arena)
        self.write(memory, b"\xaa" * nbytes)
        return memory
