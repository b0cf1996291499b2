"""A trace as HTML: the text as token chips, one step with its tree and its times, and what the chips mean.

The strings are made for ipywidgets.HTML and hold no script; whatever comes from a model or a user is escaped. `style`
goes once to a page. `decode`, everywhere, is the text of a token id. It knows neither models nor widgets.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from specdec_lab.errors import require, whole
from specdec_lab.trace import Step, Trace

FILE = Path(__file__).with_name("traceview.css")
MEANING = {
    "accepted": "drafted and kept",
    "recovered": "the main model's, after a rejection",
    "bonus": "the main model's, after a whole draft",
    "plain": "the main model's, nothing drafted",
    "rejected": "drafted, not kept",
    "untried": "behind a rejection",
    "refused": "a whole draft, drawn anew",
}
LISTED = 6  # lost drafts on a card; the view of the step shows all
BROKEN = "\ufffd"  # what decoders write for bytes that are no character
LONGEST = 8  # tokens that together may make whole characters
CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}  # drawn, as ␀ … ␡
SPECIAL = re.compile(r"<\|[^<>|\s]+\|>")
Decode = Callable[[int], str]
Join = Callable[[Sequence[int]], str]


def style() -> str:
    """The style sheet of all the others, as a <style> element."""
    return f"<style>{FILE.read_text(encoding='utf-8')}</style>"


def legend() -> str:
    """What the chips' colours and shapes mean."""
    signs = {kind: _chip(kind, kind) for kind in MEANING} | {"refused": f"{_chip('refused', '')} refused:"}
    keys = "".join(f"<span>{signs[kind]} {meaning}</span>" for kind, meaning in MEANING.items())
    return f'<div class="sd sd-legend">{keys}</div>'


def text(trace: Trace, decode: Decode, *, join: Join | None = None) -> str:
    """The emitted tokens as chips, one for each of trace.tokens, those of a step in one group (data-step: its index).

    Takes an unfinished trace too. Hovering over a chip shows its numbers and, at a step's end, the drafts that it
    lost. join: the text of several ids; with it tokens that hold parts of a character show it together.
    """
    texts = _texts(trace.tokens, decode, join)
    groups, shown = [], 0
    for index, own in enumerate(trace.steps):
        chips, emitted = [], _kept(own)[: own.emitted]
        for place in emitted:
            lost = _lost(own, decode) if place is emitted[-1] else ""
            ends = trace.finish == "eos" and shown + 1 == len(trace.tokens)
            numbers = _numbers(place, *_chances(own), "largest p", "entropy")
            chips.append(_chip(place.kind, texts[shown], ends, _card(index, place.kind, numbers + lost)))
            shown += 1
        if own.next_kind == "refused":
            chips.append(_chip("refused", "", card=_card(index, "refused", _lost(own, decode))))
        groups.append(f'<span class="sd-step" data-step="{index}">{"".join(chips)}</span>')
    end = f'<span class="sd-end">{escape(trace.finish)}</span>' if trace.finish else '<span class="sd-caret"></span>'
    return f'<div class="sd"><div class="sd-flow">{"".join(groups)}{end}</div></div>'


def step(trace: Trace, index: int, decode: Decode) -> str:
    """One step: its tree of drafts with p and q, the token that came next, where the time went, and every number.

    index: 0 … len(trace.steps) - 1; raises SettingError for another.
    """
    steps = trace.steps
    there = f"an integer 0 … {len(steps) - 1}" if steps else "none, as the trace has no step"
    require("step", index, whole(index) and 0 <= index < len(steps), there)
    before = sum(earlier.emitted for earlier in steps[:index])
    root = _chip("root", decode(trace.tokens[before - 1]) if before else "prompt", special=not before)
    tree = f'<ul><li><span class="sd-node">{root}</span>{_tree(steps[index], decode)}</li></ul>'
    parts = f'{_headline(trace, index)}<div class="sd-tree">{tree}</div>{_times(steps[index])}'
    return f'<div class="sd sd-panel" data-step="{index}">{parts}{_table(steps[index], decode)}</div>'


# ---- tokens


class Place(NamedTuple):
    """A drafted token, or the one that came next, which has no q and no overlap; the rest as in trace.Step."""

    token: int
    kind: str
    parent: int
    p: float
    q: float | None
    overlap: float | None
    largest_p: float
    entropy: float


def _places(step: Step) -> list[Place]:
    """The drafted tokens in order, then the next token unless the draft was refused."""
    names = (step.drafted, step.fate, step.parents, step.p, step.q, step.overlap, step.largest_p, step.entropy)
    places = [Place(*values) for values in zip(*names, strict=True)]
    if step.next_kind != "refused":
        last = max((node for node, fate in enumerate(step.fate) if fate == "accepted"), default=-1)
        own = step.next_p, None, None, step.next_largest_p, step.next_entropy
        places.append(Place(step.next_token, step.next_kind, last, *own))
    return places


def _kept(step: Step) -> list[Place]:
    """What the step adds to the text before EOS, stop strings and length limits cut it to `emitted` tokens."""
    return [place for place in _places(step) if place.kind not in ("rejected", "untried")]


def _texts(tokens: Sequence[int], decode: Decode, join: Join | None) -> list[str | None]:
    """The text of each token; None is the rest of a character that a token before it shows."""
    texts: list[str | None] = [decode(token) for token in tokens]
    for start, own in enumerate(texts):
        if join is None or own is None or BROKEN not in own:
            continue
        for end in range(start + 2, min(start + LONGEST, len(tokens)) + 1):
            together = join(tokens[start:end])
            if BROKEN not in together:
                texts[start:end] = [together, *[None] * (end - start - 1)]
                break
    return texts


