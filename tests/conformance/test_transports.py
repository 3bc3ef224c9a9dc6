"""Every `Transport` passes the one suite."""

from __future__ import annotations

from penstock.testing.transport_suite import TransportTests
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Transport


class TestLoopback(TransportTests):
    def make(self) -> Transport:
        return LoopbackTransport()
