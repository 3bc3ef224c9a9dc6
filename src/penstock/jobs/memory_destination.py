"""Memory as a conversion's destination: what is made lies where it is used from, and was never on a disk.

In: a job in one file. Out: its bytes in memory of the memory destination's, shown whole.
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
"""`shard_bytes` of a job whose result is one piece of memory."""


@runtime_checkable
class MemoryDestination(Protocol):
    """Memory of this host that results are made in.

    Attributes:
        uri: what reports and errors call it.
    """

    uri: str

    def take(self, job: Job, fill: Callable[[Path], Manifest]) -> None:
        """Make room for the job's one file, have it filled, and show it: all at once, or nothing is left of it.

        Args:
            fill: to be called once, with a path that processes of this user and host write to.

        Raises:
            BudgetTooSmall, ConfigError: there is no room, or the result is there already. Whatever `fill` raises.
        """
        ...


def fill(target: MemoryDestination, job: Job, run: Callable[[OutputRegion, Notes], None]) -> str:
    """Have a job run into a memory destination: the result's revision.

    Args:
        run: has every task done, told where to write and where to note it; raises if a source changed meanwhile.

    Raises:
        ConfigError: the result is not one piece. See `MemoryDestination.take`.
    """
    if len(job.files.body_nbytes) != 1 or job.files.groups != ("",):
        raise ConfigError(f"{target.uri} takes one weight set, and {job.operation.name} gives several", uri=target.uri)
    made: list[Manifest] = []

    def make(path: Path) -> Manifest:
        out, notes = OutputRegion(path, job.files.table), Notes()
        try:
            out.open()
            run(out, notes)
            manifest = manifest_of(job, notes, out)
        finally:
            out.close()
        if isinstance(job.operation, Attested):
            job.operation.check(manifest)
        made.append(manifest)
        return manifest

    target.take(job, make)
    return made[0].revision
