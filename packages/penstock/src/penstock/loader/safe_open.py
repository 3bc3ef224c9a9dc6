"""safetensors' reading interface, `safe_open` and `load_file`, over any source that Penstock can open.

Local files on the CPU are mapped privately, one mapping for each tensor. Remote files are read through `read_ahead`.
Other bytes are read into new memory by the engine if they are large, and by the calling thread if they are small,
because the engine takes 0.3 ms to start its threads and 17 ms to pin 64 MiB for a GPU. If a program requests tensors
for a GPU one after another, the engine reads the next ones ahead (`tensors_ahead`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from msgspec.structs import replace

from penstock import interrupts, lifecycle
from penstock.config import REMOTE_FETCH_THREADS, Settings
from penstock.engine.place import place_on, registrar_of
from penstock.engine.trace import Trace
from penstock.errors import ConfigError, MissingExtra, NotFound, PenstockError, PlanError, SourceError, also
from penstock.loader.index import bounding_box, is_basic, numpy_index
from penstock.loader.read_ahead import ReadAhead
from penstock.loader.run import LoadRun, Readers
from penstock.loader.session import DEVICES_HINT, WARM_ABOVE_BYTES, WARM_THREADS, Intake
from penstock.loader.tensor import as_array, as_bytes, as_tensor, as_tensors, numpy_dtype, torch_dtype, torch_shape
from penstock.loader.tensors_ahead import TensorsAhead
from penstock.plan.schedule import LoadPlan, plan_load
from penstock.storage import Source, is_remote, local_path, open_source, text_of, timed
from penstock.storage.files import FileSource
from penstock.storage.mapped import MappedFile
from penstock.storage.network_files import NetworkFile, network_file_system
from penstock.storage.safetensors import Header, read_header
from penstock.types import MIB, Box, DType, TensorTable
from penstock.waits import start_thread

ENGINE_BYTES = 16 * MIB
"""Size from which the engine reads local files for the CPU. On two cores with cached files, 32 MiB take 20 ms in this
thread and 6 ms in the engine."""

ENGINE_CUDA_BYTES = 96 * MIB
"""The same size for a GPU. On an H200 with cached files, 96 MiB take 16 ms in this thread and 17 ms in the engine, and
128 MiB take 22 ms and 15 ms."""

NETWORK_READS = 8
"""Number of concurrent reads of a file on a network file system."""


def _read_here(plan: LoadPlan, source: Source, device: torch.device) -> list[torch.Tensor]:
    """Make the plan's reads in this thread, through one staging buffer if a read cannot go directly to its slab."""
    slabs = [_empty(nbytes, device) for nbytes in plan.slab_nbytes.tolist()]
    is_host = device.type == "cpu"
    direct = plan.covered().tolist() if is_host else [False] * plan.num_reads
    pinned = device.type == "cuda"
    staging = torch.empty(0 if all(direct) else plan.max_read_nbytes, dtype=torch.uint8, pin_memory=pinned)
    for read, is_direct in enumerate(direct):
        offset, nbytes = int(plan.read_offset[read]), int(plan.read_nbytes[read])
        segments = range(int(plan.seg_first[read]), int(plan.seg_first[read + 1]))
        if is_direct:
            source.readv(offset, [_target(plan, slabs, segment).numpy().data for segment in segments])
            continue
        source.readv(offset, [staging.numpy().data[:nbytes]])
        for segment in segments:
            rows, run, pitch = (int(column[segment]) for column in (plan.seg_rows, plan.seg_run, plan.seg_pitch))
            piece = staging.as_strided((rows, run), (pitch, 1), int(plan.seg_src[segment]))
            # The copy must block, because the next read fills the staging buffer again.
            _target(plan, slabs, segment).view(rows, run).copy_(piece)
    return slabs


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    # Numpy requests huge pages from 4 MiB on. Torch's memory takes a page fault every 4 KiB.
    return torch.from_numpy(np.empty(nbytes, np.uint8))


