"""Runs chaos rounds: `python -m tests.chaos --rounds 1000 --seed 7`. The exit code is 1 if any promise did not hold."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from tests.chaos.harness import World
from tests.chaos.kinds import KINDS, kind_of
from tests.chaos.runner import PLACES, run
from tests.chaos.totals import lines, totals


def main() -> int:
    """Parse arguments, run, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="number of rounds (default: 100)")
    parser.add_argument("--seed", type=int, default=7, help="seed for all rounds (default: 7)")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no round after this time (default: 60)")
    parser.add_argument("--only", default="", help=f"kinds, separated by commas: {', '.join(KINDS)}")
    parser.add_argument("--round", type=int, action="append", default=[], help="run only this round; may be repeated")
    parser.add_argument("--at-once", type=int, default=PLACES, help=f"places for rounds (default: {PLACES})")
    parser.add_argument("--format", choices=["human", "json"], default="human")
    told = parser.parse_args()
    wanted = set(told.only.split(",")) if told.only else set(KINDS)
    if unknown := wanted - set(KINDS):
        parser.error(f"unknown kind: {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")
    numbers = told.round
    if not numbers:
        numbers, number = [], 0
        while len(numbers) < told.rounds:
            if kind_of(number) in wanted:
                numbers.append(number)
            number += 1
    shared = set(os.listdir("/dev/shm"))
    with World() as world:
        outcomes = run(
            numbers,
            told.seed,
            world=world,
            places=told.at_once,
            until=time.monotonic() + told.minutes * 60,
            show=told.format == "human",
        )
    found = totals(outcomes)
    left = sorted(name for name in set(os.listdir("/dev/shm")) - shared if "penstock" in name)
    if left:
        found["violations"]["left files"] += len(left)
        found["num_violations"] += len(left)
    if told.format == "json":
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(lines(found, told.seed)))
        print(f"left in /dev/shm: {', '.join(left)}" if left else "", end="\n" if left else "")
    return int(found["num_violations"] > 0)


if __name__ == "__main__":
    sys.exit(main())
