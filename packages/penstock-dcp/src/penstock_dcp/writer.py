"""`CheckpointWriter` implements torch DCP's `StorageWriter` for verified safetensors checkpoints, published atomically.

    plans of all ranks -> one table of whole tensors: every byte has its place before any rank writes
    each rank: its parts --pwrite, digest--> .DST.penstock-dcp-NUMBER/
    coordinator: digests that are missing, manifest --rename--> DST/

The files hold whole tensors instead of each rank's parts, so `penstock.load`, transformers and torch's readers can read
them too. `storage.output` creates and publishes the directory, and `staging` makes the copies for an asynchronous save.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from msgspec import structs
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from penstock.config import Settings
from penstock.digest import leaf
from penstock.errors import ConfigError, FormatError, PenstockError, PlanError
from penstock.loader.tensor import dtype_of
from penstock.plan.layout import box_runs
from penstock.storage import is_remote, text_of
from penstock.storage.locate import SIDECAR
from penstock.storage.manifest import encode
from penstock.storage.output import OutputSet, publish_remote, require_free_remote
from penstock.storage.place import DestinationClaim, OutputPlace, remove_dead
from penstock.storage.safetensors import encode_header, require_name
from penstock.types import GIB, MIB, U64, Box, DType, FileEntry, Manifest, TensorTable
from penstock.waits import Threads
from penstock_dcp import distcp
from penstock_dcp.checkpoint import BYTES_KEY, PATHS_KEY
from penstock_dcp.pickled import PLAIN, archive, decode, plain
from penstock_dcp.staging import Staging
from penstock_dcp.stored import bytes_of, refusal

VALUES_NAME = "values.safetensors"
"""Name of the file that contains the planner's table, and all values that are not tensors."""

MAX_FILE_BYTES = 5 * GIB
"""Maximum file size in bytes. A larger tensor gets a file of that tensor only. Source: the former default of
transformers' save_pretrained, 5 GB, which suits model hubs."""

MAX_VALUE_BYTES = 64 * MIB
"""Maximum size of a value in bytes. Values reach the coordinator through a DCP collective."""

_PIECE_BYTES = 8 * MIB
"""Number of bytes to digest and write at once: a multiple of the leaf size, and small enough for a core's cache."""

_TOKEN = "dcp-"
"""Prefix of a staging directory's token. See `OutputPlace.staging`."""

_PLAIN_HINT = "save numbers, texts, bytes, and lists, tuples, dicts and sets of them, or tensors"
_INDEX_NAME = "model.safetensors.index.json"
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Target:
    """The destination of a save, which every rank receives with its plan."""

    directory: str
    table: TensorTable
    body_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """The result of writing an item: a tensor's digests of complete leaves by leaf number, or a value's archive."""

    leaves: dict[int, int]
    value: bytes | None = None


