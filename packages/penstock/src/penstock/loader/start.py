"""The verb `load_in_background`: a thread fills a module's parameters in the order of the forward pass."""

from __future__ import annotations

import atexit
import fnmatch
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain

import torch

from penstock.arguments import require_type
from penstock.config import ReadSettings
from penstock.errors import Cancelled, ConfigError, DestinationError, OperationFailed, PenstockError
from penstock.interrupts import deferred
from penstock.lifecycle import Closeable, is_ending
from penstock.loader.into import fill, marks_target
from penstock.loader.load import open_session, settings_without_arena
from penstock.loader.match import Cast, Matched, Rename, match_targets, place_of, require_cast
from penstock.loader.pending import LazyParameter
from penstock.loader.progress import ProgressOption
from penstock.loader.report import LoadReport
from penstock.loader.session import LoadSession, ReadOptions
from penstock.loader.target_tensors import (
    Place,
    device_of,
    filled_of,
    members_in,
    memory_of,
    own_state,
    require_no_copies,
    targets_of,
)
from penstock.storage.weight_set import Names, Uris, nothing_to_verify
from penstock.telemetry.journey import Journey
from penstock.waits import start_thread

_LOOK_S = 0.5
"""Longest wait between two checks of the state, in seconds."""


class BackgroundLoad(Closeable):
    """A running load into a module that may already be used. `load_in_background` creates it.

    Each use of a parameter waits until its bytes have arrived and have matched any digests. If the load
    fails or is closed early, each use of any parameter raises the error until another load fills the parameters.
    Leaving the `with` block calls `close`.

    Attributes:
        module: the module that is being filled.
    """

    def __init__(
        self, module: torch.nn.Module, session: LoadSession, journey: Journey, matched: Matched, filled: _Filled
    ) -> None:
        self.module = module
        self._session = session
        self._journey = journey
        self._matched = matched
        self._filled = filled
        self._pid = os.getpid()
        self._report: LoadReport | None = None
        self._error: PenstockError | None = None
        self._changed = threading.Condition()
        # For each slab, whether it has arrived. The last entry means that everything has arrived.
        self._has_arrived = [False] * (len(filled.order) + 1)
        self._pending: dict[int, list[tuple[LazyParameter, torch.Tensor, list[Place]]]] = {}
        for tensor, places, slab in filled.replaced:
            pending = LazyParameter.of(
                tensor, partial(self._await, slab), self._is_refillable, partial(self._hold, slab)
            )
            self._pending.setdefault(slab, []).append((pending, tensor, places))
        # The slabs whose pending tensors were restored for pickling, and the thread that pickles them.
        self._held: dict[int, int] = {}
        # Each thread has its own current stream. Kernels on the caller's stream may still use the parameters.
        device, cuda = session.options.device, torch.cuda
        self._caller_stream: AbstractContextManager[object] = (
            cuda.stream(cuda.current_stream(device)) if device.type == "cuda" else nullcontext()
        )
        self._thread = threading.Thread(target=self._run, name="penstock-loading", daemon=True)

    @property
    def done(self) -> bool:
        """Return whether the load has ended, with or without an error, so that `wait` returns or raises at once."""
        return self._report is not None or self._error is not None

    def _is_refillable(self) -> bool:
        if not self.done or threading.current_thread() is self._thread:
            return False
        # Joining the thread takes little time, because the running reads are cancelled.
        self._thread.join(2 * self._session.settings.stall_s)
        return not self._thread.is_alive()

    def wait(self) -> LoadReport:
        """Wait until everything has arrived, and return the report.

        Raises:
            PenstockError: the load failed. A load without progress for `stall_s` fails.
        """
        self._await(len(self._has_arrived) - 1)
        assert self._report is not None
        # Wait until the thread has closed its files, unless a callback such as `progress` calls this in the thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._changed:
            for slab in list(self._held):
                self._place_parameters(slab)
        return self._report

    def close(self) -> None:
        """End the load, and return after the last write. If bytes are missing, using a parameter raises Cancelled."""
        if self._pid != os.getpid() or is_ending():
            return
        self._fail(Cancelled("the load into this module was closed before its end", hint="load the module again"))
        while self._thread.is_alive():
            # The run may begin during this loop.
            if self._error is not None and (run := self._session.run) is not None:
                run.ticket.cancel()
            # A callback such as `progress` called this in the thread, which ends after the callback.
            if threading.current_thread() is self._thread:
                return
            self._thread.join(_LOOK_S)

    def _start(self) -> None:
        """Put the pending tensors into the module, and start the thread. Raise DestinationError if no thread starts."""
        for pending, _, places in chain.from_iterable(self._pending.values()):
            for members, name in places:
                # The assignment also replaces a pending tensor of a failed load.
                members[name] = pending
        # The thread must end before the interpreter releases the memory at exit.
        atexit.register(self.close)
        try:
            start_thread(self._thread)
        except DestinationError:
            atexit.unregister(self.close)
            for slab in self._pending:
                self._place_parameters(slab)
            raise

    def _place_pending_of(self, slab: int) -> None:
        for pending, tensor, places in self._pending.get(slab, ()):
            _exchange(places, tensor, pending)

    def _place_parameters(self, slab: int) -> None:
        self._held.pop(slab, None)
        for pending, tensor, places in self._pending.get(slab, ()):
            _exchange(places, pending, tensor)

    def _hold(self, slab: int) -> None:
        """Restore the pending tensors of a slab during pickling, which recognises tied tensors by identity."""
        with self._changed:
            if self._error is None and any(len(places) > 1 for _, _, places in self._pending.get(slab, ())):
                self._place_pending_of(slab)
                self._held[slab] = threading.get_ident()

    def _run(self) -> None:
        session = self._session
        error: PenstockError = OperationFailed(
            "the loading thread ended with an unexpected error", hint="see its traceback on stderr"
        )
        try:
            with self._caller_stream, marks_target(session):
                nbytes = fill(session, self._matched, self._filled.order, self._note)
                report = session.finish(num_tensors=len(self._matched.table), nbytes=nbytes)
            self._journey.report = report
            self._journey.end()
            self._finish(report)
        except PenstockError as failure:
            error = failure
        finally:
            # An unexpected error must reach the users of the module too.
            self._journey.end(error)
            self._fail(error)
            session.close()
            # The registration would keep the module alive until exit.
            atexit.unregister(self.close)

    def _note(self, slab: int) -> None:
        with self._changed:
            if self._error is not None:
                raise Cancelled("the load was closed")
            self._has_arrived[slab] = True
            self._place_parameters(slab)
            self._changed.notify_all()

    def _finish(self, report: LoadReport) -> None:
        with self._changed:
            if self._error is not None:
                return
            self._report = report
            self._has_arrived[-1] = True
            self._place_parameters(len(self._has_arrived) - 1)
            self._changed.notify_all()

    def _fail(self, error: PenstockError) -> None:
        """Make every use of the parameters raise an error, including parameters that had arrived."""
        with self._changed:
            if self.done:
                return
            self._error = error
            for slab in self._pending:
                self._place_pending_of(slab)
            self._changed.notify_all()

    def _await(self, slab: int) -> None:
        if self._pid != os.getpid():
            hint = "call wait() of the BackgroundLoad before the fork"
            raise ConfigError("the weights were still being loaded when this process was forked", hint=hint)
        with self._changed:
            while self._error is None and not self._has_arrived[slab]:
                self._changed.wait(_LOOK_S)
            if self._error is not None:
                raise self._error.with_traceback(None)
            # The thread that pickled the slab uses it again, so it has finished pickling.
            if self._held.get(slab) == threading.get_ident():
                self._place_parameters(slab)


