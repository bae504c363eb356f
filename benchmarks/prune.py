"""Compare pruning with plain fine-tuning, and pruned models with dense ones.

    python benchmarks/prune.py step   [--shape 12x768] [--batch 32] [--length 128] [--rounds 5]
                                      [--device cpu]
    python benchmarks/prune.py memory [--shape 12x768] [--batch 32] [--length 128] [--device cpu]
    python benchmarks/prune.py sparse [--shape 12x768] [--rounds 20]
    python benchmarks/prune.py masks  [--shape 12x768]

* `step`: an optimiser step of SMP (local, global, proportional) compared with AdamW on all weights,
  interleaved. The time for choosing the masks is printed separately.
* `memory`: the memory of the model, the optimiser and two steps, each in a process of its own, in
  float32 and with products in bfloat16. In bfloat16, the weights that SMP freezes are stored in it.
* `sparse`: a forward pass of the model with random masks, compared with the same weights in dense
  form, for batches of 1 and 8. Its linears are sparse where that is faster.
* `masks`: the bytes of files with random masks compared with their entropy.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from kdcli.deploy.shapes import config_of
from kdcli.deploy.sparse.csr import sparsify
from kdcli.deploy.sparse.mask_file import MaskInfo, apply_masks, base_hash, write_mask
from kdcli.engine.memory import peak_of
from kdcli.models.matrices import matrices
from kdcli.pruners import build_pruner

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("step", "memory", "sparse", "masks"))
    parser.add_argument("--shape", default="12x768")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="the device of step and memory")
    parser.add_argument("--one", choices=("plain", "smp"), help=argparse.SUPPRESS)
    parser.add_argument("--bf16", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.shape}, {options.threads} threads, torch {torch.__version__}")
    {"step": steps, "memory": memory, "sparse": sparse, "masks": masks}[options.what](options)


def steps(options: argparse.Namespace) -> None:
    """Print the ratios of steps of SMP and plain steps, and the time for choosing the masks."""
    ids, labels = _rows(options)
    runs = {"plain": _plain(options.shape, ids, labels)}
    choosing: dict[str, list[float]] = {}
    for masking in ("local", "global", "proportional"):
        runs[masking] = _smp(options.shape, masking, ids, labels, choosing.setdefault(masking, []))
    for run in runs.values():
        run()
    taken = _interleaved(runs, options.rounds, ids.device)
    for name in ("local", "global", "proportional"):
        ratios = [a / b for a, b in zip(taken[name], taken["plain"], strict=True)]
        share = statistics.median(choosing[name]) / statistics.median(taken[name])
        print(
            f"SMP {name:12} {statistics.median(ratios):.2f}x a plain step; choosing the masks "
            f"{share:.1%} of it"
        )
    ratio = statistics.median(
        a / b for a, b in zip(choosing["global"][1:], choosing["local"][1:], strict=True)
    )
    print(f"choosing: global {ratio:.2f}x local")


def memory(options: argparse.Namespace) -> None:
    """Print the peak memory of plain steps and of SMP's, without the libraries' memory."""
    if options.one:
        ids, labels = _rows(options)

        def work() -> None:
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=options.bf16):
                run = (
                    _plain(options.shape, ids, labels)
                    if options.one == "plain"
                    else _smp(options.shape, "proportional", ids, labels, [], half=options.bf16)
                )
                for _ in range(2):
                    run()

        print(f"peak {peak_of(work, ids.device)}")
        return
    for bf16 in (False, True):
        peaks = {}
        for one in ("plain", "smp"):
            command = [sys.executable, *sys.argv, "--one", one, *(["--bf16"] if bf16 else [])]
            # Return freed memory to the system at once. Otherwise the peak includes fragments.
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment
            )
            peaks[one] = int(done.stdout.rsplit("peak ", 1)[1])
        sizes = ", ".join(f"{one} {peak / 1e9:.2f} GB" for one, peak in peaks.items())
        ratio = peaks["smp"] / peaks["plain"]
        print(f"{'bf16' if bf16 else 'fp32'}: {sizes}; SMP {ratio:.2f}x plain")


def _model(shape: str, device: torch.device = CPU) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
        config_of(shape)
    ).train()
    return model.to(device)


def _rows(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1000, 20000, (options.batch, options.length))
    return ids.to(options.device), torch.randint(0, 2, (options.batch,)).to(options.device)


def _time_when_idle(device: torch.device) -> float:
    """Wait until the device has finished its work, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _plain(shape: str, ids: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    model = _model(shape, ids.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run() -> None:
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _smp(
    shape: str,
    masking: str,
    ids: torch.Tensor,
    labels: torch.Tensor,
    choosing: list[float],
    *,
    half: bool = False,
) -> Callable[[], None]:
    model = _model(shape, ids.device)
    pruner = build_pruner("smp", {"masking": masking}, model, density=0.1, steps=100, lr=2e-2)
    scores = [p for p in model.parameters() if p.requires_grad]
    for parameter in model.parameters():
        if half and not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.AdamW(scores, lr=2e-2, weight_decay=0.0, fused=True)
    pruner.after(0)
    done = 50

    def run() -> None:
        nonlocal done
        own = sum(pruner.terms().values())
        (own + model(input_ids=ids, labels=labels).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        began = _time_when_idle(ids.device)
        pruner.after(done)
        choosing.append(_time_when_idle(ids.device) - began)

    return run


def sparse(options: argparse.Namespace) -> None:
    """Print the speed-ups of sparse inference with random masks."""
    dense = _model(options.shape).eval()
    for density in (0.03, 0.1):
        model = copy.deepcopy(dense)
        apply_masks(model, _random(model, density))
        small = sparsify(model)
        for batch in (1, 8):
            ids = torch.randint(1000, 20000, (batch, options.length))
            with torch.inference_mode():
                apart = float(
                    (model(input_ids=ids).logits - small(input_ids=ids).logits).abs().max()
                )
                runs = {
                    "dense": partial(dense, input_ids=ids),
                    "sparse": partial(small, input_ids=ids),
                }
                taken = _interleaved(runs, options.rounds)
            ratio = statistics.median(
                a / b for a, b in zip(taken["dense"], taken["sparse"], strict=True)
            )
            print(
                f"{1 - density:.0%} sparse, batch {batch}: {ratio:.2f}x dense; outputs differ by "
                f"{apart:.0e}"
            )


def masks(options: argparse.Namespace) -> None:
    """Print the sizes of mask files."""
    model = _model(options.shape).eval()
    digest, total = base_hash(model), sum(m.numel for m in matrices(model))
    with tempfile.TemporaryDirectory() as folder:
        for density in (0.03, 0.1, 0.5):
            drawn = _random(model, density)
            info = MaskInfo(
                base="random",
                base_sha256=digest,
                model_type="bert",
                vocab_size=model.config.vocab_size,
                method="random",
                density=density,
            )
            write_mask(Path(folder) / "mask.safetensors", info, drawn)
            size = (Path(folder) / "mask.safetensors").stat().st_size
            entropy = (
                -total * (density * math.log2(density) + (1 - density) * math.log2(1 - density)) / 8
            )
            print(f"density {density:.0%}: {size / 1e6:.2f} MB, entropy {entropy / 1e6:.2f} MB")


def _random(model: PreTrainedModel, density: float, seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {m.name: torch.rand(m.shape, generator=drawn) < density for m in matrices(model)}


def _interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device = CPU
) -> dict[str, list[float]]:
    """Return the seconds of every run. The runs take turns."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = _time_when_idle(device)
            run()
            taken[name].append(_time_when_idle(device) - began)
    return taken


if __name__ == "__main__":
    main()
