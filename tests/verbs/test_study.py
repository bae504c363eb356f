"""`--ablate` and `--seeds` of the verbs that prune and co-train."""

import shlex
from statistics import fmean, stdev

import own_files
import pytest
from own_files import report_of, said_by, same_weights, succeeds, times

QUICK = shlex.split(
    "--max-steps 4 --batch-size 8 --dtype fp32 --set measure.latency=false --set train.eval_every=4"
)
VERBS = {
    "prune": (
        "--method smp --sparsity 0.9 --set data.max_length=24",
        "local: {pruner.masking: local}",
        {"full 90 %": "full", "local 90 %": "local"},
        "masked",
    ),
    "cotrain": (
        "--set data.max_length=24 --no-standalone",
        "one-way: {mode: one-way}\nlonger: {train.epochs: 9.0}",
        {"full student": "full", "one-way student": "one-way", "longer student": "longer"},
        "student",
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_the_table_has_the_means_of_the_seeds_of_each_variant(verb, tmp_path):
    options, variant, names, model = VERBS[verb]
    encoder = own_files.encoder(tmp_path / "encoder", num_hidden_layers=2)
    models = [encoder] if verb == "prune" else [encoder, "1x16"]
    data = own_files.own(tmp_path / "data", "class")
    (tmp_path / "list.yaml").write_text(variant)
    task = ["--task", "own", "--data", data, *QUICK, *shlex.split(options)]
    out, asked = tmp_path / "out", [verb, *models, *task]
    study = [*asked, "--ablate", tmp_path / "list.yaml", "--seeds", "2", "--seed", "3", "-o", out]
    done = succeeds(*study)
    # --max-steps sets the length of all.
    warning = "warning: the variants full and longer give the same training"
    assert (warning in said_by(done)) == ("longer" in variant)
    report = report_of(out)
    by_name = {e.model: e for e in report.evaluations}
    for name, folder in names.items():
        runs = [report_of(out / folder / f"seed-{seed}") for seed in (3, 4)]
        assert [run.recipe["train"]["seed"] for run in runs] == [3, 4]
        assert [(run.recipe["ablate"], run.recipe["seeds"]) for run in runs] == [(None, 1)] * 2
        metrics = [next(e for e in run.evaluations if e.model == model).metrics for run in runs]
        assert by_name[name].seeds == 2
        for metric, value in by_name[name].metrics.items():
            values = [each[metric] for each in metrics]
            assert value == pytest.approx(fmean(values))
            assert by_name[name].deviations[metric] == pytest.approx(stdev(values))
        assert next(each for each in report.models if each.name == name).variant == name
    first = next(iter(names.values()))
    succeeds(*asked, "--seed", "4", "-o", tmp_path / "alone")
    place = "" if verb == "prune" else "student"
    assert same_weights(tmp_path / "alone" / place, out / first / "seed-4" / place)
    # A run that was killed before the last member and the table repeats nothing else.
    before = times(out / first / "seed-4")
    (out / "report.json").unlink()
    (out / list(names.values())[-1] / "seed-4" / "report.json").unlink()
    succeeds(*study, "--resume")
    assert times(out / first / "seed-4") == before
    again = report_of(out)
    assert (again.quality, again.evaluations) == (report.quality, report.evaluations)
