"""Files that a program or a person may have damaged: each is read, or refused in one message, in
bounded time."""

from __future__ import annotations

import copy
import functools
import gzip
import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.process import PROMISED

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2.5, 10**9, -(10**9), 2**31, 2**63, 2**64, 10**40),
    *(
        1e308,
        -0.0,
        float("nan"),
        float("inf"),
        "",
        " ",
        "x",
        "0",
        "true",
        "nan",
        "\x00",
        "\ud800",
        "\x1b[2J",
    ),
    *(
        "../../x",
        "/proc/1/mem",
        "x" * 5000,
        "\u00e9" * 300,
        "a\nb",
        [],
        {},
        [None],
        [[]],
        {"": None},
        {"x": {"x": {}}},
    ),
    *([0] * 2000, dict.fromkeys(map(str, range(500)), 0), "DEEP", "DEEPER"),
]
DEEP = {b'"DEEP"': b"[" * 600 + b"]" * 600, b'"DEEPER"': b'{"a":' * 100_000 + b"1" + b"}" * 100_000}
TOKENS = b"{}[],:\"'\\\n\t -+.eE0123456789&*!|>#%@`\x00\xff\xef\xbb\xbf\xed\xa0\x80<<~"
LONGEST = 20_000


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes with a few random changes: flipped, cut, doubled, moved, put in or out."""
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 1, 2, 8, 64))
        piece = (
            bytes(rng.choice(TOKENS) for _ in range(size))
            if rng.random() < 0.7
            else rng.randbytes(size)
        )
        begin, end = data[:at], data[at:]
        changes = [begin + piece + end[size:], begin + piece + end, begin + end[size:], begin]
        data = rng.choice([*changes, begin + end[:size] * 3 + end[size:], end + begin])
    return data


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path inside a JSON value."""
    yield at
    inside = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in inside:
        yield from places(value, (*at, key))


