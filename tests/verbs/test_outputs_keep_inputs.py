"""No verb deletes or overwrites an input, or a file that kdcli did not write."""

import os
import shutil

import own_files
import pytest
from filelock import FileLock
from own_files import QUICK

from kdcli.engine.inputs import foreign_files
from kdcli.run.context import cpu_session
from kdcli.workloads.embedder import Embedder

OWN = ("--task", "own", "--data")
ONNX = ("--format", "onnx")
STEP = (*QUICK, "--max-steps", "1", "--set", "train.warmup_steps=0")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A finished run, with its data next to it."""
    folder = tmp_path_factory.mktemp("inputs")
    base, data = own_files.encoder(folder / "base"), own_files.own(folder / "data", "class")
    own_files.succeeds("finetune", base, *OWN, data, *STEP, "-o", folder / "run")
    texts = [row["text"] for file in data.glob("*.jsonl") for row in own_files.lines_of(file)]
    vectors = Embedder.open(str(base), pooling="mean").vectors(texts, "", cpu_session())
    index = [{"text": t, "vector": v.tolist()} for t, v in zip(texts, vectors, strict=True)]
    own_files.write(folder / "index.jsonl", index)
    return folder


@pytest.fixture(scope="module")
def mask(tuned):
    pruned = tuned / "pruned"
    own_files.succeeds(
        *("prune", tuned / "run", *OWN, tuned / "data", *STEP),
        *("--method", "smp", "--sparsity", "0.5", "-o", pruned),
    )
    return pruned / "mask" / "mask.safetensors"


@pytest.fixture
def inside(tuned, tmp_path):
    """A copy in which the run's directory also holds data and a model."""
    copied = shutil.copytree(tuned, tmp_path / "copied")
    shutil.copytree(copied / "data", copied / "run" / "in" / "data")
    shutil.copytree(copied / "base", copied / "run" / "in" / "base")
    return copied


