"""Print the help of commands and of groups of commands.

A command's `--help` fits on a screen: it leaves out the options that few people need, which
`--help-all` shows. Nothing here imports a large library before help is asked for.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kdcli.errors import UsageError

MAX_WIDTH = 100
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
            formatter = ctx.make_formatter()
            self.write_help(ctx, formatter, everything=True)
            typer.echo(formatter.getvalue().rstrip("\n"))
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the short help."""
        self.write_help(ctx, formatter, everything=False)

    def write_help(self, ctx: Any, formatter: Any, *, everything: bool) -> None:
        """Write the help with all options or with the usual ones."""
        parameters = [each for each in self.get_params(ctx) if each.name != "help"]
        rare = [each for each in parameters if each.name in self.rare]
        # A line that says "1 more options" would be as long as the option itself.
        everything = everything or len(rare) == 1
        panels: dict[str, list[Row]] = {}
        for parameter in parameters:
            if everything or parameter not in rare:
                panel = _panel_of(parameter)
                heading = panel if everything or panel in KEPT else "Options"
                panels.setdefault(heading, []).append(_row_of(parameter))
        _write(ctx, formatter, self.help, panels)
        if rare and not everything:
            formatter.write(f"\n{len(rare)} more options: {ctx.command_path} {ALL}\n")
        if self.examples:
            heading = "Examples" if len(self.examples) > 1 else "Example"
            formatter.write(f"\n{typer.style(heading, bold=True)}\n")
            formatter.write("".join(f"  {example}\n" for example in self.examples))
        if self.page is not None:
            formatter.write(f"\nDocumentation: {_url(self.page)}\n")


class Group(TyperGroup):
    """A group of commands with kdcli's help. The panels of its commands are headings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read no words, or `--help-all` before a command, as `--help`."""
        if args[:1] in ([], [ALL]):
            args = ["--help", *args[1:]]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the groups of commands."""
        panels: dict[str, list[Row]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            heading = panel if isinstance(panel, str) else "Commands"
            panels.setdefault(heading, []).append((name, command.get_short_help_str(200)))
        if options := [_row_of(each) for each in self.get_params(ctx) if each.name != "help"]:
            panels["Options"] = options
        _write(ctx, formatter, self.help, panels)
        formatter.write(f"\nHelp for a command: {ctx.command_path} COMMAND --help\n")
        if ctx.parent is None:
            formatter.write(f"\nDocumentation: {_url('')}\n")


def command_with(*examples: str, page: str | None = None) -> type[Command]:
    """Return a class of commands with examples and a page of the documentation."""
    return type("CommandWithExamples", (Command,), {"examples": examples, "page": page})


def help_of(ctx: typer.Context, words: Sequence[str]) -> None:
    """Print the help of the command that the words name, such as `mask info`.

    An unknown name is an error of the parser.

    Raises:
        UsageError: A command has no subcommands.
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
    typer.echo(context.command.get_help(context))


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


def _write(
    ctx: Any, formatter: Any, description: str | None, panels: Mapping[str, Sequence[Row]]
) -> None:
    """Write the usage, the description, and the rows of each panel under its heading."""
    formatter.write(f"{ctx.get_usage()}\n\n")
    formatter.write_text(description or "")
    for heading, rows in panels.items():
        formatter.write(f"\n{typer.style(heading, bold=True)}\n")
        with formatter.indentation():
            formatter.write_dl([(typer.style(label, fg="cyan"), text) for label, text in rows])
