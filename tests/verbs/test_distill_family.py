"""`kdcli distill --to family`: one training of students that share their layers."""

import shlex

import own_files
import pytest
import torch
from encoders import tiny_encoder
from own_files import log_of, refused, report_of, same_weights, succeeds
from transformers import AutoModel, AutoModelForSequenceClassification

from kdcli.errors import UsageError
from kdcli.models.shape import InitializedStudent
from kdcli.types import Job, StepLoss, Term
from kdcli.verbs.distill.student import family_job, member, members, nested_layers, turns_of

QUICK = shlex.split(
    "--max-steps 4 --batch-size 8 --lr 1e-3 --dtype fp32 --set data.max_length=16 "
    "--set train.log_every=1 --set data.held_out_blocks=8 --set measure.latency=false"
)
KEPT = {4: [1, 2, 3, 4], 3: [1, 2, 4], 2: [1, 4], 1: [4]}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    own_files.embedder(folder / "teacher", num_hidden_layers=4)
    lines = [f"w{i % 41} w{i % 13} w{(i * 7) % 40} w{i % 5}" for i in range(200)]
    (folder / "text.txt").write_text("\n".join(lines))
    return ["distill", folder / "teacher", "--data", folder / "text.txt", *QUICK]


@pytest.mark.parametrize(
    ("depths", "kept"),
    [
        ((6, 4, 3, 2), {6: [1, 2, 3, 4, 5, 6], 4: [1, 2, 4, 6], 3: [1, 2, 6], 2: [1, 6]}),
        ((4, 3, 2, 1), KEPT),
        ((2, 12), {12: list(range(1, 13)), 2: [1, 12]}),
    ],
)
def test_a_smaller_member_keeps_layers_of_every_larger_one(depths, kept):
    assert nested_layers(depths) == kept


@pytest.mark.parametrize("method", ["embedding", "minilm"])
def test_members_are_stock_models_with_the_layers_of_the_largest(given, method, tmp_path):
    succeeds(*given, "--method", method, "--to", "family", "-o", tmp_path / "out")
    models = {n: AutoModel.from_pretrained(tmp_path / "out" / f"{n}x32") for n in KEPT}
    largest = models[4]
    for depth, model in models.items():
        assert model.config.num_hidden_layers == len(model.encoder.layer) == depth
        pairs = [(model.embeddings, largest.embeddings)]
        pairs += [
            (layer, largest.encoder.layer[n - 1])
            for layer, n in zip(model.encoder.layer, KEPT[depth], strict=True)
        ]
        for own, whole in pairs:
            expected = whole.state_dict()
            assert all(torch.equal(w, expected[name]) for name, w in own.state_dict().items())
    names = {f"{n}x32" for n in KEPT}
    trained = [one for one in log_of(tmp_path / "out") if "terms" in one]
    turns = [{term.partition("/")[0] for term in one["terms"]} for one in trained]
    assert turns == [{f"{n}x32"} for n in (4, 3, 2, 1)]
    report = report_of(tmp_path / "out")
    assert {one.name for one in report.models if one.role == "student"} == names
    assert any("share one training" in note for note in report.notes)
    card = (tmp_path / "out" / "2x32" / "README.md").read_text("utf-8")
    assert ", together with 3 other models." in card
    losses = report.quality["held-out loss"]
    # Members without layers start far from the teacher, and all of them learn.
    assert all(losses[f"{n}x32"]["loss"] < losses[f"{n}x32 undistilled"]["loss"] for n in (1, 2, 3))


