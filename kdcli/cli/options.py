"""The options that verbs share, and what is made of them. Nothing heavy is imported to show help."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

RUN, TRAIN, SHOW, ON_TASK = "Run", "Training", "Output", "With --task"
Recipe = Annotated[
    str | None, typer.Option("--recipe", "-r", help="A shipped recipe or a YAML file.", rich_help_panel=TRAIN)
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Any recipe key.", rich_help_panel=TRAIN),
]
OutputDir = Annotated[
    Path | None, typer.Option("--output-dir", "-o", help="Where the run is left.", rich_help_panel=RUN)
]
Data = Annotated[
    str | None, typer.Option(help="Hub id, file, directory, or 'demo'.", rich_help_panel=TRAIN, metavar="SOURCE")
]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random.", rich_help_panel=TRAIN)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:INDEX.", rich_help_panel=RUN)]
Processes = Annotated[
    int | None, typer.Option(help="Processes to train with; default one a CUDA device.", rich_help_panel=RUN)
]
Dtype = Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.", rich_help_panel=TRAIN)]
Task = Annotated[
    str | None,
    typer.Option(help="sst2, mnli, squad …; 'own' for your own files.", metavar="TASK", rich_help_panel=TRAIN),
]
MaxSteps = Annotated[int | None, typer.Option(help="Optimiser steps; instead of epochs.", rich_help_panel=TRAIN)]
Epochs = Annotated[float | None, typer.Option(help="Passes over the data.", rich_help_panel=TRAIN)]
BatchSize = Annotated[int | None, typer.Option(help="Global batch, in sequences.", rich_help_panel=TRAIN)]
Lr = Annotated[float | None, typer.Option(help="Peak learning rate.", rich_help_panel=TRAIN)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the output directory.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the run in the output directory first.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would cost: size, memory, time.")]
ReportTo = Annotated[str, typer.Option(help="none, tensorboard, trackio or wandb.", rich_help_panel=SHOW)]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=SHOW)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors.", rich_help_panel=SHOW)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also what the libraries say.", rich_help_panel=SHOW)]


def training_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that every training verb has, under the keys of its recipe."""
    names = ("max_steps", "epochs", "batch_size", "lr", "seed", "dtype")
    return {"data.source": given["data"]} | {f"train.{name}": given[name] for name in names}


def invocation_of(given: Mapping[str, Any]) -> Any:
    """What is no part of a recipe, from the parameters of a verb."""
    import dataclasses

    from kdcli.settings import Invocation

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
    from kdcli.progress import Progress

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
