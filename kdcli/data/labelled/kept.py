"""Keep the rows of a task in memory while a run reads them again and again."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import numpy as np

from kdcli.disk import cache_key

P = ParamSpec("P")
T = TypeVar("T")

_kept: ContextVar[dict[str, object] | None] = ContextVar("kept_rows", default=None)


@contextmanager
def keep_rows() -> Iterator[None]:
    """Read the same rows only once within this context. Later changes to the files have no
    effect."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def kept_rows(read: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that reads rows, so that `keep_rows` keeps what it returns.

    Calls with equal arguments share a result, which must not be changed. Functions among the
    arguments, such as `log`, do not count, and are not called for a result that was kept.
    """

    @functools.wraps(read)
    def read_or_reuse(*args: P.args, **kwargs: P.kwargs) -> T:
        kept = _kept.get()
        if kept is None:
            return read(*args, **kwargs)
        values = [_comparable(value) for value in args if not callable(value)]
        named = {k: _comparable(value) for k, value in kwargs.items() if not callable(value)}
        key = cache_key(read.__qualname__, repr(values), repr(named))
        if key not in kept:
            kept[key] = read(*args, **kwargs)
        result: T = kept[key]  # type: ignore[assignment]  # the key holds the function's name
        return result

    return read_or_reuse


def _comparable(value: object) -> object:
    """Return a value with a unique `repr`. An array is replaced by a hash of its bytes."""
    if isinstance(value, np.ndarray):
        return cache_key(value.tobytes().hex())
    if isinstance(value, Mapping):
        return {name: _comparable(each) for name, each in value.items()}
    return value
