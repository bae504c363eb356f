"""How often an exported file predicts what torch predicts, next to the same count by hand."""

import numpy as np
import pytest
import torch
from encoders import tiny_config, tiny_tokenizer
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from kdcli.deploy.export import GRAPH_OUTPUTS
from kdcli.deploy.runners import Runner
from kdcli.errors import UsageError
from kdcli.verbs.export.export_check import ROWS, agreement_text, compare_outputs

TEXTS = [f"w{i} w{i + 1} w{i + 2}"[: 4 + i % 9] for i in range(ROWS + 3)]
OUTPUTS_OF = {"score": 1, "span": 2}
AUTO = {
    None: AutoModel,
    "class": AutoModelForSequenceClassification,
    "multi": AutoModelForSequenceClassification,
    "score": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "span": AutoModelForQuestionAnswering,
}


def made(kind, change):
    """A model, its tokenizer, and a runner whose outputs are the model's after a change."""
    torch.manual_seed(0)
    config = tiny_config(
        "bert", num_hidden_layers=1, initializer_range=0.5, num_labels=OUTPUTS_OF.get(kind, 3)
    )
    model = AUTO[kind].from_config(config).eval()

    def call(batch):
        with torch.no_grad():
            outputs = model(**batch)
        return [change(outputs[name].numpy().copy()) for name in GRAPH_OUTPUTS if name in outputs]

    return model, tiny_tokenizer(), Runner(lambda batch: batch, call, lambda outputs: outputs)


@pytest.mark.parametrize("kind", AUTO)
def test_the_same_outputs_agree(kind):
    found = compare_outputs(*made(kind, lambda x: x), kind, TEXTS)
    assert found.pop("texts") == len(TEXTS)
    assert found == {
        None: {"cosine": pytest.approx(1, abs=1e-6), "least": pytest.approx(1, abs=1e-6)},
        "score": {"mean": 0.0, "most": 0.0},
    }.get(kind, {"same": 1.0})


@pytest.mark.parametrize("kind", ["class", "multi", "span"])
def test_changed_predictions_are_counted_by_text(kind):
    """The first text of each batch is predicted otherwise."""

    def change(x):
        x[0] = -x[0]
        return x

    assert compare_outputs(*made(kind, change), kind, TEXTS)["same"] == pytest.approx(
        1 - 2 / len(TEXTS)
    )


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("kind", AUTO)
def test_an_output_that_is_not_finite_is_refused(kind, wrong):
    def change(x):
        x[-1, 0] = wrong
        return x

    with pytest.raises(UsageError, match="outputs of the file for some texts are not finite"):
        compare_outputs(*made(kind, change), kind, TEXTS)


def test_labels_of_tokens_are_counted_without_padding():
    model, tokenizer, runner = made(
        "tokens", lambda x: np.where(np.arange(x.shape[1])[:, None] < 2, -x, x)
    )
    lengths = [len(ids) for ids in tokenizer(TEXTS)["input_ids"]]
    # The sign of the logits of the first two tokens is turned, so that the least likely label wins.
    expected = 1 - 2 * len(TEXTS) / sum(lengths)
    assert compare_outputs(model, tokenizer, runner, "tokens", TEXTS)["same"] == pytest.approx(
        expected
    )


def test_scores_differ_by_what_was_added():
    model, tokenizer, runner = made("score", lambda x: x + np.arange(len(x))[:, None])
    added = [i % ROWS for i in range(len(TEXTS))]
    found = compare_outputs(model, tokenizer, runner, "score", TEXTS)
    assert (found["mean"], found["most"]) == (
        pytest.approx(np.mean(added), abs=1e-5),
        pytest.approx(max(added), abs=1e-5),
    )
    assert (
        agreement_text(found, "score")
        == f"scores differ by {np.mean(added):.3g} on {len(TEXTS)} texts, at most by 7"
    )


def test_an_encoder_is_judged_by_the_mean_vectors_of_its_texts():
    rng = np.random.default_rng(0)
    model, tokenizer, runner = made(None, lambda x: x + rng.normal(size=x.shape).astype(np.float32))
    found = compare_outputs(model, tokenizer, runner, None, TEXTS)
    rng, cosines = np.random.default_rng(0), []
    for begin in range(0, len(TEXTS), ROWS):
        rows = tokenizer(TEXTS[begin : begin + ROWS], padding=True, return_tensors="pt")
        with torch.no_grad():
            plain = model(**rows).last_hidden_state.numpy()
        other = plain + rng.normal(size=plain.shape).astype(np.float32)
        for one, two, mask in zip(
            plain.astype(float), other.astype(float), rows["attention_mask"].numpy(), strict=True
        ):
            a, b = one[mask == 1].mean(0), two[mask == 1].mean(0)
            cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert (found["cosine"], found["least"]) == (
        pytest.approx(np.mean(cosines)),
        pytest.approx(min(cosines)),
    )
