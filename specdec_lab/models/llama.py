"""A decoder for the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3), written for short token blocks.

Pre-norm blocks of grouped-query attention (2305.13245) with rotary positions (2104.09864) and a SwiGLU
feed-forward (2002.05202). Query heads that share a key head are folded into the query length, so keys and
values are never expanded. It takes a config and tensors; it does not know files or text.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.errors import ModelError
from specdec_lab.models.cache import KVCache
from specdec_lab.models.kernels import arrange
from specdec_lab.models.linear import Linear, Switched

FAMILY = ("llama", "mistral", "qwen2", "qwen3")


class Layer:
    """The weights of one decoder block, fused where inputs are shared."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, layout: str | None) -> None:
        def get(name: str) -> Tensor | None:
            return weights.get(prefix + name)

        def fused(names: tuple[str, ...], usual: str) -> Linear | Switched:
            biases = [bias for name in names if (bias := get(f"{name}.bias")) is not None]
            weight = torch.cat([weights[f"{prefix}{name}.weight"] for name in names])
            return _product(weight, torch.cat(biases) if biases else None, usual, layout)

        self.attention_norm = weights[prefix + "input_layernorm.weight"]
        self.qkv = fused(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "transposed")
        self.q_norm, self.k_norm = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
        self.output = fused(("self_attn.o_proj",), "transposed")
        self.mlp_norm = weights[prefix + "post_attention_layernorm.weight"]
        self.gate_up = fused(("mlp.gate_proj", "mlp.up_proj"), "packed")
        self.down = fused(("mlp.down_proj",), "transposed")

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (self.qkv, self.output, self.gate_up, self.down))


def _product(weight: Tensor, bias: Tensor | None, usual: str, layout: str | None) -> Linear | Switched:
    """In the layout asked for, or else in the fastest, `usual` where that is not known."""
    return Linear(weight, bias, layout) if layout else arrange(weight, bias, usual)


