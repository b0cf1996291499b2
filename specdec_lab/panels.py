"""What a run says, as HTML: numbers, reasons, what could be, and runs side by side. Knows neither widgets nor models.

Every text is escaped. Colours are JupyterLab's where the page has them (panels.css), so that both themes are legible.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from specdec_lab import traceview
from specdec_lab.metrics import acceptance_by_position, position_counts, throughput, totals
from specdec_lab.session import Outcome, Progress, Setting, table
from specdec_lab.tables import short
from specdec_lab.whatif import WhatIf

CSS = Path(__file__).with_name("panels.css")
NUMBERS = {  # of a run, as they are called on the page
    "speculative_speedup": ("speed-up", "{:.2f}×"),
    "throughput": ("tokens/s", "{:.1f}"),
    "tokens_per_main_forward": ("τ, tokens / forward", "{:.2f}"),
    "acceptance_probability": ("α (of tried)", "{:.1%}"),
    "draft_acceptance_rate": ("accepted / drafted", "{:.1%}"),
    "draft_cost_ratio": ("c", "{:.3f}"),
}
Line = tuple[str, str, Sequence[float], Sequence[float]]  # label, CSS class, x, y


def style() -> str:
    """The style sheet as an element."""
    return f"<style>{CSS.read_text(encoding='utf-8')}</style>"


def number(value: float | None, form: str = "{:.2f}") -> str:
    """A value as shown; – where there is none."""
    return "–" if value is None or not math.isfinite(value) else form.format(value)


def describe(setting: Setting) -> str:
    """A setting in a few words."""
    if setting.draft == "none":
        return "plain"
    idle, parts = setting.idle, [short(setting.draft, 24)]
    if "draft_length" not in idle:
        parts.append(f"γ {setting.draft_length}")
    if setting.candidate_count > 1 and "candidate_count" not in idle:
        parts.append(f"K {setting.candidate_count}")
    if setting.acceptance_rule != "lossless":
        at = setting.acceptance_threshold
        parts.append(setting.acceptance_rule + ("" if at is None else f" {at:g}"))
    if setting.temperature:
        parts.append(f"T {setting.temperature:g}")
    if "seed" not in idle:
        parts.append(f"seed {setting.seed}")
    return ", ".join(parts)


def note(text: str, kind: str = "info") -> str:
    """A sentence; kind: info or error."""
    return f'<div class="sl-note sl-{kind}">{escape(text)}</div>'


def code(text: str) -> str:
    """A command to copy; a click selects all of it."""
    return f'<pre class="sl-code">{escape(text)}</pre>'


def chips(run: Progress | Outcome) -> str:
    """The text as chips, as far as it has got."""
    return "" if run.made is None else traceview.text(run.made.trace, run.token, join=run.decode)


def headline(outcome: Outcome) -> str:
    """The speed-up, the numbers behind it, and whether the text is the plain loop's."""
    found = outcome.metrics
    speedup = found["speculative_speedup"]
    if outcome.setting.draft == "none":
        verdict = "this is the plain loop"
    else:
        verdict = "faster than plain decoding" if speedup > 1 else "slower than plain decoding"
    plain = number(throughput(totals([outcome.plain.trace])), "{:.1f}")
    tiles = [_tile("speed-up", number(speedup, "{:.2f}×"), verdict, "sl-big")]
    tiles.append(_tile("tokens/s", number(found["throughput"], "{:.1f}"), f"plain: {plain}"))
    for name in ("tokens_per_main_forward", "acceptance_probability", "draft_acceptance_rate"):
        label, form = NUMBERS[name]
        tiles.append(_tile(label, number(found[name], form), ""))
    return f'<div class="sl-tiles">{"".join(tiles)}</div>' + note(_sameness(outcome))


def _tile(label: str, value: str, about: str, kind: str = "") -> str:
    below = f"<small>{escape(about)}</small>" if about else ""
    return f'<div class="sl-tile {kind}"><span>{escape(label)}</span><b>{escape(value)}</b>{below}</div>'


def _sameness(outcome: Outcome) -> str:
    setting, at = outcome.setting, outcome.differs_at
    if setting.draft == "none":
        return f"{len(outcome.made.tokens)} tokens, one by one."
    if setting.temperature > 0:
        lossless = setting.acceptance_rule == "lossless"
        follows = "the main model's own distribution" if lossless else "another distribution than the main model's"
        return f"{'Lossless' if lossless else 'Lossy'}: the text follows {follows}; another draw than the plain loop's."
    differs = "the text is the plain loop's all the same" if at is None else f"token {at + 1} is the first that differs"
    if setting.acceptance_rule != "lossless":
        return f"Lossy ({setting.acceptance_rule}): {differs}."
    if at is None:
        return f"Lossless: all {len(outcome.made.tokens)} tokens are the plain loop's."
    return f"Token {at + 1} differs from the plain loop's. In low precision ties turn; in float32 that would be a bug."


