"""Defaults from the environment and from [tool.kdcli] in pyproject.toml, and their help."""

import pytest
from typer.testing import CliRunner

import kdcli
from kdcli.cli import app
from kdcli.cli.about import TOPICS
from kdcli.disk import cache_dir
from kdcli.errors import UsageError
from kdcli.recipe.defaults import runs_dir

TRIM = ("trim", "demo", "--data", "demo", "--vocab-size", "500", "-q")


def run(*words):
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Write [tool.kdcli] above the working directory."""
    for variable in ("KDCLI_DEVICE", "KDCLI_OUTPUT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    return lambda text: (tmp_path / "pyproject.toml").write_text(f"[tool.kdcli]\n{text}\n")


def test_an_option_overrides_a_variable_and_a_variable_overrides_the_table(table, monkeypatch):
    evaluate = ("evaluate", "demo-classifier", "--data", "demo")
    table('device = "of-table"')
    assert "unknown device 'of-table'" in run(*evaluate).stderr
    with pytest.raises(UsageError, match="unknown device 'of-table'"):
        kdcli.evaluate("demo-classifier", data="demo")
    monkeypatch.setenv("KDCLI_DEVICE", "of-variable")
    assert "unknown device 'of-variable'" in run(*evaluate).stderr
    assert "unknown device 'given'" in run(*evaluate, "--device", "given").stderr


def test_runs_are_created_in_the_given_directory(table, tmp_path, monkeypatch):
    table('output_dir = "experiments"')
    assert run(*TRIM).exit_code == 0
    assert [path.name for path in (tmp_path / "inside").iterdir()] == ["experiments"]
    monkeypatch.setenv("KDCLI_OUTPUT_DIR", str(tmp_path / "others"))
    assert run(*TRIM).exit_code == 0
    assert len(list((tmp_path / "others").iterdir())) == 1


def test_a_tilde_is_the_home_of_the_user(table, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KDCLI_CACHE", "~/cache")
    table('output_dir = "~/runs"')
    assert (runs_dir(), cache_dir()) == (tmp_path / "home" / "runs", tmp_path / "home" / "cache")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('devise = "cpu"', "unknown key 'devise'; did you mean 'device'?"),
        ("device = 1", "device must be a string in quotes, got 1"),
        ("device =", "pyproject.toml cannot be read: Invalid value"),
        ('strict_data = "yes"', "strict_data must be true or false, got 'yes'"),
    ],
)
def test_a_wrong_table_is_refused(text, message, table):
    table(text)
    result = run(*TRIM)
    assert (result.exit_code, message in result.stderr) == (UsageError.exit_code, True)


def test_help_names_every_exit_code_and_variable():
    assert run("help", "exit-codes").stdout == TOPICS["exit-codes"]
    assert {"KDCLI_DEVICE", "KDCLI_OUTPUT_DIR"} <= set(run("help", "environment").stdout.split())


def test_the_shell_completes_the_keys_of_set():
    words = {"COMP_WORDS": "kdcli finetune --set train.lr", "COMP_CWORD": "3"}
    environment = words | {"_KDCLI_COMPLETE": "complete_bash"}
    completed = CliRunner().invoke(app, [], env=environment, prog_name="kdcli")
    assert completed.stdout.split() == ["train.lr=", "train.lr_schedule="]
