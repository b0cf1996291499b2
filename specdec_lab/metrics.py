"""Every ratio, defined once, derived from traces. It does not know how traces came about.

A metric takes the traces of a set of texts and, where it compares, those of the plain loop on the same prompts.
Times are seconds, memory is bytes. A value is None where it is undefined (nothing drafted, no baseline).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_lab.trace import Step, Trace

Value = float | list[float] | None
LOOP = 0.3  # share of repeated 4-grams from which on an output counts as a loop


@dataclass(frozen=True)
class Totals:
    """Sums over texts; ratios of totals are pooled, so long texts weigh more than short ones.

    Sums of several sets add up with `+`; experiments keep them per prompt.
    """

    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    steps: int = 0  # main forwards after prefill
    planned: int = 0  # tokens the draft length asked for
    emitted: int = 0
    overlap: float = 0.0  # Σ over drafted tokens of Σ min(p, q)
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    prefill_s: float = 0.0  # both models'
    first_s: float = 0.0  # prefill and first step
    texts: int = 0
    settled: int = 0  # verifications that drafted and then emitted
    fallbacks: int = 0  # those of them that kept none of their drafted tokens
    refusals: int = 0  # verifications after which the draft was drawn anew; they emitted nothing

    def __add__(self, other: "Totals") -> "Totals":
        names = self.__dataclass_fields__
        return Totals(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def decode_s(self) -> float:
        """Seconds after prefill."""
        return self.draft_s + self.verify_s + self.other_s


def totals(traces: Iterable[Trace]) -> Totals:
    """Pooled sums. Times of prefill and steps that rows shared are divided among them, but for `first_s`."""
    out = Totals()
    for trace in traces:
        settled = [step for step in trace.steps if step.drafted and not _refused(step)]
        out += Totals(
            drafted=sum(len(step.drafted) for step in trace.steps),
            accepted=sum(step.fate.count("accepted") for step in trace.steps),
            rejected=sum(step.fate.count("rejected") for step in trace.steps),
            steps=len(trace.steps),
            planned=sum(step.planned for step in trace.steps),
            emitted=len(trace.tokens),
            overlap=sum(sum(step.overlap) for step in trace.steps),
            draft_s=sum(step.draft_s / step.active for step in trace.steps),
            verify_s=sum(step.verify_s / step.active for step in trace.steps),
            other_s=sum(step.other_s / step.active for step in trace.steps),
            prefill_s=(trace.prefill_s + trace.draft_prefill_s) / (trace.steps[0].active if trace.steps else 1),
            first_s=trace.prefill_s + trace.draft_prefill_s + _seconds(_first(trace.steps)),
            texts=1,
            settled=len(settled),
            fallbacks=sum("accepted" not in step.fate for step in settled),
            refusals=sum(map(_refused, trace.steps)),
        )
    return out


def _refused(step: Step) -> bool:
    return step.next_kind == "refused"


def _first(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps until there are tokens."""
    return steps[: 1 + next((index for index, step in enumerate(steps) if not _refused(step)), len(steps))]


def _seconds(steps: Sequence[Step]) -> float:
    return sum(step.draft_s + step.verify_s + step.other_s for step in steps)


def ratio(numerator: float, denominator: float) -> float | None:
    """Their quotient, None when there is nothing to divide by."""
    return numerator / denominator if denominator else None


def draft_acceptance_rate(t: Totals) -> float | None:
    """Accepted over drafted tokens, those after a rejection included."""
    return ratio(t.accepted, t.drafted)


def acceptance_probability(t: Totals) -> float | None:
    """α: accepted over tried tokens; those after a rejection were not tried."""
    return ratio(t.accepted, t.accepted + t.rejected)


def expected_acceptance(t: Totals) -> float | None:
    """Mean over drafted tokens of Σ min(p, q), tokens behind a rejection included; greedy p and q are one-hot."""
    return ratio(t.overlap, t.drafted)


