"""The training loop. It is independent of losses, pruners, models and tasks.

In an optimiser step, the order chooses the rows of the global batch. Each process takes its share
and splits it into micro-batches, and the job's step computes their losses. Each loss term is
weighted by the number of items that it averages, so the accumulated gradients are the gradients of
the mean over the *global* batch. Then the gradients of each module are clipped, and AdamW updates
the weights.

Every random choice is a pure function of the seed, the step, the rank and the micro-batch. A
resumed run therefore ends with the same bits as an uninterrupted one, without a stored generator
state. With several processes, torch's DistributedDataParallel sums the gradients during the
backward pass of the last micro-batch. It wraps the whole step, so a step may call any module any
number of times.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kdcli.engine.batches_ahead import BatchesAhead
from kdcli.engine.evaluation import CPU_MICRO_BATCH, evaluate_batches, to_device
from kdcli.engine.memory import begin_peak, free_cached, peak_so_far
from kdcli.engine.peers import peers
from kdcli.engine.processes import stop_requests
from kdcli.engine.progress import LogRecord, Progress
from kdcli.engine.run_dir import RunDir
from kdcli.engine.session import Fact, Session
from kdcli.engine.step import JobStep, longest_rows, param_groups, sparse_embeddings
from kdcli.engine.tensors import load_modules, load_optimizer, module_tensors, optimizer_tensors
from kdcli.errors import (
    ChildFailed,
    DivergedError,
    MachineError,
    Stopped,
    UsageError,
    is_out_of_memory,
)
from kdcli.messages import log
from kdcli.types import COUNTS, Array, Batch, Count, Examples, Job, Outcome, Schedule, counts_of

COMPARED_ROWS = 1_024
"""Number of rows per data set that processes compare before the first step, evenly spaced."""
MAX_SKIPPED = 50
"""Consecutive steps that the fp16 loss scaler may skip before the run counts as diverged. Each skip
halves its scale."""


def train(session: Session, job: Job, schedule: Schedule, run: RunDir | None) -> Outcome:
    """Train the job from the run directory's newest intact checkpoint, or from the start.

    Training ends after `schedule.steps` steps, or after `schedule.stop_after` steps if that is
    fewer. A run that ends at `stop_after` evaluates the held-out examples and writes a checkpoint
    there. `Outcome.finished` is then False. A later call with the same run directory and a higher
    `stop_after` continues the run, and reaches the same weights as a run without the break. A run
    of 0 steps only evaluates the held-out examples.

    Afterwards the modules hold the trained weights, in evaluation mode, on the session's device. If
    the job selects its weights by a metric, these are the best weights so far.

    Args:
        run: The claimed run directory. If None, nothing is written.

    Raises:
        UsageError: The processes differ in data or weights, or a batch has fewer rows than there
            are processes.
        Stopped: SIGTERM or Ctrl-C arrived, or one of several processes ran out of memory. There is
            a checkpoint of the last finished step.
        DivergedError: A loss or gradient is not finite. The step was not applied.
        MachineError: Out of memory with one sequence at a time, or the disk is full.
    """
    try:
        return _Run(session, job, schedule, run).train()
    finally:
        # Otherwise accelerate keeps the optimizer, with its moments, as long as the session.
        session.accelerator.free_memory()


@dataclass
class _State:
    """The part of a checkpoint that is not tensors.

    Attributes:
        micro_batch_size: The number of sequences that fit into memory.
        best: The value and step of the best evaluation so far.
        scaler: The state of the fp16 loss scaler.
        tokens, seconds, loss_first, loss_last: See `Outcome`.
    """

    tokens: int
    seconds: float
    loss_first: float | None
    loss_last: float | None
    micro_batch_size: int
    best: tuple[float, int] | None
    scaler: Mapping[str, object] | None


class _Run:
    """One training of one job."""

    def __init__(self, session: Session, job: Job, schedule: Schedule, run: RunDir | None) -> None:
        self.session = session
        self.job = job
        self.schedule = schedule
        self.run = run
        self.accelerator, self.device = session.accelerator, session.device
        self.processes = self.accelerator.num_processes
        self.rank = self.accelerator.process_index
        # Refuse too small a batch before any work.
        self._shares(1)
        self.outcome = Outcome()
        self.on_step_end = job.on_step_end or (lambda done: None)
        self.parameters: dict[str, list[nn.Parameter]] = {}
        for name, module in job.modules.items():
            module.to(self.device)
            self.parameters[name] = [p for p in module.parameters() if p.requires_grad]
        self.modules = JobStep(session, job)
        self.forward: nn.Module = self.modules
        groups = param_groups(job, schedule.weight_decay)
        betas = (0.9, schedule.beta2)
        optimizer = torch.optim.AdamW(groups, lr=schedule.lr, betas=betas, fused=True)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer, device_placement=False)
        share = math.ceil(schedule.batch_size / self.processes)
        default = CPU_MICRO_BATCH if self.device.type == "cpu" else share
        self.micro = min(share, schedule.micro_batch_size or default)
        self.skipped = 0
        self.best: tuple[float, int] | None = None
        # The step of the latest evaluation in float32, and its outputs.
        self.latest: tuple[int, list[Array]] | None = None

    def train(self) -> Outcome:
        """Train to the last step."""
        if self.processes > 1:
            self.session.agree(_facts_of(self.job, self.schedule))
        schedule, done = self.schedule, self._restore()
        if self.processes > 1 and schedule.steps:
            self._share_gradients(done + 1)
        self.on_step_end(done)
        last = min(schedule.steps, schedule.stop_after or schedule.steps)
        began = time.perf_counter() - self.outcome.seconds
        progress = Progress(schedule.steps, done, self.session.is_main)
        begin_peak(self.device)
        self.batches = BatchesAhead(self._micro_batches, self.device, last)
        # Sparse gradients are faster on a CPU, but cannot be summed over processes.
        sparse = self.device.type == "cpu" and self.processes == 1
        with (
            stop_requests() as stop,
            progress,
            sparse_embeddings(self.job.modules, use=sparse),
            self.batches,
        ):
            if done == 0:
                record = LogRecord(0)
                self._evaluate(record)
                self._log(record)
            for step in range(done + 1, last + 1):
                step_began = time.perf_counter()
                record = self._step_or_stop(step)
                self.outcome.step_seconds.append(time.perf_counter() - step_began)
                evaluates = step % schedule.eval_every == 0 or step == last
                if evaluates:
                    self._evaluate(record)
                self.outcome.seconds = record.seconds = time.perf_counter() - began
                progress.update(record)
                if evaluates or step % schedule.log_every == 0 or step == 1:
                    self._log(record)
                stopping = self.session.any_rank(stop.requested)
                if step % schedule.checkpoint_every == 0 or step == last or stopping:
                    self._save(step)
                    # A rank that ends while the main one is still writing would count as failed.
                    self.session.wait()
                # A run that was asked to stop in the last step before `stop_after` is not finished.
                if stopping and step < schedule.steps:
                    raise Stopped(
                        f"stopped after step {step} of {schedule.steps}",
                        "continue with --resume",
                    )
        self.modules.train(False)
        return self._finish(max(done, last))

    def _finish(self, steps: int) -> Outcome:
        outcome = self.outcome
        if self.best is not None and self.run is not None:
            outcome.best_step = self.best[1]
            best = self.run.load_best(outcome.best_step) if self.session.is_main else {}
            load_modules(self.job.modules, self.session.broadcast(best))
            self.on_step_end(outcome.best_step)
        outcome.steps, outcome.finished = steps, steps >= self.schedule.steps
        kept = steps if outcome.best_step is None else outcome.best_step
        if self.latest is not None and self.latest[0] == kept:
            outcome.outputs = self.latest[1]
        outcome.tokens_per_second = outcome.tokens / outcome.seconds if outcome.seconds else 0.0
        peak = torch.tensor([float(peak_so_far(self.device))], dtype=torch.float64)
        outcome.peak_memory_bytes = int(self.session.sum_over_ranks(peak)[0])
        return outcome

    def _share_gradients(self, step: int) -> None:
        """Find a micro-batch that fits on all ranks, then wrap the step for several processes.

        All processes then have the main one's weights.
        """
        self.modules.train(True)
        rows = longest_rows(self.job.examples, self._shares(step)[self.rank], self.micro)
        counts = dict.fromkeys(COUNTS, 1.0)
        while True:
            probe = [self.job.examples.batch(rows[: self.micro])]
            if self._gradients(step, probe, counts) is not None:
                break
            self._halve(step)
        # Let DDP look for unused parameters only if there are any, because it traverses the graph.
        unused = any(p.requires_grad and p.grad is None for p in self.modules.parameters())
        unused = self.session.any_rank(unused)
        self.optimizer.zero_grad(set_to_none=True)
        self.forward = DistributedDataParallel(
            self.modules, find_unused_parameters=unused, gradient_as_bucket_view=True
        )
        # Masks are buffers. They depend only on the scores, so they are the same on all ranks.
        self.forward.broadcast_buffers = False

    def _step_or_stop(self, step: int) -> LogRecord:
        """Take one step. If one of several processes runs out of memory, stop before the step."""
        try:
            return self._step(step)
        except (RuntimeError, ChildFailed) as error:
            if self.processes == 1 or (others := peers()) is None:
                raise
            short = isinstance(error, RuntimeError) and is_out_of_memory(error)
            if not short and others.failed() != Stopped.exit_code:
                raise
        raise self._without_memory(step)

    def _step(self, step: int) -> LogRecord:
        """Take one optimiser step on the global batch.

        The step waits for the device once: for the losses and gradient norms, before the update.
        Several processes also wait for the counts of the batch, and fp16 for the loss scaler.
        `Job.on_step_end` may wait, too.
        """
        micros = self.batches.of(step, self.micro)
        lr = self.schedule.lr_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self.modules.train(True)
        counts = torch.tensor([list(counts_of(m).values()) for m in micros], dtype=torch.float64)
        counts = self.session.sum_over_ranks(counts.sum(0))
        totals = dict(zip(COUNTS, counts.tolist(), strict=True))
        while (sums := self._gradients(step, micros, totals)) is None:
            self._halve(step)
            micros = self.batches.of(step, self.micro)
        losses, norms = self._losses_and_norms(sums)
        self._check_finite(step, losses, norms)
        if (others := peers()) is not None:
            others.check()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.on_step_end(step)
        outcome, loss = self.outcome, losses.pop("loss")
        outcome.tokens += int(totals["tokens"])
        outcome.loss_first = loss if outcome.loss_first is None else outcome.loss_first
        outcome.loss_last = loss
        norm = math.sqrt(sum(n * n for n in norms))
        return LogRecord(step, loss, losses, lr, norm, outcome.tokens)

    def _losses_and_norms(
        self, sums: Mapping[str, Tensor]
    ) -> tuple[dict[str, float], Sequence[float]]:
        """Clip the gradients, and return the losses of the global batch and the modules' norms."""
        for parameter in self.modules.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        self.accelerator.unscale_gradients(self.optimizer)
        norms = [
            # The norm of a module without gradients is on the CPU.
            nn.utils.clip_grad_norm_(parameters, self.schedule.clip).to(self.device)
            for parameters in self.parameters.values()
        ]
        values = self.session.sum_over_ranks(torch.stack(list(sums.values())))
        # Transfer both at once.
        numbers = torch.cat([values, torch.stack(norms)]).tolist()
        return dict(zip(sums, numbers, strict=False)), numbers[len(sums) :]

    def _shares(self, step: int) -> list[Array]:
        """Return each rank's rows of a step. The first rank has the most, the last the fewest."""
        rows = self.job.order.indices(step)
        if len(rows) < self.processes:
            raise UsageError(
                f"the {len(rows)} rows of a batch are fewer than the {self.processes} processes",
                "start fewer processes, or raise train.batch_size",
            )
        return np.array_split(rows, self.processes)

    def _micro_batches(self, step: int, micro: int) -> list[Batch]:
        """Return this rank's micro-batches of a step, each padded to its own longest row.

        Their sizes are nearly equal and at most `micro`. A rank with fewer rows may have fewer
        micro-batches, because the ranks only wait for each other in the last one.
        """
        share = self._shares(step)[self.rank]
        parts = np.array_split(share, math.ceil(len(share) / micro))
        return [self.job.examples.batch(part) for part in parts]

    def _gradients(
        self, step: int, micros: Sequence[Batch], totals: Mapping[Count, float]
    ) -> dict[str, Tensor] | None:
        """Accumulate this rank's share of the gradient of the global mean.

        Args:
            totals: The counts of the global batch.

        Returns:
            This rank's share of every logged value; None if any rank ran out of memory.
        """
        shared = self._shared(micros)
        if shared is None:
            return None
        sums: dict[str, Tensor] = {}
        out_of_memory = False
        # torch.manual_seed takes half a millisecond: it formats the stack once for every type of
        # accelerator that is absent.
        on_cpu = self.device.type == "cpu"
        set_seed = torch.default_generator.manual_seed if on_cpu else torch.manual_seed
        ddp = self.forward if isinstance(self.forward, DistributedDataParallel) else None
        try:
            for number, (micro, of_all) in enumerate(zip(micros, shared, strict=True)):
                set_seed(_mix(self.schedule.seed, step, self.rank, number))
                # A count may be 0, for example if the tokenizer makes no token of any word.
                weights = {
                    unit: count / (totals[unit] or 1.0) for unit, count in counts_of(micro).items()
                }
                is_last = number == len(micros) - 1
                with nullcontext() if ddp is None or is_last else ddp.no_sync():
                    loss, parts = self.forward(to_device(self.device, micro) | of_all, weights)
                    self.accelerator.backward(loss)
                for name, part in parts:
                    sums[name] = sums[name] + part if name in sums else part
        except RuntimeError as error:
            # The other processes may already wait for this one's gradients.
            if ddp is not None or not is_out_of_memory(error):
                raise
            out_of_memory = True
        return None if ddp is None and self.session.any_rank(out_of_memory) else sums

    def _shared(self, micros: Sequence[Batch]) -> list[Batch] | None:
        """Compute the parts of the whole batch that each micro-batch's loss needs.

        See `Job.shared`. The result is None if any rank ran out of memory.
        """
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
        rows = [len(micro["input_ids"]) for micro in micros]
        by_rank = torch.zeros(self.processes, dtype=torch.float64)
        by_rank[self.rank] = sum(rows)
        sizes = [int(size) for size in self.session.sum_over_ranks(by_rank).tolist()]
        begin, total = sum(sizes[: self.rank]), sum(sizes)
        of_all = {}
        for name in parts[0]:
            own = torch.cat([part[name] for part in parts])
            whole = own.new_zeros(total, *own.shape[1:])
            whole[begin : begin + len(own)] = own
            of_all[name] = self.session.sum_over_ranks(whole)
        places = torch.arange(begin, begin + sum(rows), device=self.device)
        return [of_all | {"own_rows": own_rows} for own_rows in torch.split(places, rows)]

    def _halve(self, step: int) -> None:
        """Halve the micro-batch after memory ran out."""
        self.optimizer.zero_grad(set_to_none=True)
        free_cached(self.device)
        if self.micro == 1:
            raise _out_of_memory(f"at step {step} with one sequence at a time")
        self.micro = math.ceil(self.micro / 2)
        log(
            f"out of memory: micro-batch halved to {self.micro}; "
            f"the global batch stays {self.schedule.batch_size}"
        )

    def _without_memory(self, step: int) -> Stopped:
        """Write a checkpoint of the step before the one in which a rank ran out of memory."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.micro == 1 or self.run is None:
            raise _out_of_memory(f"at step {step} with micro-batches of {self.micro}")
        self.micro = math.ceil(self.micro / 2)
        self._save(step - 1)
        return Stopped(
            f"stopped after step {step - 1}: one of {self.processes} processes ran out of memory; "
            f"a resumed run takes micro-batches of {self.micro}",
            "continue with --resume",
        )

    def _check_finite(self, step: int, losses: Mapping[str, float], norms: Sequence[float]) -> None:
        """Raise DivergedError if a loss or the norm of a module's gradients is not finite."""
        scaler, finite = self.accelerator.scaler, all(map(math.isfinite, norms))
        # In fp16 the scaler handles overflows: it skips the step and lowers its scale.
        self.skipped = 0 if finite or scaler is None else self.skipped + 1
        wrong = [name for name, value in losses.items() if not math.isfinite(value)]
        if not wrong and scaler is None:
            modules = zip(self.parameters, norms, strict=True)
            wrong = [f"the gradient of {name}" for name, n in modules if not math.isfinite(n)]
        if wrong or self.skipped > MAX_SKIPPED:
            kept = "; the last checkpoint is kept" if self.run else ""
            raise DivergedError(
                f"training diverged at step {step}: "
                f"{', '.join(wrong) or 'the gradient'} is not finite",
                f"lower train.lr, raise train.warmup_steps, or set train.dtype to fp32{kept}",
            )

    def _evaluate(self, record: LogRecord) -> None:
        """Add the held-out losses and metrics to a step's record, if anything is held out."""
        examples, step = self.job.held_out, record.step
        if examples is None or len(examples) == 0:
            return
        began = time.perf_counter()
        self.modules.train(False)
        size = self.job.held_out_size
        while True:
            micro = max(1, int(self.micro / size))
            output = evaluate_batches(self.session, self.job, examples, micro)
            if output is not None:
                break
            self._halve(step)
        record.held_out = output.losses
        if self.job.compute_metrics is not None:
            record.metrics = dict(self.job.compute_metrics(output.outputs))
            # Final scores are computed in float32.
            self.latest = (step, output.outputs) if output.in_float32 else None
            # The evaluation at `stop_after` is an extra one. It must not decide which weights are
            # kept: a run in several parts must keep the same weights as a run in one part.
            if step % self.schedule.eval_every == 0 or step == self.schedule.steps:
                self._keep_best(step, record.metrics)
        self.outcome.evaluation_seconds = time.perf_counter() - began

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the weights if they are the best so far. A resumed run repeats the same choices."""
        if self.job.best is None or self.run is None or step < self.job.best_from:
            return
        if not self.schedule.steps:  # There is nothing to choose from.
            return
        value = metrics[self.job.best]
        # NaN is worse than any number.
        rank = -math.inf if math.isnan(value) else value
        # Trained weights are kept if they are as good as the weights before the first step.
        if self.best is None or (rank, step > 0) > (self.best[0], self.best[1] > 0):
            self.best = (rank, step)
            if self.session.is_main:
                self.run.save_best(step, module_tensors(self.job.modules))
            self.session.wait()

    def _restore(self) -> int:
        """Load the newest intact checkpoint, if there is one, and return its step."""
        run, session, checkpoint = self.run, self.session, None
        if run and session.is_main:
            checkpoint = run.load_checkpoint()
            # Without a finished step, step 0 is evaluated again.
            run.cut_log(checkpoint.step if checkpoint else -1)
        step, saved = session.on_main(
            lambda: (checkpoint.step, checkpoint.state) if checkpoint else (0, None)
        )
        if saved is None:
            return 0
        tensors = session.broadcast(checkpoint.tensors if checkpoint else {})
        load_modules(self.job.modules, tensors)
        load_optimizer(self.optimizer, tensors)
        state = _State(**{key: saved[key] for key in _State.__annotations__})
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state.scaler)
        self.micro = min(self.micro, state.micro_batch_size)
        self.best = (state.best[0], state.best[1]) if state.best else None
        outcome = self.outcome
        outcome.tokens, outcome.seconds = state.tokens, state.seconds
        outcome.loss_first, outcome.loss_last = state.loss_first, state.loss_last
        outcome.resumed_from_step = step
        log(f"resumed after step {step}")
        return int(step)

    def _save(self, step: int) -> None:
        if self.run is None or not self.session.is_main:
            return
        tensors = module_tensors(self.job.modules) | optimizer_tensors(self.optimizer)
        scaler, outcome = self.accelerator.scaler, self.outcome
        state = _State(
            tokens=outcome.tokens,
            seconds=outcome.seconds,
            loss_first=outcome.loss_first,
            loss_last=outcome.loss_last,
            micro_batch_size=self.micro,
            best=self.best,
            scaler=scaler.state_dict() if scaler else None,
        )
        self.run.save_checkpoint(step, tensors, asdict(state))

    def _log(self, record: LogRecord) -> None:
        if self.run and self.session.is_main:
            self.run.log(record.to_json())
        self.accelerator.log(record.scalars(), step=record.step)


def _facts_of(job: Job, schedule: Schedule) -> dict[str, Fact]:
    """Return what must be equal in all processes of a run, by the name that an error shows."""
    facts: dict[str, Fact] = {"optimiser steps": schedule.steps}
    data = {"training examples": job.examples, "held-out examples": job.held_out}
    for name, examples in data.items():
        if examples is not None:
            facts[f"number of {name}"] = len(examples)
            facts[f"hash of the {name}"] = _digest(examples)
    for name, module in job.modules.items():
        for path, parameter in module.named_parameters():
            facts[f"weights {name}.{path}"] = float(parameter.detach().double().norm())
    return facts


def _digest(examples: Examples) -> str:
    """Return a hash of evenly spaced rows.

    Numbers that were computed for the rows are excluded, because they may differ by rounding.
    """
    digest = hashlib.sha256()
    if len(examples):
        rows = np.unique(np.linspace(0, len(examples) - 1, COMPARED_ROWS).astype(np.int64))
        for part in np.array_split(rows, math.ceil(len(rows) / CPU_MICRO_BATCH)):
            for name, tensor in sorted(examples.batch(part).items()):
                if name == "labels" or not tensor.is_floating_point():
                    digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _out_of_memory(when: str) -> MachineError:
    hint = "lower data.max_length, choose a smaller student, or a device with more memory"
    return MachineError(f"out of memory {when}", hint)


def _mix(*numbers: int) -> int:
    """Return one seed for several numbers, without the collisions of a sum."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
