"""`kdcli distill --to family`: one training of students that share their layers."""

import shlex
from dataclasses import replace

import own_files
import pytest
import torch
from encoders import tiny_encoder
from own_files import log_of, refused, report_of, succeeds
from transformers import AutoModel

from kdcli.errors import UsageError
from kdcli.models.capture import capture
from kdcli.models.shape import InitializedStudent
from kdcli.types import Needs, Objective
from kdcli.verbs.distill.family import member, members, nested_layers
from kdcli.verbs.distill.student import Student, separate_modules

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


@pytest.mark.parametrize("method", ["embedding", "minilm", "tinybert"])
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
    assert {term.partition("/")[0] for one in trained for term in one["terms"]} == names
    report = report_of(tmp_path / "out")
    assert {one.name for one in report.models if one.role == "student"} == names
    losses = report.quality["held-out loss"]
    # Members without layers start far from the teacher, and all of them learn.
    assert all(losses[f"{n}x32"]["loss"] < losses[f"{n}x32 undistilled"]["loss"] for n in (1, 2, 3))


def test_a_family_of_one_is_the_student_itself():
    network = tiny_encoder("bert", num_hidden_layers=2)
    made = members(InitializedStudent(network, ["copied"]), {"student": 2})
    assert (made["student"].model, made["student"].notes) == (network, ["copied"])


def test_a_family_computes_what_its_members_compute_alone():
    torch.manual_seed(0)
    network = tiny_encoder("bert", num_hidden_layers=3)
    made = members(InitializedStudent(network, []), {"three": 3, "two": 2, "one": 1})
    teacher = capture(tiny_encoder("bert", num_hidden_layers=3), Needs(hidden=frozenset({3})))
    ids_BL = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}
    objective = Objective(
        Needs(),
        Needs(hidden=frozenset({0})),
        torch.nn.Module(),
        lambda t, s: {"last": (s.hidden[max(s.hidden)] - t.hidden[3]).square().mean()},
        {"last": "tokens"},
    )
    students = {}
    for name, built in made.items():
        last = frozenset({built.model.config.num_hidden_layers})
        own = replace(objective, student_needs=Needs(hidden=last))
        students[name] = Student(built.model, own)
    (family,) = separate_modules(students).values()
    runs = []
    for layer in network.encoder.layer:
        layer.attention.register_forward_pre_hook(lambda *_: runs.append(1))
    with torch.no_grad():
        signals = teacher(batch)
    alone = {f"{n}/last": s(batch, signals)["last"].value for n, s in students.items()}
    assert len(runs) == 6
    together = family(batch, signals)
    # The first layer runs once for two members.
    assert len(runs) == 6 + 5
    assert {name: float(term.value) for name, term in together.items()} == {
        name: float(value) for name, value in alone.items()
    }


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
        ("--to family --set student.layers=measured", "chooses layers for one depth"),
        ("--to family --method minilm --ablate minilm", "--ablate compares several"),
    ],
)
def test_refused(given, options, message, tmp_path):
    more = ["--method", "embedding"] if "--task" not in options and "minilm" not in options else []
    assert message in refused(
        tmp_path, *given, *more, *shlex.split(options), "-o", tmp_path / "out"
    )
