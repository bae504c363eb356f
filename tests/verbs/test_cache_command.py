"""`kdcli cache`: what it lists, and what it never deletes."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kdcli
from kdcli import disk
from kdcli.cli import app
from kdcli.disk import cache_key, lock_note, note_of, open_note, use_entry
from kdcli.errors import MachineError
from kdcli.verbs.cache import run as cache_verb
from kdcli.verbs.cache.settings import KINDS, CleanOptions

DAY = 86_400
HOLD = """
import sys
from pathlib import Path
from kdcli.disk import use_entry

use_entry(Path(sys.argv[1]), "held")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KDCLI_CACHE", str(folder))
    return folder


def add(cache: Path, kind: str, number: int = 0, *, days: float = 0, size: int = 1000) -> Path:
    """Write an entry as kdcli does: a directory, its writer's lock and a note."""
    path = cache / kind / cache_key(kind, number)
    path.mkdir(parents=True)
    (path / "data.bin").write_bytes(bytes(size))
    lock, note = path.with_name(f".{path.name}.lock"), note_of(path)
    lock.touch()
    note.write_text(f"{kind} {number}")
    then = time.time() - days * DAY
    for each in (path / "data.bin", path, lock, note):
        os.utime(each, (then, then))
    return path


def run(*words, **options):
    return CliRunner().invoke(app, ["cache", *words], **options)


def printed(*words):
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def names(entries):
    return {entry["name"] for entry in entries}


def test_ls_shows_kind_origin_size_and_last_use(cache):
    small, large = add(cache, "vectors", 1), add(cache, "vectors", 2, days=3, size=2_000_000)
    use_entry(cache / "vocabularies" / f"{cache_key('v')}.safetensors", "wiki, bert")
    (cache / "vocabularies" / f"{cache_key('v')}.safetensors").write_bytes(bytes(10))
    listed = printed("ls")
    assert [(e["kind"], e["name"], e["about"]) for e in listed["entries"]] == [
        ("vectors", large.name, "vectors 2"),
        ("vectors", small.name, "vectors 1"),
        ("vocabularies", cache_key("v"), "wiki, bert"),
    ]
    assert listed["entries"][0]["bytes"] == 2_000_000 + len("vectors 2")
    assert listed["bytes"] == sum(entry["bytes"] for entry in listed["entries"])
    assert listed["folder"] == str(cache)
    table = run("ls").stdout
    assert re.search(r"vectors +│ vectors 2 +│ +2\.00 MB │ +3 d ago", table)
    assert re.search(r"^3 entries, 2.00 MB in ", table, re.MULTILINE)


def test_an_entry_without_a_note_was_made_by_an_older_version(cache):
    folder = cache / "vectors" / cache_key("old")
    folder.mkdir(parents=True)
    assert printed("ls")["entries"][0]["about"] == ""
    assert "made by an older version" in run("ls").stdout


def test_an_empty_cache(cache):
    assert printed("ls")["entries"] == []
    assert run("ls").stdout.startswith("nothing in ")
    assert run("clean", "--yes").stdout == "deleted nothing\n"


def test_every_folder_of_the_cache_is_a_kind():
    source = "".join(p.read_text("utf-8") for p in Path(kdcli.__file__).parent.rglob("*.py"))
    folders = set(re.findall(r'cache_dir\(\) / "(\w+)"', source)) | {"objects"}
    assert folders == KINDS.keys() - {"measurements"}


def test_clean_by_kind_removes_the_entry_with_its_note_and_lock(cache):
    kept = add(cache, "corpora")
    add(cache, "vectors")
    (cache / "vectors" / f".{cache_key('killed')}.part").mkdir()
    assert len(printed("clean", "vectors")["deleted"]) == 2
    assert list((cache / "vectors").iterdir()) == []
    assert kept.is_dir()


def test_clean_by_age(cache):
    old, new = add(cache, "scores", 1, days=31), add(cache, "scores", 2, days=29)
    assert names(printed("clean", "--older-than", "30d")["deleted"]) == {old.name}
    assert new.is_dir()
    use_entry(new)
    assert printed("clean", "--older-than", "1h")["deleted"] == []


