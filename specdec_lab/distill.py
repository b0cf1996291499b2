"""Making a draft from a main model: its own layers as a start, its own distribution as the target.

The main model's final hidden states are computed once per text and kept on disk in half precision; its logits
follow from them with one product, so no teacher forward is repeated over passes and drafts. Embedding and head
are the main model's, frozen and shared; only the draft's layers train. The loss is the forward KL over the most
frequent tokens plus a few random others, with a regression of the hidden states beside it (word-level
distillation, 1503.02531; drafts for speculative decoding, 2310.08461); other losses are there to be compared.
"""

import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from specdec_lab.decoding import Decoder
from specdec_lab.errors import DataError, ModelError, UnknownNameError, require
from specdec_lab.models import zoo
from specdec_lab.models.int8 import quantise
from specdec_lab.models.protocol import Model
from specdec_lab.statistics import Interval, ratio_interval
from specdec_lab.tasks import load_prompts
from specdec_lab.tasks.prompts import FOLDER

SEQUENCE = 384  # most tokens of a training sequence of real text …
WINDOW = 1_600  # … which are cut from so many characters
SHARD = 128  # texts of a shard; a killed run loses at most one
LATER = 0.8  # weight of each later rollout step, to the one before
TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.0, 0.7, 0.7, 0.7, 1.0, 1.0)  # of the main model's completions, in turn


def _overlap(scores: Tensor, target: Tensor) -> Tensor:
    """Σ min(p, q) [positions], the chance that a token drawn from the draft stays."""
    return torch.minimum(scores.softmax(-1), target).sum(-1)


# Of the draft's scores [positions, subset] from the main model's probabilities there: the forward KL (but for the
# main model's own entropy), the total variation 1 − Σ min(p, q), and −log Σ min(p, q) (LK losses, 2602.23881).
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": F.cross_entropy,
    "tv": lambda scores, target: 1 - _overlap(scores, target).mean(),
    "lk": lambda scores, target: -_overlap(scores, target).clamp(min=1e-6).log().mean(),
    "kl+lk": lambda scores, target: LOSSES["kl"](scores, target) + LOSSES["lk"](scores, target),
}


@dataclass(frozen=True)
class Recipe:
    """What a draft is made of and how long it trains."""

    layers: tuple[int, ...]  # the main model's layers it is made of, first and last among them
    width: int  # feed-forward width; the neurons with the largest weights are kept
    rounds: tuple[tuple[float, int], ...]  # of (highest learning rate, training tokens), each a cosine of its own
    batch_tokens: int = 2048
    frequent: int = 10_240  # the loss sees the most frequent tokens, which the draft's head is trimmed to, …
    others: int = 1024  # … and as many random ones of the rest, new ones each step
    prompt_share: float = 0.25  # share of prompt positions that count in the loss
    loss: str = "kl"  # one of LOSSES
    feature_weight: float = 0.5  # of the smooth-L1 between hidden states
    rollouts: tuple[int, ...] = ()  # of a draft that reads hidden states: steps it is rolled out for, by round
    start: str = ""  # the bundled draft, of the same layers and width, whose trained weights it starts from
    parallel: bool = False  # its later steps see learned placeholders, so that one forward drafts them all
    warmup_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        require("layers", self.layers, len(self.layers) >= 1 and sorted(self.layers) == list(self.layers), "ascending")
        require("width", self.width, self.width >= 1, "an integer >= 1")
        enough = bool(self.rounds) and all(tokens >= self.batch_tokens for _, tokens in self.rounds)
        require("rounds", self.rounds, enough, f"rounds of at least batch_tokens ({self.batch_tokens}) tokens")
        require("prompt_share", self.prompt_share, 0 <= self.prompt_share <= 1, "0 … 1")
        require("loss", self.loss, self.loss in LOSSES, ", ".join(LOSSES))
        fits = not self.rollouts or (len(self.rollouts) == len(self.rounds) and min(self.rollouts) >= 1)
        require("rollouts", self.rollouts, fits, "none, or 1 or more for each round")
        fits = not self.parallel or min(self.rollouts, default=0) > 1
        require("parallel", self.parallel, fits, "false, or rollouts of 2 or more")

    @property
    def tokens(self) -> int:
        """Training tokens of all rounds, passes included."""
        return sum(tokens for _, tokens in self.rounds)

    def stage(self, seen: int) -> tuple[int, int]:
        """(number of the round, tokens seen in it) after so many tokens."""
        index = 0
        while index + 1 < len(self.rounds) and seen >= self.rounds[index][1]:
            seen -= self.rounds[index][1]
            index += 1
        return index, seen

    def rate(self, seen: int) -> float:
        """Learning rate after so many tokens: in each round a warm-up, then half a cosine down to 3 %."""
        index, seen = self.stage(seen)
        rate, tokens = self.rounds[index]
        warm = min(1.0, (seen + self.batch_tokens) / (self.warmup_steps * self.batch_tokens))
        return rate * warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, seen / tokens))))


