"""The loop: propose, verify, accept, commit. Rows of token trees; `generate` is a batch of one row.

Plain autoregressive decoding is this loop with a drafter that proposes nothing, on the same forward path.
It knows nothing about tasks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.acceptance import Acceptance, Verdict
from specdec_lab.constrain import Grammar, masked
from specdec_lab.control import MAX_CANDIDATES, Controller, Plan
from specdec_lab.drafting import Drafter, Row, Tree
from specdec_lab.errors import SettingError, require, whole
from specdec_lab.models.cache import KVCache
from specdec_lab.models.feed import CHUNK, feed
from specdec_lab.models.protocol import Model
from specdec_lab.sampling import Sampling, distribution, penalise, uniforms
from specdec_lab.trace import FATES, Step, Trace, now

MAX_DRAFT = 64
MAX_NODES = 1024  # of a tree: the block that the main model verifies


@dataclass
class Active(Row):
    """A row that is being decoded."""

    target: Sampling  # how the main model's tokens are drawn; drafts are drawn by `sampling`
    prompt_length: int
    limit: int  # most tokens it may emit
    stop: tuple[str, ...]
    trace: Trace
    bounded_by: str = "length"  # what sets `limit`: max_new_tokens ("length") or the "context"
    refused: int = 0  # drafts in a row that were refused as a whole
    alone: bool = False  # the main model decodes the rest of the text

    @property
    def emitted(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]

    def room(self, draft_length: int, context_length: int | None) -> int:
        """How many tokens may be drafted now: one less than may still be emitted, within the draft's context."""
        if self.alone:
            return 0
        room = min(draft_length, self.limit - len(self.emitted) - 1)
        return room if context_length is None else max(0, min(room, context_length - len(self.tokens)))


@dataclass(frozen=True)
class Generation:
    """What `generate` returns. `text` decodes `tokens` (special tokens left out)."""

    text: str
    tokens: list[int]
    trace: Trace = field(repr=False)


@dataclass(frozen=True)
class Strategy:
    """What each step is planned by and judged by."""

    plan: Plan
    accept: Acceptance = Acceptance()
    controller: Controller | None = None

    def next(self, row: Active) -> Plan:
        """The plan of a row's next step, within what there is room for."""
        if self.controller is None:
            return self.plan
        plan = self.controller.plan(self.plan, row.trace.steps)
        length, candidates = min(plan.draft_length, self.plan.draft_length), min(plan.candidates, self.controller.most)
        return replace(plan, draft_length=length, candidates=candidates)


def decode(
    main: Model, drafter: Drafter, rows: list[Active], cache: KVCache, strategy: Strategy, cut: Any
) -> Iterator[tuple[Active, Step]]:
    """Decode until every row has finished; yields each row's step as it happens.

    rows: prefilled but for their last token, all with the same Sampling; emptied as they finish. cut: function
    (row, tokens) -> (how many of the step's tokens to emit, finish reason or "").
    """
    while rows:
        start = now(main.device)
        plans = [strategy.next(row) for row in rows]
        for row, plan in zip(rows, plans, strict=True):
            row.candidates = plan.candidates
        lengths = [row.room(plan.draft_length, drafter.context_length) for row, plan in zip(rows, plans, strict=True)]
        tree = drafter.propose(rows, lengths).to(main.device)
        drafted = now(main.device)
        root = torch.tensor([[row.tokens[-1]] for row in rows], device=main.device)
        block = torch.cat([root, tree.tokens], 1)  # [rows, 1 + n]
        hidden = main.forward(block, cache, _block_parents(tree))  # [rows, 1 + n, hidden_size]
        logits = main.logits(hidden)  # [rows, 1 + n, vocab]
        verified = now(main.device)
        verdict, p = _judge(_processed(logits, rows, tree), rows, tree, strategy.accept, plans)
        again = _refused(rows, tree, verdict, strategy.accept)
        paths = [
            None if refused else path.nonzero()[:, 0].tolist()
            for refused, path in zip(again, verdict.accepted, strict=True)
        ]
        cache.commit([[] if path is None else [0, *(node + 1 for node in path)] for path in paths])
        planned = [drafter.nodes(length, row.candidates) for row, length in zip(rows, lengths, strict=True)]
        steps = _records(p, tree, verdict, planned, rows, again)
        for row, path, step in zip(rows, paths, steps, strict=True):
            if path is None:
                continue
            tokens = [step.drafted[node] for node in path] + [step.next_token]
            step.emitted, row.trace.finish = cut(row, tokens)
            row.tokens += tokens[: step.emitted]
            if row.constraint:
                row.constraint.commit(tokens[: step.emitted])
        drafter.observe(rows, paths, hidden)
        end = now(main.device)
        for row, step in zip(rows, steps, strict=True):
            step.draft_s, step.verify_s, step.other_s = drafted - start, verified - drafted, end - verified
            row.trace.steps.append(step)
            row.trace.tokens = row.emitted
        finished = list(zip(rows, steps, strict=True))
        for index in reversed(range(len(rows))):
            if rows[index].trace.finish:
                cache.drop(index)
                drafter.drop(index)
                rows[index] = rows[-1]
                rows.pop()
        yield from finished


