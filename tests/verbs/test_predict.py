"""What a result predicts: the same as transformers, sentence-transformers and the model itself."""

import json
import random
import re
import shutil

import numpy as np
import own_files
import pandas as pd
import pytest
import torch
from encoders import byte_level, on_disk, tiny_config, tiny_encoder, tiny_tokenizer
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertTokenizerFast,
    PreTrainedTokenizerFast,
    pipeline,
)

import kdcli
from kdcli.deploy.predict import AnswerSpan, Label, Labels, Predictor
from kdcli.errors import UsageError
from kdcli.models.embedder import EmbeddingFormat, save_embedder
from kdcli.models.model import return_token_types

TEXTS = ["w1 w2 w3", "w4", *(f"w{n} w{n % 7 + 9} w{n % 5 + 20}" for n in range(40)), "w7 w8"]
PAIRS = [(text, f"w{n} w3") for n, text in enumerate(TEXTS)]
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
NAMES = ("calm", "brisk", "dull")
CLASSES = {"id2label": dict(enumerate(NAMES)), "label2id": {n: i for i, n in enumerate(NAMES)}}


def in_onnx(folder, **options):
    out = folder.with_name(f"{folder.name}-onnx")
    return kdcli.export(folder, file_format="onnx", output_dir=out, **options)


@pytest.mark.parametrize("texts", [TEXTS, PAIRS], ids=["texts", "pairs"])
def test_classes_are_the_ones_of_a_pipeline(tmp_path, texts):
    folder = own_files.headed(tmp_path / "model", NAMES, type_vocab_size=2)
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    # By default, tokenizers without a class of their own tell nobody which text of a pair it is.
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    inputs = [t if isinstance(t, str) else {"text": t[0], "text_pair": t[1]} for t in texts]
    theirs = pipeline("text-classification", str(folder), top_k=None)(inputs)
    ours = Predictor.open(str(folder)).predict(texts)
    assert all(isinstance(each, Label) for each in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert one.scores == pytest.approx({row["label"]: row["score"] for row in other}, abs=1e-5)
        assert (one.label, one.score) == (
            other[0]["label"],
            pytest.approx(other[0]["score"], abs=1e-5),
        )
    assert {each.label for each in ours} == set(NAMES)


def test_several_classes_and_numbers_are_the_ones_of_a_pipeline(tmp_path):
    several = {"problem_type": "multi_label_classification"}
    folder = own_files.headed(tmp_path / "multi", NAMES, **several)
    theirs = pipeline("text-classification", str(folder), top_k=None)(TEXTS)
    ours = Predictor.open(str(folder)).predict(TEXTS)
    assert all(isinstance(each, Labels) for each in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert one.scores == pytest.approx({row["label"]: row["score"] for row in other}, abs=1e-5)
        assert sorted(one.labels) == sorted(row["label"] for row in other if row["score"] > 0.5)
    assert {len(each.labels) for each in ours} >= {1, 2}
    folder = own_files.headed(tmp_path / "score", num_labels=1, problem_type="regression")
    theirs = pipeline("text-classification", str(folder), function_to_apply="none")(TEXTS)
    ours = Predictor.open(str(folder)).predict(TEXTS)
    assert ours == pytest.approx([row["score"] for row in theirs], abs=1e-4)


def test_texts_mixed_with_pairs_are_refused(tmp_path):
    predictor = Predictor.open(str(own_files.headed(tmp_path / "model", NAMES)))
    with pytest.raises(UsageError, match=r"item 2 is a pair of texts, but item 0 is a text"):
        predictor.predict(["w1", "w2", ("w3", "w4")])
    with pytest.raises(UsageError, match=r"item 1 is a text, but item 0 is a pair of texts"):
        predictor.predict([("w3", "w4"), "w1"])


@pytest.fixture(scope="module")
def tagger(tmp_path_factory):
    """A model that labels words, with a tokenizer whose pieces are letters."""
    folder = tmp_path_factory.mktemp("tagger") / "model"
    letters = [chr(97 + n) for n in range(26)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), "."]
    labels = dict(enumerate(TAGS))
    config = tiny_config(
        "bert",
        initializer_range=0.3,
        id2label=labels,
        label2id={name: number for number, name in labels.items()},
    )
    torch.manual_seed(0)
    model = BertForTokenClassification(config).eval()
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)
    tokenizer = BertTokenizerFast({piece: n for n, piece in enumerate(pieces)})
    tokenizer.model_max_length = 100
    tokenizer.save_pretrained(folder)
    return folder


