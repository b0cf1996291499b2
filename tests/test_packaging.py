"""The files around the package agree with each other and with what the package imports."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PIN = re.compile(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*")

# Needed at run time without an import of ours: kernels, front ends, back ends of what we do import.
NOT_IMPORTED = {
    "accelerate": "transformers loads GGUF files through it",
    "gguf": "transformers parses GGUF files with it",
    "ipykernel": "runs the notebooks",
    "ipywidgets": "progress bars and sliders in notebooks",
    "jupyterlab": "`make lab`",
    "mypy": "`make types`",
    "nbstripout": "`make lint`",
    "ruff": "`make lint`",
}
# Other projects' machines: nothing here may depend on where packages are downloaded from.
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"),
        ("conda", "anaconda", "org"),
        ("deb", "debian", "org"),
    )
]


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def tracked(*patterns: str) -> list[Path]:
    """Files in git's index that exist; the test is skipped in a copy without git."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def imports(folder: Path) -> Iterator[str]:
    """Top-level names of the modules that the Python files in `folder` import, wherever in the file."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.partition(".")[0]


def distributions(modules: set[str]) -> set[str]:
    """Names of the installed distributions that provide `modules`, this project and its tests left out."""
    providers = metadata.packages_distributions()
    own = {"specdec_lab", *(path.stem for path in (ROOT / "tests").rglob("*.py"))} | sys.stdlib_module_names
    return {canonicalize_name(providers.get(name, [name])[0]) for name in modules - own}


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_environment_yml_repeats_the_dependencies() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert [line.split()[0] for line in conda] == ["python", "pip"]
    assert conda[0] == f"python {PROJECT['requires-python']}"
    assert pip == {"pip": PROJECT["dependencies"]}


def test_constraints_pin_every_requirement() -> None:
    text = (ROOT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not PIN.fullmatch(line)] == [], "only name==version, from anywhere"
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(pinned) == len(lines), "a name is pinned twice"
    for requirement in map(Requirement, chain(PROJECT["dependencies"], *EXTRAS.values())):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned"
        assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"


def test_core_dependencies_are_the_imported_ones() -> None:
    declared = names(PROJECT["dependencies"])
    optional = names([line for extra in EXTRAS.keys() - {"dev"} for line in EXTRAS[extra]])
    used = distributions(set(imports(ROOT / "specdec_lab")))
    assert used - declared - optional == set(), "imported by the package, missing in pyproject.toml"
    assert declared - used - NOT_IMPORTED.keys() == set(), "in pyproject.toml, imported nowhere"


def test_dev_extra_is_what_the_tests_import() -> None:
    core, dev = names(PROJECT["dependencies"]), names(EXTRAS["dev"])
    used = distributions(set(imports(ROOT / "tests")))
    assert used - core - dev == set(), "imported by the tests, missing in the dev extra"
    assert dev - used - NOT_IMPORTED.keys() == set(), "in the dev extra, used nowhere"


def test_extras_named_in_errors_exist() -> None:
    named = {
        extra
        for path in (ROOT / "specdec_lab").rglob("*.py")
        for extra in re.findall(r"specdec[-_]lab\[(\w+)\]", path.read_text())
    }
    assert named <= EXTRAS.keys()


def test_makefile_has_the_documented_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {
        "setup",
        "model",
        "sweep",
        "grid",
        "lab",
        "app",
        "test",
        "bench",
        "verify",
        "lint",
        "types",
        "clean",
    } <= targets


def test_nothing_tracked_names_this_machine_or_a_registry() -> None:
    forbidden = [*REGISTRY_HOSTS, f"{ROOT}/", f"{Path.home()}/", f"{sys.base_prefix}/"]
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in tracked()
        for text in forbidden
        if text.encode() in path.read_bytes()
    ]
    assert found == []


def test_notebooks_carry_no_output() -> None:
    notebooks = tracked("notebooks/*.ipynb")
    if not notebooks:
        pytest.skip("no notebook is tracked")
    command = [sys.executable, "-m", "nbstripout", "--verify", *map(str, notebooks)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", ["specdec_lab", "specdec_lab.cli"])
def test_import_is_light(module: str) -> None:
    """torch, transformers and the plotting stack load when a model or a figure is asked for, not before."""
    loaded = run_python(f"import sys, {module}; print(*sys.modules)").split()
    assert {"torch", "transformers", "matplotlib", "seaborn", "IPython"} & set(loaded) == set()
