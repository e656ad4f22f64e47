"""A lab without a GPU: its times are made up, and a case's name says what befalls its process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from fakes import CEILINGS, STAMP, made_row

from harness.measure import DeadContext
from kernels import UnsupportedCase


class FakeLab:
    """The card's UUID is what CUDA_VISIBLE_DEVICES says.

    FAKE_LAB is a folder: each case's file there has a line for each time that it was begun, and the tests plan with
    "other", "new" and "slow" which card is of another kind, has another driver, or takes twice as long.
    """

    def __init__(self):
        self.name = os.environ["CUDA_VISIBLE_DEVICES"]
        self.log = Path(os.environ["FAKE_LAB"])

    def identity(self):
        kind = "Other" if self.planned("other") else "Test"
        return {"gpu": f"NVIDIA {kind}", "uuid": self.name, "host": "here"}

    def stamps(self, families, allow_busy):
        software = {"driver": "2"} if self.planned("new") else {}
        return {family: {**STAMP, "gpu": self.identity()["gpu"], **software} for family in families}

    def ceilings(self):
        return {**CEILINGS, "card": self.name}, [{"kind": "copy"}]

    def prebuild(self, tasks, jobs):
        return {"built": len(tasks), "failed": 0, "lost": 0}

    def measure(self, ceilings, op, case, dtype, backends):
        assert ceilings["card"] == self.name
        begun = self.begin(case)
        if case.startswith("exit"):
            os._exit(3)
        if case.startswith("segv"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if case.startswith("dead") and "triton" in backends:
            raise DeadContext([made_row(op, case, "triton", [1.0]) | {"status": "failed", "reason": "illegal access"}])
        if case.startswith("raise"):
            raise UnsupportedCase("planted")
        if case.startswith("killer") or (case.startswith("killed") and begun == 1):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(30)
        if case.startswith("waits"):
            while not (self.log / "go").exists():
                time.sleep(0.02)
        slow = 2.0 if self.planned("slow") else 1.0
        # The probe comes alone first, and then on every card at once.
        wall = 150.0 if self.planned("crowded") and begun > 1 else 100.0
        return [made_row(op, case, b, [slow, 1.01 * slow], dtype=dtype, wall=wall, pid=os.getpid()) for b in backends]

    def planned(self, what):
        plan = self.log / what
        return plan.exists() and self.name in plan.read_text().split()

    def begin(self, case):
        """How often this case was begun, on any card."""
        with (self.log / case).open("a") as file:
            file.write(f"{self.name}\n")
        return len((self.log / case).read_text().split())
