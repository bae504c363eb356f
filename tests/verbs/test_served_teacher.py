"""`kdcli distill --teacher URL`: a small server on loopback computes the teacher's vectors."""

import base64
import json
import shlex
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import own_files
import psutil
import pytest
from forked import free_port
from own_files import kdcli, refused, report_of, said_by, succeeds
from processes import process

KEY = "sk-never-to-be-seen"
WIDTH = 32  # As wide as the encoder that the student starts from.
QUICK = shlex.split(
    "--batch-size 16 --lr 1e-3 --dtype fp32 --max-steps 3 --set data.held_out_blocks=8 "
    "--set measure.latency=false --set train.log_every=1 --set data.max_length=16 "
    "--set workload.server.requests=2 --set workload.server.texts=8"
)
TEXTS = [f"w{n % 59} w{n % 7} w{n % 11} w{n % 13}" for n in range(320)]
ROUND = 4 * 2 * 8  # Texts in a shard.


def vector(text):
    words = [np.random.default_rng(int(w[1:])).normal(size=WIDTH) for w in text.split() if w[1:]]
    total = np.sum(words or [np.ones(WIDTH)], axis=0)
    return (total / np.linalg.norm(total)).astype(np.float32)


class Server(ThreadingHTTPServer):
    """Serves vectors by one of the interfaces, and counts.

    `answer` may answer a request for vectors itself: (its number, texts) -> (status, body,
    headers), or None for the usual answer.
    """

    daemon_threads = True

    def __init__(self, interface):
        super().__init__(("127.0.0.1", 0), Handler)
        self.interface, self.answer = interface, lambda number, texts: None
        self.models, self.info = ["fake/model"], {"model_type": {"embedding": {"pooling": "cls"}}}
        self.asked: list[list[str]] = []
        self.keys, self.under_way, self.most = set(), 0, 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def texts(self):
        """The texts that were asked for, without those that tell the width."""
        return [text for texts in self.asked if len(texts) > 1 for text in texts]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def send(self, status, body, headers=()):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (("Content-Length", str(len(content))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        server = self.server
        self.server.keys.add(self.headers.get("Authorization"))
        if (self.path, server.interface) == ("/info", "tei"):
            limits = {"max_client_batch_size": 6, "max_input_length": 512}
            self.send(200, {"model_id": server.models[0], **limits, **server.info})
        elif (self.path, server.interface) == ("/v1/models", "openai"):
            self.send(200, {"data": [{"id": name} for name in server.models]})
        else:
            self.send(404, b"<html>not here</html>")

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        texts = body["inputs" if server.interface == "tei" else "input"]
        with server.lock:
            server.asked.append(texts)
            number = len(server.asked)
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        try:
            self.send(*(server.answer(number, texts) or usual(server, texts)))
        finally:
            with server.lock:
                server.under_way -= 1


def usual(server, texts):
    vectors = [vector(text) for text in texts]
    if server.interface == "tei":
        return 200, [v.tolist() for v in vectors]
    rows = [{"index": n, "embedding": v.tolist()} for n, v in enumerate(vectors)]
    if rows:
        # As clients of OpenAI ask for it.
        rows[-1]["embedding"] = base64.b64encode(vectors[-1].tobytes()).decode()
    return 200, {"object": "list", "data": rows[::-1]}


@contextmanager
def serving(interface="tei"):
    with Server(interface) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def served():
    with serving() as server:
        yield server


@pytest.fixture
def given(tmp_path, cache, monkeypatch):
    """The words after the address: an embedding model to start from, and texts."""
    monkeypatch.setenv("KDCLI_TEACHER_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-server")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), "utf-8")
    start = own_files.embedder(tmp_path / "start")
    return ["--student", start, "--data", tmp_path / "texts.txt", "--to", "1x16", *QUICK]


def distil(server, given, *more):
    return ["distill", "--teacher", server.url, *given, *more]


@pytest.mark.parametrize(("interface", "to"), [("tei", "1x16"), ("openai", "static")])
def test_a_student_learns_the_vectors_as_it_would_from_a_file(interface, to, given, tmp_path):
    out, np_file = tmp_path / "out", tmp_path / "vectors.npy"
    given = [to if word == "1x16" else word for word in given]
    with serving(interface) as server:
        said = said_by(succeeds(*distil(server, given, "-o", out)))
    np.save(np_file, np.stack([vector(text) for text in TEXTS]).astype(np.float16))
    _, start, *words = given
    succeeds("distill", start, *words, "--teacher-vectors", np_file, "-o", tmp_path / "file")
    own_files.same_logs(tmp_path / "file", out, rel=1e-3, abs=1e-3)
    assert sorted(server.texts) == sorted(set(TEXTS))
    assert server.most <= 2
    assert max(map(len, server.asked)) == (6 if interface == "tei" else 8)
    # The key reaches the server, and nothing else.
    assert server.keys == {f"Bearer {KEY}"}
    everything = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()]
    assert not any(b"sk-" in content for content in [*everything, said.encode()])
    first, *_ = report_of(out).models
    assert (first.role, first.card.id, first.card.hidden) == ("teacher", server.url, WIDTH)
    assert "fake/model" in said


