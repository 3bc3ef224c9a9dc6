"""One load from URI to tensors: open, plan, choose places and threads, run, report.

In: a URI and options. Out: `(name, tensor)` pairs in file order, then a `Report`.
Not here: the public verbs (`load`), live parameters (`into`), several ranks (`group`).

    open_weights -> rows, boxes -> LoadPlan -> (place, pool, checker) -> LoadRun -> slabs -> tensors
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.config import Settings
from penstock.engine.check import Checker, Expected, HostChecker
from penstock.engine.place import Bytes, HostPlace, Place
from penstock.engine.run import LoadRun
from penstock.engine.trace import Trace
from penstock.errors import BudgetTooSmall, ConfigError, IntegrityError, PlanError
from penstock.loader.progress import Progress
from penstock.loader.report import FilePath, Phases, Report
from penstock.loader.tensor import as_tensor, as_tensors, torch_dtype, torch_shape
from penstock.memory.staging import Registrar, StagingPool
from penstock.plan.schedule import LoadPlan, plan_load
from penstock.storage import Source, is_remote, local_path
from penstock.storage.files import FileSource, MappedFile
from penstock.storage.manifest import Names, Uris, WeightSet, open_weights
from penstock.storage.manifest_file import leaves_of
from penstock.storage.objects import FETCH_THREADS as REMOTE_FETCH_THREADS
from penstock.storage.uring import Uring, refusal
from penstock.types import MIB, Box, DType, Manifest, TensorTable

Boxes = Mapping[str, Box] | Callable[[str, tuple[int, ...]], Box | None] | None
"""Regions wanted, by tensor name, or asked of a function of name and shape; None: all of every tensor."""

MIN_CHUNK_BYTES = 64 << 10
"""Below this a read costs more in system calls and Python than in bytes. Source: docs/tuning.md."""

MAX_GAP_BYTES = 64 << 10
"""Unwanted bytes read rather than skipped between two wanted ones, in a local file: about what one more call costs."""

MAX_GAP_REMOTE_BYTES = MIB
"""The same for an object store, where a request costs a round trip."""

PAGE_BYTES = 4096
"""Reads are aligned to this for direct I/O. Source: statx(2) STATX_DIOALIGN of today's devices is at most this."""

MAX_LOCAL_READS = 12
"""Reads of local files under way at once into a device's staging: 12-14 x 8 MiB come nearest the link (53 of 55.5).
Source: benchmarks/results/h200x1_202611/load.md, "Why goals are missed"."""

MAX_GROUP_THREADS = 6
"""The same where several ranks of one host read at once; 8 made no difference.
Source: benchmarks/results/h200x4_202611/load.md."""

SPARE_BUFFERS = 8
"""Staging buffers beyond the one that each reader fills: what waits for the device or is being copied."""

WARM_ABOVE_BYTES = 1 << 30
"""Weight sets on local files from here on have their staging touched and pinned ahead: it takes some 10 ms."""

WARM_THREADS = 4
"""Threads that touch and pin staging ahead of its first use; more of them only wait for the address space's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a caller may ask of any load; see `penstock.load`."""

    device: torch.device
    names: Names = None
    boxes: Boxes = None
    verify: bool | None = None
    copy: bool | None = None
    storage_options: Mapping[str, str] | None = None
    progress: bool | None = None
    trace: str | os.PathLike[str] | None = None


Batch = tuple[Sequence[str], list[torch.Tensor]]
"""Names and their tensors, side by side."""


