"""`kdcli trim`: models without the tokens that a text does not need."""

import re
import shlex
import time
from functools import partial

import numpy as np
import own_files
import pytest
import torch
from encoders import tiny_tokenizer
from filelock import FileLock
from forked import Child
from own_files import kdcli, refused, report_of, said_by, succeeds, write
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from kdcli.errors import MachineError
from kdcli.models.embedding_format import EmbeddingFormat
from kdcli.models.model import training_rows, write_training_rows
from kdcli.models.trim import count_tokens
from kdcli.report.schema import Trimming
from kdcli.workloads import cut_vocabulary

TEXTS = ["w1 w2 w3", "w2 w5 w5 w5", "w3 w1"]


@pytest.fixture
def text(tmp_path):
    write(
        tmp_path / "text" / "train.jsonl", [{"a": a, "b": ["w2", "w7"], "label": 1} for a in TEXTS]
    )
    write(tmp_path / "text" / "validation.jsonl", [{"a": "w1 w9 w9"}, {"a": "w2 w3"}])
    return tmp_path / "text"


def test_a_model_with_a_head_gives_the_same_outputs(text, tmp_path):
    before = own_files.headed(tmp_path / "model", num_labels=3)
    write_training_rows(before, np.arange(3, dtype=np.uint64))
    result = succeeds("trim", before, "--data", text, "-o", tmp_path / "out")
    assert "10 of 64 tokens kept; they cover 100.000% of the training text" in said_by(result)
    assert (
        "(validation split): 1 of 2 texts (50.0%) are tokenised differently; 40.0% of their tokens "
        "were removed, and 40.0% became unknown"
    ) in said_by(result)
    few = "warning: the vocabulary has the tokens of 3 texts, and other texts need more: 40.0% of"
    assert any(note.startswith(few) for note in report_of(tmp_path / "out").notes)
    assert "'w9', in 1 of them: w9 -> [UNK]" in said_by(result)
    assert "mean state compared with the whole vocabulary: cosine 0." in said_by(result)
    models = [
        AutoModelForSequenceClassification.from_pretrained(path).eval()
        for path in (before, tmp_path / "out")
    ]
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (before, tmp_path / "out")]
    assert models[1].config.vocab_size == len(tokenizers[1]) == 10
    with torch.no_grad():
        one, other = (
            m(**t(TEXTS, padding=True, return_tensors="pt")).logits
            for m, t in zip(models, tokenizers, strict=True)
        )
    assert torch.equal(one, other)
    assert (training_rows(str(tmp_path / "out")) == np.arange(3)).all()
    report = report_of(tmp_path / "out")
    assert report.cards["trimmed"].params_embedding < report.cards["untrimmed"].params_embedding


def test_without_other_texts_the_tokens_that_occur_once_tell_how_many_are_missing(tmp_path):
    encoder = own_files.encoder(tmp_path / "model")
    # One of 40 tokens, and then none, occurs once.
    for times, share in ((39, "2.5%"), (0, "0.0%")):
        texts = ["w1"] * 39 + ["w2"] * (1 if times else 0)
        write(tmp_path / "text.jsonl", [{"text": text} for text in texts])
        out = tmp_path / f"out-{times}"
        said = said_by(succeeds("trim", encoder, "--data", tmp_path / "text.jsonl", "-o", out))
        assert f"about {share} of the tokens of further texts like these are not kept" in said
        assert ("warning: the vocabulary has the tokens of 40 texts" in said) == bool(times)


def test_of_two_processes_that_need_the_counts_of_a_text_one_counts(
    text, monkeypatch, cache, tmp_path
):
    calls = tmp_path / "calls"

    def count(tokenizer, texts):
        with calls.open("a") as file:
            file.write("counted\n")
        time.sleep(0.5)
        return count_tokens(tokenizer, texts)

    def save_counts(file):
        np.save(file, cut_vocabulary._counts(str(text), None, 1.0, tiny_tokenizer())[0])

    monkeypatch.setattr(cut_vocabulary, "count_tokens", count)
    files = [tmp_path / f"{name}.npy" for name in ("one", "other")]
    children = [Child(partial(save_counts, file)) for file in files]
    assert [child.wait() for child in children] == [0, 0]
    one, other = map(np.load, files)
    assert np.array_equal(one, other)
    assert one.sum() > 0
    assert calls.read_text() == "counted\n"