def test_a_second_run_asks_for_nothing_again(served, given, tmp_path):
    succeeds(*distil(served, given, "-o", tmp_path / "one"))
    count = len(served.texts)
    succeeds(*distil(served, given, "-o", tmp_path / "two"))
    assert len(served.texts) == count
    assert own_files.same_weights(tmp_path / "one", tmp_path / "two")


def test_failures_that_pass_are_repeated_and_a_request_that_is_too_large_is_halved(
    served, given, tmp_path
):
    def answer(number, texts):
        if number % 5 == 0:
            return 429, {"error": "overloaded"}, [("Retry-After", "0")]
        if number % 7 == 0:
            return 503, b""
        if number == 13:
            time.sleep(2)
        return (413, {"error": "batch"}) if len(texts) > 4 else None

    succeeds(*distil(served, given, "-o", tmp_path / "plain"))
    served.answer = answer
    quick = ["--set", "workload.server.timeout=1", "-o", tmp_path / "out"]
    for stored in (tmp_path / "cache").rglob("vectors"):
        stored.rename(stored.with_name("moved"))
    said = said_by(succeeds(*distil(served, given, *quick)))
    assert "asking again after 0 s" in said
    assert own_files.same_weights(tmp_path / "plain", tmp_path / "out")


def broken(body, status=200, headers=()):
    """Answer one text, which tells the width, and break afterwards."""
    return lambda number, texts: (status, body, headers) if len(texts) > 1 else None


def vectors_for(change):
    return lambda number, texts: (
        (200, change([vector(text).tolist() for text in texts])) if len(texts) > 1 else None
    )


