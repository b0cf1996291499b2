"""How token trees are proposed. A drafter knows q, the distribution each token was drawn from; not what stays."""

from specdec_lab.drafting.model import DraftModel
from specdec_lab.drafting.ngram import NGram
from specdec_lab.drafting.protocol import Drafter, Row, Tree, chains

__all__ = ["DraftModel", "Drafter", "NGram", "Row", "Tree", "chains"]