@pytest.mark.parametrize("error", [NotImplementedError("no locks"), OSError(30, "Read-only")])
def test_a_cache_without_a_place_for_a_lock_is_named(text, monkeypatch, cache, error):
    def acquire(self):
        raise error

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.raises(MachineError, match="could not be written") as caught:
        cut_vocabulary._counts(str(text), None, 1.0, tiny_tokenizer())
    assert "KDCLI_CACHE" in caught.value.hint


def test_an_embedding_model_stays_one(text, tmp_path):
    fmt = EmbeddingFormat("cls", prompts={"query": "w30 "}, max_length=20)
    own_files.embedder(tmp_path / "model", fmt)
    # Many models name the class that they were trained from, without the weights of its head.
    config = AutoConfig.from_pretrained(tmp_path / "model", architectures=["BertForMaskedLM"])
    config.save_pretrained(tmp_path / "model")
    file = str(tmp_path / "model" / "tokenizer.json")
    baked = Tokenizer.from_file(file)
    baked.enable_truncation(12)
    baked.enable_padding(length=12)
    baked.save(file)
    succeeds("trim", tmp_path / "model", "--data", text, "-o", tmp_path / "out")
    alone = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert alone.truncation["max_length"] == 20
    assert alone.padding["length"] is None
    one, other = (
        SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("model", "out")
    )
    assert np.array_equal(one.encode(TEXTS), other.encode(TEXTS))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "It inherits the licence and the limits of the model that it was made from." in card
    # A prompt is text that the model reads.
    assert np.array_equal(
        one.encode(TEXTS, prompt_name="query"), other.encode(TEXTS, prompt_name="query")
    )


def test_a_size_keeps_the_most_frequent_tokens(text, tmp_path):
    before = own_files.encoder(tmp_path / "model")
    result = succeeds("trim", before, "--data", text, "--vocab-size", "7", "-o", tmp_path / "out")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out").convert_ids_to_tokens(range(7))
    assert tokens == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "w2", "w5"]
    covered = "53.333% of the training text"
    assert f"7 of 64 tokens kept; they cover {covered}" in said_by(result)
    warning = (
        f"warning: 7 tokens cover only {covered}, so its other tokens are split into smaller "
        "pieces; it takes 10 tokens to cover all of it"
    )
    assert warning in said_by(result)
    assert warning in report_of(tmp_path / "out").notes
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert (
        "by keeping 7 of its 64 tokens: special tokens, single characters and the most frequent "
        f"tokens of text, which cover {covered}"
    ) in card
    whole = succeeds("trim", before, "--data", text, "--vocab-size", "10", "-o", tmp_path / "whole")
    assert "they cover 100.000%" in said_by(whole)
    assert "tokens cover only" not in said_by(whole)
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "by removing the tokens that do not occur in the training text of text" in card


