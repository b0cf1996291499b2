"""Settings in other systems' words: transformers' really run; the others' are spelled as their source spells them."""

import json
import shlex
from typing import Any

import pytest
import torch
from transformers.generation import candidate_generator

from specdec_lab import cli
from specdec_lab.decoding import Decoder
from specdec_lab.elsewhere import SYSTEMS, Elsewhere, Setting, elsewhere
from specdec_lab.errors import SettingError, UnknownNameError
from specdec_lab.experiment import Arm
from specdec_lab.models import zoo
from specdec_lab.sampling import Sampling
from specdec_lab.verify import generate

WARM = Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1)


def ours(setting: Setting, ids: list[int]) -> list[int]:
    main = zoo.load_main(setting.main, device="cpu")
    drafter = zoo.load_drafter(setting.arm.draft, main, **setting.options)
    how = {"repetition_penalty": setting.sampling.repetition_penalty}
    return setting.arm.decoder(main, drafter).generate(ids, max_new_tokens=setting.max_new_tokens, **how).tokens


def theirs(made: Elsewhere, ids: list[int]) -> list[int]:
    """The new tokens of the printed program."""
    tokens = torch.tensor([ids])
    names: dict[str, Any] = {"inputs": {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}}
    exec(made.text, names)
    return names["output"][0, len(ids) :].tolist()


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens transformers drafted, step by step."""
    lengths: list[int] = []
    for name in ("AssistedCandidateGenerator", "PromptLookupCandidateGenerator"):
        kind = getattr(candidate_generator, name)
        real = kind.get_candidates

        def recorded(self: Any, input_ids: Any, *args: Any, real: Any = real, **more: Any) -> Any:
            out = real(self, input_ids, *args, **more)
            lengths.append(out[0].shape[1] - input_ids.shape[1])
            return out

        monkeypatch.setattr(kind, "get_candidates", recorded)
    return lengths


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("length", [0, 3, 7])
def test_transformers_gives_the_same_greedy_tokens_from_drafts_of_that_length(
    tiny_folder: str, tiny_draft_folder: str, drafted: list[int], length: int, penalty: float
) -> None:
    sampling = Sampling(repetition_penalty=penalty)
    setting = Setting(tiny_folder, Arm(tiny_draft_folder, length), sampling, max_new_tokens=30)
    for text in ("Hello", "One, two, three, one, two,"):
        ids = list(text.encode())
        drafted.clear()
        expected = ours(setting, ids)
        assert theirs(elsewhere("transformers", setting), ids) == expected
        # nothing shortens a draft but the end: were the number read elsewhere, it would be transformers' own 20
        early = drafted[: max(0, len(drafted) - length)]
        assert set(early) == ({length} if length else set())


def test_transformers_lookup(tiny_folder: str, drafted: list[int]) -> None:
    setting = Setting(tiny_folder, Arm("ngram", 5), max_new_tokens=30)
    ids = list(b"abcdefgh abcdefgh abcdefg")
    made = elsewhere("transformers", setting)
    assert made.arguments["generate"]["max_matching_ngram_size"] == 8
    assert theirs(made, ids) == ours(setting, ids)
    assert drafted[0] == 5
    assert max(drafted) == 5


def test_transformers_arguments_as_data(tiny_folder: str, tiny_draft_folder: str) -> None:
    setting = Setting(tiny_folder, Arm(tiny_draft_folder, 3), max_new_tokens=16)
    arguments = elsewhere("transformers", setting).arguments
    model, assistant = (zoo.read(zoo._find(arguments[name]))[0] for name in ("model", "assistant_model"))
    assistant.generation_config.update(**arguments["assistant_generation_config"])
    call = {name: value for name, value in arguments["generate"].items() if name not in ("max_new_tokens", "do_sample")}
    ids = list(b"Hello")
    main = zoo.load_main(tiny_folder, device="cpu")
    assert generate(model, ids, 16, main.eos, assistant_model=assistant, **call) == ours(setting, ids)


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_transformers_samples_from_the_same_warped_distribution(
    tiny_folder: str, tiny_draft_folder: str, draft: str
) -> None:
    """A nucleus of one token leaves no choice, so that sampling has to agree with the arg-max, too."""
    narrow = Sampling(temperature=2.0, top_p=1e-6)
    arm = Arm(tiny_draft_folder if draft == "model" else draft, 3)
    setting = Setting(tiny_folder, arm, narrow, max_new_tokens=20)
    made, ids = elsewhere("transformers", setting), list(b"abc abc ab")
    assert "do_sample=True" in made.text
    plain = Decoder(zoo.load_main(tiny_folder, device="cpu").model)
    assert theirs(made, ids) == plain.generate(ids, max_new_tokens=20, eos=(257,)).tokens
    said = elsewhere("transformers", Setting(tiny_folder, arm, WARM)).arguments["generate"]
    assert {name: said[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")} == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }


def test_transformers_reads_a_gguf_file_by_its_folder() -> None:
    made = elsewhere("transformers", Setting("models/m.gguf", Arm("drafts/d.gguf", 2)))
    assert "from_pretrained('models', gguf_file='m.gguf', dtype='float32')" in made.text
    assert "from_pretrained('drafts', gguf_file='d.gguf', dtype='float32')" in made.text


def speculative_config(made: Elsewhere) -> Any:
    """What `vllm serve` parses."""
    words = shlex.split(made.text, comments=True)
    assert words[:2] == ["vllm", "serve"]
    at = "--speculative-config"
    return json.loads(words[words.index(at) + 1]) if at in words else None


def test_vllm_draft_model() -> None:
    made = elsewhere("vllm", Setting("big/model", Arm("small/model", 5), dtype="bfloat16"))
    assert speculative_config(made) == {"method": "draft_model", "model": "small/model", "num_speculative_tokens": 5}
    assert shlex.split(made.text)[2:5] == ["big/model", "--dtype", "bfloat16"]
    assert made.arguments["sampling_params"] == {"max_tokens": 128, "temperature": 0.0, "repetition_penalty": 1.0}
    assert made.lost == ()
    warm = elsewhere("vllm", Setting("big/model", Arm("small/model", 5), WARM, seed=7))
    assert speculative_config(warm)["draft_sample_method"] == "probabilistic"
    assert warm.arguments["sampling_params"] == {
        "max_tokens": 128,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.0,  # it refuses others beside a draft
        "repetition_penalty": 1.1,
        "seed": 7,
    }
    assert any(line.startswith("min_p 0.05: refused") for line in warm.lost)


def test_vllm_lookup_and_plain() -> None:
    made = elsewhere("vllm", Setting("big/model", Arm("ngram", 6), options={"longest": 4, "shortest": 2}))
    lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    assert speculative_config(made) == {"method": "ngram", "num_speculative_tokens": 6} | lookup
    plain = elsewhere("vllm", Setting("big/model", Arm("small/model", 0), WARM))
    assert speculative_config(plain) is None
    assert plain.arguments["sampling_params"]["min_p"] == 0.05


def test_llama_cpp() -> None:
    made = elsewhere("llama.cpp", Setting("m.gguf", Arm("d.gguf", 6), max_new_tokens=50, options={"confidence": 0.4}))
    flags: dict[str, Any] = {"-m": "m.gguf", "-md": "d.gguf", "--spec-type": "draft-simple"}
    flags |= {"--spec-draft-n-max": 6, "--spec-draft-n-min": 0, "--spec-draft-p-min": 0.4}
    flags |= {"-n": 50, "--samplers": "penalties;temperature;top_k;top_p;min_p", "--temp": 0.0, "--repeat-penalty": 1.0}
    assert made.arguments["flags"] == flags
    assert shlex.split(made.text) == [
        "llama-server",
        *(str(word) for flag in made.arguments["flags"].items() for word in flag),
    ]
    assert any(line.startswith("confidence: ") for line in made.lost)
    warm = elsewhere("llama.cpp", Setting("m.gguf", Arm("ngram+d.gguf", 6), WARM, seed=7)).arguments["flags"]
    assert warm["--spec-type"] == "ngram-simple,draft-simple"
    assert (warm["--spec-ngram-simple-size-n"], warm["--spec-ngram-simple-size-m"]) == (8, 6)
    named = ("--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--repeat-last-n", "--seed")
    assert [warm[name] for name in named] == [0.7, 20, 0.9, 0.05, 1.1, 32768, 7]


def test_llama_cpp_converts_folders_and_fetches_hub_ids(tiny_folder: str) -> None:
    made = elsewhere("llama.cpp", Setting(tiny_folder, Arm("owner/name", 2), dtype="bfloat16"))
    file = made.arguments["flags"]["-m"]
    assert made.prepare == (f"python convert_hf_to_gguf.py {tiny_folder} --outtype bf16 --outfile {file}",)
    assert made.arguments["flags"]["-hfd"] == "owner/name"
    assert "a hub id: has to hold GGUF files" in made.lost


def test_bundled_models_are_exported_first() -> None:
    setting = Setting(arm=Arm("1:4", 4))
    exports = ("specdec-lab export main main", "specdec-lab export 1:4 draft-1-4")
    assert elsewhere("transformers", setting).prepare == elsewhere("vllm", setting).prepare == exports
    assert speculative_config(elsewhere("vllm", setting))["model"] == "draft-1-4"
    converted = elsewhere("llama.cpp", setting).prepare
    assert converted[:2] == exports
    assert [line.split()[-1] for line in converted[2:]] == ["main.gguf", "draft-1-4.gguf"]
    for line in exports:  # they are commands of this program
        cli._parser().parse_args(shlex.split(line)[1:])
    own = elsewhere("llama.cpp", Setting(arm=Arm("bundled", 4)))
    assert len(own.prepare) == 2


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    ("arm", "says"),
    [
        (Arm("a/b", 4, 3), "candidate_count 3, branching dynamic: no token trees; one chain of 4 tokens a step"),
        (Arm("a/b", 4, adaptive_threshold=0.7), "adaptive_threshold 0.7: nothing plans each step"),
        (Arm("a/b", 4, acceptance_rule="block"), "max_retries 2: the lossless rule decides there"),
        (Arm("a/b", 4, acceptance_rule="typical"), "acceptance_rule typical ("),
        (Arm("feature", 4), "draft feature: reads this main model's hidden states"),
        (Arm("ngram+parallel", 4), "draft parallel: reads this main model's hidden states"),
        (Arm("grammar", 4), "draft grammar: "),
        (Arm("ngram+a/b", 4), "hybrid: "),
        (Arm("1:4", 4), "draft 1:4: exported with its full head"),
    ],
)
def test_what_is_lost_is_said(system: str, arm: Arm, says: str) -> None:
    made = elsewhere(system, Setting("c/d", arm))
    assert any(says in line for line in made.lost), made.lost
    assert len(made.lost) == len(set(made.lost))


@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_is_lost_of_what_it_has(system: str) -> None:
    """A chain from a model of one's own, greedy, by the lossless rule: each system has it."""
    made = elsewhere(system, Setting("m.gguf" if system == "llama.cpp" else "a/b", Arm("d.gguf", 4)))
    assert [line for line in made.lost if not line.startswith("a GGUF file")] == []
    plain = elsewhere(system, Setting("a/b", Arm("feature", 0)))
    assert [line for line in plain.lost if not line.startswith("a hub id")] == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_feature_drafts_leave_plain_decoding(system: str) -> None:
    made, plain = (elsewhere(system, Setting("a/b", Arm("feature", length))) for length in (4, 0))
    assert made.text == plain.text