def _exchange(places: Sequence[Place], old: torch.Tensor, new: torch.Tensor) -> None:
    """Replace a tensor in the places that still hold the old tensor, so that concurrent changes by the user are kept.

    Start with the last place, because pickle moves forward and must find the same tensor in all remaining places.
    """
    for members, name in reversed(places):
        if members.get(name) is old:
            members[name] = new


class _Filled:
    """The tensors that a load fills, and their order. `first` contains globs for the tensors to fill first.

    Attributes:
        order: slabs in the order of their use.
        replaced: the module's parameters and buffers with their places, and the slab that each waits for. An index
            equal to the number of slabs means all slabs.
    """

    def __init__(self, module: torch.nn.Module, filled: list[torch.Tensor], first: Sequence[str]) -> None:
        state = own_state(module)
        with_bytes = [tensor for tensor in filled if tensor.numel()]
        slab_of = {place_of(tensor): slab for slab, tensor in enumerate(with_bytes)}
        # The state dict uses the module's names, while the file may use different names.
        memories = {memory_of(tensor) for tensor in with_bytes}
        inside = {name: tensor for name, tensor in state.items() if tensor.numel() and memory_of(tensor) in memories}
        wanted: dict[int, tuple[int, int]] = {}
        for position, (name, tensor) in enumerate(inside.items()):
            # A tensor over a part of the filled memory, such as fused projections, waits for everything.
            slab = slab_of.get(place_of(tensor), len(with_bytes))
            # The first name of a tied weight determines its position.
            rank = next((i for i, glob in enumerate(first) if fnmatch.fnmatchcase(name, glob)), len(first))
            wanted[slab] = min(wanted.get(slab, (rank, position)), (rank, position))
        self.replaced: list[tuple[torch.Tensor, list[Place], int]] = [
            (own, places, slab_of.get(place_of(own), len(with_bytes)))
            for own, places in members_in(module, inside, "load_in_background").values()
        ]
        self.order = sorted(range(len(with_bytes)), key=lambda slab: wanted[slab])


