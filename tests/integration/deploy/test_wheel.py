"""The wheels of all packages, installed into clean environments: alone, by an extra of the core, and together."""

from __future__ import annotations

import email
import email.message
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.tensor_file import write_file

from penstock.types import DType

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir())
ADAPTERS = [name for name in PACKAGES if name != "penstock"]
EXTRAS = {
    "vllm": "penstock-vllm",
    "sglang": "penstock-sglang",
    "rl": "penstock-rl",
    "transformers": "penstock-hf",
    "compile-cache": "penstock-compile-cache",
    "convert": "penstock-convert",
    "dcp": "penstock-dcp",
    "hub": "penstock-hub",
    "nixl": "penstock-nixl",
    "tools": "penstock-tools",
}
"""The package that each extra of the core installs."""
ENTRY_POINTS = {
    "penstock-compile-cache": {"penstock.commands": {"compile-cache"}},
    "penstock-convert": {"penstock.commands": {"convert"}},
    "penstock-dcp": {},
    "penstock-hf": {"penstock.commands": {"run"}},
    "penstock-hub": {"penstock.commands": {"hub", "ui"}},
    "penstock-nixl": {"penstock.transports": {"nixl"}},
    "penstock-rl": {},
    "penstock-sglang": {"sglang.srt.plugins": {"penstock", "penstock_runai"}},
    "penstock-tools": {"penstock.commands": {"bench", "calibrate", "plan", "simulate"}},
    "penstock-vllm": {"vllm.general_plugins": {"penstock"}},
}
HOSTS = {"megatron", "peft", "ray", "requests", "safetensors", "sglang", "transformers", "trl", "verl", "vllm"}
"""Libraries and engines that adapters extend. A module may fail to import without them. TRL installs requests."""
OPTIONAL = {
    "boto3",
    "gguf",
    "huggingface_hub",
    "nixl",
    "prometheus_client",
    "ray",
    "redis",
    "starlette",
    "triton",
    "uvicorn",
}
"""Modules that the extras of the core install."""
BROUGHT = {
    "penstock-hf": {"penstock-convert"},
    "penstock-tools": {"penstock-convert", "penstock-hub"},
    "penstock-vllm": {"penstock-compile-cache", "penstock-convert", "penstock-hf", "penstock-hub"},
    "penstock-sglang": {"penstock-convert", "penstock-hf", "penstock-hub"},
}
"""Modules that an adapter installs in addition to the core."""
NEXT_VERSIONS = ("3.12", "3.13")

