"""Distillation on tiny random models: sizes, resuming, storage, and that training does bring draft and main closer."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec_lab.distill import (
    LOSSES,
    RECIPES,
    Corpus,
    Recipe,
    Text,
    Trainer,
    _write_shard,
    cache_hidden_states,
    draft_from,
    greedy_match,
    read_texts,
    save_draft,
)
from specdec_lab.errors import DataError, ModelError, SettingError
from specdec_lab.models import zoo
from specdec_lab.models.llama import LlamaModel

RECIPE = Recipe((0, 1), 48, ((3e-3, 6_000),), batch_tokens=256, frequent=128, others=64, warmup_steps=5)


@pytest.fixture(scope="module")
def teacher(tiny_folder: str) -> Any:
    model, _ = zoo.read(Path(tiny_folder))
    return model


@pytest.fixture(scope="module")
def texts(teacher: Any) -> list[Text]:
    """Sequences the main model itself sampled, with its hidden states."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(24):
        ids = torch.randint(0, 256, (1, 4), generator=generator)
        with torch.inference_mode():
            for _ in range(28 + index % 5):
                scores = teacher(ids).logits[0, -1] * 2
                ids = torch.cat([ids, torch.multinomial(scores.softmax(-1), 1, generator=generator)[None]], 1)
            hidden = teacher.model(ids).last_hidden_state[0]
        made.append(Text(ids[0].numpy().astype(np.uint16), hidden.half().numpy(), 4))
    return made


@pytest.mark.parametrize("ratio", zoo.RATIOS)
def test_drafts_have_the_size_they_are_named_for(ratio: str) -> None:
    main, vocabulary, hidden = 134_515_008, 49_152 * 576, 576
    recipe, share = RECIPES[ratio], int(ratio[2:])
    layer = 2 * hidden * hidden + 2 * hidden * 192 + 3 * hidden * recipe.width + 2 * hidden
    total = vocabulary + len(recipe.layers) * layer + hidden
    assert abs(main / total / share - 1) < 0.02
    assert (recipe.layers[0], recipe.layers[-1]) == (0, 29)


def test_a_draft_starts_as_the_chosen_layers_with_the_strongest_neurons(teacher: Any) -> None:
    draft = draft_from(teacher, RECIPE)
    assert torch.equal(draft.layers[1].self_attn.q_proj.weight, teacher.model.layers[1].self_attn.q_proj.weight)
    theirs, ours = teacher.model.layers[0].mlp, draft.layers[0].mlp
    assert ours.down_proj.weight.shape == (32, 48)
    strength = (
        theirs.gate_proj.weight.norm(dim=1) * theirs.up_proj.weight.norm(dim=1) * theirs.down_proj.weight.norm(dim=0)
    )
    kept = strength.topk(48).indices.sort().values
    assert torch.equal(ours.up_proj.weight, theirs.up_proj.weight[kept])


def test_training_lowers_the_loss_and_leaves_the_embedding_alone(
    teacher: Any, texts: list[Text], tmp_path: Path
) -> None:
    before = teacher.get_output_embeddings().weight.clone()
    trainer = Trainer(teacher, dataclasses.replace(RECIPE, layers=(1,)), texts, tmp_path / "c.pt")
    first = trainer._learn(texts[:8])
    trainer.run(lambda step, seen, loss: None)
    assert trainer._learn(texts[:8]) < first - 0.1
    assert torch.equal(before, teacher.get_output_embeddings().weight)


