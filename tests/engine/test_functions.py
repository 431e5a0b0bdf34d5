"""Functions by name: other processes find some, and messages explain all others."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from equivtest.base.functions import is_rank, load_file, name_of
from equivtest.base.importing import load_named
from equivtest.errors import Misuse
from equivtest.programs.case import ModuleCase
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge

BLOCK = """
from torch import nn

from neighbour import SIZE


def block(width=SIZE, *, bias=True):
    return nn.Linear(3, width, bias=bias)


class Blocks:
    @staticmethod
    def narrow():
        return nn.Linear(3, 2)


def parallelized(module, mesh):
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(module, process_group=mesh.get_group())
"""


def write(folder: Path, size: int, name: str = "test_models.py") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "neighbour.py").write_text(f"SIZE = {size}\n")
    (folder / name).write_text(BLOCK)
    return folder / name


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file in the current folder, imported and forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    write(tmp_path, 4)
    return load_file("test_models.py")


def test_function_is_named_by_its_file_below_the_current_folder(models: ModuleType) -> None:
    assert name_of(models.block, "build") == "test_models.py:block"
    assert name_of(models.Blocks.narrow, "build") == "test_models.py:Blocks.narrow"


def test_function_of_an_installed_package_is_named_by_its_module() -> None:
    assert name_of(nn.Identity, "build") == "torch.nn.modules.linear:Identity"


def test_function_name_passed_as_text_is_returned_unchanged() -> None:
    assert name_of("mypackage.models:block", "build") == "mypackage.models:block"


def test_function_can_be_loaded_by_its_name(models: ModuleType) -> None:
    for function in (models.block, models.Blocks.narrow, models.parallelized):
        assert load_named(name_of(function, "build"), "build") is function


@pytest.mark.parametrize(
    ("values", "named"), [((8,), {}), ((), {"bias": False}), ((8,), {"bias": None}), (("#:(",), {})]
)
def test_partial_function_can_be_loaded_by_a_name_that_contains_its_arguments(
    models: ModuleType, values: tuple[object, ...], named: dict[str, object]
) -> None:
    name = name_of(functools.partial(models.block, *values, **named), "build")

    found = load_named(name, "build")

    assert isinstance(found, functools.partial)
    assert (found.func, found.args, found.keywords) == (models.block, values, named)


def defined_within() -> object:
    def block() -> nn.Module:
        return nn.Identity()

    return block


def typed_in() -> object:
    """A function of a notebook: its module has no file."""
    cell = ModuleType("__main__")
    exec("def block(): ...", vars(cell))
    return vars(cell)["block"]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: nn.Identity(), "build is a lambda, which has no name to send to the ranks: write `def build(...)`"),
        (
            defined_within(),
            "build 'block' is defined within 'defined_within', so ranks cannot import it: move it to the top",
        ),
        (
            functools.partial(nn.Sequential, nn.Identity()),
            "an argument of build must be a plain value, such as a number",
        ),
        (nn.Identity(), "build must be a function or a class, got a Identity: write `def build(...)` in a file"),
        (typed_in(), "build 'block' was defined in a notebook or at a prompt, and ranks can import functions from"),
        (nn.Identity().forward, "build 'Identity.forward' is a method of one object: write `def build(...)`"),
        (functools.wraps(write)(lambda: nn.Identity()), "has another object under this name, because a decorator"),
    ],
)
def test_function_that_ranks_cannot_import_is_refused_in_one_line(function: object, said: str) -> None:
    with pytest.raises(Misuse) as raised:
        name_of(function, "build")

    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_models.py", "no ':' between module and name; write package.module:NAME, or file.py:NAME"),
        ("missing.py:block", "there is no file missing.py in "),
        ("test_models.py:blok", "did you mean 'block'?"),
        ("test_models.py:block(width=[)", "must be plain values, written as in (8, bias=False)"),
    ],
)
def test_message_on_an_unknown_function_name_says_what_to_do(models: ModuleType, name: str, said: str) -> None:
    with pytest.raises(Misuse) as raised:
        load_named(name, "build")

    assert said in str(raised.value)


def test_two_files_with_one_name_are_imported_as_two_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    first, second = (load_file(str(write(tmp_path / name, 4, "test_twice.py"))) for name in ("a", "b"))

    assert first is not second
    assert first.__file__ != second.__file__


def test_file_in_a_package_is_imported_as_a_module_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "parts_of_mine").mkdir()
    (tmp_path / "parts_of_mine/__init__.py").touch()
    (tmp_path / "parts_of_mine/other.py").write_text("SIZE = 3\n")
    file = tmp_path / "parts_of_mine/test_models.py"
    file.write_text("from .other import SIZE\n")

    found = load_file(str(file))

    assert (found.__name__, found.SIZE) == ("parts_of_mine.test_models", 3)


def test_function_of_a_script_is_named_by_its_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json\nfrom equivtest.base.functions import name_of\nfrom equivtest.base.importing import load_named\n"
        "def block(): ...\nname = name_of(block, 'build')\n"
        "print(json.dumps([name, load_named(name, 'build') is block]))\n"
    )

    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, timeout=60, check=True)

    assert json.loads(done.stdout) == ["script.py:block", True]


@pytest.mark.ranks
def test_ranks_import_two_files_with_one_name_as_two_modules(tmp_path: Path, pool: Pool) -> None:
    assert not is_rank()
    for name, size in (("a", 4), ("b", 6)):
        file = write(tmp_path / name, size)
        (file.parent / "neighbour.py").rename(file.parent / f"neighbour_{name}.py")
        file.write_text(BLOCK.replace("neighbour", f"neighbour_{name}"))
        case = ModuleCase(
            world_size=2,
            build=f"{file}:block",
            parallelize=f"{file}:parallelized",
            x_shape=(2, 3),
            batch="mean of parts",
        )

        verdicts = judge("module", case, pool)

        assert {verdict.kind for verdict in verdicts} == {"holds"}
        assert case.facts.parameters["weight"].shape == (size, 3)
