"""Lossy rules, retries and controllers in the loop: what is emitted, when a draft comes again, who plans."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import random_llama
from test_decoding import SIGNIFICANCE, START, exact, p_value, two_tokens
from test_feature import layers, model_of
from torch import Tensor

from specdec_lab.acceptance import Acceptance
from specdec_lab.control import History, Plan
from specdec_lab.decoding import Decoder, Generation
from specdec_lab.drafting import Drafter, DraftModel, FeatureDraft, Hybrid, NGram, Row, Tree
from specdec_lab.errors import SettingError
from specdec_lab.models.cache import KVCache
from specdec_lab.models.llama import LlamaModel
from specdec_lab.sampling import Sampling
from specdec_lab.trace import Step

PROMPTS = [[3, 1, 4, 3, 1], [2, 7, 2, 7, 2, 7, 2], [5, 6], [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]]


@pytest.fixture(scope="module")
def main() -> LlamaModel:
    return random_llama(0, layers=2)


def drafter(kind: str, main: LlamaModel) -> Drafter:
    model = DraftModel(random_llama(3, layers=1), branching="chains")
    if kind == "features":
        return FeatureDraft(model_of(layers(main), main), 8, branching="chains")
    return Hybrid(NGram(), model) if kind == "hybrid" else model


KINDS = ("model", "features", "hybrid")


def consistent(made: Generation) -> None:
    emitted: list[int] = []
    for step in made.trace.steps:
        assert (step.emitted == 0) == (step.next_kind == "refused")
        if step.next_kind == "refused":
            assert step.accepted == []
            assert step.drafted
        emitted += [*step.accepted, step.next_token][: step.emitted]
    assert emitted == made.tokens


@pytest.mark.parametrize("rule", ["block", "sequence"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("candidates", [1, 3])
def test_a_block_that_is_never_good_enough_leaves_the_main_model_alone(
    rule: str, kind: str, candidates: int, main: LlamaModel
) -> None:
    """The threshold 1 is out of reach: every draft is refused, and what is emitted is plain decoding."""
    decoder = Decoder(
        main, drafter(kind, main), 4, candidate_count=candidates, acceptance=Acceptance(rule, 1.0, max_retries=2)
    )
    plain = Decoder(main).generate_batch(PROMPTS, max_new_tokens=20, eos=[2])
    together = decoder.generate_batch(PROMPTS, max_new_tokens=20, eos=[2])
    assert [made.tokens for made in together] == [made.tokens for made in plain]
    for made in together:
        consistent(made)
        kinds = [step.next_kind for step in made.trace.steps]
        drafting = [step for step in made.trace.steps if step.drafted]
        if kind == "hybrid":  # its lookup draws nothing, and is not asked again
            assert kinds.count("refused") <= 2 * len(made.tokens)
            continue
        if rule == "block":
            assert all(step.drafted for step in made.trace.steps[:-1])
        else:
            assert len(drafting) == 3  # one text, two retries
            assert set(kinds[3:]) <= {"plain"}
        assert kinds[:3] == ["refused", "refused", "recovered"]


@pytest.mark.parametrize("kind", ["model", "features"])
def test_what_is_drafted_again_starts_from_the_same_state(kind: str, main: LlamaModel) -> None:
    """Its first token is drawn from the same q; and no token that was emitted is read twice by the main model."""
    read: list[int] = []

    class Counting(LlamaModel):
        def forward(self, tokens: Tensor, cache: KVCache, parents: Tensor | None = None, behind: int = 0) -> Tensor:
            read.append(tokens.shape[1])
            return super().forward(tokens, cache, parents, behind)

    counting = random_llama(0, layers=2)
    counting.__class__ = Counting
    proposed: list[Tensor] = []  # the distribution of each draft's first token
    draft = drafter(kind, main)
    propose = draft.propose

    def spy(rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        tree = propose(rows, lengths)
        if tree.q is not None:
            proposed.append(tree.q[0, 0])
        return tree

    draft.propose = spy  # type: ignore[method-assign]
    how = Acceptance("block", 1.0, max_retries=3)
    steps = Decoder(counting, draft, 4, acceptance=how).generate(START, max_new_tokens=16).trace.steps
    assert len(proposed) > 40
    for first in range(0, len(proposed) - 3, 4):
        for again in proposed[first + 1 : first + 4]:
            torch.testing.assert_close(again, proposed[first], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(proposed[0], proposed[4], atol=1e-3)
    assert read == [len(START) - 1, *(1 + len(step.drafted) for step in steps)]


def test_drafts_that_nothing_draws_are_not_asked_for_again(main: LlamaModel) -> None:
    for draft in (NGram(), DraftModel(random_llama(3, layers=1), branching="top_k")):
        candidates = 1 if isinstance(draft, NGram) else 3
        decoder = Decoder(main, draft, 4, candidate_count=candidates, acceptance=Acceptance("block", 1.0))
        made = decoder.generate(PROMPTS[1], max_new_tokens=20)
        assert "refused" not in {step.next_kind for step in made.trace.steps}
        assert made.tokens == Decoder(main).generate(PROMPTS[1], max_new_tokens=20).tokens


def test_the_best_of_several_candidates_stays(main: LlamaModel) -> None:
    """With the bonus token behind it; the score is the geometric mean of p along it."""
    how = Acceptance("block", 0.0)
    made = Decoder(main, drafter("model", main), 3, candidate_count=4, acceptance=how).generate(
        START, max_new_tokens=30
    )
    several = 0
    for step in made.trace.steps[:-1]:
        paths: list[list[int]] = []
        for node, parent in enumerate(step.parents):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
        twins = {n for n, path in enumerate(paths) for m in range(n) if _text(step, paths[m]) == _text(step, path)}
        leaves = [path for node, path in enumerate(paths) if node not in step.parents and node not in twins]
        scores = {tuple(path): torch.tensor([step.p[i] for i in path]).log().mean().item() for path in leaves}
        best = max(scores, key=lambda path: scores[path])
        kept = tuple(node for node, fate in enumerate(step.fate) if fate == "accepted")
        assert scores[kept] == pytest.approx(scores[best], abs=1e-5)
        assert step.next_kind == "bonus"
        several += len(set(scores.values())) > 1
    assert several > 3


def _text(step: Step, path: Sequence[int]) -> list[int]:
    return [step.drafted[node] for node in path]


def test_a_whole_text_is_drafted_kept_or_refused(main: LlamaModel) -> None:
    """The articles' loop: an accepted text is the draft and the bonus token, up to its end; else full decoding."""
    draft = drafter("model", main)
    kept = Decoder(main, draft, 2, acceptance=Acceptance("sequence", 0.0)).generate(START, max_new_tokens=30, eos=[])
    (step,) = kept.trace.steps  # as long as the text, not as draft_length
    assert len(step.drafted) == 29
    assert kept.tokens == [*step.drafted, step.next_token]
    ended = Decoder(main, draft, 2, acceptance=Acceptance("sequence", 0.0)).generate(START, max_new_tokens=30, eos=[6])
    assert ended.trace.finish == "eos"
    assert ended.tokens == ended.trace.steps[0].drafted  # nothing behind its end counts in the score
    assert 6 not in ended.tokens[:-1]


