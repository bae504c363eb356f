"""Serve a page on this machine that shows what a model and its teacher say about texts.

The page is HTML without scripts, and the server is the standard library's: nothing that the user
types leaves the machine. Requests have to name the server by its own address, so that a page of
another site cannot read the answers.
"""

import ipaddress
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np

from kdcli.deploy.exported import EMBEDDING_KIND, is_export
from kdcli.deploy.predict import RERANK_KIND, AnswerSpan, Label, Labels, Predictor, Text
from kdcli.disk import REPORT_FILE, user_path
from kdcli.errors import KdcliError, MachineError, UsageError
from kdcli.messages import log, warn
from kdcli.models.files import CONFIG_FILE, file_of, model_files
from kdcli.models.load import root_of
from kdcli.report.finish import RunResult
from kdcli.report.front import template
from kdcli.report.text import bytes_of, short
from kdcli.types import Array
from kdcli.verbs.try_.settings import TryOptions

PAIR = "|||"
"""It separates the two texts of a pair."""
MAX_TEXTS = 50
RUNS = 3
"""How often a text is predicted, because other load on the machine makes single runs slow."""
MAX_CLASSES = 3
"""The number of classes of a text that are shown."""
HINTS = {
    EMBEDDING_KIND: "A text for each line. The other lines are sorted by their similarity to the "
    "first one.",
    RERANK_KIND: f"A query and a passage for each line, with {PAIR} between them.",
    "span": f"A question and its context for each line, with {PAIR} between them.",
}
"""Kind of model -> what to type."""
HINT = f"A text for each line. A pair has {PAIR} between its texts."


@dataclass(frozen=True)
class TriedModel:
    """A model on the page: its name, the size of its weights, and the model."""

    name: str
    size: str
    predictor: Predictor


@dataclass(frozen=True)
class Answer:
    """What a model says about a text.

    Attributes:
        headline: The answer.
        rows: Its parts with their probabilities or similarities.
        ms: The milliseconds that the model took for the text.
        compared: The parts that are equal if two models agree; none for scores.
    """

    headline: str
    rows: Sequence[tuple[str, float]]
    ms: float
    compared: tuple[str, ...]


@dataclass(frozen=True)
class Answers:
    """The answers of all models to a text. They are in the order of the models."""

    text: str
    by_model: Sequence[Answer]

    @property
    def differ(self) -> bool:
        """Whether the models give different answers. Scores are not compared."""
        return len({answer.compared for answer in self.by_model}) > 1


def answers(models: Sequence[TriedModel], typed: str) -> list[Answers]:
    """Return what models say about each line.

    Raises:
        UsageError: There are no lines or too many, or a model cannot read them.
    """
    texts = [line.strip() for line in typed.splitlines() if line.strip()]
    if not texts:
        raise UsageError("there is no text", "type a text for each line")
    if len(texts) > MAX_TEXTS:
        raise UsageError(f"there are {len(texts)} lines; at most {MAX_TEXTS} are allowed")
    if models[0].predictor.kind == EMBEDDING_KIND:
        if len(texts) < 2:
            raise UsageError("there is one text", "add the texts to compare it with")
        return [Answers(texts[0], [_neighbours(model.predictor, texts) for model in models])]
    return [Answers(text, [_answer(model.predictor, text) for model in models]) for text in texts]


def _timed(predictor: Predictor, text: Text) -> tuple[object, float]:
    """Return a prediction, and the milliseconds of the fastest of some runs."""
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        (prediction,) = predictor.predict([text])
        times.append(time.perf_counter() - begin)
    return prediction, 1000 * min(times)


def _answer(predictor: Predictor, text: str) -> Answer:
    parts = tuple(part.strip() for part in text.split(PAIR, 1))
    prediction, ms = _timed(predictor, parts if len(parts) > 1 else text)
    headline, rows = _headline_and_rows(prediction)
    compared = [headline]
    if isinstance(prediction, list):
        compared = [name for name, _ in rows]
    elif isinstance(prediction, float):
        compared = []
    return Answer(headline, rows, ms, tuple(compared))


def _headline_and_rows(prediction: object) -> tuple[str, list[tuple[str, float]]]:
    if isinstance(prediction, Label | Labels):
        names = [prediction.label] if isinstance(prediction, Label) else prediction.labels
        best = sorted(prediction.scores.items(), key=lambda pair: -pair[1])
        return ", ".join(names) or "no label", best[: max(MAX_CLASSES, len(names))]
    if isinstance(prediction, AnswerSpan):
        return prediction.text or "no answer", [("margin over no answer", prediction.margin)]
    if isinstance(prediction, list):
        rows = [(f"{entity.label}: {entity.text}", entity.score) for entity in prediction]
        return f"{len(rows)} entities" if len(rows) != 1 else "1 entity", rows
    return (f"{prediction:.4f}" if isinstance(prediction, float) else str(prediction)), []


def _neighbours(predictor: Predictor, texts: Sequence[str]) -> Answer:
    """Sort all texts but the first by their similarity to it."""

    def vectors() -> Iterator[tuple[Array, float]]:
        for text in texts:
            vector, ms = _timed(predictor, text)
            norm = float(np.linalg.norm(np.asarray(vector)))
            yield np.asarray(vector) / (norm or 1.0), ms

    units, times = zip(*vectors(), strict=True)
    similar = [float(unit @ units[0]) for unit in units[1:]]
    rows = sorted(zip(texts[1:], similar, strict=True), key=lambda pair: -pair[1])
    nearest = rows[0][0]
    return Answer(nearest, rows, sum(times) / len(times), (nearest,))


