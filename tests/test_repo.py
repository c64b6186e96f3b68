"""What the repository says about itself is true."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import backhaul

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PACKAGE = ROOT / "src" / "backhaul"


def loaded_by(code):
    """Return the modules that a fresh interpreter has loaded once it ran ``code``."""
    done = subprocess.run([sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_backhaul_imports_no_torch():
    assert "torch" not in loaded_by("import backhaul")


def test_torch_comes_with_the_first_name_that_needs_it():
    assert "torch" in loaded_by("import backhaul; backhaul.offload")


@pytest.mark.parametrize("module", ["flow", "scheduling", "simulation", "tiers.base"])
def test_a_module_of_pure_accounting_imports_no_torch(module):
    assert "torch" not in loaded_by(f"import backhaul.{module}")


def test_help_needs_no_torch():
    assert "torch" not in loaded_by("from backhaul.cli import app")


def test_every_public_name_can_be_had():
    for name in backhaul.__all__:
        assert getattr(backhaul, name) is not None
    assert set(backhaul.__all__) <= set(dir(backhaul))


def test_the_version_is_the_one_installed_and_has_a_changelog_entry():
    assert backhaul.__version__ == importlib.metadata.version("backhaul")
    assert f"## {backhaul.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_the_commands_of_the_readme():
    install, test = re.search(r'^ *(pip install -c constraints\.txt -e "\.\[dev\]") && (pytest)$', README, re.MULTILINE).groups()
    ci = (ROOT / ".ci" / "run").read_text()
    assert install.removeprefix("pip install") in ci
    assert ci.rstrip().endswith(f"\n{test}")


def test_the_readme_names_the_demo_command():
    assert re.search(r'^ *pip install -c constraints\.txt -e "\.\[cli\]" && backhaul demo$', README, re.MULTILINE)
    scripts = importlib.metadata.entry_points(group="console_scripts", name="backhaul")
    assert [script.value for script in scripts] == ["backhaul.cli:app"]


def test_torch_is_the_only_dependency_of_the_core():
    core = [requirement for requirement in importlib.metadata.requires("backhaul") if "extra ==" not in requirement]
    assert core == ["torch>=2.11"]


def test_the_tree_in_the_readme_names_every_module():
    tree = README[README.index("src/backhaul/") :]
    modules = {path.name for path in PACKAGE.rglob("*.py")} - {"__init__.py"}
    assert {name for name in modules if name not in tree} == set()


def test_a_private_torch_symbol_stands_in_one_file_alone():
    private = re.compile(r"\btorch(\.\w+)*\._[a-zA-Z]|from torch(\.\w+)* import .*\b_[a-zA-Z]|from torch(\.\w+)*\._")
    offenders = {path.name for path in PACKAGE.rglob("*.py") if private.search(path.read_text())}
    assert offenders <= {"_torch.py"}


def test_a_source_file_stays_under_500_lines():
    assert [path.name for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) >= 500] == []
