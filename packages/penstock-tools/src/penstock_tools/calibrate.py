"""Measure this machine's rates for each stage of a sync and a fetch, as input for a simulation.

Measuring takes about a minute, half a GiB of host memory, half a GiB of temporary files, and some device memory. Links
between GPUs and hosts are not measured, because the description of a cluster contains their rates (`plan.cluster`).
"""

from __future__ import annotations

import http.server
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cli.terminal import importable
from penstock.digest.leaf import LEAF_BYTES, leaf_digests
from penstock.digest.strip import Strips, pack_strips
from penstock.http.control import ControlConnection, over_tcp
from penstock.plan.schedule import CHUNK_BYTES
from penstock.storage.safetensors import encode_header
from penstock.types import GB, MIB, DType
from penstock.waits import start_thread
from penstock_convert.plan.cluster import H200_RATES, Rates
from penstock_tools.machine import PYTHON_COSTS, SHORT_RUN_BYTES, slowed

if TYPE_CHECKING:
    from penstock_convert.report import ConvertReport

_BYTES = 128 * MIB
_SOURCE_BYTES, _ROWS = 32 * MIB, 2048
# Number of runs. The fastest run counts, because other processes on the machine can only slow a run down.
_REPEAT = 5
_RUNS = 256
_SHORT_BYTES = 4096
_COLUMN_BYTES, _GAPS = 256, 8
# Rates of copies between two devices in the same host.
_NEAR = (
    "slab_s",
    "near_post_s",
    "copy_s",
    "gap_s",
    "gather_s",
    "gather_gb_per_s",
    "worker_gb_per_s",
    "host_gb_per_s",
)

Timed = Callable[[], object]


def calibrate() -> Rates:
    """Measure on the first CUDA device, or on the CPU if the machine has no CUDA device.

    Requests are measured over loopback.
    """
    on_device = False
    if importable("torch"):
        import torch

        on_device = torch.cuda.is_available()
    stages = _device_stages() if on_device else _host_stages()
    post_s, run_s, short_run_s = _posting()
    answer_s = _answer()
    chunk_digest_s = CHUNK_BYTES / stages["digest_gb_per_s"] / GB
    hop_s = 2 * answer_s + post_s + 2 * stages["step_s"]
    where = "measured by penstock calibrate"
    source = [(name, f"{where}, {'cuda:0' if on_device else 'one core'}") for name in stages]
    source += [(name, f"{where}, loopback transport: one process") for name in ("post_s", "run_s", "short_run_s")]
    source += [("answer_s", f"{where}, HTTP over loopback")]
    source += [("exchange_gb_per_s", "assumed: as of H200")]
    source += [
        ("hop_s", f"assumed: two answers, a post, two steps; a chunk's digest ({chunk_digest_s:.4f} s) is apart")
    ]
    quantise = _quantise(on_device)
    if quantise is None:
        source.append(("quantise_gb_per_s", "assumed: torch is not installed; as fast as a copy"))
    else:
        source.append(("quantise_gb_per_s", f"{where}, fp8-block128"))
    operations = _operations("cuda:0" if on_device else "cpu") if quantise is not None else {}
    how = f"{where}, conversions of {_SOURCE_BYTES >> 20} MiB a source; copies compute nothing: their busiest stage"
    source.append(("operation_gb_per_s", how if operations else "assumed: torch is not installed; as the transform"))
    # One process with one device cannot measure these rates, because they involve two devices or several processes.
    # Scale the Python time in the H200's rates by the ratio of `step_s`. The result is an estimate, because a step does
    # not make the same calls as the code behind these rates. Source: benchmarks/results/cpu2_202611/simulate.md.
    times = stages["step_s"] / H200_RATES.step_s
    there = slowed(H200_RATES, times)
    near = {name: getattr(there, name) if on_device else 0.0 for name in _NEAR}
    for name in near:
        how = f"as of H200, {times:.2f} times as long, as a step" if name in PYTHON_COSTS else "as of H200"
        source.append((name, f"assumed: {how}" if on_device else "assumed: 0, not measured on a CPU"))
    return Rates(
        name=f"{platform.node() or 'this machine'}, {'cuda' if on_device else 'cpu'}",
        operation_gb_per_s=operations,
        quantise_gb_per_s=quantise or stages["device_copy_gb_per_s"],
        post_s=post_s,
        run_s=run_s,
        short_run_s=short_run_s,
        answer_s=answer_s,
        hop_s=hop_s,
        source=tuple(source),
        **stages,
        **near,
    )