def test_bad_settings() -> None:
    with pytest.raises(UnknownNameError, match=r"no system 'tgi'; there is: llama\.cpp, transformers, vllm"):
        elsewhere("tgi", Setting())
    with pytest.raises(SettingError, match="max_new_tokens = 0"):
        Setting(max_new_tokens=0)
    with pytest.raises(SettingError, match="seed = -1"):
        Setting(seed=-1)
    with pytest.raises(SettingError, match="above 0 with the rule lenience"):
        Setting(arm=Arm(acceptance_rule="lenience"))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "elsewhere",
        "vllm",
        "llama.cpp",
        "--main",
        "a/b",
        "--draft",
        "c/d",
        "--draft-length",
        "5",
        "--temperature",
    ]
    code = cli.main([*words, "0.5", "--candidate_count", "2", "--json", "--dtype", "bfloat16", "--device", "cpu"])
    out, err = capsys.readouterr()
    got = json.loads(out.splitlines()[-1])
    assert code == 0
    assert list(got) == ["vllm", "llama.cpp"]
    assert got["vllm"]["arguments"]["speculative_config"]["num_speculative_tokens"] == 5
    assert got["vllm"]["arguments"]["dtype"] == "bfloat16"
    assert "lost: candidate_count 2" in err
    assert cli.main(["elsewhere", "--profile", "fastest", "--task", "json", "--dtype", "packed_bf16"]) == 0
    out = capsys.readouterr().out
    assert out.count("prompt_lookup_num_tokens=12") == 1
    assert out.count("lost: dtype packed_bf16: float32 instead") == 3
    assert cli.main(["elsewhere", "--draft", "none"]) == 0
    assert "speculative" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tgi"], "no system 'tgi'"),
        (["--top_p", "2"], "top_p = 2.0"),
        (["--task", "json"], "task = 'json': allowed is none without --profile"),
        (["--acceptance_threshold", "0.7"], "none with the rule lossless"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    code = cli.main(["elsewhere", *words])
    out, err = capsys.readouterr()
    assert (code, out, says in err) == (2, "", True), err
