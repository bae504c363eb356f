"""`kdcli prune` and `kdcli mask` on a tiny encoder: exact densities, frozen weights, every form the same model."""

from __future__ import annotations

import json
from pathlib import Path

import own_files
import processes
import pytest
import torch
from encoders import tiny_config, tiny_tokenizer
from own_files import NAMES, QUICK, kdcli, log_of, report_of
from questions import tokenizer_of
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, BertForMaskedLM

import kdcli as package
from kdcli.downstream import task as downstream
from kdcli.models.matrices import matrices
from kdcli.pruners import methods
from kdcli.sparse.bank import Bank
from kdcli.sparse.mask_file import read_mask
from kdcli.training.run_dir import RunDir

EXACT = [m for m in methods() if m not in ("soft-movement", "l0")]
"""Methods whose density is chosen; thresholds and gates decide it themselves."""

MASK = "mask/mask.safetensors"
TEXTS = ["w1 w2 w3", "w25 w26 w27 w28 w29", "w3 w30"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return own_files.encoder(tmp_path_factory.mktemp("base") / "encoder")


@pytest.fixture(scope="module")
def given(base, tmp_path_factory):
    data = own_files.own(tmp_path_factory.mktemp("data"), "class")
    quick = [*QUICK[QUICK.index("--dtype") :], "--max-steps", "30", "--batch-size", "16"]
    return ["prune", base, "--task", "own", "--data", data, "--set", "head.words=[w40, w41]", *quick]


@pytest.fixture(scope="module")
def pruned(given, tmp_path_factory):
    out = tmp_path_factory.mktemp("pruned") / "out"
    result = kdcli(*given, "--sparsity", "0.7", "-o", out)
    assert result.exit_code == 0, result.output
    return out, result


def logits(model, folder):
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**{k: v for k, v in batch.items() if k != "token_type_ids"}).logits


def kept(folder):
    """Share of the masked matrices' weights that are not zero."""
    found = matrices(AutoModel.from_pretrained(folder))
    return sum(int(m.of(m.linear.weight).count_nonzero()) for m in found) / sum(m.numel for m in found)


def is_the_base_where_kept(base, out):
    """Whatever a mask left of the weights is bit for bit what it was."""
    before, after = AutoModel.from_pretrained(base), AutoModel.from_pretrained(out)
    masked = {m.path for m in matrices(before)}
    for name, weight in after.state_dict().items():
        if name.startswith("pooler."):
            continue
        own = before.state_dict()[name]
        there = weight != 0 if name.removesuffix(".weight") in masked else torch.ones_like(weight, dtype=torch.bool)
        assert torch.equal(weight[there], own[there]), name


def test_the_density_is_exact_and_what_is_kept_is_as_it_was(base, pruned):
    out, result = pruned
    assert kept(out) == pytest.approx(0.3, abs=1e-4)
    is_the_base_where_kept(base, out)
    report = report_of(out)
    assert report.command == "prune"
    (found,) = report.pruning
    assert found.density == pytest.approx(0.3, abs=1e-4)
    assert sum(m.kept for m in found.matrices) == round(0.3 * sum(m.weights for m in found.matrices))
    assert [p.density for p in found.curve] == sorted((p.density for p in found.curve), reverse=True)
    assert found.curve[0].density == 1.0
    assert all(sum(h.counts) == sum(m.weights for m in found.matrices) for h in found.histograms)
    assert report.evaluations[0].metrics["accuracy"] > 0.8, "it learned"
    assert "accuracy" in result.stdout or "own" in result.stdout


def test_every_form_is_the_same_model(base, pruned):
    out, _ = pruned
    expected = logits(AutoModelForSequenceClassification.from_pretrained(out), out)
    for model in (
        package.load(base, mask=out / MASK),
        package.load(out / "compact"),
        AutoModelForSequenceClassification.from_pretrained(out / "compact", trust_remote_code=True),
    ):
        torch.testing.assert_close(logits(model, out), expected, atol=1e-5, rtol=1e-5)
    report = report_of(out)
    scores = {e.model: e.metrics for e in report.evaluations}
    assert scores["compact"] == scores["masked"]
    assert report.models["masked"].params_nonzero < report.models["dense"].params_nonzero