def _best_s(work: Timed, *, repeat: int = _REPEAT) -> float:
    """Return the time of the fastest run, after one run as a warm-up."""
    work()
    best = float("inf")
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def _host_stages() -> dict[str, float]:
    source, target = np.ones(_BYTES, np.uint8), np.empty(_BYTES, np.uint8)
    leaves = np.zeros(_BYTES // LEAF_BYTES, np.uint64)
    view = source.data
    return {
        "device_copy_gb_per_s": _BYTES / GB / _best_s(lambda: np.copyto(target, source)),
        "digest_gb_per_s": _BYTES / GB / _best_s(lambda: leaf_digests(view, LEAF_BYTES, leaves)),
        "step_s": _best_s(lambda: leaf_digests(view[:64], LEAF_BYTES, leaves)),
        "pack_gb_per_s": _BYTES / _GAPS / GB / _best_s(lambda: pack_strips(source, _columns(), target)),
    }


def _columns() -> Strips:
    """Return a column of a matrix with many rows.

    Each run has the length that a receiver with an eighth of each row would read.
    """
    num_rows = _BYTES // (_GAPS * _COLUMN_BYTES)
    at, run, rows, pitch = (np.array([value]) for value in (0, _COLUMN_BYTES, num_rows, _GAPS * _COLUMN_BYTES))
    return Strips(at=at, run_bytes=run, num_rows=rows, pitch=pitch)


def _device_stages() -> dict[str, float]:
    """Measure copying and digesting on the first device."""
    import torch

    from penstock.cuda.pack import plan_pack
    from penstock.digest.cuda import leaf_digests_cuda

    device = torch.device("cuda:0")
    source, target = (torch.zeros(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    at = np.arange(source.data_ptr(), source.data_ptr() + _BYTES, LEAF_BYTES)

    columns = _columns()
    nothing, whole = np.zeros(1, np.int64), columns.nbytes
    packing = plan_pack(
        np.array([target.data_ptr()]),
        source.data_ptr() + columns.at,
        columns.run_bytes,
        columns.pitch,
        nothing,
        whole,
        device,
    )

    # Each function waits for the device before it returns, because a call only queues kernels and copies.
    def pack() -> None:
        packing.run()
        torch.cuda.synchronize(device)

    def digest(count: int) -> None:
        leaf_digests_cuda(at[:count], np.full(count, LEAF_BYTES), device)
        torch.cuda.synchronize(device)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(device)

    return {
        "device_copy_gb_per_s": _BYTES / GB / _best_s(copy),
        "digest_gb_per_s": _BYTES / GB / _best_s(lambda: digest(len(at))),
        "step_s": _best_s(lambda: digest(1)),
        "pack_gb_per_s": _BYTES / _GAPS / GB / _best_s(pack),
    }


def _quantise(on_device: bool) -> float | None:
    """Return the rate in GB/s at which the transform reads BF16, or None without torch."""
    if not importable("torch"):
        return None
    import torch

    from penstock.transform.formats import format_of
    from penstock.transform.fuse import KernelJob, fuse

    form = format_of("fp8-block128")
    rows, cols = (8192, 8192) if on_device else (1024, 2048)
    device = torch.device("cuda:0" if on_device else "cpu")
    source = torch.ones(rows, cols, dtype=torch.bfloat16, device=device)
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(rows // 128, cols // 128, device=device)
    fusion = fuse(form, [KernelJob(source=source, outputs=(codes, scales))])

    def run() -> None:
        fusion.run()
        if on_device:
            torch.cuda.synchronize(device)

    return source.nbytes / GB / _best_s(run)


_CONVERSIONS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("copy", "source", 1, {"operations": "copy"}),
    ("rename", "source", 1, {"operations": {"op": "rename", "rules": [("layers", "blocks")]}}),
    *((f"to {name}", "source", 1, {"to": name}) for name in ("fp8-block128", "fp8-channel", "mxfp8", "nvfp4")),
    ("to cast:", "source", 1, {"to": "cast:F16"}),
    ("dequantise", "fp8-block128", 1, {"operations": "dequantise"}),
    ("to GGUF (Q8_0)", "source", 1, {"operations": {"op": "gguf", "type": "Q8_0"}}),
    ("linear", "source", 2, {"operations": "linear"}),
    ("slerp", "source", 2, {"operations": {"op": "slerp", "t": 0.3}}),
    ("ties", "source", 3, {"operations": {"op": "ties", "density": 0.5}}),
)
"""Tuples of the prefix of an operation's name, the kind and the number of its sources, and the arguments for
`convert`."""


def _operations(device: str) -> dict[str, float]:
    """Return each operation's read rate in GB/s, measured with real conversions of small checkpoints."""
    import penstock
    import penstock_convert

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sources = {"source": [_checkpoint(directory / f"source-{number}", number) for number in range(3)]}
        into = directory / "fp8-block128"
        penstock.convert(sources["source"][0], into, to="fp8-block128", devices=device, progress=False)
        sources["fp8-block128"] = [into]
        for operation, kind, count, arguments in _CONVERSIONS:
            into = directory / "result"
            # Discard the first run, in which torch compiles kernels or allocates memory. A large conversion does this
            # only once.
            for _ in range(2):
                report = penstock.convert(
                    sources[kind][:count],
                    into,
                    devices=device,
                    workers=penstock_convert.WorkerSettings(num_workers=1),
                    progress=False,
                    **arguments,
                )
                shutil.rmtree(into)
                found[operation] = max(operation_gb_per_s(report), found.get(operation, 0.0))
    # Small checkpoints have too few heads for `reshard`. Use the rate of `copy`, because `reshard` also only copies.
    return {**found, "reshard": found["copy"]}


def operation_gb_per_s(report: ConvertReport) -> float:
    """Return a conversion's read rate in GB/s while it computed, or in its busiest stage if it computed nothing.

    Copies and renames happen in the read stage, so their computing time does not yield a rate.
    """
    busy_s = report.busy_s["compute"] or max(report.busy_s.values()) or report.phases["move"]
    return report.read_bytes / GB / busy_s


def _checkpoint(directory: Path, number: int) -> Path:
    import torch

    nbytes = 2 * _ROWS * _ROWS
    count = _SOURCE_BYTES // nbytes
    entries = [
        (f"model.layers.{i}.mlp.up_proj.weight", DType.BF16, (_ROWS, _ROWS), i * nbytes, (i + 1) * nbytes)
        for i in range(count)
    ]
    values = torch.randn(count, _ROWS, _ROWS, generator=torch.Generator().manual_seed(number)).bfloat16()
    directory.mkdir()
    path = directory / "model.safetensors"
    path.write_bytes(encode_header(entries, None, uri=str(path)) + values.view(torch.uint8).numpy().tobytes())
    return directory


def _posting() -> tuple[float, float, float]:
    """Return the seconds for a read of almost no bytes, for each further long run and for each further short run."""
    from penstock.segments import Segments
    from penstock.transport.loopback import LoopbackTransport
    from penstock.transport.protocol import Memory

    transport = LoopbackTransport()
    room = _RUNS * SHORT_RUN_BYTES
    ends = [transport.register(Memory.of_buffer(np.ones(room, np.uint8).data)) for _ in range(2)]

    def read(count: int, nbytes: int) -> None:
        at = np.arange(count) * (room // count)
        segments = Segments(src=at, dst=at, nbytes=np.full(count, nbytes))
        transport.wait(transport.post_read(ends[1], ends[0].descriptor, segments), stall_s=60.0)

    try:
        # Measure reads with almost no bytes. Then measure long runs, and subtract the time to copy the same bytes as
        # one run.
        one_s = _best_s(lambda: read(1, _SHORT_BYTES))
        short_s = (_best_s(lambda: read(_RUNS, _SHORT_BYTES)) - one_s) / (_RUNS - 1)
        joined_s = _best_s(lambda: read(1, room))
        long_s = (_best_s(lambda: read(_RUNS, SHORT_RUN_BYTES)) - joined_s) / (_RUNS - 1)
    finally:
        transport.close()
    # The difference of two measured times may be negative, but a long run costs at least as much as a short run.
    return one_s, max(long_s, short_s), short_s


def _answer() -> float:
    """Return the time in seconds that a small request takes over an open connection."""
    # Members use this client for their requests to the hub and to each other.
    with _answering() as port, ControlConnection(over_tcp("127.0.0.1", port), "127.0.0.1") as connection:
        return _best_s(lambda: connection.request("POST", "/", b"x" * 512, timeout_s=10.0), repeat=50)


class _Echo(http.server.BaseHTTPRequestHandler):
    # HTTP/1.0 would close the connection after each response. Nagle's algorithm would delay the body, because it is
    # written separately from the headers.
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log. The default implementation writes a line for each request to stderr."""


@contextmanager
def _answering() -> Iterator[int]:
    """Serve requests in a thread of this process, and yield the port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="penstock-answers", daemon=True)
        start_thread(thread)
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()
