"""The verbs `load` and `stream`.

In: a URI and options. Out: tensors the caller owns, verified where there are digests, and a report.
Not here: how (`session`), live parameters (`into`), the exchange between ranks (`group`).

Penstock's errors, catchable also as the class that another library raises for the same fault.

In: an error and the other classes. Out: an error of the same name and content that is all of them.
Not here: which fault is which library's error (`safe_open`, `compat`).
"""

from __future__ import annotations

import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from penstock import lifecycle
from penstock.arguments import require_type
from penstock.config import Settings, parse_bytes
from penstock.engine.place import HostPlace, place_on
from penstock.errors import Cancelled, PenstockError
from penstock.lifecycle import Closing, paused_gc, quick_handover
from penstock.loader.report import LoadReport, ProgressOption
from penstock.loader.run import LoadRun
from penstock.loader.session import Batch, Boxes, Options, Session, resolve_device
from penstock.plan.schedule import LoadPlan
from penstock.report import pre
from penstock.storage import Source
from penstock.storage.weight_set import Names, Uris
from penstock.types import GB, Manifest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

SHOWN_ROWS = 20
"""Tensors that a notebook shows of weights; a model of experts has 30,000."""

READY_BYTES = 1 << 30
"""Step size of a mapped file that is ready: a step then only counts bytes."""


