"""Runs that happened elsewhere: their capture, their verdicts, and refused folders."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._debug_mode import DebugMode

import equivtest
from equivtest.captured.format.folder import CapturedRun, parts_in
from equivtest.captured.format.tensor_file import DTYPES, LENGTH_BYTES, TensorFile, digest_of, write_tensors
from equivtest.captured.judge.evidence import unsharded
from equivtest.captured.judge.report import Judged, compare_runs, describe
from equivtest.captured.judge.run import judge_run
from equivtest.errors import Misuse
from equivtest.layout import Layout, Replicate, Shard
from equivtest.programs.case import ModuleCase
from equivtest.ranks.pool import Pool
from equivtest.tensors import Placed
from tests.commands import Command
from tests.engine.test_cli import call
from tests.programs.captured import (
    Flat,
    cancelling,
    captured,
    factor_left_in,
    factor_taken_out,
    model,
    more,
    placed,
    step,
    tied,
)

HERE = "tests.programs.captured:"
JSON, TENSORS = "rank-00000.json", "rank-00000.safetensors"


def judged(folder: Path, reference: str = HERE + "blocks") -> Judged:
    return judge_run(CapturedRun(folder), reference)


def first_wrong(of: Judged) -> str:
    return of.failed[0].judgement.mismatches[0].tensor


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured") / "run"
    captured(folder)
    return folder


def test_loss_scale_that_a_captured_job_later_divides_out_is_reported(tmp_path: Path) -> None:
    captured(tmp_path / "run", factor_taken_out)
    found = judged(tmp_path / "run")

    assert {verdict.kind for verdict in found.verdicts} == {"holds"}
    assert "  factor    4 in the backward, divided out later: grad.boundary." in describe(found)


def test_loss_scale_left_in_the_gradients_of_a_captured_job_is_rejected(tmp_path: Path) -> None:
    captured(tmp_path / "run", factor_left_in)

    assert first_wrong(judged(tmp_path / "run")) == "grad.boundary.1"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_captured_step_passes_with_its_recorded_buffers(run: Path) -> None:
    found = judged(run)

    assert {verdict.kind for verdict in found.verdicts} == {"holds"}
    assert found.coverage() == "16 of 16 boundaries judged"


def test_comparison_of_two_captured_runs_names_the_wrong_run(run: Path, tmp_path: Path) -> None:
    captured(tmp_path / "wrong", more)
    right, wrong = judged(run), judged(tmp_path / "wrong")

    assert first_wrong(wrong) == "boundary.1.down"
    assert compare_runs(right, wrong) == f"wrong: {tmp_path / 'wrong'}; every claim holds on {run}"


@pytest.mark.parametrize(
    ("part", "factor", "words", "open_"),
    [
        (1, 1.125, "boundary.1 differs from the oracle", ""),
        (0, 1.25, "equals_unsharded inconclusive: the bounds of ", ", 1 with too wide a bound"),
        (0, 1.0, "run: equals_unsharded, gradients_equal_unsharded, does_not_touch_its_inputs hold", ""),
    ],
)
def test_submodule_after_an_inconclusive_output_is_judged(
    tmp_path: Path, part: int, factor: float, words: str, open_: str
) -> None:
    module = cancelling()
    module[part].register_forward_hook(lambda _, __, given: given * factor)  # type: ignore[index]
    with equivtest.capture(module, tmp_path / "run"):
        step(module)
    text = describe(judged(tmp_path / "run", HERE + "cancelling"))

    assert words in text.splitlines()[0] + text.splitlines()[1]
    assert f"of 3 boundaries judged{open_}" in text and ("too wide" in text) == bool(open_)


@pytest.mark.ranks
@pytest.mark.parametrize(("subject", "first"), [("captured_on_ranks", ""), ("wrong_on_ranks", "boundary.0")])
def test_captured_run_of_a_tensor_parallel_module_is_judged(
    pool: Pool, run: Path, tmp_path: Path, subject: str, first: str
) -> None:
    """Halves on two ranks look like operands of a sum until a whole tensor is added."""
    folder = tmp_path / "ranks"
    case = ModuleCase(world_size=2, build=HERE + "blocks", parallelize=str(folder), x_shape=(1, 4))
    pool.run(HERE + subject, case)
    found = judged(folder)

    assert (first_wrong(found) if found.failed else "") == first
    assert first or compare_runs(judged(run), found).startswith("both runs hold: ")


@pytest.mark.ranks
def test_parameters_on_a_flattened_mesh_are_judged(pool: Pool, tmp_path: Path) -> None:
    case = ModuleCase(world_size=4, build=HERE + "blocks", parallelize=str(tmp_path / "ranks"), x_shape=(1, 4))
    pool.run(HERE + "captured_on_flattened_mesh", case)
    found = judged(tmp_path / "ranks")

    assert {verdict.kind for verdict in found.verdicts} == {"holds"}
    assert {"grad.0.up.weight", "grad.1.down.bias"} <= {*found.verdicts[1].judgement.agreeing}


def test_captured_submodules_within_wrappers_keep_their_names(tmp_path: Path) -> None:
    module = model()
    module[1] = nn.DataParallel(module[1])  # type: ignore[operator]
    with equivtest.capture(module, tmp_path / "run"):
        step(module)
    found = judged(tmp_path / "run")

    assert {verdict.kind for verdict in found.verdicts} == {"holds"}
    assert found.coverage() == "16 of 16 boundaries judged"


def test_error_for_a_captured_wrapper_names_the_submodule_to_capture(tmp_path: Path) -> None:
    module = nn.Sequential(nn.DataParallel(model()))
    with equivtest.capture(module, tmp_path / "run"):
        step(module)

    with pytest.raises(Misuse, match=r"it has no parameter .*, but 0\.0\.down\.bias: capture .*capture\(module\.0, "):
        judged(tmp_path / "run")


def test_run_captured_under_autocast_is_judged_under_autocast(tmp_path: Path) -> None:
    for name, spoil in (("right", lambda module: None), ("wrong", more)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            captured(tmp_path / name, spoil)
    right, wrong = judged(tmp_path / "right"), judged(tmp_path / "wrong")

    assert {verdict.kind for verdict in right.verdicts} == {"holds"}
    assert right.evidence.expected.tensors["boundary.1.down"].dtype == "bfloat16"
    assert first_wrong(wrong) == "boundary.1.down"


def test_autocast_of_another_device_is_refused(copy: Path) -> None:
    path = copy / JSON
    path.write_text(path.read_text().replace('"autocast": ""', '"autocast": "cuda:bfloat16"'))

    with pytest.raises(Misuse, match="under autocast cuda:bfloat16, which converts other operations"):
        judged(copy)


def test_capturing_changes_no_bit_of_the_step(tmp_path: Path) -> None:
    alone = model()
    step(alone)
    gradients = [each.grad for each in captured(tmp_path / "run").parameters()]

    assert all(torch.equal(one.grad, other) for one, other in zip(alone.parameters(), gradients, strict=True))  # type: ignore[arg-type]


class Sending(nn.Module):
    """Sends buffers to all ranks before each forward, as DistributedDataParallel does; here they become 0.25."""

    def __init__(self) -> None:
        super().__init__()
        self.module = model()

    def forward(self, input: torch.Tensor) -> Any:
        for buffer in self.module.buffers():
            buffer.fill_(0.25)
        return self.module(input)


def test_buffers_are_captured_after_the_wrapper_broadcast_their_values(tmp_path: Path) -> None:
    module = Sending()
    with equivtest.capture(module, tmp_path / "run"):
        step(module)

    assert not judged(tmp_path / "run").failed


def test_capture_reports_inputs_or_parameters_that_the_forward_changed(tmp_path: Path) -> None:
    module = model()
    x = torch.ones(3, 4)

    def change(*_: object) -> None:
        x.data.zero_()
        module.get_parameter("1.down.bias").data.zero_()

    module.register_forward_hook(change)
    with equivtest.capture(module, tmp_path / "run"):
        module(x).sum().backward()
    found = judged(tmp_path / "run")

    assert found.failed[-1].claim == "does_not_touch_its_inputs"
    assert [each.tensor for each in found.failed[-1].judgement.mismatches] == ["given.input", "param.1.down.bias"]


def test_error_for_shards_that_form_no_whole_tensor_lists_them_by_rank(run: Path) -> None:
    rows, whole = Layout((Shard(0),)), Layout((Replicate(),))
    held = {
        0: {"param.bias": Placed(torch.ones(2), rows)},
        1: {"param.bias": Placed(torch.ones(4).double(), whole)},
        2: {},
    }

    with pytest.raises(Misuse) as raised:
        unsharded(CapturedRun(run), held, "param.bias", (4,), "parameter bias")
    parts = "rank 0 (2,) float32 shard(0), rank 1 (4,) float64 replicate, rank 2 has none"
    assert str(raised.value).endswith(
        f"the ranks' parts of parameter bias do not make up a tensor of shape (4,): {parts}"
    )


def test_captured_submodules_keep_their_names(run: Path, tmp_path: Path) -> None:
    captured(tmp_path / "run", boundaries=("1", "1.up"))
    names, few = ({*CapturedRun(each).ranks[0]} for each in (run, tmp_path / "run"))

    assert {name for name in few if "boundary" in name} == {
        f"{grad}boundary.{name}" for grad in ("", "grad.") for name in ("0", "1", "1.up")
    }
    assert few < names and not judged(tmp_path / "run").failed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit_bytes": 100}, "would write .* KiB, but the limit is 100 B: name fewer submodules"),
        ({"batch": "parts"}, "batch must be one of whole, mean of parts, sum of parts or None"),
        ({"batch_axis": "dp"}, "batch_axis must be one of axes none"),
    ],
)
def test_refused_capture_writes_no_file(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(Misuse, match=words):
        captured(tmp_path / "run", **options)

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda module: None, "called 0 times"),
        (lambda module: module(torch.ones(1, 4), 2.0), "called with shift='2.0'"),
    ],
)
def test_capture_without_a_forward_or_with_a_non_tensor_input_is_refused(
    tmp_path: Path, body: Callable[[Any], object], words: str
) -> None:
    module = model()[0]  # type: ignore[index]
    with pytest.raises(Misuse, match=words), equivtest.capture(module, tmp_path / "run"):
        body(module)


def test_capture_into_a_used_folder_or_with_old_gradients_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="exists already: capture into an empty folder"):
        captured(run)
    with pytest.raises(Misuse, match=r"0.up.weight has a gradient from before"):
        captured(tmp_path / "run", step)


def edited(folder: Path, change: Callable[[dict[str, Any]], object], name: str = JSON) -> None:
    data = json.loads((folder / name).read_bytes())
    change(data)
    (folder / name).write_text(json.dumps(data))


def header_edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = (folder / TENSORS).read_bytes()
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    header = json.loads(data[LENGTH_BYTES : LENGTH_BYTES + length])
    change(header)
    text = json.dumps(header).encode().ljust(length)
    (folder / TENSORS).write_bytes(len(text).to_bytes(LENGTH_BYTES, "little") + text + data[LENGTH_BYTES + length :])
    edited(folder, lambda told: told.update(size_bytes=(folder / TENSORS).stat().st_size))


def second_rank(folder: Path, **fields: object) -> None:
    """Another rank's files, made of the first's."""
    for name in (JSON, TENSORS):
        shutil.copy(folder / name, folder / name.replace("00000", "00001"))
    edited(folder, lambda told: told.update(world_size=2, mesh=[2]))
    edited(
        folder, lambda told: told.update({"world_size": 2, "mesh": [2], "rank": 1, **fields}), JSON.replace("0.", "1.")
    )


class Evil:
    """Runs code in a process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def flipped(folder: Path) -> None:
    data = bytearray((folder / TENSORS).read_bytes())
    data[-1] ^= 1
    (folder / TENSORS).write_bytes(data)


