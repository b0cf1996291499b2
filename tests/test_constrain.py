"""Grammars: what they allow, that drafting under one changes nothing, and what is refused."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_llama
from scipy import stats
from test_feature import layers, model_of
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdec_lab.constrain import Constraint, Grammar, Source, masked, read_lark, read_schema
from specdec_lab.decoding import Decoder
from specdec_lab.drafting import Drafter, DraftModel, FeatureDraft, GrammarDrafter, NGram, Row, Tree
from specdec_lab.errors import DataError, ModelError, SettingError, SpecdecError
from specdec_lab.models import zoo
from specdec_lab.models.llama import LlamaModel
from specdec_lab.models.zoo import Main
from specdec_lab.sampling import Sampling, distribution
from specdec_lab.tasks import load_prompts
from specdec_lab.tasks.scores import json_score

EOS = 257
PROMPT = "Speculative decoding drafts and verifies. Speculative"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["circle", "cube", "square"]}, "on": {"type": "boolean"}},
    "required": ["kind", "on"],
    "additionalProperties": False,
}
LARK = 'start: pair+ "."\npair: KEY "=" KEY ";"\nKEY: /[a-c]{1,3}/\n'
SOURCES: dict[str, Callable[[], Source]] = {
    "schema": lambda: Source.json_schema(SCHEMA),
    "any": Source.any_json,
    "regex": lambda: Source.regex("(ab|ba){2,9}(xyz|xyw)!"),
    "lark": lambda: Source.lark(LARK),
}


@pytest.fixture(scope="module")
def main(tiny_folder: str) -> Main:
    return zoo.load_main(tiny_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def small(tiny_draft_folder: str) -> Main:
    return zoo.load_main(tiny_draft_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def grammar(main: Main) -> Callable[[str], Grammar]:
    made = {name: Grammar(source(), main.tokenizer) for name, source in SOURCES.items()}
    return made.__getitem__


def texts(constraint: Constraint, *path: str | int) -> list[str]:
    """What may follow, as characters; the end of the text is "$"."""
    tokens = [token for part in path for token in (part.encode() if isinstance(part, str) else [part])]
    return ["$" if token == EOS else chr(token) for token in constraint.allowed(tokens).nonzero()[:, 0].tolist()]


# What a grammar allows


def test_what_may_follow_each_path(grammar: Callable[[str], Grammar]) -> None:
    at = grammar("regex").constraint([EOS])
    assert texts(at) == ["a", "b"]
    assert texts(at, "ab") == ["a", "b"]
    assert texts(at, "abab") == ["a", "b", "x"]
    assert texts(at, "a") == ["b"]
    assert texts(at, "ababxy") == ["w", "z"]
    assert texts(at, "ababxyz!") == ["$"]
    assert texts(at, "ababxyz!", EOS) == ["$"], "behind the end there is nothing else"
    assert texts(at) == ["a", "b"], "paths leave nothing behind"


def test_a_refused_path_allows_everything_and_spoils_nothing(grammar: Callable[[str], Grammar]) -> None:
    at = grammar("regex").constraint([EOS], vocab_size=259)
    assert at.allowed(list(b"aa")).all()
    assert at.allowed([258]).all(), "a token that the grammar does not know"
    assert at.allowed([258, *b"ab"]).all()
    assert texts(at, "ba") == ["a", "b"]
    at.commit(list(b"ab"))
    assert texts(at) == ["a", "b"]
    assert texts(at, "ab") == ["a", "b", "x"]


def test_any_walk_sees_what_a_fresh_constraint_sees(grammar: Callable[[str], Grammar]) -> None:
    """Masks are asked for in any order, between commits: the matcher goes back and forth."""
    for name in SOURCES:
        generator = torch.Generator().manual_seed(3)
        at, committed = grammar(name).constraint([EOS]), list[int]()
        for _ in range(8):
            paths: list[list[int]] = [[]]
            for _ in range(12):
                path = paths[int(torch.randint(len(paths), (1,), generator=generator))]
                choices = at.allowed(path).nonzero()[:, 0]
                paths.append([*path, int(choices[torch.randint(len(choices), (1,), generator=generator)])])
            for path in paths:
                fresh = grammar(name).constraint([EOS])
                fresh.commit([*committed, *path])
                assert torch.equal(at.allowed(path), fresh.allowed())
            step = max(paths, key=len)[:2]
            at.commit(step)
            committed += step


@pytest.mark.parametrize("size", [200, 259, 300])
def test_the_vocabulary_may_be_smaller_or_larger_than_the_tokenizers(size: int, main: Main) -> None:
    any_text = Grammar(Source.regex("(?s).*"), main.tokenizer)
    allowed = any_text.constraint([100], vocab_size=size).allowed()
    assert allowed.shape == (size,)
    assert allowed[:128].all()
    assert not allowed[256:].any(), "neither special tokens nor padding"


def test_several_ends_and_ends_that_are_text(main: Main) -> None:
    """An end-of-sequence id ends the text, so it is allowed where the text may end, and nowhere else."""
    letters = Grammar(Source.regex("[a-c]{2,3}"), main.tokenizer).constraint([ord("a"), EOS, 9999])
    assert texts(letters) == ["b", "c"]
    assert texts(letters, "bb") == ["a", "b", "c", "$"]
    assert texts(letters, "bba") == ["a", "$"]


def test_the_tokenizers_own_end_counts_for_nothing_when_another_is_asked_for(main: Main) -> None:
    at = Grammar(Source.regex("ab?"), main.tokenizer).constraint([0])
    assert at.allowed(list(b"a")).nonzero()[:, 0].tolist() == [0, ord("b")]


def test_forced_tokens_run_to_the_next_choice(grammar: Callable[[str], Grammar]) -> None:
    at = grammar("schema").constraint([EOS])
    assert bytes(at.forced()) == b'{"kind": "'
    assert at.forced(most=3) == list(b'{"k')
    at.commit(list(b'{"kind": "c'))
    assert at.forced() == []
    assert bytes(at.forced(list(b"u"))) == b'be", "on": '
    at.commit(list(b'ube", "on": t'))
    assert at.forced() == [*b"rue}", EOS]
    at.commit([*b"rue}", EOS])
    assert at.forced() == []


def test_masks_are_computed_once_a_step(grammar: Callable[[str], Grammar]) -> None:
    at = grammar("schema").constraint([EOS])
    assert at.allowed([123]) is at.allowed((123,))
    at.commit([123])
    assert texts(at) == ['"']


def test_json_is_one_line_unless_the_schema_says_otherwise(main: Main) -> None:
    text = json.dumps({"kind": "cube", "on": True})
    assert Grammar(Source.json_schema(SCHEMA), main.tokenizer).matches(list(text.encode()))
    assert not Grammar(Source.json_schema(SCHEMA), main.tokenizer).matches(list(text.replace(" ", "").encode()))
    free = SCHEMA | {"x-guidance": {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}}
    assert Grammar(Source.json_schema(free), main.tokenizer).matches(list(text.replace(" ", "\n ").encode()))


def test_any_json_is_an_object_or_an_array(grammar: Callable[[str], Grammar]) -> None:
    for text, ok in (('{"a": [1, "b", null]}', True), ("[]", True), ("{", False), ('"a"', False), ("1", False)):
        assert grammar("any").matches(list(text.encode())) == ok, text


def test_masked_gives_a_draft_that_knows_no_allowed_token_equal_chances() -> None:
    no = float("-inf")
    logits = torch.tensor([[0.0, 1, no, no], [0, 1, no, no], [0, 1, no, no]])
    allowed = [torch.tensor([True, False, True, False]), torch.tensor([False, False, True, True]), None]
    got = masked(logits, allowed)
    assert got.tolist() == [[0, no, no, no], [no, no, 0, 0], [0, 1, no, no]]
    assert logits[0].tolist() == [0, 1, no, no]


def test_a_path_leaves_nothing_behind_for_another(byte_tokenizer: Any) -> None:
    """A key is the last one; what closes it may be a brace, never a comma, whatever was tried before."""
    properties = {name: {"type": "string"} for name in ("a", "b")}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    grammar = Grammar(Source.json_schema(schema), byte_tokenizer)
    tried, fresh = (grammar.constraint((EOS,), 259, "cpu") for _ in range(2))
    start = list(b'{"a": "x", "b": "')
    paths = [list(text) for text in (b'y", ', b"yy", b'y"}', b"zzz", b"y", b'", "', b'z"', b"yy")]
    for constraint in (tried, fresh):
        constraint.commit(start)
    for path in paths:
        tried.allowed(path)
    for path in paths:
        again = grammar.constraint((EOS,), 259, "cpu")
        again.commit(start)
        assert torch.equal(tried.allowed(path), again.allowed(path)), bytes(path)
    tried.commit(list(b"y"))
    fresh.commit(list(b"y"))
    assert torch.equal(tried.allowed(), fresh.allowed())
    assert not tried.allowed(list(b'"'))[ord(",")]
    assert tried.allowed(list(b'"'))[ord("}")]


# Greedy: drafting under a constraint emits what the constrained plain loop does


class Branching(Drafter):
    """Two tokens at the root, two behind the first and one behind each: a tree with right, wrong, refused nodes."""

    name = "branching"

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        tokens, parents = [], []
        for row, length in zip(rows, lengths, strict=True):
            assert row.constraint is not None
            first = row.constraint.allowed().nonzero()[:, 0].tolist()
            second = row.constraint.allowed(first[:1]).nonzero()[:, 0].tolist()
            tokens.append([first[0], first[-1], second[0], 255, second[-1]])
            deep = [-1, -1, 0, 1, 0]
            parents.append(deep if length >= 2 else [-1, -1, -2, -2, -2] if length else [-2] * 5)
        used = max(sum(parent >= -1 for parent in row) for row in parents)
        return Tree(torch.tensor(tokens)[:, :used], torch.tensor(parents)[:, :used], None)


DRAFTERS: dict[str, Callable[[Any, Any], Drafter]] = {
    "model": lambda main, small: DraftModel(small),
    "itself": lambda main, small: DraftModel(main),
    "ngram": lambda main, small: NGram(),
    "grammar": lambda main, small: GrammarDrafter(),
    "tree": lambda main, small: Branching(),
    "features": lambda main, small: FeatureDraft(model_of(layers(main), main, torch.arange(40, 259, 3)), 259),
    "tree of features": lambda main, small: FeatureDraft(model_of(layers(main), main, torch.arange(40, 259, 3)), 259),
    "tree of a model": lambda main, small: DraftModel(small, branching="distinct"),
}
WIDTH = {"tree of features": 3, "tree of a model": 2}  # candidates


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_equals_the_constrained_plain_loop(
    name: str, drafter: str, penalty: float, main: Main, small: Main, grammar: Callable[[str], Grammar]
) -> None:
    how = {"max_new_tokens": 48, "repetition_penalty": penalty, "constraint": grammar(name)}
    plain = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    drafting = Decoder(
        main.model,
        DRAFTERS[drafter](main.model, small.model),
        5,
        main.tokenizer,
        eos=main.eos,
        candidate_count=WIDTH.get(drafter, 1),
    )
    for prompt in ("The cat", PROMPT):
        expected, got = plain.generate(prompt, **how), drafting.generate(prompt, **how)
        assert got.tokens == expected.tokens
        if got.trace.finish == "eos":
            assert grammar(name).matches(got.tokens[:-1])
        else:
            assert grammar(name).constraint(main.eos).allowed(got.tokens[:-1])[got.tokens[-1]]
        assert got.tokens != plain.generate(prompt, **(how | {"constraint": None})).tokens
        if drafter == "itself":  # a draft that obeys the same constraint is never wrong
            assert all(fate == "accepted" for step in got.trace.steps for fate in step.fate)
        if drafter == "tree":
            assert any("accepted" in step.fate for step in got.trace.steps)


def test_the_plain_loop_takes_the_likeliest_allowed_token(main: Main, grammar: Callable[[str], Grammar]) -> None:
    """Against a loop written out here, with a fresh constraint and a fresh forward for each token."""
    decoder = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    ids, out = decoder.encode(PROMPT), list[int]()
    while EOS not in out:
        at = grammar("schema").constraint(main.eos)
        at.commit(out)
        tokens = torch.tensor([ids + out])
        logits = main.model.logits(main.model.forward(tokens, main.model.new_cache(1, tokens.shape[1])))[0, -1]
        out.append(int(torch.where(at.allowed(), logits, float("-inf")).argmax()))
    assert decoder.generate(PROMPT, constraint=grammar("schema")).tokens == out
    assert json.loads(bytes(out[:-1]))["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]


def test_all_that_the_grammar_drafter_drafts_is_accepted(main: Main, grammar: Callable[[str], Grammar]) -> None:
    for how in ({}, {"temperature": 1.0}):
        decoder = Decoder(main.model, GrammarDrafter(), 16, main.tokenizer, eos=main.eos)
        out = decoder.generate(PROMPT, constraint=grammar("schema"), seed=5, **how)
        assert {fate for step in out.trace.steps for fate in step.fate} == {"accepted"}
        assert len(out.trace.steps) <= 4 < len(out.tokens)
        free = decoder.generate(PROMPT, max_new_tokens=8, **how)
        assert not any(step.drafted for step in free.trace.steps)


@pytest.mark.parametrize("drafter", DRAFTERS.keys() - {"tree"})
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_rows_of_a_batch_each_obey_their_own(
    drafter: str, how: dict[str, Any], main: Main, small: Main, grammar: Callable[[str], Grammar]
) -> None:
    prompts = ["The cat", PROMPT, "The dog", "A", "The cat"]
    constraints = [grammar("schema"), grammar("regex"), None, grammar("lark"), grammar("schema")]
    decoder = Decoder(
        main.model,
        DRAFTERS[drafter](main.model, small.model),
        4,
        main.tokenizer,
        eos=main.eos,
        candidate_count=WIDTH.get(drafter, 1),
    )
    together = decoder.generate_batch(prompts, constraint=constraints, max_new_tokens=40, seed=3, **how)
    for i, (prompt, one) in enumerate(zip(prompts, constraints, strict=True)):
        alone = decoder.generate(prompt, constraint=one, max_new_tokens=40, seed=3 + i, **how)
        assert together[i].tokens == alone.tokens
    assert len({len(out.tokens) for out in together}) > 2


def test_a_grammar_can_be_used_again(main: Main, small: Main, grammar: Callable[[str], Grammar]) -> None:
    """CASES 20: also after a stream that was left half-way."""
    decoder = Decoder(main.model, DraftModel(small.model), 4, main.tokenizer, eos=main.eos)
    first = decoder.generate(PROMPT, constraint=grammar("schema")).tokens
    next(decoder.stream(PROMPT, constraint=grammar("schema")))
    assert decoder.generate(PROMPT, constraint=grammar("schema")).tokens == first


def test_it_ends_where_the_grammar_or_the_length_does(main: Main, grammar: Callable[[str], Grammar]) -> None:
    decoder = Decoder(main.model, GrammarDrafter(), 8, main.tokenizer, eos=main.eos)
    whole = decoder.generate(PROMPT, constraint=grammar("schema"))
    assert (whole.trace.finish, whole.tokens[-1]) == ("eos", EOS)
    cut = decoder.generate(PROMPT, constraint=grammar("schema"), max_new_tokens=12)
    assert (cut.trace.finish, cut.tokens) == ("length", whole.tokens[:12])
    stopped = decoder.generate(PROMPT, constraint=grammar("schema"), stop='"on"')
    assert (stopped.trace.finish, stopped.text) == ("stop", whole.text.partition('"on"')[0] + '"on"')


# Sampling: the constrained main model's distribution


ROWS, SIGNIFICANCE = 2000, 1e-4
SYMBOLS = "abcdefg"


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """Seven letters, then </s> 7."""
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate(SYMBOLS)}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


# What may follow depends on the token before: after a any of a, b, c; after b the end or d; after c only e.
AFTER = {"": "abc", "a": "abc", "b": "d$", "c": "e", "d": "$", "e": "$"}
PATTERN = "a*(bd?|ce)"
START = (3, 1, 4)


def exact(model: LlamaModel, how: Sampling) -> Tensor:
    """The joint distribution [64] of the first two tokens, from the model's own logits and the table AFTER."""

    def after(*path: int) -> Tensor:
        tokens = torch.tensor([[*START, *path]])
        logits = model.logits(model.forward(tokens, model.new_cache(1, 8)))[0, -1]
        before = SYMBOLS[path[-1]] if path else ""
        ids = ["abcdefg$".index(symbol) for symbol in AFTER[before]]
        mask = torch.full_like(logits, float("-inf"))
        mask[ids] = 0
        return distribution(logits + mask, how).double()

    first, joint = after(), torch.zeros(64, dtype=torch.double)
    for token in range(3):
        joint[8 * token : 8 * token + 8] = first[token] * after(token)
    return joint


