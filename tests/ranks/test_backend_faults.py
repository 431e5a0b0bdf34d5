"""Backends that are wrong in one way are red and named; those that refuse are believed; honest ones are green."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import distributed as dist

from equivtest.base import limits
from equivtest.base.lacking import FUNCTIONS, PROBED, function_of, is_allowed, parse_allowed
from equivtest.base.refusal import in_short, is_refusal
from equivtest.cases.case import Case
from equivtest.errors import BrokenSetup, Misuse
from equivtest.families.collectives.case import BUNDLES, CALLS, CollectivesCase
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.property import Property
from equivtest.pytest_plugin import pools
from equivtest.pytest_plugin.settings import parse
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.ranks.probe import PROBES
from equivtest.ranks.reply import Reply
from equivtest.ranks.support import Finding, conclude
from equivtest.report.handover import TORCHS, BackendFault
from equivtest.report.text import on_faults
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.search import search
from equivtest.verdicts.claims import equals_unsharded, gradients_equal_unsharded
from equivtest.verdicts.judging import check, judge
from equivtest.verdicts.verdict import RankRaised
from tests.commands import Command, Ended
from tests.programs import sharded_layers as layers
from tests.programs.faults import FaultCase
from tests.programs.planted import FAULT
from tests.ranks.fault_cells import VISIT

PLANTED = Backend("planted", imports=("tests.programs.planted",))
UNUSUAL = Backend("planted", imports=("tests.programs.unusual",))
SPECIAL = (("special", 0),)
ALL_REDUCE = ("all_reduce_sum", "all_reduce_max", "all_reduce_min")
LINEAR = LinearCase(world_size=2, style="rowwise", in_features=4, out_features=3, dtype="bfloat16")
FETCH = FetchCase(world_size=2, parameters=((5,),), requires_grad=(True,), collective="all_gather", dtype="bfloat16")


@pytest.fixture
def planted(pool: Pool) -> Callable[[str], Pool]:
    """Makes the pool of a backend with that fault."""
    return lambda fault: Pool(PLANTED, environment={FAULT: fault}, beside=pool)


@pytest.fixture
def on_planted(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ended]:
    """Calls `equivtest run` of one property that gathers, on two ranks of a backend with that fault."""
    args = ["run", "--profile=smoke", "--world-sizes=2", "--dtypes=float32", "--subjects=zero3_fetch_all_gather"]
    args += ["--known-failures=none", "-n0", "--backend=planted", "--import=tests.programs.planted"]

    def run(fault: str, *more: str) -> Ended:
        monkeypatch.setenv(FAULT, fault)
        return command(tmp_path, *args, *more)

    return run


@pytest.mark.ranks
def test_run_on_a_wrong_backend_excuses_only_failures_of_torch(
    pool: Pool, planted: Callable[[str], Pool], tmp_path: Path
) -> None:
    """A layer that ends in mse_loss has a wrong gradient on gloo too (torch 2.13.0)."""
    claims = (equals_unsharded, gradients_equal_unsharded)

    def failed(subject: str, case: Case, wrong: Pool) -> tuple[set[str], set[str]]:
        prop = Property(subject, "It is right.", "nowhere", lambda space: st.just(case), claims)
        chunk = Chunk(2, case.dtypes, 0, 1)
        found = search(prop, chunk, wrong, KnownFailures(), tmp_path, gloo=lambda: pool)
        known = {reason for record in found.records for reason in record.known.values()}
        return {failure.claim for failure in found.failures}, known

    with planted("drops_rank") as wrong:
        assert failed("module", layers.case_of("mse_loss"), wrong) == (set(), {f"{TORCHS} (value)"})
        assert failed("rowwise_linear", replace(LINEAR, dtype="float16"), wrong) == ({"equals_unsharded"}, set())


@pytest.mark.ranks
def test_death_of_a_rank_after_its_answer_is_reported(pool: Pool) -> None:
    case = FaultCase(world_size=2, numel=2, moment="after")
    with Pool(visit=VISIT, beside=pool) as own:
        pids = [int(reply.answers[0].tensors["output"].local[0].item()) for reply in own.run("nothing", case)]
        assert own.take_deaths() == []
        os.kill(pids[1], signal.SIGKILL)
        until_s, deaths = time.monotonic() + 10, []
        while not deaths and time.monotonic() < until_s:
            deaths = own.take_deaths()

        assert len(deaths) == 1 and deaths[0].startswith(
            "rank 1 of 2 killed by SIGKILL after it had answered, last nothing on"
        )
        assert own.take_deaths() == [] and own.run("nothing", case)[1].outcome == "answered"


def test_death_of_a_rank_between_cases_is_added_to_the_backend_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SimpleNamespace(take_faults=list, take_deaths=lambda: ["rank 1 of 2 killed by SIGKILL"])
    config: Any = SimpleNamespace(stash={pools._pool_key: pool})
    monkeypatch.setattr(pools, "settings_of", lambda _: None)

    assert pools.take_faults(config) == (BackendFault("", "rank 1 of 2 killed by SIGKILL"),)


def test_run_fails_if_a_rank_dies_between_two_cases() -> None:
    assert on_faults(
        [BackendFault("", "rank 1 of 2 killed by SIGKILL"), BackendFault("all_reduce", "all_reduce hangs")]
    ) == [
        "a rank died between two cases: rank 1 of 2 killed by SIGKILL",
        "the backend is wrong: all_reduce hangs",
    ]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("swapped_gather", "all_gather_into_tensor of bfloat16 on 2 ranks is wrong: rank"),
        ("raises_attribute", "reduce_scatter_tensor of bfloat16 on 2 ranks raises: rank"),
        ("other_root", "broadcast of bfloat16 on 2 ranks is wrong: rank"),
        ("ends_a_rank", "scatter of bfloat16 on 2 ranks ends a rank: rank 1: exited with code 3"),
        ("early_wait", "all_reduce of bfloat16 on 2 ranks is wrong: rank"),
    ],
)
def test_message_names_the_collective_whose_probe_found_a_fault(
    planted: Callable[[str], Pool], fault: str, told: str
) -> None:
    with planted(fault) as pool:
        pool.run("zero3_fetch_all_gather", FETCH)

    assert str(pool.faults[0]).startswith(told), pool.faults


@pytest.mark.ranks
def test_probe_of_nine_ranks_finds_a_reduce_scatter_that_loses_the_ninth(planted: Callable[[str], Pool]) -> None:
    with planted("drops_ninth_rank") as pool:
        finding = pool.probe(9, "bfloat16").findings["reduce_scatter"]

    assert finding.kind == "wrong" and "expected [2.0, 1.0" in finding.said and "got [1.0, 1.0" in finding.said, finding


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("opens_early", CollectivesCase(world_size=2, collectives=("barrier",))),
        ("forgets_factor", CollectivesCase(world_size=2, collectives=("all_reduce_premul",))),
        ("tires", CollectivesCase(world_size=2, collectives=("all_gather_into_tensor",), times=1000, waits="together")),
        ("wrong_above_one_mib", CollectivesCase(world_size=2, collectives=("scatter",), numels=(2**18 + 1,))),
        ("remembers_address", CollectivesCase(world_size=2, collectives=("all_gather_into_tensor",), memory="kept")),
        ("remembers_freed_address", CollectivesCase(world_size=2, collectives=("reduce_sum",), memory="freed")),
        ("needs_alignment", CollectivesCase(world_size=2, collectives=("all_to_all",), offset=1)),
        ("takes_rows", CollectivesCase(world_size=2, collectives=("all_gather",), numels=(6,), order="transposed")),
        (
            "saturates",
            CollectivesCase(
                world_size=2, dtype="float16", collectives=("all_reduce_sum",), numels=(9,), values=SPECIAL
            ),
        ),
        ("counts_in_float32", CollectivesCase(world_size=2, collectives=("int64_all_reduce_sum",))),
        (
            "largest_is_finite",
            CollectivesCase(world_size=2, collectives=("all_reduce_max",), numels=(9,), values=SPECIAL),
        ),
        ("ignores_tags", CollectivesCase(world_size=2, collectives=("tagged_send_and_receive",), numels=(3,))),
    ],
)
def test_backend_fault_that_no_probe_finds_fails_a_claim(pool: Pool, fault: str, case: CollectivesCase) -> None:
    with Pool(UNUSUAL, environment={FAULT: "premultiplies"}, beside=pool) as honest:
        assert {verdict.kind for verdict in judge("collectives", case, honest)} == {"holds"}
    with Pool(UNUSUAL, environment={FAULT: fault}, beside=pool) as deviating:
        found = {verdict.claim: verdict.kind for verdict in judge("collectives", case, deviating)}

    assert found["equals_unsharded"] == "value"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("other_root", "broadcast of float32 on 2 ranks is wrong: rank"),
        ("hangs", "all_to_all_single of float32 on 2 ranks hangs: rank"),
    ],
)
def test_run_fails_and_prints_first_that_a_probe_found_a_fault(
    on_planted: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, fault: str, told: str
) -> None:
    monkeypatch.setattr("equivtest.base.limits.PROBE_S", 3.0)  # shortens the wait for a probe that hangs
    done = on_planted(fault, "--audit=off")

    first = next(line for line in done.stdout.splitlines() if line.startswith("equivtest: "))
    assert done.code == 1
    assert first.startswith(f"equivtest: the backend is wrong: {told}")


@pytest.mark.ranks
def test_conformance_run_reports_a_wrong_backend_value_as_failed(
    on_planted: Callable[..., Ended],
) -> None:
    done = on_planted("swapped_gather", "--profile=conformance", "--audit=off", "-k", "w2-0 or equals_unsharded")
    summary = done.stdout.partition("= equivtest =")[2].splitlines()

    assert done.code == 1 and "equivtest profile conformance" in done.stdout
    assert summary[1].startswith("equivtest: the backend is wrong: all_gather_into_tensor of float32 on 2 ranks")
    totals = [line for line in summary if " failed, " in line and "of 9 claims" in line]
    assert len(totals) == 1 and "0 not supported" in totals[0] and not totals[0].startswith("0 failed"), totals
    assert "Use --dtypes" not in done.stdout and "--allow-unsupported" not in done.stdout


@pytest.mark.parametrize("heard_first", [0, 1])
def test_probe_reports_the_lowest_rank_with_a_wrong_value(heard_first: int) -> None:
    replies = [
        Reply(
            rank=rank, outcome="raised", error_type="Wrong", error_text=f"got {rank}", at_s=float(rank != heard_first)
        )
        for rank in range(2)
    ]

    assert conclude("all_reduce", "float32", replies).said == "rank 0: got 0"


@pytest.mark.ranks
def test_probes_reject_torchs_fake_process_group(pool: Pool) -> None:
    """torch's own fake one, which is known once its module is imported."""
    fake = Backend("fake", imports=("torch.testing._internal.distributed.fake_pg",))
    with Pool(fake, beside=pool) as idle:
        idle.run("zero3_fetch_all_gather", FETCH)

    found = [str(fault) for fault in idle.faults]
    assert any(text.startswith("all_gather_into_tensor of bfloat16 on 2 ranks is wrong: rank") for text in found), found


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_probe_of_send_and_recv_passes_if_each_send_waits_for_the_previous_recv(
    planted: Callable[[str], Pool], world_size: int
) -> None:
    with planted("messages_in_turn") as pool:
        assert "float32:send_and_receive" in pool.probe(world_size, "float32").working
        assert pool.faults == []