def prefill(
    main: Model, drafter: Drafter, rows: Sequence[Active], cache: KVCache, max_len: int, chunk: int = CHUNK
) -> None:
    """Feed all but the last token of each row, start the drafter, and record the seconds of both."""
    start = now(main.device)
    kept: list[list[Tensor]] | None = [[] for _ in rows] if drafter.reads_hidden else None
    feed(main, cache, [row.tokens[:-1] for row in rows], chunk, kept)
    filled = now(main.device)
    drafter.start(rows, max_len, [torch.cat(states) if states else torch.empty(0) for states in kept or ()])
    ready = now(main.device)
    for row in rows:
        row.trace.prefill_s, row.trace.draft_prefill_s = filled - start, ready - filled


def _block_parents(tree: Tree) -> Tensor | None:
    """Parents inside the verified block, whose token 0 is the root; None when every row is a full chain."""
    if tree.is_chain:
        return None
    root = torch.full_like(tree.parents[:, :1], -1)
    return torch.cat([root, torch.where(tree.parents >= -1, tree.parents + 1, -2)], 1)


def _processed(logits: Tensor, rows: Sequence[Active], tree: Tree) -> Tensor:
    """Logits [rows, 1 + n, vocab] after the processors that depend on the path to each position."""
    penalty = rows[0].target.repetition_penalty
    if penalty == 1 and not any(row.constraint for row in rows):
        return logits
    out = []
    for row, tokens, parents, scores in zip(rows, tree.tokens.tolist(), tree.parents.tolist(), logits, strict=True):
        paths: list[list[int]] = [[]]  # [1 + n] what stands between the committed tokens and each position
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*paths[max(parent, -1) + 1], token])
        scores = penalise(scores, [row.tokens + path for path in paths], penalty)
        if row.constraint:
            used = 1 + sum(parent >= -1 for parent in parents)  # padding comes last
            allowed = [row.constraint.allowed(path) for path in paths[:used]]
            scores = masked(scores, [*allowed, *[None] * (len(paths) - used)])
        out.append(scores)
    return torch.stack(out)


def _judge(
    scores: Tensor, rows: Sequence[Active], tree: Tree, accept: Acceptance, plans: Sequence[Plan]
) -> tuple[Verdict, Tensor]:
    """Apply the rule. Returns its verdict and the main model's distribution [rows, 1 + n, vocab].

    Each row draws one number per node of its own and one for the next token, whatever the other rows need.
    """
    target, q = rows[0].target, tree.q
    threshold = torch.tensor([plan.threshold or 0.0 for plan in plans], device=scores.device)
    if target.greedy:
        p = scores.softmax(-1)
        # the arg-max of scores, as rounding may make two probabilities equal
        return accept.judge(tree.tokens, tree.parents, scores if accept.lossless else p, q, None, threshold), p
    p = distribution(scores, target)
    nodes = (tree.parents >= -1).sum(1)  # [rows]
    u = uniforms([row.generator for row in rows], (nodes + 1).tolist(), scores.device)
    u = F.pad(u, (0, tree.size + 1 - u.shape[1]))  # where the longest row of a tree does not fill it
    u = torch.cat([u[:, : tree.size], u.gather(1, nodes[:, None])], 1)  # [rows, n + 1], the next token's last
    return accept.judge(tree.tokens, tree.parents, p, q, u, threshold), p


def _refused(rows: Sequence[Active], tree: Tree, verdict: Verdict, accept: Acceptance) -> list[bool]:
    """Which rows draft again; the other rows' retries are settled, and those that used them up go on alone.

    A draft of which no token was left to chance would come again, so it is not asked for.
    """
    if not accept.retries:
        return [False] * len(rows)
    again, most = [], accept.max_retries or 0
    there = tree.parents >= -1  # [rows, n]
    chance = torch.zeros_like(there) if tree.q is None else tree.q.gather(2, tree.tokens[..., None])[..., 0] < 1
    drafted, drawn = there.any(1).tolist(), (there & chance).any(1).tolist()
    for row, had, by_chance, last in zip(rows, drafted, drawn, verdict.last.tolist(), strict=True):
        failed = had and last < 0
        again.append(failed and by_chance and row.refused < most)
        row.refused = row.refused + 1 if again[-1] else 0
        row.alone = row.alone or (failed and not again[-1] and accept.rule == "sequence")
    return again


