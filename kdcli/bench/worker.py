"""The process in which latency is measured: request as JSON on stdin, answer as the last line of stdout."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModel

WARM_RUNS, WARM_SECONDS = 10, 1.0
OK, NOISY = 0.10, 0.25
"""Interquartile range over median up to which a cell is called ok, and noisy; above it is unstable."""


def main() -> None:
    """Serve one request."""
    request = json.loads(sys.stdin.read())
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    runners = {}
    for name, source in request["models"]:
        model = AutoModel.from_pretrained(
            source, dtype=dtype, use_safetensors=True, trust_remote_code=request["trust_remote_code"]
        )
        runners[name] = model.eval().to(device)
    rows: list[dict[str, Any]] = []
    speedups: dict[str, dict[str, Any]] = {}
    baseline = next(iter(runners))
    for batch_size, seq_len in request["cells"]:
        times = _cell(runners, device, batch_size, seq_len, request["min_runs"], request["min_seconds"])
        for name, seconds in times.items():
            rows.append(_row(name, request, batch_size, seq_len, np.asarray(seconds) * 1e3))
            if name != baseline:
                ratios = np.asarray(times[baseline]) / np.asarray(seconds)
                low, median, high = np.percentile(ratios, [25, 50, 75]).tolist()
                # The first cell has the plain name; the others say which they are.
                first = [batch_size, seq_len] == request["cells"][0]
                cell = "" if first else f"@{batch_size}x{seq_len}"
                speedups[f"{name}_vs_{baseline}{cell}"] = {
                    "median": median,
                    "low": low,
                    "high": high,
                    "batch_size": batch_size,
                    "seq_len": seq_len,
                }
    print(json.dumps({"rows": rows, "speedups": speedups}))


def _cell(
    runners: dict[str, Any], device: torch.device, batch_size: int, seq_len: int, min_runs: int, min_seconds: float
) -> dict[str, list[float]]:
    """Seconds of every run by model, the i-th of each taken in the same round, in an order drawn anew each round."""
    rng = np.random.Generator(np.random.PCG64(0))
    calls: dict[str, Callable[[], Any]] = {}
    for name, model in runners.items():
        # The upper half of a vocabulary holds no special tokens.
        words = model.config.vocab_size
        ids_BL = torch.from_numpy(rng.integers(words // 2, words, (batch_size, seq_len))).to(device)
        calls[name] = functools.partial(model, input_ids=ids_BL)
    times: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    with torch.inference_mode():
        for call in calls.values():
            began, runs = time.perf_counter(), 0
            while runs < WARM_RUNS or time.perf_counter() - began < WARM_SECONDS:
                _timed(call, device)
                runs += 1
        while len(times[next(iter(times))]) < min_runs or min(spent.values()) < min_seconds:
            for name in rng.permutation(list(calls)):
                taken = _timed(calls[name], device)
                times[name].append(taken)
                spent[name] += taken
    return times


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _row(name: str, request: dict[str, Any], batch_size: int, seq_len: int, ms: Any) -> dict[str, Any]:
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
