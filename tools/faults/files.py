"""Files that a program or a person may have damaged.

Each must be read, or refused with one message, within the limits of time and memory.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.damage import ODD, change_values, damage, damage_json, json_bytes
from tools.faults.process import EXIT_CODES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kdcli.recipe.resolve import Resolved
    from kdcli.recipe.sections import Section

T = TypeVar("T")
MAX_MESSAGE = 20_000
"""Maximum number of characters in a message."""


def is_intact(case: Case) -> bool:
    """Whether a case leaves its file unchanged, so that a reader that refuses all files fails."""
    return case.number % 50 == 0


def read(what: str, reader: Callable[[], T], *, is_valid: bool = False) -> T | None:
    """Read a file.

    Args:
        what: Description of the file, for the message of a fault.
        reader: Reads the file.
        is_valid: Whether the file must be accepted.

    Returns:
        The result of the reader, or None if it refused the file with a message.

    Raises:
        Fault: The reader refused a valid file, or refused it without a proper message.
    """
    from kdcli.errors import KdcliError

    try:
        return reader()
    except KdcliError as error:
        if is_valid or error.exit_code not in EXIT_CODES or not error.message.strip():
            raise Fault(f"{what}: exit {error.exit_code}, message {error.message!r}") from None
        if len(error.message) > MAX_MESSAGE:
            raise Fault(f"{what}: a message of {len(error.message):,} characters") from None
        error.message.encode("utf-8", "backslashreplace")
    return None


YAML_ENDINGS = (
    b"a: " + b"[" * 5000,
    b"a: &a [*a]\n",
    b"x: " + b"y" * 999_000,
    b"? {a: b}\n: c\n",
    b"--- a\n--- b\n",
)
"""Endings of a recipe that are difficult to parse."""


def recipe(case: Case) -> None:
    """Read a damaged copy of a shipped recipe.

    A recipe that is accepted must be the same after it is written to `recipe.yaml` and read again.
    """
    from kdcli.recipe.resolve import recipe_models, resolve, shipped
    from kdcli.recipe.yaml import flow_style, read_yaml

    models = recipe_models()
    verb = case.rng.choice([name for name in models if shipped(name)])
    data = case.rng.choice(list(shipped(verb).values())).read_bytes()
    if is_intact(case):
        pass
    elif case.rng.random() < 0.4:
        data = flow_style(change_values(case.rng, read_yaml(data.decode()))).encode()
    elif case.rng.random() < 0.1:
        data += case.rng.choice(YAML_ENDINGS)
    else:
        data = damage(case.rng, data)
    path = case.folder / "x.yaml"
    path.write_bytes(data)
    resolved = read(
        f"{verb} {data!r:.300}",
        lambda: resolve(models[verb], recipe=str(path)),
        is_valid=is_intact(case),
    )
    if resolved is not None:
        _check_written(resolved, models[verb], path)


def setting(case: Case) -> None:
    """Read `--set`, `--grid`, `--min-metric`, shapes and weights with random characters."""
    from kdcli.models.grammar import is_shape, parse_shape
    from kdcli.recipe.resolve import grid_options, leaf_keys, metric_limits, recipe_models, resolve
    from kdcli.types import ModelShape
    from kdcli.verbs.cotrain.settings import parse_weights

    models, rng = recipe_models(), case.rng
    verb = rng.choice(list(models))
    value = rng.choice(
        [
            json.dumps(rng.choice(ODD)),
            str(rng.choice(ODD)),
            "[1, 2]",
            "{a: 1, b: [x, {c: 2}]}",
            "1e-3",
            "6x384:8@4",
        ]
    )
    if rng.random() < 0.6:
        value = damage(rng, value.encode("utf-8", "replace")).decode("utf-8", "replace")
    key = rng.choice(leaf_keys(models[verb]))
    if rng.random() < 0.15:
        key = damage(rng, key.encode()).decode("utf-8", "replace")
    key += rng.choice(("", "", "", ".x", ".x.y", ".", "..", ". "))
    resolved = read(
        f"--set {key}={value!r:.200}",
        lambda: resolve(models[verb], recipe=None, sets=[f"{key}={value}"]),
    )
    if resolved is not None:
        _check_written(resolved, models[verb], case.folder / "x.yaml")
    readers: tuple[Callable[[], object], ...] = (
        lambda: grid_options(models["finetune"], [f"{key}={value}"]),
        lambda: metric_limits([f"{key}={value}"]),
        lambda: parse_weights(value),
        lambda: is_shape(value) and parse_shape(value, ModelShape(12, 768, 3072, 12)),
    )
    for reader in readers:
        read(f"{value!r:.200}", reader)


def _check_written(resolved: Resolved[Section], model: type[Section], path: Path) -> None:
    """Check that a recipe is the same after it is written to a file and read again."""
    from kdcli.recipe.resolve import resolve

    text = resolved.to_yaml()
    path.write_text(text, "utf-8")
    if resolve(model, recipe=str(path)).recipe != resolved.recipe:
        raise Fault(f"the recipe is different after it is read again: {text[:800]}")


def mask(case: Case) -> None:
    """Read a mask file with changed values and a matching hash, or with damaged bytes."""
    from kdcli.deploy.sparse.mask_file import NO_DIGEST, read_mask

    rng, path = case.rng, case.folder / "x.safetensors"
    weights = sorted((case.material / "pruned").rglob("*.safetensors"))
    data = rng.choice([p for p in weights if p.parent.name == "mask"]).read_bytes()
    if rng.random() < 0.15 or is_intact(case):
        path.write_bytes(data if is_intact(case) else damage(rng, data))
    else:
        part = rng.choice(("info", "head", "info", "meta", "tensors", "body", "bomb"))
        if part == "bomb" and rng.random() < 0.05:
            data = _with_bomb(rng, data, (case.material / "bomb").read_bytes())
        (size,) = struct.unpack("<Q", data[:8])
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        meta = header["__metadata__"] | {"sha256": NO_DIGEST}
        if part in ("info", "head"):
            changed = json_bytes(change_values(rng, json.loads(meta[part])))
            meta[part] = changed.decode("utf-8", "surrogatepass")
        elif part == "meta":
            one_odd = {**meta, rng.choice(list(meta)): rng.choice(ODD)}
            meta = rng.choice([change_values(rng, meta), one_odd])
        elif part == "body":
            body = damage(rng, body)
        header["__metadata__"] = meta
        if part == "tensors":
            header = change_values(rng, header)
        keys = json_bytes(header)
        keys += b" " * (-len(keys) % 8)
        data = struct.pack("<Q", len(keys)) + keys + body
        digest = hashlib.sha256(data).hexdigest().encode()
        path.write_bytes(data.replace(NO_DIGEST.encode(), digest, 1))
    read("mask", lambda: read_mask(path), is_valid=is_intact(case))


def _with_bomb(rng: random.Random, data: bytes, bomb: bytes) -> bytes:
    """Replace a tensor of a mask file by one that decompresses to a gigabyte."""
    import torch
    from safetensors.torch import load, save

    (size,) = struct.unpack("<Q", data[:8])
    tensors = load(data)
    name = rng.choice([key for key in tensors if key.startswith(("head.", "mask."))])
    coded = bomb if name.startswith("head.") else rng.choice((b"\0", b"\1")) + bomb[2:-4]
    tensors[name] = torch.frombuffer(bytearray(coded), dtype=torch.uint8)
    return save(tensors, json.loads(data[8 : 8 + size])["__metadata__"])


def smp_mask(case: Case) -> None:
    """Read a damaged `.npy` file in the format of SMP's authors."""
    import numpy as np

    from kdcli.deploy.sparse.mask_file import read_smp

    path, rng = case.folder / "x.npy", case.rng
    dtype = rng.choice(("u1", "u1", "i8", "f4", "O", "S5"))
    np.save(path, np.zeros(rng.choice((0, 1, 3072)), dtype), allow_pickle=True)
    data = path.read_bytes()
    if rng.random() < 0.3:
        shapes = (b"(9**99,)", b"(-1,)  ", b"(10**12,)", b"(1e9,)", b"((((),", b"([],)")
        data = data.replace(b"(3072,)", rng.choice(shapes))
    path.write_bytes(damage(rng, data))
    read("npy", lambda: read_smp(path, _random_model(case.material / "encoder")))


