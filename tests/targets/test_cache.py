"""The teacher's signals on disk: equal to the live ones up to rounding; damaged files are computed
again."""

import os
import random
import shutil
import signal
from collections import namedtuple

import numpy as np
import pytest
import torch
from encoders import tiny_config, tiny_encoder
from forked import Child, Forked, in_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import logged_to
from torch import nn
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification
from transformers import AutoModelForTokenClassification as ForTokens

from kdcli.data.labelled.features import TokenizedRows
from kdcli.engine.session import Session, start
from kdcli.errors import MachineError, UsageError
from kdcli.models.capture import capture, prepare_teacher
from kdcli.models.embedding_format import EmbeddingFormat, Pool
from kdcli.targets import cache
from kdcli.targets.cache import (
    DEFAULT_GROUPS,
    GroupSize,
    RecordLayout,
    SignalStore,
    StorePlace,
)
from kdcli.types import Needs, Signals

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EVERYTHING = Needs(*(frozenset({1, 2}),) * 3, hidden=frozenset({0, 1, 2}), logits=True)
HEADS = dict.fromkeys(("class", "score", "multi"), AutoModelForSequenceClassification)
HEADS |= {"tokens": ForTokens, "span": AutoModelForQuestionAnswering}
LENGTHS = (7, 2, 19, 3, 3, 30, 11, 5)


def rows_of(lengths=LENGTHS, kind="class", seed=0, types=True):
    rng = np.random.default_rng(seed)
    lengths, total = np.array(lengths), sum(lengths)
    labels = {
        "class": rng.integers(0, 3, len(lengths)),
        "score": rng.random(len(lengths), dtype=np.float32),
        "multi": rng.integers(0, 2, (len(lengths), 3)).astype(np.float32),
        "tokens": rng.integers(0, 3, total),
        "span": rng.integers(0, 2, (len(lengths), 2)),
    }[kind]
    ids, segments = (
        rng.integers(5, 60, total).astype(np.int32),
        rng.integers(0, 2, total).astype(np.int8),
    )
    how = {
        "labels": labels,
        "example": np.arange(len(lengths)),
        "truncated": 0,
        "pad_id": 0,
        "kind": kind,
    }
    return TokenizedRows(
        ids_T=ids, types_T=segments if types else None, ends=np.cumsum(lengths), **how
    )


def headed(kind="class", model_type="bert", dtype=torch.float32):
    torch.manual_seed(0)
    labels = {"score": 1, "span": 2}.get(kind, 3)
    model = HEADS[kind].from_config(
        tiny_config(model_type, initializer_range=0.3, num_labels=labels)
    )
    return prepare_teacher(model, dtype)


def opened(
    folder,
    rows,
    needs=EVERYTHING,
    *,
    teacher=None,
    log=None,
    limit=1 << 30,
    fingerprint="f",
    group_size=DEFAULT_GROUPS,
):
    session = Session(start(CPU, torch.float32), CPU)
    teacher, place = teacher or capture(headed(rows.kind), needs), StorePlace(folder, limit)
    with logged_to([] if log is None else log):
        return SignalStore.open(place, rows, teacher, needs, fingerprint, session, group_size)


def tensors_of(signals):
    actual = {
        f"{kind}.{n}": x
        for kind in ("q", "k", "v", "hidden")
        for n, x in getattr(signals, kind).items()
    }
    return actual | ({} if signals.logits is None else {"logits": signals.logits})


def cached(store, indices):
    return tensors_of(store.signals(store.batch(np.array(indices))))


def same(some, others):
    return some.keys() == others.keys() and all(
        torch.equal(x, others[name]) for name, x in some.items()
    )


def store_of(folder):
    (store,) = (p for p in folder.iterdir() if p.is_dir())
    return store


