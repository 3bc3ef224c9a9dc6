"""Staging pools of closed loads are used by the next load, or unpinned after a moment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from tests.support.pins import Pins

from penstock.memory import idle_pools
from penstock.memory.staging import StagingPool

PAGE = 4096


def pool_of(pins: Pins, num_buffers: int = 4) -> StagingPool:
    pool = StagingPool.map(num_buffers * PAGE, PAGE, registrar=pins)
    pool.release(pool.acquire(stall_s=1))
    return pool


def end_unpinning() -> None:
    for thread in threading.enumerate():
        if thread.name == "penstock-unpin":
            thread.join(5)


def test_kept_pool_is_taken_once_with_its_pins() -> None:
    pins = Pins()
    pool = pool_of(pins)
    idle_pools.keep(pool, keep_s=5)
    assert idle_pools.take(4 * PAGE, PAGE) is pool
    assert idle_pools.take(4 * PAGE, PAGE) is None
    end_unpinning()
    assert len(pins.pinned) == 1 and pool.peak_bytes == 0
    pool.close()


def test_pool_of_another_size_is_not_taken() -> None:
    pool = pool_of(Pins())
    idle_pools.keep(pool, keep_s=0.2)
    assert idle_pools.take(8 * PAGE, PAGE) is None
    assert idle_pools.take(4 * PAGE, 2 * PAGE) is None
    end_unpinning()


def test_pool_that_no_load_takes_is_unpinned() -> None:
    pins = Pins()
    idle_pools.keep(pool_of(pins), keep_s=0.1)
    end_unpinning()
    assert not pins.pinned
    assert idle_pools.take(4 * PAGE, PAGE) is None


def test_threads_that_take_pools_never_share_one() -> None:
    pools = [pool_of(Pins()) for _ in range(20)]
    for pool in pools:
        idle_pools.keep(pool, keep_s=5)
    taken: list[StagingPool] = []

    def work() -> None:
        while (pool := idle_pools.take(4 * PAGE, PAGE)) is not None:
            taken.append(pool)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(id, taken)) == sorted(map(id, pools))
    end_unpinning()
    for pool in taken:
        pool.close()


def test_forked_child_has_no_kept_pool() -> None:
    pool = pool_of(Pins())
    idle_pools.keep(pool, keep_s=5)
    child = os.fork()
    if child == 0:
        os._exit(0 if idle_pools.take(4 * PAGE, PAGE) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert idle_pools.take(4 * PAGE, PAGE) is pool
    end_unpinning()
    pool.close()


ENDS = """
from penstock.memory import idle_pools
from penstock.memory.staging import StagingPool
idle_pools.keep(StagingPool.map(1 << 20, 4096), keep_s=60)
"""


def test_program_ends_at_once_with_a_kept_pool() -> None:
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", ENDS], check=True, timeout=50)
    assert time.monotonic() - start < 30
