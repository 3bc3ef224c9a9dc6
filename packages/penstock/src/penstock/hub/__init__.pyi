# Written by scripts/stubs.py.
from penstock.hub.client import drain as drain
from penstock.hub.client import status as status
from penstock.hub.client import why as why
__all__: list[str] = [
    "drain",
    "status",
    "why",
]
