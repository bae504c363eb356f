"""A teacher that two processes hold together is the teacher that each holds whole."""

import json
from types import SimpleNamespace

import processes
import pytest
import torch
from encoders import padded_batch, tiny_config, tiny_encoder
from forked import Forked
from own_files import log_of, refused, same_weights, succeeds
from transformers import AutoModelForMaskedLM

from kdcli.engine.launch import Session, start
from kdcli.models.capture import prepare_teacher
from kdcli.targets import sharded
from kdcli.targets.teacher import Teacher
from kdcli.types import Needs

CPU = torch.device("cpu")
EARLY = Needs(q=frozenset({2}), k=frozenset({2}), v=frozenset({2}), hidden=frozenset({0, 1}))
MORE = ("albert", "distilbert", "deberta-v2", "modernbert", "mpnet")


def local_bytes(model):
    return sum(p.to_local().nbytes for p in model.parameters())


def _compare(kind):
    """In one of two processes: the same signals, twice, whether the forward pass comes to its end or not."""
    session = Session(start(CPU, torch.float32), CPU, shard_teacher=True)
    for needs in (EARLY, Needs(masked_logits=True)):
        torch.manual_seed(0)
        model = AutoModelForMaskedLM.from_config(tiny_config(kind, num_hidden_layers=4))
        whole = Teacher.frozen("whole", prepare_teacher(model, torch.float32), needs, session)
        shared = Teacher.of_every_step("shared", model, needs, session)
        held = local_bytes(shared.captured.model)
        batch = padded_batch(model)
        batch["labels"] = batch["input_ids"].clone()
        for _ in range(2):
            one, other = whole.signals(batch), shared.signals(batch)
            assert local_bytes(shared.captured.model) == held, (
                "every gathered weight was given back"
            )
            for name in ("q", "k", "v", "hidden"):
                found, expected = getattr(other, name), getattr(one, name)
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[n], expected[n]) for n in expected)
            assert other.logits is None or torch.equal(other.logits, one.logits)
        size = sum(p.nbytes for p in model.parameters())
        assert 0.45 < held / size < 0.6, held / size
    print("alike")


@pytest.mark.parametrize(
    "kind", ["bert", *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE)]
)
def test_its_signals_are_those_of_the_whole_teacher_and_each_process_holds_half(kind):
    both = processes.as_ranks(lambda **environment: Forked(_compare, kind, **environment))
    said = [rank.communicate() for rank in both]
    assert [rank.returncode for rank in both] == [0, 0], said
    assert [out.splitlines()[-1:] for out, _ in said] == [["alike"]] * 2


@pytest.fixture
def on_text(model_dir, text_file):
    # Odd numbers of rows: one process has fewer, and none may wait for it.
    given = [
        "--to",
        "2x16",
        "--max-steps",
        "3",
        "--batch-size",
        "7",
        "--dtype",
        "fp32",
        "--set",
        "data.max_length=16",
    ]
    given += [
        "--set",
        "train.micro_batch_size=1",
        "--set",
        "train.eval_every=2",
        "--set",
        "data.held_out_blocks=5",
    ]
    given += ["--assistant", "none", "--set", "train.log_every=1", "--set", "measure.latency=false"]
    return ["distill", model_dir, "--data", text_file, *given]


def assert_alike(folder, *arguments):
    _, said = processes.two_ranks(
        *arguments, "--set", "teacher.shard=true", "-o", folder / "shared"
    )
    processes.two_ranks(*arguments, "-o", folder / "whole")
    assert log_of(folder / "shared") == log_of(folder / "whole")
    assert same_weights(folder / "shared", folder / "whole")
    return said


@pytest.mark.slow
def test_distilling_on_text(on_text, tmp_path):
    assert "are shared out over 2 processes" in assert_alike(tmp_path, *on_text)
    assert "teacher.shard: true  # --set" in (tmp_path / "shared" / "recipe.yaml").read_text(
        "utf-8"
    )
    # The recipe that a run leaves repeats it.
    recipe = ["--recipe", tmp_path / "shared" / "recipe.yaml"]
    assert "one process has nothing to share with" in refused(tmp_path, "distill", *recipe)


QUICK = [
    *("--max-steps", "4", "--batch-size", "9", "--dtype", "fp32", "--set", "data.max_length=24"),
    *(
        "--set",
        "measure.latency=false",
        "--set",
        "train.log_every=1",
        "--set",
        "train.eval_every=2",
    ),
]


@pytest.mark.slow
def test_distilling_on_a_task(asked, tmp_path):
    said = assert_alike(tmp_path, *asked(), "--set", "undistilled.use=false")
    assert "signals are read from" not in said


@pytest.mark.slow
def test_pruning_under_a_teacher(teacher_of, tmp_path):
    teacher = teacher_of("class")
    how = [
        "prune",
        teacher,
        "--teacher",
        teacher,
        "--task",
        "own",
        "--data",
        teacher.parent / "data",
        "--method",
    ]
    assert_alike(tmp_path, *how, "cap", *QUICK)


def test_what_cannot_be_shared_out_is_refused(on_text, tmp_path):
    for options, message in (
        (
            ["--method", "embedding", "--set", "teacher.shard=true"],
            "reads its teacher once, in one process",
        ),
        (["--set", "teacher.shard=2"], "'teacher.shard' must be a valid boolean, got 2 (--set)"),
        (["--set", "teacher.sharded=true"], "did you mean 'teacher.shard'?"),
    ):
        assert message in refused(tmp_path, *on_text, *options)
    assert "the recipe names no teacher" in refused(
        tmp_path, "prune", "demo", "--set", "teacher.shard=true"
    )


def test_a_dry_run_needs_one_process(on_text):
    estimate = json.loads(
        succeeds(*on_text, "--set", "teacher.shard=true", "--dry-run", "--json").stdout
    )
    assert set(estimate["models"]) == {"teacher", "student"}


@pytest.mark.parametrize(
    ("asked_for", "count", "free", "expected"),
    [
        (None, 2, 1.9, True),
        (None, 2, 2.1, False),
        (None, 2, None, False),
        (None, 1, 1.9, False),
        (False, 2, 0.1, False),
        (True, 2, None, True),
    ],
)
def test_it_is_shared_out_if_it_does_not_fit(monkeypatch, capfd, asked_for, count, free, expected):
    model = tiny_encoder("bert")
    size = sum(p.numel() for p in model.parameters()) * 2
    monkeypatch.setattr(sharded, "free_memory", lambda device: free and int(free * size))
    accelerator = SimpleNamespace(num_processes=count, mixed_precision="bf16")
    session = Session(accelerator, CPU, shard_teacher=asked_for)
    monkeypatch.setattr(Session, "any_rank", lambda self, flag: flag)
    assert sharded.to_be_sharded(model, session) is expected
    assert ("shared out over 2 processes" in capfd.readouterr().err) is expected
