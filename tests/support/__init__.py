"""Drivers of this project's own tests: processes of a fleet, of a sync, of a conversion, and what they share.

In / Out: nothing here; import the module you need. Not here: what users may use in their tests (`penstock.testing`).
"""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])

# Processes that tests start import these modules by name, wherever they run.
_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, _paths)])
