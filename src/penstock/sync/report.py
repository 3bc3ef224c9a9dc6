"""Reports of a publish and of an update.

In: what was measured. Out: frozen values, and a few lines for people.
Not here: measuring (`sync.publish.publisher`, `sync.receive.subscriber`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.report import Summarised
from penstock.types import GB

PublishMode = Literal["live", "snapshot"]
UpdateMode = Literal["staged", "direct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport(Summarised):
    """The result of one version as its publisher saw it: only members under `committed` have it.

    A snapshot is read after `publish` returned, so its report names nobody.
    """

    name: str
    version: int
    mode: PublishMode
    nbytes: int
    """What this rank holds."""
    wall_s: float
    copy_s: float = 0.0
    """Of a snapshot: the copy."""
    wait_s: float = 0.0
    """Live: until those waited for were done."""
    transform_s: float = 0.0
    """Of tensors under tags: what other ranks hold of their blocks, and quantising."""
    transformed_bytes: int = 0
    """Memory for those beside the parameters."""
    seam_bytes: int = 0
    """The same for blocks that reach over the edges of this rank's shards."""
    exchanged_bytes: int = 0
    """Taken of other ranks for these blocks."""
    committed: tuple[str, ...] = ()
    """Subscribers that have the version, whole and verified."""
    late: tuple[str, ...] = ()
    """Known when it began, and no progress for the stall deadline; they take a later version, or this of a peer."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Subscriber -> why it could not."""

    def summary(self) -> str:
        """A line or a few for people."""
        said = f"{self.name} version {self.version}: {self.nbytes / GB:.2f} GB here, {self.mode}, {self.wall_s:.3f} s"
        if self.transformed_bytes:
            said += (
                f", of it {self.transform_s:.3f} s for {self.transformed_bytes / GB:.2f} GB transformed, "
                f"{self.exchanged_bytes / GB:.2f} GB of other ranks"
            )
        if self.mode == "snapshot":
            return f"{said}, of it {self.copy_s:.3f} s copy"
        lines = [f"{said}; {len(self.committed)} committed"]
        if self.late:
            lines.append(f"late: {', '.join(one[:8] for one in self.late)}")
        lines += [f"failed: {member[:8]}: {why}" for member, why in self.failed.items()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport(Summarised):
    """The result of one committed update of one subscriber."""

    name: str
    version: int
    revision: str
    """Of the publishers' life and the version: equal words are equal bytes."""
    mode: UpdateMode
    nbytes: int
    """Read."""
    wall_s: float
    plan_s: float
    """Until the reads began: asking for the part, leases, maps; recording, the first time."""
    wire_s: float
    """Reading and verifying."""
    install_s: float
    """After the bytes arrived: permuting, casting, constants, and what the loader itself takes."""
    pause_s: float
    """From `before_pause` to `after_resume`."""
    path: str
    """`75% shm <- MEMBER, 25% http <- MEMBER`, by bytes."""
    sources: Mapping[str, int]
    """Member -> bytes of it."""
    why: tuple[str, ...] = ()
    """Why no nearer transport, one a path; what was met on the way."""
    version_bytes: int = 0
    """What the version has for this rank: more than was read, where some of it was here."""
    delta: str = ""
    """How much of the version was read, and why no less."""
    attempts: int = 1
    """Above 1: a source went, or a newer version came, meanwhile."""

    @property
    def gb_per_s(self) -> float:
        """Return the rate on the wire."""
        return self.nbytes / GB / self.wire_s if self.wire_s > 0 else 0.0

    def summary(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.name} version {self.version}: {self.nbytes / GB:.2f} GB in {self.wall_s:.3f} s: plan "
            f"{self.plan_s:.3f} s, wire {self.wire_s:.3f} s ({self.gb_per_s:.1f} GB/s), "
            f"install {self.install_s:.3f} s, pause {self.pause_s:.3f} s ({self.mode})",
        ]
        return "\n".join([*lines, *filter(None, (self.path, self.delta)), *self.why])


def path_of(nbytes: Mapping[str, int]) -> str:
    """Bytes by path as shares, the largest first."""
    total = max(1, sum(nbytes.values()))
    ordered = sorted(nbytes.items(), key=lambda item: -item[1])
    return ", ".join(f"{count / total:.0%} {path}" for path, count in ordered)