def logged(log, words):
    return any(words in line for line in log)


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *((kind, "bert") for kind in HEADS),
        ("class", "distilbert"),
        ("tokens", "distilbert"),
        ("span", "roformer"),
    ],
)
def test_cached_signals_are_the_live_ones(tmp_path, kind, model_type):
    rows = rows_of(kind=kind, types=model_type != "distilbert")
    teacher = capture(headed(kind, model_type), EVERYTHING)
    # More than one group, so that the rows lie in another order than they are read in.
    store = opened(tmp_path, rows, teacher=teacher, group_size=GroupSize(40, 3))
    for indices in ([5, 0, 3], [1], [2, 2, 7], list(range(8))):
        batch = store.batch(np.array(indices))
        actual, live = store.signals(batch), teacher(rows.batch(np.array(indices)))
        assert torch.equal(actual.mask, live.mask)
        assert torch.equal(actual.labels, live.labels)
        ours, theirs = tensors_of(actual), tensors_of(live)
        assert len(ours) == 10
        real = live.mask.bool()
        for name, x in theirs.items():
            assert (ours[name].dtype, ours[name].shape) == (torch.float32, x.shape)
            ours_real, theirs_real = (
                t.transpose(1, 2) if name[0] in "qkv" else t for t in (ours[name], x)
            )
            if name != "logits" or kind in ("tokens", "span"):
                assert (ours_real[~real] == 0).all()
                ours_real, theirs_real = ours_real[real], theirs_real[real]
            # Half of the last of bfloat16's 8 binary digits; logits are kept in full.
            relative = 1e-6 if name == "logits" else 2.0**-8
            torch.testing.assert_close(ours_real, theirs_real, rtol=relative, atol=1e-5)


def test_the_number_format_is_the_teachers(tmp_path):
    rows = rows_of()
    teacher = capture(headed(dtype=torch.bfloat16), EVERYTHING)
    live = tensors_of(teacher(rows.batch(np.arange(2))))
    actual = cached(opened(tmp_path, rows, teacher=teacher), [0, 1])
    for name, x in actual.items():
        assert x.dtype == (torch.float32 if name == "logits" else torch.bfloat16)
        torch.testing.assert_close(x[0].float(), live[name][0].float(), rtol=0.05, atol=0.05)


def test_no_signal_reaches_the_model_and_the_batch_is_as_before(tmp_path):
    rows = rows_of()
    store = opened(tmp_path, rows)
    expected = rows.batch(np.arange(3))
    batch = store.batch(np.arange(3))
    assert len(store) == len(rows)
    assert {key.split(".")[0] for key in batch.keys() - expected.keys()} == {"teacher"}
    student, seen = headed(), []
    student.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(set(kwargs)), with_kwargs=True
    )
    listening = capture(student, Needs(logits=True))
    listening(batch)
    store.signals(batch)
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[key], x) for key, x in expected.items())
    listening(batch)
    assert seen == [{"input_ids", "attention_mask", "token_type_ids"}] * 2


@pytest.mark.parametrize("needs", [Needs(logits=True), Needs(v=frozenset({2}))])
def test_only_what_is_needed_is_kept(tmp_path, needs):
    rows = rows_of()
    store = opened(tmp_path, rows, needs)
    live = tensors_of(capture(headed(), needs)(rows.batch(np.arange(8))))
    assert cached(store, [0, 1, 2]).keys() == live.keys()
    tokens, values = len(rows.ids_T), 4 * 8
    size = 8 * 3 * 4 if needs.logits else tokens * values * 2
    assert RecordLayout.of(capture(headed(), needs), rows, needs, CPU).size(rows) == size
    assert (
        sum((store.folder / name).stat().st_size for name in ("tokens.bin", "logits.bin")) == size
    )


@pytest.mark.parametrize("length", [1e6, 1.0, 1e-7])
def test_vectors_of_any_length_are_kept(tmp_path, length):
    """float16 would make them infinite or zero. Vectors of length 1 take two bytes a component."""
    rows, needs = rows_of(), Needs(pooled=True)
    encoder = tiny_encoder("bert")
    norm = encoder.encoder.layer[-1].output.LayerNorm
    with torch.no_grad():
        norm.weight *= length
    fmt = EmbeddingFormat("mean", normalize=length == 1)
    teacher = capture(prepare_teacher(encoder, torch.float32), needs, Pool(fmt))
    store = opened(tmp_path, rows, needs, teacher=teacher)
    live = teacher(rows.batch(np.array([0, 1, 2]))).pooled
    stored = torch.from_numpy(store.vectors(np.array([0, 1, 2])).astype(np.float32))
    torch.testing.assert_close(stored, live, rtol=1e-3 if length == 1 else 1e-5, atol=0)
    assert store.logits.itemsize == (2 if length == 1 else 4)


