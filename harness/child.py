"""A process of its own for measuring: where it crashes, its caller lives on and starts another.

A lab is what the process holds: an object with the methods that the caller names. It is given as "module:name" and
made inside the process, so that the caller needs neither a CUDA context nor what a lab imports.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from harness.measure import DeadContext
from harness.record import Row


class Died(RuntimeError):
    """The process ended, or did not answer in time; the message says how."""


class DeadCard(RuntimeError):
    """The card gave up under the process, which is gone; `rows` hold what was found before and why."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__("the CUDA context died")
        self.rows = rows


class Child:
    """One process with a lab; started by the first question and, after a death, by the next one."""

    def __init__(self, lab: str) -> None:
        self.lab = lab
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None

    def ask(self, method: str, *arguments: Any, limit_s: float | None = None) -> Any:
        """What the lab's method returns.

        Raises Died, DeadCard, or RuntimeError with the text of what the method raised; after the first two the next
        question meets a clean process.
        """
        connection = self._start()
        try:
            connection.send((method, arguments))
            if not connection.poll(limit_s):
                self.close()
                raise Died(f"no answer in {limit_s:.0f} s")
            kind, answer = connection.recv()
        except (EOFError, OSError) as error:
            raise Died(self._ending()) from error
        if kind == "dead":
            self.close()
            raise DeadCard(answer)
        if kind == "raised":
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        if self.connection is not None:
            self.connection.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = self.connection = None

    def _start(self) -> Connection:
        if self.connection is not None:
            return self.connection
        ours, theirs = socket.socketpair()
        # The lab may live where only this process looks.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "harness.child", str(theirs.fileno()), self.lab]
        self.process = subprocess.Popen(
            command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        return self.connection

    def _ending(self) -> str:
        """How the process ended; it is gone afterwards."""
        process = self.process
        assert process is not None
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is None:
            return "its process stopped answering"
        return f"its process died: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def serve(connection: Connection, lab: str) -> None:
    """Answers questions until the other side is gone."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    module, name = lab.split(":")
    made = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            made = made or getattr(import_module(module), name)()
            connection.send(("done", getattr(made, method)(*arguments)))
        except DeadContext as error:
            connection.send(("dead", error.rows))
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            connection.send(("raised", f"{type(error).__name__}: {first}"[:500]))


def _end_with_parent(parent: int) -> None:
    """A killed worker's child would go on measuring, beside the worker's successor on the same card."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2])