def test_layers_of_members_may_be_measured(given, tmp_path, caplog):
    out = tmp_path / "out"
    asked = [*given, "--method", "embedding", "--to", "3x32,2x32,1x32"]
    succeeds(*asked, "--set", "student.layers=measured", "-o", out)
    three, two, one = lists = report_of(out).recipe["student"]["layers"]
    assert [*map(len, lists)] == [3, 2, 1]
    assert {*one} < {*two} < {*three}
    assert one[-1] == two[-1] == three[-1]
    models = {n: AutoModel.from_pretrained(out / f"{n}x32") for n in (3, 2)}
    for layer, n in zip(models[2].encoder.layer, two, strict=True):
        whole = models[3].encoder.layer[three.index(n)].state_dict()
        assert all(torch.equal(w, whole[name]) for name, w in layer.state_dict().items())
    assert caplog.text.count("choices)") == 2
    succeeds(*asked, "--set", f"student.layers={lists}", "-o", tmp_path / "named")
    assert same_weights(out / "2x32", tmp_path / "named" / "2x32")


def test_a_family_of_one_is_the_student_itself():
    network = tiny_encoder("bert", num_hidden_layers=2)
    made = members(InitializedStudent(network, ["copied"]), {"student": 2}, nested_layers([2]))
    assert (made["student"].model, made["student"].notes) == (network, ["copied"])


def test_each_member_runs_the_same_number_of_layers():
    turns = turns_of({"six": 6, "four": 4, "three": 3, "two": 2})
    assert turns[:4] == ["six", "four", "three", "two"]
    counts = {name: turns.count(name) for name in turns}
    assert counts == {"six": 2, "four": 3, "three": 4, "two": 6}


def test_members_take_turns_and_each_step_gives_every_weight_a_gradient():
    torch.manual_seed(0)
    network = tiny_encoder("bert", num_hidden_layers=3)
    made = members(InitializedStudent(network, []), {"three": 3, "one": 1}, nested_layers([3, 1]))
    batch = {"input_ids": torch.arange(24).view(2, 12)}

    def job_of(model):
        def step(batch):
            loss = model(**batch).last_hidden_state.square().mean()
            return StepLoss({"loss": Term(loss, "rows")}, loss)

        return Job({"model": model}, step, None, None, None)

    jobs = {name: job_of(built.model) for name, built in made.items()}
    job = family_job(jobs, {"three": 3, "one": 1})
    (family,) = job.modules.values()
    family.eval()
    every = job.step(batch)
    assert list(every.terms) == ["three/loss", "one/loss"]
    values = {name: float(term.value.detach()) for name, term in every.terms.items()}
    assert float(every.outputs.detach()) == values["three/loss"]
    for dropout in (m for m in family.modules() if isinstance(m, torch.nn.Dropout)):
        dropout.p = 0.0
    family.train()
    for done, name in enumerate(["three", "one", "one", "one", "three"]):
        job.on_step_end(done)
        loss = job.step(batch)
        assert list(loss.terms) == [f"{name}/loss"]
        assert float(loss.total.detach()) == values[f"{name}/loss"]
        family.zero_grad()
        loss.total.backward()
        gradients = [float(p.grad.abs().sum()) for p in network.encoder.layer[1].parameters()]
        assert any(gradients) == (name == "three")


@pytest.mark.parametrize("options", ["", "--method pkd", "--student"])
def test_a_classifier_and_its_family(options, tmp_path):
    names = tuple(sorted(own_files.NAMES))
    own_files.own(tmp_path / "rows", "class", n=48, judged=24)
    own_files.headed(tmp_path / "teacher", names, num_hidden_layers=4)
    if options == "--student":
        options = f"--student {own_files.encoder(tmp_path / 'own', num_hidden_layers=4)}"
    quick = f"{options} --max-steps 3 --set intermediate.max_steps=3 --set measure.latency=false"
    task = ["--task", "own", "--data", tmp_path / "rows", "--to", "4x32,2x32"]
    out = tmp_path / "out"
    succeeds("distill", tmp_path / "teacher", *task, *shlex.split(quick), "-o", out)
    largest, smaller = (
        AutoModelForSequenceClassification.from_pretrained(out / name) for name in ("4x32", "2x32")
    )
    assert [len(one.bert.encoder.layer) for one in (largest, smaller)] == [4, 2]
    weights = dict(largest.named_parameters())
    for name, weight in smaller.named_parameters():
        assert torch.equal(weight, weights[name.replace("layer.1.", "layer.3.")])
    report = report_of(out)
    assert [one.name for one in report.models] == ["teacher", "4x32", "2x32"]
    scores = {one.model: one.metrics["accuracy"] for one in report.evaluations}
    for name in ("4x32", "2x32"):
        again = tmp_path / f"again-{name}"
        succeeds("evaluate", out / name, "--task", "own", "--data", tmp_path / "rows", "-o", again)
        assert report_of(again).evaluations[0].metrics["accuracy"] == scores[name]


