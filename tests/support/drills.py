"""Tests that take long: `make test` leaves them out, `DRILLS=all make test` runs them."""

from __future__ import annotations

import os

import pytest

drill = pytest.mark.skipif(os.environ.get("DRILLS") != "all", reason="takes long: run with DRILLS=all")
