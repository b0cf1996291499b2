"""A setting in the words of other systems, to take it elsewhere; and what they have no words for.

It knows transformers' `generate`, vLLM and llama.cpp by their spelling alone, imports none of them and loads no model.
What a system cannot express is left out there and listed, so that no setting is passed off as another one.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdec_lab.acceptance import RULES
from specdec_lab.drafting import NGram
from specdec_lab.errors import UnknownNameError, require, whole
from specdec_lab.experiment import Arm
from specdec_lab.models.zoo import BUNDLED, FEATURES, HYBRID, RATIOS
from specdec_lab.sampling import Sampling

CHECKED = {  # whose source the spelling was checked against
    "transformers": "transformers 5.24.0",
    "vllm": "vLLM 0.32.0",
    "llama.cpp": "llama.cpp as in llama-cpp-python 0.3.36; builds before April 2026 say --draft-max, --draft-min",
}
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
WINDOW = 32768  # tokens that llama.cpp is told to count a repetition in; there is no word for all of them
SAMPLERS = "penalties;temperature;top_k;top_p;min_p"  # our order; llama.cpp's own has temperature last


@dataclass(frozen=True)
class Setting:
    """What is taken elsewhere. main, and arm.draft: names that zoo knows; dtype: of the weights.

    options: of the draft, as zoo.load_drafter takes them. Raises SettingError.
    """

    main: str = BUNDLED
    arm: Arm = Arm()
    sampling: Sampling = Sampling()
    max_new_tokens: int = 128
    seed: int = 0
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require("main", self.main, isinstance(self.main, str) and bool(self.main.strip()), "a model's name")
        count = self.max_new_tokens
        require("max_new_tokens", count, whole(count) and count >= 1, "an integer >= 1")
        require("seed", self.seed, whole(self.seed) and 0 <= self.seed < 2**62, "an integer 0 … 2⁶² − 1")
        self.arm.acceptance.require_temperature(self.sampling.temperature)

    @property
    def precision(self) -> str:
        """A dtype that others have, too."""
        return self.dtype if self.dtype in GGUF_TYPES else "float32"

    @property
    def confidence(self) -> float:
        """Below which draft confidence a draft ends."""
        return float(self.options.get("confidence", 0.0))

    @property
    def lookup(self) -> NGram | None:
        """The prompt lookup it drafts by, alone or beside a model."""
        if self.arm.draft_length == 0 or not (self.arm.draft == "ngram" or self.arm.draft.startswith(HYBRID)):
            return None
        return NGram(**{name: value for name, value in self.options.items() if name in ("longest", "shortest")})

    @property
    def model(self) -> str | None:
        """The draft model, if there is one that is a model of its own."""
        name = self.arm.draft.removeprefix(HYBRID)
        return None if self.arm.draft_length == 0 or name in ("ngram", "grammar", *FEATURES) else name


@dataclass(frozen=True)
class Elsewhere:
    """A setting in another system's words.

    arguments: as data, as the function that made it says; text: as one types them; prepare: commands that make the
    files it names; lost: what is not expressed, a sentence each.
    """

    system: str
    checked: str
    arguments: dict[str, Any]
    text: str
    prepare: tuple[str, ...]
    lost: tuple[str, ...]


def elsewhere(system: str, setting: Setting) -> Elsewhere:
    """The setting in the words of a system that SYSTEMS names; raises UnknownNameError for another one."""
    if system not in SYSTEMS:
        raise UnknownNameError("system", system, SYSTEMS)
    return SYSTEMS[system](setting)


def transformers(setting: Setting) -> Elsewhere:
    """Arguments of transformers' `generate`.

    arguments: `generate` holds its keywords but for assistant_model, which is the model that `assistant_model` names;
    `assistant_generation_config` goes into that model's own generation_config: `generate` does not read it elsewhere.
    """
    sampling, length, lookup, model = setting.sampling, setting.arm.draft_length, setting.lookup, setting.model
    call: dict[str, Any] = {"max_new_tokens": setting.max_new_tokens, "do_sample": not sampling.greedy}
    call |= _sampled(sampling)
    lost, config = _lost(setting, both=False), {}
    if model is not None:
        config = {"num_assistant_tokens": length, "num_assistant_tokens_schedule": "constant"}
        config |= {"assistant_confidence_threshold": setting.confidence}  # its own default is 0.4
        if setting.confidence:
            lost.append(
                "confidence: asked of each token's probability, not of their product; and it moves where scikit-learn "
                "is installed"
            )
    elif lookup is not None:
        call |= {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": lookup.longest}
        lost += ["ngram: the first match counts, not the last one"]
        lost += ["shortest: matches of one token count, too"] if lookup.shortest > 1 else []
    folders = {"model": _folder(setting.main), "assistant_model": None if model is None else _folder(model)}
    arguments = {**folders, "assistant_generation_config": config, "generate": call}
    lines = ["from transformers import AutoModelForCausalLM", "", _loaded("model", setting.main, setting)]
    words = [f"{name}={value!r}" for name, value in call.items()]
    if model is not None:
        lines.append(_loaded("assistant", model, setting))
        lines += [f"assistant.generation_config.{name} = {value!r}" for name, value in config.items()]
        words.insert(0, "assistant_model=assistant")
    lines.append("# inputs: the tokenizer's, through its chat template where it has one")
    lines.append(f"output = model.generate(**inputs, {', '.join(words)})")
    return _made("transformers", setting, arguments, "\n".join(lines), _exports(setting), lost)


def vllm(setting: Setting) -> Elsewhere:
    """`vllm serve` with its speculative config.

    arguments: `model`, `dtype`, `speculative_config` (None for plain decoding) and `sampling_params`, which go with
    each request or into SamplingParams.
    """
    sampling, length, lookup, model = setting.sampling, setting.arm.draft_length, setting.lookup, setting.model
    lost = _lost(setting, both=False)
    config: dict[str, Any] | None = None
    if model is not None:
        config = {"method": "draft_model", "model": _folder(model), "num_speculative_tokens": length}
        if not sampling.greedy:
            config["draft_sample_method"] = "probabilistic"  # its default drafts greedily
        lost += ["confidence: drafts always have their full length"] if setting.confidence else []
    elif lookup is not None:
        config = {"method": "ngram", "num_speculative_tokens": length}
        config |= {"prompt_lookup_max": lookup.longest, "prompt_lookup_min": lookup.shortest}
        lost.append("ngram: the first of the longest matches counts, not the last one")
    params = {"max_tokens": setting.max_new_tokens, "temperature": sampling.temperature, **_sampled(sampling)}
    if config is not None and params.get("min_p"):
        params["min_p"] = 0.0
        lost.append(
            f"min_p {sampling.min_p:g}: refused beside speculative decoding, so that the distribution is another"
        )
    if not sampling.greedy:
        params["seed"] = setting.seed
    names = [setting.main] + ([] if model is None else [model])
    if any(name.endswith(".gguf") for name in names):
        lost.append("a GGUF file: needs vllm-gguf-plugin; a Hugging Face folder does not")
    words = ["vllm", "serve", _folder(setting.main), "--dtype", setting.precision]
    words += [] if config is None else ["--speculative-config", json.dumps(config)]
    text = f"{shlex.join(words)}\n# in each request: {json.dumps(params)}"
    arguments: dict[str, Any] = {"model": _folder(setting.main), "dtype": setting.precision}
    arguments |= {"speculative_config": config, "sampling_params": params}
    return _made("vllm", setting, arguments, text, _exports(setting), lost)


def llama_cpp(setting: Setting) -> Elsewhere:
    """Flags of llama.cpp's llama-server; llama-cli takes the same. arguments: `flags`, by name."""
    sampling, length, lookup, model = setting.sampling, setting.arm.draft_length, setting.lookup, setting.model
    lost, prepare = _lost(setting, both=True), list(_exports(setting))
    flags = _gguf(setting.main, ("-m", "-hf"), setting, prepare)
    kinds: list[str] = []
    if lookup is not None:
        kinds.append("ngram-simple")
        flags |= {"--spec-ngram-simple-size-n": lookup.longest, "--spec-ngram-simple-size-m": length}
        lost.append(f"ngram: matches of exactly {lookup.longest} tokens count; shorter ones are not looked for")
    if model is not None:
        kinds.append("draft-simple")
        flags |= _gguf(model, ("-md", "-hfd"), setting, prepare)
        flags |= {"--spec-draft-n-max": length, "--spec-draft-n-min": 0, "--spec-draft-p-min": setting.confidence}
        if setting.confidence:
            lost.append("confidence: asked of each token's probability, not of their product")
    if kinds:
        flags["--spec-type"] = ",".join(kinds)
    if model is not None and not sampling.greedy:
        lost.append(
            "speculative sampling: drafts are greedy, and a token stays where the main model draws the same one; "
            "lossless, but fewer stay"
        )
    flags |= {"-n": setting.max_new_tokens, "--samplers": SAMPLERS, "--temp": sampling.temperature}
    spelled = {"temperature": "--temp", "repetition_penalty": "--repeat-penalty"}
    flags |= {spelled.get(name, "--" + name.replace("_", "-")): value for name, value in _sampled(sampling).items()}
    if sampling.repetition_penalty != 1:
        flags["--repeat-last-n"] = WINDOW
        lost.append(f"repetition_penalty: counts the last {WINDOW:,} tokens, not all")
    if not sampling.greedy:
        flags["--seed"] = setting.seed
    names = [setting.main] + ([] if model is None else [model])
    if any(_is_hub_id(name) for name in names):
        lost.append("a hub id: has to hold GGUF files")
    text = shlex.join(["llama-server", *(str(word) for flag in flags.items() for word in flag)])
    return _made("llama.cpp", setting, {"flags": flags}, text, tuple(prepare), lost)


