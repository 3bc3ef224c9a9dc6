"""The address of the repository: one placeholder in all packages, which a script replaces before a release."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

from scripts.project_url import PLACEHOLDER, ROOT, files_with, write

PROJECTS = sorted(ROOT.glob("packages/*/pyproject.toml"))


def test_packages_have_same_placeholder_project_urls() -> None:
    urls = [tomllib.loads(path.read_text())["project"]["urls"] for path in PROJECTS]
    assert len(urls) > 1 and all(one == urls[0] for one in urls)
    assert set(urls[0]) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith(PLACEHOLDER) for url in urls[0].values())


def test_script_replaces_project_url_in_every_file(tmp_path: Path) -> None:
    for path in files_with(PLACEHOLDER):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "-A"], check=True)
    changed = write("https://host.example/owner/penstock/", tmp_path)
    assert {path.relative_to(tmp_path) for path in changed} >= {path.relative_to(ROOT) for path in PROJECTS}
    assert not files_with(PLACEHOLDER, tmp_path)
    text = (tmp_path / PROJECTS[0].relative_to(ROOT)).read_text()
    assert 'Source = "https://host.example/owner/penstock"' in text
