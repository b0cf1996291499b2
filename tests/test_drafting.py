"""Drafters: what they propose, that q is what tokens were drawn from, and that the draft's cache stays right."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import random_llama
from scipy import stats
from torch import Tensor

from specdec_lab.constrain import Constraint
from specdec_lab.decoding import Decoder
from specdec_lab.drafting import Drafter, DraftModel, NGram, Row, Tree, chains
from specdec_lab.errors import SettingError
from specdec_lab.models.feed import feed
from specdec_lab.models.llama import LlamaModel
from specdec_lab.sampling import Sampling, distribution

VOCAB = 23
SAMPLED = Sampling(temperature=0.9, top_k=12, top_p=0.9, min_p=0.01, repetition_penalty=1.2)


def tiny(seed: int, vocab_size: int = VOCAB, context: int = 128) -> LlamaModel:
    return random_llama(seed, 1, vocab_size, context)


def logits_after(model: LlamaModel, tokens: Sequence[int]) -> Tensor:
    """Logits [vocab] of the next token, by one fresh forward."""
    cache = model.new_cache(1, len(tokens))
    return model.logits(model.forward(torch.tensor([list(tokens)]), cache))[0, -1].clone()


def row(tokens: Sequence[int], sampling: Sampling | None = None, seed: int = 0) -> Row:
    return Row(list(tokens), sampling or Sampling(), torch.Generator().manual_seed(seed))


def text(seed: int, n: int) -> list[int]:
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def drafts(tree: Tree) -> list[list[int]]:
    """The drafted tokens of each row, padding left out."""
    return [tokens[parents >= -1].tolist() for tokens, parents in zip(tree.tokens, tree.parents, strict=True)]


def started(drafter: Drafter, rows: list[Row], lengths: list[int]) -> Tree:
    """The drafter's first proposal."""
    drafter.start(rows, 64)
    return drafter.propose(rows, lengths)


def test_chains() -> None:
    tree = chains(torch.arange(8).view(2, 4), [4, 2])
    assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -2, -2]]
    assert tree.is_chain  # padding behind a shorter chain is no branch
    assert not Tree(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[-1, -1, 0]]), None).is_chain
    assert chains(torch.arange(8).view(2, 4), [4, 4]).is_chain
    assert chains(torch.zeros(2, 0, dtype=torch.long), [0, 0]).is_chain


def test_the_empty_drafter_proposes_nothing() -> None:
    tree = Drafter().propose([row([1]), row([2])], [4, 4])
    assert (tree.size, tree.q) == (0, None)
    assert Drafter().nbytes == 0


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),  # what followed 1 2 3
        ([5, 3, 8, 1, 2, 3, 9, 7, 3, 6, 4, 2, 3], [9, 7, 3, 6]),  # 2 3 beats the later 3 alone
        ([1, 3, 5, 1, 3, 6, 1, 3], [6, 1, 3, 6]),  # the most recent 1 3, whose end meets the text's: round again
        ([1, 2, 3, 4], []),
        ([7, 7], [7, 7, 7, 7]),
        ([7], []),
    ],
)
def test_ngram_looks_up(tokens: list[int], expected: list[int]) -> None:
    assert drafts(started(NGram(longest=3), [row(tokens)], [4])) == [expected]


def test_ngram_rows_are_ragged_and_one_hot() -> None:
    rows = [row([1, 2, 9, 8, 7, 1, 2]), row([4, 5]), row([3, 3, 3, 3]), row([1, 2, 9, 8, 7, 1, 2])]
    tree = started(NGram(), rows, [3, 3, 3, 0])
    assert drafts(tree) == [[9, 8, 7], [], [3, 3, 3], []]
    assert tree.q is None


def test_ngram_shortest() -> None:
    assert drafts(started(NGram(longest=3, shortest=2), [row([1, 3, 9, 2, 3])], [4])) == [[]]


def scanned(tokens: list[int], longest: int, length: int) -> list[int]:
    """The obvious way: compare the end of the text with every place before it."""
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                after = tokens[end:]
                return [after[i % len(after)] for i in range(length)]
    return []


@pytest.mark.parametrize("longest", [1, 3, 8])
def test_the_ngram_index_finds_what_a_scan_finds(longest: int) -> None:
    """As texts grow by unequal steps and rows leave."""
    rng = torch.Generator().manual_seed(longest)
    rows = [row(torch.randint(3, (3 + i,), generator=rng).tolist()) for i in range(4)]
    ngram = NGram(longest)
    ngram.start(rows, 99)
    for step in range(40):
        if step in (10, 20):
            ngram.drop(1)
            rows[1] = rows[-1]
            rows.pop()
        matches = ngram.matches(rows, [5] * len(rows))
        assert [list(match.draft) for match in matches] == [scanned(each.tokens, longest, 5) for each in rows]
        for each in rows:
            each.tokens += torch.randint(3, (int(torch.randint(4, (1,), generator=rng)),), generator=rng).tolist()


