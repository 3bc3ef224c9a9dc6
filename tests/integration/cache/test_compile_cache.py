"""Compiled code is shared between home directories through a directory, S3, a fleet and a cache."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.keeper import KeeperProcess
from tests.support.servers.s3 import SwiftServer, Unavailable
from tests.unit.compile_cache.test_bundle import fill, keys, read
from typer.testing import CliRunner

import penstock as ps
import penstock_compile_cache
from penstock.cli.main import add_commands
from penstock.storage.files import FileSource
from penstock.storage.safetensors import encode_header
from penstock.storage.weight_set import WeightSet
from penstock.testing.checkpoints import write_llama
from penstock.types import DType
from penstock_compile_cache import store
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

app = add_commands()

CONFIG = {"dtype": "bf16"}


class Homes:
    """A model, a pair of keys, and homes for processes. Each home is a directory of compiled code."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.model = directory / "llama"
        self.private, self.public = directory / "private.pem", directory / "public.pem"
        write_llama(self.model, total_bytes=2 << 20)
        private, public = keys()
        self.private.write_bytes(private)
        self.public.write_bytes(public)
        self._monkeypatch = monkeypatch

    def enter(self, name: str) -> Path:
        """Set the home of this process. Return its directory of compiled code."""
        home = self.directory / name
        self._monkeypatch.setenv("PENSTOCK_COMPILE_CACHE_DIR", str(home))
        return home

    def restore(self, **changes: object) -> store.Restored:
        options = {"engine": "mine", "config": CONFIG, "public_keys": [self.public], **changes}
        return penstock_compile_cache.restore(options.pop("uri", self.model), **options)  # type: ignore[arg-type]

    def bake(self) -> tuple[store.Saved, dict[str, bytes]]:
        """Compile in a home and save. Return the result and the files."""
        self.enter("first")
        restored = self.restore()
        files = fill(restored.directory)
        return penstock_compile_cache.save(self.model, restored.key, private_key=self.private), files


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Homes]:
    for variable in [cache.variable for cache in penstock_compile_cache.caches.CACHES]:
        monkeypatch.setenv(variable, "before")
    yield Homes(tmp_path, monkeypatch)


def test_compiled_code_is_restored_in_another_home_directory(homes: Homes) -> None:
    saved, files = homes.bake()
    assert Path(saved.uri).parent == homes.model / "penstock-artifacts"
    second = homes.enter("second")
    restored = homes.restore()
    assert restored.is_found and restored.source == saved.uri and restored.num_files == len(files)
    assert restored.directory == second / restored.key.id and read(restored.directory) == files
    assert os.environ["TRITON_CACHE_DIR"] == str(restored.directory / "triton")
    again = homes.restore()
    assert again.is_found and again.num_files == 0 and "already in" in str(again)
    # Bundles next to the model are not part of the model.
    assert ps.inspect(homes.model).num_tensors == len(ps.load(homes.model))


RESTORE_WITHOUT_TORCH = """
import sys, penstock_compile_cache
options = {"engine": "mine", "config": {"dtype": "bf16"}, "public_keys": [sys.argv[2]]}
restored = penstock_compile_cache.restore(sys.argv[1], **options)
print(restored.key.id, restored.num_files, "torch" in sys.modules)
"""


def test_restore_does_not_import_torch(homes: Homes) -> None:
    saved, files = homes.bake()
    homes.enter("second")
    command = [sys.executable, "-c", RESTORE_WITHOUT_TORCH, str(homes.model), str(homes.public)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert text.split() == [saved.key.id, str(len(files)), "False"]


@pytest.mark.parametrize(("name", "is_logged"), [("first", False), ("second", True)])
def test_kernel_tuning_lost_after_path_change_is_logged(
    homes: Homes, name: str, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = homes.enter("first")
    restored = homes.restore()
    fill(restored.directory)
    (restored.directory / "inductor" / "ab" / "x.best_config").write_text("{}")
    penstock_compile_cache.save(homes.model, restored.key, private_key=homes.private)
    shutil.rmtree(first)
    homes.enter(name)
    assert homes.restore().is_found
    assert ("torch tunes some kernels again" in caplog.text) == is_logged


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"config": {"dtype": "f16"}}, "config.dtype bf16 instead of f16"),
        ({"engine": "other"}, "engine mine instead of other"),
        ({"model": "another"}, "model "),
        ({"public_keys": []}, "no public key is trusted"),
        ({"at": "/nowhere"}, "no bundle in /nowhere"),
    ],
)
def test_changed_key_field_prevents_restore(homes: Homes, changes: dict[str, object], why: str) -> None:
    homes.bake()
    homes.enter("second")
    restored = homes.restore(**changes)
    assert not restored.is_found and why in restored.why and "the engine compiles" in str(restored)
    assert read(restored.directory) == {} and os.environ["TRITON_CACHE_DIR"] == str(restored.directory / "triton")


