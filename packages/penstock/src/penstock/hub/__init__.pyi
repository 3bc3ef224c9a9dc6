# Written by scripts/stubs.py.
from penstock.hub.client import drain as drain
from penstock.hub.client import status as status
from penstock.hub.client import why as why
from penstock.hub.job_reporter import HubReporter as HubReporter
__all__: list[str] = [
    "HubReporter",
    "drain",
    "status",
    "why",
]
