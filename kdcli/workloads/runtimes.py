"""Models that are judged by another runtime than torch: exports, and the backends of a benchmark."""

from collections.abc import Sequence

import numpy as np
from torch.nn.functional import pad

from kdcli.data.labelled.features import Array, TokenizedRows
from kdcli.deploy.environment import latency_threads
from kdcli.deploy.exported import Export, is_export, open_export
from kdcli.deploy.runners import Runner
from kdcli.engine.launch import Session
from kdcli.errors import UsageError
from kdcli.models.generation import load_generator
from kdcli.models.heads import (
    check_head,
    load_for_task,
    tokenizer_for,
    tuned_length,
)
from kdcli.models.model import Model
from kdcli.models.shape import positions_of
from kdcli.models.training_rows import training_rows
from kdcli.types import Batch, Task
from kdcli.workloads.predictions import Evaluator, Prediction
from kdcli.workloads.task import predict

FORWARD_ROWS = 16
LENGTH_STEP = 64  # Rows are padded to a multiple of this many tokens: torch.compile compiles anew for every shape


def load_judged(
    source: str,
    task: Task,
    *,
    label_map: Sequence[int] | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """A fine-tuned model, or an export, whose `model` is then an `Export`. Raises UsageError: see `load_for_task` and
    `open_export`; a `label_map` for an export."""
    how = {"trust_remote_code": trust_remote_code}
    if task.kind == "text":
        return load_generator(source, task, new_head=False, **how)
    if not is_export(source):
        return load_for_task(
            source, task, label_map=label_map, new_head=False, compacted=True, **how
        )
    export = open_export(source)
    if label_map is not None:
        raise UsageError(
            f"the labels of the export {source} cannot be reordered", "leave head.label_map out"
        )
    check_head(source, export.config, task)
    tokenizer = tokenizer_for(source, of_words=task.kind == "tokens", **how)
    note = f"run by {export.format}, {export.precision}"
    length = tuned_length(export.config, tokenizer, task)
    return Model(export, tokenizer, source, note, length, training_rows(source))


def judged(session: Session, evaluator: Evaluator, headed: Model) -> list[Prediction]:
    """A model's predictions for all evaluated examples, an export's by its own runtime on the CPU."""
    if isinstance(headed.model, Export):
        return runner_predictions(
            headed.model.runner(latency_threads()), evaluator, positions_of(headed.model.config)
        )
    return predict(session, evaluator, headed)


def runner_predictions(
    made: Runner, evaluator: Evaluator, positions: int | None
) -> list[Prediction]:
    """The predictions of a runner; `positions` is the longest row that the model reads."""
    return evaluator.features.predictions(runner_outputs(made, evaluator.features.rows, positions))


def runner_outputs(made: Runner, rows: TokenizedRows, positions: int | None) -> list[Array]:
    """The logits of each row by a runner; `positions` as in `runner_predictions`."""
    logits: list[Array] = []
    for begin in range(0, len(rows), FORWARD_ROWS):
        batch = rows.batch(np.arange(begin, min(begin + FORWARD_ROWS, len(rows))))
        outputs = made.output(made.call(made.prepare(padded(batch, rows.pad_id, positions))))
        # Start and end logits of a question answering head are stacked, [L, 2].
        logits += list(outputs[0] if len(outputs) == 1 else np.stack(outputs, -1))
    return logits


def padded(batch: Batch, pad_id: int, positions: int | None) -> Batch:
    """The inputs of a batch, padded to a multiple of `LENGTH_STEP` tokens, or to the model's positions."""
    length = batch["input_ids"].shape[1]
    longer = length + -length % LENGTH_STEP
    more = (longer if positions is None else min(longer, positions)) - length
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch]
    return {
        name: pad(batch[name], (0, more), value=pad_id if name == "input_ids" else 0)
        for name in names
    }
