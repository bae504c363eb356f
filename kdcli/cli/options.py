"""The options that verbs share, and what is made of them. Nothing heavy is imported to show help."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

RUN, TRAIN, SHOW, ON_TASK = "Run", "Training", "Output", "With --task"


def _shared(
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Where the run is left.", rich_help_panel=RUN)
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
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.", rich_help_panel=TRAIN)] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.", rich_help_panel=TRAIN)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:INDEX.", rich_help_panel=RUN)] = "auto",
    processes: Annotated[
        int | None, typer.Option(help="Processes to train with; default one a CUDA device.", rich_help_panel=RUN)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the output directory.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the output directory first.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost: size, memory, time.")] = False,
    report_to: Annotated[str, typer.Option(help="none, tensorboard, trackio or wandb.", rich_help_panel=SHOW)] = "none",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=SHOW)] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only results and errors.", rich_help_panel=SHOW)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also what the libraries say.", rich_help_panel=SHOW)
    ] = False,
) -> None:
    """The options that several verbs have, as a verb would declare them."""


PRINTING = ("json", "quiet", "verbose")
LOADING = ("output_dir", "overwrite", "trust_remote_code", *PRINTING)
JUDGING = ("recipe", "sets", "data", "device", *LOADING)
TRAINING = tuple(inspect.signature(_shared).parameters)

Task = Annotated[
    str | None,
    typer.Option(help="sst2, mnli, squad …; 'own' for your own files.", metavar="TASK", rich_help_panel=TRAIN),
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
    """Give a verb these options of `_shared` behind its own, as keywords, and make the libraries ready for it."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def ready(**given: Any) -> None:
            prepare_libraries(given.get("quiet", False), given.get("verbose", False))
            verb(**given)

        # Typer reads options out of the annotations of a signature, which have to be objects here and no strings.
        parameters = inspect.signature(verb, eval_str=True).parameters.values()
        own = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        shared = inspect.signature(_shared, eval_str=True).parameters
        ready.__signature__ = inspect.Signature([*own, *(p for n, p in shared.items() if n in names)])  # type: ignore[attr-defined]
        return ready

    return decorate


def training_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that every training verb has, under the keys of its recipe."""
    names = ("max_steps", "epochs", "batch_size", "lr", "seed", "dtype")
    return {"data.source": given["data"]} | {f"train.{name}": given[name] for name in names}


def invocation_of(given: Mapping[str, Any]) -> Any:
    """What is no part of a recipe, from the parameters of a verb."""
    import dataclasses

    from kdcli.recipe.sections import Invocation

    names = {field.name for field in dataclasses.fields(Invocation)}
    return Invocation(arguments=tuple(sys.argv[1:]), **{name: given[name] for name in names & set(given)})


def prepare_libraries(quiet: bool, verbose: bool) -> None:
    """Libraries speak only when asked to, and share the processor; must run before they are imported."""
    # A thread that spins for another that is not running keeps it from running: beside another program the blocked
    # losses took 70 times as long, with this limit 5 times, and alone the limit costs nothing (docs/results.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from kdcli.training.progress import Progress

    Progress.console.quiet = quiet


def show(result: Any, *, as_json: bool) -> None:
    """A result knows itself as JSON and as a renderable; None was printed by another process."""
    if result is None:
        return
    if as_json:
        typer.echo(result.to_json())
        return
    from rich.console import Console

    console = Console()
    for part in result.renderables():
        console.print(part)
