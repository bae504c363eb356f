"""Compare three ways to run a distillation step, for 12x768 to 6x384 and a batch of 16 x 128.

    python benchmarks/whole_step.py [--rounds 5] [--textbrewer] [--dropout 0] [--device cpu]

* kdcli: the step of the command. The teacher stops at its last q, k, v. Matrix products use the
  dtype that `--dtype auto` chooses, and the other one. The relation loss is blocked.
* plain: the teacher's full forward pass in float32 with `output_attentions=True`, and the plain
  formulas for both relations.
* TextBrewer (`pip install textbrewer tensorboard`): the step of its GeneralDistiller with both
  relations as matches, in float32.

The student has BERT's dropout of 0.1, or the value of `--dropout`. Drawing dropout is expensive on
a CPU, and the recipes for two cores do not use it.

Prints the ratios of tokens per second (medians of interleaved rounds), the step's FLOP/s as a share
of the machine's rate for matrix products, and the time for two students of one teacher pass
compared with two runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from kdcli.engine.cpu_kernels import fast_cpu_kernels
from kdcli.engine.device import choose_device, choose_dtype
from kdcli.losses import build_objective
from kdcli.models.capture import capture, prepare_teacher
from kdcli.models.card import multiply_adds
from kdcli.models.grammar import parse_shape
from kdcli.models.shape import build_student, shape_of
from kdcli.types import Needs, Start

BATCH, LENGTH = 16, 128
CPU = torch.device("cpu")
Step = Callable[[Tensor], None]
"""Token ids [B, L] -> one step of the optimiser."""


def teacher_and_student(
    shape: str = "6x384",
    *,
    dropout: float,
    device: torch.device = CPU,
    config: BertConfig | None = None,
) -> tuple[BertModel, BertModel]:
    torch.manual_seed(0)
    teacher = BertModel(config or BertConfig(), add_pooling_layer=False)
    student = build_student(
        teacher, parse_shape(shape, shape_of(teacher.config)), Start(dropout=dropout)
    ).model
    return teacher.eval().to(device), student.train().to(device)


def optimizer_of(*students: BertModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for s in students for p in s.parameters()], lr=1e-4, fused=True)


def kdcli_step(
    shapes: list[str],
    dtype: torch.dtype,
    *,
    dropout: float,
    device: torch.device = CPU,
    config: BertConfig | None = None,
    kernel: str = "torch",
) -> Step:
    pair_of = partial(teacher_and_student, dropout=dropout, device=device, config=config)
    teacher, _ = pair_of(shapes[0])
    students = [pair_of(s)[1] for s in shapes]
    of_teacher = shape_of(teacher.config)
    objectives = [
        build_objective("minilm", {}, of_teacher, shape_of(s.config), kernel=kernel)
        for s in students
    ]
    needs = Needs()
    for objective in objectives:
        needs |= objective.teacher_needs
    hear_teacher = capture(prepare_teacher(teacher, dtype), needs)
    hear = [capture(s, o.student_needs) for s, o in zip(students, objectives, strict=True)]
    optimizer = optimizer_of(*students)

    def step(ids_BL: torch.Tensor) -> None:
        with torch.no_grad():
            signals = hear_teacher({"input_ids": ids_BL})
        autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        with autocast, fast_cpu_kernels(device, students):
            terms = [
                term
                for o, h in zip(objectives, hear, strict=True)
                for term in o.terms(signals, h({"input_ids": ids_BL})).values()
            ]
            loss = torch.stack(terms).sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_([p for s in students for p in s.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_relation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores: Tensor = x @ y.transpose(-1, -2) / x.shape[-1] ** 0.5
    return scores.softmax(-1)


def plain_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    loss: Tensor = (p * (p.clamp_min(1e-12).log() - q.clamp_min(1e-12).log())).sum(-1).mean()
    return loss


def with_values(model: BertModel) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function that computes a model's last attention probabilities and values.

    It uses eager attention for the probabilities and a hook for the values.
    """
    model.set_attn_implementation("eager")
    kept: dict[str, Tensor] = {}
    heads = model.config.num_attention_heads

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        kept["v"] = output.view(*output.shape[:2], heads, -1).transpose(1, 2)

    model.encoder.layer[-1].attention.self.value.register_forward_hook(keep)

    def run(ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        return model(input_ids=ids_BL, output_attentions=True).attentions[-1], kept["v"]

    return run


def plain_step(*, dropout: float, device: torch.device) -> Step:
    teacher, student = teacher_and_student(dropout=dropout, device=device)
    run_teacher, run_student = with_values(teacher), with_values(student)
    optimizer = optimizer_of(student)

    def step(ids_BL: torch.Tensor) -> None:
        with torch.no_grad():
            a_t, v_t = run_teacher(ids_BL)
        a_s, v_s = run_student(ids_BL)
        loss = plain_kl(a_t, a_s) + plain_kl(plain_relation(v_t, v_t), plain_relation(v_s, v_s))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def textbrewer_step(*, dropout: float) -> Step:
    from textbrewer import DistillationConfig, GeneralDistiller, TrainingConfig
    from textbrewer.presets import MATCH_LOSS_MAP

    teacher, student = teacher_and_student(dropout=dropout)
    run_teacher, run_student = with_values(teacher), with_values(student)
    MATCH_LOSS_MAP["relation_kl"] = lambda s, t, mask=None: plain_kl(t, s)
    matches = [
        {"layer_T": 0, "layer_S": 0, "feature": feature, "loss": "relation_kl", "weight": 1}
        for feature in ("attention", "hidden")
    ]
    optimizer = optimizer_of(student)

    class Wrapped(nn.Module):
        def __init__(
            self, model: BertModel, run: Callable[[Tensor], tuple[Tensor, Tensor]]
        ) -> None:
            super().__init__()
            self.model, self.run = model, run

        def forward(self, input_ids: Tensor) -> dict[str, list[Tensor]]:
            a, v = self.run(input_ids)
            return {"attention": [a], "hidden": [plain_relation(v, v)]}

    distiller = GeneralDistiller(
        train_config=TrainingConfig(
            device="cpu", output_dir="/tmp/textbrewer", log_dir=None, ckpt_steps=10**9
        ),
        distill_config=DistillationConfig(kd_loss_weight=0, intermediate_matches=matches),
        model_T=Wrapped(teacher, run_teacher),
        model_S=Wrapped(student, run_student),
        adaptor_T=lambda batch, out: out,
        adaptor_S=lambda batch, out: out,
    )

    def step(ids_BL: torch.Tensor) -> None:
        # TextBrewer's forward pass and losses, without the rest of its training loop.
        loss, _ = distiller.train_on_batch({"input_ids": ids_BL}, {})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_flops(teacher: BertModel, student: BertModel, batch: int) -> float:
    """Return the floating-point operations of a step on rows of 128 tokens.

    The last layer of both models stops at its q, k and v. A backward pass counts as two forward
    passes.
    """
    of_teacher, of_student = (
        multiply_adds(model) * (1 - 0.75 / model.config.num_hidden_layers)
        for model in (teacher, student)
    )
    flops: float = 2 * batch * (of_teacher + 3 * of_student)
    return flops


def product_rate(dtype: torch.dtype, device: torch.device = CPU) -> float:
    """Return the FLOP/s of a 2048x768x3072 product, the best of ten."""
    a, b = torch.randn(2048, 768).to(device, dtype), torch.randn(768, 3072).to(device, dtype)
    best = min(timed(lambda: a @ b) for _ in range(10))
    return 2 * 2048 * 768 * 3072 / best


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call, with the work that it starts on a GPU."""
    began = time.perf_counter()
    call()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--textbrewer", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = choose_device(options.device)
    auto = choose_dtype("auto", device)
    other = torch.float32 if auto == torch.bfloat16 else torch.bfloat16
    ours = partial(kdcli_step, dropout=options.dropout, device=device)
    ways = {
        "kdcli": ours(["6x384"], auto),
        f"kdcli {str(other)[6:]}": ours(["6x384"], other),
        "plain": plain_step(dropout=options.dropout, device=device),
        "kdcli 6x384+4x312": ours(["6x384", "4x312:1200"], auto),
        "kdcli 4x312": ours(["4x312:1200"], auto),
    }
    if options.textbrewer:
        ways["TextBrewer"] = textbrewer_step(dropout=options.dropout)
    ids_BL = torch.randint(1000, 30000, (BATCH, LENGTH), device=device)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds + 1):
        for name, step in ways.items():
            seconds[name].append(timed(partial(step, ids_BL)))
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    print(f"--dtype auto is {str(auto)[6:]} here")
    for name, value in median.items():
        paired = [v / k for v, k in zip(seconds[name][1:], seconds["kdcli"][1:], strict=True)]
        ratio = (
            f"takes {statistics.median(paired):.2f}x the time of kdcli "
            f"({min(paired):.2f}-{max(paired):.2f})"
        )
        print(
            f"{name:20} {BATCH * LENGTH / value:8.0f} tokens/s   {'' if name == 'kdcli' else ratio}"
        )
    both = [
        b / (x + y)
        for b, x, y in zip(
            *(seconds[n][1:] for n in ("kdcli 6x384+4x312", "kdcli", "kdcli 4x312")), strict=True
        )
    ]
    print(f"two students of one teacher pass cost {statistics.median(both):.2f} of two runs")
    flops = step_flops(*teacher_and_student(dropout=options.dropout), BATCH)
    rate = product_rate(auto, device)
    print(
        f"about {flops / median['kdcli'] / 1e9:.0f} GFLOP/s of {rate / 1e9:.0f} a plain product "
        "reaches: "
        f"{flops / median['kdcli'] / rate:.0%}"
    )


if __name__ == "__main__":
    main()
