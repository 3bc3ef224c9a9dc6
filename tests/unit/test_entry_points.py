"""The entry points that `make VENV=system` writes equal those of the packages."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from scripts.entry_points import write_metadata


def test_installed_entry_points_are_found(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    found = {
        (point.group, point.name): point.value
        for distribution in importlib.metadata.distributions(path=[str(tmp_path)])
        for point in distribution.entry_points
    }
    assert found["vllm.general_plugins", "penstock"] == "penstock_vllm.plugin:register"
    assert found["console_scripts", "penstock"].startswith("penstock.")
    assert {"compile-cache", "convert"} <= {name for group, name in found if group == "penstock.commands"}
