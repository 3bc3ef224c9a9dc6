"""Checks of a version before it goes live: the staged weights as a check sees them, and the trainer's values for it.

In: a staging copy that holds a verified version; values that a trainer gives with a publish. Out: a `StagedVersion`;
the values as bytes and back; a ready-made check of log-probabilities.
Not here: when a check runs and what follows from it (`receive.participant`, `commit_rules`).

    publish(check={"tokens": ..., "log_probs": ...}) -> bytes -> StagedVersion.expected
    staging copy -> tensors at the places of the live ones -> StagedVersion.tensors (a copy of each), call

A check cannot change what goes live. `tensors` are copies, one at a time: a check may write to them or keep them.
`call` computes with the staged parameters themselves, because a device seldom has room for a third copy of the weights.
The subscriber therefore digests the staged bytes again after the check, and before the flip.
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
"""Limit of the values of one version, which every subscriber with a check requests."""


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """A value on the wire: a tensor, or anything that msgpack has a form for."""

    plain: Any = None
    dtype: str = ""
    """Of a tensor; empty: it is none."""
    shape: tuple[int, ...] = ()
    data: bytes = b""


prepare(dict[str, _Value])


def encode_values(values: Mapping[str, object]) -> bytes:
    """Return the values of a check as bytes.

    Raises:
        ConfigError: a value is neither a tensor nor plain data, or they are too large together.
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
            f"a value for the check cannot be sent: {error}", hint="give tensors, numbers, texts, lists and dicts"
        ) from error
    if len(raw) > MAX_CHECK_BYTES:
        raise ConfigError(
            f"the values for the check have {len(raw)} bytes, above {MAX_CHECK_BYTES}", hint="give fewer tokens"
        )
    return raw


def decode_values(raw: bytes) -> dict[str, Any]:
    """Return the values of a check. FormatError: the bytes are no values."""
    if not raw:
        return {}
    try:
        decoded = msgspec.msgpack.decode(raw, type=dict[str, _Value])
        return {name: _decoded(value) for name, value in decoded.items()}
    except (*MALFORMED, ValueError, RuntimeError) as error:
        raise FormatError(f"the values for the check cannot be decoded: {error}") from error


def _decoded(value: _Value) -> Any:
    if not value.dtype:
        return value.plain
    kind = torch_dtype(DType(value.dtype))
    # A copy: torch must not write to the bytes of a message.
    flat = (
        torch.frombuffer(bytearray(value.data), dtype=torch.uint8) if value.data else torch.empty(0, dtype=torch.uint8)
    )
    return flat.view(kind).reshape(value.shape)


class _Copies(Mapping[str, torch.Tensor]):
    """Tensors by name, of which each access returns a new copy."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        # Mapping's own would make a copy.
        return name in self._tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion:
    """The weights of a version that is staged and not live, for a check; valid while the check runs."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    """Of a module: its parameters and buffers by name, as the version would leave them. Of a dict: its
    tensors; several boxes of one tensor have the offset in their names, as in `up[4, 0]`. Each access returns a new
    copy of one tensor."""
    expected: Mapping[str, Any]
    """The values that the trainer gave with the publish; empty: none."""
    unknown: frozenset[str] = frozenset()
    """Parameters that the model's loader itself fills, when the version goes live; they are not in `tensors`."""
    model: torch.nn.Module | None = None
    """The live module, which `call` uses for its structure."""
    _staged: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    """The tensors in the staging copy itself, which goes live."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's forward pass with the staged weights; the live ones are not touched.

        The forward pass may write to buffers, which are copies. If it writes to parameters, the version is refused.

        Raises:
            PlanError: the target is no module, or some of its parameters are `unknown`.

        Order: the module has the staged weights while this runs, so no other thread may compute with it.
        """
        if self.model is None:
            raise PlanError("the target is a dict of tensors, which has no forward pass", hint="use `tensors`")
        if self.unknown:
            some = ", ".join(sorted(self.unknown)[:5])
            raise PlanError(f"{len(self.unknown)} parameters are filled by the model's loader: {some}")
        # Each by the tensor that the module has there: the two names of a tied tensor get the same object.
        made: dict[int, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, live in self.model.named_buffers(remove_duplicate=False):
                # A buffer that no version fills keeps its values, and must keep them after this forward pass too.
                tensors[name] = made.setdefault(id(live), self._staged.get(name, live).clone())
            for name, live in self.model.named_parameters(remove_duplicate=False):
                if name in self._staged:
                    tensors[name] = made.setdefault(id(live), self._staged[name])
            return torch.func.functional_call(self.model, tensors, args, kwargs)


Check = Callable[[int, StagedVersion], object]
"""Raises, or returns False or a text, if the version must not go live; returns None, True or "" if it may."""


def fault_of(check: Check, staged: StagedVersion) -> tuple[str, Exception | None]:
    """Run a check; return why the version must not go live, and the error that says so. An empty text: it may."""
    try:
        answer = check(staged.version, staged)
    except Exception as error:  # noqa: BLE001 - the user's code: whatever it raises refuses the version
        return f"{type(error).__name__}: {error}", error
    # An empty text is the answer of a check that found nothing.
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
    """Return the view of a version in the staging copy.

    Args:
        requirements: of the target.
        live: the target's memory, region by region.
        copy: the staging copy's memory, with the same regions.
        expected: the trainer's values, encoded.
        model: the target, if it is a module.
    """
    tensors, unknown = requirements.in_copy(lambda tensor: _moved(tensor, live, copy))
    return StagedVersion(
        version=version,
        tensors=_Copies(tensors),
        expected=decode_values(expected),
        unknown=frozenset(unknown),
        model=model,
        _staged=tensors,
    )


def _moved(tensor: torch.Tensor, live: tuple[Memory, ...], copy: tuple[Memory, ...]) -> torch.Tensor | None:
    """Return the tensor of the copy at the place of a tensor of the live memory; None: it lies in no region."""
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
            # Relative to `flat`, which is a view into the arena.
            return torch.as_strided(flat, tensor.shape, tensor.stride(), flat.storage_offset())
    return None
