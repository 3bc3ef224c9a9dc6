"""`penstock fetch`: the directory has the fetched files whole or not at all, and exit codes say what failed."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.compare import assert_same, by_safetensors
from tests.support.every_dtype import every_dtype

import penstock as ps
from penstock.cli.main import run
from penstock.fetcher import to_files
from penstock.storage import local
from penstock.testing.checkpoints import write_llama


@pytest.fixture(autouse=True)
def runtime(monkeypatch) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    yield
    gc.collect()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("fetched") / "llama"
    write_llama(directory, total_bytes=30_000_000)
    return directory


@pytest.fixture
def keeper(llama: Path) -> Iterator[ps.cache.WeightCache]:
    with ps.cache.WeightCache() as keeper:
        keeper.keep("llama", llama)
        yield keeper


def command(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        run(["fetch", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_pulled_weights_match_holder_weights(keeper, llama, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(to_files, "SHARD_BYTES", 7_000_000)
    assert command("llama", "--to", tmp_path / "out", "--format", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["storage_bytes"] == 0
    assert list(said["phases"])[-1] == "write"
    assert_same(by_safetensors(tmp_path / "out"), by_safetensors(llama))
    verdict = ps.verify(tmp_path / "out")
    assert verdict.verified
    assert verdict.revision == said["revision"]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert_same(ps.load(tmp_path / "out"), by_safetensors(llama))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("names", "single"),
    [
        (["diffusion_pytorch_model.fp16.safetensors"], "diffusion_pytorch_model.fp16.safetensors"),
        (["adapter_model.safetensors"], "adapter_model.safetensors"),
        (["consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors"], None),
        (["my model.safetensors"], "my model.safetensors"),
    ],
)
def test_pulled_files_have_same_names_as_source(names, single, tmp_path, capsys, monkeypatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for part, name in enumerate(names):
        save_file({f"w{part}{i}": torch.randn(64, 64) for i in range(2)}, source / name)
    if len(names) > 1:
        monkeypatch.setattr(to_files, "SHARD_BYTES", 40_000)
    with ps.cache.WeightCache() as keeper:
        keeper.keep("m", source)
        assert command("m", "--to", tmp_path / "one") == 0
        # Fetch from a member that fetched from another member.
        with ps.join("m") as relay:
            relay.fetch({})
            keeper.drop("m")
            assert command("m", "--to", tmp_path / "two") == 0
    for out in (tmp_path / "one", tmp_path / "two"):
        found = sorted(path.name for path in out.glob("*.safetensors"))
        assert found == ([single] if single else sorted(f"consolidated-0000{i}-of-00002.safetensors" for i in (1, 2)))
        assert_same(ps.load(out), by_safetensors(source))
        assert ps.verify(out).verified


def test_pull_reports_that_small_files_are_missing(keeper, tmp_path, capsys) -> None:
    assert command("llama", "--to", tmp_path / "out") == 0
    assert "a fleet has only weights, without config.json" in capsys.readouterr().out
    assert command("llama", "--device", "cpu") == 0
    assert "only weights" not in capsys.readouterr().out


def test_pull_without_holder_or_fallback_raises(tmp_path, capsys) -> None:
    assert command("org/name", "--to", tmp_path / "out", "--timeout-s", "0") == 3
    assert "--fallback org/name " in capsys.readouterr().err
    assert command("llama", "--to", tmp_path / "out", "--timeout-s", "0") == 3
    assert "--fallback URI " in capsys.readouterr().err


def test_pull_report_names_holder_with_different_key(tmp_path, llama, capsys) -> None:
    with ps.join("m") as holder:
        holder.offer(ps.load(llama))
        assert command("m", "--device", "cpu", "--fallback", llama, "--format", "json") == 0
        (why,) = json.loads(capsys.readouterr().out)["why"].values()
        assert why.startswith(f"member {holder.member.id[:8]} is complete under a different key: revision 'w1-")
        assert "`penstock manifest`" in why


@pytest.mark.parametrize("to", [True, False])
def test_pull_without_hub_reads_fallback(to, llama, tmp_path, capsys) -> None:
    where = ["--to", tmp_path / "out"] if to else ["--device", "cpu"]
    words = ["--hub", "http://127.0.0.1:9", "--timeout-s", "0.5", "--fallback", llama, "--format", "json"]
    assert command("llama", *where, *words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert "refused connections" in printed["faults"][0] and "without the fleet" in printed["faults"][0]
    assert [why.startswith("no hub responded: ") for why in printed["why"].values()] == [True]
    if to:
        assert_same(by_safetensors(tmp_path / "out"), by_safetensors(llama))


def test_pull_without_hub_or_fallback_raises(llama, capsys) -> None:
    begun = time.monotonic()
    assert command("llama", "--device", "cpu", "--hub", "http://127.0.0.1:9", "--timeout-s", "0.5") == 3
    assert time.monotonic() - begun < 5
    assert "the hub's address refused connections for 0." in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as mute:
        hub = f"http://127.0.0.1:{mute.getsockname()[1]}"
        assert command("llama", "--device", "cpu", "--hub", hub, "--timeout-s", "0.5") == 3
    assert "accepted the connection and sent no answer for 0.5" in capsys.readouterr().err


def test_revision_is_identical_in_every_report(keeper, llama, tmp_path, capsys) -> None:
    """Without a manifest the revision that members compare is a digest of the files."""
    (kept,) = keeper.models()
    word = kept.revision
    assert word.startswith("w1-") and not keeper.member.weights[0].identity.revision.startswith("w1-")
    (held,) = (held for member in keeper.member.hub.status().members for held in member.holdings)
    assert held.revision == word
    for asked in (None, word, word[:19]):
        with ps.cache.attach("llama", revision=asked, verify=True) as attached:
            assert attached.report.revision == word
    for asked in (word, word[:19]):
        for more in ([], ["--fallback", llama]):
            capsys.readouterr()
            assert command("llama", "--device", "cpu", "--revision", asked, *more, "--format", "json") == 0
            said = json.loads(capsys.readouterr().out)
            assert said["revision"] == word and said["storage_bytes"] == 0
    other = f"w1-{'0' * 64}"
    assert command("llama", "--device", "cpu", "--revision", other, "--timeout-s", "0") == 3
    assert word in capsys.readouterr().err
    assert command("llama", "--to", tmp_path / "out", "--revision", other, "--fallback", llama) == 3
    assert not (tmp_path / "out").exists()
    with pytest.raises(ps.NotFound):
        ps.cache.attach("llama", revision=other, timeout_s=0.0)


def test_every_torch_dtype_is_pulled(tmp_path) -> None:
    (tmp_path / "all").mkdir()
    made = every_dtype(tmp_path / "all" / "model.safetensors")
    known = [name for name, (dtype, _, _) in made.items() if not dtype.value.startswith("F6")]
    from tests.support.tensor_file import write_file

    write_file(tmp_path / "all" / "model.safetensors", {name: made[name] for name in known})
    assert command("all", "--to", tmp_path / "out", "--fallback", tmp_path / "all") == 0
    found = ps.load(tmp_path / "out")
    assert_same(found, ps.load(tmp_path / "all"))
    assert ps.verify(tmp_path / "out").verified


def test_pull_to_device_writes_no_files(keeper, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("llama", "--device", "cpu") == 0
    assert "shm <- " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_pull_errors_have_exit_codes(keeper, llama, tmp_path, capsys) -> None:
    assert command("llama") == 2
    assert command("llama", "--to", tmp_path / "out", "--device", "cpu") == 2
    assert command("nobody", "--device", "cpu", "--timeout-s", "0.1") == 3
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    assert command("llama", "--to", tmp_path / "taken") == 2
    assert (tmp_path / "taken" / "file").read_text() == "mine"
    assert command("llama", "--to", "/proc/out") == 3
    assert command("llama", "--to", tmp_path / "missing" / "out") == 0
    assert "DestinationError" in capsys.readouterr().err


def test_full_disk_leaves_no_partial_files(keeper, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(local, "_fallocate", lambda *_: errno.ENOSPC)
    assert command("llama", "--to", tmp_path / "out") == 3
    assert list(tmp_path.iterdir()) == []


def test_failed_fetch_leaves_no_partial_files(tmp_path, llama, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_STALL_S", "5")
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    with pytest.raises(SystemExit):
        run(["manifest", str(broken)])
    (first, *_) = sorted(broken.glob("*.safetensors"))
    with open(first, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"x" * 100)
    assert command("broken", "--to", tmp_path / "out", "--fallback", broken) in {3, 4}
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


_PULL = """
import sys, threading, time
import penstock as ps
from penstock.fetcher.to_files import fetch_to_files