def test_a_killed_training_resumes_to_the_same_weights(teacher: Any, texts: list[Text], tmp_path: Path) -> None:
    whole = Trainer(teacher, RECIPE, texts, tmp_path / "whole.pt")
    whole.run(lambda step, seen, loss: None)

    broken = Trainer(teacher, RECIPE, texts, tmp_path / "broken.pt")
    for _ in range(7):
        broken._learn(next(broken.batches))
        broken.step += 1
    broken.save()
    resumed = Trainer(teacher, RECIPE, texts, tmp_path / "broken.pt")
    assert resumed.step == 7
    resumed.run(lambda step, seen, loss: None)
    for a, b in zip(whole.draft.parameters(), resumed.draft.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_another_recipe_is_refused(teacher: Any, texts: list[Text], tmp_path: Path) -> None:
    Trainer(teacher, RECIPE, texts, tmp_path / "c.pt").save()
    with pytest.raises(ModelError, match="another recipe"):
        Trainer(teacher, dataclasses.replace(RECIPE, seed=1), texts, tmp_path / "c.pt")


def test_a_stored_draft_decodes_through_the_zoo(
    teacher: Any, tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = zoo.load_main(tiny_folder, device="cpu")
    draft = draft_from(teacher, dataclasses.replace(RECIPE, width=64))
    save_draft(draft, torch.arange(259), main.fingerprint, tmp_path / "1-4")
    monkeypatch.setattr(zoo, "DRAFTS", tmp_path)
    drafter: Any = zoo.load_drafter("1:4", main)
    ids = torch.arange(20)[None]
    ours = drafter.model.logits(drafter.model.forward(ids, drafter.model.new_cache(1, 32)))
    with torch.inference_mode():
        exact = teacher(ids).logits  # the same layers in the same width: int8 rounding is all that differs
    assert 0 < (ours - exact).abs().max() < 0.2 * exact.abs().max()
    assert drafter.model.embedding is main.model.embedding  # type: ignore[attr-defined]
    other = dataclasses.replace(main, fingerprint="0" * 64)
    with pytest.raises(ModelError, match="cannot draft for"):
        zoo.load_drafter("1:4", other)


def test_a_missing_draft_says_how_to_make_it(tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "DRAFTS", tmp_path)
    with pytest.raises(ModelError, match="specdec-lab distill --ratio 1:3"):
        zoo.load_drafter("1:3", zoo.load_main(tiny_folder, device="cpu"))


def test_hidden_states_are_cached_once_and_only_for_their_model(tiny_folder: str, tmp_path: Path) -> None:
    main = zoo.load_main(tiny_folder, device="cpu")
    corpus = Corpus({"train_prose": 3}, book_tokens=800, code_tokens=400, max_new_tokens=6, longest_prompt=400)
    said: list[str] = []
    cache_hidden_states(main, corpus, tmp_path, report=said.append)
    assert len(said) == 3  # completions, books, code
    texts = read_texts(tmp_path)
    assert len(texts) == 3 + 2 + 1
    done = next(text for text in texts if text.prompt)
    ids = torch.from_numpy(done.tokens.astype(np.int64))[None]
    with torch.inference_mode():
        again = main.model.forward(ids, main.model.new_cache(1, ids.shape[1]))[0]
    assert torch.allclose(torch.from_numpy(done.hidden).float(), again, atol=2e-2, rtol=1e-2)
    said.clear()
    cache_hidden_states(main, corpus, tmp_path, report=said.append)
    assert said == []
    with pytest.raises(ModelError, match="another model or corpus"):
        cache_hidden_states(dataclasses.replace(main, fingerprint="0" * 64), corpus, tmp_path)
    (tmp_path / "books-00000.npz").write_bytes(b"half a sha")
    with pytest.raises(DataError, match="books-00000"):
        read_texts(tmp_path)


def test_the_cache_has_a_size_limit(tiny_folder: str, tmp_path: Path) -> None:
    corpus = Corpus({}, book_tokens=4_000, code_tokens=0)
    with pytest.raises(DataError, match="outgrow"):
        cache_hidden_states(zoo.load_main(tiny_folder, device="cpu"), corpus, tmp_path, limit_bytes=1_000)


def test_greedy_match_is_one_for_the_main_model_itself(tiny_folder: str, tiny_draft_folder: str) -> None:
    main, other = zoo.load_main(tiny_folder, device="cpu"), zoo.load_main(tiny_draft_folder, device="cpu")
    model = main.model
    assert isinstance(model, LlamaModel)
    completions = []
    for start in range(6):
        ids = [start, 65 + start]
        reply: list[int] = []
        for _ in range(8):
            hidden = model.forward(torch.tensor([ids + reply]), model.new_cache(1, 16))
            reply.append(int(model.logits(hidden)[0, -1].argmax()))
        completions.append((ids, reply))
    assert greedy_match(model, completions).value == 1
    assert greedy_match(other.model, completions).value < 0.9


def test_every_round_has_a_warm_up_and_a_cosine() -> None:
    recipe = Recipe((0,), 8, ((1e-3, 10_000), (2e-4, 5_000)), batch_tokens=10, warmup_steps=10)
    assert recipe.tokens == 15_000
    assert recipe.rate(0) == pytest.approx(1e-4)
    assert recipe.rate(90) == pytest.approx(1e-3, rel=0.01)
    assert recipe.rate(5_000) == pytest.approx(1e-3 * 0.515)
    assert recipe.rate(9_999) == pytest.approx(3e-5, rel=0.01)
    assert recipe.rate(10_000) == pytest.approx(2e-5)
    assert recipe.rate(12_500) == pytest.approx(2e-4 * 0.515)
    assert recipe.rate(15_000) == recipe.rate(99_000) == pytest.approx(6e-6)


def test_the_losses_are_what_they_are_named_for() -> None:
    scores, target = torch.randn(5, 7), torch.randn(5, 7).softmax(-1)
    q = scores.softmax(-1)
    overlap = torch.minimum(q, target).sum(-1)
    assert torch.allclose(LOSSES["kl"](scores, target), -(target * q.log()).sum(-1).mean())
    assert torch.allclose(LOSSES["tv"](scores, target), (q - target).abs().sum(-1).mean() / 2)
    assert torch.allclose(LOSSES["lk"](scores, target), -overlap.log().mean())
    assert torch.allclose(LOSSES["kl+lk"](scores, target), LOSSES["kl"](scores, target) + LOSSES["lk"](scores, target))
    assert LOSSES["lk"](target.log(), target) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(loss: str, teacher: Any, texts: list[Text], tmp_path: Path) -> None:
    trainer = Trainer(teacher, dataclasses.replace(RECIPE, loss=loss), texts, tmp_path / "c.pt")
    first = trainer._learn(texts[:8])
    trainer.run(lambda step, seen, loss: None)
    assert trainer._learn(texts[:8]) < first - 0.02


@pytest.mark.parametrize("parallel", [False, True])
def test_training_on_its_own_output_lowers_the_loss(
    parallel: bool, teacher: Any, texts: list[Text], tmp_path: Path
) -> None:
    recipe = dataclasses.replace(RECIPE, layers=(1,), rollouts=(3,), parallel=parallel)
    trainer = Trainer(teacher, recipe, texts, tmp_path / "c.pt")
    first = trainer._learn(texts[:8])
    trainer.run(lambda step, seen, loss: None)
    assert trainer._learn(texts[:8]) < first - 0.1


def test_bad_recipes_name_the_field() -> None:
    with pytest.raises(SettingError, match="layers"):
        Recipe((3, 1), 64, ((1e-3, 10_000),))
    with pytest.raises(SettingError, match="rounds"):
        Recipe((0, 1), 64, ((1e-3, 10),))
    with pytest.raises(SettingError, match="rounds"):
        Recipe((0, 1), 64, ())
    with pytest.raises(SettingError, match="loss = 'mse'.*kl, tv"):
        Recipe((0, 1), 64, ((1e-3, 10_000),), loss="mse")
    with pytest.raises(SettingError, match="parallel"):
        Recipe((0, 1), 64, ((1e-3, 10_000),), parallel=True)
    assert json.dumps(dataclasses.asdict(RECIPE))


@pytest.mark.parametrize("keep", [0, 0.5, -1])
def test_a_broken_shard_is_named(keep: float, texts: list[Text], tmp_path: Path) -> None:
    _write_shard(tmp_path / "a.npz", [(t.tokens.tolist(), t.prompt, t.hidden) for t in texts[:3]])
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[: -1 if keep < 0 else int(keep * len(whole))])
    with pytest.raises(DataError, match=r"a\.npz.*delete it"):
        read_texts(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_broken_checkpoint_is_named(content: bytes | None, teacher: Any, texts: list[Text], tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    if content is None:
        torch.save({"other": 1}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=r"c\.pt is broken"):
        Trainer(teacher, RECIPE, texts, path)


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    teacher: Any, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(teacher, RECIPE, texts, tmp_path / "c.pt")
    trainer.save()
    good = (tmp_path / "c.pt").read_bytes()

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DataError, match="last good one is kept"):
        trainer.save()
    assert (tmp_path / "c.pt").read_bytes() == good
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def test_a_start_of_another_shape_is_refused(teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_draft(draft_from(teacher, RECIPE), torch.arange(259), "main", tmp_path / "1-4")
    monkeypatch.setattr(zoo, "DRAFTS", tmp_path)
    started = draft_from(teacher, dataclasses.replace(RECIPE, start="1:4"))
    stored = zoo.read_draft("1:4").weights["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(started.layers[0].mlp.up_proj.weight, stored)
    for other in ({"layers": (1,)}, {"width": 40}):
        with pytest.raises(SettingError, match="start = '1:4'"):
            draft_from(teacher, dataclasses.replace(RECIPE, start="1:4", **other))
