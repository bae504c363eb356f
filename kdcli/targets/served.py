"""A teacher behind an address: a server that computes the vectors of texts over HTTP.

Two interfaces are known: `/embed` of text-embeddings-inference (TEI), and `/v1/embeddings` of
OpenAI, which vLLM, infinity, Ollama and llama.cpp offer too. A server reads texts, as
sentence-transformers does, so the rest of kdcli handles both in the same way: the tokens of
`ServedModel` are the bytes of a text.
"""

import base64
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Literal, Protocol
from urllib.parse import urlsplit

import numpy as np
import torch
import urllib3
from pydantic import Field
from torch import Tensor
from urllib3.exceptions import HTTPError

from kdcli.data.sources import LOG_SECONDS
from kdcli.disk import HASHES, cache_key
from kdcli.errors import MachineError, UsageError, one_line, shortened
from kdcli.messages import log
from kdcli.models.embedding_format import EmbeddingFormat
from kdcli.models.library_model import LibraryConfig, LibraryModel
from kdcli.models.model import Model
from kdcli.models.source import check_address
from kdcli.recipe.sections import Section
from kdcli.types import Array

API_KEY, OPENAI_KEY = "KDCLI_TEACHER_API_KEY", "OPENAI_API_KEY"
OPENAI = "https://api.openai.com"  # The only server that is sent OPENAI_API_KEY.
REPEATED = (408, 424, 429, 500, 502, 503, 504)
"""Answers after which a request is sent again. TEI answers 424 if its device fails."""
MAX_WAIT = 600.0  # Seconds. A longer Retry-After is cut.
CONNECT_SECONDS = 10.0
ROUNDS = 4  # Requests in a forward pass, as a multiple of the requests under way.
UNIT = 0.01  # The length of a normalised vector may differ from 1 by this.
MAX_QUOTED = 200  # Characters of an answer in a message.


class ServerSettings(Section):
    """`workload.server:`, how a teacher behind an address is asked for vectors."""

    interface: Literal["auto", "tei", "openai"] = "auto"
    """Interface: /embed of text-embeddings-inference, or /v1/embeddings of OpenAI."""
    model: str | None = None
    """Model of a server with several (default: the only one it lists)."""
    texts: int = Field(32, gt=0, le=2048)
    """Maximum number of texts in a request."""
    requests: int = Field(8, gt=0, le=1024)
    """Maximum number of requests under way, in all processes."""
    retries: int = Field(6, ge=0, le=100)
    """How often a request that fails is sent again."""
    timeout: float = Field(120, gt=0)
    """Seconds to wait for the answer to a request."""


