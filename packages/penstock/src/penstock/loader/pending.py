"""Tensors that replace a module's parameters until the bytes have arrived. Each use of a tensor waits for its bytes.

A `LazyParameter` is on the meta device, so a C++ extension, which bypasses torch's Python functions, fails on it
instead of reading bytes that have not arrived.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import ConfigError

_PROPERTIES = """
    shape dtype device ndim layout requires_grad is_leaf is_cuda is_cpu is_meta is_sparse is_quantized is_nested
    itemsize nbytes grad grad_fn retains_grad output_nr
"""
_METHODS = """
    size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex storage_offset
    __len__ is_signed is_conj is_neg get_device
"""

_DESCRIBES = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()]
    + [getattr(torch.Tensor, name) for name in _METHODS.split()]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
"""Torch functions that describe a tensor without reading its bytes, and therefore do not wait for the bytes."""


class _OwnTensorsState(threading.local):
    """The argument of `own_tensors` in each thread, or None outside an `own_tensors` block."""

    whole: bool | None = None


_block = _OwnTensorsState()


@contextmanager
def own_tensors(whole: bool) -> Iterator[None]:
    """Let torch's functions act on the module's own tensors inside the block, for state dicts that create views."""
    _block.whole = whole
    try:
        yield
    finally:
        _block.whole = None


class LazyParameter(torch.Tensor):
    """A parameter whose bytes have not arrived. Each use waits for the bytes and then acts on the parameter."""

    _parameter: torch.Tensor
    _wait: Callable[[], None]
    _is_refillable: Callable[[], bool]
    _hold: Callable[[], None]

    @staticmethod
    def of(
        parameter: torch.Tensor,
        wait: Callable[[], None],
        is_refillable: Callable[[], bool],
        hold: Callable[[], None] = lambda: None,
    ) -> LazyParameter:
        """Create a pending tensor for a parameter or buffer, which must not be moved or resized.

        Args:
            wait: returns when the bytes have arrived, or raises the error of the load.
            is_refillable: waits for a failed load's last write, then returns whether a new load may fill the parameter.
            hold: called when the bytes have arrived, to keep the pending tensor in the module during pickling.
        """
        empty = torch.empty_strided(tuple(parameter.shape), parameter.stride(), dtype=parameter.dtype, device="meta")
        pending = empty.as_subclass(LazyParameter)
        pending._parameter = parameter
        pending._wait = wait
        pending._is_refillable = is_refillable
        pending._hold = hold
        if isinstance(parameter, torch.nn.Parameter):
            # Torch uses this attribute to recognise parameters of other classes.
            pending._is_param = True
        return pending

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for the bytes of the pending tensors, then call a torch function with their parameters."""
        resolve = (lambda pending: pending._parameter) if func in _DESCRIBES else _arrived
        return func(*_replaced(tuple(args), resolve), **_replaced(dict(kwargs or {}), resolve))

    def __reduce_ex__(self, protocol: Any) -> Any:
        parameter = _arrived(self)
        self._hold()
        return parameter.__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return copy.copy(_arrived(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _arrived(self).__deepcopy__(memo)


def own_tensor(tensor: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
    """Return the parameter behind a pending tensor, after the last write of its load, and any other tensor unchanged.

    If `whole` is set, the caller reads the values, so raise a failed load's error. Raise ConfigError during a load.
    """
    if not isinstance(tensor, LazyParameter):
        return tensor
    if not tensor._is_refillable():
        raise ConfigError("the module is still being loaded", hint="call wait() or close() of its BackgroundLoad first")
    if whole:
        tensor._wait()
    return tensor._parameter


def _arrived(pending: LazyParameter) -> torch.Tensor:
    if _block.whole is not None:
        return own_tensor(pending, whole=_block.whole)
    pending._wait()
    return pending._parameter


def _replaced(value: Any, resolve: Callable[[LazyParameter], torch.Tensor]) -> Any:
    if isinstance(value, LazyParameter):
        return resolve(value)
    if type(value) in {list, tuple}:
        return type(value)(_replaced(one, resolve) for one in value)
    if type(value) is dict:
        return {key: _replaced(one, resolve) for key, one in value.items()}
    return value
