"""Constructors do no I/O: `open`, `join` and `start` do. The rule is that of `scripts.shape`."""

from __future__ import annotations

from scripts import shape
from scripts.source_roots import ROOT

ALLOWED = {
    # Journeys and the hub's server, whose I/O is still to move to `open`.
    "penstock.hub.auth.TokenFile": "reads the tokens once, so that a faulty file fails at the start",
    "penstock.hub.local_hub._Hosting": "binds the socket of this host's hub",
    "penstock.jobs.coordinator.Coordinator": "binds the socket for its workers",
    "penstock.jobs.result.Journal": "opens the journal that it continues",
    "penstock.loader.verify._SidecarFile": "looks for the file",
    "penstock.memory.tier_disk.SpillTier": "makes its directory",
    "penstock.storage.place.DestinationClaim": "claims the directory",
    "penstock.telemetry.endpoint.MetricsEndpoint": "listens",
    "penstock_hf.runai_streamer.objects.ObjectStorageModel": "the replaced class opens the bucket there too",
    # Objects that are one resource of the operating system, and exist while it does.
    "penstock.hub.local_hub._File": "a locked file",
    "penstock.jobs.workers.fork_server.ForkServer": "a process",
    "penstock.jobs.workers.fork_server.Forked": "a process",
    "penstock.jobs.workers.worker.Worker": "asks for the cores of this process",
    "penstock.memory.staging.StagingPool": "mapped memory",
    "penstock.memory.tier_disk.SpillRoom": "an open directory",
    "penstock.net.listener.GuardedListener": "a listening socket",
    "penstock.net.listener.ThreadedListener": "a listening socket",
    "penstock.net.unix_sockets.RuntimeDir": "a locked directory",
    "penstock.storage.files.FileSource": "advises the kernel about an open file",
    "penstock.storage.io_uring.Uring": "a ring of the kernel",
    "penstock.storage.mapped.Mapping": "a mapped file",
    "penstock.testing.http_server.RangeServer": "resolves the path that it serves",
    "penstock.transport.cuda_ipc.Shared": "closes a file descriptor that it was given",
    "penstock.transport.fd_server.FdServer": "a listening socket",
    "penstock.transport.nixl.NixlTransport": "an agent of NIXL",
    "penstock.transport.nixl_reader.Reader": "an agent of NIXL",
    "penstock.transport.shm.MappedMemory": "mapped memory",
}
"""Class -> what its constructor does. The list only shrinks."""


def constructors_with_io() -> dict[str, list[str]]:
    found = {
        f"{module.name}.{node.name}": shape.io_calls(node)
        for module in shape.read_tree(ROOT)
        for node in module.classes()
    }
    return {name: calls for name, calls in found.items() if calls}


def test_constructors_do_no_io() -> None:
    found = constructors_with_io()
    new = [f"{name}: {', '.join(calls)}" for name, calls in found.items() if name not in ALLOWED]
    assert not new, f"move the I/O to a classmethod `open`, `join` or `start`: {new}"


def test_allowed_constructors_still_do_io() -> None:
    assert sorted(ALLOWED) == sorted(ALLOWED.keys() & constructors_with_io().keys()), "remove what no longer applies"
