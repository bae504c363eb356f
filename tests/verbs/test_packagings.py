"""Embedding models in the forms in which they are published: the verbs that take them, and kdcli's
vectors, which equal those of sentence-transformers."""

import json
import shlex
from pathlib import Path

import numpy as np
import own_files
import pytest
import sentence_transformers
import torch
from encoders import on_disk, tiny_encoder, tiny_tokenizer
from own_files import kdcli, refused, report_of, said_by, succeeds, write
from packagings import BY_LIBRARY, PACKAGINGS, framed, save_packaging
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Router, StaticEmbedding

from kdcli.deploy.predict import Predictor
from kdcli.engine.session import Session, start
from kdcli.errors import UsageError
from kdcli.workloads.embedder import Embedder

pytestmark = pytest.mark.slow

LONG = " ".join(f"w{n % 40}" for n in range(60))
TEXTS = ["w1 w2 w3", "w4", "", "w5 w6 w7 w8 w9 w10 w11", LONG, "w12 w1"]
ROLES = {"": "encode", "query": "encode_query", "document": "encode_document"}
FAST = ("EmbeddingGemma", "Qwen3-Embedding", "several poolings", "Router", "CNN", "SPLADE")
SHORT = "--max-steps 2 --dtype fp32 --set measure.latency=false --set data.max_length=16"
FEW = "--set measure.min_runs=2 --set measure.min_seconds=0.0"
COMMANDS = {
    "`evaluate`": "evaluate {model} --task own --data {pairs} -o {out}",
    "`distill --student`": f"distill {{model}} --student {{base}} --to 1x16 --data {{texts}} "
    f"{SHORT} -o {{out}}",
    "`distill --to 1x16`": f"distill {{model}} --to 1x16 --data {{texts}} {SHORT} -o {{out}}",
    "`--to static`": f"distill {{model}} --to static:8 --data {{texts}} {SHORT} -o {{out}}",
    "`export --int8`": "export {model} --format onnx --int8 --data {texts} -o {out}",
    "`benchmark`": f"benchmark {{model}} --seq-len 16 --batch-size 1 {FEW} -o {{out}}",
    "`compress`": f"compress {{model}} --data {{texts}} --max-drop 100 {FEW} "
    "--set plan.shapes=[1x32] --set plan.backends=[onnx] --set plan.trim_from=1.0 "
    "--set plan.prune=null --set plan.distill.train.max_steps=2 -o {out}",
}
QUICK = list(COMMANDS)[:4]
"""The columns of the table that take no seconds."""
BY_VECTORS = QUICK[:2]
"""The verbs that only need vectors, whoever computes them."""


