"""The hybrid: what it chooses, that the merged tree is lossless, that the model beside it misses nothing."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import random_llama
from test_decoding import SIGNIFICANCE, exact, p_value, two_tokens
from test_drafting import Watched, drafts, row, text, tiny
from test_feature import layers, model_of
from torch import Tensor

from specdec_lab.decoding import Decoder
from specdec_lab.drafting import Drafter, DraftModel, FeatureDraft, Hybrid, NGram, Row, Tree, chains
from specdec_lab.drafting import hybrid as module
from specdec_lab.drafting.hybrid import MODEL_PRIOR, WEIGHT, Survival, _agreement, _depth, _Known, _merge
from specdec_lab.drafting.ngram import Match
from specdec_lab.errors import ModelError, SettingError
from specdec_lab.models.llama import LlamaModel
from specdec_lab.sampling import Sampling


class Turns(Hybrid):
    """Takes the free draft, where there is one, every other time, whatever is learned."""

    turn = 0

    def _prefers_free(self, known: _Known, room: int) -> bool:
        self.turn += 1
        return bool(known.match.draft) and self.turn % 2 == 0


class Chosen(Drafter):
    """Proposes what it is told: for each row a chain, or (tokens, parents)."""

    name = "chosen"

    def __init__(self, *trees: Any, q: Tensor | None = None) -> None:
        self.trees, self.q = trees, q
        self.asked: list[int] = []
        self.heard: list[list[int]] = []

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        self.asked = list(lengths)
        trees = [
            ([], []) if not n else t if isinstance(t, tuple) else (t[:n], range(-1, min(n, len(t)) - 1))
            for t, n in zip(self.trees, lengths, strict=True)
        ]
        width = max(len(tokens) for tokens, _ in trees)
        pad = [([*tokens, *[0] * (width - len(tokens))], [*p, *[-2] * (width - len(tokens))]) for tokens, p in trees]
        tokens, parents = (
            torch.tensor(part, dtype=torch.long).view(len(rows), width) for part in zip(*pad, strict=True)
        )
        return Tree(tokens, parents, None if self.q is None else self.q[:, :width])

    def observe(self, rows: Sequence[Row], paths: Sequence[Sequence[int] | None], hidden: Tensor) -> None:
        self.heard = [list(path or ()) for path in paths]


def kinds(main: LlamaModel) -> dict[str, Drafter]:
    """Drafters that may stand beside prompt lookup: chains and trees, with a cache and with hidden states."""
    feature = model_of(layers(main), main)
    return {
        "draft": DraftModel(random_llama(3, layers=1)),
        "itself": DraftModel(main),
        "chain": FeatureDraft(feature, 8),
        "tree": FeatureDraft(feature, 8),
        "parallel": FeatureDraft(model_of(layers(main, parallel=True), main), 8),
        "sampled tree": FeatureDraft(feature, 8, branching="chains"),
    }


KINDS = ("draft", "itself", "chain", "tree", "parallel", "sampled tree")
# of a vocabulary of eight: rows of different lengths, full of repetitions
PROMPTS = [[3, 1, 4, 3, 1], [2, 7, 2, 7, 2, 7, 2], [5, 6], [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]]


@pytest.fixture(scope="module")
def main() -> LlamaModel:
    return random_llama(0, layers=2)


WIDTH = {"tree": 2, "sampled tree": 3}  # candidates


def made_of(name: str, main: LlamaModel, kind: type[Hybrid] = Hybrid) -> Hybrid:
    return kind(NGram(), kinds(main)[name])


# What it chooses


def test_survival_begins_with_its_prior_and_follows_what_is_seen() -> None:
    survival = Survival(0.5)
    assert survival.expected(3) == pytest.approx(0.5 + 0.25 + 0.125)
    survival.add(0, 2 * WEIGHT)
    assert survival.expected(1) == pytest.approx(0.5 / 3)
    survival.add(100_000, 100_000)
    assert survival.expected(4) == pytest.approx(4, abs=0.01)


@pytest.mark.parametrize(
    ("draft", "committed", "expected"),
    [
        ([1, 2, 3], [1, 2, 9], (2, 3)),  # the third was tried in vain
        ([1, 2, 3], [9], (0, 1)),
        ([1, 2, 3], [1, 2], (2, 2)),  # of the third nothing is known
        ([1, 2], [1, 2, 9], (2, 2)),
        ([1, 2], [], (0, 0)),
    ],
)
def test_how_far_a_draft_agrees(draft: list[int], committed: list[int], expected: tuple[int, int]) -> None:
    assert _agreement(draft, committed) == expected


def test_depth() -> None:
    assert (_depth([]), _depth([-1, -1, -1]), _depth([-1, 0, 1]), _depth([-1, -1, 0, 2, 2])) == (0, 1, 3, 3)


def test_it_takes_long_matches_and_leaves_short_ones_to_the_model() -> None:
    rows = [row([1, 2, 3, 4, 5, 6, 1, 2, 3]), row([5, 9, 5]), row([1, 2])]
    model = Chosen([11] * 4, [12] * 4, [13] * 4)
    hybrid = Hybrid(NGram(), model)
    hybrid.start(rows, 64)
    assert drafts(hybrid.propose(rows, [4, 4, 4])) == [[4, 5, 6, 1], [12] * 4, [13] * 4]
    assert model.asked == [0, 4, 4]
    assert hybrid.propose(rows, [0, 0, 0]).size == 0


def test_a_dear_model_is_asked_less() -> None:
    rows, chosen = [row([5, 9, 5])], []
    for step_cost in (0.0, 0.5):
        hybrid = Hybrid(NGram(), Chosen([12] * 4), step_cost)
        hybrid.start(rows, 64)
        chosen += drafts(hybrid.propose(rows, [4]))
    assert chosen == [[12] * 4, [9, 5, 9, 5]]


def step(hybrid: Hybrid, rows: list[Row], committed: Sequence[Sequence[int]], length: int = 4) -> list[list[int]]:
    """One step in which each row's chain is accepted as far as it agrees with `committed`."""
    proposed = drafts(hybrid.propose(rows, [length] * len(rows)))
    paths = [list(range(_agreement(d, new[:-1])[0])) for d, new in zip(proposed, committed, strict=True)]
    for each, new in zip(rows, committed, strict=True):
        each.tokens += new
    hybrid.observe(rows, paths, torch.zeros(len(rows), 5, 1))
    return proposed


