"""Compare fine-tuning with transformers.Trainer, with the same rows, model, dtype and settings.

    python benchmarks/finetune.py speed MODEL DATA [--task sst2] [--steps 100] [--rounds 5]
    python benchmarks/finetune.py quality MODEL DATA --task cola --lr 1e-4 --seeds 3 [--dtype bf16]

DATA is a source that `kdcli finetune --data` accepts for the task. The Trainer uses its defaults
and `DataCollatorWithPadding`: the order is random, and each batch is padded to its longest row.
`speed` prints the rows per second of both and the median ratio of interleaved rounds, without
evaluation, checkpoints or logging. `quality` fine-tunes with both, once per seed, and prints the
metrics of both, computed by the same code.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

from kdcli.engine.device import TORCH_DTYPES
from kdcli.engine.session import Session, start
from kdcli.engine.train import train
from kdcli.models.model import Model
from kdcli.recipe.resolve import resolve
from kdcli.types import Job, Schedule
from kdcli.workloads import open_workload
from kdcli.workloads.finetuning import request_of
from kdcli.workloads.labelled import LabelledWorkload
from kdcli.workloads.settings import FinetuneRecipe

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "quality"))
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--judged-rows", type=int)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="number format of both"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    settings = {
        "model": options.model,
        "task": options.task,
        "data.source": options.data,
        "data.train_rows": options.rows,
        "data.judged_rows": options.judged_rows,
        "train.epochs": options.epochs,
        "train.lr": options.lr,
        "train.batch_size": options.batch,
        "train.warmup_fraction": 0.05,
        "train.dtype": options.dtype,
        "train.log_every": 10**6,
        "train.eval_every": 10**6,
        "train.checkpoint_every": 10**6,
    }
    recipe = resolve(FinetuneRecipe, recipe=None, options=settings).recipe
    session = Session(start(CPU, TORCH_DTYPES[options.dtype]), CPU)
    task, _ = open_workload(request_of(recipe, options.model), session)
    assert isinstance(task, LabelledWorkload)
    (speed if options.what == "speed" else quality)(task, recipe, options)


def speed(task: LabelledWorkload, recipe: FinetuneRecipe, options: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {"kdcli": [], "Trainer": []}
    for seed in range(options.rounds + 1):
        of_seed = seeded(recipe, seed)
        job, schedule = task.job(loaded(task, of_seed), of_seed.train, of_seed.keep)
        alone = replace(job, held_out=None, compute_metrics=None)
        seconds = ours(task, alone, schedule, options.steps)
        rows = sum(len(job.order.indices(step)) for step in range(1, options.steps + 1))
        of_trainer = options.steps * options.batch / theirs(task, of_seed, options.steps)
        of_round = {"kdcli": rows / seconds, "Trainer": of_trainer}
        if seed:  # The first round is for warm-up.
            for library, rate in of_round.items():
                rates[library].append(rate)
            shown = "  ".join(f"{library} {rate:.1f} rows/s" for library, rate in of_round.items())
            print(f"round {seed}  {shown}", flush=True)
    ratios = [a / b for a, b in zip(rates["kdcli"], rates["Trainer"], strict=True)]
    print(
        f"{options.task}, batch {options.batch}, {options.threads} threads: kdcli / Trainer "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
    )


def ours(task: LabelledWorkload, job: Job, schedule: Schedule, steps: int) -> float:
    return train(task.session, job, replace(schedule, stop_after=steps), None).seconds


def loaded(task: LabelledWorkload, recipe: FinetuneRecipe) -> Model:
    return task.load(str(recipe.model), head=recipe.head, seed=recipe.train.seed)


def theirs(task: LabelledWorkload, recipe: FinetuneRecipe, steps: int) -> float:
    return float(trainer(task, recipe, steps).train().metrics["train_runtime"])


def trainer(task: LabelledWorkload, recipe: FinetuneRecipe, steps: int) -> Trainer:
    """Return a Trainer with the same rows of tokens.

    Args:
        task: the tokenised rows.
        recipe: the settings.
        steps: number of steps; 0 trains for the recipe's number of epochs.
    """
    transformers.set_seed(recipe.train.seed)
    headed = loaded(task, recipe)
    rows = task.train_rows
    assert rows.labels is not None
    data: list[dict[str, object]] = []
    for row, (end, length) in enumerate(zip(rows.ends, rows.lengths, strict=True)):
        example: dict[str, object] = {"input_ids": rows.ids_T[end - length : end].tolist()}
        if rows.types_T is not None:
            example["token_type_ids"] = rows.types_T[end - length : end].tolist()
        data.append(example | {"labels": rows.labels[row].item()})
    arguments = TrainingArguments(
        output_dir=str(Path(tempfile.gettempdir()) / "kdcli-trainer"),
        seed=recipe.train.seed,
        num_train_epochs=recipe.train.epochs,
        max_steps=steps or -1,
        learning_rate=recipe.train.lr,
        per_device_train_batch_size=recipe.train.batch_size,
        weight_decay=recipe.train.weight_decay,
        warmup_steps=recipe.train.warmup_fraction,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=recipe.train.dtype == "bf16",
    )
    return Trainer(
        model=headed.model,
        args=arguments,
        train_dataset=data,
        data_collator=DataCollatorWithPadding(headed.tokenizer),
    )


def quality(task: LabelledWorkload, recipe: FinetuneRecipe, options: argparse.Namespace) -> None:
    metrics: dict[str, list[dict[str, float]]] = {"kdcli": [], "Trainer": []}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        of_seed = seeded(recipe, seed)
        headed = loaded(task, of_seed)
        job, schedule = task.job(headed, of_seed.train, of_seed.keep)
        train(task.session, replace(job, held_out=None), schedule, None)
        metrics["kdcli"].append(scores(task, headed))
        of_trainer = trainer(task, of_seed, 0)
        of_trainer.train()
        headed = loaded(task, of_seed)
        headed.model.load_state_dict(of_trainer.model.state_dict())
        metrics["Trainer"].append(scores(task, headed))
        last = "  ".join(f"{library} {of[-1]}" for library, of in metrics.items())
        print(f"seed {seed}  {last}", flush=True)
    for metric in metrics["kdcli"][0]:
        print(f"{options.task} {metric}")
        for library, of_seeds in metrics.items():
            values = [of_seed[metric] for of_seed in of_seeds]
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            shown = " ".join(f"{value:.4f}" for value in values)
            print(f"  {library:8} {statistics.fmean(values):.4f}{spread}  {shown}")


def scores(task: LabelledWorkload, model: Model) -> dict[str, float]:
    evaluations = task.score(model).evaluations
    names = task.data.task.metrics
    return {m: float(np.mean([row.metrics[m] for row in evaluations])) for m in names}


def seeded(recipe: FinetuneRecipe, seed: int) -> FinetuneRecipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})


if __name__ == "__main__":
    main()
