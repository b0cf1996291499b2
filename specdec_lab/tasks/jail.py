"""The child's side of the sandbox: run as a script by sandbox.py, in two stages.

`confine` asks the kernel for limits and fences, then starts Python afresh, so that what it needed for that
(ctypes) is not in the process that runs untrusted code. `run` installs the audit hook and runs it.
The hook is a closure over constants: nothing it looks up can be replaced by the code it watches.
"""

import contextlib
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

SYSCALLS = {  # x86_64 numbers: processes and signals, sockets, ways round, attributes of files
    "processes": (56, 57, 58, 62, 101, 129, 200, 234, 297, 310, 311, 424, 434, 435, 438),
    "network": (41, 53),
    "kernel": (141, 165, 166, 203, 250, 272, 298, 304, 308, 319, 321, 323, 425),
    "attributes": (90, 92, 94, 132, 235, 260, 261, 268, 280),
}

PLAIN_EVENTS = """array.__new__ builtins.id builtins.input builtins.input/result compile exec function.__new__
    marshal.loads object.__delattr__ object.__setattr__ pickle.find_class sys._getframemodulename
    sys.excepthook sys.unraisablehook time.sleep"""
REFUSED_MODULES = """_ctypes _curses _dbm _gdbm _interpreters _multiprocessing _posixshmem _posixsubprocess
    _socket _testcapi _testinternalcapi _testmultiphase _tkinter _xxsubinterpreters _xxtestfuzz ctypes grp pwd
    readline spwd"""


def confine(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process and all it becomes. What the system does not offer is left out, without an error."""
    import resource

    limits = {
        resource.RLIMIT_CPU: cpu_seconds + 1,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_NPROC: 0,
    }
    for what, limit in limits.items():
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        soft = limit - 1 if what == resource.RLIMIT_CPU else limit  # SIGXCPU first, then SIGKILL
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (soft, limit))
    if sys.platform == "linux":
        with contextlib.suppress(ImportError, OSError):
            _fence()


def _fence() -> None:
    import ctypes

    libc = ctypes.CDLL(None)
    new_user, new_net, new_ipc = 0x10000000, 0x40000000, 0x08000000
    if libc.unshare(new_user | new_net | new_ipc) != 0:
        libc.unshare(new_net | new_ipc)
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: die with the parent
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: the two below ask for it
    _landlock(libc)
    if os.uname().machine == "x86_64":
        _seccomp(libc)


def _landlock(libc: Any) -> None:
    """Only the interpreter's own files can be opened, and only for reading (landlock(7), Linux 5.13)."""
    abi = libc.syscall(444, None, 0, 1)
    if abi < 1:
        return
    execute_read, read_dir = 0b101, 0b1000
    ruleset = libc.syscall(444, struct.pack("=Q", (1 << {1: 13, 2: 14}.get(abi, 15)) - 1), 8, 0)
    with open("/proc/self/maps") as maps:
        mapped = {os.path.dirname(line.split(maxsplit=5)[5].strip()) for line in maps if "/" in line}
    files = {__file__, os.path.join(sys.prefix, "pyvenv.cfg"), "/etc/ld.so.cache"}
    for path in {*sys.path, *mapped, *files}:
        if os.path.isabs(path) and os.path.exists(path):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            access = execute_read | (read_dir if os.path.isdir(path) else 0)
            libc.syscall(445, ruleset, 1, struct.pack("=Qi", access, fd), 0)
            os.close(fd)
    libc.syscall(446, ruleset, 0)
    os.close(ruleset)


def _seccomp(libc: Any) -> None:
    """The system calls of SYSCALLS fail with EPERM; those of other architectures kill (seccomp(2))."""
    import ctypes

    load, equal, at_least, leave = 0x20, 0x15, 0x35, 0x06
    kill, refuse, allow = 0x80000000, 0x00050001, 0x7FFF0000
    code = [(load, 0, 0, 4), (equal, 1, 0, 0xC000003E), (leave, 0, 0, kill)]
    code += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (leave, 0, 0, kill)]
    for number in sorted(sum(SYSCALLS.values(), ())):
        code += [(equal, 0, 1, number), (leave, 0, 0, refuse)]
    code += [(leave, 0, 0, allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    libc.prctl(22, 2, struct.pack("@HP", len(code), ctypes.addressof(program)), 0, 0)


class RefusedError(PermissionError, ValueError):
    """What the hook raises; a ValueError too, since the library expects one where there is no frame."""


def audit_hook(library: tuple[str, ...]) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook (PEP 578) that allows some events and reading below `library`; all else raises RefusedError."""
    plain = frozenset(PLAIN_EVENTS.split())
    modules = frozenset(REFUSED_MODULES.split())
    frames = frozenset(("tb_frame", "gi_frame", "cr_frame", "ag_frame"))
    paths = frozenset(("open", "os.listdir", "os.scandir"))
    write = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    text, kind, refused, no_module = str, type, RefusedError, ModuleNotFoundError

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in plain:
            return
        if event == "object.__getattr__" and args[1] not in frames:
            return
        if event == "import":
            if kind(args[0]) is text and args[0].rpartition(".")[2] not in modules:
                return
            raise no_module("a module the sandbox refuses")
        read = event in paths and (event != "open" or not args[2] & write)
        if read and kind(args[0]) is text and args[0].startswith(library) and ".." not in args[0]:
            return
        raise refused(f"the sandbox refuses {event}")

    return hook


def run() -> None:
    """Read (token, program, tests) from standard input; write "+", then the token or an error, to the report.

    The token is in this frame only, and the hook refuses every way to a frame: code under test can end
    early, print or exit as it likes, but not say "passed".
    """
    import json
    import types

    write, leave, execute, say = os.write, os._exit, exec, _describe
    report = os.dup(1)
    os.dup2(2, 1)
    with open(0, "rb", closefd=False) as stdin:
        token, program, tests = json.load(stdin)
    try:
        tests = compile(tests, "tests", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        write(report, b"the tests do not compile: " + say(error, ""))
        leave(1)
    module = types.ModuleType("reply")
    sys.modules["reply"] = sys.modules["__main__"] = module
    sys.path[:] = [path for path in sys.path if os.path.isdir(path)]
    sys.addaudithook(audit_hook(tuple(os.path.join(path, "") for path in sys.path) + tuple(sys.path)))
    write(report, b"+")
    part = "reply"
    try:
        execute(compile(program, part, "exec", dont_inherit=True), module.__dict__)
        part = "tests"
        execute(tests, module.__dict__)
    except BaseException as error:
        write(report, say(error, part))
        leave(1)
    write(report, token.encode())
    leave(0)


def _describe(error: BaseException, part: str) -> bytes:
    place = error.__traceback__.tb_next if error.__traceback__ else None
    line = f" (line {place.tb_lineno} of the {part})" if place else ""
    said = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{said}{line}".encode(errors="replace")[:300]


if __name__ == "__main__":
    if sys.argv[1:]:
        confine(*map(int, sys.argv[1:]))
        os.execv(sys.executable, [sys.executable, "-s", "-S", "-P", "-B", __file__])
    run()
