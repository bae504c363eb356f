"""Derived layouts are kept on disk: by all that decides them, and never believed if damaged."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from encoders import tiny_config, tiny_encoder

from kdcli.models import layout_cache
from kdcli.models.layout import Layout, layout_for
from kdcli.models.shape import build_student, shape_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache on disk, and a process that has derived nothing."""
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "cache"))
    layout_cache.forget()
    yield tmp_path / "cache" / "layouts"
    layout_cache.forget()


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.json"))


def in_a_new_process(kind: str, **changes: object) -> Layout:
    layout_cache.forget()
    return layout_for(tiny_config(kind, **changes))


def test_all_sizes_of_a_type_share_an_entry(cache):
    row = in_a_new_process("bert")
    (entry,) = entries(cache)
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    assert in_a_new_process("bert", intermediate_size=56, vocab_size=99, **sizes) == row
    assert entries(cache) == [entry]


def test_a_student_has_its_teachers_entry(cache):
    teacher = tiny_encoder("gte")
    shape = replace(shape_of(teacher.config), layers=1, hidden=16)
    student = build_student(teacher, shape).model
    layout_cache.forget()
    assert layout_for(student.config) == layout_for(teacher.config)
    assert len(entries(cache)) == 1


@pytest.mark.parametrize(
    "changes",
    [{"position_embedding_type": "absolute"}, {"emb_layer_norm_before": True}],
    ids=["positions", "norm"],
)
def test_settings_that_change_the_network_have_entries_of_their_own(cache, changes):
    in_a_new_process("esm")
    in_a_new_process("esm", **changes)
    assert len(entries(cache)) == 2


def test_what_an_entry_says_is_used(cache):
    row = in_a_new_process("bert")
    (entry,) = entries(cache)
    entry.write_bytes(entry.read_bytes().replace(b'"local":false', b'"local":true'))
    assert in_a_new_process("bert") == replace(row, local=True)


def test_another_version_of_torch_has_entries_of_its_own(cache, monkeypatch):
    row = in_a_new_process("bert")
    monkeypatch.setattr("torch.__version__", "9.9.9")
    assert in_a_new_process("bert") == row
    assert len(entries(cache)) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"layers": 3}',
        b'{"rotary": "thirds"}',
        b'{"of": "bert"}',
    ],
)
def test_a_damaged_entry_is_written_anew(cache, content):
    row = in_a_new_process("bert")
    (entry,) = entries(cache)
    right = entry.read_bytes()
    entry.write_bytes(content)
    assert in_a_new_process("bert") == row
    assert entry.read_bytes() == right


@pytest.mark.parametrize("block", ["file", "folder"])
def test_without_a_cache_layouts_are_derived(cache, block):
    row = in_a_new_process("bert")
    if block == "file":
        shutil.rmtree(cache.parent)
        cache.parent.write_text("in the way", "utf-8")
    else:
        (entry,) = entries(cache)
        entry.unlink()
        entry.mkdir()
    assert in_a_new_process("bert") == row


def test_a_model_without_layers_is_kept_with_its_reason(cache):
    row = in_a_new_process("fnet")
    assert row.missing
    assert "no softmax over all tokens" in row.missing
    (entry,) = entries(cache)
    derived = entry.stat().st_mtime_ns
    assert in_a_new_process("fnet") == row
    assert entry.stat().st_mtime_ns == derived
