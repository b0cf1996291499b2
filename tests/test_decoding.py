"""The loop on tiny models: what it emits against transformers and exact enumeration, and where it ends."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_llama
from scipy import stats
from torch import Tensor

from specdec_lab import acceptance
from specdec_lab.decoding import MAX_DRAFT, Decoder, Generation
from specdec_lab.drafting import Drafter, DraftModel, NGram, Row, Tree, chains
from specdec_lab.drafting.ngram import Match
from specdec_lab.errors import SettingError
from specdec_lab.models import zoo
from specdec_lab.models.cache import KVCache
from specdec_lab.models.llama import LlamaModel
from specdec_lab.models.zoo import Main
from specdec_lab.sampling import Sampling, distribution

PROMPT = "Speculative decoding drafts and verifies. Speculative"
RAGGED = ["The cat", PROMPT, "int main() { return 0; }\nint main() { return", '{"a": 1, "b": [2, 3]}']
DRAFTS = ("none", "ngram", "draft", "itself")
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def main(tiny_folder: str) -> Main:
    return zoo.load_main(tiny_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def drafter(main: Main, tiny_draft_folder: str) -> Callable[[str], Drafter]:
    """A new drafter of that name."""
    small = zoo.load_main(tiny_draft_folder, device="cpu", dtype="float32")

    def make(name: str) -> Drafter:
        models = {"draft": small.model, "itself": main.model}
        return DraftModel(models[name]) if name in models else {"none": Drafter, "ngram": NGram}[name]()

    return make


@pytest.fixture(scope="module")
def reference(tiny_folder: str) -> Callable[..., list[int]]:
    """Greedy tokens of transformers' generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()

    def generate(ids: Sequence[int], n: int, **settings: Any) -> list[int]:
        prompt = torch.tensor([list(ids)])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False, **settings
        )
        return out[0, prompt.shape[1] :].tolist()

    return generate


class Scripted:
    """A main model that says what its script says: after position i comes script[i + 1], with logit 9."""

    name, device, dtype, nbytes = "scripted", torch.device("cpu"), torch.float32, 0
    parameters = embedding_parameters = 0

    def __init__(self, script: Sequence[int], vocab_size: int = 259, context_length: int = 512) -> None:
        self.script, self.vocab_size, self.context_length = torch.tensor(script), vocab_size, context_length

    def new_cache(self, rows: int, max_len: int) -> KVCache:
        return KVCache(1, rows, 1, max_len, 1)

    def forward(self, tokens: Tensor, cache: KVCache, parents: Tensor | None = None, behind: int = 0) -> Tensor:
        return cache.block(tokens.shape[1], parents, behind).positions.expand(tokens.shape)[..., None]

    def logits(self, hidden: Tensor) -> Tensor:
        coming = self.script[(hidden[..., 0] + 1).clamp(max=len(self.script) - 1)]
        return 9 * torch.nn.functional.one_hot(coming, self.vocab_size).float()


class Oracle(Drafter):
    """Drafts the script, with every `wrong`-th position off by one."""

    name = "oracle"

    def __init__(self, script: Sequence[int], wrong: int = 10**9) -> None:
        self.script = [token + (i % wrong == 0) for i, token in enumerate(script)]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            tokens[index, :length] = torch.tensor(self.script[len(row.tokens) : len(row.tokens) + length])
        return chains(tokens, lengths)


def consistent(generation: Generation) -> None:
    """What must hold of every trace (CASES 3, 12)."""
    trace, emitted = generation.trace, []
    for step in trace.steps:
        kept = [*step.accepted, step.next_token]
        assert 1 <= step.emitted <= len(kept)
        assert len(step.drafted) <= step.planned
        if step is not trace.steps[-1]:
            assert step.emitted == len(kept)
        emitted += kept[: step.emitted]
    assert generation.tokens == trace.tokens == emitted