ALL = PACKAGINGS | BY_LIBRARY
CELLS = [
    pytest.param(
        name,
        column,
        # What is refused takes no time.
        marks=[] if name in FAST and (column in QUICK or name in BY_LIBRARY) else pytest.mark.long,
        id=f"{name} {column}",
    )
    for name in ALL
    for column in COMMANDS
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders: dict[str, Path] = {}

    def save(name):
        if name not in folders:
            folders[name] = save_packaging(name, tmp_path_factory.mktemp("packaging"))
        return folders[name]

    return save


@pytest.fixture(scope="module")
def session():
    return Session(start(torch.device("cpu"), torch.float32), torch.device("cpu"))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A file of texts, one of scored pairs, and an encoder to start from."""
    folder = tmp_path_factory.mktemp("given")
    texts = [f"w{n % 50} w{n % 7} w{n % 11}" for n in range(300)]
    pairs = [
        {"sentence1": one, "sentence2": other, "score": n % 5 + 0.5}
        for n, (one, other) in enumerate(zip(texts[:60], texts[60:120], strict=True))
    ]
    (folder / "texts.txt").write_text("\n".join(texts), "utf-8")
    torch.manual_seed(0)
    return {
        "texts": folder / "texts.txt",
        "pairs": write(folder / "pairs.jsonl", pairs),
        "base": on_disk(tiny_encoder("bert"), folder / "base", framed("[CLS]", "[SEP]")),
    }


def library_of(folder):
    settings = json.loads((folder / "config_sentence_transformers.json").read_text("utf-8"))
    name = settings.get("model_type") or "SentenceTransformer"
    return getattr(sentence_transformers, name)(str(folder), device="cpu")


def largest_difference(folder, session, texts=TEXTS):
    """Return the largest difference of a component between kdcli and sentence-transformers."""
    theirs, ours = library_of(folder), Embedder.open_scored(str(folder))
    largest = 0.0
    for role, method in ROLES.items():
        encode = getattr(theirs, method)
        # A batch of one text has no padding; the other batches have it on the tokenizer's side.
        for size in (1, 2, len(texts)):
            of_library = encode(list(texts), batch_size=size, convert_to_tensor=True).to_dense()
            vectors_NE = ours.vectors(texts, role, session)
            assert len(np.unique(vectors_NE.round(5), axis=0)) > 1
            largest = max(largest, float(np.abs(vectors_NE - of_library.numpy()).max()))
    return largest


@pytest.mark.parametrize("name", [name for name in ALL if name != "CNN"])
def test_vectors_are_those_of_the_library(name, saved, session):
    folder = saved(name)
    assert largest_difference(folder, session) < 1e-5
    if name in PACKAGINGS:
        of_library = library_of(folder).encode(TEXTS)
        np.testing.assert_allclose(
            Predictor.open(str(folder)).predict(TEXTS), of_library, atol=1e-5
        )


def test_a_module_that_reads_padding_has_the_vectors_of_the_same_batch(saved, session):
    folder = saved("CNN")
    vectors_NE = Embedder.open_scored(str(folder)).vectors(TEXTS, "", session)
    np.testing.assert_allclose(vectors_NE, library_of(folder).encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize(("name", "column"), CELLS)
def test_a_verb_takes_what_kdcli_computes(name, column, saved, given, tmp_path, session):
    model, out = saved(name), tmp_path / "out"
    command = shlex.split(COMMANDS[column].format(model=model, out=out, **given))
    if name in BY_LIBRARY and column not in BY_VECTORS:
        said = refused(tmp_path, *command)
        assert "sentence-transformers" in said
        assert "--student" in said
        return
    succeeds(*command)
    if command[0] == "distill":
        assert largest_difference(out, session) < 1e-5
        assert "\ue000" not in (out / "config_sentence_transformers.json").read_text("utf-8")
    elif command[0] == "evaluate":
        pairs = own_files.lines_of(given["pairs"])
        sides = [[row[side] for row in pairs] for side in ("sentence1", "sentence2")]
        one, other = (library_of(model).encode(side, convert_to_tensor=True) for side in sides)
        cosines = torch.cosine_similarity(one.to_dense(), other.to_dense())
        pearson = np.corrcoef(cosines.cpu(), [row["score"] for row in pairs])[0, 1]
        (evaluation,) = report_of(out).evaluations
        assert evaluation.metrics["pearson"] == pytest.approx(pearson, abs=1e-4)


@pytest.mark.parametrize("name", ["EmbeddingGemma", "Nomic v1.5"])
def test_a_student_of_its_width_keeps_layers_and_prompts(name, saved, given, tmp_path, session):
    command = f"distill {saved(name)} --to 1x32 --data {given['texts']} {SHORT} -o {tmp_path}/out"
    succeeds(*shlex.split(command))
    assert largest_difference(tmp_path / "out", session) < 1e-5
    theirs, student = library_of(saved(name)), library_of(tmp_path / "out")
    assert [type(each) for each in student] == [type(each) for each in theirs]
    assert student.prompts == theirs.prompts


def test_a_router_encodes_queries_and_documents_apart(saved, session):
    model = Embedder.open_scored(str(saved("Router")))
    query, document = (model.vectors(["w1 w2"], role, session) for role in ("query", "document"))
    assert np.abs(query - document).max() > 0.01


def test_a_router_without_a_default_needs_roles(given, tmp_path, session):
    table = StaticEmbedding(tiny_tokenizer().backend_tokenizer, embedding_dim=8)
    router = Router.for_query_document([table], [table], default_route=None, allow_empty_key=False)
    SentenceTransformer(modules=[router], device="cpu").save(str(tmp_path / "model"))
    command = f"evaluate {tmp_path}/model --task own --data {given['pairs']} -o {tmp_path}/out"
    result = kdcli(*shlex.split(command))
    assert result.exit_code == 2
    assert "cannot encode a text without a role" in said_by(result)


SCALE = """
import torch


class Scale(torch.nn.Module):
    def forward(self, features):
        features["sentence_embedding"] = 3 * features["sentence_embedding"]
        return features

    def save(self, path, *args, **kwargs):
        pass

    @staticmethod
    def load(path):
        return Scale()
"""


def test_own_code_of_a_module_needs_permission(saved, given, tmp_path):
    folder = saved("E5")
    model = tmp_path / "model"
    library_of(folder).save(str(model))
    (model / "scale.py").write_text(SCALE, "utf-8")
    (model / "3_Scale").mkdir()
    modules = json.loads((model / "modules.json").read_text("utf-8"))
    modules[2] |= {"path": "3_Scale", "type": "scale.Scale"}
    (model / "modules.json").write_text(json.dumps(modules), "utf-8")
    command = shlex.split(f"evaluate {model} --task own --data {given['pairs']}")
    said = refused(tmp_path, *command)
    assert "brings code of its own, in scale.Scale" in said
    assert "add --trust-remote-code" in said
    succeeds(*command, "--trust-remote-code", "-o", tmp_path / "out")


def test_a_vector_for_each_token_is_refused(saved):
    folder = saved("BGE-M3")
    settings = folder / "config_sentence_transformers.json"
    before = settings.read_text("utf-8")
    settings.write_text(json.dumps(json.loads(before) | {"model_type": "MultiVectorEncoder"}))
    try:
        with pytest.raises(UsageError, match="is a MultiVectorEncoder: it has a vector for each"):
            Embedder.open_scored(str(folder))
    finally:
        settings.write_text(before, "utf-8")


@pytest.mark.parametrize("verb", ["evaluate", "distill --to 1x16"])
def test_the_pickle_of_setfit_is_named_with_what_works(verb, given, tmp_path):
    model, task = save_packaging("E5", tmp_path), own_files.own(tmp_path / "task", "class", 64, 24)
    (model / "model_head.pkl").write_bytes(b"not read")
    name, *rest = verb.split()
    said = refused(tmp_path, name, model, *rest, "--task", "own", "--data", task)
    assert "its SetFit classifier, model_head.pkl, is a pickle and is not read" in said
    assert "kdcli finetune" in said


def test_a_module_without_its_files_is_refused(saved, tmp_path, given):
    model = tmp_path / "model"
    router = SentenceTransformer(str(saved("Router")), device="cpu")
    router.save(str(model))
    (model / "query_0_StaticEmbedding" / "model.safetensors").unlink()
    said = refused(tmp_path, "evaluate", model, "--task", "own", "--data", given["pairs"])
    assert "sentence-transformers cannot load" in said
