"""Without an optional package, every verb and every command names the extra and the command that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support.sources import source_path

from penstock.testing.checkpoints import write_llama

# Every Python process below runs this, including the workers of a conversion.
_BLOCK = """
import os, sys
for name in os.environ["BLOCKED"].split(","):
    sys.modules[name] = None
"""

_VERBS = """
import importlib, operator, sys
import penstock as ps
def check(label, call):
    try:
        call()
    except ps.errors.MissingExtra as error:
        if isinstance(error, ImportError) and error.hint.startswith("pip install 'torch") and not error.mutated:
            return
        print(label, "has a wrong error:", error)
    except BaseException as error:
        print(label, "raised", type(error).__name__, error)
    else:
        print(label, "did not need torch")
for name in sys.argv[2].split(","):
    check(name, lambda: operator.attrgetter(name)(ps))
check("from", lambda: exec("from penstock import load"))
check("convert", lambda: ps.convert(sys.argv[1], "out"))
check("convert to", lambda: ps.convert(sys.argv[1], "out", to="fp8-block128", devices="cpu"))
check("convert workers", lambda: ps.convert(sys.argv[1], "out", workers=2, devices="cpu"))
for name in ("penstock_dcp", "penstock_hf.patched_libraries", "penstock_rl.trl", "penstock_hf.runai_streamer"):
    check(name, lambda: importlib.import_module(name))
import penstock_hf.safetensors, safetensors
with penstock_hf.safetensors.installed():
    check("safetensors", lambda: safetensors.safe_open("file:///nowhere.safetensors", "np"))
print(ps.inspect(sys.argv[1]).manifest.tensors.names[0], ps.verify(sys.argv[1]).verified, "torch" in ps.__dict__)
"""

_COMMANDS = """
import contextlib, io, sys
from penstock.cli.main import run
for words in sys.argv[1:]:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            run(words.split())
        except SystemExit as end:
            code = end.code
    text = stderr.getvalue()
    if code != 2 or "MissingExtra" not in text or "pip install " not in text:
        print(words, code, text)
    if "bug" in text or "Traceback" in text or "destination may" in text:
        print(words, "blames Penstock", text)
"""


def _run_without(packages: str, program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "blocked").mkdir()
    (cwd / "blocked" / "sitecustomize.py").write_text(_BLOCK)
    path = f"{cwd / 'blocked'}{os.pathsep}{source_path()}"
    environment = {**os.environ, "PYTHONPATH": path, "BLOCKED": packages}
    # Avoid the hub of another test, which a command would join. The path is short, because it is a socket's path.
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        environment["PENSTOCK_RUNTIME_DIR"] = runtime
        words = [sys.executable, "-c", program, *arguments]
        return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    write_llama(tmp_path / "llama", total_bytes=1 << 20)
    return "llama"


def test_api_functions_without_torch_raise_missing_extra(tmp_path: Path, llama: str) -> None:
    verbs = "cache.attach,cache.cache_parameters,join,cache.WeightCache,load,load_file,load_into,publisher,safe_open"
    verbs += ",modules.load_in_background,stream,subscriber"
    done = _run_without("torch", _VERBS, llama, verbs, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    # These two need no torch.
    assert done.stdout == "model.embed_tokens.weight False False\n"
    assert not (tmp_path / "out").exists()


def test_commands_without_torch_exit_with_usage_error(tmp_path: Path, llama: str) -> None:
    commands = [
        f"load {llama}",
        f"cache {llama}",
        "cache --accept",
        f"fetch {llama} --to out --fallback {llama}",
        f"fetch {llama} --device cpu",
        f"convert {llama} out",
        f"convert {llama} out --to fp8-block128 --workers 2",
        f"bench load {llama}",
        "bench fetch",
    ]
    done = _run_without("torch", _COMMANDS, *commands, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocked", "llama"]


def test_doctor_without_torch_prints_torch_install_command(tmp_path: Path) -> None:
    program = "from penstock.cli.main import run; run(['doctor'])"
    done = _run_without("torch", program, cwd=tmp_path)
    assert done.returncode == 0 and "pip install 'torch" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("packages", "command"),
    [
        ("starlette", "hub"),
        ("uvicorn", "hub"),
        ("prometheus_client", "hub"),
        ("starlette", "ui --hub http://127.0.0.1:1"),
        ("redis", "hub --redis redis://127.0.0.1:1/0"),
        ("starlette", "cache llama"),
        ("huggingface_hub", "inspect hf://org/name"),
        ("huggingface_hub", "fetch org/name --cache"),
        ("modelscope,modelscope_hub", "inspect ms://org/name"),
        ("ray", "convert llama out --ray auto"),
        ("penstock_convert", "convert llama out"),
    ],
)
def test_command_without_required_package_exits_with_usage_error(
    tmp_path: Path, llama: str, packages: str, command: str
) -> None:
    done = _run_without(packages, _COMMANDS, command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")


def test_convert_without_its_package_raises_missing_extra(tmp_path: Path) -> None:
    program = """
import penstock as ps
for name in ("convert", "ConvertReport"):
    try:
        getattr(ps, name)
    except ps.errors.MissingExtra as error:
        print(isinstance(error, ImportError), error.hint)
print(ps.load.__name__, ps.cache.WeightCache.__name__)
"""
    done = _run_without("penstock_convert", program, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 2 * 'True pip install "penstock[convert]"\n' + "load WeightCache\n"