def why(outcome: Outcome) -> str:
    """Where the time went, how acceptance falls, what theory expects, and what would help most."""
    blocks = [_time(outcome), _positions(outcome), _theory(outcome)]
    return f'<div class="sl-columns">{"".join(f"<section>{block}</section>" for block in blocks)}</div>'


def _bar(label: str, share: float, said: str, kind: str = "") -> str:
    width = f"{100 * min(1.0, max(0.0, share)):.1f}%"
    fill = f'<i class="sl-fill {kind}" style="width:{width}"></i>'
    return f"<span>{escape(label)}</span><em>{fill}</em><b>{escape(said)}</b>"


def _bars(bars: Sequence[str]) -> str:
    return f'<div class="sl-bars">{"".join(bars)}</div>'


def _time(outcome: Outcome) -> str:
    """Milliseconds an emitted token takes, by part, over the plain loop's."""
    ours, theirs = totals([outcome.trace]), totals([outcome.plain.trace])
    parts = {part: getattr(ours, f"{part}_s") / ours.emitted for part in ("draft", "verify", "other")}
    parts["plain"] = theirs.decode_s / theirs.emitted
    most = max(parts.values())
    bars = [_bar(part, took / most, f"{1e3 * took:.1f} ms", f"sl-{part}") for part, took in parts.items()]
    c = number(outcome.metrics["draft_cost_ratio"], "{:.3f}")
    return f"<h4>Time of an emitted token</h4>{_bars(bars)}<p>A drafted token costs c = {c} plain forwards.</p>"


def _positions(outcome: Outcome) -> str:
    counts = position_counts([outcome.trace])
    shares = acceptance_by_position(counts, conditional=True)
    if not shares:
        return "<h4>Acceptance by position</h4><p>Nothing was drafted.</p>"
    told = zip(shares, counts["accepted"], counts["tried"], strict=False)
    bars = [_bar(str(place), share, f"{kept} of {tried}") for place, (share, kept, tried) in enumerate(told, 1)]
    return f"<h4>Acceptance of tried tokens, by position</h4>{_bars(bars)}"


def _theory(outcome: Outcome) -> str:
    head = "<h4>Predicted and measured</h4>"
    measured = outcome.metrics["speculative_speedup"]
    why_not = outcome.unexplained or ("" if outcome.curve else "the cost of verification is not measured yet")
    if why_not:
        return f"{head}<p>No prediction: {escape(why_not)}.</p>"
    shown = {"measured": (measured, ""), "predicted": (outcome.prediction, "sl-plain")}
    levers = {f"{lever.name}, {lever.change}": (lever.speedup, "sl-verify") for lever in outcome.levers}
    most = max(value for value, _ in [*shown.values(), *levers.values()] if value is not None)

    def bars(them: Mapping[str, tuple[float | None, str]]) -> str:
        return _bars([_bar(name, (v or 0) / most, number(v, "{:.2f}×"), kind) for name, (v, kind) in them.items()])

    held = "" if outcome.prediction else "<p>The draft holds back, so that one draft length says nothing.</p>"
    return f"{head}{bars(shown)}{held}<h4>What would help most</h4>{bars(levers)}"


# ---- what if


def what_if(known: WhatIf, draft_length: int, rule: str, threshold: float) -> str:
    """Predicted speed-up over draft length and over threshold, and at the chosen point."""
    lengths = list(range(1, 17))
    lossless, lossy = ([known.speedup(n, *how) for n in lengths] for how in ((), (rule, threshold)))
    at = [known.speedup(draft_length), known.speedup(draft_length, rule, threshold)]
    over_length = chart(
        [("lossless", "sl-a", lengths, lossless), (f"{rule} {threshold:g}", "sl-b", lengths, lossy)],
        "draft length",
        mark=draft_length,
    )
    grid = [step / 20 for step in range(21)]
    over_threshold = chart(
        [
            ("lossless", "sl-a", [0, 1], [at[0], at[0]]),
            (f"{rule}, γ {draft_length}", "sl-b", grid, [known.speedup(draft_length, rule, t) for t in grid]),
        ],
        "threshold",
        mark=threshold,
    )
    foreign = known.foreign(draft_length, rule, threshold)
    price = f"; {foreign:.0%} of its tokens are not the main model's first choice" if known.greedy else ""
    beyond = draft_length > known.p.shape[1]
    guess = f" Beyond {known.p.shape[1]} tokens, which this run drafted, the pooled α goes on." if beyond else ""
    said = f"γ {draft_length}: lossless {at[0]:.2f}×, {rule} {threshold:g} {at[1]:.2f}×{price}.{guess}"
    return f'<div class="sl-charts">{over_length}{over_threshold}</div>{note(said)}'


