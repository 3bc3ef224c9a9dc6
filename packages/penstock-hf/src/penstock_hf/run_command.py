"""`penstock run`: start a program whose Python processes read safetensors through Penstock.

The program replaces this process (exec). In each Python process of the program, `startup` installs the reader from
`penstock_hf.safetensors`.
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
"""Directory with the `sitecustomize` that each Python process of the program runs first."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- PROGRAM ARGUMENTS...", help="The program to start.")],
    verbose: Annotated[bool, typer.Option("--verbose", help="Print on stderr which reader each file gets.")] = False,
) -> None:
    """Start a program that reads through Penstock.

    The program accepts a URI in place of a safetensors file, and files on network volumes are read ahead. Both apply to
    every Python process that the program starts, as soon as the process imports safetensors.
    """
    # Check the environment variables here, so that an invalid variable does not make the program's `import safetensors`
    # fail.
    Settings.read()
    environment = dict(os.environ)
    paths = [str(STARTUP), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if verbose:
        environment["PENSTOCK_SAFETENSORS_LOG"] = "1"
    program = command[0]
    if shutil.which(program) is None:
        hint = "pass the program and its arguments after --, for example: penstock run -- python app.py"
        raise ConfigError(f"cannot run {program!r}: the program does not exist or is not executable", hint=hint)
    sys.stdout.flush()
    # Restore the default handlers. Python ignores these two signals, and the program would inherit this setting.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        # The command comes from the user, and no shell interprets it.
        os.execvpe(program, command, environment)  # nosec B606
    except OSError as error:
        raise ConfigError(
            f"cannot run {program!r}: {error.strerror}", hint="check that the program is built for this machine"
        ) from error


def add(commands: typer.Typer) -> None:
    """Add `penstock run`."""
    # Pass every argument after the program's name to the program, including options.
    commands.command(
        "run",
        epilog=command_examples(
            "penstock run -- python main.py", "penstock run --verbose -- accelerate launch train.py"
        ),
        context_settings={"allow_interspersed_args": False},
    )(run)
