"""Run tokenised rows through a runner, such as an export's own runtime."""

from __future__ import annotations

import numpy as np
import torch

from kdcli.data.labelled.features import TokenizedRows
from kdcli.deploy.environment import latency_threads
from kdcli.deploy.export import RUNTIMES
from kdcli.deploy.exported import Export, RuntimeNetwork
from kdcli.deploy.runners import Runner
from kdcli.deploy.sessions import library
from kdcli.engine.session import Session
from kdcli.models.shape import positions_of
from kdcli.targets.outputs import stored_outputs
from kdcli.types import Array, Batch

FORWARD_ROWS = 16
"""Number of rows that a runner reads in one call."""


def network_outputs(network: RuntimeNetwork, rows: TokenizedRows, session: Session) -> list[Array]:
    """Return the logits of each row, computed by a network's own runtime.

    The outputs of an export are stored as those of a model in torch.
    """

    def compute() -> list[Array]:
        runner = network.runner(latency_threads())
        return runner_outputs(runner, rows, positions_of(network.config))

    if not isinstance(network, Export):
        return compute()

    def identity() -> object:
        runtime = library(RUNTIMES[network.format][-1], network.format).__version__
        return network.card.sha256, network.format, network.precision, runtime, latency_threads()

    return stored_outputs(identity, rows, session, compute)


def runner_outputs(runner: Runner, rows: TokenizedRows, positions: int | None) -> list[Array]:
    """Run all rows and return the logits of each row.

    Args:
        runner: Runs the model.
        rows: The tokenised rows.
        positions: Maximum row length of the model; None if there is no maximum.
    """
    logits: dict[int, Array] = {}
    # Rows of similar length need little padding.
    order = np.argsort(-rows.lengths, kind="stable")
    for begin in range(0, len(rows), FORWARD_ROWS):
        numbers = order[begin : begin + FORWARD_ROWS]
        batch = padded(rows.batch(numbers), rows.pad_id, positions, runner.length_step)
        outputs = runner.output(runner.call(runner.prepare(batch)))
        # The start and end logits of a question-answering head are stacked to [L, 2].
        of_rows = outputs[0] if len(outputs) == 1 else np.stack(outputs, -1)
        logits.update(zip(numbers.tolist(), of_rows, strict=True))
    return [logits[number] for number in range(len(rows))]


def padded(batch: Batch, pad_id: int, positions: int | None, step: int) -> Batch:
    """Return the inputs of a batch, padded to a multiple of `step` tokens, at least one token.

    The length stays within the model's positions.
    """
    length = batch["input_ids"].shape[1]
    # A text without words has no tokens if the tokenizer adds none.
    padded_length = max(1, length + -length % step)
    if positions is not None:
        padded_length = min(padded_length, positions)
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch]
    fillers = {name: pad_id if name == "input_ids" else 0 for name in names}
    return {
        name: torch.nn.functional.pad(batch[name], (0, padded_length - length), value=filler)
        for name, filler in fillers.items()
    }
