"""The journal: what was done is done again only where a line was cut short; another job's is not touched."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import DestinationError
from penstock_convert.result import Journal


def digests(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_journalled_tasks_are_read_after_reopening(tmp_path):
    first = Journal.open(tmp_path / "j", "k" * 32)
    first.add(3, digests(1, 2**64 - 1))
    first.add(0, digests())
    first.close()
    again = Journal.open(tmp_path / "j", "k" * 32)
    assert {task: found.tolist() for task, found in again.done.items()} == {3: [1, 2**64 - 1], 0: []}
    again.close()


def test_truncated_journal_line_is_ignored(tmp_path):
    journal = Journal.open(tmp_path / "j", "k")
    journal.add(1, digests(5))
    journal.add(2, digests(6))
    journal.close()
    raw = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(raw[:-4])
    again = Journal.open(tmp_path / "j", "k")
    assert list(again.done) == [1]
    again.add(2, digests(6))
    again.close()
    assert list(Journal.open(tmp_path / "j", "k").done) == [1, 2]


def test_journal_of_different_job_is_rejected(tmp_path):
    Journal.open(tmp_path / "j", "one").close()
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(DestinationError, match="another job"):
        Journal.open(tmp_path / "j", "two")
    assert (tmp_path / "j").read_bytes() == before


@pytest.mark.parametrize(
    "line", [b"{}\n", b"nonsense\n", b'{"task": 1, "digests": "xyz"}\n', b'{"task": 1, "digests": "00"}\n']
)
def test_journal_lines_after_corruption_are_ignored(tmp_path, line):
    journal = Journal.open(tmp_path / "j", "k")
    journal.add(4, digests(7))
    journal.close()
    with open(tmp_path / "j", "ab") as file:
        file.write(line + b'{"task": 9, "digests": ""}\n')
    again = Journal.open(tmp_path / "j", "k")
    assert list(again.done) == [4]
    again.add(2, digests(1))
    again.close()
    assert list(Journal.open(tmp_path / "j", "k").done) == [4, 2]


def test_journal_lock_excludes_second_opener(tmp_path):
    journal = Journal.open(tmp_path / "j", "k")
    journal.add(1, digests(5))
    with pytest.raises(DestinationError, match="another process"):
        Journal.open(tmp_path / "j", "k")
    journal.close()
    again = Journal.open(tmp_path / "j", "k")
    assert list(again.done) == [1]
    again.remove()
    new = Journal.open(tmp_path / "j", "k")  # the file that was removed is locked still, and is not this one
    assert not new.done
    again.close()
    new.close()


def test_forgotten_tasks_are_absent_after_reopening_journal(tmp_path):
    journal = Journal.open(tmp_path / "j", "k")
    for task in range(4):
        journal.add(task, digests(task))
    journal.forget({1: None, 3: None})
    journal.close()
    assert list(Journal.open(tmp_path / "j", "k").done) == [0, 2]
