"""Trees of candidates: their shape, that they change no distribution, and what is found when they would."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import random_llama
from scipy import stats
from test_decoding import SIGNIFICANCE, START, exact, p_value, two_tokens
from test_feature import layers, model_of
from torch import Tensor

from specdec_lab.control import History
from specdec_lab.decoding import MAX_NODES, Decoder
from specdec_lab.drafting import Drafter, DraftModel, FeatureDraft, Row, Tree
from specdec_lab.drafting import tree as growth
from specdec_lab.drafting.tree import BRANCHINGS, compact
from specdec_lab.errors import SettingError, UnknownNameError
from specdec_lab.metrics import totals
from specdec_lab.models.huggingface import HuggingFaceModel
from specdec_lab.models.llama import LlamaModel
from specdec_lab.models.zoo import Main
from specdec_lab.sampling import Sampling, distribution

DRAWN = ("chains", "distinct")


@pytest.fixture(scope="module")
def main() -> LlamaModel:
    return random_llama(0, layers=2)


def drafter(kind: str, branching: str, main: LlamaModel, **options: Any) -> Drafter:
    if kind == "features":
        return FeatureDraft(model_of(layers(main), main), 8, branching, **options)
    return DraftModel(random_llama(3, layers=1), branching=branching, **options)


def row(tokens: Sequence[int], candidates: int, seed: int = 0, eos: Sequence[int] = (), **how: Any) -> Row:
    generator = torch.Generator().manual_seed(seed)
    ends = frozenset(eos)
    return Row(list(tokens), Sampling(**how), generator, eos=ends, candidates=candidates, tree=True)


def proposed(draft: Drafter, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
    draft.start(rows, 200)
    return draft.propose(rows, lengths)


def paths(tree: Tree, row: int = 0) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        if parent >= -1:
            found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


# ---- shape


def scores_behind(model: LlamaModel, tokens: Sequence[int]) -> Tensor:
    cache = model.new_cache(1, len(tokens))
    return model.logits(model.forward(torch.tensor([tokens]), cache))[0, -1]


def test_top_k_starts_with_the_most_probable_tokens_and_goes_on_greedily() -> None:
    model = random_llama(3, layers=1)
    for temperature in (0.0, 0.8):
        tree = proposed(DraftModel(model, branching="top_k"), [row(START, 3, temperature=temperature)], [4])
        assert tree.q is None
        wanted = set()
        for first in scores_behind(model, START).topk(3).indices.tolist():
            path = [first]
            while len(path) < 4:
                path.append(int(scores_behind(model, [*START, *path]).argmax()))
            wanted |= {tuple(path[:n]) for n in range(1, 5)}
        assert set(paths(tree)) == wanted
        assert len(paths(tree)) == 12


@pytest.mark.parametrize("branching", BRANCHINGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_candidate_is_a_chain(branching: str, temperature: float, main: LlamaModel) -> None:
    """Drawn, where the branching draws, with the same numbers as without a tree."""
    one = proposed(drafter("model", branching, main), [row(START, 1, temperature=temperature)], [5])
    alone = row(START, 1, temperature=temperature if branching in DRAWN else 0.0)
    alone.tree = False
    chain = proposed(drafter("model", branching, main), [alone], [5])
    assert torch.equal(one.tokens, chain.tokens)
    assert one.is_chain
    assert (one.q is None) == (chain.q is None)


@pytest.mark.parametrize("branching", DRAWN)
def test_each_q_is_what_the_token_was_drawn_from(branching: str) -> None:
    model, how = random_llama(3, layers=1), Sampling(temperature=0.9, top_k=6)
    drawn = row(START, 5, temperature=0.9, top_k=6)
    tree = proposed(DraftModel(model, branching=branching), [drawn], [3])
    assert tree.q is not None
    taken: list[int] = []
    for node, path in enumerate(paths(tree)):
        q = distribution(scores_behind(model, [*START, *path[:-1]])[None], how)[0]
        if branching == "distinct" and len(path) == 1:
            q = q.index_fill(0, torch.tensor(taken, dtype=torch.long), 0.0)
            q = q / q.sum()
            taken.append(path[0])
        torch.testing.assert_close(tree.q[0, node], q, atol=1e-5, rtol=1e-4)
    if branching == "distinct":
        assert len(set(taken)) == len(taken) == 5


def test_what_is_drawn_twice_is_tried_twice_and_continued_once() -> None:
    """Cold chains are alike: the copies are leaves, their continuations hang under the first of them."""
    tree = proposed(drafter("model", "chains", random_llama(0, 2)), [row(START, 3, temperature=1e-3)], [3])
    assert tree.tokens[0].tolist() == [token for token in tree.tokens[0, ::3].tolist() for _ in range(3)]
    assert tree.parents[0].tolist() == [-1, -1, -1, 0, 0, 0, 3, 3, 3]


def test_distinct_candidates_end_where_there_are_no_more() -> None:
    """Of three tokens with any probability there are no four different ones."""
    tree = proposed(drafter("model", "distinct", random_llama(0, 2)), [row(START, 6, temperature=1.0, top_k=3)], [2])
    assert sorted(path for path in paths(tree) if len(path) == 1) == sorted(set(paths(tree)) & {(t,) for t in range(8)})
    assert sum(len(path) == 1 for path in paths(tree)) == 3


@pytest.mark.parametrize("branching", BRANCHINGS)
def test_nothing_is_drafted_behind_an_end(branching: str, main: LlamaModel) -> None:
    ends = scores_behind(random_llama(3, layers=1), START).topk(2).indices.tolist()
    for candidates in (1, 4):
        tree = proposed(drafter("model", branching, main), [row(START, candidates, 1, ends)], [6])
        assert len(paths(tree)) > 0
        assert not any(set(path[:-1]) & set(ends) for path in paths(tree))


@pytest.mark.parametrize("branching", DRAWN)
def test_a_confident_candidate_ends_before_it_becomes_improbable(branching: str, main: LlamaModel) -> None:
    def nodes(confidence: float) -> int:
        how = row(START, 3, temperature=1.0)
        return len(paths(proposed(drafter("model", branching, main, confidence=confidence), [how], [5])))

    assert nodes(0.0) == 15
    assert 15 > nodes(0.05) > nodes(0.9) == 0


def test_compact_keeps_order_and_parents() -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])
    parents = torch.tensor([[-1, -1, 1, 2], [-1, -1, 1, 2]])
    kept = torch.tensor([[False, True, True, True], [True, False, False, False]])
    tree = compact(tokens, parents, kept, None)
    assert tree.tokens[0].tolist() == [6, 7, 8]
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, -2, -2]]
    assert tree.tokens[1, 0] == 5


# ---- losslessness

HOW: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}


@pytest.mark.parametrize("candidates", [2, 4, 8])
@pytest.mark.parametrize("branching", BRANCHINGS)
@pytest.mark.parametrize("kind", ["model", "features"])
def test_greedy_equals_the_plain_loop(kind: str, branching: str, candidates: int, main: LlamaModel) -> None:
    prompts = [[1], [*START], [3, 1, 4, 1, 5, 2, 6], [7] * 5]
    plain = Decoder(main).generate_batch(prompts, max_new_tokens=25, eos=[2])
    decoder = Decoder(main, drafter(kind, branching, main), 5, candidate_count=candidates)
    together = decoder.generate_batch(prompts, max_new_tokens=25, eos=[2])
    assert [made.tokens for made in together] == [made.tokens for made in plain]
    alone = [decoder.generate(prompt, max_new_tokens=25, eos=[2]) for prompt in prompts]
    assert [made.tokens for made in alone] == [made.tokens for made in plain]
    steps = [step for made in alone for step in made.trace.steps]
    assert max(map(len, (step.accepted for step in steps))) > (branching != "dynamic")  # five nodes may be flat
    assert any(len(set(step.parents)) < len(step.parents) for step in steps), "nothing branches"


@pytest.mark.parametrize("candidates", [2, 4, 8])
@pytest.mark.parametrize("branching", BRANCHINGS)
def test_sampling_follows_the_main_model(branching: str, candidates: int, main: LlamaModel) -> None:
    """As in test_decoding; see there for the power."""
    counts = two_tokens(Decoder(main, drafter("model", branching, main), 2, candidate_count=candidates), **HOW)
    assert p_value(counts, exact(main, Sampling(**HOW))) > SIGNIFICANCE


@pytest.mark.parametrize("branching", BRANCHINGS)
def test_sampling_from_features_follows_the_main_model(branching: str, main: LlamaModel) -> None:
    counts = two_tokens(Decoder(main, drafter("features", branching, main), 2, candidate_count=4), **HOW)
    assert p_value(counts, exact(main, Sampling(**HOW))) > SIGNIFICANCE


class Edited(DraftModel):
    """Changes the order or number of what was drawn, by the draft's own probability."""

    prune = False

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        tree = super().propose(rows, lengths)
        if tree.q is None:
            return tree
        own = tree.q.gather(2, tree.tokens[..., None])[..., 0].masked_fill(tree.parents < -1, -1.0)
        if self.prune:
            return compact(tree.tokens, tree.parents, own >= 0.12, tree.q)
        order = own.argsort(dim=1, descending=True)
        q = tree.q.gather(1, order[..., None].expand_as(tree.q))
        return Tree(tree.tokens.gather(1, order), tree.parents.gather(1, order), q)


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("branching", DRAWN)
def test_control_drawn_nodes_pruned_or_ranked_by_their_probability_are_found(
    branching: str, prune: bool, main: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 24. One level, so that the tree stays a tree."""
    monkeypatch.setattr(Edited, "prune", prune)
    draft = Edited(random_llama(3, layers=1), branching=branching)
    counts = two_tokens(Decoder(main, draft, 1, candidate_count=4), temperature=1.0)
    assert p_value(counts, exact(main, Sampling(1.0))) < SIGNIFICANCE


def test_control_copies_that_are_left_out_are_found(main: LlamaModel) -> None:
    """A token drawn twice and tried once: the residual is subtracted too rarely."""

    class Once(DraftModel):
        def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
            tree = super().propose(rows, lengths)
            if tree.q is None:
                return tree
            same = (tree.tokens[:, :, None] == tree.tokens[:, None]).tril(-1).any(-1)
            return compact(tree.tokens, tree.parents, ~same & (tree.parents >= -1), tree.q)

    draft = Once(random_llama(3, layers=1), branching="chains")
    counts = two_tokens(Decoder(main, draft, 1, candidate_count=4), temperature=1.0)
    assert p_value(counts, exact(main, Sampling(1.0))) < SIGNIFICANCE


def test_control_siblings_without_replacement_told_the_whole_q_are_found(
    main: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = growth._Chains._first

    def told(self: Any, scores: Tensor, own: Tensor | None, u: Tensor | None) -> Any:
        tokens, q, there = first(self, scores, own, u)
        return tokens, q if own is None or q is None else own.expand_as(q), there

    monkeypatch.setattr(growth._Chains, "_first", told)
    draft = DraftModel(random_llama(3, layers=1), branching="distinct")
    counts = two_tokens(Decoder(main, draft, 1, candidate_count=4), temperature=1.0)
    assert p_value(counts, exact(main, Sampling(1.0))) < SIGNIFICANCE


@pytest.mark.parametrize("branching", DRAWN)
def test_more_candidates_are_not_accepted_less(branching: str, main: LlamaModel) -> None:
    """The first candidate is drawn as with one, so that further ones can only add; 2,000 texts, one-sided at 1e-4."""

    def lengths(candidates: int) -> list[int]:
        draft = drafter("model", branching, main)
        decoder = Decoder(main, draft, 3, candidate_count=candidates)
        made = decoder.generate_batch([START] * 2000, max_new_tokens=4, temperature=1.0)
        return [len(g.trace.steps[0].accepted) for g in made]

    one, many = lengths(1), lengths(4)
    assert stats.ttest_ind(many, one, alternative="less").pvalue > SIGNIFICANCE
    assert sum(many) > sum(one)


# ---- batches, context, limits


@pytest.mark.parametrize("branching", BRANCHINGS)
@pytest.mark.parametrize("kind", ["model", "features"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_row_does_not_depend_on_its_batch(kind: str, branching: str, adaptive: bool, main: LlamaModel) -> None:
    """CASES 18, 21: also where each row has candidates of its own."""
    prompts = [[3, 1, 4, 3, 1], [2, 7, 2, 7, 2, 7, 2], [5, 6], [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]]
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.8, "eos": [0]}
    decoder = Decoder(
        main, drafter(kind, branching, main), 4, candidate_count=3, controller=History(0.6) if adaptive else None
    )
    together = decoder.generate_batch(prompts, seed=5, **settings)
    for index, (prompt, row_of_many) in enumerate(zip(prompts, together, strict=True)):
        alone = decoder.generate(prompt, seed=5 + index, **settings)
        assert alone.tokens == row_of_many.tokens
        assert [s.drafted for s in alone.trace.steps] == [s.drafted for s in row_of_many.trace.steps]
        assert [s.candidates for s in alone.trace.steps] == [s.candidates for s in row_of_many.trace.steps]
    if adaptive:
        assert len({step.candidates for g in together for step in g.trace.steps}) > 2


@pytest.mark.parametrize("kind", ["model", "features"])
def test_the_drafts_cache_holds_committed_tokens_alone(kind: str, main: LlamaModel) -> None:
    """CASES 14: a tree drafted behind many steps is the one of a drafter that reads the whole text at once."""
    seen: list[tuple[list[int], Tree]] = []
    draft = drafter(kind, "top_k", main)
    propose = draft.propose

    def spy(rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        tree = propose(rows, lengths)
        seen.append((list(rows[0].tokens), tree))
        return tree

    draft.propose = spy  # type: ignore[method-assign]
    Decoder(main, draft, 4, candidate_count=3).generate(START, max_new_tokens=30)
    for tokens, tree in seen[1:]:
        fresh, again = drafter(kind, "top_k", main), row(tokens, 3)
        states = main.forward(torch.tensor([tokens[:-1]]), main.new_cache(1, len(tokens)))[0]
        fresh.start([again], 200, [states])
        wanted = fresh.propose([again], [tree.size // 3])
        assert torch.equal(wanted.tokens, tree.tokens)


def test_trees_end_at_the_context(main: LlamaModel) -> None:
    """CASES 13: 64 positions; with and without an end in sight."""
    decoder = Decoder(main, drafter("model", "top_k", main), 6, candidate_count=4, eos=())
    plain = Decoder(main, eos=()).generate([1] * 40, max_new_tokens=100)
    made = decoder.generate([1] * 40, max_new_tokens=100)
    assert made.tokens == plain.tokens
    assert made.trace.finish == "context"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidate_count": 0}, r"candidate_count = 0: allowed is an integer 1 … 8"),
        ({"candidate_count": 9}, r"candidate_count = 9: allowed is an integer 1 … 8"),
        ({"candidate_count": 2.0}, r"candidate_count = 2.0: allowed is an integer 1 … 8"),
        ({"draft_length": 20, "candidate_count": 8}, r"tree = '160 nodes, from draft_length 20 and 8 candidates'"),
        ({"draft_length": 20, "controller": History()}, r"tree = '160 nodes, from draft_length 20 and 8 candidates'"),
    ],
)
def test_trees_out_of_range(settings: dict[str, Any], message: str, main: LlamaModel) -> None:
    with pytest.raises(SettingError, match=message):
        Decoder(main, drafter("model", "chains", main), **settings)


def test_unknown_branchings(main: LlamaModel) -> None:
    with pytest.raises(UnknownNameError, match="no branching 'wide'; there is: chains, distinct, dynamic, top_k"):
        drafter("model", "wide", main)
    assert MAX_NODES >= 8 * 64


# ---- on real models


@pytest.mark.parametrize("adapter", [False, True])
def test_every_node_of_a_tree_has_the_logits_of_its_own_chain(adapter: bool, bundled: Main) -> None:
    """Sixteen nodes, four branches, four levels, on the bundled model."""
    from specdec_lab.models import zoo

    model: Any = bundled.model
    if adapter:
        model = HuggingFaceModel(zoo.read(zoo.fetch_bundled())[0], "adapter")
    prefix = bundled.tokenizer("The cat sat on the mat, and then it")["input_ids"]
    nodes = bundled.tokenizer(" was a dog had to be in that they did not see any of them more")["input_ids"][:16]
    parents = [-1, -1, -1, -1, *range(12)]
    cache = model.new_cache(1, 64)
    model.forward(torch.tensor([prefix]), cache)
    cache.advance([len(prefix)])
    logits = model.logits(model.forward(torch.tensor([nodes]), cache, torch.tensor([parents])))[0]
    worst = 0.0
    for node in range(16):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = model.new_cache(1, 64)
        ids = [*prefix, *(nodes[i] for i in path)]
        wanted = model.logits(model.forward(torch.tensor([ids]), alone))[0, -1]
        worst = max(worst, float((logits[node] - wanted).abs().max()))
    assert worst <= 1e-4


def test_greedy_trees_give_the_plain_loops_tokens_on_real_prompts(bundled: Main) -> None:
    """Sixty prompts, each way to branch in turn; ties (a top-2 margin below 1e-3) may turn."""
    from specdec_lab.models.zoo import load_drafter
    from specdec_lab.tasks import load_prompts

    plain = Decoder(bundled.model, tokenizer=bundled.tokenizer, eos=bundled.eos)
    prompts = [plain.encode(p.prompt) for task in ("json", "code", "prose") for p in load_prompts(task, 20)]
    ways = [("1:4", "dynamic", 4), ("1:4", "top_k", 2), ("feature", "dynamic", 8)]
    accepted = 0
    for start, (draft, branching, candidates) in zip(range(3), ways, strict=True):
        part = prompts[start::3]
        tree = load_drafter(draft, bundled, branching=branching)
        decoder = Decoder(bundled.model, tree, 8, bundled.tokenizer, eos=bundled.eos, candidate_count=candidates)
        ours = decoder.generate_batch(part, max_new_tokens=12)
        theirs = plain.generate_batch(part, max_new_tokens=12)
        for prompt, got, wanted in zip(part, ours, theirs, strict=True):
            assert got.tokens == wanted.tokens or _tie(bundled, prompt, got.tokens, wanted.tokens)
        accepted += totals([made.trace for made in ours]).accepted
    assert accepted > 150


def _tie(main: Main, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    ids = [*prompt, *theirs[:at]]
    top = scores_behind(main.model, ids).topk(2).values  # type: ignore[arg-type]
    return float(top[0] - top[1]) < 1e-3
