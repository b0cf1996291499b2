"""Layouts of weights: which one is chosen, the file it is remembered in, and that every one computes the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specdec_lab.errors import ModelError, SettingError
from specdec_lab.models import kernels, linear
from specdec_lab.models.kernels import COUNTS, Plan, Times, arrange, choose
from specdec_lab.models.linear import Linear, Switched

PLAIN, TRANSPOSED, PACKED = "plain", "transposed", "packed"


def times(plain: list[float], transposed: list[float], packed: list[float]) -> Times:
    named = {PLAIN: plain, TRANSPOSED: transposed, PACKED: packed}
    return {name: dict(zip(COUNTS, taken, strict=True)) for name, taken in named.items()}


@pytest.mark.parametrize(
    ("taken", "usual", "expected"),
    [
        # nearly alike everywhere: the usual one stays, whichever that is
        (times([1, 2, 3, 4], [1.05, 2.1, 3, 4.2], [1, 2, 3.2, 4]), PACKED, Plan(PACKED, PACKED)),
        (times([1, 2, 3, 4], [1.05, 2.1, 3, 4.2], [1, 2, 3.2, 4]), TRANSPOSED, Plan(TRANSPOSED, TRANSPOSED)),
        # one is the fastest everywhere
        (times([1, 3, 5, 6], [1, 1.5, 2, 3], [2, 3, 4, 5]), PACKED, Plan(TRANSPOSED, TRANSPOSED)),
        # one for single tokens, another for more
        (times([1, 3, 5, 6], [1.5, 3, 5, 6], [1.5, 1.6, 2, 3]), TRANSPOSED, Plan(PLAIN, PACKED, 4)),
        (times([1, 1.5, 5, 6], [1.5, 3, 5, 6], [1.5, 1.8, 2, 3]), TRANSPOSED, Plan(PLAIN, PACKED, 8)),
        # a third one is as good as both, so that one copy will do
        (times([1, 3, 5, 6], [1.05, 1.7, 2.1, 3.1], [1.5, 1.6, 2, 3]), PACKED, Plan(TRANSPOSED, TRANSPOSED)),
        # three would be needed: the least bad one, the usual one where it is hardly worse
        (times([1, 4, 4, 2], [1.5, 2, 3, 3], [2, 4, 2, 2]), PLAIN, Plan(TRANSPOSED, TRANSPOSED)),
        (times([1, 2.1, 4, 4], [2, 1, 4, 4], [2.1, 2.1, 2, 4]), PLAIN, Plan(PLAIN, PLAIN)),
        # a usual one that this build of torch lacks
        ({PLAIN: dict.fromkeys(COUNTS, 1.0)}, PACKED, Plan(PLAIN, PLAIN)),
    ],
)
def test_the_choice(taken: Times, usual: str, expected: Plan) -> None:
    assert choose(taken, usual) == expected


def test_the_choice_does_not_hang_on_small_differences() -> None:
    rng = torch.Generator().manual_seed(0)
    base = times([1, 3, 5, 6], [1.5, 3, 5, 6], [1.5, 1.6, 2, 3])
    for _ in range(200):
        noisy = {
            name: {k: t * (0.97 + 0.06 * float(torch.rand(1, generator=rng))) for k, t in counts.items()}
            for name, counts in base.items()
        }
        assert choose(noisy, TRANSPOSED) == Plan(PLAIN, PACKED, 4)


# Measuring and remembering


SHAPE = (640, 512)  # of 1.3 MB, so that it is measured
FAKE = times([1, 3, 5, 6], [1.5, 3, 5, 6], [1.5, 1.6, 2, 3])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a process that has measured nothing."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPECDEC_KERNELS", raising=False)
    kernels._known_times.cache_clear()
    yield tmp_path / "cache"
    kernels._known_times.cache_clear()


@pytest.fixture
def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes measured so far, in a world where FAKE is what is measured."""
    shapes: list[tuple[int, int]] = []

    def measure(rows: int, columns: int) -> Times:
        shapes.append((rows, columns))
        return FAKE

    monkeypatch.setattr(kernels, "candidates", lambda: (PLAIN, TRANSPOSED, PACKED))
    monkeypatch.setattr(kernels, "measure", measure)
    return shapes


def weight(rows: int = SHAPE[0], columns: int = SHAPE[1]) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) / columns**0.5


