"""Configure the libraries before they are imported."""

import logging
import os
import re
from functools import partial

RETRIES = re.compile(
    r"thrown while requesting|Retrying in|before retry|Trying to resume|Max retries exceeded"
)


def prepare_libraries(quiet: bool, verbose: bool, *, is_command: bool = True) -> None:
    """Silence the libraries, and choose how threads wait and whether freed memory is kept.

    Call this before importing them.

    Args:
        quiet: Whether to print only results and errors.
        verbose: Whether to print the libraries' messages as well.
        is_command: Whether the command line calls this, and not a program.
    """
    from kdcli.engine.allocator import keep_freed_memory
    from kdcli.engine.threads import choose_spin_count

    choose_spin_count()
    if is_command:
        # The memory of another program is its own.
        keep_freed_memory()
    for name in ("utils._http", "file_download"):
        # It is always the same object, so a second command in this process adds no second filter.
        log = logging.getLogger(f"huggingface_hub.{name}")
        (log.removeFilter if verbose else log.addFilter)(_HUB_RETRIES)
    _HUB_RETRIES.is_logged = False
    if not verbose:
        # If one of several processes exits, the other processes' sockets would log a traceback.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from kdcli.cli.hub_client import watch_hub
    from kdcli.engine import processes
    from kdcli.engine.progress import Progress

    processes.prepare_child = partial(prepare_libraries, quiet, verbose)
    Progress.console.quiet = quiet
    Progress.attach(is_command=is_command)
    watch_hub()


class _HubRetries(logging.Filter):
    """Logs one line for all retries, where the hub client logs two lines for each retry."""

    is_logged = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop a message about a retry."""
        if not RETRIES.search(record.getMessage()):
            return True
        if not self.is_logged:
            from kdcli.messages import log

            self.is_logged = True
            log("waiting for the hub, which does not answer")
        return False


_HUB_RETRIES = _HubRetries()
