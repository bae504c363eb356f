"""Text is tokenised before the processes of a run join: a group that waits for one of its processes
ends."""

import os
import shlex
from pathlib import Path

import pytest
from own_files import kdcli, said_by
from processes import two_ranks

from kdcli.data.text.shards import is_complete

TEXT = shlex.split(
    "--max-steps 2 --batch-size 8 --set data.max_length=16 --set data.held_out_blocks=8"
)


def tokenised(cache):
    """How many corpora are whole in the cache; none is half there."""
    made = [path for path in cache.glob("corpora/*") if path.is_dir()]
    assert all(is_complete(path) for path in made)
    return len(made)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--to", "9x16"], "9x16"),
        (["--to", "2x16", "--device", "cuda:7"], "cuda"),
        (["--to", "2x16", "--eval-task", "nosuch"], "nosuch"),
        (
            ["--to", "2x16", "--method", "distilbert", "--set", "data.mask.share=1.5"],
            "data.mask.share",
        ),
    ],
)
def test_mistakes_are_found_before_hours_of_tokenising(
    more, message, model_dir, text_file, tmp_path, cache
):
    result = kdcli("distill", model_dir, "--data", text_file, *TEXT, *more, "-o", tmp_path / "out")
    assert result.exit_code in (2, 3), result.output
    assert message in said_by(result)
    assert tokenised(cache) == 0


@pytest.mark.slow
def test_two_processes_tokenise_once_and_train_on_shards(model_dir, text_file, tmp_path, cache):
    common = ["distill", model_dir, "--to", "2x16", *TEXT, "--set", "measure.latency=false"]
    two_ranks(*common, "--data", text_file, "-o", tmp_path / "a")
    assert tokenised(cache) == 1
    result = kdcli(
        "tokenize", text_file, "--tokenizer", model_dir, "--workers", "1", "-o", tmp_path / "tokens"
    )
    assert result.exit_code == 0, result.output
    two_ranks(*common, "--data", tmp_path / "tokens", "-o", tmp_path / "b")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert models[0] == models[1]
    # A shard that is gone: both end, and the first says why.
    next(Path(tmp_path / "tokens").glob("train-*.bin")).unlink()
    _, said = two_ranks(*common, "--data", tmp_path / "tokens", "-o", tmp_path / "c", code=2)
    assert "is missing, one of 1 shards" in " ".join(said.split())
    assert not os.path.lexists(tmp_path / "c")