def tokens_per_main_forward(t: Totals) -> float | None:
    """τ: emitted tokens per main forward, recovered and bonus tokens included, prefill left out."""
    return ratio(t.emitted, t.steps)


def coverage(t: Totals) -> float | None:
    """Drafted tokens over those the draft length asked for; 1 unless a drafter holds back."""
    return ratio(t.drafted, t.planned)


def fallback_ratio(t: Totals) -> float | None:
    """Share of the settled verifications that kept no drafted token: the main model's own token alone went on.

    A refused draft that is drawn anew is not settled. In the rule `sequence` there is one to a text.
    """
    return ratio(t.fallbacks, t.settled)


def refusal_ratio(t: Totals) -> float | None:
    """Share of the verifications of a draft after which it was drawn anew."""
    return ratio(t.refusals, t.refusals + t.settled)


def throughput(t: Totals) -> float | None:
    """Emitted tokens per second after prefill."""
    return ratio(t.emitted, t.decode_s)


def end_to_end_throughput(t: Totals) -> float | None:
    """Emitted tokens per second, prefill of both models included."""
    return ratio(t.emitted, t.decode_s + t.prefill_s)


def time_to_first_token(t: Totals) -> float | None:
    """Mean seconds until the first tokens are there, refused drafts before them included."""
    return ratio(t.first_s, t.texts)


def overhead_share(t: Totals) -> float | None:
    """Share of the time after prefill that is neither drafting nor the main model's forward."""
    return ratio(t.other_s, t.decode_s)


def speculative_speedup(t: Totals, plain: Totals) -> float | None:
    """Throughput over the plain loop's on the same prompts, after prefill."""
    return _quotient(throughput(t), throughput(plain))


def end_to_end_speedup(t: Totals, plain: Totals) -> float | None:
    """Throughput over the plain loop's on the same prompts, prefill included."""
    return _quotient(end_to_end_throughput(t), end_to_end_throughput(plain))


def draft_cost_ratio(t: Totals, plain: Totals) -> float | None:
    """c: seconds per drafted token over the plain loop's seconds per main forward."""
    return _quotient(ratio(t.draft_s, t.drafted), ratio(plain.verify_s, plain.steps))


