"""Other systems behind one interface: prompt ids in, new token ids out, greedy. It knows nothing of how they work.

What is not installed, or does not run here, is said with its reason and stops nothing else. The only place that
imports packages of the extra `bench`.
"""

import importlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdec_lab.errors import UnknownNameError
from specdec_lab.models import zoo
from specdec_lab.verify import generate

Call = Callable[[Sequence[int], int], list[int]]  # (prompt ids, max_new_tokens) -> new token ids
LOOKUP = 10  # tokens that transformers' prompt lookup drafts, the value its documentation shows
NAMES = (
    "generate",
    *(f"assisted-{ratio}" for ratio in zoo.RATIOS),
    "lookup",
    "flashspec-ngram",
    "flashspec-1:4",
    "openvino",
)


@dataclass(frozen=True)
class Peer:
    """Another system, ready to decode, or the reason why it is not.

    nbytes: of its weights, 0 where it does not say. precision: of the main model's weights.
    """

    name: str
    call: Call | None = None
    missing: str = ""
    nbytes: int = 0
    precision: str = "float32"


@dataclass(frozen=True)
class Setup:
    """What peers are built from. reference: the main model as transformers has it; scratch: a folder for files."""

    main: zoo.Main
    reference: Any
    scratch: Path
    drafts: dict[str, Any] = field(default_factory=dict)

    def draft(self, name: str) -> Any:
        """A draft as transformers loads it: a ratio's export, or a local folder."""
        if name not in self.drafts:
            folder = Path(name)
            if name in zoo.RATIOS:
                folder = self.scratch / name.replace(":", "-")
                zoo.export(name, folder)
            model = zoo.read(folder, self.reference.dtype)[0]
            self.drafts[name] = model.to(self.reference.device)
        return self.drafts[name]


def check_name(name: str) -> None:
    """Raise UnknownNameError unless `name` is a peer's; assisted- and flashspec- take a draft's folder, too."""
    kind, _, draft = name.partition("-")
    if name not in NAMES and not (kind in ("assisted", "flashspec") and Path(draft).is_dir() and draft):
        raise UnknownNameError("peer", name, NAMES)


@contextmanager
def load_peers(
    names: Sequence[str], main: zoo.Main, reference: Any, trial: Sequence[int] = (1, 2)
) -> Iterator[list[Peer]]:
    """The peers of these names, those that cannot run among them, for as long as the context lasts.

    Each decodes two tokens behind `trial` first: what fails there is missing. Raises UnknownNameError.
    """
    for name in names:
        check_name(name)
    with tempfile.TemporaryDirectory() as scratch:
        setup = Setup(main, reference, Path(scratch))
        yield [_load(name, setup, trial) for name in names]


def _load(name: str, setup: Setup, trial: Sequence[int]) -> Peer:
    kind, _, draft = name.partition("-")
    build = {"assisted": _assisted, "flashspec": _flashspec, "openvino": _openvino}.get(kind, _transformers)
    try:
        peer = build(name, draft, setup)
        if peer.call:
            peer.call(trial, 2)
    except ModuleNotFoundError as error:
        hint = "; pip install 'specdec-lab[bench]'" if kind == "flashspec" else ""
        return Peer(name, missing=f"not installed: no module {error.name}{hint}")
    except Exception as error:  # whatever another system raises is its row's, not the benchmark's end
        return Peer(name, missing=reason(error))
    return peer


def reason(error: Exception) -> str:
    """Why a system cannot run, in one line."""
    said = str(error).strip() or "no message"
    return f"cannot run: {type(error).__name__}: {said.splitlines()[0][:160]}"


def _size(*models: Any) -> int:
    """Bytes of weights, those that models share counted once."""
    held = {p.data_ptr(): p.numel() * p.element_size() for model in models for p in model.parameters()}
    return sum(held.values())


def _ready(name: str, call: Call, reference: Any, *drafts: Any) -> Peer:
    precision = str(reference.dtype).removeprefix("torch.")
    return Peer(name, call, nbytes=_size(reference, *drafts), precision=precision)


def _transformers(name: str, draft: str, setup: Setup) -> Peer:
    """Its own `generate`, and the same with prompt lookup."""
    settings = {"prompt_lookup_num_tokens": LOOKUP} if name == "lookup" else {}
    return _ready(name, partial(_generated, setup, settings), setup.reference)


def _assisted(name: str, draft: str, setup: Setup) -> Peer:
    """transformers' assisted generation at its default settings."""
    assistant = setup.draft(draft)
    return _ready(name, partial(_generated, setup, {"assistant_model": assistant}), setup.reference, assistant)


def _generated(setup: Setup, settings: dict[str, Any], ids: Sequence[int], max_new_tokens: int) -> list[int]:
    return generate(setup.reference, ids, max_new_tokens, setup.main.eos, **settings)


def _flashspec(name: str, draft: str, setup: Setup) -> Peer:
    """flashspec's engine at its default settings: n-gram lookup, or the strategy it picks for one draft model."""
    from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine.hf_drafter import HuggingFaceDrafter
    from flashspec.engine.ngram import NgramDrafter
    from flashspec.engine.verifier import TargetModel

    logging.getLogger("flashspec").setLevel(logging.ERROR)
    reference, main = setup.reference, setup.main
    device, dtype = reference.device, str(reference.dtype).removeprefix("torch.")
    settings: dict[str, Any] = {"device": str(device), "dtype": dtype, "eos_token_ids": tuple(main.eos)}
    config = FlashSpecConfig(**settings, sampling=SamplingConfig(temperature=0.0))
    models = [] if draft == "ngram" else [setup.draft(draft)]
    drafters: list[Any] = [HuggingFaceDrafter(draft, device, reference.dtype, 0.0, model) for model in models]
    drafters = drafters or [NgramDrafter()]
    engine = SpeculativeEngine(config, drafters, TargetModel(main.name, device, reference.dtype, reference))

    def call(ids: Sequence[int], max_new_tokens: int) -> list[int]:
        tokens = torch.tensor([list(ids)], device=device)
        return list(engine.generate(tokens, max_new_tokens=max_new_tokens).output_ids[0].tolist())

    return _ready(name, call, reference, *models)


def _openvino(name: str, draft: str, setup: Setup) -> Peer:
    """OpenVINO GenAI on the 4-bit file that the bundled main model comes from: another precision."""
    genai, openvino = importlib.import_module("openvino_genai"), importlib.import_module("openvino")
    if setup.main.name != zoo.BUNDLED:
        return Peer(name, missing="cannot run: only for the bundled main model's GGUF file")
    file = zoo._download_gguf(setup.scratch)
    pipeline = genai.LLMPipeline(str(file), "CPU")

    def call(ids: Sequence[int], max_new_tokens: int) -> list[int]:
        tokens = torch.tensor([list(ids)]).numpy()
        inputs = genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(tokens * 0 + 1))
        config = genai.GenerationConfig(max_new_tokens=max_new_tokens, stop_token_ids=set(setup.main.eos))
        return list(pipeline.generate(inputs, config).tokens[0])

    return Peer(name, call, nbytes=file.stat().st_size, precision="4-bit (Q4_1)")
