"""`--trim-vocab`: runs whose vocabulary is cut before training."""

import own_files
import pytest
import torch
from own_files import QUICK, own, refused, report_of, said_by, succeeds, write
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

FEW = [*QUICK, "--max-steps", "3"]


def vocabulary(folder):
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == len(model.get_input_embeddings().weight)
    return set(tokenizer.get_vocab())


SPECIAL = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
OF_TASK = SPECIAL | {f"w{n}" for n in (*range(6), *range(20, 26))}


def test_finetune_keeps_the_tokens_of_a_text_and_says_what_other_text_becomes(tmp_path):
    base, data = own_files.encoder(tmp_path / "base"), own(tmp_path / "data", "class")
    (tmp_path / "text.txt").write_text("w0 w1 w2 w3 w4 w20 w21 w22 w23 w24 w25\n")
    how = ["--task", "own", "--data", data, *FEW, "-o", tmp_path / "out"]
    said = said_by(succeeds("finetune", base, *how, "--trim-vocab", tmp_path / "text.txt"))
    assert vocabulary(tmp_path / "out") == OF_TASK - {"w5"}
    assert "16 of 64 tokens kept; they cover 100.000% of the text" in said
    assert "with its whole vocabulary" in said
    assert "validation: " in said
    assert "w5 -> [UNK]" in said


def test_texts_count_alike_however_long(tmp_path):
    base, data = own_files.encoder(tmp_path / "base"), own(tmp_path / "data", "class")
    (tmp_path / "long.txt").write_text("w0 w0 w1 w1 w2 w2\n" * 50)
    (tmp_path / "short.txt").write_text("w9 w9 w9 w8\n")
    given = [
        "--trim-vocab",
        tmp_path / "long.txt",
        "--trim-vocab",
        tmp_path / "short.txt",
        "--trim-vocab",
        7,
    ]
    succeeds(
        "finetune", base, "--task", "own", "--data", data, *FEW, *given, "-o", tmp_path / "out"
    )
    # Shares: w9 3/4, w0, w1 and w2 1/3 each, w8 1/4.
    assert vocabulary(tmp_path / "out") == SPECIAL | {"w9", "w0"}


@pytest.mark.parametrize("method", ["tinybert", "soft-targets"])
def test_a_student_on_a_task_is_cut_and_its_teacher_is_not(tmp_path, method):
    teacher = own_files.headed(tmp_path / "teacher", ("brisk", "calm"))
    data = own(tmp_path / "data", "class")
    how = [
        "--task",
        "own",
        "--data",
        data,
        "--to",
        "1x32",
        "--method",
        method,
        "--trim-vocab",
        15,
        *FEW,
    ]
    fewer = [
        "--set",
        "intermediate.max_steps=2",
        "--set",
        "undistilled.overrides.train.max_steps=2",
    ]
    succeeds("distill", teacher, *how, *fewer, "-o", tmp_path / "out")
    assert len(vocabulary(tmp_path / "out")) == 15
    report = report_of(tmp_path / "out")
    tables = [report.models[name].params_embedding for name in ("teacher", "student")]
    assert tables[0] - tables[1] == (64 - 15) * 32
    evaluated = succeeds(
        "evaluate", teacher, "--task", "own", "--data", data, "-o", tmp_path / "judged"
    )
    assert evaluated.exit_code == 0
    judged = report_of(tmp_path / "judged").evaluations[0].metrics
    assert next(e for e in report.evaluations if e.model == "teacher").metrics == judged