class LlamaModel:
    """A Llama-family causal LM behind the Model protocol.

    config: a transformers config of one of FAMILY. weights: its state dict, in the dtype and on the device to
    run on. shares: a model whose embedding and head are used, for drafts that are stored without their own. int8:
    round the weights of layers and head to int8 for speed, for drafts. vocabulary: token ids [v] that the head of a
    sharing draft is trimmed to (FR-Spec, 2502.14856); its logits are over these. packed_bf16: round weights and inputs
    of all products to bfloat16, on a CPU; its logits are another model's.
    Raises ModelError for what this decoder does not compute.
    """

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        name: str,
        shares: "LlamaModel | None" = None,
        int8: bool = False,
        vocabulary: Tensor | None = None,
        packed_bf16: bool = False,
    ) -> None:
        _check(config)
        layout = "int8" if int8 else "packed_bf16" if packed_bf16 else None
        self.name = name
        self.hidden_size = config.hidden_size
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.context_length = min(
            config.max_position_embeddings,
            getattr(config, "sliding_window", None) or config.max_position_embeddings,
        )
        if shares is None:
            self.embedding = weights["model.embed_tokens.weight"]
            tied = config.tie_word_embeddings or "lm_head.weight" not in weights
            self.head = _product(self.embedding if tied else weights["lm_head.weight"], None, "packed", layout)
        else:
            tied, self.embedding = True, shares.embedding
            if vocabulary is None:
                self.head = shares.head
            else:
                self.head = _product(self.embedding[vocabulary], None, "packed", layout)
        self.vocabulary = vocabulary
        borrowed = shares is not None and self.head is shares.head
        head_nbytes = 0 if borrowed else self.head.nbytes_beside(self.embedding)
        self._outer_nbytes = (0 if shares else self.embedding.nbytes) + head_nbytes
        self.vocab_size = self.embedding.shape[0]
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.layers = [Layer(weights, f"model.layers.{i}.", layout) for i in range(config.num_hidden_layers)]
        self.norm = weights["model.norm.weight"]
        self.inv_freq, self.rope_scale = _rotary(config, self.device)
        self.embedding_parameters = self.embedding.numel() * (1 if tied else 2)
        own = sum(w.numel() for key, w in weights.items() if "embed_tokens" not in key and "lm_head" not in key)
        self.parameters = own + self.embedding_parameters

    @property
    def nbytes(self) -> int:
        """Bytes of its own weights in every layout kept; a shared embedding or head belongs to its owner."""
        return self._outer_nbytes + sum(layer.nbytes for layer in self.layers)

    def new_cache(self, rows: int, max_len: int) -> KVCache:
        """An empty cache for `rows` sequences of up to `max_len` tokens."""
        return KVCache(len(self.layers), rows, self.kv_heads, max_len, self.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCache, parents: Tensor | None = None, behind: int = 0) -> Tensor:
        """Final hidden states [rows, n, hidden_size] of a block of tokens; see protocol.Model.forward."""
        return self._layers(F.embedding(tokens, self.embedding), cache, parents, behind)

    def _layers(self, x: Tensor, cache: KVCache, parents: Tensor | None, behind: int = 0) -> Tensor:
        """All decoder blocks and the last norm, on inputs [rows, n, hidden_size]."""
        rows, n, _ = x.shape
        group = self.heads // self.kv_heads
        block = cache.block(n, parents, behind)
        cos, sin = self._rope(block.positions)  # [rows, n, 1, head_dim]
        mask = None
        if block.mask is not None:
            mask = torch.zeros(block.mask.shape, dtype=self.dtype, device=self.device)
            mask.masked_fill_(~block.mask, float("-inf"))
            mask = mask.repeat(1, 1, group, 1)  # [rows, 1, group * n, upto]
        for index, layer in enumerate(self.layers):
            h = F.rms_norm(x, (self.hidden_size,), layer.attention_norm, self.eps)
            heads = layer.qkv(h).view(rows, n, self.heads + 2 * self.kv_heads, self.head_dim)
            qk, v = heads[:, :, : -self.kv_heads], heads[:, :, -self.kv_heads :]
            if layer.q_norm is not None:
                qk = self._norm_heads(qk, layer)
            qk = qk * cos + _rotate_half(qk) * sin
            q, k = qk[:, :, : self.heads], qk[:, :, self.heads :]
            keys, values = cache.write(index, k.transpose(1, 2), v.transpose(1, 2), block)
            q = q.view(rows, n, self.kv_heads, group, self.head_dim).permute(0, 2, 3, 1, 4)
            q = q.reshape(rows, self.kv_heads, group * n, self.head_dim)
            a = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            a = a.view(rows, self.kv_heads, group, n, self.head_dim).permute(0, 3, 1, 2, 4)
            x = x + layer.output(a.reshape(rows, n, self.heads * self.head_dim))
            h = F.rms_norm(x, (self.hidden_size,), layer.mlp_norm, self.eps)
            gate, up = layer.gate_up(h).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return F.rms_norm(x, (self.hidden_size,), self.norm, self.eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The head: [..., hidden_size] to float32 [..., vocab_size], or [..., v] where it is trimmed."""
        return self.head(hidden).float()

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.inv_freq  # [rows, n, head_dim / 2]
        angles = torch.cat([angles, angles], -1)[:, :, None]
        return (angles.cos() * self.rope_scale).to(self.dtype), (angles.sin() * self.rope_scale).to(self.dtype)

    def _norm_heads(self, qk: Tensor, layer: Layer) -> Tensor:
        q, k = qk[:, :, : self.heads], qk[:, :, self.heads :]
        size = (self.head_dim,)
        return torch.cat([F.rms_norm(q, size, layer.q_norm, self.eps), F.rms_norm(k, size, layer.k_norm, self.eps)], 2)


class FeatureModel(LlamaModel):
    """Layers that read the main model's hidden states, as `distill.FeatureLayers` trains them.

    weights: as of LlamaModel, and `fuse.weight` [hidden_size, 2 · hidden_size], which joins a token's embedding with
    the hidden state before it; with `placeholders` [depth - 1, hidden_size] it drafts up to `depth` tokens at once.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor], *args: Any, **options: Any) -> None:
        super().__init__(config, weights, *args, **options)
        self.fuse = Linear(weights["fuse.weight"], None, "int8" if options.get("int8") else "transposed")
        self.placeholders = weights.get("placeholders")

    @property
    def nbytes(self) -> int:
        """Bytes of its own weights."""
        return super().nbytes + self.fuse.nbytes

    @torch.inference_mode()
    def inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Entries [rows, n, hidden_size] of tokens [rows, n] and the hidden states before them."""
        both = F.embedding(tokens, self.embedding), F.rms_norm(features, (self.hidden_size,))
        return self.fuse(torch.cat(both, -1))

    @torch.inference_mode()
    def run(self, inputs: Tensor, cache: KVCache, parents: Tensor | None = None, behind: int = 0) -> Tensor:
        """Hidden states [rows, n, hidden_size] of entries; parents and behind as in KVCache.block."""
        return self._layers(inputs, cache, parents, behind)


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], -1)


def _rotary(config: Any, device: torch.device) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the scale of cos and sin, as transformers sets them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq.to(device=device, dtype=torch.float32), float(rotary.attention_scaling)


def _check(config: Any) -> None:
    if config.model_type not in FAMILY:
        raise ModelError(f"model_type = {config.model_type!r}: the lean decoder computes {', '.join(FAMILY)}")
    if config.hidden_act != "silu":
        raise ModelError(f"hidden_act = {config.hidden_act!r}: the lean decoder computes silu")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ModelError(f"rope_type = {kind!r}: frequencies that change with length cannot stay in a cache")
