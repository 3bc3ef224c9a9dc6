"""Tensors that stand in a module for parameters whose bytes have not arrived: any use of one waits for its bytes.

In: a parameter, and a function that waits for it. Out: a tensor of the same shape, dtype and device for the module.
Not here: when the bytes arrive, and the swap back to the parameter itself (`start`).

A `LazyParameter` has no memory of the parameter: it is a tensor on the meta device. Code that does not go through
torch's Python functions, such as a C++ extension, finds no bytes there and fails; it cannot read bytes that have not
arrived.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import ConfigError

_PROPERTIES = (
    "shape dtype device ndim layout requires_grad is_leaf is_cuda is_cpu is_meta is_sparse is_quantized is_nested"
)
_PROPERTIES += " itemsize nbytes grad grad_fn retains_grad output_nr"
_METHODS = (
    "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex storage_offset"
)
_METHODS += " __len__ is_signed is_conj is_neg get_device"

_DESCRIBES = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()]
    + [getattr(torch.Tensor, name) for name in _METHODS.split()]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
"""Functions of torch that tell what a tensor is and read none of its bytes: they do not wait."""


class _Block(threading.local):
    """Whether the calling thread is inside `own_tensors`, and its argument."""

    whole: bool | None = None


_block = _Block()


@contextmanager
def own_tensors(whole: bool) -> Iterator[None]:
    """Let torch's functions act on the module's own tensors, as `own_tensor` returns them, inside the block.

    A module may give views of its parameters as its state dict. Taking a view of a tensor reads none of its bytes.
    """
    _block.whole = whole
    try:
        yield
    finally:
        _block.whole = None


class LazyParameter(torch.Tensor):
    """A parameter whose bytes have not arrived. Each use waits for them, then acts on the parameter itself."""

    _parameter: torch.Tensor
    _wait: Callable[[], None]
    _lets_go: Callable[[], bool]
    _hold: Callable[[], None]

    @staticmethod
    def of(
        parameter: torch.Tensor,
        wait: Callable[[], None],
        lets_go: Callable[[], bool],
        hold: Callable[[], None] = lambda: None,
    ) -> LazyParameter:
        """Return a pending tensor for a parameter or buffer.

        Args:
            parameter: the tensor that it replaces; do not move or resize it before its bytes have arrived.
            wait: returns when the bytes are there; raises the error if they do not come.
            lets_go: returns whether another load may fill the parameter. It waits for the last write of a load that
                failed or was closed.
            hold: called when the tensor is pickled, once the bytes are there: keeps it in its places in the module.
        """
        empty = torch.empty_strided(tuple(parameter.shape), parameter.stride(), dtype=parameter.dtype, device="meta")
        pending = empty.as_subclass(LazyParameter)
        pending._parameter = parameter
        pending._wait = wait
        pending._lets_go = lets_go
        pending._hold = hold
        if isinstance(parameter, torch.nn.Parameter):
            # The mark by which torch recognises a parameter of another class.
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
        """Call a function of torch with the parameters in place of the pending tensors, once they have arrived."""
        resolve = _parameter_of if func in _DESCRIBES else _arrived
        return func(*_replaced(tuple(args), resolve), **_replaced(dict(kwargs or {}), resolve))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the parameter itself."""
        parameter = _arrived(self)
        self._hold()
        return parameter.__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        """Copy the parameter itself."""
        return copy.copy(_arrived(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the parameter itself."""
        return _arrived(self).__deepcopy__(memo)


def own_tensor(tensor: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
    """Return a module's own tensor: of a pending one, the parameter that it stands for, to fill it again.

    Args:
        tensor: the tensor in the module.
        whole: the parameter is to be read: raise the error of a load that failed.

    If its load failed or was closed, this first waits until that load writes nothing more.

    Raises:
        ConfigError: its load is still under way.
    """
    if not isinstance(tensor, LazyParameter):
        return tensor
    if not tensor._lets_go():
        raise ConfigError("the module is being loaded", hint="call Loading.wait() or Loading.close() first")
    if whole:
        tensor._wait()
    return tensor._parameter


def _parameter_of(pending: LazyParameter) -> torch.Tensor:
    return pending._parameter


def _arrived(pending: LazyParameter) -> torch.Tensor:
    if _block.whole is not None:
        return own_tensor(pending, whole=_block.whole)
    pending._wait()
    return pending._parameter


def _replaced(value: Any, resolve: Callable[[LazyParameter], torch.Tensor]) -> Any:
    """Return arguments with each pending tensor replaced, also inside lists, tuples and dicts."""
    if isinstance(value, LazyParameter):
        return resolve(value)
    if type(value) in {list, tuple}:
        return type(value)(_replaced(one, resolve) for one in value)
    if type(value) is dict:
        return {key: _replaced(one, resolve) for key, one in value.items()}
    return value
