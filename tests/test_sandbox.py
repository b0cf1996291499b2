"""Hostile programs: none passes, none outlives its limit, none touches a file, a process or the network."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdec_lab.errors import SettingError, SpecdecError
from specdec_lab.tasks import jail, sandbox
from specdec_lab.tasks.sandbox import Limits, run_tests

SHORT = Limits(cpu_seconds=1, memory=128)
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's fences are Linux's")

FORGE = """
import os
for fd in range(3, 32):
    try:
        os.write(fd, {0!r})
    except OSError:
        pass
os._exit(0)
"""
TRACEBACK = """
try:
    1 / 0
except ZeroDivisionError as error:
    frame = error.__traceback__.tb_frame
"""
HOSTILE = {
    "loop": ("while True: pass", "no end within 1 s of CPU time"),
    "loop past the signal": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "was killed by SIGKILL",
    ),
    "endless output": ("while True: print('x' * 100_000)", "no end within 1 s of CPU time"),
    "memory at once": ("x = bytearray(1 << 34)", "MemoryError"),
    "memory by and by": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "MemoryError"),
    "recursion": ("def f(): return f()\nf()", "RecursionError"),
    "exception": ("raise KeyError('k')", "KeyError: 'k' (line 1 of the reply)"),
    "sys.exit": ("import sys\nsys.exit(0)", "SystemExit: 0"),
    "os._exit": ("import os\nos._exit(0)", "left with exit code 0"),
    "exit code of a pass": ("raise SystemExit", "SystemExit"),
    "fork": ("import os\nos.fork()", "refuses os.fork"),
    "exec": ("import os\nos.execv('/bin/true', ['true'])", "refuses os.exec"),
    "shell": ("import os\nos.system('true')", "refuses os.system"),
    "subprocess": ("import subprocess", "refuses"),
    "multiprocessing": ("import multiprocessing\nmultiprocessing.Process().start()", "refuses"),
    "ctypes": ("import ctypes", "refuses"),
    "socket": ("import socket", "refuses"),
    "url": ("import urllib.request", "refuses"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", "refuses os.kill"),
    "kill the group": ("import os\nos.killpg(0, 9)", "refuses os.killpg"),
    "list": ("import os\nos.listdir('/')", "refuses os.listdir"),
    "remove": ("import os\nos.remove('x')", "refuses os.remove"),
    "make a folder": ("import os\nos.mkdir('x')", "refuses os.mkdir"),
    "temporary file": ("import tempfile\ntempfile.TemporaryFile(dir='.')", "refuses open"),
    "raise limits": ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))", "refuses resource"),
    "password file": ("import pwd", "refuses"),
    "frames": ("import sys\nsys._getframe(1)", "refuses sys._getframe"),
    "traceback frames": (TRACEBACK, "refuses object.__getattr__"),
    "generator frames": ("(x for x in '').gi_frame", "refuses object.__getattr__"),
    "trace": ("import sys\nsys.settrace(print)", "refuses sys.settrace"),
    "garbage": ("import gc\ngc.get_objects()", "refuses gc.get_objects"),
    "crafted code": ("(lambda: 0).__code__.replace(co_code=b'')", "refuses code.__new__"),
    "forged token": (FORGE.format(b"0" * 32), "0000"),
    "forged flood": (FORGE.format(b"+" * 1_000_000), "++++"),
    "no syntax": ("def f(:", "SyntaxError"),
    "null byte": ("x = 1\0", "null bytes"),
    "half a character": ("x = '\ud800'", "UnicodeEncodeError"),
    "wrong": ("def f(x): return x", "AssertionError (line 2 of the tests)"),
}


@pytest.mark.parametrize(("program", "error"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_program_fails_for_its_own_reason(program: str, error: str) -> None:
    result = run_tests(program, "\nassert f(1) == 2", SHORT)
    assert not result.passed
    assert error in result.error or (error == "MemoryError" and result.error.startswith("was killed"))
    assert result.timed_out == (error == "no end within 1 s of CPU time")


def test_a_program_that_waits_ends_at_the_wall_clock_limit() -> None:
    result = run_tests("import time\ntime.sleep(600)", "", Limits(wall_seconds=0.5))
    assert (result.passed, result.error, result.timed_out) == (False, "no end within 0.5 s", True)
    assert result.seconds < 60


def test_a_good_program_passes_whatever_it_prints() -> None:
    library = "import collections, dataclasses, enum, functools, hashlib, heapq, itertools, math, random, re\n"
    named = "P = collections.namedtuple('P', 'x y')\nprint('x' * 50_000_000)\ndef f(x): return P(x, x).x + 1"
    result = run_tests(library + named, "assert f(1) == 2")
    assert result == sandbox.Result(True, "", False, result.seconds)


def test_an_end_before_the_last_test_is_no_pass() -> None:
    """A test that leaves the process quietly, here by a call into the reply, must not count."""
    for leave in ("raise SystemExit(0)", "import os; os._exit(0)"):
        assert not run_tests(f"def f(x):\n    {leave}", "f(1)\nassert True").passed


@pytest.mark.parametrize("path", ["Path('/etc/passwd')", "'/etc/passwd'", "b'/etc/passwd'", "up", "'x'", "0"])
def test_the_hook_cannot_be_talked_round(path: str) -> None:
    """Names the hook might look up are replaced, paths lie about themselves or climb out of the library."""
    program = f"""
