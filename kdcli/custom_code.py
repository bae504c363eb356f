"""Whether code that comes with a model may run: decided once per command, read where models load.

A verb allows it for as long as it runs, if the user passed `--trust-remote-code`. The default is to
refuse, so a place that forgets to ask cannot run foreign code.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from kdcli.errors import KdcliError, UsageError, first_line, raise_machine_error

PACKAGE = "transformers_modules"
"""The package in which transformers puts code that comes with models."""
CODE_FAILS = (
    "its code may need other packages or another version of transformers; what always works is a "
    "model that transformers has without --trust-remote-code"
)
"""The hint if code that comes with a model fails."""
NETWORKS = "transformers.models."
"""The package of transformers' own networks and tokenizers."""
NETWORK_FAILS = (
    "it may need longer texts or other inputs than text; if it fails on other data too, use a "
    "model of another type"
)
_allowed = False


def custom_code_allowed() -> bool:
    """Return whether code that comes with a model may run now."""
    return _allowed


def code_errors(known: tuple[type[Exception], ...]) -> tuple[type[Exception], ...]:
    """Return the exceptions of a library, or any exception if code that comes with a model runs."""
    return (Exception,) if _allowed else known


def failure_of_code(error: BaseException) -> str:
    """Return the line of code that comes with a model, and what it raised.

    Empty if the error is not of such code.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == PACKAGE:
            reason = f"{type(error).__name__}: {first_line(error)}"
            return f"{frame.f_code.co_filename}, line {line}: {reason}"
        if package == "kdcli":
            break
    return ""


def raise_error_of_code(error: BaseException) -> None:
    """Raise an error of the machine again, and a UsageError if a model's own code failed."""
    raise_machine_error(error)
    if failure := failure_of_code(error):
        raise UsageError(f"the model's own code fails: {failure}", CODE_FAILS) from error


def _raise_error_of_network(error: BaseException) -> None:
    """Raise a UsageError, with the model's name, if a network or tokenizer of transformers failed.

    An error in code that the network calls is the network's own, unless that code is kdcli's.
    """
    failed: object = None
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = f"{frame.f_globals.get('__name__')}."
        if module.startswith("kdcli."):
            break
        if module.startswith(NETWORKS):
            failed = frame.f_locals.get("self", failed)
    if failed is not None:
        name, kind = getattr(failed, "name_or_path", ""), type(failed).__name__
        model = f"{name}, a {kind}," if name else f"a {kind}"
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{model} fails: {reason}", NETWORK_FAILS) from error


@contextmanager
def custom_code(allowed: bool) -> Iterator[None]:
    """Allow or refuse custom code inside this context, in all threads of the process.

    Raises UsageError if such code fails, or if a network of transformers does.
    """
    global _allowed
    before = _allowed
    _allowed = allowed
    try:
        yield
    except KdcliError:
        raise
    except (Exception, SystemExit) as error:
        raise_error_of_code(error)
        _raise_error_of_network(error)
        raise
    finally:
        _allowed = before
