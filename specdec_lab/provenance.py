"""Where a result came from: versions, commit, machine, threads, its load. Nothing that names a host or a person."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import specdec_lab

ROOT = Path(specdec_lab.__file__).resolve().parents[1]


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Versions, commit, hardware and the machine's state just now; JSON-able and flat.

    load_average: the last minute's; busy_share: of all cores, over the last fifth of a second; ram_bytes: total.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "specdec_lab": specdec_lab.__version__,
        **commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "numpy")},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else "",
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "busy_share": psutil.cpu_percent(interval=0.2) / 100,
    }


@lru_cache(maxsize=1)
def commit() -> dict[str, Any]:
    """Commit of the checkout this package runs from and whether it has changes; "" and None outside of one."""
    nothing = {"commit": "", "dirty": None}
    try:
        top = _git("rev-parse", "--show-toplevel")
        if Path(top).resolve() != ROOT:  # a virtual environment inside someone else's checkout
            return nothing
        status = _git("status", "--porcelain", "--untracked-files=no", "--", "specdec_lab", "data")
        return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(status)}
    except (OSError, subprocess.SubprocessError):
        return nothing


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def cpu_name() -> str:
    """The CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
