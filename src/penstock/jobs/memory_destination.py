"""Memory as a conversion's destination: the result is written where it is used from, and never to a disk.

In: a job in one file. Out: its bytes in memory that the destination owns, visible once they are complete.
Not here: whose memory that is (`keeper.keeper`), the job's run (`convert`), directories and object stores (`storage`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.errors import ConfigError
from penstock.jobs.job import Job
from penstock.jobs.journal import Notes
from penstock.jobs.publish import manifest_of
from penstock.jobs.sidecar_files import Attested
from penstock.storage.output import OutputRegion
from penstock.types import Manifest

SCHEME = "keeper:"
"""Of a memory destination's `uri`, and of a destination on a command line."""
ONE_FILE = 1 << 62
"""`shard_bytes` of a job whose result is one region of memory."""


@runtime_checkable
class MemoryDestination(Protocol):
    """Memory of this host that a conversion writes its result to.

    Attributes:
        uri: its name in reports and errors.
    """

    uri: str

    def take(self, job: Job, fill: Callable[[Path], Manifest]) -> None:
        """Allocate memory for the job's one file, have it filled, and publish it: completely, or not at all.

        Args:
            fill: to be called once, with a path that processes of this user and host write to.

        Raises:
            BudgetTooSmall, ConfigError: there is no room, or the result is there already. Whatever `fill` raises.
        """
        ...


def fill(target: MemoryDestination, job: Job, run: Callable[[OutputRegion, Notes], None]) -> str:
    """Run a job into a memory destination; return the result's revision.

    Args:
        run: runs every task, given the output and the notes of finished tasks; raises if a source changed meanwhile.

    Raises:
        ConfigError: the result is not one piece. See `MemoryDestination.take`.
    """
    if len(job.files.body_nbytes) != 1 or job.files.groups != ("",):
        raise ConfigError(f"{target.uri} takes one weight set, and {job.operation.name} gives several", uri=target.uri)
    # `take` returns nothing and may wrap the call in code of its own, so the manifest leaves `make` through a list.
    manifests: list[Manifest] = []

    def make(path: Path) -> Manifest:
        out, notes = OutputRegion(path, job.files.table), Notes()
        try:
            out.open()
            run(out, notes)
            manifest = manifest_of(job, notes, out)
        finally:
            out.close()
        # Inside `take`: an operation that rejects the result must do so before anyone can see that memory.
        if isinstance(job.operation, Attested):
            job.operation.check(manifest)
        manifests.append(manifest)
        return manifest

    target.take(job, make)
    return manifests[0].revision
