"""The texts on which integers are chosen are never the texts on which a file is compared."""

import json
import shutil

import numpy as np
import own_files
import pytest
from own_files import succeeds, write
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from kdcli.models.embedding_format import EmbeddingFormat, save_embedder
from kdcli.models.load import load_encoder, load_tokenizer
from kdcli.verbs.export.export_check import (
    divide,
    texts_of_package,
    texts_of_task,
    with_calibration,
)
from kdcli.workloads.embedder import FORWARD_ROWS
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.settings import LabelledSettings

LINES = [f"w{n} w{n * 7 % 50} w{n * 3 % 40} w{n * 11 % 30}" for n in range(40)]


def are_disjoint(texts):
    calibration = {text for row in texts.calibration for text in row}
    return calibration.isdisjoint(texts.compared) and bool(texts.calibration and texts.compared)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    base = load_encoder(str(own_files.encoder(folder / "base", num_hidden_layers=2)))
    save_embedder(base.model, base.tokenizer, EmbeddingFormat("mean"), folder / "model")
    return folder / "model"


def test_repeated_texts_are_on_one_side():
    texts = divide(["a b"] * 40 + LINES * 2, 256, "texts")
    assert are_disjoint(texts)
    assert len(texts.compared) + len(texts.calibration) == len(LINES) + 1
    # However often a text is repeated, in other case or spacing too, the others are found.
    texts = divide(["a b", "A  b "] * 2000 + LINES, 8, "texts")
    assert texts.compared == ["a b", *LINES[:7]]
    assert [text for (text,) in texts.calibration] == LINES[7:]


def test_without_data_the_texts_suit_the_tokenizer(embedder):
    for source, origin in (
        ("demo", "sentences of 'demo'"),
        (str(embedder), "texts of random words that the tokenizer knows"),
    ):
        texts = texts_of_package(load_tokenizer(source), 256)
        assert are_disjoint(texts)
        assert (texts.calibration_from, texts.from_package) == (origin, True)


def test_a_task_gives_its_training_rows_without_the_evaluated_ones(teacher_of, tmp_path):
    rows = [{"text": line, "label": "ab"[n % 2]} for n, line in enumerate(LINES)]
    write(tmp_path / "train.jsonl", [*rows[:30], *rows[35:]])
    write(tmp_path / "validation.jsonl", rows[30:])
    source = str(teacher_of("class"))
    request = EvaluationRequest("own", [source], LabelledSettings(source=str(tmp_path)))
    texts = texts_of_task(request, LINES[30:])
    assert [text for (text,) in texts.calibration] == LINES[:30]
    (tmp_path / "train.jsonl").unlink()
    alone = with_calibration(texts_of_task(request, LINES[30:]), load_tokenizer(source))
    assert (list(alone.compared), alone.from_package) == (LINES[30:], True)
    few = f"(0 training rows of {tmp_path.name} are fewer than 16)"
    assert alone.calibration_from.endswith(few)
    assert are_disjoint(alone)


def test_without_data_the_texts_are_the_training_runs(teacher_of, tmp_path):
    source = shutil.copytree(teacher_of("class"), tmp_path / "run")
    succeeds("export", source, "-o", tmp_path / "own")
    facts = json.loads((tmp_path / "own/export.json").read_text("utf-8"))
    assert facts["compared_on"] == "32 evaluated texts of data"
    assert "task" not in facts
    recipe = (source / "recipe.yaml").read_text("utf-8")
    (source / "recipe.yaml").write_text(recipe.replace("/data", "/gone"), "utf-8")
    done = succeeds("export", source, "-o", tmp_path / "other")
    assert f"the data of the run in {source} are not used: " in " ".join(done.stderr.split())
    facts = json.loads((tmp_path / "other/export.json").read_text("utf-8"))
    assert facts["compared_on"].endswith("texts of random words that the tokenizer knows")


@pytest.mark.parametrize("kind", ["class", "span", "embedding"])
def test_a_training_row_shares_no_text_with_the_evaluated_ones(tmp_path, kind):
    """Of pairs for vectors, either text may be an evaluated one, also in other case or spacing."""
    rows = [(f"w{n} a", f"w{n} b") for n in range(8)]
    evaluated = {
        "class": ["w1 a w1 b", "W2  A w2 B"],
        "span": ["w1 a w1 b", "w2 b"],
        "embedding": ["w1 a", "W2  b", "w30 w31"],
    }[kind]
    write(
        tmp_path / "train.jsonl",
        [{"sentence1": one, "sentence2": two, "label": n % 2} for n, (one, two) in enumerate(rows)],
    )
    write(
        tmp_path / "validation.jsonl",
        [{"sentence1": "w30", "sentence2": "w31", "label": n % 2} for n in range(2)],
    )
    request = EvaluationRequest("own", ["demo-classifier"], LabelledSettings(source=str(tmp_path)))
    texts = texts_of_task(request, evaluated)
    assert list(texts.calibration) == [rows[0], *rows[3:]]


def test_the_printed_closeness_is_that_of_the_compared_texts(embedder, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    (tmp_path / "texts.txt").write_text("\n".join(LINES))
    folder = tmp_path / "out"
    given = ("--format", "onnx", "--int8", "--data", tmp_path / "texts.txt", "-o", folder)
    done = succeeds("export", embedder, *given)
    facts = json.loads((folder / "export.json").read_text("utf-8"))
    file = folder / "onnx" / "model_quantized.onnx"
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    compared = LINES[:20]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batches = []
    # The activations of a batch share a scale, so the batches are the same here.
    for begin in range(0, len(compared), FORWARD_ROWS):
        inputs = tokenizer(
            compared[begin : begin + FORWARD_ROWS],
            padding=True,
            return_token_type_ids=True,
            return_tensors="np",
        )
        feed = {each.name: inputs[each.name] for each in session.get_inputs()}
        batches += session.run(["sentence_embedding"], feed)
    vectors = np.concatenate(batches)
    expected = SentenceTransformer(str(embedder), device="cpu").encode(compared)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (vectors * expected).sum(1) / lengths
    assert facts["agreement"] == {
        "texts": 20,
        "cosine": pytest.approx(cosines.mean(), abs=1e-6),
        "least": pytest.approx(cosines.min(), abs=1e-6),
    }
    assert (facts["compared_on"], facts["calibrated_on"]) == ("20 texts of texts.txt",) * 2
    sources = "compared with torch on 20 texts of texts.txt; the integers were chosen on 20 texts"
    assert f"{sources} of texts.txt, and no text is in both" in facts["notes"]
    assert f"{sources} of texts.txt" in (folder / "README.md").read_text("utf-8")
    printed = " ".join(done.stdout.split())
    assert f"cosine of the vectors {cosines.mean():.4f} on 20 texts" in printed
