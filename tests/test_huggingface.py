"""The transformers adapter on tiny random models: equal to `generate`, exact in batches and trees, clear when not."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_lab.decoding import Decoder
from specdec_lab.drafting import DraftModel
from specdec_lab.errors import ModelError
from specdec_lab.models.huggingface import HuggingFaceModel
from specdec_lab.models.protocol import Model

VOCAB = 97
SPECIAL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL: dict[str, Any] = SPECIAL | {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GPT2: dict[str, Any] = SPECIAL | {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GEMMA: dict[str, Any] = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
TYPES = ["sliding_attention", "full_attention"]
OPT: dict[str, Any] = {"ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.2}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2 | {"initializer_range": 0.2}),
    "opt": ("OPT", {k: v for k, v in SMALL.items() if k not in ("intermediate_size", "initializer_range")} | OPT),
    "gpt_neox": ("GPTNeoX", SMALL),
    "phi": ("Phi", SMALL),
    # Tied, with its scaled embedding, a random Gemma repeats its last token for ever.
    "gemma": ("Gemma", SMALL | {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2", GEMMA | {"layer_types": TYPES, "sliding_window": 5, "final_logit_softcapping": 3.0}),
    "cohere": ("Cohere", SMALL | {"logit_scale": 0.5}),
    "granite": ("Granite", SMALL | {"logits_scaling": 4.0}),
    "mistral": ("Mistral", SMALL | {"num_key_value_heads": 2, "sliding_window": 5}),
}
REQUIRED = ["gpt2", "opt", "gpt_neox", "phi", "gemma"]


def build(family: str, settings: dict[str, Any], seed: int = 0) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def reference(name: str) -> Any:
    return build(*ARCHITECTURES[name])


def noisy(model: Any, noise: float = 0.02) -> Any:
    """A draft that agrees with `model` now and then: a copy with noise on its weights."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    return draft