@pytest.mark.parametrize("kind", ["model", "hybrid"])
@pytest.mark.parametrize("rule", ["threshold", "typical", "block", "sequence"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_does_not_depend_on_its_batch(rule: str, kind: str, temperature: float, main: LlamaModel) -> None:
    """CASES 18, 21: retries and falls of one row leave the others alone."""
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "eos": [0]}
    how = Acceptance(rule, {"block": 0.25, "sequence": 0.15, "threshold": 0.4, "typical": 0.2}[rule])
    decoder = Decoder(main, drafter(kind, main), 4, candidate_count=2, acceptance=how)
    together = decoder.generate_batch(PROMPTS, seed=5, **settings)
    for index, (prompt, row_of_many) in enumerate(zip(PROMPTS, together, strict=True)):
        alone = decoder.generate(prompt, seed=5 + index, **settings)
        consistent(alone)
        assert alone.tokens == row_of_many.tokens
        assert [s.drafted for s in alone.trace.steps] == [s.drafted for s in row_of_many.trace.steps]
    kinds = {step.next_kind for made in together for step in made.trace.steps}
    assert {"refused", "bonus", "recovered"} <= kinds if rule == "block" else len(kinds) > 1


@pytest.mark.parametrize(
    ("rule", "threshold"), [("threshold", 0.3), ("typical", 0.1), ("lenience", 0.5), ("block", 0.2)]
)
def test_lossy_rules_change_the_distribution(rule: str, threshold: float, main: LlamaModel) -> None:
    """What the lossless ones are held to finds them."""
    decoder = Decoder(main, drafter("model", main), 2, acceptance=Acceptance(rule, threshold))
    assert p_value(two_tokens(decoder, temperature=1.0), exact(main, Sampling(1.0))) < SIGNIFICANCE


def test_a_stricter_threshold_keeps_less(main: LlamaModel) -> None:
    def kept(rule: str, threshold: float) -> int:
        decoder = Decoder(main, drafter("model", main), 4, acceptance=Acceptance(rule, threshold))
        made = decoder.generate_batch(PROMPTS, max_new_tokens=40)
        return sum(len(step.accepted) for g in made for step in g.trace.steps)

    for rule in ("threshold", "typical", "block"):
        amounts = [kept(rule, threshold) for threshold in (0.0, 0.3, 0.99)]
        assert amounts[0] > amounts[1] >= amounts[2], (rule, amounts)


def test_the_strictest_threshold_is_lossless_greedy(main: LlamaModel) -> None:
    plain = Decoder(main).generate_batch(PROMPTS, max_new_tokens=30)
    for candidates in (1, 3):
        decoder = Decoder(
            main, drafter("model", main), 4, candidate_count=candidates, acceptance=Acceptance("threshold", 1.0)
        )
        assert [g.tokens for g in decoder.generate_batch(PROMPTS, max_new_tokens=30)] == [g.tokens for g in plain]


def test_rule_and_temperature_that_exclude_each_other(main: LlamaModel) -> None:
    decoder = Decoder(main, drafter("model", main), 4, acceptance=Acceptance("lenience"))
    decoder.generate(START, max_new_tokens=4, temperature=0.5)
    with pytest.raises(SettingError, match="temperature = 0.0: allowed is above 0 with the rule lenience"):
        decoder.generate(START, max_new_tokens=4)


def test_a_whole_text_that_is_too_long_for_a_tree(main: LlamaModel) -> None:
    decoder = Decoder(main, drafter("model", main), 2, candidate_count=3, acceptance=Acceptance("sequence"))
    with pytest.raises(SettingError, match=r"tree = '90 nodes, from draft_length 30 and 3 candidates'"):
        decoder.generate(START, max_new_tokens=30)


# ---- controllers


def step(fates: Sequence[str], candidates: int = 3) -> Step:
    n = len(fates)
    ones = [1.0] * n
    return Step(
        [1] * n, list(range(-1, n - 1)), ones, ones, ones, ones, ones, list(fates), 2, "bonus", 1.0, 1.0, 0.0, n, 1,
        1, candidates=candidates,
    )  # fmt: skip


def test_history_counts_candidates_up_and_down() -> None:
    usual, good, bad = Plan(4, 3, None), ["accepted", "rejected"], ["rejected", "untried"]
    rule = History(0.5, window=2)
    assert rule.plan(usual, []) == usual
    assert rule.plan(usual, [step(good)]).candidates == 4
    assert rule.plan(usual, [step(bad)]).candidates == 2
    assert rule.plan(usual, [step(bad), step(good, 5)]).candidates == 6  # half of two
    assert rule.plan(usual, [step(good), step(bad), step(bad, 5)]).candidates == 4  # the first is too old
    assert rule.plan(usual, [step(good, 8)]).candidates == 8
    assert rule.plan(usual, [step(bad, 1)]).candidates == 1
    assert rule.plan(usual, [step(good, 4), step([], 4)]).candidates == 5  # nothing was drafted, so nothing failed
    assert History(0.5, most=2).plan(usual, []).candidates == 2


def test_history_follows_the_text_and_leaves_nothing_behind(main: LlamaModel) -> None:
    """CASES 20: itself as draft it rises to eight, a draft that is always wrong falls to one; the next call is new."""
    chains = DraftModel(main, branching="chains")
    rising = Decoder(main, chains, 3, candidate_count=3, controller=History())
    for _ in range(2):
        counts = [s.candidates for s in rising.generate(START, max_new_tokens=40).trace.steps]
        assert counts[:7] == [3, 4, 5, 6, 7, 8, 8]
    falling = Decoder(main, drafter("model", main), 1, candidate_count=3, controller=History(1.0))
    counts = [s.candidates for s in falling.generate(START, max_new_tokens=40).trace.steps]
    assert counts[0] == 3
    assert 1 in counts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 1.5}, "adaptive_threshold = 1.5: allowed is 0 … 1"),
        ({"threshold": float("nan")}, "adaptive_threshold = nan: allowed is 0 … 1"),
        ({"window": 0}, "window = 0: allowed is an integer >= 1"),
        ({"most": 9}, "most = 9: allowed is an integer 1 … 8"),
    ],
)
def test_history_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        History(**settings)
