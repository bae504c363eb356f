"""Damage files that kdcli wrote and reads again.

A reader must refuse the file with a message, or read what it held before.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.damage import damage, damage_json
from tools.faults.files import is_intact, read

RECIPE = "verb: finetune\n"
ROWS = np.arange(9, dtype=np.uint64) * 10**17


class Written(NamedTuple):
    """A file that kdcli writes.

    Attributes:
        file: Its path in the directory of a case.
        write: Writes it, and what it needs, into a directory; the second argument is the material.
        read: Reads it.
    """

    file: str
    write: Callable[[Path, Path], object]
    read: Callable[[Path], object]


def _export(folder: Path, material: Path) -> None:
    shutil.copytree(material / "export", folder / "export")


def _read_export(folder: Path) -> object:
    from kdcli.deploy.exported import open_export

    export = open_export(str(folder / "export"))
    return export.file, export.outputs, export.card, export.format, export.precision


def _rows(folder: Path, material: Path) -> None:
    from kdcli.models.model import write_training_rows

    write_training_rows(folder, ROWS)


def _read_rows(folder: Path) -> object:
    from kdcli.models.model import training_rows

    return training_rows(str(folder))


def _partition(folder: Path, material: Path) -> None:
    from kdcli.data.labelled.partition import Partition

    Partition(ROWS[:4], ROWS[4:]).write(folder / "partition.safetensors")


def _read_partition(folder: Path) -> object:
    from kdcli.data.labelled.partition import Partition

    partition = Partition.read(str(folder / "partition.safetensors"))
    return partition.is_training(ROWS)


def _journal(folder: Path, material: Path) -> None:
    from kdcli.engine.run_dir import RunDir
    from kdcli.verbs.compress.record import Attempt, Look, Record

    run = RunDir.claim(folder / "run", RECIPE)
    record = Record(run=run)
    record.add(Attempt(place="1/a", seconds=2.0), Look("1/a"))
    run.release()


def _read_journal(folder: Path) -> object:
    from kdcli.engine.run_dir import RunDir
    from kdcli.verbs.compress.record import Record

    record = Record.read(RunDir(folder / "run"))
    return record.seconds(), record.looks(), record.inputs, record.last_question


def _run(folder: Path, material: Path) -> None:
    shutil.copytree(material / "teacher", folder / "run")


def _read_report(folder: Path) -> object:
    from kdcli.report.finish import RunResult

    result = RunResult.read(folder / "run")
    return list(result.renderables()), result.to_frame(), result._repr_html_()


def _inputs(folder: Path, material: Path) -> None:
    from kdcli.engine.run_dir import RunDir

    run = RunDir.claim(folder / "run", RECIPE)
    run.record_inputs({"a": "1", "b": "2"})
    run.release()


def _read_inputs(folder: Path) -> None:
    from kdcli.engine.run_dir import RunDir

    RunDir(folder / "run").check_inputs({"a": "1", "b": "2"})


def _read_manifest(folder: Path) -> None:
    from kdcli.engine.inputs import check_no_foreign_files

    check_no_foreign_files(folder / "run")


def _tokens(folder: Path, material: Path) -> None:
    from kdcli.data.sources import open_source
    from kdcli.data.text.tokenise import tokenise
    from kdcli.models.load import load_tokenizer

    source, tokenizer = (
        open_source(str(material / "text.txt")),
        load_tokenizer(str(material / "encoder")),
    )
    tokenise(source, tokenizer, None, folder / "tokens")
    shutil.copytree(material / "encoder", folder / "encoder")


def _read_tokens(folder: Path) -> object:
    from kdcli.data.text.shards import Frame, TokenShards
    from kdcli.models.load import load_tokenizer

    shards, tokenizer = TokenShards.read(folder / "tokens"), load_tokenizer(str(folder / "encoder"))
    shards.check(folder / "tokens", tokenizer, Frame.of(tokenizer))
    shards.close_account()
    return shards.splits, shards.tokens_of("train")


def _open_signals(folder: Path) -> Any:
    import torch
    from accelerate import Accelerator
    from transformers import AutoModel

    from kdcli.data.labelled.features import TokenizedRows
    from kdcli.engine.session import Session
    from kdcli.models.capture import capture
    from kdcli.targets.cache import SignalStore, StorePlace
    from kdcli.types import Needs

    ids = np.arange(5, 17, dtype=np.int32)
    rows = TokenizedRows(
        ids_T=ids,
        types_T=None,
        ends=np.array([3, 8, 12]),
        labels=np.zeros(3, np.int64),
        example=np.arange(3),
        truncated=0,
        kind="class",
        pad_id=0,
    )
    needs = Needs(hidden=frozenset({1}))
    torch.manual_seed(0)
    teacher = capture(AutoModel.from_pretrained(folder / "encoder"), needs)
    session = Session(Accelerator(cpu=True), torch.device("cpu"))
    return SignalStore.open(
        StorePlace(folder / "signals", 1 << 20), rows, teacher, needs, "f", session
    )


def _signals(folder: Path, material: Path) -> None:
    shutil.copytree(material / "encoder", folder / "encoder")
    store = _open_signals(folder)
    np.save(folder / "expected.npy", np.asarray(store.tokens))
    store.folder.rename(folder / "signals" / "store")
    (folder / "name").write_text(store.folder.name)


def _read_signals(folder: Path) -> None:
    (folder / "signals" / "store").rename(folder / "signals" / (folder / "name").read_text())
    if not np.array_equal(_open_signals(folder).tokens, np.load(folder / "expected.npy")):
        raise Fault("damaged signals are used")


def _card(folder: Path, material: Path) -> None:
    shutil.copytree(material / "teacher", folder / "run")


def _read_card(folder: Path) -> str:
    from kdcli.report.front import front_matter

    return front_matter(
        "x",
        base=str(folder / "run"),
        relation="finetune",
        library="transformers",
        tags=[],
        pipeline=None,
    )


FILES = {
    "tokens": Written("tokens/meta.json", _tokens, _read_tokens),
    "signals' index": Written("signals/store/index.json", _signals, _read_signals),
    "signals": Written("signals/store/tokens.bin", _signals, _read_signals),
    "card": Written("run/README.md", _card, _read_card),
    "export": Written("export/export.json", _export, _read_export),
    "training rows": Written("training_rows.safetensors", _rows, _read_rows),
    "partition": Written("partition.safetensors", _partition, _read_partition),
    "journal": Written("run/log.jsonl", _journal, _read_journal),
    "report": Written("run/report.json", _run, _read_report),
    "inputs": Written("run/checkpoints/inputs.json", _inputs, _read_inputs),
    "manifest": Written("run/.manifest.jsonl", _run, _read_manifest),
}


def spoil(rng: random.Random, path: Path) -> None:
    """Damage a file, cut it, or replace it by a directory."""
    what, data = rng.random(), path.read_bytes()
    if what < 0.05:
        path.unlink()
        path.mkdir()
    elif what < 0.15:
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif path.suffix == ".json":
        path.write_bytes(damage_json(rng, data))
    else:
        path.write_bytes(damage(rng, data))


def written(case: Case) -> None:
    """Read a damaged file that kdcli wrote."""
    name = case.rng.choice(list(FILES))
    one = FILES[name]
    one.write(case.folder, case.material)
    path = case.folder / one.file
    if not is_intact(case):
        spoil(case.rng, path)
    content = path.read_bytes()[:300] if path.is_file() else b"a directory"
    read(f"{name} {content!r}", lambda: one.read(case.folder), is_valid=is_intact(case))


KINDS = [Kind("written", 4_000, written, chunk=100)]
