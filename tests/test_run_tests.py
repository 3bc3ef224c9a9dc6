"""The division of test files into groups, and the recorded durations that it uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import durations, run_tests
from scripts.run_tests import BEFORE, Group, divide, quick_files, recorded
from scripts.run_tests import test_files as files_below


def test_longest_test_file_joins_shortest_group() -> None:
    groups = divide(["a", "b", "c", "d"], {"a": 9.0, "b": 5.0, "c": 3.0, "d": 1.0}, 2)
    assert [(group.files, group.seconds) for group in groups] == [(["a"], 9.0), (["b", "c", "d"], 9.0)]


def test_setup_command_duration_counts_toward_its_group() -> None:
    groups = divide(["a", "b"], {"a": 4.0, "b": 4.0, BEFORE: 10.0}, 2, before="true")
    assert [(group.files, group.before) for group in groups] == [(["a", "b"], ""), ([], "true")]


def test_empty_test_groups_are_omitted() -> None:
    assert [group.files for group in divide(["a"], {}, 4)] == [["a"]]


def test_every_test_file_is_in_one_group() -> None:
    files = files_below(["tests"])
    assert len(files) > 200
    dealt = [file for group in divide(files, recorded(), 4, before="true") for file in group.files]
    assert sorted(dealt) == files
    assert not [file for file in files if file.startswith("tests/engines/")]


def test_test_groups_have_similar_duration() -> None:
    seconds = [group.seconds for group in divide(files_below(["tests"]), recorded(), 4)]
    assert max(seconds) - min(seconds) < 0.1 * max(seconds)


def test_test_files_with_recorded_durations_exist() -> None:
    gone = [file for file in recorded() if file != BEFORE and not (run_tests.ROOT / file).is_file()]
    assert gone == []


def test_quick_test_run_takes_under_five_minutes() -> None:
    files, seconds = quick_files(recorded()), recorded()
    assert len(files) > 100
    assert not [file for file in files if file.startswith(("tests/integration/", "tests/benchmarks/", "tests/gpu/"))]
    assert sum(seconds.get(file, 1.0) for file in files) / 2 < 240


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "LOGS", tmp_path / "logs")
    return tmp_path


def test_run_returns_worst_group_exit_status(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tree / "test_good.py").write_text("def test_good(): pass\n")
    (tree / "test_bad.py").write_text("def test_bad(): assert False\n")
    assert run_tests.run([Group(["test_good.py"])]) == 0
    assert run_tests.run([Group(["test_good.py"]), Group(["test_bad.py"])]) == 1
    assert run_tests.run([Group(["test_good.py"], before="exit 3")]) == 3
    assert "1 failed" in capfd.readouterr().out


def test_group_without_collected_tests_succeeds(tree: Path) -> None:
    (tree / "test_engine.py").write_text("import pytest\n\n\n@pytest.mark.engines\ndef test_engine(): pass\n")
    assert run_tests.run([Group(["test_engine.py"])]) == 0


def test_durations_are_read_from_test_run_reports(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "test_slow.py").write_text("import time\n\n\ndef test_slow(): time.sleep(0.3)\n")
    recorded_at = tree / "durations.json"
    recorded_at.write_text('{"test_gone.py": 3.0, "before": 2.0}')
    for module in (run_tests, durations):
        monkeypatch.setattr(module, "DURATIONS", recorded_at)
    monkeypatch.setattr(durations, "ROOT", tree)
    assert run_tests.run([Group(["test_slow.py"])]) == 0
    assert durations.main([str(run_tests.LOGS / "tests-0-unit.xml")]) == 0
    found = recorded()
    assert set(found) == {"test_slow.py", "before"}
    assert 0.3 <= found["test_slow.py"] < 30
