"""What is public: the names of `equivtest.__all__`, each with a type, none imported before it is used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import equivtest

PUBLIC = """
Arithmetic Backend BrokenSetup CheckFailed EquivtestError Flat Inconclusive Input Judge Layout Misuse NotSupported
Partial Placed Property Replicate Result Shard Space Training Unsupported World __version__ capture capture_update
check ids mask module_property positions program real targets
"""
"""A name that goes breaks programs of users: it is listed in the changelog first."""

ROOT = Path(__file__).parents[2]


def test_dunder_all_lists_the_public_names() -> None:
    assert sorted(equivtest.__all__) == sorted(PUBLIC.split())


@pytest.mark.parametrize("name", PUBLIC.split())
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    found = getattr(equivtest, name)

    assert name == "__version__" or found.__doc__
    assert name in dir(equivtest)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'equivtest' has no attribute 'chek'"):
        equivtest.chek  # noqa: B018


def test_no_public_name_is_a_module() -> None:
    """The import system would replace the name by the module as soon as somebody imports it."""
    package = ROOT / "equivtest"

    assert not [name for name in equivtest.__all__ if (package / f"{name}.py").exists() or (package / name).exists()]


def test_file_that_mypy_checks_strictly_uses_each_public_name() -> None:
    text = (ROOT / "tests/programs/public.py").read_text("utf-8")

    assert set(re.findall(r"\beq\.(\w+)", text)) == set(equivtest.__all__)
    assert "tests/programs/public.py" in (ROOT / "pyproject.toml").read_text("utf-8")


def test_importing_equivtest_imports_no_heavy_package() -> None:
    code = "import sys, equivtest; print([name for name in ('torch', 'hypothesis', 'pytest') if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "[]\n"