def drawn_texts(count):
    rng = random.Random(0)
    for _ in range(count):
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 4))) for _ in range(9)]
        yield "  ".join(words[:4]) + ", " + " ".join(words[4:]) + "."


@pytest.mark.parametrize("texts", [[], [""], ["  ", ""]])
def test_texts_without_words_have_no_entities(tagger, texts):
    assert Predictor.open(str(tagger)).predict(texts) == [[] for _ in texts]


def test_entities_are_the_ones_of_a_pipeline(tagger):
    texts = [*drawn_texts(40), ""]
    tag = pipeline("token-classification", str(tagger), aggregation_strategy="first")
    ours = Predictor.open(str(tagger)).predict(texts)
    assert ours[-1] == []
    for text, one, other in zip(texts, ours, tag(texts[:-1]), strict=False):
        assert [(e.label, e.start, e.end) for e in one] == [
            (row["entity_group"], row["start"], row["end"]) for row in other
        ]
        assert [e.score for e in one] == pytest.approx([row["score"] for row in other], abs=1e-5)
        assert [e.text for e in one] == [text[e.start : e.end] for e in one]
    found = [entity for each in ours for entity in each]
    assert {e.label for e in found} == {"PER", "LOC"}
    assert any(" " in e.text for e in found), "some entities have several words"


def test_entities_of_a_byte_level_tokenizer_begin_at_words(tmp_path):
    """Its tokens hold the space before a word, and some offsets do too."""
    labels = dict(enumerate(TAGS))
    config = tiny_config("roberta", vocab_size=300, id2label=labels, initializer_range=0.3)
    torch.manual_seed(1)
    model = AutoModelForTokenClassification.from_config(config).eval()
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(tmp_path)
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(("a", "b")), **names)
    tokenizer.model_max_length = 150
    tokenizer.save_pretrained(tmp_path)
    texts = [text.replace(",", " ").replace(".", "") for text in drawn_texts(20)]
    ours = Predictor.open(str(tmp_path)).predict(texts)
    assert sum(map(len, ours)) > 20
    for text, found in zip(texts, ours, strict=True):
        begins = {match.start() for match in re.finditer(r"\S+", text)}
        ends = {match.end() for match in re.finditer(r"\S+", text)}
        assert {entity.start for entity in found} <= begins
        assert {entity.end for entity in found} <= ends
        assert [entity.text for entity in found] == [text[e.start : e.end] for e in found]


@pytest.mark.parametrize(
    ("names", "types"),
    [(("O", "B-PER", "L-PER", "U-LOC", "I-PER"), {"PER", "LOC"}), (("O", "B", "I", "E", "S"), "_")],
)
def test_entities_follow_the_scheme_of_the_labels(tagger, tmp_path, capsys, names, types):
    shutil.copytree(tagger, tmp_path / "model")
    config = json.loads((tagger / "config.json").read_text("utf-8"))
    config |= {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), "utf-8")
    found = Predictor.open(str(tmp_path / "model")).predict(drawn_texts(20))
    assert set() < {entity.label for row in found for entity in row} <= set(types)
    assert "look like tags" not in capsys.readouterr().err
    config["id2label"] = dict(enumerate(["O", "B_PER", "I_PER", "B_LOC", "I_LOC"]))
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), "utf-8")
    Predictor.open(str(tmp_path / "model")).predict(drawn_texts(1))
    assert "B_PER and I_PER look like tags" in " ".join(capsys.readouterr().err.split())