class Weights(dict[str, torch.Tensor]):
    """Tensors by name, in file order: a plain dict that also says where they came from.

    Attributes:
        report: what the load did.
        manifest: of the tensors asked for.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], report: LoadReport, manifest: Manifest) -> None:
        super().__init__(tensors)
        self.report = report
        self.manifest = manifest

    def __repr__(self) -> str:
        devices = ", ".join(sorted({str(tensor.device) for tensor in self.values()})) or self.report.device
        nbytes = sum(tensor.nbytes for tensor in self.values())
        verified = "verified" if self.report.verified else "not verified"
        return f"<Weights of {self.report.uri}: {len(self)} tensors, {nbytes / GB:.2f} GB on {devices}, {verified}>"

    def _repr_html_(self) -> str:
        rows = [f"{name}  {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in self.items()]
        more = [f"... and {len(rows) - SHOWN_ROWS} more"] if len(rows) > SHOWN_ROWS else []
        return pre("\n".join([repr(self), *rows[:SHOWN_ROWS], *more]))


class TensorStream(Closing, Iterator[tuple[str, torch.Tensor]]):
    """`(name, tensor)` in file order, each complete and verified when it is yielded, and the caller's own.

    A context manager. Leaving it early, or dropping it, drains what is under way and frees everything not yielded.
    Several threads may read one stream: each tensor goes to one of them, and a `close` ends all of them (Cancelled).

    Attributes:
        manifest: of the tensors asked for.
    """

    def __init__(self, session: Session, group: ProcessGroup | None) -> None:
        self._session: Session | None = session
        self._group = group
        self._report: LoadReport | None = None
        self._turn = threading.RLock()
        self.manifest = session.manifest
        self._tensors = _yielding(session, group)
        self._num_tensors = self._nbytes = 0

    @property
    def report(self) -> LoadReport:
        """Return the report of the whole stream. Cancelled before it is exhausted: there is nothing to report yet."""
        if self._report is None:
            raise Cancelled("the stream has not been read to its end", hint="iterate it to the end first")
        return self._report

    def __next__(self) -> tuple[str, torch.Tensor]:
        with self._turn, self._deferred():
            return self._next()

    def _deferred(self) -> AbstractContextManager[object]:
        return deferred_interrupts(self._group)

    def _next(self) -> tuple[str, torch.Tensor]:
        try:
            name, tensor = next(self._tensors)
            lifecycle.raise_if_noted()
        except StopIteration:
            self._end()
            raise
        except BaseException:
            self.close()
            raise
        self._num_tensors += 1
        self._nbytes += tensor.nbytes
        return name, tensor

    def _end(self) -> None:
        """Make the report once every tensor was yielded. Cancelled where the stream was closed before that."""
        if self._report is not None:
            return
        if self._session is None:
            raise Cancelled("the stream was closed before its end", hint="open another one")
        try:
            self._report = self._session.finish(num_tensors=self._num_tensors, nbytes=self._nbytes)
        finally:
            self.close()

    def close(self) -> None:
        """Drain and free; iterating further raises Cancelled. Idempotent."""
        with self._deferred():
            self._close()

    def _close(self) -> None:
        session = self._session
        if session is None:
            return
        if (run := session.run) is not None and not run.ticket.done:
            run.ticket.cancel()  # so that a thread that waits for a tensor gives up its turn
        with self._turn:
            self._tensors.close()
            session.close()
            self._session = None  # what it holds ends here too, where a signal is only noted

    def __del__(self) -> None:
        if getattr(self, "_session", None) is not None:
            with lifecycle.postponed():
                self.close()


def load(
    uri: Uris,
    device: str | int | torch.device = "cpu",
    *,
    names: Names = None,
    boxes: Boxes = None,
    verify: bool | None = None,
    group: ProcessGroup | None = None,
    copy: bool | None = None,
    memory_bytes: int | str | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: ProgressOption = None,
    trace: str | os.PathLike[str] | None = None,
) -> Weights:
    """Load a weight set into memory: {name: tensor}, complete, and verified where there are digests.

    Args:
        uri: a safetensors file, directory, index, glob, prefix (`s3://`, `gs://`, `az://`, `http(s)://`), or a list.
        device: `"cpu"`, `"cuda"`, `"cuda:N"`.
        names: glob, list of globs and names, each of something; compiled regex, or predicate of the name; None: all.
        boxes: regions wanted, by name or by a function of (name, shape); only their bytes are read, give or take gaps.
        verify: compare with the manifest's leaf digests; None: if there is one; True: or fail; False: do not.
        group: a torch.distributed group whose ranks all call this; each reads its part once, all end with everything.
        copy: on the CPU, memory that does not lean on the file; by default local files are mapped (private pages).
        memory_bytes: bound of host staging, e.g. `"256M"`; by default `PENSTOCK_MEMORY_BYTES` or 256 MiB.
        storage_options: for the object store, by obstore's names; they win over the environment.
        progress: a bar on stderr, or a function of (bytes done, of how many); None: a bar on a terminal.
        trace: where to save a Chrome trace of the load.

    Returns:
        Tensors in file order, with `.report` and `.manifest`.

    Raises:
        PenstockError: see `penstock.errors`; nothing stays allocated.

    Ownership: the caller's; dropping a tensor of 1 MiB or more frees its memory, smaller ones share slabs of ~2 MiB.
    """
    options = Options(
        device=resolve_device(device),
        names=names,
        boxes=boxes,
        verify=verify,
        copy=copy,
        storage_options=storage_options,
        progress=progress,
        trace=trace,
    )
    with deferred_interrupts(group):
        return _load(uri, options, memory_bytes, group)


def _load(uri: Uris, options: Options, memory_bytes: int | str | None, group: ProcessGroup | None) -> Weights:
    """Run `load`; a function of its own so that its locals, files among them, end where a signal is only noted."""
    quick = quick_handover() if options.device.type == "cuda" else nullcontext()
    with paused_gc(), quick, open_session(uri, options, memory_bytes, group) as session:
        tensors, nbytes = _gather(session, group)
        report = session.finish(num_tensors=len(tensors), nbytes=nbytes)
        return Weights(tensors, report, session.manifest)


def _called_as(model: Callable[_Given, object]) -> Callable[[Callable[..., _Result]], Callable[_Given, _Result]]:
    """Give a function the parameters and defaults of `model`, for type checkers and `help` too; its result stays."""
    parameters = inspect.signature(model)

    def declare(function: Callable[..., _Result]) -> Callable[_Given, _Result]:
        @wraps(function)
        def called(*args: _Given.args, **named: _Given.kwargs) -> _Result:
            arguments = parameters.bind(*args, **named)
            arguments.apply_defaults()
            return function(*arguments.args, **arguments.kwargs)

        returns = inspect.signature(function).return_annotation
        called.__signature__ = parameters.replace(return_annotation=returns)  # type: ignore[attr-defined]
        return called

    return declare


@_called_as(load)
def stream(
    uri: Uris,
    device: str | int | torch.device,
    *,
    group: ProcessGroup | None,
    memory_bytes: int | str | None,
    **options: Any,
) -> TensorStream:
    """Yield each tensor as soon as its bytes are there; reads run at most `memory_bytes` ahead. Arguments as `load`.

    Raises:
        PenstockError: from here (opening, planning) or from the iteration (moving, verifying).
    """
    wanted = Options(device=resolve_device(device), **options)
    with deferred_interrupts(group):
        return TensorStream(open_session(uri, wanted, memory_bytes, group), group)


def deferred_interrupts(group: ProcessGroup | None) -> AbstractContextManager[object]:
    """Answer Ctrl-C inside the block where nothing is left behind. Not in a group: its exchanges ask for no signal."""
    return lifecycle.deferred() if group is None else nullcontext()


def open_session(uri: Uris, options: Options, memory_bytes: int | str | None, group: ProcessGroup | None) -> Session:
    """Open the weight set and decide what is wanted of it; in a group, a rank that cannot tells the others.

    Raises:
        ConfigError: an argument is of the wrong type. PenstockError: the weight set cannot be opened.
    """
    require_type("verify", options.verify, (bool, type(None)), "True, False or None")
    if group is not None:
        require_type("group", group, torch.distributed.ProcessGroup, "a torch.distributed.ProcessGroup, or None")
    settings = Settings.read(memory_bytes=None if memory_bytes is None else parse_bytes(memory_bytes))
    with reports_failure(group, options, settings.stall_s), paused_gc():
        return Session(uri, options, settings, local_world_size=1 if group is None else group.size())


def reports_failure(group: ProcessGroup | None, options: Options, stall_s: float) -> AbstractContextManager[None]:
    """Tell the group's other ranks of errors in the block: they wait to agree on a plan."""
    if group is None:
        return nullcontext()
    from penstock.loader.group import Wire

    return Wire(group, options.device, stall_s).reports_failure()


