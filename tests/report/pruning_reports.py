"""Reports of `prune`: one sparsity in all its forms, several sparsities side by side, and hostile names."""

from __future__ import annotations

import numpy as np
from reports import HOSTILE, card, evaluation, hostile_values, latency_row, report_values

SIZES = {"Q": 147_456, "K": 147_456, "V": 147_456, "O": 147_456, "U": 589_824, "G": 589_824, "D": 589_824}
"""Weights of the matrices of a layer of width 384."""


def pruned_values(
    model: str = "masked",
    sparsity: float = 0.9,
    kinds: str = "QKVOUD",
    layers: int = 6,
    number_of_heads: int = 12,
    scores: bool = True,
    **changes: object,
) -> dict[str, object]:
    """Shares that grow towards the middle layers and differ between types and heads; a cubic schedule."""
    density, values = 1 - sparsity, np.random.default_rng(0)
    matrices = []
    for layer in range(1, layers + 1):
        hill = 1.2 - 1.2 * abs(layer / (layers + 1) - 0.5)
        for number, kind in enumerate(kinds):
            share = min(1.0, density * hill * (0.7 + 0.08 * number))
            size = SIZES[kind]
            matrices.append(
                {"name": f"{layer}.{kind}", "layer": layer, "kind": kind, "weights": size, "kept": round(size * share)}
            )
    kept = sum(int(m["kept"]) for m in matrices) / sum(int(m["weights"]) for m in matrices)
    steps = list(range(0, 1001, 50))
    curve = [{"step": s, "density": max(kept, kept + (1 - kept) * (1 - s / 600) ** 3)} for s in steps[:-1]]
    histograms = []
    for step in steps if scores else []:
        spread = values.normal(-0.1, 0.5, 4000) * step / 1000 * np.where(values.random(4000) < 0.2, 1, 0.3)
        low, high = (float(spread.min()), float(spread.max())) if step else (0.0, 1.0)
        counts, edges = np.histogram(spread, 40, (low, high))
        histograms.append({"step": step, "edges": edges.tolist(), "counts": counts.tolist()})
    shares = np.clip(density * values.uniform(0.3, 1.7, (layers, number_of_heads)), 0, 1)
    return {
        "model": model,
        "method": "smp",
        "masking": "proportional",
        "sparsity": sparsity,
        "density": kept,
        "matrices": matrices,
        "heads": shares.tolist(),
        "curve": [*curve, {"step": 1000, "density": kept}],
        "histograms": histograms,
    } | changes


def _values(models: dict[str, dict[str, object]], accuracies: dict[str, float]) -> dict[str, object]:
    """A report of `prune` on sst2."""
    return report_values() | {
        "command": "prune",
        "recipe": {"model": "bert-base-uncased", "task": "sst2", "method": "smp", "sparsity": [0.9]},
        "models": models,
        "curve": [{"step": step, "loss": 0.7 / (1 + step / 200), "held_out": None} for step in range(50, 1001, 50)],
        "quality": {"sst2": {name: {"accuracy": value} for name, value in accuracies.items()}},
        "latency": [],
        "speedup": {},
        "published": [],
        "evaluations": [evaluation(name, metrics={"accuracy": value}) for name, value in accuracies.items()],
    }


def prune_values() -> dict[str, object]:
    """One sparsity: the dense model, the masked one, the compacted one, and the sparse form that has no card."""
    shape = {"layers": 6, "hidden": 384, "bytes": 90_900_000, "params_total": 22_713_216}
    models = {
        "dense": card(id="bert-base-uncased", **shape, params_nonzero=22_700_000),
        "masked": card(id="out", **shape, params_nonzero=13_100_000),
        "compact": card(id="out/compact", **shape | {"bytes": 71_000_000}, params_nonzero=13_090_000),
    }
    ratios = {"masked": 1.0, "compact": 1.4, "sparse/sparse-fp32": 1.6}
    return _values(models, {"masked": 0.9, "compact": 0.9}) | {
        "latency": [
            latency_row("dense", 1, 10.0),
            latency_row("masked", 1, 10.1),
            latency_row("compact", 1, 7.1),
            latency_row("sparse", 1, 6.2) | {"backend": "sparse", "dtype": "fp32"},
        ],
        "speedup": {
            f"{name}_vs_dense": {"median": r, "low": r - 0.1, "high": r + 0.1, "batch_size": 1, "seq_len": 128}
            for name, r in ratios.items()
        },
        "pruning": [pruned_values()],
    }


def sparsities_values() -> dict[str, object]:
    """Three sparsities, each a model of its own; the sizes differ."""
    asked = {"0.5": 0.5, "0.9": 0.9, "0.97": 0.97}
    models = {"dense": card(id="bert-base-uncased", layers=6, hidden=384, bytes=90_900_000)}
    models |= {
        name: card(id=name, layers=6, hidden=384, bytes=int(90_900_000 * (1 - s / 2))) for name, s in asked.items()
    }
    values = _values(models, {"0.5": 0.91, "0.9": 0.9, "0.97": 0.85})
    recipe = values["recipe"] | {"sparsity": list(asked.values())}  # type: ignore[operator]
    pruning = [pruned_values(name, s) for name, s in asked.items()]
    return values | {"recipe": recipe, "training": None, "curve": [], "pruning": pruning}


def odd_values() -> dict[str, object]:
    """Gates, as many heads as no number fits for, and layers that are not alike; a method without scores."""
    other = pruned_values("gates", 0.5, "QKVOUGD", layers=4, number_of_heads=24, scores=False, method="magnitude")
    left_out = ("1.G", "3.D")
    matrices = [m for m in other["matrices"] if m["name"] not in left_out]  # type: ignore[attr-defined]
    matrices[0] |= {"kept": 1}
    heads = [other["heads"][0][:6], *other["heads"][1:]]  # type: ignore[index]
    return prune_values() | {"pruning": [other | {"model": "masked", "matrices": matrices, "heads": heads}]}


def hostile_prune_values() -> dict[str, object]:
    """Names of models, methods and matrices that try to become markup."""
    values = hostile_values()
    other = {"name": HOSTILE, "layer": 1, "kind": HOSTILE, "weights": 10, "kept": 1}
    entry = pruned_values(HOSTILE, method=HOSTILE, masking=HOSTILE)
    second = entry | {"matrices": [*entry["matrices"], other], "model": "teacher"}  # type: ignore[misc]
    recipe = {"model": HOSTILE, "task": HOSTILE, "method": HOSTILE, "sparsity": [0.9]}
    quality = {HOSTILE: {"teacher": {HOSTILE: 0.9}, HOSTILE: {HOSTILE: 0.8}}}
    return values | {"command": "prune", "recipe": recipe, "quality": quality, "pruning": [entry, second]}