def test_it_learns_from_drafts_it_did_not_take_and_from_each_row_alone() -> None:
    """Short matches always turn out right in row 0, always wrong in row 1; the model's never are."""
    rows = [row([5, 9, 5]), row([5, 9, 5])]
    hybrid = Hybrid(NGram(longest=1), Chosen([12] * 4, [12] * 4))
    hybrid.start(rows, 999)
    seen = [step(hybrid, rows, [[9, 5, 9, 5], [20 + i, 5]]) for i in range(12)]
    assert seen[0] == [[12] * 4, [12] * 4]
    assert [proposed[0] for proposed in seen[-3:]] == [[9, 5, 9, 5]] * 3
    free = [known.free[1] for known in hybrid._known]
    assert free[0].stayed == free[0].tried > 20
    assert free[1].stayed <= 1 < 10 <= free[1].tried
    hybrid.start(rows, 999)  # CASES 20
    assert all(known.free == {} and known.model == Survival(MODEL_PRIOR) for known in hybrid._known)


def test_a_model_that_fails_is_given_up() -> None:
    rows = [row([5, 9, 5])]
    hybrid = Hybrid(NGram(longest=1), Chosen([12] * 4))
    hybrid.start(rows, 999)
    seen = [step(hybrid, rows, [[9, 7, 5]])[0] for _ in range(10)]  # one free token stays, none of the model's
    assert seen[0] == [12] * 4
    assert seen[-1] == [9, 7, 5, 9]


