"""Prune wheels, install them without pip, and make an environment find the packages of its machine.

    python wheels.py prune DIRECTORY                remove the files of PRUNED from the wheels
    python wheels.py install DIRECTORY SITE         extract all wheels into a site directory
    python wheels.py link SITE TREE [TORCH]         add the tree's Penstock, TORCH and this machine's packages to a site

`scripts/engine_bundle.sh` runs this. The machine that installs has no registry, and pip installs 2.5 GB on one core.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

PRUNED: dict[str, Sequence[str]] = {
    # FlashAttention 2 is for GPUs before Hopper, and the Rust front end is optional.
    "vllm": ("vllm/vllm_flash_attn/_vllm_fa2_C.*", "vllm/vllm-rs", "vllm/third_party/deep_gemm/_C.cpython-31[01345]*"),
    # FlashAttention has 94 % of the bytes. Triton's attention replaces it.
    "sglang_kernel": ("sgl_kernel/flash_ops.*", "sgl_kernel/infllm_ops.*"),
    # Static libraries, profilers and the assembler for Blackwell.
    "triton": (
        "*.a",
        "*/ptxas-blackwell",
        "*/nvdisasm",
        "*/cuobjdump",
        "*/cupti-blackwell/*",
        "triton/instrumentation/*",
    ),
    # Headers and test tools are for extensions that are compiled.
    "torch": ("torch/bin/protoc*", "torch/test/*", "torch/lib/*.a"),
}
"""Files that the engines do not need on a Hopper GPU, for each wheel."""
DATA = re.compile(r"^[^/]+\.data/(purelib|platlib)/")


def prune(directory: Path) -> None:
    """Write each wheel of `PRUNED` again without its files."""
    for wheel in sorted(directory.glob("*.whl")):
        patterns = PRUNED.get(wheel.name.partition("-")[0], ())
        if not patterns:
            continue
        smaller = wheel.with_suffix(".pruned")
        with (
            zipfile.ZipFile(wheel) as source,
            zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as target,
        ):
            for info in source.infolist():
                if not any(fnmatch.fnmatch(info.filename, pattern) for pattern in patterns):
                    with source.open(info) as data, target.open(info, "w", force_zip64=True) as copy:
                        shutil.copyfileobj(data, copy, 1 << 20)
        smaller.replace(wheel)


def install(directory: Path, into: Path) -> None:
    """Extract all wheels, one process for each wheel."""
    into.mkdir(parents=True, exist_ok=True)
    wheels = sorted(directory.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(extract, wheels, [into] * len(wheels)):
            pass


def extract(wheel: Path, into: Path) -> None:
    """Extract a wheel. Scripts and headers are left out."""
    with zipfile.ZipFile(wheel) as source:
        for info in source.infolist():
            name = DATA.sub("", info.filename)
            if info.is_dir() or ".data/" in name.partition(".dist-info")[0]:
                continue
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with source.open(info) as data, path.open("wb") as copy:
                shutil.copyfileobj(data, copy, 1 << 20)
            if mode := (info.external_attr >> 16) & 0o777:
                path.chmod(mode | 0o600)


def link(into: Path, tree: Path, torch: Path | None = None) -> None:
    """Add directories to the search path of a site, after its own packages."""
    machine = Path(site.getsitepackages()[0])
    metadata = into / "entry-points"
    subprocess.run([sys.executable, str(tree / "scripts" / "entry_points.py"), str(metadata)], check=True)
    lines = [*map(str, sorted(tree.glob("packages/*/src"))), str(metadata)]
    if torch is not None:
        lines.append(str(torch))
        # torch looks for CUDA's libraries beside itself.
        for library in sorted((machine / "nvidia").glob("*")):
            beside = torch / "nvidia" / library.name
            if library.is_dir() and not beside.exists():
                beside.parent.mkdir(exist_ok=True)
                os.symlink(library, beside)
    # `addsitedir` also reads the machine's own .pth files.
    lines.append(f"import site; site.addsitedir({str(machine)!r})")
    (into / "bundle.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Run one of the commands."""
    command, *paths = sys.argv[1], *map(Path, sys.argv[2:])
    {"prune": prune, "install": install, "link": link}[command](*paths)


if __name__ == "__main__":
    main()
