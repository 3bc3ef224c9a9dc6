"""Reports of a publish and of an update.

In: what was measured. Out: frozen values, and a few lines for people.
Not here: measuring (`sync.publish.publisher`, `sync.receive.subscriber`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.report import Summarised, bytes_text
from penstock.telemetry.metrics import Outcome
from penstock.types import GB

PublishMode = Literal["live", "snapshot"]
UpdateMode = Literal["staged", "direct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport(Summarised):
    """The result of one version as its publisher saw it: only members under `committed` have it.

    A snapshot is read after `publish` returned, so its report names no member.
    """

    name: str
    version: int
    revision: str
    """The epoch of the publishers and the version: equal revisions are equal bytes."""
    mode: PublishMode
    nbytes: int
    """Bytes of the tensors on this rank."""
    wall_s: float
    copy_s: float = 0.0
    """Snapshot: the time of the copy."""
    wait_s: float = 0.0
    """Live: the time until all expected subscribers were done."""
    transform_s: float = 0.0
    """Tensors under tags: the time to fetch other ranks' parts of their blocks, and to quantise."""
    transformed_bytes: int = 0
    """Memory for the transformed tensors, in addition to the parameters."""
    boundary_bytes: int = 0
    """Memory for blocks that cross the edges of this rank's shards."""
    exchanged_bytes: int = 0
    """Bytes read from other ranks for these blocks."""
    committed: tuple[str, ...] = ()
    """Subscribers that have the complete and verified version."""
    late: tuple[str, ...] = ()
    """Subscribers known at the start that made no progress for the stall deadline; they can update later, or from a
    peer."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Subscriber -> reason of its failure."""
    outcome: Literal["", "pending", "committed"] = ""
    """Of a version with a two-phase commit: `pending` until `Publisher.wait_decision` returns. A version that was
    withdrawn has no report, but `VersionRefused`."""

    def summary(self) -> str:
        """Return a summary of one or a few lines."""
        # Member ids by their first eight digits: enough to find them in `penstock status`.
        head = f"{self.name} version {self.version}: {bytes_text(self.nbytes)} here, {self.mode}, {self.wall_s:.3f} s"
        if self.transformed_bytes:
            head += (
                f", of it {self.transform_s:.3f} s for {bytes_text(self.transformed_bytes)} transformed, "
                f"{bytes_text(self.exchanged_bytes)} from other ranks"
            )
        if self.mode == "snapshot" and self.outcome != "committed":
            return f"{head}, of it {self.copy_s:.3f} s copy" + (", not decided yet" if self.outcome else "")
        lines = [f"{head}; {len(self.committed)} committed"]
        if self.late:
            lines.append(f"late: {', '.join(member[:8] for member in self.late)}")
        lines += [f"failed: {member[:8]}: {why}" for member, why in self.failed.items()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport(Summarised):
    """The result of one committed update of one subscriber."""

    name: str
    version: int
    revision: str
    """The publishers' epoch and the version: equal revisions are equal bytes."""
    mode: UpdateMode
    nbytes: int
    """Bytes read."""
    wall_s: float
    plan_s: float
    """Time until the reads began: the request for the part, sessions, maps; the recording, the first time."""
    wire_s: float
    """Time of reading and verifying."""
    install_s: float
    """Time after the bytes arrived: permuting, casting, constants, and the loader's own work."""
    pause_s: float
    """From `before_pause` to `after_resume`."""
    path: str
    """`75% shm <- MEMBER, 25% http <- MEMBER`, by bytes."""
    sources: Mapping[str, int]
    """Member -> bytes read from it."""
    why: tuple[str, ...] = ()
    """Reasons for the transports in use, one per path, and for tensors that passed through the loader."""
    version_bytes: int = 0
    """Bytes of the version for this rank: more than was read, where this rank had some of them already."""
    delta: str = ""
    """How much of the version was read, and why no less."""
    attempts: int = 1
    """Above 1: a source failed, or a newer version came, during the update."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Member that failed during the update, and was left out -> the reason."""
    nbytes_by_path: Mapping[str, int] = field(default_factory=dict)
    """Path (`shm <- MEMBER`) -> bytes that came by it."""
    packed_bytes: int = 0
    """Bytes that were short runs at sources of other hosts, which packed them to be read in long runs."""
    staging_bytes: int = 0
    """Memory in addition to the target's own: the staging copy and scratch."""

    @property
    def gb_per_s(self) -> float:
        """Return decimal GB read per second of reading and verifying."""
        return self.nbytes / GB / self.wire_s if self.wire_s > 0 else 0.0

    def summary(self) -> str:
        """Return a summary of a few lines."""
        lines = [
            f"{self.name} version {self.version}: {bytes_text(self.nbytes)} in {self.wall_s:.3f} s: plan "
            f"{self.plan_s:.3f} s, wire {self.wire_s:.3f} s ({self.gb_per_s:.1f} GB/s), "
            f"install {self.install_s:.3f} s, pause {self.pause_s:.3f} s ({self.mode})",
        ]
        lost = [f"without {member[:8]}: {why}" for member, why in self.lost.items()]
        return "\n".join([*lines, *filter(None, (self.path, self.delta)), *self.why, *lost])


def publish_outcome(report: PublishReport) -> Outcome:
    """Return what metrics and spans show of a publish."""
    live = {"committed": len(report.committed), "late": len(report.late), "failed": len(report.failed)}
    return Outcome(
        nbytes=report.nbytes,
        phases={"copy": report.copy_s, "transform": report.transform_s, "wait": report.wait_s},
        subscribers=live if report.mode == "live" else {},
        attributes={"version": report.version, "mode": report.mode},
    )


def update_outcome(report: UpdateReport) -> Outcome:
    """Return what metrics and spans show of an update."""
    return Outcome(
        nbytes=report.nbytes,
        phases={"plan": report.plan_s, "wire": report.wire_s, "install": report.install_s},
        # Every byte is compared with its source's digests before the version is live.
        verified_bytes=report.nbytes,
        path=report.path,
        # An update that found nothing new paused nothing.
        pause_s=report.pause_s if report.version_bytes else None,
        attributes={"version": report.version, "mode": report.mode, "revision": report.revision},
    )


def received(nbytes_by_path: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Return the bytes of an update's paths by source and transport, for metrics."""
    received: dict[tuple[str, str], int] = {}
    for path, nbytes in nbytes_by_path.items():
        key = ("peer", path.partition(" ")[0])
        received[key] = received.get(key, 0) + nbytes
    return received