def test_trees_teach_by_level() -> None:
    """Two levels: 5 and 6 behind the root, 7 behind 6."""
    rows = [row([1, 2])]
    model = Chosen(([5, 6, 7], [-1, -1, 1]))
    hybrid = Hybrid(NGram(), model)
    hybrid.start(rows, 64)
    for path, counts in (([], (0, 1)), ([1], (1, 3)), ([1, 2], (3, 5)), ([0], (4, 6))):
        hybrid.propose(rows, [4])
        hybrid.observe(rows, [path], torch.zeros(1, 4, 1))
        known = hybrid._known[0]
        assert (known.model.stayed, known.model.tried, known.depth) == (*counts, 2)
        assert model.heard == [path]


def test_the_free_draft_serves_beyond_the_models_context() -> None:
    main = tiny(0)
    short = DraftModel(tiny(5, context=12))
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    out = Decoder(main, Hybrid(NGram(), short), 4).generate(prompt, max_new_tokens=40)
    assert out.tokens == Decoder(main).generate(prompt, max_new_tokens=40).tokens
    assert any(each.drafted for each in out.trace.steps[10:])


def test_a_model_that_proposes_nothing_leaves_the_row_to_the_free_draft() -> None:
    rows = [row([5, 9, 5])]
    hybrid = Hybrid(NGram(), Chosen([]))
    hybrid.start(rows, 64)
    assert drafts(hybrid.propose(rows, [3])) == [[9, 5, 9]]


def test_what_it_forwards() -> None:
    main = random_llama(0, layers=2)
    feature = FeatureDraft(model_of(layers(main), main), 8)
    hybrid = Hybrid(NGram(), feature)
    assert (hybrid.name, hybrid.reads_hidden, hybrid.nbytes) == ("ngram+feature", True, feature.nbytes)
    Decoder(main, hybrid, 4).generate([3, 1, 4], max_new_tokens=8)
    assert hybrid.cache_nbytes == feature.cache_nbytes > 0
    assert not Hybrid(NGram(), Drafter()).reads_hidden
    with pytest.raises(SettingError, match="step_cost = -1"):
        Hybrid(NGram(), Drafter(), step_cost=-1)


# Merging


def test_a_merged_tree_keeps_both_sides() -> None:
    tree = Tree(
        torch.tensor([[5, 6, 7], [0, 0, 0], [4, 0, 0]]), torch.tensor([[-1, -1, 1], [-2] * 3, [-1, -2, -2]]), None
    )
    merged = _merge(tree, [(), (1, 2, 3, 4), ()])
    assert drafts(merged) == [[5, 6, 7], [1, 2, 3, 4], [4]]
    assert merged.parents.tolist() == [[-1, -1, 1, -2], [-1, 0, 1, 2], [-1, -2, -2, -2]]
    assert merged.q is None


def test_free_rows_of_a_drawn_tree_are_one_hot() -> None:
    q = torch.rand(2, 3, 9)
    merged = _merge(chains(torch.tensor([[5, 6, 7], [8, 8, 8]]), [3, 0], q), [(), (1, 2, 3, 4)])
    assert merged.q is not None
    assert torch.equal(merged.q[0, :3], q[0])
    assert torch.equal(merged.q[1], torch.eye(9)[[1, 2, 3, 4]])


# Losslessness


@pytest.mark.parametrize("kind", [Hybrid, Turns])
@pytest.mark.parametrize("name", KINDS)
def test_greedy_is_the_plain_loop(name: str, kind: type[Hybrid], main: LlamaModel) -> None:
    """Ragged rows that leave at different times."""
    hybrid = made_of(name, main, kind)
    decoder, plain = Decoder(main, hybrid, 4, candidate_count=WIDTH.get(name, 1)), Decoder(main)
    settings = {"max_new_tokens": 30, "eos": [2]}
    out = decoder.generate_batch(PROMPTS, **settings)
    assert [g.tokens for g in out] == [g.tokens for g in plain.generate_batch(PROMPTS, **settings)]
    assert len({len(g.tokens) for g in out}) > 1
    assert not any(each.drafted and max(each.q, default=0) < 1 for g in out for each in g.trace.steps)


