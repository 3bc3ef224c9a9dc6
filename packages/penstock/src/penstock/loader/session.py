"""A load from URI to tensors: open, plan, choose places and threads, run, report."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from penstock import interrupts, lifecycle
from penstock.config import REMOTE_FETCH_THREADS, ReadSettings, Settings
from penstock.engine.fetch_ring import READS_AHEAD
from penstock.engine.place import Destination, registrar_of
from penstock.engine.trace import open_trace
from penstock.errors import BudgetTooSmall, ConfigError, IntegrityError
from penstock.lifecycle import Closeable
from penstock.loader.boxes import Boxes, Wanted, wanted_regions
from penstock.loader.progress import Progress, ProgressOption
from penstock.loader.regions import TensorRegions
from penstock.loader.report import FilePath, LoadReport
from penstock.loader.run import LoadRun, Readers
from penstock.loader.tensor import TensorMappings, as_tensors, torch_dtype, torch_shape
from penstock.memory import idle_pools
from penstock.memory.staging import Registrar, StagingPool
from penstock.phases import Phases
from penstock.plan.schedule import LoadPlan, plan_load
from penstock.storage import Digested, Source, is_remote
from penstock.storage.files import FileSource
from penstock.storage.io_uring import Uring, refusal
from penstock.storage.locate import texts_of
from penstock.storage.manifest import leaves_of
from penstock.storage.weight_set import Names, Uris, WeightSet, fills_files, nothing_to_verify, open_weights
from penstock.types import MIB, U64, Box, DType, Manifest, TensorTable

if TYPE_CHECKING:
    from penstock.engine.check import Checker

MIN_CHUNK_BYTES = 64 << 10
"""Smallest chunk. Smaller reads cost more in system calls and Python code than in bytes. Source: docs/tuning.md."""

PAGE_BYTES = 4096
"""Alignment of reads for direct I/O. Source: statx(2) STATX_DIOALIGN is at most this on current devices."""

MAX_LOCAL_READS = 11
"""Maximum number of concurrent reads of local files into staging for a device. With 14 reads, first loads on busy hosts
took a fifth longer. Source: benchmarks/results/h200x1_202611/load-history.md."""

MAX_GROUP_READS = 12
"""The same limit if several ranks on one host read together. Source: benchmarks/results/h200x4_202611/load.md."""

MAX_DIRECT_READS = 16
"""The same limit for a disk, which read 3.7 to 4.1 GB/s with 16 x 1 MiB in flight and 3.4 to 3.9 GB/s with 12 x 1 MiB.
Source: benchmarks/results/h200x1_202611/load-history.md, row c."""

DEVICE_CHUNKS = 2
"""Divisor of the chunk size for local files and a device, so that staged bytes stay in the CPU cache. Smaller chunks
cost more Python time than they save. Source: benchmarks/results/h200x1_202611/load-history.md."""

SPARE_BUFFERS = 6
"""Number of staging buffers for copies, in addition to the buffers of readers and of reads that wait for a worker."""

WARM_ABOVE_BYTES = 1 << 30
"""Size from which staging for local files is touched and pinned ahead, which takes about 10 ms."""

WARM_THREADS = 2
"""Number of threads that touch and pin staging ahead of its first use. A third thread does not help."""


class Intake:
    """The staging and the ring for one load, sized for its device and sources. `close` releases the pool.

    Attributes:
        is_remote: whether a source is on the network. The attribute must be set before the first read.
        local_world_size: number of processes on this host that read for the same load.
        ring_refusal: why the kernel refused a ring.
    """

    def __init__(self, settings: Settings, device: torch.device, local_world_size: int = 1) -> None:
        self._settings = settings
        self._device = device
        self.is_remote = False
        self.local_world_size = local_world_size
        self.ring_refusal = ""
        self.pool: StagingPool | None = None
        self._peak_bytes = 0

    @property
    def num_reads(self) -> int:
        """Return the number of concurrent reads, by threads or by the ring's workers."""
        if self._settings.fetch_threads:
            return self._settings.fetch_threads
        if self.is_remote:
            return REMOTE_FETCH_THREADS
        cores = len(os.sched_getaffinity(0))
        if self._device.type == "cpu":
            # Two to four threads read a mapped file fastest. Source: benchmarks/results/cpu2_202611/files.md.
            return min(4, max(2, cores))
        if self.local_world_size > 1:
            return max(2, min(MAX_GROUP_READS, cores * 3 // 4 // self.local_world_size))
        # Leave two cores to the program and to the thread that places chunks.
        return max(2, min(MAX_LOCAL_READS, cores - 2))

    @property
    def num_direct_reads(self) -> int:
        """Return the number of concurrent reads of bytes outside the page cache."""
        if self._settings.fetch_threads or self.is_remote or self._device.type == "cpu" or self.local_world_size > 1:
            return self.num_reads
        return max(self.num_reads, min(MAX_DIRECT_READS, len(os.sched_getaffinity(0))))

    @property
    def chunk_bytes(self) -> int:
        """Return the size of the largest read. Raise BudgetTooSmall if `memory_bytes` is too small for four reads."""
        wanted, memory_bytes = self._settings.chunk_bytes, self._settings.memory_bytes
        if self._device.type == "cuda" and (self.local_world_size > 1 or not self.is_remote):
            wanted //= DEVICE_CHUNKS
        # With fewer than four buffers, reads and copies wait for each other.
        chunk = min(wanted, memory_bytes // 4) // PAGE_BYTES * PAGE_BYTES
        if chunk < MIN_CHUNK_BYTES:
            raise BudgetTooSmall(
                f"memory_bytes={memory_bytes} is too small: chunks get {chunk} bytes", minimum_bytes=4 * MIN_CHUNK_BYTES
            )
        return chunk

    @property
    def peak_bytes(self) -> int:
        """Return the peak size of staging in use, even after the pool was closed."""
        return self._peak_bytes if self.pool is None else self.pool.peak_bytes

    def open_pool(self, registrar: Registrar | None) -> StagingPool:
        """Create the pool, just large enough to saturate readers and device. The intake closes it."""
        enough = (self.num_reads + READS_AHEAD + SPARE_BUFFERS) * self.chunk_bytes
        memory_bytes = min(self._settings.memory_bytes, enough)
        kept = None if registrar is None else idle_pools.take(memory_bytes, self.chunk_bytes)
        self.pool = kept or StagingPool.map(memory_bytes, self.chunk_bytes, registrar=registrar)
        return self.pool

    def warm(self, uri: Uris) -> None:
        """For large local files and a GPU, touch and pin the pool while headers are read."""
        if self._device.type == "cuda" and _local_nbytes(uri) > WARM_ABOVE_BYTES:
            self.open_pool(registrar_of(self._device)).warm(WARM_THREADS)

    def open_ring(self) -> Uring | None:
        """Open a ring to read cached files, for the caller to close. Return None if no ring is wanted or allowed."""
        if self.is_remote or not self._settings.io_uring:
            return None
        self.ring_refusal = refusal()
        try:
            return None if self.ring_refusal else Uring.open(2 * (self.num_reads + READS_AHEAD), self.num_reads)
        except OSError as error:
            self.ring_refusal = f"io_uring: {error.strerror}"
            return None

    def close(self) -> None:
        """Keep a pinned pool for the next load, or free the pool. The runs must be closed. Idempotent."""
        pool, self.pool = self.pool, None
        if pool is None:
            return
        self._peak_bytes = pool.peak_bytes
        if pool.is_pinned and not pool.is_cancelled and not pool.num_in_use:
            idle_pools.keep(pool)
            return
        pool.cancel()
        pool.close()


def prepare_staging(device: torch.device, memory_bytes: int | None, *, keep_s: float) -> None:
    """Pin the staging for a load to a GPU that begins within `keep_s` seconds. Raise the errors of its first read."""
    intake = Intake(Settings.read(memory_bytes=memory_bytes), device)
    pool = intake.open_pool(registrar_of(device))
    pool.warm(WARM_THREADS)
    pool.end_warming()
    idle_pools.keep(pool, keep_s=keep_s)


def _filled(uri: Uris, options: ReadOptions, settings: Settings) -> str:
    """Download a model into the local cache of its hub. Return its pinned URI."""
    if not isinstance(uri, str | os.PathLike):
        raise ConfigError("cache=True takes one URI, not a list", hint="pass org/name or an hf:// URI")
    from penstock.storage.fill import fill_weights

    stored = options.settings.storage_options
    with Progress(options.progress, str(uri)) as progress:
        return fill_weights(uri, settings=settings, storage_options=stored, on_bytes=progress).uri


def _local_nbytes(uri: Uris) -> int:
    """Return the approximate size of the weight files at local paths, or 0 if a URI is remote."""
    uris = texts_of(uri)
    if any(map(is_remote, uris)):
        return 0
    try:
        return sum(map(_nbytes_at, uris))
    except OSError:
        return 0


def _nbytes_at(path: str) -> int:
    if not os.path.isdir(path):
        return os.path.getsize(path)
    with os.scandir(path) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith((".safetensors", ".gguf")))


MAX_GAP_BYTES = 64 << 10
"""Largest gap in bytes between two wanted ranges of a local file that is read instead of skipped. Reading the gap costs
about as much as one more call."""

MAX_GAP_REMOTE_BYTES = MIB
"""The same size for an object store, where a request costs a round trip."""

DEVICES_HINT = 'use "cpu", "cuda", "cuda:N" or the number N of a GPU'


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that all loads share. See `penstock.load`."""

    device: torch.device
    names: Names = None
    boxes: Boxes = None
    verify: bool | None = None
    progress: ProgressOption = None
    settings: ReadSettings = msgspec.field(default_factory=ReadSettings)


Batch = tuple[Sequence[str], list[torch.Tensor]]
"""Names and the tensors with these names."""


class LoadSession(Closeable):
    """A running load. Leaving its `with` block ends all reads and releases everything that the caller did not receive.

    Args:
        uri, options, settings: the weights, the caller's options, and the limits.
        in_group: whether other ranks may send the bytes, so that staging is created only when a read needs it.
        local_world_size: number of processes on this host that read for the same load.
        journey: name of the journey in the record of phases, empty if the load is part of a different journey.
        weights: open files of `uri`, which the caller closes.

    Attributes:
        group_bytes: number of bytes that other ranks sent.
        paths: number of bytes read for each (file index, path name).
        is_touched: whether a target may have been written outside a run.
    """

    def __init__(
        self,
        uri: Uris,
        options: ReadOptions,
        settings: Settings,
        *,
        in_group: bool = False,
        local_world_size: int = 1,
        journey: str = "load",
        weights: WeightSet | None = None,
    ) -> None:
        self.options = options
        self.settings = settings
        first = "cache" if options.settings.cache else "open"
        self.phases = Phases(first, journey=journey, model=next(iter(texts_of(uri)), ""))
        self.intake = Intake(settings, options.device, local_world_size)
        self._ends = ExitStack()
        # From here on every error must end the phase, because the process would otherwise never be ready.
        try:
            # Some threads parse headers while others pin staging.
            if options.device.type == "cuda":
                self._ends.enter_context(lifecycle.quick_handover())
            self.trace = open_trace(options.settings.trace)
            # Start pinning before reading the headers, so that both overlap.
            if not in_group:
                self.intake.warm(uri)
            # Let Ctrl-C act at once, because listings and headers of remote files may take until their deadlines.
            opening = interrupts.allow_interrupts() if any(map(is_remote, texts_of(uri))) else nullcontext()
            self._is_owner = weights is None
            with opening:
                if options.settings.cache:
                    uri = _filled(uri, options, settings)
                    self.phases.enter("open")
                self.weights: WeightSet = weights or open_weights(
                    uri, settings=settings, storage_options=options.settings.storage_options, names=options.names
                )
        except BaseException as error:
            self.phases.fail(error)
            with self._ends:
                self.intake.close()
            raise
        self.intake.is_remote = any(is_remote(source.uri) for source in self.weights.sources)
        self.run: LoadRun | None = None
        self.plan: LoadPlan | None = None
        self._mappings: TensorMappings | None = None
        self.verified = False
        self.why = ""
        self.group_bytes = 0
        self.paths: dict[tuple[int, str], int] = {}
        self.is_touched = False
        self._reads_all = not in_group and local_world_size == 1
        self._digested: list[Digested] = []

    def received(self) -> dict[tuple[str, str], int]:
        """Return the bytes received so far, by source and path, for metrics. Thread-safe."""
        received: dict[tuple[str, str], int] = {}
        # Iterate over a copy, because readers may add paths.
        for (_, path), nbytes in list(self.paths.items()):
            key = ("cache" if path == "cache" else "storage", path)
            received[key] = received.get(key, 0) + nbytes
        if self.group_bytes:
            received["peer", "group"] = self.group_bytes
        return received

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the requested tensors."""
        return self.weights.manifest

    def close(self) -> None:
        """End the reads, release all memory and close the files. Idempotent."""
        with self._ends:
            # Close the run first, because its threads use the pool, the mappings and the sources.
            if self.run is not None:
                self.run.close()
            self.intake.close()
            if self._mappings is not None:
                self._mappings.close()
            if self._is_owner:
                self.weights.close()
        self.phases.close()

    def __exit__(self, *raised: object) -> None:
        if isinstance(error := raised[1], BaseException):
            self.phases.fail(error)
        super().__exit__(*raised)

    def table(self) -> TensorTable:
        """Return the requested tensors in file order. Raise PlanError if torch cannot represent a tensor."""
        table = self.manifest.tensors
        # Read forward through the files, even if a header lists its tensors in a different order.
        order = np.lexsort((table.offset, table.file_index))
        if not (order == np.arange(len(order))).all():
            table = table.take(order.tolist())
        for dtype in set(table.dtypes):
            torch_dtype(dtype)
        if DType.F4 in table.dtypes:
            for dtype, shape in zip(table.dtypes, table.shapes, strict=True):
                torch_shape(dtype, shape)
        return table

    def wanted(self, table: TensorTable) -> Wanted:
        """Return the rows of a table with the requested regions. See `wanted_regions`."""
        # Use the first file, because configurations are stored next to the files.
        uri = self.weights.sources[0].uri if self.weights.sources else self.weights.uri
        return wanted_regions(self.options.boxes, table, uri, self.settings, self.options.settings.storage_options)

    def make_plan(
        self,
        table: TensorTable,
        boxes: Sequence[Box | None],
        *,
        pack: bool,
        exact: bool,
        aligned: bool = True,
        chunk_bytes: int = 0,
        max_gap_bytes: int = MAX_GAP_REMOTE_BYTES,
    ) -> LoadPlan:
        """Plan the rows of `table`, which are in file order.

        Args:
            boxes: region of each row, or None.
            pack: see `plan_load`.
            exact: read no unwanted byte, because the reads go directly into the destination.
            aligned: start and end reads at page boundaries.
            chunk_bytes: size of the largest read, at least that of the intake.
            max_gap_bytes: largest gap that is read instead of skipped, within the limit for this kind of source.
        """
        max_read = self.intake.chunk_bytes
        gap = MAX_GAP_REMOTE_BYTES if self.intake.is_remote else MAX_GAP_BYTES
        self.plan = plan_load(
            table,
            file_nbytes=[source.nbytes for source in self.weights.sources],
            chunk_bytes=max(chunk_bytes, max_read),
            boxes=boxes,
            pack=pack,
            align_bytes=1 if exact or not aligned or self.intake.is_remote else PAGE_BYTES,
            max_gap_bytes=0 if exact else min(gap, max_gap_bytes, max_read),
        )
        return self.plan

    def maps_files(self, boxes: Sequence[Box | None]) -> bool:
        """Return whether the tensors can be views of mapped files: local, whole, on the CPU, and without `copy`."""
        is_host = self.options.device.type == "cpu" and not self.options.settings.copy
        is_local = all(isinstance(source, FileSource) for source in self.weights.sources)
        return is_host and is_local and boxes.count(None) == len(boxes)

    def open_mappings(self) -> TensorMappings:
        """Map the files. The session closes them."""
        files = [source for source in self.weights.sources if isinstance(source, FileSource)]
        self._mappings = TensorMappings.open(files)
        return self._mappings

    def begin(
        self,
        plan: LoadPlan,
        place: Destination,
        *,
        sources: Sequence[Source] | None = None,
        checker: Checker | None = None,
        reads: Sequence[int] | None = None,
        window_bytes: int = 0,
        order: Sequence[int] | None = None,
    ) -> LoadRun:
        """Start the run of `plan` into `place`. The session closes it. See `LoadRun` for the arguments."""
        # No staging is needed if every read can go directly to its slabs.
        direct = place.direct(0, 0, 0) is not None if len(plan.slab_nbytes) else True
        if self.intake.pool is None and not (direct and bool(plan.covered().all())):
            self.intake.open_pool(place.registrar)
        self.run = LoadRun(
            plan,
            self.weights.sources if sources is None else sources,
            place,
            Readers(
                pool=self.intake.pool,
                num_threads=self.intake.num_reads,
                num_direct_threads=self.intake.num_direct_reads,
                ring=self.intake.open_ring() if self.intake.pool is not None else None,
            ),
            stall_s=self.settings.stall_s,
            trace=self.trace,
            checker=checker,
            reads=reads,
            window_bytes=window_bytes,
            order=order,
        )
        self.paths = self.run.paths
        self.run.start()
        return self.run

    def enter_move(self) -> None:
        """Enter the phase `move`, which shows the bytes of the run."""
        assert self.run is not None
        # Refer to the ticket only, because the record of phases must not keep the weights alive.
        ticket = self.run.ticket
        self.phases.enter("move", lambda: (ticket.moved_bytes, ticket.nbytes))

    def regions(self, table: TensorTable, boxes: Sequence[Box | None]) -> TensorRegions | None:
        """Return the rows to read for boxes, widened to whole leaves, or None if there are no boxes or no digests."""
        manifest = self.manifest
        if self.options.verify is False or manifest.leaves is None or boxes.count(None) == len(boxes):
            return None
        return TensorRegions(table, boxes, self._leaves_of(table), manifest.leaf_bytes)

    def _leaves_of(self, table: TensorTable) -> U64 | None:
        manifest = self.manifest
        row_of = dict(zip(manifest.tensors.names, range(len(manifest.tensors)), strict=True))
        return leaves_of(manifest, np.fromiter(map(row_of.__getitem__, table.names), np.int64, len(table)))

    def checker(self, plan: LoadPlan, place: Any, leaves: U64 | None = None) -> Checker | None:
        """Return a checker for the slabs of `place`, or return None and set `why` to the reason.

        If the plan's rows are parts of the manifest's rows, `leaves` are the digests of these parts. Raise NotFound if
        `verify=True` but there are no digests.
        """
        manifest, requested = self.manifest, self.options.verify
        if requested is False:
            self.why = "verify=False"
            return None
        if manifest.leaves is None:
            if self._check_files(plan):
                return None
            self.why = self.weights.why_unverified or "no digests"
            if requested:
                raise nothing_to_verify(self.why)
            return None
        from penstock.engine.check import CudaChecker, Expected, HostChecker

        # Regions in the plan are not widened to leaves. An empty region needs no digest.
        regions = sum(box is not None and box.num_elements > 0 for box in plan.boxes)
        leaves = self._leaves_of(plan.table) if leaves is None else leaves
        assert leaves is not None
        expected = Expected(plan, leaves, manifest.leaf_bytes, [source.uri for source in self.weights.sources])
        where = "CPU" if self.options.device.type == "cpu" else "device"
        self.verified = regions == 0
        self.why = f"{len(leaves)} leaf digests compared on the {where}"
        if regions:
            self.why = f"{regions} tensors are regions, which have no digests; the others were compared"
        if self.options.device.type == "cuda":
            return CudaChecker(expected, place)
        return HostChecker(expected, lambda slab: memoryview(place.slab(slab)))

    def _check_files(self, plan: LoadPlan) -> bool:
        """Compare whole files with digests from their storage while they are read. Return False if impossible."""
        sources = self.weights.sources
        # Compare the sizes, because `load_into(strict=False)` and boxes may skip bytes.
        is_whole = self.options.names is None and plan.nbytes == self.manifest.nbytes
        if not self._reads_all or not is_whole or not sources or not fills_files(self.manifest):
            return False
        self._digested = [source for source in sources if isinstance(source, Digested) and source.check_whole()]
        return len(self._digested) == len(sources)

    def _conclude_files(self) -> None:
        num_files = len(self.weights.sources)
        num_equal = sum(source.is_checked for source in self._digested)
        self.why = f"the SHA-256 of {num_equal} of {num_files} files equals the storage's"
        self.verified = num_equal == num_files
        # Raise only if no other digests were compared. A file's comparison stops if a chunk is over `stall_s` late.
        if self.options.verify and not self.verified and len(self._digested) == num_files:
            raise IntegrityError(f"verify=True, but {self.why}", hint="load again, or increase stall_s")

    def batches(self, plan: LoadPlan, indices: Iterable[int], memory: Callable[[int], Any]) -> Iterator[Batch]:
        """Yield the names and tensors of each slab's rows, and of the empty rows before the slab, in file order.

        The caller owns the tensors.

        Args:
            plan: plan of the slabs.
            indices: all slabs, in order.
            memory: returns the bytes of a slab, as a flat uint8 tensor or array.
        """
        table, row = plan.table, 0
        shapes: Sequence[tuple[int, ...]] = table.shapes
        if plan.boxes.count(None) < len(plan.boxes):
            both = zip(table.shapes, plan.boxes, strict=True)
            shapes = [shape if box is None else box.shape for shape, box in both]
        with_bytes = np.flatnonzero(plan.row_slab >= 0)
        first, last = np.zeros((2, len(plan.slab_nbytes)), np.int64)
        # Numpy stores the last of several writes to one index, which is a slab's last row in a forward pass and its
        # first row in a backward pass.
        last[plan.row_slab[with_bytes]] = with_bytes + 1
        first[plan.row_slab[with_bytes[::-1]]] = with_bytes[::-1]
        starts, stops = first.tolist(), last.tolist()
        offsets: list[int] = plan.row_offset.tolist()

        def empties(begin: int, end: int) -> Batch:
            types = zip(table.dtypes[begin:end], shapes[begin:end], strict=True)
            device = self.options.device
            empty = [torch.empty(torch_shape(d, shape), dtype=torch_dtype(d), device=device) for d, shape in types]
            return table.names[begin:end], empty

        for slab in indices:
            start, stop = starts[slab], stops[slab]
            if start > row:
                yield empties(row, start)
            at, flat = slice(start, stop), memory(slab)
            raw = torch.from_numpy(flat) if isinstance(flat, np.ndarray) else flat
            del flat
            yield table.names[at], as_tensors(raw, table.dtypes[at], shapes[at], offsets[at])
            # Hold no reference while the caller has the batch, so that dropped tensors release their slab at once.
            del raw
            row = stop
        if row < len(table):
            yield empties(row, len(table))

    def progress(self) -> Progress:
        """Return the progress bar or callback from the caller's options."""
        return Progress(self.options.progress, self.weights.uri)

    def _why_not_faster(self, file: int, path: str) -> str:
        if path in {"mmap", "direct"}:
            return ""
        if path == "page-cache" and self.intake.ring_refusal:
            return f"by threads: {self.intake.ring_refusal}"
        why: str | None = getattr(self.weights.sources[file], "why", None)
        return why or ""

    def check_unchanged(self) -> None:
        """Raise if a file was modified, replaced or removed since it was opened."""
        for source in self.weights.sources:
            if isinstance(source, FileSource):
                source.check_unchanged()

    def finish(self, *, num_tensors: int, nbytes: int) -> LoadReport:
        """Check that no source changed, end every thread, save the trace, and return the report."""
        self.phases.enter("finish")
        # The bytes of a changed file may belong to two versions.
        self.check_unchanged()
        if self._mappings is not None:
            self._mappings.check_unchanged()
        # End the threads first, so that the trace contains every span.
        if self.run is not None:
            self.run.close()
        if self.options.settings.trace is not None:
            self.trace.save(self.options.settings.trace)
        if self._digested:
            self._conclude_files()
        uris = [source.uri for source in self.weights.sources]
        files = [
            FilePath(uri=uris[file], nbytes=nbytes_read, path=path, why=self._why_not_faster(file, path))
            for (file, path), nbytes_read in sorted(self.paths.items())
        ]
        if self.group_bytes:
            files.append(FilePath(uri=self.weights.uri, nbytes=self.group_bytes, path="group", why=""))
        cuda = self.options.device.type == "cuda"
        phases = self.phases.stop()
        return LoadReport(
            uri=self.weights.uri,
            device=str(self.options.device),
            num_tensors=num_tensors,
            nbytes=nbytes,
            verified_bytes=nbytes if self.verified else 0,
            read_bytes=sum(self.paths.values()),
            wall_s=sum(phases.values()),
            phases=phases,
            busy_s=self.trace.busy_s(),
            peak_staging_bytes=self.intake.peak_bytes,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            peak_device_bytes=torch.cuda.max_memory_allocated(self.options.device) if cuda else 0,
            files=tuple(files),
            verified=self.verified,
            why=self.why,
            revision=self.manifest.revision,
        )


def resolve_device(device: str | int | torch.device) -> torch.device:
    """Return a device with its index. `"cuda"` means the current CUDA device.

    Raises:
        ConfigError: torch does not know the device, or the host does not have it.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        # For torch a bare number means the current accelerator.
        device = f"cuda:{device}"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{device!r} is not a valid device", hint=DEVICES_HINT) from error
    if resolved.type not in {"cpu", "cuda"}:
        raise ConfigError(f"device {resolved} is not supported", hint=DEVICES_HINT)
    if resolved.type == "cuda":
        if not torch.cuda.is_available() or (resolved.index or 0) >= torch.cuda.device_count():
            message = f"device {resolved} does not exist, because there are {torch.cuda.device_count()} CUDA devices"
            raise ConfigError(message, hint="run `penstock doctor` to list the devices, and check CUDA_VISIBLE_DEVICES")
        resolved = torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
    return resolved
