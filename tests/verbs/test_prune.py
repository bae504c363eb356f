"""`kdcli prune` and `kdcli mask` on a tiny encoder: exact densities, frozen weights, equal forms,
resumption."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import own_files
import processes
import pytest
import torch
from encoders import on_disk, tiny_config
from own_files import (
    NAMES,
    QUICK,
    kdcli,
    log_of,
    refused,
    report_of,
    same_weights,
    succeeds,
)
from questions import tokenizer_of
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForMaskedLM,
)

import kdcli as package
from kdcli.deploy.sparse.mask_file import read_mask
from kdcli.disk import STAGED
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.models.matrices import matrices
from kdcli.pruners import defaults, methods
from kdcli.recipe.sections import RunOptions
from kdcli.run import stages
from kdcli.verbs.prune.build import TRACE
from kdcli.verbs.prune.method_recipes import prune_recipes
from kdcli.verbs.prune.run import _advice, _check_compact, prune, runs_of

MASK = "mask/mask.safetensors"
TEXTS = ["w1 w2 w3", "w25 w26 w27 w28 w29", "w3 w30"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return own_files.encoder(tmp_path_factory.mktemp("base") / "encoder")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return ["--task", "own", "--data", own_files.own(tmp_path_factory.mktemp("data"), "class")]


@pytest.fixture(scope="module")
def given(base, task):
    quick = [*QUICK[QUICK.index("--dtype") :], "--max-steps", "30", "--batch-size", "16"]
    return ["prune", base, *task, "--set", "head.words=[w40, w41]", *quick]


@pytest.fixture(scope="module")
def pruned(given, tmp_path_factory):
    out = tmp_path_factory.mktemp("pruned") / "out"
    return out, succeeds(*given, "--sparsity", "0.7", "-o", out)


def score(folder, model="masked"):
    return next(e.metrics for e in report_of(folder).evaluations if e.model == model)


def logits(model, folder):
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**{k: v for k, v in batch.items() if k != "token_type_ids"}).logits


def kept(folder):
    """Share of the masked matrices' weights that are not zero."""
    found = matrices(AutoModel.from_pretrained(folder))
    return sum(int(m.of(m.linear.weight).count_nonzero()) for m in found) / sum(
        m.numel for m in found
    )


def is_the_base_where_kept(base, out):
    before, after = AutoModel.from_pretrained(base), AutoModel.from_pretrained(out)
    masked = {m.path for m in matrices(before)}
    for name, weight in after.state_dict().items():
        if not name.startswith("pooler."):
            there = (
                weight != 0
                if name.removesuffix(".weight") in masked
                else torch.ones_like(weight).bool()
            )
            assert torch.equal(weight[there], before.state_dict()[name][there]), name


def test_density_is_exact_and_kept_weights_are_the_bases(base, pruned):
    out, result = pruned
    assert kept(out) == pytest.approx(0.3, abs=1e-4)
    is_the_base_where_kept(base, out)
    report = report_of(out)
    assert report.command == "prune"
    (found,) = report.pruning
    assert found.density == pytest.approx(0.3, abs=1e-4)
    assert sum(m.kept for m in found.matrices) == round(
        0.3 * sum(m.weights for m in found.matrices)
    )
    assert [p.density for p in found.curve] == sorted(
        (p.density for p in found.curve), reverse=True
    )
    assert found.curve[0].density == 1.0
    assert all(sum(h.counts) == sum(m.weights for m in found.matrices) for h in found.histograms)
    assert report.evaluations[0].metrics["accuracy"] > 0.8
    assert "own" in result.stdout


def test_every_form_is_the_same_model(base, pruned):
    out, _ = pruned
    expected = logits(AutoModelForSequenceClassification.from_pretrained(out), out)
    for model in (
        package.load(base, mask=out / MASK),
        package.load(out / "compact").model,
        AutoModelForSequenceClassification.from_pretrained(out / "compact", trust_remote_code=True),
    ):
        torch.testing.assert_close(logits(model, out), expected, atol=1e-5, rtol=1e-5)
    report = report_of(out)
    assert score(out, "compact") == score(out)
    assert report.cards["masked"].params_nonzero < report.cards["dense"].params_nonzero


def test_the_trace_goes_with_the_checkpoints(tmp_path):
    # A kill between the report and its end leaves both, and only checkpoints are looked for
    # afterwards.
    (tmp_path / TRACE).parent.mkdir()
    (tmp_path / TRACE).touch()
    RunDir(tmp_path).drop_checkpoints()
    assert list(tmp_path.iterdir()) == []