PROBE = """
import importlib, importlib.metadata, json, pathlib, sys
own = [one for one in importlib.metadata.distributions() if one.metadata["Name"].startswith("penstock")]
own = [one for one in own if str(one.locate_file("")).startswith(sys.prefix)]
points = [[one.metadata["Name"], point.group, point.name, point.module] for one in own for point in one.entry_points]
missing, imported = {}, []
sys.path.append(sys.argv[1])
for name in sys.argv[2:]:
    place = pathlib.Path(importlib.util.find_spec(name).origin).parent
    assert str(place).startswith(sys.prefix), place
    for path in sorted(place.rglob("*.py")):
        parts = [name, *path.relative_to(place).with_suffix("").parts]
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        # Both change the process that imports them.
        if parts[-1] in {"__main__", "sitecustomize"}:
            continue
        try:
            importlib.import_module(module)
            imported.append(module)
        except Exception as error:
            # MissingExtra is raised from the failed import.
            failed = error if isinstance(error, ModuleNotFoundError) else error.__cause__
            if not isinstance(failed, ModuleNotFoundError):
                raise
            missing[module] = failed.name
print(json.dumps({
    "packages": {one.metadata["Name"]: one.version for one in own},
    "points": points, "missing": missing, "imported": imported,
}))
"""
"""Prints our packages of an environment, their entry points, and how the import of each module ends."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment without pip."""

    path: Path

    @property
    def penstock(self) -> Path:
        return self.path / "bin" / "penstock"

    def probe(self, *packages: str, torch: Path | str = "") -> dict:
        """Run PROBE over the modules of packages; `torch` is a directory of more modules."""
        modules = [name.replace("-", "_") for name in packages]
        done = run(self.path / "bin" / "python", "-c", PROBE, torch, *modules)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def commands(self) -> set[str]:
        done = run(self.penstock, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        return set(re.findall(r"^  ([a-z-]+)  ", done.stdout.partition("Commands:")[2], re.M))


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environ, cwd=ROOT)


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with this interpreter's torch and what it requires, and no other package."""
    pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("torch")
    wanted, seen = ["torch"], set()
    while wanted:
        name = wanted.pop()
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # needed on other platforms
        seen.add(name)
        wanted += {re.split(r"[^\w.-]", one)[0] for one in found.requires or [] if "extra ==" not in one} - seen
        for top in {path.parts[0] for path in found.files or []} - {"..", "__pycache__"}:
            if not (directory / top).exists():
                (directory / top).symlink_to(str(found.locate_file(top)))
    return directory


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the wheel of each package, as `make wheel` builds it in a new clone."""
    directory = tmp_path_factory.mktemp("wheels")
    make = [
        "make",
        "--no-print-directory",
        "wheel",
        f"DIST={directory}",
        "VENV=/nonexistent",
        f"PYTHON={sys.executable}",
    ]
    done = run(*make)
    if done.returncode and "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("the build needs hatchling from a package index, which does not answer here")
    assert done.returncode == 0, done.stderr
    built = {path.name.partition("-")[0].replace("_", "-"): path for path in directory.glob("*.whl")}
    assert sorted(built) == PACKAGES
    return built


@pytest.fixture(scope="module")
def install(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """Install requirements, by a real resolution of all but torch, into a new environment."""
    overrides = tmp_path_factory.mktemp("install") / "overrides.txt"
    # torch has gigabytes on some indexes, and every test of the repository runs with it.
    overrides.write_text("torch; python_version < '3'\n")

    def install(*requirements: str, python: str = sys.executable) -> Environment:
        path = tmp_path_factory.mktemp("environment")
        done = run(python, "-m", "venv", "--without-pip", path)
        assert done.returncode == 0, done.stderr
        options = ["--find-links", wheels["penstock"].parent, "--overrides", overrides]
        # uv's cache knows a local wheel by its path and version. Another run may have had the same path.
        options += [f"--refresh-package={name}" for name in wheels]
        done = run(sys.executable, ROOT / "scripts" / "install.py", path, *options, *requirements)
        if done.returncode and ("No solution found" in done.stderr or "connect" in done.stderr.lower()):
            # Our own wheels are in the directory, so anything missing is a dependency.
            assert not re.search(r"\bpenstock[a-z-]* was not found", done.stderr), done.stderr
            pytest.skip("no package index answers here")
        assert done.returncode == 0, done.stderr
        return Environment(path)

    return install


@pytest.fixture(scope="module")
def core(install: Callable[..., Environment]) -> Environment:
    return install("penstock")


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def added_by(found: Mapping, package: str) -> dict[str, set[str]]:
    """Return the names of a package's entry points, by their group."""
    points: dict[str, set[str]] = {}
    for owner, group, name, module in found["points"]:
        if owner == package:
            points.setdefault(group, set()).add(name)
            # A plug-in may import its engine, which imports it.
            needs = found["missing"].get(module, "").partition(".")[0]
            assert module in found["imported"] or group.startswith(f"{needs}."), f"{group} names {module}: {needs}"
    return points


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_contains_exactly_its_package_files(wheels: dict[str, Path], package: str) -> None:
    packed = {name for name in zipfile.ZipFile(wheels[package]).namelist() if ".dist-info/" not in name}
    source = ROOT / "packages" / package / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    module = package.replace("-", "_")
    assert packed == files
    assert f"{module}/py.typed" in packed
    assert {name.partition("/")[0] for name in packed} == {module}


def test_wheels_contain_assets_stubs_and_startup_file(wheels: dict[str, Path]) -> None:
    names = ("penstock", "penstock-hf", "penstock-hub")
    core, hf, hub = (set(zipfile.ZipFile(wheels[name]).namelist()) for name in names)
    assert {"penstock/__init__.pyi", "penstock/spi/__init__.pyi"} <= core
    assert "penstock_hf/startup/sitecustomize.py" in hf
    assert "penstock_hub/assets/index.html" in hub


