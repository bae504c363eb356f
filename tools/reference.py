"""Write docs/reference/: the options and recipe keys of each verb, and the model types.

python -m tools.reference
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import typer

from kdcli.cli import FIRST, app
from kdcli.cli.parameters import Parameter, help_sentence
from kdcli.cli.verb import Verb, VerbCommand
from kdcli.recipe.options import Setting, settings_of
from kdcli.recipe.sections import CommandOptions, RunOptions
from kdcli.recipe.yaml import flow_style
from tools.model_types import page

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
HEAD = """\
# Options and recipe keys

These pages list every option of the command line, the recipe key that it sets, and the recipe keys
that have no option. `python -m tools.reference` writes them from the code.

An option overrides `--set KEY=VALUE`, which overrides the recipe, which overrides the default.
`kdcli recipes show NAME` prints a recipe with the origin of each value. The defaults on these pages
are those without a recipe; many tasks have a shipped recipe of their own. In Python the options are
arguments of the same name: see [From Python](../python.md).
"""
SHARED = """\
## Options of several verbs

They set no recipe key.
"""


def reference() -> dict[str, str]:
    """Return the text of each page by its file name."""
    verbs = list(all_verbs())
    sections: dict[str, list[str]] = {}
    for name, verb in verbs:
        command = name.split()[0]
        sections.setdefault(command, [f"# Options of {command}\n"]).append(section_of(name, verb))
    links = "".join(f"* [kdcli {command}]({command}.md)\n" for command in sections)
    links += "* [keys of `workload`](workload.md), which depend on the kind of data\n"
    index = "\n".join([HEAD, links, SHARED, shared_table(verbs)])
    pages = {f"{command}.md": "\n".join(parts) for command, parts in sections.items()}
    return {"index.md": index, **pages, "workload.md": workloads(), "model-types.md": page()}


def all_verbs() -> Iterable[tuple[str, Verb]]:
    """Yield the name and declaration of each verb, in the order of `kdcli --help`.

    Commands of a group, such as `mask apply`, are verbs of their own. A process that imported one
    verb before the application has another order.
    """
    commands: dict[str, object] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    places = {verb: place for place, verb in enumerate(FIRST)}
    for name in sorted(commands, key=lambda verb: (places.get(verb, len(places)), verb)):
        command = commands[name]
        for inner, each in getattr(command, "commands", {"": command}).items():
            if isinstance(each, VerbCommand):
                yield f"{name} {inner}".strip(), each.verb


def is_shared(parameter: Parameter) -> bool:
    """Whether an option is declared once for several verbs."""
    return parameter.model in (RunOptions, CommandOptions)


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
            (flags_of(p), p.shown_default, description_of(p), ", ".join(names))
            for p, names in rows.values()
        ),
    )


def section_of(name: str, verb: Verb) -> str:
    """Return the section of a verb."""
    own = [each for each in verb.parameters if not is_shared(each)]
    shared = ", ".join(f"`{each.option.flag}`" for each in verb.parameters if is_shared(each))
    head = ("option", "recipe key", "default", "description")
    rows = [(flags_of(p), key_of(p), p.shown_default, description_of(p)) for p in own]
    parts = [
        f"## kdcli {name}\n",
        f"{verb.description}\n",
        *(f"    {example}\n" for example in verb.examples),
        table(head, rows),
        f"It also takes {shared}.\n",
    ]
    if verb.recipe is not None:
        with_option = {each.key for each in own} | {"verb"}
        settings = [each for each in settings_of(verb.recipe) if each.key not in with_option]
        parts.append(f"### Other keys of the recipe: {name}\n")
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


def key_of(parameter: Parameter) -> str:
    """Return a table's cell with the recipe key that an option sets."""
    return f"`{parameter.key}`" if parameter.is_recipe_key else ""


def description_of(parameter: Parameter) -> str:
    """Return a table's cell with the description of an option."""
    return help_sentence(parameter.description, parameter.choices, "")


def workloads() -> str:
    """Return the section on the keys of `workload`, by kind of data."""
    from kdcli.verbs.distill.space import StudentVectors
    from kdcli.workloads import embeddings, rerank, text_generation

    kinds = {
        "Embedding models: prune": embeddings.Settings,
        "Embedding models: distill": StudentVectors,
        "Rerankers": rerank.Settings,
        "Tasks that generate text": text_generation.Settings,
    }
    parts = ["# Keys of workload\n\nEach kind of data has its own keys.\n"]
    for title, model in kinds.items():
        rows = (row_of(replace(each, key=f"workload.{each.key}")) for each in settings_of(model))
        parts.append(f"## {title}\n\n{table(('recipe key', 'default', 'description'), rows)}")
    return "\n".join(parts)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, content in reference().items():
        (FOLDER / file).write_text(content, "utf-8")
