"""Launches Triton kernels: a compiled copy from the wheel or from ~/.cache/penstock, or through Triton.

The wheel contains copies for common devices. Other kernels are compiled by Triton once, and stored for later processes.

A fresh process needs 0.15 s to import Triton and 0.37 s to find Triton's cached kernels, because Triton first hashes
its sources. A compiled copy loads in a few milliseconds. Source: benchmarks/results/h200x1_202611/load-history.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import re
import secrets
import stat
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3

from penstock.config import home_cache
from penstock.errors import MALFORMED, ConfigError, DestinationError, MissingExtra

_ALIGNMENT = 16
"""Required alignment in bytes of all pointers for a copy. Source: Triton's argument specialisation."""
_INT32_STOP = 1 << 31
"""Larger integers have 64 bits, for which Triton compiles a different kernel."""
_MAX_SHARED_BYTES = 48 << 10
"""More shared memory than this requires an opt-in. Source: CUDA programming guide, "Shared Memory"."""
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[usb](32|64)\b")
_BLOCK = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)")


def device_context(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a device is torch's current device. The CPU needs no context."""
    # Torch looks up a device object in 1.2 us, and a device number in 0.07 us.
    return torch.cuda.device(device.index) if device.type == "cuda" else contextlib.nullcontext()


class StoredKernel(msgspec.Struct, frozen=True):
    """A compiled kernel that the driver loads without Triton."""

    file: str
    """Name of the copy, with a digest of everything on which the kernel depends."""
    symbol: str
    parameter_bits: tuple[int, ...]
    """Bits of every parameter: the kernel's, then Triton's (scratch pointers, which are null here)."""
    num_threads: int
    shared_bytes: int
    cubin: bytes
    """Code for the device, or PTX as text with a null byte at its end."""


class Launch:
    """A kernel launch that can be queued again each time its memory is refilled. The launch keeps its tensors alive.

    The arguments are packed for the driver only once. When other threads competed for the GIL, packing the arguments
    for each launch took 0.25 ms, and a digest of 1 GB with ten launches took 2.6 ms instead of 0.5 ms. Not thread-safe.

    Args:
        module: module that contains the kernel and all its callees. A compiled copy is valid only for one source text.
        name: name of the kernel, whose integer arguments Triton must not specialise.
        num_programs: default number of programs in a launch. If `num_programs` is 0, `run` launches nothing.
        arguments: the first arguments, in order. A compiled copy is used only if all integers are below 2^31.
    """

    def __init__(
        self,
        module: str,
        name: str,
        num_programs: int,
        arguments: Sequence[torch.Tensor | int],
        constants: Mapping[str, int | str],
        *,
        num_warps: int = 4,
    ) -> None:
        self._module, self._name, self._num_warps = module, name, num_warps
        self._num_programs = num_programs
        self._arguments = tuple(arguments)
        self._constants = constants
        self._device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
        self._can_use_copy = self._device.type == "cuda" and all(map(_fits_copy, self._arguments))
        self._shape = (module, name, tuple(sorted(constants.items())), num_warps)
        self._queued: _Queued | None = None

    def run(self, *more: torch.Tensor | int, num_programs: int | None = None) -> None:
        """Queue the kernel on the current stream of its first argument's device.

        The arguments `more` follow those of the constructor, with the same number and types in every call. Raises
        MissingExtra if Triton is needed but not installed, and DestinationError if the driver refused the kernel.
        """
        if num_programs is None:
            num_programs = self._num_programs
        # The driver refuses an empty grid.
        if not num_programs:
            return
        can_use_copy = self._can_use_copy and all(map(_fits_copy, more))
        if can_use_copy and self._queued is None and (kernel := _loaded(self._shape, self._device)) is not None:
            self._queued = _Queued(kernel, self._arguments, len(more))
        if can_use_copy and self._queued is not None:
            stream = torch.cuda.current_stream(self._device.index)
            if not _thread.has_context:
                # `query` makes the device's context current in a thread that has no context yet.
                stream.query()
                _thread.has_context = True
            self._queued.run(more, stream.cuda_stream, num_programs)
            return
        kernel_of_triton = getattr(_imported(self._module), self._name)[(num_programs,)]
        compiled = kernel_of_triton(*self._arguments, *more, **self._constants, num_warps=self._num_warps)
        key = self._shape, self._device
        if can_use_copy and key not in _compiled:
            # Make the next launch look for the stored copy, because a launch through Triton takes ten times as long.
            _compiled.add(key)
            _store(compiled, _path(*key))
            _kernels.pop(key, None)


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def _fits_copy(argument: torch.Tensor | int) -> bool:
    return argument.data_ptr() % _ALIGNMENT == 0 if isinstance(argument, torch.Tensor) else argument < _INT32_STOP


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        hint = "pip install triton, or a CUDA build of torch"
        raise MissingExtra("digests and formats on a GPU need Triton", hint=hint) from error


Shape = tuple[str, str, object, int]
"""Module, name, constants and number of warps of a kernel."""


def kernel_name(shape: Shape, *more: object) -> str:
    """Return the name of a kernel's copy, which changes with the text of its module, with `shape` and with `more`."""
    module, name, _, _ = shape
    key = blake3(_text(module))
    key.update(repr((shape, *more)).encode())
    return f"{name}-{key.hexdigest()[:32]}"


@functools.cache
def _path(shape: Shape, device: torch.device) -> Path | None:
    try:
        directory = home_cache("kernels")
    except ConfigError:
        return None
    return directory / kernel_name(shape, torch.__version__, torch.cuda.get_device_capability(device))


SHIPPED = Path(__file__).with_name("kernels")
"""Directory of the copies in the wheel, which `scripts/kernels.py` compiles. A file holds those of one capability."""


@functools.cache
def shipped_kernels(capability: tuple[int, int]) -> dict[str, StoredKernel]:
    """Return the wheel's kernels for a device, by `kernel_name`."""
    # Code for 8.0 also runs on 8.6. Code for later devices runs only on devices of exactly its capability. The driver
    # compiles PTX for any later device.
    names = [f"sm_{capability[0]}{capability[1]}", "sm_80" if capability[0] == 8 else "ptx"]
    for name in names:
        with contextlib.suppress(OSError, *MALFORMED):
            return msgspec.msgpack.decode((SHIPPED / name).read_bytes(), type=dict[str, StoredKernel])
    return {}


@functools.cache
def _text(module: str) -> bytes:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_bytes()


_kernels: dict[tuple[Shape, torch.device], _Kernel | None] = {}
_compiled: set[tuple[Shape, torch.device]] = set()
"""Kernels that this process compiled and tried to store."""


def _loaded(shape: Shape, device: torch.device) -> _Kernel | None:
    key = shape, device
    kernel = _kernels.get(key)
    if kernel is None and key not in _kernels:
        kernel = _kernels[key] = _from_wheel(shape, device) or _load(_path(shape, device))
    return kernel


def _from_wheel(shape: Shape, device: torch.device) -> _Kernel | None:
    copy = shipped_kernels(torch.cuda.get_device_capability(device)).get(kernel_name(shape))
    # An old driver refuses code from a newer compiler.
    with contextlib.suppress(DestinationError):
        return None if copy is None else _Kernel(copy)
    return None


def _load(path: Path | None) -> _Kernel | None:
    if path is None:
        return None
    try:
        # Do not follow a symlink, and do not block on a FIFO.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            # The copy runs on the device, so only this user may own it and write to it.
            if not is_own or stat.S_IMODE(status.st_mode) & 0o022:
                return None
            copy = msgspec.msgpack.decode(file.read(), type=StoredKernel)
        # A kernel with the same parameters but a different name would compute something else.
        return _Kernel(copy) if copy.file == path.name else None
    except OSError:
        return None
    except (*MALFORMED, DestinationError):
        # Remove a corrupt file, so that the kernel is compiled and stored again.
        path.unlink(missing_ok=True)
        return None


def stored_kernel(compiled: Any, name: str) -> StoredKernel | None:
    """Return the copy of a kernel that Triton compiled, or None if only Triton can launch the kernel."""
    metadata = compiled.metadata
    # Kernels that need scratch memory, clusters or other extras can be launched only through Triton.
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    is_plain = not any(getattr(metadata, extra, 0) for extra in extras) and getattr(metadata, "num_ctas", 1) == 1
    ptx: str = compiled.asm["ptx"]
    head = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
    block = _BLOCK.search(head)
    if not is_plain or block is None or metadata.shared > _MAX_SHARED_BYTES:
        return None
    return StoredKernel(
        file=name,
        symbol=metadata.name,
        parameter_bits=tuple(int(bits) for bits in _PARAMETER.findall(head)),
        num_threads=int(block[1]),
        shared_bytes=metadata.shared,
        cubin=compiled.asm["cubin"],
    )


def _store(compiled: Any, path: Path | None) -> None:
    """Store a copy if it can be launched without Triton. Do nothing if the disk is full or read-only."""
    if path is None or path.exists() or (copy := stored_kernel(compiled, path.name)) is None:
        return
    # The file must be complete or absent. Two containers may share the cache and both have a process 1.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.msgpack.encode(copy))
        os.replace(partial, path)


class _Kernel:
    def __init__(self, copy: StoredKernel) -> None:
        self.copy = copy
        self.function = ctypes.c_void_p()
        module = ctypes.c_void_p()
        # `query` makes the device's context current in this thread.
        torch.cuda.current_stream().query()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), copy.cubin))
        _check(_driver().cuModuleGetFunction(ctypes.byref(self.function), module, copy.symbol.encode()))


