"""The command line: parse, resolve the recipe, one call, print. No logic; nothing heavy is imported to show help."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kdcli import __version__
from kdcli.errors import Interrupted, KdcliError, MachineError, UsageError


class Verbs(TyperGroup):
    """The one place that turns an error into a message on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb; an error of a user, a machine or a measurement becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            error: KdcliError = Interrupted("interrupted; no checkpoint of this step was written")
        except KdcliError as caught:
            error = caught
        from rich.console import Console

        from kdcli.processes import is_main

        # What is wrong with the input every process finds; what is wrong with a machine, perhaps only one of them.
        if error.message and (is_main() or isinstance(error, MachineError)):
            # What a user gave may look like an emoji's name: `1:a:1`.
            shown = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
            shown.print(f"error: {error.message}", style="red", markup=False)
            if error.hint:
                shown.print(error.hint, markup=False)
        raise typer.Exit(error.exit_code) from None


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Make Hugging Face encoders small and fast, and prove it.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes = typer.Typer(no_args_is_help=True, help="List, show and check the recipes.")
app.add_typer(recipes, name="recipes")
mask = typer.Typer(no_args_is_help=True, help="Mask files: look, compare, apply, compact.")
app.add_typer(mask, name="mask")

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


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"kdcli {__version__}")
        raise typer.Exit


@app.command()
def distill(
    teacher: Annotated[str | None, typer.Argument(help="Hub id, directory, or 'demo'.")] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="LxH[:FFN][@HEADS]", help="Student shape, e.g. 6x768; may be repeated."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="minilm, minilmv2, tinybert, distilbert, mlm-kd, masked-lm; on tasks tinybert, minilm, minilmv2, pkd, "
            "soft-targets.",
            show_default=False,
        ),
    ] = None,
    task: Task = None,
    student: Annotated[
        str | None, typer.Option(metavar="DIR", help="On a task: start from this encoder.", rich_help_panel=ON_TASK)
    ] = None,
    general: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="First distil on text, in this directory.", rich_help_panel=ON_TASK),
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="The text of that stage; it is wanted then.", rich_help_panel=ON_TASK),
    ] = None,
    more_teachers: Annotated[
        list[str] | None,
        typer.Option("--also-teacher", help="A further teacher of the task; repeatable.", rich_help_panel=ON_TASK),
    ] = None,
    augment: Annotated[
        bool | None,
        typer.Option("--augment/--no-augment", help="Train on copies with other words too.", rich_help_panel=ON_TASK),
    ] = None,
    augment_model: Annotated[
        str | None, typer.Option(help="Masked language model that names words.", rich_help_panel=ON_TASK)
    ] = None,
    glove: Annotated[
        str | None, typer.Option(metavar="FILE", help="Word vectors for long words.", rich_help_panel=ON_TASK)
    ] = None,
    augment_only: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the copies as jsonl and stop.", rich_help_panel=ON_TASK),
    ] = None,
    ablate: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Also run the variants of this list; one table.", rich_help_panel=ON_TASK),
    ] = None,
    assistant: Annotated[str | None, typer.Option(help="Teacher assistant: auto, none or LxH.")] = None,
    eval_task: Annotated[
        list[str] | None, typer.Option(metavar="TASK", help="Also fine-tune all models on this task and compare.")
    ] = None,
    output_dir: OutputDir = None,
    recipe: Recipe = None,
    sets: Sets = None,
    data: Data = None,
    max_steps: MaxSteps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = "auto",
    processes: Processes = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    report_to: ReportTo = "none",
    trust_remote_code: RemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a smaller student of an encoder: on unlabelled text (MiniLM, TinyBERT …), or on a task with --task."""
    given = locals()
    _prepare_libraries(quiet, verbose)
    from kdcli.recipe import resolve, verb_of
    from kdcli.settings import DistillRecipe

    if task is not None or (recipe is not None and verb_of(recipe) == "distill-task"):
        _distill_on_task(given)
        return
    _refuse_without_task(given)
    own = {"teacher": teacher, "student.to": to, "method": method, "assistant": assistant, "eval.tasks": eval_task}
    shipped = "demo" if teacher == "demo" and method in (None, "minilm") else None
    resolved = resolve(DistillRecipe, recipe=recipe or shipped, sets=sets or (), options=own | _training(given))
    invocation = _invocation(given)
    from kdcli.commands import distill as command

    _print(command.run(resolved, invocation), as_json=json)


@app.command()
def finetune(
    model: Annotated[str | None, typer.Argument(help="Hub id, directory, or 'demo'.")] = None,
    task: Task = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of every setting, each with a seed of its own.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2…", help="Try every value, e.g. lr=2e-5,3e-5; may be repeated."),
    ] = None,
    output_dir: OutputDir = None,
    recipe: Recipe = None,
    sets: Sets = None,
    data: Data = None,
    max_steps: MaxSteps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = "auto",
    processes: Processes = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    report_to: ReportTo = "none",
    trust_remote_code: RemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fine-tune an encoder on a labelled task and report what it scores."""
    given = locals()
    _prepare_libraries(quiet, verbose)
    from kdcli.recipe import grid_options, resolve, shipped
    from kdcli.settings import FinetuneRecipe

    own = {"model": model, "task": task, "seeds": seeds, **grid_options(FinetuneRecipe, grid or ())}
    of_task = task if task in shipped("finetune") else None
    resolved = resolve(FinetuneRecipe, recipe=recipe or of_task, sets=sets or (), options=own | _training(given))
    invocation = _invocation(given)
    from kdcli.commands import finetune as command

    _print(command.run(resolved, invocation), as_json=json)


