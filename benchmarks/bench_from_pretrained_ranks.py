"""One model for several ranks on two hosts: `from_pretrained(group=)` beside stock `from_pretrained`.

    python -m benchmarks.bench_from_pretrained_ranks [--gib 1] [--gbit 1] [--ranks 4] [--reps 3] [--out DIRECTORY]
    python -m benchmarks.bench_from_pretrained_ranks --device cuda --ranks 2 [--gib 16] [--reps 3] [--out DIRECTORY]

On the CPU it needs root and iproute2 (`ip`, `tc` with tbf, bridges). Two namespaces are hosts and a third one is the
storage, a small hub of Hugging Face; each has one link to a switch, shaped in both directions. The ranks (gloo) are
dealt to the two hosts in halves, and live through the run. On CUDA the ranks (NCCL) are processes of this host, one for
each device, and the model is a directory in the page cache.

    penstock   all ranks: from_pretrained(..., group=)
    reader     one rank alone: from_pretrained(...), the others idle
    exchange   all ranks: all_gather of as many bytes, from memory to memory
    stock      all ranks: transformers' own from_pretrained; ranks of a host share their cache
    tp         as penstock, with tensor parallelism; on CUDA also stock_tp

A repetition runs each case once, in an order drawn anew, with empty caches; a case takes as long as its slowest rank.
The ranks begin after a barrier, with everything imported. Ratios are medians of the ratios within repetitions. The sum
of all parameters' bytes must be that of every other run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.bench_hosts import Talk, command

STORAGE = "10.213.8.1"
HOSTS = ("10.213.8.11", "10.213.8.12")
PREFIX = f"penstock-{os.getpid()}"
EXCHANGED_BYTES = 8 << 20
"""Bytes that a rank contributes to a round, as in a load on the CPU."""


def write_model(directory: Path, gib: float) -> int:
    """Write a Llama of BF16 in about eight shards; return the bytes of its tensors."""
    import torch
    import transformers

    torch.manual_seed(0)
    width = 2048 if gib >= 0.5 else 512
    config = transformers.LlamaConfig(
        vocab_size=32000 if gib >= 0.5 else 3200,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_attention_heads=width // 64,
        num_key_value_heads=4,
        num_hidden_layers=1,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        one = transformers.LlamaForCausalLM(config)
    layer = sum(p.numel() for p in one.model.layers.parameters()) * 2
    rest = sum(p.numel() for p in one.parameters()) * 2 - layer
    config.num_hidden_layers = max(2, round((gib * (1 << 30) - rest) / layer))
    torch.set_default_dtype(torch.bfloat16)
    # Random values of gigabytes take minutes on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.LlamaForCausalLM(config)
    nbytes = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(directory, max_shard_size=nbytes // 8)
    return nbytes


def serve(directory: str, host: str) -> None:
    """Serve the model as `org/model` until stdin ends; answer each line by the bytes sent of its weights."""
    from tests.support.servers.hugging_face import HuggingFaceServer

    files = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    with HuggingFaceServer({"org/model": files}, host=host) as hub:
        del files
        print(json.dumps({"url": hub.url}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"sent": hub.storage.num_bytes_sent}), flush=True)


def rank(number: int, num_ranks: int, device: str, model: str, store: str) -> None:
    """Run the cases named on stdin, each answered by its seconds and a sum of all parameters."""
    import torch
    import torch.distributed as dist
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    from penstock_hf.transformers import from_pretrained

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    init: dict[str, Any] = {"init_method": f"tcp://{store}", "rank": number, "world_size": num_ranks}
    if device == "cuda":
        # As torchrun sets it: transformers selects the device of a rank by it.
        os.environ["LOCAL_RANK"] = str(number)
        torch.cuda.set_device(number)
        init["device_id"] = torch.device("cuda", number)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, **init)
    model_class = transformers.LlamaForCausalLM
    place: dict[str, Any] = {"device_map": {"": number}} if device == "cuda" else {}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        case = asked["case"]
        options: dict[str, Any] = {"cache_dir": asked["cache"]} if device == "cpu" else {}
        loaded = None
        torch.cuda.synchronize() if device == "cuda" else None
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        if case in {"penstock", "penstock_again"}:
            loaded = from_pretrained(model_class, model, group=dist.group.WORLD, **options, **place)
        elif case == "tp":
            options["distributed_config"] = DistributedConfig(tp_size=num_ranks)
            loaded = from_pretrained(model_class, model, group=dist.group.WORLD, **options)
        elif case == "stock_tp":
            options["distributed_config"] = DistributedConfig(tp_size=num_ranks)
            loaded = model_class.from_pretrained(model, **options)
        elif case == "stock":
            loaded = model_class.from_pretrained(model, **options, **place)
        elif case == "reader" and number == 0:
            loaded = from_pretrained(model_class, model, **options, **place)
        elif case == "exchange":
            exchange(asked["nbytes"], num_ranks, device)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu
        total = None
        if loaded is not None and "tp" not in case:
            total = sum(int(p.view(torch.uint8).sum(dtype=torch.int64)) for p in loaded.state_dict().values())
        del loaded
        dist.barrier()
        print(json.dumps({"seconds": seconds, "cpu_s": cpu, "total": total}), flush=True)
    dist.destroy_process_group()


def exchange(nbytes: int, num_ranks: int, device: str) -> None:
    """All-gather `nbytes` in rounds, as a load does, with nothing else."""
    import torch
    import torch.distributed as dist

    width = EXCHANGED_BYTES if device == "cpu" else 4 * EXCHANGED_BYTES
    send = torch.zeros(width, dtype=torch.uint8, device=device)
    received = torch.empty(num_ranks * width, dtype=torch.uint8, device=device)
    for _ in range(-(-nbytes // (width * num_ranks))):
        dist.all_gather_into_tensor(received, send)


@contextlib.contextmanager
def network(gbit: float) -> Iterator[None]:
    """Hosts and a storage on a switch, one shaped link each."""
    switch, ends = f"{PREFIX}-sw", (STORAGE, *HOSTS)
    names = [f"{PREFIX}-{at}" for at in range(len(ends))]
    try:
        for name in (switch, *names):
            command("ip", "netns", "add", name)
            command("ip", "-n", name, "link", "set", "lo", "up")
        command("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        command("ip", "-n", switch, "link", "set", "br0", "up")
        rate = ("rate", f"{gbit}gbit", "burst", "1mb", "latency", "50ms")
        for at, (name, address) in enumerate(zip(names, ends, strict=True)):
            port = f"port{at}"
            command("ip", "link", "add", "pv0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            command("ip", "-n", name, "address", "add", f"{address}/24", "dev", "pv0")
            command("ip", "-n", switch, "link", "set", port, "master", "br0")
            for inside, link in ((name, "pv0"), (switch, port)):
                command("ip", "-n", inside, "link", "set", link, "up")
                if gbit:
                    command("tc", "-n", inside, "qdisc", "add", "dev", link, "root", "tbf", *rate)
        yield
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=60)


class Ranks:
    """The processes of the ranks."""

    def __init__(self, args: argparse.Namespace, model: str, store: str, environ: dict[str, str]) -> None:
        words = [sys.executable, "-m", "benchmarks.bench_from_pretrained_ranks", "--device", args.device]
        words += ["--ranks", str(args.ranks), "--model", model, "--store", store]
        os.environ.update(environ)
        self.hosts = [number * len(HOSTS) // args.ranks for number in range(args.ranks)]
        self.talks = []
        for number, host in enumerate(self.hosts):
            mine = [*words, "--rank", str(number)]
            self.talks.append(Talk(f"{PREFIX}-{1 + host}" if args.device == "cpu" else "", mine))
        for talk in self.talks:
            talk.answer()

    def ask(self, case: str, caches: Path, nbytes: int) -> list[dict[str, Any]]:
        for number, talk in enumerate(self.talks):
            # Ranks of a host share a cache, as on a cluster.
            cache = caches / f"host{self.hosts[number]}"
            talk.process.stdin.write(json.dumps({"case": case, "cache": str(cache), "nbytes": nbytes}) + "\n")
            talk.process.stdin.flush()
        return [talk.answer() for talk in self.talks]

    def close(self) -> None:
        for talk in self.talks:
            talk.close()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all repetitions; return a row for each case and repetition."""
    cpu = args.device == "cpu"
    cases = args.cases.split(",") if args.cases else ["penstock", "reader", "exchange", "stock", "tp"]
    if not args.cases and not cpu:
        cases.append("stock_tp")
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as ends:
        directory = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        source = directory / "model"
        nbytes = write_model(source, args.gib)
        server = None
        environ = {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        model, store = str(source), "127.0.0.1:29571"
        if cpu:
            ends.enter_context(network(args.gbit))
            words = [sys.executable, "-m", "benchmarks.bench_from_pretrained_ranks", "--serve", str(source)]
            server = Talk(f"{PREFIX}-0", words)
            ends.callback(server.close)
            environ |= {"HF_ENDPOINT": server.answer()["url"], "HF_HUB_OFFLINE": "0", "GLOO_SOCKET_IFNAME": "pv0"}
            model, store = "org/model", f"{HOSTS[0]}:29571"
        ranks = Ranks(args, model, store, environ)
        ends.callback(ranks.close)
        totals = set()
        chance = random.Random(1)
        for rep in range(-1 if args.warm else 0, args.reps):
            for case in chance.sample(cases, len(cases)):
                caches = directory / "caches"
                before = server.ask()["sent"] if server else 0
                answers = ranks.ask(case, caches, nbytes)
                sent = server.ask()["sent"] - before if server else None
                shutil.rmtree(caches, ignore_errors=True)
                totals |= {answer["total"] for answer in answers} - {None}
                row = {
                    "case": case,
                    "rep": rep,
                    "seconds": round(max(answer["seconds"] for answer in answers), 3),
                    "cpu_s": round(sum(answer["cpu_s"] for answer in answers), 2),
                    "storage_ratio": None if sent is None else round(sent / nbytes, 4),
                    "load": round(os.getloadavg()[0], 1),
                }
                print(json.dumps(row), file=sys.stderr, flush=True)
                if rep >= 0:
                    rows.append(row)
        if len(totals) > 1:
            raise SystemExit(f"the runs loaded different bytes: {totals}")
    return [row | {"nbytes": nbytes, "ranks": args.ranks, "device": args.device, "gbit": args.gbit} for row in rows]


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the medians, and the ratios within repetitions, as a table."""
    cases = list(dict.fromkeys(row["case"] for row in sorted(rows, key=lambda row: row["case"])))
    by = {(row["case"], row["rep"]): row for row in rows}
    reps = sorted({row["rep"] for row in rows})
    lines = ["| case | median s | least - most | n | storage bytes / checkpoint | CPU s of all ranks |"]
    lines.append("|---|---|---|---|---|---|")
    for case in cases:
        own = [by[case, rep] for rep in reps]
        seconds = [row["seconds"] for row in own]
        ratios = [row["storage_ratio"] for row in own if row["storage_ratio"] is not None]
        ratio = f"{statistics.median(ratios):.3f}" if ratios else "-"
        spread = f"{min(seconds):.2f} - {max(seconds):.2f}"
        cpu = statistics.median(row["cpu_s"] for row in own)
        lines.append(f"| {case} | {statistics.median(seconds):.2f} | {spread} | {len(own)} | {ratio} | {cpu:.1f} |")

    def paired(name: str, above: str, *below: str) -> None:
        if {above, *below} <= set(cases):
            values = [by[above, rep]["seconds"] / sum(by[c, rep]["seconds"] for c in below) for rep in reps]
            lines.append(f"\n{name}: {statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})")

    paired("penstock / (reader + exchange)", "penstock", "reader", "exchange")
    paired("tp / (reader + exchange)", "tp", "reader", "exchange")
    paired("penstock / stock", "penstock", "stock")
    paired("tp / stock_tp", "tp", "stock_tp")
    return "\n".join(lines)


def main() -> None:
    """Run the cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", default="", help="comma-separated; default: all")
    parser.add_argument("--no-warm", dest="warm", action="store_false", help="leave out the repetition that warms up")
    parser.add_argument("--out", type=Path, help="directory: rows go to from_pretrained_ranks.jsonl")
    for name in ("--serve", "--model", "--store", "--rank"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, STORAGE)
    elif args.rank:
        rank(int(args.rank), args.ranks, args.device, args.model, args.store)
    else:
        rows = measure(args)
        print(f"torch {version('torch')}, transformers {version('transformers')}, {platform.release()}")
        print(summary(rows))
        if args.out:
            with (args.out / "from_pretrained_ranks.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