def test_mask_info_diff_apply_and_compact(base, pruned, tmp_path):
    out, _ = pruned
    facts = json.loads(succeeds("mask", "info", out / MASK, "--json").stdout)
    assert (facts["density"], facts["density_asked"]) == (
        pytest.approx(0.3, abs=1e-4),
        pytest.approx(0.3),
    )
    held = read_mask(out / MASK).masks.values()
    left, total = sum(int(mask.sum()) for mask in held), sum(mask.numel() for mask in held)
    assert facts["density"] == left / total
    assert (facts["task"], facts["labels"], facts["label_words"]) == (
        "own",
        sorted(NAMES),
        ["w40", "w41"],
    )
    assert "w40, w41" in kdcli("mask", "info", out / MASK).stdout
    assert (
        json.loads(succeeds("mask", "diff", out / MASK, out / MASK, "--json").stdout)["shared"]
        == 1.0
    )
    # Killed between two files, it left one of a model; the same command goes on.
    (tmp_path / "applied" / STAGED).mkdir(parents=True)
    (tmp_path / "applied" / "model.safetensors").touch()
    succeeds("mask", "apply", out / MASK, "-o", tmp_path / "applied")
    assert not (tmp_path / "applied" / STAGED).exists()
    assert same_weights(out, tmp_path / "applied")
    scores = out / "mask" / "scores.safetensors"
    succeeds("mask", "apply", scores, "--sparsity", "0.9", "-o", tmp_path / "less")
    assert kept(tmp_path / "less") == pytest.approx(0.1, abs=1e-3)
    least = kdcli("mask", "apply", scores, "--sparsity", "0.99999", "-o", tmp_path / "least")
    assert "matrices keep a single weight" in " ".join(least.output.split())
    assert kept(tmp_path / "least") > 0
    assert "holds no scores" in refused(tmp_path, "mask", "apply", out / MASK, "--sparsity", "0.9")
    other = own_files.headed(tmp_path / "other", ("a", "b"), seed=3)
    assert "weights have the hash" in refused(
        tmp_path, "mask", "apply", out / MASK, "--base", other
    )
    succeeds("mask", "compact", out / MASK, "--base", base, "-o", tmp_path / "small")
    expected = logits(AutoModelForSequenceClassification.from_pretrained(out), out)
    torch.testing.assert_close(
        logits(package.load(tmp_path / "small").model, out), expected, atol=1e-5, rtol=1e-5
    )
    for folder in (out, tmp_path / "applied", tmp_path / "small"):
        assert AutoTokenizer.from_pretrained(folder).model_max_length == facts["max_length"]


def test_evaluate_takes_a_base_and_masks(base, task, pruned, tmp_path):
    out, _ = pruned
    args = ["evaluate", base, *task]
    succeeds(*args, "--mask", out / MASK, "--mask", out / MASK, "-o", tmp_path / "judged")
    metrics = {e.model: e.metrics for e in report_of(tmp_path / "judged").evaluations}
    own = pytest.approx(score(out))
    assert metrics == {"mask.safetensors": own, "mask.safetensors (2)": own}
    rows = [{**row, "text": 9 * f"{row['text']} "} for row in own_files.rows("class", 20)]
    long = ["--task", "own", "--data", own_files.write(tmp_path / "long.jsonl", rows)]
    cut = succeeds("evaluate", base, *long, "--mask", out / MASK, "-o", tmp_path / "cut")
    assert "longer than 24 tokens" in own_files.said_by(cut)
    assert "--mask takes one model" in refused(tmp_path, *args, base, "--mask", out / MASK)


def test_byte_level_tokenizers_space_labelled_words_under_a_mask(tmp_path):
    # Without a space before it, a byte-level tokenizer joins a word to the one before.
    base = own_files.encoder(tmp_path / "base", vocab_size=600)
    tokenizer_of("bytes").save_pretrained(base)
    args = [
        "--task",
        "own",
        "--data",
        own_files.own(tmp_path / "data", "tokens"),
        "--set",
        "measure.latency=false",
    ]
    succeeds(
        "prune",
        base,
        *args,
        *shlex.split(f"--set head.kind=scratch --max-steps 2 -o {tmp_path}/out"),
    )
    mask = tmp_path / "out" / MASK
    succeeds("mask", "apply", mask, "-o", tmp_path / "applied")
    trained, applied = (
        AutoTokenizer.from_pretrained(tmp_path / name) for name in ("out", "applied")
    )
    plain, *both = (of(["the cat"]).input_ids for of in (tokenizer_of("bytes"), trained, applied))
    assert plain != both[0] == both[1]
    succeeds("evaluate", base, "--mask", mask, *args[:4], "-o", tmp_path / "judged")
    assert score(tmp_path / "judged", "mask.safetensors") == pytest.approx(score(tmp_path / "out"))