def test_objects_are_deleted_only_by_name(cache):
    data, other = add(cache, "objects", days=50), add(cache, "scores", days=50)
    assert names(printed("clean", "--older-than", "30d")["deleted"]) == {other.name}
    assert printed("clean", "--yes")["deleted"] == []
    assert data.is_dir()
    printed("clean", "objects")
    assert not data.exists()


def test_clean_without_arguments_asks(cache, monkeypatch):
    entry = add(cache, "vectors")
    refused = run("clean")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    monkeypatch.setattr("kdcli.verbs.cache.run._can_ask", lambda: True)
    assert "deleted nothing" in run("clean", input="n\n").output
    assert entry.is_dir()
    answered = run("clean", input="y\n")
    assert "vectors 0" in answered.stderr
    assert not entry.exists()


def test_an_entry_that_a_process_uses_is_kept(cache):
    held, free = add(cache, "vectors", 1), add(cache, "vectors", 2)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    cleaned = printed("clean", "--yes")
    assert (names(cleaned["deleted"]), names(cleaned["in_use"])) == ({free.name}, {held.name})
    assert "which a running kdcli uses" in run("clean", "--yes").stdout
    assert (held / "data.bin").is_file()
    process.kill()
    process.communicate()
    assert names(printed("clean", "--yes")["deleted"]) == {held.name}


def test_links_are_not_followed(cache, tmp_path):
    outside = tmp_path / "outside"
    target = add(outside, "vectors")
    (cache / "scores").mkdir(parents=True)
    (cache / "scores" / cache_key("link")).symlink_to(target)
    (cache / "vectors").symlink_to(outside / "vectors")
    inside = add(cache, "corpora")
    (inside / "more").symlink_to(target)
    sizes = {entry["kind"]: entry["bytes"] for entry in printed("ls")["entries"]}
    assert sizes["scores"] < 1000
    assert {entry["kind"] for entry in printed("ls")["entries"]} == {"corpora", "scores"}
    assert "is a link" in run("clean", "--yes").stderr
    assert not inside.exists()
    assert list((cache / "scores").iterdir()) == []
    assert (target / "data.bin").is_file()


def test_a_note_that_is_a_link_is_not_written(cache, tmp_path):
    (tmp_path / "letter").write_text("private")
    entry = cache / "vectors" / cache_key(1)
    entry.parent.mkdir(parents=True)
    note_of(entry).symlink_to(tmp_path / "letter")
    with pytest.raises(MachineError):
        use_entry(entry, "about")
    assert (tmp_path / "letter").read_text() == "private"


def test_other_files_stay(cache):
    for name in ("vectors/notes.txt", "vectors/.git/config", "project/data.csv", "thesis.pdf"):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).touch()
    (cache / f"cpu-bf16-{cache_key(1)}.json").write_text("{}")
    assert [entry["kind"] for entry in printed("clean", "--yes")["deleted"]] == ["measurements"]
    files = {p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.is_file()}
    assert files == {"vectors/notes.txt", "vectors/.git/config", "project/data.csv", "thesis.pdf"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vector"], "unknown kind 'vector'; did you mean 'vectors'?"),
        (["--older-than", "30"], "--older-than takes a number with the unit m, h, d or w"),
        (["--older-than", "-1d"], "--older-than takes a number with the unit m, h, d or w"),
    ],
)
def test_refused(cache, words, message):
    result = run("clean", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_use_entry_survives_the_deletion_of_its_note(cache):
    entry = cache / "vectors" / cache_key(1)
    use_entry(entry, "first")
    note_of(entry).unlink()
    use_entry(entry, "second, longer")
    use_entry(entry, "third")
    assert note_of(entry).read_text() == "third"


def test_an_entry_that_is_made_again_during_the_deletion_is_kept(cache, monkeypatch):
    entry = add(cache, "vectors", days=1)

    def lock_after_others(file, *, shared):
        # Another `clean` deletes the entry, and another run makes and finishes it.
        note_of(entry).unlink()
        note_of(entry).write_text("made again")
        return lock_note(file, shared=shared)

    monkeypatch.setattr(cache_verb, "lock_note", lock_after_others)
    assert names(printed("clean", "--yes")["in_use"]) == {entry.name}
    assert (entry / "data.bin").is_file()


def test_an_entry_that_was_used_since_the_listing_is_kept(cache):
    used, new, gone = (add(cache, "vectors", number, days=1) for number in range(3))
    note_of(new).unlink()
    chosen = cache_verb.selected(CleanOptions(kinds=["vectors"]))
    os.utime(note_of(used))
    note_of(new).touch()
    note_of(gone).unlink()
    assert cache_verb.clean(chosen).deleted == []
    assert used.is_dir()
    assert new.is_dir()
    assert not note_of(gone).exists()


def test_a_killed_clean_leaves_no_part_of_an_entry(cache, monkeypatch):
    entry = add(cache, "objects")

    def killed(path):
        if path.name.endswith(".old") and path.exists():
            (path / "data.bin").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache_verb, "remove", killed)
        run("clean", "objects")
    assert not entry.exists()
    assert [path.suffix for path in cache.rglob("*") if path.is_dir()] == ["", ".old"]
    assert len(printed("clean", "objects")["deleted"]) == 1
    assert list((cache / "objects").iterdir()) == []