def _safe(text: str) -> str:
    """Text that is safe in HTML; what cannot be read has a sign."""
    return escape(text.translate(CONTROL)).replace(BROKEN, '<i class="sd-part"></i>')


def _chip(kind: str, text: str | None, special: bool = False, card: str = "") -> str:
    """A token: a box for each of its lines, and what hovering shows. text: None for the rest of a character."""
    *lines, rest = (text or "").split("\n")
    boxes = "".join(f'<samp>{_safe(line)}<i class="sd-return"></i></samp>\n' for line in lines)
    if rest or not lines:
        boxes += f"<samp>{_safe(rest)}</samp>"
    more = " sd-rest" if text is None else " sd-special" if special or SPECIAL.fullmatch(text) else ""
    return f'<span class="sd-chip sd-{kind}{more}">{boxes}{card}</span>'


# ---- numbers


def _chances(step: Step) -> tuple[str, ...]:
    """p and q; p alone where no draft was drawn at random, as when decoding is greedy: q is 1 then."""
    return ("p",) if all(q == 1 for q in step.q) else ("p", "q")


def _values(place: Place) -> dict[str, str]:
    shares = {"p": place.p, "q": place.q, "Σ min(p, q)": place.overlap, "largest p": place.largest_p}
    said = {name: "&lt; 0.01" if 0 < v < 0.005 else f"{v:.2f}" for name, v in shares.items() if v is not None}
    return said | {"entropy": f"{place.entropy:.2f} nats"}


def _numbers(place: Place, *names: str) -> str:
    values = _values(place)
    return "".join(f"<span><i>{name}</i> {values[name]}</span>" for name in names if name in values)


def _card(index: int, kind: str, body: str) -> str:
    return f'<span class="sd-card"><b>{kind}<i>step {index + 1}</i></b>{body}</span>'


def _lost(step: Step, decode: Decode) -> str:
    """The drafts that a step rejected, or refused, with p and q; how many it did not try."""
    gone = ("rejected", "untried") if step.next_kind == "refused" else ("rejected",)
    places = [place for place in _places(step) if place.kind in gone]
    lines = [
        f'<span class="sd-lost">{_chip("rejected", decode(place.token))}{_numbers(place, *_chances(step))}</span>'
        for place in places[:LISTED]
    ]
    rest = {"more": len(places) - len(lines), "untried": 0 if "untried" in gone else step.fate.count("untried")}
    return "".join(lines) + "".join(f"<span><i>{count} {name}</i></span>" for name, count in rest.items() if count)


# ---- a step


def _headline(trace: Trace, index: int) -> str:
    step = trace.steps[index]
    kept = step.fate.count("accepted")
    then = "refused, so drawn anew" if step.next_kind == "refused" else f"then {step.next_kind}"
    said = f"drafted {len(step.drafted)}, accepted {kept}, {then}" if step.drafted else "nothing drafted, plain"
    said += f"; {step.candidates} candidates" if step.candidates > 1 and step.drafted else ""
    said += "; q is 1" if step.drafted and _chances(step) == ("p",) else ""
    if 0 < step.emitted <= kept:
        said += f"; {step.emitted} of {kept + 1} emitted, as the text ends there ({escape(trace.finish)})"
    return f"<p><b>Step {index + 1} of {len(trace.steps)}</b>: {said}</p>"


def _tree(step: Step, decode: Decode) -> str:
    """Nested lists, a node's children in the order in which they are tried; the next token stands last."""
    places, cut = _places(step), _kept(step)[step.emitted :]
    under: dict[int, list[str]] = defaultdict(list)  # by node, the root's by -1
    for node, place in reversed(list(enumerate(places))):
        gone = place in cut
        title = f' class="sd-node{" sd-cut" * gone}" title="{place.kind}{", not emitted" * gone}"'
        chip = f"<span{title}>{_chip(place.kind, decode(place.token))}{_numbers(place, *_chances(step))}</span>"
        below = f"<ul>{''.join(under[node])}</ul>" if under[node] else ""
        under[place.parent].insert(0, f"<li>{chip}{below}</li>")
    return f"<ul>{''.join(under[-1])}</ul>"


def _times(step: Step) -> str:
    """A bar of the step's time, and its parts in ms."""
    parts = {"draft": step.draft_s, "verify": step.verify_s, "other": step.other_s}
    total = sum(parts.values()) or 1.0
    bar = "".join(f'<i class="sd-{name}" style="flex-grow:{s / total:.4f}"></i>' for name, s in parts.items())
    keys = "".join(
        f'<span><i class="sd-{name}"></i>{name} {1e3 * s:.1f} ms, {s / total:.0%}</span>' for name, s in parts.items()
    )
    shared = f"<span>shared by {step.active} rows</span>" if step.active > 1 else ""
    return f'<div><div class="sd-bar">{bar}</div><p class="sd-keys">{keys}{shared}</p></div>'


def _table(step: Step, decode: Decode) -> str:
    """Every number of the step, folded."""
    names, lines = ("p", "q", "Σ min(p, q)", "largest p", "entropy"), []
    for place in _places(step):
        values = _values(place)
        cells = "".join(f"<td>{values.get(name, '')}</td>" for name in names)
        lines.append(f"<tr><td>{_chip(place.kind, decode(place.token))}</td><td>{place.kind}</td>{cells}</tr>")
    heads = "".join(f"<th>{name}</th>" for name in ("token", "kind", *names))
    return f"<details><summary>all numbers</summary><table><tr>{heads}</tr>{''.join(lines)}</table></details>"