@functools.cache
def _random_model(folder: Path) -> PreTrainedModel:
    """Return a model with the configuration in a folder and random weights."""
    from transformers import AutoConfig, AutoModel

    return AutoModel.from_config(AutoConfig.from_pretrained(folder))


def data_rows(case: Case) -> None:
    """Read text and labelled data from files in several formats, with odd values in their rows or
    with damaged bytes."""
    from kdcli.data.labelled.request import RowsRequest
    from kdcli.data.labelled.task_data import open_labelled
    from kdcli.data.sources import open_source

    rng = case.rng
    kind = rng.choice(("data", "pair", "multi", "score", "tokens", "span"))
    lines = (case.material / kind / "train.jsonl").read_bytes().splitlines(keepends=True)
    ending = "jsonl"
    if not is_intact(case):
        ending = rng.choice(["jsonl"] * 3 + ["csv", "txt", "parquet", "jsonl.gz", "csv.gz"])
    if is_intact(case):
        data = b"".join(lines)
    elif ending.startswith("jsonl"):
        row = rng.randrange(len(lines))
        lines[row] = json_bytes(change_values(rng, json.loads(lines[row]))) + b"\n"
        data = b"".join(lines)
    elif ending.startswith("csv"):
        rows = [json.loads(line) for line in lines]
        table = [list(rows[0]), *(row.values() for row in rows)]
        csv_lines = [",".join(json.dumps(str(cell)) for cell in row) for row in table]
        data = "".join(f"{line}\n" for line in csv_lines).encode()
    else:
        data = b"".join(lines)
    if not is_intact(case) and (not ending.startswith("jsonl") or rng.random() < 0.3):
        data = damage(rng, data)
    if ending.endswith("gz"):
        data = gzip.compress(data, 1)
        data = damage(rng, data) if rng.random() < 0.3 else data
    folder = case.folder / "own"
    folder.mkdir(exist_ok=True)
    (folder / f"train.{ending}").write_bytes(data)
    read(
        f"{ending} {data!r:.300}",
        lambda: sum(1 for _ in open_source(str(folder)).documents("train", None)),
    )
    read(
        f"{kind} {ending} {data!r:.300}",
        lambda: open_labelled(RowsRequest("own", str(folder))),
        is_valid=is_intact(case),
    )
    shutil.rmtree(folder)


