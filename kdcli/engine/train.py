"""THE training loop. It knows no loss, pruner, model or task.

One optimiser step: order.indices(step) -> this rank's share -> micro-batches -> step -> gradients, each term weighted
by what it counts, so that their sum is the gradient of the mean over the *global* batch -> clip each module -> AdamW.

Every random choice is a pure function of (seed, step, rank, micro-batch): a resumed run repeats an uninterrupted one
bit for bit without stored generator state. Of several processes torch's DistributedDataParallel sums the gradients
while the last micro-batch runs backward. It wraps the whole step, so a step may call any module any number of times.
"""

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kdcli.engine.batches_ahead import BatchesAhead
from kdcli.engine.cpu_kernels import fast_cpu_kernels
from kdcli.engine.evaluation import CPU_MICRO_BATCH, evaluate_batches, to_device
from kdcli.engine.launch import Session
from kdcli.engine.memory import begin_peak, free_cached, is_out_of_memory, peak_so_far
from kdcli.engine.peers import peers
from kdcli.engine.processes import stop_requests
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import ChildFailed, DivergedError, MachineError, Stopped, UsageError
from kdcli.types import (
    COUNTS,
    Batch,
    Count,
    Examples,
    Job,
    Outcome,
    ParamGroup,
    Schedule,
    counts_of,
)

SKIPS_ALLOWED = 50
"""Consecutive steps that the fp16 loss scaler may skip, halving its scale, before the run counts as diverged."""
COMPARED = 1_024
"""Rows of a data set that the processes compare before the first step."""
OUTCOME_SO_FAR = ("tokens", "seconds", "loss_first", "loss_last")
"""The parts of an `Outcome` that a checkpoint holds."""


def train(session: Session, job: Job, schedule: Schedule, run: RunDir | None) -> Outcome:
    """Train the job from the run directory's newest intact checkpoint, or from the start.

    Training ends after `schedule.steps` steps, or after `schedule.stop_after` steps if that is
    fewer. A run that ends at `stop_after` evaluates the held-out examples and writes a checkpoint
    there. `Outcome.finished` is then False, and a later call with the same run directory and a
    higher `stop_after` continues to the same weights as a run without the break.

    Afterwards the modules hold the trained weights, in eval mode, on the session's device. If the
    job selects its weights by a metric, these are the best weights so far.

    Raises:
        UsageError: the processes of the run differ in data or weights; more of them than rows in a batch.
        Stopped: SIGTERM, Ctrl-C, or one of several processes out of memory, after a checkpoint of the last step done.
        DivergedError: loss or gradient not finite; the step was not applied.
        MachineError: out of memory with one sequence at a time, or disk full.
    """
    return _Run(session, job, schedule, run).go()


