"""Methods are the files of a package, read without importing them."""

import importlib
import sys

import pytest

from kdcli.recipe.methods import method_names
from kdcli.verbs.distill.cli import distill
from kdcli.verbs.prune.cli import prune


def test_names_are_read_from_the_folder_and_nothing_is_imported(tmp_path, monkeypatch):
    folder = tmp_path / "package_of_methods"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError", "utf-8")
    (folder / "two_words.py").write_text(
        'INPUTS = frozenset({"text"})\ndef objective(x):\n    ...\n', "utf-8"
    )
    (folder / "other.py").write_text(
        'INPUTS = frozenset({"task"})\n\ndef objective(x): ...', "utf-8"
    )
    (folder / "helper.py").write_text("def helper(): ...\n    def objective(): ...", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert method_names(folder.name, "objective") == ["other", "two-words"]
    assert method_names(folder.name, "objective", "text", "masked") == ["two-words"]
    assert folder.name not in sys.modules


@pytest.mark.parametrize(
    ("package", "function", "command"),
    [("kdcli.losses", "objective", distill), ("kdcli.pruners", "pruner", prune)],
)
def test_every_method_can_be_imported_and_is_in_the_help(package, function, command):
    (option,) = (each for each in command.parameters if each.name == "method")
    assert method_names(package, function)
    for name in method_names(package, function):
        module = importlib.import_module(f"{package}.{name.replace('-', '_')}")
        assert {function, "Settings"} <= set(vars(module))
        assert name in option.help
