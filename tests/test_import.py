"""`import specdec_lab` costs nothing, and its names load when used."""

import subprocess
import sys

import pytest

import specdec_lab


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_loads_no_heavy_package_and_takes_no_second() -> None:
    code = (
        "import sys, time; start = time.process_time(); import specdec_lab; took = time.process_time() - start; "
        "heavy = {'torch', 'transformers', 'pandas', 'matplotlib', 'numpy', 'IPython'} & set(sys.modules); "
        "print(took, sorted(heavy))"
    )
    seconds, heavy = run(code).split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 1


def test_the_core_does_without_transformers() -> None:
    """Decoding, metrics and theory know tensors; transformers comes with the first model."""
    code = (
        "import sys, specdec_lab.decoding, specdec_lab.metrics, specdec_lab.theory, specdec_lab.models.llama; "
        "print('transformers' in sys.modules)"
    )
    assert run(code).strip() == "False"


@pytest.mark.parametrize("name", specdec_lab.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(specdec_lab, name).__doc__


def test_an_unknown_name_lists_what_is_there() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Decodr'; there is: Decoder, "):
        _ = specdec_lab.Decodr
