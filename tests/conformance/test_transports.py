"""Every `Transport` passes the conformance suite."""

from __future__ import annotations

import socket
from importlib.util import find_spec

import pytest
from tests.support.fake_cuda import FakeCuda

from penstock.memory.arena import Arena
from penstock.testing.transport_suite import TransportTests
from penstock.transport.cuda_ipc import CudaIpcTransport
from penstock.transport.http import HttpTransport
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Memory, Transport
from penstock.transport.shm import ShmTransport
from penstock_nixl.transport import NixlTransport


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


@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
class TestNixl(TransportTests):
    def make(self) -> Transport:
        return NixlTransport.open(tls="tcp")


class TestHttp(TransportTests):
    def make(self) -> Transport:
        return HttpTransport.open()


class TestHttpCompressed(TransportTests):
    def make(self) -> Transport:
        return HttpTransport.open(compress=True)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
class TestHttpOnIpv6(TransportTests):
    def make(self) -> Transport:
        return HttpTransport.open("[::1]:0")


class TestCudaIpcWithoutDevice(TransportTests):
    driver = FakeCuda()

    def make(self) -> Transport:
        return CudaIpcTransport(self.driver)

    def allocate(self, nbytes: int) -> Memory:
        memory = self.driver.allocate(nbytes)
        self.write(memory, b"\xaa" * nbytes)
        return memory


class TestCudaIpcVirtualMemoryWithoutDevice(TestCudaIpcWithoutDevice):
    def allocate(self, nbytes: int) -> Memory:
        memory = self.driver.allocate_virtual(nbytes)
        self.write(memory, b"\xaa" * nbytes)
        return memory
