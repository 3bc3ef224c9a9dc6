"""`penstock bench boot`: the phases of real programs that load by Penstock, until their first answer."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from tests.support.commands import run
from tests.support.fork_server import ForkServer

from penstock.testing.checkpoints import write_llama
from penstock.testing.http_server import RangeServer

SERVER = """
import http.server, os, sys, time
import penstock as ps

class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert body == b'{"prompt": 1}', body
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

with ps.phase("start"):
    weights = ps.load(sys.argv[1], progress=False)
    with ps.phase("warm up"):
        # A compiler's cache: empty in a cold start, and filled in the warm one after it.
        cache = os.path.join(os.environ["TRITON_CACHE_DIR"], "kernel")
        if not os.path.exists(cache):
            time.sleep(0.5)
            os.makedirs(cache)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Answer)
server.serve_forever()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_llama(tmp_path / "llama", total_bytes=4 << 20)
    return tmp_path / "llama"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_phases_of_a_server_until_its_first_answer(model: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    port = free_port()
    url = ["--url", f"http://127.0.0.1:{port}/answer", "--body", '{"prompt": 1}', "--model", str(model)]
    program = [sys.executable, str(tmp_path / "server.py"), str(model), str(port)]
    done = run(fork_server, ["bench", "boot", *url, "--format", "json", "--timeout-s", "60", "--", *program])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [start["case"] for start in found["starts"]] == ["cold", "warm"]
    for start in found["starts"]:
        assert start["num_processes"] == 1
        phases = {phase["name"]: phase for phase in start["phases"]}
        assert {
            "to the process",
            "imports and set-up",
            "start",
            "move",
            "warm up",
            "to the first answer",
        } <= phases.keys()
        assert (phases["move"]["kind"], phases["warm up"]["kind"]) == ("weights", "engine")
        assert phases["imports and set-up"]["seconds"] > 0.05
        # In order, and none after the first answer.
        assert phases["move"]["start_s"] < phases["warm up"]["start_s"] < start["first_answer_s"]
        last = start["phases"][-1]
        assert last["start_s"] + last["seconds"] == pytest.approx(start["first_answer_s"], abs=0.1)
    cold, warm = (
        next(phase for phase in start["phases"] if phase["name"] == "warm up")["seconds"] for start in found["starts"]
    )
    assert cold >= 0.5 > warm
    assert found["first_answer_s"].keys() == {"cold", "warm"}
    # The servers have ended.
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_program_that_ends_at_once_loses_no_phase(model: Path, fork_server: ForkServer) -> None:
    # By os._exit, as forked workers end: what runs at exit does not run.
    load = f"import os, penstock as ps; ps.load({str(model)!r}, progress=False); os._exit(0)"
    done = run(fork_server, ["bench", "boot", "--format", "json", "--", sys.executable, "-c", load])
    assert done.returncode == 0, done.stderr
    for start in json.loads(done.stdout)["starts"]:
        assert start["num_processes"] == 1 and start["cut_off"] == []
        assert {"open", "move", "finish"} <= {phase["name"] for phase in start["phases"]}
    done = run(fork_server, ["bench", "boot", "--", sys.executable, "-c", "pass"])
    assert done.returncode == 0 and "no process reported phases" in done.stderr, done.stderr


KILLED = """
import os, signal, subprocess, sys
if sys.argv[1:]:
    import penstock as ps
    with ps.phase("warm up"):
        os.kill(os.getpid(), signal.SIGKILL)
subprocess.run([sys.executable, sys.argv[0], "child"])
"""


def test_a_process_that_was_killed_is_said_to_lack_phases(tmp_path: Path, fork_server: ForkServer) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    done = run(fork_server, ["bench", "boot", "--", sys.executable, str(tmp_path / "killed.py")])
    assert done.returncode == 0 and "warm up" in done.stdout, done.stderr
    assert done.stderr.count("ended in the phase 'warm up': its last phases may be missing") == 2


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--", "no-such-program"], 2, "cannot run 'no-such-program'"),
        (["--url", "ftp://here", "--", sys.executable], 2, "--url takes http"),
        (["--model", "s3://b/m", "--", sys.executable], 2, "--model is for local files"),
        (["--", sys.executable, "-c", "print('no room'); raise SystemExit(3)"], 3, "ended with 3"),
        (["--url", "http://127.0.0.1:9/", "--", sys.executable, "-c", "print('no room')"], 3, "ended with 0"),
        (["--timeout-s", "1", "--", sys.executable, "-c", "import time; time.sleep(60)"], 3, "gave no answer for 1 s"),
    ],
)
def test_starts_that_fail_say_why(options: list[str], code: int, message: str, fork_server: ForkServer) -> None:
    done = run(fork_server, ["bench", "boot", *options])
    assert done.returncode == code and message in done.stderr, done.stderr
    if "no room" in " ".join(options):
        assert "no room" in done.stderr


def test_a_server_that_runs_already_is_not_measured(fork_server: ForkServer) -> None:
    with RangeServer(Path(__file__).parent) as server:
        url = f"{server.url}/{Path(__file__).name}"
        done = run(
            fork_server, ["bench", "boot", "--url", url, "--", sys.executable, "-c", "import time; time.sleep(60)"]
        )
    assert done.returncode == 2 and "something answers there before" in done.stderr, done.stderr
