"""Data classes for a version that a receiver has read and verified, and for the options of the read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from penstock.plan.sync import WATERMARK_BYTES, ReceiverPlan
from penstock.sync.receive.hooks import Hooks
from penstock.sync.recording.layout import Load
from penstock.sync.report import UpdateReport

StagedOrigin = Literal["sync", "restore", "here"]


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """A version that was read and verified."""

    version: int
    epoch: str
    origin: StagedOrigin
    """`sync` was read from members, `restore` was filled from elsewhere, and `here` is already live and was not
    read."""
    part: ReceiverPlan | None = None
    begun: float
    report: UpdateReport
    """The report of the update without its flip."""
    decide_by: float | None = None
    """Time at which the fleet's decision is due. None means that the version may go live at once."""
    check: bytes = b""
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)

    def report_now(self, *, install_s: float = 0.0, pause_s: float = 0.0) -> UpdateReport:
        """Return the report of the update that ends now."""
        phases = {**self.report.phases, "install": self.report.phases.get("install", 0.0) + install_s}
        wall_s = time.perf_counter() - self.begun
        return msgspec.structs.replace(self.report, wall_s=wall_s, phases=phases, pause_s=pause_s)


class UpdateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options for filling a target. See `subscriber`."""

    staged: bool
    load: Load | None
    strict: bool
    transforms: str | Sequence[str] | None
    serve: bool
    memory_bytes: int | None
    hooks: Hooks

    @property
    def has_check(self) -> bool:
        """Return whether a hook checks versions before they go live, so that the caller must report the outcome."""
        return self.hooks.check is not None

    @property
    def watermark_bytes(self) -> int:
        """Return the maximum number of bytes that may be read and not yet verified."""
        # In staged mode, `memory_bytes` limits the staging copy instead.
        return WATERMARK_BYTES if self.staged or self.memory_bytes is None else self.memory_bytes