SYSTEMS: dict[str, Callable[[Setting], Elsewhere]] = {
    "transformers": transformers,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
}


def _made(
    system: str, setting: Setting, arguments: dict[str, Any], text: str, prepare: tuple[str, ...], lost: list[str]
) -> Elsewhere:
    if not setting.sampling.greedy:
        lost = [*lost, "seed: other random numbers, so other tokens of the same distribution"]
    return Elsewhere(system, CHECKED[system], arguments, text, prepare, tuple(lost))


def _sampled(sampling: Sampling) -> dict[str, Any]:
    """The fields of Sampling that matter, each said: a model's own generation_config may say otherwise."""
    if sampling.greedy:
        return {"repetition_penalty": sampling.repetition_penalty}
    return asdict(sampling)


def _lost(setting: Setting, both: bool) -> list[str]:
    """What none of the systems has. both: whether it can draft by lookup and by a model at once."""
    arm, lost = setting.arm, []
    if arm.draft_length == 0:
        return []
    if arm.candidate_count > 1 or arm.adaptive_threshold is not None:
        how = f"candidate_count {arm.candidate_count}, branching {arm.branching}"
        lost.append(f"{how}: no token trees; one chain of {arm.draft_length} tokens a step")
    if arm.adaptive_threshold is not None:
        lost.append(f"adaptive_threshold {arm.adaptive_threshold:g}: nothing plans each step from the ones before")
    if not arm.acceptance.lossless:
        rule = f"acceptance_rule {arm.acceptance_rule} ({RULES[arm.acceptance_rule].about})"
        retries = "" if arm.max_retries is None else f", max_retries {arm.max_retries}"
        lost.append(f"{rule}{retries}: the lossless rule decides there")
    partner = arm.draft.removeprefix(HYBRID)
    if partner in FEATURES:
        lost.append(f"draft {partner}: reads this main model's hidden states; no other system loads it")
    elif partner == "grammar":
        lost.append("draft grammar: nothing drafts the tokens that a constraint forces")
    if setting.lookup is not None and setting.model is not None:
        there = "the lookup drafts wherever it matches, not where it promises more"
        lost.append(f"hybrid: {there if both else 'the model alone drafts; lookup cannot stand beside it'}")
    if setting.model in RATIOS:
        lost.append(f"draft {setting.model}: exported with its full head and without int8, so that a step costs more")
    if setting.precision != setting.dtype:
        lost.append(f"dtype {setting.dtype}: {setting.precision} instead")
    return lost


