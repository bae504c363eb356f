"""The process in which latency is measured: request as JSON on stdin, answer as the last line of stdout."""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, PretrainedConfig

WARM_RUNS, WARM_SECONDS = 10, 1.0
OK, NOISY = 0.10, 0.25
"""Interquartile range over median up to which a cell is called ok, and noisy; above it is unstable."""


def main() -> None:
    """Serve one request."""
    request = json.loads(sys.stdin.read())
    torch.set_num_threads(request["threads"])
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    models = {}
    for name, source in request["models"]:
        model = AutoModel.from_pretrained(
            source, dtype=dtype, use_safetensors=True, trust_remote_code=request["trust_remote_code"]
        )
        models[name] = model.eval().to(device)
    rows: list[dict[str, Any]] = []
    speedups: dict[str, dict[str, Any]] = {}
    baseline = next(iter(models))
    for batch_size, seq_len in request["cells"]:
        calls = {
            name: functools.partial(model, input_ids=full_length_ids(model.config, batch_size, seq_len).to(device))
            for name, model in models.items()
        }
        times = interleaved(calls, device, request["min_runs"], request["min_seconds"])
        rows += [_row(name, request, batch_size, seq_len, np.asarray(taken) * 1e3) for name, taken in times.items()]
        # The first cell has the plain name; the others say which they are.
        cell = "" if [batch_size, seq_len] == request["cells"][0] else f"@{batch_size}x{seq_len}"
        for name in [n for n in models if n != baseline]:
            speedups[f"{name}_vs_{baseline}{cell}"] = {
                **_speedup(times[baseline], times[name]),
                "batch_size": batch_size,
                "seq_len": seq_len,
            }
    print(json.dumps({"rows": rows, "speedups": speedups}))


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
    calls: Mapping[str, Callable[[], Any]], device: torch.device, min_runs: int, min_seconds: float
) -> dict[str, list[float]]:
    """Seconds of every run by model; the i-th of each were taken in the same round, in an order drawn anew each round.

    Every model first runs alone for at least `WARM_RUNS` runs and `WARM_SECONDS`. Rounds go on until there are
    `min_runs` of them and they have together lasted `min_seconds`.
    """
    rng = np.random.Generator(np.random.PCG64(0))
    times: dict[str, list[float]] = {name: [] for name in calls}
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
                for name in rng.permutation(list(calls)):
                    times[name].append(_timed(calls[name], device))
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


def _row(name: str, request: Mapping[str, Any], batch_size: int, seq_len: int, ms: Any) -> dict[str, Any]:
    p25, p50, p75, p90, p95 = np.percentile(ms, [25, 50, 75, 90, 95]).tolist()
    spread = (p75 - p25) / p50
    return {
        "model": name,
        "backend": "torch",
        "device": request["device"],
        "dtype": request["dtype"],
        "batch_size": batch_size,
        "seq_len": seq_len,
        "padding": "full",
        "n": len(ms),
        "p50_ms": p50,
        "p90_ms": p90,
        "p95_ms": p95,
        "mean_ms": float(ms.mean()),
        "iqr_over_p50": spread,
        "status": "ok" if spread <= OK else "noisy" if spread <= NOISY else "unstable",
    }


if __name__ == "__main__":
    main()
