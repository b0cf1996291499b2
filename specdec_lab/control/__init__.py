"""What the next step is to look like, from the records of the past ones."""

from specdec_lab.control.history import History
from specdec_lab.control.protocol import MAX_CANDIDATES, Controller, Plan

__all__ = ["MAX_CANDIDATES", "Controller", "History", "Plan"]
