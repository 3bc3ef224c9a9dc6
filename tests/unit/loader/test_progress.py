"""A wait that is drawn ends as one that is not."""

from __future__ import annotations

import pytest

from penstock.engine.run import Ticket
from penstock.errors import SourceStalled
from penstock.loader.report import Progress


def test_a_drawn_wait_has_a_deadline() -> None:
    ticket = Ticket(100, is_busy=lambda: False)
    with Progress(True, "weights") as progress, pytest.raises(SourceStalled):
        progress.follow(ticket, stall_s=0.3)
