"""Run directories: what may be claimed, what survives a kill, a full disk or damage, and what is
never deleted."""

import fcntl
import os
import sys
from pathlib import Path

import pytest
import torch
from forked import killed
from reading import logged_to

from kdcli import disk
from kdcli.engine.launch import output_dir
from kdcli.engine.run_dir import (
    BEST_WEIGHTS,
    CHECKPOINTS,
    KEEP,
    LOCK,
    LOG_FILE,
    RECIPE_FILE,
    REPORT_FILE,
    RunDir,
    numbered,
    pin_commits,
    run_to_continue,
)
from kdcli.errors import MachineError, UsageError
from kdcli.manifest import MANIFEST
from kdcli.recipe.resolve import resolve
from kdcli.recipe.sections import RunOptions
from kdcli.verbs.distill.settings import DistillRecipe

pytestmark = pytest.mark.slow


def recipe(*sets: str) -> str:
    return resolve(DistillRecipe, recipe=None, sets=sets).to_yaml()


@pytest.fixture
def run(tmp_path):
    return RunDir.claim(tmp_path / "run", recipe())


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "module/student/weight": torch.full((4, 3), value),
        "optimizer/0/step": torch.tensor(value),
    }


def listing(path: Path) -> list[str]:
    names = sorted(str(p.relative_to(path)) for p in path.rglob("*"))
    return [name for name in names if name != MANIFEST]


def killed_before_the_end(monkeypatch, save, *arguments):
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Path, "rename", lambda *_: os._exit(9))
        save(*arguments)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_path_that_no_repository_can_have_as_its_name_stays_as_it_is():
    text = "model: runs/a--b\ndata: {source: tickets..2024.csv, train: x.git}\n"
    assert pin_commits(text) == text


