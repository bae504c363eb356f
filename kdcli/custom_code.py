"""Whether code that comes with a model may run: decided once per command, read where models load.

A verb allows it for as long as it runs, if the user passed `--trust-remote-code`. The default is to
refuse, so a place that forgets to ask cannot run foreign code.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_allowed = False


def custom_code_allowed() -> bool:
    """Return whether code that comes with a model may run now."""
    return _allowed


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
