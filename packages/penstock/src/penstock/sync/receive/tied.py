"""Receiver rows that share memory under several names. Of tied rows, one is read, so their sources must be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from penstock.digest.strip import Strips
from penstock.errors import PenstockError
from penstock.holding.regions import VersionRegions
from penstock.memory.targets import sources_differ
from penstock.plan.sync import ReceiverPlan
from penstock.segments import spread
from penstock.sync.receive.sources import SourceLink, SourceRead
from penstock.transfer.blame import SourceFailed
from penstock.types import I64, U64

_COLUMNS = ("row", "source", "src", "dst", "run_bytes", "num_rows", "src_pitch", "dst_pitch")
_ANY_NBYTES = 1 << 62
"""A limit that no source reaches, because the real sizes are unknown here."""


class _Reads(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    source: I64
    src: I64
    src_pitch: I64
    dst: I64
    dst_pitch: I64
    run_bytes: I64
    num_rows: I64

    def __getitem__(self, which: np.ndarray) -> _Reads:
        return _Reads(**{name: getattr(self, name)[which] for name in self.__struct_fields__})

    @property
    def theirs(self) -> Strips:
        pitch = np.where(self.num_rows > 1, self.src_pitch, self.run_bytes)
        return Strips(at=self.src, run_bytes=self.run_bytes, num_rows=self.num_rows, pitch=pitch)


class TiedRows:
    """The rows of a part that share their memory with other rows. `part` contains no reads of duplicate rows."""

    def __init__(
        self, part: ReceiverPlan, groups: Sequence[Sequence[int]], names: Sequence[str], into: VersionRegions
    ) -> None:
        self.part = part
        self.sources = part.used_sources()
        self._into = into
        # The names of two rows that share memory, and their reads, cut at the same places.
        self._pairs: list[tuple[tuple[str, str], tuple[_Reads, _Reads]]] = []
        if not groups:
            return
        part.check(src_nbytes=[_ANY_NBYTES] * len(part.sources), dst_nbytes=into.nbytes)
        for first, *others in groups:
            for other in others:
                reads = _cut_alike(_reads(part, first), _reads(part, other))
                self._pairs.append(((names[first], names[other]), reads))
        kept = ~np.isin(part.row, [row for _, *others in groups for row in others])
        count = np.concatenate([[0], np.cumsum(kept)])
        columns = {name: getattr(part, name)[kept] for name in _COLUMNS}
        self.part = msgspec.structs.replace(part, bucket_first=count[part.bucket_first], **columns)

    def compare(self, links: Mapping[str, SourceLink], *, stall_s: float) -> None:
        """Raise PlanError if the sources of tied rows have different bytes, or SourceFailed if a source stalls."""
        for names, (ours, others) in self._pairs:
            apart = (ours.source != others.source) | (ours.src != others.src)
            apart |= (ours.num_rows > 1) & (ours.src_pitch != others.src_pitch)
            if apart.any():
                digests = [self._digests(reads[apart], links, stall_s) for reads in (ours, others)]
                if (digests[0] != digests[1]).any():
                    raise sources_differ(*names)

    def _digests(self, reads: _Reads, links: Mapping[str, SourceLink], stall_s: float) -> U64:
        digests = np.zeros(len(reads.source), np.uint64)
        for number in np.unique(reads.source).tolist():
            mine = reads.source == number
            member = self.part.sources[number]
            source = SourceRead(links[member], self._into)
            try:
                digests[mine] = source.ask(reads[mine].theirs, stall_s=stall_s, is_over=lambda: False)
            except PenstockError as error:
                raise SourceFailed(member, error) from error
        return digests


def _reads(part: ReceiverPlan, row: int) -> _Reads:
    mine = np.flatnonzero(part.row == row)
    mine = mine[np.argsort(part.dst[mine], kind="stable")]
    return _Reads(**{name: getattr(part, name)[mine] for name in _Reads.__struct_fields__})


def _cut_alike(one: _Reads, other: _Reads) -> tuple[_Reads, _Reads]:
    same = len(one.dst) == len(other.dst) and all(
        (getattr(one, name) == getattr(other, name)).all() for name in ("dst", "dst_pitch", "run_bytes", "num_rows")
    )
    if same:
        return one, other
    # Ranks may shard the two tensors differently, so cut their runs wherever a run of either tensor starts or ends.
    runs = [_runs(reads) for reads in (one, other)]
    edges = np.unique(np.concatenate([edge for each in runs for edge in (each.dst, each.dst + each.run_bytes)]))
    begin, nbytes = edges[:-1], np.diff(edges)
    at = [np.searchsorted(each.dst, begin, side="right") - 1 for each in runs]
    inside = [(i >= 0) & (begin < (each.dst + each.run_bytes)[i]) for each, i in zip(runs, at, strict=True)]
    both = np.flatnonzero(inside[0] & inside[1])
    pieces = [_piece(each, i[both], begin[both], nbytes[both]) for each, i in zip(runs, at, strict=True)]
    return pieces[0], pieces[1]


def _runs(reads: _Reads) -> _Reads:
    each = reads[np.repeat(np.arange(len(reads.dst)), reads.num_rows)]
    number = spread(np.zeros(len(reads.dst), np.int64), reads.num_rows)
    src, dst = each.src + number * each.src_pitch, each.dst + number * each.dst_pitch
    runs = msgspec.structs.replace(each, src=src, dst=dst, num_rows=np.ones_like(number))
    return runs[np.argsort(dst, kind="stable")]


def _piece(runs: _Reads, at: I64, begin: I64, nbytes: I64) -> _Reads:
    some = runs[at]
    return msgspec.structs.replace(some, src=some.src + begin - some.dst, dst=begin, run_bytes=nbytes)