class TestClaim:
    def test_missing_or_empty_directory_is_claimed(self, tmp_path):
        (tmp_path / "empty").mkdir()
        for path in (tmp_path / "a" / "b", tmp_path / "empty"):
            RunDir.claim(path, recipe())
            assert (path / RECIPE_FILE).read_text("utf-8") == recipe()

    def test_a_run_is_neither_overwritten_nor_resumed_unasked(self, run):
        with pytest.raises(UsageError, match="is not empty") as caught:
            RunDir.claim(run.path, recipe())
        assert all(option in caught.value.hint for option in ("--resume", "--overwrite"))

    def test_overwrite_deletes_the_run_before(self, run):
        run.save_checkpoint(1, tensors(1.0), {})
        RunDir.claim(run.path, recipe("train.lr=1e-2"), overwrite=True)
        assert listing(run.path) == [LOCK, LOG_FILE, RECIPE_FILE]
        assert "lr: 0.01" in (run.path / RECIPE_FILE).read_text("utf-8")

    @pytest.mark.parametrize(
        "text",
        ["teacher: {0}", "student: {0}/checkpoints", "models: [a, {0}]", "steps: [{{model: {0}}}]"],
    )
    def test_overwrite_spares_what_the_run_reads(self, run, text):
        run.save_checkpoint(1, tensors(1.0), {})
        before = listing(run.path)
        with pytest.raises(UsageError, match="would delete"):
            RunDir.claim(run.path, text.format(run.path), overwrite=True)
        assert listing(run.path) == before

    def test_overwrite_takes_no_name_for_a_path(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in ("smp", "demo"):
            text = f"verb: prune\nmethod: {name}\nmodel: demo\nother: ~nosuch/x\n"
            text += f"url: 'https://a/{300 * 'b'}'\n"
            RunDir.claim(Path(name), text).save_checkpoint(1, tensors(1.0), {})
            RunDir.claim(Path(name), text, overwrite=True).release()
            assert listing(Path(name)) == [LOG_FILE, RECIPE_FILE]

    @pytest.mark.parametrize("flags", [{"overwrite": True}, {"resume": True}, {}])
    @pytest.mark.parametrize("names", [["thesis.tex"], ["thesis.tex", RECIPE_FILE]])
    def test_what_is_not_a_run_of_ours_is_never_touched(self, tmp_path, flags, names):
        for name in names:
            (tmp_path / name).write_text("years of work", "utf-8")
        with pytest.raises(UsageError, match="is not empty") as caught:
            RunDir.claim(tmp_path, recipe(), **flags)
        assert "holds no run of kdcli" in caught.value.hint
        assert listing(tmp_path) == sorted(names)

    def test_a_file_is_not_a_directory(self, tmp_path):
        (tmp_path / "file").write_text("", "utf-8")
        with pytest.raises(UsageError, match="is a file"):
            RunDir.claim(tmp_path / "file", recipe())
        with pytest.raises(UsageError, match=r"cannot be created: .*file is a file"):
            RunDir.claim(tmp_path / "file" / "run", recipe())

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_the_directory_itself_is_never_removed(self, tmp_path, monkeypatch, overwrite):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        monkeypatch.chdir(tmp_path / "link")
        for path in (Path(), tmp_path / "link"):
            if overwrite:
                RunDir.claim(path, recipe(), overwrite=True).save_checkpoint(1, tensors(1.0), {})
            RunDir.claim(path, recipe(), overwrite=True).release()
            assert listing(tmp_path / "real") == [LOG_FILE, RECIPE_FILE]
        assert (tmp_path / "link").is_symlink()

    def test_a_directory_in_use_is_refused(self, run):
        """A lock of another file object is as one of another process."""
        lock = run.path / ".lock"
        with lock.open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run.drop_checkpoints()
        assert not lock.exists()
        with lock.open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with pytest.raises(UsageError, match=f"^another process uses {run.path}\n"):
                RunDir.claim(run.path, recipe(), resume=True)
        RunDir.claim(run.path, recipe(), resume=True)

    @pytest.mark.parametrize("left", [[LOG_FILE], [LOCK], [f".{RECIPE_FILE}.part", LOG_FILE, LOCK]])
    def test_a_claim_that_was_killed_is_claimed_again(self, tmp_path, left):
        for name in left:
            (tmp_path / name).write_text("", "utf-8")
        assert RunDir.claim(tmp_path, recipe(), resume=True).read_log() == []
        assert (tmp_path / RECIPE_FILE).read_text("utf-8") == recipe()


class TestResume:
    def test_keys_that_cannot_change_the_training_may_differ(self, run):
        changed = recipe("measure.latency=false", "train.checkpoint_every=7")
        RunDir.claim(run.path, changed, resume=True)
        assert (run.path / RECIPE_FILE).read_text("utf-8") == changed

    @pytest.mark.parametrize("text", ["train: [", "\0", "a: 1\na: 2\n", "finetune"])
    def test_a_damaged_recipe_is_a_usage_error(self, run, text):
        (run.path / RECIPE_FILE).write_text(text, "utf-8")
        with pytest.raises(UsageError, match="is damaged"):
            RunDir.claim(run.path, recipe(), resume=True)

    @pytest.mark.parametrize(
        "line",
        [b"{", b"\xff", b"3", b'"x"', b"[1]", b'{"loss": 1}', b'{"step": "x"}', b"[" * 100_000],
    )
    def test_a_damaged_log_is_a_machine_error(self, run, line):
        (run.path / LOG_FILE).write_bytes(line + b"\n")
        with pytest.raises(MachineError, match=r"log\.jsonl is damaged"):
            run.read_log()

    def test_changed_recipe_names_each_differing_key_and_no_other(self, run):
        changed = recipe("train.lr=1e-2", "loss.value=none", "student.to=[6x384]")
        with pytest.raises(UsageError) as caught:
            RunDir.claim(run.path, changed, resume=True)
        first, *lines = caught.value.message.splitlines()
        assert "another recipe" in first
        of_loss, of_student = (
            '  loss.value: was not set, is "none"',
            '  student.to: was [], is ["6x384"]',
        )
        assert sorted(lines) == [of_loss, of_student, "  train.lr: was 0.0003, is 0.01"]
        assert (run.path / RECIPE_FILE).read_text("utf-8") == recipe()


class TestCheckpoints:
    def test_comes_back_bit_for_bit(self, run):
        saved = {"a": torch.randn(5, 3), "b": torch.arange(4), "c": torch.randn(2, 2).bfloat16().T}
        run.save_checkpoint(7, saved, {"tokens": 12, "seconds": 0.1})
        found = run.load_checkpoint()
        assert (found.step, found.state["tokens"], found.state["seconds"]) == (7, 12, 0.1)
        torch.testing.assert_close(found.tensors, saved, rtol=0, atol=0)

    def test_only_the_last_ones_are_kept(self, run):
        for step in (1, 2, 10, 100):
            run.save_checkpoint(step, tensors(step), {})
        kept = sorted(p.name for p in (run.path / CHECKPOINTS).iterdir())
        assert kept == ["step-00000010", "step-00000100"]
        assert len(kept) == KEEP

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            *(("tensors.safetensors", content) for content in (None, b"", "flip", "cut")),
            *(("state.json", content) for content in (None, b'{"step": 2, ', b"\0" * 64, b"{}")),
        ],
    )
    def test_damaged_one_falls_back_to_the_one_before_and_says_so(self, run, name, content):
        for step in (1, 2):
            run.save_checkpoint(step, tensors(step), {})
        file = run.path / CHECKPOINTS / "step-00000002" / name
        whole = file.read_bytes()
        if content is None:
            file.unlink()
        elif content == "flip":
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        else:
            file.write_bytes(whole[: len(whole) // 2] if content == "cut" else content)
        said: list[str] = []
        with logged_to(said):
            found = run.load_checkpoint()
        assert found.step == 1
        assert torch.equal(found.tensors["module/student/weight"], torch.full((4, 3), 1.0))
        (line,) = said
        assert all(part in line for part in ("step-00000002 is damaged", "the one before"))

    def test_when_all_are_damaged_it_says_that_none_is_left(self, run):
        run.save_checkpoint(1, tensors(1.0), {})
        (run.path / CHECKPOINTS / "step-00000001" / "state.json").unlink()
        said: list[str] = []
        with logged_to(said):
            assert run.load_checkpoint() is None
        assert "it was the last one, so the run starts again" in said[0]

    @pytest.mark.parametrize(
        "where", ["engine.run_dir.save_file", "disk.fsync", "engine.run_dir.file_sha256"]
    )
    def test_full_disk_keeps_the_one_before_and_nothing_half_written(
        self, run, monkeypatch, full_disk, where
    ):
        run.save_checkpoint(1, tensors(1.0), {})
        before = listing(run.path)
        full_disk(f"kdcli.{where}")
        with pytest.raises(MachineError, match="the disk is full") as caught:
            run.save_checkpoint(2, tensors(2.0), {})
        monkeypatch.undo()
        assert "--resume" in caught.value.hint
        assert listing(run.path) == before
        assert run.load_checkpoint().step == 1

    def test_kill_while_writing_leaves_the_one_before(self, run, monkeypatch):
        run.save_checkpoint(1, tensors(1.0), {})
        killed_before_the_end(monkeypatch, run.save_checkpoint, 2, tensors(2.0), {})
        assert any(p.name.endswith(".part") for p in (run.path / CHECKPOINTS).iterdir())
        assert run.load_checkpoint().step == 1
        run.save_checkpoint(2, tensors(2.0), {})
        assert not any(p.name.endswith(".part") for p in (run.path / CHECKPOINTS).iterdir())
        assert run.load_checkpoint().step == 2


class TestBest:
    def test_comes_back_as_it_was_and_only_the_last_is_kept(self, run):
        run.save_best(3, tensors(1.0))
        run.save_best(9, tensors(2.0))
        torch.testing.assert_close(run.load_best(9), tensors(2.0), rtol=0, atol=0)
        assert listing(run.path / CHECKPOINTS) == [BEST_WEIGHTS]

    @pytest.mark.parametrize("damage", ["gone", "empty", "cut"])
    def test_damaged_is_refused_by_name(self, run, damage):
        run.save_best(3, tensors(1.0))
        file = run.path / CHECKPOINTS / BEST_WEIGHTS
        file.write_bytes(file.read_bytes()[:-9] if damage == "cut" else b"")
        if damage == "gone":
            file.unlink()
        with pytest.raises(MachineError, match=r"best\.safetensors cannot be read"):
            run.load_best(3)

    def test_is_no_checkpoint_to_go_on_from_and_is_dropped_with_them(self, run):
        run.save_best(3, tensors(1.0))
        assert run.load_checkpoint() is None
        for step in range(5):
            run.save_checkpoint(step, tensors(step), {})
        assert (run.path / CHECKPOINTS / BEST_WEIGHTS).exists()
        run.drop_checkpoints()
        assert listing(run.path) == [LOG_FILE, RECIPE_FILE]

    def test_the_weights_of_another_step_are_refused(self, run):
        run.save_best(3, tensors(1.0))
        with pytest.raises(MachineError, match="does not belong to step 9") as caught:
            run.load_best(9)
        assert "--overwrite" in caught.value.hint


@pytest.mark.parametrize("how", [{}, {"overwrite": True}])
def test_a_claim_that_was_killed_anywhere_can_be_claimed_again(how, tmp_path):
    after, path = 0, tmp_path / "run"
    while True:
        if how:
            before = RunDir.claim(path, recipe(), overwrite=path.exists())
            before.log({"step": 1})
            before.save_checkpoint(1, tensors(1.0), {})
            disk.write_atomic(path / "model.safetensors", b"x")
            (path / REPORT_FILE).write_text('{"status": "done"}', "utf-8")
            before.release()
        if not killed(
            after := after + 1, lambda: RunDir.claim(path, recipe("train.lr=1e-2"), **how)
        ):
            break
        # A report says that the model next to it is whole.
        assert not (path / REPORT_FILE).exists() or (path / "model.safetensors").exists()
        claimed = RunDir.claim(path, recipe("train.lr=1e-2"), **how or {"resume": True})
        assert [name for name in listing(path) if name != LOCK] == [LOG_FILE, RECIPE_FILE]
        claimed.release()
        if not how:
            disk.remove(path)
    assert after > (8 if how else 3)


def test_a_run_that_came_between_check_and_lock_is_not_deleted(tmp_path):
    place, waiting = tmp_path / "run", [True]

    def other_process(event, arguments):
        if waiting and event == "open" and str(arguments[0]) == str(place / LOCK):
            waiting.clear()
            (place / RECIPE_FILE).write_text(recipe("train.lr=1e-2"), "utf-8")
            (place / LOG_FILE).write_text('{"step": 1}\n', "utf-8")

    sys.addaudithook(other_process)  # It cannot be removed again, and does nothing later.
    with pytest.raises(UsageError, match="is not empty"):
        RunDir.claim(place, recipe())
    assert not waiting
    assert (place / LOG_FILE).read_text("utf-8") == '{"step": 1}\n'


class TestNumbered:
    @pytest.fixture(autouse=True)
    def somewhere(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

    def made(self, *, taken=False):
        path = numbered("finetune-x", taken=taken)
        path.mkdir(parents=True, exist_ok=True)
        return path.as_posix()

    def test_the_last_one_to_go_on_with(self):
        assert self.made(taken=True) == "runs/finetune-x"
        assert self.made(taken=True) == "runs/finetune-x"
        self.made()
        self.made()
        assert self.made(taken=True) == "runs/finetune-x-3"

    def test_a_free_one_each_time_and_a_gap_is_filled(self):
        assert [self.made() for _ in range(3)] == [
            "runs/finetune-x",
            "runs/finetune-x-2",
            "runs/finetune-x-3",
        ]
        Path("runs/finetune-x-2").rmdir()
        assert self.made() == "runs/finetune-x-2"


class TestOverwriteWithoutADirectory:
    @pytest.fixture(autouse=True)
    def somewhere(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

    def start(self, name, source, *sets):
        path = Path("runs") / name
        RunDir.claim(path, recipe(f"data.source={source}", *sets)).release()
        return path

    def overwritten(self, name, source):
        options = RunOptions(overwrite=True)
        return output_dir(name, options, recipe(f"data.source={source}"))

    def test_it_is_the_newest_run_on_the_same_data(self):
        first = self.start("x-tickets", "tickets.csv")
        assert self.overwritten("x-tickets", "tickets.csv") == first
        second = self.start("x-tickets-2", "tickets.csv", "train.lr=1e-2")
        assert self.overwritten("x-tickets", "tickets.csv") == second

    def test_a_run_on_other_data_is_kept(self):
        first = self.start("x-tickets", "tickets.csv")
        other = self.start("x-tickets-2", "tickets-2.csv")
        assert self.overwritten("x-tickets", "tickets.csv") == first
        assert self.overwritten("x-tickets-2", "tickets-2.csv") == other
        new = Path("runs/x-tickets-3")
        assert self.overwritten("x-tickets", "archive/tickets.csv") == new
        (first / RECIPE_FILE).write_text("train: [", "utf-8")
        assert self.overwritten("x-tickets", "tickets.csv") == new
        assert not new.exists()


class TestRunToContinue:
    @pytest.fixture(autouse=True)
    def somewhere(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

    def start(self, number, *sets, done=False):
        path = Path("runs") / ("distill-x" if number == 1 else f"distill-x-{number}")
        run = RunDir.claim(path, recipe(*sets))
        if done:
            (path / REPORT_FILE).write_text('{"status": "done"}', "utf-8")
        run.release()
        return path

    def continued(self, *sets):
        return run_to_continue("distill-x", recipe(*sets))

    def test_a_damaged_report_blocks_no_other_run(self):
        self.start(1)
        damaged = self.start(2, done=True)
        (damaged / REPORT_FILE).write_text('{"status": ', "utf-8")
        assert self.continued() == Path("runs/distill-x")

    def test_it_is_the_newest_unfinished_run_of_the_recipe(self):
        self.start(1)
        second = self.start(2)
        done = self.start(3, done=True)
        self.start(4, "train.lr=1e-2")
        assert self.continued() == second
        (second / RECIPE_FILE).write_text("train: [", "utf-8")
        assert self.continued() == Path("runs/distill-x")
        # A finished run is done already.
        (Path("runs/distill-x") / RECIPE_FILE).unlink()
        assert self.continued() == done

    def test_a_key_that_may_change_makes_no_other_recipe(self):
        first = self.start(1, "train.checkpoint_every=7")
        self.start(2, "train.checkpoint_every=7", "loss.value=none")
        assert self.continued("train.checkpoint_every=9") == first

    def test_without_a_run_of_the_recipe_the_newest_one_tells_what_differs(self):
        assert self.continued() == Path("runs/distill-x")
        self.start(1, "train.lr=1e-2")
        newest = self.start(2, "train.lr=1e-2")
        assert self.continued() == newest
        with pytest.raises(UsageError, match=r"train\.lr: was 0\.01") as error:
            RunDir(newest).check(recipe(), resume=True, overwrite=False)
        assert error.value.hint.index("-o") < error.value.hint.index("--overwrite")


class TestLog:
    def test_line_torn_by_a_kill_is_left_out(self, run):
        run.log({"step": 1, "loss": 0.5})
        run.log({"step": 2, "loss": 0.4})
        with (run.path / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write('{"step": 3, "lo')
        assert [r["step"] for r in run.read_log()] == [1, 2]
        run.cut_log(1)
        run.log({"step": 2, "loss": 0.4})
        assert (run.path / LOG_FILE).read_text(
            "utf-8"
        ) == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.4}\n'


@pytest.mark.parametrize(
    ("section", "named"),
    [("embedding:\n  rows: 3", "embedding, workload"), ("5: 3\nnull: 3", "5, None, workload")],
)
def test_a_run_of_another_version_is_refused_in_a_line(tmp_path, section, named):
    (tmp_path / "recipe.yaml").write_text(f"verb: distill\n{section}\n", "utf-8")
    (tmp_path / "log.jsonl").write_text('{"step": 0}\n', "utf-8")
    now = "verb: distill\nworkload: {}\n"
    with pytest.raises(UsageError, match=rf"another version of kdcli.*: {named}"):
        RunDir(tmp_path).check(now, resume=True, overwrite=False)