def test_a_trimmed_model_has_one_size_and_no_teacher(text, tmp_path):
    before = own_files.encoder(tmp_path / "model")
    result = succeeds("trim", before, "--data", text, "-o", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    report = (tmp_path / "out" / "report.md").read_text()
    sizes = [set(re.findall(r"[\d.]+ [kMG]B", shown)) for shown in (said_by(result), card, report)]
    assert len(sizes[1]) == 2
    assert sizes[0] <= sizes[1] == sizes[2]
    assert "as you would the model that it was made from, whose licence and limits" in card
    assert "teacher" not in card


def test_a_text_that_is_nearly_covered_gives_no_warning():
    def warnings(share):
        coverage = {"en": 1.0, "de": share}
        return cut_vocabulary.low_coverage(Trimming(kept=7, whole=64, needed=10, coverage=coverage))

    assert warnings(0.99) == []
    (warning,) = warnings(0.9899)
    assert "cover only 98.990% of de" in warning
    assert "it takes 10 tokens to cover all texts" in warning


@pytest.mark.parametrize(("kept", "count"), [(10, 1), (7, 0)])
def test_more_texts_are_asked_for_unless_a_limit_on_the_size_removed_the_tokens(kept, count):
    trimming = Trimming(kept=kept, whole=64, needed=10, coverage={"en": 0.8})
    assert len(cut_vocabulary.few_texts(trimming, 0.2)) == count


def test_a_file_lists_texts_that_count_alike_however_long(tmp_path):
    base = own_files.encoder(tmp_path / "base")
    (tmp_path / "long.txt").write_text("w0 w0 w1 w1 w2 w2\n" * 50)
    (tmp_path / "short.txt").write_text("w9 w9 w9 w8\n")
    listed = tmp_path / "languages.yaml"
    listed.write_text(f"en: {tmp_path}/long.txt\nde: {tmp_path}/short.txt\n")
    trim = ["trim", base, "--data", listed, "--vocab-size", "7"]
    said = said_by(succeeds(*trim, "-o", tmp_path / "out"))
    assert "they cover 33.333% of en (training split), 75.000% of de (training split)" in said
    # Shares: w9 3/4, w0, w1 and w2 1/3 each, w8 1/4.
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out").convert_ids_to_tokens(range(7))
    assert tokens[5:] == ["w0", "w9"]
    for text, message in (
        ("de: [a.txt, b.txt]", "languages.yaml: the value of de must be one source of text"),
        ("{}", "languages.yaml lists no text"),
    ):
        listed.write_text(text)
        assert message in refused(tmp_path, *trim)


def test_a_mask_learned_with_all_tokens_is_refused_for_the_trimmed_model(text, tmp_path):
    base = own_files.encoder(tmp_path / "model", num_hidden_layers=2)
    own = ["--task", "own", "--data", own_files.own(tmp_path / "data", "class")]
    quick = [
        *own_files.QUICK,
        *shlex.split("--max-steps 2 --set head.kind=embedding --set 'head.words=[w0, w20]'"),
    ]
    teacher = own_files.headed(tmp_path / "teacher", ("brisk", "calm"))
    succeeds(
        "prune",
        base,
        *own,
        *quick,
        *shlex.split(f"--teacher {teacher} --sparsity 0.5 -o {tmp_path}/pruned"),
    )
    succeeds("trim", base, "--data", text, "-o", tmp_path / "out")
    mask = tmp_path / "pruned" / "mask" / "mask.safetensors"
    message = f"was made with 64 tokens, but {tmp_path / 'out'} has only 10 of them"
    assert message in refused(tmp_path, "mask", "apply", mask, "--base", tmp_path / "out")
    assert message in refused(tmp_path, "evaluate", tmp_path / "out", "--mask", mask, *own)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--vocab-size", "4"],
            "5 tokens are always kept (special tokens, single characters of your texts' writing "
            "systems, and bytes)",
        ),
        (["--set", "data.column=c"], "there is no column 'c'; the columns are a, b"),
        (["--set", "data.share=0.001"], "data.share=0.001 of {text} holds no text"),
        (["--data", "nowhere.txt"], "no data at nowhere.txt"),
    ],
)
def test_mistakes_are_refused(text, tmp_path, more, message):
    before = own_files.encoder(tmp_path / "model")
    error = refused(tmp_path, "trim", before, "--data", text, *more)
    assert message.format(text=text) in error


def test_weights_in_half_precision_stay_so(text, tmp_path):
    source = own_files.encoder(tmp_path / "model")
    model = AutoModel.from_pretrained(source, dtype=torch.float16)
    model.save_pretrained(source)
    succeeds("trim", source, "--data", text, "-o", tmp_path / "out")
    trimmed = own_files.weights(tmp_path / "out")
    assert {tensor.dtype for tensor in trimmed.values()} == {torch.float16}
    whole = model.state_dict()
    same = [name for name in trimmed if "word_embeddings" not in name]
    assert all(torch.equal(trimmed[name], whole[name]) for name in same)
    before, after = report_of(tmp_path / "out").cards.values()
    assert (before.held_in, after.held_in) == ("fp16", "fp16")


def test_a_table_without_names_loses_no_row(tmp_path):
    model = own_files.encoder(tmp_path / "model")
    (tmp_path / "texts.csv").write_text("".join(f"w1 w2 w3 w4 w5 w6 w{n},w8\n" for n in range(9)))
    message = refused(tmp_path, "trim", model, "--data", tmp_path / "texts.csv")
    assert "texts.csv:1 looks like a row, but it must name the columns: 'w1 w2" in message
    assert "name the column of the text with --set data.column=NAME" in message


def test_a_text_that_needs_every_token(tmp_path):
    before = own_files.encoder(tmp_path / "model")
    (tmp_path / "all.txt").write_text(" ".join(f"w{n}" for n in range(59)))
    assert "the text needs all 64 tokens: nothing to trim" in refused(
        tmp_path, "trim", before, "--data", tmp_path / "all.txt"
    )
    assert kdcli("trim", before).exit_code == 2
    assert AutoModel.from_pretrained(before).config.vocab_size == 64