def test_an_entry_that_cannot_be_deleted_does_not_stop_the_others(cache, monkeypatch):
    bad, good = add(cache, "vectors", 1, size=2000), add(cache, "vectors", 2)
    rename = Path.rename

    def fail(path, target):
        if path == bad:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    result = run("clean", "--yes", "--json")
    assert result.exit_code == MachineError.exit_code
    assert "could not be deleted" in result.stderr
    cleaned = json.loads(result.stdout)
    assert names(cleaned["deleted"]) == {good.name}
    assert names(cleaned["failed"]) == {bad.name}
    assert "Permission denied" in cleaned["failed"][0]["reason"]
    assert bad.is_dir()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(cache, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    entry = add(cache, "vectors", days=1)
    monkeypatch.setattr(fcntl, "flock", flock)
    use_entry(entry)
    result = run("clean", "--yes")
    assert result.exit_code == MachineError.exit_code
    said = " ".join(result.stdout.split())
    assert "this file system has no locks" in said
    assert "delete the entry yourself" in said
    assert "a running kdcli" not in said
    assert entry.is_dir()


def test_the_name_of_the_cache_is_no_markup(tmp_path, monkeypatch):
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "a[/b]"))
    result = run("ls")
    assert result.exit_code == 0
    assert "a[/b]" in "".join(result.stdout.split("\n"))


def test_clean_without_an_age_takes_entries_of_the_future_and_notes_without_an_entry(cache):
    add(cache, "vectors", 1, days=-1)
    use_entry(cache / "scores" / cache_key("never made"))
    disk._NOTES.clear()
    assert len(printed("clean", "--yes")["deleted"]) == 2
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_note_that_cannot_be_read(cache, tmp_path):
    (tmp_path / "letter").write_text("private")
    linked, folder = add(cache, "vectors", 1), add(cache, "vectors", 2)
    for entry in (linked, folder):
        note_of(entry).unlink()
    note_of(linked).symlink_to(tmp_path / "letter")
    note_of(folder).mkdir()
    assert [entry["about"] for entry in printed("ls")["entries"]] == ["", ""]


def test_a_note_that_may_only_be_read_is_locked(cache, monkeypatch):
    entry = add(cache, "vectors", days=1)
    opened = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        use_entry(entry, "about")
    with open_note(note_of(entry)) as file:
        assert not lock_note(file, shared=False)
    assert note_of(entry).read_text() == "vectors 0"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_can_be_used(cache):
    entry = add(cache, "vectors")
    note_of(entry).unlink()
    entry.parent.chmod(0o500)
    try:
        use_entry(entry, "shared")
    finally:
        entry.parent.chmod(0o700)
    assert not note_of(entry).exists()
