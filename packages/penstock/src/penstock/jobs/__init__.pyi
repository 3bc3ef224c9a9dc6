# Written by scripts/stubs.py.
from penstock.jobs.convert import WorkerSettings as WorkerSettings
__all__: list[str] = [
    "WorkerSettings",
]