# Greedy: token for token what the main model alone says


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("draft_length", [0, 1, 4, 8])
def test_greedy_equals_transformers(
    name: str, draft_length: int, main: Main, drafter: Callable[[str], Drafter], reference: Callable[..., list[int]]
) -> None:
    decoder = Decoder(main.model, drafter(name), draft_length, main.tokenizer, eos=main.eos)
    for prompt in RAGGED:
        out = decoder.generate(prompt, max_new_tokens=24)
        assert out.tokens == reference(decoder.encode(prompt), 24)
        consistent(out)
        drafted = sum(len(step.drafted) for step in out.trace.steps)
        if name == "itself" and draft_length:  # a draft that is the main model is never wrong
            assert drafted > 0
            assert all(fate == "accepted" for step in out.trace.steps for fate in step.fate)
        if name == "none" or draft_length == 0:
            assert drafted == 0
            assert {(step.next_kind, step.planned) for step in out.trace.steps} == {("plain", 0)}


@pytest.mark.parametrize("name", DRAFTS)
def test_repetition_penalty_equals_transformers(
    name: str, main: Main, drafter: Callable[[str], Drafter], reference: Callable[..., list[int]]
) -> None:
    """CASES 16, 17: it depends on the committed prefix and the path, at every verified position."""
    decoder = Decoder(main.model, drafter(name), 4, main.tokenizer, eos=main.eos)
    for prompt in RAGGED:
        out = decoder.generate(prompt, max_new_tokens=24, repetition_penalty=1.4)
        ids = decoder.encode(prompt)
        assert out.tokens == reference(ids, 24, repetition_penalty=1.4)
    assert out.tokens != reference(ids, 24)


def test_the_text_and_the_chat_template(main: Main) -> None:
    decoder = Decoder(main.model, tokenizer=main.tokenizer)
    assert bytes(decoder.encode("hi")[1:]) == b"user: hi\nassistant: "
    assert Decoder(main.model, tokenizer=main.tokenizer, chat=False).encode("hi") == list(b"hi")
    assert decoder.encode([5, 6]) == [5, 6]
    out = decoder.generate("hi", max_new_tokens=8)
    assert out.text == main.tokenizer.decode(out.tokens, skip_special_tokens=True)


def test_prefill_in_chunks_changes_nothing(main: Main, drafter: Callable[[str], Drafter]) -> None:
    whole = Decoder(main.model, drafter("draft"), 4, main.tokenizer).generate_batch(RAGGED, max_new_tokens=16)
    parts = Decoder(main.model, drafter("draft"), 4, main.tokenizer, prefill_chunk=7).generate_batch(
        RAGGED, max_new_tokens=16
    )
    assert [g.tokens for g in parts] == [g.tokens for g in whole]


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("temperature", [1e-4, 1e-300])
def test_temperature_tends_to_greedy(
    name: str, temperature: float, main: Main, drafter: Callable[[str], Drafter]
) -> None:
    """CASES 22."""
    decoder = Decoder(main.model, drafter(name), 4, main.tokenizer)
    cold = decoder.generate(PROMPT, max_new_tokens=24, temperature=temperature)
    assert cold.tokens == decoder.generate(PROMPT, max_new_tokens=24).tokens
    assert all(math.isfinite(x) for step in cold.trace.steps for x in (*step.p, *step.entropy, step.next_p))


# Sampling: the same distribution as the main model alone


ROWS, CELLS, SIGNIFICANCE = 6000, 64, 1e-4
START = (3, 1, 4)


def exact(model: LlamaModel, how: Sampling) -> Tensor:
    """The joint distribution [64] of the first two tokens after START, from the model's own logits."""

    def after(*tokens: int) -> Tensor:
        cache = model.new_cache(1, 8)
        return distribution(model.logits(model.forward(torch.tensor([tokens]), cache))[0, -1], how).double()

    first = after(*START)
    return torch.cat([first[token] * after(*START, token) for token in range(8)])


