"""Give up on a hub that does not answer after one request, instead of retrying for minutes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.errors import OfflineModeIsEnabled

# Use the client's own import, because versions of the client use different libraries.
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

AnswerT = TypeVar("AnswerT")


class HubClient(httpx.Client):
    """The HTTP client of `huggingface_hub`, which makes one attempt until the hub has answered.

    The first request waits for HF_HUB_ETAG_TIMEOUT seconds, 10 by default. If it fails, all other
    requests fail at once, and the libraries use their caches. After an answer, the hub is known to
    be reachable, and failed requests are retried.
    """

    has_answered = False
    failure: str | None = None

    def send(self, request: Any, **options: Any) -> Any:
        """Send a request.

        Raises:
            OfflineModeIsEnabled: The hub does not answer.
        """
        state, send = HubClient, super().send
        if state.has_answered:
            return send(request, **options)
        if state.failure is not None:
            raise OfflineModeIsEnabled(state.failure)
        seconds, original = constants.HF_HUB_ETAG_TIMEOUT, request.extensions.get("timeout", {})
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
        request.extensions["timeout"] = timeouts
        try:
            response = _within(seconds, lambda: send(request, **options))
        except (TimeoutError, httpx.TimeoutException, httpx.NetworkError) as error:
            where = f"{request.url.scheme}://{request.url.netloc.decode()}"
            from kdcli.messages import log

            state.failure = f"{where} does not answer ({str(error) or type(error).__name__})"
            log(f"{state.failure}; only files in the cache are used, as with HF_HUB_OFFLINE=1")
            raise OfflineModeIsEnabled(state.failure) from None
        state.has_answered = True
        request.extensions["timeout"] = original
        return response


def _within(seconds: float, call: Callable[[], AnswerT]) -> AnswerT:
    """Return the result of a function.

    A request's own timeouts limit neither the look-up of a host's name nor the sum over its
    addresses. The call therefore runs in a thread, which ends with the process.

    Raises:
        TimeoutError: The function takes longer.
    """
    result: Future[AnswerT] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001  # It is raised in the caller's thread.
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(timeout=seconds)
    except TimeoutError:
        if result.done():
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def watch_hub() -> None:
    """Make `huggingface_hub` use `HubClient`, and forget whether the hub has answered."""
    HubClient.has_answered, HubClient.failure = False, None
    hooks = get_session().event_hooks
    set_client_factory(lambda: HubClient(event_hooks=hooks, follow_redirects=True, timeout=None))
