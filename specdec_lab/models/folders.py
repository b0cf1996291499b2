"""Where this package keeps what it has fetched, computed or measured."""

import os
from pathlib import Path

from specdec_lab.errors import ModelError


def cache_folder() -> Path:
    """Where models, hidden states and timings are kept: $SPECDEC_CACHE or ~/.cache/specdec_lab.

    Raises ModelError where that is a file.
    """
    named = os.environ.get("SPECDEC_CACHE")
    folder = Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "specdec_lab"
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"SPECDEC_CACHE = {named}: a folder is needed, this is a file")
    return folder
