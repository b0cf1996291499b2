"""The lean decoder against transformers, on tiny random models of every architecture it computes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.errors import ModelError
from specdec_lab.models import linear
from specdec_lab.models.linear import Linear
from specdec_lab.models.llama import LlamaModel

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16}),
    "llama-no-gqa": ("Llama", {"num_key_value_heads": 4}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def reference(name: str) -> Any:
    """A seeded random transformers model; biases and norms are random too, as their defaults would hide them."""
    import transformers

    family, settings = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**SMALL | settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for key, weight in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def lean(model: Any) -> LlamaModel:
    return LlamaModel(model.config, model.state_dict(), "tiny")


def plain(model: Any, tokens: list[int]) -> Tensor:
    """transformers' logits [n, vocab] of one sequence."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def text(seed: int, n: int) -> list[int]:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(name: str) -> None:
    model = reference(name)
    ours, tokens = lean(model), text(0, 100)
    cache = ours.new_cache(1, 100)
    logits = []
    for start, end in ((0, 60), (60, 61), (61, 69), (69, 100)):
        logits.append(ours.logits(ours.forward(torch.tensor([tokens[start:end]]), cache))[0])
        cache.advance([end - start])
    expected = plain(model, tokens)
    assert expected.std() > 0.5, "logits so flat that anything would pass"
    assert (torch.cat(logits) - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "qwen2", "qwen3"])
def test_ragged_trees_are_those_of_chains(name: str) -> None:
    model = reference(name)
    ours = lean(model)
    prefixes, nodes = [text(1, 9), text(2, 4)], [text(3, 5), text(4, 5)]
    parents = [[-1, -1, 0, 1, 2], [-1, 0, 0, -2, -2]]
    cache = ours.new_cache(2, 32)
    padded = [prefix + [0] * (9 - len(prefix)) for prefix in prefixes]
    ours.forward(torch.tensor(padded), cache)
    cache.advance([9, 4])
    logits = ours.logits(ours.forward(torch.tensor(nodes), cache, torch.tensor(parents)))
    branches = {(0, 2): [0, 2], (0, 3): [1, 3], (0, 4): [0, 2, 4], (1, 1): [0, 1], (1, 2): [0, 2]}
    for (row, node), path in branches.items():
        expected = plain(model, prefixes[row] + [nodes[row][i] for i in path])[-1]
        assert (logits[row, node] - expected).abs().max() <= 1e-4
    cache.commit([[1, 3], [0, 2]])
    after = ours.logits(ours.forward(torch.tensor([[5], [6]]), cache))[:, 0]
    for row, (path, token) in enumerate([([1, 3], 5), ([0, 2], 6)]):
        expected = plain(model, prefixes[row] + [nodes[row][i] for i in path] + [token])[-1]
        assert (after[row] - expected).abs().max() <= 1e-4


def test_ragged_rows_are_those_of_single_rows() -> None:
    ours = lean(reference("llama"))
    rows = [text(5, 11), text(6, 3), text(7, 7)]
    cache = ours.new_cache(3, 16)
    ours.forward(torch.tensor([row + [0] * (11 - len(row)) for row in rows]), cache)
    cache.advance([len(row) for row in rows])
    together = ours.logits(ours.forward(torch.tensor([[1, 2], [3, 4], [5, 6]]), cache))
    for index, row in enumerate(rows):
        alone = ours.new_cache(1, 16)
        ours.forward(torch.tensor([row]), alone)
        alone.advance([len(row)])
        logits = ours.logits(ours.forward(torch.tensor([[2 * index + 1, 2 * index + 2]]), alone))
        assert (together[index] - logits[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("tokens", [1, 3, 8, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["plain", "transposed", "packed"])
def test_layouts_compute_the_same_product(layout: str, bias: bool, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 48, generator=generator) for n in (80, 2 * tokens))
    b = torch.randn(80, generator=generator) if bias else None
    product = Linear(weight, b, layout)
    y = product(x.view(2, tokens, 48))
    assert y.shape == (2, tokens, 80)
    assert (y.view(-1, 80) - F.linear(x, weight, b)).abs().max() <= 1e-4
    assert product.nbytes == weight.nbytes


def test_without_packing_the_transposed_layout_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference("llama-untied")
    tokens = torch.tensor([text(8, 12)])
    logits = []
    for works in (linear.packing_works(), False):
        monkeypatch.setattr(linear, "packing_works", lambda works=works: works)
        ours = lean(model)
        assert ours.head.layout == ours.layers[0].gate_up.layout == ("packed" if works else "transposed")
        logits.append(ours.logits(ours.forward(tokens, ours.new_cache(1, 12))))
    assert (logits[0] - logits[1]).abs().max() <= 1e-4


def test_a_torch_without_the_private_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: Tensor) -> Tensor:
        raise AttributeError("_reorder_linear_weight")

    monkeypatch.setattr(linear, "_pack", missing)
    assert linear.packing_works.__wrapped__() is False


def test_half_precision_keeps_the_plain_layout() -> None:
    model = reference("llama").to(torch.bfloat16)
    ours = lean(model)
    assert ours.head.layout == "plain"
    assert ours.logits(ours.forward(torch.tensor([text(9, 5)]), ours.new_cache(1, 5))).dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "llama-untied", "qwen2", "qwen3"])
def test_parameters_are_counted_once(name: str) -> None:
    model = reference(name)
    ours = lean(model)
    assert ours.parameters == sum(p.numel() for p in model.parameters())
    assert ours.embedding_parameters == VOCAB * 32 * (2 if name == "llama-untied" else 1)
    assert ours.context_length == 128
    assert ours.vocab_size == VOCAB


def test_a_draft_shares_embedding_and_head() -> None:
    main = reference("llama")
    draft = reference("llama")
    shared = lean(main)
    own = {key: w for key, w in draft.state_dict().items() if "embed_tokens" not in key and "lm_head" not in key}
    ours = LlamaModel(draft.config, own, "draft", shares=shared)
    assert ours.embedding is shared.embedding
    assert ours.head is shared.head
    assert ours.parameters == shared.parameters
    assert ours.nbytes == shared.nbytes - shared._outer_nbytes
    tokens = torch.tensor([text(10, 6)])
    assert torch.equal(
        ours.logits(ours.forward(tokens, ours.new_cache(1, 6))),
        shared.logits(shared.forward(tokens, shared.new_cache(1, 6))),
    )


def test_a_sliding_window_bounds_the_context() -> None:
    import transformers

    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL | {"sliding_window": 24}))
    assert lean(model).context_length == 24


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ("GPT2Config", {}, "model_type = 'gpt2'.*llama, mistral, qwen2, qwen3"),
        ("LlamaConfig", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_it_does_not_compute_is_refused(config: str, settings: dict[str, Any], message: str) -> None:
    import transformers

    with pytest.raises(ModelError, match=message):
        LlamaModel(getattr(transformers, config)(**settings), {}, "tiny")
