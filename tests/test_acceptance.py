"""The rules against a slow reference, and what they emit against p by χ² tests with known power.

Power. A χ² test over k cells rejects with probability P(χ²(k − 1, λ) > critical value), λ = n Σ δ²/p for a
deviation δ. Whatever its direction, a deviation of total variation d has λ ≥ 4 n d² (Cauchy-Schwarz), so with
n = 200,000 draws and a significance of 1e-4 the 8-cell test finds d = 0.01, and the 64-cell test of the first two
tokens finds d = 0.0125, with a power above 0.99. `test_stated_power` computes it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from specdec_lab import acceptance
from specdec_lab.acceptance import RULES, Acceptance, Verdict, greedy_match, speculative_sampling
from specdec_lab.errors import SettingError, UnknownNameError
from specdec_lab.sampling import Sampling, distribution

DRAWS, VOCAB = 200_000, 8
Judge = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Verdict]
SIGNIFICANCE = 1e-4
WARPED = Sampling(temperature=0.7, top_k=6, top_p=0.9)


@pytest.mark.parametrize(("cells", "distance"), [(VOCAB, 0.01), (VOCAB * VOCAB, 0.0125)])
def test_stated_power(cells: int, distance: float) -> None:
    critical = stats.chi2.isf(SIGNIFICANCE, cells - 1)
    assert stats.ncx2.sf(critical, cells - 1, 4 * DRAWS * distance**2) > 0.99


def chi_square(tokens: Tensor, expected: Tensor) -> float:
    """p-value of tokens [draws] under the distribution expected [cells]; 0 when an impossible one came up."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    scaled = expected[possible].double() / expected.double().sum() * len(tokens)
    return float(stats.chisquare(counts[possible].numpy(), scaled.numpy()).pvalue)


def logits(seed: int, *shape: int) -> Tensor:
    return 1.5 * torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed))