def _records(
    p: Tensor, tree: Tree, verdict: Verdict, planned: Sequence[int], rows: Sequence[Active], again: Sequence[bool]
) -> list[Step]:
    """The raw record of each row's step, but for times and what was emitted. p: [rows, 1 + n, vocab]."""
    tokens, parents, greedy = tree.tokens, tree.parents, rows[0].target.greedy  # [rows, n]
    row = torch.arange(len(tokens), device=p.device)
    place = (parents + 1).clamp(min=0)  # where in p each node is judged
    at_node = p[row[:, None], place, tokens]
    largest, choice = p.max(-1)  # [rows, 1 + n]
    entropy = torch.special.entr(p).sum(-1)
    if tree.q is None:
        q = torch.ones_like(at_node)
        overlap = (choice.gather(1, place) == tokens).float() if greedy else at_node
    else:
        q = tree.q.gather(2, tokens[..., None])[..., 0]
        overlap = torch.minimum(p[row[:, None], place], tree.q).sum(-1)
    rejected = verdict.tried & ~verdict.accepted
    recovered = (rejected & (parents == verdict.last[:, None])).any(1)
    end = verdict.last + 1
    nodes = {
        "drafted": tokens,
        "parents": parents,
        "p": at_node,
        "q": q,
        "overlap": overlap,
        "largest_p": largest.gather(1, place),
        "entropy": entropy.gather(1, place),
        "fate": torch.where(verdict.tried, verdict.accepted.int(), 2),  # an index of FATES
    }
    ends = {
        "next_token": verdict.next_token,
        "next_p": p[row, end, verdict.next_token],
        "next_largest_p": largest[row, end],
        "next_entropy": entropy[row, end],
    }
    per_node = {name: values.tolist() for name, values in nodes.items()}
    per_row = {name: values.tolist() for name, values in ends.items()}
    steps = []
    for r, (length, was_rejected) in enumerate(zip(planned, recovered.tolist(), strict=True)):
        n = sum(parent >= -1 for parent in per_node["parents"][r])  # padding comes last
        step: dict[str, Any] = {name: values[r][:n] for name, values in per_node.items()}
        step |= {name: values[r] for name, values in per_row.items()}
        step["fate"] = [FATES[fate] for fate in step["fate"]]
        step["next_kind"] = "refused" if again[r] else "recovered" if was_rejected else "bonus" if n else "plain"
        steps.append(Step(**step, planned=length, candidates=rows[r].candidates, active=len(planned)))
    return steps


