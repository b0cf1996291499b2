"""Any causal LM that transformers can load, behind the Model protocol: correct first, fast second.

A transformers cache whose layers write into our KVCache, an explicit float mask and a position per token make
ragged rows, rollback and trees work without touching the model's code. What that cannot serve is refused, by
its config where that tells, and by a probe on the model's own weights where it does not. It knows neither
files nor text.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from specdec_lab.errors import ArchitectureError, ModelError
from specdec_lab.models.cache import Block, KVCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
FULL, SLIDING = "full_attention", "sliding_attention"
PROBE_LENGTH = 6


class _Layer(CacheLayerMixin):
    """One layer of a transformers cache, for one block: it writes into, and reads from, our KVCache."""

    is_sliding = False

    def __init__(self, cache: KVCache, block: Block, index: int) -> None:
        super().__init__()
        self._cache, self._block, self._index = cache, block, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the KVCache is allocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [rows, heads, n, width] of the block; returns all up to its last slot."""
        return self._cache.write(self._index, key_states, value_states, self._block)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that attention reads."""
        return self._block.upto, 0

    def get_seq_length(self) -> int:
        """Slots before the block, of the longest row."""
        return self._block.upto - self._block.slots.shape[1]

    def get_max_length(self) -> int:
        """Slots of a row."""
        return self._cache.max_len


class _Past(Cache):
    """A transformers cache for one block. stored: the KVCache's index of each layer, None = it stores nothing."""

    def __init__(self, cache: KVCache, block: Block, stored: Sequence[int | None]) -> None:
        super().__init__([DummyLayer() if index is None else _Layer(cache, block, index) for index in stored])