def test_ngram_tells_how_long_the_match_is() -> None:
    rows = [row([1, 2, 3, 9, 1, 2, 3]), row([9, 3, 8, 3]), row([1, 2]), row([4] * 30)]
    ngram = NGram()
    ngram.start(rows, 64)
    assert [match.length for match in ngram.matches(rows, [2] * 4)] == [3, 1, 0, 8]


def test_ngram_forgets_the_texts_before() -> None:
    ngram = NGram()
    ngram.start([row([1, 2, 3, 1, 2])], 64)
    assert drafts(ngram.propose([row([1, 2, 3, 1, 2])], [1])) == [[3]]
    assert drafts(started(ngram, [row([7, 8, 1, 2])], [1])) == [[]]


class OnlySmall(Constraint):
    """Allows tokens below 8, and 9 as the first of a path."""

    def __init__(self) -> None:
        pass

    def allowed(self, path: Sequence[int] = ()) -> Tensor:
        mask = torch.arange(VOCAB) < 8
        mask[9] = len(path) == 0
        return mask


def test_an_ngram_draft_ends_where_the_constraint_refuses() -> None:
    rows = [row([1, 2, 9, 5, 9, 7, 1, 2]), row([1, 2, 3, 8, 1, 2]), row([1, 8, 1]), row([1, 8, 1])]
    for each in rows[:3]:
        each.constraint = OnlySmall()
    assert drafts(started(NGram(), rows, [5] * 4)) == [[9, 5], [3], [], [8, 1, 8, 1, 8]]


@pytest.mark.parametrize("longest", [0, 17])
def test_ngram_refuses(longest: int) -> None:
    with pytest.raises(SettingError, match=rf"longest = {longest}: allowed is 1 … 16"):
        NGram(longest=longest)
    with pytest.raises(SettingError, match=r"shortest = 4: allowed is 1 … longest \(3\)"):
        NGram(longest=3, shortest=4)


def test_a_greedy_draft_is_the_models_own_continuation() -> None:
    model, prompt = tiny(0), text(1, 9)
    drafter = DraftModel(model)
    rows = [row(prompt)]
    drafter.start(rows, 64)
    tree = drafter.propose(rows, [5])
    expected = list(prompt)
    for _ in range(5):
        expected.append(int(logits_after(model, expected).argmax()))
    assert drafts(tree) == [expected[9:]]
    assert tree.q is None


def test_q_is_the_distribution_after_every_processor() -> None:
    """CASES 9, 17: at each drafted position, penalties over the drafted path included."""
    model, prompt = tiny(0), text(1, 9)
    drafter, rows = DraftModel(model), [row(prompt, SAMPLED)]
    drafter.start(rows, 64)
    tree = drafter.propose(rows, [5])
    assert tree.q is not None
    path = list(prompt)
    for i, token in enumerate(drafts(tree)[0]):
        scores = logits_after(model, path)
        for seen in set(path):
            scores[seen] = scores[seen] * 1.2 if scores[seen] < 0 else scores[seen] / 1.2
        torch.testing.assert_close(tree.q[0, i], distribution(scores, SAMPLED), atol=1e-5, rtol=1e-4)
        assert tree.q[0, i, token] > 0
        path.append(token)


def test_drafted_tokens_follow_q() -> None:
    """5,000 rows, χ² over the tokens q allows at 1e-4: a total variation of 0.06 is found with a power > 0.99."""
    assert stats.ncx2.sf(stats.chi2.isf(1e-4, VOCAB - 1), VOCAB - 1, 4 * 5000 * 0.06**2) > 0.99
    model, n = tiny(0), 5000
    drafter = DraftModel(model)
    rows = [row([3, 1, 4], Sampling(temperature=0.8, top_p=0.95), seed) for seed in range(n)]
    drafter.start(rows, 16)
    tree = drafter.propose(rows, [1] * n)
    assert tree.q is not None
    q = tree.q[0, 0]
    counts = torch.bincount(tree.tokens[:, 0], minlength=VOCAB)
    assert (counts[q == 0] == 0).all()
    allowed = q[q > 0].double()
    assert stats.chisquare(counts[q > 0].numpy(), (allowed / allowed.sum() * n).numpy()).pvalue > 1e-4


def test_feeding_in_chunks_returns_each_rows_last_state() -> None:
    model, rows = tiny(0), [text(1, 2), text(2, 11), text(3, 5)]
    cache = model.new_cache(3, 16)
    last = feed(model, cache, rows, chunk=3)
    assert last is not None
    assert cache.lengths == [2, 11, 5]
    for tokens, hidden in zip(rows, last, strict=True):
        torch.testing.assert_close(model.logits(hidden), logits_after(model, tokens), atol=1e-4, rtol=1e-4)
    assert feed(model, cache, [[], [], []]) is None


