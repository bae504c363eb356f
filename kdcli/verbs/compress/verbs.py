"""Verbs that another verb runs, each a process of its own.

Importing torch and transformers takes longer than many a step. So one process imports them once and forks for each
verb: `kdcli.verbs.compress.serve`.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection

from kdcli.engine.processes import wait_for
from kdcli.errors import MachineError, Stopped


class Forked:
    """A verb under way, with the methods of `subprocess.Popen` that `wait_for` uses."""

    returncode: int | None = None

    def __init__(self, server: Connection) -> None:
        self._server, self._pid = server, int(server.recv_bytes())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            try:
                self.returncode = int(self._server.recv_bytes())
            except EOFError:
                self.returncode = -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Verbs:
    """Runs verbs one after another; `close` ends the process that forks them, which the first one starts."""

    _server: Connection | None = None
    _process: subprocess.Popen[bytes]

    def _connected(self) -> Connection:
        if self._server is None:
            self._server, theirs = Pipe()
            end = theirs.fileno()
            # -P: a file torch.py or kdcli.py in the working directory must not shadow a module.
            command = [sys.executable, "-P", "-m", "kdcli.verbs.compress.serve", str(end)]
            self._process = subprocess.Popen(command, pass_fds=[end])
            theirs.close()
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            self._process.wait()

    def run(
        self, arguments: Sequence[str], *, until: Callable[[], bool] | None = None
    ) -> tuple[int, str, str]:
        """Run `kdcli ARGUMENTS`; returns its exit code, its standard output and the first line of its error. Its
        standard error is shown. Once `until` is true it is asked to stop with a checkpoint. Signals are forwarded.
        Raises MachineError: another signal ended the process."""
        found = list[str]()

        def show() -> None:
            for line in errors:
                sys.stderr.write(text := line.decode("utf-8", "replace"))
                sys.stderr.flush()
                found.extend(
                    [text.removeprefix("error: ").strip()] if text.startswith("error: ") else []
                )

        reader, writer = os.pipe()
        with tempfile.TemporaryFile() as output, open(reader, "rb") as errors:
            try:
                child = self._fork(arguments, output.fileno(), writer)
            finally:
                os.close(writer)
            shower = threading.Thread(target=show, daemon=True)
            shower.start()
            try:
                code = wait_for([child], until)
            except MachineError:
                # It was stopped before it could say so itself.
                if child.returncode not in (-signal.SIGTERM, -signal.SIGINT):
                    raise
                code = Stopped.exit_code
            shower.join()
            output.seek(0)
            return code, output.read().decode("utf-8", "replace"), (found or [""])[0]

    def _fork(self, arguments: Sequence[str], *streams: int) -> Forked:
        server = self._connected()
        try:
            server.send_bytes(json.dumps(list(arguments)).encode())
            for stream in streams:
                reduction.send_handle(server, stream, None)
            return Forked(server)
        except (EOFError, OSError) as error:
            self.close()
            raise MachineError(
                "the process that starts verbs was ended", "often for lack of memory"
            ) from error