def changed(rng: random.Random, tree: Any) -> Any:
    """A JSON value with one to three changes: an odd value somewhere, a key missing, new or of
    another name."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *above, last = rng.choice(list(places(tree))[1:] or [("x",)])
        parent = tree
        for key in above:
            parent = parent[key]
        if not isinstance(parent, dict | list) or not parent:
            return rng.choice(ODD)
        what = rng.random()
        if what < 0.75:
            parent[last] = copy.deepcopy(rng.choice(ODD))
        elif what < 0.85:
            del parent[last]
        elif isinstance(parent, dict):
            parent[str(rng.choice(ODD))] = parent.pop(last)
        else:
            parent.append(copy.deepcopy(rng.choice([*ODD, parent[last]])))
        if not places(tree):
            break
    return rng.choice(ODD) if rng.random() < 0.01 else tree


def json_bytes(tree: Any) -> bytes:
    """As UTF-8, with what stands for deep nesting written out."""
    data = json.dumps(tree, separators=(",", ":")).encode()
    for word, deep in DEEP.items():
        data = data.replace(word, deep)
    return data


def either(rng: random.Random, data: bytes) -> bytes:
    """JSON with other values, or its bytes damaged."""
    return json_bytes(changed(rng, json.loads(data))) if rng.random() < 0.75 else damaged(rng, data)


def intact(case: Case) -> bool:
    """Now and then a file is left as it was: what refuses everything would find no fault."""
    return case.number % 50 == 0


def read(what: str, reader: Callable[[], object], *, whole: bool = False) -> object:
    """Read something. Raises Fault: an error that is no message, or one without end, or any if the
    file is `whole`. A message returns None."""
    from kdcli.errors import KdcliError

    try:
        return reader()
    except KdcliError as error:
        if whole or error.exit_code not in PROMISED or not error.message.strip():
            raise Fault(f"{what}: exit {error.exit_code}, message {error.message!r}") from None
        if len(error.message) > LONGEST:
            raise Fault(f"{what}: a message of {len(error.message):,} characters") from None
        error.message.encode("utf-8", "backslashreplace")
    return None


def recipe(case: Case) -> None:
    """A shipped recipe, damaged; one that resolves reads back the same from what `recipe.yaml`
    would hold."""
    from kdcli.recipe.resolve import recipe_models, resolve, shipped
    from kdcli.recipe.yaml import flow_style, read_yaml

    models = recipe_models()
    verb = case.rng.choice([name for name in models if shipped(name)])
    data = case.rng.choice(list(shipped(verb).values())).read_bytes()
    if intact(case):
        pass
    elif case.rng.random() < 0.4:
        data = flow_style(changed(case.rng, read_yaml(data.decode()))).encode()
    elif case.rng.random() < 0.1:
        data += case.rng.choice(
            (
                b"a: " + b"[" * 5000,
                b"a: &a [*a]\n",
                b"x: " + b"y" * 999_000,
                b"? {a: b}\n: c\n",
                b"--- a\n--- b\n",
            )
        )
    else:
        data = damaged(case.rng, data)
    path = case.folder / "x.yaml"
    path.write_bytes(data)
    found: Any = read(
        f"{verb} {data!r:.300}", lambda: resolve(models[verb], recipe=str(path)), whole=intact(case)
    )
    if found is not None:
        _reads_back(found, models[verb], path)


def setting(case: Case) -> None:
    """`--set`, `--grid`, `--min-metric`, shapes and weights, of any characters."""
    from kdcli.models.shape import is_shape, parse_shape
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
    value = (
        damaged(rng, value.encode("utf-8", "replace")).decode("utf-8", "replace")
        if rng.random() < 0.6
        else value
    )
    key = rng.choice(leaf_keys(models[verb]))
    key = damaged(rng, key.encode()).decode("utf-8", "replace") if rng.random() < 0.15 else key
    key += rng.choice(("", "", "", ".x", ".x.y", ".", "..", ". "))
    found: Any = read(
        f"--set {key}={value!r:.200}",
        lambda: resolve(models[verb], recipe=None, sets=[f"{key}={value}"]),
    )
    if found is not None:
        _reads_back(found, models[verb], case.folder / "x.yaml")
    for reader in (
        lambda: grid_options(models["finetune"], [f"{key}={value}"]),
        lambda: metric_limits([f"{key}={value}"]),
        lambda: parse_weights(value),
        lambda: is_shape(value) and parse_shape(value, ModelShape(12, 768, 3072, 12)),
    ):
        read(f"{value!r:.200}", reader)


def _reads_back(found: Any, model: Any, path: Path) -> None:
    from kdcli.recipe.resolve import resolve

    path.write_text(text := found.to_yaml(), "utf-8")
    if resolve(model, recipe=str(path)).recipe != found.recipe:
        raise Fault(f"another recipe is read back: {text[:800]}")


def mask(case: Case) -> None:
    """A mask file with other values in its header and a right hash, or damaged as it is."""
    from kdcli.deploy.sparse.mask_file import NO_DIGEST, read_mask

    rng, path = case.rng, case.folder / "x.safetensors"
    original = sorted((case.material / "pruned").rglob("*.safetensors"))
    data = rng.choice([p for p in original if p.parent.name == "mask"]).read_bytes()
    if rng.random() < 0.15 or intact(case):
        path.write_bytes(data if intact(case) else damaged(rng, data))
    else:
        part = rng.choice(("info", "head", "info", "meta", "tensors", "body", "bomb"))
        if part == "bomb" and rng.random() < 0.05:
            data = _with_bomb(rng, data, (case.material / "bomb").read_bytes())
        (size,) = struct.unpack("<Q", data[:8])
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        meta = header["__metadata__"] | {"sha256": NO_DIGEST}
        if part in ("info", "head"):
            meta[part] = json_bytes(changed(rng, json.loads(meta[part]))).decode(
                "utf-8", "surrogatepass"
            )
        elif part == "meta":
            meta = rng.choice(
                [changed(rng, meta), {**meta, rng.choice(list(meta)): rng.choice(ODD)}]
            )
        elif part == "body":
            body = damaged(rng, body)
        header["__metadata__"] = meta
        if part == "tensors":
            header = changed(rng, header)
        keys = json_bytes(header)
        keys += b" " * (-len(keys) % 8)
        data = struct.pack("<Q", len(keys)) + keys + body
        path.write_bytes(
            data.replace(NO_DIGEST.encode(), hashlib.sha256(data).hexdigest().encode(), 1)
        )
    read("mask", lambda: read_mask(path), whole=intact(case))


def _with_bomb(rng: random.Random, data: bytes, bomb: bytes) -> bytes:
    """A mask file in which one part unpacks to a gigabyte."""
    import torch
    from safetensors.torch import load, save

    (size,) = struct.unpack("<Q", data[:8])
    tensors = load(data)
    name = rng.choice([key for key in tensors if key.startswith(("head.", "mask."))])
    coded = bomb if name.startswith("head.") else rng.choice((b"\0", b"\1")) + bomb[2:-4]
    tensors[name] = torch.frombuffer(bytearray(coded), dtype=torch.uint8)
    return save(tensors, json.loads(data[8 : 8 + size])["__metadata__"])


def smp_mask(case: Case) -> None:
    """An `.npy` of the authors of SMP, damaged."""
    import numpy as np

    from kdcli.deploy.sparse.mask_file import read_smp

    path, rng = case.folder / "x.npy", case.rng
    dtype = rng.choice(("u1", "u1", "i8", "f4", "O", "S5"))
    np.save(path, np.zeros(rng.choice((0, 1, 3072)), dtype), allow_pickle=True)
    data = path.read_bytes()
    if rng.random() < 0.3:
        shapes = (b"(9**99,)", b"(-1,)  ", b"(10**12,)", b"(1e9,)", b"((((),", b"([],)")
        data = data.replace(b"(3072,)", rng.choice(shapes))
    path.write_bytes(damaged(rng, data))
    read("npy", lambda: read_smp(path, _bare(case.material / "encoder")))


@functools.cache
def _bare(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModel

    return AutoModel.from_config(AutoConfig.from_pretrained(folder))


def data_rows(case: Case) -> None:
    """Files of text and of a labelled task: odd values in rows, damaged bytes, as jsonl, csv, txt,
    and gzipped."""
    from kdcli.data.labelled.task_data import open_labelled
    from kdcli.data.sources import open_source

    rng = case.rng
    kind = rng.choice(("data", "pair", "multi", "score", "tokens", "span"))
    lines = (case.material / kind / "train.jsonl").read_bytes().splitlines(keepends=True)
    ending = (
        "jsonl"
        if intact(case)
        else rng.choice(["jsonl"] * 3 + ["csv", "txt", "parquet", "jsonl.gz", "csv.gz"])
    )
    if intact(case):
        data = b"".join(lines)
    elif ending.startswith("jsonl"):
        row = rng.randrange(len(lines))
        lines[row] = json_bytes(changed(rng, json.loads(lines[row]))) + b"\n"
        data = b"".join(lines)
    elif ending.startswith("csv"):
        rows = [json.loads(line) for line in lines]
        table = [list(rows[0]), *(row.values() for row in rows)]
        data = "".join(
            ",".join(json.dumps(str(cell)) for cell in row) + "\n" for row in table
        ).encode()
    else:
        data = b"".join(lines)
    if not intact(case) and (not ending.startswith("jsonl") or rng.random() < 0.3):
        data = damaged(rng, data)
    if ending.endswith("gz"):
        data = gzip.compress(data, 1)
        data = damaged(rng, data) if rng.random() < 0.3 else data
    folder = case.folder / "own"
    folder.mkdir(exist_ok=True)
    (folder / f"train.{ending}").write_bytes(data)
    read(
        f"{ending} {data!r:.300}",
        lambda: sum(1 for _ in open_source(str(folder)).documents("train", None)),
    )
    what = f"{kind} {ending} {data!r:.300}"
    read(
        what,
        lambda: open_labelled("own", source=str(folder), log=lambda _: None),
        whole=intact(case),
    )
    shutil.rmtree(folder)


SIZES = (2, 32, 128, 4, 100, 60, 40, 100, 1000, 400)
"""The sizes of a card, which no test reads."""


def latency_report(case: Case) -> None:
    """Reports of kdcli and of the portable runner, to be combined."""
    from kdcli.deploy.old_machines.measure_encoders import SCHEMA
    from kdcli.types import Card
    from kdcli.verbs.benchmark.compare import gather

    rng, path = case.rng, case.folder / "x.json"
    cell: dict[str, Any] = {
        "device": "cpu",
        "dtype": "fp32",
        "batch_size": 1,
        "seq_len": 8,
        "padding": "full",
        "n": 9,
    }
    cell |= dict.fromkeys(("p50_ms", "p75_ms", "p90_ms", "p95_ms", "mean_ms"), 1.0) | {
        "iqr_over_p50": 0.1,
        "status": "ok",
    }
    ratio = {"median": 2.0, "low": 1.0, "high": 3.0, "unstable": False}
    if rng.random() < 0.5:
        report = json.loads((case.material / "teacher" / "report.json").read_bytes())
        name = report["models"][0]["name"]
        cell |= {"model": name, "backend": "torch", "speedup": ratio | {"baseline": name}}
        report |= {"latency": [cell]}
    else:
        report = {
            "kind": "kdcli portable latency",
            "schema": SCHEMA,
            "complete": True,
            "sha256": {},
            "settings": {},
        }
        report |= {
            "created": "",
            "environment": {},
            "models": {"2x32": {"layers": 2}},
        }
        cell |= {"model": "2x32", "backend": "portable", "p99_ms": None}
        report["rows"] = [cell | {"speedup": ratio | {"baseline": "2x32"}}]
    data = json.dumps(report).encode()
    path.write_bytes(data if intact(case) else either(rng, data))
    read(
        f"report {path.read_bytes()[-300:]!r}",
        lambda: gather([path], lambda shape: Card(shape, "bert", *SIZES, sha256=None)),
        whole=intact(case),
    )


def run_files(case: Case) -> None:
    """A run's recipe, log, report, checkpoints and best weights, damaged, when it is to go on."""
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
    path.write_bytes(either(rng, data) if path.suffix == ".json" else damaged(rng, data))
    what = f"{path.name} {path.read_bytes()!r:.300}"
    read(what, lambda: run.check(text, resume=True, overwrite=False))
    read(what, lambda: run.check(text, resume=False, overwrite=True))
    read(what, lambda: run.done)
    read(what, run.read_log)
    read(what, lambda: run.cut_log(1))
    read(what, lambda: run.load_checkpoint(lambda line: None))
    read(what, lambda: run.load_best(2))
    shutil.rmtree(folder)


