"""Two terminals on one host: the second process starts from the first, and nothing else has to run.

    terminal 1:  python examples/fetch_two_terminals.py CHECKPOINT      reads storage, then serves until Ctrl-C
    terminal 2:  python examples/fetch_two_terminals.py                 reads from terminal 1, then serves too

Without a checkpoint, a process that finds no other one writes a small synthetic checkpoint. `--once` leaves instead of
serving.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack

import torch

import penstock as ps
from penstock.testing.checkpoints import write_llama


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with ExitStack() as stack:
        fleet = stack.enter_context(ps.join("two-terminals"))
        weights: dict[str, torch.Tensor] = {}
        try:
            report = fleet.fetch(weights, fallback=args.checkpoint, device=args.device, timeout_s=1)
        except ps.NotFound:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            print("no process has the weights, so this one writes a small checkpoint")
            write_llama(directory, total_bytes=64 << 20)
            report = fleet.fetch(weights, fallback=directory, device=args.device)
        print(report.summary(), flush=True)
        if not args.once:
            print("serving until Ctrl-C", flush=True)
            fleet.serve()


if __name__ == "__main__":
    main()
