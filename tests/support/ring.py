"""Tells whether this system supports io_uring."""

from __future__ import annotations

from penstock.storage.io_uring import Uring, refusal


def ring_refused() -> str:
    """Return why this system has no io_uring, or "" if it has."""
    if why := refusal():
        return why
    try:
        Uring.open(1, 1).close()
    except OSError as error:
        return str(error)
    return ""