def test_signals_of_masked_tokens_are_not_kept(tmp_path):
    with pytest.raises(ValueError, match="masked"):
        opened(
            tmp_path,
            rows_of(),
            Needs(masked_logits=True),
            teacher=capture(headed(), Needs(logits=True)),
        )


class Counting(nn.Module):
    """A teacher that counts the rows it reads; dropout would make every pass another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.read = inner, 0
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch) -> Signals:
        assert not torch.is_grad_enabled()
        self.read += len(batch["input_ids"])
        signals = self.inner(batch)
        signals.logits = self.dropout(signals.logits)
        return signals


def counting():
    return Counting(capture(headed(), EVERYTHING)).train()


def test_the_teacher_reads_every_row_once_and_what_is_there_is_only_read(tmp_path):
    teacher, log = counting(), []
    first = cached(opened(tmp_path, rows_of(), teacher=teacher, log=log), range(8))
    # One more for the widths.
    assert teacher.read == len(LENGTHS) + 1
    assert logged(log, "computing")
    log.clear()

    before = {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))}
    assert same(first, cached(opened(tmp_path, rows_of(), teacher=teacher, log=log), range(8)))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))} == before
    assert teacher.read == len(LENGTHS) + 2
    assert not logged(log, "computing")


def other_array(name, at):
    rows = rows_of()
    getattr(rows, name)[at] ^= 1
    return rows


@pytest.mark.parametrize(
    "changed",
    [
        {"fingerprint": "g"},
        {"needs": Needs(hidden=frozenset({1}))},
        {"rows": rows_of((*LENGTHS[:-2], LENGTHS[-1], LENGTHS[-2]))},
        {"rows": other_array("types_T", 0)},
        {"rows": other_array("ids_T", 3)},
        {"teacher": torch.bfloat16},
    ],
)
def test_another_teacher_or_other_rows_have_a_store_of_their_own(tmp_path, changed):
    opened(tmp_path, rows_of())
    if "teacher" in changed:
        changed = {"teacher": capture(headed(dtype=changed["teacher"]), EVERYTHING)}
    opened(tmp_path, **{"rows": rows_of()} | changed)
    assert sum(p.is_dir() for p in tmp_path.iterdir()) == 2


def damaged(path, whole, damage):
    if damage == "missing":
        path.unlink()
    elif isinstance(damage, int):
        turned = bytearray(whole)
        turned[damage] ^= 1 << damage % 8
        path.write_bytes(turned)
    else:
        os.truncate(path, {"cut": len(whole) - 1, "longer": len(whole) + 1, "emptied": 0}[damage])


@pytest.mark.parametrize("name", ["tokens.bin", "logits.bin", "index.json"])
def test_damage_anywhere_is_found_and_all_computed_again(tmp_path, name, monkeypatch):
    monkeypatch.setattr(cache, "HASHED_BYTES", 100)
    rows = rows_of()
    expected = cached(opened(tmp_path, rows), range(8))
    path = store_of(tmp_path) / name
    whole = path.read_bytes()
    places = {0, len(whole) - 1, *random.Random(0).sample(range(len(whole)), 3)}
    for damage in (*places, "cut", "longer", "emptied", "missing"):
        damaged(path, whole, damage)
        log = []
        assert same(expected, cached(opened(tmp_path, rows, log=log), range(8)))
        assert logged(log, "damaged")
        assert path.read_bytes() == whole, "computed twice it is the same to the bit"


def die_while_writing(folder):
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    opened(folder, rows_of())


def test_what_a_killed_process_left_is_neither_read_nor_kept(tmp_path):
    assert Child(lambda: die_while_writing(tmp_path)).wait() == -signal.SIGKILL
    (left,) = tmp_path.glob(".*.part")
    assert (left / "tokens.bin").is_file()
    log = []
    store = opened(tmp_path, rows_of(), log=log)
    assert logged(log, "computing")
    assert same(cached(store, range(8)), cached(opened(tmp_path / "other", rows_of()), range(8)))
    assert list(tmp_path.glob(".*.part")) == []


class Shares(nn.Module):
    """A teacher that counts the rows it reads, and is killed before it reads more than `most`."""

    def __init__(self, most=10**6):
        super().__init__()
        self.read, self.most = 0, most

    def forward(self, batch) -> Signals:
        self.read += len(batch["input_ids"])
        if self.read > self.most:
            os.kill(os.getpid(), signal.SIGKILL)
        ids = batch["input_ids"].float()
        return Signals(hidden={0: ids[..., None]}, logits=ids.sum(1, keepdim=True) / 7)


SHARED_NEEDS = Needs(hidden=frozenset({0}), logits=True)
LONG_ROWS = (500,) * 320  # 20 groups of 16 rows


def shared(folder, teacher):
    """Open a store, and return what a process has read and finds in it."""
    store = opened(folder, rows_of(LONG_ROWS), SHARED_NEEDS, teacher=teacher)
    files = ("tokens.bin", "logits.bin", "index.json")
    content = b"".join((store.folder / name).read_bytes() for name in files)
    found = {"read": torch.tensor(teacher.read - 1)}
    return found | {"content": torch.frombuffer(bytearray(content), dtype=torch.uint8)}


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    alone = shared(tmp_path_factory.mktemp("alone"), Shares())
    assert alone["read"] == 320
    return alone["content"]


@pytest.mark.parametrize("common", [True, False])
def test_processes_share_the_pass_and_find_the_bits_of_one(tmp_path, common, of_one_process):
    """Each reads half of the rows, on one machine and on two without a common directory."""

    def work():
        return shared(tmp_path / ("all" if common else os.environ["RANK"]), Shares())

    both = in_ranks(2, work)
    assert [found["read"].item() for found in both] == [160, 160]
    assert all(torch.equal(found["content"], of_one_process) for found in both)
    left = [path.name for path in tmp_path.rglob(".*") if path.suffix != ".lock"]
    assert left == []


def test_a_machine_that_has_the_signals_gives_them_to_the_other(tmp_path, of_one_process):
    shared(tmp_path / "1", Shares())
    both = in_ranks(2, lambda: shared(tmp_path / os.environ["RANK"], Shares()))
    assert [found["read"].item() for found in both] == [0, 0]
    assert all(torch.equal(found["content"], of_one_process) for found in both)


def test_processes_with_other_teachers_do_not_share_a_pass(tmp_path):
    def work():
        with pytest.raises(UsageError, match="hash of the teacher and the rows"):
            opened(
                tmp_path, rows_of(), SHARED_NEEDS, teacher=Shares(), fingerprint=os.environ["RANK"]
            )
        return {"nothing": torch.tensor(len(list(tmp_path.iterdir())))}

    assert [found["nothing"].item() for found in in_ranks(2, work)] == [0, 0]


@pytest.mark.parametrize("common", [True, False])
def test_of_a_killed_process_the_complete_shards_stay(tmp_path, common, of_one_process):
    """Process 1 dies in its fourth shard. The other one has then computed its ten."""

    def work(most=10**6):
        return shared(tmp_path / ("all" if common else os.environ["RANK"]), Shares(most))

    # One row is read to tell the widths.
    killed = lambda: work(1 + 3 * 16 if os.environ["RANK"] == "1" else 10**6)  # noqa: E731
    in_ranks(2, killed, ends=[1, -signal.SIGKILL])
    both = in_ranks(2, work)
    assert [found["read"].item() for found in both] == [4 * 16, 3 * 16]
    assert all(torch.equal(found["content"], of_one_process) for found in both)


def test_shards_of_a_killed_process_are_read_again_only_if_they_are_whole(tmp_path, of_one_process):
    assert Child(lambda: shared(tmp_path, Shares(1 + 5 * 16))).wait() == -signal.SIGKILL
    (tokens,) = tmp_path.glob(".*.part/tokens.bin")
    with tokens.open("r+b") as file:
        file.seek(3 * 16 * 500 * 2)
        file.write(b"damaged")
    found = shared(tmp_path, Shares())
    assert found["read"] == 16 * 16
    assert torch.equal(found["content"], of_one_process)


class Aloud:
    @staticmethod
    def append(line):
        print(line, flush=True)


def open_aloud(folder):
    opened(folder, rows_of(), log=Aloud)


def test_of_two_processes_one_computes_and_the_other_waits(tmp_path):
    others, first_lines = [], []

    class Slow(Counting):
        def forward(self, batch):
            # The first row only tells the widths.
            if self.read == 1:
                others.append(Forked(open_aloud, tmp_path))
                first_lines.append(others[0].first_line())
            return super().forward(batch)

    opened(tmp_path, rows_of(), teacher=Slow(capture(headed(), EVERYTHING)))
    out, stderr = others[0].communicate()
    assert others[0].returncode == 0, stderr
    assert "waiting for it" in first_lines[0]
    (_, read) = out.splitlines()
    assert "are read from" in read


def test_a_store_over_the_limit_logs_both_sizes_and_computes_nothing(tmp_path):
    teacher, log = counting(), []
    rows = rows_of((30,) * 100)
    size = RecordLayout.of(teacher, rows, EVERYTHING, CPU).size(rows)
    assert size == 3000 * 9 * 32 * 2 + 100 * 3 * 4
    teacher.read = 0
    assert opened(tmp_path, rows, teacher=teacher, log=log, limit=1_100_000) is None
    assert opened(tmp_path, rows, teacher=teacher, limit=size - 1) is None
    assert teacher.read == 2
    assert logged(log, "1.7 MB, and the limit is 1.1 MB")
    assert list(tmp_path.iterdir()) == []
    assert opened(tmp_path, rows, teacher=teacher, limit=size) is not None


def test_a_disk_without_room_is_logged_and_nothing_computed(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(cache.RESERVED_BYTES + 100))
    teacher, log = counting(), []
    assert opened(tmp_path, rows_of(), teacher=teacher, log=log) is None
    assert teacher.read == 1
    assert logged(log, "1,073.7 MB")
    assert [p for p in tmp_path.iterdir() if p.suffix != ".lock"] == []


def test_a_disk_that_fills_up_is_an_error_with_a_name_and_leaves_nothing(tmp_path, full_disk):
    full_disk(os, "fsync")
    with pytest.raises(MachineError, match="the disk is full"):
        opened(tmp_path, rows_of())
    assert [p for p in tmp_path.iterdir() if p.suffix != ".lock"] == []


def test_memory_that_suffices_for_fewer_rows(tmp_path):
    class Small(Counting):
        def forward(self, batch):
            if batch["input_ids"].numel() > limit:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(batch)

    limit = 40
    expected = cached(opened(tmp_path / "a", rows_of()), range(8))
    actual = cached(
        opened(tmp_path / "b", rows_of(), teacher=Small(capture(headed(), EVERYTHING))), range(8)
    )
    torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=1e-5)
    limit = 20
    with pytest.raises(MachineError, match="out of memory"):
        opened(tmp_path / "c", rows_of(), teacher=Small(capture(headed(), EVERYTHING)))


class Echo(nn.Module):
    """A teacher whose signals are the tokens themselves, which bfloat16 holds exactly."""

    def forward(self, batch) -> Signals:
        ids = batch["input_ids"].float()
        return Signals(
            hidden={0: ids[..., None].expand(-1, -1, 3)}, logits=ids.sum(1, keepdim=True)
        )


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    at_once=st.integers(1, 40),
    data=st.data(),
)
def test_every_row_has_its_own_signals_and_zeros_behind(tmp_path_factory, lengths, at_once, data):
    rows = rows_of(lengths)
    indices = np.array(
        data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6))
    )
    needs = Needs(hidden=frozenset({0}), logits=True)
    folder, size = tmp_path_factory.mktemp("store"), GroupSize(at_once)
    store = opened(folder, rows, needs, teacher=Echo(), group_size=size)
    batch = store.batch(indices)
    actual = store.signals(batch)
    # The padding of the ids is 0 too.
    assert torch.equal(actual.hidden[0], batch["input_ids"].float()[..., None].expand(-1, -1, 3))
    assert torch.equal(actual.logits, batch["input_ids"].float().sum(1, keepdim=True))
