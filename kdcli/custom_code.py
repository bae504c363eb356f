"""Whether code that comes with a model may run: decided once per command, read where models load.

A verb allows it for as long as it runs, if the user passed `--trust-remote-code`. The default is to
refuse, so a place that forgets to ask cannot run foreign code.
"""

from collections.abc import Iterator
from contextlib import contextmanager

CODE_FAILS = (
    "its code may need other packages or another version of transformers; what always works is a "
    "model that transformers has without --trust-remote-code"
)
"""The hint if code that comes with a model fails."""
_allowed = False


def custom_code_allowed() -> bool:
    """Return whether code that comes with a model may run now."""
    return _allowed


def code_errors(known: tuple[type[Exception], ...]) -> tuple[type[Exception], ...]:
    """Return the exceptions of a library, or any exception if code that comes with a model runs."""
    return (Exception,) if _allowed else known


@contextmanager
def custom_code(allowed: bool) -> Iterator[None]:
    """Allow or refuse custom code inside this context, in all threads of the process."""
    global _allowed
    before = _allowed
    _allowed = allowed
    try:
        yield
    finally:
        _allowed = before
