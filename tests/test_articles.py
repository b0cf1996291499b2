"""The articles' dictionaries: they load as they are, what they do, what is refused."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from specdec_lab.articles import BatchConfig, DecodingParams
from specdec_lab.decoding import Decoder
from specdec_lab.errors import SettingError, UnknownNameError
from specdec_lab.experiment import Arm
from specdec_lab.models import zoo

DECODING: dict[str, Any] = {
    "enable_speculative": True,
    "draft_model_path": "/models/llama-7b-draft",
    "initial_candidates": 3,
    "max_retries": 2,
    "adaptive_threshold": 0.7,
}
BATCH: dict[str, Any] = {"max_batch_size": 8, "timeout_ms": 50, "fill_strategy": "sequential"}


@pytest.fixture(scope="module")
def main(tiny_folder: str) -> zoo.Main:
    return zoo.load_main(tiny_folder, device="cpu")


def decoder(main: zoo.Main, settings: dict[str, Any], draft_length: int = 3) -> Decoder:
    arm = DecodingParams.from_dict(settings).arm(draft_length)
    return arm.decoder(main, zoo.load_drafter(arm.draft, main, **arm.options))


def candidates(main: zoo.Main, settings: dict[str, Any], tokens: int = 48) -> list[int]:
    made = decoder(main, settings).generate([65, 66, 67], max_new_tokens=tokens, eos=())
    return [step.candidates for step in made.trace.steps]


def test_decoding_params_load_as_they_are() -> None:
    arm = DecodingParams.from_dict(DECODING).arm(16)
    assert arm == Arm(
        "/models/llama-7b-draft",
        16,
        candidate_count=3,
        branching="chains",
        acceptance_rule="block",
        acceptance_threshold=0.7,
        max_retries=2,
        adaptive_threshold=0.7,
    )


@pytest.mark.parametrize(
    ("settings", "arm"),
    [
        ({}, Arm("1:4", 4)),
        ({"initial_candidates": 2}, Arm("1:4", 4, 2, "chains")),
        ({"max_retries": 0}, Arm("1:4", 4, acceptance_rule="block", max_retries=0)),
        ({"adaptive_threshold": 1}, Arm("1:4", 4, branching="chains", adaptive_threshold=1.0)),
        (DECODING | {"enable_speculative": False}, Arm("ngram", 0)),
    ],
)
def test_what_is_left_out_stays_as_it_is(settings: dict[str, Any], arm: Arm) -> None:
    assert DecodingParams.from_dict(settings).arm() == arm


def test_candidates_rise_to_eight_after_success(main: zoo.Main, tiny_folder: str) -> None:
    drafts_for_itself = {"draft_model_path": tiny_folder, "initial_candidates": 3, "adaptive_threshold": 0.7}
    got = candidates(main, drafts_for_itself)
    assert got[:8] == [3, 4, 5, 6, 7, 8, 8, 8]


def test_candidates_fall_to_one_after_failure(main: zoo.Main, tiny_draft_folder: str) -> None:
    settings = DECODING | {"draft_model_path": tiny_draft_folder}
    got = candidates(main, settings, tokens=8)
    assert got[:5] == [3, 2, 1, 1, 1]
    assert set(candidates(main, settings | {"adaptive_threshold": None}, tokens=8)) == {3}


def test_a_refused_draft_is_drawn_anew_as_often_as_max_retries_says(main: zoo.Main, tiny_draft_folder: str) -> None:
    for retries in (0, 2):
        settings = DECODING | {"draft_model_path": tiny_draft_folder, "max_retries": retries}
        made = decoder(main, settings).generate([65, 66, 67], max_new_tokens=4, eos=())
        kinds = [step.next_kind for step in made.trace.steps]
        assert kinds[: retries + 1] == ["refused"] * retries + ["recovered"]


def test_disabled_is_plain_decoding(main: zoo.Main) -> None:
    got = decoder(main, DECODING | {"enable_speculative": False}).generate("Hello", max_new_tokens=12)
    plain = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos).generate("Hello", max_new_tokens=12)
    assert got.tokens == plain.tokens
    assert not any(step.drafted for step in got.trace.steps)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("enable_speculative", 1, "enable_speculative = 1"),
        ("draft_model_path", "", "draft_model_path = ''"),
        ("draft_model_path", None, "draft_model_path = None"),
        ("initial_candidates", 0, "initial_candidates = 0: allowed is an integer 1 … 8"),
        ("initial_candidates", 9, "initial_candidates = 9"),
        ("initial_candidates", 3.0, "initial_candidates = 3.0"),
        ("initial_candidates", True, "initial_candidates = True"),
        ("max_retries", -1, "max_retries = -1"),
        ("max_retries", "2", "max_retries = '2'"),
        ("adaptive_threshold", 1.2, "adaptive_threshold = 1.2: allowed is 0 … 1"),
        ("adaptive_threshold", "0.7", "adaptive_threshold = '0.7'"),
    ],
)
def test_decoding_params_refuse_wrong_values(key: str, value: Any, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        DecodingParams.from_dict(DECODING | {key: value})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("max_batch_size", 0, "max_batch_size = 0: allowed is an integer 1 … 1024"),
        ("max_batch_size", 8.0, "max_batch_size = 8.0"),
        ("timeout_ms", -1, "timeout_ms = -1"),
        ("timeout_ms", float("nan"), "timeout_ms = nan"),
        ("timeout_ms", "50", "timeout_ms = '50'"),
        ("fill_strategy", "longest_first", "no fill_strategy 'longest_first'; there is: sequential"),
        ("fill_strategy", ["sequential"], "no fill_strategy"),
    ],
)
def test_batch_config_refuses_wrong_values(key: str, value: Any, says: str) -> None:
    with pytest.raises((SettingError, UnknownNameError), match=says):
        BatchConfig.from_dict(BATCH | {key: value})


def test_unknown_keys_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="no key of DecodingParams 'draft_len'; there is: adaptive_threshold, "):
        DecodingParams.from_dict(DECODING | {"draft_len": 3})
    with pytest.raises(UnknownNameError, match="there is: fill_strategy, max_batch_size, timeout_ms"):
        BatchConfig.from_dict({"max_batch": 8})
    with pytest.raises(SettingError, match="a dictionary"):
        DecodingParams.from_dict([("max_retries", 2)])  # type: ignore[arg-type]


def test_both_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        BatchConfig.from_dict(BATCH).timeout_ms = 3  # type: ignore[misc]


def test_a_batch_config_decodes_in_groups_as_in_one_batch(main: zoo.Main, tiny_draft_folder: str) -> None:
    config = BatchConfig.from_dict(BATCH | {"max_batch_size": 2})
    prompts = ["a", "bc", "def", "gh", "i"]
    assert [list(group) for group in config.batches(prompts)] == [["a", "bc"], ["def", "gh"], ["i"]]
    drafting = decoder(main, {"draft_model_path": tiny_draft_folder})
    settings: dict[str, Any] = {"max_new_tokens": 10, "temperature": 1.0, "seed": 5}
    got = config.generate(drafting, prompts, **settings)
    assert [made.tokens for made in got] == [
        made.tokens for made in drafting.generate_batch(prompts, **settings)
    ]  # prompt i has its own seed
    assert {step.active for step in got[0].trace.steps} <= {1, 2}
    assert [step.active for step in got[4].trace.steps] == [1] * len(got[4].trace.steps)
    assert config.generate(drafting, []) == []


def test_constraints_of_a_batch_are_counted_before_anything_is_decoded() -> None:
    nothing: Any = None
    for count in (1, 3):
        with pytest.raises(SettingError, match=f"'{count} grammars': allowed is one, or one for each of 2"):
            BatchConfig(max_batch_size=1).generate(nothing, ["Hi", "Ho"], constraint=[None] * count)
