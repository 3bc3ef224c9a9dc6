"""The A/B runner: real rows in worktrees of a commit, and the rule by which a row is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import ab, ab_rows


@pytest.mark.timeout(400)
def test_benchmark_runs_in_worktree_of_each_commit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.ab", "HEAD", "HEAD", "--rows", "load,sync", "--n", "1"]
    command += ["--large-mib", "32", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ab.ROOT, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode in {0, 1} and "Traceback" not in done.stderr, done.stderr
    lines = [line.split()[0] for line in done.stdout.splitlines() if "ratio" in line and "again" not in line]
    assert lines == ["load", "sync"]
    listed = subprocess.run(["git", "worktree", "list"], cwd=ab.ROOT, capture_output=True, text=True, check=True)
    assert "/ab-" not in listed.stdout


@pytest.mark.parametrize(("second", "lost"), [(1.10, ["load"]), (1.01, [])])
def test_row_slower_in_both_runs_counts_as_regression(
    monkeypatch: pytest.MonkeyPatch, second: float, lost: list[str]
) -> None:
    calls: list[str] = []

    def run(rows: Sequence[str], tree: Path, data: Path) -> dict[str, float]:
        calls.append(tree.name)
        slower = 1.10 if len(calls) <= 12 else second
        return dict.fromkeys(rows, slower if tree.name == "new" else 1.0)

    monkeypatch.setattr(ab, "run", run)
    assert ab.compare(["load"], (Path("old"), Path("new")), Path(), 6) == lost
    assert calls[:4] == ["old", "new", "new", "old"] and len(calls) == 24


def test_run_from_another_worktree_is_rejected(tmp_path: Path) -> None:
    # A root without the package: Python finds the installed one, which is not what was to be measured.
    (tmp_path / "src").mkdir()
    ab.write_data(tmp_path, large_mib=16, num_small=1)
    with pytest.raises((SystemExit, subprocess.CalledProcessError)):
        ab.run(["load"], tmp_path, tmp_path)


def test_unknown_public_name_error_mentions_names_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ab_rows.NAMES, "load", ["penstock.nowhere:load", "penstock:unload"])
    with pytest.raises(SystemExit, match="add its place to NAMES"):
        ab_rows.public("load")
    monkeypatch.setitem(ab_rows.NAMES, "load", ["penstock.nowhere:load", "penstock:load"])
    assert ab_rows.public("load").__name__ == "load"