def test_a_masked_language_model_head_works_in_every_form(given, task, tmp_path):
    torch.manual_seed(0)
    base = on_disk(BertForMaskedLM(tiny_config("bert", initializer_range=0.1)), tmp_path / "base")
    out, args = tmp_path / "out", [given[0], base, *given[2:]]
    succeeds(*args, "--set", "head.kind=mlm", "--sparsity", "0.7", "-o", out)
    is_the_base_where_kept(base, out)
    report = report_of(out)
    assert any("trust_remote_code" in note for note in report.notes)
    assert "trust_remote_code=True" in (out / "README.md").read_text("utf-8")
    expected = logits(package.load(out).model, out)
    assert expected.std() > 0.1
    with safe_open(out / MASK, "pt") as file:
        assert not any(64 in file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118  # not a mapping
    for model in (
        AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True),
        package.load(base, mask=out / MASK),
        package.load(out / "compact").model,
        AutoModelForSequenceClassification.from_pretrained(out / "compact", trust_remote_code=True),
    ):
        torch.testing.assert_close(logits(model.eval(), out), expected, atol=1e-5, rtol=1e-5)
    succeeds("mask", "apply", out / MASK, "-o", tmp_path / "applied")
    assert torch.equal(logits(package.load(tmp_path / "applied").model, out), expected)
    succeeds("evaluate", out, out / "compact", *task, "-o", tmp_path / "judged")
    assert [e.metrics for e in report_of(tmp_path / "judged").evaluations] == [
        pytest.approx(score(out))
    ] * 2


def test_two_processes_score_the_forms_without_labels(given, pruned, tmp_path):
    """The main process scores the saved forms alone."""
    out, _ = pruned
    (tmp_path / "texts.txt").write_text("\n".join(f"w{n % 40} w{n % 7}" for n in range(60)))
    words = ["prune", out, "--task", "own"]
    started = processes.process(
        *words,
        *("--data", tmp_path / "texts.txt", "--set", "data.labels=teacher"),
        *("--max-steps", "2", "--processes", "2", "--device", "cpu"),
        *("--set", "measure.latency=false", "-o", tmp_path / "out"),
    )
    output = started.communicate(timeout=240)
    assert started.returncode == 0, output
    assert len(report_of(tmp_path / "out").evaluations) == 3


@pytest.mark.parametrize("method", methods())
def test_every_method_prunes(given, tmp_path, method):
    succeeds(
        *given, "--method", method, "--sparsity", "0.5", "--max-steps", "12", "-o", tmp_path / "out"
    )
    report = report_of(tmp_path / "out")
    assert report.recipe["method"] == method
    (found,) = report.pruning
    assert kept(tmp_path / "out") == pytest.approx(found.density, abs=1e-4)
    exact = defaults(method).exact
    if exact:
        assert found.density == pytest.approx(0.5, abs=1e-3)
    assert any("no target density" in note for note in report.notes) != exact
    if method in ("movement", "smp"):
        assert any("removes up to" in note for note in report.notes) == (method == "movement")
    assert report.recipe["head"]["kind"] == defaults(method).head
    assert (tmp_path / "out" / MASK).exists() == (defaults(method).head == "embedding")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")


def test_evaluate_and_benchmark_take_a_compact_directory_and_training_refuses_it(
    given, task, pruned, tmp_path
):
    out, _ = pruned
    # In a fresh process: transformers caches facts by class, so classes that other tests loaded
    # could hide an error.
    alone = processes.process("evaluate", out / "compact", *task, "-o", tmp_path / "scores")
    output = alone.communicate()
    assert alone.returncode == 0, output
    assert report_of(tmp_path / "scores").evaluations[0].metrics == score(out)
    quick = shlex.split(
        "--batch-size 1 --seq-len 8 --set measure.min_runs=2 --set measure.min_seconds=0"
    )
    succeeds("benchmark", out, out / "compact", *task, *quick, "-o", tmp_path / "times")
    masked, compact = report_of(tmp_path / "times").evaluations
    assert (masked.metrics, masked.worst) == (compact.metrics, compact.worst)
    trained = "is compacted: its layers have shapes of their own"
    for verb, message in (
        (
            ["benchmark", out, out / "compact", "--backend", "torch", "--backend", "sparse"],
            "a compacted or static model has no weights left to skip",
        ),
        (["finetune", out / "compact", *task], trained),
        ([*given, "--teacher", out / "compact"], trained),
    ):
        assert message in refused(tmp_path, *verb)


