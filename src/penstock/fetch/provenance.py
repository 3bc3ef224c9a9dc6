"""Where the bytes of one fetch came from: by path, and why by that one.

In: what was verified, from whom; faults. Out: shares and reasons in words.
Not here: the fetch (`run`), what the caller is told at the end (`report`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import SourceError

NEAREST = "the nearest there is"
NO_MEMBER = "no member had these chunks or was reading them"


@dataclass(slots=True)
class Provenance:
    """Where the bytes came from."""

    nbytes_by_path: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Upstreams that failed, and why."""
    full: dict[str, str] = field(default_factory=dict)
    """Member -> what it said when all its readers' places were taken; told only where the fetch fails."""
    why: dict[str, str] = field(default_factory=dict)
    """Path -> why by that one: why no nearer transport, why storage, or that it is the nearest."""
    why_storage: str = NO_MEMBER

    def took(self, path: str, nbytes: int) -> None:
        """Note bytes that were verified."""
        self.nbytes_by_path[path] = self.nbytes_by_path.get(path, 0) + nbytes
        if path.startswith("storage "):
            self.why[path] = self.why_storage

    def goes_alone(self, hub_says: str) -> None:
        """Storage is read without the hub's word, since it says this, or nothing."""
        self.faults.append(f"hub: {hub_says}; storage is read without a claim")
        self.why_storage = f"read without a claim, the hub: {hub_says}"

    def stalled(self, kind: type[SourceError], what: str, asked: str) -> SourceError:
        """That nothing came any more, and what was tried."""
        full = [f"{member[:8]}: {said}" for member, said in self.full.items()]
        tried = "; ".join((self.faults + full)[-4:]) or "no member has them"
        hint = "see `penstock why` for what each holder lacks; give fallback= to read storage"
        return kind(f"{what}: {tried}; {asked}", hint=hint)

    def shares(self) -> str:
        """Paths by their share: `75% shm <- MEMBER, 25% storage URI`."""
        total = max(1, sum(self.nbytes_by_path.values()))
        ordered = sorted(self.nbytes_by_path.items(), key=lambda item: -item[1])
        return ", ".join(f"{nbytes / total:.0%} {path}" for path, nbytes in ordered)

    def reasons(self) -> str:
        """Why by these paths, each reason once."""
        found = (f"{path.partition(' ')[0]}: {why}" for path, why in self.why.items() if path in self.nbytes_by_path)
        return "; ".join(dict.fromkeys(found))