FAILURES = {
    "busy for ever": (broken({"error": KEY}, 429, [("Retry-After", "0")]), 3, "429 after 1 repeat"),
    "failing for ever": (broken(b"", 500), 3, "status 500"),
    "slow": (lambda number, texts: time.sleep(len(texts) > 1), 3, "timed out"),
    "half a batch": (vectors_for(lambda v: v[: len(v) // 2]), 2, "3 vectors for 6 texts"),
    "NaN": (vectors_for(lambda v: [[None, *v[0][1:]], *v[1:]]), 2, "zero or not finite"),
    "zero": (vectors_for(lambda v: [[0.0] * WIDTH, *v[1:]]), 2, "zero or not finite"),
    "another width": (vectors_for(lambda v: [x[:-1] for x in v]), 2, "[31], and before with [32]"),
    "ragged": (vectors_for(lambda v: [v[0][:-1], *v[1:]]), 2, "one vector of numbers for each"),
    "objects": (broken({"data": [{"embedding": "?"}]}), 2, "one vector of numbers for each"),
    "a page": (broken(b"<html>log in</html>"), 2, "other content than JSON: '<html>log in</html>'"),
    "elsewhere": (
        broken(b"", 307, [("Location", "http://evil.example/embed?token=1")]),
        2,
        "redirects to http://evil.example, which is not followed",
    ),
    "no key": (broken({"error": f"wrong key {KEY}"}, 401), 2, "wrong key ***"),
    "too long": (lambda number, texts: (413, {"error": "512 tokens"}), 2, "--payload-limit"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_a_server_may_answer_is_one_message(failure, served, given, tmp_path):
    served.answer, code, message = FAILURES[failure]
    quick = ["--set", "workload.server.timeout=0.5", "--set", "workload.server.retries=1"]
    result = kdcli(*distil(served, given, *quick, "-o", tmp_path / "out"))
    assert (result.exit_code, result.stderr.count("error: ")) == (code, 1), result.output
    assert message in said_by(result)
    assert KEY not in result.output
    # Of a server that comes back, --resume asks for what is missing.
    assert (tmp_path / "out").exists() == (code == 3)


@pytest.mark.parametrize(
    ("interface", "changes", "sets", "message"),
    [
        ("openai", {"models": ["a", "b"]}, [], "2 models: a, b choose one with --set workload"),
        ("tei", {"info": {"model_type": {"reranker": {}}}}, [], "a model of type reranker"),
        ("none", {}, [], "no known interface"),
        ("openai", {}, ["workload.server.interface=tei"], "/info: status 404"),
        ("tei", {}, ["workload.server.model=x", "workload.server.interface=openai"], "status 404"),
    ],
)
def test_which_interface_and_model_must_be_clear(
    interface, changes, sets, message, given, tmp_path, monkeypatch
):
    words = [word for each in sets for word in ("--set", each)]
    with serving(interface) as server:
        vars(server).update(changes)
        if interface == "tei" and sets:
            server.answer = lambda number, texts: (404, b"")
            monkeypatch.setattr(server, "interface", "openai")
        assert message in refused(tmp_path, *distil(server, given, *words))


OPEN = ("distill", "{url}", "--student", "demo")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["distill", "{url}", "--to", "1x16"], "name an encoder to start from: --student MODEL"),
        ([*OPEN, "--method", "minilm"], "its teacher's states"),
        ([*OPEN, "--task", "sst2"], "its teacher's outputs"),
        (["distill", "demo", "--teacher", "{url}", "--to", "2x32"], "are two teachers"),
        (
            ["distill", "{url}", "--student", "demo", "--set", "loss.hidden_weight=1"],
            "token states",
        ),
        (
            ["distill", "{url}", "--student", "demo", "--set", "workload.router=true"],
            "only vectors",
        ),
        (["distill", "http://me:sk-word@127.0.0.1", "--student", "demo"], "KDCLI_TEACHER_API_KEY"),
        (["distill", "http://127.0.0.1?key=sk-word", "--student", "demo"], "after its path"),
        (["distill", "http://127.0.0.1:99999", "--student", "demo"], "no URL with a host"),
        (["evaluate", "{url}", "--task", "own"], "which gives vectors and no model"),
        (["compress", "{url}"], "which gives vectors and no model"),
    ],
)
def test_what_an_address_cannot_do_is_refused(words, message, served, given, tmp_path):
    data = [] if "sst2" in words else ["--data", tmp_path / "texts.txt"]
    said = refused(tmp_path / "start", *(word.format(url=served.url) for word in words), *data)
    assert message in said
    assert "sk-" not in said


def test_no_server_is_an_error_of_the_machine(given, tmp_path):
    result = kdcli("distill", f"http://127.0.0.1:{free_port()}", *given, "-o", tmp_path / "out")
    assert result.exit_code == 3
    assert "Connection refused start the server, or check the address" in said_by(result)


def test_a_dry_run_asks_for_no_texts(served, given, tmp_path):
    said = said_by(succeeds(*distil(served, given, "--dry-run")))
    assert "would be asked for the vectors of 320 texts" in said
    assert served.texts == []


def test_another_model_at_the_address_does_not_continue_a_run(served, given, tmp_path, monkeypatch):
    words = distil(served, given, "--set", "train.checkpoint_every=1", "-o", tmp_path / "out")
    assert own_files.interrupted(monkeypatch, "out", 2, *words).exit_code == 130
    served.models = ["other/model"]
    result = kdcli(*words, "--resume")
    assert result.exit_code == 2
    assert f"{served.url} has changed since the run" in said_by(result)


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_run_asks_only_for_what_is_missing(count, served, given, tmp_path):
    """Of two processes, one is killed in the middle of the teacher's pass."""
    words = [*distil(served, given), "--device", "cpu", "--processes", count]
    words += ["-o", tmp_path / "out", "--resume", "auto"]
    half, killed = threading.Event(), threading.Event()

    def answer(number, texts):
        if len(served.texts) > 3 * ROUND:
            half.set()
            killed.wait()

    served.answer = answer
    run = process(*words)
    assert half.wait(100)
    children = psutil.Process(run.pid).children() if count == 2 else [run]
    assert len(children) == count
    children[-1].kill()
    killed.set()
    run.communicate()
    assert run.returncode == (3 if count == 2 else -9)
    first, served.answer = len(served.texts), lambda number, texts: None
    served.asked.clear()
    run = process(*words)
    assert "shards are there" in run.communicate()[1]
    assert run.returncode == 0
    # A process computes one shard at a time.
    assert 320 - first <= len(served.texts) <= 320 - first + count * ROUND
    assert served.most <= 2
    (stored,) = (tmp_path / "cache" / "vectors").glob("*/logits.bin")
    cosines = (
        np.fromfile(stored, np.float16).reshape(-1, WIDTH) @ np.stack(list(map(vector, TEXTS))).T
    )
    assert cosines.max(1).min() > 0.999
    assert sorted(cosines.argmax(1)) == list(range(320))