def test_words_of_a_list_are_labelled_one_by_one(tagger):
    words = ["ab", "c.d", "a", "bcd"]
    model = AutoModelForTokenClassification.from_pretrained(tagger)
    tokenizer = AutoTokenizer.from_pretrained(tagger)
    encoded = tokenizer(words, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        probs_LC = model(**encoded).logits[0].double().softmax(-1)
    firsts = [encoded.word_ids().index(n) for n in range(len(words))]
    tags = [TAGS[int(probs_LC[token].argmax())] for token in firsts]
    ours, of_array = Predictor.open(str(tagger)).predict([words, np.array(words, object)])
    assert of_array == ours
    covered = {n for entity in ours for n in range(entity.start, entity.end)}
    assert covered == {n for n, tag in enumerate(tags) if tag != "O"}
    for entity in ours:
        assert entity.text == " ".join(words[entity.start : entity.end])
        of_words = [float(probs_LC[firsts[n]].max()) for n in range(entity.start, entity.end)]
        assert entity.score == pytest.approx(np.mean(of_words), abs=1e-6)


def test_words_after_the_longest_row_have_no_label(tagger):
    predictor = Predictor.open(str(tagger))
    text = " ".join(drawn_texts(20))
    cut = predictor.tokenizer.model_max_length - 2
    kept = predictor.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    end = kept["offset_mapping"][cut - 1][1]
    (ours,) = predictor.predict([text])
    assert ours
    assert max(entity.end for entity in ours) <= end + 4


def test_answers_are_the_best_spans(tmp_path):
    torch.manual_seed(0)
    config = tiny_config("bert", initializer_range=0.3, num_labels=2, type_vocab_size=2)
    model = AutoModelForQuestionAnswering.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 40
    return_token_types(config, tokenizer)
    tokenizer.save_pretrained(tmp_path)
    rng = random.Random(0)
    contexts = [" ".join(f"w{rng.randrange(59)}" for _ in range(n)) for n in (5, 12, 9)]
    ours = Predictor.open(str(tmp_path)).predict([("w1 w2", context) for context in contexts])
    for answer, context in zip(ours, contexts, strict=True):
        words = context.split()
        ids = tokenizer.convert_tokens_to_ids(["w1", "w2", *words])
        types = [0, 0, *(1 for _ in words)]
        # This tokenizer puts no special tokens around a text, so "no answer" is the first token.
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types]))
        starts, ends = out.start_logits[0].tolist(), out.end_logits[0].tolist()
        best, span = max(
            (starts[i + 2] + ends[j + 2], (i, j))
            for i in range(len(words))
            for j in range(i, len(words))
        )
        assert isinstance(answer, AnswerSpan)
        assert answer.text == " ".join(words[span[0] : span[1] + 1])
        assert answer.margin == pytest.approx(best - starts[0] - ends[0], abs=1e-4)
    long = " ".join(f"w{n % 59}" for n in range(300))
    (answer,) = Predictor.open(str(tmp_path)).predict([("w1", long)])
    assert answer.text in long, "a long context is read in windows"


@pytest.mark.parametrize(
    "fmt",
    [
        EmbeddingFormat(),
        EmbeddingFormat("cls", normalize=False, max_length=5),
        EmbeddingFormat("last", prompts={"query": "w20 w21 "}, default_prompt="query"),
        EmbeddingFormat("max", dense=own_files.DENSE, normalize=False),
    ],
    ids=lambda fmt: fmt.pooling,
)
def test_vectors_are_the_ones_of_sentence_transformers(tmp_path, fmt):
    torch.manual_seed(0)
    folder = tmp_path / "model"
    save_embedder(tiny_encoder("bert"), tiny_tokenizer(), fmt, folder)
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    predictor = Predictor.open(str(folder))
    ours = predictor.predict(TEXTS)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert predictor.predict([]).shape == (0, theirs.shape[1])


@pytest.mark.parametrize("activation", [None, torch.nn.Identity()], ids=["default", "identity"])
def test_scores_of_passages_are_the_ones_of_sentence_transformers(tmp_path, activation):
    own_files.headed(tmp_path / "raw", num_labels=1, type_vocab_size=2)
    reranker = CrossEncoder(str(tmp_path / "raw"), device="cpu", activation_fn=activation)
    folder = tmp_path / "reranker"
    reranker.save_pretrained(str(folder))
    theirs = reranker.predict(PAIRS)
    predictor = Predictor.open(str(folder))
    assert predictor.kind == "rerank"
    assert predictor.predict(PAIRS) == pytest.approx(theirs.tolist(), abs=1e-4)
    export = in_onnx(folder)
    assert export.predict(PAIRS) == pytest.approx(theirs.tolist(), abs=1e-4)
    with pytest.raises(UsageError, match=r"item 0 is 1 texts; this model takes a pair"):
        predictor.predict(["w1"])


@pytest.mark.parametrize("kind", ["multi", "score", "tokens", "span"])
def test_an_export_predicts_what_its_model_predicts(exported, kind):
    teacher, _, folder = exported(kind)
    columns = {"tokens": ["tokens"], "span": ["question", "context"]}.get(kind, ["text"])
    rows = own_files.rows(kind, 40, seed=3)
    inputs = [tuple(row[name] for name in columns) for row in rows]
    if kind != "span":
        inputs = [one for (one,) in inputs]
    ours, of_export = (Predictor.open(str(each)).predict(inputs) for each in (teacher, folder))
    assert len(ours) == len(of_export) == 40
    for one, other in zip(ours, of_export, strict=True):
        if kind == "multi":
            assert other.scores == pytest.approx(one.scores, abs=1e-4)
        elif kind == "score":
            assert other == pytest.approx(one, abs=1e-4)
        elif kind == "span":
            assert (other.text, other.margin) == (one.text, pytest.approx(one.margin, abs=1e-3))
        else:
            places, expected = (
                [(each.label, each.start, each.end) for each in found] for found in (other, one)
            )
            assert places == expected


