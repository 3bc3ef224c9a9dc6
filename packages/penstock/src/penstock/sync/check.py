"""Checks of a version before it goes live. A check cannot change the version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from penstock.errors import MALFORMED, ConfigError, FormatError, PlanError
from penstock.hub.messages import prepare
from penstock.loader.tensor import dtype_of, torch_dtype
from penstock.memory.arena import Arena
from penstock.sync.recording.requirements import Requirements
from penstock.transport.protocol import Memory
from penstock.types import MIB, DType

MAX_CHECK_BYTES = MIB
"""Maximum size of the check values of one version, in bytes. Every subscriber with a check requests them."""


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    plain: Any = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes = b""


prepare(dict[str, _Value])


def encode_values(values: Mapping[str, object]) -> bytes:
    """Encode the values for a check. Raise ConfigError for a value that msgpack cannot encode, or too many bytes."""
    encoded = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            flat = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            dtype, shape = str(dtype_of(value.dtype)), tuple(value.shape)
            encoded[name] = _Value(dtype=dtype, shape=shape, data=flat.numpy().tobytes())
        else:
            encoded[name] = _Value(plain=value)
    try:
        raw = msgspec.msgpack.encode(encoded)
    except (TypeError, ValueError, OverflowError) as error:
        hint = "pass only tensors, numbers, strings, lists and dicts"
        raise ConfigError(f"cannot encode a value for the check: {error}", hint=hint) from error
    if len(raw) > MAX_CHECK_BYTES:
        hint = "pass fewer tokens"
        raise ConfigError(f"the values for the check have {len(raw)} bytes, more than {MAX_CHECK_BYTES}", hint=hint)
    return raw


def decode_values(raw: bytes) -> dict[str, Any]:
    """Decode the values for a check. Raise FormatError if the bytes are malformed."""
    if not raw:
        return {}
    try:
        decoded = msgspec.msgpack.decode(raw, type=dict[str, _Value])
        return {name: _decoded(value) for name, value in decoded.items()}
    except (*MALFORMED, ValueError, RuntimeError) as error:
        raise FormatError(f"cannot decode the values for the check: {error}") from error


def _decoded(value: _Value) -> Any:
    if not value.dtype:
        return value.plain
    # Copy the bytes, because torch must not write to the received message.
    data = bytearray(value.data)
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(torch_dtype(DType(value.dtype))).reshape(value.shape)


class _CopiedTensors(Mapping[str, torch.Tensor]):
    """Tensors by name. Each access returns a new copy of a tensor."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion:
    """The weights of a staged version, which are valid while the check runs."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    """Parameters and buffers of a module, or the tensors of a dict, with the values of this version. If a dict has
    several shards of a tensor, their names contain the offset, as in `up[4, 0]`. Each access returns a new copy."""
    expected: Mapping[str, Any]
    """Values that the trainer published for the check. May be empty."""
    unknown: frozenset[str] = frozenset()
    """Parameters that `tensors` lacks, because the model's loader fills them when the version goes live."""
    model: torch.nn.Module | None = None
    """The live module. None if the target is not a module."""
    _staged: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    """Tensors in the staging copy, which goes live."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass with the staged weights, and return its result.

        The live weights do not change. The forward pass may write to buffers, because it uses copies of them. If the
        forward pass writes to a parameter, the check fails. No other thread may use the module during the call.

        Raises:
            PlanError: the target is not a module, or some of its parameters are `unknown`.
        """
        if self.model is None:
            raise PlanError("the target is a dict of tensors, which has no forward pass", hint="read `tensors` instead")
        if self.unknown:
            some = ", ".join(sorted(self.unknown)[:5])
            raise PlanError(f"{len(self.unknown)} parameters have no staged values before the flip: {some}")
        # All names of a tied tensor must refer to the same object.
        made: dict[int, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, live in self.model.named_buffers(remove_duplicate=False):
                # Copy buffers, because a buffer that no version fills must keep its values.
                tensors[name] = made.setdefault(id(live), self._staged.get(name, live).clone())
            for name, live in self.model.named_parameters(remove_duplicate=False):
                if name in self._staged:
                    tensors[name] = made.setdefault(id(live), self._staged[name])
            return torch.func.functional_call(self.model, tensors, args, kwargs)


Check = Callable[[int, StagedVersion], object]
"""Receives a version number and its weights. Raises an error, or returns False or a reason, to refuse the version.
Returns None, True or "" to accept it."""


def fault_of(check: Check, staged: StagedVersion) -> tuple[str, Exception | None]:
    """Run a check. Return why the version is refused, or an empty string, and the check's exception, or None."""
    try:
        result = check(staged.version, staged)
    except Exception as error:  # noqa: BLE001 - any error in the user's code refuses the version
        return f"{type(error).__name__}: {error}", error
    if result is None or result is True:
        return "", None
    return result if isinstance(result, str) else f"the check returned {result!r}", None


def staged_version(
    version: int,
    requirements: Requirements,
    live: tuple[Memory, ...],
    copy: tuple[Memory, ...],
    expected: bytes,
    model: torch.nn.Module | None,
) -> StagedVersion:
    """Return a staged version's weights for a check. `live` are the target's regions, `copy` the staging copy's."""
    tensors, unknown = requirements.in_copy(lambda tensor: _moved(tensor, live, copy))
    return StagedVersion(
        version=version,
        tensors=_CopiedTensors(tensors),
        expected=decode_values(expected),
        unknown=frozenset(unknown),
        model=model,
        _staged=tensors,
    )


def _moved(tensor: torch.Tensor, live: tuple[Memory, ...], copy: tuple[Memory, ...]) -> torch.Tensor | None:
    if not tensor.numel():
        return tensor
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    nbytes = reach * tensor.itemsize
    for region, twin in zip(live, copy, strict=True):
        offset = tensor.data_ptr() - region.address
        if 0 <= offset <= offset + nbytes <= region.nbytes:
            assert isinstance(twin.owner, Arena)
            flat = twin.owner.bytes_at(offset, nbytes).view(tensor.dtype)
            return torch.as_strided(flat, tensor.shape, tensor.stride(), flat.storage_offset())
    return None
