"""Runs of a model's own loader on tensors without storage: followed by a recorder, with the model put back afterwards.

In: a live model, its loader, names with dtypes and shapes. Out: the recorder of a run; what a run writes to; or
`LoaderRaised`.
Not here: turning a recorder's pieces into records (`requirements`), the effect of operators (`meta_tensors`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import PenstockError, PlanError
from penstock.sync.recording.layout import Load, live_tensors, writing
from penstock.sync.recording.meta_tensors import LoadRecorder, Recorded, written
from penstock.sync.shards import unwrapped

Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each checkpoint tensor, as torch shows it."""


class LoaderRaised(Exception):
    """The loader itself raised an error, which is the cause.

    Attributes:
        last: the last tensor that the loader received; empty: it received all of them, or none.
        lacked: the loader was not given all tensors of the checkpoint.
    """

    # No PenstockError: `record` decides whether the loader can do without a recording.

    def __init__(self, last: str) -> None:
        super().__init__(last)
        self.last = last
        self.lacked = False


def said(error: BaseException | None) -> str:
    """Return the text for an error of the user's code."""
    return f"{type(error).__name__}: {error}"[:1000]


@contextlib.contextmanager
def users_code(what: str, *, mutated: bool = False) -> Iterator[None]:
    """Turn any error that the user's code raises in the block into a PlanError, which has it as the cause."""
    try:
        yield
    except PenstockError as error:
        error.mutated |= mutated
        raise
    except Exception as error:
        raise PlanError(f"{what} raised {said(error)}", mutated=mutated) from error


def follow(
    model: torch.nn.Module, specs: Specs, run: Load, device: torch.device, left_out: dict[str, str]
) -> LoadRecorder:
    """Run the loader until it reads no values, each time without the tensors whose values it read before.

    Args:
        specs: of all tensors that it may be given.
        left_out: tensors that it is not given, with the reason; those whose values it reads are added.

    Raises:
        LoaderRaised: the loader raised an error. PlanError: as `LoadRecorder`.
    """
    # Each run leaves out at least one more tensor, so this ends.
    while True:
        recorder = LoadRecorder(model, device)
        given = {name: spec for name, spec in specs.items() if name not in left_out}
        try:
            with writing(live_tensors(model).values()), _Pass(model, recorder) as running:
                run(running.tensors(given))
        except LoaderRaised as raised:
            raised.lacked = len(given) < len(specs)
            raise
        if not recorder.read:
            return recorder
        left_out |= recorder.read


def written_alone(model: torch.nn.Module, specs: Specs, run: Load, device: torch.device) -> frozenset[str]:
    """Return the live tensors that the loader writes to when it gets these tensors alone.

    Raises:
        LoaderRaised: the loader needs other tensors too.
    """
    # Again without values. This watch is inside the recorder's, so it sees each operator before that replaces it.
    seen = _WriteWatch()

    def watched(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with seen:
            run(weights)

    follow(model, specs, watched, device, {})
    live = {name: span(tensor) for name, tensor in live_tensors(model).items()}
    return frozenset(_meeting(live, seen.spans))


def own_loader(model: torch.nn.Module) -> Load:
    """Return the model's own loader: its `load_weights`, else `load_state_dict`."""
    # The wrappers of torch.compile and of data parallelism add a prefix to all names.
    model = unwrapped(model)
    # `load_weights` is the convention of vLLM and SGLang: it takes the checkpoint's own names.
    own = getattr(model, "load_weights", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    return lambda weights: model.load_state_dict(dict(weights), strict=False)


class _Pass:
    """A run of the loader: operators are watched during it, and the model's own tensors put back after it."""

    def __init__(self, model: torch.nn.Module, recorder: LoadRecorder) -> None:
        self._recorder = recorder
        # The tensor that the loader received last, until it asks for one more than there are.
        self._last = ""
        groups: list[dict[str, Any]] = [g for module in model.modules() for g in (module._parameters, module._buffers)]
        # The model's tensors and their memory before the run, to be put back.
        self._saved = [(group, dict(group)) for group in groups]
        self._data = [(t, t.data) for _, saved in self._saved for t in saved.values() if t is not None]

    def tensors(self, specs: Specs) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the recording tensors, one by one."""
        for name, (dtype, shape) in specs.items():
            self._last = name
            # Unwatched: watching them made is a third of the time of a recording. Not all of them before the loader
            # runs: in its inference mode torch refuses views of tensors that were made outside of it.
            with torch._C._DisableTorchDispatch():
                tensor = self._recorder.checkpoint_tensor(name, dtype, shape)
            yield name, tensor
        self._last = ""

    def __enter__(self) -> _Pass:
        self._recorder.watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        self._recorder.watch.__exit__(kind, error, tb)  # type: ignore[no-untyped-call]
        self._put_back()
        if isinstance(error, Exception) and self._recorder.read:
            # The stand-in for a value led the loader astray: the next run leaves that tensor out.
            return True
        if isinstance(error, Exception) and not isinstance(error, PenstockError):
            raise LoaderRaised(self._last) from error
        return False

    def _put_back(self) -> None:
        """Restore the model's tensors; record a tensor that replaced a parameter as that parameter's values."""
        for group, saved in self._saved:
            for name, old in saved.items():
                new = group.get(name)
                if old is not None and new is not None and new is not old:
                    self._recorder.assigned(old.detach(), new)
            group.clear()
            group.update(saved)
        # Loaders also assign `param.data`, which leaves the parameter's identity but changes its memory.
        for tensor, data in self._data:
            if tensor.data_ptr() != data.data_ptr() or tensor.device != data.device:
                tensor.data = data


class _WriteWatch(TorchDispatchMode):
    """Dispatch mode that notes the memory that operators write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spans: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.spans += [span(tensor) for tensor in written(func, args, kwargs or {}) if not isinstance(tensor, Recorded)]
        return func(*args, **(kwargs or {}))


def span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a tensor's storage, its first byte in it, and the end of its last."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = int(tensor.storage_offset()) * tensor.itemsize
    return int(tensor.untyped_storage()._cdata), first, first + (int(reach) * tensor.itemsize if tensor.numel() else 0)


def _meeting(live: Mapping[str, tuple[int, int, int]], spans: Iterable[tuple[int, int, int]]) -> Iterator[str]:
    """Yield the names of live tensors whose bytes meet one of the spans."""
    by_storage: dict[int, list[tuple[int, int]]] = {}
    for storage, start, stop in spans:
        by_storage.setdefault(storage, []).append((start, stop))
    for name, (storage, start, stop) in live.items():
        if any(a < stop and start < b for a, b in by_storage.get(storage, ())):
            yield name