def test_a_student_on_text_starts_from_the_kept_rows(tmp_path):
    base = own_files.encoder(tmp_path / "base")
    lines = [{"text": " ".join(f"w{(n * k) % 12}" for k in range(9))} for n in range(400)]
    write(tmp_path / "text" / "train.jsonl", lines)
    data = own(tmp_path / "tasks" / "own", "class")
    how = ["--data", tmp_path / "text", "--trim-vocab", 12, "--assistant", "none", "--lr", "1e-9"]
    how += [
        "--eval-task",
        "own",
        "--set",
        f"eval.source={data}",
        "--set",
        "eval.overrides.train.max_steps=2",
    ]
    how += [
        "--set",
        "data.max_length=24",
        "--max-steps",
        "1",
        "--batch-size",
        "4",
        "--dtype",
        "fp32",
    ]
    how += ["--set", "measure.latency=false"]
    succeeds("distill", base, "--to", "1x32", *how, "-o", tmp_path / "out")
    kept = vocabulary(tmp_path / "out")
    assert len(kept) == 12
    before, after = (
        AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() for name in ("base", "out")
    )
    table, cut = (
        own_files.weights(tmp_path / name)["embeddings.word_embeddings.weight"]
        for name in ("base", "out")
    )
    assert torch.allclose(
        cut[[after[t] for t in kept]], table[[before[t] for t in kept]], atol=1e-6
    )
    report = report_of(tmp_path / "out")
    tables = [report.models[name].params_embedding for name in ("teacher", "student")]
    assert tables[0] - tables[1] == (64 - 12) * 32
    assert {e.model for e in report.evaluations} == {"teacher", "student", "student undistilled"}


def test_a_mask_of_a_cut_model_fits_the_whole_one(tmp_path):
    base, data = (
        own_files.encoder(tmp_path / "base", num_hidden_layers=2),
        own(tmp_path / "data", "class"),
    )
    how = ["--task", "own", "--data", data, "--sparsity", "0.5", "--trim-vocab", 17, *FEW]
    words = ["--set", "head.kind=embedding", "--set", "head.words=[w0, w20]"]
    teacher = own_files.headed(tmp_path / "teacher", ("brisk", "calm"))
    succeeds("prune", base, *how, *words, "--teacher", teacher, "-o", tmp_path / "out")
    mask = tmp_path / "out" / "mask" / "mask.safetensors"
    assert load_file(mask)
    judged = ["--task", "own", "--data", data]
    succeeds("evaluate", base, "--mask", mask, *judged, "-o", tmp_path / "masked")
    succeeds("evaluate", tmp_path / "out", *judged, "-o", tmp_path / "cut")
    # Every token of the task is kept, so both read the same.
    scores = [report_of(tmp_path / name).evaluations[0].metrics for name in ("masked", "cut")]
    assert scores[0] == scores[1]


def test_a_file_lists_texts_by_language(tmp_path):
    base, data = own_files.encoder(tmp_path / "base"), own(tmp_path / "data", "class")
    (tmp_path / "long.txt").write_text("w0 w0 w1 w1 w2 w2\n" * 50)
    (tmp_path / "short.txt").write_text("w9 w9 w9 w8\n")
    listed = tmp_path / "languages.yaml"
    listed.write_text(f"en: {tmp_path}/long.txt\nde: {tmp_path}/short.txt\n")
    how = ["--task", "own", "--data", data, *FEW, "--trim-vocab", listed, "--trim-vocab", 7]
    said = said_by(succeeds("finetune", base, *how, "-o", tmp_path / "out"))
    assert "they cover 33.333% of en, 75.000% of de" in said
    assert vocabulary(tmp_path / "out") == SPECIAL | {"w9", "w0"}
    listed.write_text("de: [a.txt, b.txt]\n")
    assert "languages.yaml: de names no text" in refused(tmp_path, "finetune", base, *how)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--trim-vocab", "4"], "a vocabulary of 4 is too small: 5 tokens always stay"),
        (["--trim-vocab", "9", "--trim-vocab", "10"], "--trim-vocab was given two sizes: 9, 10"),
        (["--trim-vocab", "nowhere.txt"], "no data at nowhere.txt"),
    ],
)
def test_mistakes_are_refused(tmp_path, more, message):
    base, data = own_files.encoder(tmp_path / "base"), own(tmp_path / "data", "class")
    assert message in refused(tmp_path, "finetune", base, "--task", "own", "--data", data, *more)
