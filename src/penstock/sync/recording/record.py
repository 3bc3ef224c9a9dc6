"""Recording of a model's own loader, run once with tensors that have no storage.

In: a live model, its loader, the table of a checkpoint. Out: a `Recording`; the model is unchanged, bit for bit.
Not here: copies by strides (`stride_map`), the use of a recording (`layout`), the effect of operators
(`meta_tensors`).

    names, shapes -> tensors that only know where their elements came from -> load_weights -> copies into live memory
                                                                                               caught, not carried out
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from penstock.errors import PlanError
from penstock.hub.identity import layout_digest
from penstock.loader.into import targets_of
from penstock.loader.tensor import torch_dtype, torch_shape
from penstock.sync.recording.layout import Constant, Load, Record, Recording
from penstock.sync.recording.meta_tensors import LoadRecorder
from penstock.types import TensorTable


def record(
    model: torch.nn.Module,
    table: TensorTable,
    *,
    load: Load | None = None,
    device: torch.device | str = "cpu",
) -> Recording:
    """Record a model's loader, as copies of boxes.

    Args:
        model: live, on any device, "meta" included. Copies into its parameters and buffers are recorded.
        table: the checkpoint's tensors, from its manifest or its publisher.
        load: takes the tensors as pairs (name, tensor); None is `model.load_weights`, else `model.load_state_dict`.
        device: the device that the recording tensors report.

    Raises:
        PlanError: the loader reads values that are not the checkpoint's, so that no run of it can be trusted.
        Exception: any error of the loader itself, with a note that names the last tensor it received.

    If the loader reads a tensor's values (`item`, a comparison), it runs again without that tensor, which later passes
    through the loader at each update. The loader's effects on anything but the model's tensors stay.
    Order: nothing else may use the model meanwhile; the loader's threads are followed where they use these tensors.
    Cost: no memory of the tensors' sizes; about 50 us of Python per operator that the loader calls.
    """
    run = load or own_loader(model)
    left_out: dict[str, str] = {}
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, dtype, shape in zip(table.names, table.dtypes, table.shapes, strict=True):
        try:
            specs[name] = torch_dtype(dtype), torch_shape(dtype, shape)
        except PlanError as error:
            left_out[name] = error.message
    # Each run leaves out at least one more tensor, so this ends.
    while True:
        recorder = LoadRecorder(model, torch.device(device))
        recordable = {name: spec for name, spec in specs.items() if name not in left_out}
        with torch.no_grad(), _Pass(model, recorder) as running:
            run(running.tensors(recordable))
        if not recorder.read:
            break
        left_out |= recorder.read
    return _recording(model, table, recorder, left_out)


def own_loader(model: torch.nn.Module) -> Load:
    """Return the model's own loader: its `load_weights`, else `load_state_dict`."""
    own = getattr(model, "load_weights", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    return lambda weights: model.load_state_dict(dict(weights), strict=False)


class _Pass:
    """A run of the loader: operators are watched during it, and the model's own tensors put back after it."""

    def __init__(self, model: torch.nn.Module, recorder: LoadRecorder) -> None:
        self._recorder = recorder
        self._last = ""
        groups: list[dict[str, Any]] = [g for module in model.modules() for g in (module._parameters, module._buffers)]
        self._held = [(group, dict(group)) for group in groups]
        self._data = [(t, t.data) for _, saved in self._held for t in saved.values() if t is not None]

    def tensors(self, specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the recording tensors, one by one."""
        for name, (dtype, shape) in specs.items():
            self._last = name
            yield name, self._recorder.checkpoint_tensor(name, dtype, shape)

    def __enter__(self) -> _Pass:
        self._recorder.watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        self._recorder.watch.__exit__(kind, error, tb)  # type: ignore[no-untyped-call]
        self._put_back()
        if isinstance(error, Exception) and self._recorder.read:
            # The stand-in for a value led the loader astray: the next run leaves that tensor out.
            return True
        if error is not None:
            error.add_note(f"while the loader was recorded; the last tensor it received is {self._last!r}")
        return False

    def _put_back(self) -> None:
        """Restore the model's tensors; record a tensor that replaced a parameter as that parameter's values."""
        for group, saved in self._held:
            for name, old in saved.items():
                new = group.get(name)
                if old is not None and new is not None and new is not old:
                    self._recorder.replaced(old.detach(), new)
            group.clear()
            group.update(saved)
        # Loaders also assign `param.data`, which leaves the parameter's identity but changes its memory.
        for tensor, data in self._data:
            if tensor.data_ptr() != data.data_ptr() or tensor.device != data.device:
                tensor.data = data


def _recording(
    model: torch.nn.Module, table: TensorTable, recorder: LoadRecorder, left_out: Mapping[str, str]
) -> Recording:
    unrecorded = {**left_out, **recorder.lost}
    records: list[Record] = []
    constants: list[Constant] = []
    filled: dict[str, int] = {}
    for target, pieces in recorder.live_pieces():
        for piece in pieces:
            box = piece.map.target_box()
            if piece.why:
                unrecorded |= dict.fromkeys(piece.names, piece.why)
                continue
            filled[target] = filled.get(target, 0) + box.num_elements
            if piece.value is not None:
                constants.append(Constant(target=target, target_box=box, value=piece.value))
                continue
            split, permutation = piece.map.order()
            records.append(
                Record(
                    source=piece.names[0],
                    source_box=piece.map.source_box(),
                    split=split,
                    permutation=permutation,
                    target=target,
                    target_box=box,
                    steps=piece.steps,
                )
            )
    used = {entry.source for entry in records} | unrecorded.keys()
    shapes = {name: tuple(shape) for name, shape in zip(table.names, table.shapes, strict=True) if name in used}
    homes = {name: (tensor, recorder.name_of(tensor)) for name, tensor in targets_of(model).items()}
    missing = {name: tensor.numel() - filled.get(home, 0) for name, (tensor, home) in homes.items() if home is not None}
    unused = [n for n, shape in zip(table.names, table.shapes, strict=True) if n not in used and 0 not in shape]
    return Recording(
        layout=layout_digest(table),
        shapes=shapes,
        records=tuple(records),
        constants=tuple(constants),
        unrecorded=unrecorded,
        unused=tuple(unused),
        unfilled={name: count for name, count in missing.items() if count},
    )
