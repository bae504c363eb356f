"""Print docs/reference.md: every option and recipe key, from their declarations.

python -m tools.reference > docs/reference.md
"""

import sys
from collections.abc import Iterable

import typer

from kdcli.cli import app
from kdcli.cli.parameters import Parameter, default_of, help_sentence, listed
from kdcli.cli.verb import Verb, VerbCommand
from kdcli.recipe.options import Setting, settings_of
from kdcli.recipe.yaml import flow_style

HEAD = """\
# Options and recipe keys

This page lists every option of the command line, the recipe key that it sets, and the recipe keys
that have no option. `python -m tools.reference > docs/reference.md` writes it from the code.

An option overrides `--set KEY=VALUE`, which overrides the recipe, which overrides the default.
`kdcli recipes show NAME` prints a recipe with the origin of each value. The defaults below are
those without a recipe; many tasks have a shipped recipe of their own. In Python the options are
arguments of the same name: see [From Python](python.md).
"""
SHARED = """\
## Options of several verbs

They set no recipe key.
"""


def reference() -> str:
    """Return the page."""
    verbs = list(all_verbs())
    sections = [HEAD, f"{SHARED}\n{shared_table(verbs)}"]
    return "\n".join([*sections, *(section_of(*each) for each in verbs)])


def all_verbs() -> Iterable[tuple[str, Verb]]:
    """Yield the name and declaration of each verb, in the order of `kdcli --help`.

    Commands of a group, such as `mask apply`, are verbs of their own.
    """
    commands: dict[str, object] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        for inner, each in getattr(command, "commands", {"": command}).items():
            if isinstance(each, VerbCommand):
                yield f"{name} {inner}".strip(), each.verb


def is_shared(parameter: Parameter) -> bool:
    """Whether an option is declared once for several verbs."""
    return bool({"RunOptions", "CommandOptions"} & set(parameter.by_model))


def shared_table(verbs: Iterable[tuple[str, Verb]]) -> str:
    """Return the table of the shared options and the verbs that have them."""
    rows: dict[str, tuple[Parameter, list[str]]] = {}
    for name, verb in verbs:
        for parameter in filter(is_shared, verb.parameters):
            rows.setdefault(parameter.name, (parameter, []))[1].append(name)
    head = ("option", "default", "description", "verbs")
    return table(
        head,
        (
            (flags_of(p), default(p), description_of(p), ", ".join(names))
            for p, names in rows.values()
        ),
    )


def section_of(name: str, verb: Verb) -> str:
    """Return the section of a verb."""
    own = [each for each in verb.parameters if not is_shared(each)]
    shared = ", ".join(f"`{each.option.flag}`" for each in verb.parameters if is_shared(each))
    head = ("option", "recipe key", "default", "description")
    rows = [(flags_of(p), keys_of(p), default(p), description_of(p)) for p in own]
    parts = [
        f"## kdcli {name}\n",
        f"{verb.description}\n",
        *(f"    {example}\n" for example in verb.examples),
        table(head, rows),
        f"It also takes {shared}.\n",
    ]
    with_option = {key for each in own for key in keys(each)}
    for kind, recipe in verb.recipes.items():
        settings = [each for each in settings_of(recipe) if each.key not in with_option | {"verb"}]
        title = f"recipe of {recipe.purpose}" if recipe.purpose else "recipe"
        parts.append(f"### Other keys of the {title} (`{kind}`): {name}\n")
        parts.append(table(("recipe key", "default", "description"), map(row_of, settings)))
    return "\n".join(parts)


def row_of(setting: Setting) -> tuple[str, ...]:
    """Return a row for a recipe key without an option."""
    text = help_sentence(setting.description, setting.choices, "")
    return (f"`{setting.key}`", f"`{flow_style(setting.default)}`", text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles)]
    lines += [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def flags_of(parameter: Parameter) -> str:
    """Return the flags of an option with its placeholder, or the name of an argument."""
    metavar = parameter.option.metavar
    if parameter.option.is_argument:
        return f"`{metavar}`"
    flags = [flag for each in parameter.option.flags for flag in each.split("/")]
    return ", ".join(f"`{flag} {metavar}`" if metavar else f"`{flag}`" for flag in flags)


def keys(parameter: Parameter) -> list[str]:
    """Return the recipe keys that an option sets."""
    if not parameter.is_recipe_key:
        return []
    return list(dict.fromkeys(each.key for each in parameter.by_model.values()))


def keys_of(parameter: Parameter) -> str:
    """Return a table's cell with the recipe keys that an option sets."""
    return listed(f"`{key}`" for key in keys(parameter)) if keys(parameter) else ""


def default(parameter: Parameter) -> str:
    """Return a table's cell with an option's default."""
    return default_of(parameter.by_model.values())


def description_of(parameter: Parameter) -> str:
    """Return a table's cell with the description of an option."""
    texts = {each.description: each.choices for each in parameter.by_model.values()}
    return " ".join(help_sentence(text, choices, "") for text, choices in texts.items())


if __name__ == "__main__":
    sys.stdout.write(reference())
