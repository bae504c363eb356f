"""Masks as the authors of SMP publish them, bits alone: their head, by hand from a stock model."""

import json

import numpy as np
import pytest
import torch
from encoders import tiny_config
from own_files import kdcli, refused, report_of, succeeds
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertForMaskedLM, PreTrainedTokenizerFast

import kdcli as package

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "Yes", "No", "Maybe", "terrible", "great", *(f"w{i}" for i in range(54))]


FILE = "mnli_0.50_kd_mag.npy"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base with its masked-language-model head, a mask in the authors' layout, rows of MNLI, and
    the masked model."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    model = BertForMaskedLM(tiny_config("bert", initializer_range=0.3)).eval()
    torch.nn.init.normal_(model.cls.predictions.bias)
    model.save_pretrained(folder / "base")
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    named = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    # As the tokenizer of bert-base-uncased, which returns token types.
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=inputs, **named
    ).save_pretrained(folder / "base")
    bits, state = [], model.state_dict()
    for name in sorted(
        n for n in state if ".layer." in n and n.endswith("weight") and "LayerNorm" not in n
    ):
        kept = torch.rand(state[name].shape) < 0.5
        state[name].mul_(kept)
        bits.append(kept.numpy().reshape(-1))
    np.save(folder / FILE, np.packbits(np.concatenate(bits)))
    rng = np.random.default_rng(0)
    rows = [
        {"premise": f"w{a} w{b}", "hypothesis": f"w{c}", "label": int(d)}
        for a, b, c, d in zip(*rng.integers(0, 54, (3, 40)), rng.integers(0, 3, 40), strict=True)
    ]
    (folder / "data").mkdir()
    for split in ("validation_matched", "validation_mismatched"):
        (folder / "data" / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), "utf-8"
        )
    return folder, model, rows


def by_hand(model, rows, *words):
    """Logits of words at [CLS], from the whole head of the masked model; of a task's model all that
    it has."""
    ids = [WORDS.index(word) for word in words]
    found = []
    for row in rows:
        first, second = (
            [WORDS.index(w) for w in row[name].split()] for name in ("premise", "hypothesis")
        )
        tokens = [2, *first, 3, *second, 3]
        kinds = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), token_type_ids=torch.tensor([kinds])).logits
        found.append(logits[0, 0, ids] if logits.dim() == 3 else logits[0])
    return torch.stack(found)


def accuracy(logits, rows):
    return float(
        np.mean([int(row.argmax()) == r["label"] for row, r in zip(logits, rows, strict=True)])
    )


def judged(made, out, *more):
    folder = made[0]
    args = ["--task", "mnli", "--data", folder / "data", "--mask", folder / FILE, "-o", out]
    result = succeeds("evaluate", folder / "base", *args, *more)
    return report_of(out).evaluations[0].metrics["accuracy"], " ".join(result.output.split())


def test_evaluate_judges_mnli_with_the_words_its_labels_were_trained_with(made, tmp_path):
    _, model, rows = made
    right, other = (
        accuracy(by_hand(model, rows, *w), rows)
        for w in (("Maybe", "No", "Yes"), ("Yes", "Maybe", "No"))
    )
    assert right != other
    found, said = judged(made, tmp_path / "judged")
    assert found == pytest.approx(right)
    assert "Maybe (entailment), No (neutral), Yes (contradiction)" in said
    # A mask that a user trained by our own order of labels.
    found, said = judged(made, tmp_path / "own", "--set", "head.words=['Yes', 'Maybe', 'No']")
    assert found == pytest.approx(other)
    assert "Yes (entailment), Maybe (neutral), No (contradiction)" in said


@pytest.mark.parametrize("verb", ["apply", "compact"])
def test_mask_saves_the_model_with_its_head_and_says_what_it_took(made, tmp_path, verb):
    folder, model, rows = made
    out = tmp_path / "out"
    result = succeeds("mask", verb, folder / FILE, "--base", folder / "base", "-o", out)
    said = " ".join(result.output.split())
    assert "task mnli" in said
    assert "Maybe (entailment), No (neutral), Yes (contradiction)" in said
    expected = by_hand(model, rows[:4], "Maybe", "No", "Yes")
    torch.testing.assert_close(
        by_hand(package.load(out).model, rows[:4]), expected, atol=1e-5, rtol=1e-5
    )


def test_a_name_that_tells_no_task_gives_the_encoder_until_one_is_told(made, tmp_path):
    folder, _, _ = made
    other = tmp_path / "mine.npy"
    other.write_bytes((folder / FILE).read_bytes())
    args = ["mask", "apply", other, "--base", folder / "base", "-o"]
    assert "the bare encoder" in " ".join(kdcli(*args, tmp_path / "bare").output.split())
    assert json.loads((tmp_path / "bare" / "config.json").read_text("utf-8"))["architectures"] == [
        "BertModel"
    ]
    facts = json.loads(succeeds(*args, tmp_path / "sst2", "--task", "sst2", "--json").stdout)
    assert (facts["task"], facts["label_words"]) == ("sst2", ["terrible", "great"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--task", "mnil"], "unknown task 'mnil'"),
        (["--set", "head.kind=scratch"], "'head.kind' must be 'embedding' or 'mlm'"),
        (["--set", "head.words=['Yes', 'No']"], "2 label words for the 3 outputs"),
        (["--set", "head.label_map=[0]"], "head.label_map"),
        (["--task", "cola"], "label word 'incorrect'"),
    ],
)
def test_heads_that_cannot_be_made_are_refused(made, tmp_path, more, message):
    folder, _, _ = made
    assert message in refused(
        tmp_path, "mask", "apply", folder / FILE, "--base", folder / "base", *more
    )


def test_words_are_for_masks_without_a_head(made, tmp_path):
    folder, _, _ = made
    args = ["evaluate", folder / "base", "--task", "mnli", "--data", folder / "data"]
    assert "head.kind and head.words are for" in refused(tmp_path, *args, "--set", "head.kind=mlm")
    assert "for models, not for masks" in refused(
        tmp_path, *args, "--mask", folder / FILE, "--set", "head.label_map=[0, 1, 2]"
    )
