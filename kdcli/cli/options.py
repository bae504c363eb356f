"""The options that verbs share. Showing help imports nothing heavy."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.errors import UsageError

RUN, TRAIN, SHOW, ON_TASK = "Run", "Training", "Output", "With --task"


def _shared(
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Output directory.", rich_help_panel=RUN)
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="A shipped recipe or a YAML file.", rich_help_panel=TRAIN)
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Any recipe key.", rich_help_panel=TRAIN),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Hub id, file, directory, or 'demo'.", rich_help_panel=TRAIN, metavar="SOURCE")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Optimiser steps; instead of epochs.", rich_help_panel=TRAIN)
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.", rich_help_panel=TRAIN)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Global batch, in sequences.", rich_help_panel=TRAIN)] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", rich_help_panel=TRAIN)] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.", rich_help_panel=TRAIN)] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.", rich_help_panel=TRAIN)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:INDEX.", rich_help_panel=RUN)] = "auto",
    processes: Annotated[
        int | None, typer.Option(help="Number of training processes; default one a CUDA device.", rich_help_panel=RUN)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output directory.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the output directory first.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Estimate size, memory and time; write nothing.")] = False,
    report_to: Annotated[str, typer.Option(help="none, tensorboard, trackio or wandb.", rich_help_panel=SHOW)] = "none",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=SHOW)] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only results and errors.", rich_help_panel=SHOW)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also messages of the libraries.", rich_help_panel=SHOW)
    ] = False,
) -> None:
    """The shared options, declared as in a verb."""


PRINTING = ("json", "quiet", "verbose")
LOADING = ("output_dir", "overwrite", "trust_remote_code", *PRINTING)
JUDGING = ("recipe", "sets", "data", "device", *LOADING)
TRAINING = tuple(inspect.signature(_shared).parameters)
CONFLICTS = (("epochs", "max_steps"), ("resume", "overwrite"))
"""Options that contradict each other."""

Task = Annotated[
    str | None,
    typer.Option(help="sst2, mnli, squad …; 'own' for your own files.", metavar="TASK", rich_help_panel=TRAIN),
]

Pooling = Annotated[
    str | None,
    typer.Option(help="mean, cls or last, of an encoder without modules.json.", rich_help_panel=TRAIN),
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

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def ready(**given: Any) -> None:
            check_conflicts(given)
            prepare_libraries(given.get("quiet", False), given.get("verbose", False))
            verb(**given)

        # Typer reads options from evaluated annotations, not from strings.
        parameters = inspect.signature(verb, eval_str=True).parameters.values()
        own = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        shared = inspect.signature(_shared, eval_str=True).parameters
        ready.__signature__ = inspect.Signature([*own, *(p for n, p in shared.items() if n in names)])  # type: ignore[attr-defined]
        return ready

    return decorate


def check_conflicts(given: Mapping[str, Any]) -> None:
    """Raise a UsageError where two options contradict each other."""
    for pair in CONFLICTS:
        if all(given.get(name) for name in pair):
            first, second = (f"--{name.replace('_', '-')}" for name in pair)
            raise UsageError(f"{first} and {second} contradict each other", "give one of them")


def training_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The training options under their recipe keys."""
    names = ("max_steps", "epochs", "batch_size", "lr", "seed", "dtype")
    return {"data.source": given["data"]} | {f"train.{name}": given[name] for name in names}


def invocation_of(given: Mapping[str, Any]) -> Any:
    """The parameters of a verb that are no recipe keys."""
    import dataclasses

    from kdcli.recipe.sections import Invocation

    names = {field.name for field in dataclasses.fields(Invocation)}
    return Invocation(arguments=tuple(sys.argv[1:]), **{name: given[name] for name in names & set(given)})


def prepare_libraries(quiet: bool, verbose: bool) -> None:
    """Quiet the libraries and let OpenMP threads yield; must run before the libraries are imported."""
    # Spinning threads starve the thread they wait for: beside another program losses took 70 times as long, with this
    # limit 5 times, and alone the limit costs nothing (docs/results.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from kdcli.training.progress import Progress

    Progress.console.quiet = quiet


def show(result: Any, *, as_json: bool) -> None:
    """Print a result, as JSON or for a terminal; None was printed by another process."""
    if result is None:
        return
    if as_json:
        typer.echo(result.to_json())
        return
    from rich.console import Console

    console = Console()
    for part in result.renderables():
        console.print(part)
