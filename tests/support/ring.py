"""Whether this system gives an io_uring."""

from __future__ import annotations

from penstock.storage.io_uring import Uring, refusal


def ring_refused() -> str:
    """Return why this system gives no ring; empty where it does."""
    if why := refusal():
        return why
    try:
        Uring.open(1, 1).close()
    except OSError as error:
        return str(error)
    return ""