def test_masks_are_shown_compared_applied_and_cut_anew(base, pruned, given, tmp_path):
    out, _ = pruned
    shown = kdcli("mask", "info", out / MASK, "--json")
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout)
    assert facts["density_realised"] == pytest.approx(0.3, abs=1e-4)
    assert (facts["task"], facts["labels"], facts["label_words"]) == ("own", sorted(NAMES), ["w40", "w41"])
    assert "w40, w41" in kdcli("mask", "info", out / MASK).stdout
    same = kdcli("mask", "diff", out / MASK, out / MASK, "--json")
    assert json.loads(same.stdout)["shared"] == 1.0
    assert kdcli("mask", "apply", out / MASK, "-o", tmp_path / "applied").exit_code == 0
    a, b = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "applied"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    scores = out / "mask" / "scores.safetensors"
    assert kdcli("mask", "apply", scores, "--sparsity", "0.9", "-o", tmp_path / "less").exit_code == 0
    assert kept(tmp_path / "less") == pytest.approx(0.1, abs=1e-3)
    least = kdcli("mask", "apply", scores, "--sparsity", "0.99999", "-o", tmp_path / "least")
    assert "matrices keep a single weight" in " ".join(least.output.split())
    assert kept(tmp_path / "least") > 0
    refused = kdcli("mask", "apply", out / MASK, "--sparsity", "0.9", "-o", tmp_path / "no")
    assert refused.exit_code == 2
    assert "holds no scores" in refused.output
    assert kdcli("mask", "compact", out / MASK, "--base", base, "-o", tmp_path / "small").exit_code == 0
    expected = logits(AutoModelForSequenceClassification.from_pretrained(out), out)
    torch.testing.assert_close(logits(package.load(tmp_path / "small"), out), expected, atol=1e-5, rtol=1e-5)
    made = (out, tmp_path / "applied", tmp_path / "small")
    lengths = {AutoTokenizer.from_pretrained(folder).model_max_length for folder in made}
    assert lengths == {facts["max_length"]}, "rows are cut where those of the task were"


def test_a_base_is_judged_under_its_mask(base, given, pruned, tmp_path):
    out, _ = pruned
    data = given[given.index("--data") + 1]
    asked = ["evaluate", base, "--task", "own", "--data", data]
    result = kdcli(*asked, "--mask", out / MASK, "--mask", out / MASK, "-o", tmp_path / "judged")
    assert result.exit_code == 0, result.output
    assert "fine-tuned with 24 tokens a row and is judged so too" in " ".join(result.output.split())
    metrics = {e.model: e.metrics for e in report_of(tmp_path / "judged").evaluations}
    own = next(e.metrics for e in report_of(out).evaluations if e.model == "masked")
    assert metrics == {"mask.safetensors": pytest.approx(own), "mask.safetensors (2)": pytest.approx(own)}
    refused = kdcli("evaluate", base, base, "--task", "own", "--data", data, "--mask", out / MASK)
    assert refused.exit_code == 2
    assert "--mask takes one model" in refused.output


def test_labelled_words_stand_apart_under_a_mask_too(tmp_path):
    # A byte-level tokenizer takes words without a space before them for parts of one.
    base = own_files.encoder(tmp_path / "base", vocab_size=600)
    tokenizer_of("bytes").save_pretrained(base)
    asked = ["--task", "own", "--data", own_files.own(tmp_path / "data", "tokens"), "--set", "measure.latency=false"]
    run = ["prune", base, *asked, "--set", "head.kind=scratch", "--max-steps", "2", "-o", tmp_path / "out"]
    assert (result := kdcli(*run)).exit_code == 0, result.output
    mask = tmp_path / "out" / MASK
    assert (result := kdcli("mask", "apply", mask, "-o", tmp_path / "applied")).exit_code == 0, result.output
    trained, applied = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("out", "applied"))
    plain, *both = (of(["the cat"]).input_ids for of in (tokenizer_of("bytes"), trained, applied))
    assert plain != both[0] == both[1]
    result = kdcli("evaluate", base, "--mask", mask, *asked[:4], "-o", tmp_path / "judged")
    assert result.exit_code == 0, result.output
    (under_mask,) = report_of(tmp_path / "judged").evaluations
    own = next(e.metrics for e in report_of(tmp_path / "out").evaluations if e.model == "masked")
    assert under_mask.metrics == pytest.approx(own)