@pytest.mark.ranks
def test_run_on_a_right_process_group_passes(on_planted: Callable[..., Ended]) -> None:
    done = on_planted("")

    assert done.code == 0, done.stdout + done.stderr
    assert "0 failed, 0 known, 0 inconclusive, 0 not supported" in done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize(("fault", "collective"), [("hangs", "all_to_all_single"), ("gather_hangs", "gather")])
def test_cases_are_not_run_after_the_probe_of_a_collective_hangs(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, fault: str, collective: str
) -> None:
    monkeypatch.setattr("equivtest.base.limits.PROBE_S", 2.0)
    with Pool(UNUSUAL, environment={FAULT: fault}, beside=pool) as hanging:
        hanging.run("rowwise_linear", LINEAR)
        begun_s = time.monotonic()
        for case in (LINEAR, FETCH, replace(FETCH, world_size=3), replace(FETCH, dtype="float64")):
            subject = "rowwise_linear" if case is LINEAR else "zero3_fetch_all_gather"
            replies = hanging.run(subject, case)
            assert [reply.outcome for reply in replies] == ["timed_out"] * case.world_size
            assert f"{collective} of bfloat16 on 2 ranks hangs" in replies[0].detail
        assert time.monotonic() - begun_s < 1


@pytest.mark.ranks
def test_probe_on_many_ranks_gets_a_longer_time_limit(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    given_s = {}

    class Ranks:
        def __init__(self, world_size: int) -> None:
            self.world_size = world_size

        def probe(self, collective: str, dtype: str, limit_s: float) -> Finding:
            given_s[self.world_size] = limit_s
            return Finding(collective, dtype, self.world_size, "works")

    with Pool(beside=pool) as probing:
        monkeypatch.setattr(probing, "_world", Ranks)
        for world_size in (2, 8, 64):
            probing.probe(world_size, "float32")

    assert given_s == {2: limits.PROBE_S, 8: limits.PROBE_S, 64: 8 * limits.PROBE_S}


@pytest.mark.ranks
def test_refused_collective_makes_only_the_cases_that_need_it_unsupported(planted: Callable[[str], Pool]) -> None:
    with planted("refuses") as pool:
        refused = pool.run("rowwise_linear", LINEAR)
        world = pool._worlds[2].pids
        assert [(reply.outcome, reply.lacking) for reply in refused] == [
            ("not_supported", ("bfloat16:all_reduce",))
        ] * 2
        assert refused[0].error_text == "bfloat16 all_reduce: NotImplementedError: this group reduces no bfloat16"
        assert check("zero3_fetch_all_gather", FETCH, pool) and pool._worlds[2].pids == world
        assert pool.faults == []


def calls(*names: str, numel: int = 33) -> CollectivesCase:
    return CollectivesCase(world_size=2, collectives=names, numels=(numel,))


@pytest.mark.ranks
def test_collective_that_is_refused_after_a_successful_probe_fails(planted: Callable[[str], Pool]) -> None:
    with planted("refuses_large") as pool:
        assert check("collectives", calls("broadcast", numel=30), pool)
        with pytest.raises(RankRaised, match="refused, but its probe on 2 ranks worked: broadcast of float32"):
            check("collectives", calls("broadcast"), pool)


@pytest.mark.ranks
def test_collective_that_is_refused_on_only_one_rank_fails(
    planted: Callable[[str], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equivtest.base.limits.REFUSAL_GRACE_S", 1.0)
    with planted("refuses_on_one_rank") as pool:
        begun_s = time.monotonic()
        with pytest.raises(RankRaised, match="refused, but not on every rank: coalesced_all_reduce_sum of float32"):
            check("collectives", calls("coalesced_all_reduce_sum"), pool)
        assert time.monotonic() - begun_s < limits.CASE_S
        assert check("collectives", calls("broadcast"), pool)


@pytest.mark.ranks
def test_collective_that_every_rank_refuses_is_reported_with_its_reduction(planted: Callable[[str], Pool]) -> None:
    with planted("refuses_max") as pool:
        for name in ("all_reduce_max", "all_reduce_product"):
            replies = pool.run("collectives", calls(name, "all_reduce_sum"))
            lacking = (f"float32:{name}",)
            assert [(reply.outcome, reply.lacking) for reply in replies] == [("not_supported", lacking)] * 2


@pytest.mark.ranks
@pytest.mark.parametrize(("fault", "failing"), [("refuses_max", []), ("refuses_max_and_is_wrong", ["all_reduce_min"])])
def test_remaining_collectives_of_a_case_with_a_refused_collective_are_judged(
    planted: Callable[[str], Pool], tmp_path: Path, fault: str, failing: list[str]
) -> None:
    whole = calls(*ALL_REDUCE)
    prop = replace(shipped()["collectives"], examples=(whole,), cases=lambda space: st.just(whole))
    with planted(fault) as pool:
        found = search(prop, Chunk(2, ("float32",), 0, 5), pool, KnownFailures(), tmp_path)

    refused, rest = found.records
    assert refused.refused == ("float32:all_reduce_max",)
    assert rest.case["fields"]["collectives"] == ("all_reduce_sum", "all_reduce_min")
    headlines = [failure.message.split("\n")[0] for failure in found.failures]
    assert [name for name in ALL_REDUCE if any(name in line for line in headlines)] == failing, headlines
    assert bool(headlines) == bool(failing), headlines


@pytest.mark.ranks
@pytest.mark.parametrize("case", [LINEAR, FETCH])
def test_check_raises_broken_setup_if_a_probe_fails_although_the_claim_holds(
    planted: Callable[[str], Pool], case: Case
) -> None:
    subject = "rowwise_linear" if case is LINEAR else "zero3_fetch_all_gather"
    with planted("nothing_exchanged") as pool, pytest.raises(BrokenSetup, match="all_to_all_single of bfloat16 on 2"):
        check(subject, case, pool)


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError(),
        RuntimeError("Backend mine does not support alltoall_base"),
        RuntimeError("No backend type associated with device type cpu"),
        RuntimeError("Invalid scalar type"),
        ValueError("Cannot use ReduceOp.BAND with NCCL"),
        TypeError("Input tensor data type is not supported for NCCL process group: Short"),
    ],
)
def test_usual_error_texts_of_backends_count_as_refusals(error: Exception) -> None:
    assert is_refusal(error)


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'Group' object does not support stream"),
        TypeError("unsupported operand type(s) for +: 'int' and 'NoneType'"),
        TypeError("'Work' object does not support item assignment"),
        KeyError("not supported"),
        IndexError("not implemented"),
        RuntimeError("Connection closed by peer"),
        ValueError("tensors must have the same size"),
        RuntimeError("unsupported operation: some elements of the input tensor refer to a single memory location."),
    ],
)
def test_programming_and_connection_errors_do_not_count_as_refusals(error: Exception) -> None:
    assert not is_refusal(error)