class _Queued:
    """Arguments of a loaded kernel, packed for the driver. The last `num_more` arguments are set at each launch."""

    def __init__(self, kernel: _Kernel, arguments: Sequence[torch.Tensor | int], num_more: int) -> None:
        self._function = kernel.function
        copy = kernel.copy
        values = list(map(_value, arguments))
        # Triton's parameters follow: pointers to scratch memory, which these kernels do not use.
        values += [0] * (len(copy.parameter_bits) - len(values))
        pairs = zip(values, copy.parameter_bits, strict=True)
        self._boxed = [ctypes.c_uint64(v) if n == 64 else ctypes.c_uint32(v) for v, n in pairs]
        self._more = slice(len(arguments), len(arguments) + num_more)
        # Keep the boxed values, because their addresses do not keep them alive.
        self._pointers = (ctypes.c_void_p * len(self._boxed))(*map(ctypes.addressof, self._boxed))
        self._shape = (1, 1, copy.num_threads, 1, 1, copy.shared_bytes)
        self._launcher = _launcher()

    def run(self, more: Sequence[torch.Tensor | int], stream: int, num_programs: int) -> None:
        for box, argument in zip(self._boxed[self._more], more, strict=True):
            box.value = _value(argument)
        grid = (num_programs, *self._shape)
        _check(self._launcher(self._function, *grid, ctypes.c_void_p(stream), self._pointers, None))


def _value(argument: torch.Tensor | int) -> int:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _launcher() -> Any:
    # PyDLL keeps the interpreter's lock. A launch takes microseconds, and reacquiring the lock can take milliseconds.
    return ctypes.PyDLL("libcuda.so.1").cuLaunchKernel


def _check(code: int) -> None:
    if code:
        raise DestinationError(f"a kernel launch failed with CUDA error {code}", hint="look up the code under CUresult")