def test_all_packages_have_one_version(wheels: dict[str, Path]) -> None:
    described = {name: metadata_of(wheel) for name, wheel in wheels.items()}
    (version,) = {one["Version"] for one in described.values()}
    for name, one in described.items():
        for requirement in one.get_all("Requires-Dist", []):
            if requirement.startswith("penstock"):
                assert f"=={version}" in requirement, f"{name} requires {requirement}"


def test_package_metadata_is_complete_and_consistent(wheels: dict[str, Path]) -> None:
    described = [metadata_of(wheel) for wheel in wheels.values()]
    for key in ("Project-URL", "Classifier", "Requires-Python", "License-Expression"):
        assert len({tuple(one.get_all(key, [])) for one in described}) == 1, key
    first = described[0]
    assert {url.partition(",")[0] for url in first.get_all("Project-URL", [])} >= {"Documentation", "Issues", "Source"}
    assert "Programming Language :: Python :: 3.11" in first.get_all("Classifier", [])
    assert len({one["Summary"] for one in described}) == len(described)


@pytest.mark.parametrize("package", PACKAGES)
def test_description_has_absolute_links_and_install_command(wheels: dict[str, Path], package: str) -> None:
    described = metadata_of(wheels[package])
    text = described.get_payload()
    assert described["Description-Content-Type"] == "text/markdown"
    assert isinstance(text, str) and text.startswith("# ") and f"pip install {package}" in text.replace('"', "")
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []


def test_package_descriptions_render_on_package_index(
    install: Callable[..., Environment], wheels: dict[str, Path]
) -> None:
    tools = install("twine>=6")
    done = run(tools.path / "bin" / "twine", "check", "--strict", *wheels.values())
    assert done.returncode == 0 and done.stdout.count("PASSED") == len(PACKAGES), done.stdout


def test_core_installs_no_engine(core: Environment, torch: Path) -> None:
    found = core.probe("penstock", torch=torch)
    assert set(found["packages"]) == {"penstock"}
    assert added_by(found, "penstock") == {"console_scripts": {"penstock"}}
    assert {needs.partition(".")[0] for needs in found["missing"].values()} <= OPTIONAL, found["missing"]
    assert len(found["imported"]) > 200


def test_core_command_error_names_missing_package(core: Environment) -> None:
    added = {name: package for package, groups in ENTRY_POINTS.items() for name in groups.get("penstock.commands", ())}
    assert added.keys().isdisjoint(core.commands()) and {"load", "fetch", "status"} <= core.commands()
    extras = {package: extra for extra, package in EXTRAS.items()}
    for command, package in added.items():
        done = run(core.penstock, command)
        assert done.returncode == 2, (command, done.stderr)
        assert done.stderr.endswith(f'pip install "penstock[{extras[package]}]"\n'), done.stderr


def test_convert_error_names_missing_package(core: Environment) -> None:
    done = run(core.path / "bin" / "python", "-c", "import penstock; penstock.convert('a', 'b')")
    assert done.returncode == 1 and "MissingExtra: this needs penstock_convert" in done.stderr, done.stderr
    assert done.stderr.endswith('pip install "penstock[convert]"\n'), done.stderr


def test_core_reads_files_without_torch(core: Environment, tmp_path: Path) -> None:
    penstock = core.penstock
    write_file(tmp_path / "model.safetensors", {"w": (DType.F32, (2, 3), bytes(24))})
    done = run(penstock, "version")
    assert done.returncode == 0 and "torch" in done.stdout and "not installed" in done.stdout
    for verb in ("inspect", "manifest", "verify"):
        done = run(penstock, verb, tmp_path / "model.safetensors")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ADAPTERS)
