"""The application, and the one place where an error becomes a message and an exit code."""

import errno
import re
import sys
from typing import Annotated, Any

import typer

from kdcli.cli.help import MAX_WIDTH, Group
from kdcli.errors import (
    OF_MACHINE,
    Interrupted,
    KdcliError,
    MachineError,
    Stopped,
    UsageError,
    first_line,
    is_out_of_memory,
    shortened,
)
from kdcli.version import full_version

# Errors of a machine that a bug in kdcli cannot cause. A missing file, or a permission error
# without a file would be a bug.
OF_PERMISSION = ("EACCES", "EPERM")
OF_PATH = ("ENAMETOOLONG", "ENOTDIR", "ELOOP")  # Only a path from the user causes these.
FEW_FILES = "this process may open too few files: raise the limit, for example ulimit -n 1024"
LITTLE_MEMORY = (
    "use a smaller model, batch or file, close other programs, or raise the limit (ulimit -v)"
)
WRONG_USAGE: type[Exception] = typer.BadParameter.__bases__[0]
INSTEAD = {
    ("kdcli compress", "--dry-run"): "--budget 20m limits its time, and kdcli distill --dry-run "
    "estimates a single training",
    ("kdcli", "completion"): "kdcli --install-completion sets it up for this shell",
}
"""Command and unknown option or command -> what to use instead."""
OTHER_NAMES = {"--learning-rate": "--lr", "--num-train-epochs": "--epochs"}
"""Options of transformers' Trainer -> kdcli's."""
RESUME_AUTO = ("--resume", "auto")
MAX_ARGUMENT = 4_096
"""Maximum number of characters of an argument. No path is longer."""


class Verbs(Group):
    """The group of all verbs. It turns errors into messages on stderr and exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--resume auto`, which managed restarts use, as `--resume`."""
        words = [
            word
            for before, word in zip(["", *args], args, strict=False)
            if (before, word) != RESUME_AUTO
        ]
        try:
            return super().parse_args(ctx, words)
        except WRONG_USAGE as caught:
            error = _of_usage(caught)
        _say(error)
        raise typer.Exit(error.exit_code)

    def invoke(self, ctx: Any) -> Any:
        """Run a verb, and turn a KdcliError into a message and an exit code."""
        from kdcli.engine.processes import ends_at_once
        from kdcli.messages import facts_once

        try:
            with ends_at_once(), facts_once():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            error: KdcliError = Interrupted("interrupted")
        except KdcliError as caught:
            error = caught
        except WRONG_USAGE as caught:
            error = _of_usage(caught)
        except OSError as caught:
            if (kind := _kind_of(caught)) is None:
                _tell_bug(caught)
                raise
            name = shortened(str(caught.filename or "a file"), 200)
            hint = FEW_FILES if caught.errno == errno.EMFILE else None
            error = kind(f"{name} cannot be used: {caught.strerror}", hint)
        except MemoryError:
            error = MachineError("out of memory", LITTLE_MEMORY)
        except typer.Exit:  # A RuntimeError, after which torch need not be loaded.
            raise
        except RuntimeError as caught:
            from kdcli.engine.processes import lost_another

            if is_out_of_memory(caught):
                error = MachineError(f"out of memory: {first_line(caught)}", LITTLE_MEMORY)
            elif lost_another(caught):
                from kdcli.engine.peers import Lost

                error = Lost()
            else:
                _tell_bug(caught)
                raise
        except Exception as caught:
            _tell_bug(caught)
            raise
        _say(error)
        raise typer.Exit(error.exit_code) from None


def _of_usage(error: Any) -> UsageError:
    """Return Typer's error about the words of a command in kdcli's form."""
    message = error.format_message()
    verbs = ""
    if error.ctx:
        # The program may be called `python -m kdcli`.
        verbs = error.ctx.command_path.removeprefix(error.ctx.find_root().command_path)
    command = f"kdcli{verbs}"
    option = getattr(error, "option_name", "")
    unknown = re.match(r"No such command '(.*)'", message)
    instead = INSTEAD.get((command, unknown[1] if unknown else option))
    if (own := OTHER_NAMES.get(option.replace("_", "-"))) is not None:
        instead = f"its name here is {own}, in the commands that train"
    hint = instead or f"{command} --help lists what the command takes"
    return UsageError(f"{message[0].lower()}{message[1:].rstrip('.')}", hint)


def _kind_of(error: OSError) -> type[KdcliError] | None:
    """Return the class of error that the user sees; None if the error is a bug in kdcli."""
    name = errno.errorcode.get(error.errno or 0)
    if name in OF_MACHINE or (name in OF_PERMISSION and error.filename is not None):
        return MachineError
    return UsageError if name in OF_PATH and error.filename is not None else None


def _say(error: KdcliError) -> None:
    """Print an error in one of the processes of a run."""
    from kdcli.engine.processes import joined
    from kdcli.messages import is_main

    if joined():
        from kdcli.engine.peers import peers

        if (others := peers()) is not None:
            error = others.end(error)
        elif not is_main() and not isinstance(error, MachineError):
            # Every process finds a wrong input, but a fault of a machine may occur in one process.
            return
    if error.message:
        from rich.console import Console

        # Emoji are off because user input such as `1:a:1` may look like the name of an emoji.
        console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        # A requested stop is not an error.
        if isinstance(error, Stopped | Interrupted):
            console.print(error.message, markup=False)
        else:
            console.print(f"error: {error.message}", style="red", markup=False)
        if error.hint:
            console.print(error.hint, markup=False)


def _tell_bug(error: Exception) -> None:
    """Tell the other processes about a bug. This process prints the traceback."""
    from kdcli.engine.processes import joined

    if joined():
        from kdcli.engine.peers import peers

        if (others := peers()) is not None:
            others.end(
                KdcliError(
                    f"{type(error).__name__}: {error}", "its traceback is in that process's output"
                )
            )


app: typer.Typer = typer.Typer(
    cls=Verbs,
    pretty_exceptions_show_locals=False,
    help="Make Hugging Face encoders small and fast, and measure what is lost.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", is_eager=True)
    ] = False,
) -> None:
    if version:
        typer.echo(f"kdcli {full_version()}")
        raise typer.Exit


def main() -> None:
    """Entry point of `kdcli` and `python -m kdcli`."""
    if undecodable := [
        word for word in sys.argv[1:] if any("\ud800" <= letter <= "\udfff" for letter in word)
    ]:
        sys.stderr.write(f"error: the argument {undecodable[0]!a} is not UTF-8\n")
        sys.exit(UsageError.exit_code)
    if long := [word for word in sys.argv[1:] if len(word) > MAX_ARGUMENT]:
        sys.stderr.write(
            f"error: the argument {shortened(long[0], 40)!a} has {len(long[0]):,} characters\n"
        )
        sys.stderr.write(
            f"at most {MAX_ARGUMENT:,} are allowed; give long values in a recipe file (--recipe)\n"
        )
        sys.exit(UsageError.exit_code)
    app()
