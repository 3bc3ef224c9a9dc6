"""Reads of a peer's memory through one protocol, and the registration of transports. `loopback` is the reference."""

from penstock.transport.choose import TransportKind, TransportSetup, register_transport
from penstock.transport.protocol import Descriptor, Handle, Memory, PendingRead, Transport

__all__ = [
    "Descriptor",
    "Handle",
    "Memory",
    "PendingRead",
    "Transport",
    "TransportKind",
    "TransportSetup",
    "register_transport",
]
