"""Running untrusted code (a model's reply) against its tests, in a process of its own.

What holds everywhere (POSIX): a fresh Python in its own process group, killed as a whole at its end;
limits on CPU time, memory, open files and file size; an empty environment and folder; output discarded;
an audit hook (PEP 578) that refuses files outside the standard library, all writing, processes, signals,
sockets, ctypes, and stack frames; a random token that only code running after the last test can report.
Linux adds, where the kernel permits: no network, no capabilities (namespaces), no file access beyond the
interpreter's own (Landlock), no new process, signal or socket (seccomp; x86_64 only).

What it is not: a boundary against a determined attacker. The hook alone, where the kernel's fences are
missing, can be got round by corrupting the interpreter's memory; `os.stat` tells names and sizes of files;
and as in HumanEval's own harness, code shares a process with its tests, so it may cheat them (an object equal
to everything). It contains a language model's mistakes, not an exploit. Only the standard library is there.
"""

import contextlib
import hmac
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from specdec_lab.errors import SpecdecError, require

JAIL = Path(__file__).resolve().with_name("jail.py")
START_SECONDS = 60.0
REPORT_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """cpu_seconds decides for a program that computes, so that a busy machine changes no score; wall_seconds, from
    the program's start, for one that waits; memory: address space in MiB."""

    cpu_seconds: int = 10
    wall_seconds: float = 60.0
    memory: int = 512

    def __post_init__(self) -> None:
        whole = isinstance(self.cpu_seconds, int) and isinstance(self.memory, int)
        require("cpu_seconds", self.cpu_seconds, whole and 1 <= self.cpu_seconds <= 3600, "1 … 3600, whole")
        require("wall_seconds", self.wall_seconds, 0 < self.wall_seconds <= 36000, "more than 0, to 36000")
        require("memory", self.memory, whole and 64 <= self.memory <= 1 << 20, "64 … 1048576 MiB, whole")


@dataclass(frozen=True)
class Result:
    """passed: all tests ran to their end; error: why not, else ""; seconds: wall-clock, start included."""

    passed: bool
    error: str
    timed_out: bool
    seconds: float


DEFAULT = Limits()


def run_tests(program: str, tests: str, limits: Limits = DEFAULT) -> Result:
    """Run `program`, then `tests` in the same namespace; passed when neither raises or ends early.

    Raises SpecdecError where the sandbox cannot start or the tests do not compile, whatever the program.
    """
    if os.name != "posix":
        raise SpecdecError("code can be scored on Linux and macOS only: the sandbox needs POSIX limits")
    token = secrets.token_hex(16)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", JAIL, str(limits.cpu_seconds), str(limits.memory << 20)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
            start_new_session=True,
        )
        try:
            report, timed_out = _talk(child, json.dumps([token, program, tests]).encode(), limits.wall_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
    seconds = time.perf_counter() - start
    if not report.startswith(b"+"):
        reason = report[:300].decode(errors="replace") or f"its Python {_ending(code)} after {seconds:.1f} s"
        raise SpecdecError(f"the sandbox did not start: {reason}")
    if hmac.compare_digest(report[1:], token.encode()):
        return Result(True, "", False, seconds)
    if code == -signal.SIGXCPU:
        return Result(False, f"no end within {limits.cpu_seconds} s of CPU time", True, seconds)
    if timed_out:
        return Result(False, f"no end within {limits.wall_seconds:g} s", True, seconds)
    return Result(False, report[1:300].decode(errors="replace") or _ending(code), False, seconds)


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _talk(child: subprocess.Popen[bytes], message: bytes, seconds: float) -> tuple[bytes, bool]:
    """Send the message, read the report until its end, size limit or time limit -> (report, timed out)."""
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(message)
    report, deadline = b"", time.monotonic() + START_SECONDS
    with child.stdout, selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while len(report) <= REPORT_BYTES:
            if not ready.select(deadline - time.monotonic()):
                return report, True
            chunk = os.read(child.stdout.fileno(), REPORT_BYTES)
            if not chunk:
                break
            if not report:
                deadline = time.monotonic() + seconds
            report += chunk
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return report, True
    return report, False