def test_a_run_gives_its_model_its_predictions_and_its_pictures(tmp_path):
    base = own_files.encoder(tmp_path / "base")
    rows = own_files.rows("class", 48)
    run = kdcli.finetune(
        base,
        task="own",
        data=rows,
        max_steps=4,
        batch_size=8,
        dtype="fp32",
        config={"measure": {"latency": False}, "train": {"log_every": 1}},
        output_dir=tmp_path / "run",
    )
    assert run.best == run.folder == tmp_path / "run"
    assert isinstance(run.model, BertForSequenceClassification)
    assert run.model is run.model
    assert not run.model.training
    texts = [row["text"] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(run.best)
    with torch.no_grad():
        logits = run.model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.double()
    ours = run.predict(texts)
    np.testing.assert_allclose(
        [list(each.scores.values()) for each in ours], logits.softmax(-1), atol=1e-6
    )
    assert list(ours[0].scores) == ["brisk", "calm"]
    html = run.plot()._repr_html_()
    assert html.count("<svg") == len(run.plot().pictures) > 0
    assert "loss" in run.plot().pictures[0].caption
    assert run.predict([]) == []
    with pytest.raises(UsageError, match="predict takes a list of texts") as caught:
        run.predict("w1 w2")
    assert caught.value.hint == "give [text]"
    for table in ({"text": texts}, pd.DataFrame({"text": texts})):
        with pytest.raises(UsageError, match="list of texts, and got an object of type") as caught:
            run.predict(table)
        assert 'data["text"]' in caught.value.hint
    assert run.predict(pd.Series(texts[:1])) == run.predict(texts[:1])
    for wrong, message in ((3, "type int"), (("w1", "w2", "w3"), "3 texts"), (["w1", 2], "list")):
        with pytest.raises(UsageError, match=f"item 1 is .*{message}.*a text or a pair of texts"):
            run.predict(["w1", wrong])


def test_classes_of_models_for_others(tmp_path):
    folder = tmp_path / "embedder"
    save_embedder(tiny_encoder("bert"), tiny_tokenizer(), EmbeddingFormat(), folder)
    export = in_onnx(folder, weights=True)
    assert isinstance(export.model, SentenceTransformer)
    np.testing.assert_allclose(export.model.encode(TEXTS), export.predict(TEXTS), atol=1e-4)
    own_files.headed(tmp_path / "raw", num_labels=1)
    CrossEncoder(str(tmp_path / "raw"), device="cpu").save_pretrained(str(tmp_path / "reranker"))
    bare = in_onnx(tmp_path / "reranker")
    with pytest.raises(UsageError, match="is an export, and has no weights for torch") as caught:
        _ = bare.model
    assert "weights=True" in caught.value.hint
    whole = kdcli.export(
        tmp_path / "reranker", file_format="onnx", weights=True, output_dir=tmp_path / "whole"
    )
    assert isinstance(whole.model, CrossEncoder)
    assert whole.model.predict(PAIRS).tolist() == pytest.approx(whole.predict(PAIRS), abs=1e-4)


def test_what_has_no_head_or_no_model_is_refused(tmp_path):
    folder = on_disk(tiny_encoder("bert"), tmp_path / "encoder")
    with pytest.raises(UsageError, match="is an encoder without a head") as caught:
        Predictor.open(str(folder))
    assert "fine-tune it" in caught.value.hint
    own_files.headed(tmp_path / "model", ("same", "other"))
    data = own_files.write(tmp_path / "rows.jsonl", own_files.rows("pair", 40))
    run = kdcli.evaluate(
        tmp_path / "model", task="own", data=data, dtype="fp32", output_dir=tmp_path / "run"
    )
    for use in (lambda: run.predict(["w1"]), lambda: run.model):
        with pytest.raises(UsageError, match="left no model of its own"):
            use()


def test_an_activation_that_is_not_computed_is_refused(tmp_path):
    folder = own_files.headed(tmp_path / "model", num_labels=1)
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="applies Tanh to its scores") as caught:
        Predictor.open(str(folder)).predict(PAIRS)
    assert ".model" in caught.value.hint
