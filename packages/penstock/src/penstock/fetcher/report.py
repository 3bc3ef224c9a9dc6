"""The report of a fetch. `Provenance` collects the facts while the fetch runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import msgspec

from penstock.errors import PenstockError, SourceError
from penstock.peer.local_weights import LocalWeights
from penstock.report import TransferStats, bytes_text, phases_text
from penstock.transfer.blame import is_fault

NEAREST = "it is the nearest source"
NO_MEMBER = "no member had these chunks or was reading them"


def why_command(model: str) -> str:
    """Return the command that explains why the members of a model cannot exchange weights."""
    return f"penstock why {shlex.quote(model)}"


class Provenance(msgspec.Struct):
    """The sources of one fetch's bytes, and the faults of the fetch."""

    model: str
    nbytes_by_path: dict[str, int] = msgspec.field(default_factory=dict)
    faults: list[str] = msgspec.field(default_factory=list)
    full: dict[str, str] = msgspec.field(default_factory=dict)
    """The refusal from each full member. Reported only if the fetch fails."""
    why: dict[str, str] = msgspec.field(default_factory=dict)
    """Reason for each path: why no nearer transport or storage was used, or that it is the nearest."""
    why_storage: str = NO_MEMBER
    num_wrong: int = 0

    def add_bytes(self, path: str, nbytes: int) -> None:
        """Add verified bytes from a path."""
        self.nbytes_by_path[path] = self.nbytes_by_path.get(path, 0) + nbytes
        if path.startswith("storage "):
            self.why[path] = self.why_storage

    def note_failure(self, member: str, error: PenstockError) -> None:
        """Add the failure or the refusal of a member."""
        if is_fault(error):
            self.faults.append(f"{member[:8]}: {error.message}")
        else:
            self.full[member] = str(error)

    def stall_error(self, kind: type[SourceError], what: str, hub_says: str) -> SourceError:
        """Return the error for a fetch without progress. The message names the sources that were tried."""
        full = [f"{member[:8]}: {refusal}" for member, refusal in self.full.items()]
        tried = "; ".join((self.faults + full)[-4:]) or "no member has them"
        hint = f"run `{why_command(self.model)}` to see what each holder lacks, or pass fallback= to read storage"
        return kind(f"{what}: {tried}; {hub_says}", hint=hint)

    def reasons(self) -> str:
        """Return the distinct reasons for the paths that were used."""
        used = (f"{path.partition(' ')[0]}: {why}" for path, why in self.why.items() if path in self.nbytes_by_path)
        return "; ".join(dict.fromkeys(used))


class FetchReport(TransferStats, frozen=True, kw_only=True):
    """The outcome of a fetch. `revision` is the root of all digests, with the prefix `w1-`.

    The phases are `discover`, `allocate`, `register`, `connect`, `move` and `commit`, whose sum is `wall_s`.
    """

    model: str
    key: str
    num_tensors: int
    storage_bytes: int
    """Bytes of weights that this process requested from storage."""
    header_bytes: int
    """Bytes that this process requested from storage for the names and shapes of weights. 0 without a fallback.

    They include the index, the manifest, and at least 16 KiB of each file. Every member with a fallback reads them,
    because they determine which members have the same weights.
    """
    nbytes_by_path: Mapping[str, int]
    """Verified bytes for each path, such as `cuda_ipc <- MEMBER` or `storage URI`."""
    why: Mapping[str, str]
    """Reason for each path: why no nearer transport or storage was used, or that it is the nearest."""
    faults: tuple[str, ...]
    """Sources that failed during the fetch, with the reasons."""
    verified: bool
    """Whether every byte was compared with a digest that existed before this process read the byte."""
    verified_against: str
    """Source of the digests for the comparison, or why there were no digests."""

    @property
    def path(self) -> str:
        """Return the paths with their bytes."""
        return ", ".join(f"{bytes_text(nbytes)} by {path}" for path, nbytes in self.nbytes_by_path.items())

    def summary(self) -> str:
        """Return a readable summary of a few lines."""
        paths = [
            f"{bytes_text(nbytes)} by {path} (because {self.why[path]})" for path, nbytes in self.nbytes_by_path.items()
        ]
        lines = [
            f"{self.model}: {self.num_tensors} tensors, {bytes_text(self.nbytes)} in {self.wall_s:.3f} s "
            f"({self.gb_per_s:.2f} GB/s): {phases_text(self.phases)}",
            f"paths: {'; '.join(paths) or 'none'}",
            f"{'verified against' if self.verified else 'not verified:'} {self.verified_against}; "
            f"revision {self.revision[:19]}",
        ]
        return "\n".join(lines + [f"fault: {fault}" for fault in self.faults])


def report_of(
    weights: LocalWeights, provenance: Provenance, *, storage_bytes: int, header_bytes: int, phases: dict[str, float]
) -> FetchReport:
    """Return the report of a successful fetch."""
    unverified_bytes, against = _unverified(weights, provenance)
    return FetchReport(
        model=weights.identity.model,
        key=weights.key,
        revision=weights.verified.root(),
        num_tensors=len(weights.layout.table),
        nbytes=weights.layout.nbytes,
        verified_bytes=weights.layout.nbytes - unverified_bytes,
        storage_bytes=storage_bytes,
        header_bytes=header_bytes,
        wall_s=sum(phases.values()),
        phases=phases,
        nbytes_by_path=dict(provenance.nbytes_by_path),
        why=dict(provenance.why),
        faults=tuple(provenance.faults),
        verified=not unverified_bytes,
        verified_against=against,
    )


def _unverified(weights: LocalWeights, provenance: Provenance) -> tuple[int, str]:
    """Return the number of bytes that had no digest to compare with, and `verified_against`."""
    if weights.verified.has_manifest:
        return 0, "the manifest's digests"
    # The root of all digests had to equal this revision. See `check_revision`.
    if weights.identity.revision.startswith("w1-"):
        return 0, f"the revision asked for, {weights.identity.revision[:19]}"
    first = "digests made by the member that read the bytes first"
    # This process computed the digests of the bytes that it read from storage.
    hashed = sum(nbytes for path, nbytes in provenance.nbytes_by_path.items() if path.startswith("storage "))
    if not hashed:
        return 0, first
    alone = "hashed on read, nothing to compare with"
    total = sum(provenance.nbytes_by_path.values())
    if hashed == total:
        return hashed, alone
    return hashed, f"{bytes_text(hashed)} of {bytes_text(total)} {alone}; the rest compared with {first}"
