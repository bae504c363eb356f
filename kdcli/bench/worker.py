"""The process in which latency is measured: request as JSON on stdin, answers as lines of JSON on stdout.

A line comes as soon as there is something to say, so that what is measured survives an end before the end.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel

from kdcli.backends.runners import LIMITS, Runner, agreement, runner
from kdcli.bench.shapes import config_of
from kdcli.models.shape import is_shape
from kdcli.sparse.load import is_compact, load
from kdcli.training.memory import is_out_of_memory, peak_of
from kdcli.types import Batch

WARM_RUNS, WARM_SECONDS = 10, 1.0
OK, NOISY = 0.10, 0.25
"""Interquartile range over median up to which a cell is called ok, and noisy; above it is unstable."""

RUNS_OF_P99 = 100
"""Runs below which a 99th percentile would be one run or two."""

Say = Callable[[Mapping[str, Any]], None]


@dataclass
class _Loaded:
    """A subject ready to run; `first_call_ms` is known after its first call."""

    spec: Mapping[str, str]
    config: PretrainedConfig
    runner: Runner
    load_seconds: float
    weights_bytes: int
    first_call_ms: float | None = None

    @property
    def named(self) -> dict[str, str]:
        """How the report names it."""
        return {"model": self.spec["name"], "backend": self.spec["backend"], "dtype": self.spec["precision"]}

    @property
    def label(self) -> str:
        """The name in speed-ups: the model, and what it ran on where that is not plain torch."""
        name, backend, precision = (self.spec[k] for k in ("name", "backend", "precision"))
        return name if (backend, precision) == ("torch", "fp32") else f"{name}/{backend}-{precision}"


def main() -> None:
    """Serve one request."""
    request = json.loads(sys.stdin.read())
    torch.set_num_threads(request["threads"])
    with tempfile.TemporaryDirectory() as folder:
        serve(request, Path(folder), lambda answer: print(json.dumps(answer), flush=True))


def serve(request: Mapping[str, Any], folder: Path, say: Say) -> None:
    """Load every subject, compare its output with torch's in float32, measure cell after cell."""
    device = torch.device(request["device"])
    subjects = _load(request, device, folder, say)
    for batch_size, seq_len in request["cells"]:
        _cell(request, device, subjects, batch_size, seq_len, say)


def _load(request: Mapping[str, Any], device: torch.device, folder: Path, say: Say) -> list[_Loaded]:
    loaded: list[_Loaded] = []
    references: dict[str, Any] = {}
    for number, spec in enumerate(request["subjects"]):
        began = time.perf_counter()
        model = _model(spec["source"], request["trust_remote_code"]).to(device)
        read = time.perf_counter() - began
        sample, mask = _sample(spec["source"], model, request["texts"])
        plain = (spec["backend"], spec["precision"]) == ("torch", "fp32")
        if not plain and spec["source"] not in references:
            with torch.inference_mode():
                on_device = {k: v.to(device) for k, v in sample.items()}
                references[spec["source"]] = model(**on_device).last_hidden_state.float().cpu().numpy()
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        began = time.perf_counter()
        made = runner(
            model,
            spec["backend"],
            spec["precision"],
            device=device,
            threads=request["threads"],
            folder=folder / str(number),
        )
        subject = _Loaded(spec, model.config, made, read + time.perf_counter() - began, weights)
        if not plain and not _agrees(subject, sample, mask, references[spec["source"]], say):
            continue
        loaded.append(subject)
    return loaded


def _model(source: str, trust_remote_code: bool) -> PreTrainedModel:
    if is_shape(source):
        torch.manual_seed(0)
        made: PreTrainedModel = AutoModel.from_config(config_of(source), dtype=torch.float32)
        return made.eval()
    if is_compact(source):
        base: PreTrainedModel = load(source).base_model
        return base
    made = AutoModel.from_pretrained(
        source, dtype=torch.float32, use_safetensors=True, trust_remote_code=trust_remote_code
    )
    return made.eval()


