"""`CheckpointReader` implements torch DCP's `StorageReader` for every kind of storage that Penstock supports.

read items -> parts: a box of a stored item, with its targets
local files, host memory:  --copied, a part at a time (`local_files`)--> the planner's tensors, in place
others: a load plan for each device  --read, or staged-->               the planner's tensors, in place
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from penstock.arguments import require_type
from penstock.config import ReadSettings, Settings, parse_bytes
from penstock.engine.place import CudaPlace, HostPlace
from penstock.errors import FormatError, PenstockError, PlanError, without_frames
from penstock.lifecycle import paused_gc
from penstock.loader.into import marks_target
from penstock.loader.load import deferred_interrupts
from penstock.loader.report import LoadReport
from penstock.loader.session import LoadSession, ReadOptions
from penstock.loader.tensor import torch_dtype
from penstock.memory.targets import note_written, tied_targets
from penstock.storage import text_of
from penstock.storage.files import FileSource
from penstock.telemetry.journey import Journey
from penstock.types import Box
from penstock_dcp import distcp
from penstock_dcp.checkpoint import Checkpoint, CheckpointRow, open_checkpoint, table_of
from penstock_dcp.local_files import LocalFill, num_threads
from penstock_dcp.parts import FilePart, box_of
from penstock_dcp.pickled import PLAIN, archive, decode, plain

_MAX_GAP_BYTES = 128 << 10
"""Maximum gap in bytes that is read instead of skipped. Other ranks read the bytes between two parts of a rank. With
a gap of 1 MiB, as in `penstock.load`, each of two ranks read all bytes of a model with 300 tensors of 0.9 MiB, although
each rank needed only half of them."""


class _Unreadable(Metadata):
    """A substitute for the metadata of an unreadable checkpoint, which raises the read error when it is used.

    DCP catches an error from `read_metadata` and raises an AssertionError that contains only the text of the error.
    If the steps after `read_metadata` raise the error, the caller gets it unchanged in `CheckpointException.failures`.
    """

    def __init__(self, error: PenstockError) -> None:
        self.error = error

    @property
    def state_dict_metadata(self) -> Any:  # type: ignore[override]
        """Raise the error."""
        raise self.error


class CheckpointReader(StorageReader):
    """Reads a checkpoint in safetensors or DCP's own format for `torch.distributed.checkpoint.load`.

    Args:
        uri: a URI as for `penstock.load`, such as a directory, a file, an index, `s3://`, `hf://` or `http://`. If
            `uri` is None, pass the URI to DCP as `checkpoint_id`.
        verify: whether to compare whole tensors with their digests. Parts of tensors are never compared. See
            `penstock.load`.
        memory_bytes: limit in bytes for staging buffers in host memory. See `penstock.load`.
        storage_options: credentials and endpoint for an object store. See `penstock.load`.
        cast: whether to convert a stored tensor to the dtype of its target, as torch's readers do. If `cast` is
            False, a different dtype raises PlanError.

    Attributes:
        reports: reports of the last load, one for each device.

    Each rank reads the bytes for its own tensors once, directly into the tensors' memory. All ranks open and check all
    their files before the first byte of a tensor is read. DCP's `CheckpointException.failures` contains each rank's
    `PenstockError`.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        verify: bool | None = None,
        memory_bytes: int | str | None = None,
        storage_options: Mapping[str, str] | None = None,
        cast: bool = True,
    ) -> None:
        super().__init__()
        require_type("verify", verify, (bool, type(None)), "True, False or None")
        self._uri = None if uri is None else text_of(uri)
        self._verify = verify
        self._storage_options = storage_options
        self._settings = Settings.read(memory_bytes=None if memory_bytes is None else parse_bytes(memory_bytes))
        self._cast = cast
        self._checkpoint: Checkpoint | None = None
        self.reports: list[LoadReport] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageReader.reset`."""
        self.close()
        if checkpoint_id is not None:
            self._uri = text_of(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """Return the URI."""
        return self._uri

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See `StorageReader.validate_checkpoint_id`: any path or URI may be a checkpoint."""
        return isinstance(checkpoint_id, str | os.PathLike)

    # If this method accepted arbitrary keywords, DCP would request per-rank metadata after an error.
    def read_metadata(self) -> Metadata:
        """Open the checkpoint and return its metadata.

        If the metadata cannot be read, return an object that raises the error when it is used.
        """
        self.close()
        self.reports = []
        try:
            if self._uri is None:
                raise PlanError("the reader has no URI", hint="pass uri= or load(checkpoint_id=)")
            with paused_gc():
                checkpoint = open_checkpoint(self._uri, settings=self._settings, storage_options=self._storage_options)
        except PenstockError as error:
            return _Unreadable(without_frames(error))
        self._checkpoint = checkpoint
        checkpoint.metadata.storage_meta = StorageMeta(checkpoint_id=self._uri)
        return checkpoint.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """See `StorageReader.set_up_storage_reader`. Raise the error if `read_metadata` could not read the metadata."""
        if isinstance(metadata, _Unreadable):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Open and check every file that this rank needs.

        An error aborts the load on all ranks before any tensor is modified.
        """
        self._opened().locate(item.storage_index for item in plan.items)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader.prepare_global_plan`. Each rank reads the bytes for its own tensors."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan into the planner's tensors. Return a finished future.

        Raises:
            PenstockError: the read failed. If `mutated` is True, tensors were modified and must be filled again before
                use.
        """
        checkpoint = self._opened()
        # The planner may have changed the plan after `prepare_local_plan`.
        checkpoint.locate(item.storage_index for item in plan.items)
        parts = self._parts(checkpoint, plan.items, planner)
        values = [part for part in parts if part.row.is_bytes]
        with deferred_interrupts(None), paused_gc():
            # Read values other than tensors first, so that an error in a value leaves all tensors unchanged.
            if values:
                self._fill(checkpoint, torch.device("cpu"), values)
            decoded = [_value(part, checkpoint.uri) for part in values]
            tensors = [part for part in parts if not part.row.is_bytes]
            filled = [(part.row.name, target) for part in tensors for target in part.targets]
            tied_targets([name for name, _ in filled], [target for _, target in filled])
            for device in dict.fromkeys(part.device for part in tensors):
                try:
                    self._fill(checkpoint, device, [part for part in tensors if part.device == device])
                except PenstockError as error:
                    # Tensors on another device may already be filled.
                    error.mutated |= any(report.nbytes for report in self.reports[bool(values) :])
                    if error.mutated:
                        note_written(target for _, target in filled)
                    raise
            # Tell torch that the tensors have changed, because it cannot detect writes to their addresses.
            note_written(target for _, target in filled)
        for part, value in zip(values, decoded, strict=True):
            for item in part.items:
                planner.load_bytes(item, io.BytesIO(value))
        # Commit the tensors only after all tensors are complete and verified.
        for part in tensors:
            for item, target in zip(part.items, part.targets, strict=True):
                planner.commit_tensor(item, target)
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Close the files of the last load. Idempotent."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            checkpoint.close()

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            raise PlanError("the checkpoint is not open", hint="call read_metadata first, as DCP does")
        return self._checkpoint

    def _parts(self, checkpoint: Checkpoint, items: Sequence[ReadItem], planner: LoadPlanner) -> list[FilePart]:
        """Return the distinct boxes to read, each with the tensors that it fills."""
        parts: dict[tuple[str, int, int, Box | None, torch.device], FilePart] = {}
        for item in items:
            row = checkpoint.row(item.storage_index)
            box: Box | None = None
            target: torch.Tensor | None = None
            if (item.type is LoadItemType.BYTE_IO) != row.is_bytes:
                kinds = "a tensor", "another value"
                fault = f"the checkpoint has {kinds[row.is_bytes]} where the state has {kinds[not row.is_bytes]}"
                raise PlanError(fault, uri=checkpoint.uri, tensor=row.name)
            if not row.is_bytes:
                target = planner.resolve_tensor(item).detach()
                self._require_fit(checkpoint, item, row, target)
                box = box_of(item, row)
            device = torch.device("cpu") if target is None else target.device
            part = parts.setdefault(
                (row.name, row.file, row.offset, box, device), FilePart(row=row, box=box, items=[], targets=[])
            )
            part.items.append(item)
            if target is not None:
                part.targets.append(target)
        return list(parts.values())

    def _require_fit(self, checkpoint: Checkpoint, item: ReadItem, row: CheckpointRow, target: torch.Tensor) -> None:
        dtype = torch_dtype(row.dtype)
        if tuple(target.shape) != tuple(item.lengths):
            fault = f"the plan reads {list(item.lengths)} elements, but the planner's tensor has {list(target.shape)}"
            raise PlanError(fault, uri=checkpoint.uri, tensor=row.name)
        if target.device.type not in {"cpu", "cuda"}:
            hint = "allocate its memory first with module.to_empty(device=...)" if target.is_meta else None
            raise PlanError(f"cannot load into a tensor on the {target.device.type} device", tensor=row.name, hint=hint)
        if not self._cast and target.dtype != dtype:
            fault = f"the checkpoint has {dtype}, but the state has {target.dtype}"
            raise PlanError(fault, uri=checkpoint.uri, tensor=row.name, hint="pass cast=True to convert the tensor")

    def _fill(self, checkpoint: Checkpoint, device: torch.device, parts: list[FilePart]) -> None:
        """Run one load plan for the parts of one device."""
        # Sort the parts by file and offset, because the load plan reads its rows in this order.
        parts.sort(key=lambda part: (part.row.file, part.row.offset))
        rows = [part.row for part in parts]
        options = ReadOptions(
            device=device,
            # Pass an empty list instead of None, because None means that the whole weight set is read.
            names=[],
            verify=self._verify,
            settings=ReadSettings(storage_options=self._storage_options),
        )
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        local_ranks = min(num_ranks, torch.cuda.device_count()) if device.type == "cuda" else 1
        with (
            Journey("load", uri=checkpoint.uri, device=str(device)) as journey,
            LoadSession(
                checkpoint.uri,
                options,
                self._settings,
                local_world_size=max(1, local_ranks),
                weights=checkpoint.weights(rows),
            ) as session,
        ):
            journey.received = session.received
            session.phases.enter("plan")
            is_local = all(isinstance(source, FileSource) for source in session.weights.sources)
            # Do not mark the target for values other than tensors. These values are read into new memory, so an error
            # leaves the state unchanged.
            with nullcontext() if parts and parts[0].row.is_bytes else marks_target(session):
                if is_local and device.type == "cpu":
                    fill = LocalFill(session, parts)
                    session.phases.enter("move", lambda: (fill.moved_bytes, fill.nbytes))
                    fill.run(self._settings.fetch_threads or num_threads(num_ranks))
                    nbytes = fill.nbytes
                else:
                    nbytes = self._run(session, parts, device)
                report = session.finish(num_tensors=len(rows), nbytes=nbytes)
            journey.report = report
        self.reports.append(report)

    def _run(self, session: LoadSession, parts: list[FilePart], device: torch.device) -> int:
        """Read parts of remote files, or parts for a GPU, with the load engine. Return the number of bytes read."""
        is_host = device.type == "cpu"
        plan = session.make_plan(
            table_of([part.row for part in parts]),
            [part.box for part in parts],
            pack=False,
            exact=False,
            aligned=not is_host,
            max_gap_bytes=_MAX_GAP_BYTES,
        )
        owners = np.flatnonzero(plan.row_slab >= 0).tolist()
        slabs = [parts[row].memory() for row in owners]
        sizes: list[int] = plan.slab_nbytes.tolist()
        place: HostPlace | CudaPlace = (
            HostPlace(sizes, [None if slab is None else slab.numpy() for slab in slabs])
            if is_host
            else CudaPlace(device, sizes, slabs)
        )
        checker = session.checker(plan, place)
        # New slabs are allocated when reads reach them. The window limits how far reads may run ahead of the delivered
        # slabs.
        window = 0 if None not in slabs else self._settings.memory_bytes
        run = session.begin(plan, place, checker=checker, window_bytes=window)
        session.enter_move()
        for slab in run.slabs():
            memory = place.take(slab)
            parts[owners[slab]].deliver(memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory))
            del memory
        run.ticket.wait(stall_s=self._settings.stall_s)
        return plan.nbytes


def _value(part: FilePart, uri: str) -> bytes:
    """Return a new archive that contains the decoded value.

    DCP's planner executes the pickle in the archive that it receives, so it must not receive an archive from the
    checkpoint.
    """
    try:
        raw = distcp.member_of(part.data, "data.pkl", uri=uri, tensor=part.row.name)
        return archive(plain(decode(raw, PLAIN, uri=uri), uri=uri))
    except FormatError as error:
        error.tensor = part.row.name
        error.hint = error.hint or (
            "only numbers, texts, bytes, dtypes and lists, tuples, dicts and sets of them are read; for others use "
            "torch's reader, which runs what the pickle says, with a checkpoint that you trust"
        )
        raise
