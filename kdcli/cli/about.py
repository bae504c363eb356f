"""`kdcli recipes`, `kdcli doctor` and `kdcli help`."""

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.help import Group, command_with, help_of
from kdcli.cli.libraries import prepare_libraries
from kdcli.cli.verb import INSPECT
from kdcli.errors import UsageError, closest, did_you_mean

if TYPE_CHECKING:
    from kdcli.recipe.resolve import Resolved
    from kdcli.recipe.sections import Section

AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
VerbName = Annotated[str | None, typer.Option("--verb", metavar="VERB", help="Verb of the recipe.")]

recipes = typer.Typer(cls=Group, help="List, show and check recipes.")
app.add_typer(recipes, name="recipes", rich_help_panel=INSPECT)
TOPICS = {
    "environment": """\
Environment variables
  KDCLI_DEVICE           Default of --device, such as cpu or cuda:1.
  KDCLI_OUTPUT_DIR       Directory of runs without -o (default: runs).
  KDCLI_CACHE            Directory of the cache (default: ~/.cache/kdcli).
  KDCLI_TEACHER_API_KEY  API key for the server that --teacher http://... names.
  KDCLI_JOIN_SECONDS     Seconds to wait for other processes (default: 40).
  HF_HOME, HF_TOKEN, HF_HUB_OFFLINE  Cache, token and offline mode of the hub.

An option overrides a variable, and a variable overrides pyproject.toml:

  [tool.kdcli]
  device = "cpu"
  output_dir = "experiments"  # the directory in which runs are created
  report_to = "none"
  strict_data = true
""",
    "exit-codes": """\
Exit codes
  0    The command did what it was asked to do.
  1    A bug in kdcli, with a traceback: please report it.
  2    The command, the recipe, the model or the data cannot be used; the message says why.
  3    The machine cannot do it: too little memory or disk, or a missing library or device.
  4    The training diverged: a loss or a gradient is not finite. The step was not applied.
  5    A limit was missed: the goal of compress, a bound of evaluate, benchmark or export.
  6    A measurement was too unstable, or a part of the cache could not be deleted.
  75   The run was stopped and has a checkpoint: run the same command with --resume.
  130  Interrupted before any checkpoint, or while exporting or scoring; --resume scores the rest.
  143  Ended by SIGTERM in one of several processes, or while kdcli starts.
""",
}
"""Topic -> its text."""


@recipes.command("ls", cls=command_with("kdcli recipes ls"))
def recipes_ls(as_json: AsJson = False) -> None:
    """List the shipped recipes."""
    from kdcli.recipe.resolve import shipped_recipes

    rows = shipped_recipes()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(f"{row['verb']:12} {row['name']:28} {row['about']}")


@recipes.command("show", cls=command_with("kdcli recipes show minilm-6x384"))
def recipes_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Shipped recipe, or a YAML file.")],
    verb: VerbName = None,
) -> None:
    """Print a recipe: the comment at its top, then every value with its origin."""
    from kdcli.recipe.resolve import shipped

    resolved = _resolved(name, verb)
    file = shipped(resolved.recipe.model_dump()["verb"]).get(name, Path(name))
    lines = file.read_text("utf-8").splitlines(keepends=True)
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    typer.echo("".join(comment) + resolved.to_yaml(), nl=False)


@recipes.command("validate", cls=command_with("kdcli recipes validate mine.yaml"))
def recipes_validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="YAML files.")],
    verb: VerbName = None,
) -> None:
    """Check recipe files; exit with 2 and one line per problem."""
    for file in files:
        _resolved(str(file), verb).recipe.check_parts()
        typer.echo(f"{file}: ok")


@app.command(cls=command_with("kdcli doctor", page="errors"), rich_help_panel=INSPECT)
def doctor(as_json: AsJson = False) -> None:
    """Show what this machine can run: devices, backends, versions.

    Paste the output into a bug report.
    """
    prepare_libraries(quiet=False, verbose=False)
    from kdcli.deploy.doctor import examine

    diagnosis = examine()
    typer.echo(diagnosis.to_json() if as_json else diagnosis.to_markdown())


@app.command("help", cls=command_with("kdcli help mask info"), rich_help_panel=INSPECT)
def show_help(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="Command or topic.")
    ] = None,
) -> None:
    """Show the help of a command or of a topic: environment, exit-codes."""
    name = " ".join(words or [])
    if name in TOPICS:
        typer.echo(TOPICS[name], nl=False)
        return
    commands: Any = ctx.find_root().command
    if closest(name, [*commands.commands, *TOPICS]) in TOPICS:
        raise UsageError(
            f"no topic '{name}'{did_you_mean(name, TOPICS)}", f"topics: {', '.join(TOPICS)}"
        )
    help_of(ctx, words or [])


def _resolved(name: str, verb: str | None) -> "Resolved[Section]":
    """Resolve a recipe by its name or path.

    Raises:
        UsageError: There is no such recipe.
    """
    from kdcli.recipe.resolve import recipe_models, resolve, shipped_recipes, verb_of

    models = recipe_models()
    names = [row["name"] for row in shipped_recipes()]
    if verb is None and name not in names and not Path(name).is_file():
        raise UsageError(
            f"no recipe '{name}'{did_you_mean(name, names)}",
            "kdcli recipes ls lists the shipped recipes; or give the path of a YAML file",
        )
    verb = verb or verb_of(name)
    if verb not in models:
        raise UsageError(f"no recipes for verb '{verb}'; known: {', '.join(models)}")
    return resolve(models[verb], recipe=name)
