"""`kdcli compress --cascade`: a small model answers, and a larger one where it is unsure."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from fake_verbs import Fakes, tuned
from own_files import headed, kdcli, refused, report_of, rows, write
from test_compress_unlabelled import (
    LABELS,
    TRAIN,
    classifier,
    embedder,
    keys_of,
    reranker,
    several_labels,
    tagger,
)
from transformers import AutoTokenizer

import kdcli as package
from kdcli.deploy.predict import Predictor
from kdcli.disk import read_json
from kdcli.errors import GateError, MachineError
from kdcli.metrics.cascade import Answers, choose, ranked_twice, rows_needed, upper_limit
from kdcli.models.model import training_rows
from kdcli.report.schema import Report
from kdcli.verbs.compress.cascade import find, write_cascade
from kdcli.verbs.compress.limits import GoalSettings, ScoredModel
from kdcli.verbs.compress.scored import CandidateScores

TEXTS = [f"w{n % 50} w{n % 7} w{n % 11}" for n in range(24)]
MS = {"1x32": 2.0, "onnx": 60.0, "teacher": 100.0}
KINDS = {"class": classifier, "multi": several_labels, "tokens": tagger, "rerank": reranker}


def parts_of(folder, make):
    """Two exports with the same tokenizer and different heads, the second with surer answers."""
    for name, scale in (("small", 0.4), ("large", 3.0)):
        make(folder / name)
        network = package.load(folder / name / "model").model
        torch.manual_seed(len(name + make.__name__) if scale < 1 else 0)
        torch.nn.init.normal_(network.classifier.weight, std=scale)
        network.save_pretrained(folder / name / "model")
        package.export(
            folder / name / "model", file_format="onnx", output_dir=folder / f"{name}-onnx"
        )
    return folder / "small-onnx", folder / "large-onnx"


def items_of(kind):
    if kind == "rerank":
        return [("w1 w2", text) for text in TEXTS]
    return [text.split() if kind == "tokens" else text for text in TEXTS]


def inputs_of(tokenizer, item, kind):
    encoded = tokenizer(item, is_split_into_words=kind == "tokens", return_tensors="np")
    words = np.array([-1 if w is None else w for w in encoded.word_ids()])
    starts = (words >= 0) & (np.diff(words, prepend=-1) != 0)
    types = np.zeros_like(encoded["input_ids"])
    return {"token_type_ids": types, **encoded, "word_starts": starts[None].astype(np.int64)}


def run(session, inputs):
    return session.run(None, {each.name: inputs[each.name] for each in session.get_inputs()})


def sure_of(kind, logits, starts):
    """How sure an answer is, with numpy alone."""
    if kind == "multi":
        probability = 1 / (1 + np.exp(-logits))
        return np.maximum(probability, 1 - probability).min()
    logits = logits[starts] if kind == "tokens" else logits[None]
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return (exp / exp.sum(-1, keepdims=True)).max(-1).min()


def code_on_card(folder):
    card = (folder / "README.md").read_text("utf-8")
    return re.search(r"```python\n(.*?)```", card, re.S)[1]


@pytest.fixture(scope="module", params=["class", "class, own tokenizers", "multi", "tokens"])
def cascade(request, tmp_path_factory):
    """The kind, the two exports, their cascade at the median sureness, and the logits of each."""
    kind, _, own = request.param.partition(", ")
    folder = tmp_path_factory.mktemp(kind)
    small, large = parts_of(folder, KINDS[kind])
    if own:
        config = read_json(small / "tokenizer_config.json") | {"model_max_length": 20}
        (small / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    tokenizer, logits, sure = AutoTokenizer.from_pretrained(large), [], []
    sessions = [onnxruntime.InferenceSession(f / "onnx/model.onnx") for f in (small, large)]
    for item in items_of(kind):
        inputs = inputs_of(tokenizer, item, kind)
        logits.append([run(session, inputs)[0][0] for session in sessions])
        starts = inputs["word_starts"][0].astype(bool)
        sure.append(sure_of(kind, logits[-1][0], starts))
    threshold = float(np.median(sure)) + 1e-9
    write_cascade(folder / "both", small, large, {"threshold": threshold}, kind)
    expected = [pair[int(s < threshold)] for pair, s in zip(logits, sure, strict=True)]
    asked = [s < threshold for s in sure]
    assert 0 < sum(asked) < len(asked)
    return kind, folder / "both", small, large, expected, asked


def test_the_larger_model_answers_where_the_small_one_is_unsure(cascade):
    kind, folder, small, large, _, asked = cascade
    items, loaded = items_of(kind), package.load(folder)
    own, other = (Predictor.open(str(part)).predict(items) for part in (small, large))
    expected = [b if asks else a for a, b, asks in zip(own, other, asked, strict=True)]
    shown = [repr(each) for each in expected]
    found = loaded.predict(items)
    assert [re.sub(r"\d\.\d+(e-\d+)?", "", repr(each)) for each in found] == [
        re.sub(r"\d\.\d+(e-\d+)?", "", each) for each in shown
    ]


def test_the_code_on_the_card_needs_no_kdcli(cascade, monkeypatch, capsys):
    kind, folder, _, _, expected, _ = cascade
    code = code_on_card(folder)
    assert "kdcli" not in code.replace("kdcli_cascade", "")
    monkeypatch.chdir(folder)
    names, known = read_json(folder / "config.json")["id2label"], {}
    exec(code, known)
    assert capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for item, logits in zip(items_of(kind), expected, strict=True):
        if kind == "class":
            right = names[str(logits.argmax())]
        elif kind == "multi":
            right = [names[str(n)] for n in np.flatnonzero(logits > 0)]
        else:
            starts = inputs_of(tokenizer, item, kind)["word_starts"][0].astype(bool)
            right = [names[str(n)] for n in logits[starts].argmax(-1)]
        assert known["answer"](item) == right


def test_one_file_runs_the_larger_model_only_if_asked(cascade, tmp_path):
    kind, folder, _, _, expected, asked = cascade
    tokenizer = AutoTokenizer.from_pretrained(folder)
    graph = onnx.load(folder / "onnx/model_cascade.onnx").graph
    read = {name for node in graph.node for name in node.input}
    assert {each.name for each in graph.initializer} <= read
    ran = {}
    for asks in (False, True):
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / f"profile-{asks}")
        session = onnxruntime.InferenceSession(folder / "onnx/model_cascade.onnx", options)
        for item, logits, is_asked in zip(items_of(kind), expected, asked, strict=True):
            if is_asked == asks:
                inputs = inputs_of(tokenizer, item, kind)
                inputs |= {f"second_{name}": value for name, value in inputs.items()}
                found, said = run(session, inputs)
                np.testing.assert_allclose(found[0], logits, atol=1e-5)
                assert said == asks
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
        ran[asks] = sum(event["name"].startswith("second_") for event in events)
    assert ran[False] == 0 < ran[True]


def test_a_reranker_ranks_what_the_small_one_keeps(tmp_path, monkeypatch):
    small, large = parts_of(tmp_path, reranker)
    write_cascade(tmp_path / "both", small, large, {"keep": 5}, None)
    items = items_of("rerank")
    own, other, both = (
        np.array(Predictor.open(str(place)).predict(items))
        for place in (small, large, tmp_path / "both")
    )
    order = np.argsort(-own, kind="stable")
    expected = [*order[:5][np.argsort(-other[order[:5]])], *order[5:]]
    assert np.argsort(-both, kind="stable").tolist() == expected
    assert not (tmp_path / "both/onnx/model_cascade.onnx").exists()
    monkeypatch.chdir(tmp_path / "both")
    known = {}
    exec(code_on_card(tmp_path / "both"), known)
    assert known["rank"]("w1 w2", TEXTS) == expected
    # The lists as `evaluate` ranks them.
    result = kdcli(
        "evaluate", large, tmp_path / "both", "--task", "rerank", "--data",
        tmp_path / "small/lists.jsonl", "--set", "data.labels=teacher", "-o", tmp_path / "scores",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    # Lists of three are read whole.
    assert [e.metrics["ndcg@10"] for e in report_of(tmp_path / "scores").evaluations] == [1.0, 1.0]


def test_candidates_that_are_cut_keep_the_small_models_order():
    first, second = np.array([0.1, 0.9, 0.5, 0.7]), np.array([9.0, 1.0, 2.0, 3.0])
    ranked = ranked_twice(first, second, 2)
    assert np.argsort(-ranked).tolist() == [3, 1, 2, 0]
    assert ranked_twice(first, second, 4).tolist() == second.tolist()


@pytest.mark.parametrize("loss", [1.0, 0.5])
@pytest.mark.parametrize(
    ("lost", "rows", "risk"), [(0, 150, 0.001), (6, 400, 0.02), (13, 1000, 0.014), (8, 400, 0.02)]
)
def test_the_rows_that_would_show_a_bound(lost, rows, risk, loss):
    """A loss of a half makes the losses of a kind that is no share."""
    losses = np.repeat([loss, 0.0], [round(lost / loss), rows - round(lost / loss)])
    needed = rows_needed(losses, risk, 0.05)
    if lost >= risk * rows:
        assert needed is None
        return

    def limit(count):
        """The limit of so many rows with at least the same mean loss."""
        number = math.ceil(lost / rows * count / loss - 1e-9)
        return upper_limit(np.repeat([loss, 0.0], [number, count - number]), 0.05)

    assert limit(needed) <= risk
    assert min(limit(count) for count in range(needed - needed // 9, needed)) > risk


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """A compression of a classifier, whose student is too unsure to answer alone."""
    folder = tmp_path_factory.mktemp("compressed")
    headed(folder / "model", LABELS, num_hidden_layers=2)
    # The student is saved with this length and these inputs.
    tokenizer = folder / "model" / "tokenizer_config.json"
    names = ["input_ids", "token_type_ids", "attention_mask"]
    own = {"model_max_length": 24, "model_input_names": names}
    tokenizer.write_text(json.dumps(read_json(tokenizer) | own), "utf-8")
    data = write(folder / "texts.jsonl", [{"text": row["text"]} for row in rows("class", 1500)])
    made = Fakes({}, in_earnest=True, ms=MS)
    keys = keys_of(
        folder, data, goal__cascade=True, plan__distill={"train": {**TRAIN, "max_steps": 40}}
    )
    return folder, partial(made.compress, **keys, output_dir=folder / "out"), made


def test_a_cascade_is_found_verified_and_shipped(compressed, tmp_path):
    folder, compress, _ = compressed
    compression = compress(**{"goal__max_drop": 20.0}).report.compression
    chosen = next(one for one in compression.candidates if one.name == compression.chosen)
    facts, best = chosen.cascade, folder / "out" / "best"
    assert compression.chosen == "1x32-onnx+onnx"
    assert (facts.first, facts.second) == ("1x32-onnx", "onnx")
    assert chosen.ms == pytest.approx(2.0 + facts.asked * 60.0)
    assert chosen.speedup.median == pytest.approx(100.0 / chosen.ms)
    assert chosen.costs["95th percentile, ms"] == 62.0
    assert facts.risk <= 0.2
    assert compression.verification.risk <= 0.2
    assert "It is a cascade: 1x32-onnx reads every text, and onnx reads" in compression.sentence
    said = f"at most {100 * compression.verification.risk:.2f} % of the answers on such texts"
    assert said in compression.sentence
    assert f"asks onnx about {100 * facts.asked:.1f} % of the texts" in (
        folder / "out" / "report.md"
    ).read_text("utf-8")
    assert read_json(best / "config.json")["kdcli_cascade"] == {"threshold": facts.setting}
    assert not (best / "first" / "tokenizer.json").exists()
    # The small model learned from rows that the larger one was not trained on.
    assert len(training_rows(str(best)))
    # The shipped directory has the score that the report states.
    result = kdcli(
        "evaluate", folder / "model", best, "--data", folder / "texts.jsonl", "--set",
        f"data.partition={folder / 'out' / 'partition.safetensors'}", "--set",
        "data.split=verification", "--set", "data.max_length=24", "-o", tmp_path / "scores",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "scores")
    assert report.evaluations[1].metrics["agreement"] == compression.verification.score
    assert any("the larger model gave" in note for note in report.notes)
    # A small model with other labels cannot answer for the larger one.
    shutil.copytree(best, tmp_path / "other")
    config = read_json(tmp_path / "other/first/config.json")
    config["id2label"] = {"0": "calm", "1": "brisk"}
    config["label2id"] = {"calm": 0, "brisk": 1}
    (tmp_path / "other/first/config.json").write_text(json.dumps(config), "utf-8")
    said = refused(tmp_path, "evaluate", best, tmp_path / "other", "--data", folder / "texts.jsonl")
    assert "have different labels: calm, brisk and brisk, calm" in said
    config = read_json(best / "config.json") | {"kdcli_cascade": {"threshold": 2.0}}
    (tmp_path / "other/config.json").write_text(json.dumps(config), "utf-8")
    said = refused(tmp_path, "evaluate", best, tmp_path / "other", "--data", folder / "texts.jsonl")
    assert "kdcli_cascade in the config.json of" in said
    assert "whose time depends on how often" in refused(tmp_path, "benchmark", best)


def test_a_bound_that_too_few_rows_can_show_is_a_missed_goal(compressed):
    _, compress, made = compressed
    trained = len(made.recipes)
    with pytest.raises(GateError) as missed:
        compress(goal__max_drop=0.1, goal__speedup=2.0)
    assert "(no cascade): " in missed.value.message
    why = (
        r"There is no cascade: none keeps --max-drop 0\.1: on 150 selection rows, up "
        r"to \S+ % of the answers of 1x32-onnx\+onnx may change\. At the same rate of changes, "
        r"about 2,995 selection rows would be enough: give more rows, or raise "
        r"data\.selection_rows if they come from the training rows, with --overwrite or another "
        r"-o\."
    )
    assert re.search(why, missed.value.hint)
    # A candidate that meets the goal alone does not change why.
    assert re.search(why, compress(goal__max_drop=0.1).report.compression.advice)
    assert len(made.recipes) == trained


def test_a_larger_model_that_changes_too_many_answers_is_no_end(tmp_path):
    """Two int8 files, of which the larger one changes 2 % of the teacher's answers."""
    right, wrong = [0] * 1000, [1] * 20 + [0] * 980
    shown = {"teacher": right, "1x32-onnx-int8": wrong[::-1], "onnx-int8": wrong}
    answers = {name: {"shown": each, "sure": [0.9] * 1000} for name, each in shown.items()}
    (tmp_path / "answers.json").write_text(json.dumps(answers), "utf-8")
    scored = {}
    for name, ms in zip(shown, (100.0, 2.0, 20.0), strict=True):
        (tmp_path / name / "onnx").mkdir(parents=True)
        score = 1 - sum(shown[name]) / 1000
        scored[name] = ScoredModel(name, tmp_path / name, score, score, score, ms, None, 1.0)
    teacher, *candidates = scored.values()
    goal = GoalSettings(max_drop=1.0, cascade=True)
    report = Report.model_construct()
    scores = CandidateScores(goal, report, "agreement", 1000, teacher, candidates)
    found, why = find(scores, tmp_path)
    assert not found
    assert why.endswith(
        "on 1,000 selection rows, up to 2.89 % of the answers of "
        "1x32-onnx-int8+onnx-int8 may change. More selection rows do not help, because the rate of "
        "changes itself is not below the goal. Add onnx to plan.backends: in float32, the model "
        "itself loses nothing."
    )


