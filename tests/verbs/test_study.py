"""Several runs of one command: `--ablate`, `--seeds`, `--grid`, methods and sparsities."""

import hashlib
import json
import shlex
from statistics import fmean, stdev

import own_files
import pytest
import torch
from own_files import (
    kdcli,
    log_of,
    report_of,
    said_by,
    same_weights,
    succeeds,
    terminate_in_training,
    times,
)

from kdcli.recipe.resolve import ablations

QUICK = shlex.split(
    "--max-steps 4 --batch-size 8 --dtype fp32 --set measure.latency=false --set train.eval_every=4"
)
LIST = "one-way: {mode: one-way}\nlonger: {train.epochs: 9.0}"


def test_the_table_has_the_means_of_the_seeds_of_each_variant(tmp_path):
    names = {"full student": "full", "one-way student": "one-way"}
    encoder = own_files.encoder(tmp_path / "encoder", num_hidden_layers=2)
    data = own_files.own(tmp_path / "data", "class")
    (tmp_path / "list.yaml").write_text(LIST)
    task = ["--task", "own", "--data", data, *QUICK, "--set", "data.max_length=24"]
    out, asked = tmp_path / "out", ["cotrain", encoder, "1x16", *task, "--no-standalone"]
    study = [*asked, "--ablate", tmp_path / "list.yaml", "--seeds", "2", "--seed", "3", "-o", out]
    done = succeeds(*study)
    # --max-steps sets the length of all.
    said = "warning: longer is the same training as full, which trains once for both"
    assert said in said_by(done)
    assert not (out / "longer").exists()
    # The variants of one seed begin with the same student.
    assert said_by(done).count("fitting a 1x16 to") == 2
    report = report_of(out)
    by_name = {e.model: e for e in report.evaluations}
    for name, folder in names.items():
        runs = [report_of(out / folder / f"seed-{seed}") for seed in (3, 4)]
        assert [run.recipe["train"]["seed"] for run in runs] == [3, 4]
        assert [(run.recipe["ablate"], run.recipe["seeds"]) for run in runs] == [(None, 1)] * 2
        metrics = [next(e for e in run.evaluations if e.model == "student").metrics for run in runs]
        assert by_name[name].seeds == 2
        for metric, value in by_name[name].metrics.items():
            values = [each[metric] for each in metrics]
            assert value == pytest.approx(fmean(values))
            assert by_name[name].deviations[metric] == pytest.approx(stdev(values))
        assert next(each for each in report.models if each.name == name).variant == name
    first = next(iter(names.values()))
    succeeds(*asked, "--seed", "4", "-o", tmp_path / "alone")
    assert same_weights(tmp_path / "alone" / "student", out / first / "seed-4" / "student")
    # A run that was killed before the last member and the table repeats nothing else.
    before = times(out / first / "seed-4")
    (out / "report.json").unlink()
    (out / list(names.values())[-1] / "seed-4" / "report.json").unlink()
    succeeds(*study, "--resume")
    assert times(out / first / "seed-4") == before
    again = report_of(out)
    assert (again.quality, again.evaluations) == (report.quality, report.evaluations)


@pytest.mark.usefixtures("short_demo")
def test_equal_variants_of_a_task_train_once(tmp_path):
    (tmp_path / "list.yaml").write_text("longer: {train.epochs: 9.0}\nrate: {train.lr: 0.02}")
    asked = "distill demo-classifier --task demo-topic --to 1x64 --max-steps 2 --dry-run --json"
    done = succeeds(*shlex.split(asked), "--ablate", tmp_path / "list.yaml")
    assert "longer is the same training as full, which trains once for both" in said_by(done)
    folders = [stage["folder"] for stage in json.loads(done.stdout)["legs"]]
    assert {name for name in ("full", "longer", "rate") if name in " ".join(folders)} == {
        "full",
        "rate",
    }


