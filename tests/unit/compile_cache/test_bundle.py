"""Bundles are unpacked unchanged. A bundle that differs from the signed content leaves no files."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from tests.unit.compile_cache.test_key import KEY

import penstock as ps
from penstock.errors import ConfigError, DestinationError, DiskFull, FormatError, IntegrityError, PenstockError
from penstock.storage.manifest import sign
from penstock_compile_cache import bundle
from penstock_compile_cache.bundle import CONTENT, DESCRIPTION, SIGNATURE, Description, describe, pack, unpack


def keys() -> tuple[bytes, bytes]:
    """Return a private and a public key in PEM."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


PRIVATE, PUBLIC = keys()


def fill(root: Path) -> dict[str, bytes]:
    """Write caches and unrelated files. Return the files of a bundle."""
    files = {
        "inductor/ab/cab.py": b"def call(): ...\n" * 200,
        "inductor/ab/cab.so": os.urandom(5 << 20),
        "inductor/fxgraph/x/y": b"",
        "triton/K/kernel.cubin": os.urandom(10_000),
        "vllm/torch_compile_cache/0a/rank_0_0/graph": b"graph" * 1000,
        "vllm/modelinfos/llama.json": b"{}",
    }
    others = {
        "inductor/locks/a.lock": b"",
        "inductor/ab/half.tmp": b"half",
        "triton/K/tmp.pid_1_x/kernel.cubin": b"half",
        "vllm/startup_plan/plan.json": b"of this machine",
        "notes/mine.txt": b"no cache",
        "readme": b"no cache",
    }
    for path, data in {**files, **others}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    (root / "inductor/ab/cab.so").chmod(0o755)
    (root / "inductor/ab/secret").symlink_to("/etc/passwd")
    return files


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    files = fill(tmp_path / "caches")
    pack(tmp_path / "caches", KEY, PRIVATE, tmp_path / "bundle.safetensors")
    return tmp_path / "bundle.safetensors", files


def parts(path: Path) -> tuple[bytes, bytes, bytes]:
    """Return the description, signature and content of a bundle."""
    tensors = ps.load(path)
    return tuple(bytes(tensors[name].numpy()) for name in (DESCRIPTION, SIGNATURE, CONTENT))  # type: ignore[return-value]


def test_pack_does_not_follow_symlinks(tmp_path: Path) -> None:
    fill(tmp_path / "caches")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "victim").chmod(0o600)
    (tmp_path / "bundle.safetensors").symlink_to("victim")
    with pytest.raises(DestinationError):
        pack(tmp_path / "caches", KEY, PRIVATE, tmp_path / "bundle.safetensors")
    assert (tmp_path / "victim").read_text() == "precious"
    assert stat.S_IMODE((tmp_path / "victim").stat().st_mode) == 0o600


def read(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_unpacked_files_are_private_to_user(packed: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    path, files = packed
    raw, signature, content = parts(path)
    description = describe(raw, signature, [keys()[1], PUBLIC])
    assert description.key == KEY and description.num_files == len(files)
    unpack(description, memoryview(content), tmp_path / "new")
    assert read(tmp_path / "new") == files
    modes = {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "new").rglob("*") if one.is_dir()}
    assert modes == {0o700} and stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new/inductor/ab/cab.so").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new/inductor/ab/cab.py").stat().st_mode) == 0o600


