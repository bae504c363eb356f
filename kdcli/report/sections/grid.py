"""Show how one of several runs was chosen."""

from dataclasses import replace

import numpy as np

from kdcli.report.schema import RunRow, Selection
from kdcli.report.text import ReportSection, View, filled, names_in, number

MAX_METRICS = 6  # with more metrics, the ones of single sets are skipped

GridSettings = dict[str, float | int | str]


def by_setting(selection: Selection) -> list[tuple[GridSettings, list[RunRow]]]:
    """Group the runs by setting, in the order of the report."""
    groups: list[tuple[GridSettings, list[RunRow]]] = []
    for run in selection.runs:
        if run.settings not in (settings for settings, _ in groups):
            same = [other for other in selection.runs if other.settings == run.settings]
            groups.append((run.settings, same))
    return groups


def spread(values: list[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation (n - 1).

    The deviation of a single value is None.
    """
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def selection_section(selection: Selection) -> ReportSection:
    """Show the mean ± sample standard deviation over the seeds of each setting, and every run."""
    chosen, metrics = selection.settings, _metrics(selection)
    rows = [
        _settings(settings)
        | {"seeds": ", ".join(str(run.seed) for run in runs)}
        | {metric: _over(runs, metric) for metric in metrics}
        | {"": "chosen" * (settings == chosen)}
        for settings, runs in by_setting(selection)
    ]
    runs = [
        _settings(run.settings)
        | {"seed": str(run.seed)}
        | {metric: number(run.metrics.get(metric)) for metric in metrics}
        | {"": "chosen" * ((run.settings, run.seed) == (chosen, selection.seed))}
        for run in selection.runs
    ]
    place, place_of_run = (
        next((n for n, row in enumerate(each) if row[""]), None) for each in (rows, runs)
    )
    every = filled("Every run", runs, marked=place_of_run, least=View.MARKDOWN, open=False)
    section = filled("Selection", rows, how_chosen(selection), marked=place)
    return replace(section, parts=[every])


def how_chosen(selection: Selection) -> str:
    """Describe which run was chosen, and how."""
    groups = by_setting(selection)
    seeds = any(len(runs) > 1 for _, runs in groups)
    by = f"{selection.metric} ({selection.on}"
    if len(groups) == 1:
        text = f"Of {len(selection.runs)} runs, seed {selection.seed} was chosen by {by})"
    elif seeds:
        text = (
            f"Of {len(groups)} settings, one was chosen by {by}; mean over its seeds); of its runs "
            f"the best one, with seed {selection.seed}, is the model reported here"
        )
    else:
        text = f"Of {len(groups)} runs, one was chosen by {by})"
    spreads = " ± is the sample standard deviation over seeds." if seeds else ""
    listed = _metrics(selection)
    skipped = any(metric not in listed for run in selection.runs for metric in run.metrics)
    sets = " report.json has the scores on every set." if skipped else ""
    return f"{text}. The scores that chose it are therefore a little optimistic.{spreads}{sets}"


def _metrics(selection: Selection) -> list[str]:
    """Return all metrics. If there are too many, skip the ones of single sets (`SET/METRIC`)."""
    names = names_in(run.metrics for run in selection.runs)
    return names if len(names) <= MAX_METRICS else [name for name in names if "/" not in name]


def _settings(settings: GridSettings) -> dict[str, str]:
    if not settings:
        return {"settings": "as in the recipe"}
    return {
        key: f"{value:g}" if isinstance(value, float) else str(value)
        for key, value in settings.items()
    }


def _over(runs: list[RunRow], metric: str) -> str:
    values = [run.metrics[metric] for run in runs if metric in run.metrics]
    mean, deviation = spread(values) if values else (None, None)
    return number(mean) if deviation is None else f"{number(mean)} ± {deviation:.2g}"