SIZES = (2, 32, 128, 4, 100, 60, 40, 100, 1000, 400)
"""The sizes of a model card. Their values do not matter."""


def latency_report(case: Case) -> None:
    """Combine damaged latency reports of kdcli and of `measure_encoders.py`."""
    from kdcli.deploy.old_machines.measure_encoders import SCHEMA
    from kdcli.types import Card
    from kdcli.verbs.benchmark.run import gather

    rng, path = case.rng, case.folder / "x.json"
    row: dict[str, object] = {
        "device": "cpu",
        "dtype": "fp32",
        "batch_size": 1,
        "seq_len": 8,
        "padding": "full",
        "n": 9,
        "iqr_over_p50": 0.1,
        "status": "ok",
    }
    row |= dict.fromkeys(("p50_ms", "p75_ms", "p90_ms", "p95_ms", "mean_ms"), 1.0)
    ratio = {"median": 2.0, "low": 1.0, "high": 3.0, "unstable": False}
    if rng.random() < 0.5:
        report = json.loads((case.material / "teacher" / "report.json").read_bytes())
        name = report["models"][0]["name"]
        row |= {"model": name, "backend": "torch", "speedup": ratio | {"baseline": name}}
        report |= {"latency": [row]}
    else:
        row |= {"model": "2x32", "backend": "portable", "p99_ms": None}
        report = {
            "kind": "kdcli portable latency",
            "schema": SCHEMA,
            "complete": True,
            "sha256": {},
            "settings": {},
            "created": "",
            "environment": {},
            "models": {"2x32": {"layers": 2}},
            "rows": [row | {"speedup": ratio | {"baseline": "2x32"}}],
        }
    data = json.dumps(report).encode()
    path.write_bytes(data if is_intact(case) else damage_json(rng, data))
    read(
        f"report {path.read_bytes()[-300:]!r}",
        lambda: gather([path], lambda shape: Card(shape, "bert", *SIZES, sha256=None)),
        is_valid=is_intact(case),
    )