def test_equal_files_produce_equal_bundles(packed: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    description = describe(*parts(packed[0])[:2], [PUBLIC])
    shutil.rmtree(description.directory)
    unpack(description, memoryview(parts(packed[0])[2]), Path(description.directory))
    pack(Path(description.directory), KEY, PRIVATE, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == packed[0].read_bytes()


def test_packing_without_compiled_code_raises(tmp_path: Path) -> None:
    (tmp_path / "caches").mkdir()
    with pytest.raises(ConfigError, match="no compiled code"):
        pack(tmp_path / "caches", KEY, PRIVATE, tmp_path / "bundle.safetensors")


@pytest.mark.parametrize("trusted", [[], [keys()[1]], [keys()[1], keys()[1]]])
def test_bundle_from_untrusted_signer_is_refused(packed: tuple[Path, dict[str, bytes]], trusted: list[bytes]) -> None:
    raw, signature, _ = parts(packed[0])
    with pytest.raises((IntegrityError, ConfigError), match=r"not signed by|no public key is trusted"):
        describe(raw, signature, trusted)


def test_manifest_signature_is_invalid_for_bundle(packed: tuple[Path, dict[str, bytes]]) -> None:
    raw, _, _ = parts(packed[0])
    with pytest.raises(IntegrityError):
        describe(raw, sign(raw, PRIVATE), [PUBLIC])


@pytest.mark.parametrize("at", [0, 100, -1])
def test_tampered_bundle_description_is_refused(packed: tuple[Path, dict[str, bytes]], at: int) -> None:
    raw, signature, _ = parts(packed[0])
    changed = bytearray(raw)
    changed[at] ^= 1
    with pytest.raises(IntegrityError):
        describe(bytes(changed), signature, [PUBLIC])


def test_description_in_unknown_format_is_refused() -> None:
    for raw in (b"", b"\xff", b"[" * 100_000, b'{"format": "penstock-artifacts-2"}'):
        with pytest.raises(FormatError):
            describe(raw, sign(bundle.PURPOSE + raw, PRIVATE), [PUBLIC])


def make_bundle(path: str = "inductor/a", data: bytes = b"code", **changes: object) -> tuple[Description, bytes]:
    """Return a bundle of one file with a change that a malicious or careless signer might make."""
    content = zstandard.ZstdCompressor().compress(data)
    file = bundle.BundledFile(path, len(data), False, blake3(data).hexdigest())
    file = msgspec.structs.replace(file, **{name: text for name, text in changes.items() if name != "frames"})
    frames = (bundle.BundleFrame(len(content), (file,)),)
    frames = changes.get("frames", lambda frames: frames)(frames)  # type: ignore[operator]
    return Description(format="penstock-artifacts-1", key=KEY, directory="/caches", frames=frames), content


PATHS = [
    "/etc/cron.d/x",
    "../x",
    "inductor/../../x",
    "inductor/./x",
    "inductor//x",
    "inductor",
    "",
    "other/x",
    "inductor/a\0b",
]
BAD: dict[str, Callable[[], tuple[Description, bytes]]] = {
    **{f"path {path!r}": lambda path=path: make_bundle(path) for path in PATHS},  # type: ignore[misc]
    "digest": lambda: make_bundle(digest=blake3(b"other").hexdigest()),
    "longer": lambda: make_bundle(nbytes=5),
    "shorter": lambda: make_bundle(nbytes=3),
    "negative": lambda: make_bundle(nbytes=-4),
    "huge": lambda: make_bundle(nbytes=1 << 40),
    "frame longer": lambda: make_bundle(frames=lambda frames: (msgspec.structs.replace(frames[0], nbytes=999),)),
    "frame negative": lambda: make_bundle(
        frames=lambda frames: (*frames, bundle.BundleFrame(-1, ()), bundle.BundleFrame(1, ()))
    ),
    "no zstd": lambda: (make_bundle()[0], b"x" * len(make_bundle()[1])),
    "cut": lambda: (make_bundle()[0], make_bundle()[1][:-1]),
    "twice": lambda: (
        Description(format="penstock-artifacts-1", key=KEY, directory="/caches", frames=make_bundle()[0].frames * 2),
        make_bundle()[1] * 2,
    ),
    "below a file": lambda: (
        Description(
            format="penstock-artifacts-1",
            key=KEY,
            directory="/caches",
            frames=make_bundle()[0].frames + make_bundle("inductor/a/b")[0].frames,
        ),
        make_bundle()[1] * 2,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_unpacking_bad_bundle_writes_no_file(name: str, tmp_path: Path) -> None:
    description, content = BAD[name]()
    (tmp_path / "home").mkdir()
    with pytest.raises(PenstockError):
        unpack(description, memoryview(content), tmp_path / "home" / "new")
    assert [path for path in tmp_path.rglob("*") if path.name != "home"] == []


def test_valid_bundle_is_unpacked(tmp_path: Path) -> None:
    description, content = make_bundle()
    unpack(description, memoryview(content), tmp_path / "new")
    assert read(tmp_path / "new") == {"inductor/a": b"code"}


def test_full_disk_raises_before_first_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.output.free_bytes", lambda path: 3)
    description, content = make_bundle()
    with pytest.raises(DiskFull):
        unpack(description, memoryview(content), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
