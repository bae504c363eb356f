"""Give up on a hub that does not answer after one request, instead of retrying for minutes."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import OfflineModeIsEnabled

# Use the client's own import, because versions of the client use different libraries.
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]
from huggingface_hub.utils._http import default_client_factory


class HubClient(httpx.Client):
    """The HTTP client of `huggingface_hub`, which makes one attempt until the hub has answered.

    The first request waits for HF_HUB_ETAG_TIMEOUT seconds, 10 by default. If it fails, every other
    request fails at once, and the libraries use their caches. After an answer, the hub is known to
    be reachable, and failed requests are retried.
    """

    has_answered = False
    failure: str | None = None

    def send(self, request: Any, **options: Any) -> Any:
        """Send a request. Raises OfflineModeIsEnabled if the hub does not answer."""
        state, send = HubClient, super().send
        if state.has_answered:
            return send(request, **options)
        if state.failure is not None:
            raise OfflineModeIsEnabled(state.failure)
        seconds, given = constants.HF_HUB_ETAG_TIMEOUT, request.extensions.get("timeout", {})
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
        request.extensions["timeout"] = timeouts
        try:
            response = _within(seconds, lambda: send(request, **options))
        except (TimeoutError, httpx.TimeoutException, httpx.NetworkError) as error:
            where = f"{request.url.scheme}://{request.url.netloc.decode()}"
            from kdcli.engine.progress import Progress

            state.failure = f"{where} does not answer ({str(error) or type(error).__name__})"
            Progress.log(
                f"{state.failure}; only files in the cache are used, as with HF_HUB_OFFLINE=1"
            )
            raise OfflineModeIsEnabled(state.failure) from None
        state.has_answered = True
        request.extensions["timeout"] = given
        return response


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what a function returns. Raises TimeoutError if it takes longer.

    The timeouts of a request limit neither the look-up of a name nor the sum over the addresses of
    a host, so the call runs in a thread, which ends with the process.
    """
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:  # noqa: BLE001  # It is raised in the caller's thread.
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result


def watch_hub() -> None:
    """Make `huggingface_hub` use `HubClient`, and forget whether the hub answered before."""
    HubClient.has_answered, HubClient.failure = False, None
    with default_client_factory() as settings:
        hooks = settings.event_hooks
    set_client_factory(lambda: HubClient(event_hooks=hooks, follow_redirects=True, timeout=None))
