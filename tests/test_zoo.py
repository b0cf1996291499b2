"""Models by name: folders, GGUF files, the bundled family's stand-in, and what must be refused clearly."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_lab.decoding import Decoder
from specdec_lab.distill import Recipe, draft_from, save_draft
from specdec_lab.drafting import Drafter, DraftModel, NGram
from specdec_lab.errors import ModelError, SettingError, UnknownNameError
from specdec_lab.models import zoo
from specdec_lab.models.llama import LlamaModel
from specdec_lab.models.zoo import Main, drafter_fingerprint, export, load_drafter, load_main

PROMPT = "Speculative decoding drafts and verifies. Speculative"


@pytest.fixture(scope="module")
def main(tiny_folder: str) -> Main:
    return load_main(tiny_folder, device="cpu", dtype="float32")


@pytest.fixture
def broken(tiny_folder: str, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder to break."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "broken"))


def tokens(main: Main, drafter: Drafter | None = None, draft_length: int = 4) -> list[int]:
    decoder = Decoder(main.model, drafter, draft_length, main.tokenizer, eos=main.eos, chat=False)
    return decoder.generate(PROMPT, max_new_tokens=24).tokens


def write_gguf(folder: str, path: Path) -> str:
    """Write a Llama folder with the byte tokenizer as a GGUF file, in llama.cpp's names and layout.

    Rows of the embedding without a token are named [PAD259] …, as llama.cpp's converter does.
    """
    from gguf import GGUFWriter

    config, weights = json.loads((Path(folder) / "config.json").read_text()), load_file(f"{folder}/model.safetensors")
    vocabulary = json.loads((Path(folder) / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"] | {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    special = {token["id"] for token in vocabulary["added_tokens"]}
    ids |= {f"[PAD{index}]": index for index in range(len(ids), config["vocab_size"])}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(ids, key=lambda token: ids[token]))
    writer.add_token_types([3 if index in special else 1 for index in range(len(ids))])  # control or normal
    writer.add_token_scores([0.0] * len(ids))  # in the place of merges, of which a byte vocabulary has none
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in weights.items():
        array = tensor.float().numpy()
        for kind, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if kind in name:  # llama.cpp interleaves the halves that rotary positions pair
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        short = name.replace("model.layers.", "blk.")
        for theirs, ours in names.items():
            short = short.replace(theirs, ours)
        writer.add_tensor(short, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


# What loads


def test_a_folder_as_main(main: Main, tiny_folder: str) -> None:
    assert isinstance(main.model, LlamaModel)
    assert (main.name, main.eos) == (tiny_folder, (257,))
    assert (main.model.vocab_size, main.model.context_length) == (259, 512)
    assert main.model.parameters == sum(t.numel() for t in load_file(f"{tiny_folder}/model.safetensors").values())
    assert main.model.embedding_parameters == 259 * 32
    assert main.fingerprint == zoo.fingerprint(Path(tiny_folder))


def test_drafters_by_name(main: Main, tiny_draft_folder: str) -> None:
    assert type(load_drafter("none", main)) is Drafter
    assert isinstance(load_drafter("ngram", main), NGram)
    draft = load_drafter(tiny_draft_folder, main)
    assert isinstance(draft, DraftModel)
    assert tokens(main, draft) == tokens(main)


def test_several_eos_ids_come_from_the_generation_config(broken: Path) -> None:
    path = broken / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [257, 10]}))
    assert load_main(str(broken)).eos == (257, 10)


def test_fingerprints_follow_the_weights(main: Main, broken: Path, tiny_draft_folder: str) -> None:
    assert zoo.fingerprint(broken) == main.fingerprint
    (broken / "tokenizer_config.json").touch()
    assert zoo.fingerprint(broken) == main.fingerprint
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert zoo.fingerprint(broken) != main.fingerprint
    assert drafter_fingerprint("ngram") == "ngram"
    assert drafter_fingerprint(tiny_draft_folder) == zoo.fingerprint(Path(tiny_draft_folder))


def test_another_architecture_goes_through_the_adapter(gpt2_folder: str, tiny_draft_folder: str) -> None:
    main = load_main(gpt2_folder, device="cpu", dtype="float32")
    assert not isinstance(main.model, LlamaModel)
    assert tokens(main, load_drafter(tiny_draft_folder, main)) == tokens(main)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype(tiny_folder: str, tiny_draft_folder: str, dtype: str) -> None:
    main = load_main(tiny_folder, device="cpu", dtype=dtype)
    draft = load_drafter(tiny_draft_folder, main)
    assert isinstance(draft, DraftModel)
    assert str(main.model.dtype) == str(draft.model.dtype) == f"torch.{dtype}"


def test_a_gguf_file_as_main_and_as_draft(main: Main, tiny_folder: str, tiny_draft_folder: str, tmp_path: Path) -> None:
    """README's bring-your-own section: decodes as the folder it was made from."""
    big, small = write_gguf(tiny_folder, tmp_path / "big.gguf"), write_gguf(tiny_draft_folder, tmp_path / "small.gguf")
    ours = load_main(big, device="cpu", dtype="float32")
    assert ours.eos == (257,)
    assert ours.tokenizer(PROMPT)["input_ids"] == list(PROMPT.encode())
    assert tokens(ours) == tokens(main)
    draft = load_drafter(small, ours)
    assert isinstance(draft, DraftModel)
    assert tokens(ours, draft) == tokens(main)
    assert tokens(main, load_drafter(small, main)) == tokens(main)  # of either kind for either kind
    assert tokens(ours, load_drafter(tiny_draft_folder, ours)) == tokens(main)
    assert drafter_fingerprint(small) == zoo.fingerprint(Path(small))


