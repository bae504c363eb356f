"""How one run was chosen of several, as tables of text."""

from __future__ import annotations

import numpy as np

from kdcli.report.schema import RunRow, Selection
from kdcli.report.text import Listing, names_of, number

FEW_METRICS = 6
"""Columns of metrics up to which those of each set are shown."""

Settings = dict[str, float | int | str]


def by_setting(selection: Selection) -> list[tuple[Settings, list[RunRow]]]:
    """The runs of each setting, in the order of the report."""
    found: list[tuple[Settings, list[RunRow]]] = []
    for run in selection.runs:
        known = next((runs for settings, runs in found if settings == run.settings), None)
        if known is None:
            found.append((run.settings, [run]))
        else:
            known.append(run)
    return found


def spread(values: list[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1); None for the latter of a single value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def setting_table(selection: Selection) -> Listing:
    """A row a setting: mean ± sample standard deviation over its seeds of every metric."""
    groups = by_setting(selection)
    keys, metrics = _keys(selection), _metrics(selection)
    rows = []
    for values, runs in groups:
        seeds = ", ".join(str(run.seed) for run in runs)
        row = [*_values(values, keys), seeds]
        for metric in metrics:
            found = [run.metrics[metric] for run in runs if metric in run.metrics]
            row.append(_plus_minus(*spread(found)) if found else "")
        rows.append([*row, "chosen" if values == selection.settings else ""])
    marked = next((i for i, (values, _) in enumerate(groups) if values == selection.settings), None)
    header = [*(keys or ["settings"]), "seeds", *metrics, ""]
    return Listing("Selection", header, rows, _how_chosen(selection, groups), marked)


def _how_chosen(selection: Selection, groups: list[tuple[Settings, list[RunRow]]]) -> str:
    seeds = any(len(runs) > 1 for _, runs in groups)
    by = f"{selection.metric} ({selection.on}"
    if len(groups) == 1:
        how = f"Of {len(selection.runs)} runs, seed {selection.seed} was chosen by {by})"
    elif seeds:
        how = (
            f"Of {len(groups)} settings, one was chosen by {by}; mean over its seeds); of its runs the best one, with "
            f"seed {selection.seed}, is the model reported here"
        )
    else:
        how = f"Of {len(groups)} runs, one was chosen by {by})"
    spreads = " ± is the sample standard deviation over seeds." if seeds else ""
    left_out = " The sets one by one: report.json." if _metrics(selection) != _all_metrics(selection) else ""
    return f"{how}. The scores by which it was chosen are therefore a little optimistic.{spreads}{left_out}"


def _all_metrics(selection: Selection) -> list[str]:
    return names_of(run.metrics for run in selection.runs)


def _metrics(selection: Selection) -> list[str]:
    """All metrics while they fit; else those over all sets, without `SET/METRIC`."""
    names = _all_metrics(selection)
    return names if len(names) <= FEW_METRICS else [name for name in names if "/" not in name]


def run_table(selection: Selection) -> Listing:
    """A row for every single run."""
    keys, metrics = _keys(selection), _metrics(selection)
    rows = [
        [*_values(run.settings, keys), str(run.seed), *(number(run.metrics.get(m)) for m in metrics)]
        for run in selection.runs
    ]
    chosen = [run.settings == selection.settings and run.seed == selection.seed for run in selection.runs]
    for row, mark in zip(rows, chosen, strict=True):
        row.append("chosen" if mark else "")
    marked = chosen.index(True) if True in chosen else None
    return Listing("Every run", [*(keys or ["settings"]), "seed", *metrics, ""], rows, marked=marked)


def _keys(selection: Selection) -> list[str]:
    return list(dict.fromkeys(key for run in selection.runs for key in run.settings))


def _values(settings: Settings, keys: list[str]) -> list[str]:
    return [_setting(settings.get(key, "")) for key in keys] or ["as in the recipe"]


def _setting(value: float | int | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plus_minus(mean: float, deviation: float | None) -> str:
    return number(mean) if deviation is None else f"{number(mean)} ± {deviation:.2g}"
