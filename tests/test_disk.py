"""Paths that a user gives, bounded JSON, and directories that are filled in place."""

import json
import os
from pathlib import Path

import pytest
from forked import killed

from kdcli.disk import (
    STAGED,
    check_writable,
    content_of,
    fill_dir,
    near_path,
    parse_json,
    read_json,
    user_path,
    without_home,
    write_atomic,
)
from kdcli.errors import UsageError


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a\udcff", "not UTF-8"),
        ("a\0b", "not UTF-8"),
        (f"there/{'n' * 256}/x", "a name of 256 bytes"),
        ("é" * 128, "a name of 256 bytes"),
        ("~nosuchuser/x", "there is no such user"),
    ],
)
def test_a_path_that_no_file_system_takes_is_refused(path, message):
    for check in (user_path, lambda path: check_writable(Path(path), directory=True)):
        with pytest.raises(UsageError, match=message):
            check(path)


def test_a_missing_path_has_the_closest_name_next_to_it(tmp_path):
    (tmp_path / "tickets").mkdir()
    assert near_path(f"{tmp_path}/tikets/") == f"; did you mean '{tmp_path}/tickets'?"
    assert near_path(f"{tmp_path}/none/x") == near_path(f"{tmp_path}/zzz") == ""
    assert near_path("dmeo", ["demo"]) == "; did you mean 'demo'?"
    # What stands there already, but is refused, is no suggestion; other names have no directory.
    assert near_path(f"{tmp_path}/tickets", ["tickets"]) == ""
    assert near_path("runs/demo", ["demo"]) == "; did you mean 'demo'?"


def test_the_longest_name_is_taken(tmp_path):
    check_writable(tmp_path / ("n" * 249), directory=True)
    with pytest.raises(UsageError, match="too long"):
        check_writable(tmp_path / ("n" * 250), directory=False)


def test_a_path_of_another_kind_is_refused_and_nothing_is_made(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    for path, directory in (
        (tmp_path, False),
        (tmp_path / "file", True),
        (tmp_path / "file" / "x" / "y", True),
    ):
        with pytest.raises(UsageError, match=r"is a (file|directory)"):
            check_writable(path, directory=directory)
    check_writable(tmp_path / "new" / "one", directory=True)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_only_objects_are_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1]}', "utf-8")
    assert read_json(tmp_path / "a.json") == {"a": [1]}
    for text in (b"null", b"[]", b"5", b'"x"'):
        with pytest.raises(UsageError, match="x must hold a JSON object"):
            parse_json(text, "x")
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_json(path)
    with pytest.raises(UsageError, match="is larger than 5 bytes"):
        read_json(tmp_path / "a.json", max_bytes=5)


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it is not a file"):
        read_json(tmp_path / "pipe")


def test_what_is_no_plain_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UsageError, match="is a device or a pipe; it must be a file"):
            check_writable(path, directory=False)
    with pytest.raises(UsageError, match="is not a regular file"):
        write_atomic(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("target", ["loop", "missing"])
def test_nothing_can_be_created_through_a_link_that_leads_nowhere(target, tmp_path):
    (tmp_path / "loop").symlink_to(target)
    for path in (tmp_path / "loop", tmp_path / "loop" / "x"):
        with pytest.raises(UsageError, match=r"the link .*loop leads nowhere"):
            check_writable(path, directory=True)


def test_a_link_stays_a_link_when_its_file_is_written(tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "place" / "file")
    for text in ("new", "newer"):
        write_atomic(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "place" / "file").read_text("utf-8") == text


def filled(folder: Path, text: str) -> None:
    with fill_dir(folder, last="done.json", clear=True) as aside:
        for name in ("a", "done.json", "z"):
            (aside / name).write_text(text, "utf-8")


def test_a_directory_filled_in_place_is_whole_or_can_be_filled_again(tmp_path):
    folder, after = tmp_path / "out", 0
    filled(folder, "old")
    inode = folder.stat().st_ino
    while killed(after := after + 1, lambda: filled(folder, "new")):
        texts = {p.name: p.read_text("utf-8") for p in content_of(folder)}
        # Without `done.json` in its place it lies in what was staged, so that the directory is
        # known as ours.
        assert (
            set(texts.values()) in ({"old"}, {"new"})
            or (folder / STAGED / "done.json").exists()
            or texts == {}
        )
        if texts.get("done.json") == "new":
            assert texts == dict.fromkeys(("a", "done.json", "z"), "new")
        filled(folder, "old")
        assert {p.name: p.read_text("utf-8") for p in content_of(folder)} == dict.fromkeys(
            ("a", "done.json", "z"), "old"
        )
    assert after > 8
    assert folder.stat().st_ino == inode
    assert (
        json.dumps(sorted(p.read_text("utf-8") for p in content_of(folder)))
        == '["new", "new", "new"]'
    )


def test_an_error_while_filling_leaves_what_was_there(tmp_path):
    def fail(folder: Path) -> None:
        with fill_dir(folder, last="done.json", clear=True) as aside:
            (aside / "a").write_text("new", "utf-8")
            raise UsageError("no")

    filled(tmp_path / "old", "old")
    for folder in (tmp_path / "new", tmp_path / "old"):
        with pytest.raises(UsageError, match="no"):
            fail(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert sorted(p.name for p in content_of(tmp_path / "old")) == ["a", "done.json", "z"]


def test_a_directory_in_a_filled_directory_is_replaced(tmp_path):
    for text in ("old", "new"):
        with fill_dir(tmp_path / "out", last="done.json") as aside:
            (aside / "inside").mkdir()
            (aside / "inside" / text).write_text(text, "utf-8")
    assert [p.name for p in (tmp_path / "out" / "inside").iterdir()] == ["new"]


@pytest.mark.parametrize(
    ("home", "text", "shown"),
    [
        ("/users", "/users/a, (/users), /data/users/b", "~/a, (~), /data/users/b"),
        ("/users", "x/users/c and /users", "x/users/c and ~"),
        ("/home/al", "/home/al/x, /home/alice, /home/al-2", "~/x, /home/alice, /home/al-2"),
        ("/", "/x", "/x"),
    ],
)
def test_the_home_directory_is_a_tilde_where_a_path_begins(monkeypatch, home, text, shown):
    monkeypatch.setenv("HOME", home)
    assert without_home(text) == shown
