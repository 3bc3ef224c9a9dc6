"""The Slurm script starts a hub and runs a command on each node.

Replacements for `srun` and `scontrol` use this host.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
SRUN = """#!/usr/bin/env bash
# Skips srun's own options. A step with --ntasks-per-node runs once for each of two nodes.
tasks=1
while [[ ${1:-} == --* ]]; do
    [[ $1 == --ntasks-per-node=* ]] && tasks=2
    shift
done
[[ $tasks == 1 ]] && exec "$@"
"$@" &
first=$!
"$@"
wait "$first"
"""
SCONTROL = """#!/usr/bin/env bash
printf 'localhost\\nlocalhost\\n'
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    penstock = f'#!/usr/bin/env bash\nexec {sys.executable} -m penstock.cli.main "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("penstock", penstock)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PENSTOCK_JOB_DIR": str(tmp_path),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[0-1]",
    }


@pytest.mark.timeout(180)
def test_slurm_job_reads_storage_once(tmp_path: Path, environment: dict[str, str]) -> None:
    write_llama(tmp_path / "llama", total_bytes=4 * MIB, fp8=False)
    pull = f"penstock fetch llama --fallback {tmp_path}/llama --device cpu --listen localhost:0 --format json"
    done = subprocess.run(
        ["bash", ROOT / "deploy" / "slurm" / "fleet.sbatch", pull],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('"verified"') == 2, done.stdout
    assert not list(tmp_path.glob("penstock-*")), "the token and the key of the job stayed"


@pytest.mark.timeout(180)
def test_failing_command_fails_the_slurm_job(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", ROOT / "deploy" / "slurm" / "fleet.sbatch", "exit 7"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert not list(tmp_path.glob("penstock-*")), "the token and the key of the job stayed"
