"""A transport that reads the memory of hosts and GPUs with NIXL. `pip install "penstock[nixl]"` registers it.

`transport` serves and reads memory, and `reader` has the reads in flight.
"""

from __future__ import annotations

from pathlib import Path

from penstock.transport import Transport, TransportKind, TransportSetup

__all__ = ["KIND"]


def _open(setup: TransportSetup) -> Transport:
    # Import on use, since NIXL's bindings take 150 ms.
    from penstock_nixl.transport import NixlTransport

    return NixlTransport.open()


def _unless(setup: TransportSetup) -> str:
    # Over TCP, NIXL is not faster than `http`, does not protect memory from a process that has a descriptor, and UCX
    # aborts a holder that was stopped until its readers gave up. Source: docs/design/fetch.md.
    if setup.is_named:
        return ""
    if setup.listen is None:
        return "it needs ConnectionSettings(listen=)"
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    return "" if has_rdma or Path("/proc/driver/nvidia").exists() else "this host has neither RDMA nor a GPU"


KIND = TransportKind(name="nixl", open=_open, reach="network", rank=30, unless=_unless)
"""The entry point of this package in the group `penstock.transports`."""
