"""Checks of a version before it goes live: the staged weights for a user's check, and the trainer's values for it.

    publish(check={"tokens": ..., "log_probs": ...}) -> bytes -> StagedVersion.expected
    staging copy -> tensors at the places of the live ones -> StagedVersion.tensors (a copy of each), call

A check cannot change the version that goes live. `tensors` returns copies, one at a time, so a check may write to them
or keep them. `call` computes with the staged parameters themselves, because a device seldom has memory for a third copy
of the weights. The subscriber therefore digests the staged bytes again after the check and before the flip.
"""

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
"""Maximum size of the values for one version, which every subscriber with a check requests."""


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """A value on the wire: a tensor, or plain data that msgpack can encode."""

    plain: Any = None
    dtype: str = ""
    """The dtype of a tensor. Empty if the value is not a tensor."""
    shape: tuple[int, ...] = ()
    data: bytes = b""


prepare(dict[str, _Value])


def encode_values(values: Mapping[str, object]) -> bytes:
    """Encode the values for a check.

    Raises:
        ConfigError: a value is neither a tensor nor plain data, or the values are too large.
    """
    encoded = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            flat = value.detach().to("cpu").contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
            encoded[name] = _Value(dtype=str(dtype_of(value.dtype)), shape=tuple(value.shape), data=data)
        else:
            encoded[name] = _Value(plain=value)
    try:
        raw = msgspec.msgpack.encode(encoded)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"cannot send a value for the check: {error}", hint="give tensors, numbers, texts, lists and dicts"
        ) from error
    if len(raw) > MAX_CHECK_BYTES:
        raise ConfigError(
            f"the values for the check have {len(raw)} bytes, above {MAX_CHECK_BYTES}", hint="give fewer tokens"
        )
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
    kind = torch_dtype(DType(value.dtype))
    # Copy the bytes, because torch must not write to a message.
    flat = (
        torch.frombuffer(bytearray(value.data), dtype=torch.uint8) if value.data else torch.empty(0, dtype=torch.uint8)
    )
    return flat.view(kind).reshape(value.shape)


class _CopiedTensors(Mapping[str, torch.Tensor]):
    """Tensors by name. Each access returns a new copy."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        # The inherited method would copy the tensor.
        return name in self._tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion:
    """The weights of a staged version, for a check. Valid while the check runs."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    """For a module, its parameters and buffers by name, as the version would leave them. For a dict, its tensors. If it
    has several boxes of one tensor, their names contain the offset, as in `up[4, 0]`. Each access returns a new copy of
    a tensor."""
    expected: Mapping[str, Any]
    """The values that the trainer published with the version. Empty if there are none."""
    unknown: frozenset[str] = frozenset()
    """Parameters that the model's loader fills when the version goes live. `tensors` does not have them."""
    model: torch.nn.Module | None = None
    """The live module, whose structure `call` uses."""
    _staged: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    """The tensors in the staging copy, which goes live."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass with the staged weights, and return its result.

        The live weights are not touched.

        The forward pass may write to buffers, which are copies. If it writes to parameters, the version is refused. The
        module has the staged weights during the call, so no other thread may compute with it.

        Raises:
            PlanError: the target is not a module, or some of its parameters are `unknown`.
        """
        if self.model is None:
            raise PlanError("the target is a dict of tensors, which has no forward pass", hint="use `tensors`")
        if self.unknown:
            some = ", ".join(sorted(self.unknown)[:5])
            raise PlanError(f"{len(self.unknown)} parameters are filled by the model's loader: {some}")
        # Use one object for each tensor in the module, so that both names of a tied tensor get the same object.
        made: dict[int, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, live in self.model.named_buffers(remove_duplicate=False):
                # A buffer that no version fills must keep its values, even after this forward pass.
                tensors[name] = made.setdefault(id(live), self._staged.get(name, live).clone())
            for name, live in self.model.named_parameters(remove_duplicate=False):
                if name in self._staged:
                    tensors[name] = made.setdefault(id(live), self._staged[name])
            return torch.func.functional_call(self.model, tensors, args, kwargs)


Check = Callable[[int, StagedVersion], object]
"""A check of a version. It raises, or returns False or a text, if the version must not go live. It returns None, True
or "" if it may."""


def fault_of(check: Check, staged: StagedVersion) -> tuple[str, Exception | None]:
    """Run a check. Return why the version must not go live (empty if it may), and the error that caused it."""
    try:
        answer = check(staged.version, staged)
    except Exception as error:  # noqa: BLE001 - any error in the user's code refuses the version
        return f"{type(error).__name__}: {error}", error
    # A check that found nothing returns an empty text.
    if answer is None or answer is True or answer == "":
        return "", None
    return answer if isinstance(answer, str) else f"the check returned {answer!r}", None


def staged_version(
    version: int,
    requirements: Requirements,
    live: tuple[Memory, ...],
    copy: tuple[Memory, ...],
    expected: bytes,
    model: torch.nn.Module | None,
) -> StagedVersion:
    """Return the staged version as a check sees it.

    Args:
        requirements: requirements of the target.
        live: the target's memory, region by region.
        copy: the staging copy's memory, with the same regions.
        expected: the trainer's values, encoded.
        model: the target, if it is a module.
    """
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
    """Return the tensor in the copy at the place of a live tensor, or None if the tensor is in no region."""
    if not tensor.numel():
        return tensor
    address = tensor.data_ptr()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    nbytes = reach * tensor.itemsize
    for region, twin in zip(live, copy, strict=True):
        offset = address - region.address
        if 0 <= offset <= offset + nbytes <= region.nbytes:
            assert isinstance(twin.owner, Arena)
            flat = twin.owner.bytes_at(offset, nbytes).view(tensor.dtype)
            # The offset is relative to `flat`, which is a view into the arena.
            return torch.as_strided(flat, tensor.shape, tensor.stride(), flat.storage_offset())
    return None
