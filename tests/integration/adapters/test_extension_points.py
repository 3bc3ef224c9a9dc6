"""Adds a storage, a transport, a format and an operation from outside the package, through public entry points only.

The extensions are a module in a separate directory, as in an installed package. Nothing in Penstock is patched, and no
private name is used.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.sources import source_path

import penstock
from penstock.errors import ConfigError
from penstock.storage import register_storage
from penstock.transform import Format, register_format
from penstock.transport import TransportKind, register_transport
from penstock.types import DType

VAULT = '''
import os
from pathlib import Path

import torch

from penstock.errors import NotFound
from penstock_convert.operations.operation import copy_recipe, only_source, specs_of
from penstock.storage import MemorySource, read_whole

ROOT = Path(os.environ["VAULT_ROOT"])


class VaultStorage:
    """Files of a directory, under names of the form vault://name."""

    def open(self, uri, *, settings, storage_options):
        path = self._path(uri)
        if not path.is_file():
            raise NotFound("no such object in the vault", uri=uri)
        source = MemorySource(path.read_bytes(), uri=uri)
        # Equal in every process: the workers of a conversion compare it with the coordinator's.
        source.identity = f"{path.stat().st_mtime_ns}"
        return source

    def list(self, uri, *, settings, storage_options):
        path = self._path(uri)
        if path.is_file():
            return [uri]
        found = sorted(path.iterdir()) if path.is_dir() else []
        if not found:
            raise NotFound("nothing in the vault", uri=uri)
        return [f"vault://{file.relative_to(ROOT)}" for file in found]

    def read_small(self, uri, *, settings, storage_options):
        try:
            return read_whole(self.open(uri, settings=settings, storage_options=storage_options))
        except NotFound:
            return None

    def _path(self, uri):
        return ROOT / uri.removeprefix("vault://")


class Negate:
    """Every tensor with its sign changed."""

    name = "negate"

    def recipes(self, sources):
        return [copy_recipe(0, spec) for spec in specs_of(only_source(sources, self.name))]

    def run(self, recipe, start, stop, inputs):
        return [-inputs[0]]

    def config(self, config):
        return config
'''

PEEK = '''
import ctypes
import os
import secrets
from pathlib import Path

import msgspec

from penstock.errors import Cancelled, ConfigError, PeerLost, StaleDescriptor
from penstock.transport import TransportKind
from penstock.transport.protocol import Descriptor

GENERATIONS = Path(os.environ["PEEK_ROOT"])
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)


class Payload(msgspec.Struct):
    pid: int
    address: int


class PeekHandle:
    """Memory of this process; a file that is removed at a fence says whether its generation is still good."""

    def __init__(self, memory):
        self.memory, self.is_open = memory, True
        self.descriptor = self._begin()

    def _begin(self):
        self._generation = secrets.randbits(62)
        (GENERATIONS / str(self._generation)).touch()
        return Descriptor(
            transport="peek",
            endpoint=str(os.getpid()),
            generation=self._generation,
            nbytes=self.memory.nbytes,
            payload=msgspec.msgpack.encode(Payload(os.getpid(), self.memory.address)),
        )

    def fence(self):
        if not self.is_open:
            raise Cancelled("the registration is closed")
        (GENERATIONS / str(self._generation)).unlink(missing_ok=True)
        self.descriptor = self._begin()
        return self.descriptor

    def close(self):
        self.is_open = False
        (GENERATIONS / str(self._generation)).unlink(missing_ok=True)


class PeekRead:
    def __init__(self, into, source, segments):
        self.into, self.source, self.segments = into, source, segments
        self.nbytes, self.moved_bytes = int(segments.nbytes.sum()), 0


class PeekTransport:
    """Reads /proc/PID/mem of another process on this host."""

    name = "peek"

    def __init__(self):
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY, 0, 0, 0)
        self._handles = []

    def register(self, memory):
        if memory.device != "cpu":
            raise ConfigError(f"peek reaches host memory only, not {memory.device}")
        self._handles.append(PeekHandle(memory))
        return self._handles[-1]

    def post_read(self, into, source, segments):
        segments.check(src_nbytes=source.nbytes, dst_nbytes=into.memory.nbytes)
        return PeekRead(into, source, segments)

    def wait(self, pending, *, stall_s):
        peer, rows = msgspec.msgpack.decode(pending.source.payload, type=Payload), pending.segments
        target = (ctypes.c_ubyte * pending.into.memory.nbytes).from_address(pending.into.memory.address)
        view = memoryview(target).cast("B")
        pending.moved_bytes = 0
        try:
            with open(f"/proc/{peer.pid}/mem", "rb", buffering=0) as memory:
                for src, dst, n in zip(rows.src.tolist(), rows.dst.tolist(), rows.nbytes.tolist(), strict=True):
                    while n:
                        got = os.preadv(memory.fileno(), [view[dst : dst + n]], peer.address + src)
                        src, dst, n = src + got, dst + got, n - got
                        pending.moved_bytes += got
        except OSError as error:
            raise PeerLost(f"process {peer.pid} cannot be read: {error}", mutated=pending.moved_bytes > 0) from error
        if not (GENERATIONS / str(pending.source.generation)).exists():
            raise StaleDescriptor("the memory was fenced", mutated=True)

    def close(self):
        for handle in self._handles:
            handle.close()


