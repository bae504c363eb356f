"""The training loop: the same numbers whatever the micro-batch, the interruption or the number of
students."""

import atexit
import dataclasses
import gc
import json
import math
import os
import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import Child, free_port, in_ranks
from torch import nn

from kdcli.data.batches import BatchOrder
from kdcli.engine import train as engine
from kdcli.engine.batches_ahead import BatchesAhead
from kdcli.engine.evaluation import evaluate_batches
from kdcli.engine.run_dir import BEST_WEIGHTS, CHECKPOINTS, RunDir
from kdcli.engine.session import Session, start
from kdcli.engine.train import train
from kdcli.errors import DivergedError, MachineError, Stopped, UsageError
from kdcli.types import Job, ParamGroup, Schedule, StepLoss, Term

CPU, MPS = torch.device("cpu"), torch.device("mps")


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
        error = (
            self.out(self.dropout(self.embed(batch["input_ids"])))[..., 0] - batch["input_ids"] / 20
        ) ** 2
        return (error * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


def session_of(dtype=torch.float32):
    return Session(start(CPU, dtype), CPU)


def job_of(nets, step=None):
    rows = Rows()

    def together(batch):
        return StepLoss({name: Term(net(batch), "tokens") for name, net in nets.items()})

    return Job(nets, step or together, rows, BatchOrder(len(rows), 8, 0), Rows(9))


def make_schedule(**changes):
    given = {
        "steps": 12,
        "batch_size": 8,
        "lr": 0.05,
        "warmup_steps": 3,
        "log_every": 1,
        "eval_every": 5,
    }
    return Schedule(**given | {"checkpoint_every": 4} | changes)


def run(nets, tmp_path=None, step=None, **changes):
    run_dir = tmp_path and RunDir.claim(tmp_path / "run", "x: 1\n", resume=True)
    return train(session_of(), job_of(nets, step), make_schedule(**changes), run_dir)


@pytest.fixture(params=["built in turn", "built ahead"])
def batches(request, monkeypatch):
    """Batches as on a CPU, and by a thread as on an accelerator that shares its memory."""
    if request.param == "built ahead":
        monkeypatch.setattr(
            engine, "BatchesAhead", lambda make, device, last: BatchesAhead(make, MPS, last)
        )
        yield
        assert not [
            thread.name for thread in threading.enumerate() if thread.name.startswith("batches")
        ]
    else:
        yield


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


def test_a_session_keeps_no_optimizer_after_a_training():
    def optimizers():
        gc.collect()
        return {id(each) for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer)}

    session, before = session_of(), optimizers()
    train(session, job_of({"net": Net()}), make_schedule(), None)
    assert optimizers() <= before


def test_micro_batches_do_not_change_the_result():
    whole, parts = Net(), Net()
    run({"net": whole}, micro_batch_size=8)
    run({"net": parts}, micro_batch_size=3)
    torch.testing.assert_close(weights(whole), weights(parts), atol=1e-6, rtol=1e-5)


def test_no_process_has_a_larger_micro_batch_than_asked():
    """Of 9 rows, the first of two processes has 5, and the other one 4."""

    def train_and_record():
        net, sizes = Net(), []

        def step(batch):
            sizes.append(len(batch["input_ids"]))
            return StepLoss({"net": Term(net(batch), "tokens")})

        job = dataclasses.replace(job_of({"net": net}, step), order=BatchOrder(50, 9, 0))
        job = dataclasses.replace(job, held_out=None)
        schedule = make_schedule(steps=3, batch_size=9, micro_batch_size=1)
        train(session_of(), job, schedule, None)
        return {"weights": weights(net), "sizes": torch.tensor(sizes)}

    (alone,) = in_ranks(1, train_and_record)
    ranks = in_ranks(2, train_and_record)
    for rank in ranks:
        assert rank["sizes"].max() == 1
        torch.testing.assert_close(rank["weights"], alone["weights"], atol=1e-6, rtol=1e-5)


