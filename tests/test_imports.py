"""Who may import whom, what the package never does, and what `kdcli --help` must not load. Read off the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kdcli

ROOT = Path(kdcli.__file__).parent
FILES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py"))

# Unit → the units of the package it may import at all; each may import itself, except that no command imports another.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "progress": {"processes"},
    "yaml_text": set(),
    "disk": {"errors"},
    "processes": {"errors"},
    "settings": set(),
    "memory": set(),
    "cpu_training": set(),
    "recipe": {"errors", "settings", "yaml_text"},
    "stage_recipes": {"errors", "recipe", "settings"},
    "run_dir": {"disk", "errors", "yaml_text"},
    "held_out": {"errors", "memory", "types"},
    "engine": {"cpu_training", "errors", "held_out", "memory", "processes", "progress", "run_dir", "types"},
    "methods": {"errors"},
    "losses": {"errors", "methods", "types"},
    "models": {"disk", "errors", "types"},
    "pruners": {"errors", "methods", "models", "types"},
    "sparse": {"disk", "errors", "models", "types", "kdcli"},
    "data": {"disk", "errors", "types"},
    "bench": {"disk", "errors", "memory", "models", "sparse", "types", "kdcli"},
    "report": {"disk", "errors", "types"},
    "metrics": {"data", "errors", "types"},
    "chain": {"errors", "models", "recipe", "settings", "types"},
    "estimate": {"engine", "errors", "report", "types"},
    "launch": {"bench", "engine", "errors", "processes", "progress", "run_dir", "settings", "types"},
    "judge": {"data", "metrics", "types"},
    "downstream": {
        *("data", "engine", "errors", "held_out", "judge", "launch", "losses", "models", "progress"),
        *("run_dir", "settings", "types"),
    },
    "downstream_scores": {"downstream", "finetune_run", "judge", "launch", "recipe", "settings", "stage_recipes"},
    "distill_job": {"models", "progress", "types"},
    "distill_run": {
        *("bench", "chain", "data", "distill_job", "downstream", "downstream_scores", "engine", "errors", "estimate"),
        *("finish", "judge", "launch", "losses", "metrics", "models", "progress", "recipe", "report", "run_dir"),
        *("settings", "types"),
    },
    "finetune_run": {
        *("bench", "downstream", "finish", "launch", "models", "progress", "recipe", "report", "run_dir", "settings"),
        "types",
    },
    "signal_records": {"data", "errors", "memory", "types"},
    "signal_store": {"data", "disk", "signal_records", "types"},
    "task_augment": {"data", "disk", "downstream", "errors", "models", "progress", "settings"},
    "task_distill": {
        *("distill_run", "downstream", "errors", "launch", "losses", "models", "progress", "recipe", "run_dir"),
        *("settings", "stage_recipes", "task_augment", "task_stages", "task_teacher", "types"),
    },
    "task_run": {
        *("bench", "data", "disk", "distill_job", "distill_run", "downstream", "engine", "estimate", "finetune_run"),
        *("finish", "judge", "launch", "models", "progress", "recipe", "report", "run_dir", "stage_recipes"),
        *("task_augment", "task_distill", "task_stages", "task_teacher", "types"),
    },
    "task_stages": {
        *("distill_job", "downstream", "models", "settings", "task_teacher", "types"),
    },
    "task_teacher": {
        *("distill_job", "downstream", "errors", "losses", "models", "progress", "settings", "signal_store", "types"),
    },
    "cotrain_plan": {"errors", "losses", "recipe", "settings"},
    "cotrain_models": {"cotrain_plan", "data", "errors", "losses", "models", "progress", "settings", "types"},
    "cotrain_job": {
        *("cotrain_models", "cotrain_plan", "data", "distill_job", "downstream", "losses", "models", "progress"),
        *("settings", "types"),
    },
    "cotrain_report": {"bench", "cotrain_plan", "finish", "losses", "run_dir", "settings", "types"},
    "cotrain_run": {
        *("bench", "cotrain_job", "cotrain_models", "cotrain_plan", "cotrain_report", "data", "downstream"),
        *("downstream_scores", "engine", "errors", "estimate", "finish", "launch", "losses", "models", "progress"),
        *("recipe", "run_dir", "settings", "types"),
    },
    "cotrain_task": {
        *("bench", "cotrain_job", "cotrain_models", "cotrain_plan", "data", "downstream", "engine", "errors"),
        *("estimate", "finetune_run", "finish", "launch", "losses", "models", "progress", "recipe", "run_dir"),
        *("settings", "task_teacher", "types"),
    },
    "prune_job": {
        *("disk", "distill_job", "downstream", "models", "pruners", "settings", "task_teacher", "types"),
    },
    "prune_run": {
        *("bench", "downstream", "engine", "errors", "finish", "judge", "launch", "models", "progress", "prune_job"),
        *("pruners", "recipe", "report", "run_dir", "settings", "sparse", "task_teacher", "types"),
    },
    "backend_scores": {
        *("bench", "data", "downstream", "errors", "judge", "metrics", "models", "progress", "settings", "sparse"),
        "types",
    },
    "finish": {"bench", "disk", "progress", "report", "run_dir", "settings", "types"},
    "commands": {
        *(
            "backend_scores",
            "bench",
            "distill_run",
            "chain",
            "cotrain_plan",
            "cotrain_run",
            "cotrain_task",
            "data",
            "disk",
            "downstream",
            "engine",
            "errors",
            "estimate",
            "finetune_run",
            "finish",
        ),
        *("held_out", "judge", "launch", "losses", "metrics", "models", "processes", "progress"),
        *("prune_job", "prune_run", "pruners", "recipe", "report", "run_dir", "settings", "sparse"),
        *("task_augment", "task_distill", "task_run", "task_teacher", "types"),
    },
    "cli": {"bench", "commands", "errors", "kdcli", "processes", "progress", "recipe", "settings", "stage_recipes"},
    "__main__": {"cli"},
    "kdcli": {"sparse"},
}
AT_HELP = {"errors", "kdcli"}
"""What the command line may import outside its functions, besides its own parts."""

NO_TORCH = {
    "errors",
    "recipe",
    "settings",
    "stage_recipes",
    "yaml_text",
    "disk",
    "processes",
    "progress",
    "cli",
    "__main__",
    "kdcli",
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "click"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.full_load", "yaml.unsafe_load"),
    *("os.system", "numpy.load", "np.load"),
}


def unit_of(path: str) -> str:
    """`models/load.py` → `models`, `engine.py` → `engine`, `__init__.py` → `kdcli`."""
    if path == "__init__.py":
        return "kdcli"
    return path.split("/")[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            module = str(node.module)
            yield from (f"{module}.{alias.name}" if module == "kdcli" else module for alias in node.names)


def imported_units(tree: ast.AST) -> set[str]:
    parts = [name.split(".") for name in imports(tree)]
    units = {p[1] if len(p) > 1 else "kdcli" for p in parts if p[0] == "kdcli"}
    return {"kdcli" if unit == "__version__" else unit for unit in units}


def wrong_imports(path: str, source: str) -> list[str]:
    """What a file of the package imports and may not."""
    unit, tree = unit_of(path), ast.parse(source)
    found = sorted(imported_units(tree) - ALLOWED[unit] - {unit})
    if unit == "commands":
        found += sorted({n for n in imports(tree) if n.startswith("kdcli.commands")})
    if unit in NO_TORCH:
        found += sorted({n for n in imports(tree) if n.split(".")[0] in ("torch", "transformers")})
    if unit == "cli":
        top = ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])
        found += sorted(imported_units(top) - AT_HELP - {unit})
    return found


def wrong_calls(source: str) -> list[str]:
    """Modules and calls that can run what a file brings."""
    tree = ast.parse(source)
    called = [ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    modules = {name.split(".")[0] for name in imports(tree)} & FORBIDDEN_MODULES
    return sorted(modules | (set(called) & FORBIDDEN_CALLS))


def backward_calls(source: str) -> int:
    calls = [n.func for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    return sum(isinstance(f, ast.Attribute) and f.attr == "backward" for f in calls)


@pytest.mark.parametrize("path", FILES)
def test_imports_go_downwards_only(path):
    assert wrong_imports(path, (ROOT / path).read_text("utf-8")) == []


@pytest.mark.parametrize("path", FILES)
def test_nothing_that_a_file_brings_is_run(path):
    assert wrong_calls((ROOT / path).read_text("utf-8")) == []


def test_gradients_are_taken_in_one_place():
    assert {p: n for p in FILES if (n := backward_calls((ROOT / p).read_text("utf-8")))} == {"engine.py": 1}


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("models/load.py", "from kdcli.recipe import resolve", ["recipe"]),
        ("models/load.py", "def f():\n    import kdcli.engine", ["engine"]),
        ("losses/minilm.py", "from kdcli import models", ["models"]),
        ("recipe.py", "import torch.nn", ["torch.nn"]),
        ("commands/prune.py", "from kdcli.commands import distill", ["kdcli.commands"]),
        ("cli/score.py", "from kdcli.recipe import resolve", ["recipe"]),
        ("cli/score.py", "def f():\n    from kdcli.recipe import resolve", []),
        ("engine.py", "from kdcli.types import Batch\nimport torch", []),
    ],
)
def test_the_rule_finds_what_it_should(path, source, found):
    assert wrong_imports(path, source) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from dill import loads", ["dill"]),
        ("torch.load(path)", ["torch.load"]),
        ("yaml.load(text, Loader=x)", ["yaml.load"]),
        ("eval('1')", ["eval"]),
        ("model.eval()\nload_file(path)", []),
    ],
)
def test_the_ban_finds_what_it_should(source, found):
    assert wrong_calls(source) == found


def loaded_by(statement: str) -> set[str]:
    """The heavy ones among the modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()) & {
        *("torch", "transformers", "pydantic", "numpy", "yaml", "datasets", "accelerate", "matplotlib"),
    }


HELP = "from kdcli.cli import main\nsys.argv = ['kdcli', *{}]\ntry:\n    main()\nexcept SystemExit:\n    pass"


def test_help_loads_nothing_heavy():
    assert loaded_by(HELP.format(["--help"])) == set()


@pytest.mark.parametrize("arguments", [["distill", "--help"], ["recipes", "--help"], ["--version"]])
def test_help_of_a_verb_loads_nothing_heavy(arguments):
    # Typer itself reads the values of options with pydantic.
    assert loaded_by(HELP.format(arguments)) <= {"pydantic"}


def test_recipes_are_listed_without_torch():
    assert not loaded_by(HELP.format(["recipes", "ls"])) & {"torch", "transformers", "numpy"}


@pytest.mark.parametrize("module", ["recipe", "settings", "stage_recipes", "errors", "disk", "processes"])
def test_module_loads_no_torch(module):
    assert not loaded_by(f"import kdcli.{module}") & {"torch", "transformers", "numpy"}
