"""Where the project lies. Imports nothing of the project, as what a page shows first waits for it."""

from pathlib import Path


def project_root() -> Path:
    """The folder that holds notebooks/: the package's own, or else the nearest around the working directory.

    Outside of a project, as after a plain `pip install`, it is the working directory.
    """
    here = Path.cwd()
    around = [Path(__file__).resolve().parents[1], here, *here.parents]
    return next((folder for folder in around if (folder / "notebooks").is_dir()), here)


def from_root(path: str | Path) -> Path:
    """A path, relative ones taken from the project's root wherever the notebook runs."""
    return project_root() / Path(path).expanduser()
