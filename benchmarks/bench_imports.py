"""CPU time from `import penstock` to the end of the first call of each verb, in a new process that has torch and numpy.

    python -m benchmarks.bench_imports --runs 21 --tree OLD --tree NEW

Each run is forked from this process, which has imported torch and numpy and nothing of Penstock. A tree is a directory
of installed wheels with compiled files. Without `--tree` the installed packages are measured. The trees run in turns.
CPU time is user and system time of all threads, so that other work on the machine changes it less than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

_FILE = "sys.argv[1] + '/model.safetensors'"
_CALLS = {
    "import penstock": ("", "import penstock", ""),
    "load": ("", "import penstock as ps; ps.load(sys.argv[1])", ""),
    "load_file": ("", f"import penstock as ps; ps.load_file({_FILE})", ""),
    "safe_open": ("", f"import penstock as ps\nwith ps.safe_open({_FILE}, 'pt') as f: f.get_tensor('0')", ""),
    "load_into": ("m = torch.nn.Linear(256, 256)", "import penstock as ps; ps.load_into(m, sys.argv[2])", ""),
    "join, import only": ("", "import penstock as ps; ps.join", ""),
    "join": ("", "import penstock as ps; fleet = ps.join('fleet')", "fleet.leave()"),
    "join and fetch from storage": (
        "",
        "import penstock as ps; fleet = ps.join('fleet'); fleet.fetch({}, fallback=sys.argv[1])",
        "fleet.leave()",
    ),
    "publisher, import only": ("", "import penstock as ps; ps.publisher", ""),
    "publisher": (
        "d = {'w': torch.ones(64, 64)}",
        "import penstock as ps; p = ps.publisher('policy', d)",
        "p.close()",
    ),
    "subscriber, import only": ("", "import penstock as ps; ps.subscriber", ""),
    "subscriber": (
        "d = {'w': torch.ones(64, 64)}",
        "import penstock as ps; s = ps.subscriber('policy', d)",
        "s.close()",
    ),
    "attach, import only": ("", "import penstock as ps; ps.cache.attach", ""),
}


def fresh(name: str, tree: str | None, model: Path) -> dict[str, float]:
    """Run one call in a forked process with its own home and runtime directory."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as home:
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.environ |= {"HOME": home, "PENSTOCK_RUNTIME_DIR": home}
            sys.argv = ["", str(model), str(model / "linear.safetensors")]
            if tree is not None:
                sys.path.insert(0, tree)
            run(*_CALLS[name], writer)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            told = file.read()
        os.waitpid(child, 0)
    return json.loads(told)  # type: ignore[no-any-return]


def run(before: str, call: str, after: str, writer: int) -> None:
    """Run one call here and write its times to a pipe."""
    scope = {"sys": sys, "torch": torch}
    exec(before, scope)
    spent, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    exec(call, scope)
    wall_s, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = now.ru_utime - spent.ru_utime + now.ru_stime - spent.ru_stime
    modules = sum(name.partition(".")[0] == "penstock" for name in sys.modules)
    os.write(writer, json.dumps({"wall": wall_s, "cpu": cpu_s, "modules": modules}).encode())
    exec(after, scope)


def main() -> None:
    """Run the calls in turns and print one row for each call and tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--tree", action="append", help="directory of installed wheels; several are compared")
    parser.add_argument("--call", action="append", choices=_CALLS)
    args = parser.parse_args()
    print("| call | tree | modules | CPU ms: least | median (spread) | wall ms: median (spread) |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        model = Path(directory)
        save_file({str(i): torch.ones(256, 256) for i in range(8)}, model / "model.safetensors")
        (model / "linear").mkdir()
        linear = {"weight": torch.ones(256, 256), "bias": torch.ones(256)}
        save_file(linear, model / "linear.safetensors")
        for name in args.call or _CALLS:
            rows: dict[str | None, list[dict[str, float]]] = {tree: [] for tree in args.tree or [None]}
            for tree in rows:
                fresh(name, tree, model)
            for _ in range(args.runs):
                for tree, found in rows.items():
                    found.append(fresh(name, tree, model))
            for tree, found in rows.items():
                cpu, wall = (sorted(one[kind] * 1e3 for one in found) for kind in ("cpu", "wall"))
                spread = [f"{statistics.median(of):.1f} ({of[0]:.1f}-{of[-1]:.1f})" for of in (cpu, wall)]
                modules = f"{found[0]['modules']:.0f}"
                label = Path(tree).name if tree else "installed"
                print(f"| {name} | {label} | {modules} | {cpu[0]:.1f} | {spread[0]} | {spread[1]} |", flush=True)


if __name__ == "__main__":
    main()