def content(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def links(folder, target):
    """A directory of links, as in the hub's cache."""
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def link(data, aside):
    (aside / "link").symlink_to(data)
    return aside / "link"


PATHS = {
    "plain": lambda place, aside: place,
    "relative": lambda place, aside: os.path.relpath(place),
    "through its parent": lambda place, aside: place.parent / ".." / "in" / place.name,
    "link": link,
    "directory of links": lambda place, aside: links(aside / "linked", place),
    "upper case": lambda place, aside: place.with_name(place.name.upper()),
}
"""Spellings of a model or of data."""
SOURCES = PATHS | {
    "file url": lambda place, aside: f"file://{place}",
    "local url": lambda place, aside: f"local://{place}",
    "one file": lambda place, aside: f"file://{place}/train.jsonl",
    "pattern": lambda place, aside: f"{place}/tr*.jsonl",
    "revision": lambda place, aside: f"{place}@main",
}
"""Spellings of data. The last ones are of no data, but may name a file in the directory."""
VERBS = {
    "finetune": ("finetune", "{model}", *OWN, "{data}", *STEP, "--overwrite"),
    "distill": ("distill", "{model}", *OWN, "{data}", "--to", "1x16", *STEP, "--overwrite"),
    "distill text": (
        "distill",
        "{model}",
        "--data",
        "{data}",
        "--to",
        "1x16",
        *STEP,
        "--overwrite",
    ),
    "prune": ("prune", "{model}", *OWN, "{data}", *STEP, "--method", "smp", "--overwrite"),
    "cotrain": ("cotrain", "{model}", "1x32", *OWN, "{data}", *STEP, "--overwrite"),
    "evaluate": ("evaluate", "{model}", *OWN, "{data}", "--overwrite"),
    "evaluate a list": (*("evaluate", "{first}", "{model}", *OWN, "{data}", "--overwrite"),),
    "evaluate a mask": (
        *("evaluate", "{model}", *OWN, "{data}", "--mask", "{mask}", "--overwrite"),
    ),
    "trim": ("trim", "{model}", "--data", "{data}", "--overwrite"),
    "adapt": (
        *("adapt", "{base}", "--pooling", "mean", "--index", "{index}", "--data", "{data}"),
        "--overwrite",
    ),
    "benchmark": (
        *("benchmark", "{model}", "--backend", "torch", "--batch-size", "1", "--seq-len", "8"),
        *("--set", "measure.min_runs=1", "--set", "measure.min_seconds=0", "--overwrite"),
    ),
    "compress": ("compress", "{model}", "--data", "{data}", "--max-drop", "1", "--overwrite"),
    "export": ("export", "{model}", *ONNX, *OWN, "{data}", "--overwrite"),
    "tokenize": ("tokenize", "{data}", "--tokenizer", "{model}"),
    "mask": ("mask", "apply", "{mask}", "--base", "{model}"),
}
GIVEN = {"base": "base", "model": "run", "data": "data", "index": "index.jsonl"}
ONE_FILE = {"plain": PATHS["plain"], "link": link}
SPELLED = {"model": PATHS, "data": SOURCES, "mask": ONE_FILE, "index": ONE_FILE}


@pytest.mark.parametrize("verb", VERBS)
def test_an_input_in_the_output_directory_is_not_deleted(verb, tuned, mask, tmp_path, monkeypatch):
    run = shutil.copytree(tuned / "run", tmp_path / "run")
    shutil.copytree(tuned / "data", run / "in" / "data")
    shutil.copytree(tuned / "run", run / "in" / "model")
    shutil.copy(mask, run / "in" / "mask")
    shutil.copy(tuned / "index.jsonl", run / "in" / "index")
    given = {"first": tuned / "run", "mask": mask}
    given |= {name: tuned / place for name, place in GIVEN.items()}
    before = content(run)
    monkeypatch.chdir(tmp_path)
    for name, spellings in SPELLED.items():
        if f"{{{name}}}" not in VERBS[verb]:
            continue
        for spelling, spelled in spellings.items():
            aside = tmp_path / f"{name} {spelling}"
            aside.mkdir()
            sources = given | {name: spelled(run / "in" / name, aside)}
            if spelling == "upper case" and not sources[name].exists():
                continue  # This file system tells upper case from lower case.
            command = [word.format(**sources) for word in VERBS[verb]]
            result = own_files.kdcli(*command, "-o", run)
            assert result.exit_code == 2, (name, spelling, result.output, result.exception)
            # A pattern or a revision may be refused because it is no data.
            is_told = f"{sources[name]}, which this command reads" in own_files.said_by(result)
            assert is_told or spelling in ("pattern", "revision"), (name, spelling, result.output)
            assert content(run) == before, (name, spelling)


def test_a_text_that_a_list_names_is_an_input(tuned, tmp_path):
    run = shutil.copytree(tuned / "run", tmp_path / "run")
    (tmp_path / "languages.yaml").write_text(f"de: {run / 'README.md'}\n")
    trim = ("trim", tuned / "run", "--data", tmp_path / "languages.yaml", "--vocab-size", "50")
    result = own_files.kdcli(*trim, "-o", run, "--overwrite")
    assert result.exit_code == 2
    assert "README.md, which this command reads" in own_files.said_by(result)


def test_data_that_holds_the_output_directory_is_no_obstacle(tuned, tmp_path):
    folder = shutil.copytree(tuned / "data", tmp_path / "data")
    run = ("finetune", tuned / "base", *OWN, folder, *STEP, "-o", folder / "run")
    own_files.succeeds(*run)
    own_files.succeeds(*run, "--overwrite")


@pytest.mark.parametrize("name", ["src/work.py", ".git/HEAD", "notes.txt"])
def test_a_file_that_kdcli_did_not_write_is_named_and_kept(tuned, tmp_path, name):
    run = shutil.copytree(tuned / "run", tmp_path / "run")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("precious")
    before = content(run)
    result = own_files.kdcli(
        "finetune", tuned / "base", *OWN, tuned / "data", *STEP, "-o", run, "--overwrite"
    )
    assert result.exit_code == 2
    assert f"would delete {name}" in result.stderr
    assert content(run) == before


WRITTEN = {
    "a changed file": ("README.md", b"my notes"),
    "an added file": ("notes/README.md", b"my notes"),
    "an added file next to others": ("modules.json", b"[]"),
    "a changed recipe": ("recipe.yaml", b"verb: finetune  # my notes\n"),
    "a file of the same size": ("report.html", None),
}
"""Files with the names of kdcli's own."""


@pytest.mark.parametrize(
    "verb",
    [
        *("finetune", "distill", "distill text", "prune", "cotrain", "evaluate", "trim"),
        *("adapt", "benchmark", "export"),
    ],
)
def test_overwriting_deletes_only_what_kdcli_wrote(verb, tuned, tmp_path):
    given = {name: tuned / place for name, place in GIVEN.items()}
    command = [word.format(**given) for word in VERBS[verb]]
    out = tmp_path / "out"
    own_files.succeeds(*command, "-o", out)
    assert foreign_files(out) == []
    whole = shutil.copytree(out, tmp_path / "whole")
    for kind, (name, changed) in WRITTEN.items():
        if verb == "export" and not (out / name).is_file() and "added" not in kind:
            continue
        file = out / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(changed or file.read_bytes().swapcase())
        before = content(out)
        result = own_files.kdcli(*command, "-o", out)
        assert (result.exit_code, f"would delete {name}" in result.stderr) == (2, True), (
            kind,
            result.output,
        )
        assert content(out) == before, kind
        shutil.rmtree(out)
        # A run that was moved or copied is still the one that kdcli wrote.
        shutil.copytree(whole, out)
    own_files.succeeds(*command, "-o", out)
    assert foreign_files(out) == []


def test_a_run_of_an_older_version_is_known_by_its_names(tuned, tmp_path):
    run = shutil.copytree(tuned / "run", tmp_path / "run")
    (run / ".manifest.jsonl").unlink()
    command = ("finetune", tuned / "base", *OWN, tuned / "data", *STEP, "-o", run, "--overwrite")
    (run / "notes.txt").write_text("precious")
    assert "would delete notes.txt" in own_files.kdcli(*command).stderr
    (run / "notes.txt").unlink()
    (run / "README.md").write_text("a name that kdcli writes")
    own_files.succeeds(*command)
    assert foreign_files(run) == []


def test_files_of_a_damaged_run_do_not_prevent_a_new_one(tuned, tmp_path):
    command = ("finetune", tuned / "base", *OWN, tuned / "data", *STEP, "--overwrite")
    for name in ("recipe.yaml", "report.json", "log.jsonl"):
        run = shutil.copytree(tuned / "run", tmp_path / name)
        (run / name).write_bytes((run / name).read_bytes()[:40] + b"\xff\xfe: [")
        own_files.succeeds(*command, "-o", run)


@pytest.mark.parametrize(
    ("recipe", "log"),
    [
        ("", '{"step": 1, "loss": 0.5}\n'),
        ("quant_stage: {modifiers: {}}  # verb: none\n", '{"step": 1, "loss": 0.5}\n'),
        ("steps: [a, b]\n", '{"level": "info"}\n'),
    ],
)
def test_two_files_with_the_names_of_a_run_are_no_run(tuned, tmp_path, recipe, log):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "recipe.yaml").write_text(recipe)
    (tmp_path / "out" / "log.jsonl").write_text(log)
    (tmp_path / "out" / "model.safetensors").write_text("precious")
    before = content(tmp_path / "out")
    result = own_files.kdcli(
        *("finetune", tuned / "base", *OWN, tuned / "data", *STEP),
        *("-o", tmp_path / "out", "--overwrite"),
    )
    assert result.exit_code == 2
    assert "are not from kdcli" in result.stderr
    assert content(tmp_path / "out") == before