class Watched(DraftModel):
    """Checks after every step that the cache holds a prefix of the committed tokens (CASES 14)."""

    checked = 0
    may_lack = 2

    def observe(self, rows: Sequence[Any], paths: Sequence[Sequence[int] | None], hidden: torch.Tensor) -> None:
        super().observe(rows, paths, hidden)
        assert self.cache is not None
        for index, each in enumerate(rows):
            length = self.cache.lengths[index]
            if each.trace.finish or not length:
                continue  # its last tokens may have been cut; it leaves
            fresh = self.model.new_cache(1, length)
            self.model.forward(torch.tensor([each.tokens[:length]]), fresh)
            for ours, theirs in zip((*self.cache.keys, *self.cache.values), (*fresh.keys, *fresh.values), strict=True):
                torch.testing.assert_close(ours[index, :, :length], theirs[0], atol=1e-4, rtol=1e-3)
            # it lacks the root, and after a step that kept the whole draft that draft's last token
            assert len(each.tokens) - length <= self.may_lack
            self.checked += 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_cache_holds_the_committed_prefix(temperature: float, seed: int) -> None:
    """seed 0: the main model drafts for itself, so that bonus tokens come; 7: another model, often rejected."""
    main = tiny(0)
    watched = Watched(tiny(seed))
    prompts = [text(i, 3 + 4 * i) for i in range(4)]
    Decoder(main, watched, 4).generate_batch(prompts, max_new_tokens=20, temperature=temperature, seed=3)
    assert watched.checked >= 12


class Planned(Watched):
    """Drafts as many tokens as its plan says, whatever is asked for."""

    may_lack = 9
    plan = ([0, 3, 1], [2, 0, 3], [3, 1, 0], [0, 0, 0], [1, 3, 2], [0, 3, 3], [3, 3, 3])

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        self.turn = getattr(self, "turn", -1) + 1
        planned = self.plan[self.turn % len(self.plan)]
        return super().propose(rows, [min(pair) for pair in zip(planned, lengths, strict=False)])


def test_the_cache_holds_the_prefix_of_rows_that_skip_a_step() -> None:
    """A controller may plan no draft for one row while the others draft."""
    main = tiny(0)
    prompts = [text(i, 3 + 4 * i) for i in range(3)]
    planned = Planned(tiny(7))
    out = Decoder(main, planned, 4).generate_batch(prompts, max_new_tokens=24)
    plain = Decoder(main).generate_batch(prompts, max_new_tokens=24)
    assert [g.tokens for g in out] == [g.tokens for g in plain]
    assert planned.checked > 10


@pytest.mark.parametrize(("ours", "theirs"), [(VOCAB, VOCAB + 9), (VOCAB + 9, VOCAB)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabularies(ours: int, theirs: int, temperature: float) -> None:
    """CASES 19: the draft's embedding has fewer or more rows than the main model's."""
    main, draft = tiny(0, vocab_size=ours), tiny(5, vocab_size=theirs)
    decoder = Decoder(main, DraftModel(draft, main.vocab_size), 4)
    prompt = [*text(2, 6), ours - 1]  # an id that the smaller draft has no row for
    out = decoder.generate(prompt, max_new_tokens=40, temperature=temperature, seed=1)
    assert len(out.tokens) == 40
    if temperature == 0:
        assert out.tokens == Decoder(main).generate(prompt, max_new_tokens=40).tokens
    for step in out.trace.steps:
        assert all(0 < q <= 1 + 1e-6 for q in step.q)
        assert all(token < min(ours, theirs) for token in step.drafted)


class Echo(Drafter):
    """A third drafter in a few lines: the last token again and again."""

    name = "echo"

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        last = torch.tensor([each.tokens[-1] for each in rows])
        return chains(last[:, None].expand(-1, max(lengths)), lengths)


def test_a_new_drafter_needs_one_method() -> None:
    main, prompt = tiny(0), text(4, 5)
    out = Decoder(main, Echo(), 3).generate(prompt, max_new_tokens=30)
    assert out.tokens == Decoder(main).generate(prompt, max_new_tokens=30).tokens
    assert all(step.drafted == [step.drafted[0]] * len(step.drafted) for step in out.trace.steps if step.drafted)


def test_a_row_far_behind_catches_up_beside_a_long_one() -> None:
    """The block that feeds it takes as many slots of the long row, which has fewer left."""
    model = tiny(0)
    long, text = [1, 2, 3] * 6, [4, 5, 6, 7] * 4
    cache, alone = model.new_cache(2, 20), model.new_cache(1, 20)
    feed(model, cache, [long, []])
    last, wanted = feed(model, cache, [[], text]), feed(model, alone, [text])
    assert last is not None
    assert wanted is not None
    assert cache.lengths == [18, 16]
    assert torch.allclose(last[1], wanted[0], atol=1e-5)
