"""The training loop: the same numbers whatever the micro-batch, the interruption or the number of students."""

from __future__ import annotations

import json
import math
import signal

import numpy as np
import pytest
import torch
from torch import nn

from kdcli.data.batches import BatchPlan
from kdcli.engine import start, train
from kdcli.errors import DivergedError, MachineError, Stopped, UsageError
from kdcli.run_dir import RunDir
from kdcli.types import Job, Plan, StepLoss, real_tokens

CPU = torch.device("cpu")


class Rows:
    """Examples of different real lengths: a mean over tokens is not a mean of means."""

    def __init__(self, n: int = 50):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, 20, (n, 6), generator=generator)
        self.mask = (torch.arange(6) < torch.randint(1, 7, (n, 1), generator=generator)).long()

    def __len__(self):
        return len(self.ids)

    def batch(self, indices):
        at = torch.from_numpy(np.asarray(indices))
        return {"input_ids": self.ids[at], "attention_mask": self.mask[at]}


class Net(nn.Module):
    def __init__(self, seed=0, dropout=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch):
        error = (self.out(self.dropout(self.embed(batch["input_ids"])))[..., 0] - batch["input_ids"] / 20) ** 2
        return (error * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


def job_of(nets, step=None):
    rows = Rows()

    def together(batch):
        terms = {name: net(batch) for name, net in nets.items()}
        return StepLoss(torch.stack(list(terms.values())).sum(), terms)

    return Job(nets, step or together, rows, BatchPlan(len(rows), 8, 0), Rows(9), real_tokens)


def plan_of(**changes):
    given = {"steps": 12, "batch_size": 8, "lr": 0.05, "warmup_steps": 3, "log_every": 1, "eval_every": 5}
    return Plan(**given | {"checkpoint_every": 4} | changes)


def run(nets, tmp_path=None, step=None, **changes):
    run_dir = None
    if tmp_path is not None:
        run_dir = RunDir.claim(tmp_path / "run", "x: 1\n", resume=True)
    return train(start(CPU, torch.float32), CPU, job_of(nets, step), plan_of(**changes), run_dir)


def weights(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def test_it_learns_and_logs(tmp_path):
    outcome = run({"net": Net()}, tmp_path)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert outcome.loss_last < 0.5 * outcome.loss_first
    assert [r["step"] for r in log] == list(range(13))
    assert set(log[1]) == {"step", "loss", "terms", "lr", "grad_norm", "tokens", "seconds"}
    assert [r["step"] for r in log if "held_out" in r] == [0, 5, 10, 12]
    assert log[-1]["held_out"]["loss"] < log[0]["held_out"]["loss"]
    assert log[-1]["tokens"] == outcome.tokens


def test_micro_batches_do_not_change_the_result():
    whole, parts = Net(), Net()
    run({"net": whole}, micro_batch_size=8)
    run({"net": parts}, micro_batch_size=3)
    torch.testing.assert_close(weights(whole), weights(parts), atol=1e-6, rtol=1e-5)


def test_the_first_step_is_adamw_on_the_clipped_gradient_of_the_global_mean():
    net, reference = Net(), Net().double()
    run({"net": net}, stop_after=1, clip=0.1)
    batch = Rows().batch(BatchPlan(50, 8, 0).indices(1))
    loss = reference(batch)
    loss.backward()
    gradients = [p.grad for p in reference.parameters()]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    lr = 0.05 / 3
    for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
        g = gradient * min(1.0, 0.1 / (norm + 1e-6))
        decay = 0.01 if parameter.dim() > 1 else 0.0
        parameter.data = parameter.data * (1 - lr * decay) - lr * g / (g.abs() + 1e-8)
    torch.testing.assert_close(weights(net).double(), weights(reference), atol=1e-5, rtol=1e-4)


def test_the_schedule_wastes_no_step_at_rate_zero():
    plan = plan_of(steps=10, warmup_steps=4, lr=1.0)
    rates = [plan.lr_at(s) for s in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_students_trained_together_move_as_each_would_alone():
    one, two, alone = Net(1), Net(2), Net(2)
    run({"one": one, "two": two}, clip=0.05)
    run({"two": alone}, clip=0.05)
    assert torch.equal(weights(two), weights(alone))


def stopping_at(net, step):
    """Training that fails at a step, like a power cut."""
    seen = [0]

    def fail(batch):
        if net.training:
            seen[0] += 1
            if seen[0] == step:
                raise KeyboardInterrupt
        loss = net(batch)
        return StepLoss(loss, {"net": loss})

    return fail


@pytest.mark.parametrize("cut", [2, 5, 11])
def test_resumed_is_bit_identical_to_uninterrupted(tmp_path, cut):
    whole, broken, again = (Net(dropout=0.3) for _ in range(3))
    run({"net": whole}, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        run({"net": broken}, tmp_path / "b", stopping_at(broken, cut))
    outcome = run({"net": again}, tmp_path / "b")
    assert torch.equal(weights(whole), weights(again))
    assert outcome.resumed_from_step == (None if cut <= 4 else 4 * ((cut - 1) // 4))

    def log(side):
        rows = [json.loads(x) for x in (tmp_path / side / "run" / "log.jsonl").read_text().splitlines()]
        return [{k: v for k, v in r.items() if k != "seconds"} for r in rows]

    assert log("a") == log("b")


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, capfd):
    whole, broken, again = (Net() for _ in range(3))
    run({"net": whole}, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        run({"net": broken}, tmp_path / "b", stopping_at(broken, 11))
    last = tmp_path / "b" / "run" / "checkpoints" / "step-00000008" / "tensors.safetensors"
    data = bytearray(last.read_bytes())
    data[-5] ^= 0xFF
    last.write_bytes(bytes(data))
    outcome = run({"net": again}, tmp_path / "b")
    assert outcome.resumed_from_step == 4
    assert torch.equal(weights(whole), weights(again))
    assert "step-00000008 is damaged" in capfd.readouterr().err.replace("\n", "")


def test_sigterm_leaves_a_checkpoint_to_resume_from(tmp_path):
    whole, net, again = Net(), Net(), Net()
    run({"net": whole}, tmp_path / "a")
    seen = [0]

    def terminate(batch):
        seen[0] += net.training
        if seen[0] == 6:
            signal.raise_signal(signal.SIGTERM)
        return StepLoss(net(batch), {"net": net(batch)})

    with pytest.raises(Stopped, match="stopped after step 6 of 12") as stopped:
        run({"net": net}, tmp_path / "b", terminate)
    assert stopped.value.exit_code == 75
    assert run({"net": again}, tmp_path / "b").resumed_from_step == 6
    assert torch.equal(weights(whole), weights(again))


def test_out_of_memory_halves_the_micro_batch_and_changes_nothing_else(capfd):
    whole, tight = Net(), Net()

    def small_memory(batch):
        if len(batch["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return StepLoss(tight(batch), {"net": tight(batch)})

    run({"net": whole})
    run({"net": tight}, step=small_memory)
    torch.testing.assert_close(weights(whole), weights(tight), atol=1e-6, rtol=1e-5)
    said = capfd.readouterr().err
    assert "micro-batch halved to 4" in said
    assert "micro-batch halved to 2" in said


def test_out_of_memory_with_one_sequence_is_said(tmp_path):
    def never(batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    net = Net()

    def only_in_training(batch):
        return never(batch) if net.training else StepLoss(net(batch), {"net": net(batch)})

    with pytest.raises(MachineError, match="one sequence at a time"):
        run({"net": net}, step=only_in_training)


def test_another_runtime_error_is_not_taken_for_lack_of_memory():
    def broken(batch):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        run({"net": Net()}, step=broken)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(value):
    net = Net()
    before = weights(net).clone()

    def burst(batch):
        loss = net(batch) * (value if net.training else 1.0)
        return StepLoss(loss, {"relation": loss})

    with pytest.raises(DivergedError, match=r"diverged at step 1: .*relation") as diverged:
        run({"net": net}, step=burst)
    assert diverged.value.exit_code == 4
    assert torch.equal(weights(net), before)


def test_frozen_parameters_stay():
    net = Net()
    net.embed.requires_grad_(False)
    before = net.embed.weight.detach().clone()
    run({"net": net})
    assert torch.equal(net.embed.weight, before)


def test_bf16_trains(tmp_path):
    net = Net()
    outcome = train(start(CPU, torch.bfloat16), CPU, job_of({"net": net}), plan_of(), None)
    assert outcome.loss_last < 0.7 * outcome.loss_first
    assert weights(net).dtype == torch.float32


def test_a_batch_smaller_than_the_processes_is_refused(monkeypatch):
    accelerator = start(CPU, torch.float32)
    monkeypatch.setattr(type(accelerator), "num_processes", 9)
    with pytest.raises(UsageError, match="one sequence for each of 9 processes"):
        train(accelerator, CPU, job_of({"net": Net()}), plan_of(), None)