def test_predictions_replace_no_input_and_no_other_file_unasked(tuned, tmp_path):
    data = shutil.copytree(tuned / "data", tmp_path / "data")
    (tmp_path / "notes.jsonl").write_text("precious")
    before = content(tmp_path)
    quick = ("--set", "measure.latency=false", "-o", tmp_path / "out")
    evaluate = ("evaluate", tuned / "run", *OWN, data, *quick, "--predictions")
    for file, overwrites in (
        (data / "validation.jsonl", ["--overwrite"]),
        (f"{data}/../data/validation.jsonl", ["--overwrite"]),
        (tmp_path / "notes.jsonl", []),
        (tmp_path / "out" / "report.json", ["--overwrite"]),
    ):
        result = own_files.kdcli(*evaluate, file, *overwrites)
        assert result.exit_code == 2, result.output
        assert content(tmp_path) == before
    own_files.succeeds(*evaluate, tmp_path / "notes.jsonl", "--overwrite")
    assert len(own_files.lines_of(tmp_path / "notes.jsonl")) == 48
    # The predictions of a run may lie in its directory, also when it is run again.
    own_files.succeeds(*evaluate, tmp_path / "out" / "predicted.jsonl", "--overwrite")
    own_files.succeeds(*evaluate, tmp_path / "out" / "predicted.jsonl", "--overwrite")