def negatives(number):
    return [f"w{(number + 5 * n) % 40} w{n}" for n in range(2, 8)]


def test_the_scores_are_those_of_their_members_in_any_order(tmp_path):
    rows = [
        {"query": f"w{i} w{i % 7}", "positive": f"w{i % 11} w3", "negative": negatives(i)}
        for i in range(40)
    ]
    for split, some in (("train", rows[:20]), ("validation", rows[20:])):
        own_files.write(tmp_path / "lists" / f"{split}.jsonl", some)
    own_files.headed(tmp_path / "teacher", num_labels=1, num_hidden_layers=3, type_vocab_size=2)
    data, out = ["--task", "rerank", "--data", tmp_path / "lists"], tmp_path / "out"
    training = "--to 1x32,3x32 --max-steps 6 --lr 1e-2 --dtype fp32 --set keep=last"
    quick = "--set train.eval_every=3 --set data.max_length=16 --set measure.latency=false"
    words = shlex.split(f"{training} {quick}")
    succeeds("distill", tmp_path / "teacher", *data, *words, "-o", out)
    said = {one.model: one.metrics["ndcg@10"] for one in report_of(out).evaluations}
    members = {"1x32", "3x32"}
    assert said.keys() == {"teacher", *members, *(f"{name} undistilled" for name in members)}
    assert said["1x32"] != said["3x32"]
    for name in ("1x32", "3x32"):
        evaluated = tmp_path / f"evaluated-{name}"
        succeeds("evaluate", out / name, *data, "--set", "data.max_length=16", "-o", evaluated)
        (one,) = report_of(evaluated).evaluations
        assert one.metrics["ndcg@10"] == pytest.approx(said[name], abs=1e-6)


@pytest.mark.parametrize("kind", ["bert", "mpnet", "modernbert", "deberta-v2", "albert", "t5"])
def test_members_share_every_weight(kind):
    network = tiny_encoder(kind, num_hidden_layers=3)
    weights = set(map(id, network.parameters()))
    view = member(network, [1, 3])
    assert {id(weight) for weight in view.parameters()} <= weights
    assert view.config.num_hidden_layers == 2


def test_a_layer_that_works_only_in_its_place_is_refused():
    # The first layer of a T5 holds the position biases of all layers.
    with pytest.raises(UsageError, match="layers 3 of a t5 compute something else"):
        member(tiny_encoder("t5", num_hidden_layers=3), [3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--to 4x32,2x16", "differ in more than their layers"),
        ("--to 4x32,4x32", "names a shape twice"),
        ("--to 4x32,04x32", "names a number of layers twice"),
        ("--to 4x32,static", "a static student has no layers to share"),
        ("--to family --to 2x32", "repeat --to with single shapes"),
        ("--to 4x32,2", "'2' is not a shape"),
        ("--to 4x32,2x", "'2x' is not a shape"),
        ("--to 5x32,2x32", "larger than its teacher"),
        ("--to 3x32,1x32 --set student.layers=[[1,2,4],[3]]", "[3] must be a subset of [1, 2, 4]"),
        ("--to 3x32,1x32 --set student.layers=[[1,2,4],[1]]", "[1] must be a subset of [1, 2, 4]"),
        ("--to family --method minilm --ablate minilm", "--ablate compares several"),
    ],
)
def test_refused(given, options, message, tmp_path):
    more = ["--method", "embedding"] if "--task" not in options and "minilm" not in options else []
    assert message in refused(
        tmp_path, *given, *more, *shlex.split(options), "-o", tmp_path / "out"
    )
