"""The verbs `load` and `stream`."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from penstock import interrupts, lifecycle
from penstock.arguments import require_type
from penstock.config import ReadSettings, Settings, parse_bytes
from penstock.engine.place import HostPlace, place_on
from penstock.errors import Cancelled, ConfigError
from penstock.lifecycle import Closeable, paused_gc
from penstock.loader.boxes import Boxes, Wanted, joined
from penstock.loader.progress import ProgressOption
from penstock.loader.regions import TensorRegions
from penstock.loader.report import LoadReport
from penstock.loader.run import LoadRun
from penstock.loader.session import Batch, LoadSession, ReadOptions, resolve_device
from penstock.plan.schedule import LoadPlan
from penstock.report import bytes_text, pre
from penstock.storage import Source
from penstock.storage.weight_set import Names, Uris
from penstock.telemetry.journey import Journey
from penstock.types import Box, Manifest, TensorTable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


SHOWN_ROWS = 20
"""Number of tensors that a notebook shows."""

MANY_TENSORS = 10_000
"""With more tensors than this, create the views before reading and not during reading. Creating 60,000 views takes as
long as reading the bytes. Source: benchmarks/results/h200x1_202611/load-history.md, row e."""

READY_BYTES = 1 << 30
"""Step size for a mapped file in the page cache, where a step costs only Python time."""


class Weights(dict[str, torch.Tensor]):
    """A dict of tensors by name, in file order.

    Attributes:
        report: the result of the load.
        manifest: the manifest of the requested tensors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], report: LoadReport, manifest: Manifest) -> None:
        super().__init__(tensors)
        self.report = report
        self.manifest = manifest

    def __repr__(self) -> str:
        devices = ", ".join(sorted({str(tensor.device) for tensor in self.values()})) or self.report.device
        nbytes = sum(tensor.nbytes for tensor in self.values())
        verified = "verified" if self.report.verified else "not verified"
        return f"<Weights of {self.report.uri}: {len(self)} tensors, {bytes_text(nbytes)} on {devices}, {verified}>"

    def _repr_html_(self) -> str:
        rows = [f"{name}  {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in self.items()]
        more = [f"... and {len(rows) - SHOWN_ROWS} more"] if len(rows) > SHOWN_ROWS else []
        return pre("\n".join([repr(self), *rows[:SHOWN_ROWS], *more]))


class TensorStream(Closeable, Iterator[tuple[str, torch.Tensor]]):
    """An iterator over `(name, tensor)` in file order. Each tensor is complete, verified and owned by the caller.

    Leaving the stream's `with` block early, or dropping the stream, ends the running reads and releases all tensors
    that were not yielded. Several threads may iterate over one stream, and each tensor goes to one thread.

    Attributes:
        manifest: the manifest of the requested tensors.
    """

    def __init__(self, session: LoadSession, group: ProcessGroup | None, journey: Journey) -> None:
        self._session: LoadSession | None = session
        self._pid = os.getpid()
        self._journey = journey
        journey.received = session.received
        self._group = group
        self._report: LoadReport | None = None
        # Only one thread at a time can advance a generator. The lock is re-entrant, because a failing `next` closes
        # the stream.
        self._turn = threading.RLock()
        self.manifest = session.manifest
        self._tensors = _yielding(session, group)
        self._num_tensors = 0
        self._nbytes = 0

    @property
    def report(self) -> LoadReport:
        """Return the report of the whole stream. Raise Cancelled if the stream was not read to its end."""
        if self._report is None:
            raise Cancelled("the stream was not read to its end", hint="iterate the stream to its end first")
        return self._report

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._pid != os.getpid():
            raise ConfigError("the stream was opened before this process was forked", hint="open a stream in the child")
        with self._turn, deferred_interrupts(self._group):
            return self._next()

    def _next(self) -> tuple[str, torch.Tensor]:
        try:
            name, tensor = next(self._tensors)
            # Ctrl-C during the wait was only noted. Raise it here, where nothing is half done.
            interrupts.raise_if_noted()
        except StopIteration:
            self._end()
            raise
        except BaseException as error:
            self._fail(error)
            raise
        self._num_tensors += 1
        self._nbytes += tensor.nbytes
        return name, tensor

    def _end(self) -> None:
        if self._report is not None:
            return
        if self._session is None:
            raise Cancelled("the stream was closed before its end", hint="open a new stream")
        try:
            self._report = self._session.finish(num_tensors=self._num_tensors, nbytes=self._nbytes)
            self._journey.report = self._report
        except BaseException as error:
            self._fail(error)
            raise
        self.close()

    def _fail(self, error: BaseException) -> None:
        self._journey.end(error)
        if self._session is not None:
            self._session.phases.fail(error)
        self.close()

    def close(self) -> None:
        """End the reads and release the memory. Further iteration raises Cancelled. Idempotent."""
        with deferred_interrupts(self._group):
            self._close()

    def _close(self) -> None:
        session = self._session
        # A forked child has no reading threads, and the locks of these threads may stay locked.
        if session is None or lifecycle.is_ending() or self._pid != os.getpid():
            return
        # Cancel before acquiring the lock, because a thread that waits for a tensor holds the lock.
        if (run := session.run) is not None and not run.ticket.done:
            run.ticket.cancel()
        with self._turn:
            self._tensors.close()
            session.close()
            self._journey.end()
            # Release the session's files and memory inside the block that defers Ctrl-C.
            self._session = None

    def __del__(self) -> None:
        # The constructor may have failed before it set the attribute.
        if getattr(self, "_session", None) is not None and not lifecycle.is_ending():
            with interrupts.defer_in_finalizer():
                self.close()


def load(
    uri: Uris,
    device: str | int | torch.device = "cpu",
    *,
    names: Names = None,
    boxes: Boxes = None,
    verify: bool | None = None,
    group: ProcessGroup | None = None,
    progress: ProgressOption = None,
    settings: ReadSettings | None = None,
) -> Weights:
    """Load a weight set into memory. Tensors are complete, and verified if there are digests.

    The caller owns the tensors. Dropping a tensor of 1 MiB or more releases its memory. Smaller tensors share slabs of
    about 2 MiB.

    Args:
        uri: a safetensors file, directory, index, glob, prefix (`s3://`, `gs://`, `az://`, `http(s)://`), or a list of
            these.
        device: `"cpu"`, `"cuda"` or `"cuda:N"`.
        names: the tensors to load: a glob, a list of globs and names (each must match a tensor), a compiled regex, or a
            predicate on the name. By default, all tensors are loaded.
        boxes: the regions to load: a `Box` or slices (`numpy.s_[0:4, :]`) for each name, a function from name and shape
            to a region, or `tensor_parallel(rank=, size=)`. If digests are compared, the leaves of 256 KiB that contain
            a region are read. Without a comparison, only the regions and small gaps between regions are read.
        verify: whether to compare bytes with the manifest's leaf digests. `verify=None` compares bytes if there are
            digests, `verify=True` raises an error if there are no digests, and `verify=False` never compares bytes.
        group: a torch.distributed group. All ranks make this call, read a part each, and receive all tensors.
        progress: True for a bar on stderr, None for a bar only on a terminal, or a function of (finished bytes, total
            bytes).
        settings: memory limit, options for the object store, trace file and more. See `ReadSettings`.

    Returns:
        Tensors by name, in file order, with `.report` and `.manifest`.

    Raises:
        PenstockError: see `penstock.errors`. No memory stays allocated.
    """
    place, read = resolve_device(device), settings_without_arena(settings, "load")
    options = ReadOptions(device=place, names=names, boxes=boxes, verify=verify, progress=progress, settings=read)
    with deferred_interrupts(group), Journey("load", uri=str(uri), device=str(options.device)) as journey:
        return _load(uri, options, group, journey)


def _load(uri: Uris, options: ReadOptions, group: ProcessGroup | None, journey: Journey) -> Weights:
    """Run `load` in a separate function, so that its locals are released inside the block that defers Ctrl-C."""
    with paused_gc(), open_session(uri, options, group) as session:
        journey.received = session.received
        tensors, nbytes = _gather(session, group)
        report = session.finish(num_tensors=len(tensors), nbytes=nbytes)
        journey.report = report
        return Weights(tensors, report, session.manifest)


def stream(
    uri: Uris,
    device: str | int | torch.device = "cpu",
    *,
    names: Names = None,
    boxes: Boxes = None,
    verify: bool | None = None,
    group: ProcessGroup | None = None,
    progress: ProgressOption = None,
    settings: ReadSettings | None = None,
) -> TensorStream:
    """Yield each tensor as soon as its bytes have arrived. Reads run at most `settings.memory_bytes` ahead.

    The arguments are those of `load`.

    Raises:
        PenstockError: this call raises errors from opening and planning, and the iteration raises later errors.
    """
    place, read = resolve_device(device), settings_without_arena(settings, "stream")
    options = ReadOptions(device=place, names=names, boxes=boxes, verify=verify, progress=progress, settings=read)
    with deferred_interrupts(group):
        return open_stream(uri, options, group, lambda: open_session(uri, options, group))


def settings_without_arena(settings: ReadSettings | None, verb: str) -> ReadSettings:
    """Return an argument's settings. Raise ConfigError if the settings request an arena, which `verb` cannot make."""
    settings = ReadSettings.of(settings)
    if settings.arena:
        raise ConfigError(f"{verb} cannot move tensors into an arena", hint="omit arena=True, or use load_into")
    return settings


def open_stream(
    uri: Uris, options: ReadOptions, group: ProcessGroup | None, open_session: Callable[[], LoadSession]
) -> TensorStream:
    """Return a stream over the session that a function opens, counted as a load."""
    journey = Journey("load", uri=str(uri), device=str(options.device)).begin()
    try:
        return TensorStream(open_session(), group, journey)
    except BaseException as error:
        journey.end(error)
        raise


def deferred_interrupts(group: ProcessGroup | None) -> AbstractContextManager[object]:
    """Return a context manager that delays Ctrl-C until an interrupt would leave nothing behind.

    If `group` is set, Ctrl-C is not delayed, because the group's collectives do not check for a noted signal.
    """
    return interrupts.deferred() if group is None else nullcontext()


def open_session(uri: Uris, options: ReadOptions, group: ProcessGroup | None) -> LoadSession:
    """Open the weight set. In a group, a rank that fails reports its error to the other ranks."""
    require_type("verify", options.verify, (bool, type(None)), "True, False or None")
    if options.settings.cache and group is not None:
        # Hosts finish their downloads at different times, but a group waits only `stall_s` for a rank.
        hint = "first run `penstock fetch org/name --cache` on each host"
        raise ConfigError("cache=True cannot be combined with group=", hint=hint)
    if group is not None:
        require_type("group", group, torch.distributed.ProcessGroup, "a torch.distributed.ProcessGroup, or None")
    memory_bytes = options.settings.memory_bytes
    settings = Settings.read(memory_bytes=None if memory_bytes is None else parse_bytes(memory_bytes))
    with reports_failure(group, options, settings.stall_s), paused_gc():
        return LoadSession(uri, options, settings, local_world_size=1 if group is None else group.size())


def reports_failure(group: ProcessGroup | None, options: ReadOptions, stall_s: float) -> AbstractContextManager[None]:
    """Return a context that reports errors to the other ranks in the group, which are waiting to agree on a plan."""
    if group is None:
        return nullcontext()
    from penstock.ranks.agreement import RankWords

    return RankWords(group, options.device, stall_s).reports_failure()


def _gather(session: LoadSession, group: ProcessGroup | None) -> tuple[dict[str, torch.Tensor], int]:
    if group is not None:
        batches = list(_exchanged(session, group))
        tensors = {name: tensor for names, some in batches for name, tensor in zip(names, some, strict=True)}
        return tensors, sum(tensor.nbytes for tensor in tensors.values())
    wanted = _wanted(session)
    if regions := _regions_of(session, wanted):
        tensors = dict(_yielding_regions(session, wanted, regions))
        return tensors, sum(tensor.nbytes for tensor in tensors.values())
    plan, place, begin = _prepare(session, wanted.table, wanted.boxes, all_at_once=True)
    session.phases.enter("allocate")
    is_on_host = isinstance(place, HostPlace)
    if is_on_host:
        run = begin(0)
    else:
        # Allocate while the first reads wait in staging, because the driver takes about 0.7 ms per GB.
        with place.allocating():
            run = begin(0)
            run.prepare_checker()
            place.allocate()
    session.enter_move()
    stall_s = session.settings.stall_s
    with session.progress() as progress:
        if not is_on_host and len(plan.table) < MANY_TENSORS:
            progress.follow(run.ticket, stall_s=stall_s, reached=run.is_under_way)
        views = session.batches(plan, range(len(plan.slab_nbytes)), place.slab)
        tensors = {name: tensor for names, some in views for name, tensor in zip(names, some, strict=True)}
        progress.follow(run.ticket, stall_s=stall_s)
    return tensors, plan.nbytes


def _yielding(session: LoadSession, group: ProcessGroup | None) -> Generator[tuple[str, torch.Tensor], None, None]:
    if group is not None:
        for names, tensors in _exchanged(session, group):
            yield from zip(names, tensors, strict=True)
        return
    wanted = _wanted(session)
    if regions := _regions_of(session, wanted):
        yield from _yielding_regions(session, wanted, regions)
        return
    # The lists of a plan would start several collections. In a process with an engine, a full one takes half a second.
    with paused_gc():
        plan, place, begin = _prepare(session, wanted.table, wanted.boxes, all_at_once=False)
        run = begin(session.settings.memory_bytes)
    session.enter_move()
    with session.progress() as progress:
        for names, batch in session.batches(plan, run.slabs(), place.take):
            progress.show(run.ticket)
            # Hold no reference here, so that a tensor that the caller drops releases its memory at once.
            pairs = deque(zip(names, batch, strict=True))
            del batch
            while pairs:
                yield pairs.popleft()


def _wanted(session: LoadSession) -> Wanted:
    session.phases.enter("plan")
    return session.wanted(session.table())


def _regions_of(session: LoadSession, wanted: Wanted) -> TensorRegions | None:
    """Return the rows to read if boxes are cut from leaves or joined, or None if the boxes are read directly."""
    regions = session.regions(wanted.table, wanted.boxes)
    return TensorRegions(*wanted) if regions is None and wanted.of_several() else regions


def _yielding_regions(
    session: LoadSession, wanted: Wanted, regions: TensorRegions
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield each tensor when its bytes have arrived, and each region when its leaves are verified."""
    device = session.options.device
    # Read whole rows on the CPU directly into their places. Boxes pass through staging, where reads may cross gaps.
    is_exact = device.type == "cpu" and regions.boxes.count(None) == len(regions.boxes)
    plan = session.make_plan(regions.table, regions.boxes, pack=True, exact=is_exact)
    place: Any = place_on(device, plan.slab_nbytes.tolist())
    checker = session.checker(plan, place, regions.leaves)
    cut_bytes = regions.cut_bytes()
    index = dict(zip(cut_bytes, range(len(cut_bytes)), strict=True))
    cut: Any = place_on(device, list(cut_bytes.values()))
    run = session.begin(plan, place, checker=checker, window_bytes=session.settings.memory_bytes)
    session.enter_move()
    row, names, several = 0, wanted.table.names, wanted.of_several()
    open_parts: list[torch.Tensor] = []
    with session.progress() as progress:
        for _, batch in session.batches(plan, run.slabs(), place.take):
            progress.show(run.ticket)
            arrived = deque(batch)
            # Hold no reference here, so that a tensor that the caller drops releases its memory at once.
            del batch
            while arrived:
                done = deque(
                    regions.arrived(row, arrived.popleft(), lambda line: torch.as_tensor(cut.take(index[line])))
                )
                row += 1
                while done:
                    line, tensor = done.popleft()
                    if names[line] in several:
                        open_parts.append(tensor)
                        del tensor
                        if line + 1 < len(names) and names[line + 1] == names[line]:
                            continue
                        tensor = joined(open_parts, several[names[line]][0][0])
                        open_parts.clear()
                    yield names[line], tensor
                    del tensor


def _exchanged(session: LoadSession, group: ProcessGroup) -> Iterator[Batch]:
    from penstock.loader.group import exchange

    with reports_failure(group, session.options, session.settings.stall_s):
        wanted = _wanted(session)
        table, boxes, several = wanted.table, wanted.boxes, wanted.of_several()
        if several:
            # Exchange whole tensors, so that every rank has the same rows. Cut and join the boxes afterwards.
            table = session.table()
            single = dict(zip(wanted.table.names, wanted.boxes, strict=True))
            boxes = tuple(None if name in several else single[name] for name in table.names)
    batches = exchange(session, group, table, boxes)
    return _joining(batches, several) if several else batches


def _joining(batches: Iterator[Batch], several: Mapping[str, Sequence[tuple[int, int, int]]]) -> Iterator[Batch]:
    """Yield the batches, with each tensor in `several` replaced by its joined parts `(dim, start, length)`."""
    for names, tensors in batches:
        for at, name in enumerate(names):
            if parts := several.get(name):
                tensors[at] = joined([tensors[at].narrow(*part) for part in parts], parts[0][0])
        yield names, tensors


def _prepare(
    session: LoadSession, table: TensorTable, boxes: Sequence[Box | None], *, all_at_once: bool
) -> tuple[LoadPlan, Any, Callable[[int], LoadRun]]:
    """Return the plan, the place, and a function that starts the run.

    The function takes the limit of the read-ahead in bytes, or 0 for no limit. If `all_at_once` is set, the caller
    receives nothing until all bytes have arrived.
    """
    place: Any
    sources: Sequence[Source] | None = None
    if session.maps_files(boxes):
        # Fault in pages in steps if they are touched before the end, by a consumer or for digests. A truncated file
        # then raises an error instead of SIGBUS.
        mappings = session.open_mappings()
        is_ready = mappings.are_ready() and all_at_once and session.manifest.leaves is None
        plan = session.make_plan(table, boxes, pack=True, exact=True, chunk_bytes=READY_BYTES if is_ready else 0)
        place, sources = mappings.place(plan, is_ready=is_ready)
    else:
        # Read whole tensors on the CPU directly into their places. Other bytes pass through staging, where reads may
        # be aligned and may cross gaps.
        is_whole_on_host = session.options.device.type == "cpu" and boxes.count(None) == len(boxes)
        plan = session.make_plan(table, boxes, pack=True, exact=is_whole_on_host)
        window_bytes = 0 if all_at_once else session.settings.memory_bytes
        place = place_on(session.options.device, plan.slab_nbytes.tolist(), window_bytes=window_bytes)
    checker = session.checker(plan, place)

    def begin(window_bytes: int) -> LoadRun:
        return session.begin(plan, place, sources=sources, checker=checker, window_bytes=window_bytes)

    return plan, place, begin