def _target(plan: LoadPlan, slabs: list[torch.Tensor], segment: int) -> torch.Tensor:
    nbytes = int(plan.seg_rows[segment] * plan.seg_run[segment])
    return slabs[int(plan.seg_slab[segment])].narrow(0, int(plan.seg_dst[segment]), nbytes)


_TORCH = {"pt", "torch", "pytorch"}
_NUMPY = {"np", "numpy"}
_BACKENDS = {"mmap", "pread"}

_GAP_BYTES = 64 * 1024
"""Largest gap in bytes between two runs of a slice that is read instead of skipped. At 1 GB/s it takes 65 us, less than
a round trip to an object store."""


class safe_open:
    """An open safetensors file, with the signature and behaviour of safetensors 0.8.

    Args:
        filename: a path, or the URI of an object (`s3://`, `gs://`, `az://`, `http(s)://`).
        framework: `pt` (`torch`, `pytorch`) or `np` (`numpy`).
        device: `cpu`, `cuda`, `cuda:1`, the index of a CUDA device, or a torch.device. Numpy supports the CPU only.
        backend: `mmap` maps a local file, and `pread` reads it into new memory. Both backends return the same tensors.
        storage_options: credentials and endpoint of an object store.
        memory_bytes: host memory for read-ahead and staging. None means `PENSTOCK_MEMORY_BYTES`.

    Raises:
        FormatError: the file is not a safetensors file, or its header contradicts its size.
        NotFound, PermissionDenied, SourceError: the file cannot be read.
        ConfigError: the framework, device or backend is unknown, or the object is used after its `with` block.

    Every error is also an instance of the class that safetensors or Python raises, such as `SafetensorError`,
    `FileNotFoundError`, `PermissionError` or `OSError`.

    Unlike in safetensors, F4 can be sliced (in the packed shape of `get_tensor`), numpy slices may be negative, empty
    or overlong, and numpy supports BF16 and F8 if `ml_dtypes` is installed.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str = "pt",
        device: str | int | torch.device | None = "cpu",
        *,
        backend: str = "mmap",
        storage_options: Mapping[str, str] | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        if not isinstance(framework, str):
            raise TypeError(f"argument 'framework': expected str, not {type(framework).__name__}")
        with _as_safetensors_raises():
            if framework not in _TORCH | _NUMPY:
                raise ConfigError(f"framework {framework} is invalid", hint='use "pt" or "np"')
            if backend not in _BACKENDS:
                raise ConfigError(f"backend {backend!r} is invalid", hint='use "mmap" or "pread"')
            place = _device(device)
            if framework in _NUMPY and place.type != "cpu":
                raise ConfigError(f"device {device} is not supported for framework numpy", hint="use `cpu`")
            try:
                name = text_of(filename)
            except ConfigError as error:
                raise also(error, TypeError) from None
            with interrupts.deferred():
                settings = Settings.read(memory_bytes=memory_bytes)
                self._file: _OpenFile | None = _OpenFile.open(
                    name, place, settings, mapped=backend == "mmap", storage_options=storage_options
                )
        self._numpy = framework in _NUMPY

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Existing slices stay usable, and the last slice closes the file.
        with interrupts.deferred():
            self._file = None

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._open().header.tensors.names)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of their bytes in the file."""
        return list(self._open().table.names)

    def metadata(self) -> dict[str, str] | None:
        """Return `__metadata__` from the header, or None if there is none."""
        return dict(self._open().header.metadata) or None

    def get_tensor(self, name: str) -> Any:
        """Return a whole tensor: a `torch.Tensor` on the device, or a `numpy.ndarray`.

        The caller owns the result, which is writable and stays valid after the `with` block. A mapped tensor is read
        when it is first touched.

        Raises:
            NotFound: the file has no tensor with this name.
            PlanError: the framework lacks this dtype (F6, and for numpy also F4, and F8 without `ml_dtypes`).
            MissingExtra: numpy needs `ml_dtypes` for BF16.
        """
        with _as_safetensors_raises():
            file = self._open()
            row = file.row(name)
            return file.array(row, ()) if self._numpy else file.tensor(row, ())

    def get_slice(self, name: str) -> SafeSlice:
        """Return a handle that reads parts of a tensor by index. Raise NotFound like `get_tensor`."""
        with _as_safetensors_raises():
            file = self._open()
            return SafeSlice(file, file.row(name), is_numpy=self._numpy)

    def get_tensors(self) -> dict[str, Any]:
        """Return every tensor by name, in the order of the file, like `get_tensor`."""
        with _as_safetensors_raises():
            file = self._open()
            if self._numpy:
                return {name: file.array(file.row(name), ()) for name in file.table.names}
            return file.tensors()

    def expect(self, names: Iterable[str]) -> None:
        """Announce the tensors that will be requested, in order, so that they are read ahead of the requests.

        Without this call, read-ahead follows requests in file order. Tensors that are skipped, requested in parts or in
        a different order are read too. The first request starts the reads. Thread-safe.

        Raises:
            NotFound: the file has no tensor with one of these names.
        """
        with _as_safetensors_raises():
            file = self._open()
            file.expect([file.row(name) for name in names])

    def _open(self) -> _OpenFile:
        if self._file is None:
            raise _compatible(ConfigError("file is closed", hint="use the file inside its `with` block"))
        return self._file