def test_error_of_nccl_is_reported_with_its_cause() -> None:
    place = "NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9"
    error = dist.DistBackendError(
        f"{place}\nncclInvalidUsage: ...\nLast error:\nDuplicate GPU detected : rank 1 and rank 0"
    )

    assert in_short(error) == f"DistBackendError: {place}: Duplicate GPU detected : rank 1 and rank 0"
    assert in_short(dist.DistBackendError(place)) == f"DistBackendError: {place}"
    assert in_short(RuntimeError("first\nlast")) == "RuntimeError: first"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("float61", "unknown dtype 'float61' in 'float61'; did you mean 'float64'"),
        ("float16:all_reduct", "unknown collective 'all_reduct' in 'float16:all_reduct'; did you mean 'all_reduce'"),
        ("all_reduce", "unknown dtype 'all_reduce'"),
        ("float16:broadcast_max", "unknown collective 'broadcast_max'"),
    ],
)
def test_unknown_name_in_the_allow_unsupported_option_raises_misuse(name: str, told: str) -> None:
    with pytest.raises(Misuse, match=r"^--allow-unsupported: ") as caught:
        parse_allowed([name])
    assert told in str(caught.value)


def test_allow_unsupported_option_can_name_a_single_reduction() -> None:
    lacking = ("float16:all_reduce_avg",)

    assert is_allowed(lacking, parse_allowed(lacking)) and is_allowed(lacking, parse_allowed(["float16:all_reduce"]))
    assert not is_allowed(lacking, parse_allowed(["float16:all_reduce_max"]))
    assert not is_allowed(("float16:all_reduce",), parse_allowed(lacking))


