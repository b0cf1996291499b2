"""Drafts that read the main model's hidden states: decoding as they were trained, chains, trees, losslessness."""

import heapq
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import random_llama
from test_decoding import SIGNIFICANCE, START, exact, p_value, two_tokens
from torch import Tensor

from specdec_lab.decoding import Decoder
from specdec_lab.distill import FeatureLayers, Recipe
from specdec_lab.drafting import FeatureDraft, Row, Tree
from specdec_lab.errors import SettingError
from specdec_lab.models.llama import FeatureModel, LlamaModel
from specdec_lab.sampling import Sampling

VOCABULARY = torch.tensor([0, 1, 3, 4, 6, 7])


def layers(main: LlamaModel, rollout: int = 4, parallel: bool = False, count: int = 1) -> FeatureLayers:
    """Random layers over the hidden states of `main`, as a recipe builds them for training."""
    from transformers import LlamaConfig
    from transformers import LlamaModel as Body

    config = LlamaConfig(
        vocab_size=main.vocab_size,
        hidden_size=main.hidden_size,
        intermediate_size=16,
        num_hidden_layers=count,
        num_attention_heads=2,
        max_position_embeddings=main.context_length,
        initializer_range=0.4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        recipe = Recipe(tuple(range(count)), 16, ((1e-3, 4096),), rollouts=(rollout,), parallel=parallel)
        made = FeatureLayers(Body(config), recipe).eval()
        torch.nn.init.normal_(made.fuse.weight, std=0.4)
    return made


def model_of(made: FeatureLayers, main: LlamaModel, vocabulary: Tensor | None = None) -> FeatureModel:
    weights = {f"model.{key}": value for key, value in made.body.state_dict().items()}
    weights |= {"fuse.weight": made.fuse.weight.detach()}
    if made.placeholders is not None:
        weights["placeholders"] = made.placeholders.detach()
    return FeatureModel(made.body.config, weights, "feature", shares=main, vocabulary=vocabulary)


@pytest.fixture(scope="module")
def main() -> LlamaModel:
    return random_llama(0, layers=2)


def states(main: LlamaModel, tokens: Sequence[int]) -> Tensor:
    return main.forward(torch.tensor([tokens]), main.new_cache(1, len(tokens)))[0]


def row(tokens: Sequence[int], candidates: int = 1, **how: Any) -> Row:
    return Row(
        list(tokens), Sampling(**how), torch.Generator().manual_seed(0), candidates=candidates, tree=candidates > 1
    )


TOKENS = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5)


@pytest.mark.parametrize("parallel", [False, True])
def test_it_decodes_as_it_was_trained(parallel: bool, main: LlamaModel) -> None:
    """State j behind a prefix is what rollout step j computed there, given the same tokens."""
    made = layers(main, parallel=parallel, count=2 if parallel else 1)
    model, hidden = model_of(made, main), states(main, TOKENS)
    embedded = main.embedding[torch.tensor([TOKENS])]
    with torch.no_grad():
        trained = made(embedded, hidden[None], 4)  # per step [1, n - 1, hidden_size], entry t of token t + 1
    draft = FeatureDraft(model, 8)
    for known in (2, 5, 6):
        draft.start([row(TOKENS[:known])], 32, [hidden[: known - 1]])
        found = draft._catch_up([row(TOKENS[:known])], ahead=3 if parallel else 0)
        assert torch.allclose(found[0, 0], trained[0][0, known - 2], atol=1e-5)
        assert draft.cache is not None
        state = found[:, :1]
        for step in range(1, 4):
            if parallel:
                state = found[:, step : step + 1]
            else:
                state = draft._step(torch.tensor([[TOKENS[known + step - 1]]]), state, None)
                draft.cache.advance([1])
            assert torch.allclose(state[0, 0], trained[step][0, known + step - 2], atol=1e-5), (known, step)


@pytest.mark.parametrize("candidates", [1, 3])
def test_it_knows_the_committed_prefix_after_every_step(candidates: int, main: LlamaModel) -> None:
    """Drafts behind many steps of decoding equal those of a drafter that reads the whole text at once."""
    model = model_of(layers(main), main)
    seen: list[tuple[list[int], Tree]] = []

    class Spy(FeatureDraft):
        def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
            tree = super().propose(rows, lengths)
            seen.append((list(rows[0].tokens), tree))
            return tree

    made = Decoder(main, Spy(model, 8), 5, candidate_count=candidates).generate(
        START, max_new_tokens=30, temperature=1.0
    )
    accepted = sum(step.fate.count("accepted") for step in made.trace.steps)
    assert 0 < accepted < sum(len(step.drafted) for step in made.trace.steps)
    for tokens, tree in seen[1:]:
        fresh = FeatureDraft(model, 8)
        fresh.start([row(tokens)], 64, [states(main, tokens)[:-1]])
        again = fresh.propose([row(tokens, candidates, temperature=1.0)], [tree.size])
        if candidates > 1:
            assert torch.equal(tree.tokens, again.tokens)
            assert torch.equal(tree.parents, again.parents)
        elif tree.q is not None and again.q is not None:  # its tokens were drawn with other numbers
            assert torch.allclose(tree.q[:, 0], again.q[:, 0], atol=1e-5)


DRAFTS: dict[str, tuple[dict[str, Any], int]] = {  # options and candidates
    "chain": ({}, 1),
    "confident": ({"confidence": 0.2}, 1),
    "tree": ({}, 3),
    "pruned": ({"confidence": 0.05}, 3),
    "parallel": ({}, 1),
}