def test_bundle_from_untrusted_signer_is_not_restored(homes: Homes, caplog: pytest.LogCaptureFixture) -> None:
    homes.bake()
    homes.enter("second")
    stranger = homes.directory / "stranger.pem"
    stranger.write_bytes(keys()[1])
    restored = homes.restore(public_keys=[stranger])
    assert not restored.is_found and "not signed by the trusted key" in restored.why and read(restored.directory) == {}
    assert "is not used, the engine compiles" in caplog.text
    (listed,) = penstock_compile_cache.list_bundles(homes.model, public_keys=[stranger])
    assert listed.key is None and listed.signature == "refused"


def test_renamed_bundle_is_refused(homes: Homes) -> None:
    saved, _ = homes.bake()
    homes.enter("second")
    other = homes.restore(config={"dtype": "f16"})
    shutil.copy(saved.uri, homes.model / "penstock-artifacts" / f"{other.key.id}.safetensors")
    shutil.rmtree(other.directory)
    restored = homes.restore(config={"dtype": "f16"})
    assert not restored.is_found and "a different key: config.dtype bf16 instead of f16" in restored.why


@pytest.mark.parametrize("size", [0, 7, 200, 4096, -1])
def test_truncated_bundle_is_refused(homes: Homes, size: int) -> None:
    saved, _ = homes.bake()
    whole = Path(saved.uri).read_bytes()
    Path(saved.uri).write_bytes(whole[:size])
    homes.enter("second")
    restored = homes.restore()
    assert not restored.is_found and "is not used" in restored.why
    assert [path.name for path in restored.directory.parent.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("name", ["description", "signature", "content"])
@pytest.mark.parametrize("change", ["missing", "dtype", "shape", "empty"])
def test_invalid_bundle_file_is_not_restored(homes: Homes, name: str, change: str) -> None:
    saved, _ = homes.bake()
    tensors = load_file(saved.uri)
    whole = tensors.pop(name)
    if change != "missing":
        even = whole[: len(whole) // 2 * 2]
        changed = {"dtype": even.view(torch.bfloat16), "shape": even.view(2, -1), "empty": whole[:0]}
        tensors[name] = changed[change].clone()
    save_file(tensors, saved.uri)
    homes.enter("second")
    restored = homes.restore()
    assert not restored.is_found and "is not used" in restored.why and read(restored.directory) == {}
    # The bundle is listed, and the error states how the nearest bundle differs.
    (listed,) = penstock_compile_cache.list_bundles(homes.model, public_keys=[homes.public])
    assert (listed.signature == "refused") == (name != "content")
    assert not homes.restore(config={"dtype": "f16"}).is_found


@pytest.mark.parametrize("name", ["description", "signature", "content"])
def test_oversized_bundle_tensor_is_not_read(homes: Homes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may state any size and a file may be sparse, but unsigned bytes must not fill the memory."""
    saved, _ = homes.bake()
    # The mapped file is rewritten, so copy the tensors.
    tensors = {key: value.clone() for key, value in load_file(saved.uri).items()}
    sizes = {key: len(value) for key, value in tensors.items()} | {name: 3 << 30}
    starts = np.cumsum([0, *sizes.values()]).tolist()
    entries = [(key, DType.U8, (size,), at, at + size) for (key, size), at in zip(sizes.items(), starts, strict=False)]
    header = encode_header(entries, {}, uri="bundle")
    with open(saved.uri, "wb") as file:
        file.write(header)
        for value, at in zip(tensors.values(), starts, strict=False):
            file.seek(len(header) + at)
            file.write(value.numpy().tobytes())
        file.truncate(len(header) + starts[-1])
    reads, readv = list[int](), FileSource.readv

    def count(source: FileSource, offset: int, buffers: Sequence[memoryview]) -> str:
        reads.append(sum(buffer.nbytes for buffer in buffers))
        return readv(source, offset, buffers)

    monkeypatch.setattr(FileSource, "readv", count)
    homes.enter("second")
    restored = homes.restore()
    assert not restored.is_found and f"its {name} has {3 << 30} bytes" in restored.why
    assert sum(reads) < 1 << 20


def test_bundle_signature_is_checked_before_content(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    homes.bake()
    read_part, parts = store._read_part, list[str]()

    def note(weights: WeightSet, name: str, most_bytes: int) -> memoryview:
        parts.append(name)
        return read_part(weights, name, most_bytes)

    monkeypatch.setattr(store, "_read_part", note)
    homes.enter("second")
    stranger = homes.directory / "stranger.pem"
    stranger.write_bytes(keys()[1])
    assert not homes.restore(public_keys=[stranger]).is_found
    assert "content" not in parts and "signature" in parts
    assert homes.restore().is_found and "content" in parts


def test_restore_is_skipped_if_disk_is_full(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    homes.bake()
    homes.enter("second")
    monkeypatch.setattr("penstock.storage.output.free_bytes", lambda path: 3)
    restored = homes.restore()
    assert not restored.is_found and "not enough disk space" in restored.why and read(restored.directory) == {}


def test_bundle_added_after_first_restore_is_found(homes: Homes) -> None:
    home = homes.enter("first")
    empty = homes.restore().directory
    (empty / "inductor" / "locks").mkdir(parents=True)
    homes.enter("other")
    restored = homes.restore()
    files = fill(restored.directory)
    penstock_compile_cache.save(homes.model, restored.key, private_key=homes.private)
    homes.enter("first")
    again = homes.restore()
    assert again.num_files == len(files) and again.directory == empty and empty.parent == home


def test_missing_hub_falls_back_to_storage(homes: Homes, caplog: pytest.LogCaptureFixture) -> None:
    saved, files = homes.bake()
    homes.enter("second")
    restored = homes.restore(connection=f"unix://{homes.directory}/no-hub")
    assert restored.source == saved.uri and read(restored.directory) == files
    assert "so this process reads from its fallback" in caplog.text


def test_saving_bundle_to_hugging_face_hub_raises(homes: Homes) -> None:
    homes.bake()
    restored = homes.restore()
    with pytest.raises(ps.ConfigError, match="cannot write to hf://"):
        penstock_compile_cache.save("hf://org/llama", restored.key, private_key=homes.private)


def test_directory_writable_by_others_is_refused(homes: Homes) -> None:
    home = homes.enter("open")
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    with pytest.raises(ps.ConfigError, match="other users can write to"):
        homes.restore()


def test_save_raises_without_private_key_or_compiled_code(homes: Homes) -> None:
    homes.enter("first")
    restored = homes.restore()
    with pytest.raises(ps.ConfigError, match="no private key"):
        penstock_compile_cache.save(homes.model, restored.key)
    with pytest.raises(ps.ConfigError, match="no compiled code"):
        penstock_compile_cache.save(homes.model, restored.key, private_key=homes.private)
    with pytest.raises(ps.ConfigError, match=f"known ids: {restored.key.id}"):
        penstock_compile_cache.save(homes.model, "../../etc", private_key=homes.private)
    with pytest.raises(ps.ConfigError, match="no compiled code"):
        penstock_compile_cache.save(
            homes.model, restored.key, private_key=homes.private, at=homes.directory / "new" / "bundles"
        )
    assert not (homes.model / "penstock-artifacts").exists() and not (homes.directory / "new").exists()


def test_bundle_is_saved_next_to_its_model(homes: Homes) -> None:
    homes.enter("first")
    restored, named = homes.restore(), homes.restore(model="any of these")
    for each in (restored, named):
        fill(each.directory)
    absent = homes.directory / "absent"
    for each in (restored, named):
        with pytest.raises(ps.NotFound):
            penstock_compile_cache.save(absent, each.key, private_key=homes.private)
    assert not absent.exists()
    other = homes.directory / "other"
    write_llama(other, total_bytes=1 << 20)
    with pytest.raises(ps.ConfigError, match="is for a model with revision h1-"):
        penstock_compile_cache.save(other, restored.key, private_key=homes.private)
    assert not (other / "penstock-artifacts").exists()
    # A name may refer to several models.
    assert penstock_compile_cache.save(other, named.key, private_key=homes.private).num_files


def test_list_reports_missing_and_corrupt_bundles(homes: Homes) -> None:
    def listed(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["compile-cache", "list", *words])
        assert done.exception is None or isinstance(done.exception, ps.PenstockError | SystemExit)
        return done.exit_code, done.stdout if done.exception is None else type(done.exception).__name__

    assert listed(str(homes.directory / "nowhere")) == (1, "NotFound")
    assert listed(str(homes.model)) == (0, f"no bundles in {homes.model}/penstock-artifacts\n")
    saved, _ = homes.bake()
    good = Path(saved.uri)
    good.with_name("cut.safetensors").write_bytes(good.read_bytes()[:-1])
    tensors = load_file(good)
    del tensors["signature"]
    save_file(tensors, good.with_name("unsigned.safetensors"))
    code, text = listed(str(homes.model), "--public-key", str(homes.public))
    lines = {Path(line.partition(": ")[0]).name: line for line in text.splitlines()}
    assert code == 0 and len(lines) == 3
    assert "signature good" in lines[good.name]
    assert "mine, torch" in lines[good.name]
    assert ": refused: " in lines["cut.safetensors"]
    assert lines["unsigned.safetensors"].endswith(": refused: the bundle is not signed")


def test_refused_bundle_is_logged_once(homes: Homes) -> None:
    saved, _ = homes.bake()
    Path(saved.uri).write_bytes(Path(saved.uri).read_bytes()[:-1])
    words = ["--engine", "mine", "--config", "dtype=bf16", "--public-key", str(homes.public)]
    command = [sys.executable, "-m", "penstock", "compile-cache", "restore", str(homes.model), *words]
    env = {**os.environ, "PENSTOCK_COMPILE_CACHE_DIR": str(homes.directory / "second")}
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=env).stderr
    assert text.count("is not used") == 1
    assert "no package 'mine' is installed" in text


RESTORE = """
import json, os, signal, sys
import penstock as ps
import penstock_compile_cache
if "kill" in sys.argv:
    os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
options = {"engine": "mine", "config": {"dtype": "bf16"}, "public_keys": [sys.argv[2]]}
restored = penstock_compile_cache.restore(sys.argv[1], **options)
print(json.dumps([restored.is_found, restored.num_files]))
"""


def start(homes: Homes, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RESTORE, str(homes.model), str(homes.public), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_restore_leaves_no_partial_directory(homes: Homes) -> None:
    _, files = homes.bake()
    second = homes.enter("second")
    with start(homes, "kill") as killed:
        assert killed.wait(60) == -signal.SIGKILL
    (left,) = [path for path in second.iterdir() if path.is_dir()]
    assert ".partial-" in left.name
    restored = homes.restore()
    assert restored.num_files == len(files) and read(restored.directory) == files
    assert [path for path in second.iterdir() if path.is_dir()] == [restored.directory]


def test_processes_on_host_share_one_restore(homes: Homes) -> None:
    _, files = homes.bake()
    homes.enter("second")
    processes = [start(homes) for _ in range(4)]
    found = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert sorted(found) == [[True, 0]] * 3 + [[True, len(files)]]


def test_bundles_are_stored_in_object_store(homes: Homes, tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        SwiftServer.check()
    except Unavailable as error:
        pytest.skip(str(error))
    homes.enter("first")
    with SwiftServer(tmp_path_factory.mktemp("swift")) as server:
        options = server.storage_options
        server.make_bucket("models")
        for path in homes.model.iterdir():
            server.store("models").put(f"llama/{path.name}", path.read_bytes())
        uri = "s3://models/llama/"
        restored = homes.restore(uri=uri, storage_options=options)
        assert "there is no bundle in s3://models/llama/penstock-artifacts" in restored.why
        files = fill(restored.directory)
        saved = penstock_compile_cache.save(uri, restored.key, private_key=homes.private, storage_options=options)
        assert saved.uri == f"s3://models/llama/penstock-artifacts/{restored.key.id}.safetensors"
        homes.enter("second")
        again = homes.restore(uri=uri, storage_options=options)
        assert again.source == saved.uri and read(again.directory) == files
        (listed,) = penstock_compile_cache.list_bundles(uri, public_keys=[homes.public], storage_options=options)
        assert listed.key == restored.key and listed.signature == "good"
        assert ps.inspect(uri, storage_options=options).num_tensors == ps.inspect(homes.model).num_tensors


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    left: list[Callable[[float], None]] = []
    monkeypatch.setattr(store, "atexit", SimpleNamespace(register=lambda leave, *_: left.append(leave)))
    directory = tempfile.mkdtemp(prefix="pa-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    running = HubThread(Directory(MemoryStore(), fresh=True), bind(f"unix://{directory}/hub", Auth()), Auth())
    running.start()
    yield running.url
    # Leave the fleet, as a process does when it exits.
    for leave in left:
        leave(0.0)
    running.stop()
    shutil.rmtree(directory, ignore_errors=True)


def test_bundle_is_fetched_from_fleet(homes: Homes, hub: str) -> None:
    saved, files = homes.bake()
    homes.enter("second")
    assert homes.restore(connection=hub).source == saved.uri
    # The second process reads the bundle from the first process, because storage has none.
    Path(saved.uri).unlink()
    homes.enter("third")
    restored = homes.restore(connection=hub)
    assert restored.source == f"fleet:artifacts-{restored.key.id}" and read(restored.directory) == files


def test_cache_serves_bundles_of_its_models(homes: Homes, hub: str) -> None:
    saved, files = homes.bake()
    listed = subprocess.run(
        [sys.executable, "-m", "penstock", "compile-cache", "list", str(homes.model), "--cache"],
        capture_output=True,
        text=True,
        check=True,
    )
    words = [str(homes.model), "--model", homes.model.name, *shlex.split(listed.stdout)]
    with KeeperProcess([*words, "--hub", hub]):
        Path(saved.uri).unlink()
        homes.enter("second")
        restored = homes.restore(connection=hub)
    assert restored.source == f"fleet:artifacts-{restored.key.id}" and read(restored.directory) == files


def test_command_can_restore_save_and_list_bundles(homes: Homes) -> None:
    home = homes.enter("first")
    words = ["--engine", "mine", "--config", "dtype=bf16", "--public-key", str(homes.public)]
    done = CliRunner().invoke(app, ["compile-cache", "restore", str(homes.model), *words])
    assert done.exit_code == 0 and "none, the engine compiles" in done.stderr
    variables = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
    root = Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent
    assert root.parent == home
    files = fill(root)
    done = CliRunner().invoke(
        app, ["compile-cache", "save", str(homes.model), root.name, "--sign", str(homes.private), "--format", "json"]
    )
    assert done.exit_code == 0 and json.loads(done.stdout)["num_files"] == len(files)
    done = CliRunner().invoke(app, ["compile-cache", "list", str(homes.model), "--public-key", str(homes.public)])
    assert "dtype bf16" in done.stdout and "signature good" in done.stdout
    homes.enter("second")
    done = CliRunner().invoke(app, ["compile-cache", "restore", str(homes.model), *words, "--format", "json"])
    assert json.loads(done.stdout)["num_files"] == len(files)


COMPILE = """
import json, sys
import torch
import penstock as ps
import penstock_compile_cache
restored = penstock_compile_cache.restore(sys.argv[1], engine="torch", public_keys=[sys.argv[3]])
linear = torch.nn.Linear(8, 8)
with torch.inference_mode():
    torch.compile(lambda x: torch.relu(linear(x)).sum())(torch.ones(4, 8))
from torch._dynamo.utils import counters
if not restored.is_found:
    penstock_compile_cache.save(sys.argv[1], restored.key, private_key=sys.argv[2])
print(json.dumps(dict(counters["inductor"])))
"""


def test_torch_reuses_code_compiled_in_another_home_directory(homes: Homes) -> None:
    hits = []
    for name in ("first", "second"):
        homes.enter(name)
        command = [sys.executable, "-c", COMPILE, str(homes.model), str(homes.private), str(homes.public)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        hits.append(json.loads(done.stdout.splitlines()[-1]).get("fxgraph_cache_hit", 0))
    assert hits == [0, 1]
