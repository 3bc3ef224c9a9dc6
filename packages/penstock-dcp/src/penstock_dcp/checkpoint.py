"""Opens checkpoints for DCP: reads their metadata, and locates the bytes of each stored item.

safetensors: headers -> names, dtypes, shapes, places; DCP_SHARDING_INFO says which part of its tensor a file has
distcp:      .metadata -> entries; the archive of each requested entry -> dtype, shape, place
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from blake3 import blake3
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.config import REMOTE_FETCH_THREADS, Settings
from penstock.digest import leaf
from penstock.errors import FormatError, NotFound, SourceTruncated
from penstock.loader.tensor import dtype_of, torch_dtype, torch_shape
from penstock.storage import Source, is_remote, open_source, read_small
from penstock.storage.locate import INDEX_SUFFIX, SUFFIX, display, texts_of
from penstock.storage.safetensors import Header, clip
from penstock.storage.weight_set import Uri, WeightSet, open_weights
from penstock.types import MIB, DType, FileEntry, Manifest, TensorTable
from penstock.waits import Threads
from penstock_dcp import distcp
from penstock_dcp.pickled import is_sizes

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Metadata key in a safetensors file with parts of tensors. Source: torch 2.13, checkpoint/_hf_utils.py."""

BYTES_KEY = "penstock.dcp.bytes"
"""Metadata key in a safetensors file from this package, for the list of U8 tensors that are torch.save archives of
values other than tensors."""

PATHS_KEY = "penstock.dcp.paths"
"""Metadata key in a safetensors file from this package. For each name in a nested state, the entry lists the keys that
lead to the value, which the planner needs."""

_PROBE_GAP_BYTES = 16 << 10
"""Maximum gap in bytes between the end of one archive and the beginning of the next if both are read together. Small
tensors are read whole."""

_PROBE_MAX_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """The location, dtype and shape of a stored item."""

    name: str
    """Name in the weight set's table. Errors also identify the item by this name."""
    file: int
    offset: int
    nbytes: int
    dtype: DType
    shape: tuple[int, ...]
    """Shape of the stored tensor, with the dims in the order in which the bytes are stored."""
    order: tuple[int, ...] | None = None
    """Permutation of the tensor's dims into the order in which the bytes are stored, or None if the two orders are
    equal."""
    is_bytes: bool = False


class Checkpoint(Protocol):
    """An open checkpoint. The sources stay open until `close`."""

    metadata: Metadata
    uri: str

    def locate(self, indexes: Iterable[MetadataIndex]) -> None:
        """Locate the bytes of these items. The files that contain the items are opened and checked.

        Raises:
            NotFound: a file is missing.
            SourceTruncated: a file ends too early.
            FormatError: a file contradicts the metadata.
        """
        ...

    def row(self, index: MetadataIndex) -> CheckpointRow:
        """Return the row of an item that `locate` has located.

        Raise FormatError if the checkpoint does not contain the item.
        """
        ...

    def weights(self, rows: Sequence[CheckpointRow]) -> WeightSet:
        """Return the weight set for loading these rows. `close` closes its sources."""
        ...

    def close(self) -> None:
        """Close the sources. Idempotent."""
        ...


def open_checkpoint(uri: Uri, *, settings: Settings, storage_options: Mapping[str, str] | None) -> Checkpoint:
    """Open the checkpoint at `uri`, which is in DCP's own format if it contains `.metadata`, or else in safetensors.

    Raises:
        NotFound: there is no checkpoint at `uri`.
        FormatError: the metadata or a header is malformed, or the two contradict each other.
        SourceError: the storage failed.
    """
    text = texts_of(uri)[0]
    if not text.endswith((SUFFIX, INDEX_SUFFIX)):
        prefix = f"{text.rstrip('/')}/"
        place = f"{prefix}{distcp.METADATA_NAME}"
        raw = read_small(place, settings=settings, storage_options=storage_options)
        if raw is not None:
            return DistcpCheckpoint(prefix, raw, settings=settings, storage_options=storage_options)
    return SafetensorsCheckpoint(text, settings=settings, storage_options=storage_options)


