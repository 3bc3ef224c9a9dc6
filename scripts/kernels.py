"""Compiles the Triton kernels of the wheel: `python -m scripts.kernels [--write]`.

A load, a fetch and a sync launch these kernels on a device: digests, copies, and the built-in formats of BF16 weights.
Their compiled copies are in `penstock/cuda/kernels`, in a file for each compute capability, so that a new pod neither
imports Triton nor compiles. Without `--write`, the exit code is 1 if a copy is missing or was compiled from another
source. Compiling needs Triton, but no device.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, cast

import msgspec
import numpy as np
import torch

from penstock.cuda import kernel_cache
from penstock.cuda.kernel_cache import Shape, StoredKernel, kernel_name, stored_kernel
from penstock.cuda.pack import WIDTHS, plan_copy
from penstock.digest.cuda import warm_up
from penstock.transform import fuse
from penstock.transform.formats import FORMATS, Format, fault, outputs
from penstock.transform.quantize import torch_dtype
from penstock.types import Box, DType

CAPABILITIES = (80, 89, 90, 100, 103, 120)
"""Compute capabilities with copies: A100, L40, H100 and H200, B200, B300, RTX 50 and RTX PRO 6000."""

TARGETS: list[int | str] = [*CAPABILITIES, "ptx"]
"""Files of copies. The driver compiles the kernels in `ptx` for devices that are newer than these capabilities."""

CPU = torch.device("cpu")

_TYPES = {torch.int64: "*i64", torch.uint64: "*u64", torch.int32: "*i32", torch.uint8: "*u8"}


class Recorder:
    """Collects the kernels that are launched in a `with` block instead of running them."""

    def __init__(self) -> None:
        self.types: dict[Shape, tuple[str, ...]] = {}
        """Types of the arguments of each kernel, in Triton's notation."""

    def __enter__(self) -> Recorder:
        self._run = kernel_cache.Launch.run

        def record(launch: Any, *more: torch.Tensor | int, num_programs: int | None = None) -> None:
            arguments = (*launch._arguments, *more)
            self.types[launch._shape] = tuple(
                _TYPES[argument.dtype] if isinstance(argument, torch.Tensor) else "i32" for argument in arguments
            )

        kernel_cache.Launch.run = record  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        kernel_cache.Launch.run = self._run  # type: ignore[method-assign]


def launched(target: int | str) -> dict[Shape, tuple[str, ...]]:
    """Return the kernels that a device launches for digests, copies and formats, with the types of their arguments.

    The target `ptx` has no formats, because the kernels of formats for newer devices use newer instructions.
    """
    with Recorder() as recorder:
        warm_up(CPU)
        for width in WIDTHS:
            column = np.array([width], np.int64)
            plan_copy(column, column, column, np.array([2]), column, column, CPU).run()
        if target == "ptx":
            return recorder.types
        capability = divmod(cast("int", target), 10)
        has_native_codes, fuse.has_native_codes = fuse.has_native_codes, lambda device: capability >= fuse.NATIVE
        for form in _FORMATS:
            for cols in (256, 48):
                _run_format(form, torch.zeros((256, cols), dtype=torch.bfloat16))
        fuse.has_native_codes = has_native_codes
    return recorder.types


_FORMATS = [form for form in FORMATS.values() if form.scaling != "none"]


def _run_format(form: Format, source: torch.Tensor) -> None:
    if fault(form, DType.BF16, tuple(source.shape)) is None:
        parts = outputs(form, "weight", DType.BF16, tuple(source.shape), Box.full(tuple(source.shape)))
        out = tuple(torch.empty(part.shape, dtype=torch_dtype(part.dtype)) for part in parts)
        fuse.lay_out(form, (fuse.KernelJob(source=source, outputs=out),), CPU).run()


def compiled(shape: Shape, types: Sequence[str], target: int | str) -> StoredKernel:
    """Compile a kernel for a capability, or to PTX for all devices from 8.0 on."""
    # Lines of the source double the size of a kernel.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    module, name, constants, num_warps = shape
    function = getattr(import_module(module), name)
    values = dict(cast("Sequence[tuple[str, object]]", constants))
    names = list(inspect.signature(function.fn).parameters)
    plain = [name for name in names if name not in values]
    signature = dict.fromkeys(values, "constexpr") | dict(zip(plain, types, strict=True))
    source = ASTSource(
        fn=function,
        signature={name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in values.items()},
        # `Launch` uses a copy only if all pointers are multiples of 16.
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")},
    )
    capability = _OLDEST if target == "ptx" else cast("int", target)
    kernel = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    copy = stored_kernel(kernel, kernel_name(shape))
    assert copy is not None, f"only Triton can launch {name}"
    if target == "ptx":
        # The driver expects PTX as text that ends with a null byte.
        return msgspec.structs.replace(copy, cubin=kernel.asm["ptx"].encode() + b"\0")
    return copy


_OLDEST = 80


def file_of(target: int | str) -> str:
    """Return the name of the file for a target."""
    return f"sm_{target}" if isinstance(target, int) else target


def stale() -> Iterator[str]:
    """Yield a line for each copy that is missing or was compiled from another source."""
    for target in TARGETS:
        path = kernel_cache.SHIPPED / file_of(target)
        if not path.exists():
            yield f"{path} does not exist"
            continue
        copies = msgspec.msgpack.decode(path.read_bytes(), type=dict[str, StoredKernel])
        names = {kernel_name(shape) for shape in launched(target)}
        for name in names ^ copies.keys():
            yield f"{path}: {name} is {'missing' if name in names else 'of another source'}"


def main() -> int:
    """Write or check the copies."""
    if "--write" in sys.argv[1:]:
        kernel_cache.SHIPPED.mkdir(exist_ok=True)
        for target in TARGETS:
            shapes = sorted(launched(target).items())
            copies = {kernel_name(shape): compiled(shape, types, target) for shape, types in shapes}
            (kernel_cache.SHIPPED / file_of(target)).write_bytes(msgspec.msgpack.encode(copies))
    lines = list(stale())
    print("\n".join(lines) or "the compiled kernels are those of the source")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