def test_a_shape_is_measured_once_in_a_process_and_once_on_a_machine(
    folder: Path, measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [arrange(weight(), None, TRANSPOSED) for _ in range(3)]
    assert [product.layout for product in first] == ["plain, packed from 4"] * 3
    assert measured == [SHAPE]
    kernels._known_times.cache_clear()  # another process
    assert arrange(weight(), None, TRANSPOSED).layout == "plain, packed from 4"
    assert measured == [SHAPE]
    monkeypatch.setattr(kernels, "machine", lambda: "another machine")
    arrange(weight(), None, TRANSPOSED)
    assert measured == [SHAPE] * 2
    stored = json.loads((folder / "kernels.json").read_text())
    assert len(stored) == 2
    assert all(set(shapes) == {"640x512"} for shapes in stored.values())
    assert [file.name for file in folder.iterdir()] == ["kernels.json"]


def test_the_key_names_what_times_depend_on() -> None:
    assert all(
        part in kernels.machine() for part in (f"{torch.get_num_threads()} threads", torch.__version__, "float32")
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"a": 1}',
        json.dumps({"here": {"640x512": {}}}),
        json.dumps({"here": {"640x512": {PLAIN: {"1": 1}}}}),
        json.dumps({"here": {"640x512": FAKE | {PACKED: dict.fromkeys(COUNTS, "fast")}}}),
        json.dumps({"here": {"640x512": FAKE | {PACKED: dict.fromkeys(COUNTS, -1)}}}),
        json.dumps({"here": {"640x512": FAKE | {PACKED: dict.fromkeys(COUNTS, float("nan"))}}}),
        json.dumps({"here": {"640x512": [1]}}),
        "\udcff",
    ],
)
def test_a_broken_file_is_measured_anew(
    content: str, folder: Path, measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "machine", lambda: "here")
    folder.mkdir()
    (folder / "kernels.json").write_bytes(content.encode(errors="surrogateescape"))
    assert arrange(weight(), None, TRANSPOSED).layout == "plain, packed from 4"
    assert measured == [SHAPE]
    assert json.loads((folder / "kernels.json").read_text())["here"]["640x512"][PLAIN] == {
        "1": 1,
        "4": 3,
        "8": 5,
        "16": 6,
    }


def test_a_place_that_cannot_be_written_is_no_error(
    folder: Path, measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file where the folder should be")
    assert arrange(weight(), None, TRANSPOSED).layout == "plain, packed from 4"
    folder.unlink()
    kernels._known_times.cache_clear()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernels.os, "replace", full)
    assert arrange(weight(), None, TRANSPOSED).layout == "plain, packed from 4"
    assert list(folder.iterdir()) == []
    assert measured == [SHAPE] * 2


def test_a_busy_machine_keeps_the_usual_layout_and_remembers_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_noisy", lambda seconds: True)
    assert arrange(weight(), None, TRANSPOSED).layout == TRANSPOSED
    assert not folder.exists()


def test_what_is_noisy() -> None:
    assert not kernels._noisy([1.0, 1.1, 1.2, 1.1, 9.0])  # one disturbance
    assert kernels._noisy([1.0, 1.1, 4.0, 5.0, 3.0])
    assert all(kernels._plausible(counts) for counts in FAKE.values())
    assert not kernels._plausible({1: 1, 4: 40, 8: 2, 16: 3})  # a machine that was away most of the time
    assert not kernels._plausible({1: 1, 4: 1, 8: 2, 16: 40})


def test_a_real_measurement_has_every_layout_and_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_noisy", lambda seconds: False)
    monkeypatch.setattr(kernels, "_plausible", lambda counts: True)
    monkeypatch.setattr(kernels, "STREAM", 2**22)
    found = kernels.measure(96, 64)
    assert found is not None
    assert set(found) == set(kernels.candidates())
    assert all(set(counts) == set(COUNTS) and min(counts.values()) > 0 for counts in found.values())