class World:
    """Distributions over two tokens: p and q of the first one, p and q of the second given the first."""

    def __init__(self, how: Sampling) -> None:
        self.p0, self.p1 = distribution(logits(1), how), distribution(logits(2, VOCAB), how)
        self.q0, self.q1 = distribution(logits(3), how), distribution(logits(4, VOCAB), how)
        self.joint = (self.p0[:, None] * self.p1).flatten()
        self.rng = torch.Generator().manual_seed(5)

    def draw(self, q: Tensor) -> Tensor:
        """One token [DRAWS] of each row of q [DRAWS, VOCAB], or of q [VOCAB]."""
        return torch.multinomial(q.expand(DRAWS, VOCAB), 1, generator=self.rng)[:, 0]

    def uniform(self, n: int) -> Tensor:
        return torch.rand(DRAWS, n, generator=self.rng)

    def emit(self, tokens: Tensor, parents: list[int], q: Tensor | None, rule: Judge) -> tuple[Tensor, Tensor]:
        """First and second token [DRAWS] after one step over a tree of depth 1 and a plain one if need be.

        tokens [DRAWS, n], all children of the root or of one of its children.
        """
        p = torch.stack([self.p0.expand(DRAWS, VOCAB), *(self.p1[tokens[:, i]] for i in range(tokens.shape[1]))], 1)
        shape = torch.tensor(parents).expand(DRAWS, -1)
        verdict = rule(tokens, shape, p, q, self.uniform(len(parents) + 1))
        depth = verdict.accepted.sum(1)
        stays = tokens.gather(1, verdict.last.clamp(min=0)[:, None])[:, 0]  # the deepest accepted token
        above = shape.gather(1, verdict.last.clamp(min=0)[:, None])  # its parent
        first = torch.where(depth == 0, verdict.next_token, stays)
        first = torch.where(depth == 2, tokens.gather(1, above.clamp(min=0))[:, 0], first)
        second = torch.where(depth == 1, verdict.next_token, stays)
        plain = rule(tokens[:, :0], shape[:, :0], self.p1[first][:, None], None, self.uniform(1))
        return first, torch.where(depth == 0, plain.next_token, second)

    def chain(self, rule: Judge, q: Tensor | None = None, drawn_from: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One drafted token. q: the distribution the rule is told; drawn_from: the true one."""
        told = self.q0 if q is None else q
        token = self.draw(self.q0 if drawn_from is None else drawn_from)
        return self.emit(token[:, None], [-1], told.expand(DRAWS, 1, VOCAB), rule)


def p_values(world: World, emitted: tuple[Tensor, Tensor]) -> tuple[float, float]:
    first, second = emitted
    return chi_square(first, world.p0), chi_square(first * VOCAB + second, world.joint)


def without_residual(*args: Tensor) -> Tensor:
    """The classic mistake: after a rejection, draw from p."""
    return args[0]


SETTINGS = {
    "plain": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.5),
    "top_k": Sampling(temperature=1.2, top_k=4),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "all": WARPED,
}


@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_a_chain_emits_p(how: Sampling) -> None:
    world = World(how)
    first, joint = p_values(world, world.chain(speculative_sampling))
    assert first > SIGNIFICANCE
    assert joint > SIGNIFICANCE


@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_control_p_instead_of_the_residual_is_found(how: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "_subtract", without_residual)
    world = World(how)
    assert max(p_values(world, world.chain(speculative_sampling))) < SIGNIFICANCE


def test_control_q_recorded_before_top_k_is_found() -> None:
    """CASES 9: the draft drew from its top 6, the rule is told the distribution over all 8."""
    world = World(WARPED)
    raw = distribution(logits(3), Sampling(temperature=0.7))
    assert max(p_values(world, world.chain(speculative_sampling, q=raw))) < SIGNIFICANCE


def test_control_a_greedy_draft_scored_as_sampled_is_found() -> None:
    """CASES 9: the draft took its arg-max, the rule is told the distribution it did not draw from."""
    world = World(SETTINGS["plain"])
    onehot = torch.zeros(VOCAB)
    onehot[world.q0.argmax()] = 1
    assert max(p_values(world, world.chain(speculative_sampling, drawn_from=onehot))) < SIGNIFICANCE


def test_a_one_hot_chain_emits_p() -> None:
    world = World(WARPED)
    token = world.q0.argmax().expand(DRAWS, 1)
    assert min(p_values(world, world.emit(token, [-1], None, speculative_sampling))) > SIGNIFICANCE


def test_one_hot_siblings_emit_p() -> None:
    """Distinct candidates that nothing drew at random: each is a one-hot proposal (CASES 24)."""
    world = World(SETTINGS["plain"])
    tokens = world.q0.topk(3).indices.expand(DRAWS, 3)
    assert min(p_values(world, world.emit(tokens, [-1, -1, -1], None, speculative_sampling))) > SIGNIFICANCE


def siblings(world: World, rule: Judge) -> tuple[Tensor, Tensor]:
    """Three siblings drawn independently from q0, and a child of each drawn from q1 behind them."""
    top = [world.draw(world.q0) for _ in range(3)]
    below = [world.draw(world.q1[token]) for token in top]
    q = [world.q0.expand(DRAWS, VOCAB)] * 3 + [world.q1[token] for token in top]
    tokens = torch.stack([*top, *below], 1)
    return world.emit(tokens, [-1, -1, -1, 0, 1, 2], torch.stack(q, 1), rule)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_siblings_emit_p(name: str) -> None:
    world = World(SETTINGS[name])
    assert min(p_values(world, siblings(world, speculative_sampling))) > SIGNIFICANCE


def test_control_siblings_tried_against_p_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "_subtract", without_residual)
    world = World(SETTINGS["plain"])
    assert max(p_values(world, siblings(world, speculative_sampling))) < SIGNIFICANCE


def test_control_siblings_sorted_by_their_own_probability_are_found() -> None:
    """CASES 24: to order drawn tokens by how likely they were biases what is emitted."""
    world = World(SETTINGS["plain"])
    drawn = torch.stack([world.draw(world.q0) for _ in range(3)], 1)
    ranked = drawn.gather(1, world.q0[drawn].argsort(1, descending=True))
    emitted = world.emit(ranked, [-1] * 3, world.q0.expand(DRAWS, 3, VOCAB), speculative_sampling)
    assert max(p_values(world, emitted)) < SIGNIFICANCE


def test_equal_p_and_q_accept_everything() -> None:
    world = World(SETTINGS["plain"])
    token = world.draw(world.p0)[:, None]
    p = torch.stack([world.p0.expand(DRAWS, VOCAB), world.p1[token[:, 0]]], 1)
    verdict = speculative_sampling(token, torch.full_like(token, -1), p, p[:, :1], world.uniform(2))
    assert verdict.accepted.all()


def reference(tokens: list[int], parents: list[int], stays: Callable[[int, list[int]], bool]) -> tuple[list[int], set]:
    """Walk one tree from the root: the accepted path, and every node tried. stays(node, siblings tried before)."""
    path: list[int] = []
    tried: set[int] = set()
    while True:
        here = path[-1] if path else -1
        before: list[int] = []
        for node in (i for i, parent in enumerate(parents) if parent == here):
            tried.add(node)
            if stays(node, before):
                path.append(node)
                break
            before.append(node)
        else:
            return path, tried


def random_trees(seed: int, rows: int, n: int) -> tuple[Tensor, Tensor]:
    """Tokens and parents [rows, n] in topological order with a random number of nodes each, padded with -2."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, n), generator=rng)
    parents = torch.full((rows, n), -2)
    for row in range(rows):
        for i in range(int(torch.randint(n + 1, (1,), generator=rng))):
            parents[row, i] = torch.randint(-1, i, (1,), generator=rng) if i else -1
    return tokens, parents


def test_greedy_match_walks_trees_like_the_reference() -> None:
    tokens, parents = random_trees(0, rows=400, n=12)
    p = torch.rand(400, 13, VOCAB, generator=torch.Generator().manual_seed(1))
    p.scatter_(2, tokens[:, :1, None].expand(-1, 13, 1), 1.5)  # make a match likely
    verdict = greedy_match(tokens, parents, p, None, torch.empty(0))
    deepest = 0
    for row in range(400):
        choice, ids, above = p[row].argmax(-1).tolist(), tokens[row].tolist(), parents[row].tolist()
        path, tried = reference(
            ids,
            above,
            lambda node, _, c=choice, t=ids, a=above: t[node] == c[a[node] + 1],  # type: ignore[misc]
        )
        assert verdict.accepted[row].nonzero()[:, 0].tolist() == path
        assert set(verdict.tried[row].nonzero()[:, 0].tolist()) == tried
        assert verdict.last[row] == (path[-1] if path else -1)
        assert verdict.next_token[row] == choice[(path[-1] if path else -1) + 1]
        deepest = max(deepest, len(path))
    assert deepest >= 3


def test_speculative_sampling_walks_trees_like_the_reference() -> None:
    rows, n = 400, 12
    tokens, parents = random_trees(2, rows, n)
    rng = torch.Generator().manual_seed(3)
    p = torch.rand(rows, n + 1, VOCAB, generator=rng).softmax(-1)
    q = torch.rand(rows, n, VOCAB, generator=rng).softmax(-1)
    u = torch.rand(rows, n + 1, generator=rng)
    verdict = speculative_sampling(tokens, parents, p, q, u)
    rejections = 0
    for row in range(rows):
        ids, above = tokens[row].tolist(), parents[row].tolist()

        def residual(here: int, before: list[int], row: int = row) -> Tensor:
            left = p[row, here + 1].double()
            for sibling in before:
                left = (left - q[row, sibling].double()).clamp(min=0)
                left = left / left.sum()
            return left

        def stays(node: int, before: list[int], row: int = row, ids: list[int] = ids, above: list[int] = above) -> bool:
            x = ids[node]
            return bool(u[row, node] < residual(above[node], before)[x] / q[row, node, x])

        path, tried = reference(ids, above, stays)
        assert verdict.accepted[row].nonzero()[:, 0].tolist() == path
        assert set(verdict.tried[row].nonzero()[:, 0].tolist()) == tried
        last = path[-1] if path else -1
        assert verdict.last[row] == last
        rejected = [i for i in sorted(tried) if above[i] == last]
        rejections += len(rejected)
        assert verdict.residual is not None
        found = verdict.residual[row].double()
        torch.testing.assert_close(found / found.sum(), residual(last, rejected), atol=1e-5, rtol=1e-3)
        mass = residual(last, rejected).cumsum(0)
        token = int(verdict.next_token[row])
        below = float(mass[token - 1]) if token else 0.0
        assert below - 1e-5 <= float(u[row, -1]) <= float(mass[token]) + 1e-5
    assert rejections > 100


def test_greedy_match_on_ragged_chains() -> None:
    """Row 0 matches two of three, row 1 all of its single token, row 2 has nothing drafted."""
    p = torch.zeros(3, 4, VOCAB)
    for row, choices in enumerate([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]]):
        p[row, torch.arange(4), torch.tensor(choices)] = 1
    tokens = torch.tensor([[1, 2, 7], [5, 0, 0], [7, 7, 7]])
    parents = torch.tensor([[-1, 0, 1], [-1, -2, -2], [-2, -2, -2]])
    verdict = greedy_match(tokens, parents, p, None, torch.empty(0))
    assert verdict.accepted.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    assert verdict.tried.tolist() == [[True, True, True], [True, False, False], [False] * 3]
    assert verdict.last.tolist() == [1, 0, -1]
    assert verdict.next_token.tolist() == [3, 6, 7]


