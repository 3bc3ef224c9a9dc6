"""The third table of `make demo`: a Llama in training sends each version to the ranks that serve it.

It checks that the logits after each version are, bit for bit, those of the gathered weights. Two processes train (FSDP2
over gloo, AdamW on synthetic tokens) and publish their shards. Two serve with tensor parallelism and fused parameters,
as engines do. One of these is killed before the second version, returns when the other has it, and catches up while
training continues.

    python scripts/demo_sync.py --mib 64
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from tests.support.fleet import send_event
from tests.support.sync import SyncWorker

from penstock.errors import PenstockError

if TYPE_CHECKING:
    import torch
    from tests.support.llama import LlamaRank, Sizes

GB, MIB = 10**9, 1 << 20
RANKS, VERSIONS, STEPS, KILLED = 2, 3, 2, 1
"""Ranks of each side, versions, optimiser steps for each version, and the serving rank that is killed before version
2."""
BATCH = (2, 32)
WAIT_S = 120.0
SEED = 20_261_121
progress = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """The task of one process."""

    side: str
    rank: int
    directory: str
    sizes: dict[str, int]
    environ: dict[str, str] = field(default_factory=dict)


class Rank(SyncWorker):
    """A process. It accepts `step V` for a trainer, and `update V` and then `logits V` for an engine."""

    module = "demo_sync"

    def ask_done(self, line: str) -> dict[str, Any]:
        """Send a line and return the answer. Raise SystemExit if it failed."""
        return done(self, line, self.call(line, timeout_s=WAIT_S))


def done(rank: Rank, line: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the answer. Raise SystemExit if it is an error."""
    if "error" in found:
        raise SystemExit(f"{rank.task.side} {rank.task.rank}: {line}: {found['error']}: {found['message']}")
    return found


def all_done(ranks: Sequence[Rank], line: str) -> list[dict[str, Any]]:
    """Send a line to all ranks, then return all answers."""
    for rank in ranks:
        rank.send(line)
    return [done(rank, line, rank.result(line, timeout_s=WAIT_S)) for rank in ranks]


# --- in the processes ------------------------------------------------------------------------------------------------


@contextmanager
def process_group(directory: str, name: str, rank: int) -> Iterator[None]:
    """Create the process group for one side's ranks, which rendezvous through a file."""
    import torch.distributed as dist

    met = f"file://{directory}/{name}"
    dist.init_process_group("gloo", init_method=met, rank=rank, world_size=RANKS, timeout=timedelta(seconds=WAIT_S))
    try:
        yield
    finally:
        dist.destroy_process_group()


def gathered(directory: str, version: int) -> Path:
    """Return the file for a whole version, for comparisons."""
    return Path(directory, f"gathered-{version}.safetensors")


def train(task: RankTask, sizes: Sizes) -> None:
    """Train on synthetic tokens. After the steps, this rank's shards are the next version."""
    import torch
    from tests.support.llama import Llama
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    import penstock as ps

    with process_group(task.directory, "trainers", task.rank):
        torch.manual_seed(SEED)
        model = Llama(sizes).to(torch.bfloat16)
        mesh = init_device_mesh("cpu", (RANKS,))  # also where there are devices: there may be fewer than ranks
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        torch.manual_seed(SEED + 1 + task.rank)  # each rank has its own part of the data

        with ps.publisher("policy", model, mode="snapshot", snapshot_device="cpu") as publisher:
            send_event("joined", member=publisher.member.id)

            def step(version: int) -> dict[str, Any]:
                for _ in range(STEPS):
                    tokens = torch.randint(0, sizes.vocab, BATCH)
                    loss = torch.nn.functional.cross_entropy(
                        model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()
                    )
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                report = publisher.publish(version)
                whole = {
                    name: one.full_tensor() for name, one in model.state_dict().items() if isinstance(one, DTensor)
                }
                if task.rank == 0:
                    from safetensors.torch import save_file

                    save_file(whole, gathered(task.directory, version))
                return {"loss": loss.item(), "nbytes": report.nbytes, "wall_s": report.wall_s}

            obey({"step": step})