class SafetensorsCheckpoint:
    """A checkpoint in safetensors files that contain whole tensors, or parts with offsets in DCP_SHARDING_INFO."""

    def __init__(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None) -> None:
        # Offsets of the parts in each file. Several threads may fill this dict while headers are read.
        parts: dict[str, dict[str, tuple[int, ...]]] = {}
        stored_bytes: set[str] = set()
        paths: dict[str, distcp.Path] = {}
        is_nested: list[bool] = []

        def rename(file: str, header: Header) -> Header:
            stored_bytes.update(_bytes_names(file, header))
            if PATHS_KEY in header.metadata:
                is_nested.append(True)
                paths.update(_paths_of(file, header.metadata[PATHS_KEY]))
            offsets = _offsets_of(file, header)
            if offsets is None:
                return header
            parts[file] = offsets
            # Parts of a tensor have the same name in several files, so give each part a unique name.
            names = tuple(_part_name(name, offsets[name]) for name in header.tensors.names)
            return msgspec.structs.replace(header, tensors=msgspec.structs.replace(header.tensors, names=names))

        self._weights = open_weights(uri, settings=settings, storage_options=storage_options, rename=rename)
        self.uri = self._weights.uri
        try:
            self.metadata = self._describe(parts, stored_bytes)
            if is_nested:
                self.metadata.planner_data = {n: paths.get(n, (n,)) for n in self.metadata.state_dict_metadata}
        except BaseException:
            self._weights.close()
            raise

    def _describe(self, parts: Mapping[str, Mapping[str, tuple[int, ...]]], stored_bytes: set[str]) -> Metadata:
        table = self._weights.manifest.tensors
        uris = [source.uri for source in self._weights.sources]
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._rows: dict[MetadataIndex, CheckpointRow] = {}
        sharded: set[str] = set()
        # Use lists, because reading a numpy scalar takes ten times as long as reading a Python number.
        places = (table.file_index.tolist(), table.offset.tolist(), table.nbytes.tolist())
        columns = zip(table.names, table.dtypes, table.shapes, *places, strict=True)
        by_part = {uri: {_part_name(n, at): (n, at) for n, at in offsets.items()} for uri, offsets in parts.items()}
        for part, kind, stored, file, start, nbytes in columns:
            is_bytes = part in stored_bytes
            row = CheckpointRow(
                name=part, file=file, offset=start, nbytes=nbytes, dtype=kind, shape=stored, is_bytes=is_bytes
            )
            if is_bytes:
                if kind is not DType.U8 or len(stored) != 1:
                    raise FormatError("stored bytes are not a one-dim U8 tensor", uri=uris[file], tensor=clip(part))
                tensors[part] = BytesStorageMetadata()
                self._rows[MetadataIndex(part)] = row
                continue
            dtype, shape = torch_dtype(kind), torch_shape(kind, stored)
            name, offset = by_part[uris[file]][part] if uris[file] in by_part else (part, (0,) * len(shape))
            if len(offset) != len(shape):
                raise FormatError(
                    "the offset of a part has a different number of dims than the part",
                    uri=uris[file],
                    tensor=clip(name),
                )
            chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))
            self._rows[MetadataIndex(name, offset)] = row
            there = tensors.get(name)
            if there is None:
                tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [chunk])
                # If a tensor has a single part that does not begin at offset 0, the tensor is larger than the part.
                if any(offset):
                    sharded.add(name)
                continue
            if not isinstance(there, TensorStorageMetadata) or there.properties.dtype != dtype:
                raise FormatError("the tensor's parts have different dtypes", uri=uris[file], tensor=clip(name))
            there.chunks.append(chunk)
            sharded.add(name)
        for name in sharded:
            item = tensors[name]
            assert isinstance(item, TensorStorageMetadata)
            ends = [[at + n for at, n in zip(c.offsets, c.sizes, strict=True)] for c in item.chunks]
            if len({len(end) for end in ends}) > 1:
                raise FormatError("the tensor's parts have different numbers of dims", uri=self.uri, tensor=clip(name))
            item.size = torch.Size(max(column) for column in zip(*ends, strict=True))
            distcp.require_covered(name, item.size, item.chunks, self.uri)
        return Metadata(tensors, storage_data=self._rows)

    def locate(self, indexes: Iterable[MetadataIndex]) -> None:
        """Do nothing. The headers contain every location and were read when the checkpoint was opened."""

    def row(self, index: MetadataIndex) -> CheckpointRow:
        """See `Checkpoint.row`."""
        try:
            return self._rows[index]
        except KeyError:
            raise FormatError(
                "the checkpoint lacks a part of the tensor", uri=self.uri, tensor=clip(index.fqn)
            ) from None

    def weights(self, rows: Sequence[CheckpointRow]) -> WeightSet:
        """See `Checkpoint.weights`."""
        return self._weights

    def close(self) -> None:
        """See `Checkpoint.close`."""
        self._weights.close()


