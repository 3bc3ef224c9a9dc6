"""Marks slow tests. `make test` skips them, and `DRILLS=all make test` runs them."""

from __future__ import annotations

import os

import pytest

long_running = pytest.mark.skipif(os.environ.get("DRILLS") != "all", reason="takes long: run with DRILLS=all")