class CheckpointWriter(Staging, StorageWriter):
    """Writes a checkpoint for `torch.distributed.checkpoint.save` and `async_save`.

    Args:
        uri: a directory, or a prefix in an object store. If `uri` is None, pass the URI to DCP as `checkpoint_id`.
        replace: whether to replace an existing checkpoint at `uri`. The old checkpoint stays until the new one is
            complete.
        scratch: for an object store, a directory shared by all ranks, where files are written before the upload. The
            default is the system's temporary directory, which works only if all ranks are on one host.
        staging_bytes: limit in bytes for the copies of an asynchronous save in host memory, or None for no limit.
            Tensors that exceed the limit are written before `async_save` returns.
        storage_options: credentials and endpoint for an object store.

    All ranks need access to the directory on a shared file system. A rename publishes the checkpoint after all parts
    were written and digested. A save that fails or is killed leaves the previous checkpoint in place.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        replace: bool = False,
        scratch: str | os.PathLike[str] | None = None,
        staging_bytes: int | str | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = Settings.read()
        Staging.__init__(self, staging_bytes, self._settings.stall_s)
        # In this class `run/step-0` is a path, although `load` would interpret it as a repository name.
        self._uri = None if uri is None else text_of(uri)
        self._replace = replace
        self._scratch = scratch
        self._storage_options = storage_options
        self._target: _Target | None = None
        self._claim: DestinationClaim | None = None
        self._place: Path | None = None
        self.revision = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageWriter.reset`."""
        if checkpoint_id is not None:
            self._uri = text_of(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """Return the URI."""
        return self._uri

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See `StorageWriter.validate_checkpoint_id`."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def storage_meta(self) -> StorageMeta | None:
        """See `StorageWriter.storage_meta`."""
        return StorageMeta(checkpoint_id=self._uri)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter.set_up_storage_writer`."""
        self.begin(threading.current_thread())
        if not kwargs.get("use_collectives", True):
            raise ConfigError("CheckpointWriter needs DCP's collectives", hint="save without use_collectives=False")
        self._target = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check names, dtypes and layouts before anything is written.

        Raise PlanError if safetensors cannot store an item.
        """
        for item in plan.items:
            require_name(item.index.fqn, uri=self._uri)
            if item.tensor_data is not None:
                _dtype_of(item)
                layout = item.tensor_data.properties.layout
                if layout is not torch.strided:
                    raise refusal(f"the layout is {layout}", item.index.fqn)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign every tensor to a file and an offset, and create the files in a hidden directory.

        DCP calls this on the coordinator.

        Raises:
            ConfigError: the destination already exists.
            DiskFull, DestinationError: the files cannot be created.
        """
        if self._uri is None:
            raise ConfigError("the writer has no URI", hint="pass uri= or save(checkpoint_id=)")
        # Discard an unfinished save. DCP does not tell the coordinator if the previous save failed on a different rank.
        self._discard()
        if is_remote(self._uri):
            require_free_remote(self._uri, settings=self._settings, storage_options=self._storage_options)
            if self._replace:
                raise ConfigError("replace=True requires a directory", uri=self._uri, hint="write to another prefix")
            # Use the same name for each save to this prefix, so that the next save finds and removes the files of a
            # killed save.
            name = f"penstock-dcp-{blake3(self._uri.encode()).hexdigest(length=16)}"
            place = OutputPlace(
                path=Path(self._scratch or tempfile.gettempdir()).absolute() / name, keeps_directory=False
            )
        else:
            place = OutputPlace.at(self._uri)
            place.require_free(replace=self._replace)
        table, body_nbytes = _layout([item for plan in plans for item in plan.items])
        remove_dead(place, _TOKEN)
        # Use a new name, because ranks of a killed save may still write to the old files. Other users can access the
        # system's temporary directory, so restrict the mode there.
        staging, mode = place.staging(f"{_TOKEN}{secrets.token_hex(4)}"), 0o700 if is_remote(self._uri) else 0o777
        self._claim = DestinationClaim.open(place.path, staging, mode=mode, is_shared=True)
        self._place = place.path
        target = _Target(directory=str(staging), table=table, body_nbytes=body_nbytes)
        try:
            _output(target).create()
        except BaseException:
            self._discard()
            raise
        return [replace(plan, storage_data=target) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts and return their digests. See `StorageWriter.write_data`."""
        target: _Target = plan.storage_data
        self._target = target
        rows = {name: row for row, name in enumerate(target.table.names)}
        out = _output(target)
        try:
            out.open()
            # First write the tensors in the caller's memory, because training waits for these writes.
            items = sorted(plan.items, key=lambda item: not self._is_live(planner, item))
            first_staged = sum(self._is_live(planner, item) for item in items)

            def write(item: WriteItem) -> WriteResult:
                written = _value(item, planner) if item.type is WriteItemType.BYTE_IO else None
                if written is None:
                    row = rows[item.index.fqn]
                    written = _write_tensor(out, row, item, planner.resolve_data(item))
                return WriteResult(index=item.index, size_in_bytes=_nbytes(item), storage_data=written)

            with Threads(min(4, len(os.sched_getaffinity(0))), "penstock-save", waits_for_calls=True) as pool:
                results = list(pool.map(write, items[:first_staged]))
                self.written_live.set()
                results += pool.map(write, items[first_staged:])
            out.sync()
        finally:
            out.close()
            self.release()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _is_live(self, planner: SavePlanner, item: WriteItem) -> bool:
        """Return whether an asynchronous save reads this item from the caller's memory."""
        if item.type is WriteItemType.BYTE_IO or not self.has_live:
            return False
        tensor = planner.resolve_data(item)
        return isinstance(tensor, torch.Tensor) and not self.owns(tensor)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Compute the missing digests, write the index and the manifest, and publish the checkpoint.

        DCP calls this on the coordinator.
        """
        target, uri = self._target, self._uri
        assert target is not None and uri is not None
        out = _output(target)
        try:
            out.open()
            leaves = _leaves(out, {r.index: r.storage_data for each in results for r in each})
            values = {
                result.index.fqn: result.storage_data.value
                for each in results
                for result in each
                if result.storage_data.value is not None
            }
            small = _small_files(out, metadata, values, leaves)
            self.revision = small.pop("revision").decode()
            if is_remote(uri):
                publish_remote(out, uri, small, settings=self._settings, storage_options=self._storage_options)
            else:
                assert self._place is not None
                out.publish(self._place, small, replace=self._replace)
        finally:
            out.close()
            # Either the directory was published, or the save has failed. No rank writes to it after the results were
            # gathered.
            self._discard()

    def _discard(self) -> None:
        """Remove the hidden directory if it was not published, and release its lock."""
        if self._claim is not None:
            shutil.rmtree(self._claim.staging, ignore_errors=True)
            self._claim.close()
            self._claim = None


def _output(target: _Target) -> OutputSet:
    return OutputSet(Path(target.directory), target.table, target.body_nbytes, _METADATA)


def _dtype_of(item: WriteItem) -> DType:
    assert item.tensor_data is not None
    try:
        dtype = dtype_of(item.tensor_data.properties.dtype)
    except PlanError as error:
        error.tensor = item.index.fqn
        raise
    if dtype is DType.F4:
        raise PlanError("F4 tensors cannot be saved", tensor=item.index.fqn, hint="view the tensors as torch.uint8")
    return dtype


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _layout(items: list[WriteItem]) -> tuple[TensorTable, tuple[int, ...]]:
    """Return the table of whole tensors with their files and offsets, and the size of each file's body."""
    tensors: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for item in items:
        if item.tensor_data is not None:
            tensors.setdefault(item.index.fqn, (_dtype_of(item), tuple(item.tensor_data.size)))
    for item in items:
        if item.tensor_data is None and item.index.fqn in tensors:
            raise PlanError("one rank has a tensor with this name, but another rank has a value", tensor=item.index.fqn)
    # Sort the tensors by decreasing element size, as safetensors' writers do, so that every tensor is aligned to its
    # element size.
    names = sorted(tensors, key=lambda name: (-tensors[name][0].bits, name))
    files: list[int] = [0]
    file_index, offsets, sizes = [], [], []
    for name in names:
        dtype, shape = tensors[name]
        nbytes = torch.Size(shape).numel() * dtype.bits // 8
        if files[-1] and files[-1] + nbytes > MAX_FILE_BYTES:
            files.append(0)
        file_index.append(len(files) - 1)
        offsets.append(files[-1])
        sizes.append(nbytes)
        files[-1] += nbytes
    table = TensorTable(
        names=tuple(names),
        dtypes=tuple(tensors[name][0] for name in names),
        shapes=tuple(tensors[name][1] for name in names),
        file_index=np.array(file_index, np.int64),
        offset=np.array(offsets, np.int64),
        nbytes=np.array(sizes, np.int64),
    )
    return table, tuple(files)


def _write_tensor(out: OutputSet, row: int, item: WriteItem, tensor: torch.Tensor | io.BytesIO) -> _Written:
    """Write a part of a tensor to its offsets in the file that contains the whole tensor.

    Return the digests of the leaves that lie completely inside one run.
    """
    table = out.table
    data, size = item.tensor_data, int(table.nbytes[row])
    assert data is not None and isinstance(tensor, torch.Tensor)
    expected = (data.properties.dtype, tuple(data.chunk.sizes))
    if (tensor.dtype, tuple(tensor.shape)) != expected:
        fault = (
            f"the planner returned {tensor.dtype} {list(tensor.shape)}, its plan has {expected[0]} {list(expected[1])}"
        )
        raise PlanError(fault, tensor=item.index.fqn)
    stop = tuple(at + n for at, n in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
    box = Box(start=tuple(data.chunk.offsets), stop=stop)
    runs = box_runs(table.shapes[row], box, table.dtypes[row].bits)
    leaves: dict[int, int] = {}
    if not runs.nbytes:
        return _Written(leaves=leaves)
    raw = bytes_of(tensor, item.index.fqn)
    file, base = int(table.file_index[row]), int(table.offset[row])
    at = 0
    for first in runs.offsets.tolist():
        for step in range(runs.num_rows):
            start = first + step * runs.pitch_bytes
            _write_run(out, file, base, start, size, raw[at : at + runs.run_bytes], leaves)
            at += runs.run_bytes
    return _Written(leaves=leaves)


def _write_run(
    out: OutputSet, file: int, base: int, start: int, size: int, run: torch.Tensor, leaves: dict[int, int]
) -> None:
    """Write bytes `[start, start + run)` of a tensor that has `size` bytes and begins at offset `base` in its file."""
    at, stop = start, start + run.numel()
    while at < stop:
        # End the first piece at the next boundary, so that the pieces after it begin at leaf boundaries.
        end = min(stop, (at // _PIECE_BYTES + 1) * _PIECE_BYTES)
        # Copy one piece at a time from a device, so that only one piece is in host memory instead of the whole tensor.
        piece = run[at - start : end - start].cpu().numpy().data
        first = -(-at // leaf.LEAF_BYTES)
        last = -(-end // leaf.LEAF_BYTES) if end == size else end // leaf.LEAF_BYTES
        if last > first:
            digests = np.empty(last - first, np.uint64)
            leaf.leaf_digests(
                piece[first * leaf.LEAF_BYTES - at :][: (last - first) * leaf.LEAF_BYTES], leaf.LEAF_BYTES, digests
            )
            leaves.update(zip(range(first, last), digests.tolist(), strict=True))
        out.write(file, base + at, piece)
        at = end


def _value(item: WriteItem, planner: SavePlanner) -> _Written:
    """Serialize a value that is not a tensor to an archive. Raise PlanError if the value is not plain data."""
    name = item.index.fqn
    try:
        stored = planner.resolve_data(item)
    except PenstockError:
        raise
    except Exception as error:
        raise PlanError(f"a value is not plain data: {error}", tensor=name, hint=_PLAIN_HINT) from error
    assert isinstance(stored, io.BytesIO)
    try:
        value = plain(
            decode(distcp.member_of(stored.getvalue(), "data.pkl", uri=name, tensor=name), PLAIN, uri=name), uri=name
        )
    except FormatError as error:
        raise PlanError(f"a value is not plain data: {error.message}", tensor=name, hint=_PLAIN_HINT) from error
    raw = archive(value)
    if len(raw) > MAX_VALUE_BYTES:
        raise PlanError(f"a value has {len(raw)} bytes, above the limit of {MAX_VALUE_BYTES}", tensor=name)
    return _Written(leaves={}, value=raw)


def _leaves(out: OutputSet, written: Mapping[MetadataIndex, _Written]) -> U64:
    """Return the digests of all leaves. Read back and digest each leaf that several parts have written."""
    table = out.table
    counts = leaf.num_leaves(table.nbytes, leaf.LEAF_BYTES)
    firsts = (np.cumsum(counts) - counts).tolist()
    leaves = np.zeros(int(counts.sum()), np.uint64)
    known = np.zeros(len(leaves), bool)
    rows = {name: row for row, name in enumerate(table.names)}
    for index, part in written.items():
        if part.leaves:
            at = firsts[rows[index.fqn]] + np.fromiter(part.leaves.keys(), np.int64, len(part.leaves))
            leaves[at] = np.fromiter(part.leaves.values(), np.uint64, len(part.leaves))
            known[at] = True
    row_of = np.repeat(np.arange(len(table)), counts)

    def measure(number: int) -> None:
        row = int(row_of[number])
        start = (number - firsts[row]) * leaf.LEAF_BYTES
        buffer = memoryview(bytearray(min(leaf.LEAF_BYTES, int(table.nbytes[row]) - start)))
        out.read(int(table.file_index[row]), int(table.offset[row]) + start, buffer)
        leaf.leaf_digests(buffer, leaf.LEAF_BYTES, leaves[number:])

    with Threads(min(8, len(os.sched_getaffinity(0))), "penstock-digest", waits_for_calls=True) as pool:
        list(pool.map(measure, np.flatnonzero(~known).tolist()))
    return leaves


def _small_files(out: OutputSet, metadata: Metadata, values: Mapping[str, bytes], leaves: U64) -> dict[str, bytes]:
    """Return the contents of the small files by file name, and the revision under the key `revision`."""
    table = out.table
    paths = {name: list(path) for name, path in (metadata.planner_data or {}).items() if tuple(path) != (name,)}
    small: dict[str, bytes] = {}
    files = [
        FileEntry(name=name, nbytes=nbytes, metadata=_METADATA)
        for name, nbytes in zip(out.names, out.file_nbytes, strict=True)
    ]
    placed = structs.replace(table, offset=table.offset + np.array(out.data_offset, np.int64)[table.file_index])
    if values or paths:
        names = sorted(values)
        sizes = np.array([len(values[name]) for name in names], np.int64)
        starts = np.cumsum(sizes) - sizes
        about = _METADATA | {BYTES_KEY: json.dumps(dict.fromkeys(names, 0)), PATHS_KEY: json.dumps(paths)}
        entries = [
            (name, DType.U8, (int(n),), int(at), int(at + n)) for name, at, n in zip(names, starts, sizes, strict=True)
        ]
        header = encode_header(entries, about, uri=VALUES_NAME)
        small[VALUES_NAME] = raw = header + b"".join(values[name] for name in names)
        digests = np.zeros(int(leaf.num_leaves(sizes, leaf.LEAF_BYTES).sum()), np.uint64)
        at = 0
        for name in names:
            count = -(-len(values[name]) // leaf.LEAF_BYTES)
            leaf.leaf_digests(memoryview(values[name]), leaf.LEAF_BYTES, digests[at : at + count])
            at += count
        placed = TensorTable(
            names=(*placed.names, *names),
            dtypes=(*placed.dtypes, *[DType.U8] * len(names)),
            shapes=(*placed.shapes, *[(int(n),) for n in sizes]),
            file_index=np.append(placed.file_index, np.full(len(names), len(files), np.int64)),
            offset=np.append(placed.offset, starts + len(header)),
            nbytes=np.append(placed.nbytes, sizes),
        )
        leaves = np.append(leaves, digests)
        files.append(FileEntry(name=VALUES_NAME, nbytes=len(raw), metadata=about))
    if len(out.names) > 1:
        weight_map = {
            name: files[file].name for name, file in zip(placed.names, placed.file_index.tolist(), strict=True)
        }
        index = {"metadata": {"total_size": int(placed.nbytes.sum())}, "weight_map": weight_map}
        small[_INDEX_NAME] = json.dumps(index, indent=2).encode()
    revision = leaf.revision(placed, leaf.LEAF_BYTES, leaves)
    manifest = Manifest(
        files=tuple(files), tensors=placed, leaf_bytes=leaf.LEAF_BYTES, leaves=leaves, revision=revision
    )
    return {**small, SIDECAR: encode(manifest), "revision": revision.encode()}