def test_adapter_installs_core_and_entry_points(
    install: Callable[..., Environment], wheels: dict[str, Path], torch: Path, package: str
) -> None:
    requires = metadata_of(wheels[package]).get_all("Requires-Dist", [])
    environment = install(package)
    # Conversions need torch, which the extra `convert` of the core installs.
    needs_torch = package == "penstock-convert" or any("[torch]" in one for one in requires)
    found = environment.probe(package, torch=torch if needs_torch else "")
    assert set(found["packages"]) == {"penstock", package, *BROUGHT.get(package, ())}
    assert added_by(found, package) == ENTRY_POINTS[package]
    assert ENTRY_POINTS[package].get("penstock.commands", set()) <= environment.commands()
    optional = {name_of(one).replace("-", "_") for one in requires if "extra ==" in one}
    for module, needs in found["missing"].items():
        assert needs.partition(".")[0] in HOSTS | optional, f"{module} needs {needs}"


def name_of(requirement: str) -> str:
    """Return the package that a requirement names."""
    return re.split(r"[^\w-]", requirement)[0]


def test_extra_installs_adapter_package(install: Callable[..., Environment]) -> None:
    found = install("penstock[vllm]").probe()
    assert set(found["packages"]) == {"penstock", "penstock-vllm", *BROUGHT["penstock-vllm"]}
    assert [point[1:] for point in found["points"] if point[0] == "penstock-vllm"] == [
        ["vllm.general_plugins", "penstock", "penstock_vllm.plugin"]
    ]


def test_core_has_extra_for_each_adapter(wheels: dict[str, Path]) -> None:
    requires = metadata_of(wheels["penstock"]).get_all("Requires-Dist", [])
    pairs = {re.findall(r"extra == '([\w-]+)'", one)[0]: name_of(one) for one in requires if "penstock-" in one}
    assert pairs == EXTRAS
    assert [one for one in requires if one.startswith("torch") and "'convert'" in one]


def test_installing_all_packages_provides_every_command(install: Callable[..., Environment], torch: Path) -> None:
    environment = install(*PACKAGES)
    # Its modules import those of other adapters, which are installed here.
    found = environment.probe("penstock-rl", torch=torch)
    assert sorted(found["packages"]) == PACKAGES
    assert {needs.partition(".")[0] for needs in found["missing"].values()} <= HOSTS
    assert {"compile-cache", "convert", "run", "bench", "calibrate", "plan", "simulate"} <= environment.commands()


def test_adapter_failing_to_import_is_skipped(install: Callable[..., Environment]) -> None:
    environment = install("penstock-tools", "penstock-hf")
    (broken,) = environment.path.glob("lib/python3*/site-packages/penstock_hf/run_command.py")
    # The file may be a link into the installer's cache, so make a copy.
    broken.unlink()
    broken.write_text("import a_module_that_nobody_has\n")
    done = run(environment.penstock, "--help")
    assert done.returncode == 0 and "simulate" in done.stdout
    (line,) = done.stderr.splitlines()
    assert (
        line.startswith("penstock: the command `penstock run` is not available: ")
        and "a_module_that_nobody_has" in line
    )
    assert run(environment.penstock, "simulate", "--help").returncode == 0
    # The package is installed, so the message does not say to install it.
    done = run(environment.penstock, "run", "--", "true")
    assert done.returncode == 2 and "a_module_that_nobody_has" in done.stderr, done.stderr


@pytest.mark.parametrize("version", NEXT_VERSIONS)
def test_commands_run_on_next_python_version(install: Callable[..., Environment], tmp_path: Path, version: str) -> None:
    named = shutil.which(f"python{version}")
    candidates = [*([named] if named else []), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    python = next((str(one) for one in candidates if run(one, "-c", "").returncode == 0), None)
    if python is None:
        pytest.skip(f"this host has no Python {version}")
    environment = install(*PACKAGES, python=python)
    assert {"load", "run", "simulate", "compile-cache"} <= environment.commands()
    write_file(tmp_path / "model.safetensors", {"w": (DType.F32, (2, 3), bytes(24))})
    for verb in ("inspect", "manifest", "verify"):
        done = run(environment.penstock, verb, tmp_path / "model.safetensors")
        assert (done.returncode, done.stderr) == (0, ""), (verb, done.stderr)
