"""What options and recipe keys declare: descriptions, help, examples, the type stub, the
reference."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass
from typer.testing import CliRunner

import kdcli
from kdcli.cli import app
from kdcli.cli.parameters import parameters_of
from kdcli.cli.verb import Given, Verb
from kdcli.errors import UsageError
from kdcli.recipe.options import Option, settings_of
from kdcli.recipe.resolve import recipe_models
from kdcli.recipe.sections import CommandOptions, RunOptions, Section
from tools.reference import FOLDER, all_verbs, reference
from tools.stub import stub

ROOT = Path(kdcli.__file__).parents[1]
VERBS = dict(all_verbs())
MODELS = [
    *recipe_models().values(),
    *(verb.options for verb in VERBS.values() if verb.options is not None),
    *(RunOptions, CommandOptions),
]
INTERNAL = ("verb", "arguments", "stop_after", "written")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_is_described_in_a_sentence(model):
    for setting in settings_of(model):
        if setting.key not in INTERNAL:
            assert re.fullmatch(r"[A-Z][^\n]*\.", setting.description), setting.key


def test_an_example_with_an_unknown_option_would_be_seen():
    wrong = CliRunner().invoke(app, ["prune", "demo", "--sparsty", "0.9", "--help"])
    assert (wrong.exit_code, "--sparsity" in wrong.stderr) == (2, True)


def test_the_stub_is_up_to_date():
    message = "run python -m tools.stub > kdcli/__init__.pyi"
    assert (ROOT / "kdcli" / "__init__.pyi").read_text("utf-8") == stub(), message


def test_the_reference_is_up_to_date():
    written = {page.name: page.read_text("utf-8") for page in FOLDER.iterdir()}
    assert written == reference(), "run python -m tools.reference"


PAGES = sorted((ROOT / "docs").rglob("*.md"))
RECIPES = [
    block
    for page in PAGES
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    if re.search("^verb: ", block, re.MULTILINE)
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.split("\n")[0])
def test_a_recipe_in_the_documentation_can_be_used(recipe, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe, "utf-8")
    done = CliRunner().invoke(app, ["recipes", "validate", str(tmp_path / "recipe.yaml")])
    assert done.exit_code == 0, done.stderr


def type_errors(code: str, folder: Path) -> list[str]:
    """The errors of mypy in a file of this code."""
    file = folder / "code.py"
    file.write_text(code, "utf-8")
    # The stub is followed, the modules that it imports are not.
    options = [
        "--follow-imports",
        "skip",
        # pandas has its stubs in another package.
        "--disable-error-code",
        "import-untyped",
        "--config-file",
        "",
        "--cache-dir",
        str(folder / "cache"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--no-error-summary", str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    return done.stdout.splitlines()


def test_the_stub_accepts_the_examples_of_the_page_and_no_wrong_type(tmp_path):
    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 5
    promised = [
        'kdcli.distill("demo", to="2x64")',
        'kdcli.distill("demo", to=["2x64", "2x32"])',
        'kdcli.evaluate("own")',
        'kdcli.evaluate(Path("runs/teacher"), data=Path("mine"), min_metric="accuracy=0.9")',
        "kdcli.prune(sparsity=0.9)",
        'kdcli.benchmark("2x64", batch_size=1, seq_len=[16, 128])',
        'kdcli.push(Path("runs/student"), "me/small").url',
        'kdcli.push("runs/student", "me/small", dry_run=True).files',
        'kdcli.compress(front="runs/compress").to_frame()',
        'kdcli.read("runs/compress").predict(["a text"])',
        'kdcli.trim("demo", data=["a text"])',
        'kdcli.finetune("demo", data=[{"text": "a", "label": 1}])',
        'kdcli.distill("demo", corpus={"text": ["a"]}, config={"train": {"lr": 1e-3}})',
    ]
    accepted = "\n".join([*blocks, "from pathlib import Path", *promised])
    assert type_errors(accepted, tmp_path) == []
    refused = [
        'kdcli.prune(sparsity="much")',
        'kdcli.distill("demo", too="2x64")',
        "kdcli.export()",
        'kdcli.distill("demo", config=["train.lr=0.001"])',
    ]
    errors = type_errors("\n".join(["import kdcli", *refused]), tmp_path)
    lines = {error.split(":")[1] for error in errors if ": error:" in error}
    assert lines == {"2", "3", "4", "5"}


class Inner(Section):
    use: bool = Field(False, description="Whether to use it.")
    file: Annotated[str | None, Option("--file", enables="use", excludes=("--fast",))] = Field(
        None, description="File (default: none)."
    )


class Recipe(Section):
    lr: Annotated[float, Option("--lr")] = Field(3e-4, description="Rate.")
    shapes: Annotated[list[str], Option("--to")] = Field(default_factory=list, description="Shape.")
    inner: Inner = Inner()


@dataclass(frozen=True)
class Extra:
    fast: Annotated[bool, Option("--fast"), Field(description="Be fast.")] = False
    workers: Annotated[int | None, Option("--workers"), Field(gt=0, description="Workers.")] = None


@pytest.fixture
def given(monkeypatch):
    parameters = parameters_of("read", Recipe, Extra, {})
    monkeypatch.setattr(Verb, "parameters", parameters)

    def make(**values):
        verb = Verb("read", lambda given: None, "unused", (), ("kdcli read",), "read")
        return Given(verb, {each.name: each.default for each in parameters} | values)

    return make


def refusal(function, *arguments) -> str:
    with pytest.raises(UsageError) as caught:
        function(*arguments)
    return f"{caught.value.message}; {caught.value.hint}"


def test_options_become_keys_of_the_recipe(given):
    assert given(lr=1.0, to=["2x64"]).keys() == {"lr": 1.0, "shapes": ["2x64"]}
    assert given(file="x").keys() == {"inner.use": True, "inner.file": "x"}
    assert given(to=[]).keys() == {"shapes": []}
    assert given().keys() == {}


def test_options_that_exclude_each_other_and_wrong_values_are_refused(given):
    conflict = "--file and --fast contradict each other; give one of them"
    assert refusal(given(file="x", fast=True).check_conflicts) == conflict
    given(file="x").check_conflicts()
    assert given(workers=2, fast=True).of(Extra) == Extra(fast=True, workers=2)
    assert refusal(given(workers=0).of, Extra).startswith("--workers must be greater than 0, got 0")


def test_help_shows_the_defaults(given):
    helps = {each.name: each.help for each in given().verb.parameters}
    assert helps["lr"] == "Rate (default: 0.0003)."
    assert helps["file"] == "File (default: none)."
    assert helps["to"] == "Shape."