def test_the_first_step_is_adamw_on_the_clipped_gradient_of_the_global_mean():
    net, reference = Net(), Net().double()
    run({"net": net}, stop_after=1, clip=0.1)
    batch = Rows().batch(BatchOrder(50, 8, 0).indices(1))
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
    schedule = make_schedule(steps=10, warmup_steps=4, lr=1.0)
    rates = [schedule.lr_at(s) for s in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


@pytest.mark.parametrize(("warmup", "expected"), [(0, [2.0] * 4), (2, [1.0, 2.0, 2.0, 2.0])])
def test_a_constant_rate_stays_after_the_warm_up(warmup, expected):
    schedule = make_schedule(steps=4, warmup_steps=warmup, lr=2.0, lr_schedule="constant")
    assert [schedule.lr_at(s) for s in range(1, 5)] == expected


def test_parameters_move_at_their_own_pace():
    # Adam's first step is the rate itself, whatever the gradient, plus the decay.
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    paces = {"net.embed.weight": ParamGroup(0.5), "net.out.weight": ParamGroup(0.1, decayed=False)}
    paces["net.out.bias"] = ParamGroup(2.0)
    job = dataclasses.replace(job_of({"net": net}), param_group=paces.__getitem__)
    train(
        session_of(), job, make_schedule(steps=1, warmup_steps=0, lr=0.01, weight_decay=0.3), None
    )
    for name, lr, decay in (
        ("embed.weight", 0.005, 0.3),
        ("out.weight", 0.001, 0.0),
        ("out.bias", 0.02, 0.0),
    ):
        moved = net.get_parameter(name).detach() - (1 - lr * decay) * before[name]
        seen = moved[moved.abs() > 1e-6] if name == "embed.weight" else moved
        torch.testing.assert_close(seen.abs(), torch.full_like(seen, lr), atol=1e-5, rtol=1e-3)


def test_after_is_told_what_is_done_and_by_a_resumed_run_too(tmp_path):
    net, told = Net(), []

    def after(done):
        told.append((done, weights(net).clone()))

    def go(resume, **changes):
        job = dataclasses.replace(job_of({"net": net}), on_step_end=after)
        run_dir = RunDir.claim(tmp_path / "run", "x: 1\n", resume=resume)
        return train(session_of(), job, make_schedule(**changes), run_dir)

    go(False, stop_after=4)
    assert [done for done, _ in told] == [0, 1, 2, 3, 4]
    of_four = told[-1][1]
    assert not torch.equal(of_four, told[-2][1])
    told.clear()
    go(True)
    assert [done for done, _ in told] == list(range(4, 13))
    assert torch.equal(told[0][1], of_four)
    assert torch.equal(told[-1][1], weights(net))


def test_a_batch_that_counts_nothing_moves_nothing():
    net = Net()
    before = weights(net)

    def step(batch):
        return StepLoss({"loss": Term(0.0 * net(batch), "labels")})

    job = dataclasses.replace(job_of({"net": net}, step), held_out=None)
    outcome = train(
        session_of(), job, make_schedule(steps=2, warmup_steps=0, weight_decay=0.0), None
    )
    assert torch.equal(weights(net), before)
    assert outcome.loss_last == 0


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
        return StepLoss({"net": Term(loss, "tokens")})

    return fail


@pytest.mark.usefixtures("batches")
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
        rows = [
            json.loads(x) for x in (tmp_path / side / "run" / "log.jsonl").read_text().splitlines()
        ]
        return [{k: v for k, v in r.items() if k != "seconds"} for r in rows]

    assert log("a") == log("b")


@pytest.mark.usefixtures("batches")
def test_sigterm_leaves_a_checkpoint_to_resume_from(tmp_path):
    whole, net, again = Net(), Net(), Net()
    run({"net": whole}, tmp_path / "a")
    seen = [0]

    def terminate(batch):
        seen[0] += net.training
        if seen[0] == 6:
            signal.raise_signal(signal.SIGTERM)
        return StepLoss({"net": Term(net(batch), "tokens")})

    with pytest.raises(Stopped, match="stopped after step 6 of 12") as stopped:
        run({"net": net}, tmp_path / "b", terminate)
    assert stopped.value.exit_code == 75
    assert run({"net": again}, tmp_path / "b").resumed_from_step == 6
    assert torch.equal(weights(whole), weights(again))


@pytest.mark.parametrize("stops", [(3, 8, None), (4, 5, 12), (8, 3, None)])
def test_a_run_in_parts_ends_with_the_bits_of_a_run_in_one_part(tmp_path, capfd, stops):
    """Learning rates, dropout and the selected weights do not depend on where a part ends."""

    def metrics(outputs):
        # The weights after step 3 would be the best if the evaluation at `stop_after` counted.
        score = {0: 0.0, 3: 9.0, 4: 0.1, 5: 0.2, 8: 9.0, 10: 0.4, 12: 0.3}[at["step"]]
        return {"score": score}

    def part(folder, stop):
        net = Net(dropout=0.3)
        job = dataclasses.replace(judged_job(net, metrics), on_step_end=count)
        run_dir = RunDir.claim(tmp_path / folder, "x: 1\n", resume=True)
        outcome = train(session_of(), job, make_schedule(stop_after=stop), run_dir)
        return net, outcome, run_dir

    def count(done):
        at["step"] = done

    at = {"step": 0}
    whole, outcome, _ = part("whole", None)
    assert (outcome.finished, outcome.best_step) == (True, 10)
    done = 0
    for stop in stops:
        net, outcome, run_dir = part("parts", stop)
        assert outcome.resumed_from_step == (done or None)
        done = max(done, stop or 12)
        assert (outcome.steps, outcome.finished) == (done, done == 12)
        assert run_dir.load_checkpoint().step == done
        assert "metrics" in next(r for r in run_dir.read_log() if r["step"] == done)
    assert outcome.best_step == 10
    assert torch.equal(weights(whole), weights(net))
    output = capfd.readouterr()
    assert "stopped" not in output.err
    assert "--resume" not in output.err


def test_sigterm_in_the_last_step_of_a_part_stops_the_run(tmp_path):
    net = Net()

    def terminate(batch):
        if net.training:
            signal.raise_signal(signal.SIGTERM)
        return StepLoss({"net": Term(net(batch), "tokens")})

    with pytest.raises(Stopped, match="stopped after step 1 of 12"):
        run({"net": net}, tmp_path, terminate, stop_after=1)


@pytest.mark.usefixtures("batches")
def test_a_batch_that_cannot_be_built_ends_the_run_at_its_step(tmp_path):
    class Damaged(Rows):
        def batch(self, indices):
            if np.array_equal(indices, order.indices(7)):
                raise UsageError("the shard is damaged")
            return super().batch(indices)

    rows, net = Damaged(), Net()
    order = BatchOrder(len(rows), 8, 0)
    job = dataclasses.replace(job_of({"net": net}), examples=rows, order=order)
    folder = RunDir.claim(tmp_path / "run", "x: 1\n", resume=True)
    with pytest.raises(UsageError, match=r"^the shard is damaged$"):
        train(session_of(), job, make_schedule(), folder)
    assert [
        json.loads(x)["step"] for x in (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    ] == list(range(7))


@pytest.mark.usefixtures("batches")
def test_out_of_memory_halves_the_micro_batch_and_changes_nothing_else(capfd):
    whole, tight = Net(), Net()

    def small_memory(batch):
        if len(batch["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return StepLoss({"net": Term(tight(batch), "tokens")})

    run({"net": whole})
    run({"net": tight}, step=small_memory)
    torch.testing.assert_close(weights(whole), weights(tight), atol=1e-6, rtol=1e-5)
    said = capfd.readouterr().err
    assert all(f"micro-batch halved to {size}" in said for size in (4, 2))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), MachineError, "one sequence at a time"),
        (RuntimeError("shapes do not match"), RuntimeError, "shapes do not match"),
    ],
)
def test_an_error_with_one_sequence_is_said_as_what_it_is(error, kind, message):
    net = Net()

    def only_in_training(batch):
        if net.training:
            raise error
        return StepLoss({"net": Term(net(batch), "tokens")})

    with pytest.raises(kind, match=message):
        run({"net": net}, step=only_in_training)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(value):
    net = Net()
    before = weights(net).clone()

    def burst(batch):
        loss = net(batch) * (value if net.training else 1.0)
        return StepLoss({"relation": Term(loss, "tokens")})

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