def chart(lines: Sequence[Line], xlabel: str, mark: float) -> str:
    """Predicted speed-ups over x as inline SVG, with a dashed line at 1 and a vertical one at `mark`.

    Not matplotlib, which takes longer to draw than a slider may wait.
    """
    width, height, left, right, top, bottom = 310, 190, 48, 10, 8, 38
    xs, ys = [a for line in lines for a in line[2]], [b for line in lines for b in line[3]]
    low, high, step = min(xs), max(xs), _step(max(1.0, *ys))
    peak = step * math.ceil(max(1.0, *ys) / step + 0.2)

    def x(value: float) -> float:
        return left + (value - low) / (high - low or 1) * (width - left - right)

    def y(value: float) -> float:
        return height - bottom - value / peak * (height - top - bottom)

    def rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'

    def word(at_x: float, at_y: float, text: str, anchor: str, turn: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'

    parts = []
    for i in range(round(peak / step) + 1):
        parts += [rule(left, y(i * step), width - right, y(i * step), "sl-grid")]
        parts += [word(left - 5, y(i * step) + 4, f"{i * step:g}", "end")]
    for tick in _ticks(low, high):
        parts += [word(x(tick), height - bottom + 15, f"{tick:g}", "middle")]
    parts += [rule(left, y(1), width - right, y(1), "sl-one")]
    parts += [rule(x(mark), top, x(mark), height - bottom, "sl-mark")]
    for _, kind, over, values in lines:
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(over, values, strict=True))
        parts += [f'<polyline points="{points}" class="sl-line {kind}"/>']
    turn = f' transform="rotate(-90 11 {height / 2:.0f})"'
    parts += [
        word((left + width) / 2, height - 6, xlabel, "middle"),
        word(11, height / 2, "predicted speed-up", "middle", turn),
    ]
    keys = "".join(f'<span class="sl-key {kind}">{escape(label)}</span>' for label, kind, _, _ in lines)
    label = escape(f"predicted speed-up over {xlabel}")
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<figure class="sl-chart"><figcaption>{keys}</figcaption>{svg}</figure>'


def _step(most: float) -> float:
    return next(step for step in (0.25, 0.5, 1, 2, 5, 10, 1e9) if most / step <= 6)


def _ticks(low: float, high: float) -> list[float]:
    return [low, *range(4, int(high) + 1, 4)] if high > 1 else [i / 5 for i in range(6)]


# ---- runs that were kept


def history(outcomes: Sequence[Outcome]) -> str:
    """A table of runs, the latest first."""
    if not outcomes:
        return note("Runs appear here.")
    names = [*NUMBERS]
    head = "".join(f"<th>{escape(word)}</th>" for word in ("run", "setting", *(NUMBERS[n][0] for n in names)))
    lines = []
    for place, each in reversed(list(enumerate(outcomes, 1))):
        cells = [str(place), describe(each.setting), *(number(each.metrics[n], NUMBERS[n][1]) for n in names)]
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr title="{escape(each.setting.prompt[:200])}">{shown}</tr>')
    return f'<div class="sl-scroll"><table class="sl-table"><tr>{head}</tr>{"".join(lines)}</table></div>'


def comparison(a: Outcome, b: Outcome) -> str:
    """Two runs side by side: numbers and texts."""
    sides = []
    for each in (a, b):
        said = ", ".join(f"{label} {number(each.metrics[n], form)}" for n, (label, form) in NUMBERS.items())
        body = chips(each)
        sides.append(f"<section><h4>{escape(describe(each.setting))}</h4><p>{escape(said)}</p>{body}</section>")
    ratio = _ratio(a, b)
    return f'{note(ratio)}<div class="sl-columns sl-two">{"".join(sides)}</div>'


def _ratio(a: Outcome, b: Outcome) -> str:
    if a.setting.plain != b.setting.plain:
        return "Different prompts, models, lengths or seeds: not like with like."
    ratio = b.metrics["speculative_speedup"] / a.metrics["speculative_speedup"]
    return f"The second is {ratio:.2f} times as fast as the first (one run each)."


def download(outcomes: Sequence[Outcome]) -> str:
    """A link that saves the runs as CSV."""
    data = base64.b64encode(table(outcomes).to_csv(index=False).encode()).decode()
    return f'<a class="sl-link" download="specdec_runs.csv" href="data:text/csv;base64,{data}">Save as CSV</a>'