def test_one_candidate_makes_no_cascade(tmp_path):
    made = Fakes({"onnx": 0.8}, errors={"2x16": MachineError("no memory")})
    keys = {"plan__backends": ["onnx"], "plan__shapes": ["2x16"], "plan__prune": None}
    with pytest.raises(GateError) as missed:
        made.compress(
            **tuned(tmp_path), **keys, goal__max_drop=1.0, goal__cascade=True,
            output_dir=tmp_path / "out",
        )  # fmt: skip
    assert "needs two ONNX candidates, and there is only: onnx." in missed.value.hint


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (classifier, ["--speedup", "2"], "by --max-drop, which is not given add --max-drop 0.5"),
        (classifier, ["--max-drop", "0"], "by --max-drop, which is 0: no number of rows"),
        (
            classifier,
            ["--max-drop", "1", "--set", "plan.backends=[openvino-int8]"],
            "plan.backends has no ONNX file add onnx or onnx-int8 to plan.backends",
        ),
        (
            embedder,
            ["--max-drop", "1"],
            "--cascade is for classes, several labels, labels of words and rerankers, and",
        ),
    ],
)
def test_what_a_cascade_cannot_do_is_refused(make, options, said, tmp_path):
    data, _, _ = make(tmp_path)
    model = tmp_path / "model"
    assert said in refused(tmp_path, "compress", model, "--data", data, "--cascade", *options)


