"""Launches of Triton kernels: by Triton, or from a compiled copy that an earlier process left.

In: a kernel's module and name, its arguments. Out: the kernel is queued on the current stream.
Not here: the kernels, each in the room that it works for (`digest.xxh3_triton`, `transform.quantize_triton`).

    launch --copy in ~/.cache/penstock/kernels--> CUDA driver
           `--no copy, or arguments for which it was not made--> Triton, which compiles (and a copy is left)

Reason: a fresh process spends 0.15 s to import Triton and 0.37 s until Triton finds its own cached kernels, since it
hashes all its sources first; a copy is loaded in some milliseconds.
Source: benchmarks/results/h200x1_202611/load-history.md.
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
"""Bytes to which all pointers must be aligned for a copy: Triton may have compiled for pointers that are.

Source: Triton's argument specialisation.
"""

_INT32_STOP = 1 << 31
"""Integers from here on have 64 bits, for which Triton compiles another kernel."""

_MAX_SHARED_BYTES = 48 << 10
"""More shared memory needs an opt-in. Source: CUDA programming guide, "Shared Memory"."""

_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[usb](32|64)\b")
_BLOCK = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)")


def device_context(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a device is torch's current one; the CPU needs none."""
    # By number: torch looks up a device object in 1.2 us, and a number in 0.07.
    return torch.cuda.device(device.index) if device.type == "cuda" else contextlib.nullcontext()


class _Copy(msgspec.Struct, frozen=True):
    """A compiled kernel in the form in which it is stored."""

    file: str
    """Name of its file, which is a digest of everything that the kernel depends on."""
    symbol: str
    parameter_bits: tuple[int, ...]
    """Bits of every parameter: the kernel's, then Triton's own (scratch pointers, null here)."""
    num_threads: int
    shared_bytes: int
    cubin: bytes


def launch(
    module: str,
    name: str,
    num_programs: int,
    arguments: Sequence[torch.Tensor | int],
    constants: Mapping[str, int | str],
    *,
    num_warps: int = 4,
) -> None:
    """Queue a kernel once on the current stream of its first argument's device; see `Launch`."""
    Launch(module, name, num_programs, arguments, constants, num_warps=num_warps).run()


class Launch:
    """A launch of a kernel that is queued as often as its memory is refilled.

    Its arguments are laid out for the driver once: while other threads compete for the interpreter's lock, each launch
    that was laid out anew took 0.25 ms, and a digest of 1 GB with ten of them 2.6 ms instead of 0.5.

    Args:
        module: where the kernel is, alone in it with what it calls: a copy is of the module's text.
        name: of the kernel, whose integers Triton does not specialise.
        num_programs: programs of a launch that is not given another number; 0: nothing is done.
        arguments: the first ones, in order; integers below 2^31, or no copy is used.
        constants: the kernel's constants.
        num_warps: of each program.

    Ownership: keeps the tensors alive. Used by one thread at a time.
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
        # A copy holds one of the kernels that Triton compiles: for aligned pointers and 32-bit integers.
        self._suits = self._device.type == "cuda" and all(map(_suits, self._arguments))
        self._shape = (module, name, tuple(sorted(constants.items())), num_warps)
        self._queued: _Queued | None = None

    def run(self, *more: torch.Tensor | int, num_programs: int | None = None) -> None:
        """Queue the kernel on the current stream of its first argument's device.

        Args:
            more: the arguments after those that were given before; always as many, of the same kinds.
            num_programs: of this launch; None: as many as the launch was made with.

        Raises:
            MissingExtra: Triton is needed and not installed.
            DestinationError: the driver refuses the kernel.
        """
        if num_programs is None:
            num_programs = self._num_programs
        # The driver refuses an empty grid.
        if not num_programs:
            return
        suits = self._suits and all(map(_suits, more))
        if suits and self._queued is None and (kernel := _loaded(self._shape, self._device)) is not None:
            self._queued = _Queued(kernel, self._arguments, len(more))
        if suits and self._queued is not None:
            # By number, as in `device_context`.
            stream = torch.cuda.current_stream(self._device.index)
            if not _thread.has_context:
                # A call of torch's makes the device's context that of a thread which has none yet.
                stream.query()
                _thread.has_context = True
            self._queued.run(more, stream.cuda_stream, num_programs)
            return
        kernel_of_triton = getattr(_imported(self._module), self._name)[(num_programs,)]
        compiled = kernel_of_triton(*self._arguments, *more, **self._constants, num_warps=self._num_warps)
        key = self._shape, self._device
        if suits and key not in _compiled:
            # The next launch looks for the copy, once, be it this process's or another rank's: Triton takes ten times
            # as long for each launch.
            _compiled.add(key)
            _store(compiled, _path(*key))
            _kernels.pop(key, None)


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def _suits(argument: torch.Tensor | int) -> bool:
    """Return whether a copy was compiled for such an argument."""
    return argument.data_ptr() % _ALIGNMENT == 0 if isinstance(argument, torch.Tensor) else argument < _INT32_STOP


def _imported(module: str) -> Any:
    """Import a kernel's module. MissingExtra: Triton is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        hint = "pip install triton, or a CUDA build of torch"
        raise MissingExtra("digests and formats on a GPU need Triton", hint=hint) from error


_Shape = tuple[str, str, object, int]