def test_several_methods_are_compared_on_the_same_examples(given, tmp_path):
    both = ["--method", "magnitude", "--method", "smp", "--max-steps", "6"]
    result = succeeds(
        *given, *both, "--sparsity", "0.5", "--sparsity", "0.8", "-o", tmp_path / "out"
    )
    report = report_of(tmp_path / "out")
    names = ["magnitude 50 %", "magnitude 80 %", "smp 50 %", "smp 80 %"]
    assert [p.model for p in report.pruning] == [e.model for e in report.evaluations] == names
    assert [p.method for p in report.pruning] == ["magnitude"] * 2 + ["smp"] * 2
    assert "magnitude, smp 50 %, 80 %" in result.stdout
    runs = {
        m: report_of(tmp_path / "out" / m / "sparsity-0.8").recipe for m in ("magnitude", "smp")
    }
    assert {m: r["head"]["kind"] for m, r in runs.items()} == {
        "magnitude": "scratch",
        "smp": "embedding",
    }
    assert runs["magnitude"]["train"]["lr"] < runs["smp"]["train"]["lr"]
    alike = [r | {"method": None, "head": None, "kd": None} for r in runs.values()]
    assert alike[0] | {"train": None} == alike[1] | {"train": None}
    succeeds(*given, *both[2:], "--sparsity", "0.8", "-o", tmp_path / "alone")
    assert same_weights(tmp_path / "alone", tmp_path / "out/smp/sparsity-0.8")


@pytest.mark.parametrize(
    ("methods", "masking", "sparsity", "folders"),
    [
        (["magnitude", "smp"], None, [0.9], ["magnitude", "smp"]),
        (["smp"], None, [0.5, 0.9], ["sparsity-0.5", "sparsity-0.9"]),
        (["smp", "l0"], None, [0.5, 0.9], ["smp/sparsity-0.5", "smp/sparsity-0.9", "l0"]),
        (["l0"], None, [0.5, 0.9], [""]),
        (["smp"], "threshold", [0.5, 0.9], [""]),
    ],
)
def test_a_run_for_each_method_and_each_sparsity_that_can_be_chosen(
    methods, masking, sparsity, folders
):
    options = {"sparsity": sparsity, "pruner.masking": masking}
    runs = runs_of(prune_recipes(methods, recipe=None, sets=(), options=options), "")
    assert [folder for _, folder, _ in runs] == [Path(folder) for folder in folders]
    assert len({name for name, _, _ in runs}) == len(runs)


@pytest.mark.parametrize("head", ["embedding", "scratch"])
def test_in_bf16_the_frozen_encoder_trains_in_bf16_and_is_saved_as_it_was(
    head, base, given, tmp_path, monkeypatch
):
    held, train = {}, stages.train

    def recorded(session, job, schedule, run_dir):
        model = job.modules["model"].model
        held.update({name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()})
        return train(session, job, schedule, run_dir)

    monkeypatch.setattr(stages, "train", recorded)
    words = ["head.words=[w40, w41]"] if head == "embedding" else []
    other = [x for x in given if not str(x).startswith("head.words")]
    other.remove("--set")
    args = [
        *other,
        *shlex.split("--dtype bf16 --max-steps 3 --sparsity 0.5"),
        "-o",
        tmp_path / "out",
    ]
    succeeds(*args, *(part for word in [f"head.kind={head}", *words] for part in ("--set", word)))
    of_head = {name for name in held if name.startswith(("classifier.", "bert.pooler."))}
    assert all(
        (name.endswith(".score") or (name in of_head and head == "scratch")) == held[name][1]
        for name in held
    )
    wide = {name for name in held if name.endswith(".score")} | of_head
    assert {name for name, (dtype, _) in held.items() if dtype == torch.float32} == wide
    assert {held[name][0] for name in held if name not in wide} == {torch.bfloat16}
    assert kept(tmp_path / "out") == pytest.approx(0.5, abs=1e-4)
    is_the_base_where_kept(base, tmp_path / "out")


