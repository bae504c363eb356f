"""What needs a CUDA device: the losses there are those of the CPU, and every verb that computes
runs on it."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from typer.testing import CliRunner

from kdcli.cli import app
from kdcli.losses.relation import relation_kl

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QUICK = ["--device", "cuda:0", "--set", "measure.min_runs=3", "--set", "measure.min_seconds=0.1"]


def run(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    # Of one process accelerate keeps the number format, which the next command may choose anew.
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_relation_loss_is_that_of_the_cpu(dtype, near):
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 4, 33, 16), torch.randn(2, 4, 33, 8)
    mask = torch.ones(2, 33, dtype=torch.long)
    mask[1, 20:] = 0
    found = []
    for device, of_type in (("cpu", torch.float64), ("cuda", dtype)):
        own = student.to(device, of_type).requires_grad_()
        given = teacher.to(device, of_type)
        loss = relation_kl(given, given, own, own, mask.to(device))
        loss.backward()
        found.append((loss.detach().double().cpu(), own.grad.double().cpu()))
    (expected, gradient), (loss, other) = found
    torch.testing.assert_close(loss, expected, rtol=near, atol=0)
    assert float((other - gradient).norm() / gradient.norm()) < 10 * near


def test_distill(tmp_path):
    run("distill", "demo", "--to", "2x64", "--max-steps", "4", *QUICK, "-o", tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert report["training"]["peak_memory_bytes"] > 0
    assert {row["device"] for row in report["latency"]} == {"cuda:0"}


@pytest.mark.parametrize("verb", ["finetune", "prune"])
def test_a_task(tmp_path, verb):
    run(verb, "demo", "--task", "demo-topic", "--max-steps", "4", *QUICK, "-o", tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert {row["device"] for row in report["latency"]} == {"cuda:0"}
    if verb == "finetune":
        run(
            "evaluate",
            tmp_path / "out",
            "--task",
            "demo-topic",
            "--device",
            "cuda:0",
            "-o",
            tmp_path / "judged",
        )


def test_benchmark(tmp_path):
    shapes = ["2x64:256@4", "1x64:256@4"]
    run(
        "benchmark",
        *shapes,
        "--backend",
        "torch",
        "--backend",
        "torch-bf16",
        *QUICK,
        "-o",
        tmp_path / "out",
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert {row["dtype"] for row in report["latency"]} == {"fp32", "bf16"}
    assert all(row["peak_memory_bytes"] > 0 for row in report["latency"])
