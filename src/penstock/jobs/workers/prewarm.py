"""A worker's process of a host with GPUs, begun before its device is known: seconds go into torch and the driver.

In: a worker's arguments, later, by standard input. Out: its exit code.
Not here: what it does (`process`), who begins it (`launch`).

    begun --import torch and the rest----------------------> work(address, worker, device, secret)
          `--driver--> arguments come --> device's context --'

A process that forks others cannot have a driver, and to import first and wake the driver after takes twice as long.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from penstock.cuda.driver import load_driver, ordinal
from penstock.errors import PenstockError
from penstock.jobs.workers.launch import IMPORTS


def work() -> int:
    """Be a worker once it is known which; 0 without one, if none comes any more."""
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-early") as one:
        waking = one.submit(_wake)
        gc.disable()  # a tenth of the time of what follows
        for name in IMPORTS:
            with contextlib.suppress(ImportError):  # left to who needs it
                importlib.import_module(name)
        gc.enable()
        arguments = waking.result()
    if not arguments:
        return 0
    from penstock.jobs.workers import process

    return process.work(*arguments)


def _wake() -> list[str]:
    """Return the arguments. What fails here fails again where the worker can tell it."""
    with contextlib.suppress(PenstockError):
        load_driver()
    said = sys.stdin.buffer.readline()
    arguments: list[str] = json.loads(said) if said else []
    with contextlib.suppress(PenstockError):
        if arguments and arguments[2] != "cpu":
            with load_driver().entered(ordinal(arguments[2])):
                pass
    return arguments
