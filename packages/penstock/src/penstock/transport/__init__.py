"""Reads of a peer's memory by one protocol, and the registration of transports.

In / Out: a `TransportKind` for `register_transport`, and the types that a transport is written with.
Not here: which bytes cross and when (`plan`, `fetch`, `sync`).
"""

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