def test_padding_is_never_tried_when_sampling() -> None:
    tokens, parents = torch.zeros(2, 3, dtype=torch.long), torch.tensor([[-1, -2, -2], [-2, -2, -2]])
    p = torch.zeros(2, 4, VOCAB)
    p[:, :, 0] = 1  # every token would be accepted
    verdict = speculative_sampling(tokens, parents, p, None, torch.full((2, 4), 0.5))
    assert verdict.tried.tolist() == [[True, False, False], [False] * 3]
    assert verdict.last.tolist() == [0, -1]
    assert verdict.next_token.tolist() == [0, 0]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("greedy", [True, False])
def test_an_empty_tree_gives_one_token_of_p(name: str, greedy: bool) -> None:
    p = torch.zeros(3, 1, VOCAB)
    p[torch.arange(3), 0, torch.tensor([2, 0, 7])] = 1
    empty = torch.zeros(3, 0, dtype=torch.long)
    if greedy and RULES[name].samples:
        return
    verdict = Acceptance(name).judge(empty, empty, p, None, None if greedy else torch.rand(3, 1), torch.ones(3) / 2)
    assert verdict.next_token.tolist() == [2, 0, 7]
    assert verdict.last.tolist() == [-1, -1, -1]
    assert verdict.accepted.shape == verdict.tried.shape == (3, 0)


