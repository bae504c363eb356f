"""Print the help of commands and of groups of commands.

A command's `--help` fits on a screen: it leaves out the options that few people need, which
`--help-all` shows. Nothing here imports a large library before help is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kdcli.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

LABEL_WIDTH, MAX_WIDTH = 30, 100
ALL = "--help-all"
KEPT = ("Arguments", "Goal")
"""The panels that keep their headings in the short help. The others are one list there."""

PLACEHOLDER = "OWNER"
"""Stands in pyproject.toml for the account that hosts the repository."""

Row = tuple[str, str]
"""The name of an option or command, and its description."""


class Command(TyperCommand):
    """A command with kdcli's help.

    Attributes:
        examples: Command lines that help shows.
        page: The page of the documentation, without its extension.
    """

    examples: Sequence[str] = ()
    page: str | None = None

    @property
    def rare(self) -> Collection[str]:
        """The names of the parameters that only `--help-all` shows."""
        return ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the whole help if `--help-all` is among the arguments."""
        if ALL in args:
            self.print_help(ctx, everything=True)
            typer.echo()
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the short help."""
        self.print_help(ctx, everything=False)

    def print_help(self, ctx: Any, *, everything: bool) -> None:
        """Print the help to stdout, with all options or with the usual ones."""
        panels: dict[str, list[Row]] = {}
        left_out = 0
        # A line that says "1 more options" would be as long as the option itself.
        everything = everything or sum(p.name in self.rare for p in self.get_params(ctx)) == 1
        for parameter in self.get_params(ctx):
            if not everything and parameter.name in self.rare:
                left_out += 1
            elif parameter.name != "help":
                panel = _panel_of(parameter)
                heading = panel if everything or panel in KEPT else "Options"
                panels.setdefault(heading, []).append(_row_of(parameter))
        parts: list[str | tuple[str, list[Row]]] = [ctx.get_usage(), self.help or ""]
        parts += panels.items()
        if left_out:
            parts.append(f"{left_out} more options: {ctx.command_path} {ALL}")
        if self.examples:
            parts.append(
                (
                    "Examples" if len(self.examples) > 1 else "Example",
                    [("", example) for example in self.examples],
                )
            )
        if self.page is not None:
            parts.append(f"Documentation: {_url(self.page)}")
        _print(parts)


class Group(TyperGroup):
    """A group of commands with kdcli's help. The panels of its commands are headings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--help-all` before a command as `--help`."""
        first = ["--help"] if args[:1] == [ALL] else args[:1]
        return super().parse_args(ctx, [*first, *args[1:]])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the groups of commands."""
        panels: dict[str, list[Row]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            heading = panel if isinstance(panel, str) else "Commands"
            panels.setdefault(heading, []).append((name, command.get_short_help_str(200)))
        options = [_row_of(each) for each in self.get_params(ctx) if each.name != "help"]
        parts: list[str | tuple[str, list[Row]]] = [ctx.get_usage(), self.help or ""]
        parts += panels.items()
        if options:
            parts.append(("Options", options))
        parts.append(f"Help for a command: {ctx.command_path} COMMAND --help")
        if ctx.parent is None:
            parts.append(f"Documentation: {_url('')}")
        _print(parts)


def command_with(*examples: str, page: str | None = None) -> type[Command]:
    """Return a class of commands with examples and a page of the documentation."""
    return type("CommandWithExamples", (Command,), {"examples": examples, "page": page})


def help_of(ctx: typer.Context, words: Sequence[str]) -> None:
    """Print the help of the command that the words name, such as `mask info`.

    Raises UsageError if a command has no subcommands. An unknown name is an error of the parser.
    """
    context: Any = ctx.find_root()
    for word in words:
        command = context.command
        if not isinstance(command, TyperGroup):
            raise UsageError(
                f"{context.command_path} has no subcommand '{word}'",
                f"{context.command_path} --help shows its help",
            )
        name, found, _ = command.resolve_command(context, [word])
        if found is not None:
            context = found.make_context(name, [], parent=context, resilient_parsing=True)
    context.command.format_help(context, None)
    typer.echo()


def _panel_of(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return KEPT[0]
    panel = getattr(parameter, "rich_help_panel", None)
    return panel if isinstance(panel, str) else "Options"


def _row_of(parameter: Any) -> Row:
    """Return the flags with the placeholder of their value, and the description."""
    if parameter.param_type_name == "argument":
        return parameter.metavar, parameter.help or ""
    flags = sorted((*parameter.opts, *parameter.secondary_opts), key=lambda f: f.startswith("--"))
    label = ", ".join(flags)
    return f"{label} {parameter.metavar or ''}".strip(), parameter.help or ""


def _url(page: str) -> str:
    """Return the address of a page of the documentation.

    A copy that was not released has no address.
    """
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        lines = metadata("kdcli").get_all("Project-URL") or []
    except PackageNotFoundError:
        lines = []
    sites = dict(line.split(", ", 1) for line in lines)
    site = sites.get("Documentation")
    if site is None or PLACEHOLDER in site:
        return f"docs/{page or 'index'}.md in kdcli's repository"
    return f"{site}/{page}".removesuffix("/")


def _print(parts: Iterable[str | tuple[str, list[Row]]]) -> None:
    """Print sentences, and tables of rows under a heading, with an empty line after each."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    with console.capture() as printed:
        _print_to(console, parts)
    # Rich pads the rows of a table.
    typer.echo(re.sub(r" +$", "", printed.get(), flags=re.MULTILINE), nl=False)


def _print_to(console: Console, parts: Iterable[str | tuple[str, list[Row]]]) -> None:
    from rich.table import Table
    from rich.text import Text

    for number, part in enumerate(parts):
        if number:
            console.print()
        if isinstance(part, str):
            console.print(Text(part))
        elif not any(label for label, _ in part[1]):
            console.print(Text(part[0], style="bold"))
            for _, line in part[1]:
                console.print(Text(f"  {line}"), soft_wrap=True)
        else:
            heading, rows = part
            console.print(Text(heading, style="bold"))
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(width=min(LABEL_WIDTH, 2 + max(len(label) for label, _ in rows)))
            table.add_column()
            for label, description in rows:
                table.add_row(Text(f"  {label}", style="cyan"), Text(description))
            console.print(table)