def run_files(case: Case) -> None:
    """Resume a run with a damaged recipe, log, report, checkpoint or file of best weights."""
    import torch

    from kdcli.engine.run_dir import BEST_WEIGHTS, CHECKPOINTS, RunDir

    rng, folder = case.rng, case.folder / "run"
    run = RunDir(folder)
    text = "verb: finetune\ntrain:\n  lr: 0.001  # option\n"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(text)
    for step in (1, 2):
        run.log({"step": step, "loss": 1.0})
        run.save_checkpoint(step, {"a": torch.zeros(4)}, {"rng": [1, 2], "step": step})
    run.save_best(2, {"a": torch.zeros(4)})
    (folder / "report.json").write_text('{"status": "done"}')
    names = ["recipe.yaml", "log.jsonl", "report.json", f"{CHECKPOINTS}/{BEST_WEIGHTS}"]
    names += [
        f"{CHECKPOINTS}/step-0000000{n}/{name}"
        for n in (1, 2)
        for name in ("state.json", "tensors.safetensors")
    ]
    path = folder / rng.choice(names)
    data = path.read_bytes()
    path.write_bytes(damage_json(rng, data) if path.suffix == ".json" else damage(rng, data))
    what = f"{path.name} {path.read_bytes()!r:.300}"
    read(what, lambda: run.check(text, resume=True, overwrite=False))
    read(what, lambda: run.check(text, resume=False, overwrite=True))
    read(what, lambda: run.done)
    read(what, run.read_log)
    read(what, lambda: run.cut_log(1))
    read(what, lambda: run.load_checkpoint())
    read(what, lambda: run.load_best(2))
    shutil.rmtree(folder)


def model_files(case: Case) -> None:
    """Load a model with a damaged configuration, index, tokenizer or header of its weights."""
    from kdcli.models.load import load_encoder

    rng, folder = case.rng, case.folder / "model"
    shutil.copytree(case.material / "encoder", folder)
    name = rng.choice(
        ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "index", "header")
    )
    if not is_intact(case):
        damage_model(rng, folder, name)
    read(name, lambda: load_encoder(str(folder)), is_valid=is_intact(case))
    os.chdir(case.folder)
    shutil.rmtree(folder)


def damage_model(rng: random.Random, folder: Path, name: str) -> None:
    """Damage one file of a model's directory.

    Args:
        rng: The random generator.
        folder: The model's directory.
        name: A JSON file, `header` for the header of the weights, or `index` for the index of
            sharded weights, which is created first.
    """
    weights = folder / "model.safetensors"
    if name == "index":
        data = weights.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        names = dict.fromkeys((k for k in header if k != "__metadata__"), "model-1.safetensors")
        weights.rename(folder / "model-1.safetensors")
        index = {"metadata": {"total_size": len(data)}, "weight_map": names}
        path = folder / "model.safetensors.index.json"
        path.write_bytes(damage_json(rng, json.dumps(index).encode()))
    elif name == "header":
        data = weights.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        keys = damage_json(rng, data[8 : 8 + size])
        length = len(keys)
        if rng.random() >= 0.8:
            length = rng.choice((0, 1, 2**32, 2**63, 2**64 - 1, size))
        weights.write_bytes(struct.pack("<Q", length) + keys + data[8 + size :])
    else:
        (folder / name).write_bytes(damage_json(rng, (folder / name).read_bytes()))


KINDS = [
    Kind("recipes", 12_000, recipe, chunk=400),
    Kind("settings", 13_000, setting, chunk=400),
    Kind("masks", 30_000, mask, chunk=500),
    Kind("npy", 10_000, smp_mask, chunk=500),
    Kind("rows", 20_000, data_rows, chunk=400),
    Kind("reports", 20_000, latency_report, chunk=500),
    Kind("runs", 5_000, run_files, chunk=250),
    Kind("weights", 4_000, model_files, chunk=100),
]