def model_files(case: Case) -> None:
    """A model's config, index, tokenizer and the header of its weights, loaded as every verb
    does."""
    from kdcli.models.load import load_encoder

    rng, folder = case.rng, case.folder / "model"
    shutil.copytree(case.material / "encoder", folder)
    name = rng.choice(
        ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "index", "header")
    )
    if not intact(case):
        spoiled(rng, folder, name)
    read(name, lambda: load_encoder(str(folder)), whole=intact(case))
    os.chdir(case.folder)
    shutil.rmtree(folder)


def spoiled(rng: random.Random, folder: Path, name: str) -> None:
    """Change one file of a model's directory: odd values in JSON, an index, or the weights'
    header."""
    weights = folder / "model.safetensors"
    if name == "index":
        data = weights.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        names = dict.fromkeys((k for k in header if k != "__metadata__"), "model-1.safetensors")
        weights.rename(folder / "model-1.safetensors")
        tree: Any = {"metadata": {"total_size": len(data)}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_bytes(
            either(rng, json.dumps(tree).encode())
        )
    elif name == "header":
        data = weights.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        keys = either(rng, data[8 : 8 + size])
        length = (
            len(keys) if rng.random() < 0.8 else rng.choice((0, 1, 2**32, 2**63, 2**64 - 1, size))
        )
        weights.write_bytes(struct.pack("<Q", length) + keys + data[8 + size :])
    else:
        (folder / name).write_bytes(either(rng, (folder / name).read_bytes()))


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