def test_bf16_trains():
    net = Net()
    outcome = train(session_of(torch.bfloat16), job_of({"net": net}), make_schedule(), None)
    assert outcome.loss_last < 0.7 * outcome.loss_first
    assert weights(net).dtype == torch.float32


class Held(Rows):
    """Held-out examples that say which they are, and of what lengths a batch was padded to."""

    def batch(self, indices):
        found = super().batch(indices)
        longest = int(found["attention_mask"].sum(1).max())
        return {name: tensor[:, :longest] for name, tensor in found.items()} | {
            "number": torch.from_numpy(indices)
        }


def judged_job(net, metrics, n=21):
    """A job whose outputs are the examples' own numbers and tokens; `metrics` gets them."""

    def step(batch):
        loss = net(batch)
        # As with labels of words, outputs are as wide as the batch was padded.
        outputs = (
            batch["number"][:, None] + batch["attention_mask"].double() / 2
            if "number" in batch
            else None
        )
        return StepLoss({"net": Term(loss, "tokens")}, outputs)

    return dataclasses.replace(
        job_of({"net": net}, step), held_out=Held(n), compute_metrics=metrics, best="score"
    )


class TestJudge:
    def train(self, tmp_path, metrics, n=21, net=None, **changes):
        run_dir = RunDir.claim(tmp_path / "run", "x: 1\n", resume=True)
        net = net or Net(dropout=0.3)
        outcome = train(
            session_of(), judged_job(net, metrics, n), make_schedule(**changes), run_dir
        )
        return outcome, net, run_dir

    @pytest.mark.parametrize("micro", [1, 4, 5, 8])
    def test_it_gets_every_output_once_in_order_whatever_the_micro_batch(self, tmp_path, micro):
        calls = []

        def metrics(outputs):
            calls.append([float(o[0]) for o in outputs])
            assert all(o.dtype == np.float32 for o in outputs)
            return {"score": float(len(outputs)), "other": 0.5}

        _, _, run_dir = self.train(tmp_path, metrics, micro_batch_size=micro)
        # The first token of every example is real.
        assert calls == [[i + 0.5 for i in range(21)]] * 4
        found = {r["step"]: r["metrics"] for r in run_dir.read_log() if "metrics" in r}
        assert found == {step: {"score": 21.0, "other": 0.5} for step in (0, 5, 10, 12)}

    def test_judging_changes_nothing_of_the_training(self, tmp_path):
        _, judged, _ = self.train(tmp_path, lambda outputs: {"score": 1.0}, eval_every=1)
        plain = Net(dropout=0.3)
        run({"net": plain})
        kept = Net(dropout=0.3)
        # The first of equal scores is the best, so these are the weights after one step.
        run({"net": kept}, stop_after=1)
        assert torch.equal(weights(judged), weights(kept))
        assert not torch.equal(weights(judged), weights(plain))

    def test_evaluations_before_the_first_step_that_counts_are_not_kept(self, tmp_path):
        values = iter([0.9, 0.8, 0.1, 0.2])
        net = Net(dropout=0.3)
        job = dataclasses.replace(judged_job(net, lambda _: {"score": next(values)}), best_from=6)
        outcome = train(
            session_of(),
            job,
            make_schedule(),
            RunDir.claim(tmp_path / "run", "x: 1\n", resume=True),
        )
        assert outcome.best_step == 12

    @pytest.mark.parametrize(
        ("scores", "best"),
        [
            ({5: 0.1, 10: 0.3, 12: 0.2}, 10),
            ({5: 0.3, 10: 0.3, 12: 0.3}, 5),
            ({5: -0.3, 10: -0.2, 12: -0.1}, 12),
            ({5: 0.0, 10: -1.0, 12: -1.0}, 5),
            ({5: math.nan, 10: -0.1, 12: math.nan}, 10),
            ({5: math.nan, 10: math.nan, 12: math.nan}, 5),
        ],
    )
    def test_the_weights_of_the_best_step_are_kept(self, tmp_path, scores, best):
        """Step 0 is judged too, and never kept, however good it seems."""
        values = iter([9.9, *scores.values()])
        outcome, net, run_dir = self.train(tmp_path, lambda _: {"score": next(values)})
        expected = Net(dropout=0.3)
        run({"net": expected}, stop_after=best)
        assert outcome.best_step == best
        assert torch.equal(weights(net), weights(expected))
        assert outcome.steps == 12
        assert not net.training
        assert (run_dir.path / CHECKPOINTS / BEST_WEIGHTS).exists()

    @pytest.mark.parametrize(
        ("scores", "best"), [([0.3, 0.2, 0.1, 0.2], 0), ([0.3, 0.3, 0.3, 0.2], 5)]
    )
    def test_the_start_is_kept_if_no_step_is_as_good(self, tmp_path, scores, best):
        values = iter(scores)
        net = Net(dropout=0.3)
        job = dataclasses.replace(judged_job(net, lambda _: {"score": next(values)}), best_from=0)
        outcome = train(session_of(), job, make_schedule(), RunDir.claim(tmp_path / "run", "x: 1"))
        expected = Net(dropout=0.3)
        if best:
            run({"net": expected}, stop_after=best)
        assert outcome.best_step == best
        assert torch.equal(weights(net), weights(expected))

    @pytest.mark.parametrize("in_float32", [True, False])
    def test_outputs_of_lower_precision_are_no_final_outputs(
        self, tmp_path, monkeypatch, in_float32
    ):
        def evaluated(*given):
            return dataclasses.replace(evaluate_batches(*given), in_float32=in_float32)

        monkeypatch.setattr(engine, "evaluate_batches", evaluated)
        values = iter([0.0, 1.0, 2.0, 3.0])
        outcome, *_ = self.train(tmp_path, lambda _: {"score": next(values)})
        assert outcome.best_step == 12
        assert (outcome.outputs is not None) == in_float32

    def test_without_a_metric_to_choose_by_the_last_are_kept(self, tmp_path):
        values = iter([0.0, 3.0, 2.0, 1.0])
        net, run_dir = Net(), RunDir.claim(tmp_path / "run", "x: 1\n")
        job = dataclasses.replace(judged_job(net, lambda _: {"score": next(values)}), best=None)
        outcome = train(session_of(), job, make_schedule(), run_dir)
        last = Net()
        run({"net": last})
        assert outcome.best_step is None
        assert torch.equal(weights(net), weights(last))
        assert not (run_dir.path / CHECKPOINTS / BEST_WEIGHTS).exists()

    @pytest.mark.parametrize("cut", [6, 9, 11])
    @pytest.mark.parametrize(
        "scores",
        [{5: 0.5, 10: 0.4, 12: 0.3}, {5: 0.4, 10: 0.5, 12: 0.3}, {5: 0.1, 10: 0.2, 12: 0.3}],
    )
    def test_a_resumed_run_keeps_the_same(self, tmp_path, cut, scores):
        """Also where the best one was judged before the checkpoint that it goes on from, or after
        it and again."""
        at = {"step": 0}

        def metrics(_):
            return {"score": scores.get(at["step"], 0.0)}

        def job(net, stop=None):
            at["step"], whole = 0, judged_job(net, metrics)

            def indices(step):
                at["step"] = step
                if step == stop:
                    raise KeyboardInterrupt
                return whole.order.indices(step)

            return dataclasses.replace(whole, order=SimpleNamespace(indices=indices))

        results = []
        for side, stops in (("whole", [None]), ("cut", [cut, None])):
            for stop in stops:
                net, run_dir = (
                    Net(dropout=0.3),
                    RunDir.claim(tmp_path / side, "x: 1\n", resume=True),
                )
                try:
                    outcome = train(session_of(), job(net, stop), make_schedule(), run_dir)
                except KeyboardInterrupt:
                    continue
            log = [{k: v for k, v in r.items() if k != "seconds"} for r in run_dir.read_log()]
            results.append((outcome.best_step, weights(net).tolist(), log))
        assert results[0] == results[1]
        assert results[0][0] == max(scores, key=scores.get)

    def test_a_best_file_that_is_gone_is_said(self, tmp_path):
        def metrics(_):
            (tmp_path / "run" / CHECKPOINTS / BEST_WEIGHTS).unlink(missing_ok=True)
            return {"score": 0.5}

        with pytest.raises(MachineError, match=r"best\.safetensors cannot be read"):
            self.train(tmp_path, metrics)


def leave_in_a_group():
    """End with a group of processes at work; print whether it is there until the end."""

    def report(when: str) -> None:
        # A write of a whole line cannot be mixed with another process's.
        os.write(1, f"group {when}: {torch.distributed.is_initialized()}\n".encode())

    atexit.register(report, "at the very end")
    start(CPU, torch.float32)
    report("at work")
    torch.distributed.barrier()
    sys.exit(3)


def test_a_process_leaves_its_group_before_it_ends_whatever_it_ends_with(capfd):
    # One that takes the group along into the interpreter's end aborts now and then: exit code 134
    # in place of its own.
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common = os.environ | place | {"ACCELERATE_USE_CPU": "true"}
    processes = [
        Child(leave_in_a_group, common | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"
    ]
    assert [process.wait() for process in processes] == [3, 3]
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["group at the very end: False"] * 2 + ["group at work: True"] * 2