def test_a_masked_language_models_head_serves_in_every_form(given, tmp_path):
    torch.manual_seed(0)
    base = tmp_path / "base"
    BertForMaskedLM(tiny_config("bert", initializer_range=0.1)).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    out, data = tmp_path / "out", given[given.index("--data") + 1]
    asked = [base if x == given[1] else x for x in given]
    result = kdcli(*asked, "--set", "head.kind=mlm", "--sparsity", "0.7", "-o", out)
    assert result.exit_code == 0, result.output
    is_the_base_where_kept(base, out)
    report = report_of(out)
    assert any("trust_remote_code" in note for note in report.notes)
    assert "trust_remote_code=True" in (out / "README.md").read_text("utf-8")
    expected = logits(package.load(out), out)
    assert expected.std() > 0.1
    with safe_open(out / MASK, "pt") as file:
        assert not any(64 in file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118  # not a mapping
    bank, found = Bank(AutoModel.from_pretrained(base)), read_mask(out / MASK)
    bank.add("own", found.masks, info=found.info, head=found.head)
    for model in (
        AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True),
        package.load(base, mask=out / MASK),
        package.load(out / "compact"),
        AutoModelForSequenceClassification.from_pretrained(out / "compact", trust_remote_code=True),
        bank.use("own"),
    ):
        torch.testing.assert_close(logits(model.eval(), out), expected, atol=1e-5, rtol=1e-5)
    assert kdcli("mask", "apply", out / MASK, "-o", tmp_path / "applied").exit_code == 0
    assert torch.equal(logits(package.load(tmp_path / "applied"), out), expected)
    result = kdcli("evaluate", out, out / "compact", "--task", "own", "--data", data, "-o", tmp_path / "judged")
    assert result.exit_code == 0, result.output
    own = next(e.metrics for e in report.evaluations if e.model == "masked")
    assert [e.metrics for e in report_of(tmp_path / "judged").evaluations] == [pytest.approx(own)] * 2