# Vocabularies


def change_vocabulary(folder: Path, change: Callable[[dict[str, int]], None]) -> str:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer["model"]["vocab"])
    path.write_text(json.dumps(tokenizer))
    return str(folder)


def test_another_vocabulary_is_refused(main: Main, broken: Path) -> None:
    """CASES 19: the first token that differs is named."""

    def swap(vocab: dict[str, int]) -> None:
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]

    with pytest.raises(ModelError, match=r"differ in vocabulary: token 65 is 'B' .* and 'A'"):
        load_drafter(change_vocabulary(broken, swap), main)


def test_padding_alone_may_differ(main: Main, tmp_path: Path, tiny_folder: str) -> None:
    """CASES 19: the embedding of one model has 13 rows more than the tokenizers have tokens; folder and GGUF."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model.resize_token_embeddings(272)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_folder) / name, tmp_path)
    (tmp_path / "alone").mkdir()  # beside a tokenizer.json, transformers would read that one
    for name in (str(tmp_path), write_gguf(str(tmp_path), tmp_path / "alone" / "padded.gguf")):
        draft = load_drafter(name, main)
        assert isinstance(draft, DraftModel)
        assert (draft.model.vocab_size, draft.vocab_size) == (272, 259)
        assert tokens(main, draft) == tokens(main)
        padded = load_main(name, device="cpu", dtype="float32")
        assert tokens(padded, load_drafter(tiny_folder, padded)) == tokens(padded)


def test_a_token_less_is_no_padding(main: Main, broken: Path) -> None:
    """The draft has a row for id 66, but no token."""

    def remove(vocab: dict[str, int]) -> None:
        del vocab["B"]

    with pytest.raises(ModelError, match=r"differ in vocabulary: token 66 is missing there and 'B' here"):
        load_drafter(change_vocabulary(broken, remove), main)


# What is refused


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere", "/no/such/folder", "a/b/c", "1:5"])
def test_unknown_names_list_what_there_is(name: str, main: Main) -> None:
    for load in (load_main, lambda name: load_drafter(name, main), drafter_fingerprint):
        with pytest.raises(ModelError, match=rf"no model '{name}'.*bundled.*1:2, .*feature, .*ngram.*none"):
            load(name)


def test_a_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"cannot fetch 'nobody/nothing' from the hub .*give the folder"):
        load_main("nobody/nothing")


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"{tmp_path} has no config.json; it holds: nothing"):
        load_main(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match="it holds: notes.txt"):
        load_main(str(tmp_path))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", ')


def strange_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "perpetuum"}')


@pytest.mark.parametrize("damage", [truncate, no_weights, no_tokenizer, half_a_config, strange_config])
def test_damaged_folders(damage: Callable[[Path], None], broken: Path, main: Main) -> None:
    damage(broken)
    for load in (load_main, lambda name: load_drafter(name, main)):
        with pytest.raises(ModelError, match=f"cannot load a causal language model from {broken}"):
            load(str(broken))


def test_missing_tensors(broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors, the first is model\.layers\.1\.mlp\.up_proj\.weight"):
        load_main(str(broken))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float, broken: Path, main: Main) -> None:
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    for load in (load_main, lambda name: load_drafter(name, main)):
        with pytest.raises(ModelError, match=r"not finite: model\.layers\.0\.mlp\.down_proj\.weight holds NaN or inf"):
            load(str(broken))


@pytest.mark.parametrize("content", [b"", b"this is no model", b"GGUF" + bytes(60)])
def test_a_gguf_file_that_is_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"cannot load a causal language model from {path}"):
        load_main(str(path))


def test_a_truncated_gguf_file(tiny_folder: str, tmp_path: Path) -> None:
    path = Path(write_gguf(tiny_folder, tmp_path / "model.gguf"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ModelError, match=f"cannot load a causal language model from {path}"):
        load_main(str(path))


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model\.bin is a file that does not end in \.gguf"):
        load_main(str(tmp_path / "model.bin"))


def test_devices_and_dtypes_out_of_range(tiny_folder: str) -> None:
    with pytest.raises(SettingError, match="dtype = 'int4': allowed is float32, bfloat16, float16"):
        load_main(tiny_folder, device="cpu", dtype="int4")
    with pytest.raises(SettingError, match="device = 'toaster': allowed is cpu"):
        load_main(tiny_folder, device="toaster")
    if not torch.cuda.is_available():
        with pytest.raises(SettingError, match="device = 'cuda': allowed is cpu"):
            load_main(tiny_folder, device="cuda")


# The bundled family, by a stand-in


@pytest.fixture
def family(tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Main:
    """The tiny model in the bundled one's place, with a 1:3 draft made of its second layer, stored as int8."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(zoo, "fetch_bundled", lambda: Path(tiny_folder))
    monkeypatch.setattr(zoo, "DRAFTS", tmp_path / "models")
    source = AutoModelForCausalLM.from_pretrained(tiny_folder)
    recipe = Recipe(layers=(1,), width=48, rounds=((1e-3, 4096),))
    save_draft(draft_from(source, recipe), torch.arange(259), zoo.GGUF_SHA256, tmp_path / "models" / "1-3")
    return load_main("bundled", device="cpu", dtype="float32")


