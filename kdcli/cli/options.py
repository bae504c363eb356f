"""The options that verbs share. Showing help imports nothing heavy."""

import functools
import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.cli.complete import complete_recipe, complete_task
from kdcli.errors import UsageError

TRACKERS = (
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)
"""The trackers of accelerate, which help must not import."""
HUB_ID = r"(\w[\w.-]*/)?\w[\w.-]*"
RUN, TRAIN, SHOW, ON_TASK = "Run", "Training", "Output", "With --task"


def _shared(
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Output directory.", rich_help_panel=RUN),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help="A shipped recipe or a YAML file.",
            rich_help_panel=TRAIN,
            autocompletion=complete_recipe,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY.PATH=VALUE", help="Any recipe key.", rich_help_panel=TRAIN
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Hub id (or ID@REV), file, directory, or 'demo'.",
            rich_help_panel=TRAIN,
            metavar="SOURCE",
        ),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Optimiser steps; instead of epochs.", rich_help_panel=TRAIN)
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data.", rich_help_panel=TRAIN)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Global batch, in sequences.", rich_help_panel=TRAIN)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate.", rich_help_panel=TRAIN)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.", rich_help_panel=TRAIN)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, fp32, bf16 or fp16.", rich_help_panel=TRAIN)
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, mps, xpu or cuda:INDEX.", rich_help_panel=RUN)
    ] = "auto",
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="REV",
            help="Branch, tag or commit of the model, as MODEL@REV.",
            rich_help_panel=RUN,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Number of training processes; default one a CUDA device.", rich_help_panel=RUN
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the output directory.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the output directory first.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate size, memory and time; write nothing.")
    ] = False,
    report_to: Annotated[
        str, typer.Option(help=f"none, all, {', '.join(TRACKERS)}.", rich_help_panel=SHOW)
    ] = "none",
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Then push the model to this private repository."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=SHOW)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only results and errors.", rich_help_panel=SHOW)
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also messages of the libraries.", rich_help_panel=SHOW
        ),
    ] = False,
) -> None:
    """The shared options, declared as in a verb."""


PRINTING = ("json", "quiet", "verbose")
LOADING = ("output_dir", "overwrite", "revision", "trust_remote_code", *PRINTING)
MAKING = ("push_to_hub", *LOADING)
JUDGING = ("recipe", "sets", "data", "device", *LOADING)
TRAINING = tuple(inspect.signature(_shared).parameters)
MEASURING = (
    "max_latency_ms",
    "min_speedup",
    "strict",
    "task",
    "baseline",
    "backend",
    "padding",
)
CONFLICTS = (
    *(
        ("epochs", "max_steps"),
        ("resume", "overwrite"),
        ("quiet", "verbose"),
        ("dry_run", "push_to_hub"),
    ),
    *(("vocab_size", "base"), ("vocab_size", "community")),
    *(("no_augment", name) for name in ("augment_model", "glove", "augment_only")),
    *(("augment_only", name) for name in ("ablate", "resume", "push_to_hub")),
    *(
        ("compare", name)
        for name in ("portable", "models", "preset", "batch_size", "seq_len", *MEASURING)
    ),
    *(("portable", name) for name in MEASURING),
)
"""Options that contradict each other, by parameter; `no_augment` is a flag that was turned off."""
POSITIVE = ("max_latency_ms", "max_mb", "min_speedup", "processes", "workers")
MOST_PROCESSES = 1_024

Task = Annotated[
    str | None,
    typer.Option(
        help="sst2, mnli, squad …; 'own' for your own files.",
        metavar="TASK",
        rich_help_panel=TRAIN,
        autocompletion=complete_task,
    ),
]

Pooling = Annotated[
    str | None,
    typer.Option(
        help="mean, cls or last, of an encoder without modules.json.", rich_help_panel=TRAIN
    ),
]

EvalTask = Annotated[
    list[str] | None,
    typer.Option(metavar="TASK", help="Also compare all models on this task; may be repeated."),
]

Metric = Annotated[
    list[str] | None,
    typer.Option(
        help="A metric of the evaluate library, by name or script; may be repeated.",
        metavar="NAME|DIRECTORY",
        rich_help_panel=TRAIN,
    ),
]


def with_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add these options of `_shared` behind a verb's own, and configure the libraries before it runs."""

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(verb)
        def ready(**given: Any) -> Any:
            from kdcli.disk import COMMITS

            # Python may run several verbs in this process.
            COMMITS.clear()
            prepare_libraries(given.get("quiet", False), given.get("verbose", False))
            if "processes" in given:
                _join()
            check_conflicts(given)
            check_numbers(given)
            if (revision := given.pop("revision", None)) is not None:
                given[own[0].name] = pinned(given[own[0].name], revision)
            if given.get("push_to_hub") is None:
                return verb(**given)
            from kdcli.report.publish import check_repository, publish

            check_repository(given["push_to_hub"])
            result = verb(**given)
            if result is not None:
                typer.echo(publish(result.folder, given["push_to_hub"]).sentence, err=True)
            return result

        # Typer reads options from evaluated annotations, not from strings.
        parameters = inspect.signature(verb, eval_str=True).parameters.values()
        own = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        shared = inspect.signature(_shared, eval_str=True).parameters
        listed = [*own, *(p for n, p in shared.items() if n in names)]
        ready.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
        return ready

    return decorate


