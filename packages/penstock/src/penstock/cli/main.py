"""The `penstock` command: its list of commands, and its exit codes, which docs/reference/errors.md explains."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

DONE, CLOSED, USAGE, FAILED, DIRTY, INTERRUPTED = 0, 1, 2, 3, 4, 130

# An interrupt during the imports ends the process without a traceback, with the same exit code as any interrupt.
try:
    import typer

    from penstock import entry_points
    from penstock.cli import checkpoints, doctor, fleet, initialize, load, terminal
    from penstock.cli.terminal import FormatOption, OutputFormat, examples, write_fields, write_json
    from penstock.entry_points import install_hint, missing_extra
    from penstock.errors import ConfigError, MissingExtra, PenstockError
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)

COMMANDS = "penstock.commands"
"""Group of the entry points with which other packages add commands. Each entry point names a function that takes a
`typer.Typer`."""
_EXTRA_OF = {
    "bench": "tools",
    "calibrate": "tools",
    "compile-cache": "compile-cache",
    "convert": "convert",
    "hub": "hub",
    "plan": "tools",
    "run": "transformers",
    "simulate": "tools",
    "ui": "hub",
}
"""For each command from another package, the extra that installs the package, for the error if it is missing."""

app = typer.Typer(
    name="penstock",
    help="Moves model weights to GPUs at the speed of the link, verified and in bounded memory.",
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
    """Move model weights to GPUs at the speed of the link, verified and in bounded memory."""


for _name, _command, *_examples in (
    ("load", load.load, "penstock load llama", "penstock load s3://bucket/llama/ --device cuda --trace trace.json"),
    ("inspect", checkpoints.inspect, "penstock inspect llama --all"),
    ("verify", checkpoints.verify, "penstock verify llama --public-key key.pub.pem"),
    ("manifest", checkpoints.manifest, "penstock manifest llama --sign key.pem"),
    ("cache", fleet.cache, "penstock cache s3://bucket/llama/ --model llama --device cuda --memory-bytes 40G"),
    ("fetch", fleet.fetch, "penstock fetch llama --to /models/llama --fallback s3://bucket/llama/"),
    (
        "storage-initializer",
        initialize.storage_initializer,
        "penstock storage-initializer s3://bucket/llama/ /mnt/models",
    ),
    ("status", fleet.status, "penstock status --watch 2", "penstock status llama --format json"),
    ("why", fleet.why, "penstock why llama"),
    ("drain", fleet.drain, "penstock drain 1bdacba8 --token-file operator.token"),
    ("doctor", doctor.doctor, "penstock doctor --path model.safetensors"),
    ("version", version, "penstock version --format json"),
):
    app.command(_name, epilog=examples(*_examples))(_command)

_added: set[str] = set()
"""Names of the commands that other packages have added."""


def add_commands(words: Sequence[str] = ()) -> typer.Typer:
    """Add the commands of other packages, and return the app.

    If `words` begin with the name of a command, only the package of this command is imported, because all of them
    together need 0.1 s.
    """
    name = words[0] if words else ""
    if any(command.name == name for command in app.registered_commands):
        return app
    found = [entry for entry in entry_points.entry_points(COMMANDS) if entry.name not in _added]
    for entry in [entry for entry in found if entry.name == name] or found:
        try:
            add = entry_points.load(entry)
        except PenstockError as error:
            terminal.note(f"penstock: the command `penstock {entry.name}` is not available: {error}")
            continue
        if callable(add):
            add(app)
            _added.add(entry.name)
    return app


def exit_code(error: PenstockError) -> int:
    """Return the exit code for an error: wrong usage, or a failure that left the destination intact or changed it."""
    if isinstance(error, ConfigError):
        return USAGE
    return DIRTY if error.mutated else FAILED


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, flush stdout, and end the process with `SystemExit`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = DONE
    try:
        add_commands(words)
        _require_package(words)
        app(args=words, prog_name="penstock")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else DIRTY if end.code else DONE
        # Typer turns an interrupt into a SystemExit.
        _print_resume_command(end, words)
    except PenstockError as error:
        code = _report_error(error, words)
    except KeyboardInterrupt as interrupt:
        code = INTERRUPTED
        _print_resume_command(interrupt, words)
    # This is the only handler for all exceptions. An exception that is not a PenstockError is a bug in Penstock and
    # leaves the destination in an unknown state, which counts as dirty.
    except Exception as error:  # noqa: BLE001
        # The OSError may come from stdout in the middle of a command. If so, writing another byte raises it again.
        if isinstance(error, OSError) and (lost := _lost("\n")) is not None and lost.errno == error.errno:
            code = _lost_code(lost)
        # Commands import the modules that they use, so a missing package such as torch fails here.
        elif isinstance(error, ImportError) and (missing := missing_extra(error)) is not None:
            code = _report_error(missing, words)
        else:
            traceback.print_exc()
            terminal.note("penstock: this is a bug in Penstock. The destination may be damaged, so load it again.")
            code = DIRTY
    if (lost := _lost()) is not None:
        code = code or _lost_code(lost)
    sys.exit(code)


def _require_package(words: Sequence[str]) -> None:
    """Raise MissingExtra if the command belongs to a package of this project that is not installed."""
    extra = _EXTRA_OF.get(words[0]) if words else None
    if extra is not None and words[0] not in _added:
        message = f"`penstock {words[0]}` requires the extra penstock[{extra}], which is not installed"
        raise MissingExtra(message, hint=install_hint(extra))


def _report_error(error: PenstockError, words: Sequence[str]) -> int:
    """Write an error to stderr, as JSON if the command line requests JSON. Return the exit code."""
    code = exit_code(error)
    terminal.write_error(error, exit_code=code, as_json=_asks_for_json(words))
    return code


def _print_resume_command(error: BaseException | None, words: Sequence[str]) -> None:
    """If an interrupted call recorded its progress, write the progress and the command that resumes the call."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    for kept in getattr(error, "__notes__", ()):
        terminal.note(f"penstock: interrupted. {kept}\n  {shlex.join(['penstock', *words])}")


def _lost(more: str = "") -> OSError | None:
    """Write `more` to stdout and flush stdout. Return the error if writing fails."""
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes stdout again at exit. On a broken pipe the flush would print a second error and change
        # the exit code.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None


def _lost_code(lost: OSError) -> int:
    if isinstance(lost, BrokenPipeError):
        return CLOSED
    terminal.note(f"penstock: cannot write to stdout: {lost.strerror}")
    return FAILED


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Return whether the arguments, which may be invalid, request errors as JSON."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return "--format=json" in arguments or ("--format", "json") in pairs


if __name__ == "__main__":
    run()
