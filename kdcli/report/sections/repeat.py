"""Write the block that repeats a run: the command, and what its result depends on."""

from collections.abc import Iterator

from kdcli.report.schema import Report
from kdcli.report.sections.evaluations import set_name


def repeat_block(report: Report) -> str:
    """Return the command as it was typed, and comments with versions, hashes and the seed.

    A shell can run the whole block. A run that was started from Python has the command that repeats
    its recipe.
    """
    command = report.command_line or f"kdcli {report.command} --recipe recipe.yaml -o NEW_DIRECTORY"
    return "\n".join([command, *(f"# {' '.join(fact.split())}" for fact in _facts(report))])


def _facts(report: Report) -> Iterator[str]:
    yield f"run on {report.created}"
    yield ", ".join(f"{name} {version}" for name, version in report.versions.items())
    machine = [report.environment.get(key) for key in ("cpu", "os")]
    python = report.environment.get("python")
    yield ", ".join(
        [*(str(fact) for fact in machine if fact), *([f"Python {python}"] if python else [])]
    )
    seed = _seed(report)
    if seed is not None:
        yield f"seed {seed}"
    for name, version in report.data_versions.items():
        yield f"data {name}: {version}"
    rows = {
        f"{e.n:,} rows of {set_name(e.task, e.set)} ({e.split})": e.rows_sha256
        for e in report.evaluations
        if e.rows_sha256 is not None
    }
    for name, digest in rows.items():
        yield f"{name}: sha256 {digest}"
    for name, card in report.cards.items():
        if card.sha256 is not None:
            revision = f", revision {card.revision}" if card.revision else ""
            yield f"weights of {name}: sha256 {card.sha256}{revision}"


def _seed(report: Report) -> object:
    """Return the seed of the chosen run, of the recipe, or of its training."""
    if report.selection is not None:
        return report.selection.seed
    training = report.recipe.get("train")
    inner = training.get("seed") if isinstance(training, dict) else None
    return report.recipe.get("seed", inner)
