"""The page of `benchmarks.bench_fetch` and `bench_sync`: the machine, the method, the rows.

In: rows. Out: Markdown.
Not here: measuring.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence

FETCH = (
    "workers are processes of one host; medians (least-most); every fetched byte is digested where it arrives and "
    "compared with the holder's digests; GB are 10^9 bytes"
)


def page(
    rows: Sequence[Sequence[str]], device: str, seconds: float, *, what: str = "Fetch", method: str = FETCH
) -> str:
    """The page of a run."""
    gpus = shell("nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader").splitlines()
    import torch

    head = {
        "date": time.strftime("%Y-%m-%d"),
        "GPU": f"{len(gpus)} x {gpus[0]}" if gpus and device == "cuda" else "none used",
        "CPU": f"{os.cpu_count()} cores",
        "kernel": platform.release(),
        "Python, torch, CUDA": f"{platform.python_version()}, {torch.__version__}, {torch.version.cuda}",
        "command": f"`python -m benchmarks.bench_{what.lower()} " + " ".join(sys.argv[1:]) + "`",
        "method": method,
        "run": f"{seconds:.0f} s in all",
    }
    lines = [
        f"# {what}, beside its peers",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in head.items()),
    ]
    lines += ["", "| work | goal | found | |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    topology = shell(r"nvidia-smi topo -m | sed 's/\x1b\[[0-9;]*m//g'") if device == "cuda" else ""
    lines += ["", "```", topology.strip(), "```"] if topology else []
    return "\n".join(lines) + "\n"


@functools.cache
def shell(command: str) -> str:
    """Return the output of a command; "" if it fails."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout if done.returncode == 0 else ""