class Pair(NGram):
    """Always drafts, so that one-hot proposals are put to the test in every row that takes them."""

    def matches(self, rows: Sequence[Row], lengths: Sequence[int]) -> list[Match]:
        return [Match(1, tuple(r.tokens[-1:-3:-1][:n])) for r, n in zip(rows, lengths, strict=True)]


@pytest.mark.parametrize("name", ["draft", "tree", "sampled tree"])
def test_what_it_samples_is_what_the_model_says(name: str, main: LlamaModel) -> None:
    """As in test_decoding, in batches whose rows draft either way; see there for the power."""
    model = kinds(main)[name]
    decoder = Decoder(main, Turns(Pair(), model), 2, candidate_count=WIDTH.get(name, 1))
    counts = two_tokens(decoder, temperature=1.0, top_p=0.95)
    assert p_value(counts, exact(main, Sampling(1.0, top_p=0.95))) > SIGNIFICANCE


def test_control_a_free_draft_scored_as_drawn_is_found(main: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 9: its rows keep a q that its tokens were not drawn from."""

    def wrong(tree: Tree, drafts: Sequence[Sequence[int]]) -> Tree:
        merged = _merge(tree, drafts)
        uniform = None if merged.q is None else torch.full_like(merged.q, 1 / 8)
        if uniform is None or merged.q is None:
            return merged
        taken = torch.tensor([bool(draft) for draft in drafts])
        return Tree(merged.tokens, merged.parents, torch.where(taken[:, None, None], uniform, merged.q))

    monkeypatch.setattr(module, "_merge", wrong)
    counts = two_tokens(Decoder(main, Turns(Pair(), DraftModel(random_llama(3, layers=1))), 2), temperature=1.0)
    assert p_value(counts, exact(main, Sampling(1.0))) < SIGNIFICANCE


def test_control_a_choice_after_the_draw_is_found(main: LlamaModel) -> None:
    """CASES 24: the model's draft is kept where the token it drew is a likely one, and scored by its whole q."""

    class Peeking(Hybrid):
        def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
            tree = super().propose(rows, lengths)
            if tree.q is None or not tree.size:
                return tree
            likely = tree.q[:, 0].gather(1, tree.tokens[:, :1])[:, 0] > 0.2
            free = [match.draft for match in Pair().matches(rows, lengths)]
            return _merge(tree, [() if keep else draft for keep, draft in zip(likely.tolist(), free, strict=True)])

        def _prefers_free(self, known: _Known, room: int) -> bool:
            return False

    counts = two_tokens(Decoder(main, Peeking(Pair(), DraftModel(random_llama(3, layers=1))), 2), temperature=1.0)
    assert p_value(counts, exact(main, Sampling(1.0))) < SIGNIFICANCE


@pytest.mark.parametrize("name", KINDS)
def test_a_row_does_not_depend_on_its_batch(name: str, main: LlamaModel) -> None:
    """CASES 18, 21: neither its tokens nor what was drafted for it."""
    decoder = Decoder(main, made_of(name, main), 4, candidate_count=WIDTH.get(name, 1))
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.8}
    together = decoder.generate_batch(PROMPTS, seed=5, **settings)
    for index, (prompt, row_of_many) in enumerate(zip(PROMPTS, together, strict=True)):
        alone = decoder.generate(prompt, seed=5 + index, **settings)
        assert alone.tokens == row_of_many.tokens
        assert [s.drafted for s in alone.trace.steps] == [s.drafted for s in row_of_many.trace.steps]