class _Run:
    def __init__(self, session: Session, job: Job, schedule: Schedule, run: RunDir | None) -> None:
        self.session, self.job, self.schedule, self.run = session, job, schedule, run
        self.accelerator, self.device = accelerator, device = session.accelerator, session.device
        self.processes, self.rank = accelerator.num_processes, accelerator.process_index
        self._shares(1)
        self.outcome, self.modules = Outcome(), _Step(session, job)
        self.forward: nn.Module = self.modules
        self.after = job.on_step_end or (lambda done: None)
        self.parameters: dict[str, list[nn.Parameter]] = {}
        for name, module in job.modules.items():
            module.to(device)
            self.parameters[name] = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            self._groups(), lr=schedule.lr, betas=(0.9, schedule.beta2), fused=True
        )
        self.optimizer = accelerator.prepare_optimizer(optimizer, device_placement=False)
        local = math.ceil(schedule.batch_size / self.processes)
        self.micro = min(
            local, schedule.micro_batch_size or (CPU_MICRO_BATCH if device.type == "cpu" else local)
        )
        self.skipped = 0
        self.best: tuple[float, int] | None = None

    def _groups(self) -> list[dict[str, Any]]:
        """AdamW's parameter groups; `lr_factor` multiplies the schedule's learning rate."""
        groups: dict[ParamGroup, list[nn.Parameter]] = {}
        for name, module in self.job.modules.items():
            for path, parameter in module.named_parameters():
                if parameter.requires_grad:
                    group = (
                        self.job.param_group(f"{name}.{path}")
                        if self.job.param_group
                        else ParamGroup()
                    )
                    # Biases and normalisations are not decayed, as in BERT's own recipe.
                    group = replace(group, decayed=group.decayed and parameter.dim() > 1)
                    groups.setdefault(group, []).append(parameter)
        decay = self.schedule.weight_decay
        return [
            {
                "params": parameters,
                "weight_decay": decay if group.decayed else 0.0,
                "lr_factor": group.lr,
            }
            for group, parameters in groups.items()
        ]

    def go(self) -> Outcome:
        if self.processes > 1:
            self.session.agree(facts_of(self.job, self.schedule))
        schedule, done = self.schedule, self._restore()
        if self.processes > 1:
            self._share(done + 1)
        self.after(done)
        last = min(schedule.steps, schedule.stop_after or schedule.steps)
        began = time.perf_counter() - self.outcome.seconds
        progress = Progress(schedule.steps, done, self.session.is_main)
        begin_peak(self.device)
        self.batches = BatchesAhead(self._micros, self.device, last)
        # They pay on a CPU; gradients that are summed over processes cannot be sparse.
        sparse = self.device.type == "cpu" and self.processes == 1
        with (
            stop_requests() as stop,
            progress,
            _sparse_embeddings(self.job.modules, use=sparse),
            self.batches,
        ):
            if done == 0:
                self._log({"step": 0, **self._evaluation(0)})
            for step in range(done + 1, last + 1):
                step_began = time.perf_counter()
                record = self._step_or_stop(step)
                self.outcome.step_seconds.append(time.perf_counter() - step_began)
                evaluate = step % schedule.eval_every == 0 or step == last
                if evaluate:
                    record |= self._evaluation(step)
                self.outcome.seconds = record["seconds"] = time.perf_counter() - began
                progress.update(step, record)
                if evaluate or step % schedule.log_every == 0 or step == 1:
                    self._log(record)
                stopping = self.session.any_rank(stop.requested)
                if step % schedule.checkpoint_every == 0 or step == last or stopping:
                    self._checkpoint(step)
                # A run that was asked to stop in the last step before `stop_after` is not finished.
                if stopping and step < schedule.steps:
                    raise Stopped(
                        f"stopped after step {step} of {schedule.steps}",
                        "go on with the same command and --resume",
                    )
        self.modules.train(False)
        return self._finish(max(done, last))

    def _finish(self, steps: int) -> Outcome:
        outcome = self.outcome
        if self.best is not None and self.run is not None:
            outcome.best_step = self.best[1]
            best = self.run.load_best(outcome.best_step) if self.session.is_main else {}
            self._load_modules(self.session.from_main(best))
            self.after(outcome.best_step)
        outcome.steps, outcome.finished = steps, steps >= self.schedule.steps
        outcome.tokens_per_second = outcome.tokens / outcome.seconds if outcome.seconds else 0.0
        peaks = self.session.sum_over_ranks(
            torch.tensor([float(peak_so_far(self.device))], dtype=torch.float64)
        )
        outcome.peak_memory_bytes = int(peaks[0])
        return outcome

    def _share(self, step: int) -> None:
        """Settle on a micro-batch that fits on all ranks; then wrap the step, with the main rank's weights for all."""
        self.modules.train(True)
        rows = _longest(self.job, self._shares(step)[self.rank], self.micro)
        while (
            self._gradients(
                step, [self.job.examples.batch(rows[: self.micro])], dict.fromkeys(COUNTS, 1.0)
            )
            is None
        ):
            self._halve(step)
        # To look for parameters that a step leaves out costs a walk over its graph.
        idle = self.session.any_rank(
            any(p.requires_grad and p.grad is None for p in self.modules.parameters())
        )
        self.optimizer.zero_grad(set_to_none=True)
        self.forward = DistributedDataParallel(
            self.modules, find_unused_parameters=idle, gradient_as_bucket_view=True
        )
        # Masks are a function of the scores, and alike on all ranks.
        self.forward.broadcast_buffers = False

    def _step_or_stop(self, step: int) -> dict[str, Any]:
        """One optimiser step; without memory for it in one of several processes, a checkpoint of the step before."""
        try:
            return self._step(step)
        except (RuntimeError, ChildFailed) as error:
            if self.processes == 1 or (others := peers()) is None:
                raise
            short = isinstance(error, RuntimeError) and is_out_of_memory(error)
            if not short and others.failed() != Stopped.exit_code:
                raise
        raise self._without_memory(step)

    def _step(self, step: int) -> dict[str, Any]:
        """One optimiser step on the global batch -> its record in log.jsonl.

        The device is waited for once: for losses and gradient norms, before they are applied. Besides, by several
        processes for the counts of the batch, in fp16 by the loss scaler, and by what `Job.on_step_end` says.
        """
        micros = self.batches.of(step, self.micro)
        lr = self.schedule.lr_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self.modules.train(True)
        counted = torch.tensor([list(counts_of(m).values()) for m in micros], dtype=torch.float64)
        totals = dict(
            zip(COUNTS, self.session.sum_over_ranks(counted.sum(0)).tolist(), strict=True)
        )
        while (sums := self._gradients(step, micros, totals)) is None:
            self._halve(step)
            micros = self.batches.of(step, self.micro)
        for parameter in self.modules.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        self.accelerator.unscale_gradients(self.optimizer)
        clip = self.schedule.clip
        # The norm of no gradients is on the CPU.
        clipped = [
            nn.utils.clip_grad_norm_(ps, clip).to(self.device) for ps in self.parameters.values()
        ]
        values = self.session.sum_over_ranks(torch.stack(list(sums.values())))
        found = torch.cat([values, torch.stack(clipped)]).tolist()
        losses, norms = dict(zip(sums, found, strict=False)), found[len(sums) :]
        self._check_finite(step, losses, norms)
        if (others := peers()) is not None:
            others.check()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.after(step)
        self.outcome.tokens += int(totals["tokens"])
        total = losses.pop("loss")
        self.outcome.loss_first = (
            total if self.outcome.loss_first is None else self.outcome.loss_first
        )
        self.outcome.loss_last = total
        norm = math.sqrt(sum(n * n for n in norms))
        facts = {"step": step, "loss": total, "terms": losses, "lr": lr, "grad_norm": norm}
        return facts | {"tokens": self.outcome.tokens}

    def _shares(self, step: int) -> list[np.ndarray[Any, Any]]:
        """Each rank's rows of a step; the first has as many as any, the last as few."""
        indices = self.job.order.indices(step)
        if len(indices) < self.processes:
            raise UsageError(
                f"the {len(indices)} rows of a batch are less than one for each of {self.processes} processes",
                "start fewer processes, or raise train.batch_size",
            )
        return np.array_split(indices, self.processes)

    def _micros(self, step: int, micro: int) -> list[Batch]:
        """This rank's near-equal micro-batches of a step, each padded to its own longest row; all ranks have the same
        number of them."""
        shares = self._shares(step)
        count = min(math.ceil(len(shares[0]) / micro), len(shares[-1]))
        return [self.job.examples.batch(part) for part in np.array_split(shares[self.rank], count)]

    def _gradients(
        self, step: int, micros: Sequence[Batch], totals: Mapping[Count, float]
    ) -> dict[str, Tensor] | None:
        """Accumulate this rank's share of the global mean's gradient; None when any rank ran out of memory. `totals`:
        counts of the global batch."""
        shared = self._shared(micros)
        if shared is None:
            return None
        sums: dict[str, Tensor] = {}
        out_of_memory = False
        # torch.manual_seed formats the stack once for every absent accelerator type: half a millisecond.
        seed_generator = (
            torch.default_generator.manual_seed if self.device.type == "cpu" else torch.manual_seed
        )
        ddp = self.forward if isinstance(self.forward, DistributedDataParallel) else None
        try:
            for number, (micro, of_all) in enumerate(zip(micros, shared, strict=True), start=1):
                seed_generator(
                    _mix(self.schedule.seed, step, self.accelerator.process_index, number - 1)
                )
                # A batch may count nothing, such as words from which the tokenizer makes no token.
                shares = {
                    over: count / (totals[over] or 1.0) for over, count in counts_of(micro).items()
                }
                with nullcontext() if ddp is None or number == len(micros) else ddp.no_sync():
                    loss, parts = self.forward(to_device(self.device, micro) | of_all, shares)
                    self.accelerator.backward(loss)
                for name, part in parts:
                    sums[name] = sums[name] + part if name in sums else part
        except RuntimeError as error:
            # The other ranks may wait for the gradients of this one.
            if ddp is not None or not is_out_of_memory(error):
                raise
            out_of_memory = True
        return None if ddp is None and self.session.any_rank(out_of_memory) else sums

    def _shared(self, micros: Sequence[Batch]) -> list[Batch] | None:
        """What the loss of each micro-batch reads of all rows (`Job.shared`); None when any rank ran out of memory."""
        if self.job.shared is None:
            return [{} for _ in micros]
        parts: list[Mapping[str, Tensor]] = []
        out_of_memory = False
        try:
            with torch.no_grad():
                parts = [self.job.shared(to_device(self.device, micro)) for micro in micros]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            out_of_memory = True
        if self.session.any_rank(out_of_memory):
            return None
        ranks = torch.zeros(self.accelerator.num_processes, dtype=torch.float64)
        ranks[self.accelerator.process_index] = sum(len(micro["input_ids"]) for micro in micros)
        sizes = [int(size) for size in self.session.sum_over_ranks(ranks).tolist()]
        begin = sum(sizes[: self.accelerator.process_index])
        of_all = {}
        for name in parts[0]:
            own = torch.cat([part[name] for part in parts])
            whole = own.new_zeros(sum(sizes), *own.shape[1:])
            whole[begin : begin + len(own)] = own
            of_all[name] = self.session.sum_over_ranks(whole)
        places = torch.arange(
            begin, begin + sizes[self.accelerator.process_index], device=self.device
        )
        own_rows = torch.split(places, [len(micro["input_ids"]) for micro in micros])
        return [of_all | {"own_rows": own} for own in own_rows]

    def _halve(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        free_cached(self.device)
        if self.micro == 1:
            raise _out_of_memory(f"at step {step} with one sequence at a time")
        self.micro = math.ceil(self.micro / 2)
        Progress.log(
            f"out of memory: micro-batch halved to {self.micro}; the global batch stays {self.schedule.batch_size}"
        )

    def _without_memory(self, step: int) -> Stopped:
        """End the run after the step before this one, for which one of several ranks had no memory."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.micro == 1 or self.run is None:
            raise _out_of_memory(f"at step {step} with micro-batches of {self.micro}")
        self.micro = math.ceil(self.micro / 2)
        self._save(step - 1)
        return Stopped(
            f"stopped after step {step - 1}: one of {self.processes} processes ran out of memory",
            f"go on with the same command and --resume: it takes micro-batches of {self.micro}",
        )

    def _check_finite(self, step: int, losses: Mapping[str, float], norms: Sequence[float]) -> None:
        """Raise DivergedError when a loss, or the norm of a module's gradients, is not finite."""
        finite = all(map(math.isfinite, norms))
        # In fp16 the scaler handles an overflow: it skips the step and lowers its scale.
        self.skipped = 0 if finite or self.accelerator.scaler is None else self.skipped + 1
        lost = [name for name, value in losses.items() if not math.isfinite(value)]
        if not lost and not finite and self.accelerator.scaler is None:
            lost = [
                "the gradient of " + name
                for name, n in zip(self.parameters, norms, strict=True)
                if n - n != 0
            ]
        if lost or self.skipped > SKIPS_ALLOWED:
            raise DivergedError(
                f"training diverged at step {step}: {', '.join(lost) or 'the gradient'} is not finite",
                "lower train.lr, raise train.warmup_steps, or set train.dtype to fp32"
                + ("; the last checkpoint is kept" if self.run else ""),
            )

    def _evaluation(self, step: int) -> dict[str, Any]:
        """Held-out loss, terms and metrics; empty when nothing is held out."""
        examples = self.job.held_out
        if examples is None or len(examples) == 0:
            return {}
        began = time.perf_counter()
        self.modules.train(False)
        size = self.job.held_out_size
        while (
            found := evaluate_batches(
                self.session, self.job, examples, max(1, int(self.micro / size))
            )
        ) is None:
            self._halve(step)
        record: dict[str, Any] = {"held_out": found.losses}
        if self.job.compute_metrics is not None:
            record["metrics"] = dict(self.job.compute_metrics(found.outputs))
            # The evaluation at `stop_after` is an extra one. It must not decide which weights are
            # kept, or a run in several parts would keep others than a run in one part.
            if step % self.schedule.eval_every == 0 or step == self.schedule.steps:
                self._keep_best(step, record["metrics"])
        self.outcome.evaluation_seconds = time.perf_counter() - began
        return record

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the weights if they are the best so far; a resumed run repeats this at the same steps."""
        if self.job.best is None or self.run is None or step < self.job.best_from:
            return
        value = metrics[self.job.best]
        if self.best is None or value > self.best[0]:
            self.best = (value, step)
            if self.session.is_main:
                self.run.save_best(step, self._module_tensors())
            self.session.wait()

    def _module_tensors(self) -> dict[str, Tensor]:
        return {
            f"module/{n}/{k}": v
            for n, m in self.job.modules.items()
            for k, v in _tensors(m).items()
        }

    def _load_modules(self, tensors: Mapping[str, Tensor]) -> None:
        for name, module in self.job.modules.items():
            prefix = f"module/{name}/"
            found = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            assert found.keys() == _tensors(module).keys(), "a checkpoint of another model"
            module.load_state_dict(found, strict=False)

    def _restore(self) -> int:
        """Load the newest whole checkpoint, if any, and return its step."""
        run, session = self.run, self.session
        found = run.load_checkpoint(Progress.log) if run and session.is_main else None
        step, saved = session.in_main(lambda: (found.step, found.state) if found else (0, None))
        if run and session.is_main:
            # Without a step done, step 0 is evaluated again.
            run.cut_log(step or -1)
        if saved is None:
            return 0
        tensors = session.from_main(found.tensors if found else {})
        self._load_modules(tensors)
        state = self.optimizer.state_dict()
        state["state"] = {}
        for key, tensor in tensors.items():
            if key.startswith("optimizer/"):
                _, index, name = key.split("/")
                state["state"].setdefault(int(index), {})[name] = tensor
        self.optimizer.load_state_dict(state)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved["scaler"])
        self.micro = min(self.micro, saved["micro_batch_size"])
        for key in OUTCOME_SO_FAR:
            setattr(self.outcome, key, saved[key])
        self.best = tuple(saved["best"]) if saved["best"] else None
        self.outcome.resumed_from_step = step
        Progress.log(f"resumed after step {step}")
        return int(step)

    def _checkpoint(self, step: int) -> None:
        self._save(step)
        # A rank that ended while the main one still writes would count as failed.
        self.session.wait()

    def _save(self, step: int) -> None:
        if self.run is not None and self.session.is_main:
            tensors = self._module_tensors()
            for index, values in self.optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer/{index}/{name}": value for name, value in values.items()}
            scaler = self.accelerator.scaler
            state = {key: getattr(self.outcome, key) for key in OUTCOME_SO_FAR}
            state |= {"micro_batch_size": self.micro, "best": self.best}
            self.run.save_checkpoint(
                step, tensors, state | {"scaler": scaler.state_dict() if scaler else None}
            )

    def _log(self, record: Mapping[str, Any]) -> None:
        if self.run and self.session.is_main:
            self.run.log(record)
        scalars = {k: v for k, v in record.items() if isinstance(v, float)}
        for group in ("terms", "held_out", "metrics"):
            scalars |= {f"{group}/{k}": v for k, v in record.get(group, {}).items()}
        self.accelerator.log(scalars, step=record["step"])


class _Step(nn.Module):
    """A job's step as one module: one forward and one backward pass for `DistributedDataParallel`."""

    def __init__(self, session: Session, job: Job) -> None:
        super().__init__()
        self.session, self.job = session, job
        self.trained = nn.ModuleList(job.modules.values())

    def forward(
        self, batch: Batch, shares: Mapping[Count, float]
    ) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        """The loss of a micro-batch, and by name what is logged, weighted by the micro-batch's shares of the counts. Of
        several processes gradients are averaged, so the loss is as many times as large."""
        accelerator, device = self.session.accelerator, self.session.device
        with accelerator.autocast(), fast_cpu_kernels(device, self.job.modules.values()):
            loss = self.job.step(batch)
        weighted = [
            total * (shares[over] * accelerator.num_processes)
            for over, total in loss.totals().items()
        ]
        parts = [
            (name, value.detach().float() * shares[over]) for name, over, value in loss.parts()
        ]
        return torch.stack(weighted).sum(), parts


def facts_of(job: Job, schedule: Schedule) -> dict[str, Any]:
    """What the ranks of a run must have alike, with names for messages."""
    facts: dict[str, Any] = {"optimiser steps": schedule.steps}
    for name, examples in (
        ("training examples", job.examples),
        ("held-out examples", job.held_out),
    ):
        if examples is not None:
            facts |= {f"number of {name}": len(examples), f"hash of the {name}": _digest(examples)}
    for name, module in job.modules.items():
        facts |= {
            f"weights {name}.{path}": float(p.detach().double().norm())
            for path, p in module.named_parameters()
        }
    return facts


def _digest(examples: Examples) -> str:
    """A hash of evenly spread rows, without what was computed for them, which may differ by rounding."""
    digest, rows = (
        hashlib.sha256(),
        np.unique(np.linspace(0, max(0, len(examples) - 1), COMPARED).astype(np.int64)),
    )
    for part in (
        np.array_split(rows, math.ceil(len(rows) / CPU_MICRO_BATCH)) if len(examples) else ()
    ):
        for name, tensor in sorted(examples.batch(part).items()):
            if name == "labels" or not tensor.is_floating_point():
                digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _longest(job: Job, rows: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """The longest examples if their lengths are known; else of these rows, as all are alike."""
    lengths = getattr(job.examples, "lengths", None)
    return (rows if lengths is None else np.argsort(lengths)[::-1])[:count]


def _out_of_memory(when: str) -> MachineError:
    hint = "lower data.max_length, choose a smaller student, or a device with more memory"
    return MachineError(f"out of memory {when}", hint)


@contextmanager
def _sparse_embeddings(modules: Mapping[str, nn.Module], *, use: bool) -> Iterator[None]:
    """Embeddings get sparse gradients per micro-batch, made dense once a step (docs/results.md)."""
    found = [
        m
        for module in modules.values()
        for m in module.modules()
        if isinstance(m, nn.Embedding) and not m.sparse
    ]
    for embedding in found:
        embedding.sparse = use
    try:
        yield
    finally:
        for embedding in found:
            embedding.sparse = False


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's state, each tied tensor under its first name only."""
    found: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict().items():
        found.setdefault(
            (tensor.data_ptr() if tensor.numel() else id(tensor), tensor.shape), (name, tensor)
        )
    return dict(found.values())


def _mix(*numbers: int) -> int:
    """One seed from several numbers, without the collisions of a sum."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