class SafeSlice:
    """A handle for one tensor in an open file, which is indexed like a tensor.

    The handle stays usable after the file's `with` block. For `pt`, `s[index]` equals `get_tensor(name)[index]` for
    every index that torch accepts. For `np` an index consists of integers, slices with a positive step and `...`. The
    caller owns the result, which on the CPU is a view of the mapping.
    """

    def __init__(self, file: _OpenFile, row: int, *, is_numpy: bool) -> None:
        self._file = file
        self._row = row
        self._numpy = is_numpy

    def get_shape(self) -> list[int]:
        """Return the shape in elements of the format. The last dim of an F4 tensor is twice as long as in torch."""
        return list(self._file.table.shapes[self._row])

    def get_dtype(self) -> str:
        """Return the dtype's name in the format, such as `BF16`."""
        return str(self._file.table.dtypes[self._row])

    def __getitem__(self, index: Any) -> Any:
        """Return the part that `index` selects.

        Raises:
            IndexError: the index does not fit the tensor, or `np` does not support its form (`IndexRefused`).
            PlanError, MissingExtra: like `safe_open.get_tensor`.
            SourceError: the bytes could not be read.
        """
        with _as_safetensors_raises():
            if self._numpy:
                return self._file.array(self._row, numpy_index(index, self._file.table.shapes[self._row]))
            return self._file.tensor(self._row, index)


