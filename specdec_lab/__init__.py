"""specdec_lab: a notebook workbench for research on speculative decoding.

Names are loaded when first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Decoder": "decoding",
    "Generation": "decoding",
    "Sampling": "sampling",
    "load_main": "models.zoo",
    "load_drafter": "models.zoo",
    "summarise": "metrics",
    "load_prompts": "tasks",
    "Arm": "experiment",
    "Block": "experiment",
    "compare": "experiment",
    "grid": "experiment",
    "sweep": "experiment",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specdec_lab' has no attribute {name!r}; there is: {', '.join(__all__)}")
    return getattr(import_module(f"specdec_lab.{_HOME[name]}"), name)
