"""The help of the commands: short, complete on request, with examples that parse."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kdcli.cli import app
from kdcli.cli.help import Command, Group

DOCS = Path(__file__).parents[1] / "docs"
SCREEN = 50
"""Lines of a screen."""


def commands(group, path=()):
    for name, command in group.commands.items():
        if isinstance(command, Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))
paths = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def output(*words):
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


@paths
def test_help_is_one_screen_and_help_all_has_every_option(path):
    command = COMMANDS[path]
    assert isinstance(command, Command)
    short, whole = output(*path, "--help"), output(*path, "--help-all")
    assert len(short.splitlines()) <= SCREEN
    flags = [flag for each in command.params for flag in (*each.opts, *each.secondary_opts)]
    assert len(flags) == len(set(flags))
    words = whole.replace(",", " ").split()
    assert {flag for flag in flags if flag.startswith("-")} <= set(words)
    assert "<" not in whole, "types are not shown"
    assert (f"{' '.join(path)} --help-all" in short) == (len(short) < len(whole))
    assert output("help", *path) == short


@paths
def test_a_verb_has_examples_that_parse_and_a_page(path):
    command = COMMANDS[path]
    assert command.examples
    printed = output(*path, "--help")
    if command.page is not None:
        end = r"(\.md in kdcli's repository)?$"
        assert re.search(rf"^Documentation: \S+/{command.page}{end}", printed, re.MULTILINE)
        assert (DOCS / f"{command.page}.md").is_file()
    for example in command.examples:
        assert f"\n  {example}\n" in printed
        program, *words = shlex.split(example)
        assert (program, *words[: len(path)]) == ("kdcli", *path)
        context = typer.main.get_command(app).make_context("kdcli", words)
        command.make_context(path[-1], words[len(path) :], parent=context)


def test_verbs_are_listed_in_groups():
    listed = output("--help")
    headings = ["Compress", "Train", "Measure", "Ship", "Inspect", "Options"]
    places = [listed.index(f"\n{heading}\n") for heading in headings]
    assert places == sorted(places)
    assert listed.index("  compress ") < listed.index("  distill ") < listed.index("\nTrain\n")
    assert output("-V") == output("--version")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("distil", "distill"),
        ("distill extra", "kdcli distill has no subcommand 'extra'"),
        ("exit-code", "no topic 'exit-code'; did you mean 'exit-codes'?"),
    ],
)
def test_help_of_an_unknown_command_is_refused(words, said):
    result = CliRunner().invoke(app, ["help", *words.split()], prog_name="kdcli")
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("group", [(), ("mask",), ("recipes",), ("cache",)], ids=str)
def test_a_group_without_words_prints_its_help(group):
    assert output(*group) == output(*group, "--help")
    assert output(*group).startswith("Usage: ")


def test_help_all_of_a_group_is_its_help():
    assert output("--help-all") == output("--help")
    assert output("mask", "--help-all") == output("mask", "--help")


@pytest.mark.parametrize(
    ("verb", "texts"),
    [
        ("compress", ["with or without labels", "Maximum latency of 128 tokens"]),
        ("evaluate", ["with or without labels", "compared with the first."]),
        ("finetune", ["Data of the task: a hub id"]),
        ("cotrain", ["Text, or rows of a task: a hub id"]),
        ("prune", ["--method NAME"]),
    ],
)
def test_each_verb_describes_its_own_options(verb, texts):
    shown = " ".join(output(verb, "--help-all").split())
    assert [text for text in texts if text not in shown] == []