def _sample(source: str, model: PreTrainedModel, texts: Sequence[str]) -> tuple[Batch, Any]:
    """What backends are compared on: real text where the model has a tokenizer, else random ids; padded either way."""
    if texts and not is_shape(source):
        tokenizer = AutoTokenizer.from_pretrained(source)
        found = tokenizer(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt")
        batch = {k: v for k, v in found.items() if k in ("input_ids", "attention_mask", "token_type_ids")}
    else:
        batch = cell_batch(model.config, [64, 48, 17, 5])
    return batch, batch["attention_mask"].numpy()


def _agrees(subject: _Loaded, sample: Batch, mask: Any, reference: Any, say: Say) -> bool:
    """Compare with torch in float32; a subject that is fast and wrong is not measured."""
    with torch.inference_mode():
        (output,) = subject.runner.output(subject.runner.call(subject.runner.prepare(sample)))
    found = agreement(reference, output, mask)
    limit = LIMITS[subject.spec["precision"]]
    wrong = not found["relative"] <= limit
    say({"agreements": [subject.named | found | {"limit": limit, "wrong": wrong}]})
    return not wrong


def _cell(
    request: Mapping[str, Any],
    device: torch.device,
    subjects: Sequence[_Loaded],
    batch_size: int,
    seq_len: int,
    say: Say,
) -> None:
    """Measure all subjects in one cell; one that does not fit is a failure and the others go on."""
    lengths = lengths_of(request["padding"], request["lengths"], batch_size, seq_len)
    calls: dict[int, Callable[[], Any]] = {}
    peaks: dict[int, int | None] = {}
    failures = []
    for number, subject in enumerate(subjects):
        prepared = subject.runner.prepare(cell_batch(subject.config, lengths))
        call = subject.runner.call
        try:
            with torch.inference_mode():
                began = time.perf_counter()
                peaks[number] = peak_of(lambda call=call, x=prepared: _timed(lambda: call(x), device), device)  # type: ignore[misc]
                if subject.first_call_ms is None:
                    subject.first_call_ms = 1e3 * (time.perf_counter() - began)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failures.append(subject.named | {"batch_size": batch_size, "seq_len": seq_len, "reason": "out of memory"})
            continue
        calls[number] = lambda call=call, x=prepared: call(x)  # type: ignore[misc]
    if not calls:
        say({"failures": failures})
        return
    times = interleaved(calls, device, request["min_runs"], request["min_seconds"])
    rows = [
        _row(subjects[n], request, batch_size, seq_len, sum(lengths), peaks[n], np.asarray(taken) * 1e3)
        for n, taken in times.items()
    ]
    # The first cell has the plain name; the others say which they are.
    cell = "" if [batch_size, seq_len] == list(request["cells"][0]) else f"@{batch_size}x{seq_len}"
    speedups = {}
    if 0 in times:
        for n in [n for n in times if n != 0]:
            speedups[f"{subjects[n].label}_vs_{subjects[0].label}{cell}"] = {
                **_speedup(times[0], times[n]),
                "batch_size": batch_size,
                "seq_len": seq_len,
            }
    say({"rows": rows, "speedups": speedups, "failures": failures})


def lengths_of(padding: str, lengths: Sequence[int], batch_size: int, seq_len: int) -> list[int]:
    """Real tokens of each row of a cell."""
    drawn = np.random.Generator(np.random.PCG64(batch_size))
    if padding == "random":
        found = drawn.integers(max(1, seq_len // 4), seq_len + 1, batch_size)
    elif padding == "data":
        found = np.minimum(drawn.choice(np.asarray(lengths), batch_size), seq_len)
    else:
        found = np.full(batch_size, seq_len)
    return [int(n) for n in found]


def cell_batch(config: PretrainedConfig, lengths: Sequence[int]) -> Batch:
    """Random ids of the given lengths, padded on the right to the longest of them."""
    longest = max(lengths)
    mask_BL = (torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]).long()
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    ids_BL = full_length_ids(config, len(lengths), longest).where(mask_BL.bool(), pad)
    return {"input_ids": ids_BL, "attention_mask": mask_BL}


def full_length_ids(config: PretrainedConfig, batch_size: int, seq_len: int) -> Tensor:
    """Random token ids [B, L] without padding or any other special token; the same for the same vocabulary.

    Special tokens stand at the beginning of a vocabulary (BERT) or at its end (RoBERTa's mask, ModernBERT's all), so
    only its middle half is drawn from, less the ids the configuration names.
    """
    words = int(config.vocab_size)
    named = {v for k, v in config.to_dict().items() if k.endswith("_token_id") and isinstance(v, int)}
    usable = np.array([i for i in range(words // 4, max(words - words // 4, words // 4 + 1)) if i not in named])
    drawn = np.random.Generator(np.random.PCG64(0)).integers(0, len(usable), (batch_size, seq_len))
    return torch.from_numpy(usable[drawn])


def interleaved(
    calls: Mapping[Any, Callable[[], Any]], device: torch.device, min_runs: int, min_seconds: float
) -> dict[Any, list[float]]:
    """Seconds of every run by subject; the i-th of each were taken in one round, in an order drawn anew each round.

    Every subject first runs alone for at least `WARM_RUNS` runs and `WARM_SECONDS`. Rounds go on until there are
    `min_runs` of them and they have together lasted `min_seconds`.
    """
    rng = np.random.Generator(np.random.PCG64(0))
    keys = list(calls)
    times: dict[Any, list[float]] = {key: [] for key in keys}
    collecting = gc.isenabled()
    with torch.inference_mode():
        for call in calls.values():
            began, runs = time.perf_counter(), 0
            while runs < WARM_RUNS or time.perf_counter() - began < WARM_SECONDS:
                _timed(call, device)
                runs += 1
        gc.collect()
        gc.disable()
        try:
            began, rounds = time.perf_counter(), 0
            while rounds < min_runs or time.perf_counter() - began < min_seconds:
                for i in rng.permutation(len(keys)):
                    times[keys[i]].append(_timed(calls[keys[i]], device))
                rounds += 1
        finally:
            if collecting:
                gc.enable()
    return times


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _speedup(baseline: Sequence[float], candidate: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios within each round."""
    low, median, high = np.percentile(np.asarray(baseline) / np.asarray(candidate), [25, 50, 75]).tolist()
    return {"median": median, "low": low, "high": high}


def _row(
    subject: _Loaded,
    request: Mapping[str, Any],
    batch_size: int,
    seq_len: int,
    tokens: int,
    peak: int | None,
    ms: Any,
) -> dict[str, Any]:
    p25, p50, p75, p90, p95, p99 = np.percentile(ms, [25, 50, 75, 90, 95, 99]).tolist()
    spread = (p75 - p25) / p50
    return {
        "model": subject.spec["name"],
        "backend": subject.spec["backend"],
        "device": request["device"],
        "dtype": subject.spec["precision"],
        "batch_size": batch_size,
        "seq_len": seq_len,
        "padding": request["padding"],
        "n": len(ms),
        "p50_ms": p50,
        "p90_ms": p90,
        "p95_ms": p95,
        "p99_ms": p99 if len(ms) >= RUNS_OF_P99 else None,
        "mean_ms": float(ms.mean()),
        "iqr_over_p50": spread,
        "status": "ok" if spread <= OK else "noisy" if spread <= NOISY else "unstable",
        "tokens_per_second": 1e3 * tokens / p50,
        "load_seconds": subject.load_seconds,
        "first_call_ms": subject.first_call_ms,
        "peak_memory_bytes": None if peak is None else peak + subject.weights_bytes,
    }


if __name__ == "__main__":
    main()