def serve(task: RankTask, sizes: Sizes) -> None:
    """Receive versions. Compute with them, and with the gathered weights loaded by the model's own loader."""
    import torch

    import penstock as ps

    served = served_model(sizes, task.rank)
    with ps.subscriber("policy", served, rank=(task.rank, RANKS)) as subscriber:
        send_event("joined", member=subscriber.member.id)

        def update(version: int) -> dict[str, Any]:
            return plain(subscriber.update(version, timeout_s=WAIT_S))

        def logits(version: int) -> dict[str, Any]:
            from safetensors.torch import load_file

            reference = served_model(sizes, task.rank)
            reference.load_weights(load_file(gathered(task.directory, version)).items())
            tokens = torch.arange(BATCH[0] * BATCH[1]).reshape(BATCH) % sizes.vocab
            with torch.no_grad(), process_group(task.directory, f"servers-{version}", task.rank):
                made, true = served(tokens), reference(tokens)
            parameters = all(torch.equal(one, reference.get_parameter(name)) for name, one in served.named_parameters())
            return {"is_equal": parameters and torch.equal(made, true) and bool(made.isfinite().all())}

        obey({"update": update, "logits": logits})


def served_model(sizes: Sizes, rank: int) -> LlamaRank:
    """Return the model of a rank, with its sums over the ranks."""
    import torch
    import torch.distributed as dist
    from tests.support.llama import LlamaRank

    def reduce(part: torch.Tensor) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    return LlamaRank(sizes, rank, RANKS, reduce).to(torch.bfloat16).requires_grad_(False)


def plain(report: Any) -> dict[str, Any]:
    """Return the columns of the table for an update."""
    names = "version", "nbytes", "phases", "pause_s", "gb_per_s", "path", "attempts"
    return {name: getattr(report, name) for name in names} | {"why": list(report.why)}


def obey(answers: dict[str, Callable[[int], dict[str, Any]]]) -> None:
    """Execute lines of input one by one until they end."""
    for line in sys.stdin:
        word, number = line.split()
        try:
            found = answers[word](int(number))
        except PenstockError as error:
            found = {"error": type(error).__name__, "message": str(error)}
        send_event(f"{line.strip()} done", **found)


# --- the demo --------------------------------------------------------------------------------------------------------


def sizes_of(nbytes: int) -> Sizes:
    """Return the sizes of a model of about `nbytes` bytes of BF16."""
    from tests.support.llama import Sizes

    hidden = 256 if nbytes < 24 * MIB else 512
    made = [
        Sizes(num_layers=n, hidden=hidden, inner=3 * hidden, vocab=8 * hidden, num_heads=8, num_kv_heads=4)
        for n in (0, 1)
    ]
    frame, layer = 2 * made[0].num_params, 2 * (made[1].num_params - made[0].num_params)
    num_layers = max(1, round((nbytes - frame) / layer))
    return Sizes(num_layers=num_layers, hidden=hidden, inner=3 * hidden, vocab=8 * hidden, num_heads=8, num_kv_heads=4)


