"""What is tracked is what a clone needs: sources and words, of no particular machine, small, and nothing built."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 1 << 20
BUILT = re.compile(r"\.(whl|egg|pyc|so|o|a|tar\.gz|zip)$|(^|/)(__pycache__|build|dist)/")
# A path at the start of a word, of a place where people and machines keep their own things.
PRIVATE = re.compile(r"(?<![\w.~/$})>:-])/(?:work|root|home|Users|workspace|scratch|data\d+)/[\w.-]+")


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: there is nothing tracked")
    listed = subprocess.run(["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    assert listed.returncode == 0, listed.stderr.decode()
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def text_of(name: str) -> str:
    """The file's text; "" for one that is not text."""
    raw = (ROOT / name).read_bytes()
    return "" if b"\0" in raw else raw.decode("utf-8", "replace")


def test_built_files_are_not_tracked() -> None:
    assert [name for name in tracked() if BUILT.search(name)] == []


def test_large_files_are_not_tracked() -> None:
    assert [name for name in tracked() if (ROOT / name).stat().st_size > MAX_BYTES] == []


def test_tracked_files_contain_no_machine_paths() -> None:
    others = [name for name in tracked() if ROOT / name != Path(__file__).resolve()]
    found = [f"{name}: {hit[0]}" for name in others for hit in PRIVATE.finditer(text_of(name))]
    assert found == []


@pytest.mark.parametrize("line", ["see /home/me/x", "`/root/.cache`", '"/work/a"', "--dir=/Users/me", "(/scratch/b)"])
def test_private_machine_path_is_detected(line: str) -> None:
    assert PRIVATE.search(line)


@pytest.mark.parametrize(
    "line", ["/tmp/x", "/dev/shm/x", "/models/llama", "s3://root/a", "https://h/home/x", "a/work/b", "/proc/self/maps"]
)
def test_harmless_paths_are_accepted(line: str) -> None:
    assert not PRIVATE.search(line)
