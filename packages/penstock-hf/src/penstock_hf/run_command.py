"""`penstock run`: start a program in whose Python processes safetensors reads through Penstock.

In: a command. Out: nothing: this process becomes the program, so its exit code and signals are the program's.
Not here: what is replaced (`safetensors`), how a process begins it (`startup`).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import ConfigError
from penstock.spi import Settings, command_examples

STARTUP = Path(__file__).resolve().parent / "startup"
"""The directory of the `sitecustomize` that each Python process of the program runs first."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- PROGRAM ARGUMENTS...", help="The program to start.")],
    verbose: Annotated[bool, typer.Option("--verbose", help="Say on stderr which reader each file gets.")] = False,
) -> None:
    """Start a program that reads through Penstock.

    Penstock is put under its safetensors: URIs then work wherever the program takes a safetensors file, and files on
    network volumes are read ahead. It holds for every Python process that the program starts, once that imports
    safetensors.
    """
    # In the program itself a wrong variable is only a message: its own `import safetensors` must not fail.
    Settings.read()
    environment = dict(os.environ)
    paths = [str(STARTUP), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if verbose:
        environment["PENSTOCK_SAFETENSORS_LOG"] = "1"
    program = command[0]
    if shutil.which(program) is None:
        hint = "give the program and its arguments after --, as: penstock run -- python app.py"
        raise ConfigError(f"cannot run {program!r}: there is no such program, or it is not executable", hint=hint)
    sys.stdout.flush()
    # Python ignores these two from its start on, and a program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        # nosec: the user's own command, without a shell.
        os.execvpe(program, command, environment)  # nosec B606
    except OSError as error:
        raise ConfigError(
            f"cannot run {program!r}: {error.strerror}", hint="is it a program of this machine?"
        ) from error


def add(commands: typer.Typer) -> None:
    """Add `penstock run`."""
    # Everything from the program on is the program's, options too.
    commands.command(
        "run",
        epilog=command_examples(
            "penstock run -- python main.py", "penstock run --verbose -- accelerate launch train.py"
        ),
        context_settings={"allow_interspersed_args": False},
    )(run)