import builtins, os
class Path(str):
    def startswith(self, *a): return True
up = os.path.dirname(os.__file__) + "/.." * 20 + "/etc/passwd"
builtins.isinstance = builtins.type = builtins.str = builtins.tuple = lambda *a: True
opened = False
try:
    open({path})
    opened = True
except PermissionError as error:
    reason = error.args
"""
    result = run_tests(program, "assert not opened; assert reason == ('the sandbox refuses open',), reason")
    assert result.passed, result.error


def test_files_stay_unread_and_unwritten(tmp_path: Path) -> None:
    secret, target = tmp_path / "secret", tmp_path / "target"
    secret.write_text("s3cret")
    assert "refuses open" in run_tests(f"print(open({str(secret)!r}).read())", "").error
    assert "refuses open" in run_tests(f"open({str(target)!r}, 'w').write('x')", "").error
    assert "refuses open" in run_tests("open('here', 'w').write('x')", "").error
    assert not target.exists()
    where = run_tests("import os\nraise ValueError(os.getcwd())", "").error
    assert "specdec-" in where
    assert not Path(where.split()[1]).exists()


def test_secrets_of_the_environment_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    result = run_tests("import os\nnames = set(os.environ)", "assert not any('SECRET' in n for n in names), names")
    assert result.passed, result.error


def test_tests_that_do_not_compile_are_the_users_error() -> None:
    with pytest.raises(SpecdecError, match="tests do not compile: SyntaxError"):
        run_tests("x = 1", "assert (")


def test_an_interpreter_that_does_not_start_is_no_failed_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "JAIL", "/no/such/script.py")
    with pytest.raises(SpecdecError, match="did not start: its Python left with exit code 2"):
        run_tests("x = 1", "assert x")


@pytest.mark.parametrize("bad", [{"cpu_seconds": 0}, {"wall_seconds": float("nan")}, {"memory": 1}])
def test_limits_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(SettingError, match=f"{next(iter(bad))} = "):
        Limits(**bad)  # type: ignore[arg-type]


def confined(program: str) -> str:
    """Run behind the kernel's limits and fences without the hook; returns what was raised or printed."""
    script = f"import runpy, ctypes\nmod = runpy.run_path({jail.__file__!r})\nmod['confine'](5, 1 << 29)\n"
    script += f"try:\n    exec({program!r})\nexcept OSError as error:\n    print(type(error).__name__)\n"
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def landlocked() -> bool:
    return int(confined("print(ctypes.CDLL(None).syscall(444, None, 0, 1))")) > 0


@ON_LINUX
def test_the_kernel_refuses_without_the_hook(tmp_path: Path) -> None:
    """The second fence: processes and sockets fail by seccomp, files by Landlock, where there are any."""
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    if os.uname().machine == "x86_64":
        for program in ("os.fork()", "os.kill(os.getppid(), 0)", "os.posix_spawn('/bin/true', ['x'], {})"):
            assert confined("import os\n" + program) == "PermissionError", program
        assert confined("import socket\nsocket.socket()") == "PermissionError"
    if not landlocked():
        pytest.skip("this kernel has no Landlock; the hook alone guards files here")
    for program in (
        f"open({str(secret)!r})",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "import os\nos.listdir('/')",
    ):
        assert confined(program) == "PermissionError", program
    assert confined("import os\nopen(os.__file__)\nprint('library')") == "library"


@ON_LINUX
def test_a_killed_parent_leaves_no_child_behind() -> None:
    script = """
import subprocess
from specdec_lab.tasks import sandbox
class Told(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        print(self.pid, flush=True)
subprocess.Popen = Told
sandbox.run_tests("import time; time.sleep(300)", "", sandbox.Limits(wall_seconds=300))
"""
    root = str(Path(sandbox.__file__).parents[2])
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdout is not None
    with parent, parent.stdout:
        child = int(parent.stdout.readline())
        time.sleep(1)
        assert _alive(child)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_network_is_not_reached() -> None:
    """A listener that would accept is not reached by any of the ways to a socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        for program in (
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}))",
            f"import _socket\n_socket.socket().connect(('127.0.0.1', {port}))",
            f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}')",
        ):
            assert "refuses" in run_tests(program, "").error
        with pytest.raises(TimeoutError):
            server.accept()
