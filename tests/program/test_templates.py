"""Files that `equivtest init` writes: each test file is green, and each job runs an existing command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from equivtest.base.functions import load_file
from equivtest.cli import app
from equivtest.errors import Misuse
from equivtest.programs import checking
from equivtest.ranks.pool import Pool
from equivtest.templates import JOBS, KINDS, write_files


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_property_that_the_init_command_writes_passes(
    kind: str, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(checking._pools, pool.backend, pool)
    file, *_ = write_files(tmp_path, kind)
    module = load_file(str(file))

    # In float64, because a constant that a template makes in float32 is too narrow there.
    result = vars(module)[file.stem].check(world_sizes=(2,), dtypes=("float64",), audit=False, raises=True)

    assert result.ok


@pytest.mark.parametrize("path", JOBS.values())
def test_ci_job_that_the_init_command_writes_runs_the_test_file(path: str, tmp_path: Path) -> None:
    write_files(tmp_path, "step")
    group: Any = typer.main.get_command(app)

    (command,) = re.findall(r"- (?:run: )?equivtest (run .*)", (tmp_path / path).read_text("utf-8"))

    name, *arguments = shlex.split(command)
    parsed = group.commands[name].make_context(name, arguments)
    assert parsed.params["paths"] == [Path("test_step.py")]
    assert parsed.params["report"] == "report"


@pytest.mark.parametrize("path", JOBS.values())
def test_ci_job_for_a_backend_runs_on_its_manifest(path: str, tmp_path: Path) -> None:
    typer.main.get_command(app).main(["init", str(tmp_path), "--kind", "backend"], standalone_mode=False)

    job = (tmp_path / path).read_text("utf-8")

    assert (tmp_path / "equivtest.toml").is_file()
    assert "equivtest run test_backend.py --manifest equivtest.toml --report report\n" in job


def test_init_command_never_overwrites_a_file(tmp_path: Path) -> None:
    (tmp_path / "test_step.py").write_text("mine")

    with pytest.raises(Misuse, match=r"test_step\.py exists: move it, or start in another folder; nothing was written"):
        write_files(tmp_path, "step")

    assert [path.name for path in tmp_path.iterdir()] == ["test_step.py"]
    assert (tmp_path / "test_step.py").read_text() == "mine"


def test_error_for_a_misspelt_kind_of_template_suggests_the_right_name(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"--kind: there is no 'tensor_parallel': did you mean 'tensor-parallel'\?"):
        write_files(tmp_path, "tensor_parallel")
