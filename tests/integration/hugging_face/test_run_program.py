"""`penstock run` runs unmodified programs in separate processes, with the same bits as without it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.support.servers.http_server import RangeServer
from tests.support.servers.network_volume import NetworkVolume, refusal

PROGRAM = """
import hashlib, json, multiprocessing, subprocess, sys

def digests(place):
    from safetensors import safe_open
    from safetensors.torch import load_file
    found = {}
    for name in ("checkpoint.safetensors", "lora.safetensors"):
        digest = hashlib.sha256()
        for key, tensor in sorted(load_file(f"{place}/{name}").items()):
            digest.update(key.encode() + tensor.numpy().tobytes())
        with safe_open(f"{place}/{name}", framework="pt", device="cpu") as file:
            for key in file.keys():
                digest.update(file.get_tensor(key).numpy().tobytes())
                digest.update(bytes(file.get_slice(key)[:1].numpy().tobytes()))
            digest.update(json.dumps(file.metadata()).encode())
        found[name] = digest.hexdigest()
    return found

def tell(place, queue):
    queue.put(digests(place))

if __name__ == "__main__":
    place = sys.argv[1]
    if sys.argv[2:] == ["--child"]:
        print(json.dumps([digests(place)]))
        sys.exit(0)
    queue = multiprocessing.get_context("spawn").Queue()
    spawned = multiprocessing.get_context("spawn").Process(target=tell, args=(place, queue))
    spawned.start()
    results = [digests(place), queue.get(timeout=100)]
    spawned.join(100)
    command = [sys.executable, __file__, place, "--child"]
    results += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    print(json.dumps(results))
    sys.exit(7)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    checkpoint = {f"model.layers.{index}.weight": torch.randn(96, 64) for index in range(40)}
    checkpoint["model.embed.weight"] = torch.randn(4000, 64)
    lora = {
        f"lora_unet.{index}.lora_{side}.weight": torch.randn(4, 64) for index in range(30) for side in ("down", "up")
    }
    safetensors.torch.save_file(checkpoint, directory / "checkpoint.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(lora, directory / "lora.safetensors", metadata={"ss_network_dim": "4"})
    return directory


@pytest.fixture(scope="module")
def program(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("program") / "app.py"
    program.write_text(PROGRAM)
    return program


def penstock_run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "run", *map(str, words)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def stock(directory: Path) -> dict[str, str]:
    """Return the program's result without Penstock, computed in this process because torch takes seconds to import."""
    names: dict[str, Any] = {"__name__": "app"}
    exec(PROGRAM, names)
    found: dict[str, str] = names["digests"](directory)
    return found


def test_program_and_children_read_uris(program: Path, directory: Path, stock: dict[str, str]) -> None:
    with RangeServer(directory) as server:
        done = penstock_run("--verbose", "--", sys.executable, program, server.url)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == [stock] * 3
    # Three processes open two files twice each.
    assert done.stderr.count("read by penstock: a URI") == 12


@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_program_reads_network_volume_through_penstock(
    program: Path, directory: Path, stock: dict[str, str], tmp_path: Path
) -> None:
    with NetworkVolume(directory, tmp_path / "volume", latency_s=0.001) as volume:
        done = penstock_run("--verbose", sys.executable, program, volume, "--child")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [stock]
    assert "checkpoint.safetensors: read by penstock: a file on FUSE" in done.stderr
    # The second read comes from the page cache.
    assert "checkpoint.safetensors: read by safetensors" in done.stderr


def test_local_files_use_original_safetensors(program: Path, directory: Path, stock: dict[str, str]) -> None:
    done = penstock_run("--verbose", "--", sys.executable, program, directory, "--child")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [stock]
    assert done.stderr.count("read by safetensors") == 4
    assert "read by penstock" not in done.stderr


def test_process_without_safetensors_does_not_import_penstock(tmp_path: Path) -> None:
    code = (
        "import sys; print(sorted({name.partition('.')[0] for name in sys.modules} & {'penstock', 'torch', 'numpy'}))"
    )
    done = penstock_run("--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_find_spec_does_not_import_safetensors() -> None:
    code = (
        "import importlib.util as util, sys\n"
        "assert util.find_spec('safetensors') is not None\n"
        "assert 'safetensors' not in sys.modules\n"
        "import safetensors\n"
        "print(type(safetensors.__loader__).__name__, type(safetensors.safe_open).__name__, 'torch' in sys.modules)\n"
    )
    done = penstock_run("--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "SourceFileLoader _Replacement False\n"), done.stderr


def test_program_keeps_its_sitecustomize_and_path(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.its_own = __name__, __file__\n")
    code = "import sys; print(*sys.its_own, any('startup' in entry for entry in sys.path))"
    inherited = os.environ.get("PYTHONPATH", "")
    done = penstock_run("--", sys.executable, "-c", code, PYTHONPATH=f"{tmp_path}{os.pathsep}{inherited}")
    assert done.stdout.split() == ["sitecustomize", str(tmp_path / "sitecustomize.py"), "False"], done.stderr


def test_interpreter_without_penstock_logs_warning(tmp_path: Path) -> None:
    (tmp_path / "safetensors.py").write_text("safe_open = 'stock'\n")
    # Python finds this package before the real package. It lacks penstock's dependencies.
    code = (
        "import sys\nsys.modules['msgspec'] = None\nsys.path.insert(0, sys.argv[1])\n"
        "import safetensors\nprint(safetensors.safe_open)\n"
    )
    done = penstock_run("--", sys.executable, "-c", code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "stock\n")
    assert "cannot import penstock" in done.stderr


def test_missing_program_is_refused_before_start() -> None:
    done = penstock_run("--", "no-such-program", "--option")
    assert done.returncode == 2
    assert "cannot run 'no-such-program'" in done.stderr


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    code = "import sys, time; print('ready', flush=True); time.sleep(100)"
    command = [sys.executable, "-m", "penstock", "run", "--", sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def test_signals_reach_program(sleeper: subprocess.Popen[str]) -> None:
    assert sleeper.stdout is not None
    assert sleeper.stdout.readline() == "ready\n"
    sleeper.send_signal(signal.SIGTERM)
    assert sleeper.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("stub", ["", "safe_open = 7\n", "import types\nsafe_open = types.SimpleNamespace()\n"])
def test_incompatible_safetensors_is_imported_unpatched(stub: str, tmp_path: Path) -> None:
    (tmp_path / "safetensors.py").write_text(f"it = 'stock'\n{stub}")
    code = "import sys\nsys.path.insert(0, sys.argv[1])\nimport safetensors\nprint(safetensors.it)\n"
    done = penstock_run("--", sys.executable, "-c", code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "stock\n"), done.stderr
    assert done.stderr.count("cannot use penstock") == 1


def test_invalid_environment_variable_keeps_safetensors_importable(directory: Path) -> None:
    # The program sets the variable, because `penstock run` would reject it before the start.
    code = "import os\nos.environ['PENSTOCK_RETRIES'] = 'many'\nimport safetensors\nprint(safetensors.safe_open)\n"
    done = penstock_run("--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "<class 'builtins.safe_open'>\n"), done.stderr
    assert "PENSTOCK_RETRIES" in done.stderr
    refused = penstock_run("--", sys.executable, "-c", "print('started')", PENSTOCK_RETRIES="many")
    assert (refused.returncode, refused.stdout) == (2, "")