def test_a_bundled_draft(family: Main) -> None:
    draft = load_drafter("1:3", family)
    assert isinstance(draft, DraftModel)
    assert isinstance(draft.model, LlamaModel)
    assert draft.name == "1:3"
    assert draft.model.embedding is family.model.embedding  # type: ignore[attr-defined]
    assert draft.model.parameters < family.model.parameters
    assert tokens(family, draft) == tokens(family)
    assert len(drafter_fingerprint("1:3")) == 64


def test_a_bundled_draft_for_another_main(family: Main) -> None:
    with pytest.raises(ModelError, match="the draft 1:3 shares .* cannot draft for 'mine'; give .* or use ngram"):
        load_drafter("1:3", replace(family, name="mine", fingerprint="0"))


def test_a_bundled_draft_that_is_not_there(family: Main) -> None:
    with pytest.raises(ModelError, match=r"the draft 1:4 is not in .*; `specdec-lab distill.*1:4`"):
        load_drafter("1:4", family)


def test_an_exported_draft_assists_in_transformers(family: Main, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export("1:3", tmp_path / "draft")
    export("main", tmp_path / "main")
    big, small = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("main", "draft"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    prompt = tokenizer(PROMPT, return_tensors="pt")
    plain = big.generate(**prompt, max_new_tokens=16, do_sample=False)
    assisted = big.generate(**prompt, max_new_tokens=16, do_sample=False, assistant_model=small)
    assert assisted.tolist() == plain.tolist()
    assert plain[0, prompt["input_ids"].shape[1] :].tolist() == tokens(family)[:16]
    bundled, exported = load_drafter("1:3", family), load_drafter(str(tmp_path / "draft"), family)
    assert isinstance(bundled, DraftModel)
    assert isinstance(exported, DraftModel)
    ours, theirs = (Main("", each.model, family.tokenizer, family.eos, "") for each in (bundled, exported))
    assert tokens(ours) == tokens(theirs)


def test_export_of_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no model to export '1:9'; there is: 1:2, 1:3, 1:4, main"):
        export("1:9", tmp_path)