def counts(decoder: Decoder, grammar: Grammar, **how: Any) -> Tensor:
    out = decoder.generate_batch([START] * ROWS, max_new_tokens=4, seed=1000, constraint=grammar, **how)
    return torch.bincount(torch.tensor([8 * g.tokens[0] + g.tokens[1] for g in out]), minlength=64)


def p_value(counts: Tensor, expected: Tensor) -> float:
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    scaled = expected[possible] / expected.sum() * counts.sum()
    return float(stats.chisquare(counts[possible].numpy(), scaled.numpy()).pvalue)


class Ends(Branching):
    """A tree without a token that this tokenizer lacks."""

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        tree = super().propose(rows, lengths)
        return replace(tree, tokens=tree.tokens.clamp(max=6))


SAMPLERS: dict[str, Callable[[], Drafter]] = {
    "none": Drafter,
    "model": lambda: DraftModel(random_llama(3, layers=1)),
    "grammar": GrammarDrafter,
    "tree": Ends,
}
HOW: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.85, "top_k": 2}]


@pytest.mark.parametrize("drafter", SAMPLERS)
@pytest.mark.parametrize("how", HOW, ids=["plain", "truncated"])
def test_what_is_sampled_is_what_the_constrained_model_says(drafter: str, how: Any, letters: Any) -> None:
    """2,000 generations, χ² over the first two tokens: a total variation of 0.1 is found with a power above 0.99."""
    cells = sum(map(len, (AFTER[first] for first in AFTER[""])))
    assert stats.ncx2.sf(stats.chi2.isf(SIGNIFICANCE, cells - 1), cells - 1, 4 * ROWS * 0.1**2) > 0.99
    model = random_llama(0, layers=2)
    decoder = Decoder(model, SAMPLERS[drafter](), 3, eos=(7,))
    found = counts(decoder, Grammar(Source.regex(PATTERN), letters), **how)
    assert p_value(found, exact(model, Sampling(**how))) > SIGNIFICANCE