def _gather(session: Session, group: ProcessGroup | None) -> tuple[dict[str, torch.Tensor], int]:
    """Return every tensor, and their bytes."""
    if group is not None:
        batches = list(_exchanged(session, group))
        tensors = {name: tensor for names, some in batches for name, tensor in zip(names, some, strict=True)}
        return tensors, sum(tensor.nbytes for tensor in tensors.values())
    plan, place, begin = _prepare(session, all_at_once=True)
    session.phases.enter("allocate")
    if not isinstance(place, HostPlace):
        place.allocate()
    run = begin(0)
    session.phases.enter("move")
    # Made while the bytes are on their way: about 1 us a tensor, and a large model has 60,000.
    tensors = _views(session, plan, place)
    with session.progress() as progress:
        progress.follow(run.ticket, stall_s=session.settings.stall_s)
    return tensors, plan.nbytes


def _yielding(session: Session, group: ProcessGroup | None) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield each tensor when its bytes are there; a generator, so that nothing starts before the first `next`."""
    if group is not None:
        for names, tensors in _exchanged(session, group):
            yield from zip(names, tensors, strict=True)
        return
    plan, place, begin = _prepare(session, all_at_once=False)
    run = begin(session.settings.memory_bytes)
    session.phases.enter("move")
    with session.progress() as progress:
        for names, batch in session.batches(plan, run.slabs(), place.take):
            progress.show(run.ticket)
            # No reference may stay here: a tensor that the caller drops is to free its memory at once.
            pairs = deque(zip(names, batch, strict=True))
            del batch
            while pairs:
                yield pairs.popleft()


def _exchanged(session: Session, group: ProcessGroup) -> Iterator[Batch]:
    from penstock.loader.group import exchange

    session.phases.enter("plan")
    with reports_failure(group, session.options, session.settings.stall_s):
        table = session.table()
        boxes = session.boxes(table)
    return exchange(session, group, table, boxes)


def _views(session: Session, plan: LoadPlan, place: Any) -> dict[str, torch.Tensor]:
    """Return every tensor as a view of its slab, whose bytes may not be there yet."""
    tensors: dict[str, torch.Tensor] = {}
    for names, batch in session.batches(plan, range(len(plan.slab_nbytes)), place.slab):
        tensors.update(zip(names, batch, strict=True))
    return tensors


def _prepare(session: Session, *, all_at_once: bool) -> tuple[LoadPlan, Any, Callable[[int], LoadRun]]:
    """Return the plan, the place, and what sets the run going (given how many bytes reads may be ahead; 0: any).

    `all_at_once`: nothing is given to the caller before everything is there.
    """
    session.phases.enter("plan")
    table = session.table()
    boxes = session.boxes(table)
    place: Any
    sources: Sequence[Source] | None = None
    if session.maps_files(boxes):
        # What is looked at before the end (by a consumer, to digest it) is brought in step by step, so that a file
        # cut short meanwhile is an error rather than a signal.
        mappings = session.open_mappings()
        is_ready = mappings.are_ready() and all_at_once and session.manifest.leaves is None
        plan = session.make_plan(table, boxes, pack=True, exact=True, chunk_bytes=READY_BYTES if is_ready else 0)
        place, sources = mappings.place(plan, is_ready=is_ready)
    else:
        is_whole_on_host = session.options.device.type == "cpu" and boxes.count(None) == len(boxes)
        plan = session.make_plan(table, boxes, pack=True, exact=is_whole_on_host)
        place = place_on(session.options.device, plan.slab_nbytes.tolist())
    checker = session.checker(plan, place)

    def begin(window_bytes: int) -> LoadRun:
        return session.begin(plan, place, sources=sources, checker=checker, window_bytes=window_bytes)

    return plan, place, begin


_classes: dict[tuple[type[Exception], ...], type[PenstockError]] = {}


def also(error: PenstockError, *others: type[Exception]) -> PenstockError:
    """Return `error` as an instance of its own class and of `others`; itself if it is all of them already."""
    ours = type(error)
    missing = tuple(other for other in others if not issubclass(ours, other))
    if not missing:
        return error
    key = (ours, *missing)
    if key not in _classes:
        body = {"__module__": ours.__module__, "__doc__": ours.__doc__, "__qualname__": ours.__qualname__}
        # Kept, so that two errors of one kind are of one class.
        _classes[key] = type(ours.__name__, key, body)
    instance = _classes[key].__new__(_classes[key])
    # Not by calling the class: a foreign base may want other arguments, or none.
    PenstockError.__init__(
        instance,
        error.message,
        mutated=error.mutated,
        uri=error.uri,
        tensor=error.tensor,
        byte_range=error.byte_range,
        hint=error.hint,
    )
    instance.__dict__.update(error.__dict__)
    return instance