def test_a_mask_of_another_base_is_refused(pruned, tmp_path):
    out, _ = pruned
    other = own_files.encoder(tmp_path / "other", hidden_act="relu")
    torch.manual_seed(5)
    model = AutoModel.from_pretrained(other)
    torch.nn.init.normal_(model.encoder.layer[0].output.dense.weight)
    model.save_pretrained(other)
    result = kdcli("mask", "apply", out / MASK, "--base", other, "-o", tmp_path / "no")
    assert result.exit_code == 2
    assert "hash" in result.output
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("method", methods())
def test_every_method_prunes(given, tmp_path, method):
    result = kdcli(*given, "--method", method, "--sparsity", "0.5", "--max-steps", "12", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "out")
    assert report.recipe["method"] == method
    (found,) = report.pruning
    assert kept(tmp_path / "out") == pytest.approx(found.density, abs=1e-4)
    if method in EXACT:
        assert found.density == pytest.approx(0.5, abs=1e-3)
    assert any("no density that can be asked for" in note for note in report.notes) == (method not in EXACT)
    assert any("removes up to" in note for note in report.notes) == (method in ("movement", "cap"))
    frozen = method == "smp"
    assert report.recipe["head"]["kind"] == ("embedding" if frozen else "scratch")
    assert (tmp_path / "out" / MASK).exists() == frozen
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("method", ["smp", "movement", "l0"])
def test_cut_and_resumed_is_bit_identical(given, tmp_path, monkeypatch, method):
    often = ["--set", "train.log_every=1", "--set", "train.checkpoint_every=4", "--set", "train.eval_every=6"]
    asked = [*given, "--method", method, "--max-steps", "12", *often]
    assert kdcli(*asked, "-o", tmp_path / "a").exit_code == 0
    whole = RunDir.log

    def log(self, record):
        whole(self, record)
        if record["step"] == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "log", log)
        assert kdcli(*asked, "-o", tmp_path / "b").exit_code == 130
    assert kdcli(*asked, "-o", tmp_path / "b", "--resume").exit_code == 0
    a, b = (load_file(tmp_path / side / "model.safetensors") for side in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")
    a, b = (report_of(tmp_path / side) for side in "ab")
    assert (a.pruning, a.evaluations) == (b.pruning, b.evaluations)
    assert b.training.resumed_from_step == 4
    if method == "smp":
        a, b = (read_mask(tmp_path / side / MASK).masks for side in "ab")
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_compact_directory_is_judged_and_measured_like_any_other(given, pruned, tmp_path):
    out, _ = pruned
    data = given[given.index("--data") + 1]
    asked = ["--task", "own", "--data", data]
    result = kdcli("evaluate", out, out / "compact", *asked, "-o", tmp_path / "scores")
    assert result.exit_code == 0, result.output
    masked, compact = report_of(tmp_path / "scores").evaluations
    assert (masked.metrics, masked.worst) == (compact.metrics, compact.worst)
    quick = ["--batch-size", "1", "--seq-len", "8", "--set", "measure.min_runs=2", "--set", "measure.min_seconds=0"]
    result = kdcli("benchmark", out, out / "compact", *asked, *quick, "-o", tmp_path / "times")
    assert result.exit_code == 0, result.output
    scores = {e.model: e.metrics for e in report_of(tmp_path / "times").evaluations}
    assert len(scores) == 2
    assert len({tuple(metrics.items()) for metrics in scores.values()}) == 1
    result = kdcli(
        "benchmark", out, out / "compact", "--backend", "torch", "--backend", "sparse", "-o", tmp_path / "no"
    )
    assert result.exit_code == 2
    assert "it is compacted" in result.output
    assert not (tmp_path / "no").exists()
    result = kdcli("evaluate", out / "compact", "--task", "sst2", "--data", data)
    assert result.exit_code == 2
    for verb in (["finetune", out / "compact", *asked], [*given, "--teacher", out / "compact"]):
        result = kdcli(*verb, "-o", tmp_path / "no")
        assert result.exit_code == 2
        assert "is compacted: its layers have shapes of their own" in " ".join(result.output.split())
        assert not (tmp_path / "no").exists()


def test_a_compact_directory_is_judged_alone(given, pruned, tmp_path):
    # In a process of its own: what transformers finds out of a class it remembers of those made from it.
    asked = ["--task", "own", "--data", given[given.index("--data") + 1], "-o", tmp_path / "scores"]
    alone = processes.process("evaluate", pruned[0] / "compact", *asked)
    said = alone.communicate()
    assert alone.returncode == 0, said
    (own,) = {tuple(e.metrics.items()) for e in report_of(pruned[0]).evaluations}
    assert tuple(report_of(tmp_path / "scores").evaluations[0].metrics.items()) == own


def test_several_sparsities_are_runs_of_their_own(given, tmp_path):
    asked = [*given, "--sparsity", "0.5", "--sparsity", "0.8", "--max-steps", "6", "-o", tmp_path / "out"]
    result = kdcli(*asked)
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "out")
    assert [p.model for p in report.pruning] == ["50 %", "80 %"]
    assert [e.model for e in report.evaluations] == ["50 %", "80 %"]
    compact = tmp_path / "out" / "sparsity-0.8" / "compact" / "model.safetensors"
    assert report.models["80 %"].bytes == compact.stat().st_size
    assert kept(tmp_path / "out" / "sparsity-0.5") == pytest.approx(0.5, abs=1e-3)
    assert kept(tmp_path / "out" / "sparsity-0.8") == pytest.approx(0.2, abs=1e-3)
    before = (tmp_path / "out" / "report.json").read_text("utf-8")
    assert kdcli(*asked, "--resume").exit_code == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))["pruning"] == json.loads(before)["pruning"]