def run(sizes: Sizes, directory: str, table: Table) -> tuple[bool, list[str]]:
    """Run all versions. Return whether everything was equal, and the notes below the table."""
    environ = {
        "PENSTOCK_RUNTIME_DIR": f"{directory}/run",  # a hub of their own
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        ),
        "OMP_NUM_THREADS": "1",
    }
    equal, below = True, list[str]()

    def task(side: str, rank: int) -> RankTask:
        return RankTask(side=side, rank=rank, directory=directory, sizes=asdict(sizes), environ=environ)

    with ExitStack() as stack:
        trainers = [stack.enter_context(Rank(task("trainer", rank))) for rank in range(RANKS)]
        servers = [stack.enter_context(Rank(task("server", rank))) for rank in range(RANKS)]
        for one in (*trainers, *servers):
            one.wait_for("joined", timeout_s=WAIT_S)
        for version in range(1, VERSIONS + 1):
            progress.print(f"  version {version}")
            notes = [""] * RANKS
            if version == 2:
                servers[KILLED].kill()
                servers[KILLED].process.wait()
            stepped = all_done(trainers, f"step {version}")
            if version == 2:
                others = [one for rank, one in enumerate(servers) if rank != KILLED]
                reports = all_done(others, f"update {version}")
                servers[KILLED] = stack.enter_context(Rank(task("server", KILLED)))
                servers[KILLED].wait_for("joined", timeout_s=WAIT_S)
                reports.insert(KILLED, servers[KILLED].ask_done(f"update {version}"))
                notes[KILLED] = ", killed, back"
            else:
                reports = all_done(servers, f"update {version}")
            compared = [one["is_equal"] for one in all_done(servers, f"logits {version}")]
            equal &= all(compared)
            names = {one.events["joined"]["member"][:8]: f"trainer {rank}" for rank, one in enumerate(trainers)}
            names |= {one.events["joined"]["member"][:8]: f"server {rank}" for rank, one in enumerate(servers)}
            add_rows(table, reports, compared, notes, names)
            below.append(
                f"version {version}: loss {stepped[0]['loss']:.3f}; training went on after "
                + ", ".join(f"{one['wall_s']:.3f} s ({one['nbytes'] / GB:.3f} GB)" for one in stepped)
            )
    why = dict.fromkeys(line for report in reports for line in report["why"])
    return equal, [*below, *(named(line, names) for line in why)]


def add_rows(
    table: Table,
    reports: Sequence[dict[str, Any]],
    compared: Sequence[bool],
    notes: Sequence[str],
    names: dict[str, str],
) -> None:
    """Add a row for each serving rank."""
    for rank, (report, is_equal) in enumerate(zip(reports, compared, strict=True)):
        phases = report["phases"]
        seconds = (f"{one:.3f}" for one in (phases["wire"], phases["install"], report["pause_s"]))
        table.add_row(
            str(report["version"]),
            f"{rank}{notes[rank]}",
            f"{report['nbytes'] / GB:.3f}",
            *seconds,
            f"{report['gb_per_s']:.2f}",
            named(report["path"], names),
            "equal" if is_equal else "[red]DIFFERENT[/red]",
        )
    table.add_section()


def named(text: str, names: dict[str, str]) -> str:
    """Replace member ids by their names in this demo."""
    for member, name in names.items():
        text = text.replace(member, name)
    return text


def sync_demo(nbytes: int) -> bool:
    """Print the table for a model of about `nbytes` bytes. Return False if a bit differs."""
    begun, sizes = time.monotonic(), sizes_of(nbytes)
    table = Table(
        title=f"{RANKS} ranks train a Llama of {2 * sizes.num_params / GB:.3f} GB under FSDP2, {RANKS} serve it under "
        "tensor parallelism",
        caption="wire: read and verified beside the live weights; pause: the flip, the only time that serving stops;\n"
        "logits: as of the gathered weights by the model's own loader, and every parameter, bit for bit",
    )
    for column in ("version", "server", "GB", "wire s", "install s", "pause s", "GB/s", "path", "logits"):
        table.add_column(column, justify="right" if column.endswith(("GB", " s", "GB/s")) else "left", overflow="fold")
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        equal, below = run(sizes, directory, table)
    Console(width=None if Console().is_terminal else 120).print(table)
    for line in below:
        Console().print(line, highlight=False, soft_wrap=True)
    progress.print(f"  {time.monotonic() - begun:.0f} s in total")
    return equal


def work(values: dict[str, Any]) -> int:
    """Run one process to its end."""
    import torch
    from tests.support.llama import Sizes

    torch.set_num_threads(1)
    task = RankTask(**values)
    {"trainer": train, "server": serve}[task.side](task, Sizes(**task.sizes))
    return 0


def main() -> int:
    """Run the demo, or one of its processes."""
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        return work(json.loads(sys.argv[1]))
    parser = argparse.ArgumentParser(description="A Llama in training sends each version to the ranks that serve it.")
    parser.add_argument("--mib", type=float, default=64.0, help="size of the model")
    return 0 if sync_demo(int(parser.parse_args().mib * MIB)) else 1


if __name__ == "__main__":
    sys.exit(main())