def test_without_labels_the_forms_are_compared_with_the_dense_model(tmp_path):
    model = own_files.headed(tmp_path / "model", ("no", "yes"))
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{row['premise']}\n" for row in own_files.rows("pair", 300)))
    quick = QUICK[QUICK.index("--dtype") :]
    out = tmp_path / "out"
    succeeds("prune", model, "--data", texts, "--sparsity", "0.7", *quick, "-o", out)
    report = report_of(out)
    assert {(e.model, e.reference) for e in report.evaluations} == {
        (name, "teacher") for name in ("dense", "masked", "compact")
    }
    found = {d.model: d for d in report.decisions}
    assert {(name, d.baseline) for name, d in found.items()} == {
        ("masked", "dense"),
        ("compact", "dense"),
    }
    assert {each.name for each in found["masked"].classes} == {"no", "yes"}
    assert found["masked"].agreement == pytest.approx(score(out)["agreement"])


def test_a_pruned_model_is_compared_with_the_trivial_answer(pruned):
    report = report_of(pruned[0])
    score, *warnings = [n for n in report.notes if n.startswith("the pruned model ")]
    assert score.startswith("the pruned model has accuracy ")
    assert "; answering " in score
    (masked,) = [e for e in report.evaluations if e.model == "masked"]
    assert len(warnings) == (not masked.trivial.is_beaten)


@pytest.mark.parametrize(
    ("is_beaten", "lost", "advice"),
    [
        (True, 0.01, ["ship compact/; it is only faster than the dense model if"]),
        (True, 0.2, ["before you ship compact/: the pruned model loses 20.00 points of accuracy"]),
        (False, 0.2, []),
    ],
)
def test_the_advice_follows_from_the_scores(is_beaten, lost, advice):
    trivial = SimpleNamespace(is_beaten=is_beaten)
    difference = SimpleNamespace(
        model="masked", metric="accuracy", difference=-lost, low=-lost, high=-lost, confidence=0.95
    )
    contents = SimpleNamespace(
        evaluations=[SimpleNamespace(trivial=trivial)], comparisons=[difference]
    )
    notes = _advice(contents, ["compact/"], latency=True)
    assert [note[: len(start)] for note, start in zip(notes, advice, strict=True)] == advice
    assert all("(--sparsity)" in note for note in notes if lost > 0.05)


def test_a_teacher_is_learned_from(given, tmp_path):
    teacher = own_files.headed(tmp_path / "teacher", tuple(sorted(NAMES)), seed=3)
    args = [*given, "--teacher", teacher, "--set", "train.log_every=1"]
    result = succeeds(*args, "-o", tmp_path / "out")
    terms = [r["terms"] for r in log_of(tmp_path / "out") if r["step"] > 0]
    assert all(set(t) == {"task", "kd", "regularizer"} for t in terms)
    assert all(t["kd"] > 0 for t in terms)
    # Computed once for all rows, and deleted at the end of the run.
    assert "computing the teacher's signals" in result.output
    assert not (tmp_path / "out" / "signals").exists()
    succeeds(*args, "--set", "cache_gb=0", "-o", tmp_path / "asked")
    in_every_step = [r["terms"] for r in log_of(tmp_path / "asked") if r["step"] > 0]
    assert len(terms) == len(in_every_step)
    assert all(
        a["kd"] == pytest.approx(b["kd"], rel=1e-4)
        for a, b in zip(terms, in_every_step, strict=True)
    )


def test_cap_contrasts_with_the_model_as_it_was_and_as_it_is_fine_tuned(given, tmp_path):
    teacher = own_files.headed(tmp_path / "teacher", tuple(sorted(NAMES)), seed=3)
    args = [*given, "--method", "cap", "--max-steps", "3", "--set", "train.log_every=1"]
    for name, more, extra in (
        ("alone", [], set()),
        ("taught", ["--teacher", teacher], {"kd", "supervised"}),
    ):
        succeeds(*args, *more, "-o", tmp_path / name)
        terms = [r["terms"] for r in log_of(tmp_path / name) if r["step"] > 0]
        assert all(set(t) == {"task", "unsupervised"} | extra for t in terms)
        assert all(value > 0 for t in terms for value in t.values())
    assert report_of(tmp_path / "taught").recipe["kd"]["weight"] == 0.9


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        ([], {"sparsity": [1.0]}, "item 1 of 'sparsity' must be less than 1, got 1.0"),
        ([], {"sparsity": [-0.1]}, "item 1 of 'sparsity' must be at least 0"),
        ([], {"sparsity": [0.5, 0.5]}, "sparsity 0.5 was given twice"),
        (["smp", "smp"], {}, "method smp was given twice"),
        (
            [],
            {"pruner.masking": "lokal"},
            "'pruner.masking' must be 'local', 'global', 'proportional' or 'threshold'",
        ),
        (["movement"], {"pruner.masking": "threshold"}, "'pruner.masking' must be"),
    ],
)
def test_wrong_recipes_are_refused_before_anything_is_loaded(methods, options, message):
    with pytest.raises(UsageError) as raised:
        prune(prune_recipes(methods, recipe=None, sets=(), options=options), RunOptions())
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--set", "pruner.warmup_steps=31"],
            "'pruner.warmup_steps' is 31, but the run has only 30 steps",
        ),
        (
            ["--method", "magnitude", "--method", "smp", "--set", "head.words=[w40]"],
            "1 label words for the 2 outputs",
        ),
    ],
)
def test_wrong_options_leave_nothing(given, tmp_path, options, message):
    assert message in refused(tmp_path, *given, *options)


