"""The process that imports torch and transformers once and forks for each verb of `kdcli.verbs.compress.verbs`.

It computes nothing itself, so it has no threads that a fork could lose.
"""

import contextlib
import json
import os
import signal
import sys
from multiprocessing import reduction
from multiprocessing.connection import Connection

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(parent: Connection) -> None:
    """Fork a verb for each list of arguments and send its process id and its exit code, until the parent closes."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # Not on macOS, whose libraries do not survive a fork.
        import kdcli.verbs.compress.run  # noqa: F401
    while True:
        try:
            arguments = json.loads(parent.recv_bytes())
        except EOFError:
            return
        streams = [reduction.recv_handle(parent) for _ in range(2)]
        # No signal is lost between the fork and the child's own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        pid = os.fork()
        if not pid:
            parent.close()
            for descriptor, stream in enumerate(streams, 1):
                os.dup2(stream, descriptor)
                os.close(stream)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            from kdcli.cli import main

            sys.argv = ["kdcli", *arguments]
            sys.exit(main())  # type: ignore[func-returns-value]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(BrokenPipeError):
            parent.send_bytes(str(pid).encode())
            parent.send_bytes(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