def two_tokens(decoder: Decoder, **how: Any) -> Tensor:
    """Counts [64] of the first two of three emitted tokens, over ROWS rows, each with its own seed."""
    out = decoder.generate_batch([START] * ROWS, max_new_tokens=3, seed=1000, **how)
    return torch.bincount(torch.tensor([8 * g.tokens[0] + g.tokens[1] for g in out]), minlength=CELLS)


def p_value(counts: Tensor, expected: Tensor) -> float:
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    scaled = expected[possible] / expected.sum() * counts.sum()
    return float(stats.chisquare(counts[possible].numpy(), scaled.numpy()).pvalue)


HOW: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "top_p": {"temperature": 1.0, "top_p": 0.85},
    "min_p": {"temperature": 1.0, "min_p": 0.08},
}


@pytest.mark.parametrize("name", HOW)
def test_what_the_loop_samples_is_what_the_model_says(name: str) -> None:
    """6,000 generations, χ² over two tokens at 1e-4: a total variation of 0.08 is found with a power above 0.99.

    (λ ≥ 4 n d² whatever the direction of the deviation; see test_acceptance.) The broken rule of the next test
    is off by more.
    """
    assert stats.ncx2.sf(stats.chi2.isf(SIGNIFICANCE, CELLS - 1), CELLS - 1, 4 * ROWS * 0.08**2) > 0.99
    model = random_llama(0, layers=2)
    decoder = Decoder(model, DraftModel(random_llama(3, layers=1)), 2)
    assert p_value(two_tokens(decoder, **HOW[name]), exact(model, Sampling(**HOW[name]))) > SIGNIFICANCE


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_control_a_wrong_residual_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "_subtract", lambda residual, token, q: residual)
    model = random_llama(0, layers=2)
    decoder = Decoder(model, DraftModel(random_llama(3, layers=1)), 2)
    assert p_value(two_tokens(decoder, **HOW[name]), exact(model, Sampling(**HOW[name]))) < SIGNIFICANCE


def test_control_a_rule_that_accepts_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_rule = acceptance.speculative_sampling

    def lenient(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, u: Tensor) -> acceptance.Verdict:
        return exact_rule(tokens, parents, p, q, u * 0.7)

    monkeypatch.setattr(acceptance, "speculative_sampling", lenient)
    model = random_llama(0, layers=2)
    decoder = Decoder(model, DraftModel(random_llama(3, layers=1)), 2)
    assert p_value(two_tokens(decoder, temperature=1.0), exact(model, Sampling(1.0))) < SIGNIFICANCE


def test_ngram_drafts_do_not_change_the_distribution() -> None:
    class Repeat(NGram):
        """Always drafts, so that one-hot proposals are put to the test in every row."""

        def matches(self, rows: Sequence[Row], lengths: Sequence[int]) -> list[Match]:
            drafts = [row.tokens[-1:-3:-1][:length] for row, length in zip(rows, lengths, strict=True)]
            return [Match(1, tuple(draft)) for draft in drafts]

    model = random_llama(0, layers=2)
    counts = two_tokens(Decoder(model, Repeat(), 2), temperature=1.0, top_p=0.95)
    assert p_value(counts, exact(model, Sampling(1.0, top_p=0.95))) > SIGNIFICANCE


# Seeds and batches