def test_control_a_mask_at_the_root_alone_is_found(letters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With p constrained at the root only, drafts of the constrained q are judged by another distribution."""
    real = Constraint.allowed

    def at_the_root(self: Constraint, path: Sequence[int] = ()) -> Tensor:
        return real(self, path) if not path else real(self, ()).new_ones(8)

    monkeypatch.setattr(Constraint, "allowed", at_the_root)
    monkeypatch.setattr(Constraint, "commit", lambda self, tokens: None)
    model = random_llama(0, layers=2)
    found = counts(
        Decoder(model, DraftModel(random_llama(3, layers=1)), 3, eos=(7,)),
        Grammar(Source.regex(PATTERN), letters),
        **HOW[0],
    )
    assert p_value(found, exact(model, Sampling(**HOW[0]))) < SIGNIFICANCE


def test_control_a_q_that_was_not_drawn_from_is_found(letters: Any) -> None:
    """CASES 9: a draft drawn under the constraint, whose q is told as if it were not."""

    class Forgetful(DraftModel):
        def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
            tree = super().propose(rows, lengths)
            return replace(tree, q=None if tree.q is None else (tree.q + 0.3) / 3.4)

    model = random_llama(0, layers=2)
    decoder = Decoder(model, Forgetful(random_llama(3, layers=1)), 3, eos=(7,))
    found = counts(decoder, Grammar(Source.regex(PATTERN), letters), **HOW[0])
    assert p_value(found, exact(model, Sampling(**HOW[0]))) < SIGNIFICANCE


# The bundled pair


def test_outputs_of_the_bundled_pair_validate(bundled: Main) -> None:
    """Three short prompts; an output that its length cuts, in a string without end, does not count."""
    rows = [row for row in load_prompts("json") if row.schema is not None]
    rows.sort(key=lambda row: (len(json.dumps(row.reference)) + len(row.prompt) // 4, row.id))
    plain, ended = Decoder(bundled.model, tokenizer=bundled.tokenizer, eos=bundled.eos), 0
    for row in rows[:3]:
        own = Grammar(Source.json_schema(row.schema, row.id), bundled.tokenizer)
        expected = plain.generate(row.prompt, constraint=own, max_new_tokens=48)
        if expected.trace.finish == "eos":
            assert json_score(row, expected.text, None, None).value == 1.0
            ended += 1
        for name in ("1:4", "grammar"):
            decoder = Decoder(bundled.model, zoo.load_drafter(name, bundled), 8, bundled.tokenizer, eos=bundled.eos)
            got = decoder.generate(row.prompt, constraint=own, max_new_tokens=48)
            assert got.tokens == expected.tokens
            assert len(got.trace.steps) < len(expected.trace.steps)
    assert ended >= 2


# Bad input


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "frob"}, "Invalid type: frob"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
        ({"$ref": "https://example.org/a.json"}, "example.org"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        (False, "false"),
        ([], "a JSON schema is an object, true or false, this is list"),
        (None, "this is NoneType"),
    ],
)
def test_schemas_that_cannot_be_used(schema: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mine: ") as told:
        Source.json_schema(schema, "mine")
    assert reason in str(told.value)
    assert "\n" not in str(told.value)
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    with pytest.raises(DataError) as told:
        read_schema(file)
    assert str(told.value).startswith(f"{file}: ")
    assert reason in str(told.value)


def test_files_that_are_missing_or_something_else(tmp_path: Path) -> None:
    broken, binary = tmp_path / "broken.json", tmp_path / "binary"
    broken.write_text('{"type": ')
    binary.write_bytes(b"\xff\xfe\x00")
    for path, reason in (
        (broken, "not JSON"),
        (binary, "not UTF-8"),
        (tmp_path / "none", "No such"),
        (tmp_path, "dir"),
    ):
        with pytest.raises(DataError, match=reason) as told:
            read_schema(path)
        assert str(told.value).startswith(f"{path}: ")
    with pytest.raises(DataError, match="No such file"):
        read_lark(tmp_path / "none")
    broken.write_text("start: x")
    with pytest.raises(DataError, match='unknown name: "x"') as told:
        read_lark(broken)
    assert str(told.value).startswith(f"{broken}: ")


def test_regular_expressions_that_cannot_be_used(main: Main) -> None:
    with pytest.raises(SettingError, match=r"regex = '\(a': .*unclosed group"):
        Source.regex("(a")
    with pytest.raises(DataError, match=r"regex '\[a&&b\]': nothing that the tokenizer can spell satisfies"):
        Grammar(Source.regex("[a&&b]"), main.tokenizer)


def test_a_grammar_that_cannot_end_in_time_is_told_before(main: Main, grammar: Callable[[str], Grammar]) -> None:
    decoder = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    with pytest.raises(SettingError, match=r"max_new_tokens = 9: allowed is 10 or more: what every output of the JSON"):
        decoder.generate(PROMPT, constraint=grammar("schema"), max_new_tokens=9)
    assert decoder.generate(PROMPT, constraint=grammar("schema"), max_new_tokens=10).text == '{"kind": "'
    endless = Grammar(Source.lark('start: "a" start'), main.tokenizer)
    with pytest.raises(SettingError, match="max_new_tokens = 128"):
        decoder.generate(PROMPT, constraint=endless)


def test_the_fewest_tokens_are_those_of_the_vocabulary(bundled: Main) -> None:
    """A bound must not count more than the tokenizer needs."""
    for text in ("hello world, hello moon and all the stars above", '{"dimensions": {"height": '):
        own = Grammar(Source.regex(text.replace("{", r"\{")), bundled.tokenizer)
        ids = bundled.tokenizer(text, add_special_tokens=False)["input_ids"]
        own.require_room(len(ids))
        with pytest.raises(SettingError, match="max_new_tokens = 3"):
            own.require_room(3)


def test_what_no_token_can_spell_is_told(letters: Any) -> None:
    """At the root at once; behind a choice when it is made."""
    decoder = Decoder(random_llama(0, layers=2), eos=(7,))
    with pytest.raises(DataError, match="regex 'x': nothing that the tokenizer can spell satisfies it"):
        Grammar(Source.regex("x"), letters)
    dead = Grammar(Source.regex("ax"), letters)
    assert dead.constraint([7]).allowed([0]).all(), "drafting runs into it without harm"
    with pytest.raises(ModelError, match="cannot go on after 1 tokens"):
        decoder.generate(START, constraint=dead)


def test_what_a_decoder_refuses(main: Main, letters: Any, grammar: Callable[[str], Grammar]) -> None:
    decoder = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    with pytest.raises(SettingError, match=r"eos = \(\): allowed is ids 0 … 258, one at least"):
        decoder.generate(PROMPT, constraint=grammar("any"), eos=())
    with pytest.raises(SettingError, match="constraint = '2 grammars': allowed is one, or one for each of 3"):
        decoder.generate_batch([PROMPT] * 3, constraint=[grammar("any"), None])
    with pytest.raises(SettingError, match="a grammar compiled for this decoder's tokenizer"):
        decoder.generate(PROMPT, constraint=Grammar(Source.regex("ab"), letters))


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SpecdecError, match=r"pip install 'specdec_lab\[structured\]'"):
        Source.any_json()