def _quotient(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _depths(step: Step) -> list[int]:
    """How deep each drafted node is, 1 behind the last committed token."""
    depths: list[int] = []
    for parent in step.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def position_counts(traces: Iterable[Trace]) -> dict[str, list[int]]:
    """Tokens "drafted", "tried" and "accepted" at depth 1, 2, …"""
    counts: dict[str, list[int]] = {"drafted": [], "tried": [], "accepted": []}
    for trace in traces:
        for step in trace.steps:
            for depth, fate in zip(_depths(step), step.fate, strict=True):
                for at in counts.values():
                    at.extend([0] * (depth - len(at)))
                counts["drafted"][depth - 1] += 1
                counts["tried"][depth - 1] += fate != "untried"
                counts["accepted"][depth - 1] += fate == "accepted"
    return counts


def tried(traces: Iterable[Trace]) -> dict[str, list[Any]]:
    """Of every tried token: the main model's "entropy" there (nats), whether it "stays", its "depth" from 1."""
    out: dict[str, list[Any]] = {"entropy": [], "stays": [], "depth": []}
    for trace in traces:
        for step in trace.steps:
            for entropy, fate, depth in zip(step.entropy, step.fate, _depths(step), strict=True):
                if fate != "untried":
                    out["entropy"].append(entropy)
                    out["stays"].append(fate == "accepted")
                    out["depth"].append(depth)
    return out


def acceptance_by_position(counts: Mapping[str, Sequence[float]], conditional: bool = False) -> list[float]:
    """Share of tokens drafted at depth 1, 2, … that stay; conditional: of those that were tried there."""
    below = counts["tried" if conditional else "drafted"]
    return [a / b for a, b in zip(counts["accepted"], below, strict=True) if b]


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float | None:
    """Share of the n-grams of one text that stood in it before; None for a text shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return ratio(len(grams) - len(set(grams)), len(grams))


def loops(tokens: Sequence[int]) -> bool:
    """Whether an output has fallen into a loop: of its 4-grams, LOOP or more stood in it before.

    Any drafter guesses a loop, so speed on such texts says nothing. Of 64 to 128 tokens that people wrote, at most
    2 % of the JSON and 1 % of the code answers shipped with the prompts reach that share, and 1 in 1,000 passages of
    the books. A text too short to have 4-grams does not loop.
    """
    return (repeated_ngrams(tokens) or 0.0) >= LOOP


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first differing token, the shorter one's end counting as a difference; None when equal."""
    for index, (a, b) in enumerate(zip(got, expected, strict=False)):
        if a != b:
            return index
    return None if len(got) == len(expected) else min(len(got), len(expected))


def repetition(traces: Sequence[Trace]) -> float | None:
    """Mean over texts of the share of repeated 4-grams in the output."""
    shares = [share for trace in traces if (share := repeated_ngrams(trace.tokens)) is not None]
    return ratio(sum(shares), len(shares))


def peak_memory(traces: Sequence[Trace]) -> float | None:
    """Largest memory of a run: on CUDA the allocator's peak, on CPU weights in all layouts and KV caches."""
    return float(max((trace.memory_bytes for trace in traces), default=0)) or None


@dataclass(frozen=True)
class MetricSpec:
    """What a metric is called, how it reads, and how it is computed from traces and the plain loop's traces."""

    name: str
    formula: str
    unit: str
    better: str  # "higher", "lower" or "neither"
    source: str
    of: Callable[[Sequence[Trace], Sequence[Trace] | None], Value]


def _not_in_traces(traces: Sequence[Trace], plain: Sequence[Trace] | None) -> None:
    """What compares texts by a task or a model; statistics.quality_change derives it."""


def _pooled(f: Callable[[Totals], float | None]) -> Callable[[Any, Any], Value]:
    return lambda traces, plain: f(totals(traces))


def _against(f: Callable[[Totals, Totals], float | None]) -> Callable[[Any, Any], Value]:
    return lambda traces, plain: None if plain is None else f(totals(traces), totals(plain))


def _memory_growth(traces: Sequence[Trace], plain: Sequence[Trace] | None) -> float | None:
    with_draft, alone = peak_memory(traces), peak_memory(plain or ())
    return None if with_draft is None or not alone else with_draft / alone - 1


_LEVIATHAN, _CHEN, _ARTICLES = "arXiv 2211.17192", "arXiv 2302.01318", "specdec_lab, after the articles"
_SPECS = (
    MetricSpec("speculative_speedup", "(Σ emitted / Σ decode time) / (the same of the plain loop)", "×", "higher",
               _LEVIATHAN, _against(speculative_speedup)),
    MetricSpec("end_to_end_speedup", "the same with the prefill of both models in the time", "×", "higher",
               "specdec_lab", _against(end_to_end_speedup)),
    MetricSpec("throughput", "Σ emitted / Σ decode time", "tokens/s", "higher", "specdec_lab", _pooled(throughput)),
    MetricSpec("time_to_first_token", "mean of prefill + steps until the first token", "s", "lower", "specdec_lab",
               _pooled(time_to_first_token)),
    MetricSpec("tokens_per_main_forward", "τ = emitted / main forwards", "tokens", "higher", _LEVIATHAN,
               _pooled(tokens_per_main_forward)),
    MetricSpec("draft_acceptance_rate", "accepted / drafted", "share", "higher", _CHEN,
               _pooled(draft_acceptance_rate)),
    MetricSpec("acceptance_probability", "α = accepted / (accepted + rejected)", "share", "higher", _LEVIATHAN,
               _pooled(acceptance_probability)),
    MetricSpec("expected_acceptance", "mean over drafted tokens of Σ min(p, q); greedy: those equal to the arg-max",
               "share", "higher", _LEVIATHAN, _pooled(expected_acceptance)),
    MetricSpec("acceptance_by_position", "accepted / drafted at each depth", "share", "higher", "specdec_lab",
               lambda traces, plain: acceptance_by_position(position_counts(traces))),
    MetricSpec("acceptance_by_position_conditional", "accepted / tried at each depth", "share", "higher",
               "specdec_lab", lambda traces, plain: acceptance_by_position(position_counts(traces), conditional=True)),
    MetricSpec("coverage", "drafted / planned", "share", "neither", "specdec_lab", _pooled(coverage)),
    MetricSpec("fallback_ratio", "verifications that kept no drafted token / those that drafted and then emitted "
               "(`sequence`: one to a text)", "share", "lower", _ARTICLES, _pooled(fallback_ratio)),
    MetricSpec("refusal_ratio", "verifications after which the draft was drawn anew / those that drafted", "share",
               "lower", "specdec_lab", _pooled(refusal_ratio)),
    MetricSpec("draft_cost_ratio", "c = time per drafted token / time per plain main forward", "share", "lower",
               _LEVIATHAN, _against(draft_cost_ratio)),
    MetricSpec("overhead_share", "time outside drafting and main forwards / decode time", "share", "lower",
               "specdec_lab", _pooled(overhead_share)),
    MetricSpec("repetition", "repeated 4-grams / 4-grams, mean over texts", "share", "lower", "arXiv 1908.04319",
               lambda traces, plain: repetition(traces)),
    MetricSpec("quality_delta", "scores where higher is better (json, code): mean of the plain loop's − this one's; "
               "where lower is better (prose): Σ this one's / Σ the plain loop's − 1; over texts that both have scores "
               "of, same prompt and seed", "share", "lower", _ARTICLES, _not_in_traces),
    MetricSpec("nll_delta", "Σ NLL / Σ NLL of the plain loop's − 1; NLL: mean of −log p of a text's tokens, nats per "
               "token, p of the main model without processors", "share", "lower", "specdec_lab", _not_in_traces),
    MetricSpec("repetition_delta", "mean of a text's repetition − that of the plain loop's", "share", "lower",
               "specdec_lab", _not_in_traces),
    MetricSpec("peak_memory", "CUDA: allocator's peak; CPU: weights and KV caches", "bytes", "lower", "specdec_lab",
               lambda traces, plain: peak_memory(traces)),
    MetricSpec("memory_growth", "peak memory / that of the plain loop − 1", "share", "lower", "specdec_lab",
               _memory_growth),
)  # fmt: skip

METRICS: dict[str, MetricSpec] = {spec.name: spec for spec in _SPECS}


def summarise(traces: Sequence[Trace], baseline: Sequence[Trace] | None = None) -> dict[str, Value]:
    """Every metric of a set of texts; `baseline` is the plain loop's traces of the same prompts."""
    return {name: spec.of(traces, baseline) for name, spec in METRICS.items()}


def markdown() -> str:
    """The table of metrics that docs/METRICS.md holds."""
    lines = [
        "# Metrics",
        "",
        "Made from `specdec_lab.metrics.METRICS`; every ratio is defined there, once. *Accepted*: drafted tokens that",
        "stay. *Tried*: accepted or rejected; tokens behind a rejection are not tried. *Emitted*: what the user gets,",
        "after end-of-sequence, stop strings and length limits cut the last step; what that cut removes counts as",
        "drafted and accepted, never as emitted. A draft that is refused and drawn anew counts as drafted,",
        "its verification as a main forward that emits nothing. *Plain loop*: the same decoder without a draft, on the",
        "same prompts, measured in the same run.",
        "",
        "| name | definition | unit | better | source |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| `{m.name}` | {m.formula} | {m.unit} | {m.better} | {m.source} |" for m in _SPECS]
    return "\n".join(lines) + "\n"
