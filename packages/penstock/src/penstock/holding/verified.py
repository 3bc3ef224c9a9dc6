"""The verified chunks of a key: their digests, the log that tells readers of new chunks, and repeated spot checks."""

from __future__ import annotations

import random
import threading

import numpy as np

from penstock.digest.leaf import revision
from penstock.errors import IntegrityError
from penstock.holding.weight_layout import WeightLayout
from penstock.types import I64, U64, Bools


class VerifiedChunks:
    """The chunks of a layout that were verified, with their digests. The caller guards changes with a lock.

    Args:
        leaves: the digests in the manifest, or None without a manifest.

    Attributes:
        leaves: digest of each leaf. Without a manifest only the digests of chunks in `have` are valid.
        have: [num_chunks] bool, whether each chunk was verified.
        num_logged: number of chunks in the log, which lists verified chunks in the order of their arrival.
    """

    def __init__(self, layout: WeightLayout, leaves: U64 | None = None) -> None:
        self._table, self._chunks = layout.table, layout.chunks
        self.has_manifest = leaves is not None
        self.leaves: U64 = np.zeros(self._chunks.num_leaves, np.uint64) if leaves is None else leaves
        self.have: Bools = np.zeros(self._chunks.num_chunks, bool)
        self.num_logged = 0
        self._log: I64 = np.empty(self._chunks.num_chunks, np.int64)
        self._sources: list[str] = []
        self._source_index: I64 = np.full(self._chunks.num_chunks, -1)
        self.known_root = ""

    @property
    def nbytes(self) -> int:
        """Return the number of verified bytes."""
        return int(self._chunks.nbytes[self.have].sum())

    def contradicting(self, chunks: I64, leaves: U64) -> I64:
        """Return the chunks for which a peer's digests contradict the manifest. Without a manifest, return none."""
        if not self.has_manifest:
            return chunks[:0]
        return self._chunks.differing(chunks, leaves, self.leaves[self._chunks.leaves_of(chunks)])

    def record(self, chunks: I64, leaves: U64, source: str) -> None:
        """Record one source's digests for chunks. Without a manifest, raise IntegrityError if two sources disagree."""
        if self.has_manifest:
            return
        is_known = self._source_index[chunks] >= 0
        if is_known.any():
            known, counts = chunks[is_known], self._chunks.leaf_counts(chunks)
            stated = leaves[np.repeat(is_known, counts)]
            wrong = self._chunks.differing(known, stated, self.leaves[self._chunks.leaves_of(known)])
            if len(wrong):
                other = self._sources[self._source_index[wrong[0]]]
                raise IntegrityError(
                    f"{other} and {source} report different digests for chunk {int(wrong[0])}",
                    hint="write a manifest with `penstock manifest`. Only a manifest shows which source is right",
                )
            chunks, leaves = chunks[~is_known], leaves[np.repeat(~is_known, counts)]
        if len(chunks):
            self.leaves[self._chunks.leaves_of(chunks)] = leaves
            self._source_index[chunks] = len(self._sources)
            self._sources.append(source)

    def add(self, chunks: I64, leaves: U64) -> None:
        """Add verified chunks to the log, with their leaf digests."""
        # A slow source and its replacement may deliver the same chunk, but the log must list each chunk once.
        new = ~self.have[chunks]
        if not new.all():
            chunks, leaves = chunks[new], leaves[np.repeat(new, self._chunks.leaf_counts(chunks))]
        self.leaves[self._chunks.leaves_of(chunks)] = leaves
        self.have[chunks] = True
        self._log[self.num_logged : self.num_logged + len(chunks)] = chunks
        self.num_logged += len(chunks)

    def logged_after(self, serial: int) -> tuple[I64, U64]:
        """Return the chunks verified since `serial`, or all chunks if `serial` is from another log, and the digests."""
        new = self._log[serial if serial <= self.num_logged else 0 : self.num_logged]
        return new, self.leaves[self._chunks.leaves_of(new)]

    def root(self) -> str:
        """Return the `w1-` revision, the root of all digests. The revision is final once every chunk is verified."""
        return self.known_root or revision(self._table, self._chunks.leaf_bytes, self.leaves)

    def keep_root(self) -> str:
        """Keep and return the root. Computing it takes milliseconds."""
        self.known_root = self.root()
        return self.known_root

    def check_revision(self, key: str, *revisions: str) -> None:
        """Keep the root. Raise IntegrityError unless the root matches each of these revisions that is a `w1-` root."""
        root = self.root()
        for named in revisions:
            if named.startswith("w1-") and not root.startswith(named):
                raise IntegrityError(f"the digests belong to revision {root}, not {named}", uri=f"penstock:{key}")
        self.known_root = root


class SpotChecks:
    """The order of the spot checks of some chunks.

    Attributes:
        digesting: lock that is held while a chunk is digested, so that its memory is not released. Code that also needs
            the lock of the holding acquires `digesting` first.
    """

    def __init__(self) -> None:
        self.digesting = threading.Lock()
        self._last_chunk = -1

    def next_chunk(self, have: Bools, chance: random.Random) -> int | None:
        """Return the next verified chunk to check, or None if no chunk is verified."""
        verified = np.flatnonzero(have)
        if not len(verified):
            return None
        # Members that start together should not check the same chunks at the same time.
        if self._last_chunk >= 0:
            later = verified[verified > self._last_chunk]
        else:
            later = verified[chance.randrange(len(verified)) :]
        self._last_chunk = int(later[0] if len(later) else verified[0])
        return self._last_chunk