def plain(model: Any, tokens: list[int]) -> Tensor:
    """The logits [vocab] behind a sequence, by transformers alone."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


def text(seed: int, n: int) -> list[int]:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", REQUIRED)
def test_greedy_decoding_equals_generate(name: str) -> None:
    model = reference(name)
    prompt = text(0, 7)
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)[0, 7:].tolist()
    main: Model = HuggingFaceModel(model, name)
    draft = DraftModel(HuggingFaceModel(noisy(model), "draft"))
    out = Decoder(main, draft, 4, eos=()).generate(prompt, max_new_tokens=40)
    fates = [fate for step in out.trace.steps for fate in step.fate]
    assert {"accepted", "rejected"} <= set(fates), "a draft this close or far tests nothing"
    assert out.tokens == expected
    assert len(set(expected)) > 5, "output so dull that anything would pass"


@pytest.mark.parametrize("name", REQUIRED)
def test_ragged_batches_equal_single_rows(name: str) -> None:
    model = reference(name)
    draft = DraftModel(HuggingFaceModel(noisy(model), "draft"))
    decoder = Decoder(HuggingFaceModel(model, name), draft, 3, eos=())
    prompts = [text(1, 12), text(2, 1), text(3, 5)]
    together = decoder.generate_batch(prompts, max_new_tokens=16)
    assert [out.tokens for out in together] == [
        decoder.generate(prompt, max_new_tokens=16).tokens for prompt in prompts
    ]


def test_rows_end_at_the_context_while_others_are_padded() -> None:
    model = reference("gpt2")  # learned positions: one beyond the last is an index error
    draft = DraftModel(HuggingFaceModel(noisy(model), "draft"))
    decoder = Decoder(HuggingFaceModel(model, "gpt2"), draft, 4, eos=())
    prompts = [text(4, 58), text(5, 40)]
    outs = decoder.generate_batch(prompts, max_new_tokens=100)
    assert [len(out.tokens) for out in outs] == [6, 24]
    for prompt, out in zip(prompts, outs, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_length=64)[0, len(prompt) :]
        assert out.tokens == expected.tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tree_nodes_have_the_logits_of_chains(name: str) -> None:
    model = reference(name)
    ours = HuggingFaceModel(model, name)
    prefixes, nodes = [text(6, 9), text(7, 2)], [text(8, 5), text(9, 5)]
    parents = [[-1, -1, 0, 1, 2], [-1, 0, 0, -2, -2]]
    cache = ours.new_cache(2, 24)
    ours.forward(torch.tensor([prefix + [0] * (9 - len(prefix)) for prefix in prefixes]), cache)
    cache.advance([9, 2])
    logits = ours.logits(ours.forward(torch.tensor(nodes), cache, torch.tensor(parents)))
    branches = {(0, 0): [0], (0, 1): [1], (0, 2): [0, 2], (0, 3): [1, 3], (0, 4): [0, 2, 4]}
    branches |= {(1, 0): [0], (1, 1): [0, 1], (1, 2): [0, 2]}
    for (row, node), path in branches.items():
        expected = plain(model, prefixes[row] + [nodes[row][i] for i in path])
        assert expected.std() > 0.1, "logits so flat that anything would pass"
        assert (logits[row, node] - expected).abs().max() <= 1e-4
    cache.commit([[1, 3], [0, 2]])
    after = ours.logits(ours.forward(torch.tensor([[5], [6]]), cache))[:, 0]
    for row, (path, token) in enumerate([([1, 3], 5), ([0, 2], 6)]):
        expected = plain(model, prefixes[row] + [nodes[row][i] for i in path] + [token])
        assert (after[row] - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(("name", "tied"), [("gpt2", True), ("gpt_neox", False)])
def test_what_it_says_of_itself(name: str, tied: bool) -> None:
    model = reference(name)
    ours = HuggingFaceModel(model, name)
    assert ours.parameters == sum(p.numel() for p in model.parameters())
    assert ours.embedding_parameters == VOCAB * 32 * (1 if tied else 2)
    assert ours.nbytes >= 4 * ours.parameters
    assert (ours.context_length, ours.vocab_size, ours.dtype) == (64, VOCAB, torch.float32)
    assert ours.new_cache(3, 10).nbytes == 2 * 2 * 3 * 10 * 32 * 4


def test_half_precision_passes_the_probe() -> None:
    ours = HuggingFaceModel(reference("gpt2").to(torch.bfloat16), "gpt2")
    hidden = ours.forward(torch.tensor([text(10, 4)]), ours.new_cache(1, 4))
    assert hidden.dtype == torch.bfloat16
    assert ours.logits(hidden).dtype == torch.float32


MAMBA = SPECIAL | {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
BLOOM = SPECIAL | {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}
NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 2}
NEO |= SPECIAL | {"vocab_size": VOCAB, "hidden_size": 32, "max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("Mamba", MAMBA, "MambaForCausalLM.*recurrent state, which cannot be rolled back"),
    "bloom": ("Bloom", BLOOM, "BloomForCausalLM.*ALiBi"),
    "gpt_neo": ("GPTNeo", NEO, "GPTNeoForCausalLM.*window of its own"),
    "dynamic rope": ("Llama", SMALL | {"rope_parameters": DYNAMIC}, "LlamaForCausalLM.*rope_type = 'dynamic'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name_and_reason(name: str) -> None:
    family, settings, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        HuggingFaceModel(build(family, settings), name)


def test_the_probe_catches_what_no_list_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HuggingFaceModel, "_refuse_known", lambda self: None)
    for family, settings, _ in (REFUSED["mamba"], REFUSED["bloom"], REFUSED["gpt_neo"]):
        model = build(family, settings | {"initializer_range": 0.2})
        model.config.max_position_embeddings = 64
        with pytest.raises(ModelError, match="does not take our mask|keeps no keys|cannot be rolled|other logits"):
            HuggingFaceModel(model, family)


def test_the_probe_catches_positions_that_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference("gpt2")
    forward = model.transformer.forward

    @functools.wraps(forward)
    def without_positions(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs | {"position_ids": None})

    monkeypatch.setattr(model.transformer, "forward", without_positions)
    with pytest.raises(ModelError, match="other logits than plain forwards"):
        HuggingFaceModel(model, "gpt2")


def test_something_after_the_head_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference("granite")
    monkeypatch.setattr(model.config, "logit_scale", 2.0, raising=False)  # Granite itself knows no such thing
    with pytest.raises(ModelError, match="not those of its head"):
        HuggingFaceModel(model, "granite")


def test_damaged_weights_are_an_error() -> None:
    model = reference("gpt2")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        HuggingFaceModel(model, "gpt2")