@pytest.mark.parametrize("name", DRAFTS)
def test_seeds(name: str, main: Main, drafter: Callable[[str], Drafter]) -> None:
    """CASES 18."""
    decoder = Decoder(main.model, drafter(name), 4, main.tokenizer)
    once, again, other = (decoder.generate(PROMPT, max_new_tokens=24, seed=seed, **SAMPLED) for seed in (5, 5, 6))
    assert once.tokens == again.tokens != other.tokens


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_does_not_depend_on_its_batch(
    name: str, how: dict[str, Any], main: Main, drafter: Callable[[str], Drafter]
) -> None:
    """CASES 18, 21: ragged prompts, rows that end early."""
    decoder = Decoder(main.model, drafter(name), 4, main.tokenizer)
    alone = [decoder.generate(p, max_new_tokens=30, seed=7 + i, **how) for i, p in enumerate(RAGGED)]
    ends = (alone[0].tokens[4], alone[3].tokens[9])
    cut = [decoder.generate(p, max_new_tokens=30, seed=7 + i, eos=ends, **how) for i, p in enumerate(RAGGED)]
    together = decoder.generate_batch(RAGGED, max_new_tokens=30, seed=7, eos=ends, **how)
    assert [g.tokens for g in together] == [g.tokens for g in cut]
    assert len({len(g.tokens) for g in together}) > 1
    for out in together:
        consistent(out)
    assert together[0].trace.steps[0].active == len(RAGGED)


def test_one_call_leaves_nothing_behind_for_the_next(main: Main, drafter: Callable[[str], Drafter]) -> None:
    """CASES 20: also not a stream that was left half-way."""
    decoder = Decoder(main.model, drafter("draft"), 4, main.tokenizer)
    fresh = decoder.generate(PROMPT, max_new_tokens=20, seed=1, **SAMPLED)
    decoder.generate_batch(RAGGED, max_new_tokens=9, temperature=1.3)
    next(decoder.stream(RAGGED[0], max_new_tokens=20))
    assert decoder.generate(PROMPT, max_new_tokens=20, seed=1, **SAMPLED).tokens == fresh.tokens


def test_stream_ends_with_what_generate_returns(main: Main, drafter: Callable[[str], Drafter]) -> None:
    decoder = Decoder(main.model, drafter("draft"), 3, main.tokenizer)
    parts = list(decoder.stream(PROMPT, max_new_tokens=20, seed=2, temperature=0.9))
    assert parts[-1].tokens == decoder.generate(PROMPT, max_new_tokens=20, seed=2, temperature=0.9).tokens
    assert len(parts) == len(parts[-1].trace.steps)
    for shorter, longer in zip(parts, parts[1:], strict=False):
        assert longer.tokens[: len(shorter.tokens)] == shorter.tokens
        assert len(longer.tokens) > len(shorter.tokens)


# Where it ends

SCRIPT = list(b"ab. One line END and two lines\nof text END no more than that, and on it goes for a while.") * 4


def scripted(draft_length: int, wrong: int = 10**9, tokenizer: Any = None, **settings: Any) -> Decoder:
    return Decoder(Scripted(SCRIPT, **settings), Oracle(SCRIPT, wrong), draft_length, tokenizer)


@pytest.mark.parametrize("wrong", [3, 10**9])
@pytest.mark.parametrize("draft_length", [0, 1, 4, 8])
def test_eos_ends_the_text_wherever_it_stands_in_a_block(draft_length: int, wrong: int) -> None:
    """CASES 10: the first of several, also when it was drafted and accepted, and tokens behind it too."""
    decoder = scripted(draft_length, wrong)
    for ends in ([ord("E")], [ord("\n"), ord("w")], [ord("O")], [ord("x"), ord("E"), ord("q")]):
        out = decoder.generate(SCRIPT[:4], eos=ends, max_new_tokens=80)
        first = next(i for i in range(4, len(SCRIPT)) if SCRIPT[i] in ends)
        assert out.tokens == SCRIPT[4 : first + 1]
        assert out.trace.finish == "eos"
        consistent(out)
    if draft_length == 8 and wrong > 3:  # CASES 3: more was accepted than emitted
        assert len(out.trace.steps[-1].accepted) + 1 > out.trace.steps[-1].emitted


def test_without_eos_it_goes_on() -> None:
    """CASES 10: eos = () overrides the decoder's, None keeps it."""
    decoder = Decoder(Scripted(SCRIPT), Oracle(SCRIPT), 4, eos=(ord("E"),))
    assert decoder.generate(SCRIPT[:4], max_new_tokens=60).trace.finish == "eos"
    assert decoder.generate(SCRIPT[:4], max_new_tokens=60, eos=None).trace.finish == "eos"
    out = decoder.generate(SCRIPT[:4], max_new_tokens=60, eos=())
    assert (out.tokens, out.trace.finish) == (SCRIPT[4:64], "length")