def held():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))

only = ps.ConnectionSettings(transports=["http"])  # by shm the keeper's own memory would be counted
with ps.join("big", connection=only) as fleet:
    peak = before = held()
    is_over = threading.Event()
    def watch():
        global peak
        while not is_over.wait(0.005):
            peak = max(peak, held())
    threading.Thread(target=watch).start()
    report = fetch_to_files(fleet, to=sys.argv[1])
    is_over.set()
print(peak - before, report.nbytes)
"""


def test_pull_uses_limited_memory(tmp_path) -> None:
    write_llama(tmp_path / "big", total_bytes=200_000_000)
    with ps.cache.WeightCache() as keeper:
        keeper.keep("big", tmp_path / "big")
        done = subprocess.run([sys.executable, "-c", _PULL, str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown, nbytes = map(int, done.stdout.split())
    assert nbytes > 150_000_000
    assert grown < 60_000_000
    assert_same(by_safetensors(tmp_path / "out"), by_safetensors(tmp_path / "big"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_reports_destination_state(when, llama, tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "out"

    def interrupted(*arguments: object, **options: object) -> None:
        if when == "after":
            out.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(to_files, "join", interrupted)
    assert command("llama", "--to", out, "--fallback", llama) == 130
    said = capsys.readouterr().err
    assert said.startswith("penstock: interrupted. ") and f"penstock fetch llama --to {out}" in said
    assert (f"{out} is unchanged" if when == "before" else f"{out} is complete") in said