def _folder(name: str) -> str:
    """The folder, file or hub id of a model; bundled ones lie where _exports puts them."""
    if name == BUNDLED:
        return "main"
    return f"draft-{name.replace(':', '-')}" if name in RATIOS else name


def _exports(setting: Setting) -> tuple[str, ...]:
    """Commands that write the bundled models as folders."""
    names = {BUNDLED: "main", **{ratio: ratio for ratio in RATIOS}}
    used = dict.fromkeys([setting.main, setting.model])
    return tuple(f"specdec-lab export {names[name]} {_folder(name)}" for name in used if name in names)


def _loaded(variable: str, name: str, setting: Setting) -> str:
    folder, file = _folder(name), ""
    if name.endswith(".gguf"):
        path = Path(name)
        folder, file = str(path.parent), f"gguf_file={path.name!r}, "
    return f"{variable} = AutoModelForCausalLM.from_pretrained({folder!r}, {file}dtype={setting.precision!r})"


def _is_hub_id(name: str) -> bool:
    plain = name not in (BUNDLED, *RATIOS) and not name.endswith(".gguf")
    return plain and name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _gguf(name: str, flags: tuple[str, str], setting: Setting, prepare: list[str]) -> dict[str, Any]:
    """The flag that names a model, by file or by hub id; a folder is converted first."""
    if name.endswith(".gguf"):
        return {flags[0]: name}
    if _is_hub_id(name):
        return {flags[1]: name}
    folder = _folder(name)
    file = f"{Path(folder).name}.gguf"
    convert = ["python", "convert_hf_to_gguf.py", folder, "--outtype", GGUF_TYPES[setting.precision], "--outfile", file]
    command = shlex.join(convert)
    if command not in prepare:
        prepare.append(command)
    return {flags[0]: file}