@pytest.mark.parametrize("draft_length", [0, 1, 4, 8])
@pytest.mark.parametrize("limit", [1, 2, 5, 9, 10])
def test_max_new_tokens_is_never_exceeded(draft_length: int, limit: int) -> None:
    """CASES 11: drafts are capped at what remains less one."""
    out = scripted(draft_length, 4).generate(SCRIPT[:4], max_new_tokens=limit)
    assert out.tokens == SCRIPT[4 : 4 + limit]
    assert out.trace.finish == "length"
    left = limit
    for step in out.trace.steps:
        assert len(step.drafted) <= min(draft_length, left - 1)
        left -= step.emitted
    consistent(out)


def test_the_earliest_bound_wins(byte_tokenizer: Any) -> None:
    """CASES 11: EOS, a stop string and the length limit within one block of eight."""
    decoder = scripted(8, tokenizer=byte_tokenizer)
    at = {"eos": (ord("l"),), "stop": "lin", "length": 7}  # 'One line': l is emitted token 5, lin ends at token 7
    out = decoder.generate(SCRIPT[:4], eos=at["eos"], stop=at["stop"], max_new_tokens=6)
    assert (bytes(out.tokens), out.trace.finish) == (b"One l", "eos")
    out = decoder.generate(SCRIPT[:4], eos=(), stop=at["stop"], max_new_tokens=6)
    assert (bytes(out.tokens), out.trace.finish) == (b"One li", "length")
    out = decoder.generate(SCRIPT[:4], eos=(ord("\n"),), stop=at["stop"], max_new_tokens=20)
    assert (bytes(out.tokens), out.trace.finish) == (b"One lin", "stop")


@pytest.mark.parametrize("draft_length", [0, 3, 8])
@pytest.mark.parametrize("stop", ["END", ("nowhere", "two li"), " ", "One line END and"])
def test_a_stop_string_cuts_ids_trace_and_text(draft_length: int, stop: Any, byte_tokenizer: Any) -> None:
    """CASES 12: each letter is a token of its own, so that the strings span tokens and steps."""
    out = scripted(draft_length, 5, byte_tokenizer).generate(SCRIPT[:4], stop=stop, max_new_tokens=80, eos=())
    stops = (stop,) if isinstance(stop, str) else stop
    whole = bytes(SCRIPT[4:]).decode()
    end = min(whole.find(s) + len(s) for s in stops if s in whole)
    assert out.text == whole[:end] == bytes(out.tokens).decode()
    assert out.trace.finish == "stop"
    consistent(out)


def test_a_stop_string_of_characters_of_several_tokens(byte_tokenizer: Any) -> None:
    script = list("ab: grüß dich, 日本語 und 🙂 mehr".encode())
    for stop in ("ß d", "本語", "🙂"):
        decoder = Decoder(Scripted(script), Oracle(script), 8, byte_tokenizer)
        out = decoder.generate(script[:4], stop=stop, max_new_tokens=36, eos=())
        assert out.text.endswith(stop)
        assert out.text == bytes(script[4:]).decode().split(stop)[0] + stop


def test_a_stop_string_in_the_prompt_does_not_count(byte_tokenizer: Any) -> None:
    out = scripted(4, tokenizer=byte_tokenizer).generate(SCRIPT[:18], stop="END", max_new_tokens=80, eos=())
    assert bytes(out.tokens).endswith(b"text END")


@pytest.mark.parametrize("draft_length", [0, 4, 8])
def test_the_context_ends_the_text(draft_length: int) -> None:
    """CASES 13: no token behind the model's context, and the trace says why it ended."""
    out = scripted(draft_length, 6, context_length=20).generate(SCRIPT[:12], max_new_tokens=64)
    assert (out.tokens, out.trace.finish) == (SCRIPT[12:20], "context")
    consistent(out)


