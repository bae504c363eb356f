"""The application: its groups of verbs, and the one place where an error becomes a message and an exit code."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kdcli import __version__
from kdcli.errors import Interrupted, KdcliError, MachineError


class Verbs(TyperGroup):
    """The one place that turns an error into a message on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb; an error of a user, a machine or a measurement becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            error: KdcliError = Interrupted("interrupted; no checkpoint of this step was written")
        except KdcliError as caught:
            error = caught
        except RuntimeError as caught:
            from kdcli.training.processes import lost_another

            if not lost_another(caught):
                raise
            message = "another process of this run has ended, and this one cannot go on without it"
            error = MachineError(message, "what it said stands above, if it could; then go on with --resume")
        from rich.console import Console

        from kdcli.training.processes import is_main

        # What is wrong with the input every process finds; what is wrong with a machine, perhaps only one of them.
        if error.message and (is_main() or isinstance(error, MachineError)):
            # What a user gave may look like an emoji's name: `1:a:1`.
            shown = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
            shown.print(f"error: {error.message}", style="red", markup=False)
            if error.hint:
                shown.print(error.hint, markup=False)
        raise typer.Exit(error.exit_code) from None


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Make Hugging Face encoders small and fast, and prove it.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"kdcli {__version__}")
        raise typer.Exit