def test_small_or_half_precision_weights_and_the_fixed_mode_are_not_measured(
    measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert arrange(weight(64, 64), None, TRANSPOSED).layout == TRANSPOSED
    assert arrange(weight().bfloat16(), None, TRANSPOSED).layout == PLAIN
    monkeypatch.setenv("SPECDEC_KERNELS", "fixed")
    assert arrange(weight(), None, TRANSPOSED).layout == TRANSPOSED
    assert measured == []
    monkeypatch.setenv("SPECDEC_KERNELS", "quick")
    with pytest.raises(SettingError, match="SPECDEC_KERNELS = 'quick': allowed is measured or fixed"):
        arrange(weight(), None, TRANSPOSED)


# What is computed, and what is held


@pytest.mark.parametrize("bias", [False, True])
def test_two_layouts_switch_at_their_count_and_agree(
    bias: bool, measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = weight()
    b = torch.randn(len(w), generator=torch.Generator().manual_seed(2)) if bias else None
    product = arrange(w, b, TRANSPOSED)
    assert isinstance(product, Switched)
    used: list[str] = []
    call = Linear.__call__

    def watched(self: Linear, x: torch.Tensor) -> torch.Tensor:
        used.append(self.layout)
        return call(self, x)

    monkeypatch.setattr(Linear, "__call__", watched)
    for rows, tokens in ((1, 1), (1, 3), (3, 1), (1, 4), (2, 2), (1, 16)):
        x = torch.randn(rows, tokens, w.shape[1], generator=torch.Generator().manual_seed(3))
        y = product(x)
        assert y.shape == (rows, tokens, len(w))
        assert (y - F.linear(x, w, b)).abs().max() <= 1e-4
    packed = PACKED if linear.packing_works() else TRANSPOSED
    assert used == [PLAIN] * 3 + [packed] * 3
    assert product.nbytes == 2 * w.nbytes


def test_a_head_in_two_layouts_holds_the_embedding_once(measured: list[tuple[int, int]]) -> None:
    """Its plain layout is the embedding itself; what the other one takes is told."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from specdec_lab.models.llama import LlamaModel

    config = LlamaConfig(
        vocab_size=4200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        source = LlamaForCausalLM(config).eval()
    ours = LlamaModel(source.config, source.state_dict(), "tiny")
    assert measured == [(4200, 64)]
    assert ours.head.layout == "plain, packed from 4"
    assert ours._outer_nbytes == 2 * ours.embedding.nbytes
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.inference_mode():
        expected = source(tokens).logits[0]
    cache = ours.new_cache(1, 8)
    found = ours.logits(ours.forward(tokens, cache))[0]
    assert (found - expected).abs().max() <= 1e-4
    draft = LlamaModel(
        source.config, {k: w for k, w in source.state_dict().items() if "layers" in k or "norm" in k}, "d", shares=ours
    )
    assert draft.nbytes == ours.nbytes - ours._outer_nbytes


@pytest.mark.skipif(not linear.bf16_packing_works(), reason="no packed bfloat16 product in this build of torch")
@pytest.mark.parametrize("bias", [False, True])
def test_packed_bf16_rounds_weights_and_inputs(bias: bool) -> None:
    w, x = weight(), torch.randn(2, 3, SHAPE[1], generator=torch.Generator().manual_seed(3))
    b = torch.randn(len(w), generator=torch.Generator().manual_seed(2)) if bias else None
    product = Linear(w, b, "packed_bf16")
    y, rounded = product(x), F.linear(x.bfloat16().float(), w.bfloat16().float(), b)
    assert y.dtype == torch.float32
    assert product.nbytes == w.nbytes // 2
    assert (y - rounded).abs().max() <= 2**-7 * rounded.abs().max()  # the result is rounded, too
    assert (y - F.linear(x, w, b)).abs().max() > 1e-4  # another model's numbers


def test_packed_bf16_is_refused_where_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "bf16_packing_works", lambda: False)
    with pytest.raises(ModelError, match="no packed bfloat16 product"):
        Linear(weight(), None, "packed_bf16")


@pytest.mark.skipif(not linear.bf16_packing_works(), reason="no packed bfloat16 product in this build of torch")
def test_packed_bf16_is_a_dtype_to_ask_for(tiny_folder: str, gpt2_folder: str) -> None:
    from specdec_lab.decoding import Decoder
    from specdec_lab.drafting import NGram
    from specdec_lab.models.llama import LlamaModel
    from specdec_lab.models.zoo import load_main

    main = load_main(tiny_folder, device="cpu", dtype="packed_bf16")
    assert isinstance(main.model, LlamaModel)
    layer = main.model.layers[0]
    products = (main.model.head, layer.qkv, layer.output, layer.gate_up, layer.down)
    assert {product.layout for product in products} == {"packed_bf16"}
    assert main.model.dtype == torch.float32
    prompt = [5, 6, 7, 5, 6, 7, 5]
    drafted = Decoder(main.model, NGram(), 4).generate(prompt, max_new_tokens=12)
    assert len(drafted.tokens) == 12
    with pytest.raises(ModelError, match="packed_bf16 is for llama.*gpt2"):
        load_main(gpt2_folder, device="cpu", dtype="packed_bf16")
