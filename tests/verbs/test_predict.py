"""What a result predicts: the same as transformers, sentence-transformers and the model itself."""

import json
import random
import shutil

import numpy as np
import own_files
import pandas as pd
import pytest
import torch
from encoders import on_disk, tiny_config, tiny_encoder, tiny_tokenizer
from questions import PEOPLE, ROBBERT, with_pre_tokenizer
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import (
    AutoTokenizer,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertTokenizerFast,
    pipeline,
)

import kdcli
from kdcli.deploy.predict import Predictor
from kdcli.errors import UsageError
from kdcli.models.embedding_format import EmbeddingFormat, save_embedder

TEXTS = ["w1 w2 w3", "w4", *(f"w{n} w{n % 7 + 9} w{n % 5 + 20}" for n in range(40)), "w7 w8"]
PAIRS = [(text, f"w{n} w3") for n, text in enumerate(TEXTS)]
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
NAMES = ("calm", "brisk", "dull")


def in_onnx(folder, **options):
    out = folder.with_name(f"{folder.name}-onnx")
    return kdcli.export(folder, file_format="onnx", output_dir=out, **options)


def test_texts_mixed_with_pairs_are_refused(tmp_path):
    predictor = Predictor.open(str(own_files.headed(tmp_path / "model", NAMES)))
    with pytest.raises(UsageError, match=r"item 2 is a pair of texts, but item 0 is a text"):
        predictor.predict(["w1", "w2", ("w3", "w4")])
    with pytest.raises(UsageError, match=r"item 1 is a text, but item 0 is a pair of texts"):
        predictor.predict([("w3", "w4"), "w1"])


def test_questions_and_contexts_without_text_are_refused(tmp_path):
    folder = on_disk(BertForQuestionAnswering(tiny_config("bert")), tmp_path)
    predictor = Predictor.open(str(folder))
    with pytest.raises(UsageError, match="item 1 has an empty context"):
        predictor.predict([("w1", "w2 w3"), ("w1", " ")])
    with pytest.raises(UsageError, match="item 0 has an empty question"):
        predictor.predict([("", "")])


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


def test_a_text_that_is_not_utf_8_has_no_entities(tagger):
    with pytest.raises(UsageError, match="item 1 is not UTF-8 text"):
        kdcli.load(tagger).predict(["w1", "\ud800"])


def test_entities_have_all_letters_of_their_words(tmp_path):
    tokenizer = with_pre_tokenizer(ROBBERT)
    config = tiny_config("bert", vocab_size=len(tokenizer), id2label={0: "X", 1: "O"})
    model = BertForTokenClassification(config).eval()
    torch.nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data[0] = 1.0
    model.save_pretrained(tmp_path)
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(tmp_path)
    ((entity,),) = Predictor.open(str(tmp_path)).predict([PEOPLE])
    assert (entity.label, entity.text) == ("X", PEOPLE)


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
    with pytest.raises(UsageError, match="item 1 is not UTF-8 text"):
        run.predict(["w1", "\ud800"])


def test_classes_of_models_for_others(tmp_path):
    folder = tmp_path / "embedder"
    save_embedder(tiny_encoder("bert"), tiny_tokenizer(), EmbeddingFormat(), folder)
    export = in_onnx(folder, weights=True)
    assert isinstance(export.model, SentenceTransformer)
    np.testing.assert_allclose(export.model.encode(TEXTS), export.predict(TEXTS), atol=1e-4)
    for place in (folder, export.folder):
        loaded = kdcli.load(place)
        assert isinstance(loaded.model, SentenceTransformer)
        np.testing.assert_allclose(loaded.predict(TEXTS), export.predict(TEXTS), atol=1e-4)
    own_files.headed(tmp_path / "raw", num_labels=1)
    CrossEncoder(str(tmp_path / "raw"), device="cpu").save_pretrained(str(tmp_path / "reranker"))
    bare = in_onnx(tmp_path / "reranker")
    with pytest.raises(UsageError, match="is an export, and has no weights for torch") as caught:
        _ = kdcli.load(bare.folder).model
    assert "export it with --weights" in caught.value.hint
    assert kdcli.load(bare.folder).predict(PAIRS) == bare.predict(PAIRS)
    whole = kdcli.export(
        tmp_path / "reranker", file_format="onnx", weights=True, output_dir=tmp_path / "whole"
    )
    assert isinstance(whole.model, CrossEncoder)
    assert whole.model.predict(PAIRS).tolist() == pytest.approx(whole.predict(PAIRS), abs=1e-4)


def test_a_detector_with_one_named_output_gives_its_probability(tmp_path):
    folder = own_files.headed(tmp_path / "detector", ("SPAM",))
    wanted = pipeline("text-classification", model=str(folder), device="cpu")(TEXTS)
    for model in (kdcli.load(folder), in_onnx(folder)):
        for one, other in zip(model.predict(TEXTS), wanted, strict=True):
            assert one.scores == {"SPAM": pytest.approx(other["score"], abs=1e-4)}


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
