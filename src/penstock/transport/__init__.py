"""One-sided reads between address spaces, by one protocol, and the registration of transports.

In / Out: a `TransportKind` for `register_transport`, and what its transport is made of.
Not here: what crosses and when (`plan`, `fetch`, `sync`).
"""

from penstock.transport.descriptor import Descriptor
from penstock.transport.protocol import Handle, Memory, Pending, Transport
from penstock.transport.registry import TransportKind, TransportSetup, register_transport

__all__ = [
    "Descriptor",
    "Handle",
    "Memory",
    "Pending",
    "Transport",
    "TransportKind",
    "TransportSetup",
    "register_transport",
]