# ---- siblings that differ: without replacement


def distinct(world: World, told: Callable[[Tensor, list[Tensor]], Tensor]) -> tuple[Tensor, Tensor]:
    """Three siblings drawn without replacement from q0; told(left, before) is the q that the rule hears of."""
    left = world.q0.expand(DRAWS, VOCAB).clone()
    tokens: list[Tensor] = []
    q: list[Tensor] = []
    for _ in range(3):
        left = left / left.sum(-1, keepdim=True)
        q.append(told(left, tokens))
        tokens.append(torch.multinomial(left, 1, generator=world.rng)[:, 0])
        left = left.scatter(1, tokens[-1][:, None], 0.0)
    return world.emit(torch.stack(tokens, 1), [-1] * 3, torch.stack(q, 1), speculative_sampling)


def test_siblings_without_replacement_emit_p() -> None:
    world = World(SETTINGS["plain"])
    assert min(p_values(world, distinct(world, lambda left, before: left))) > SIGNIFICANCE


def test_control_q_that_is_not_renormalised_is_found() -> None:
    """Distinct siblings, each told to have been drawn from the whole q."""
    world = World(SETTINGS["plain"])
    emitted = distinct(world, lambda left, before: world.q0.expand(DRAWS, VOCAB))
    assert max(p_values(world, emitted)) < SIGNIFICANCE


def test_control_pruned_siblings_are_found() -> None:
    """CASES 24: of drawn siblings the improbable ones are left out."""
    world = World(SETTINGS["plain"])
    drawn = torch.stack([world.draw(world.q0) for _ in range(2)], 1)
    best = drawn.gather(1, world.q0[drawn].argmax(1, keepdim=True))
    emitted = world.emit(best, [-1], world.q0.expand(DRAWS, 1, VOCAB), speculative_sampling)
    assert max(p_values(world, emitted)) < SIGNIFICANCE


# ---- lossy rules, against the definition, walked node by node