RECIPES = {
    "1:2": Recipe((0, 3, 6, 9, 12, 15, 17, 20, 23, 26, 29), 1536, ((6e-4, 1_400_000),)),
    "1:3": Recipe((0, 7, 15, 22, 29), 1400, ((8e-4, 3_000_000), (4e-4, 1_100_000))),
    "1:4": Recipe((0, 29), 1024, ((1e-3, 4_000_000), (6e-4, 2_500_000))),
    "feature": Recipe(
        (0, 29),
        1024,
        ((5e-4, 1_600_000), (4e-4, 2_000_000), (4e-4, 900_000)),
        batch_tokens=1024,
        rollouts=(2, 2, 2),
        start="1:4",
    ),
    "parallel": Recipe(
        (0, 29), 1024, ((4e-4, 250_000),), batch_tokens=1024, rollouts=(5,), start="feature", parallel=True
    ),
}


def draft_from(main: Any, recipe: Recipe) -> Any:
    """A transformers LlamaModel that holds the chosen layers of `main` (a LlamaForCausalLM), narrowed.

    With rollouts it stands inside FeatureLayers; with `start` its weights are those of that bundled draft.
    """
    from transformers import LlamaConfig, LlamaModel

    settings = main.config.to_dict() | {
        "num_hidden_layers": len(recipe.layers),
        "intermediate_size": recipe.width,
        "layer_types": None,
    }
    draft = LlamaModel(LlamaConfig(**settings)).float()
    source = main.model.state_dict()
    weights = {"norm.weight": source["norm.weight"], "embed_tokens.weight": source["embed_tokens.weight"]}
    for index, layer in enumerate(recipe.layers):
        part = {k.split(".", 2)[2]: v for k, v in source.items() if k.startswith(f"layers.{layer}.")}
        gate, up, down = (part[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        importance = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        keep = importance.topk(recipe.width).indices.sort().values
        part |= {"mlp.gate_proj.weight": gate[keep], "mlp.up_proj.weight": up[keep]}
        part["mlp.down_proj.weight"] = down[:, keep]
        weights |= {f"layers.{index}.{key}": value for key, value in part.items()}
    draft.load_state_dict(weights)
    draft.embed_tokens.requires_grad_(False)
    made = FeatureLayers(draft, recipe) if recipe.rollouts else draft
    if recipe.start:
        trained = zoo.read_draft(recipe.start).weights
        prefix = "body." if recipe.rollouts else ""
        own = {key.replace("model.", prefix): weight for key, weight in trained.items() if key != "placeholders"}
        ours = {key: weight.shape for key, weight in _own(made).items() if key not in ("fuse.weight", "placeholders")}
        fits = ours == {key: weight.shape for key, weight in own.items() if key != "fuse.weight"}
        require("start", recipe.start, fits, "a bundled draft of the recipe's layers and width")
        made.load_state_dict(own, strict=False)
    return made


class FeatureLayers(torch.nn.Module):
    """Layers that read the main model's hidden state beside each token, trained on what they will meet.

    Entry t holds token t + 1 and the hidden state of token t, and stands for the hidden state of token t + 1.
    Where decoding has no hidden state yet, the draft's own output takes its place (EAGLE, 2401.15077), or a
    learned placeholder when the whole block is drafted at once (P-EAGLE, 2602.01469). Rollout step j is trained
    on that: its entry t sees entries of the first step up to t - j + 1, then one of each later step, itself last
    (EAGLE-3's training-time test, 2503.01840).
    """

    def __init__(self, body: Any, recipe: Recipe) -> None:
        super().__init__()
        size = body.config.hidden_size
        self.body = body
        self.fuse = torch.nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():  # at first it passes the token on
            self.fuse.weight.normal_(0, 1e-3)
            self.fuse.weight[:, :size] += torch.eye(size)
        later = max(recipe.rollouts) - 1 if recipe.parallel else 0
        self.placeholders = torch.nn.Parameter(torch.randn(later, size) * 0.02) if later else None

    def forward(self, embedded: Tensor, hidden: Tensor, rollout: int) -> list[Tensor]:
        """embedded, hidden [rows, n + 1, hidden_size] → per rollout step [rows, n, hidden_size]."""
        from transformers import DynamicCache

        embedded, hidden = embedded[:, 1:], hidden[:, :-1].to(embedded.dtype)
        n, size = embedded.shape[1:]
        cache, index, outputs = DynamicCache(), torch.arange(n, device=embedded.device), []
        feature = hidden
        for step in range(rollout):
            if step and self.placeholders is not None:
                x = self.placeholders[step - 1].expand_as(embedded)
            else:
                x = self.fuse(torch.cat([embedded, F.rms_norm(feature, (size,))], -1))
            gap = index[:, None] - index  # [query, key]
            mask = torch.cat([gap >= step, *(gap == step - s for s in range(1, step + 1))], 1)
            out = self.body(
                inputs_embeds=x, attention_mask=mask[None, None], position_ids=index[None], past_key_values=cache
            ).last_hidden_state
            outputs.append(out)
            feature = F.pad(out, (0, 0, 1, 0))[:, :-1].to(embedded.dtype)
        return outputs


@dataclass(frozen=True)
class Text:
    """One training sequence with the main model's hidden states."""

    tokens: np.ndarray  # uint16 [n]
    hidden: np.ndarray  # float16 [n, hidden_size], the state after each token
    prompt: int  # leading tokens that are a prompt, not the main model's own words


@dataclass(frozen=True)
class Corpus:
    """Which texts the hidden-state cache holds, in tokens of real text and numbers of prompts to complete."""

    prompts: Mapping[str, int]  # training set -> prompts that the main model completes
    book_tokens: int = 300_000
    code_tokens: int = 400_000
    max_new_tokens: int = 180
    longest_prompt: int = 420
    seed: int = 0


CORPUS = Corpus({"train_json": 1324, "train_code": 1248, "train_prose": 2036, "train_writing": 3000})


def cache_hidden_states(
    main: zoo.Main, corpus: Corpus, folder: Path, limit_bytes: int = 6 << 30, report: Callable[[str], Any] = print
) -> None:
    """Write the corpus with the main model's hidden states to `folder`, shard by shard; finished shards are kept.

    Raises ModelError when the folder holds another model's or another corpus' states, DataError when it would
    grow beyond `limit_bytes`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    label = {"main": main.fingerprint, "dtype": str(main.model.dtype), **asdict(corpus)}
    manifest = folder / "corpus.json"
    try:
        known = json.loads(manifest.read_text()) if manifest.exists() else None
    except ValueError as error:
        raise DataError(f"{manifest} is broken ({error}); delete it if the shards there are this corpus'") from error
    if known is not None and known != json.loads(json.dumps(label)):
        raise ModelError(f"{folder} holds the hidden states of another model or corpus; move it away or name another")
    scratch = manifest.with_suffix(".tmp")
    scratch.write_text(json.dumps(label, indent=1))
    os.replace(scratch, manifest)
    for name, sequences in _shards(main, corpus):
        shard = folder / f"{name}.npz"
        if shard.exists():
            continue
        texts = [(ids, prompt, _hidden(main.model, ids)) for ids, prompt in sequences()]
        used = sum(file.stat().st_size for file in folder.glob("*.npz"))
        if used + sum(hidden.nbytes for *_, hidden in texts) > limit_bytes:
            raise DataError(
                f"the hidden states in {folder} would outgrow {limit_bytes >> 20} MiB; {used >> 20} are used"
            )
        _write_shard(shard, texts)
        report(f"{shard.name}: {sum(len(ids) for ids, *_ in texts)} tokens")


def _shards(main: zoo.Main, corpus: Corpus) -> Iterator[tuple[str, Callable[[], list[tuple[list[int], int]]]]]:
    """Names of shards and what computes their texts, as (token ids, prompt tokens)."""
    rng = np.random.default_rng(corpus.seed)
    jobs = _prompts(main, corpus)
    for start in range(0, len(jobs), SHARD):
        yield f"completions-{start:05}", partial(_complete, main, corpus, jobs[start : start + SHARD], start)
    sources = {"books": sorted((FOLDER / "texts").glob("*.txt")), "code": _standard_library()}
    for kind, budget in (("books", corpus.book_tokens), ("code", corpus.code_tokens)):
        windows = _windows(sources[kind])
        order = rng.permutation(len(windows))[: budget // SEQUENCE]
        for start in range(0, len(order), SHARD):
            part = [windows[index] for index in order[start : start + SHARD]]
            yield f"{kind}-{start:05}", partial(_tokenised, main.tokenizer, part)


def _prompts(main: zoo.Main, corpus: Corpus) -> list[list[int]]:
    """Training prompts as chat token ids, shuffled, those that are too long left out."""
    encode = Decoder(main.model, tokenizer=main.tokenizer).encode
    ids = [encode(row.prompt) for task, n in corpus.prompts.items() for row in load_prompts(task, n)]
    ids = [prompt for prompt in ids if len(prompt) <= corpus.longest_prompt]
    return [ids[index] for index in np.random.default_rng(corpus.seed).permutation(len(ids))]


def _complete(
    main: zoo.Main, corpus: Corpus, prompts: Sequence[Sequence[int]], seed: int
) -> list[tuple[list[int], int]]:
    """The main model's own completions, greedy and sampled in turn."""
    decoder = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    out = []
    for temperature in sorted(set(TEMPERATURES)):
        turn = [p for i, p in enumerate(prompts) if TEMPERATURES[i % len(TEMPERATURES)] == temperature]
        if turn:
            made = decoder.generate_batch(
                turn, max_new_tokens=corpus.max_new_tokens, temperature=temperature, seed=corpus.seed + seed
            )
            out += [([*prompt, *done.tokens[:-1]], len(prompt)) for prompt, done in zip(turn, made, strict=True)]
    return out


def _standard_library() -> list[Path]:
    """Sources of the running Python's standard library, tests and very large files left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [*root.glob("*.py"), *root.glob("*/*.py")]
    skipped = ("site-packages", "test", "tests", "idlelib")
    return sorted(f for f in files if not set(skipped) & set(f.parts) and f.stat().st_size < 80_000)


def _windows(files: Sequence[Path]) -> list[str]:
    """All whole stretches of WINDOW characters."""
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return [text[i : i + WINDOW] for text in texts for i in range(0, len(text) - WINDOW + 1, WINDOW)]


def _tokenised(tokenizer: Any, texts: Sequence[str]) -> list[tuple[list[int], int]]:
    return [(tokenizer(text)["input_ids"][:SEQUENCE], 0) for text in texts]


def _hidden(model: Model, ids: Sequence[int]) -> np.ndarray:
    hidden = model.forward(torch.tensor([ids], device=model.device), model.new_cache(1, len(ids)))
    return hidden[0].half().cpu().numpy()


def _write_shard(shard: Path, texts: Sequence[tuple[list[int], int, np.ndarray]]) -> None:
    scratch = shard.with_suffix(".tmp")
    try:
        with open(scratch, "wb") as stream:
            np.savez(
                stream,
                tokens=np.concatenate([np.array(ids, dtype=np.uint16) for ids, *_ in texts]),
                lens=np.array([len(ids) for ids, *_ in texts]),
                plens=np.array([prompt for _, prompt, _ in texts]),
                hidden=np.concatenate([hidden for *_, hidden in texts]),
            )
        os.replace(scratch, shard)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise DataError(f"cannot write the shard {shard}: {error}; finished shards are kept") from error


def read_texts(folder: Path) -> list[Text]:
    """The texts of every shard in a hidden-state cache; raises DataError naming a broken file."""
    texts = []
    for shard in sorted(folder.glob("*.npz")):
        try:
            with np.load(shard) as stored:
                tokens, lengths, prompts, hidden = (stored[k] for k in ("tokens", "lens", "plens", "hidden"))
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise DataError(f"the shard {shard} cannot be read ({error}); delete it to make it anew") from error
        ends = np.cumsum(lengths)
        for end, length, prompt in zip(ends, lengths, prompts, strict=True):
            texts.append(Text(tokens[end - length : end], hidden[end - length : end], int(prompt)))
    if not texts:
        raise DataError(f"no hidden states in {folder}")
    return texts


def batches(texts: Sequence[Text], recipe: Recipe) -> Iterator[list[Text]]:
    """Endless batches of about `batch_tokens`, of texts of similar length, in an order the seed fixes."""
    rng = np.random.default_rng(recipe.seed)
    while True:
        # length with noise: similar lengths meet, but never the same neighbours
        order = np.argsort([len(text.tokens) * rng.uniform(0.85, 1.15) for text in texts])
        groups: list[list[Text]] = [[]]
        size = 0
        for index in order:
            text = texts[index]
            if groups[-1] and size + len(text.tokens) > recipe.batch_tokens:
                groups.append([])
                size = 0
            groups[-1].append(text)
            size += len(text.tokens)
        for group in rng.permutation(len(groups)):
            yield groups[group]


class Trainer:
    """Trains one draft; stops and resumes at any step."""

    def __init__(self, main: Any, recipe: Recipe, texts: Sequence[Text], checkpoint: Path) -> None:
        self.recipe, self.checkpoint, self.main = recipe, checkpoint, main
        self.divergence = LOSSES[recipe.loss]
        self.device = main.device
        self.draft = draft_from(main, recipe).to(self.device)
        self.head = main.get_output_embeddings().weight.detach()  # [vocab, hidden_size]
        self.half = self.head.to(torch.bfloat16)
        counts = np.bincount(np.concatenate([text.tokens for text in texts]), minlength=len(self.head))
        self._divide(torch.from_numpy(np.argsort(-counts)[: recipe.frequent].copy()))
        trained = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.01)
        self.rng = torch.Generator().manual_seed(recipe.seed)
        self.batches = batches(texts, recipe)
        self.step = self.seen = 0
        if checkpoint.exists():
            self._resume()

    def _divide(self, frequent: Tensor) -> None:
        """Divide the vocabulary into the frequent tokens, in ascending order, and the rest."""
        self.frequent = frequent.sort().values.to(self.device)
        rest = torch.ones(len(self.head), dtype=torch.bool)
        rest[self.frequent.cpu()] = False
        self.rest = rest.nonzero()[:, 0]

    def run(self, report: Callable[[int, int, float], Any], save_every: int = 200) -> None:
        """Train until the recipe's tokens are seen; report(step, tokens seen, smoothed loss) now and then."""
        running = None
        while self.seen < self.recipe.tokens:
            loss = self._learn(next(self.batches))
            running = loss if running is None else 0.98 * running + 0.02 * loss
            self.step += 1
            if self.step % 50 == 0:
                report(self.step, self.seen, running)
            if self.step % save_every == 0:
                self.save()
        self.save()

    def _learn(self, texts: Sequence[Text]) -> float:
        tokens, hidden, counted = self._tensors(texts)
        self.optimizer.param_groups[0]["lr"] = self.recipe.rate(self.seen)
        with torch.autocast(self.device.type, torch.bfloat16):
            embedded = F.embedding(tokens, self.head)
            if self.recipe.rollouts:
                outputs = self.draft(embedded, hidden, self.recipe.rollouts[self.recipe.stage(self.seen)[0]])
                hidden, counted = hidden[:, 1:], counted[:, 1:]
            else:
                outputs = [self.draft(inputs_embeds=embedded, use_cache=False).last_hidden_state]
            theirs = hidden[counted]  # [positions, hidden_size]
            others = self.rest[torch.randperm(len(self.rest), generator=self.rng)[: self.recipe.others]]
            head = self.half[torch.cat([self.frequent, others.to(self.device)])]  # [subset, hidden_size]
            with torch.no_grad():
                target = F.linear(theirs.bfloat16(), head).float().softmax(-1)
            losses, weight = [], 1.0
            for out in outputs:
                ours = out[counted]
                losses.append(weight * self.divergence(F.linear(ours, head).float(), target))
                features = F.smooth_l1_loss(ours.float(), theirs.float())
                losses.append(weight * self.recipe.feature_weight * features)
                weight *= LATER
        divergence, loss = losses[0], torch.stack(losses).sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_((p for p in self.draft.parameters() if p.requires_grad), 1.0)
        self.optimizer.step()
        self.seen += sum(len(text.tokens) for text in texts)
        return divergence.item()

    def _tensors(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """Padded tokens [rows, n], hidden states [rows, n, hidden_size] and which positions count."""
        width = max(len(text.tokens) for text in texts)
        tokens = torch.zeros(len(texts), width, dtype=torch.long)
        hidden = torch.zeros(len(texts), width, self.head.shape[1], dtype=torch.float16)
        counted = torch.zeros(len(texts), width, dtype=torch.bool)
        for row, text in enumerate(texts):
            n = len(text.tokens)
            tokens[row, :n] = torch.from_numpy(text.tokens.astype(np.int64))
            hidden[row, :n] = torch.from_numpy(text.hidden)
            counted[row, :n] = True
            inside = max(text.prompt - 1, 0)  # the prompt's last position already predicts the completion
            counted[row, :inside] = torch.rand(inside, generator=self.rng) < self.recipe.prompt_share
        return tokens.to(self.device), hidden.to(self.device), counted.to(self.device)

    def save(self) -> None:
        """Write the checkpoint atomically."""
        state = {
            "recipe": asdict(self.recipe),
            "draft": _own(self.draft),
            "frequent": self.frequent,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seen": self.seen,
            "rng": self.rng.get_state(),
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.checkpoint.with_suffix(".tmp")
        try:
            torch.save(state, scratch)
            os.replace(scratch, self.checkpoint)
        except (OSError, RuntimeError) as error:  # torch tells a full disk as the latter
            scratch.unlink(missing_ok=True)
            raise DataError(
                f"cannot write the checkpoint {self.checkpoint}: {error}; the last good one is kept"
            ) from error

    def _resume(self) -> None:
        try:
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            recipe = state["recipe"]
        except (OSError, RuntimeError, EOFError, KeyError, TypeError, UnpicklingError) as error:
            raise ModelError(f"the checkpoint {self.checkpoint} is broken; move it away to start anew") from error
        if recipe != asdict(self.recipe):
            raise ModelError(f"the checkpoint {self.checkpoint} is of another recipe; move it away to start anew")
        self.draft.load_state_dict(state["draft"], strict=False)
        self._divide(state["frequent"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seen = state["step"], state["seen"]
        self.rng.set_state(state["rng"].cpu())
        for _ in range(self.step):
            next(self.batches)


def _own(draft: Any) -> dict[str, Tensor]:
    """The weights that are the draft's alone: all but the main model's embedding."""
    return {key: weight for key, weight in draft.state_dict().items() if "embed_tokens" not in key}


def save_draft(draft: Any, vocabulary: Tensor, main_sha256: str, folder: Path) -> None:
    """Write a draft's layers as int8 with their config; embedding and head stay with the main model.

    vocabulary: the token ids that its head is trimmed to.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    body = draft.body if isinstance(draft, FeatureLayers) else draft
    weights = {f"model.{key}": weight for key, weight in _own(body).items()}
    weights |= {key: weight for key, weight in _own(draft).items() if key in ("fuse.weight", "placeholders")}
    stored = quantise(weights) | {"vocabulary": vocabulary.to("cpu", torch.int32)}
    scratch = folder / ".model.safetensors.tmp"
    try:
        save_file(stored, scratch, metadata={"main_sha256": main_sha256})
        scratch.chmod(0o644)
        os.replace(scratch, folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write the draft to {folder}: {error}; the checkpoint is kept") from error
    finally:
        scratch.unlink(missing_ok=True)
    config = body.config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config = {key: value for key, value in config.items() if not key.endswith("name_or_path")}
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def distill(
    ratio: str,
    folder: Path | None = None,
    out: Path | None = None,
    tokens: int | None = None,
    corpus: Corpus = CORPUS,
    report: Callable[[str], Any] = print,
) -> list[tuple[int, int, float]]:
    """Train the draft of that ratio by its recipe and store it under data/models, resuming what was interrupted.

    folder: hidden states and checkpoints, default in the cache folder. out: where the draft goes. tokens: other
    than the recipe's, for a trial, which then goes to `folder` by default. Returns the history of (step, tokens
    seen, loss) of this call.
    """
    if ratio not in RECIPES:
        raise UnknownNameError("ratio", ratio, RECIPES)
    recipe = RECIPES[ratio]
    if tokens is not None:
        least = recipe.batch_tokens
        require("tokens", tokens, tokens >= least, f"an integer >= {least}, the recipe's batch_tokens")
        recipe = replace(recipe, rounds=((recipe.rounds[0][0], tokens),))
    folder = folder or zoo.cache_folder() / "distill"
    main = zoo.load_main(dtype="bfloat16")
    cache_hidden_states(main, corpus, folder / "hidden", report=report)
    teacher, _ = zoo.read(zoo.fetch_bundled())
    label = hashlib.sha256(json.dumps([asdict(recipe), asdict(corpus)]).encode()).hexdigest()[:8]
    name = ratio.replace(":", "-")
    checkpoint = folder / f"{name}-{label}.pt"
    trainer = Trainer(teacher.to(main.model.device), recipe, read_texts(folder / "hidden"), checkpoint)
    history = []

    def note(step: int, seen: int, loss: float) -> None:
        history.append((step, seen, loss))
        report(f"{ratio}: step {step}, {seen:,} of {recipe.tokens:,} tokens, cross-entropy {loss:.3f}")

    trainer.run(note)
    trial = folder / f"{name}-trial"
    save_draft(
        trainer.draft, trainer.frequent, main.fingerprint, out or (zoo.DRAFTS / name if tokens is None else trial)
    )
    return history


def greedy_completions(
    main: zoo.Main, task: str, prompts: int = 20, max_new_tokens: int = 96
) -> list[tuple[list[int], list[int]]]:
    """The main model's own greedy replies on evaluation prompts, as (prompt ids, reply ids)."""
    decoder = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    ids = [decoder.encode(row.prompt) for row in load_prompts(task, prompts)]
    return [(prompt, decoder.generate(prompt, max_new_tokens=max_new_tokens).tokens) for prompt in ids]


def greedy_match(draft: Model, completions: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Interval:
    """How often the draft's arg-max is the main model's next token, given the true prefix; 95 % over prompts."""
    hits, counts = [], []
    for prompt, reply in completions:
        block = torch.tensor([[*prompt, *reply[:-1]]], device=draft.device)
        hidden = draft.forward(block, draft.new_cache(1, block.shape[1]))[0, len(prompt) - 1 :]
        hits.append(int((draft.logits(hidden).argmax(-1).cpu() == torch.tensor(reply)).sum()))
        counts.append(len(reply))
    return ratio_interval(hits, counts)
