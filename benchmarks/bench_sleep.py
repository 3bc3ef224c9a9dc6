"""Time that a sleep of level 1 adds to an engine: digests of all weights on the device, beside the copy to the host.

    python -m benchmarks.bench_sleep [--device cuda|cpu] [--total-gb 16] [--layers 32] [--reps 5] [--json]

The model has a layer's tensors as vLLM allocates them, each in its own storage. `copy` is what vLLM's allocator does at
level 1: one copy for each tensor into new pinned memory. `digests` is what Penstock adds before it, and again at the
wake. The first digest of a process also loads the kernels: `warm up` is what vLLM's workers do while they load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from penstock.holding.digester import Digester
from penstock.sync.memory_digests import MemoryDigests

SHARES = {"qkv": 6 / 26, "o": 4 / 26, "gate_up": 10.5 / 26, "down": 5.5 / 26}
"""The matrices of a layer and their part of its bytes, as in Llama 3 8B."""


def make_model(total_bytes: int, layers: int, device: torch.device) -> torch.nn.Module:
    """Return modules with matrices and norms of their own memory, filled with random bytes."""
    model = torch.nn.ModuleList()
    width = 4096
    for _ in range(layers):
        layer = torch.nn.Module()
        for name, share in SHARES.items():
            rows = max(1, int(total_bytes / layers * share / 2 / width))
            layer.register_parameter(name, torch.nn.Parameter(torch.randn(rows, width, device=device).bfloat16()))
        for name in ("norm_1", "norm_2"):
            layer.register_parameter(name, torch.nn.Parameter(torch.randn(width, device=device).bfloat16()))
        model.append(layer)
    return model


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call, with the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def copy_out(model: torch.nn.Module, *, pin: bool) -> list[torch.Tensor]:
    """Copy each parameter to new host memory."""
    copies = []
    for parameter in model.parameters():
        host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=pin)
        copies.append(host.copy_(parameter.detach()))
    return copies


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one process."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    model = make_model(int(arguments.total_gb * 1e9), arguments.layers, device)
    nbytes = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    warm_up_s = seconds(Digester(str(device)).warm_up, device)
    first_s = seconds(lambda: MemoryDigests.of_target(model), device)
    digests = MemoryDigests.of_target(model)
    again_s = [seconds(digests.is_same, device) for _ in range(arguments.reps)]
    copy_s = [seconds(lambda: copy_out(model, pin=device.type == "cuda"), device) for _ in range(2)]
    # The check is worth nothing unless it notices one byte.
    list(model.parameters())[-1].data[-1] += 1
    if digests.is_same():
        raise SystemExit("a changed value was not noticed")
    return {
        "gb": round(nbytes / 1e9, 3),
        "tensors": len(list(model.parameters())),
        "warm_up_s": round(warm_up_s, 4),
        "first_digest_s": round(first_s, 4),
        "digest_s": round(statistics.median(again_s), 4),
        "copy_s": [round(one, 4) for one in copy_s],
        "added_to_sleep": round(first_s / copy_s[0], 4),
    }


def main() -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--total-gb", type=float, default=16.0)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    row = measure(arguments)
    print(json.dumps(row) if arguments.json else "\n".join(f"{name:>16}  {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