def load_in_background(
    module: torch.nn.Module,
    uri: Uris,
    *,
    first: Sequence[str] = (),
    strict: bool = True,
    rename: Rename = None,
    dtype: Cast = None,
    names: Names = None,
    verify: bool | None = None,
    progress: ProgressOption = None,
    settings: ReadSettings | None = None,
) -> BackgroundLoad:
    """Start filling a module from a weight set, and return at once. The module may be called while bytes arrive.

    The tensors are read in the order in which the module defines them, which is usually the order of the forward pass.
    A layer waits only for its own bytes, and weights that the forward pass does not use do not delay it.

    Parameters stay the same objects with the same memory. During the load other tensors replace the parameters in the
    module, so take references before this call or after `wait`.

    Args:
        module: a module whose parameters and persistent buffers are on one device other than meta.
        uri, names: see `load`.
        first: globs for names of the module's tensors that are read first, in the order of the globs.
        strict, rename, dtype: see `load_into`.
        progress: see `load`. A progress function is called in the loading thread.
        settings: memory limit, options for the object store, and more. See `ReadSettings`.
        verify: see `load`. Each tensor is compared with the manifest's digests before it can be used. Digests of whole
            files are not sufficient for `verify=True`, because they are known only at the end of a file.

    Returns:
        The running load. Call the load's `wait` before `torch.compile`, before capturing CUDA graphs, before a fork,
        and before passing the module's parameters to code outside torch.

    Raises:
        PlanError: like `load_into`. Nothing was touched.
        NotFound: `verify=True`, but there is no manifest with digests.
        PenstockError: the weight set cannot be opened. Errors after the start are raised when a parameter is used.
    """
    require_type("the target", module, torch.nn.Module, "a torch.nn.Module")
    globs = "a sequence of globs, such as ['model.language_model.*']"
    require_cast(dtype)
    require_type("first", first, (list, tuple), globs)
    read = settings_without_arena(settings, "load_in_background")
    targets = targets_of(module, written=strict)
    device = device_of(targets)
    options = ReadOptions(device=device, names=names, verify=verify, progress=progress, settings=read)
    with deferred():
        journey = Journey("load", uri=str(uri), device=str(device)).begin()
        try:
            session = open_session(uri, options, None)
            try:
                journey.received = session.received
                session.phases.enter("plan")
                if verify and session.manifest.leaves is None:
                    why = session.weights.why_unverified or "there are no digests of its parts"
                    why += ": they would be used before they are verified"
                    raise nothing_to_verify(why, uri=str(uri), hint="use load_into")
                matched = match_targets(session, targets, rename, strict, cast=dtype, whole="load_in_background")
                if not strict:
                    require_no_copies(module, filled_of(targets, matched))
                loading = BackgroundLoad(
                    module, session, journey, matched, _Filled(module, matched.lines().tensors, first)
                )
                loading._start()
            except BaseException:
                session.close()
                raise
        except BaseException as error:
            journey.end(error)
            raise
        return loading
