"""Models go to a hub, private unless asked, and are read back at the commit that a recipe names."""

import json
import shlex
import sys
from pathlib import Path

import own_files
import pytest
import yaml
from hub_server import COMMIT, hub  # noqa: F401
from huggingface_hub import ModelCard
from own_files import refused, succeeds

import kdcli as kdcli_package
from kdcli.report.publish import Upload

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
def connected(hub, tmp_path):  # noqa: F811
    """This process knows no hub but this one, and has a token for it."""
    with hub.known(tmp_path / "home", HF_TOKEN="hf_secret"):
        yield hub


def test_a_model_is_pushed_to_a_private_repository(connected, tmp_path):
    folder = own_files.headed(tmp_path / "model", labels=own_files.NAMES)
    needed = {file.name for file in folder.iterdir()}
    for name in (*PRIVATE, *REPORT):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no")
    done = succeeds("push", folder, "someone/tiny", "--json")
    said = json.loads(done.stdout)
    assert said.pop("url").startswith(connected.url)
    assert said == {"repository": "someone/tiny", "revision": COMMIT, "private": True}
    assert connected.private == {"someone/tiny"}
    assert set(connected.repositories["someone/tiny"]) == needed
    done = succeeds("push", folder, "someone/report", "--public", "--with-report")
    assert " ".join(done.stdout.split()) == f"pushed to someone/report (public), revision {COMMIT}"
    assert connected.private == {"someone/tiny"}
    assert set(connected.repositories["someone/report"]) == needed | set(REPORT)
    assert all(name in done.stderr for name in (*needed, *REPORT)), "the files are listed first"


def test_a_dry_run_lists_the_files_without_a_token(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    folder = own_files.headed(tmp_path / "model")
    for name in PRIVATE:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no")
    done = succeeds("push", folder, "someone/tiny", "--dry-run", "--json")
    upload = json.loads(done.stdout)
    assert set(upload["kept"]) == set(PRIVATE)
    assert set(upload["files"]) == {f.name for f in folder.iterdir() if f.is_file()} - set(PRIVATE)


@pytest.mark.parametrize(
    ("folder", "name", "message"),
    [
        ("runs", "someone/x", "runs/model: give one of them"),
        ("runs/empty", "someone/x", "has no config.json"),
        ("runs/model", "some one/x", "is not the name of a repository"),
        ("runs/model", "x", "is not the name of a repository"),
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
        assert "pushes one model, and this run makes 2" in refused(tmp_path, *given, *push), given
    for one in ("--dry-run", "--augment-only"):
        given = [
            "distill",
            "demo",
            one,
            *([tmp_path / "copies"] * (one == "--augment-only")),
            *push,
        ]
        assert "--push-to-hub contradict each other" in refused(tmp_path, *given)


def test_a_run_is_pushed_and_its_recipe_repeats_it_after_the_hub_moved_on(connected, tmp_path):
    base = own_files.encoder(tmp_path / "base", num_hidden_layers=1)
    connected.add("someone/base", base)
    (base / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n")
    connected.add("someone/base", base)
    loaded = next(reversed(connected.commits["someone/base"]))
    connected.add("someone/rows", own_files.own(tmp_path / "data", "class", n=16, judged=8))
    read, out = next(reversed(connected.commits["someone/rows"])), tmp_path / "out"
    given = [*TRAINED, "--data", "someone/rows"]
    done = succeeds("finetune", "someone/base", *given, "--push-to-hub", "someone/tuned", "-o", out)
    assert f"pushed to someone/tuned (private), revision {COMMIT}" in done.stderr
    card = ModelCard(connected.repositories["someone/tuned"]["README.md"].decode()).data
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
    assert own_files.report_of(out).data_versions["someone/rows"] == f"commit {read}"
    connected.add("someone/base", own_files.encoder(tmp_path / "other", num_hidden_layers=2))
    connected.add("someone/rows", own_files.own(tmp_path / "newer", "class", n=24, judged=12))
    succeeds("finetune", "-r", out / "recipe.yaml", "--device", "cpu", "-o", tmp_path / "again")
    before, after = map(own_files.report_of, (out, tmp_path / "again"))
    assert before.cards["finetuned"].sha256 == after.cards["finetuned"].sha256
    assert before.evaluations[0].rows_sha256 == after.evaluations[0].rows_sha256
    assert "was not found at revision 'nowhere'" in refused(
        tmp_path, "finetune", "someone/base", "--revision", "nowhere", *given
    )


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """Name -> the directory of a model or an export that was made from local files."""
    folder = tmp_path_factory.mktemp("pushed")
    base = own_files.encoder(folder / "base", num_hidden_layers=2)
    data = own_files.own(folder / "data", "class", n=16, judged=8)
    (folder / "texts.txt").write_text("\n".join(f"w{n} w{n + 1} w{n + 2}" for n in range(50)))
    succeeds("finetune", base, *TRAINED, "--data", data, "-o", folder / "tuned")
    task = ["--task", "own", "--data", data, "--set", "data.max_length=24"]
    succeeds("export", folder / "tuned", "--format", "onnx", "--int8", *task, "-o", folder / "onnx")
    texts = ["--data", folder / "texts.txt"]
    distilled = ["--method", "embedding", "--pooling", "mean", "--to", "1x32", *texts]
    few = ["--max-steps", "2", "--device", "cpu", "--set", "measure.latency=false"]
    succeeds("distill", base, *distilled, *few, "-o", folder / "distilled")
    openvino = ["--format", "openvino", *texts, "-o", folder / "openvino"]
    succeeds("export", folder / "distilled", *openvino)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tuned", "distilled", "onnx", "openvino"])
def test_no_pushed_file_names_a_path_of_this_machine(pushed, name):
    upload = Upload.of(pushed / name)
    assert {"README.md", "config.json"} <= set(upload.files)
    private = [str(pushed), str(Path(kdcli_package.__file__).parent), sys.prefix, str(Path.home())]
    found = {
        (file, path)
        for file in upload.files
        for path in private
        if path.encode() in (pushed / name / file).read_bytes()
    }
    assert found == set()


def test_an_export_names_its_data_without_its_directory(pushed):
    facts = json.loads((pushed / "onnx" / "export.json").read_text("utf-8"))
    assert (facts["task"], facts["data"], facts["source"]) == ("own", "data", "tuned")
