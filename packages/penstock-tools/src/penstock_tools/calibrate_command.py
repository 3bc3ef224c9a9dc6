"""`penstock calibrate`: measure the rates that `penstock simulate --rates` and `penstock convert --rates` read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import FormatOption, OutputFormat, examples, write_fields, write_json
from penstock.errors import ConfigError


def calibrate(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File for the rates.")],
    format: FormatOption = OutputFormat.human,
) -> None:
    """Measure the stages that a simulation needs. The measurement takes about a minute."""
    from penstock_convert.plan.cluster import to_json
    from penstock_tools import calibrate as stages

    rates = stages.calibrate()
    try:
        path.write_bytes(to_json(rates))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    if format is OutputFormat.json:
        write_json({name: getattr(rates, name) for name in rates.__struct_fields__})
        return
    source = dict(rates.source)
    shown = {name: getattr(rates, name) for name in rates.__struct_fields__ if name in source}
    operations = shown.pop("operation_gb_per_s")
    write_fields({name: f"{value:.6g}  {source[name]}" for name, value in shown.items()})
    how = source["operation_gb_per_s"]
    write_fields({f"operation {name!r}, GB/s": f"{rate:.6g}  {how}" for name, rate in operations.items()})


def add(commands: typer.Typer) -> None:
    """Add `penstock calibrate`."""
    commands.command("calibrate", epilog=examples("penstock calibrate rates.json"))(calibrate)