def test_several_methods_are_compared_on_the_same_examples(given, tmp_path):
    methods_asked = ["--method", "magnitude", "--method", "smp", "--max-steps", "6"]
    result = kdcli(*given, *methods_asked, "--sparsity", "0.5", "--sparsity", "0.8", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "out")
    names = ["magnitude 50 %", "magnitude 80 %", "smp 50 %", "smp 80 %"]
    assert [p.model for p in report.pruning] == [e.model for e in report.evaluations] == names
    assert [p.method for p in report.pruning] == ["magnitude"] * 2 + ["smp"] * 2
    assert "magnitude, smp 50 %, 80 %" in result.stdout
    runs = {m: report_of(tmp_path / "out" / m / "sparsity-0.8").recipe for m in ("magnitude", "smp")}
    assert {m: r["head"]["kind"] for m, r in runs.items()} == {"magnitude": "scratch", "smp": "embedding"}
    assert runs["magnitude"]["train"]["lr"] < runs["smp"]["train"]["lr"]
    alike = [r | {"method": None, "head": None, "kd": None} for r in runs.values()]
    assert alike[0] | {"train": None} == alike[1] | {"train": None}
    # Alone it would have been the same.
    alone = kdcli(*given, *methods_asked[2:], "--sparsity", "0.8", "-o", tmp_path / "alone")
    assert alone.exit_code == 0, alone.output
    same = [
        load_file(folder / "model.safetensors") for folder in (tmp_path / "alone", tmp_path / "out/smp/sparsity-0.8")
    ]
    assert all(torch.equal(same[0][k], same[1][k]) for k in same[0])


