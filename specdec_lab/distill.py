"""Making a draft from a main model: its own layers as a start, its own distribution as the target.

The main model's final hidden states are computed once per text and kept on disk in half precision; its logits
follow from them with one product, so no teacher forward is repeated over passes and drafts. Embedding and head
are the main model's, frozen and shared; only the draft's layers train. The loss is the forward KL over the most
frequent tokens plus a few random others, with a regression of the hidden states beside it (word-level
distillation, 1503.02531; drafts for speculative decoding, 2310.08461).
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.errors import DataError, ModelError, require
from specdec_lab.models.int8 import quantise

SEQUENCE = 384  # tokens of a training sequence


@dataclass(frozen=True)
class Recipe:
    """What a draft is made of and how long it trains."""

    layers: tuple[int, ...]  # the main model's layers it starts from, first and last among them
    width: int  # feed-forward width; the neurons with the largest weights are kept
    learning_rate: float
    tokens: int  # training tokens, passes included
    batch_tokens: int = 2048
    frequent: int = 8192  # the loss sees the most frequent tokens …
    others: int = 2048  # … and as many random ones of the rest, new ones each step
    prompt_share: float = 0.25  # share of prompt positions that count in the loss
    feature_weight: float = 0.5  # of the smooth-L1 between hidden states
    warmup_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        require("layers", self.layers, len(self.layers) >= 1 and sorted(self.layers) == list(self.layers), "ascending")
        require("width", self.width, self.width >= 1, "an integer >= 1")
        require("tokens", self.tokens, self.tokens >= self.batch_tokens, f">= batch_tokens ({self.batch_tokens})")
        require("prompt_share", self.prompt_share, 0 <= self.prompt_share <= 1, "0 … 1")


RECIPES = {
    "1:2": Recipe((0, 3, 6, 9, 12, 15, 17, 20, 23, 26, 29), 1536, 6e-4, 3_000_000),
    "1:3": Recipe((0, 7, 15, 22, 29), 1400, 8e-4, 3_000_000),
    "1:4": Recipe((0, 29), 1024, 1e-3, 4_000_000),
}


def draft_from(main: Any, recipe: Recipe) -> Any:
    """A transformers LlamaModel that holds the chosen layers of `main` (a LlamaForCausalLM), narrowed."""
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
    return draft


@dataclass(frozen=True)
class Text:
    """One training sequence with the main model's hidden states."""

    tokens: np.ndarray  # uint16 [n]
    hidden: np.ndarray  # float16 [n, hidden_size], the state after each token
    prompt: int  # leading tokens that are a prompt, not the main model's own words


def read_texts(folder: Path) -> list[Text]:
    """The texts of every shard in a hidden-state cache; raises DataError naming a broken file."""
    texts = []
    for shard in sorted(folder.glob("*.npz")):
        try:
            with np.load(shard) as stored:
                tokens, lengths, prompts, hidden = (stored[k] for k in ("tokens", "lens", "plens", "hidden"))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"the hidden-state shard {shard} cannot be read ({error}); delete it to make it anew"
            ) from error
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
        self.device = main.device
        self.draft = draft_from(main, recipe).to(self.device)
        self.head = main.get_output_embeddings().weight.detach()  # [vocab, hidden_size]
        self.half = self.head.to(torch.bfloat16)
        counts = np.bincount(np.concatenate([text.tokens for text in texts]), minlength=len(self.head))
        self.frequent = torch.from_numpy(np.argsort(-counts)[: recipe.frequent].copy()).to(self.device)
        rest = torch.ones(len(self.head), dtype=torch.bool)
        rest[self.frequent.cpu()] = False
        self.rest = rest.nonzero()[:, 0]
        trained = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.rng = torch.Generator().manual_seed(recipe.seed)
        self.batches = batches(texts, recipe)
        self.step = self.seen = 0
        if checkpoint.exists():
            self._resume()

    def run(self, report: Any = print, save_every: int = 200) -> None:
        """Train until the recipe's tokens are seen; report(step, seen, loss) now and then."""
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
        scale = min(1.0, (self.step + 1) / self.recipe.warmup_steps)
        scale *= 0.5 * (1 + math.cos(math.pi * min(1.0, self.seen / self.recipe.tokens))) * 0.97 + 0.03
        self.optimizer.param_groups[0]["lr"] = self.recipe.learning_rate * scale
        with torch.autocast(self.device.type, torch.bfloat16):
            out = self.draft(inputs_embeds=F.embedding(tokens, self.head), use_cache=False).last_hidden_state
            ours, theirs = out[counted], hidden[counted]  # [positions, hidden_size]
            others = self.rest[torch.randperm(len(self.rest), generator=self.rng)[: self.recipe.others]]
            head = self.half[torch.cat([self.frequent, others.to(self.device)])]  # [subset, hidden_size]
            with torch.no_grad():
                target = F.linear(theirs.bfloat16(), head).float().softmax(-1)
            guess = F.linear(ours, head).float()
        entropy = F.cross_entropy(guess, target)  # the forward KL but for the main model's own entropy
        loss = entropy + self.recipe.feature_weight * F.smooth_l1_loss(ours.float(), theirs.float())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_((p for p in self.draft.parameters() if p.requires_grad), 1.0)
        self.optimizer.step()
        self.seen += sum(len(text.tokens) for text in texts)
        return entropy.item()

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
            "draft": {k: v for k, v in self.draft.state_dict().items() if not k.startswith("embed_tokens")},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seen": self.seen,
            "rng": self.rng.get_state(),
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.checkpoint.with_suffix(".tmp")
        torch.save(state, scratch)
        os.replace(scratch, self.checkpoint)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise ModelError(f"the checkpoint {self.checkpoint} is of another recipe; move it away to start anew")
        self.draft.load_state_dict(state["draft"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seen = state["step"], state["seen"]
        self.rng.set_state(state["rng"].cpu())
        for _ in range(self.step):
            next(self.batches)