@pytest.mark.long
def test_the_bound_is_violated_in_at_most_one_of_twenty_repetitions():
    """Students of which the small ones are sure, and wrong, to different degrees."""
    rng, allowed, error, repetitions = np.random.default_rng(0), 0.02, 0.05, 500

    def draw(n, skill):
        sure = rng.beta(skill, 1, n) / 2 + 0.5
        wrong = rng.random(n) < (1 - sure) * 0.7
        return Answers(shown=wrong.tolist(), sure=sure.tolist())

    def second(n):
        return Answers(shown=(rng.random(n) < 0.004).tolist(), sure=[1.0] * n)

    def losses(model, n, threshold):
        answers, others = draw(n, model), second(n)
        asks = np.array(answers.sure) < threshold
        return np.where(asks, np.array(others.shown), np.array(answers.shown)).astype(float)

    def risk(skill, threshold):
        """The true share of wrong answers, integrated over how sure the small model is."""
        unsure, mean = (max(0.0, 2 * threshold - 1) ** power for power in (skill, skill + 1))
        wrong = 0.35 * (1 - unsure - skill / (skill + 1) * (1 - mean))
        return 0.004 * unsure + wrong

    of_one, of_naive, shipped, of_shipped, of_means = 0, 0, 0, 0, 0
    for _ in range(repetitions):
        teacher, chosen = Answers(shown=[False] * 1000, sure=[1.0] * 1000), []
        for skill in (2, 4, 6, 8, 10):
            trials = list(draw(1000, skill).trials(second(1000), teacher))
            assert len(trials) == 259
            trial, _ = choose(iter(trials), allowed, error)
            if trial is not None:
                chosen.append((trial.asked, skill, trial.setting))
                of_one += skill == 6 and risk(skill, trial.setting) > allowed
            best = min(one.setting for one in trials if one.losses_N.mean() <= allowed)
            of_naive += skill == 6 and risk(skill, best) > allowed
        # The pair that asks the least is verified on other rows.
        _, skill, threshold = min(chosen)
        if upper_limit(losses(skill, 2500, threshold), error) <= allowed:
            shipped += 1
            of_shipped += risk(skill, threshold) > allowed
        of_means += upper_limit(rng.beta(0.3, 5.7, 300), error) < 0.05
    # A threshold that is chosen by the share of wrong answers itself fails this test.
    assert of_naive > 5 * error * repetitions
    assert shipped > repetitions / 2
    assert max(of_one, of_shipped, of_means) <= error * repetitions
