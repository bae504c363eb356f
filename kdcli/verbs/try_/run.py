"""Serve a page on this machine that shows what a model and its teacher say about texts.

The page is HTML without scripts, and the server is the standard library's: nothing that the user
types leaves the machine. Requests have to name the server by its own address, so that a page of
another site cannot read the answers.
"""

import ipaddress
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kdcli.deploy.exported import is_export
from kdcli.deploy.predict import Predictor
from kdcli.disk import REPORT_FILE, user_path
from kdcli.engine.progress import Progress
from kdcli.errors import KdcliError, MachineError, UsageError
from kdcli.models.files import CONFIG_FILE, file_of, model_files
from kdcli.models.load import root_of
from kdcli.report.finish import RunResult
from kdcli.report.front import template
from kdcli.report.text import bytes_of, short
from kdcli.verbs.try_.answers import HINT, HINTS, Answers, TriedModel, answers
from kdcli.verbs.try_.settings import TryOptions

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
    with server, suppress(KeyboardInterrupt):
        page.models = tried_models(options)
        host = f"[{options.host}]" if family == socket.AF_INET6 else options.host
        if not page.is_local:
            Progress.warn(f"everybody who reaches {host} can use the models")
        Progress.log(f"http://{host}:{server.server_port} shows the page; Ctrl-C ends it")
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
        Progress.log(f"{options.run} names no teacher; --teacher MODEL shows one next to it")
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
        Progress.warn(f"the page shows no teacher: {error.message}")
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
