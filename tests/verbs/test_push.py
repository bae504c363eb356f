"""Models go to a hub, private unless asked, and are read back at the commit that a recipe names."""

import json
import shlex
import subprocess
import sys

import own_files
import pytest
import yaml
from hub_server import COMMIT, hub  # noqa: F401
from huggingface_hub import ModelCard

TRAINED = shlex.split("--task own --max-steps 2 --batch-size 4 --dtype fp32 --device cpu")
TRAINED += ["--set", "measure.latency=false", "--set", "data.max_length=24"]

PRIVATE = (
    "training_rows.safetensors",
    "log.jsonl",
    "notes.txt",
    "checkpoints/model.safetensors",
    "mask/mask.safetensors",
)
REPORT = ("recipe.yaml", "report.json", "report.md", "report.html")


@pytest.fixture
def kdcli(hub, tmp_path):  # noqa: F811
    """A command in a process of its own that knows no other hub."""

    def run(*arguments, token="hf_secret", **changes):
        more = {"HF_TOKEN": token} if token else {}
        environment = hub.environment(tmp_path / "home", **more | changes)
        command = [sys.executable, "-m", "kdcli", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_a_model_is_pushed_to_a_private_repository(hub, kdcli, tmp_path):  # noqa: F811
    folder = own_files.headed(tmp_path / "model", labels=own_files.NAMES)
    needed = {file.name for file in folder.iterdir()}
    for name in (*PRIVATE, *REPORT):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no")
    done = kdcli("push", folder, "someone/tiny", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("url").startswith(hub.url)
    assert said == {"repository": "someone/tiny", "revision": COMMIT, "private": True}
    assert hub.private == {"someone/tiny"}
    assert set(hub.repositories["someone/tiny"]) == needed
    done = kdcli("push", folder, "someone/report", "--public", "--with-report")
    assert " ".join(done.stdout.split()) == f"pushed to someone/report (public), revision {COMMIT}"
    assert hub.private == {"someone/tiny"}
    assert set(hub.repositories["someone/report"]) == needed | set(REPORT)
    assert all(name in done.stderr for name in (*needed, *REPORT)), "the files are listed first"


def test_a_dry_run_lists_the_files_without_a_token(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    folder = own_files.headed(tmp_path / "model")
    for name in PRIVATE:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no")
    done = own_files.succeeds("push", folder, "someone/tiny", "--dry-run", "--json")
    upload = json.loads(done.stdout)
    assert set(upload["kept"]) == set(PRIVATE)
    assert set(upload["files"]) == {f.name for f in folder.iterdir() if f.is_file()} - set(PRIVATE)


@pytest.mark.parametrize(
    ("folder", "name", "message"),
    [
        ("runs", "someone/x", "there are models in model: push one of them"),
        ("runs/empty", "someone/x", "has no config.json"),
        ("runs/model", "some one/x", "is not the name of a repository"),
        ("runs/model", "someone/x", "there is no token"),
    ],
)
def test_what_cannot_be_pushed_is_one_message(tmp_path, monkeypatch, folder, name, message):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    own_files.headed(tmp_path / "runs" / "model")
    (tmp_path / "runs" / "empty").mkdir()
    done = own_files.kdcli("push", tmp_path / folder, name)
    assert (done.exit_code, done.stderr.count("error: ")) == (2, 1), done.output
    assert message in own_files.said_by(done)


def test_a_run_of_several_models_is_refused_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    push, few = ["--push-to-hub", "someone/x"], ["--max-steps", "2", "--device", "cpu"]
    data, base = (
        own_files.own(tmp_path / "data", "class", n=16, judged=8),
        own_files.encoder(tmp_path / "base"),
    )
    runs = [
        ["distill", "demo", "--to", "1x64", "--to", "2x64", *few],
        [
            "distill",
            "demo",
            *shlex.split("--method embedding --pooling mean --to 1x64 --to 2x64"),
            *few,
        ],
        [
            "prune",
            base,
            "--task",
            "own",
            "--data",
            data,
            *shlex.split("--sparsity 0.5 --sparsity 0.9"),
            *few,
        ],
    ]
    for given in runs:
        assert "pushes one model, and this run makes 2" in own_files.refused(
            tmp_path, *given, *push
        ), given
    for one in ("--dry-run", "--augment-only"):
        given = [
            "distill",
            "demo",
            one,
            *([tmp_path / "copies"] * (one == "--augment-only")),
            *push,
        ]
        assert "--push-to-hub contradict each other" in own_files.refused(tmp_path, *given)


def test_a_run_is_pushed_and_its_recipe_repeats_it_after_the_hub_moved_on(hub, kdcli, tmp_path):  # noqa: F811
    base = own_files.encoder(tmp_path / "base", num_hidden_layers=1)
    hub.add("someone/base", base)
    (base / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n")
    hub.add("someone/base", base)
    loaded = next(reversed(hub.commits["someone/base"]))
    hub.add("someone/rows", own_files.own(tmp_path / "data", "class", n=16, judged=8))
    read, out = next(reversed(hub.commits["someone/rows"])), tmp_path / "out"
    given = [*TRAINED, "--data", "someone/rows"]
    done = kdcli("finetune", "someone/base", *given, "--push-to-hub", "someone/tuned", "-o", out)
    assert done.returncode == 0, done.stderr
    assert f"pushed to someone/tuned (private), revision {COMMIT}" in done.stderr
    card = ModelCard(hub.repositories["someone/tuned"]["README.md"].decode()).data
    assert (card.base_model, card.base_model_relation, card.license) == (
        "someone/base",
        "finetune",
        "mit",
    )
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    assert (recipe["model"], recipe["data"]["source"]) == (
        f"someone/base@{loaded}",
        f"someone/rows@{read}",
    )
    assert f"data someone/rows: commit {read}" in own_files.report_of(out).notes
    hub.add("someone/base", own_files.encoder(tmp_path / "other", num_hidden_layers=2))
    hub.add("someone/rows", own_files.own(tmp_path / "newer", "class", n=24, judged=12))
    again = kdcli(
        "finetune", "-r", out / "recipe.yaml", "--device", "cpu", "-o", tmp_path / "again"
    )
    assert again.returncode == 0, again.stderr
    before, after = map(own_files.report_of, (out, tmp_path / "again"))
    assert before.cards["finetuned"].sha256 == after.cards["finetuned"].sha256
    assert before.evaluations[0].rows_sha256 == after.evaluations[0].rows_sha256
    said = kdcli(
        "finetune", "someone/base", "--revision", "nowhere", *given, "-o", tmp_path / "none"
    )
    assert (said.returncode, "was not found at revision 'nowhere'" in said.stderr) == (2, True), (
        said.stderr
    )