@pytest.mark.parametrize("name", ["monitored_barrier", "all_reduce_premul", "reduce_scatter_tensor_premul"])
def test_collective_that_torch_documents_for_one_backend_may_be_unsupported_on_others(name: str) -> None:
    assert is_allowed((f"float32:{name}",), ())
    assert not is_allowed((f"float32:{name}", "float32:barrier"), ())


def test_unsupported_case_is_allowed_only_if_all_its_refused_collectives_are_allowed() -> None:
    lacking = ("float16:all_reduce", "float16:broadcast")

    assert is_allowed(lacking, {"float16"}) and is_allowed(lacking, {"all"}) and is_allowed(lacking, set(lacking))
    assert not is_allowed(lacking, {"float16:all_reduce"}) and not is_allowed(lacking, {"release"})
    assert is_allowed((), {"release"}) and not is_allowed((), {"float16"})


def test_allow_unsupported_option_accepts_every_collective_that_cases_call() -> None:
    assert {Finding(name, "float32", 2, "refused").function for name in PROBES} == set(PROBED)
    assert {call.function for calls in BUNDLES.values() for call in calls} <= set(FUNCTIONS)
    assert parse_allowed(f"float32:{name}" for name in CALLS)
    assert {function_of(name) for name in CALLS} == {call.function for call in CALLS.values()}


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (8,)),
        ({"profile": "conformance"}, (8,)),
        ({"profile": "smoke"}, ()),
        ({"world_sizes": "1,2"}, ()),
        ({"device": "cuda"}, ()),
    ],
)
def test_examples_on_eight_ranks_run_unless_an_option_excludes_them(
    options: dict[str, str], sizes: tuple[int, ...]
) -> None:
    settings = parse(options)

    assert settings.pinned_sizes(shipped()["collectives"]) == sizes
    assert settings.pinned_sizes(shipped()["rowwise_linear"]) == ()
