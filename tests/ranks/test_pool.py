"""Rank processes: answered, raised, lost, silent; and nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from equivtest.base import limits
from equivtest.base.users_code import digest_of
from equivtest.errors import BrokenSetup, Misuse
from equivtest.pytest_plugin import pools
from equivtest.ranks import scratch
from equivtest.ranks.backend import Backend
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.launch import USERS
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.ranks.scratch import Scratch, scratch_directories, scratch_roots, sweep
from tests.programs import tiny
from tests.programs.tiny import PlainCase

pytestmark = pytest.mark.ranks
VISIT = "tests.programs.tiny:visit"
THREADS = "tests.programs.threads:visit"
BY_FAKE_MODE = "EQUIVTEST_TEST_BY_FAKE_MODE"
AS_CARD = "EQUIVTEST_TEST_AS_CARD"
USED = "EQUIVTEST_TEST_USED"
TWO = PlainCase(world_size=2)
HERE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(visit=VISIT) as pool:
        yield pool


def outcomes(replies: list[Reply]) -> list[str]:
    return [reply.outcome for reply in replies]


def pids(pool: Pool, world_size: int = 2) -> list[float]:
    """The process ids of the living world, as its ranks say."""
    replies = pool.run("trivial", PlainCase(world_size=world_size))
    return [reply.answers[0].tensors["output"].local.item() for reply in replies]


def blamed(replies: list[Reply]) -> Reply:
    cause = first_cause(replies)
    assert cause is not None
    return cause


def scratch_of(pid: int) -> list[Path]:
    return [path for path in scratch_directories() if path.name.startswith(f"equivtest-{pid}-")]


def become_true(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_replies(pool: Pool, world_size: int) -> None:
    replies = pool.run("counts", PlainCase(world_size=world_size))
    assert [reply.rank for reply in replies] == list(range(world_size))
    assert [reply.answers[0].tensors["output"].local.item() for reply in replies] == [world_size] * world_size
    assert all(0 < reply.busy_s < 60 and reply.at_s <= time.monotonic() for reply in replies)


def test_ranks_of_a_world_are_reused(pool: Pool) -> None:
    assert pids(pool) == pids(pool)


def test_pool_has_a_digest_of_each_file_that_only_ranks_import(pool: Pool) -> None:
    late = HERE / "tests/programs/late.py"
    pool.run("trivial", TWO)
    before = dict(pool.code)
    pool.run("imports_late", TWO)

    assert "tests.programs.late" not in sys.modules
    assert pool.code.keys() - before.keys() == {str(late)}
    assert pool.code[str(late)] == digest_of(str(late))


def test_files_that_the_server_imported_before_it_forked_count_as_imported_by_ranks(pool: Pool) -> None:
    pool.run("trivial", TWO)

    assert tiny.__file__ in pool.code


@pytest.mark.parametrize("subject", ["raises_alone", "raises_late"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_reply_names_the_rank_that_raised(pool: Pool, subject: str, culprit: int) -> None:
    pool.run("counts", PlainCase(world_size=3))  # ranks start
    begun_s = time.monotonic()
    cause = blamed(pool.run(subject, PlainCase(world_size=3, culprit=culprit)))
    assert time.monotonic() - begun_s < limits.CASE_S / 2  # no rank waits for the time limit
    assert (cause.rank, cause.outcome, cause.error_type) == (culprit, "raised", "ValueError")
    assert "the culprit's own words" in cause.error_text and "in raises_alone" in cause.detail
    assert outcomes(pool.run("counts", PlainCase(world_size=3))) == ["answered"] * 3


@pytest.mark.parametrize(
    ("subject", "ending"),
    [
        ("killed", "killed by SIGKILL"),
        ("exits_0", "exited with code 0"),
        ("exits_3", "exited with code 3"),
        ("crashes", "killed by SIGSEGV"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_reply_names_the_rank_whose_process_ended(pool: Pool, subject: str, ending: str, culprit: int) -> None:
    cause = blamed(pool.run(subject, PlainCase(world_size=2, culprit=culprit)))
    assert (cause.rank, cause.outcome, cause.error_text) == (culprit, "lost", ending)
    assert outcomes(pool.run("counts", TWO)) == ["answered"] * 2


def test_reply_names_the_line_that_raised_system_exit(pool: Pool) -> None:
    cause = blamed(pool.run("raises_system_exit", TWO))
    assert (cause.outcome, cause.error_type, cause.error_text) == ("raised", "SystemExit", "3")
    assert "in raises_system_exit" in cause.detail


def test_message_on_a_lost_rank_has_its_output_and_stack(pool: Pool) -> None:
    assert "last words" in blamed(pool.run("exits_3", TWO)).detail
    assert "in crashes" in blamed(pool.run("crashes", TWO)).detail


@pytest.mark.parametrize(
    ("subject", "culprit", "silent"), [("hangs_in_python", 0, [0, 1]), ("hangs_in_collective", 0, [1])]
)
def test_message_has_the_stacks_of_ranks_that_do_not_answer(
    pool: Pool, subject: str, culprit: int, silent: list[int]
) -> None:
    replies = pool.run(subject, PlainCase(world_size=2, culprit=culprit), limit_s=0.5)
    assert [reply.rank for reply in replies if reply.outcome == "timed_out"] == silent
    for rank in silent:
        assert f"in {subject}" in replies[rank].detail and "_watch" not in replies[rank].detail
    assert "no answer within 0.5 s" in blamed(replies).error_text
    assert outcomes(pool.run("counts", TWO)) == ["answered"] * 2


def test_ranks_that_share_the_cores_have_more_time_for_a_visit(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equivtest.base.limits.MANY_RANKS", 1)
    replies = pool.run("hangs_in_python", PlainCase(world_size=2, culprit=0), limit_s=0.25)

    assert "no answer within 0.5 s" in blamed(replies).error_text


def test_rank_that_loops_outside_of_the_collective_is_blamed_for_a_hang(pool: Pool) -> None:
    assert blamed(pool.run("hangs_in_python", PlainCase(world_size=2, culprit=1), limit_s=0.5)).rank == 1


@pytest.mark.parametrize(
    ("subject", "error_type", "text"),
    [
        ("raises_unspeakably", "Unspeakable", "(its __str__ raised RuntimeError)"),
        ("raises_surrogates", "ValueError", "no text: \\udc80"),
        ("no_such_subject", "KeyError", "'no_such_subject'"),
    ],
)
def test_exception_that_cannot_be_printed_or_pickled_is_sent_as_text(
    pool: Pool, subject: str, error_type: str, text: str
) -> None:
    cause = blamed(pool.run(subject, TWO))
    assert (cause.outcome, cause.error_type, cause.error_text) == ("raised", error_type, text)


def test_misuse_on_a_rank_has_the_outcome_misused(pool: Pool) -> None:
    assert outcomes(pool.run("misuses", TWO)) == ["misused"] * 2


def test_second_reply_to_a_request_is_ignored(pool: Pool) -> None:
    before = pids(pool)
    assert all("early" in reply.error_text for reply in pool.run("answers_twice", TWO))
    assert pids(pool) == before
    assert [reply.error_text for reply in pool.run("trivial", TWO)] == ["", ""]


def test_unreadable_message_counts_as_a_lost_rank(pool: Pool) -> None:
    assert "cannot be read" in blamed(pool.run("talks_nonsense", TWO)).error_text
    assert outcomes(pool.run("counts", TWO)) == ["answered"] * 2


def test_rank_that_closes_its_connection_is_lost(pool: Pool) -> None:
    assert outcomes(pool.run("stays_mute", TWO)) == ["lost"] * 2


def test_pool_leaves_no_file_of_large_replies(pool: Pool) -> None:
    numel = limits.SHARED_BYTES
    replies = pool.run("large", PlainCase(world_size=2, numel=numel))
    for rank, reply in enumerate(replies):
        expected = torch.arange(numel, dtype=torch.float64) + rank
        assert reply.answers[0].tensors["output"].local.equal(expected)
    assert not [file for path in scratch_of(os.getpid()) for file in path.glob("reply-*")]


def test_stored_output_of_a_rank_is_limited(pool: Pool) -> None:
    assert outcomes(pool.run("prints_much", TWO)) == ["answered"] * 2
    pool.run("trivial", TWO)
    sizes = [file.stat().st_size for path in scratch_of(os.getpid()) for file in path.glob("output-[0-9]")]
    assert sizes and max(sizes) < 10_000


def test_rank_that_ends_between_cases_is_replaced(pool: Pool) -> None:
    assert outcomes(pool.run("ends_later", TWO)) == ["answered"] * 2
    time.sleep(0.5)
    assert outcomes(pool.run("counts", TWO)) == ["answered"] * 2


def test_processes_forked_by_a_rank_end_with_the_rank(pool: Pool) -> None:
    children = [int(reply.error_text.removeprefix("child ")) for reply in pool.run("forks", TWO)]
    assert become_true(lambda: not any(is_at_work(child) for child in children), 2)


def test_temporary_files_of_a_killed_rank_are_removed_with_its_world(pool: Pool) -> None:
    lost = blamed(pool.run("killed_with_a_temporary_folder", TWO))
    (folder,) = (Path(line) for line in lost.detail.splitlines() if "checkpoint-" in line)
    assert folder.is_relative_to(tempfile.gettempdir()) and folder.parent != Path(tempfile.gettempdir())
    assert become_true(lambda: not folder.parent.exists(), 30)


def test_slow_removal_of_directories_delays_no_answer(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    moves_again, remove = threading.Event(), scratch._remove
    monkeypatch.setattr(scratch, "_remove", lambda path: (moves_again.wait(5), remove(path)))

    with Pool(visit=VISIT, beside=pool) as delayed:
        before = scratch_of(os.getpid())
        assert blamed(delayed.run("raises_alone", TWO)).outcome == "raised"  # which would never come
        assert len(scratch_of(os.getpid())) > len(before)
        moves_again.set()

    assert not set(scratch_of(os.getpid())) - set(before)


def test_ranks_see_the_parents_environment_at_the_time_they_are_started(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUIVTEST_TEST", "5")
    pool.run("raises_everywhere", TWO)
    assert pool.run("sees_environment", TWO)[0].answers[0].tensors["output"].local.item() == 5


def test_ranks_are_forked_with_the_modules_that_earlier_ranks_imported(pool: Pool) -> None:
    with Pool(visit=VISIT, beside=pool) as own:
        first = own.run("imports_a_family", TWO)
        own.renew(2)
        second = own.run("imports_a_family", TWO)

    found = [[reply.answers[0].tensors["output"].local.item() for reply in replies] for replies in (first, second)]
    assert found == [[0, 0], [1, 1]]


def test_running_cases_does_not_change_the_environment_of_the_parent(pool: Pool) -> None:
    before = dict(os.environ)
    pool.run("raises_everywhere", TWO)
    pool.run("trivial", TWO)
    assert dict(os.environ) == before


def test_processes_are_kept_after_an_expected_error_on_every_rank(pool: Pool) -> None:
    before = pids(pool)
    assert outcomes(pool.run("raises_everywhere", TWO, may_raise=True)) == ["raised"] * 2
    assert pids(pool) == before


def test_processes_are_replaced_if_a_rank_left_a_collective_unfinished(pool: Pool) -> None:
    before = pids(pool)
    assert outcomes(pool.run("raises_out_of_step", TWO, may_raise=True)) == ["raised"] * 2
    assert not set(pids(pool)) & set(before)


def test_processes_are_replaced_after_an_unexpected_error(pool: Pool) -> None:
    before = pids(pool)
    pool.run("raises_everywhere", TWO)
    assert not set(pids(pool)) & set(before)


@pytest.mark.parametrize("dtype", limits.DTYPES)
def test_probe_of_gloo_finds_every_dtype_supported(pool: Pool, dtype: str) -> None:
    """The probe of gloo on the CPU finds nothing missing."""
    assert outcomes(pool.run("trivial", PlainCase(world_size=2, dtype=dtype))) == ["answered"] * 2


def test_pool_reports_the_collective_that_the_backend_computes_wrongly(pool: Pool) -> None:
    with Pool(Backend("fake"), visit=VISIT, beside=pool) as wrong:
        pytest.importorskip("torch.testing._internal.distributed.fake_pg")
        assert outcomes(wrong.run("trivial", TWO)) == ["answered"] * 2
        assert "all_reduce of float32 on 2 ranks is wrong: rank 0: expected [2.0, 1.0, 2.0], got [1.0, 1.0, 0.0]" in {
            str(fault) for fault in wrong.faults
        }
        assert wrong.take_faults() == wrong.faults and wrong.take_faults() == []


def test_run_all_yields_cases_in_order_despite_failures(pool: Pool) -> None:
    cases = [PlainCase(world_size=size, culprit=0) for size in (2, 3, 2)]
    seen = [(case, outcomes(replies)[0]) for case, replies in pool.run_all("killed", cases)]
    assert seen == [(case, "lost") for case in cases]
    assert list(pool.run_all("trivial", [])) == []


def test_ranks_run_the_next_case_while_the_parent_judges(pool: Pool) -> None:
    stamps = []
    for _, replies in pool.run_all("trivial", [TWO, TWO, TWO]):
        stamps.append((replies[0].at_s, time.monotonic()))
        time.sleep(0.2)
    assert stamps[1][0] < stamps[0][1] + 0.2


def test_run_all_keeps_processes_after_a_case_that_every_rank_refuses(pool: Pool) -> None:
    before = pids(pool)
    refused = PlainCase(world_size=2, refused="too odd")
    assert [outcomes(replies) for _, replies in pool.run_all("raises_everywhere", [refused])] == [["raised"] * 2]
    assert pids(pool) == before


def test_pool_can_run_a_case_after_run_all_was_closed_early(pool: Pool) -> None:
    cases = pool.run_all("hangs_in_python", [PlainCase(world_size=1), PlainCase(world_size=2)])
    list(zip(range(0), cases, strict=False))
    running = pool.run_all("trivial", [TWO, TWO])
    next(running)
    running.close()
    assert outcomes(pool.run("counts", TWO)) == ["answered"] * 2


def test_least_recently_used_world_is_ended(pool: Pool) -> None:
    with Pool(visit=VISIT, max_worlds=2, beside=pool) as small:
        first = pids(small, 1)
        kept = pids(small, 2)
        pids(small, 3)
        assert not psutil.pid_exists(int(first[0]))
        assert pids(small, 2) == kept


def test_ranks_are_replaced_only_if_another_test_file_uses_the_pool(pool: Pool) -> None:
    found = []
    with Pool(visit=VISIT, beside=pool) as own:
        for owner in ("test_first.py", "test_first.py", "test_second.py"):
            own.serve(owner)
            found.append(pids(own))

    assert found[0] == found[1] and not {*found[1]} & {*found[2]}


@pytest.mark.parametrize("module", USERS)
def test_every_module_that_the_fork_server_preloads_can_be_found(module: str) -> None:
    assert importlib.util.find_spec(module)


def test_second_pool_has_separate_ranks_from_the_same_fork_server(pool: Pool) -> None:
    with Pool(visit=VISIT, beside=pool) as other:
        found = {*pids(pool), *pids(other)}
        servers = {psutil.Process(int(pid)).ppid() for pid in found}
    pool.renew(2)

    assert (len(found), len(servers)) == (4, 1)
    assert outcomes(pool.run("trivial", TWO)) == ["answered"] * 2


def test_closed_pool_leaves_no_process_directory_or_thread() -> None:
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    directories, threads = scratch_of(os.getpid()), psutil.Process().num_threads()
    descriptors = psutil.Process().num_fds()
    pool = Pool(visit=VISIT)
    pool.run("killed", TWO)
    pool.run("trivial", TWO)
    pool.close()
    pool.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} == children
    assert scratch_of(os.getpid()) == directories
    assert psutil.Process().num_threads() == threads and psutil.Process().num_fds() == descriptors
    with pytest.raises(Misuse, match="closed"):
        pool.run("trivial", TWO)


def test_dead_fork_server_is_replaced(pool: Pool) -> None:
    server = psutil.Process(int(pids(pool)[0])).parent()
    assert server is not None
    server.kill()
    time.sleep(0.2)
    assert outcomes(pool.run("counts", TWO)) == ["answered"] * 2


def test_pool_raises_misuse_in_a_forked_child(pool: Pool) -> None:
    before = pids(pool)
    child = os.fork()
    if child == 0:
        try:
            pool.close()
            pool.run("trivial", TWO)
        except Misuse:
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert pids(pool) == before


def is_at_work(pid: int) -> bool:
    """True if the process still runs, not as a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def start_script(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """One rank is idle, one loops in Python, and one waits for it in a collective."""
    text = (
        "from equivtest.ranks.pool import Pool\nfrom tests.programs.tiny import PlainCase\n"
        f"pool = Pool(visit={VISIT!r})\npool.run('trivial', PlainCase(world_size=1))\n"
        f"pool.run('trivial', PlainCase(world_size=2))\nprint('up', flush=True)\n"
        "pool.run('hangs_in_python', PlainCase(world_size=2, culprit=0))\n"
    )
    with start_script(tmp_path, text) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        time.sleep(0.2)
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == 4  # the server, an idle rank, two at work
        parent.send_signal(signal.SIGKILL)
    assert become_true(lambda: not any(is_at_work(child.pid) for child in family), 2)
    assert become_true(lambda: scratch_of(parent.pid) == [], 2)


def test_user_script_without_a_main_guard_runs_only_once(tmp_path: Path) -> None:
    text = (
        "print('here', flush=True)\n"
        "from equivtest.ranks.pool import Pool\nfrom tests.programs.tiny import PlainCase\n"
        f"pool = Pool(visit={VISIT!r})\nprint(pool.run('says_main', PlainCase(world_size=2))[0].error_text)\n"
    )
    with start_script(tmp_path, text) as parent:
        output, _ = parent.communicate(timeout=60)
    assert output.splitlines() == ["here", "no file"]
    assert parent.returncode == 0 and scratch_of(parent.pid) == []


def test_ranks_are_spawned_if_the_backward_fails_in_a_fork() -> None:
    with Pool(visit=THREADS) as pool:
        assert outcomes(pool.run("runs_backward", PlainCase(world_size=1))) == ["answered"]
        assert pool.start.startswith("spawn (") and "autograd's threading in combination with fork" in pool.start


def test_start_method_forkserver_raises_if_the_backward_fails_in_a_fork() -> None:
    with Pool(Backend(start="forkserver"), visit=THREADS) as pool, pytest.raises(BrokenSetup) as caught:
        pool.run("runs_backward", TWO)
    message = str(caught.value)
    assert "a fork runs no backward (RuntimeError: Unable to handle autograd's threading" in message
    assert "2 threads" in message and "use start='spawn'" in message


def test_ranks_on_the_cpu_are_forked_although_there_are_cards_and_fake_tensors_register_a_device() -> None:
    with Pool(Backend(start="forkserver"), visit=THREADS, environment={BY_FAKE_MODE: "1", AS_CARD: "1"}) as pool:
        assert outcomes(pool.run("runs_backward", TWO)) == ["answered"] * 2
        assert pool.start == "forkserver"


@pytest.mark.parametrize("environment", [{}, {USED: "1"}], ids=["unused", "used"])
def test_ranks_on_a_device_are_forked_unless_an_import_has_used_it(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "validate", lambda _: None)  # it would register the device in this process
    backend = Backend("shadow", "shadow", ("tests.programs.used_device",))

    with Pool(backend, visit=VISIT, environment=environment) as pool:
        if not environment:
            assert outcomes(pool.run("counts", PlainCase(world_size=1))) == ["answered"]
        pool._server._wait_until_ready()
        start = pool.start

    used = "spawn (a fork runs no backward: RuntimeError: Unable to handle autograd's threading"
    assert start.startswith(used) if environment else start == "forkserver"


def test_run_hides_cards_from_the_server_that_forks_ranks_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(make_backend=Backend)
    config: Any = SimpleNamespace(stash={}, workerinput={})
    monkeypatch.setattr(pools, "settings_of", lambda _: settings)
    monkeypatch.setattr(pools, "hub_path", lambda _: "")
    monkeypatch.setattr(pools, "end_with_starter", lambda: None)

    pools.start_server(config)
    server = config.stash[pools._server_key]
    try:
        process = psutil.Process(server._process.pid)
        while not (environment := process.environ()):  # Linux shows none until it has loaded the new program
            time.sleep(0.01)
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
    finally:
        server.close()


def test_no_default_argument_keeps_a_process_group_of_the_warm_up(pool: Pool) -> None:
    """Ranks would find it there, and torch would not: it was destroyed."""
    num_functions, num_bound = pool.run("counts_defaults", TWO)[0].answers[0].tensors["output"].local.tolist()

    assert num_functions > 1000 and num_bound == 0


@pytest.fixture(scope="module")
def spawned() -> Iterator[Pool]:
    """A pool that spawns its ranks, and whose server is ready."""
    with Pool(Backend(start="spawn"), visit=VISIT) as pool:
        pool._server._wait_until_ready()
        yield pool


def test_limit_for_starting_spawned_ranks_does_not_include_the_import_of_torch(
    spawned: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "START_S", 0.7)  # less than an import takes
    monkeypatch.setattr(limits, "EXECUTE_S", 120.0)  # more than an import takes on any machine
    assert outcomes(spawned.run("counts", PlainCase(world_size=1))) == ["answered"]


def test_killed_spawned_rank_is_reported(spawned: Pool) -> None:
    assert blamed(spawned.run("killed", PlainCase(world_size=1, culprit=0))).error_text == "killed by SIGKILL"


def test_directories_of_a_pool_are_kept_when_another_server_ends(pool: Pool, spawned: Pool) -> None:
    assert outcomes(pool.run("counts", TWO)) == ["answered"] * 2
    before = [path for path in scratch_of(os.getpid()) if path.exists()]
    server = spawned._server
    server._control.shutdown(socket.SHUT_RDWR)
    server._process.wait(5)
    assert before and all(path.exists() for path in before)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (Backend("glue"), r"no backend 'glue' here; available: .*gloo"),
        (Backend("undefined"), "no backend 'undefined'"),
        (Backend("cuda:gloo"), "serves cuda, not device 'cpu'"),
        (Backend(device="toaster"), r"no device type 'toaster'; available here: cpu"),
        (Backend(device="meta"), "no device 'meta' is available here"),
        (Backend(device="cpu:0"), "must not have an index"),
        (Backend(imports=("no_such_vendor",)), "cannot import 'no_such_vendor': ModuleNotFoundError.*installed here"),
        (Backend(imports=("./vendor.py",)), "cannot import './vendor.py': .*installed here"),
        (Backend(imports=("",)), "cannot import '': .*installed here"),
        (Backend(start="thread"), "start must be one of auto, forkserver, spawn"),
    ],
    ids=lambda value: "" if isinstance(value, str) else f"{value.name}-{value.device}-{value.imports}-{value.start}",
)
def test_unknown_backend_is_refused(backend: Backend, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        Pool(backend, visit=VISIT)


@pytest.mark.parametrize("content", ["raise RuntimeError('no driver')", "import no_such_driver"])
def test_error_names_the_vendor_module_that_raises_on_import(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising_vendor.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(
        Misuse, match=r"cannot import 'raising_vendor'.*driver.*; fix this error in the module, or leave"
    ):
        Backend(imports=("raising_vendor",)).validate()


def test_backend_can_be_named_for_each_device() -> None:
    """torch's own form, one backend per device, is understood."""
    Backend("cpu:gloo,cuda:gloo").validate()


@pytest.mark.parametrize(
    ("visit", "message"),
    [("no_such_module:visit", "ModuleNotFoundError: No module named"), ("math:visit", "AttributeError")],
)
def test_world_that_cannot_start_raises_with_the_first_traceback(pool: Pool, visit: str, message: str) -> None:
    with Pool(visit=visit, beside=pool) as broken, pytest.raises(BrokenSetup, match=message):
        broken.run("trivial", TWO)


@pytest.mark.parametrize("room", [limits.SCRATCH_BYTES, 2**62], ids=["enough space", "too little space"])
def test_directories_of_ended_processes_are_removed(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Directories of ended processes go, even if no new one would fit; those of living processes stay."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = scratch_roots()[0] / f"equivtest-{ended.pid}-abcdefgh"
    stale.mkdir()
    monkeypatch.setattr(limits, "SCRATCH_BYTES", room)
    (stale / "rendezvous").touch()
    mine = Scratch()
    sweep()
    assert not stale.exists() and mine.path.exists()
    mine.remove()
    assert not mine.path.exists()