class Session:
    """One load. A context manager; leaving it drains and frees everything but what was given away."""

    def __init__(self, uri: Uris, options: Options, settings: Settings, *, in_group: bool = False) -> None:
        self.options, self.settings = options, settings
        self.local_world_size = 1
        """Processes that read on this host at the same time, as part of the same load."""
        self._peak_staging_bytes = 0
        self.phases = Phases()
        self.trace = Trace(enabled=options.trace is not None)
        self.is_remote = False
        self._pool: StagingPool | None = None
        if options.device.type == "cuda" and not in_group and _local_nbytes(uri) > WARM_ABOVE_BYTES:
            # Headers are read while staging is touched and pinned.
            from penstock.engine.place_cuda import CudaRegistrar

            self.open_pool(CudaRegistrar(options.device)).warm(WARM_THREADS)
        try:
            self.weights: WeightSet = open_weights(
                uri, settings=settings, storage_options=options.storage_options, names=options.names
            )
        except BaseException:
            self._close_pool()
            raise
        self.is_remote = any(is_remote(source.uri) for source in self.weights.sources)
        self.run: LoadRun | None = None
        self.plan: LoadPlan | None = None
        self._mapped: list[MappedFile] = []
        self.ring_refusal = ""
        self.verified = False
        self.why = ""

    @property
    def manifest(self) -> Manifest:
        """Of the tensors asked for."""
        return self.weights.manifest

    def close(self) -> None:
        """Drain, free, close. Idempotent."""
        if self.run is not None:
            self.run.close()
        self._close_pool()
        for mapped in self._mapped:
            mapped.close()
        self.weights.close()

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.cancel()
            # Unpinning takes milliseconds that the caller need not wait for; the thread is joined at exit.
            threading.Thread(target=self._pool.close, name="penstock-unpin").start()
            self._peak_staging_bytes, self._pool = self._pool.peak_bytes, None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- planning

    @property
    def chunk_bytes(self) -> int:
        """Largest read and size of a staging buffer. BudgetTooSmall when `memory_bytes` cannot hold four."""
        wanted = self.settings.chunk_bytes
        if self.local_world_size > 1 and self.options.device.type == "cuda":
            wanted //= 2  # so that the staging of all ranks fits the processor's cache
        chunk = min(wanted, self.settings.memory_bytes // 4) // PAGE_BYTES * PAGE_BYTES
        if chunk < MIN_CHUNK_BYTES:
            raise BudgetTooSmall(
                f"memory_bytes={self.settings.memory_bytes} leaves chunks of {chunk} bytes",
                minimum_bytes=4 * MIN_CHUNK_BYTES,
            )
        return chunk

    def table(self) -> TensorTable:
        """The tensors asked for in file order, the order of the plan. PlanError if torch cannot hold one of them."""
        table = self.manifest.tensors
        order = np.lexsort((table.offset, table.file_index))
        if not (order == np.arange(len(order))).all():
            table = table.take(order.tolist())
        for dtype in set(table.dtypes):
            torch_dtype(dtype)
        if DType.F4 in table.dtypes:
            for dtype, shape in zip(table.dtypes, table.shapes, strict=True):
                torch_shape(dtype, shape)
        return table

    def boxes(self, table: TensorTable) -> tuple[Box | None, ...]:
        """The region wanted of each row. PlanError for a box of a tensor that is not there."""
        boxes = self.options.boxes
        if boxes is None:
            return (None,) * len(table)
        if callable(boxes):
            return tuple(boxes(name, shape) for name, shape in zip(table.names, table.shapes, strict=True))
        unknown = sorted(set(boxes) - set(table.names))
        if unknown:
            raise PlanError(f"boxes for tensors that are not there: {', '.join(unknown[:5])}")
        return tuple(boxes.get(name) for name in table.names)

    def make_plan(
        self, table: TensorTable, boxes: Sequence[Box | None], *, pack: bool, exact: bool, chunk_bytes: int = 0
    ) -> LoadPlan:
        """Plan the rows of `table` (in file order).

        Args:
            table: rows wanted.
            boxes: region of each, or None.
            pack: see `plan_load`.
            exact: read no byte that is not wanted (the destination itself is read into).
            chunk_bytes: largest read, at least `self.chunk_bytes`.
        """
        gap = MAX_GAP_REMOTE_BYTES if self.is_remote else MAX_GAP_BYTES
        self.plan = plan_load(
            table,
            file_nbytes=[source.nbytes for source in self.weights.sources],
            chunk_bytes=max(chunk_bytes, self.chunk_bytes),
            boxes=boxes,
            pack=pack,
            align_bytes=1 if exact or self.is_remote else PAGE_BYTES,
            max_gap_bytes=0 if exact else min(gap, self.chunk_bytes),
        )
        return self.plan

    # -- running

    def maps_files(self, boxes: Sequence[Box | None]) -> bool:
        """Whether the tensors can be views of mapped files: on the CPU, local, whole, and no copy asked for."""
        local = all(isinstance(source, FileSource) for source in self.weights.sources)
        return self.options.device.type == "cpu" and not self.options.copy and local and boxes.count(None) == len(boxes)

    def open_mappings(self) -> bool:
        """Map the files; whether all are in the page cache already."""
        files = self.weights.sources
        self._mapped = [MappedFile(local_path(source.uri), identity=source.identity) for source in files]
        return all(mapped.is_ready() for mapped in self._mapped)

    def map_files(self, plan: LoadPlan, *, is_ready: bool) -> tuple[HostPlace, list[Source]]:
        """A place whose slabs are views of the mapped files, and sources that bring them in."""
        first = np.flatnonzero((plan.row_slab >= 0) & (plan.row_offset == 0))
        slabs: list[Bytes | None] = [
            np.frombuffer(self._mapped[file].view(offset, nbytes), np.uint8)
            for file, offset, nbytes in zip(
                plan.table.file_index[first].tolist(),
                plan.table.offset[first].tolist(),
                plan.slab_nbytes.tolist(),
                strict=True,
            )
        ]
        return HostPlace(plan.slab_nbytes.tolist(), slabs), [_MappedSource(mapped, is_ready) for mapped in self._mapped]

    def open_pool(self, registrar: Registrar | None) -> StagingPool:
        """Make the staging pool, as large as keeps readers and device busy."""
        enough = (self._num_fetch_threads() + SPARE_BUFFERS) * self.chunk_bytes
        self._pool = StagingPool(min(self.settings.memory_bytes, enough), self.chunk_bytes, registrar=registrar)
        return self._pool

    def begin(
        self,
        plan: LoadPlan,
        place: Place,
        *,
        sources: Sequence[Source] | None = None,
        checker: Checker | None = None,
        reads: Sequence[int] | None = None,
        window_bytes: int = 0,
    ) -> LoadRun:
        """Start the run of `plan` into `place`; the session closes it."""
        direct = place.direct(0, 0, 0) is not None if len(plan.slab_nbytes) else True
        if self._pool is None and not (direct and bool(plan.covered().all())):
            self.open_pool(place.registrar)
        self.run = LoadRun(
            plan,
            self.weights.sources if sources is None else sources,
            place,
            pool=self._pool,
            num_fetch_threads=self._num_fetch_threads(),
            ring=self._open_ring() if self._pool is not None else None,
            stall_s=self.settings.stall_s,
            trace=self.trace,
            checker=checker,
            reads=reads,
            window_bytes=window_bytes,
        )
        self.run.start()
        return self.run

    def _open_ring(self) -> Uring | None:
        """A ring for files in the page cache; None where the kernel refuses one, which `ring_refusal` then says."""
        self.ring_refusal = refusal()
        if self.is_remote or self.ring_refusal or not self.settings.io_uring:
            return None
        try:
            return Uring(2 * self._num_fetch_threads())
        except OSError as error:
            self.ring_refusal = f"io_uring: {error.strerror}"
            return None

    def _num_fetch_threads(self) -> int:
        if self.settings.fetch_threads:
            return self.settings.fetch_threads
        if self.is_remote:
            return REMOTE_FETCH_THREADS
        cores = len(os.sched_getaffinity(0))
        if self.options.device.type == "cpu":
            return min(4, max(2, cores))
        if self.local_world_size > 1:
            return max(2, min(MAX_GROUP_THREADS, cores * 3 // 8 // self.local_world_size))
        return max(2, min(MAX_LOCAL_READS, cores * 3 // 4))

    def checker(self, plan: LoadPlan, place: Any) -> Checker | None:
        """What checks slabs of `place`, or None with `why` saying why not.

        Raises:
            IntegrityError: `verify=True` was asked for and there is nothing to verify against.
        """
        manifest, asked = self.manifest, self.options.verify
        if asked is False:
            self.why = "verify=False"
            return None
        if manifest.leaves is None:
            self.why = self.weights.why_unverified or "no digests"
            if asked:
                raise IntegrityError(f"verify=True, but {self.why}", hint="write one with `penstock manifest URI`")
            return None
        regions = len(plan.boxes) - plan.boxes.count(None)
        row_of = dict(zip(manifest.tensors.names, range(len(manifest.tensors)), strict=True))
        rows = np.fromiter(map(row_of.__getitem__, plan.table.names), np.int64, len(plan.table))
        leaves = leaves_of(manifest, rows)
        assert leaves is not None
        expected = Expected(plan, leaves, manifest.leaf_bytes)
        where = "CPU" if self.options.device.type == "cpu" else "device"
        self.verified = regions == 0
        self.why = f"{len(leaves)} leaf digests compared on the {where}"
        if regions:
            self.why = f"{regions} tensors are regions, which have no digests; the others were compared"
        if self.options.device.type == "cuda":
            from penstock.engine.check_cuda import CudaChecker

            return CudaChecker(expected, place.slab, self.options.device)
        return HostChecker(expected, lambda slab: memoryview(place.slab(slab)))

    # -- results

    def batches(self, plan: LoadPlan, indices: Iterable[int], memory: Callable[[int], Any]) -> Iterator[Batch]:
        """Names and tensors of each slab's rows, with the empty rows before them; file order; owned by the caller.

        Args:
            plan: of the slabs.
            indices: every slab, in order.
            memory: the slab's bytes, as a flat uint8 tensor or array.
        """
        table, row = plan.table, 0
        shapes: Sequence[tuple[int, ...]] = table.shapes
        if plan.boxes.count(None) < len(plan.boxes):
            both = zip(table.shapes, plan.boxes, strict=True)
            shapes = [shape if box is None else box.shape for shape, box in both]
        held = np.flatnonzero(plan.row_slab >= 0)
        first, last = np.zeros((2, len(plan.slab_nbytes)), np.int64)
        last[plan.row_slab[held]] = held + 1
        first[plan.row_slab[held[::-1]]] = held[::-1]
        starts, stops = first.tolist(), last.tolist()
        offsets: list[int] = plan.row_offset.tolist()
        num_rows = len(table)

        def empties(begin: int, end: int) -> Batch:
            return table.names[begin:end], [self.empty(table.dtypes[i], shapes[i]) for i in range(begin, end)]

        for slab in indices:
            start, stop = starts[slab], stops[slab]
            if start > row:
                yield empties(row, start)
            at, found = slice(start, stop), memory(slab)
            raw = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
            del found
            if stop - start == 1:
                yield table.names[at], [as_tensor(raw, table.dtypes[start], shapes[start])]
            else:
                # Rows of no bytes between these make empty tensors too.
                yield table.names[at], as_tensors(raw, table.dtypes[at], shapes[at], offsets[at])
            del raw
            row = stop
        if row < num_rows:
            yield empties(row, num_rows)

    def empty(self, dtype: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of no bytes."""
        return torch.empty(torch_shape(dtype, shape), dtype=torch_dtype(dtype), device=self.options.device)

    def progress(self) -> Progress:
        """The bar the caller asked for."""
        wanted = self.settings.progress if self.options.progress is None else self.options.progress
        return Progress(wanted, self.weights.uri)

    def finish(self, *, num_tensors: int, nbytes: int, num_group_bytes: int = 0) -> Report:
        """Check that no source changed meanwhile, end every thread, save the trace, and report."""
        self.phases.enter("finish")
        for source in (*self.weights.sources, *self._mapped):
            if isinstance(source, FileSource | MappedFile):
                source.check_unchanged()
        run = self.run
        if run is not None:
            run.close()
        if self.options.trace is not None:
            self.trace.save(self.options.trace)
        paths = run.paths if run is not None else {}
        files = [
            FilePath(
                uri=self.weights.sources[file].uri,
                nbytes=nbytes_read,
                path=path,
                why="" if path in {"mmap", "direct"} else getattr(self.weights.sources[file], "why", ""),
            )
            for (file, path), nbytes_read in sorted(paths.items())
        ]
        if num_group_bytes:
            files.append(FilePath(uri=self.weights.uri, nbytes=num_group_bytes, path="group", why=""))
        cuda = self.options.device.type == "cuda"
        phases = self.phases.stop()
        return Report(
            uri=self.weights.uri,
            device=str(self.options.device),
            num_tensors=num_tensors,
            nbytes=nbytes,
            read_bytes=sum(paths.values()),
            wall_s=sum(phases.values()),
            phases=phases,
            busy_s=self.trace.busy_s(),
            peak_staging_bytes=self._pool.peak_bytes if self._pool is not None else self._peak_staging_bytes,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            peak_device_bytes=torch.cuda.max_memory_allocated(self.options.device) if cuda else 0,
            files=tuple(files),
            verified=self.verified,
            why=self.why,
            revision=self.manifest.revision,
        )


class _MappedSource:
    """A mapped file as a source whose bytes are already where they go: reading is bringing them in."""

    def __init__(self, mapped: MappedFile, is_ready: bool) -> None:
        self._mapped, self._is_ready = mapped, is_ready
        self.uri, self.nbytes, self.identity = mapped.uri, mapped.nbytes, mapped.identity

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`; `buffers` are views of this very range."""
        if not self._is_ready:
            self._mapped.prefetch(offset, sum(buffer.nbytes for buffer in buffers))
        return "mmap"

    def close(self) -> None:
        """The session closes the mapping."""


def resolve_device(device: str | int | torch.device) -> torch.device:
    """`"cuda"` gets the current index.

    Raises:
        ConfigError: torch does not know the device, or the device is not there.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{device!r} is not a device: {error}") from error
    if found.type not in {"cpu", "cuda"}:
        raise ConfigError(f"device {found} is not supported", hint='use "cpu", "cuda" or "cuda:N"')
    if found.type == "cuda":
        if not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device {found} is not there: {torch.cuda.device_count()} CUDA devices")
        found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    return found


def _local_nbytes(uri: Uris) -> int:
    """Bytes of the safetensors files a local path names, roughly and cheaply; 0 where that takes more than a look."""
    if not isinstance(uri, str | os.PathLike) or is_remote(str(uri)):
        return 0
    path = local_path(str(uri))
    try:
        if os.path.isfile(path):
            return os.path.getsize(path)
        with os.scandir(path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".safetensors"))
    except OSError:
        return 0
