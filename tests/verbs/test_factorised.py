"""Factorised tables of tokens: the nearest product, and models that keep it through training, saving and export."""

import subprocess
import sys

import numpy as np
import own_files
import pytest
import torch
from encoders import tiny_encoder
from own_files import QUICK, own, refused, report_of, said_by, succeeds, write
from transformers import AutoModel

import kdcli
from kdcli.errors import UsageError
from kdcli.models.factorise import factorise
from kdcli.models.layout import LAYOUTS
from kdcli.models.load import load_encoder, save_model

IDS = torch.tensor([[2, 5, 6, 8, 3, 0], [2, 7, 3, 0, 0, 0]])


def product(model):
    embeddings = model.get_input_embeddings()
    return (embeddings.weight @ embeddings.projection.weight.T).detach()


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_the_product_is_the_nearest_of_its_rank(model_type):
    model = tiny_encoder(model_type)
    table = model.get_input_embeddings().weight.detach()
    small, note = factorise(model, 4)
    left, values, right = np.linalg.svd(table.double().numpy(), full_matrices=False)
    nearest = left[:, :4] * values[:4] @ right[:4]
    torch.testing.assert_close(
        product(small).double(), torch.from_numpy(nearest), rtol=1e-4, atol=1e-6
    )
    assert f"holds {(values[:4] ** 2).sum() / (values**2).sum():.1%} of the energy" in note
    mask = (IDS != 0).long()
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.from_numpy(nearest))
        one, other = (
            m(input_ids=IDS, attention_mask=mask).last_hidden_state for m in (model, small)
        )
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_ranks_that_save_nothing():
    model = tiny_encoder("bert")
    with pytest.raises(UsageError, match="embedding_rank=32: the table of tokens is 32 wide"):
        factorise(model, 32)
    with pytest.raises(UsageError, match="factorised already, to rank 4"):
        factorise(factorise(model, 4)[0], 2)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A student of a few steps on text, its teacher, and what the command said."""
    folder = tmp_path_factory.mktemp("factorised")
    base = own_files.encoder(folder / "base", num_hidden_layers=2)
    lines = [{"text": " ".join(f"w{(n * k) % 50}" for k in range(9))} for n in range(400)]
    write(folder / "text" / "train.jsonl", lines)
    how = [
        "--data",
        folder / "text",
        "--to",
        "1x32",
        "--max-steps",
        "3",
        "--batch-size",
        "4",
        "--dtype",
        "fp32",
    ]
    how += ["--set", "data.max_length=24", "--set", "measure.latency=false", "--lr", "1e-2"]
    result = succeeds(
        "distill", base, *how, "--set", "student.embedding_rank=6", "-o", folder / "out"
    )
    return folder, folder / "out", said_by(result)


def test_a_student_trains_both_factors_and_loads_anywhere(student):
    folder, out, said = student
    assert "table of tokens of rank 6 holds" in said
    loaded = kdcli.load(out)
    assert type(loaded).__name__ == "FactorisedBertModel"
    assert loaded.get_input_embeddings().weight.shape == (64, 6)
    start, _ = factorise(load_encoder(str(folder / "base")).model, 6)
    for name in ("weight", "projection.weight"):
        before, after = (m.get_input_embeddings().get_parameter(name) for m in (start, loaded))
        assert not torch.allclose(before, after, atol=1e-4)
    # 64 x 32 become 64 x 6 and 6 x 32.
    report = report_of(out)
    saved = report.models["teacher"].params_embedding - report.models["student"].params_embedding
    assert saved == 64 * 32 - (64 * 6 + 6 * 32)
    elsewhere = AutoModel.from_pretrained(out, trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS).last_hidden_state, elsewhere(IDS).last_hidden_state)


def test_what_follows_keeps_the_factors(student, tmp_path):
    """Fine-tuned, trimmed, compacted, exported, measured."""
    _, out, _ = student
    data = own(tmp_path / "data", "class")
    quick = [*QUICK, "--max-steps", "3"]
    succeeds("finetune", out, "--task", "own", "--data", data, *quick, "-o", tmp_path / "tuned")
    tuned = kdcli.load(tmp_path / "tuned")
    assert type(tuned).__name__ == "FactorisedBertForSequenceClassification"
    succeeds(
        "evaluate", tmp_path / "tuned", "--task", "own", "--data", data, "-o", tmp_path / "judged"
    )
    judged, told = (
        report_of(tmp_path / name).evaluations[0].metrics for name in ("judged", "tuned")
    )
    assert judged == told
    (tmp_path / "text.txt").write_text("w1 w2 w3\n")
    succeeds(
        "trim", tmp_path / "tuned", "--data", tmp_path / "text.txt", "-o", tmp_path / "trimmed"
    )
    assert kdcli.load(tmp_path / "trimmed").get_input_embeddings().weight.shape == (8, 6)
    pruning = [
        "--task",
        "own",
        "--data",
        data,
        "--sparsity",
        "0.5",
        "--set",
        "head.kind=scratch",
        *quick,
    ]
    succeeds("prune", out, *pruning, "-o", tmp_path / "pruned")
    compact = kdcli.load(tmp_path / "pruned" / "compact")
    assert type(compact).__name__ == "CompactFactorisedBertForSequenceClassification"
    succeeds("export", tmp_path / "tuned", "--format", "onnx", "-o", tmp_path / "onnx")
    cell = [
        "--batch-size",
        "1",
        "--seq-len",
        "8",
        "--set",
        "measure.min_runs=2",
        "--set",
        "measure.min_seconds=0",
    ]
    succeeds("benchmark", out, *cell, "-o", tmp_path / "timed")


def test_sentences_of_those_without_kdcli(student):
    """The file beside the weights needs torch and transformers alone."""
    _, out, _ = student
    code = (
        "import sys; sys.modules['kdcli'] = None\nfrom transformers import AutoModel\n"
        f"print(type(AutoModel.from_pretrained({str(out)!r}, trust_remote_code=True)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["FactorisedBertModel"]


def test_a_student_of_a_factorised_model_copies_its_factors(student, tmp_path):
    _, out, _ = student
    loaded = load_encoder(str(out))
    save_model(loaded.model, loaded.tokenizer, tmp_path / "again")
    again = load_encoder(str(tmp_path / "again")).model
    assert torch.equal(product(again), product(loaded.model))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--set", "student.embedding_rank=40"],
            "student.embedding_rank=40: the table of tokens is 32 wide",
        ),
        (["--set", "student.embedding_rank=0"], "student.embedding_rank"),
        (
            ["--method", "distilbert", "--set", "student.embedding_rank=8"],
            "tied to the whole table of tokens",
        ),
    ],
)
def test_mistakes_are_refused(student, tmp_path, more, message):
    folder, _, _ = student
    how = [
        "--data",
        folder / "text",
        "--to",
        "1x32",
        "--max-steps",
        "1",
        "--set",
        "data.max_length=24",
    ]
    assert message in refused(tmp_path, "distill", folder / "base", *how, *more)