def pinned(model: Any, revision: str) -> Any:
    """`--revision REV` as `MODEL@REV`, of a verb's one model. Raises UsageError: no model or several, one that is not
    of the hub, or one at another revision."""
    if isinstance(model, list) and len(model) == 1:
        return [pinned(model[0], revision)]
    if not model or isinstance(model, list):
        number = "several are" if model else "none is"
        raise UsageError(
            f"--revision is of the model, and {number} given",
            "write MODEL@REV for each, or in the recipe",
        )
    name, at, given = model.partition("@")
    if Path(model).exists() or name == "demo" or not re.fullmatch(HUB_ID, name):
        raise UsageError(
            f"{model} has no revisions: only models of the hub have", "leave --revision out"
        )
    if not re.fullmatch(r"[\w./-]+", revision):
        raise UsageError(f"--revision takes a branch, a tag or a commit, got '{revision}'")
    if at and given != revision:
        raise UsageError(
            f"{model} and --revision {revision} contradict each other", "give one of them"
        )
    return f"{name}@{revision}"


def _join() -> None:
    """Meet the other processes of the run before any of them can fail."""
    from kdcli.engine.processes import joined

    if joined():
        from kdcli.engine.peers import join

        join()


def check_conflicts(given: Mapping[str, Any]) -> None:
    """Raise a UsageError where two options contradict each other."""
    for pair in CONFLICTS:
        if all(_is_given(given, name) for name in pair):
            first, second = map(_shown, pair)
            raise UsageError(f"{first} and {second} contradict each other", "give one of them")


def _is_given(given: Mapping[str, Any], name: str) -> bool:
    if name.startswith("no_"):
        return given.get(name.removeprefix("no_")) is False
    return given.get(name) not in (None, False, [], "none")


def _shown(name: str) -> str:
    return "a model" if name == "models" else f"--{name.replace('_', '-')}"


def check_numbers(given: Mapping[str, Any]) -> None:
    """Raise a UsageError for a number that is not finite, or no count or limit where one is meant."""
    for name, value in given.items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float):
                continue
            if isinstance(number, float) and not math.isfinite(number):
                raise UsageError(f"{_shown(name)} must be a finite number, got {number}")
            if name in POSITIVE and number <= 0:
                raise UsageError(f"{_shown(name)} must be more than 0, got {number:g}")
    for name in ("processes", "workers"):
        if (count := given.get(name)) and count > MOST_PROCESSES:
            raise UsageError(f"--{name} must be at most {MOST_PROCESSES:,}, got {count}")


def training_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The training options under their recipe keys."""
    names = ("max_steps", "epochs", "batch_size", "lr", "seed", "dtype")
    return {"data.source": given["data"]} | {f"train.{name}": given[name] for name in names}


def run_options(given: Mapping[str, Any]) -> Any:
    """The parameters of a verb that are no recipe keys."""
    import dataclasses

    from kdcli.recipe.sections import RunOptions

    names = {field.name for field in dataclasses.fields(RunOptions)}
    return RunOptions(
        arguments=tuple(sys.argv[1:]), **{name: given[name] for name in names & set(given)}
    )


def prepare_libraries(quiet: bool, verbose: bool) -> None:
    """Quiet the libraries and let OpenMP threads yield; must run before the libraries are imported."""
    # Spinning threads starve the thread they wait for: beside another program losses took 70 times as long, with this
    # limit 5 times, and alone the limit costs nothing (docs/results.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for name in ("utils._http", "file_download"):
        # One filter, so that a second command in a process adds none.
        log = logging.getLogger(f"huggingface_hub.{name}")
        (log.removeFilter if verbose else log.addFilter)(_WAITING)
    _WAITING.said = False
    if not verbose:
        # Where one of several processes ends, the others' sockets would say so with a stack each.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from kdcli.engine.progress import Progress

    Progress.console.quiet = quiet


class _Waiting(logging.Filter):
    """Says once that the hub does not answer, in place of the hub client's two lines for each of its retries."""

    said = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop a message about a retry."""
        if not RETRIES.search(record.getMessage()):
            return True
        if not self.said:
            from kdcli.engine.progress import Progress

            self.said = True
            Progress.log("waiting for the hub, which does not answer")
        return False


_WAITING = _Waiting()
RETRIES = re.compile(
    r"thrown while requesting|Retrying in|before retry|Trying to resume|Max retries exceeded"
)


def show(result: Any, *, as_json: bool | None) -> Any:
    """Print a result, as JSON or for a terminal, and return it; None was printed by another process. Nothing is printed
    where `as_json` is None, as from Python."""
    if result is None or as_json is None:
        return result
    if as_json:
        typer.echo(result.to_json())
        return result
    from rich.console import Console

    console = Console()
    for part in result.renderables():
        console.print(part)
    return result