MAX_LETTERS = 60_000
"""Maximum length of the texts in a request."""
MAX_BYTES = 12 * MAX_LETTERS
"""Maximum size of a request. The form encodes a letter in at most twelve bytes."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'"


def serve(options: TryOptions) -> None:
    """Load the models, and serve the page until Ctrl-C.

    Raises:
        UsageError: The model cannot be loaded, or makes no predictions.
        MachineError: The address or the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    server_class = type("Server", (ThreadingHTTPServer,), {"address_family": family})
    page = Page([], options.host)
    try:
        # The port is taken before the models are loaded, which takes seconds.
        server = server_class((options.host, options.port), page.handler())
    except OSError as error:
        raise MachineError(
            f"--host {options.host} --port {options.port} cannot be used: {error.strerror}",
            "give another --port, or --port 0 for any that is free",
        ) from None
    with server:
        page.models = tried_models(options)
        host = f"[{options.host}]" if family == socket.AF_INET6 else options.host
        if not page.is_local:
            warn(f"everybody who reaches {host} can use the models")
        log(f"http://{host}:{server.server_port} shows the page; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def tried_models(options: TryOptions) -> list[TriedModel]:
    """Load the model and, if it is known, the one to compare it with.

    Raises:
        UsageError: The model cannot be loaded, or the two predict different things.
    """
    source, name, teacher = options.run, short(options.run), options.teacher
    folder = user_path(source)
    if (folder / REPORT_FILE).is_file():
        result = RunResult.read(folder)
        source, teacher = str(result.best), teacher or _teacher_of(result)
        if result.report.compression is not None:
            name = result.report.compression.chosen
        if not (Path(source) / CONFIG_FILE).is_file():
            models = [
                f"{options.run}/{path.parent.name}" for path in folder.glob(f"*/{CONFIG_FILE}")
            ]
            raise UsageError(
                f"{options.run} does not have one model", f"give one of {', '.join(sorted(models))}"
            )
    own = _tried(source, name)
    if teacher is None:
        log(f"{options.run} names no teacher; --teacher MODEL shows one next to it")
        return [own]
    try:
        other = _tried(teacher, f"{short(teacher)} (teacher)")
        if other.predictor.kind != own.predictor.kind:
            raise UsageError(
                f"{teacher} predicts {other.predictor.kind}, {source} {own.predictor.kind}"
            )
    except KdcliError as error:
        if options.teacher is not None:
            raise
        warn(f"the page shows no teacher: {error.message}")
        return [own]
    return [other, own]


def _teacher_of(result: RunResult) -> str | None:
    """Return the model that a run started from: its fine-tuned step, or the one of its recipe."""
    compression = result.report.compression
    for step in compression.steps if compression else ():
        if step.name == "teacher":
            return str(result.folder / step.folder)
    named = result.report.recipe.get("teacher") or result.report.recipe.get("model")
    return named if isinstance(named, str) else None


def _tried(source: str, name: str) -> TriedModel:
    predictor = Predictor.open(source)
    config = file_of(root_of(source), CONFIG_FILE, needed=True)
    assert config is not None
    runs = (".onnx", ".data", ".bin") if is_export(source) else (".safetensors",)
    files = [name for name in model_files(config.parent) if name.endswith(runs)]
    stats = [(config.parent / name).stat() for name in files]
    # A file may have two names.
    size = sum({stat.st_ino: stat.st_size for stat in stats}.values())
    return TriedModel(name, bytes_of(size), predictor)


@dataclass
class Page:
    """The page: its models, and the address that the server listens on."""

    models: Sequence[TriedModel]
    host: str

    def __post_init__(self) -> None:
        # Threads share the models.
        self.lock = threading.Lock()

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the page."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    def html(self, typed: str = "") -> tuple[HTTPStatus, str]:
        """Return the page with what the models say about the lines that a user typed."""
        shown: list[Answers] = []
        problem, status = "", HTTPStatus.OK
        if typed:
            try:
                with self.lock:
                    shown = answers(self.models, typed)
            except KdcliError as error:
                problem = ". ".join(filter(None, (error.message, error.hint)))
                status = HTTPStatus.BAD_REQUEST
        kind = self.models[-1].predictor.kind
        page = template("kdcli.verbs.try_", "page.html.jinja").render(
            models=self.models,
            typed=typed,
            answers=shown,
            problem=problem,
            hint=HINTS.get(kind, HINT),
            max_letters=MAX_LETTERS,
        )
        return status, page

    def allows(self, host: str) -> bool:
        """Whether a request names this machine. Other names may belong to somebody else."""
        if not self.is_local:
            return True
        with suppress(ValueError):
            return urlsplit(f"//{host}").hostname in ("localhost", self.host)
        return False

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """Return the class that answers requests."""
        page = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 30
            server_version, sys_version = "kdcli", ""

            def do_GET(self) -> None:
                if self._is_for_page():
                    self._send(*page.html())

            def do_POST(self) -> None:
                if not self._is_for_page():
                    return
                length = self.headers.get("Content-Length", "")
                if not length.isdecimal() or len(length) > 9 or int(length) > MAX_BYTES:
                    self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                    return
                body = self.rfile.read(int(length)).decode("utf-8", "replace")
                try:
                    typed = parse_qs(body, max_num_fields=1).get("texts", [""])[0]
                except ValueError:
                    self.send_error(HTTPStatus.BAD_REQUEST)
                    return
                self._send(*page.html(typed))

            def _is_for_page(self) -> bool:
                if not page.allows(self.headers.get("Host", "")):
                    self.send_error(HTTPStatus.FORBIDDEN)
                elif self.path != "/":
                    self.send_error(HTTPStatus.NOT_FOUND)
                else:
                    return True
                return False

            def _send(self, status: HTTPStatus, text: str) -> None:
                body = text.encode("utf-8", "replace")
                self.send_response(status)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Security-Policy", POLICY)
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing for a request."""

        return Handler
