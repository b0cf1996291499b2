"""How token trees are proposed. A drafter knows q, the distribution each token was drawn from; not what stays."""

from specdec_lab.drafting.feature import FeatureDraft
from specdec_lab.drafting.grammar import GrammarDrafter
from specdec_lab.drafting.hybrid import Hybrid
from specdec_lab.drafting.model import DraftModel
from specdec_lab.drafting.ngram import NGram
from specdec_lab.drafting.protocol import Drafter, Row, Tree, chains

__all__ = ["DraftModel", "Drafter", "GrammarDrafter", "FeatureDraft", "Hybrid", "NGram", "Row", "Tree", "chains"]