def test_other_writers_keep_their_inputs(inside, tmp_path):
    run, exported = inside / "run", tmp_path / "exported"
    own_files.succeeds("export", run, *ONNX, "--weights", "-o", exported)
    shutil.copytree(run, tmp_path / "runs" / "a")
    shutil.copytree(run, tmp_path / "runs" / "a" / "inner")
    shutil.copytree(inside / "data", exported / "data")
    before = content(tmp_path)
    commands = {
        "an export over its model": ("export", exported, *ONNX, "-o", exported, "--overwrite"),
        "an export over its data": (
            *("export", run, *ONNX, "--data", exported / "data", "--task", "own"),
            *("-o", exported, "--overwrite"),
        ),
        "a comparison over a run": (
            *("benchmark", "--compare", tmp_path / "runs" / "a", run),
            *("-o", tmp_path / "runs" / "a", "--overwrite"),
        ),
        "a comparison over the directory of a run": (
            *("benchmark", "--compare", tmp_path / "runs" / "a" / "inner", run),
            *("-o", tmp_path / "runs" / "a", "--overwrite"),
        ),
        "an export next to other files": ("export", run, *ONNX, "-o", exported, "--overwrite"),
        "shards over text": ("tokenize", inside / "data", "--tokenizer", run, "-o", inside),
    }
    for name, command in commands.items():
        result = own_files.kdcli(*command)
        assert result.exit_code == 2, (name, result.output)
        assert content(tmp_path) == before, name


def test_a_mask_is_not_applied_over_a_model(tuned, mask, tmp_path):
    """A directory that a killed command left half filled can be completed; no other."""
    model = shutil.copytree(tuned / "run", tmp_path / "model")
    (model / ".staged").mkdir()
    before = content(model)
    result = own_files.kdcli("mask", "apply", mask, "--base", tuned / "run", "-o", model)
    assert result.exit_code == 2, result.output
    assert "is not empty" in result.stderr
    assert content(model) == before


@pytest.mark.parametrize("verb", ["mask", "export"])
def test_two_processes_do_not_write_one_directory(verb, tuned, mask, tmp_path):
    commands = {
        "mask": ("mask", "apply", mask),
        "export": ("export", tuned / "run", *ONNX),
    }
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        result = own_files.kdcli(*commands[verb], "-o", tmp_path / "out")
    assert (result.exit_code, "another process uses" in result.stderr) == (2, True), result.output
    assert not [path for path in content(tmp_path) if path.name != ".lock"]
    own_files.succeeds(*commands[verb], "-o", tmp_path / "out")
    assert not (tmp_path / "out" / ".lock").exists()