KIND = TransportKind(name="peek", open=lambda setup: PeekTransport(), reach="host", rank=5)
'''

BLOCK64 = """
from penstock.transform import Format
from penstock.types import DType

FORMAT = Format(
    tag="fp8-block64",
    values=DType.F8_E4M3,
    scaling="amax",
    block=(64, 64),
    scales_suffix="_scale_inv",
    config=lambda kept: {"quant_method": "fp8", "weight_block_size": [64, 64], "modules_to_not_convert": list(kept)},
)
"""

HOLDER = """
import sys, safetensors.torch, penstock
with penstock.join("model", connection=penstock.ConnectionSettings(transports=["peek"])) as fleet:
    fleet.offer(safetensors.torch.load_file(sys.argv[1]))
    print("offered", flush=True)
    sys.stdin.read()
"""

READER = """
import json, sys, safetensors.torch, penstock
tensors = {}
with penstock.join("model", connection=penstock.ConnectionSettings(transports=["peek"])) as fleet:
    report = fleet.fetch(tensors)
safetensors.torch.save_file(tensors, sys.argv[1])
print(json.dumps({path: report.why[path] for path in report.nbytes_by_path}))
"""


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint with two files in the vault, and its tensors read by the format's own reader."""
    vault = tmp_path / "vault" / "model"
    vault.mkdir(parents=True)
    save_file({"a": torch.randn(300, 700)}, vault / "model-00001-of-00002.safetensors")
    save_file({"b": torch.randn(17).bfloat16()}, vault / "model-00002-of-00002.safetensors")
    return {name: tensor for file in vault.iterdir() for name, tensor in load_file(file).items()}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a package with entry points, on the path of this process and its children."""
    site = tmp_path / "site"
    information = site / "extensions-1.0.dist-info"
    information.mkdir(parents=True)
    for name, code in (("vault_storage", VAULT), ("peek_transport", PEEK), ("block64_format", BLOCK64)):
        (site / f"{name}.py").write_text(code)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: extensions\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[penstock.storages]\nvault = vault_storage:VaultStorage\n"
        "[penstock.transports]\npeek = peek_transport:KIND\n"
        "[penstock.formats]\nfp8-block64 = block64_format:FORMAT\n"
    )
    monkeypatch.setenv("VAULT_ROOT", str(tmp_path / "vault"))
    monkeypatch.setenv("PEEK_ROOT", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{source_path()}")
    return site


def run(code: str) -> str:
    """Run code in a separate process, so that its registrations end with it."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_storage_registered_in_process_is_read(tensors, installed: Path, tmp_path: Path) -> None:
    # Remove its entry point, so that only the registration makes the scheme known.
    (installed / "extensions-1.0.dist-info" / "entry_points.txt").unlink()
    run(
        "import penstock, safetensors.torch\n"
        "from penstock.storage import register_storage\n"
        "from vault_storage import VaultStorage\n"
        "register_storage('vault', VaultStorage)\n"
        f"safetensors.torch.save_file(dict(penstock.load('vault://model')), r'{tmp_path}/out.safetensors')"
    )
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_workers_use_installed_storage_and_operation(tensors, installed: Path, tmp_path: Path) -> None:
    """Workers of a conversion are separate processes, which know the storage by its entry point."""
    run(
        "import penstock\n"
        "word = {'op': 'function', 'function': 'vault_storage:Negate'}\n"
        f"penstock.convert('vault://model', r'{tmp_path}/out', operations=[word], workers=1)"
    )
    found = {
        name: tensor for file in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], -tensor) for name, tensor in tensors.items())


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a short runtime directory for processes that find each other through the host's hub."""
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    yield directory
    shutil.rmtree(directory)


def fetch_in_processes(tmp_path: Path, transports: str = '["peek"]') -> dict[str, str]:
    """Fetch from one process into another. Return the report's paths with the reason for each."""
    wanted = {"a": torch.randn(1 << 20), "b": torch.randn(3, 5).bfloat16()}
    save_file(wanted, tmp_path / "in.safetensors")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER.replace('["peek"]', transports), str(tmp_path / "in.safetensors")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "offered\n"
        done = subprocess.run(
            [sys.executable, "-c", READER.replace('["peek"]', transports), str(tmp_path / "out.safetensors")],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        holder.communicate(timeout=60)  # ends its standard input
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    reasons: dict[str, str] = json.loads(done.stdout)
    return reasons


def test_fetch_uses_installed_transport(installed: Path, runtime: str, tmp_path: Path) -> None:
    """Both ends know the transport by its entry point, and it transfers every byte of a fetch."""
    (path,) = fetch_in_processes(tmp_path)
    assert path.startswith("peek")


def test_fetch_falls_back_if_transport_is_refused(installed: Path, runtime: str, tmp_path: Path) -> None:
    refuses = 'rank=5, unless_peer=lambda into, source: f"process {source.endpoint} is private")'
    (installed / "peek_transport.py").write_text(PEEK.replace("rank=5)", refuses))
    ((path, why),) = fetch_in_processes(tmp_path, '["peek", "http"]').items()
    assert path.startswith("http")
    assert re.search(r"peek: process \d+ is private", why)


def test_broken_entry_point_is_logged_and_skipped(installed: Path, runtime: str) -> None:
    information = installed / "extensions-1.0.dist-info" / "entry_points.txt"
    information.write_text(
        "[penstock.transports]\nbad = no_such_module:KIND\n"
        "[penstock.storages]\nbad = no_such_module:Storage\n[penstock.formats]\nbad = vault_storage:missing\n"
    )
    run(
        "import penstock\n"
        "from penstock.errors import ConfigError\n"
        "from penstock.transform.formats import format_of\n"
        "only = lambda name: penstock.ConnectionSettings(transports=[name])\n"
        "with penstock.join('model', connection=only('shm')):\n"
        "    pass\n"
        "for act in (\n"
        "    lambda: penstock.join('model', connection=only('bad')),\n"
        "    lambda: penstock.load('bad://model'),\n"
        "    lambda: format_of('bad'),\n"
        "):\n"
        "    try:\n"
        "        act()\n"
        "    except ConfigError as error:\n"
        "        assert 'entry point bad = ' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError(act)\n"
    )


def test_conversion_stores_and_dequantises_installed_format(installed: Path, tmp_path: Path) -> None:
    """A conversion stores the format and describes it in config.json, and `dequantise` reads it again."""
    source = tmp_path / "model"
    source.mkdir()
    weight = torch.randn(200, 160)
    save_file({"layers.0.mlp.up_proj.weight": weight}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"architectures": ["Toy"], "torch_dtype": "float32"}))
    run(
        "import penstock\n"
        f"penstock.convert(r'{source}', r'{tmp_path}/fp8', to='fp8-block64', workers=1)\n"
        f"penstock.convert(r'{tmp_path}/fp8', r'{tmp_path}/plain', operations='dequantise:to=F32', workers=1)"
    )
    stored = next((tmp_path / "fp8").glob("*.safetensors"))
    found = load_file(stored)
    codes = found["layers.0.mlp.up_proj.weight"]
    scales = found["layers.0.mlp.up_proj.weight_scale_inv"]
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (4, 3)
    spread = scales.repeat_interleave(64, 0)[:200].repeat_interleave(64, 1)[:, :160]
    values = codes.float() * spread
    # E4M3 has three bits of mantissa, so the error is at most 1/16 of the value or of the block's smallest step.
    assert bool(((values - weight).abs() <= weight.abs() / 16 + spread * 2**-10).all())
    block = weight[:64, :64].abs().max() / 448
    torch.testing.assert_close(scales[0, 0], block)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [64, 64]
    plain = load_file(next((tmp_path / "plain").glob("*.safetensors")))
    assert torch.equal(plain["layers.0.mlp.up_proj.weight"], values)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tag": "nvfp4"}, "its tag is taken"),
        ({"tag": "a tag"}, "a tag must be"),
        ({"block": (96, 64)}, "powers of two"),
        ({"block": (64, 0)}, "must have one row"),
        ({"block": (256, 256)}, "powers of two"),
        ({"scaling": "nv"}, "F4 values"),
        ({"values": DType.BF16}, "F8_E4M3 or F4"),
        ({"scaling": "none"}, "no blocks"),
    ],
)
def test_format_unsupported_by_kernels_is_refused(change: dict[str, object], why: str) -> None:
    form = Format(tag="fp8-block64", values=DType.F8_E4M3, scaling="amax", block=(64, 64))
    with pytest.raises(ConfigError, match=why):
        register_format(replace(form, **change))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("shm", "its name is taken"),
        ("Peek", "its name is malformed"),
        ("staged_peek", "its name is malformed"),
        ("", "its name is malformed"),
    ],
)
def test_duplicate_or_invalid_transport_name_is_rejected(name: str, why: str) -> None:
    kind = TransportKind(name=name, open=lambda setup: object(), reach="host", rank=5)
    with pytest.raises(ConfigError, match=why):
        register_transport(kind)


@pytest.mark.parametrize("register", [register_format, register_transport])
def test_wrong_extension_type_is_refused(register: Callable[[object], None]) -> None:
    with pytest.raises(ConfigError, match="is 'peek' "):
        register("peek")


@pytest.mark.parametrize("scheme", ["file", "S3", "a b", "", "x://"])
def test_invalid_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match="not a URI scheme"):
        register_storage(scheme, object)


def test_second_storage_for_scheme_is_rejected() -> None:
    with pytest.raises(ConfigError, match="registered already"):
        register_storage("s3", object)


def test_unknown_scheme_error_lists_known_schemes() -> None:
    with pytest.raises(ConfigError, match="no storage supports nowhere://") as caught:
        penstock.load("nowhere://model")
    assert "s3://" in str(caught.value)
    assert "register_storage" in str(caught.value)