@pytest.mark.parametrize("prompt_length", [10, 33, 60])
def test_a_draft_with_a_shorter_context(
    prompt_length: int, main: Main, tiny_draft_folder: str, reference: Callable[..., list[int]]
) -> None:
    """CASES 13: near its end the loop decodes plainly, and stays right; also for prompts already beyond it."""
    draft = zoo.load_main(tiny_draft_folder, device="cpu", dtype="float32").model
    draft.context_length = 40
    ids = list(range(50, 50 + prompt_length))
    rows = Decoder(main.model, DraftModel(draft), 4).generate_batch([ids, ids[:10]], max_new_tokens=40)
    assert rows[0].tokens == reference(ids, 40, eos_token_id=None)
    assert rows[1].tokens == reference(ids[:10], 40, eos_token_id=None)
    for out, length in zip(rows, (prompt_length, 10), strict=True):
        for step in out.trace.steps:
            assert length + len(step.drafted) <= 40 or not step.drafted
            length += step.emitted
        assert not out.trace.steps[-1].drafted
    assert any(step.drafted for step in rows[1].trace.steps)


# Traces


def test_what_a_trace_records(main: Main, drafter: Callable[[str], Drafter]) -> None:
    """p, q, overlap, entropy of every drafted token against fresh forwards."""
    small, how = drafter("draft"), Sampling(temperature=0.8, top_k=30)
    assert isinstance(small, DraftModel)
    decoder = Decoder(main.model, small, 4)
    ids = list(PROMPT.encode())
    out = decoder.generate(ids, max_new_tokens=20, temperature=0.8, top_k=30, seed=3)

    def after(model: Any, tokens: list[int]) -> Tensor:
        cache = model.new_cache(1, len(tokens))
        return distribution(model.logits(model.forward(torch.tensor([tokens]), cache))[0, -1], how)

    kinds = set()
    for step in out.trace.steps:
        for i, token in enumerate(step.drafted):
            p, q = (after(model, ids + step.drafted[:i]) for model in (main.model, small.model))
            assert step.p[i] == pytest.approx(p[token].item(), abs=1e-4)
            assert step.q[i] == pytest.approx(q[token].item(), abs=1e-4)
            assert step.overlap[i] == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-4)
            assert step.largest_p[i] == pytest.approx(p.max().item(), abs=1e-4)
            assert step.entropy[i] == pytest.approx(torch.special.entr(p).sum().item(), abs=1e-3)
        p = after(main.model, ids + step.accepted)
        assert step.next_p == pytest.approx(p[step.next_token].item(), abs=1e-4)
        kinds.add(step.next_kind)
        fates = step.fate + ["untried"] * (step.next_kind == "recovered")
        assert fates == sorted(fates, key=["accepted", "rejected", "untried"].index)
        assert (step.next_kind == "recovered") == ("rejected" in step.fate)
        assert step.fate.count("rejected") <= 1
        ids += [*step.accepted, step.next_token]
    assert "recovered" in kinds


def test_a_trace_survives_json(main: Main, drafter: Callable[[str], Drafter]) -> None:
    import json

    from specdec_lab.trace import Trace

    trace = Decoder(main.model, drafter("draft"), 3).generate([1, 2, 3], max_new_tokens=9).trace
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


