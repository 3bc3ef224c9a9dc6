"""Provenance of one fetch: bytes by path, the reason for each path, and the sources that failed.

In: verified bytes with their source, and faults. Out: shares and reasons in words.
Not here: the fetch (`run`), its final report (`report`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import SourceError

NEAREST = "the nearest there is"
NO_MEMBER = "no member had these chunks or was reading them"


@dataclass(slots=True)
class Provenance:
    """A record of the sources of one fetch's bytes."""

    nbytes_by_path: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Upstreams that failed, with the reason."""
    full: dict[str, str] = field(default_factory=dict)
    """Member -> its refusal when all its readers' places were taken; reported only if the fetch fails."""
    why: dict[str, str] = field(default_factory=dict)
    """Path -> reason for it: why no nearer transport, why storage, or that it is the nearest."""
    why_storage: str = NO_MEMBER

    def add_bytes(self, path: str, nbytes: int) -> None:
        """Add verified bytes of a path."""
        self.nbytes_by_path[path] = self.nbytes_by_path.get(path, 0) + nbytes
        if path.startswith("storage "):
            self.why[path] = self.why_storage

    def read_without_claim(self, hub_says: str) -> None:
        """Record that storage is read without a claim, because the hub refused or did not answer."""
        self.faults.append(f"hub: {hub_says}; storage is read without a claim")
        self.why_storage = f"read without a claim, the hub: {hub_says}"

    def stall_error(self, kind: type[SourceError], what: str, asked: str) -> SourceError:
        """Return the error for a fetch without progress; its message names the sources that were tried."""
        full = [f"{member[:8]}: {said}" for member, said in self.full.items()]
        tried = "; ".join((self.faults + full)[-4:]) or "no member has them"
        hint = "run `penstock why` to see what each holder lacks, or give fallback= to read storage"
        return kind(f"{what}: {tried}; {asked}", hint=hint)

    def shares(self) -> str:
        """Return the paths with their shares: `75% shm <- MEMBER, 25% storage URI`."""
        total = max(1, sum(self.nbytes_by_path.values()))
        ordered = sorted(self.nbytes_by_path.items(), key=lambda item: -item[1])
        return ", ".join(f"{nbytes / total:.0%} {path}" for path, nbytes in ordered)

    def reasons(self) -> str:
        """Return the reasons for the paths that were used, each reason once."""
        used = (f"{path.partition(' ')[0]}: {why}" for path, why in self.why.items() if path in self.nbytes_by_path)
        return "; ".join(dict.fromkeys(used))
