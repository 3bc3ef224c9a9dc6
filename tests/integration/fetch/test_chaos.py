"""A short `make chaos`: rounds of each kind must not return wrong bytes, hang or leak."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.chaos.harness import World
from tests.chaos.kinds import KINDS, ORDER
from tests.chaos.runner import PLACES, run
from tests.chaos.totals import lines, totals
from tests.support.fork_server import ForkServer

SEED = 7
NUM_ROUNDS = 6 * len(ORDER) if os.environ.get("DRILLS") == "all" else len(ORDER)
MINUTES = 20.0


@pytest.mark.timeout(MINUTES * 60 + 60)
def test_fetch_guarantees_hold_under_random_faults(fork_server: ForkServer, tmp_path: Path) -> None:
    with World(fork_server) as world:
        until = time.monotonic() + MINUTES * 60
        outcomes = run(range(NUM_ROUNDS), SEED, world=world, places=PLACES, until=until, show=False, keep=tmp_path)
    found = totals(outcomes)
    print("\n".join(lines(found, SEED)))
    assert found["num_rounds"] == NUM_ROUNDS
    assert set(found["rounds"]) == set(KINDS)
    assert not found["num_violations"]