def test_times_and_memory(main: Main, drafter: Callable[[str], Drafter]) -> None:
    plain = Decoder(main.model).generate([1, 2, 3], max_new_tokens=9).trace
    trace = Decoder(main.model, drafter("draft"), 3).generate([1, 2, 3], max_new_tokens=9).trace
    assert trace.memory_bytes > plain.memory_bytes > main.model.nbytes
    assert trace.prefill_s > 0
    assert trace.draft_prefill_s > 0
    assert all(step.draft_s > 0 and step.verify_s > 0 and step.other_s > 0 for step in trace.steps)


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens = 0: allowed is an integer >= 1"),
        ({"max_new_tokens": -1}, r"max_new_tokens = -1: allowed is an integer >= 1"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens = 2\.5: allowed is an integer >= 1"),
        ({"temperature": -1}, r"temperature = -1: allowed is a number >= 0"),
        ({"temperature": math.nan}, r"temperature = nan: allowed"),
        ({"temperature": math.inf}, r"temperature = inf: allowed"),
        ({"top_p": 0}, r"top_p = 0: allowed is 0 < top_p <= 1"),
        ({"min_p": 1}, r"min_p = 1: allowed is 0 <= min_p < 1"),
        ({"top_k": -1}, r"top_k = -1: allowed is an integer >= 0"),
        ({"repetition_penalty": 0}, r"repetition_penalty = 0: allowed is 0.01 … 100"),
        ({"stop": ""}, r"stop = '': allowed is strings that are not empty"),
        ({"stop": ("a", "")}, r"stop = \('a', ''\): allowed is strings that are not empty"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str, main: Main) -> None:
    decoder = Decoder(main.model, tokenizer=main.tokenizer)
    for call in (decoder.generate, lambda prompt, **how: next(decoder.stream(prompt, **how))):
        with pytest.raises(SettingError, match=message):
            call("hello", **settings)


@pytest.mark.parametrize("draft_length", [-1, MAX_DRAFT + 1, 2.5])
def test_draft_length_out_of_range(draft_length: Any, main: Main) -> None:
    with pytest.raises(SettingError, match=rf"draft_length = {draft_length}: allowed is .*0 \(plain.* … {MAX_DRAFT}"):
        Decoder(main.model, Drafter(), draft_length)


def test_draft_length_beyond_the_context() -> None:
    with pytest.raises(SettingError, match=r"draft_length = 12: allowed is .* … 11"):
        Decoder(Scripted(SCRIPT, context_length=12), Drafter(), 12)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", r"prompt = '': allowed is text or token ids that are not empty"),
        ("  \n", r"prompt = .*: allowed is text or token ids that are not empty"),
        ([], r"prompt = \[\]: allowed is text or token ids that are not empty"),
        ([1] * 512, r"prompt = '512 tokens': allowed is 1 … 511 tokens"),
        ("x" * 600, r"prompt = '6\d\d tokens': allowed is 1 … 511 tokens"),
        ([1, 259], r"prompt = 'token 259': allowed is ids 0 … 258"),
        ([1, -1], r"prompt = 'token -1': allowed is ids 0 … 258"),
    ],
)
def test_prompts_that_cannot_be_decoded(prompt: Any, message: str, main: Main) -> None:
    with pytest.raises(SettingError, match=message):
        Decoder(main.model, tokenizer=main.tokenizer).generate(prompt)


def test_what_needs_a_tokenizer_says_so(main: Main) -> None:
    with pytest.raises(SettingError, match=r"prompt = 'hello': allowed is token ids, as this decoder has no tok"):
        Decoder(main.model).generate("hello")
    with pytest.raises(SettingError, match=r"stop = 'x': allowed is none, as this decoder has no tokenizer"):
        Decoder(main.model).generate([1], stop="x")


def test_a_misspelt_setting_is_refused(main: Main) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        Decoder(main.model).generate([1], max_tokens=3)


def test_an_empty_batch_is_an_empty_list(main: Main) -> None:
    assert Decoder(main.model).generate_batch([]) == []


def test_eos_of_the_tokenizer_is_the_default() -> None:
    decoder = Decoder(Scripted(SCRIPT), None, 4, SimpleNamespace(eos_token_id=ord("E"), decode=lambda ids, **_: ""))
    assert decoder.generate(SCRIPT[:4], max_new_tokens=60).trace.finish == "eos"
