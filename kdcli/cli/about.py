"""`kdcli recipes` and `kdcli doctor`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import show, with_options
from kdcli.errors import UsageError, did_you_mean

recipes = typer.Typer(no_args_is_help=True, help="List, show and check the recipes.")
app.add_typer(recipes, name="recipes")


@recipes.command("ls")
@with_options("json")
def recipes_ls(**shared: Any) -> None:
    """List the shipped recipes."""
    import json

    from kdcli.recipe.resolve import summary

    found = summary()
    lines = [f"{row['verb']:12} {row['name']:28} {row['about']}" for row in found]
    typer.echo(json.dumps(found, indent=2) if shared["json"] else "\n".join(lines))


@recipes.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(help="Name or file.")], verb: str | None = None
) -> None:
    """Print a recipe: its first lines, then every value resolved and its origin."""
    import itertools

    from kdcli.recipe.resolve import shipped

    resolved = _resolved(name, verb)
    file = shipped(resolved.recipe.verb).get(name, Path(name))
    about = itertools.takewhile(
        lambda line: line.startswith("#"), file.read_text("utf-8").splitlines(keepends=True)
    )
    typer.echo("".join(about) + resolved.to_yaml(), nl=False)


@recipes.command("validate")
def recipes_validate(
    files: Annotated[list[Path], typer.Argument(help="YAML files.")], verb: str | None = None
) -> None:
    """Check recipe files; exit 2 with one line a problem."""
    for file in files:
        _resolved(str(file), verb)
        typer.echo(f"{file}: ok")


@app.command()
@with_options("json")
def doctor(**shared: Any) -> None:
    """Show what this machine can run: devices, number formats, library versions."""
    from kdcli.deploy.doctor import examine

    show(examine(), as_json=shared["json"])


def _resolved(name: str, verb: str | None) -> Any:
    from kdcli.recipe.resolve import recipe_models, resolve, summary, verb_of

    models = recipe_models()
    names = [row["name"] for row in summary()]
    if verb is None and name not in names and not Path(name).is_file():
        raise UsageError(
            f"no recipe '{name}'{did_you_mean(name, names)}",
            "kdcli recipes ls lists the shipped ones; or give the path of a YAML file",
        )
    verb = verb or verb_of(name)
    if verb not in models:
        raise UsageError(f"no recipes for verb '{verb}'; known: {', '.join(models)}")
    return resolve(models[verb], recipe=name)
