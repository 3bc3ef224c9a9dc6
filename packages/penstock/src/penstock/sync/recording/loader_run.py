"""Runs a model's own loader on tensors without storage, and restores the model afterwards."""

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
"""Dtype and shape of each checkpoint tensor in torch's elements."""


class LoaderRaised(Exception):
    """The loader itself raised an error, which is the cause. `last` is the last tensor that the loader received."""

    def __init__(self, last: str) -> None:
        super().__init__(last)
        self.last = last
        self.was_incomplete = False


def error_text(error: BaseException | None) -> str:
    """Return the text for an error in the user's code."""
    return f"{type(error).__name__}: {error}"[:1000]


@contextlib.contextmanager
def user_code(what: str, *, mutated: bool = False) -> Iterator[None]:
    """Turn any error from the user's code in the block into a PlanError with that error as its cause."""
    try:
        yield
    except PenstockError as error:
        error.mutated |= mutated
        raise
    except Exception as error:
        raise PlanError(f"{what} raised {error_text(error)}", mutated=mutated) from error


def follow(
    model: torch.nn.Module, specs: Specs, run: Load, device: torch.device, left_out: dict[str, str]
) -> LoadRecorder:
    """Repeat the loader until it reads no values. Tensors whose values the loader reads are added to `left_out`."""
    # The loop ends, because each run leaves out at least one more tensor.
    while True:
        recorder = LoadRecorder(model, device)
        available = {name: spec for name, spec in specs.items() if name not in left_out}
        try:
            with writing(live_tensors(model).values()), _Pass(model, recorder) as running:
                run(running.tensors(available))
        except LoaderRaised as raised:
            raised.was_incomplete = len(available) < len(specs)
            raise
        if not recorder.read:
            return recorder
        left_out |= recorder.read


def targets_written_by(model: torch.nn.Module, specs: Specs, run: Load, device: torch.device) -> frozenset[str]:
    """Return the live tensors that the loader writes to. Raise LoaderRaised if it needs a tensor that `specs` lacks."""
    # This watch is nested in the recorder's watch, so it sees each operator before the recorder replaces the operator.
    seen = _WriteWatch()

    def watched(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with seen:
            run(weights)

    follow(model, specs, watched, device, {})
    by_storage: dict[int, list[tuple[int, int]]] = {}
    for storage, start, stop in seen.spans:
        by_storage.setdefault(storage, []).append((start, stop))
    live = {name: span(tensor) for name, tensor in live_tensors(model).items()}
    return frozenset(
        name
        for name, (storage, start, stop) in live.items()
        if any(a < stop and start < b for a, b in by_storage.get(storage, ()))
    )


def own_loader(model: torch.nn.Module) -> Load:
    """Return the model's own loader, which is `load_weights` or else `load_state_dict`."""
    model = unwrapped(model)
    # vLLM and SGLang define `load_weights`, which accepts the checkpoint's own names.
    own = getattr(model, "load_weights", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    return lambda weights: model.load_state_dict(dict(weights), strict=False)


class _Pass:
    """A run of the loader that watches operators, and restores the model's tensors afterwards."""

    def __init__(self, model: torch.nn.Module, recorder: LoadRecorder) -> None:
        self._recorder = recorder
        self._last = ""
        groups: list[dict[str, Any]] = [g for module in model.modules() for g in (module._parameters, module._buffers)]
        self._saved = [(group, dict(group)) for group in groups]
        self._data = [(t, t.data) for _, saved in self._saved for t in saved.values() if t is not None]

    def tensors(self, specs: Specs) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, shape) in specs.items():
            self._last = name
            # In inference mode torch refuses views of older tensors, so create each tensor now, unwatched for speed.
            with torch._C._DisableTorchDispatch():
                tensor = self._recorder.checkpoint_tensor(name, dtype, shape)
            yield name, tensor
        self._last = ""

    def __enter__(self) -> _Pass:
        self._recorder.watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        self._recorder.watch.__exit__(kind, error, tb)  # type: ignore[no-untyped-call]
        # If the loader replaced a parameter, the new tensor contains the values to record.
        for group, saved in self._saved:
            for name, old in saved.items():
                new = group.get(name)
                if old is not None and new is not None and new is not old:
                    self._recorder.assigned(old.detach(), new)
            group.clear()
            group.update(saved)
        # Loaders also assign `param.data`, which changes a parameter's memory but not its identity.
        for tensor, data in self._data:
            if tensor.data_ptr() != data.data_ptr() or tensor.device != data.device:
                tensor.data = data
        if isinstance(error, Exception) and self._recorder.read:
            # A placeholder for a value misled the loader. The next run leaves out the tensor that was read.
            return True
        if isinstance(error, Exception) and not isinstance(error, PenstockError):
            raise LoaderRaised(self._last) from error
        return False


class _WriteWatch(TorchDispatchMode):
    """Dispatch mode that records the memory that operators write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spans: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.spans += [span(tensor) for tensor in written(func, args, kwargs or {}) if not isinstance(tensor, Recorded)]
        return func(*args, **(kwargs or {}))


def span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a tensor's storage and its byte range in the storage."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = int(tensor.storage_offset()) * tensor.itemsize
    return int(tensor.untyped_storage()._cdata), first, first + (int(reach) * tensor.itemsize if tensor.numel() else 0)