def linked(folder: Path) -> None:
    (folder / TENSORS).rename(folder / "elsewhere")
    (folder / TENSORS).symlink_to("elsewhere")


def cut(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])


def says(**fields: object) -> Callable[[Path], None]:
    """Changes fields of the manifest."""
    return lambda folder: edited(folder, lambda told: told.update(fields))


def header_says(name: str, **fields: object) -> Callable[[Path], None]:
    """Changes fields of one tensor in the header of the tensors."""
    return lambda folder: header_edited(folder, lambda header: header[name].update(fields))


def holds(data: bytes, name: str = JSON) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def gap(folder: Path) -> None:
    second_rank(folder)
    without(JSON, TENSORS)(folder)


def piped(folder: Path) -> None:
    (folder / JSON).unlink()
    os.mkfifo(folder / JSON)


def laid_out(folder: Path) -> None:
    edited(folder, lambda told: told["tensors"]["output"].update(layout=["shard(7)"]))


def renamed(folder: Path) -> None:
    header_edited(folder, lambda header: header.update(other=header.pop("output")))


def shared(folder: Path) -> None:
    header_edited(folder, lambda header: header.update(output=header["given.input"]))


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "cannot be read as a folder"),
    "empty": (without(JSON, TENSORS), "holds no captured run"),
    "one file alone": (without(TENSORS), "rank-00000.safetensors is missing"),
    "a missing rank": (says(world_size=2, mesh=[2]), "has files of 1 ranks, but the run had 2"),
    "a gap": (gap, "rank-00000.json is missing"),
    "two runs": (lambda folder: second_rank(folder, run="f" * 32), "has files of two runs"),
    "a renamed rank": (
        lambda folder: second_rank(folder, rank=0),
        "belongs to rank 0: the files of ranks were renamed",
    ),
    "a touched unknown": (
        lambda folder: edited(folder, lambda told: told.update(touched=["x"])),
        "that 'x' was changed",
    ),
    "other words": (lambda folder: second_rank(folder, batch="sum of parts"), "recorded different batch"),
    "a huge world": (says(world_size=2**62), "has a size outside of 0.."),
    "a newer version": (says(version=4), "of version 4, but this equivtest reads"),
    "another kind": (says(kind="x"), "is a 'x' of version 3"),
    "an unknown field": (says(path="/etc"), "unknown field `path`"),
    "an unknown batch": (says(batch="x"), "batch must be one of"),
    "a pickle for a manifest": (holds(pickle.dumps(Evil())), "is not the manifest of a captured run"),
    "a deep manifest": (holds(b"[" * 10**5), "is not the manifest of a captured run"),
    "a cut manifest": (lambda folder: cut(folder, JSON), "is cut off"),
    "escapes": (says(inputs=["\x1b[2J"]), r"has the name '\\x1b\[2J': a name must be printable"),
    "no run id": (says(run="../.."), "32 hexadecimal digits"),
    "a layout of nothing": (laid_out, "has 2 dims, which do not fit the layout shard"),
    "a pickle for tensors": (holds(pickle.dumps(Evil()), TENSORS), "is not a complete safetensors file"),
    "cut tensors": (lambda folder: cut(folder, TENSORS), "is not a complete safetensors file"),
    "a link": (linked, "is a link, which is never followed"),
    "a pipe": (piped, "is not a regular file"),
    "a huge shape": (header_says("output", shape=[2**40, 2**40]), "overflow computing buffer size"),
    "a negative size": (header_says("output", shape=[-3, -4]), "expected usize"),
    "an unknown dtype": (header_says("output", dtype="F8"), "unknown variant `F8`"),
    "a dtype of no run": (header_says("output", dtype="U32"), "is of dtype 'U32': a captured run may hold F64, F32"),
    "shared bytes": (shared, "invalid offset for tensor"),
    "tensors of others": (renamed, "only one of the two has 'other'"),
    "other bytes": (flipped, "other bytes than its rank wrote"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_invalid_folder_of_a_captured_run_is_refused_with_a_reason(copy: Path, what: str) -> None:
    spoil, words = HOSTILE[what]
    spoil(copy)
    with pytest.raises(Misuse, match=words):
        judged(copy)

    assert not Path("ran").exists()


def sglang_dump(path: Path) -> None:
    """Writes a dump as SGLang's dumper does: a folder with one pickle per value, whose name lists its tags.

    Source: sglang/python/sglang/srt/debug_utils/dumper.py, _Dumper._dump_single (commit 00d35548).
    """
    path.mkdir()
    for rank in range(2):
        name = f"step=0___rank={rank}___dump_index=1___name=hidden_states___recompute_status=disabled___layer_id=0.pt"
        torch.save({"value": torch.ones(2, 3), "meta": {"world_rank": rank, "dims": "t h[tp]"}}, path / name)


def debug_mode_log(path: Path) -> None:
    with DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes(hash_inputs=True):
        nn.Linear(3, 2)(torch.ones(4, 3)).sum().backward()
    path.write_text(mode.debug_string())


def debug_mode_logs(path: Path) -> None:
    path.mkdir()
    debug_mode_log(path / "rank-0.txt")


def debug_mode_log_of_functions(path: Path) -> None:
    with DebugMode(record_torchfunction=True, record_ids=True, record_stack_trace=True) as mode:
        torch.nn.functional.softmax(torch.ones(2, 3), dim=0)
    path.write_text(mode.debug_string())


SGLANG, DEBUG_MODE = (
    "a dump of SGLang's dumper \\(step=0___.*pickles",
    "a log of torch's DebugMode: .*no values to judge",
)


def test_missing_path_with_the_name_of_a_dump_is_not_called_a_dump(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="cannot be read as a folder: No such file"):
        CapturedRun(tmp_path / "name=x___dump_index=1.pt")


@pytest.mark.parametrize("is_other", [False, True], ids=["run", "other run"])
@pytest.mark.parametrize(
    ("write", "words"),
    [
        (sglang_dump, SGLANG),
        (debug_mode_log, DEBUG_MODE),
        (debug_mode_logs, DEBUG_MODE),
        (debug_mode_log_of_functions, DEBUG_MODE),
    ],
)
def test_judging_a_dump_of_another_tool_says_in_one_line_what_it_lacks(
    copy: Path,
    tmp_path: Path,
    write: Callable[[Path], None],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_other: bool,
) -> None:
    dump = tmp_path / "dump"
    write(dump)
    folders = [str(copy)] * is_other + [str(dump)]

    assert call(monkeypatch, "judge", *folders, "--reference", HERE + "blocks") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(words, line) and "put equivtest.capture(model, FOLDER) around the step" in line


def test_file_of_no_known_tool_is_refused_as_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "name=notes.pt"
    path.write_text("aten::mm is slow: t: f32[2, 3]")

    with pytest.raises(Misuse, match="cannot be read as a folder"):
        parts_in(path)


def test_declared_batch_decides_which_captured_gradients_are_right(copy: Path) -> None:
    """Both ranks recorded equal values and the whole gradients of the parameters, which are no means of two parts."""
    second_rank(copy)
    assert not judged(copy).failed
    for name in (JSON, JSON.replace("0.", "1.")):
        edited(copy, lambda told: told.update(batch="sum of parts"), name)

    assert first_wrong(judged(copy)) == "grad.0.up.weight"


def test_judging_a_captured_run_with_a_wrong_or_missing_model_is_refused(run: Path) -> None:
    with pytest.raises(Misuse, match=r"another model than .*others: it has no parameter 1.bias"):
        judged(run, HERE + "others")
    with pytest.raises(Misuse, match="cannot be imported"):
        judged(run, "tests.nowhere:blocks")


def test_submodules_captured_separately_are_judged_separately(tmp_path: Path, command: Command) -> None:
    captured(tmp_path / "run", more, alone=("?",))
    ended = command(tmp_path, "judge", "run", "--reference", HERE + "blocks")

    assert ended.code == 1 and ended.stdout.splitlines()[-1] == "run: 1 of 2 parts hold, 1 are wrong, 0 not judged"
    assert "run/0: equals_unsharded, gradients_equal_unsharded" in ended.stdout
    assert "ValueMismatch: run/1: boundary.down differs" in ended.stdout


def test_user_function_locates_a_parameter_within_a_flat_tensor(tmp_path: Path) -> None:
    module, shapes = Flat(), {"weight": (4, 4), "bias": (4,)}
    with equivtest.capture(module, tmp_path / "run", placed=placed, shapes=shapes):
        step(module)
    found = judged(tmp_path / "run", HERE + "single")

    assert {verdict.kind for verdict in found.verdicts} == {"holds"}
    assert {"grad.weight", "grad.bias"} <= {*found.verdicts[1].judgement.agreeing}


def test_capturing_only_a_submodule_that_shares_a_parameter_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(Misuse, match=r"submodule 1 shares parameter 0.up.weight with another one"),
        equivtest.capture(tied(), tmp_path / "run", alone=["1"]),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "batch", "words"),
    [
        ("given.input", "whole", "ranks 0 and 1 got different values of input input, but with batch='whole'"),
        ("before.0.scale", "mean of parts", "ranks 0 and 1 have different values of buffer 0.scale, which the forward"),
    ],
)
def test_captured_ranks_that_began_with_unequal_values_are_refused(
    copy: Path, name: str, batch: str, words: str
) -> None:
    second_rank(copy)
    second = copy / TENSORS.replace("0.", "1.")
    file = TensorFile(second)
    tensors = {each: file.read(each) for each in file.entries}
    tensors[name].reshape(-1)[0] += 1
    write_tensors(second, tensors)
    digest = digest_of(tensors[name])
    edited(copy, lambda told: told["tensors"][name].update(sha256=digest), JSON.replace("0.", "1."))
    for each in (JSON, JSON.replace("0.", "1.")):
        edited(copy, lambda told: told.update(batch=batch), each)

    with pytest.raises(Misuse, match=words):
        judged(copy)