@functools.cache
def _path(shape: _Shape, device: torch.device) -> Path | None:
    """Return the path of this kernel's copy; None where there is no home directory."""
    module, name, _, _ = shape
    # By the module's text: a kernel that was edited is another one, and no version number need be kept.
    key = blake3(_text(module))
    key.update(repr((shape, torch.__version__, torch.cuda.get_device_capability(device))).encode())
    try:
        return home_cache("kernels") / f"{name}-{key.hexdigest()[:32]}"
    except ConfigError:
        return None


@functools.cache
def _text(module: str) -> bytes:
    """Return the source of a module that need not be importable."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_bytes()


_kernels: dict[tuple[_Shape, torch.device], _Kernel | None] = {}
"""What `_loaded` found."""
_compiled: set[tuple[_Shape, torch.device]] = set()
"""Kernels that this process compiled, and of which it stored a copy if it could."""


def _loaded(shape: _Shape, device: torch.device) -> _Kernel | None:
    """Return the stored copy of a kernel, loaded once; None: there is none that can be used."""
    key = shape, device
    kernel = _kernels.get(key)
    if kernel is None and key not in _kernels:
        kernel = _kernels[key] = _load(_path(shape, device))
    return kernel


def _load(path: Path | None) -> _Kernel | None:
    """Load a stored copy; None: there is none that can be used."""
    if path is None:
        return None
    try:
        # A link is not followed, and a pipe is not waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            # The copy runs on the device: it must be this user's own, and writable by no other user.
            if not is_own or stat.S_IMODE(status.st_mode) & 0o022:
                return None
            copy = msgspec.msgpack.decode(file.read(), type=_Copy)
        # A kernel of the same parameters under another kernel's name would compute something else.
        return _Kernel(copy) if copy.file == path.name else None
    except OSError:
        return None
    except (*MALFORMED, DestinationError):
        # Damaged: without the file it is compiled and stored anew.
        path.unlink(missing_ok=True)
        return None


def _store(compiled: Any, path: Path | None) -> None:
    """Store a copy for later launches, if it can be launched without Triton; a full or read-only disk is no fault."""
    metadata = compiled.metadata
    # Kernels that need more than a plain launch, such as scratch memory or clusters, are left to Triton.
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    plain = not any(getattr(metadata, extra, 0) for extra in extras) and getattr(metadata, "num_ctas", 1) == 1
    ptx: str = compiled.asm["ptx"]
    head = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
    block = _BLOCK.search(head)
    if path is None or not plain or block is None or metadata.shared > _MAX_SHARED_BYTES or path.exists():
        return
    copy = _Copy(
        file=path.name,
        symbol=metadata.name,
        parameter_bits=tuple(int(bits) for bits in _PARAMETER.findall(head)),
        num_threads=int(block[1]),
        shared_bytes=metadata.shared,
        cubin=compiled.asm["cubin"],
    )
    # Complete or absent: written under a random name, and renamed. Process 1 of two containers may share the cache.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.msgpack.encode(copy))
        os.replace(partial, path)


class _Kernel:
    """A copy loaded into the current context. It stays loaded, since a process uses it again."""

    def __init__(self, copy: _Copy) -> None:
        self.copy = copy
        self.function = ctypes.c_void_p()
        module = ctypes.c_void_p()
        # A call of torch's makes the device's context that of this thread.
        torch.cuda.current_stream().query()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), copy.cubin))
        _check(_driver().cuModuleGetFunction(ctypes.byref(self.function), module, copy.symbol.encode()))


class _Queued:
    """Arguments of a loaded kernel as the driver takes them; the last `num_more` are set at each launch."""

    def __init__(self, kernel: _Kernel, arguments: Sequence[torch.Tensor | int], num_more: int) -> None:
        self._function = kernel.function
        copy = kernel.copy
        values = list(map(_value, arguments))
        # After them Triton's own parameters: pointers to scratch memory, which these kernels do not have.
        values += [0] * (len(copy.parameter_bits) - len(values))
        pairs = zip(values, copy.parameter_bits, strict=True)
        self._boxed = [ctypes.c_uint64(v) if n == 64 else ctypes.c_uint32(v) for v, n in pairs]
        self._more = slice(len(arguments), len(arguments) + num_more)
        # Addresses alone, which do not keep the boxes alive.
        self._pointers = (ctypes.c_void_p * len(self._boxed))(*map(ctypes.addressof, self._boxed))
        self._shape = (1, 1, copy.num_threads, 1, 1, copy.shared_bytes)
        self._launcher = _launcher()

    def run(self, more: Sequence[torch.Tensor | int], stream: int, num_programs: int) -> None:
        """Queue a launch on a stream. DestinationError: the driver refuses it."""
        for box, argument in zip(self._boxed[self._more], more, strict=True):
            box.value = _value(argument)
        grid = (num_programs, *self._shape)
        _check(self._launcher(self._function, *grid, ctypes.c_void_p(stream), self._pointers, None))


def _value(argument: torch.Tensor | int) -> int:
    """Return an argument as the driver takes it."""
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _launcher() -> Any:
    """Return the driver's launch call."""
    # By PyDLL, which keeps the interpreter's lock: a launch takes microseconds, getting the lock back milliseconds.
    return ctypes.PyDLL("libcuda.so.1").cuLaunchKernel


def _check(code: int) -> None:
    if code:
        raise DestinationError(f"CUDA error {code} from a kernel", hint="see CUresult in the CUDA driver API")
