"""Defaults of run settings: environment variables and the table [tool.kdcli] of pyproject.toml."""

import os
import tomllib
from pathlib import Path

from kdcli.disk import user_path
from kdcli.errors import UsageError, did_you_mean, first_line

VARIABLES = {"device": "KDCLI_DEVICE", "output_dir": "KDCLI_OUTPUT_DIR"}
"""Setting -> the environment variable that overrides the table."""
KINDS: dict[str, type] = {"device": str, "output_dir": str, "report_to": str, "strict_data": bool}
"""Setting -> the type of its value in the table."""
TABLE = "[tool.kdcli]"
RUNS = "runs"


def option_defaults() -> dict[str, object]:
    """Return the defaults of options, by name.

    The directory for new runs is no default of `--output-dir`, which names the run itself.

    Raises:
        UsageError: The table has an unknown key or a value of the wrong type.
    """
    return {name: value for name, value in _given().items() if name != "output_dir"}


def runs_dir() -> Path:
    """Return the directory in which runs without `--output-dir` are created."""
    return user_path(str(_given().get("output_dir", RUNS)))


def _given() -> dict[str, object]:
    variables = {name: os.environ.get(variable) for name, variable in VARIABLES.items()}
    return _table() | {name: value for name, value in variables.items() if value}


def _table() -> dict[str, object]:
    """Read the table of the nearest pyproject.toml at or above the working directory."""
    here = Path.cwd()
    files = (folder / "pyproject.toml" for folder in (here, *here.parents))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return {}
    try:
        tools = tomllib.loads(file.read_text("utf-8")).get("tool", {})
    except (OSError, ValueError) as error:
        hint = f"fix the file: kdcli reads its defaults from the table {TABLE}"
        raise UsageError(f"{file} cannot be read: {first_line(error)}", hint) from None
    table = tools.get("kdcli", {}) if isinstance(tools, dict) else {}
    where = f"{TABLE} in {file}"
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table", f"allowed keys: {', '.join(KINDS)}")
    for key, value in table.items():
        if key not in KINDS:
            hint = f"allowed: {', '.join(KINDS)}; keys of a recipe belong in a recipe (--recipe)"
            raise UsageError(f"{where}: unknown key '{key}'{did_you_mean(key, KINDS)}", hint)
        if not isinstance(value, KINDS[key]):
            allowed = "true or false" if KINDS[key] is bool else "a string in quotes"
            raise UsageError(f"{where}: {key} must be {allowed}, got {value!r}")
    return table