class HuggingFaceModel:
    """A transformers causal LM behind the Model protocol.

    model: loaded, on one device. It is set to eval mode and to sdpa attention (eager where sdpa would not be
    exact), and used as it is, not copied. Construction runs some 50 tokens through it: what it caches shows the
    shapes, and a tree, ragged rows and a commit must give the logits of plain forwards.
    Raises ArchitectureError, naming architecture and reason, for what cannot roll back or take an explicit mask, and
    ModelError for damaged weights.
    """

    def __init__(self, model: "PreTrainedModel", name: str) -> None:
        self._model, self._config = model.eval(), model.config.get_text_config(decoder=True)
        self._refuse_known()
        self.name = name
        self.device, self.dtype = self._placed()
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        named = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"  # the older name
        if self._head is None or self._decoder is model:
            raise self._error("its head cannot be called apart from its body")
        model.set_attn_implementation(self._attention())
        self.context_length = _context_length(self._config) or 0
        if not self.context_length:
            raise self._error(f"its config has none of {', '.join(CONTEXT_NAMES)}, so its context is unknown")
        self.vocab_size = self._head.weight.shape[0]
        self.parameters = sum(p.numel() for p in model.parameters())
        ends = {id(p): p.numel() for m in (model.get_input_embeddings(), self._head) for p in m.parameters()}
        self.embedding_parameters = sum(ends.values())
        self._stored: list[int | None] = []  # index in the KVCache of each layer; None = it stores nothing
        self._shapes: list[tuple[int, int, int]] = []  # heads, key width, value width of each stored layer
        self._windows: dict[str, int | None] = {}  # tokens that each kind of layer looks back; None = all
        self._probe()

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(t.nbytes for t in (*self._model.parameters(), *self._model.buffers()))

    def new_cache(self, rows: int, max_len: int) -> KVCache:
        """An empty cache for `rows` sequences of up to `max_len` tokens."""
        cache = KVCache(0, rows, 0, max_len, 0, self.dtype, self.device)
        for heads, key_width, value_width in self._shapes:  # layers may differ, and keys from values
            for tensors, width in ((cache.keys, key_width), (cache.values, value_width)):
                shape = (rows, heads, max_len, width)
                tensors.append(torch.zeros(shape, dtype=self.dtype, device=self.device))
        return cache

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCache, parents: Tensor | None = None, behind: int = 0) -> Tensor:
        """Final hidden states [rows, n, hidden_size] of a block of tokens; see protocol.Model.forward."""
        block = cache.block(tokens.shape[1], parents, behind)
        output = self._decoder(
            input_ids=tokens,
            attention_mask=self._masks(block),
            position_ids=block.positions.clamp(max=self.context_length - 1),  # padding may lie beyond it
            use_cache=True,
            return_dict=True,
            **{self._cache_argument: _Past(cache, block, self._stored)},
        )
        return cast(Tensor, output.last_hidden_state)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The head, and the scale and soft cap that follow it: [..., hidden_size] to float32 [..., vocab_size]."""
        logits = self._head(hidden)
        if scale := getattr(self._config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if scale := getattr(self._config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if cap := getattr(self._config, "final_logit_softcapping", None):  # Gemma 2 and later
            logits = torch.tanh(logits / cap) * cap
        return cast(Tensor, logits.float())

    def _masks(self, block: Block) -> Tensor | dict[str, Tensor]:
        """Additive masks [rows, 1, n, upto] in the model's dtype; one per kind of layer where kinds differ."""
        rows, n = block.slots.shape
        shape = (rows, 1, n, block.upto)
        seen = torch.ones(shape, dtype=torch.bool, device=self.device) if block.mask is None else block.mask
        masks = {}
        for kind, window in self._windows.items():
            near = seen
            if window is not None and window < block.upto:
                slots = torch.arange(block.upto, device=self.device).repeat(rows, 1)
                positions = slots.scatter(1, block.slots, block.positions)  # [rows, upto], of what each slot holds
                near = seen & (block.positions[:, None, :, None] - positions[:, None, None] < window)
            mask = torch.zeros(shape, dtype=self.dtype, device=self.device)
            masks[kind] = mask.masked_fill_(~near, float("-inf"))
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _error(self, reason: str, kind: type[ModelError] = ArchitectureError) -> ModelError:
        return kind(f"{type(self._model).__name__} cannot be used here: {reason}")

    def _refuse_known(self) -> None:
        """Refuse what the config already tells, for the sake of a good message."""
        config, kinds = self._config, set(getattr(self._config, "layer_types", None) or ())
        if self._model.config.is_encoder_decoder:
            raise self._error("it is an encoder-decoder; decoder-only models are decoded here")
        if self._model._is_stateful:
            raise self._error("it keeps a recurrent state, which cannot be rolled back when drafts are rejected")
        if kinds - {FULL, SLIDING, "moe", "mlp"} or getattr(config, "attention_chunk_size", None):
            known = ", ".join(sorted(kinds)) or "chunked_attention"
            raise self._error(f"it has layers of kinds {known}; {FULL} and {SLIDING} are computed here")
        if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
            raise self._error("it uses ALiBi, which derives distances from a 2-D mask: no ragged rows, no trees")
        if config.model_type == "gpt_neo":
            raise self._error("its attention applies a window of its own by cache slot: no ragged rows, no trees")
        if any("dynamic" in rope["rope_type"] for rope in _ropes(config)):
            raise self._error("rope_type = 'dynamic': frequencies that change with length cannot stay in a cache")

    def _placed(self) -> tuple[torch.device, torch.dtype]:
        devices = {p.device for p in self._model.parameters()}
        if len(devices) != 1 or "meta" in {device.type for device in devices}:
            raise self._error(f"its weights lie on {sorted(map(str, devices))}; all must be on one device", ModelError)
        return devices.pop(), self._model.dtype

    def _attention(self) -> str:
        """sdpa, unless scores are capped (Gemma 2) or the architecture has no sdpa."""
        capped = getattr(self._config, "attn_logit_softcapping", None)
        return "sdpa" if self._model._supports_sdpa and not capped else "eager"

    def _probe(self) -> None:
        """Learn the cache's shapes, and compare ragged rows, a tree and a commit with plain forwards."""
        try:
            tokens, expected = self._plain_logits()
            exact = self._tree_agrees(tokens, expected)
        except ModelError:
            raise
        except Exception as error:  # whatever an architecture raises when it gets a mask or cache it does not take
            raise self._error(f"it does not take our mask, positions and cache ({error!r})") from error
        if not exact:
            raise self._error("ragged rows or token trees give other logits than plain forwards")

    @torch.inference_mode()
    def _plain_logits(self) -> tuple[Tensor, Tensor]:
        """Probe tokens [3, 6], the first two rows with a common prefix, and their logits [3, 6, vocab]."""
        tokens = torch.arange(3 * PROBE_LENGTH, device=self.device).view(3, PROBE_LENGTH) * 101 + 11
        tokens %= self.vocab_size
        tokens[1, :3] = tokens[0, :3]
        output = self._model(input_ids=tokens, use_cache=True, return_dict=True)
        logits = output.logits.float()
        if not logits.isfinite().all():
            raise self._error("its logits are not finite; the weights may be damaged", ModelError)
        self._learn(getattr(output, "cache", None) or getattr(output, "past_key_values", None))
        hidden = self._decoder(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state
        if not self._close(self.logits(hidden), logits):
            raise self._error("its logits are not those of its head on the final hidden states")
        return tokens, logits

    def _learn(self, cache: Any) -> None:
        """Read off which layers store what from the cache that the model made for itself."""
        for layer in getattr(cache, "layers", ()):
            if type(layer) is DummyLayer:
                self._stored.append(None)
            elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.keys is not None:
                self._stored.append(len(self._shapes))
                self._shapes.append((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
                window = layer.sliding_window if layer.is_sliding else None
                kind = SLIDING if layer.is_sliding else FULL
                if self._windows.setdefault(kind, window) != window:
                    raise self._error("its sliding layers have windows of different lengths")
            else:
                raise self._error(f"its cache has layers of kind {type(layer).__name__}, which cannot be rolled back")
        if not self._shapes:
            raise self._error("it keeps no keys and values in a transformers cache")

    def _tree_agrees(self, tokens: Tensor, expected: Tensor) -> bool:
        """Whether a ragged prefill, a tree and a commit lead to the logits of `_plain_logits`.

        Row 0 has the first two probe rows as its branches and goes on with the second; row 1 is the third probe
        row, with a shorter prefix.
        """
        first, second, third = tokens
        cache = self.new_cache(2, 2 * PROBE_LENGTH)
        prefix = self.logits(self.forward(torch.stack([first[:3], third[:3]]), cache))
        cache.advance([3, 1])
        branches = torch.stack([first[3], second[3], first[4], second[4]])
        parents = torch.tensor([[-1, -1, 0, 1], [-1, 0, 1, 2]], device=self.device)
        tree = self.logits(self.forward(torch.stack([branches, third[1:5]]), cache, parents))
        cache.commit([[1, 3], [0, 1, 2, 3]])
        last = self.logits(self.forward(torch.stack([second[5:], third[5:]]), cache))
        got = torch.cat([prefix[0], prefix[1, :1], *tree, last[:, 0]])
        one, two, three = expected
        wanted = [*one[:3], three[0], one[3], two[3], one[4], two[4], *three[1:5], two[5], three[5]]
        return self._close(got, torch.stack(wanted))

    def _close(self, got: Tensor, expected: Tensor) -> bool:
        """Whether logits agree within rounding, relative to their spread over the vocabulary."""
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-6)
        return bool(((got - expected).norm(dim=-1) / spread).max() <= tolerance)


def _context_length(config: Any) -> int | None:
    """Most positions a config allows, None when it names none; where longrope would switch its frequencies, fewer."""
    named = next((value for name in CONTEXT_NAMES if (value := getattr(config, name, None))), None)
    switches = [rope["original_max_position_embeddings"] for rope in _ropes(config) if rope["rope_type"] == "longrope"]
    return named and min(named, *switches) if switches else named


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config: one, or one per kind of layer, or none."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [rope] if "rope_type" in rope else rope.values()
    return [each for each in nested if isinstance(each, dict) and "rope_type" in each]