class Decoder:
    """Draft/verify decoding with one main model and one drafter.

    tokenizer: a transformers tokenizer; needed for prompts given as text and for stop strings. chat: apply its
    chat template to text prompts when it has one. eos: token ids that end a text; default the tokenizer's.
    candidate_count: how many candidates a tree holds, for drafters that branch; see drafting.tree. acceptance: the
    rule; the lossless one, which is the default, keeps exact matches when decoding is greedy and is speculative
    sampling else: both emit what the main model alone would. In the rule "sequence" a draft is as long as the text.
    controller: plans each step from the ones before. Raises SettingError for a value out of range, before any model
    runs.
    """

    def __init__(
        self,
        main: Model,
        drafter: Drafter | None = None,
        draft_length: int = 4,
        tokenizer: Any = None,
        *,
        eos: Sequence[int] | None = None,
        chat: bool = True,
        prefill_chunk: int = CHUNK,
        candidate_count: int = 1,
        acceptance: Acceptance | None = None,
        controller: Controller | None = None,
    ) -> None:
        most = min(MAX_DRAFT, main.context_length - 1)
        fits = whole(draft_length) and 0 <= draft_length <= most
        require("draft_length", draft_length, fits, f"an integer, 0 (plain decoding) … {most}")
        require("prefill_chunk", prefill_chunk, prefill_chunk >= 1, "an integer >= 1")
        self.main, self.tokenizer, self.chat, self.prefill_chunk = main, tokenizer, chat, prefill_chunk
        self.drafter = drafter if drafter is not None and draft_length > 0 else Drafter()
        plain = type(self.drafter) is Drafter
        self.draft_length = 0 if plain else draft_length  # what is never drafted is not planned either
        self.acceptance, self.controller = acceptance or Acceptance(), controller
        self.candidate_count = candidate_count
        allowed = f"an integer 1 … {MAX_CANDIDATES}"
        if not self.drafter.branches and not plain:
            allowed = f"1 for the draft {self.drafter.name}, which does not branch"
        most = MAX_CANDIDATES if self.drafter.branches or plain else 1
        require("candidate_count", candidate_count, whole(candidate_count) and 1 <= candidate_count <= most, allowed)
        require("controller", controller, controller is None or most > 1, f"none: {allowed} candidate")
        if self.acceptance.rule == "sequence" and (candidate_count > 1 or controller):
            own = self.drafter.nodes(2, 2) > 2
            require("branching", "dynamic", own, "chains, distinct or top_k with the rule sequence")
        self._most = controller.most if controller else candidate_count  # candidates of any step
        self._require_room(draft_length)
        self.eos = tuple(eos) if eos is not None else _eos_of(tokenizer)

    def _require_room(self, draft_length: int) -> None:
        nodes = self.drafter.nodes(draft_length, self._most)
        most = min(MAX_NODES, self.main.context_length - 1)
        what = f"{nodes} nodes, from draft_length {draft_length} and {self._most} candidates"
        require("tree", what, nodes <= most, f"up to {most} nodes")

    def generate(self, prompt: str | Sequence[int], **settings: Any) -> Generation:
        """Decode one prompt; settings as in `stream`."""
        return self.generate_batch([prompt], **settings)[0]

    def generate_batch(self, prompts: Sequence[str | Sequence[int]], **settings: Any) -> list[Generation]:
        """Decode several prompts together; prompt i is seeded with seed + i; settings as in `stream`."""
        rows = self._rows(prompts, **settings)
        everyone = list(rows)
        for _ in self._run(rows):
            pass
        return [self._generation(row) for row in everyone]

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        eos: Sequence[int] | None = None,
        constraint: Grammar | None = None,
    ) -> Iterator[Generation]:
        """Decode one prompt, yielding what there is after each step; the last one is the whole.

        prompt: text, or token ids taken as they are. stop: the text ends with the token that completes one of
        these strings; ids, trace and text end there alike. eos: overrides the decoder's end-of-sequence ids;
        () never ends early. constraint: what the output must be; a batch takes one for all prompts or a list of one
        each, None for free text. An output cut by its length ("length", "context") may be incomplete; SettingError
        is raised before a model runs when no output fits. See Sampling for temperature … repetition_penalty.
        """
        rows = self._rows(
            [prompt],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop,
            eos=eos,
            constraint=constraint,
        )
        for row, _ in self._run(rows):
            yield self._generation(row)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt: ids as they are, text through the chat template or the tokenizer."""
        if not isinstance(prompt, str):
            ids = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
            require("prompt", prompt, all(map(whole, ids)), "text or a flat list of token ids")
        elif not _encodable(prompt):
            raise SettingError("prompt", prompt[:40], "text without lone surrogates")
        elif self.tokenizer is None:
            raise SettingError("prompt", prompt[:40], "token ids, as this decoder has no tokenizer")
        elif not prompt.strip():
            ids = []
        elif self.chat and getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": prompt}]
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = self.tokenizer(prompt)["input_ids"]
        require("prompt", prompt, len(ids) > 0, "text or token ids that are not empty")
        most = self.main.context_length - 1
        require("prompt", f"{len(ids)} tokens", len(ids) <= most, f"1 … {most} tokens, the model's context less one")
        known = range(self.main.vocab_size)
        worst = next((token for token in ids if token not in known), 0)
        require("prompt", f"token {worst}", worst in known, f"ids 0 … {known[-1]}")
        return ids

    def _rows(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        eos: Sequence[int] | None = None,
        constraint: Grammar | Sequence[Grammar | None] | None = None,
        **sampling: Any,
    ) -> list[Active]:
        positive = whole(max_new_tokens) and max_new_tokens >= 1
        require("max_new_tokens", max_new_tokens, positive, "an integer >= 1")
        require("seed", seed, whole(seed) and 0 <= seed < 2**62, "an integer 0 … 2⁶² − 1")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        require("stop", stop, all(stops), "strings that are not empty")
        require("stop", stop, not stops or self.tokenizer is not None, "none, as this decoder has no tokenizer")
        how, ends = Sampling(**sampling), frozenset(self.eos if eos is None else eos)
        self.acceptance.require_temperature(how.temperature)
        warm = self.acceptance.draft_temperature
        drafts = how if warm is None else replace(how, temperature=warm)
        grammars = self._grammars(constraint, len(prompts), ends)
        rows = []
        for index, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True)):
            tokens = self.encode(prompt)
            left = self.main.context_length - len(tokens)
            if grammar:
                grammar.require_room(max_new_tokens)
            rows.append(
                Active(
                    tokens=tokens,
                    sampling=drafts,
                    target=how,
                    generator=torch.Generator().manual_seed(seed + index),
                    prompt_length=len(tokens),
                    limit=min(max_new_tokens, left),
                    eos=ends,
                    stop=stops,
                    trace=Trace(prompt_tokens=len(tokens)),
                    tree=self._most > 1,
                    bounded_by="length" if max_new_tokens <= left else "context",
                    constraint=grammar.constraint(ends, self.main.vocab_size, self.main.device) if grammar else None,
                )
            )
        return rows

    def _grammars(
        self, constraint: Grammar | Sequence[Grammar | None] | None, prompts: int, eos: frozenset[int]
    ) -> list[Grammar | None]:
        """One grammar, or None, for each prompt; raises SettingError for those that cannot be."""
        grammars = [constraint] * prompts if constraint is None or isinstance(constraint, Grammar) else list(constraint)
        require(
            "constraint", f"{len(grammars)} grammars", len(grammars) == prompts, f"one, or one for each of {prompts}"
        )
        for grammar in {grammar for grammar in grammars if grammar}:
            last = self.main.vocab_size - 1
            ends = any(0 <= token <= last for token in eos)
            require("eos", tuple(eos), ends, f"ids 0 … {last}, one at least: they end a constrained output")
            own = self.tokenizer
            same = own is None or own is grammar.tokenizer or own.get_vocab() == grammar.tokenizer.get_vocab()
            require("constraint", grammar.name, same, "a grammar compiled for this decoder's tokenizer")
        return grammars

    def _run(self, rows: list[Active]) -> Iterator[tuple[Active, Step]]:
        """Prefill, then decode; `rows` is emptied."""
        if not rows:
            return
        draft_length = self.draft_length
        if draft_length and self.acceptance.rule == "sequence":
            draft_length = max(row.limit for row in rows)
            self._require_room(draft_length)
        longest = max(len(row.tokens) + row.limit for row in rows) + 1
        read = longest + draft_length * self._most  # what a draft reads of a tree may be more than what it proposes
        longest += self.drafter.nodes(draft_length, self._most)
        on_gpu, held = self.main.device.type == "cuda", 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.main.device)
            held = torch.cuda.memory_allocated(self.main.device)
        cache = self.main.new_cache(len(rows), longest)
        prefill(self.main, self.drafter, rows, cache, read, self.prefill_chunk)
        plan = Plan(draft_length, self.candidate_count, self.acceptance.threshold)
        strategy = Strategy(plan, self.acceptance, self.controller)
        for row, step in decode(self.main, self.drafter, rows, cache, strategy, self._cut):
            weights = self.main.nbytes + self.drafter.nbytes
            caches = cache.nbytes + self.drafter.cache_nbytes
            used = torch.cuda.max_memory_allocated(self.main.device) - held if on_gpu else caches
            row.trace.memory_bytes = weights + used
            yield row, step

    def _cut(self, row: Active, tokens: Sequence[int]) -> tuple[int, str]:
        """How many of a step's tokens the user gets, and why it ends there, if it does: the earliest bound wins."""
        emitted = row.emitted
        for count, token in enumerate(tokens, 1):
            emitted.append(token)
            if token in row.eos:
                return count, "eos"
            if row.stop and self._stops(emitted, row.stop):
                return count, "stop"
            if len(emitted) == row.limit:
                return count, row.bounded_by
        return len(tokens), ""

    def _stops(self, emitted: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether the last token completes a stop string; a character takes at most four byte tokens."""
        window = emitted[-(4 * max(map(len, stops)) + 4) :]
        tail = self.tokenizer.decode(window)  # special tokens too, so that they can be stop strings
        return any(stop in tail for stop in stops)

    def _generation(self, row: Active) -> Generation:
        text = self.tokenizer.decode(row.trace.tokens, skip_special_tokens=True) if self.tokenizer else ""
        return Generation(text, list(row.trace.tokens), row.trace)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _eos_of(tokenizer: Any) -> tuple[int, ...]:
    eos = getattr(tokenizer, "eos_token_id", None)
    return () if eos is None else (eos,)