@pytest.mark.parametrize("kind", ["convbert", "gemma3_text"])
def test_the_report_of_a_pruned_model_of_another_type_names_each_head(kind, task, tmp_path):
    """ConvBERT's attention output also reads a convolution; Gemma's heads share keys and values."""
    torch.manual_seed(0)
    folder = on_disk(AutoModel.from_config(tiny_config(kind)), tmp_path / "model")
    method = ("--method", "magnitude", "--sparsity", "0.5", "--max-steps", "2")
    succeeds("prune", folder, *task, *method, *QUICK, "-o", tmp_path / "out")
    (pruning,) = report_of(tmp_path / "out").pruning
    assert pruning.density == pytest.approx(0.5, abs=0.01)
    heads = 2 if kind == "convbert" else 4
    assert [len(layer) for layer in pruning.heads] == [heads, heads]
    assert all(0 < share < 1 for layer in pruning.heads for share in layer)


@pytest.mark.parametrize("method", ["smp", "magnitude"])
def test_the_best_weights_have_the_density_asked_for(given, tmp_path, method):
    """Before the density is reached the model is larger and scores better."""
    often = ["--set", "keep=best", "--set", "train.eval_every=3", "--set", "measure.latency=false"]
    alone = ["--set", "head.words=null", "--lr", "1e-2"]
    if method == "smp":
        alone = ["--set", "pruner.warmup_fraction=0.8"]
    succeeds(
        *given, *alone, "--method", method, "--sparsity", "0.99", *often, "-o", tmp_path / "out"
    )
    assert kept(tmp_path / "out") == pytest.approx(0.01, abs=1e-3)
    scores = {
        r["step"]: r["metrics"]["accuracy"] for r in log_of(tmp_path / "out") if "metrics" in r
    }
    (note,) = [note for note in report_of(tmp_path / "out").notes if "were kept" in note]
    assert "from step 24 on" in note
    best = max((step for step in scores if step >= 24), key=scores.__getitem__)
    assert f"the weights of step {best} were kept" in note
    # The first of equal scores would be kept.
    assert max(score for step, score in scores.items() if 0 < step < 24) >= scores[best]


def test_without_a_density_to_ask_for_the_last_weights_are_kept_and_that_is_said(given, tmp_path):
    often = ["--set", "keep=best", "--set", "train.eval_every=10", "--set", "measure.latency=false"]
    succeeds(*given, "--set", "head.words=null", "--method", "l0", *often, "-o", tmp_path / "out")
    report = report_of(tmp_path / "out")
    assert any(
        "keep: best has no effect" in note and "last weights are kept" in note
        for note in report.notes
    )
    assert not any("were kept" in note for note in report.notes)
    assert (
        log_of(tmp_path / "out")[-1]["metrics"]["accuracy"] == score(tmp_path / "out")["accuracy"]
    )


def test_a_compact_model_that_differs_is_a_bug_with_a_traceback():
    workload = SimpleNamespace(held_out=Rows(), encode=lambda model, batch: [model])
    with pytest.raises(AssertionError, match=r"differs from the masked one by 1\.0e\+00"):
        _check_compact(workload, torch.zeros(2), torch.ones(2), 1)
    assert "differ by at most 0e+00" in _check_compact(workload, torch.ones(2), torch.ones(2), 1)


class Rows:
    """Two held-out rows."""

    def __len__(self):
        return 2

    def batch(self, rows):
        return rows
