"""The `penstock` command: its commands, and what a failure becomes.

In: arguments of the process. Out: an exit code:
    0 done   2 wrong usage   3 failed, the destination is intact   4 failed, the destination is dirty   130 interrupted
Not here: the commands (one file each).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import typer

from penstock.cli import (
    bench,
    convert,
    doctor,
    hub,
    inspect,
    keep,
    load,
    manifest,
    output,
    plan,
    pull,
    simulate,
    status,
    version,
)
from penstock.errors import ConfigError, PenstockError

DONE, USAGE, FAILED, DIRTY = 0, 2, 3, 4

app = typer.Typer(
    name="penstock",
    help="Moves model weights to GPUs at the speed of the link: verified, in bounded memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("load")(load.load)
app.command("inspect")(inspect.inspect)
app.command("verify")(manifest.verify)
app.command("manifest")(manifest.manifest)
app.command("keep")(keep.keep)
app.command("pull")(pull.pull)
app.command("convert")(convert.convert)
app.command("hub")(hub.hub)
app.command("status")(status.status)
app.command("why")(status.why)
app.command("doctor")(doctor.doctor)
app.command("version")(version.version)
app.add_typer(plan.app, name="plan")
app.add_typer(simulate.app, name="simulate")
app.add_typer(bench.app, name="bench")


def exit_code(error: PenstockError) -> int:
    """The exit code of an error: usage, or by whether the destination was touched."""
    if isinstance(error, ConfigError):
        return USAGE
    return DIRTY if error.mutated else FAILED


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process by `SystemExit`.

    The one place that holds on to any exception: what is not a `PenstockError` is our own fault, and nothing is known
    of the destination, so it counts as dirty.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=given, prog_name="penstock")
    except PenstockError as error:
        code = exit_code(error)
        output.write_error(error, exit_code=code, as_json=_asks_for_json(given))
        sys.exit(code)
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        output.note("penstock: this is a fault of Penstock itself; take the destination as dirty")
        sys.exit(DIRTY)
    sys.exit(DONE)


def _asks_for_json(arguments: Sequence[str]) -> bool:
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return "--format=json" in arguments or ("--format", "json") in pairs


if __name__ == "__main__":
    run()
