"""Running a notebook with parameters, by papermill and with the interpreter that runs this. It knows no results."""

import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from specdec_lab.errors import DataError, SpecdecError, UnknownNameError
from specdec_lab.places import from_root, project_root

__all__ = ["OwnKernel", "find_notebook", "from_root", "notebooks", "parameters_of", "project_root", "run_notebook"]
TAG = "parameters"


def notebooks(folder: Path | None = None) -> dict[str, Path]:
    """The project's notebooks by name, without .ipynb."""
    folder = folder or project_root() / "notebooks"
    return {path.stem: path for path in sorted(folder.glob("[!.]*.ipynb"))}


def find_notebook(name: str | Path) -> Path:
    """The path of a notebook given by name ("03_ratio_sweep") or path; raises UnknownNameError listing them."""
    known = notebooks()
    if str(name).removesuffix(".ipynb") in known:
        return known[str(name).removesuffix(".ipynb")]
    path = Path(name).expanduser()
    if path.suffix == ".ipynb" and path.is_file():
        return path
    raise UnknownNameError("notebook", str(name), known)


def parameters_of(name: str | Path) -> dict[str, str]:
    """The parameters of a notebook and their defaults, as written.

    Raises UnknownNameError for the notebook, DataError when it cannot be read or no cell has the tag `parameters`,
    which papermill would run with its defaults.
    """
    import papermill

    path = find_notebook(name)
    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception as error:  # nbformat raises many kinds for broken files
        raise DataError(f"{path} is not a notebook ({str(error).splitlines()[0]})") from error
    tagged = [cell for cell in cells if TAG in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise DataError(f"{path}: {len(tagged) or 'no'} cells have the tag {TAG!r}; one with the defaults must")
    found = papermill.inspect_notebook(path)
    return {parameter: about["default"] for parameter, about in found.items()}


def _is_notebook(path: Path) -> bool:
    try:
        nbformat.read(path, as_version=4)
    except Exception:  # nbformat raises many kinds for broken files
        return False
    return True


class OwnKernel(AsyncKernelManager):
    """Starts this interpreter, whatever kernels are registered on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """How to start the kernel."""
        command = [sys.executable, "-m", "ipykernel_launcher", "--log-level=CRITICAL", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python", interrupt_mode="signal")


def run_notebook(
    name: str | Path, parameters: Mapping[str, Any] | None = None, out: str | Path | None = None, quiet: bool = False
) -> Path:
    """Execute a notebook with these parameters in the project's root; returns the path of the executed copy.

    out: default build/notebooks/<name>.ipynb; it is replaced whole, by what ran even where a cell fails. What cells
    print goes on to standard output and error unless `quiet`. Raises UnknownNameError for a notebook or parameter that
    does not exist, DataError as `parameters_of`, SpecdecError naming the cell's error, and KeyboardInterrupt.
    """
    import papermill

    path, given = find_notebook(name), dict(parameters or {})
    known = parameters_of(path)
    for parameter in given:
        if parameter not in known:
            raise UnknownNameError(f"parameter of {path.stem}", parameter, known)
    out = Path(out).expanduser() if out else project_root() / "build" / "notebooks" / path.name
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.stem}.{uuid.uuid4().hex}.ipynb")
    streams = {} if quiet else {"stdout_file": sys.stdout, "stderr_file": sys.stderr}
    try:
        papermill.execute_notebook(
            path,
            scratch,
            given,
            progress_bar=False,
            cwd=project_root(),
            kernel_name="python3",
            kernel_manager_class=OwnKernel,
            **streams,
        )
    except papermill.PapermillExecutionError as error:
        if error.ename == "KeyboardInterrupt":
            raise KeyboardInterrupt from error
        where = f"cell {error.exec_count} of {path.stem} failed"
        raise SpecdecError(f"{where}: {error.ename}: {error.evalue}; what ran is in {out}") from error
    finally:
        if scratch.exists() and _is_notebook(scratch):
            os.replace(scratch, out)
        scratch.unlink(missing_ok=True)
    return out