@pytest.mark.usefixtures("short_demo")
def test_a_variant_with_another_method_has_the_budget_of_the_others(tmp_path):
    (tmp_path / "list.yaml").write_text("magnitude: {method: magnitude}")
    asked = "prune demo --task demo-topic --max-steps 2 --set measure.latency=false --ablate"
    succeeds(*shlex.split(asked), tmp_path / "list.yaml", "-o", tmp_path / "out")
    full, other = (report_of(tmp_path / "out" / name).recipe for name in ("full", "magnitude"))
    assert other["data"] == full["data"]
    own = {"lr": 3e-5, "warmup_fraction": 0.1}
    assert other["train"] == full["train"] | own
    methods = ["--method", "smp", "--method", "l0"]
    refused = own_files.kdcli(*shlex.split(asked), "smp", *methods, "-o", tmp_path / "never")
    assert (refused.exit_code, refused.stderr.count("error: ")) == (2, 1)
    assert "--ablate smp takes one method, got smp, l0" in refused.stderr


SHIPPED = {
    "smp": "prune demo --task demo-topic --sparsity 0.9 --sparsity 0.97",
    "ctcd": "cotrain 2x16 1x16 --data demo --no-standalone --eval-task demo-topic",
}


@pytest.mark.long
@pytest.mark.usefixtures("short_demo")
@pytest.mark.parametrize("listed", SHIPPED)
def test_a_shipped_list_runs_on_the_demo(listed, tmp_path):
    options = ["--max-steps", "2", "--batch-size", "8", "--set", "measure.latency=false"]
    asked = [*shlex.split(SHIPPED[listed]), *options]
    succeeds(*asked, "--ablate", listed, "-o", tmp_path / "out")
    report = report_of(tmp_path / "out")
    named = {one.variant.partition(" ")[0] for one in report.models if one.variant is not None}
    # With --max-steps, variants that differ in their epochs train the same.
    assert named == {"full", *(name for name in ablations(listed) if "epochs" not in name)}
    scored = {one.model for one in report.evaluations}
    assert scored == {one.name for one in report.models if one.variant is not None}


SIDE_BY_SIDE = {
    "finetune": "--grid lr=1e-3,3e-3 --max-steps 150",
    "prune": "--max-steps 6 --method magnitude --method smp --sparsity 0.5 --set head.kind=scratch",
}


def trained(folder):
    """What all trainings of a run logged, and the files of weights that it left."""
    logs = {
        path.relative_to(folder): [one | {"seconds": 0} for one in log_of(path.parent)]
        for path in folder.rglob("log.jsonl")
    }
    files = {
        path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*.safetensors")
    }
    return logs, files


@pytest.mark.parametrize("verb", SIDE_BY_SIDE)
def test_runs_side_by_side_have_the_bits_of_runs_in_turn(verb, tmp_path, monkeypatch):
    # With fewer threads, the processes would compute other last bits.
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    model = own_files.headed(tmp_path / "model", ("brisk", "calm"), num_hidden_layers=2)
    data = own_files.own(tmp_path / "data", "class")
    asked = [verb, model, "--task", "own", "--data", data, *QUICK, "--set", "train.log_every=1"]
    asked += ["--set", "data.max_length=24", *shlex.split(SIDE_BY_SIDE[verb])]
    succeeds(*asked, "--processes", "1", "-o", tmp_path / "one")
    more = ["--processes", "2", "-o", tmp_path / "two"]
    if verb == "finetune":
        terminate_in_training(tmp_path / "two")
        stopped = kdcli(*asked, *more)
        assert stopped.exit_code == 75, stopped.output
        words = shlex.join(map(str, ["kdcli", *asked, *more, "--resume"]))
        assert stopped.stderr.endswith(f"\ncontinue with: {words}\n")
        more += ["--resume"]
    succeeds(*asked, *more)
    assert trained(tmp_path / "one") == trained(tmp_path / "two")
    one, two = report_of(tmp_path / "one"), report_of(tmp_path / "two")
    assert (one.evaluations, one.notes) == (two.evaluations, two.notes)
