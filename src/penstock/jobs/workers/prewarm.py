"""A worker's process on a host with GPUs, started before its device is known: torch and the driver take seconds.

In: a worker's arguments, later, by standard input. Out: its exit code.
Not here: the worker's code (`process`), starting it (`launch`).

    begun --import torch and the rest----------------------> work(address, worker, device, secret)
          `--driver--> arguments come --> device's context --'

A fork server cannot have a driver, which does not survive a fork. Importing first and initialising the driver after
takes twice as long.
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
    """Run a worker once its arguments arrive; return 0 if none arrive."""
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-early") as driver_thread:
        waking = driver_thread.submit(_wake)
        gc.disable()  # a tenth of the time of what follows
        for name in IMPORTS:
            with contextlib.suppress(ImportError):  # fails again, with a message, in the worker if it needs the module
                importlib.import_module(name)
        gc.enable()
        arguments = waking.result()
    if not arguments:
        return 0
    from penstock.jobs.workers import process

    return process.work(*arguments)


def _wake() -> list[str]:
    """Initialise the driver, wait for the arguments, create the device's context; return the arguments.

    An error here occurs again in the worker, which has a connection to report it.
    """
    with contextlib.suppress(PenstockError):
        load_driver()
    line = sys.stdin.buffer.readline()
    arguments: list[str] = json.loads(line) if line else []
    with contextlib.suppress(PenstockError):
        if arguments and arguments[2] != "cpu":
            with load_driver().entered(ordinal(arguments[2])):
                pass
    return arguments