def test_tensor_file_keeps_every_dtype(tmp_path: Path) -> None:
    tensors = {name: torch.tensor([[1, 0], [0, 1]]).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"none": torch.empty(0, 3), "number": torch.tensor(2.5)}
    size_bytes = write_tensors(tmp_path / "file", tensors)
    read = TensorFile(tmp_path / "file")

    assert size_bytes == (tmp_path / "file").stat().st_size
    assert all(torch.equal(read.read(name), tensor) for name, tensor in tensors.items())


def test_judge_command_exits_with_0_for_right_and_1_for_wrong_runs(
    run: Path, copy: Path, tmp_path: Path, command: Command
) -> None:
    captured(tmp_path / "wrong", more)
    reference = ["--reference", HERE + "blocks"]
    green, red = (command(tmp_path, "judge", str(each), *reference) for each in (run, tmp_path / "wrong"))
    two = command(tmp_path, "judge", str(run), str(tmp_path / "wrong"), *reference)
    refused = command(tmp_path, "judge", str(tmp_path / "nowhere"), *reference)

    assert (green.code, red.code, two.code, refused.code) == (0, 1, 1, 2)
    assert red.stdout.startswith(f"ValueMismatch: {tmp_path / 'wrong'}: boundary.1.down differs from the oracle\n")
    assert "Traceback" not in refused.stderr and refused.stderr.count("\n") == 1