def _part_name(name: str, offset: Sequence[int]) -> str:
    return f"{name} at {','.join(map(str, offset))}"


def _offsets_of(file: str, header: Header) -> dict[str, tuple[int, ...]] | None:
    """Return the offset of each part in a file within the part's tensor, or None if the file contains whole tensors."""
    raw = header.metadata.get(SHARDING_KEY)
    if raw is None:
        return None
    info = _json(raw, SHARDING_KEY, file)
    offsets = {}
    for name in header.tensors.names:
        entry = info.get(name)
        offset = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not isinstance(offset, list) or not is_sizes(offset):
            raise FormatError(f"{SHARDING_KEY} has no offset for the tensor", uri=file, tensor=clip(name))
        offsets[name] = tuple(offset)
    return offsets


def _bytes_names(file: str, header: Header) -> list[str]:
    """Return the names of those tensors in a file whose bytes are the archive of a value that is not a tensor."""
    raw = header.metadata.get(BYTES_KEY)
    if raw is None:
        return []
    return list(_json(raw, BYTES_KEY, file))


def _paths_of(file: str, raw: str) -> dict[str, distcp.Path]:
    paths = {}
    for name, path in _json(raw, PATHS_KEY, file).items():
        if not isinstance(path, list) or not path or not all(map(distcp.is_key, path)):
            raise FormatError(f"{PATHS_KEY} has no valid path for the name", uri=file, tensor=clip(name))
        paths[name] = tuple(path)
    return paths


