"""`kdcli distill --method embedding` and `kdcli evaluate` of embedding models, from end to end on
tiny models."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import own_files
import pytest
import safetensors.numpy
import torch
from encoders import foreign_tokenizer, tiny_encoder
from own_files import (
    log_of,
    refused,
    report_of,
    said_by,
    same_weights,
    succeeds,
    terminate_in_training,
    write,
)
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from kdcli.engine.session import Session, start
from kdcli.models.embedding_format import EmbeddingFormat, save_embedder
from kdcli.models.load import load_encoder
from kdcli.recipe.resolve import Resolved, read_recipe
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.distill.space import VectorSpace
from kdcli.verbs.distill.vectors import with_layers
from kdcli.workloads.eval_sets import PairEvaluation

QUICK = shlex.split(
    "--max-steps 6 --batch-size 8 --lr 1e-3 --dtype fp32 --set data.max_length=16 "
    "--set train.eval_every=3 --set train.log_every=1 --set train.checkpoint_every=2 "
    "--set data.held_out_blocks=8 --set measure.latency=false "
    "--set embedding.anchors=16"
)
SOME = EmbeddingFormat("cls", prompts={"query": "w30 "}, max_length=20)


@pytest.fixture
def teacher(tmp_path):
    """A tiny embedding model, CLS-pooled."""
    base = load_encoder(str(own_files.encoder(tmp_path / "base", num_hidden_layers=4)))
    (tmp_path / "teacher").mkdir()
    save_embedder(base.model, base.tokenizer, SOME, tmp_path / "teacher")
    return tmp_path / "teacher"


@pytest.fixture
def texts(tmp_path):
    rng = np.random.default_rng(0)
    lines = [
        " ".join(f"w{n}" for n in rng.integers(0, 59, size=rng.integers(3, 10))) for _ in range(80)
    ]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    return tmp_path / "texts.txt"


@pytest.fixture
def given(teacher, texts):
    return ["distill", teacher, "--data", texts, *QUICK]


@pytest.fixture
def pairs(tmp_path):
    """An own task: two texts and how many words they share."""
    rows = []
    for n in range(60):
        words = np.random.default_rng(n).integers(0, 59, size=6)
        other = [*words[: n % 6], *np.random.default_rng(n + 999).integers(0, 59, size=6 - n % 6)]
        rows.append(
            {
                "a": " ".join(f"w{w}" for w in words),
                "b": " ".join(f"w{w}" for w in other),
                "label": n % 6 + 0.5,
            }
        )
    write(tmp_path / "pairs" / "validation.jsonl", rows)
    return tmp_path / "pairs"


@pytest.fixture
def beir(tmp_path):
    folder = tmp_path / "beir"
    write(
        folder / "corpus.jsonl",
        [{"_id": f"d{n}", "title": "", "text": f"w{n} w{n + 1} w{n + 2}"} for n in range(20)],
    )
    write(folder / "queries.jsonl", [{"_id": f"q{n}", "text": f"w{n} w{n + 1}"} for n in range(10)])
    lines = ["query-id\tcorpus-id\tscore", *(f"q{n}\td{n}\t1" for n in range(10))]
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines))
    return folder


def vectors(folder, texts=("w1 w2", "w3 w4 w5")):
    return SentenceTransformer(str(folder), device="cpu").encode(list(texts))


def test_an_embedding_model_is_distilled_as_one_and_stays_one(given, pairs, tmp_path):
    judge = [
        "--eval-task",
        "own",
        "--set",
        f"eval.source={pairs}",
        "--set",
        "eval.overrides={data.columns: {text: a, pair: b}}",
    ]
    result = succeeds(*given, "--to", "2x32", "--lr", "1e-4", "-o", tmp_path / "out", *judge)
    report = report_of(tmp_path / "out")
    assert report.recipe["method"] == "embedding"
    assert "cls pooling, normalised, as its modules.json says" in said_by(result)
    losses = report.quality["held-out loss"]
    assert losses["student"]["vectors"] < losses["student undistilled"]["vectors"]
    assert [e.model for e in report.evaluations] == ["teacher", "student", "student undistilled"]
    assert list(report.evaluations[0].metrics) == ["spearman", "pearson"]
    assert {c.baseline for c in report.comparisons} == {"teacher"}
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert theirs.prompts["query"] == "w30 "
    assert AutoModel.from_pretrained(tmp_path / "out").config.num_hidden_layers == 2
    assert vectors(tmp_path / "out").shape == (2, 32)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert 'SentenceTransformer("path/to/this/directory").encode' in card
    assert "AutoTokenizer" not in card


def test_a_narrower_student_learns_principal_components_or_keeps_a_dense_layer(given, tmp_path):
    result = succeeds(*given, "--to", "2x16@4", "--to", "3x32", "-o", tmp_path / "out")
    assert "16 principal components of the teacher's 32-wide vectors" in said_by(result)
    assert vectors(tmp_path / "out" / "2x16@4").shape == (2, 16)
    assert vectors(tmp_path / "out" / "3x32").shape == (2, 32)
    succeeds(*given, "--to", "2x16@4", "--set", "embedding.dense=true", "-o", tmp_path / "dense")
    assert vectors(tmp_path / "dense").shape == (2, 32)
    assert (tmp_path / "dense" / "2_Dense" / "model.safetensors").is_file()


def test_a_student_starts_from_its_teachers_weights_in_float32(given, tmp_path):
    """In half precision, the teacher is cast before it computes vectors. A fit runs in it too."""
    untrained = ["--to", "2x32", "--max-steps", "0", "--set", "student.init=copied"]
    for dtype in ("fp32", "bf16"):
        succeeds(*given, *untrained, "--dtype", dtype, "-o", tmp_path / dtype)
    one, other = (own_files.weights(tmp_path / dtype) for dtype in ("fp32", "bf16"))
    for name, weight in one.items():
        assert torch.equal(other[name], weight), name


def test_the_undistilled_student_is_made_in_float32(given, pairs, tmp_path, monkeypatch):
    scored, score = {}, PairEvaluation.score

    def spy(self, model, **how):
        scored[len(scored)] = {k: v.clone() for k, v in model.model.state_dict().items()}
        return score(self, model, **how)

    monkeypatch.setattr(PairEvaluation, "score", spy)
    columns = "eval.overrides={data.columns: {text: a, pair: b}}"
    judge = ["--eval-task", "own", "--set", f"eval.source={pairs}", "--set", columns]
    succeeds(*given, "--to", "4x32", "--dtype", "bf16", *judge, "-o", tmp_path / "out")
    teacher, _, undistilled = scored.values()
    assert all(torch.equal(weight, teacher[name]) for name, weight in undistilled.items())


def test_vectors_that_will_be_cut_start_turned_to_their_components(given, teacher, tmp_path):
    succeeds(
        *given,
        *shlex.split(f"--to 4x32 --set 'loss.dimensions=[32, 8]' --lr 1e-6 -o {tmp_path}/out"),
    )
    losses = report_of(tmp_path / "out").quality["held-out loss"]["student undistilled"]
    assert losses["vectors"] < 1e-5, "its encoder is the teacher's"
    turned, whole = (vectors(folder) @ vectors(folder).T for folder in (tmp_path / "out", teacher))
    np.testing.assert_allclose(turned, whole, atol=1e-3)
    turn_DD = safetensors.numpy.load_file(tmp_path / "out" / "2_Dense" / "model.safetensors")[
        "linear.weight"
    ]
    np.testing.assert_allclose(turn_DD @ turn_DD.T, np.eye(32), atol=1e-3)


def test_the_teacher_runs_once_for_several_runs(given, tmp_path):
    changes = []
    for shape in ("2x32", "3x32"):
        said = said_by(succeeds(*given, "--to", shape, "-o", tmp_path / shape))
        store = Path(re.search(r"signals are read from (\S+)", said)[1])
        changes.append({file: file.stat().st_mtime_ns for file in store.rglob("*")})
    assert changes[0] == changes[1]


def test_pairs_with_negatives_are_contrasted(given, texts, tmp_path):
    lines = texts.read_text().splitlines()
    rows = [
        {"query": a, "positive": b, "negative": c}
        for a, b, c in zip(lines, lines[1:], lines[2:], strict=False)
    ]
    file = write(tmp_path / "triples.jsonl", rows)
    result = succeeds(
        *given,
        *shlex.split(
            f"--to 2x32 --data {file} --set loss.contrastive_weight=0.5 -o {tmp_path}/out"
        ),
    )
    assert "78 pairs" in said_by(result)
    assert set(report_of(tmp_path / "out").quality["held-out loss"]["student"]) == {
        "loss",
        "vectors",
        "contrastive",
    }


@pytest.mark.parametrize("width", [32, 20])
def test_students_of_another_space_start_turned_to_it(given, texts, teacher, tmp_path, width):
    theirs = vectors(teacher, texts.read_text().splitlines())
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((32, 32)))[0][:, :width]
    np.save(tmp_path / "v.npy", (theirs @ rotation).astype(np.float32))
    asked = [*given, "--to", "4x32", "--teacher-vectors", tmp_path / "v.npy", "--lr", "1e-6"]
    succeeds(*asked, "-o", tmp_path / "out")
    (before,) = {
        row["step"]: row for row in log_of(tmp_path / "out") if row.get("step") == 0
    }.values()
    assert before["held_out"]["vectors"] < (1e-5 if width == 32 else 0.05)


def test_vectors_of_another_model_are_learnt(given, texts, tmp_path):
    count = len(texts.read_text().splitlines())
    np.save(
        tmp_path / "v.npy", np.random.default_rng(0).standard_normal((count, 24), dtype=np.float32)
    )
    succeeds(
        *given, "--to", "2x32", "--teacher-vectors", tmp_path / "v.npy", "-o", tmp_path / "out"
    )
    assert report_of(tmp_path / "out").recipe["method"] == "embedding"
    assert vectors(tmp_path / "out").shape == (2, 24)
    np.save(tmp_path / "short.npy", np.ones((3, 24), np.float32))
    said = refused(tmp_path, *given, "--to", "2x32", "--teacher-vectors", tmp_path / "short.npy")
    assert f"3 vectors for {count} texts" in said


@pytest.fixture
def stranger(tmp_path):
    """A tiny encoder of another type and width, with a tokenizer of its own."""
    folder = tmp_path / "stranger"
    tiny_encoder(
        "distilbert", vocab_size=64, dim=16, n_layers=3, n_heads=2, hidden_dim=32
    ).save_pretrained(folder)
    foreign_tokenizer().save_pretrained(folder)
    return folder


def test_another_encoder_learns_the_vectors_with_its_own_tokenizer(
    given, stranger, pairs, tmp_path
):
    judge = ["--eval-task", "own", "--set", f"eval.source={pairs}"]
    judge += ["--set", "eval.overrides={data.columns: {text: a, pair: b}}"]
    result = succeeds(*given, "--student", stranger, "-o", tmp_path / "out", *judge)
    assert "cls pooling, as its teacher has" in said_by(result)
    report = report_of(tmp_path / "out")
    losses = report.quality["held-out loss"]
    assert losses["student"]["vectors"] < losses["student undistilled"]["vectors"]
    assert any(str(stranger) in note for note in report.notes)
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert theirs.tokenizer.get_vocab() == foreign_tokenizer().get_vocab()
    assert theirs.prompts["query"] == "w30 "
    assert vectors(tmp_path / "out").shape == (2, 16)
    config = AutoModel.from_pretrained(tmp_path / "out").config
    assert (config.model_type, config.n_layers) == ("distilbert", 3)


def test_another_embedding_model_keeps_its_own_pooling_and_is_made_smaller(
    given, stranger, tmp_path
):
    own = tmp_path / "own"
    base = load_encoder(str(stranger))
    save_embedder(base.model, base.tokenizer, EmbeddingFormat("mean", max_length=12), own)
    succeeds(
        *given,
        *shlex.split(f"--student {own} --to 2x16 --set embedding.dense=true -o {tmp_path}/out"),
    )
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert theirs.max_seq_length == 12
    assert theirs[1].pooling_mode == "mean"
    assert vectors(tmp_path / "out").shape == (2, 32)
    assert AutoModel.from_pretrained(tmp_path / "out").config.n_layers == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--set", "loss.hidden_weight=1"),
            "loss.relations_weight and loss.hidden_weight compare tokens",
        ),
        (("--method", "minilm"), "distil another encoder with --method embedding"),
        (("--to", "2x99"), "2x99"),
    ],
)
def test_another_encoder_cannot_learn_token_states(given, stranger, tmp_path, more, message):
    assert message in refused(tmp_path, *given, "--student", stranger, *more)


def test_vectors_are_judged_when_cut(teacher, pairs, beir, tmp_path):
    given = [
        "evaluate",
        teacher,
        "--task",
        "own",
        "--data",
        pairs,
        "--set",
        "data.columns={text: a, pair: b}",
    ]
    succeeds(*given, "--set", "dimensions=[32, 8]", "-o", tmp_path / "cut")
    whole, cut = report_of(tmp_path / "cut").evaluations
    rows = own_files.lines_of(pairs / "validation.jsonl")
    model = SentenceTransformer(str(teacher), device="cpu", truncate_dim=8)
    first, second = (
        model.encode([row[side] for row in rows], normalize_embeddings=True) for side in "ab"
    )
    cosines = np.corrcoef((first * second).sum(1), [n % 6 for n in range(60)])[0, 1]
    assert cut.metrics["pearson"] == pytest.approx(cosines, abs=1e-6)
    assert whole.metrics["pearson"] != cut.metrics["pearson"]
    searched = ["evaluate", teacher, "--task", "retrieval", "--data", beir]
    succeeds(*searched, "--set", "dimensions=[32, 8]", "-o", tmp_path / "searched")
    assert [e.model for e in report_of(tmp_path / "searched").evaluations] == [
        "teacher, 32 numbers",
        "teacher, 8 numbers",
    ]
    assert "vectors of 32 numbers: dimensions=33" in refused(
        tmp_path, *searched, "--set", "dimensions=[33]"
    )


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("qrels/test.tsv", "q1 d1 1", "separated by tabs"),
        ("qrels/test.tsv", "q1\td1\t0", "gives document d1 a second, different relevance"),
        ("corpus.jsonl", '{"_id": "d1", "text": "w1"}', "_id d1 occurs twice"),
        ("queries.jsonl", '{"_id": 7.5, "text": "w1"}', "must have '_id' and the string 'text'"),
        ("queries.jsonl", '{"_id": "blank", "text": " "}', "query blank of"),
    ],
)
def test_unusable_retrieval_data_are_refused(teacher, beir, tmp_path, name, line, message):
    with open(beir / name, "a") as file:
        file.write(f"\n{line}")
    with open(beir / "qrels/test.tsv", "a") as file:
        file.write("\nblank\td1\t1" if "blank" in line else "")
    assert message in refused(tmp_path, "evaluate", teacher, "--task", "retrieval", "--data", beir)


TWO_MICRO_BATCHES_OF_TWO = ["--batch-size", "4", "--set", "train.micro_batch_size=3"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--set", "loss.dimensions=[64]"],
            "loss.dimensions is [64], but the vectors have width 32",
        ),
        (["--set", "loss.dimensions=[16]"], "such as [32, 16]"),
        (["--set", "loss.dimensions=[32,32]"], "give decreasing numbers"),
        (["--set", "loss.dimensions=[32,0]"], "give decreasing numbers"),
        (["--set", "loss.contrastive_weight=1.0"], "has a positive among the 80 chosen texts"),
        (["--pooling", "mean"], "pools by cls, not by mean"),
        (["--set", "loss.vectors_weight=0.0"], "weight 0"),
        (
            ["--set", "loss.pairs_weight=0.1", "--set", "train.micro_batch_size=2"],
            "at least 3 texts in a micro-batch, but there are only 2",
        ),
        (
            ["--set", "loss.pairs_weight=0.1", *TWO_MICRO_BATCHES_OF_TWO],
            "there are only 2",
        ),
        (["--method", "minilm", "--set", "embedding.rows=9"], "are for --method embedding"),
        (["--eval-task", "sst2"], "cannot be scored with vectors"),
        (["--set", "data.pack_isolated=true"], "reads? blocks"),
    ],
)
def test_mistakes_are_refused(given, tmp_path, more, message):
    said = refused(tmp_path, *given, "--to", "2x32", *more)
    assert message.replace("reads? ", "read ") in said, said


@pytest.mark.usefixtures("short_demo")
def test_the_demo_is_distilled_as_an_embedding_model(tmp_path):
    few = ["--set", "embedding.rows=300"]
    succeeds(
        "distill",
        "demo",
        *shlex.split("--to 2x64 --method embedding"),
        *QUICK,
        *few,
        "-o",
        tmp_path / "out",
    )
    assert vectors(tmp_path / "out").shape == (2, 64)
    assert torch.isfinite(
        own_files.weights(tmp_path / "out")["embeddings.word_embeddings.weight"]
    ).all()


@pytest.mark.parametrize(
    "given", ["--pooling cls", "--task embedding", "--task embedding --pooling cls"]
)
def test_a_pooling_or_the_task_makes_an_encoder_an_embedding_model(given, monkeypatch):
    ran = []
    monkeypatch.setattr(
        "kdcli.verbs.distill.run.run_command", lambda resolved, *_: ran.append(resolved.recipe)
    )
    succeeds("distill", "demo", "--to", "2x64", *shlex.split(given))
    (recipe,) = ran
    assert (recipe.method, recipe.train.batch_size) == ("embedding", 64)
    assert recipe.workload.get("pooling") == ("cls" if "cls" in given else None)


def test_the_task_of_vectors_has_one_method(given, tmp_path):
    said = refused(tmp_path, *given, *shlex.split("--to 2x32 --task embedding --method tinybert"))
    assert "is distilled with --method embedding, not tinybert" in said


def test_targets_are_turned_by_training_texts_only():
    """Held-out texts score a student, so they must not decide how it starts."""
    generator = np.random.default_rng(0)
    own_ND = generator.standard_normal((40, 6))
    turn, other = (np.linalg.qr(generator.standard_normal((6, 6)))[0] for _ in range(2))
    # The first 20 texts are held out, and their targets are turned differently.
    targets_NE = np.concatenate([own_ND[:20] @ other.T, own_ND[20:] @ turn.T])
    recipe = SimpleNamespace(train=SimpleNamespace(seed=0))
    cpu = torch.device("cpu")
    workload = SimpleNamespace(
        all_texts=SimpleNamespace(texts=[str(n) for n in range(40)]),
        train_numbers=np.arange(20, 40),
    )
    session = Session(start(cpu, torch.float32), cpu)
    space = VectorSpace(recipe, session, workload, lambda rows: targets_NE[rows], 6)
    student = SimpleNamespace(vectors=lambda texts, role, session: own_ND[[int(t) for t in texts]])
    found = space._rotation(None, student)
    assert found == pytest.approx(turn, abs=1e-6)


def test_measured_layers_are_written_down_and_not_searched_again(given, tmp_path):
    out = tmp_path / "out"
    command = [*given, "--to", "2x32", "--set", "student.layers=measured", "-o"]
    result = succeeds(*command, out)
    layers = report_of(out).recipe["student"]["layers"]
    assert read_recipe(str(out / "recipe.yaml"), "distill")["student"]["layers"] == layers
    assert f"initialised from teacher layers {layers[0]}, {layers[1]}" in said_by(result)
    assert "after the fit (evenly spaced" in said_by(result)
    (out / "report.json").unlink()
    resumed = succeeds(*command, out, "--resume")
    assert "after the fit" not in said_by(resumed)
    assert report_of(out).recipe["student"]["layers"] == layers
    rerun = tmp_path / "rerun"
    succeeds("distill", "--recipe", out / "recipe.yaml", "-o", rerun)
    for name in ("model.safetensors", "config.json"):
        assert (rerun / name).read_bytes() == (out / name).read_bytes()
    succeeds(*command, tmp_path / "dry", "--dry-run")


def test_layers_are_measured_for_each_depth(given, tmp_path, caplog):
    out, shapes = tmp_path / "out", ["--to", "2x32", "--to", "3x32", "--to", "2x16"]
    command = [*given, *shapes, "--set", "student.layers=measured", "-o", out]
    succeeds(*command)
    three, two = report_of(out).recipe["student"]["layers"]
    assert (len(two), len(three)) == (2, 3)
    for name, layers in (("2x32", two), ("2x16", two), ("3x32", three)):
        assert (
            f"{name}: initialised from teacher layers {', '.join(map(str, layers))}" in caplog.text
        )
    named = f"student.layers=[{three},{two}]"
    succeeds(*given, *shapes, "--set", named, "-o", tmp_path / "named")
    assert same_weights(out / "3x32", tmp_path / "named" / "3x32")
    succeeds(*command, "--resume")
    said = refused(tmp_path, *given, *shapes, "--set", "student.layers=[[1,2,4],[1]]")
    assert "student.layers has lists of 3, 1 layers, but the students have 2, 3" in said


@pytest.mark.parametrize(
    ("depth", "student", "layers"),
    [
        (12, {"to": ["3x16"]}, "measured"),
        (12, {"to": ["3x16", "3x32"]}, "measured"),
        (11, {"to": ["3x16"]}, None),
        (12, {"to": ["12x16"]}, None),
        (12, {"to": []}, None),
        (12, {"to": ["3x16", "2x16", "12x16"]}, "measured"),
        (12, {"to": ["3x32,2x32"]}, "measured"),
        (12, {"to": ["family"]}, "measured"),
        (12, {"to": ["3x32,static"]}, None),
        (12, {"to": ["static"]}, None),
        (12, {"to": ["2x"]}, "measured"),
        (12, {"to": ["3x16"], "init": "random"}, None),
    ],
)
def test_layers_of_a_deep_teacher_are_chosen_by_trial(tmp_path, depth, student, layers):
    teacher = own_files.encoder(tmp_path / "teacher", num_hidden_layers=depth)
    recipe = DistillRecipe.model_validate({"teacher": str(teacher), "student": student})
    assert with_layers(Resolved(recipe, {})).recipe.student.layers == layers
    chosen = {"student.layers": "--set"}
    assert with_layers(Resolved(recipe, chosen)).recipe == recipe


def test_few_texts_need_no_trial_unless_it_is_asked_for(tmp_path, texts, caplog):
    teacher = own_files.encoder(tmp_path / "deep", num_hidden_layers=12)
    few = tmp_path / "few.txt"
    few.write_text("\n".join(texts.read_text().split("\n")[:8]))
    asked = ["distill", teacher, "--pooling", "mean", "--method", "embedding", "--data", few]
    asked += [*QUICK, "--to", "2x32"]
    succeeds(*asked, "-o", tmp_path / "out")
    assert (
        "evenly spaced layers stay, because a trial needs at least 8 training texts" in caplog.text
    )
    assert report_of(tmp_path / "out").recipe["student"]["layers"] is None
    said = refused(tmp_path, *asked, "--set", "student.layers=measured")
    assert "at least 8 training texts" in said


def test_a_student_of_a_deep_teacher_goes_on_with_its_layers(tmp_path, texts, caplog):
    teacher = own_files.encoder(tmp_path / "deep", num_hidden_layers=12)
    asked = ["distill", teacher, "--pooling", "mean", "--method", "embedding", "--data", texts]
    asked += [*QUICK, "--to", "2x32", "-o", tmp_path / "out"]
    terminate_in_training(tmp_path / "out")
    assert own_files.kdcli(*asked).exit_code == 75
    layers = read_recipe(str(tmp_path / "out" / "recipe.yaml"), None)["student"]["layers"]
    assert len(layers) == 2
    assert "choices)" in caplog.text
    caplog.clear()
    succeeds(*asked, "--resume")
    assert report_of(tmp_path / "out").recipe["student"]["layers"] == layers
    assert "choices)" not in caplog.text


# Without a learning rate.
SHORT = shlex.split(
    "--batch-size 8 --set data.held_out_blocks=8 --set measure.latency=false --max-steps"
)


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        (["--to", "2x16", "--to", "1x32"], 0.006),
        (["--to", "2x16", "--to", "static"], 0.012),
        (["--to", "static"], 3e-3),
        (["--to", "2x16", "--lr", "1e-3"], 1e-3),
    ],
)
def test_the_learning_rate_follows_the_widest_student(teacher, texts, tmp_path, options, rate):
    out = tmp_path / "out"
    succeeds("distill", teacher, "--data", texts, *options, *SHORT, "1", "-o", out)
    assert report_of(out).recipe["train"]["lr"] == pytest.approx(rate)


def test_a_given_student_has_the_learning_rate_of_its_width(teacher, texts, tmp_path):
    command = ["distill", teacher, "--data", texts]
    succeeds(*command, "--to", "2x16", *SHORT, "0", "-o", tmp_path / "narrow")
    succeeds(*command, "--student", tmp_path / "narrow", *SHORT, "1", "-o", tmp_path / "out")
    assert report_of(tmp_path / "out").recipe["train"]["lr"] == pytest.approx(0.012)
