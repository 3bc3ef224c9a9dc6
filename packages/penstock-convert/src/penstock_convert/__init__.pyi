# Written by scripts/stubs.py.
from penstock_convert.convert import WorkerSettings as WorkerSettings
from penstock_convert.job_reporter import HubReporter as HubReporter
TABLE: dict[str, str]
__all__: list[str] = [
    "HubReporter",
    "WorkerSettings",
]