@app.command()
def prune(
    model: Annotated[str | None, typer.Argument(help="Hub id, directory, or 'demo'.")] = None,
    method: Annotated[
        str | None, typer.Option(help="smp, magnitude, movement, soft-movement, l0 or cap.", show_default=False)
    ] = None,
    sparsity: Annotated[
        list[float] | None, typer.Option(help="Share of the weights that goes, e.g. 0.9; may be repeated.")
    ] = None,
    masking: Annotated[str | None, typer.Option(help="local, global, proportional or threshold.")] = None,
    task: Task = None,
    teacher: Annotated[
        str | None, typer.Option(help="A model fine-tuned on the task, whose logits are learned too.")
    ] = None,
    output_dir: OutputDir = None,
    recipe: Recipe = None,
    sets: Sets = None,
    data: Data = None,
    max_steps: MaxSteps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = "auto",
    processes: Processes = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    report_to: ReportTo = "none",
    trust_remote_code: RemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Remove weights of an encoder while it learns a task (SMP and its baselines)."""
    given = locals()
    _prepare_libraries(quiet, verbose)
    from kdcli.recipe import resolve, shipped
    from kdcli.settings import PruneRecipe

    own = {"model": model, "task": task, "method": method, "sparsity": sparsity, "teacher": teacher}
    own |= {"pruner.masking": masking}
    named = f"{method or 'smp'}-{task or 'sst2'}"
    of_task = named if named in shipped("prune") else None
    resolved = resolve(PruneRecipe, recipe=recipe or of_task, sets=sets or (), options=own | _training(given))
    from kdcli.commands import prune as command

    _print(command.run(resolved, _invocation(given)), as_json=json)


@app.command()
def cotrain(
    teacher: Annotated[str | None, typer.Argument(help="LxH, hub id or directory.")] = None,
    student: Annotated[str | None, typer.Argument(help="LxH, hub id or directory.")] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="co-distillation, one-way, reversed or standalone.", show_default=False),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="A:B:C:D", help="Student against labels, from teacher; teacher against labels, from student."
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of both softmaxes.")] = None,
    community: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A frozen teacher of both, from which shapes are copied.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Tokenizer and configuration of shapes; on a task weights too.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Of a tokenizer trained from the text.")] = None,
    standalone: Annotated[
        bool | None,
        typer.Option("--standalone/--no-standalone", help="Also train both without each other, to compare."),
    ] = None,
    task: Task = None,
    eval_task: Annotated[
        list[str] | None, typer.Option(metavar="TASK", help="Also fine-tune all models on this task and compare.")
    ] = None,
    output_dir: OutputDir = None,
    recipe: Recipe = None,
    sets: Sets = None,
    data: Data = None,
    max_steps: MaxSteps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = "auto",
    processes: Processes = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    report_to: ReportTo = "none",
    trust_remote_code: RemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train two models in one loop that learn from each other: on unlabelled text, or on a task with --task."""
    given = locals()
    _prepare_libraries(quiet, verbose)
    from kdcli.recipe import resolve, verb_of
    from kdcli.settings import CotrainRecipe, CotrainTaskRecipe

    on_task = task is not None or (recipe is not None and verb_of(recipe) == "cotrain-task")
    for name in ("community", "vocab_size", "eval_task") if on_task else ():
        if given[name]:
            raise UsageError(f"--{name.replace('_', '-')} belongs to co-training on text, not on a task")
    from kdcli.commands import cotrain as command

    own = {name: given[name] for name in ("teacher", "student", "base", "mode", "temperature", "standalone")}
    own |= {"weights": command.weights(weights)} | _training(given)
    if on_task:
        of_task = resolve(CotrainTaskRecipe, recipe=recipe, sets=sets or (), options=own | {"task": task})
        _print(command.run_on_task(of_task, _invocation(given)), as_json=json)
        return
    own |= {"community.model": community, "vocab_size": vocab_size, "eval.tasks": eval_task}
    resolved = resolve(CotrainRecipe, recipe=recipe, sets=sets or (), options=own)
    _print(command.run(resolved, _invocation(given)), as_json=json)


@app.command()
def evaluate(
    models: Annotated[list[str] | None, typer.Argument(help="Fine-tuned models; the first is the baseline.")] = None,
    task: Task = None,
    data: Data = None,
    mask_file: Annotated[
        list[str] | None, typer.Option("--mask", metavar="FILE", help="Judge MODEL under this mask; may be repeated.")
    ] = None,
    predictions: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every prediction as jsonl.")] = None,
    submission: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the GLUE server's file for the test split.")
    ] = None,
    min_metric: Annotated[
        list[str] | None, typer.Option(metavar="METRIC=VALUE", help="Exit 5 below this; may be repeated.")
    ] = None,
    output_dir: OutputDir = None,
    recipe: Recipe = None,
    sets: Sets = None,
    dtype: Dtype = None,
    device: Device = "auto",
    processes: Processes = None,
    overwrite: Overwrite = False,
    trust_remote_code: RemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Judge fine-tuned models on a labelled task and compare them."""
    given = locals()
    _prepare_libraries(quiet, verbose)
    from kdcli.recipe import gates, resolve
    from kdcli.settings import EvaluateRecipe

    options = {"models": models, "masks": mask_file, "task": task, "data.source": data, "dtype": dtype}
    resolved = resolve(EvaluateRecipe, recipe=recipe, sets=sets or (), options=options)
    least = gates(min_metric or ())
    invocation = _invocation(given)
    from kdcli.commands import evaluate as command

    extras = command.Extras(predictions=predictions, submission=submission, gates=least)
    result = command.run(resolved, invocation, extras)
    _print(result, as_json=json)
    if result is not None:
        command.hold_gates(result, extras)


@app.command()
def benchmark(
    models: Annotated[list[str] | None, typer.Argument(help="Hub ids, directories, or shapes such as 6x384.")] = None,
    baseline: Annotated[str | None, typer.Option(help="What the others are compared with; default the first.")] = None,
    preset: Annotated[str | None, typer.Option(help="minilm, tinybert or serving.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(metavar="NAME[-DTYPE]", help="torch, compile, onnx, openvino; e.g. onnx-int8.")
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Sequences; may be repeated.")] = None,
    seq_len: Annotated[list[int] | None, typer.Option(help="Tokens; may be repeated.")] = None,
    padding: Annotated[str | None, typer.Option(help="full, random, or data (lengths of --data).")] = None,
    task: Annotated[str | None, typer.Option(help="Judge every backend on this task too.")] = None,
    data: Data = None,
    project: Annotated[str | None, typer.Option(metavar="CARD,…", help="Estimate for cards, e.g. p100,k80.")] = None,
    portable: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a runner for old machines.")] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Report runs side by side; measures nothing; repeatable.")
    ] = None,
    max_latency_ms: Annotated[float | None, typer.Option(help="Exit 5 above this p50 in the first cell.")] = None,
    min_speedup: Annotated[float | None, typer.Option(help="Exit 5 below this speed-up in the first cell.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 6 when a measurement is unstable.")] = False,
    output_dir: OutputDir = None,
    recipe: Recipe = None,
    sets: Sets = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    trust_remote_code: RemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure latency of models or shapes beside a baseline, interleaved, on several backends."""
    given = locals()
    _prepare_libraries(quiet, verbose)
    from kdcli.recipe import resolve
    from kdcli.settings import BenchmarkRecipe

    options = {
        "models": models,
        "baseline": baseline,
        "preset": preset,
        "backends": backend,
        "batch_sizes": batch_size,
        "seq_lens": seq_len,
        "padding": padding,
        "project": project.split(",") if project else None,
        "task": task,
        "data.source": data,
    }
    resolved = resolve(BenchmarkRecipe, recipe=recipe, sets=sets or (), options=options)
    invocation = _invocation(given)
    from kdcli.commands import benchmark as command

    if portable is not None:
        _print(command.write_runner(resolved, portable), as_json=json)
        return
    if compare:
        _print(command.compare(resolved, invocation, compare), as_json=json)
        return
    result = command.run(resolved, invocation)
    _print(result, as_json=json)
    command.hold_gates(result, command.Gates(max_latency_ms, min_speedup, strict))


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or 'demo'; its head goes with it.")],
    file_format: Annotated[str, typer.Option("--format", metavar="onnx|openvino", help="What to write.")],
    int8: Annotated[bool, typer.Option("--int8", help="Quantise to 8 bits.")] = False,
    output_dir: OutputDir = None,
    overwrite: Overwrite = False,
    trust_remote_code: RemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a model as ONNX or OpenVINO, compared with torch before it is kept."""
    _prepare_libraries(quiet, verbose)
    from kdcli.commands import export as command

    result = command.run(
        model,
        format=file_format,
        int8=int8,
        output_dir=output_dir,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
    )
    _print(result, as_json=json)


@mask.command("info")
def mask_info(
    file: Annotated[Path, typer.Argument(help="A mask file.")],
    json: Json = False,
) -> None:
    """What a mask is of, and how much it keeps."""
    from kdcli.commands import mask as command

    _print(command.info(file), as_json=json)


@mask.command("diff")
def mask_diff(
    first: Annotated[Path, typer.Argument(help="A mask file.")],
    second: Annotated[Path, typer.Argument(help="Another one of the same base.")],
    json: Json = False,
) -> None:
    """How much two masks have in common."""
    from kdcli.commands import mask as command

    _print(command.diff(first, second), as_json=json)


Base = Annotated[str | None, typer.Option(help="Where the base is; default where the mask says.", metavar="MODEL")]
Masking = Annotated[str, typer.Option(help="local, global or proportional; of --sparsity.")]
Cut = Annotated[float | None, typer.Option(help="Cut the scores anew, so that this share goes.")]


@mask.command("apply")
def mask_apply(
    file: Annotated[Path, typer.Argument(help="A mask file, or an .npy of the SMP authors.")],
    base: Base = None,
    sparsity: Cut = None,
    masking: Masking = "proportional",
    output_dir: OutputDir = None,
    trust_remote_code: RemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Save the masked model, with zeros: it loads anywhere and is not faster."""
    _applied(locals(), compacted=False, drop_rows_below=0)


@mask.command("compact")
def mask_compact(
    file: Annotated[Path, typer.Argument(help="A mask file, or an .npy of the SMP authors.")],
    base: Base = None,
    sparsity: Cut = None,
    masking: Masking = "proportional",
    drop_rows_below: Annotated[int, typer.Option(help="Take rows with fewer weights for empty.")] = 0,
    output_dir: OutputDir = None,
    trust_remote_code: RemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Save the model without its empty rows, columns and heads: smaller and faster."""
    _applied(locals(), compacted=True, drop_rows_below=drop_rows_below)


def _distill_on_task(given: Mapping[str, Any]) -> None:
    from kdcli.recipe import ablations, task_recipe

    for name in ("assistant", "eval_task"):
        if given[name]:
            raise UsageError(f"--{name.replace('_', '-')} belongs to distilling on text, not on a task")
    text = given["general"] or given["corpus"]
    copies = True if given["augment_only"] or given["glove"] or given["augment_model"] else None
    own = {
        **{name: given[name] for name in ("teacher", "method", "task", "more_teachers")},
        "student.to": given["to"],
        "student.source": given["student"],
        "general.use": True if text else None,
        "general.run": given["general"],
        "general.source": given["corpus"],
        "augment.use": given["augment"] if given["augment"] is not None else copies,
        "augment.model": given["augment_model"],
        "augment.glove": given["glove"],
    }
    asked = {"recipe": given["recipe"], "sets": given["sets"] or (), "options": own | _training(given)}
    from kdcli.commands import distill as command

    resolved, invocation = task_recipe(**asked), _invocation(given)
    if given["augment_only"] is not None:
        _print(command.write_copies(resolved, invocation, given["augment_only"]), as_json=given["json"])
    elif given["ablate"] is not None:
        variants = {name: task_recipe(**asked, overrides=over) for name, over in ablations(given["ablate"]).items()}
        _print(command.run_variants(variants, invocation), as_json=given["json"])
    else:
        _print(command.run_on_task(resolved, invocation), as_json=given["json"])


def _refuse_without_task(given: Mapping[str, Any]) -> None:
    names = ("student", "general", "corpus", "more_teachers", "augment", "augment_model", "glove", "augment_only")
    for name in (*names, "ablate"):
        if given[name]:
            option = {"more_teachers": "also_teacher"}.get(name, name).replace("_", "-")
            raise UsageError(f"--{option} needs --task", "it belongs to distilling on a task")


def _applied(given: Mapping[str, Any], *, compacted: bool, drop_rows_below: int) -> None:
    _prepare_libraries(given["quiet"], given["verbose"])
    from kdcli.commands import mask as command

    names = ("base", "sparsity", "masking", "output_dir", "trust_remote_code")
    made = command.apply(
        given["file"], compacted=compacted, drop_rows_below=drop_rows_below, **{name: given[name] for name in names}
    )
    _print(made, as_json=given["json"])


@recipes.command("ls")
def recipes_ls() -> None:
    """List the shipped recipes."""
    from kdcli.recipe import summary

    for line in summary():
        typer.echo(line)


@recipes.command("show")
def recipes_show(name: Annotated[str, typer.Argument(help="Name or file.")], verb: str | None = None) -> None:
    """Print a recipe with every value resolved and its origin."""
    typer.echo(_resolved(name, verb).to_yaml(), nl=False)


@recipes.command("validate")
def recipes_validate(files: Annotated[list[Path], typer.Argument(help="YAML files.")], verb: str | None = None) -> None:
    """Check recipe files; exit 2 with one line for each thing that is wrong."""
    for file in files:
        _resolved(str(file), verb)
        typer.echo(f"{file}: ok")


@app.command()
def doctor(json: Json = False) -> None:
    """Show what this machine can run: devices, number formats, library versions."""
    from kdcli.bench.doctor import examine

    _print(examine(), as_json=json)


def _resolved(name: str, verb: str | None) -> Any:
    from kdcli.recipe import resolve, verb_of
    from kdcli.settings import VERBS

    verb = verb or verb_of(name)
    if verb not in VERBS:
        raise UsageError(f"no recipes for verb '{verb}'; known: {', '.join(VERBS)}")
    return resolve(VERBS[verb], recipe=name)


def _training(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that every training verb has, under the keys of its recipe."""
    names = ("max_steps", "epochs", "batch_size", "lr", "seed", "dtype")
    return {"data.source": given["data"]} | {f"train.{name}": given[name] for name in names}


def _invocation(given: Mapping[str, Any]) -> Any:
    """What is no part of a recipe, from the parameters of a verb."""
    import dataclasses

    from kdcli.settings import Invocation

    names = {field.name for field in dataclasses.fields(Invocation)}
    return Invocation(arguments=tuple(sys.argv[1:]), **{name: given[name] for name in names & set(given)})


def _prepare_libraries(quiet: bool, verbose: bool) -> None:
    """Libraries speak only when asked to, and share the processor; must run before they are imported."""
    # A thread that spins for another that is not running keeps it from running: beside another program the blocked
    # losses took 70 times as long, with this limit 5 times, and alone the limit costs nothing (docs/results.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from kdcli.progress import Progress

    Progress.console.quiet = quiet


def _print(result: Any, *, as_json: bool) -> None:
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


def main() -> None:
    """Entry point of `kdcli` and `python -m kdcli`."""
    app()