class Interface(Protocol):
    """How a server is asked for vectors, and what it is.

    Attributes:
        path: The path of the requests, after the address.
        name: The interface and the model, for the log.
        identity: Everything known about the model, which the vectors depend on.
        max_texts: Maximum number of texts in a request; None if the server does not say.
    """

    @property
    def path(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> object: ...

    @property
    def max_texts(self) -> int | None: ...

    def request(self, texts: Sequence[str]) -> Mapping[str, object]:
        """Return the body of a request."""

    def vectors(self, answer: object) -> Sequence[object]:
        """Return the vectors in an answer, in the order of the texts.

        Raises:
            KeyError, TypeError, ValueError: The answer has another form.
        """


@dataclass(frozen=True)
class Tei:
    """text-embeddings-inference, as its `/info` describes it."""

    info: Mapping[str, object]
    path: str = "/embed"

    @property
    def name(self) -> str:
        length = self.info.get("max_input_length")
        cut = f", which cuts texts at {length} tokens" if length else ""
        return f"{self.info['model_id']} by text-embeddings-inference{cut}"

    @property
    def identity(self) -> object:
        return [self.info.get(key) for key in ("model_id", "model_sha", "model_type")]

    @property
    def max_texts(self) -> int | None:
        count = self.info.get("max_client_batch_size")
        return count if isinstance(count, int) and count > 0 else None

    def request(self, texts: Sequence[str]) -> Mapping[str, object]:
        return {"inputs": texts, "truncate": True, "normalize": True}

    def vectors(self, answer: object) -> Sequence[object]:
        if not isinstance(answer, list):
            raise TypeError("not a list")
        return answer


@dataclass(frozen=True)
class OpenAi:
    """The interface of OpenAI, and the name of a model."""

    model: str
    path: str
    max_texts: int | None = None

    @property
    def name(self) -> str:
        return f"{self.model} by the interface of OpenAI"

    @property
    def identity(self) -> object:
        return self.model

    def request(self, texts: Sequence[str]) -> Mapping[str, object]:
        return {"model": self.model, "input": texts, "encoding_format": "float"}

    def vectors(self, answer: object) -> Sequence[object]:
        if not isinstance(answer, dict):
            raise TypeError("not an object")
        by_index = {int(row["index"]): _decoded(row["embedding"]) for row in answer["data"]}
        # A number that is missing or there twice leaves a gap.
        return [by_index[n] for n in range(len(answer["data"]))]


def _decoded(vector: object) -> object:
    """Return a vector that may be little-endian float32 in base64, as clients of OpenAI ask for."""
    if not isinstance(vector, str):
        return vector
    return np.frombuffer(base64.b64decode(vector, validate=True), "<f4")


class _Repeats(urllib3.Retry):
    """Repeats of a request, with growing pauses or the server's own, which are logged."""

    logged = -LOG_SECONDS

    def parse_retry_after(self, retry_after: str) -> float:
        return min(super().parse_retry_after(retry_after), MAX_WAIT)

    def sleep(self, response: urllib3.BaseHTTPResponse | None = None) -> None:
        if (now := time.monotonic()) - _Repeats.logged > LOG_SECONDS:
            _Repeats.logged = now
            answer = "no answer" if response is None else f"status {response.status}"
            asked = None if response is None else self.get_retry_after(response)
            wait = self.get_backoff_time() if asked is None else asked
            log(f"the teacher's server: {answer}; asking again after {wait:.0f} s")
        super().sleep(response)


class EmbeddingServer:
    """A server that computes vectors.

    Attributes:
        address: Its address.
        settings: How it is asked.
        interface: Its interface and model.
        width: The number of components of its vectors.
        unit: Whether they have length 1.
    """

    def __init__(self, address: str, settings: ServerSettings) -> None:
        check_address(address)
        self.address, self.settings = address.rstrip("/"), settings
        self._key = _api_key(address)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # A request waits for a free connection, so this also limits the requests under way.
        self._pool = urllib3.PoolManager(maxsize=settings.requests, block=True, headers=headers)
        self.width = 0  # Until the first vector is there.
        self.interface: Interface = self._find_interface()
        (vector_E,) = self._part(["a"])
        self.width = len(vector_E)
        self.unit = abs(float(np.linalg.norm(vector_E)) - 1) < UNIT

    @property
    def identity(self) -> str:
        """A hash of what the vectors depend on."""
        return cache_key(self.address, type(self.interface).__name__, self.interface.identity)

    @property
    def texts_at_once(self) -> int:
        """Maximum number of texts in a request."""
        return min(self.settings.texts, self.interface.max_texts or self.settings.texts)

    @property
    def texts_under_way(self) -> int:
        """Number of texts that keep the server busy for a while."""
        return ROUNDS * self.settings.requests * self.texts_at_once

    def vectors(self, texts: Sequence[str]) -> Array:
        """Compute the vectors of texts, [N, E] float32.

        Raises:
            UsageError: The server refuses the texts, or answers with something else than a finite
                vector for each.
            MachineError: The server does not answer, after all repeats.
        """
        size, limit = self.texts_at_once, self.settings.requests
        parts = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
        if torch.distributed.is_initialized():
            limit = max(1, limit // torch.distributed.get_world_size())
        # Threads of this pool do not keep a process alive that ends while they wait.
        with ThreadPool(min(limit, len(parts))) as pool:
            return np.concatenate(list(pool.imap(self._part, parts)))

    def _find_interface(self) -> Interface:
        wanted, tried = self.settings.interface, list[str]()
        prefix = "" if self.address.endswith("/v1") else "/v1"
        if wanted == "tei" or (wanted == "auto" and prefix):
            info, problem = self._described("/info")
            if "model_id" in info:
                kind = info.get("model_type")
                if isinstance(kind, Mapping) and "embedding" not in kind:
                    raise UsageError(
                        f"{self.address} serves a model of type {', '.join(kind)}, and a text has "
                        "no vector of it",
                        "start the server with an embedding model",
                    )
                return Tei(info)
            tried.append(f"/info: {problem}")
        if wanted != "tei":
            if (model := self.settings.model) is not None:
                return OpenAi(model, f"{prefix}/embeddings")
            listed, problem = self._described(f"{prefix}/models")
            rows = listed.get("data")
            if isinstance(rows, list) and rows:
                names = [str(row.get("id")) for row in rows if isinstance(row, Mapping)]
                if len(names) == 1:
                    return OpenAi(names[0], f"{prefix}/embeddings")
                raise UsageError(
                    f"{self.address} has {len(names)} models: {shortened(', '.join(names), 500)}",
                    "choose one with --set workload.server.model=NAME",
                )
            tried.append(f"{prefix}/models: {problem}")
        raise UsageError(
            f"no known interface for vectors at {self.address} ({'; '.join(tried)})",
            "give the address of a server of text-embeddings-inference, or of one with "
            "/v1/embeddings; if it lists no models, add --set workload.server.model=NAME",
        )

    def _described(self, path: str) -> tuple[Mapping[str, object], str]:
        """Ask the server what it is.

        Returns:
            The answer, which is empty if the server has no JSON object at this path, and the reason
            for that.
        """
        response = self._send("GET", path)
        if response.status in (401, 403):
            raise self._refused(response, path)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status == 200 and isinstance(answer, dict):
            return answer, "another answer"
        return {}, "no JSON object" if response.status == 200 else f"status {response.status}"

    def _part(self, texts: Sequence[str]) -> Array:
        """Compute the vectors of the texts of one request, or of two halves if it is too large."""
        path = self.interface.path
        response = self._send("POST", path, self.interface.request(texts))
        if response.status == 413 and len(texts) > 1:
            half = len(texts) // 2
            return np.concatenate([self._part(texts[:half]), self._part(texts[half:])])
        if response.status != 200:
            raise self._refused(response, path, texts)
        try:
            answer = response.json()
        except ValueError:
            raise UsageError(
                f"{self.address}{path} answers with other content than JSON: "
                f"{self._quoted(response)}",
                "is this the address of a server for vectors?",
            ) from None
        return self._checked(answer, texts)

    def _checked(self, answer: object, texts: Sequence[str]) -> Array:
        """Return the vectors in an answer, [N, E] float32."""
        place = f"{self.address}{self.interface.path}"
        try:
            rows = self.interface.vectors(answer)
            vectors_NE = np.array(list(rows), dtype=np.float32)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UsageError(
                f"{place} answers with something else than one vector of numbers for each text",
                "is the interface right (--set workload.server.interface=tei or openai)?",
            ) from None
        if len(vectors_NE) != len(texts):
            raise UsageError(
                f"{place} answers with {len(vectors_NE)} vectors for {len(texts)} texts",
                "repeat the command with --resume; if it happens again, lower "
                "workload.server.texts",
            )
        width = self.width or vectors_NE.shape[-1]
        if vectors_NE.shape != (len(texts), width) or width == 0:
            raise UsageError(
                f"{place} answers with vectors of shape {list(vectors_NE.shape[1:])}, and before "
                f"with [{width}]",
                "give a server of one model, with one vector for a text",
            )
        lengths_N = np.linalg.norm(vectors_NE, axis=1)
        if len(wrong := np.flatnonzero(~np.isfinite(lengths_N) | (lengths_N == 0))):
            raise UsageError(
                f"{place}: the vector is zero or not finite, for the text "
                f"{texts[int(wrong[0])]!r:.60}",
                "serve the model in float32 or bfloat16, or remove the text",
            )
        return vectors_NE

    def _send(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> urllib3.BaseHTTPResponse:
        """Send a request, and repeat it if the server is busy or fails.

        Raises:
            UsageError: The server redirects to another address.
            MachineError: There is no answer, or a failure after all repeats.
        """
        settings, is_opened = self.settings, self.width > 0
        repeats = _Repeats(
            total=settings.retries,
            # A server that was never reached is not there, but a later gap may be a restart.
            connect=None if is_opened else 0,
            status_forcelist=REPEATED,
            allowed_methods=None,
            backoff_factor=0.5,
            backoff_max=60,
            backoff_jitter=0.5,
            raise_on_status=False,
        )
        connect = min(CONNECT_SECONDS, settings.timeout)
        timeout = urllib3.Timeout(connect=connect, read=settings.timeout)
        hint = "start the server, or check the address"
        if is_opened:
            hint = (
                "start the server again, and repeat the command with --resume: stored vectors are "
                "not asked for again; a busy server needs a lower workload.server.requests"
            )
        try:
            response = self._pool.request(
                method,
                self.address + path,
                json=body,
                redirect=False,
                retries=repeats,
                timeout=timeout,
            )
        except (HTTPError, UnicodeError) as error:
            reason = one_line(getattr(error, "reason", None) or error).rpartition(": ")[2]
            raise MachineError(
                f"no answer from the teacher at {self.address}{path}: {reason}", hint
            ) from None
        if response.status in REPEATED:
            raise MachineError(
                f"the teacher at {self.address}{path} answers with status {response.status} after "
                f"{settings.retries} repeats: {self._quoted(response)}",
                hint,
            )
        if 300 <= response.status < 400:
            target = urlsplit(response.headers.get("Location", ""))
            other = f"{target.scheme}://{target.hostname}" if target.hostname else "another path"
            raise UsageError(
                f"{self.address}{path} redirects to {other}, which is not followed",
                "give the address that answers itself",
            )
        return response

    def _refused(
        self, response: urllib3.BaseHTTPResponse, path: str, texts: Sequence[str] = ()
    ) -> UsageError:
        """Return the error for a request that the server refuses."""
        hint = "is the address right, and does the server have this model?"
        if response.status in (401, 403):
            key = "another key" if self._key else "a key"
            hint = f"set {API_KEY} to {key} for this server"
        elif response.status in (400, 413, 422):
            first = f" (the first text is {texts[0]!r:.60})" if texts else ""
            hint = (
                f"if a text is too long{first}, split it (workload.unit=sentence) or start the "
                "server with a higher limit: --payload-limit of text-embeddings-inference, "
                "--max-model-len of vLLM, --ctx-size and --ubatch-size of llama.cpp"
            )
        return UsageError(
            f"{self.address}{path} refuses the request with status {response.status}: "
            f"{self._quoted(response)}",
            hint,
        )

    def _quoted(self, response: urllib3.BaseHTTPResponse) -> str:
        """Return the beginning of an answer on one line, without the key."""
        text = " ".join(response.data.decode("utf-8", "replace").split())
        return repr(shortened(text.replace(self._key, "***") if self._key else text, MAX_QUOTED))


def _api_key(address: str) -> str:
    """Return the key for a server, or an empty string.

    Raises:
        UsageError: A key has characters that no HTTP header can have.
    """
    parts = urlsplit(address)
    names = [API_KEY, OPENAI_KEY] if f"{parts.scheme}://{parts.netloc}" == OPENAI else [API_KEY]
    name = next((name for name in names if os.environ.get(name)), names[0])
    key = os.environ.get(name, "").strip()
    if not re.fullmatch(r"[!-~]*", key):
        raise UsageError(
            f"{name} has characters that no HTTP header can have", "set it to the key alone"
        )
    return key


class ServedModel(LibraryModel):
    """Bytes of texts -> each text's vector, which a server computes."""

    def __init__(self, config: LibraryConfig, server: EmbeddingServer) -> None:
        super().__init__(config, None, server.address)
        self.server = server
        self.rows_at_once = server.texts_under_way

    def encode(self, texts: list[str], role: str) -> Tensor:
        return torch.from_numpy(self.server.vectors(texts))


def load_served(address: str, settings: ServerSettings) -> tuple[Model, EmbeddingFormat]:
    """Open the teacher behind an address.

    Args:
        address: The address of the server.
        settings: How it is asked.

    Raises:
        UsageError: The server has no known interface, refuses requests, or has several models.
        MachineError: The server does not answer.
    """
    server = EmbeddingServer(address, settings)
    HASHES[address] = server.identity
    config = LibraryConfig(hidden_size=server.width, digest=server.identity)
    model = ServedModel(config, server).eval()
    config.vocab_size = len(model.bytes)
    note = f"{server.interface.name}; texts are sent without a prompt"
    fmt = EmbeddingFormat("cls", normalize=server.unit, library=True)
    return Model(model, model.bytes, address, note), fmt
