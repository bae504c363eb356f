"""Who may import whom, what the package never does, and what `kdcli --help` must not load. Read off
the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

import kdcli

pytestmark = pytest.mark.slow

ROOT = Path(kdcli.__file__).parent
FILES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py"))

# Package -> the packages that it may import. All may import errors, types and disk.
TOP = (
    "cli workloads targets run report deploy engine losses pruners models data metrics recipe kept"
)
BELOW: dict[str, set[str]] = {
    "verbs": set(TOP.split()),
    "targets": {"kept", "engine", "data", "losses", "models", "recipe"},
    "workloads": {
        *("kept", "targets", "run", "deploy", "report", "engine"),
        *("data", "metrics", "losses", "models", "recipe"),
    },
    "run": {"kept", "deploy", "report", "engine", "data", "recipe"},
    "report": {"deploy", "engine", "metrics", "models", "data", "recipe"},
    "deploy": {"engine", "models", "metrics", "data", "kdcli"},
    "engine": {"recipe"},
    "pruners": {"models", "recipe"},
    "metrics": {"data"},
    "losses": {"recipe"},
    "cli": {*("workloads", "deploy", "report", "engine"), *("data", "models", "recipe", "kdcli")},
    "kdcli": {"deploy"},
    "__main__": {"cli"},
    "models": {"kept"},
    **{room: set() for room in ("kept", "data", "recipe")},
}
GROUND = {
    *("attention", "manifest", "custom_code", "errors", "listing", "messages"),
    *("types", "disk", "version"),
}
# What the command line may import outside its functions, next to `METHODS`, which reads names from
# folders.
AT_HELP = {"custom_code", "errors", "cli", "kdcli", "version"}
METHODS = "kdcli.recipe.methods"
NO_TORCH = {"cli", "recipe", "errors", "disk"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "click"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
}
FORBIDDEN_CALLS |= {"os.system", "numpy.load", "np.load"}


def room_of(path: str) -> str:
    """`models/load.py` -> `models`, `errors.py` -> `errors`, `__init__.py` -> `kdcli`."""
    room = path.split("/")[0].removesuffix(".py")
    return "kdcli" if room == "__init__" else room


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            module = str(node.module)
            yield from (
                f"{module}.{alias.name}" if module == "kdcli" else module for alias in node.names
            )


def imported_rooms(tree: ast.AST) -> set[str]:
    parts = [name.split(".") for name in imports(tree)]
    rooms = {p[1] if len(p) > 1 else "kdcli" for p in parts if p[0] == "kdcli"}
    return {"kdcli" if room == "__version__" else room for room in rooms}


def wrong_imports(path: str, source: str) -> list[str]:
    """What a file of the package imports and may not."""
    room, tree = room_of(path), ast.parse(source)
    allowed = {"errors", "manifest"} if room in GROUND else BELOW[room] | GROUND
    found = sorted(imported_rooms(tree) - allowed - {room})
    # Compress calls the other verbs.
    if room == "verbs" and not path.startswith("verbs/compress/"):
        own = ".".join(["kdcli", *path.split("/")[:2]])
        found += sorted(
            {n for n in imports(tree) if n.startswith("kdcli.verbs") and not n.startswith(own)}
        )
    if room in NO_TORCH or path.endswith(("/settings.py", "/cli.py")):
        found += sorted({n for n in imports(tree) if n.split(".")[0] in ("torch", "transformers")})
    if room == "cli" or path.endswith("/cli.py"):
        outside = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        top = ast.Module([n for n in outside if getattr(n, "module", None) != METHODS], [])
        found += sorted(imported_rooms(top) - AT_HELP)
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


def test_imports_go_downwards_only():
    found = {path: wrong_imports(path, (ROOT / path).read_text("utf-8")) for path in FILES}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_the_table_has_no_circle():
    order: list[str] = []
    while rest := set(BELOW) - set(order):
        free = {room for room in rest if not BELOW[room] & (rest - {"kdcli"})}
        assert free, f"a circle among {rest}"
        order += sorted(free)


def test_nothing_that_a_file_brings_is_run():
    found = {path: wrong_calls((ROOT / path).read_text("utf-8")) for path in FILES}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_gradients_are_taken_in_one_place():
    assert {p: n for p in FILES if (n := backward_calls((ROOT / p).read_text("utf-8")))} == {
        "engine/train.py": 1
    }


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("models/load.py", "from kdcli.recipe.resolve import resolve", ["recipe"]),
        ("models/load.py", "def f():\n    import kdcli.engine.train", ["engine"]),
        ("losses/minilm.py", "from kdcli import models", ["models"]),
        ("recipe/resolve.py", "import torch.nn", ["torch.nn"]),
        (
            "verbs/prune/run.py",
            "from kdcli.verbs.distill import run",
            ["kdcli.verbs.distill"],
        ),
        ("verbs/compress/steps.py", "from kdcli.verbs.distill import run", []),
        ("verbs/prune/cli.py", "from kdcli.recipe.resolve import resolve", ["recipe"]),
        ("verbs/prune/cli.py", "def f():\n    from kdcli.recipe.resolve import resolve", []),
        ("engine/train.py", "from kdcli.types import Batch\nimport torch", []),
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


HEAVY = frozenset(
    {"torch", "transformers", "pydantic", "numpy", "yaml", "datasets", "accelerate", "matplotlib"}
)


def loaded_by(statement: str, heavy: Set[str] = HEAVY) -> set[str]:
    """The heavy ones among the modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()) & heavy


HELP = (
    "from kdcli.cli import main\nsys.argv = ['kdcli', *{}]\ntry:\n    main()\nexcept SystemExit:\n "
    "   pass"
)


# Typer itself reads the values of options with pydantic.
@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--help"], set()),
        *((a, {"pydantic"}) for a in (["distill", "--help"], ["recipes", "--help"], ["--version"])),
    ],
)
def test_help_loads_nothing_heavy(arguments, allowed):
    assert loaded_by(HELP.format(arguments)) <= allowed


MODULES = ("recipe.resolve", "verbs.distill.distill_recipes", "errors", "disk", "engine.processes")


@pytest.mark.parametrize(
    "code", [HELP.format(["recipes", "ls"]), *(f"import kdcli.{module}" for module in MODULES)]
)
def test_recipes_and_modules_below_them_load_no_torch(code):
    assert not loaded_by(code) & {"torch", "transformers", "numpy"}


def test_verbs_load_no_pandas_and_no_matplotlib_before_they_report():
    verbs = sorted(path.parent.name for path in (ROOT / "verbs").glob("*/run.py"))
    statement = "\n".join(f"import kdcli.verbs.{verb}.run" for verb in verbs)
    assert len(verbs) > 8
    found = loaded_by(statement, {"pandas", "matplotlib", "sklearn", "sentence_transformers"})
    assert found == set()
