"""Rows in which a tokenizer finds no token cannot be trained on."""

import numpy as np
import pytest

from kdcli.errors import UsageError
from kdcli.recipe.sections import TrainSettings
from kdcli.workloads.training import bucketed


def test_rows_without_any_token_are_refused():
    with pytest.raises(UsageError, match="none of the 40 rows has a token"):
        bucketed(np.zeros(40, int), TrainSettings(batch_size=4, max_steps=2), 2)
    assert (
        bucketed(np.eye(1, 40, dtype=int)[0], TrainSettings(batch_size=4), 2).steps_per_pass == 10
    )
