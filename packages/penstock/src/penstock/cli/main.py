"""The `penstock` command: its list of commands, and the exit codes of their failures.

In: arguments of the process. Out: an exit code:
    0 done   1 the reader of stdout left   2 wrong usage   3 failed, the destination is intact
    4 failed, the destination is dirty   130 interrupted
Not here: the commands (the other files of this folder).
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

DONE, CLOSED, USAGE, FAILED, DIRTY, INTERRUPTED = 0, 1, 2, 3, 4, 130

# A process that is interrupted while it imports ends like one that is interrupted later: no traceback, the same code.
try:
    import typer

    from penstock import entry_points
    from penstock.cli import checkpoints, convert, doctor, fleet, hub, initialize, load, terminal
    from penstock.cli.terminal import FormatOption, OutputFormat, examples, write_fields, write_json
    from penstock.entry_points import missing_extra
    from penstock.errors import ConfigError, PenstockError
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)

COMMANDS = "penstock.commands"
"""Group of the entry points by which other packages add commands: each names a function that takes a `typer.Typer`."""
_PACKAGE_OF = {
    "bench": "penstock-tools",
    "calibrate": "penstock-tools",
    "compile-cache": "penstock-compile-cache",
    "plan": "penstock-tools",
    "run": "penstock-hf",
    "simulate": "penstock-tools",
}
"""The packages of this project that add commands, for the message where one is not installed."""

app = typer.Typer(
    name="penstock",
    help="Moves model weights to GPUs at the speed of the link: verified, in bounded memory.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def version(format: FormatOption = OutputFormat.human) -> None:
    """Print the versions that a bug report needs."""
    import platform

    from penstock.cli.terminal import package_version

    found = {
        "penstock": package_version("penstock"),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "safetensors": package_version("safetensors"),
        "platform": platform.platform(),
    }
    if format is OutputFormat.json:
        write_json(found)
    else:
        write_fields({name: value or "not installed" for name, value in found.items()})


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from penstock.cli.terminal import package_version, write_lines

        write_lines(f"penstock {package_version('penstock') or 'from a source tree'}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Move model weights to GPUs at the speed of the link: verified, in bounded memory."""


for _name, _command, *_examples in (
    ("load", load.load, "penstock load llama", "penstock load s3://bucket/llama/ --device cuda --trace trace.json"),
    ("inspect", checkpoints.inspect, "penstock inspect llama --all"),
    ("verify", checkpoints.verify, "penstock verify llama --public-key key.pub.pem"),
    ("manifest", checkpoints.manifest, "penstock manifest llama --sign key.pem"),
    ("cache", fleet.cache, "penstock cache s3://bucket/llama/ --model llama --device cuda --memory-bytes 40G"),
    ("fetch", fleet.fetch, "penstock fetch llama --to /models/llama --fallback s3://bucket/llama/"),
    (
        "convert",
        convert.convert,
        "penstock convert llama llama-fp8 --to fp8-block128",
        "penstock convert a b merged --op 'linear:weights=0.3,0.7'",
        "penstock convert --list-ops",
    ),
    (
        "storage-initializer",
        initialize.storage_initializer,
        "penstock storage-initializer s3://bucket/llama/ /mnt/models",
    ),
    ("hub", hub.hub, "penstock hub --listen 0.0.0.0:7070 --token-file tokens --cert hub.pem --key hub.key"),
    ("ui", hub.ui, "penstock ui --hub https://hub:7070 --token-file token"),
    ("status", fleet.status, "penstock status --watch 2", "penstock status llama --format json"),
    ("why", fleet.why, "penstock why llama"),
    ("drain", fleet.drain, "penstock drain 1bdacba8 --token-file operator.token"),
    ("doctor", doctor.doctor, "penstock doctor --path model.safetensors"),
    ("version", version, "penstock version --format json"),
):
    app.command(_name, epilog=examples(*_examples))(_command)

_added: set[str] = set()
"""The names of the commands that other packages have added."""


def _add_commands() -> None:
    """Add the commands of other packages. One that cannot be imported is named on stderr, and left out."""
    for entry in entry_points.entry_points(COMMANDS):
        try:
            add = entry_points.load(entry)
        except PenstockError as error:
            terminal.note(f"penstock: `penstock {entry.name}` is left out: {error}")
            continue
        if callable(add):
            add(app)
            _added.add(entry.name)


_add_commands()


# The numbers are documented in docs/reference/errors.md and pinned by tests: scripts branch on them.
def exit_code(error: PenstockError) -> int:
    """Return the exit code of an error: wrong usage, or whether the destination was touched."""
    if isinstance(error, ConfigError):
        return USAGE
    return DIRTY if error.mutated else FAILED


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, flush stdout, and end the process by `SystemExit`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = DONE
    try:
        _require_package(words)
        app(args=words, prog_name="penstock")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else DIRTY if end.code else DONE
        # Typer makes a SystemExit of an interrupt.
        _say_how_to_resume(end, words)
    except PenstockError as error:
        code = _say_error(error, words)
    except KeyboardInterrupt as interrupt:
        code = INTERRUPTED
        _say_how_to_resume(interrupt, words)
    # The one place that catches every exception: one that is not a PenstockError is our own fault, and nothing is known
    # of the destination, so it counts as dirty.
    except Exception as error:  # noqa: BLE001
        # The OSError may be that of stdout, raised in the middle of a command: writing a byte more tells.
        if isinstance(error, OSError) and (lost := _lost("\n")) is not None and lost.errno == error.errno:
            code = _lost_code(lost)
        # Commands import the rooms they use. Without torch, say, most of these imports fail.
        elif isinstance(error, ImportError) and (missing := missing_extra(error)) is not None:
            code = _say_error(missing, words)
        else:
            traceback.print_exc()
            terminal.note("penstock: this is a bug in Penstock; the destination may be damaged, load it again")
            code = DIRTY
    if (lost := _lost()) is not None:
        code = code or _lost_code(lost)
    sys.exit(code)


def _require_package(words: Sequence[str]) -> None:
    """Raise ConfigError where the command is in a package of this project that is not installed."""
    package = _PACKAGE_OF.get(words[0]) if words else None
    if package is not None and words[0] not in _added:
        raise ConfigError(f"`penstock {words[0]}` is a command of the package {package}", hint=f"pip install {package}")


def _say_error(error: PenstockError, words: Sequence[str]) -> int:
    """Write an error to stderr, as JSON where the command line asks for that; return the exit code."""
    code = exit_code(error)
    terminal.write_error(error, exit_code=code, as_json=_asks_for_json(words))
    return code


def _say_how_to_resume(error: BaseException | None, words: Sequence[str]) -> None:
    """Write what an interrupted call has kept, and the command that goes on with it, if the call noted that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    for kept in getattr(error, "__notes__", ()):
        terminal.note(f"penstock: interrupted; {kept}\n  {shlex.join(['penstock', *words])}")


def _lost(more: str = "") -> OSError | None:
    """Write `more` to stdout and flush it; return the error if its reader or its file system does not take it."""
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes stdout once more at its end: to a broken pipe that would print a second error and
        # change the exit code.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None


def _lost_code(lost: OSError) -> int:
    """Return the exit code where output was lost: its reader left (`head`), or it cannot be written."""
    if isinstance(lost, BrokenPipeError):
        return CLOSED
    terminal.note(f"penstock: stdout cannot be written: {lost.strerror}")
    return FAILED


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Return whether errors are written as JSON: known even where the arguments do not parse."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return "--format=json" in arguments or ("--format", "json") in pairs


if __name__ == "__main__":
    run()
