"""`kdcli finetune` on tasks that generate: a tiny model copies and reverses, reloads, is judged;
what is refused."""

import json
import random
import shlex

import pytest
import torch
from encoders import tiny_tokenizer
from own_files import (
    log_of,
    refused,
    report_of,
    succeeds,
    write,
)
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertForMaskedLM

import kdcli as package
from kdcli.report.finish import RunResult

ROW = shlex.split(
    "--set data.max_length=24 --set generation.max_tokens=8 --set measure.latency=false"
)
GREEDY = ["--set", "generation.beams=1", "--set", "generation.label_smoothing=0"]


def rows(count, seed):
    drawn = random.Random(seed)
    for _ in range(count):
        words = [f"w{drawn.randrange(2, 12)}" for _ in range(drawn.randint(3, 4))]
        backwards = drawn.random() < 0.5
        target = words[::-1] if backwards else words
        yield {"source": " ".join([f"w{int(backwards)}", *words]), "target": " ".join(target)}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    config = BertConfig(
        vocab_size=64,
        **sizes,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", None, special)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder / "train.jsonl", list(rows(4000, seed=0)))
    # No model learns the last row, whose words are in no training row.
    wrong = {"source": "w0 w20 w21 w22", "target": "w20 w21 w22"}
    write(folder / "validation.jsonl", [*rows(399, seed=1), wrong])
    return folder


@pytest.fixture(scope="module")
def trained(encoder, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "copier"
    how = ["--batch-size", "64", "--lr", "3e-3", "--max-steps", "450", "--dtype", "fp32"]
    succeeds("finetune", encoder, "--task", "own", "--data", data, *ROW, *GREEDY, *how, "-o", out)
    return out


def test_a_tiny_model_learns_to_copy_and_to_reverse(trained, data):
    (evaluation,) = report_of(trained).evaluations
    assert evaluation.metrics["exact"] >= 0.99
    assert evaluation.metrics["rougeL"] > 0.99
    held_out = [line["held_out"]["loss"] for line in log_of(trained) if "held_out" in line]
    assert held_out[-1] < 0.2
    texts = [
        json.loads(line)
        for line in (data / "validation.jsonl").read_text("utf-8").splitlines()[:20]
    ]
    found = package.load(trained).model.generate([row["source"] for row in texts])
    assert sum(f == row["target"] for f, row in zip(found, texts, strict=True)) >= 19


def test_transformers_alone_loads_it_by_the_file_beside_the_weights_and_as_a_stock_encoder(trained):
    text = ["w1 w2 w3 w4"]
    alone = AutoModelForMaskedLM.from_pretrained(trained, trust_remote_code=True)
    assert type(alone).__module__.startswith("transformers_modules.")
    assert alone.generate(text) == package.load(trained).model.generate(text) == ["w4 w3 w2"]
    result = RunResult.read(trained)
    assert result.predict(text) == result.model.generate(text) == ["w4 w3 w2"]
    assert result.predict([]) == []
    assert (
        type(AutoModel.from_pretrained(trained)).__module__
        == "transformers.models.bert.modeling_bert"
    )
    assert 'model.generate(["a source"]' in (trained / "README.md").read_text("utf-8")


def test_it_is_evaluated_as_it_was_trained_with_its_predictions(trained, data, tmp_path):
    file = tmp_path / "predictions.jsonl"
    quick = ["--set", "measure.latency=false"]
    succeeds(
        "evaluate",
        trained,
        trained,
        *shlex.split(f"--task own --data {data} --predictions {file}"),
        *quick,
        "-o",
        tmp_path / "e",
    )
    report = report_of(tmp_path / "e")
    assert report.evaluations[0].metrics == report_of(trained).evaluations[0].metrics
    assert {c.metric for c in report.comparisons} == set(report.evaluations[0].metrics)
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert len(lines) == 2 * report.evaluations[0].n
    wrong = [line for line in lines[: len(lines) // 2] if line["predicted"] != line["label"]]
    assert 0 < len(wrong) == len(report.evaluations[0].worst)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "generation.beams=0"], "'workload.beams' must be greater than 0"),
        (["--set", "generation.masked=1"], "'workload.masked' must be less than 1"),
        (["--set", "generation.min_tokens=8"], "workload.min_tokens 8 is not below max_tokens 8"),
        (["--set", "generation.max_tokens=200"], "leave 0 tokens for the source"),
        (["--set", "data.columns.target=goal"], "no column 'goal'"),
    ],
)
def test_what_cannot_be_done_is_refused(more, message, encoder, data, tmp_path):
    assert message in refused(
        tmp_path, "finetune", encoder, "--task", "own", "--data", data, *ROW, *more
    )


def test_an_empty_target_is_named(encoder, tmp_path):
    file = write(tmp_path / "rows.jsonl", [*rows(40, 0), {"source": "w1", "target": " "}])
    said = refused(tmp_path, "finetune", encoder, "--task", "own", "--data", file, *ROW)
    assert "rows.jsonl:41: 'target', the target of your data, must be a text" in said


@pytest.mark.parametrize(
    "verb",
    [
        ["prune", "MODEL", "--method", "magnitude"],
        ["distill", "MODEL", "--to", "1x64"],
        ["cotrain", "MODEL", "1x64"],
        ["benchmark", "MODEL"],
    ],
)
def test_other_verbs_say_who_generates(verb, trained, data, tmp_path):
    arguments = [trained if a == "MODEL" else a for a in verb]
    said = refused(tmp_path, *arguments, "--task", "own", "--data", data)
    assert "generates text, which this verb cannot do" in said
