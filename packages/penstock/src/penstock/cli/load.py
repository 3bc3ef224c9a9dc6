"""`penstock load`: load weights into memory of this process, report on the load, and release them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import terminal
from penstock.config import Settings, parse_bytes
from penstock.errors import ConfigError
from penstock.report import bytes_text, plain
from penstock.units import GB, MIB


def load(
    uri: terminal.Uri,
    device: terminal.Device = "cpu",
    names: terminal.Names = None,
    memory_bytes: terminal.MemoryBytes = None,
    verify: terminal.Verify = None,
    trace: Annotated[Path | None, terminal.option("--trace", "FILE", "Write a Chrome trace (for Perfetto).")] = None,
    cache: terminal.Cache = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and load nothing.")] = False,
    format: terminal.FormatOption = terminal.OutputFormat.human,
) -> None:
    """Load weights and report rate, memory and paths.

    The tensors are freed at the end. The command measures a load and shows the path of each file.
    """
    budget = None if memory_bytes is None else parse_bytes(memory_bytes)
    if dry_run and cache:
        raise ConfigError("--dry-run cannot fill a cache", hint="omit --dry-run or --cache")
    if dry_run:
        _write_plan(uri, names, budget, format)
        return
    import penstock
    from penstock.storage.locate import require_local

    # Check the path before torch is imported, which takes seconds.
    require_local(uri)
    # Import the progress bar's library now, because the load's time would otherwise include the import.
    import rich.progress  # noqa: F401

    weights = penstock.load(
        uri,
        device=device,
        names=names,
        verify=verify,
        settings=penstock.ReadSettings(memory_bytes=budget, trace=trace, cache=cache),
    )
    if format is terminal.OutputFormat.json:
        terminal.write_json({**plain(weights.report), "gb_per_s": weights.report.gb_per_s})
    else:
        terminal.write_lines(weights.report.summary())


# Number of bytes that a dry run reads for its prediction, enough to measure the link in a short time.
_SAMPLE_BYTES = 64 * MIB


def _write_plan(uri: str, names: list[str] | None, memory_bytes: int | None, format: terminal.OutputFormat) -> None:
    """Plan a load from the headers, predict its time by reading a sample of the source, and write both to stdout."""
    from penstock.plan.schedule import plan_load
    from penstock.storage.weight_set import open_weights

    settings = Settings.read(memory_bytes=memory_bytes)
    with open_weights(uri, settings=settings, names=names) as weights:
        files = weights.manifest.files
        plan = plan_load(
            weights.manifest.tensors,
            file_nbytes=[file.nbytes for file in files],
            chunk_bytes=min(settings.chunk_bytes, settings.memory_bytes),
        )
        read_bytes = int(plan.read_nbytes.sum())
        path, rate = "none", 0.0
        # Read the sample from the largest file, because the sample must not reach the end of the file.
        largest = int(max((file.nbytes for file in files), default=0))
        if largest:
            source = weights.sources[[file.nbytes for file in files].index(largest)]
            sample = memoryview(bytearray(min(largest, _SAMPLE_BYTES)))
            begin = time.perf_counter()
            path = source.readv(0, [sample])
            rate = len(sample) / (time.perf_counter() - begin) / GB
    counts = {"uri": uri, "num_files": len(files), "num_tensors": len(plan.table), "nbytes": plan.nbytes}
    predicted_s = read_bytes / rate / GB if rate else 0.0
    if format is terminal.OutputFormat.json:
        terminal.write_json(
            {
                **counts,
                "read_bytes": read_bytes,
                "num_reads": plan.num_reads,
                "memory_bytes": settings.memory_bytes,
                "sample_path": path,
                "sample_gb_per_s": rate,
                "predicted_s": predicted_s,
                "reads": plan.explain(),
            }
        )
        return
    terminal.write_fields(
        {
            "uri": uri,
            "files": len(files),
            "tensors": len(plan.table),
            "bytes": bytes_text(plan.nbytes),
            "to read": f"{bytes_text(read_bytes)} in {plan.num_reads} reads",
            "staging": f"at most {bytes_text(settings.memory_bytes)}",
            "sample": f"{rate:.2f} GB/s by one thread ({path})",
            "predicted": f"{predicted_s:.2f} s at that rate; several threads may do better",
        }
    )
    terminal.write_lines("", plan.explain())
