"""The commands on a small checkpoint: exit code, stdout and stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.servers.http_server import RangeServer

from penstock.cli.main import run
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

pytest.importorskip("torch")


Penstock = Callable[..., tuple[str, str]]


@pytest.fixture
def penstock(capsys) -> Penstock:
    """Run `penstock ...` in this process, check its exit code, and return stdout and stderr."""

    def call(*arguments: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run([str(argument) for argument in arguments])
        written = capsys.readouterr()
        assert (caught.value.code or 0) == code, f"exit {caught.value.code}\n{written.out}\n{written.err}"
        return written.out, written.err

    return call


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_llama(tmp_path / "llama", total_bytes=2 * MIB, shards=2)
    return tmp_path / "llama"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    private = Ed25519PrivateKey.generate()
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    files = tmp_path / "key.pem", tmp_path / "key.pub.pem"
    files[0].write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password))
    files[1].write_bytes(private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return files


def flip_bit(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_inspect_lists_files_dtypes_and_tensors(llama: Path, penstock: Penstock) -> None:
    found = json.loads(penstock("inspect", llama, "--format", "json")[0])
    index = json.loads((llama / "model.safetensors.index.json").read_text())
    assert {tensor["name"]: tensor["file"] for tensor in found["tensors"]} == index["weight_map"]
    assert found["num_tensors"] == len(index["weight_map"])
    assert found["nbytes"] == index["metadata"]["total_size"] == sum(found["dtypes"].values())
    assert set(found["dtypes"]) == {"BF16", "F8_E4M3", "F32"}
    assert [file["name"] for file in found["files"]] == sorted(set(index["weight_map"].values()))
    assert sum(file["num_tensors"] for file in found["files"]) == found["num_tensors"]
    assert found["digests"] is False


def test_inspect_text_shows_all_tensors_on_request(llama: Path, penstock: Penstock) -> None:
    some, every = penstock("inspect", llama)[0], penstock("inspect", llama, "--all")[0]
    assert "more. Use --all to list all." in some
    assert "model.norm.weight" in every
    assert "more. Use --all to list all." not in every


def test_load_command_prints_report(llama: Path, penstock: Penstock) -> None:
    out, err = penstock("load", llama, "--format", "json")
    report = json.loads(out)
    index = json.loads((llama / "model.safetensors.index.json").read_text())
    assert report["nbytes"] == index["metadata"]["total_size"]
    assert report["num_tensors"] == len(index["weight_map"])
    assert report["verified"] is False
    assert report["why"]
    assert report["gb_per_s"] == pytest.approx(report["nbytes"] / report["wall_s"] / 1e9)
    assert sum(report["phases"].values()) == pytest.approx(report["wall_s"], rel=0.01)
    assert err == ""
    assert str(report["num_tensors"]) in penstock("load", llama)[0]


def test_load_command_accepts_names_and_memory_limit(llama: Path, penstock: Penstock) -> None:
    out, _ = penstock(
        "load", llama, "--names", "*norm*", "--names", "lm_head.*", "--memory-bytes", "64M", "--format", "json"
    )
    report = json.loads(out)
    index = json.loads((llama / "model.safetensors.index.json").read_text())
    assert report["num_tensors"] == sum("norm" in name or "lm_head" in name for name in index["weight_map"])


def test_load_command_writes_perfetto_trace(llama: Path, tmp_path: Path, penstock: Penstock) -> None:
    penstock("load", llama, "--trace", tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_load_dry_run_reads_no_weights(llama: Path, penstock: Penstock) -> None:
    plan = json.loads(penstock("load", llama, "--dry-run", "--format", "json")[0])
    index = json.loads((llama / "model.safetensors.index.json").read_text())
    assert plan["nbytes"] == index["metadata"]["total_size"]
    assert plan["read_bytes"] >= plan["nbytes"]
    assert plan["num_files"] == 2
    assert plan["predicted_s"] > 0
    assert "read 0: file 0" in penstock("load", llama, "--dry-run")[0]


def test_verify_command_passes_after_manifest_is_written(llama: Path, penstock: Penstock) -> None:
    facts = json.loads(penstock("manifest", llama, "--format", "json")[0])
    assert facts["written"] == [f"{llama}/penstock.manifest"]
    assert facts["revision"].startswith("w1-")
    assert json.loads(penstock("load", llama, "--format", "json")[0])["verified"] is True
    assert json.loads(penstock("load", llama, "--no-verify", "--format", "json")[0])["verified"] is False
    verdict = json.loads(penstock("verify", llama, "--format", "json")[0])
    assert verdict["verified"] is True
    assert verdict["num_leaves"] == facts["num_leaves"]
    assert json.loads(penstock("inspect", llama, "--format", "json")[0])["revision"] == facts["revision"]


@pytest.mark.parametrize("command", ["load", "verify"])
def test_flipped_bit_exits_3_and_names_tensor(llama: Path, command: str, penstock: Penstock) -> None:
    penstock("manifest", llama)
    shard = sorted(llama.glob("*.safetensors"))[1]
    flip_bit(shard, shard.stat().st_size - 1)
    out, err = penstock(command, llama, "--format", "json", code=3)
    facts = json.loads(err)
    assert facts["error"] == "IntegrityError"
    assert facts["blame"] == "source"
    assert facts["tensor"] in json.loads((llama / "model.safetensors.index.json").read_text())["weight_map"]
    assert out == ""


def test_corrupt_manifest_is_replaced_with_force(llama: Path, penstock: Penstock) -> None:
    penstock("manifest", llama)
    with (llama / "penstock.manifest").open("ab") as file:
        file.write(b"x")
    before = (llama / "penstock.manifest").read_bytes()
    assert "FormatError" in penstock("verify", llama, code=3)[1]
    err = penstock("manifest", llama, code=3)[1]
    assert "is not a readable manifest" in err and "--force" in err
    assert (llama / "penstock.manifest").read_bytes() == before
    penstock("manifest", llama, "--force")
    penstock("verify", llama)


def test_manifest_of_corrupt_weights_is_not_overwritten(llama: Path, penstock: Penstock) -> None:
    first = json.loads(penstock("manifest", llama, "--format", "json")[0])
    before = (llama / "penstock.manifest").read_bytes()
    shard = sorted(llama.glob("*.safetensors"))[1]
    flip_bit(shard, shard.stat().st_size - 1)
    facts = json.loads(penstock("manifest", llama, "--format", "json", code=3)[1])
    assert facts["error"] == "IntegrityError" and first["revision"][:19] in facts["message"]
    assert facts["uri"] == str(shard) and facts["tensor"] and facts["byte_range"][1] == shard.stat().st_size
    assert facts["message"].count("w1-") == 2 and "--force" in facts["hint"]
    assert (llama / "penstock.manifest").read_bytes() == before
    forced = json.loads(penstock("manifest", llama, "--force", "--format", "json")[0])
    assert forced["revision"] != first["revision"] and forced["written"] == [f"{llama}/penstock.manifest"]
    penstock("verify", llama)


def test_manifest_of_changed_tensors_is_not_overwritten(tmp_path: Path, penstock: Penstock) -> None:
    import torch
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    penstock("manifest", file)
    save_file({"b": torch.zeros(4)}, file)
    assert "tensors differ in name" in penstock("manifest", file, code=3)[1]
    penstock("manifest", file, "--force")
    penstock("verify", file)


def test_signed_manifest_of_copied_weights_stays_valid(
    llama: Path, keys: tuple[Path, Path], penstock: Penstock
) -> None:
    private, public = keys
    penstock("manifest", llama, "--sign", private)
    # A copy has a different time, and so a different identity.
    for file in llama.glob("*.safetensors"):
        os.utime(file, (1, 1))
    assert "up to date" in penstock("manifest", llama)[0]
    penstock("verify", llama, "--public-key", public)
    penstock("manifest", llama, "--sign", private)
    penstock("verify", llama, "--public-key", public)


def test_stale_signature_is_removed(llama: Path, keys: tuple[Path, Path], penstock: Penstock) -> None:
    private, public = keys
    penstock("manifest", llama, "--sign", private)
    shard = sorted(llama.glob("*.safetensors"))[1]
    flip_bit(shard, shard.stat().st_size - 1)
    before = (llama / "penstock.manifest").read_bytes()
    assert "IntegrityError" in penstock("manifest", llama, "--sign", private, code=3)[1]
    assert "is signed" in penstock("manifest", llama, "--force", code=2)[1]
    assert (llama / "penstock.manifest").read_bytes() == before
    penstock("manifest", llama, "--force", "--sign", private)
    penstock("verify", llama, "--public-key", public)


@pytest.mark.parametrize("name", ["out", "out.sig"])
def test_manifest_command_replaces_only_regular_files(
    llama: Path, tmp_path: Path, name: str, penstock: Penstock
) -> None:
    os.mkfifo(tmp_path / name)
    assert "not a regular file" in penstock("manifest", llama, "--out", tmp_path / "out", code=2)[1]
    assert (tmp_path / name).is_fifo()


def test_verify_without_manifest_exits_3_with_reason(llama: Path, penstock: Penstock) -> None:
    out, _ = penstock("verify", llama, code=3)
    assert "NO" in out
    assert "no manifest" in out


def test_verify_with_public_key_requires_valid_signature(
    llama: Path, keys: tuple[Path, Path], tmp_path: Path, penstock: Penstock
) -> None:
    private, public = keys
    facts = json.loads(penstock("manifest", llama, "--sign", private, "--format", "json")[0])
    assert facts["written"] == [f"{llama}/penstock.manifest.sig", f"{llama}/penstock.manifest"]
    assert json.loads(penstock("verify", llama, "--public-key", public, "--format", "json")[0])["verified"] is True
    flip_bit(llama / "penstock.manifest.sig", 5)
    assert "IntegrityError" in penstock("verify", llama, "--public-key", public, code=3)[1]
    (llama / "penstock.manifest.sig").unlink()
    penstock("verify", llama, "--public-key", public, code=3)


def test_missing_key_file_is_usage_error(llama: Path, tmp_path: Path, penstock: Penstock) -> None:
    assert "cannot read the key" in penstock("manifest", llama, "--sign", tmp_path / "absent", code=2)[1]
    assert "cannot read the key" in penstock("verify", llama, "--public-key", tmp_path / "absent", code=2)[1]
    assert not (llama / "penstock.manifest").exists()


def test_manifest_command_writes_to_out_path(llama: Path, tmp_path: Path, penstock: Penstock) -> None:
    penstock("manifest", llama, "--out", tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere").stat().st_size > 0
    assert not (llama / "penstock.manifest").exists()
    err = penstock("manifest", llama, "--out", tmp_path / "no" / "such" / "directory", code=3)[1]
    assert "DestinationError" in err


def test_http_source_is_readable_but_not_writable(llama: Path, penstock: Penstock) -> None:
    with RangeServer(llama) as server:
        index = f"{server.url}/model.safetensors.index.json"
        report = json.loads(penstock("load", index, "--format", "json")[0])
        assert {file["path"] for file in report["files"]} == {"http"}
        num_requests = len(server.requests)
        assert "cannot write to an http" in penstock("manifest", index, code=2)[1]
        assert len(server.requests) == num_requests


def test_bench_load_compares_with_safetensors(llama: Path, penstock: Penstock) -> None:
    rows = json.loads(penstock("bench", "load", llama, "--repeat", 2, "--format", "json")[0])
    assert [row["loader"] for row in rows] == ["penstock", "safetensors"]
    assert len({row["nbytes"] for row in rows}) == 1
    assert all(0 < row["best_s"] <= row["median_s"] <= row["worst_s"] for row in rows)
    assert penstock("bench", "load", llama, "--repeat", 1, "--cold")[0].startswith("loader")
    assert not any(row["verified"] for row in rows)
    # A load with digests is compared only with loads that check digests, unless the table says so.
    penstock("manifest", llama)
    out, err = penstock("bench", "load", llama, "--repeat", 1, "--format", "json")
    verified = {row["loader"]: row["verified"] for row in json.loads(out)}
    assert verified == {"penstock": True, "penstock, verify=False": False, "safetensors": False}
    assert "safetensors does not" in err


def test_bench_load_of_some_tensors_skips_safetensors(llama: Path, penstock: Penstock) -> None:
    out, err = penstock("bench", "load", llama, "--names", "*norm*", "--repeat", 1, "--format", "json")
    assert [row["loader"] for row in json.loads(out)] == ["penstock"]
    assert "left out" in err


def test_source_error_exits_3(tmp_path: Path, llama: Path, penstock: Penstock) -> None:
    assert "NotFound" in penstock("load", tmp_path / "absent", code=3)[1]
    shard = sorted(llama.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "blame: source; destination untouched" in penstock("load", llama, code=3)[1]
    (tmp_path / "junk.safetensors").write_bytes(b"\xff" * 64)
    assert "FormatError" in penstock("inspect", tmp_path / "junk.safetensors", code=3)[1]


def test_invalid_configuration_exits_2(llama: Path, penstock: Penstock, monkeypatch) -> None:
    penstock("load", "nonsense://bucket/x", code=2)
    monkeypatch.setenv("PENSTOCK_RETRIES", "many")
    assert "PENSTOCK_RETRIES" in penstock("load", llama, code=2)[1]


def test_inspect_imports_no_torch(llama: Path) -> None:
    code = (
        "import sys\nfrom penstock.cli.main import run\n"
        f"try:\n    run(['inspect', {str(llama)!r}])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_command_exit_code_reaches_shell(llama: Path) -> None:
    (llama / "model-00002-of-00002.safetensors").unlink()
    command = [sys.executable, "-m", "penstock.cli.main", "load", str(llama)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "NotFound" in done.stderr
