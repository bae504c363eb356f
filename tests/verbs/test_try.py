"""`kdcli try`: the page shows what the models predict, only to this machine, until Ctrl-C."""

import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np
import own_files
import pytest

from kdcli.deploy.predict import Predictor
from kdcli.errors import UsageError
from kdcli.verbs.try_.run import MAX_TEXTS, TriedModel, answers


def fetched(address, typed=None, **headers):
    """The status and the body of a response."""
    data = None if typed is None else urlencode({"texts": typed}).encode()
    try:
        with urlopen(Request(address, data, headers), timeout=60) as response:
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            return response.status, response.read().decode("utf-8")
    except HTTPError as error:
        return error.code, error.read().decode("utf-8")


@pytest.mark.slow
def test_the_page_has_the_answers_of_both_models_until_ctrl_c(tmp_path):
    student = own_files.headed(tmp_path / "student", ("brisk", "calm"))
    # A shell that started the tests in the background may have had SIGINT ignored.
    main = "from signal import *; signal(SIGINT, default_int_handler); import kdcli.__main__"
    command = [sys.executable, "-c", main, "try", student, "--teacher", student, "--port", "0"]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process,
        ExitStack() as ended,
    ):
        ended.callback(process.kill)
        lines = iter(process.stderr.readline, "")
        address = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
        status, page = fetched(address)
        assert (status, "<form" in page, "<script" in page) == (200, True, False)
        status, page = fetched(address, "w1 w2\n<script>w3")
        assert status == 200
        assert page.count("student (teacher)</p>") == page.count("student</p>") == 2
        assert "<script" not in page
        assert "&lt;script&gt;w3" in page
        (label,) = Predictor.open(str(student)).predict(["w1 w2"])
        assert f"<b>{label.label}</b>" in page
        assert f"<span>{label.score:.4f}</span>" in page
        status, page = fetched(address, " \n")
        assert (status, "type a text for each line" in page) == (400, True)
        # Another site's name that leads here.
        assert fetched(address, "w1", Host="example.org")[0] == 403
        assert fetched(f"{address}/other")[0] == 404
        assert fetched(address, "w" * 800_000)[0] == 413
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = own_files.kdcli("try", "demo-classifier", "--port", port)
    assert result.exit_code == 3
    assert f"--port {port} cannot be used: Address already in use" in own_files.said_by(result)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["class", "pair", "multi", "score", "tokens", "span"])
def test_answers_are_the_predictions(teacher_of, kind):
    predictor = Predictor.open(str(teacher_of(kind)))
    model = TriedModel("teacher", "1 MB", predictor)
    parts = [("w1 w2", "w3 w21 w4"), ("w22", "w5 w30")]
    pairs = kind in ("pair", "span")
    typed = [" ||| ".join(part) if pairs else part[1] for part in parts]
    predictions = predictor.predict([part if pairs else part[1] for part in parts])
    shown = answers([model, model], "\n\n".join(typed))
    assert [one.text for one in shown] == typed
    assert not any(one.differ for one in shown)
    for one, prediction in zip(shown, predictions, strict=True):
        first, second = one.by_model
        assert (first.headline, first.rows) == (second.headline, second.rows)
        assert first.ms > 0
        if kind in ("class", "pair"):
            assert first.headline == prediction.label
            assert dict(first.rows)[prediction.label] == pytest.approx(prediction.score)
        elif kind == "multi":
            assert first.headline == (", ".join(prediction.labels) or "no label")
        elif kind == "score":
            assert float(first.headline) == pytest.approx(prediction, abs=1e-4)
        elif kind == "tokens":
            assert [name for name, _ in first.rows] == [f"{e.label}: {e.text}" for e in prediction]
        else:
            assert first.headline == (prediction.text or "no answer")


def test_an_embedding_model_sorts_texts_by_similarity(tmp_path):
    predictor = Predictor.open(str(own_files.embedder(tmp_path / "model")))
    texts = ["w1 w2", "w3 w4 w5", "w1 w2 w6", "w2 w1"]
    (shown,) = answers([TriedModel("model", "1 MB", predictor)], "\n".join(texts))
    first, *others = (v / np.linalg.norm(v) for v in predictor.predict(texts))
    expected = sorted(((float(v @ first), t) for v, t in zip(others, texts[1:], strict=True)))[::-1]
    assert [name for name, _ in shown.by_model[0].rows] == [text for _, text in expected]
    similar = [similarity for _, similarity in shown.by_model[0].rows]
    assert similar == pytest.approx([similarity for similarity, _ in expected], abs=1e-5)
    assert shown.by_model[0].headline == expected[0][1]
    with pytest.raises(UsageError, match="there is one text"):
        answers([TriedModel("model", "1 MB", predictor)], "w1")
    with pytest.raises(UsageError, match=f"at most {MAX_TEXTS} are allowed"):
        answers([TriedModel("model", "1 MB", predictor)], "w1\n" * (MAX_TEXTS + 1))