def lossy_case(seed: int, rows: int = 300, n: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, parents, p and u of random trees."""
    tokens, parents = random_trees(seed, rows, n)
    rng = torch.Generator().manual_seed(seed + 1)
    p = (2 * torch.randn(rows, n + 1, VOCAB, generator=rng)).softmax(-1)
    return tokens, parents, p, torch.rand(rows, n + 1, generator=rng)


FITS: dict[str, Callable[[Tensor, int, float], bool]] = {
    "threshold": lambda p, x, t: bool(p[x] >= t * p.max()),
    "typical": lambda p, x, t: bool(p[x] >= min(t, t**0.5 * float(torch.exp((p * p.log()).sum())))),
}


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.9])
def test_the_longest_path_of_fitting_tokens_stays(name: str, threshold: float) -> None:
    tokens, parents, p, u = lossy_case(7)
    verdict = Acceptance(name, threshold).judge(tokens, parents, p, None, u, torch.full((len(tokens),), threshold))
    lengths = []
    for row in range(len(tokens)):
        reach: list[int] = []  # of each node: tokens of the path to it, 0 where one of them does not fit
        for i, (token, parent) in enumerate(zip(tokens[row].tolist(), parents[row].tolist(), strict=True)):
            above = 0 if parent < 0 else reach[parent]
            fits = parent >= -1 and FITS[name](p[row, parent + 1], token, threshold)
            reach.append(above + 1 if fits and (parent == -1 or above) else 0)
            assert i >= 0
        kept = verdict.accepted[row].nonzero()[:, 0].tolist()
        assert len(kept) == max(reach)
        assert [parents[row, node].item() for node in kept] == [-1, *kept[:-1]][: len(kept)]
        assert all(reach[node] for node in kept)
        last = kept[-1] if kept else -1
        assert verdict.last[row] == last
        mass = p[row, last + 1].double().cumsum(0) / p[row, last + 1].double().sum()
        token = int(verdict.next_token[row])
        assert (float(mass[token - 1]) if token else 0.0) - 1e-5 <= float(u[row, -1]) <= float(mass[token]) + 1e-5
        rejected = (verdict.tried[row] & ~verdict.accepted[row]).nonzero()[:, 0].tolist()
        for node in rejected:
            above = int(parents[row, node])
            assert above in (-1, *kept)
            assert not FITS[name](p[row, above + 1], int(tokens[row, node]), threshold)
        lengths.append(len(kept))
    assert len(set(lengths)) > 1 or threshold == 0.9


def test_the_strictest_threshold_is_greedy_match() -> None:
    tokens, _, p, _ = lossy_case(11)
    parents = torch.arange(-1, tokens.shape[1] - 1).expand(tokens.shape)
    tokens[:, :6] = torch.where(
        torch.rand(len(tokens), 6, generator=torch.Generator().manual_seed(1)) < 0.8, p[:, :6].argmax(-1), tokens[:, :6]
    )
    ours = Acceptance("threshold", 1.0).judge(tokens, parents, p, None, None, torch.ones(len(tokens)))
    exact = greedy_match(tokens, parents, p, None, None)
    for field in ("accepted", "tried", "last", "next_token"):
        assert torch.equal(getattr(ours, field), getattr(exact, field))
    assert exact.accepted.sum(1).unique().numel() > 4


def test_the_loosest_threshold_keeps_a_deepest_path() -> None:
    tokens, parents, p, _ = lossy_case(13)
    verdict = Acceptance("threshold", 0.0).judge(tokens, parents, p, None, None, torch.zeros(len(tokens)))
    deepest = [max([0, *depths(row)]) for row in parents.tolist()]
    assert verdict.accepted.sum(1).tolist() == deepest


def depths(parents: list[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == -2 else 1 if parent == -1 else found[parent] + 1)
    return found


def strictly(how: Acceptance, threshold: float) -> Judge:
    """The rule with one threshold for all rows."""
    return lambda tokens, parents, p, q, u: how.judge(tokens, parents, p, q, u, torch.full((len(tokens),), threshold))


def test_lenience_of_one_is_speculative_sampling() -> None:
    world, how = World(SETTINGS["plain"]), Acceptance("lenience", 1.0)
    assert min(p_values(world, siblings(world, strictly(how, 1.0)))) > SIGNIFICANCE


@pytest.mark.parametrize("l", [0.3, 0.7])
def test_lenience_bounds_what_a_token_can_gain(l: float) -> None:  # noqa: E741
    """2211.17192, A.5: no token becomes more probable than p / l; and it is biased, or it would buy nothing."""
    world, how = World(SETTINGS["plain"]), Acceptance("lenience", l)
    first, _ = world.chain(strictly(how, l))
    share = torch.bincount(first, minlength=VOCAB) / DRAWS
    assert (share <= world.p0 / l + 4 * (world.p0 / l / DRAWS).sqrt()).all()
    assert chi_square(first, world.p0) < SIGNIFICANCE
    kept = torch.minimum(world.q0, world.p0 / l)
    residual = (world.p0 - l * world.q0).clamp(min=0)
    assert chi_square(first, kept + (1 - kept.sum()) * residual / residual.sum()) > SIGNIFICANCE


def test_a_block_stays_if_its_geometric_mean_exceeds_the_threshold() -> None:
    tokens, parents, p, u = lossy_case(17)
    threshold = torch.linspace(0.05, 0.6, len(tokens))
    verdict = Acceptance("block").judge(tokens, parents, p, None, u, threshold)
    kept_some = 0
    for row in range(len(tokens)):
        above, ids = parents[row].tolist(), tokens[row].tolist()
        nodes = [i for i, parent in enumerate(above) if parent >= -1]
        copies = {i for i in nodes for j in range(i) if (above[i], ids[i]) == (above[j], ids[j])}
        leaves = [i for i in nodes if i not in above and i not in copies]
        scores = {}
        for leaf in leaves:
            path = [leaf]
            while above[path[0]] >= 0:
                path.insert(0, above[path[0]])
            own = [float(p[row, above[i] + 1, ids[i]]) for i in path]
            scores[leaf] = (float(torch.tensor(own).double().log().mean().exp()), path)
        best = max(scores, key=lambda leaf: scores[leaf][0], default=None)  # noqa: B023
        kept = verdict.accepted[row].nonzero()[:, 0].tolist()
        if best is None or scores[best][0] <= float(threshold[row]):
            assert kept == []
            assert verdict.last[row] == -1
            assert (verdict.tried[row].sum() > 0) == (best is not None)
        else:
            assert kept == scores[best][1]
            kept_some += 1
    assert 20 < kept_some < len(tokens) - 20


def test_a_copy_is_no_candidate() -> None:
    """Two chains that begin alike hang under the first token; its copy alone would score 0.86."""
    tokens, parents = torch.tensor([[5, 5, 6, 7]]), torch.tensor([[-1, -1, 0, 0]])
    p = torch.full((1, 5, VOCAB), 0.02)
    p[0, 0, 5], p[0, 1, 6], p[0, 1, 7] = 0.86, 0.1, 0.1
    for threshold, kept in ((0.7, []), (0.25, [0, 2])):
        verdict = Acceptance("block").judge(tokens, parents, p, None, None, torch.tensor([threshold]))
        assert verdict.accepted[0].nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("name", ["threshold", "typical", "block"])
def test_what_is_impossible_never_stays(name: str) -> None:
    """At the threshold 0, too: a constraint's mask, top-k and top-p hold."""
    p = torch.zeros(1, 3, VOCAB)
    p[0, :, 0] = 1
    verdict = Acceptance(name, 0.0).judge(
        torch.tensor([[0, 1]]), torch.tensor([[-1, 0]]), p, None, None, torch.zeros(1)
    )
    assert verdict.accepted[0].tolist() == [name != "block", False]


# ---- settings


def test_rules_by_name() -> None:
    assert Acceptance().lossless
    assert Acceptance("block") == Acceptance("block", 0.7, 2, 0.7)
    assert Acceptance("block", draft_temperature=0).max_retries == 0
    with pytest.raises(UnknownNameError, match=r"no acceptance rule 'best'; there is: block, lenience, lossless"):
        Acceptance("best")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "threshold", "threshold": 1.01}, r"acceptance_threshold = 1.01: allowed is 0 … 1"),
        ({"rule": "block", "threshold": -0.1}, r"acceptance_threshold = -0.1: allowed is 0 … 1"),
        ({"rule": "typical", "threshold": float("nan")}, r"acceptance_threshold = nan: allowed is 0 … 1"),
        ({"rule": "block", "threshold": True}, r"acceptance_threshold = True: allowed is 0 … 1"),
        ({"threshold": 0.7}, r"acceptance_threshold = 0.7: allowed is none with the rule lossless"),
        ({"rule": "typical", "max_retries": 1}, r"max_retries = 1: allowed is none with the rule typical"),
        ({"rule": "threshold", "draft_temperature": 1}, r"draft_temperature = 1: allowed is none with the rule thr"),
        ({"rule": "block", "max_retries": -1}, r"max_retries = -1: allowed is 0 … 16"),
        ({"rule": "block", "max_retries": 1.5}, r"max_retries = 1.5: allowed is 0 … 16"),
        ({"rule": "sequence", "draft_temperature": -1}, r"draft_temperature = -1: allowed is a number >= 0"),
        ({"rule": "block", "draft_temperature": "warm"}, r"draft_temperature = 'warm': allowed is a number >= 0"),
        ({"rule": "block", "draft_temperature": 0, "max_retries": 2}, r"max_retries = 2: allowed is 0 at draft_temp"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Acceptance(**settings)


def test_lenience_needs_a_temperature() -> None:
    Acceptance("lenience").require_temperature(0.1)
    Acceptance("threshold").require_temperature(0)
    with pytest.raises(SettingError, match="above 0 with the rule lenience; for greedy decoding the rule threshold"):
        Acceptance("lenience").require_temperature(0)