def decoder_of(name: str, main: LlamaModel, length: int, trimmed: bool = False) -> Decoder:
    options, candidates = DRAFTS[name]
    made = layers(main, parallel=name == "parallel")
    draft = FeatureDraft(model_of(made, main, VOCABULARY if trimmed else None), 8, **options)
    return Decoder(main, draft, length, candidate_count=candidates)


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_equals_the_plain_loop(name: str, trimmed: bool, main: LlamaModel) -> None:
    prompts = [[1], START, TOKENS, [7] * 5]
    plain = Decoder(main).generate_batch(prompts, max_new_tokens=25)
    decoder = decoder_of(name, main, 5, trimmed)
    together = decoder.generate_batch(prompts, max_new_tokens=25)
    assert [made.tokens for made in together] == [made.tokens for made in plain]
    alone = [decoder.generate(prompt, max_new_tokens=25) for prompt in prompts]
    assert [made.tokens for made in alone] == [made.tokens for made in plain]
    fates = [fate for made in alone for step in made.trace.steps for fate in step.fate]
    assert fates.count("accepted") > 2
    assert fates.count("rejected") > 2


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("name", DRAFTS)
def test_what_it_drafts_does_not_change_the_distribution(name: str, trimmed: bool, main: LlamaModel) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
    counts = two_tokens(decoder_of(name, main, 3, trimmed), **how)
    assert p_value(counts, exact(main, Sampling(**how))) > SIGNIFICANCE


def test_control_a_gate_that_looks_at_the_drawn_token_is_found(main: LlamaModel) -> None:
    """A chain that leaves out drawn tokens which the draft itself thinks improbable is biased."""

    class Pruned(FeatureDraft):
        def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
            tree = super().propose(rows, lengths)
            if tree.q is None:
                return tree
            own = tree.q.gather(2, tree.tokens[..., None])[..., 0]
            dropped = (own < 0.2).int().cummax(1).values > 0
            return Tree(tree.tokens, tree.parents.masked_fill(dropped, -2), tree.q)

    counts = two_tokens(Decoder(main, Pruned(model_of(layers(main), main), 8), 2), temperature=1.0)
    assert p_value(counts, exact(main, Sampling(1.0))) < SIGNIFICANCE


def test_a_tree_is_the_most_probable_part_of_all_continuations(main: LlamaModel) -> None:
    """With as many branches as tokens, the nodes are those of the largest products of the draft's probabilities."""
    model = model_of(layers(main), main)
    hidden = states(main, TOKENS)[:-1]

    def probabilities(path: tuple[int, ...]) -> Tensor:
        draft = FeatureDraft(model, 8)
        draft.start([row(TOKENS)], 32, [hidden])
        state = draft._catch_up([row(TOKENS)], 0)
        assert draft.cache is not None
        for token in path:
            state = draft._step(torch.tensor([[token]]), state, None)
            draft.cache.advance([1])
        return model.logits(state)[0, 0].softmax(-1)

    wanted: list[tuple[int, ...]] = []
    open_ends: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while len(wanted) <= 12:  # the root among them; a child is never more probable than its parent
        reach, path = heapq.heappop(open_ends)
        wanted.append(path)
        for token, p in enumerate(probabilities(path)):
            heapq.heappush(open_ends, (reach * float(p), (*path, token)))
    wanted.remove(())
    draft = FeatureDraft(model, 8)
    draft.start([row(TOKENS)], 128, [hidden])
    tree = draft.propose([row(TOKENS, candidates=8)], [12])
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert max(map(len, wanted)) > 1  # the test would be idle on a tree of one level
    assert set(paths) == set(wanted)


def test_a_row_far_behind_catches_up_beside_a_long_one(main: LlamaModel) -> None:
    """As a hybrid leaves it behind, whose free drafts serve one row for long; there is no room to read all at once."""
    model, long, text = model_of(layers(main), main), [*TOKENS, *TOKENS, *TOKENS], [*TOKENS[::-1], *TOKENS]
    draft, alone = FeatureDraft(model, 8), FeatureDraft(model, 8)
    rows = [row(long), row(text[:2])]
    draft.start(rows, 36, [states(main, long)[:-1], states(main, text[:2])[:-1]])
    draft.propose(rows, [1, 1])
    hidden = states(main, [*text, 0])
    rows[1].tokens[:] = text
    draft._pending[1] = hidden[1:19]
    alone.start([row(text)], 64, [hidden[:19]])
    tree, wanted = draft.propose(rows, [0, 4]), alone.propose([row(text)], [4])
    assert torch.equal(tree.tokens[1], wanted.tokens[0])


def test_a_confident_chain_ends_before_it_becomes_improbable(main: LlamaModel) -> None:
    model, hidden = model_of(layers(main), main), states(main, TOKENS)[:-1]

    def drafted(confidence: float) -> int:
        draft = FeatureDraft(model, 8, confidence=confidence)
        draft.start([row(TOKENS)], 32, [hidden])
        return int((draft.propose([row(TOKENS)], [6]).parents >= -1).sum())

    assert drafted(0.0) == 6
    assert 6 > drafted(0.05) > drafted(0.9) == 0


@pytest.mark.parametrize("options", [{"confidence": 1.0}, {"confidence": -0.1}])
def test_options_out_of_range(options: dict[str, Any], main: LlamaModel) -> None:
    with pytest.raises(SettingError, match=next(iter(options))):
        FeatureDraft(model_of(layers(main), main), 8, **options)


def test_one_forward_cannot_branch(main: LlamaModel) -> None:
    draft = FeatureDraft(model_of(layers(main, parallel=True), main), 8)
    with pytest.raises(SettingError, match="candidate_count = 2: allowed is 1 for the draft"):
        Decoder(main, draft, candidate_count=2)