@pytest.mark.parametrize(
    ("options", "folders"),
    [
        (["--method", "magnitude", "--method", "smp"], ["magnitude", "smp"]),
        (["--method", "smp", "--sparsity", "0.5"], ["sparsity-0.5", "sparsity-0.9"]),
        (["--method", "smp", "--method", "l0", "--sparsity", "0.5"], ["smp/sparsity-0.5", "smp/sparsity-0.9", "l0"]),
        (["--method", "l0", "--sparsity", "0.5"], [""]),
        (["--masking", "threshold", "--sparsity", "0.5"], [""]),
    ],
)
def test_a_run_each_where_a_density_can_be_asked_for(given, tmp_path, options, folders):
    result = kdcli(*given, *options, "--sparsity", "0.9", "--dry-run", "--json", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    stages = json.loads(result.stdout)["legs"]
    assert [Path(leg["folder"]) for leg in stages] == [tmp_path / "out" / folder for folder in folders]


@pytest.mark.parametrize("head", ["embedding", "scratch"])
def test_in_bf16_what_is_frozen_is_held_in_it_and_saved_as_it_was(head, base, given, tmp_path, monkeypatch):
    held = {}

    def trained(task, headed, job, schedule, run_dir):
        held.update({name: (p.dtype, p.requires_grad) for name, p in headed.model.named_parameters()})
        return downstream.trained(task, headed, job, schedule, run_dir)

    monkeypatch.setattr("kdcli.commands.prune.one_run.trained", trained)
    words = ["head.words=[w40, w41]"] if head == "embedding" else []
    other = [x for x in given if not str(x).startswith("head.words")]
    other.remove("--set")
    asked = [*other, "--dtype", "bf16", "--max-steps", "3", "--sparsity", "0.5", "-o", tmp_path / "out"]
    result = kdcli(*asked, *(part for word in [f"head.kind={head}", *words] for part in ("--set", word)))
    assert result.exit_code == 0, result.output
    of_head = {name for name in held if name.startswith(("classifier.", "bert.pooler."))}
    assert all((name.endswith(".score") or (name in of_head and head == "scratch")) == held[name][1] for name in held)
    assert {dtype for dtype, trains in held.values() if trains} == {torch.float32}
    assert {dtype for dtype, trains in held.values() if not trains} == {torch.bfloat16}
    assert kept(tmp_path / "out") == pytest.approx(0.5, abs=1e-4)
    is_the_base_where_kept(base, tmp_path / "out")


def test_a_teacher_is_learned_from(given, tmp_path):
    teacher = own_files.headed(tmp_path / "teacher", tuple(sorted(NAMES)), seed=3)
    asked = [*given, "--teacher", teacher, "--epochs", "2", "--set", "train.log_every=1"]
    result = kdcli(*asked, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    terms = [r["terms"] for r in log_of(tmp_path / "out") if r["step"] > 0]
    assert all(set(t) == {"task", "kd", "regularizer"} for t in terms)
    assert all(t["kd"] > 0 for t in terms)
    # Asked once for all rows; what it said is gone with the run.
    assert "computing the teacher's signals" in result.output
    assert not (tmp_path / "out" / "signals").exists()
    assert kdcli(*asked, "--set", "cache_gb=0", "-o", tmp_path / "asked").exit_code == 0
    in_every_step = [r["terms"] for r in log_of(tmp_path / "asked") if r["step"] > 0]
    assert len(terms) == len(in_every_step)
    assert all(a["kd"] == pytest.approx(b["kd"], rel=1e-4) for a, b in zip(terms, in_every_step, strict=True))
    swapped = own_files.headed(tmp_path / "swapped", tuple(sorted(NAMES, reverse=True)), seed=3)
    refused = kdcli(*given, "--teacher", swapped, "-o", tmp_path / "no")
    assert refused.exit_code == 2
    assert "in another order" in refused.output
    assert not (tmp_path / "no").exists()


def test_cap_contrasts_with_the_model_as_it_was_and_as_it_is_fine_tuned(given, tmp_path):
    teacher = own_files.headed(tmp_path / "teacher", tuple(sorted(NAMES)), seed=3)
    asked = [*given, "--method", "cap", "--max-steps", "3", "--set", "train.log_every=1"]
    for name, more, extra in (("alone", [], set()), ("taught", ["--teacher", teacher], {"kd", "supervised"})):
        assert kdcli(*asked, *more, "-o", tmp_path / name).exit_code == 0
        terms = [r["terms"] for r in log_of(tmp_path / name) if r["step"] > 0]
        assert all(set(t) == {"task", "unsupervised"} | extra for t in terms)
        assert all(value > 0 for t in terms for value in t.values())
    recipe = report_of(tmp_path / "taught").recipe
    assert recipe["kd"]["weight"] == 0.9


def test_a_dry_run_leaves_nothing(given, tmp_path):
    result = kdcli(*given, "--dry-run", "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["legs"][0]["steps"] == 30
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sparsity", "1.0"], "'sparsity.0' must be less than 1, got 1.0"),
        (["--sparsity", "-0.1"], "'sparsity.0' must be greater than or equal to 0"),
        (["--sparsity", "0.5", "--sparsity", "0.5"], "sparsity 0.5 was asked for twice"),
        (["--method", "smp", "--method", "smp"], "method smp was asked for twice"),
        (["--method", "smp", "--method", "smpp"], "unknown method 'smpp'"),
        (["--method", "magnitude", "--method", "smp", "--set", "head.words=[w40]"], "1 label words for the 2 outputs"),
        (["--method", "smpp"], "unknown method 'smpp'; did you mean 'smp'?"),
        (["--masking", "lokal"], "'pruner.masking' must be 'local', 'global', 'proportional' or 'threshold'"),
        (["--set", "pruner.regulariser=1"], "unknown key 'pruner.regulariser' of method smp; did you mean"),
        (["--set", "head.words=[w40, w40w41]"], "w40w41"),
        (["--set", "head.words=[w40]"], "1 label words for the 2 outputs"),
        (["--method", "movement", "--masking", "threshold"], "'pruner.masking' must be"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(given, tmp_path, options, said):
    result = kdcli(*given, *options, "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_at_a_random_step_and_resumed_is_bit_identical(given, tmp_path):
    asked = [*given, "--max-steps", "60", "--set", "train.log_every=1", "--set", "train.checkpoint_every=5"]
    assert kdcli(*asked, "-o", tmp_path / "a").exit_code == 0
    processes.killed_at_random(*asked, out=tmp_path / "b")
    assert kdcli(*asked, "-o", tmp_path / "b", "--resume").exit_code == 0
    a, b = (load_file(tmp_path / side / "model.safetensors") for side in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert len({(tmp_path / side / "mask" / "mask.safetensors").read_bytes() for side in "ab"}) == 1
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")


@pytest.mark.slow
def test_two_processes_are_one_with_the_same_global_batch(given, tmp_path):
    # Dropout is drawn by each process for itself.
    still = own_files.encoder(tmp_path / "still", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    asked = ["prune", still, *given[2:], "--max-steps", "10", "--device", "cpu", "--set", "train.log_every=1"]
    assert kdcli(*asked, "-o", tmp_path / "one").exit_code == 0
    processes.two_ranks(*asked, "-o", tmp_path / "two")
    a, b = (read_mask(tmp_path / side / MASK).masks for side in ("one", "two"))
    same = sum(int((a[k] == b[k]).sum()) for k in a) / sum(m.numel() for m in a.values())
    assert same > 0.99, "sums in another order move scores near the threshold"
    for one, other in zip(log_of(tmp_path / "one"), log_of(tmp_path / "two"), strict=True):
        if "loss" in one:
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