def load_file(
    filename: str | os.PathLike[str], device: str | int | torch.device | None = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Return every tensor in a safetensors file by name, in file order, like `safetensors.torch.load_file`.

    The caller owns the tensors. On the CPU, tensors of a local file are mapped, and small neighbours share a mapping.

    Raises:
        PenstockError: see `safe_open`.
    """
    with safe_open(filename, framework="pt", device=device, backend=backend) as file:
        tensors: dict[str, torch.Tensor] = file.get_tensors()
    return tensors


class _OpenFile:
    """An open file with its header and source. Dropping the last reference closes the file."""

    def __init__(
        self, source: Source, header: Header, device: torch.device, settings: Settings, mapping: MappedFile | None
    ) -> None:
        self.source = source
        self.header = header
        self.device = device
        self._settings = settings
        self._mapping = mapping
        self._intake = Intake(settings, device)
        # A file on a network file system has round trips like an object.
        self._intake.is_remote = isinstance(source, ReadAhead) or is_remote(source.uri)
        # Allow one engine read at a time, because a run uses the whole staging pool.
        self._turn = threading.RLock()
        self._has_turn = False
        # The rows are in file order.
        self.table: TensorTable = header.tensors
        self._ahead: TensorsAhead | None = None
        if device.type == "cuda" and isinstance(source, FileSource):
            limit = settings.memory_bytes
            self._ahead = TensorsAhead(self.table, limit_bytes=limit, enough_bytes=ENGINE_CUDA_BYTES)
        self._rows = {name: row for row, name in enumerate(self.table.names)}
        _alive.add(self)

    @classmethod
    def open(
        cls,
        path: str,
        device: torch.device,
        settings: Settings,
        *,
        mapped: bool,
        storage_options: Mapping[str, str] | None,
    ) -> _OpenFile:
        with ExitStack() as opened:
            # Let Ctrl-C act at once, because opening a remote file may take until its deadlines.
            with interrupts.allow_interrupts() if is_remote(path) else nullcontext():
                source = _open_source(path, settings, storage_options, can_map=mapped and device.type == "cpu")
                opened.callback(source.close)
                if isinstance(source, ReadAhead):
                    # Let the engine make as many concurrent reads as the read-ahead.
                    settings = replace(settings, fetch_threads=source.num_reads)
                # Bypass the read-ahead, which would count the header as the first request of a run.
                file = source.source if isinstance(source, ReadAhead) else source
                header = read_header(timed(file, path, settings))
            mapping = None
            if mapped and device.type == "cpu" and isinstance(source, FileSource):
                mapping = MappedFile.open(local_path(path), state=source.state)
            opened.pop_all()
        return cls(source, header, device, settings, mapping)

    def __del__(self) -> None:
        # Ctrl-C between two of these calls would leave the source open.
        if not hasattr(self, "_intake") or lifecycle.is_ending():
            return
        if threading.current_thread().name.startswith("penstock-"):
            # A collection may run in a thread of the run, which cannot wait for its own end.
            owned = [each for each in (self._ahead, self._intake, self.source, self._mapping) if each is not None]
            start_thread(threading.Thread(target=_close_all, args=(owned,), name="penstock-close"), is_needed=False)
            return
        with interrupts.defer_in_finalizer():
            self.close()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._intake.close()
        self.source.close()
        if self._mapping is not None:
            self._mapping.close()

    def row(self, name: str) -> int:
        if not isinstance(name, str):
            raise TypeError(f"argument 'name': expected str, not {type(name).__name__}")
        try:
            return self._rows[name]
        except KeyError:
            hint = "`keys()` lists all names"
            raise NotFound(
                f"file does not contain tensor {name}", uri=self.source.uri, tensor=name, hint=hint
            ) from None

    def tensor(self, row: int, index: Any) -> torch.Tensor:
        """Return the part of a row that torch's `index` selects. An empty tuple selects the whole row."""
        dtype, shape = self.table.dtypes[row], self.table.shapes[row]
        kind, extent = torch_dtype(dtype), torch_shape(dtype, shape)
        if isinstance(index, tuple) and not index:
            if isinstance(self.source, ReadAhead) and self.device.type == "cpu" and self.table.nbytes[row]:
                start = int(self.table.offset[row])
                found = self.source.small(start, start + int(self.table.nbytes[row]))
                if found is not None:
                    # The allocator aligns the memory for every dtype.
                    return torch.frombuffer(bytearray(found), dtype=kind).view(extent)
            return as_tensor(self._whole(row), dtype, shape)
        if self._mapping is not None:
            return as_tensor(self._whole(row), dtype, shape)[index]
        basic = is_basic(index)
        if basic:
            # Raise torch's error for an invalid index before anything is read.
            torch.empty((), dtype=kind).expand(extent)[index]
        box, rest = bounding_box(index, extent)
        if dtype is DType.F4:
            # Torch packs two elements of F4 into one element.
            box = Box(start=(*box.start[:-1], 2 * box.start[-1]), stop=(*box.stop[:-1], 2 * box.stop[-1]))
        if box == Box.full(shape) and basic:
            return as_tensor(self._whole(row), dtype, shape)[rest]
        # Gather on the CPU, because devices lack gathers for some dtypes.
        slabs = self._slabs(self._plan([row], box), self.device if basic else torch.device("cpu"))
        return as_tensor(slabs[0], dtype, box.shape)[rest].to(self.device)

    def array(self, row: int, index: tuple[int | slice, ...]) -> np.ndarray[Any, Any]:
        dtype, shape = self.table.dtypes[row], self.table.shapes[row]
        _require_numpy(dtype)
        box, rest = (Box.full(shape), index) if self._mapping is not None else bounding_box(index, shape)
        whole = box == Box.full(shape)
        slab = self._whole(row) if whole else self._slabs(self._plan([row], box), self.device)[0]
        part = as_array(slab.numpy().data, dtype, box.shape)
        # With the ellipsis, an index with only integers returns a 0-d array and not a scalar.
        return part[(*rest, ...)]

    def expect(self, rows: Sequence[int]) -> None:
        if self._ahead is not None:
            with self._own_turn() as is_mine:
                if is_mine:
                    self._ahead.expect(rows)
        if isinstance(self.source, ReadAhead):
            starts, stops = self.table.offset[rows], self.table.offset[rows] + self.table.nbytes[rows]
            self.source.expect(zip(starts.tolist(), stops.tolist(), strict=True))

    def tensors(self) -> dict[str, torch.Tensor]:
        plan = self._plan(range(len(self.table)))
        slabs = self._slabs(plan, self.device)
        # Create the tensors slab by slab, because one call creates all tensors in a slab.
        rows: dict[int, list[int]] = {}
        for row, slab in enumerate(plan.row_slab.tolist()):
            rows.setdefault(slab, []).append(row)
        # Insert all names first, so that the result is in the order of the file.
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        tensors: dict[str, torch.Tensor] = dict.fromkeys(self.table.names, nothing)
        for slab, members in rows.items():
            part = plan.table.take(members)
            offsets = plan.row_offset[members].tolist()
            buffer = slabs[slab] if slab >= 0 else nothing
            tensors |= zip(part.names, as_tensors(buffer, part.dtypes, part.shapes, offsets), strict=True)
        return tensors

    def _whole(self, row: int) -> torch.Tensor:
        offset, nbytes = int(self.table.offset[row]), int(self.table.nbytes[row])
        if self._mapping is not None:
            return as_bytes(self._mapping.view(offset, nbytes))
        if self._ahead is not None and (found := self._read_ahead(self._ahead, row)) is not None:
            return found
        # A single read needs no plan. The read-ahead splits large reads.
        if nbytes <= self._intake.chunk_bytes or (isinstance(self.source, ReadAhead) and self.device.type == "cpu"):
            return self._read_run(offset, nbytes)
        return self._slabs(self._plan([row]), self.device)[0]

    def _read_ahead(self, ahead: TensorsAhead, row: int) -> torch.Tensor | None:
        with self._own_turn() as is_mine:
            if not is_mine:
                return None
            was_reading = ahead.is_reading
            found = ahead.take(row, self._plan, self._start_ahead)
            if was_reading and not ahead.is_reading:
                # Release the staging of a file that was read to its end, because the program may read other files now.
                self._intake.close()
            return found

    @contextmanager
    def _own_turn(self) -> Iterator[bool]:
        """Wait for the turn to read with the engine. Yield False if a signal handler has interrupted such a read."""
        with self._turn, interrupts.deferred():
            is_mine, self._has_turn = not self._has_turn, True
            try:
                yield is_mine
            finally:
                if is_mine:
                    self._has_turn = False

    def reset_after_fork(self) -> None:
        """Forget the lock and the staging of the parent in a forked child, which has none of the parent's threads."""
        self._turn = threading.RLock()
        self._has_turn = False
        self._intake.pool = None

    def _plan(self, rows: Sequence[int], box: Box | None = None) -> LoadPlan:
        # The plan needs a size for each file index in the table, and all indices refer to this file.
        sizes = (self.source.nbytes,) * (int(self.table.file_index.max(initial=0)) + 1)
        boxes = None if box is None or box == Box.full(self.table.shapes[rows[0]]) else [box]
        table = self.table.take(rows)
        return plan_load(
            table, file_nbytes=sizes, chunk_bytes=self._intake.chunk_bytes, boxes=boxes, max_gap_bytes=_GAP_BYTES
        )

    def _slabs(self, plan: LoadPlan, device: torch.device) -> list[torch.Tensor]:
        """Return the plan's slabs, from the mapping or from reads, or a single empty slab if the plan has no slabs."""
        if self._mapping is None:
            slabs = self._read(plan, device)
        else:
            # A slab starts at a row's offset in the file minus the row's offset in the slab.
            starts = np.zeros(len(plan.slab_nbytes), np.int64)
            has_bytes = plan.row_slab >= 0
            starts[plan.row_slab[has_bytes]] = plan.table.offset[has_bytes] - plan.row_offset[has_bytes]
            places = zip(starts.tolist(), plan.slab_nbytes.tolist(), strict=True)
            slabs = [as_bytes(self._mapping.view(start, nbytes)) for start, nbytes in places]
        return slabs or [torch.empty(0, dtype=torch.uint8, device=device)]

    def _read_run(self, offset: int, nbytes: int) -> torch.Tensor:
        run = _empty(nbytes, self.device)
        is_host = self.device.type == "cpu"
        # Pinned memory needs only one transfer to the device.
        staging = run if is_host else torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        if nbytes:
            self.source.readv(offset, [staging.numpy().data])
        return run if is_host else run.copy_(staging)

    def _read(self, plan: LoadPlan, device: torch.device) -> list[torch.Tensor]:
        """Read every range in `plan`. Return a filled `[nbytes]` uint8 tensor on `device` for each slab."""
        # Even two reads from a remote source use the engine, because their round trips overlap there.
        enough = ENGINE_CUDA_BYTES if device.type == "cuda" else ENGINE_BYTES
        if plan.num_reads <= 1 or (not self._intake.is_remote and int(plan.read_nbytes.sum()) < enough):
            return _read_here(plan, self.source, device)
        first, last = int(plan.read_offset[0]), int(plan.read_offset[-1] + plan.read_nbytes[-1])
        if isinstance(self.source, ReadAhead) and self.source.is_ahead(first, last):
            return _read_here(plan, self.source, device)
        with self._own_turn() as is_mine:
            # Reading ahead uses the whole staging pool, too.
            if is_mine and (self._ahead is None or not self._ahead.is_reading):
                return self._read_on_engine(plan, device)
        return _read_here(plan, self.source, device)

    def _read_on_engine(self, plan: LoadPlan, device: torch.device) -> list[torch.Tensor]:
        with self._open_run(plan, device) as run:
            place: Any = run.place
            run.start().wait(stall_s=self._settings.stall_s)
        slabs = map(place.take, range(len(plan.slab_nbytes)))
        return [as_bytes(slab) if device.type == "cuda" else as_bytes(slab.data).to(device) for slab in slabs]

    def _start_ahead(self, plan: LoadPlan, order: Sequence[int]) -> LoadRun:
        run = self._open_run(plan, self.device, window_bytes=self._settings.memory_bytes, order=order)
        try:
            run.start()
        except BaseException:
            run.close()
            raise
        return run

    def _open_run(
        self, plan: LoadPlan, device: torch.device, *, window_bytes: int = 0, order: Sequence[int] | None = None
    ) -> LoadRun:
        """Open a run of a plan into new memory of a device. See `LoadRun` for the arguments."""
        is_cuda = device.type == "cuda"
        if is_cuda:
            # Resolve the current device here, because the engine's threads may have a different current device.
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        on = device if is_cuda else torch.device("cpu")
        place: Any = place_on(on, plan.slab_nbytes.tolist(), window_bytes=window_bytes)
        # For other devices the bytes pass through host memory.
        staged = is_cuda or not bool(plan.covered().all())
        if staged and (self._intake.pool is None or self._intake.pool.is_cancelled):
            self._intake.close()
            pool = self._intake.open_pool(registrar_of(self.device))
            if is_cuda and plan.nbytes > WARM_ABOVE_BYTES:
                pool.warm(WARM_THREADS)
        # Bypass the read-ahead, because the engine reads concurrently and requests each byte once.
        source = self.source.source if isinstance(self.source, ReadAhead) else self.source
        readers = Readers(
            pool=self._intake.pool if staged else None,
            num_threads=min(self._intake.num_reads, plan.num_reads),
            ring=self._intake.open_ring() if staged else None,
        )
        return LoadRun(
            plan,
            [source] * (int(plan.read_file.max()) + 1),
            place,
            readers,
            stall_s=self._settings.stall_s,
            trace=Trace(enabled=False),
            window_bytes=window_bytes,
            order=order,
        )


_alive = lifecycle.release_after_fork(_OpenFile.reset_after_fork)


def _close_all(owned: Sequence[TensorsAhead | Intake | Source | MappedFile]) -> None:
    for each in owned:
        each.close()


def _open_source(path: str, settings: Settings, storage_options: Mapping[str, str] | None, *, can_map: bool) -> Source:
    """Open a file. Use read-ahead if each read is a round trip to a server."""
    if not is_remote(path) and network_file_system(local_path(path)):
        file = NetworkFile.open(local_path(path))
        # A file in the page cache is as fast as a local file.
        if not (can_map and file.is_cached()):
            num_reads = settings.fetch_threads or NETWORK_READS
            return ReadAhead(file, settings, num_reads=num_reads, stall_s=settings.stall_s)
        file.close()
    source = open_source(path, settings=settings, storage_options=storage_options)
    if not is_remote(source.uri):
        return source
    return ReadAhead(source, settings, num_reads=settings.fetch_threads or REMOTE_FETCH_THREADS)


def _device(device: str | int | torch.device | None) -> torch.device:
    """Return the device for safetensors' argument. Raise ConfigError if the device is unknown or has no memory."""
    if device is None:
        return torch.device("cpu")
    try:
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device} is invalid", hint=DEVICES_HINT) from error
    if place.type == "meta":
        raise ConfigError(f"device {device} is invalid", hint="use `inspect` for shapes. Meta tensors have no bytes")
    return place


