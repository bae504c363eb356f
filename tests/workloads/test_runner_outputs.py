"""Batches of tokenised rows for a runner: rows of similar length together, with little padding."""

import numpy as np
import pytest

from kdcli.data.labelled.features import TokenizedRows
from kdcli.deploy.runners import Runner
from kdcli.workloads.embedder import FORWARD_ROWS, runner_outputs


def test_rows_without_tokens_are_padded_to_one():
    ends = np.zeros(FORWARD_ROWS, np.int64)
    rows = TokenizedRows(
        np.zeros(0, np.int32), None, ends, None, np.arange(FORWARD_ROWS), 0, pad_id=7, kind="class"
    )
    runner = Runner(
        lambda batch: batch, lambda batch: batch["input_ids"].numpy(), lambda ids_BL: [ids_BL], 1
    )
    outputs = runner_outputs(runner, rows, None)
    assert [output.tolist() for output in outputs] == [[7]] * FORWARD_ROWS


@pytest.mark.parametrize(
    ("step", "positions", "lengths"),
    [(1, None, [90, 3]), (64, None, [128, 64]), (64, 100, [100, 64])],
)
def test_rows_of_similar_length_share_a_batch(step, positions, lengths):
    of_rows = np.array([3, 90] * FORWARD_ROWS)
    ids = np.repeat(np.arange(len(of_rows)), of_rows).astype(np.int32)
    rows = TokenizedRows(
        ids, None, np.cumsum(of_rows), None, np.arange(len(of_rows)), 0, pad_id=0, kind="class"
    )
    shapes = []

    def call(batch):
        shapes.append(tuple(batch["input_ids"].shape))
        return batch["input_ids"].numpy()

    runner = Runner(lambda batch: batch, call, lambda ids_BL: [ids_BL[:, :1]], step)
    outputs = runner_outputs(runner, rows, positions)
    assert shapes == [(FORWARD_ROWS, length) for length in lengths]
    # The outputs have the order of the rows.
    assert [int(output[0]) for output in outputs] == list(range(len(of_rows)))
