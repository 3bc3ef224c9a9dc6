"""Two terminals on one host: a trainer publishes a version every second, and an engine takes each one.

    terminal 1:  python examples/sync_two_terminals.py train        publishes until Ctrl-C
    terminal 2:  python examples/sync_two_terminals.py serve        takes each new version, until Ctrl-C

Start them in any order, with as many engines as you like. If you end and restart the trainer, the engines continue.
`--versions` ends the program after this number of versions.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from itertools import count, islice

import torch

import penstock as ps


def train(model: torch.nn.Module, versions: int | None) -> None:
    with ps.publisher("two-terminals", model) as publisher:
        # Versions must be larger than those of an earlier trainer, which engines may have.
        for version in islice(count(publisher.latest + 1), versions):
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(version)  # a training step
            print(publisher.publish(version).summary(), flush=True)
            time.sleep(1)


def serve(model: torch.nn.Module, versions: int | None) -> None:
    with ps.subscriber("two-terminals", model) as subscriber:
        print("waiting for a version", flush=True)
        for report in islice(subscriber, versions):
            assert all((param == report.version).all() for param in model.parameters())
            print(report.summary(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["train", "serve"])
    parser.add_argument("--versions", type=int)
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        {"train": train, "serve": serve}[args.side](torch.nn.Linear(256, 256), args.versions)


if __name__ == "__main__":
    main()
