"""The reports of a publish and of an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from penstock.report import TransferStats, bytes_text
from penstock.types import GB

PublishMode = Literal["live", "snapshot"]
UpdateMode = Literal["staged", "direct"]


class PublishReport(TransferStats, frozen=True, kw_only=True):
    """The result of publishing a version, as one publisher saw it. Only members in `committed` have the version.

    Members read a snapshot after `publish` returns, so the report of a snapshot names no members. `nbytes` is the size
    of this rank's tensors. The phases are `copy` for a snapshot, `transform` for quantising and for reading blocks from
    other ranks, and `wait` for a live version until all expected subscribers had finished.
    """

    name: str
    version: int
    mode: PublishMode
    transformed_bytes: int = 0
    """Memory for the transformed tensors in bytes, in addition to the parameters."""
    boundary_bytes: int = 0
    """Memory for blocks that cross the edges of this rank's shards, in bytes."""
    exchanged_bytes: int = 0
    """Bytes read from other ranks for these blocks."""
    committed: tuple[str, ...] = ()
    """Subscribers that have the complete, verified version."""
    late: tuple[str, ...] = ()
    """Subscribers without progress until the stall deadline. They can update later, or from a peer."""
    failed: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Subscribers that failed, with the reason."""
    outcome: Literal["", "pending", "committed"] = ""
    """`pending` until `Publisher.wait_decision` returns, in a two-phase commit. A withdrawn version raises
    `VersionRefused`."""

    def summary(self) -> str:
        """Return a summary in one or a few lines."""
        # `penstock status` finds a member by the first eight digits of its id.
        head = f"{self.name} version {self.version}: {bytes_text(self.nbytes)} here, {self.mode}, {self.wall_s:.3f} s"
        if self.transformed_bytes:
            head += (
                f", of it {self.phases['transform']:.3f} s for {bytes_text(self.transformed_bytes)} transformed, "
                f"{bytes_text(self.exchanged_bytes)} from other ranks"
            )
        if self.mode == "snapshot" and self.outcome != "committed":
            return f"{head}, of it {self.phases['copy']:.3f} s copy" + (", no decision yet" if self.outcome else "")
        lines = [f"{head}; {len(self.committed)} committed"]
        if self.late:
            lines.append(f"late: {', '.join(member[:8] for member in self.late)}")
        lines += [f"failed: {member[:8]}: {why}" for member, why in self.failed.items()]
        return "\n".join(lines)


class UpdateReport(TransferStats, frozen=True, kw_only=True):
    """The result of one committed update of one subscriber.

    The phases are `plan` until the reads began, including the recording of the loader in the first update, `wire` for
    reading and verifying, and `install` after the bytes arrived, for permuting, casting and the loader's work.
    """

    name: str
    version: int
    mode: UpdateMode
    pause_s: float = 0.0
    """Seconds from `before_pause` to `after_resume`."""
    path: str = ""
    """Transports and members by share of bytes, such as `75% shm <- MEMBER, 25% http <- MEMBER`."""
    sources: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Number of bytes read from each member."""
    why: tuple[str, ...] = ()
    """Reasons for the transports in use, and for tensors that passed through the loader."""
    version_bytes: int = 0
    """Size of the version for this rank in bytes. It exceeds `nbytes` if this rank had some bytes already."""
    delta: str = ""
    """How much of the version was read, and why it was not less."""
    attempts: int = 1
    """Number of attempts, above 1 if a source failed or a newer version arrived during the update."""
    lost: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Members that failed during the update, with the reason."""
    nbytes_by_path: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Number of bytes for each path, such as `shm <- MEMBER`."""
    packed_bytes: int = 0
    """Bytes in short runs that sources on other hosts packed into long runs."""
    staging_bytes: int = 0
    """Memory for the staging copy and scratch in bytes, in addition to the target."""

    @property
    def gb_per_s(self) -> float:
        """Return the rate of reading and verifying in decimal GB per second."""
        return self.nbytes / GB / self.phases["wire"] if self.phases["wire"] > 0 else 0.0

    def summary(self) -> str:
        """Return a summary in a few lines."""
        lines = [
            f"{self.name} version {self.version}: {bytes_text(self.nbytes)} in {self.wall_s:.3f} s: plan "
            f"{self.phases['plan']:.3f} s, wire {self.phases['wire']:.3f} s ({self.gb_per_s:.1f} GB/s), "
            f"install {self.phases['install']:.3f} s, pause {self.pause_s:.3f} s ({self.mode})"
        ]
        lost = [f"without {member[:8]}: {why}" for member, why in self.lost.items()]
        return "\n".join([*lines, *filter(None, (self.path, self.delta)), *self.why, *lost])