def _require_numpy(dtype: DType) -> None:
    try:
        numpy_dtype(dtype)
    except MissingExtra as error:
        if dtype is DType.BF16:
            raise also(error, TypeError) from error.__cause__
        # No built-in class is both an ImportError and an AttributeError.
        raise also(PlanError(error.message, hint=error.hint), AttributeError) from error.__cause__
    except PlanError as error:
        raise also(error, AttributeError) from None


@contextmanager
def _as_safetensors_raises() -> Iterator[None]:
    """Raise errors from the block as classes that derive from safetensors' classes too. See `_compatible`."""
    try:
        yield
    except PenstockError as error:
        raise _compatible(error) from error.__cause__
    except AssertionError as error:
        if not str(error).startswith("Torch not compiled with CUDA"):
            raise
        hint = 'use device="cpu", or install torch for CUDA'
        raise also(ConfigError("this build of torch has no CUDA", hint=hint), RuntimeError, AssertionError) from error


def _compatible(error: PenstockError) -> PenstockError:
    """Return `error` as an instance of its class and of safetensors' class for the same fault."""
    others: list[type[Exception]] = []
    # Callers can catch safetensors' class only if the program has imported safetensors.
    theirs = getattr(sys.modules.get("safetensors"), "SafetensorError", None)
    if theirs is not None:
        others.append(theirs)
    if isinstance(error, SourceError) and error.tensor is None:
        others.append(OSError)
    return also(error, *others)
