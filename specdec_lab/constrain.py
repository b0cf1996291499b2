"""Constrained decoding: a grammar says which tokens may come next, to p and to q alike (2307.09702, 2403.06988).

Masking logits is a processor like any other: it depends on the path to a position alone, so drafting stays
lossless with respect to the *constrained* main model. llguidance (extra `structured`) does the parsing. Where a
grammar leaves one spelling only, it allows the tokenizer's own tokens for it, one at a time.
This module knows tokens and grammars; it does not know models, drafters or prompts.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_lab.errors import DataError, ModelError, SettingError, SpecdecError

# One line, spaced as json.dumps does. Free whitespace would let a small model go on in it for ever, and would force
# less. A schema says otherwise for itself: "x-guidance": {"whitespace_flexible": true}.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# RFC 4627's JSON text; a bare string would let a model write prose between two quotes.
ANY_JSON = {"type": ["object", "array"]}


def _llguidance() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise SpecdecError("constrained decoding needs llguidance: pip install 'specdec_lab[structured]'") from error
    return llguidance


@dataclass(frozen=True)
class Source:
    """A grammar as text, checked; no tokenizer yet. Made by `json_schema`, `any_json`, `regex` or `lark`."""

    text: str  # in llguidance's own form
    name: str  # what messages call it
    schema: Any = None  # the JSON schema, where it is one

    @classmethod
    def json_schema(cls, schema: Any, name: str = "the JSON schema") -> "Source":
        """What conforms to a JSON schema, a dict or bool, on one line, keys in the schema's order.

        Raises DataError, starting with `name`, for a schema that is invalid, that nothing satisfies, or that uses
        a keyword llguidance does not support: none is ignored.
        """
        if not isinstance(schema, dict | bool):
            raise DataError(f"{name}: a JSON schema is an object, true or false, this is {type(schema).__name__}")
        try:
            text = json.dumps({} if schema is True else schema, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{name}: not a JSON schema ({error})") from error
        form = None if schema is False else JSON_FORM
        return cls(_llguidance().LLMatcher.grammar_from_json_schema(text, defaults=form), name, schema)._checked()

    @classmethod
    def any_json(cls) -> "Source":
        """Any JSON object or array, on one line."""
        return cls.json_schema(ANY_JSON, "any JSON")

    @classmethod
    def regex(cls, pattern: str) -> "Source":
        """Texts that a regular expression (Rust's syntax) matches as a whole; raises SettingError for a broken one."""
        source = cls(_llguidance().LLMatcher.grammar_from_regex(pattern), f"regex {pattern!r}")
        if fault := source._fault():
            raise SettingError("regex", pattern, f"a regular expression in Rust's syntax ({fault})")
        return source

    @classmethod
    def lark(cls, grammar: str, name: str = "the Lark grammar") -> "Source":
        """A context-free grammar in llguidance's variant of Lark; raises DataError for a broken one."""
        return cls(_llguidance().LLMatcher.grammar_from_lark(grammar), name)._checked()

    def _checked(self) -> "Source":
        if fault := self._fault():
            raise DataError(f"{self.name}: not usable as a constraint ({fault})")
        return self

    def _fault(self) -> str:
        failed, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(self.text)
        return _one_line(messages[0]) if failed else ""


def read_schema(path: Path) -> Source:
    """The JSON schema in a file; raises DataError naming file and reason."""
    try:
        schema = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    return Source.json_schema(schema, str(path))


def read_lark(path: Path) -> Source:
    """The Lark grammar in a file; raises DataError naming file and reason."""
    return Source.lark(_read(path), str(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _one_line(message: str) -> str:
    """A parser's message without its drawing of the place; what follows "<state>" is a dump."""
    return " ".join(message.partition("<state>")[0].split())[:300]


@lru_cache(maxsize=4)  # takes about a second for 50,000 tokens, and holds the tokenizer's trie
def _tokens_of(tokenizer: Any) -> Any:
    """llguidance's form of a fast transformers tokenizer."""
    try:
        return _llguidance().hf.from_tokenizer(tokenizer)
    except ValueError as error:
        raise ModelError(f"this tokenizer cannot be constrained by a grammar: {_one_line(str(error))}") from error


class Grammar:
    """A source compiled for one tokenizer; any number of generations may use it, each with its own `constraint`."""

    def __init__(self, source: Source, tokenizer: Any) -> None:
        """tokenizer: the main model's, a fast transformers tokenizer; raises ModelError for another kind.

        Raises DataError when nothing that it can spell satisfies the grammar, or when llguidance's limits are too low.
        """
        self.source, self.name, self.tokenizer = source, source.name, tokenizer
        self.tokens = _tokens_of(tokenizer)
        self._start = _llguidance().LLMatcher(self.tokens, source.text, log_level=0)
        if self._start.is_error():
            raise DataError(f"{self.name}: not usable as a constraint ({_one_line(self._start.get_error())})")
        probe = self.matcher()
        probe.compute_bitmask()  # it looks ahead only for a mask
        if probe.is_stopped() and not probe.is_accepting():
            raise DataError(f"{self.name}: nothing that the tokenizer can spell satisfies it")

    def matcher(self) -> Any:
        """A fresh llguidance matcher at the beginning."""
        return self._start.deep_copy()

    def constraint(
        self, eos: Collection[int], vocab_size: int | None = None, device: torch.device | str = "cpu"
    ) -> "Constraint":
        """A fresh constraint for one generation; see Constraint."""
        return Constraint(self, eos, vocab_size or self.tokens.vocab_size, device)

    def matches(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens`, without an end-of-sequence token, are a complete sentence of the grammar."""
        matcher = self.matcher()
        return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()

    def require_room(self, max_new_tokens: int) -> None:
        """Raise SettingError when max_new_tokens provably cannot hold a complete output.

        The proof is the text that every output begins with and the fewest tokens that spell it. A grammar may need
        more behind a choice: that shows only at the end, as an output that was cut by its length.
        """
        if len(self._beginning) > max_new_tokens and self._fewest > max_new_tokens:
            allowed = f"{self._fewest:.0f} or more: what every output of {self.name} begins with takes so many tokens"
            raise SettingError("max_new_tokens", max_new_tokens, allowed)

    @cached_property
    def _beginning(self) -> bytes:
        """The text that every output begins with."""
        return self.matcher().compute_ff_bytes()

    @cached_property
    def _fewest(self) -> float:
        """The fewest tokens that spell the beginning, the last of which may reach beyond it."""
        text, known = self._beginning, range(self.tokens.vocab_size)
        vocabulary = {self.tokens.decode_bytes([i]) for i in known if not self.tokens.is_special_token(i)}
        ordered, longest = sorted(vocabulary), max(map(len, vocabulary))
        fewest = [0.0] + [math.inf] * len(text)  # [length of the prefix spelt]
        for i in range(len(text)):
            for j in range(i + 1, min(i + longest, len(text)) + 1):
                if text[i:j] in vocabulary:
                    fewest[j] = min(fewest[j], fewest[i] + 1)
            after = bisect_left(ordered, text[i:])
            if after < len(ordered) and ordered[after].startswith(text[i:]):
                fewest[-1] = min(fewest[-1], fewest[i] + 1)
        return fewest[-1]


class Constraint:
    """Where one generation stands in its grammar. Paths begin behind the committed tokens.

    eos: ids that end the output, allowed when the grammar is satisfied and only then. Ids that the tokenizer lacks
    (padding of the vocabulary) are never allowed; vocab_size: the main model's. Masks live on `device`.
    """

    def __init__(self, grammar: Grammar, eos: Collection[int], vocab_size: int, device: torch.device | str) -> None:
        self.grammar, self.vocab_size, self.device = grammar, vocab_size, device
        self.eos = frozenset(token for token in eos if 0 <= token < vocab_size)
        self._committed: list[int] = []
        self._matchers: dict[tuple[int, ...], Any] = {(): grammar.matcher()}  # by path; None where it is refused
        self._reason = ""  # why the last refusal, as far as llguidance says
        self._ended = False
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._anything = torch.ones(vocab_size, dtype=torch.bool, device=device)

    def allowed(self, path: Sequence[int] = ()) -> Tensor:
        """Which tokens may follow the committed tokens and `path`: bool [vocab_size], not to be written to.

        Remembered until the next commit, so that what a drafter asked for costs nothing at verification. Behind an
        end-of-sequence token only those follow. A path that the grammar refuses, or that no token of the
        vocabulary continues, allows everything: p gives the former no probability, and the latter is told once it
        is committed. Raises ModelError when nothing can follow the committed tokens.
        """
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._mask(key)
        return self._masks[key]

    def forced(self, path: Sequence[int] = (), most: int = 64) -> list[int]:
        """Up to `most` tokens of which each is the only one that may follow `path` and those before it."""
        found: list[int] = []
        while len(found) < most and not self._over([*path, *found]):
            only = self.allowed([*path, *found]).nonzero()[:2, 0].tolist()
            if len(only) != 1:
                break
            found += only
        return found

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens to the committed ones; raises ModelError when the grammar cannot go on from there."""
        count = next((i for i, token in enumerate(tokens) if token in self.eos), len(tokens))
        matcher = self._at(tuple(tokens[:count]))
        if matcher is None:
            raise self._stuck(self._reason or "the grammar refuses what follows")
        self._committed += tokens[:count]
        self._ended = self._ended or count < len(tokens)
        self._matchers = {(): matcher}
        self._masks.clear()

    def _over(self, path: Sequence[int]) -> bool:
        return self._ended or not self.eos.isdisjoint(path)

    def _mask(self, path: tuple[int, ...]) -> Tensor:
        over = self._over(path)
        matcher = None if over else self._at(path)
        if not over and matcher is None:
            return self._anything
        mask = np.zeros(self.vocab_size, dtype=bool)
        if matcher is not None:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            known = np.unpackbits(bits, bitorder="little")[: min(self.vocab_size, self.grammar.tokens.vocab_size)]
            mask[: len(known)] = known
            mask[[token for token in (*self.eos, *self.grammar.tokens.eos_tokens) if token < self.vocab_size]] = False
        if matcher is None or matcher.is_accepting():
            mask[list(self.eos)] = True
        if mask.any() and not (matcher is not None and matcher.is_error()):
            return torch.from_numpy(mask).to(self.device)
        if not path:
            told = _one_line(matcher.get_error()) if matcher is not None else ""
            raise self._stuck(told or "the vocabulary has no token that continues it")
        return self._anything

    def _stuck(self, reason: str) -> ModelError:
        return ModelError(f"{self.grammar.name}: cannot go on after {len(self._committed)} tokens ({reason})")

    def _at(self, path: tuple[int, ...]) -> Any:
        """A matcher behind the committed tokens and `path`; None where the grammar refuses that.

        A copy for every path: copying takes microseconds, and a matcher that is rolled back (llguidance 1.9.1) may
        go on with masks of the tokens it took back.
        """
        if path not in self._matchers:
            before, token = self._at(path[:-1]), path[-1]
            after = None
            if before is not None and 0 <= token < self.grammar.tokens.vocab_size:
                after = before.deep_copy()
                if after.try_consume_tokens([token]) != 1 or after.is_error():
                    self._reason, after = _one_line(after.get_error()), None
            self._matchers[path] = after
        return self._matchers[path]


def masked(logits: Tensor, allowed: Sequence[Tensor | None]) -> Tensor:
    """Logits [n, vocab] with −∞ wherever allowed[i], bool [vocab], says no; None allows all. A new tensor.

    Where a draft knows none of the allowed tokens (a trimmed head gives the others −∞), they become equally likely.
    """
    rows = list(logits)
    for index, mask in enumerate(allowed):
        if mask is not None:
            row = rows[index].masked_fill(~mask, float("-inf"))
            if row.max() == float("-inf"):
                row = torch.zeros_like(row).masked_fill(~mask, float("-inf"))
            rows[index] = row
    return torch.stack(rows)
