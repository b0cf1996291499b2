"""The bundled pair, for truth: greedy output against transformers, and what README promises of the family."""

from pathlib import Path
from typing import Any

import pytest

from specdec_lab.decoding import Decoder
from specdec_lab.drafting import DraftModel
from specdec_lab.experiment import Arm, Block, summary, sweep
from specdec_lab.metrics import totals
from specdec_lab.models import zoo
from specdec_lab.verify import table, verify


@pytest.fixture(scope="module")
def reference(bundled: zoo.Main) -> Any:
    return zoo.read(zoo.fetch_bundled())[0]


def test_greedy_output_is_transformers_own(bundled: zoo.Main, reference: Any) -> None:
    """A slice of `make verify`: every draft, one draft length each, four prompts a task."""
    lengths = {"1:2": 1, "1:3": 8, "1:4": 4, "ngram": 8}
    for name, length in lengths.items():
        checks = verify(bundled, reference, [name], [length], prompts=2, max_new_tokens=24)
        assert len(checks) == 2 * 3 * 2
        assert all(check.verdict != "WRONG" for check in checks), table(checks)


@pytest.mark.parametrize("ratio", zoo.RATIOS)
def test_the_family_has_the_sizes_it_is_named_for(bundled: zoo.Main, ratio: str) -> None:
    drafter = zoo.load_drafter(ratio, bundled)
    assert isinstance(drafter, DraftModel)
    assert bundled.model.parameters / drafter.model.parameters == pytest.approx(int(ratio[2:]), rel=0.02)


def test_drafts_are_accepted_and_save_main_forwards(bundled: zoo.Main) -> None:
    plain = Decoder(bundled.model, tokenizer=bundled.tokenizer, eos=bundled.eos)
    prompt = "Write a Python function that returns the sum of a list of numbers."
    expected = plain.generate(prompt, max_new_tokens=48)
    for ratio in zoo.RATIOS:
        drafter = zoo.load_drafter(ratio, bundled)
        got = Decoder(bundled.model, drafter, 4, bundled.tokenizer, eos=bundled.eos).generate(prompt, max_new_tokens=48)
        assert got.tokens == expected.tokens
        sums = totals([got.trace])
        assert sums.emitted / sums.steps > 1.3, ratio
        assert sums.accepted / (sums.accepted + sums.rejected) > 0.25, ratio


def test_a_lossy_rule_buys_tokens_per_forward_with_likelihood(bundled: zoo.Main, tmp_path: Path) -> None:
    """The laxer the more of both; the lossless arm pays exactly nothing."""
    strictness = (None, 0.3, 0.0)
    arms = [
        Arm("1:4", 4, acceptance_rule="lossless" if t is None else "threshold", acceptance_threshold=t)
        for t in strictness
    ]
    block = Block(task="prose", arms=tuple(arms), prompts=5, max_new_tokens=16, device="cpu")
    table = summary(sweep([block], tmp_path, progress=False), resamples=500)
    exact, some, all_of_it = table[table.draft != "none"].itertuples()
    assert exact.nll_delta == exact.nll_delta_high == exact.quality_delta == exact.repetition_delta == 0
    assert 0 < some.nll_delta < all_of_it.nll_delta
    assert all_of_it.nll_delta_low > 0
    assert exact.tokens_per_main_forward < some.tokens_per_main_forward < all_of_it.tokens_per_main_forward
    assert exact.fallback_ratio > some.fallback_ratio > all_of_it.fallback_ratio == 0