def _json(raw: str, key: str, file: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{key} is not JSON: {error}", uri=file) from error
    if not isinstance(value, dict):
        raise FormatError(f"{key} is not a JSON object", uri=file)
    return value


class DistcpCheckpoint:
    """A checkpoint in DCP's own format."""

    def __init__(
        self, prefix: str, raw: bytes, *, settings: Settings, storage_options: Mapping[str, str] | None
    ) -> None:
        self.uri = display(prefix.rstrip("/"))
        self.metadata = distcp.parse_metadata(raw, uri=display(f"{prefix}{distcp.METADATA_NAME}"))
        self._prefix = prefix
        self._settings = settings
        self._options = storage_options
        self._revision = leaf.headers_revision([blake3(raw).digest()])
        self._entries: Mapping[MetadataIndex, distcp.DistcpEntry] = self.metadata.storage_data
        self._files: dict[str, int] = {}
        self._sources: list[Source] = []
        self._rows: dict[MetadataIndex, CheckpointRow] = {}
        # Parsed descriptions by the bytes of `data.pkl`, because the many tensors of a model have only a few distinct
        # ones.
        self._tensors: dict[bytes, tuple[distcp.StoredTensor, str, int]] = {}

    def locate(self, indexes: Iterable[MetadataIndex]) -> None:
        """See `Checkpoint.locate`."""
        wanted = [index for index in dict.fromkeys(indexes) if index not in self._rows]
        for index in wanted:
            if index not in self._entries:
                raise FormatError("the metadata has no location for the tensor", uri=self.uri, tensor=clip(index.fqn))
        self._open({self._entries[index].file for index in wanted})
        tensors: list[tuple[MetadataIndex, int, distcp.DistcpEntry]] = []
        for index in wanted:
            entry = self._entries[index]
            file = self._files[entry.file]
            source = self._sources[file]
            if entry.offset + entry.nbytes > source.nbytes:
                fault = (
                    f"the file has {source.nbytes} bytes, but the tensor should end at {entry.offset + entry.nbytes}"
                )
                raise SourceTruncated(fault, uri=source.uri, tensor=clip(index.fqn))
            if isinstance(self.metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                shape = (entry.nbytes,)
                self._rows[index] = CheckpointRow(
                    name=index.fqn,
                    file=file,
                    offset=entry.offset,
                    nbytes=entry.nbytes,
                    dtype=DType.U8,
                    shape=shape,
                    is_bytes=True,
                )
            else:
                tensors.append((index, file, entry))
        probe = _Probe(self._sources, [(file, entry) for _, file, entry in tensors], self._settings)
        sizes = self._chunk_sizes({index.fqn for index, _, _ in tensors})
        for index, file, entry in tensors:
            self._rows[index] = self._tensor(index, file, entry, probe, sizes)

    def _open(self, names: set[str]) -> None:
        """Open the files that are not open yet."""
        new = sorted(names - self._files.keys())

        def open_one(name: str) -> Source:
            try:
                return open_source(f"{self._prefix}{name}", settings=self._settings, storage_options=self._options)
            except NotFound as error:
                message = f"the metadata lists the file {clip(name)!r}, which is missing"
                where = display(f"{self._prefix}{name}")
                raise NotFound(
                    message, uri=where, hint="copy the checkpoint again, because this copy is incomplete"
                ) from error

        if len(new) < 2 or not is_remote(self._prefix):
            for name in new:
                self._add(name, open_one(name))
            return
        with Threads(min(REMOTE_FETCH_THREADS, len(new)), thread_name_prefix="penstock-open") as pool:
            jobs = [pool.submit(open_one, name) for name in new]
            # Add every opened file, so that `close` closes it even if opening another file failed.
            for name, job in zip(new, jobs, strict=True):
                if job.exception() is None:
                    self._add(name, job.result())
            for job in jobs:
                job.result()

    def _add(self, name: str, source: Source) -> None:
        self._files[name] = len(self._sources)
        self._sources.append(source)

    def _chunk_sizes(self, names: set[str]) -> dict[MetadataIndex, tuple[int, ...]]:
        """Return the size of each part of these tensors by the part's index."""
        sizes = {}
        for name in names:
            item = self.metadata.state_dict_metadata[name]
            for chunk in item.chunks if isinstance(item, TensorStorageMetadata) else ():
                sizes[MetadataIndex(name, chunk.offsets)] = tuple(chunk.sizes)
        return sizes

    def _tensor(
        self,
        index: MetadataIndex,
        file: int,
        entry: distcp.DistcpEntry,
        probe: _Probe,
        sizes: Mapping[MetadataIndex, tuple[int, ...]],
    ) -> CheckpointRow:
        uri, name = self._sources[file].uri, index.fqn
        tail_bytes = min(distcp.TAIL_BYTES, entry.nbytes)
        tail = probe.read(file, entry.offset + entry.nbytes - tail_bytes, tail_bytes)
        members = distcp.directory(tail, entry.nbytes, uri=uri, tensor=name)
        if isinstance(members, int):
            # The zip directory is longer than the prefetched tail, which is unusual but valid.
            tail = probe.read(file, entry.offset + entry.nbytes - members, members)
            members = distcp.directory(tail, entry.nbytes, uri=uri, tensor=name)
            assert not isinstance(members, int)

        def body(path: str) -> tuple[int, int]:
            assert not isinstance(members, int)
            member = distcp.member(members, path, uri=uri, tensor=name)
            # The local header states the lengths of its name and its padding.
            head = probe.read(file, entry.offset + member.start, 30)
            start = distcp.body_start(head, member, uri=uri, tensor=name)
            if start + member.nbytes > entry.nbytes:
                raise FormatError("a member of the archive ends outside the archive", uri=uri, tensor=clip(name))
            return start, member.nbytes

        start, nbytes = body("data.pkl")
        if nbytes > MIB:
            raise FormatError("cannot read a stored tensor: its description is too long", uri=uri, tensor=clip(name))
        raw = probe.read(file, entry.offset + start, nbytes)
        known = self._tensors.get(raw)
        if known is None:
            known = self._tensors[raw] = distcp.parse_tensor(raw, uri=uri, tensor=name)
        stored, key, needed = known
        if any(path.partition("/")[2] == "byteorder" for path in members):
            start, nbytes = body("byteorder")
            if probe.read(file, entry.offset + start, min(nbytes, 6)) != b"little":
                raise FormatError("cannot read a stored tensor: its bytes are not little-endian", uri=uri)
        start, nbytes = body(f"data/{key}")
        if needed > nbytes:
            raise FormatError(f"the tensor's archive has only {nbytes} of {needed} bytes", uri=uri, tensor=clip(name))
        self._compare(index, stored, sizes, uri)
        in_order = stored.order == tuple(range(len(stored.shape)))
        shape = tuple(stored.shape[dim] for dim in stored.order)
        dtype = dtype_of(stored.dtype)
        return CheckpointRow(
            name=name,
            file=file,
            offset=entry.offset + start + stored.offset,
            nbytes=math.prod(shape) * stored.dtype.itemsize,
            dtype=dtype,
            shape=shape,
            order=None if in_order else stored.order,
        )

    def _compare(
        self,
        index: MetadataIndex,
        stored: distcp.StoredTensor,
        sizes: Mapping[MetadataIndex, tuple[int, ...]],
        uri: str,
    ) -> None:
        """Raise FormatError unless a stored tensor matches the metadata."""
        item = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(item, TensorStorageMetadata)
        if stored.dtype != item.properties.dtype:
            fault = f"the file has {stored.dtype}, but the metadata has {item.properties.dtype}"
            raise FormatError(fault, uri=uri, tensor=clip(index.fqn))
        expected = sizes.get(MetadataIndex(index.fqn, index.offset))
        if stored.shape != expected:
            fault = f"the file has the shape {list(stored.shape)}, but the metadata has {list(expected or ())}"
            raise FormatError(fault, uri=uri, tensor=clip(index.fqn))

    def row(self, index: MetadataIndex) -> CheckpointRow:
        """See `Checkpoint.row`."""
        try:
            return self._rows[index]
        except KeyError:
            raise FormatError(
                "the checkpoint lacks a part of the tensor", uri=self.uri, tensor=clip(index.fqn)
            ) from None

    def weights(self, rows: Sequence[CheckpointRow]) -> WeightSet:
        """See `Checkpoint.weights`."""
        files = tuple(
            FileEntry(name=name, nbytes=source.nbytes, identity=source.identity)
            for name, source in zip(self._files, self._sources, strict=True)
        )
        manifest = Manifest(
            files=files, tensors=table_of(rows), leaf_bytes=leaf.LEAF_BYTES, leaves=None, revision=self._revision
        )
        return WeightSet(
            uri=self.uri,
            manifest=manifest,
            sources=tuple(self._sources),
            why_unverified="DCP's format has no digests",
            opening_bytes=0,
        )

    def close(self) -> None:
        """See `Checkpoint.close`."""
        for source in self._sources:
            source.close()


def table_of(rows: Sequence[CheckpointRow]) -> TensorTable:
    """Return a tensor table with these rows."""
    return TensorTable(
        names=tuple(row.name for row in rows),
        dtypes=tuple(row.dtype for row in rows),
        shapes=tuple(row.shape for row in rows),
        file_index=np.array([row.file for row in rows], np.int64),
        offset=np.array([row.offset for row in rows], np.int64),
        nbytes=np.array([row.nbytes for row in rows], np.int64),
    )


class _Probe:
    """Prefetched beginnings and ends of archives, which contain the offsets of the tensors' elements.

    Archives are adjacent in a file, so one read can cover the end of an archive and the beginning of the next archive.
    """

    def __init__(
        self, sources: Sequence[Source], entries: Sequence[tuple[int, distcp.DistcpEntry]], settings: Settings
    ) -> None:
        self._sources = sources
        ranges = []
        for file, entry in entries:
            stop = entry.offset + entry.nbytes
            ranges.append((file, entry.offset, min(stop, entry.offset + distcp.HEAD_BYTES)))
            ranges.append((file, max(entry.offset, stop - distcp.TAIL_BYTES), stop))
        merged: list[tuple[int, int, int]] = []
        for file, start, stop in sorted(ranges):
            if merged:
                last_file, first, last = merged[-1]
                if last_file == file and start - last <= _PROBE_GAP_BYTES and stop - first <= _PROBE_MAX_BYTES:
                    merged[-1] = (file, first, max(last, stop))
                    continue
            merged.append((file, start, stop))
        self._starts = {file: ([], []) for file, _, _ in merged}  # type: dict[int, tuple[list[int], list[bytes]]]
        if any(is_remote(source.uri) for source in sources) and len(merged) > 1:
            with Threads(settings.fetch_threads or REMOTE_FETCH_THREADS, "penstock-probe") as pool:
                data = list(pool.map(lambda each: self._fetch(*each), merged))
        else:
            data = [self._fetch(*each) for each in merged]
        for (file, start, _), part in zip(merged, data, strict=True):
            self._starts[file][0].append(start)
            self._starts[file][1].append(part)

    def _fetch(self, file: int, start: int, stop: int) -> bytes:
        buffer = bytearray(stop - start)
        self._sources[file].readv(start, [memoryview(buffer)])
        return bytes(buffer)

    def read(self, file: int, start: int, nbytes: int) -> bytes:
        """Return a byte range from the prefetched bytes, or read it from the file."""
        starts, parts = self._starts[file]
        at = bisect_right(starts, start) - 1
        if at >= 0 and start + nbytes <= starts[at] + len(parts[at]):
            return parts[at][start - starts[at] : start - starts[at] + nbytes]
        return self._fetch(file, start, start + nbytes)
