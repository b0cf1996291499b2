"""What tests share: quiet offline libraries, tiny random models with a byte tokenizer, the bundled model.

The tiny models are written as ordinary Hugging Face folders, so that tests go through the same loading code
as a user's own model. They are seeded: the same weights on every run.
"""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from specdec_lab.models.llama import LlamaModel
    from specdec_lab.models.zoo import Main

# All of these act only when set before torch, matplotlib or transformers are imported.
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if threads := os.environ.get("SPECDEC_TEST_THREADS"):
    os.environ["OMP_NUM_THREADS"] = threads

pytest_plugins = ["driving"]  # of tests/browser

BOS, EOS, PAD = 256, 257, 258
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chromium() -> str | None:
    """Path of an installed Chromium, or None. The variable CHROMIUM overrides the search."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def browser_required() -> bool:
    return os.environ.get("SPECDEC_REQUIRE_BROWSER", "") not in ("", "0")


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the users of `bundled`; skip browser tests without Chromium unless SPECDEC_REQUIRE_BROWSER=1."""
    for item in items:
        if "bundled" in getattr(item, "fixturenames", ()):
            item.add_marker("pair")
    if chromium() or browser_required():
        return
    skip = pytest.mark.skip(reason="no Chromium on PATH (Debian: apt-get install chromium)")
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say in capitals what a green line would hide: browser or model tests that did not run."""
    skipped = terminalreporter.stats.get("skipped", [])
    for marker, what in (("browser", "BROWSER TESTS SKIPPED"), ("pair", "BUNDLED-MODEL TESTS SKIPPED")):
        missed = [report for report in skipped if marker in report.keywords]
        if missed:
            reason = str(missed[0].longrepr[-1]).removeprefix("Skipped: ")
            terminalreporter.write_sep("!", f"{what}: {len(missed)} ({reason})", red=True, bold=True)


def byte_alphabet() -> list[str]:
    """The character that stands for each byte 0 … 255 in byte-level BPE (the table GPT-2 introduced)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def make_byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Byte-level tokenizer without merges: id = byte value, then <s> 256, </s> 257, <pad> 258."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({char: byte for byte, char in enumerate(byte_alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_model(config: Any, folder: Path, seed: int) -> str:
    """Write a random model of `config` with the byte tokenizer to `folder`; returns the folder as str."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    return str(folder)


# Ten times the usual width of initial weights, so that greedy output varies with its prompt.
INITIALIZER_RANGE = 0.2


def llama_config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def random_llama(seed: int, layers: int, vocab_size: int = 8, context: int = 64) -> "LlamaModel":
    """A random model on the lean decoder, small enough to enumerate what it says."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from specdec_lab.models.llama import LlamaModel

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=context,
        initializer_range=0.4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    return LlamaModel(model.config, model.state_dict(), f"random-{seed}")


def noisy_copy(folder: str, out: Path) -> str:
    """Write the model in `folder` to `out` with noise on its weights: it agrees with itself now and then."""
    import torch

    from specdec_lab.models import zoo

    model, tokenizer = zoo.read(Path(folder))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=rng)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return str(out)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """The installed Chromium; fails where it is missing, which only SPECDEC_REQUIRE_BROWSER=1 lets happen."""
    path = chromium()
    assert path, "SPECDEC_REQUIRE_BROWSER is set, but there is no Chromium on PATH"
    return path


@pytest.fixture(scope="session")
def bundled() -> "Main":
    """The bundled main model on the CPU in fp32; skipped where it cannot be fetched, failed so in CI."""
    from specdec_lab.errors import ModelError
    from specdec_lab.models import zoo

    try:
        zoo.fetch_bundled()
    except ModelError as error:
        if in_ci():
            raise
        pytest.skip(str(error))
    return zoo.load_main(zoo.BUNDLED, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def byte_tokenizer() -> "PreTrainedTokenizerFast":
    return make_byte_tokenizer()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random Llama, 2 layers, hidden 32, 4 heads over 2 K/V heads, context 512, vocabulary 259."""
    return save_model(llama_config(layers=2), tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def tiny_draft_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As `tiny_folder` with 1 layer and other weights; the same tokenizer."""
    return save_model(llama_config(layers=1), tmp_path_factory.mktemp("tiny_draft"), seed=1)


@pytest.fixture(scope="session")
def noisy_folder(tiny_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """As `tiny_folder` with noise on its weights: a draft that is right now and then."""
    return noisy_copy(tiny_folder, tmp_path_factory.mktemp("noisy"))


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random GPT-2, 2 layers, hidden 32, 4 heads, context 512, vocabulary 259."""
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=259,
        n_positions=512,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return save_model(config, tmp_path_factory.mktemp("gpt2"), seed=2)