def test_one_call_leaves_nothing_behind_for_the_next(main: LlamaModel) -> None:
    """CASES 20."""
    decoder = Decoder(main, made_of("draft", main), 4)
    first, _, second = (decoder.generate(PROMPTS[i], max_new_tokens=30) for i in (0, 1, 0))
    assert [s.drafted for s in first.trace.steps] == [s.drafted for s in second.trace.steps]


# The model beside it


class Lagging(Watched):
    """Misses what the free draft has won until it is asked again."""

    may_lack = 64


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_models_cache_holds_the_committed_prefix(temperature: float, seed: int) -> None:
    """CASES 14, with rows that take free drafts while others do not, and rows that leave."""
    main, watched = tiny(0), Lagging(tiny(seed))
    hybrid = Turns(NGram(), watched)
    prompts = [text(i, 3 + 4 * i) * 2 for i in range(4)]
    settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "eos": [3]}
    out = Decoder(main, hybrid, 4).generate_batch(prompts, seed=3, **settings)
    if temperature == 0:
        assert [g.tokens for g in out] == [g.tokens for g in Decoder(main).generate_batch(prompts, **settings)]
    assert watched.checked >= 12


def test_an_accepted_free_draft_reaches_the_model_as_if_it_were_its_own(main: LlamaModel) -> None:
    """A draft that reads hidden states proposes the same, whoever drafted what is committed."""
    feature = model_of(layers(main), main)
    alone, beside = FeatureDraft(feature, 8), FeatureDraft(feature, 8)
    hybrid = Turns(NGram(), beside)
    seen: list[tuple[list[int], list[int]]] = []

    class Both(Drafter):
        """Decodes by the hybrid and asks the other one at each step what it would have said."""

        reads_hidden = True

        def start(self, rows: Sequence[Row], max_len: int, hidden: Sequence[Tensor] = ()) -> None:
            alone.start(rows, max_len, hidden)
            hybrid.start(rows, max_len, hidden)

        def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
            expected, tree = alone.propose(rows, lengths), hybrid.propose(rows, lengths)
            if hybrid._known[0].parents:
                seen.append((drafts(expected)[0], drafts(tree)[0]))
            return tree

        def observe(self, rows: Sequence[Row], paths: Sequence[Sequence[int] | None], hidden: Tensor) -> None:
            alone.observe(rows, paths, hidden)
            hybrid.observe(rows, paths, hidden)

        def drop(self, row: int) -> None:
            alone.drop(row)
            hybrid.drop(row)

    made = Decoder(main, Both(), 4).generate(PROMPTS[1], max_new_tokens=40)
    assert len(seen) > 3
    assert len(made.trace.steps) > len(seen)  # the others were free ones
    assert all(expected == proposed for expected, proposed in seen)


def test_hybrids_by_name(tiny_folder: str, tiny_draft_folder: str) -> None:
    from specdec_lab.models.zoo import drafter_fingerprint, load_drafter, load_main

    main = load_main(tiny_folder, device="cpu", dtype="float32")
    hybrid = load_drafter(f"ngram+{tiny_draft_folder}", main)
    assert isinstance(hybrid, Hybrid)
    assert isinstance(hybrid.partner, DraftModel)
    assert drafter_fingerprint(f"ngram+{tiny_draft_folder}") == "ngram+" + drafter_fingerprint(tiny_draft_folder)
    prompt = [5, 6, 7, 5, 6, 7, 5]
    drafted = Decoder(main.model, hybrid, 4).generate(prompt, max_new_tokens=20)
    assert drafted.tokens == Decoder(main.model).generate(prompt, max_new_tokens=20).tokens
    ngram = load_drafter("ngram", main, longest=2)
    assert isinstance(ngram, NGram)
    assert ngram.longest == 2
    with pytest.raises(SettingError, match="option confidence of ngram = 0.5: allowed is none but longest, shortest"):
        load_drafter("ngram", main, confidence=0.5)
    with pytest.raises(ModelError, match="no model 'nope'"):
        load_drafter("ngram+nope", main)
