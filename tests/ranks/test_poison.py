"""Poisoned memory: it is really filled, it is so for one visit only, and no answer depends on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from equivtest.cases.case import POISONS
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.ranks import poison
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.tensors import DTYPES, same_bits

SIZES = ((1,), (7,), (100,), (5000,), (2**20,))
"""Elements from one cache line to memory that the kernel maps for one tensor alone."""

FINDS = FetchCase(world_size=2, parameters=SIZES, requires_grad=(False,) * len(SIZES))
glibc = pytest.mark.skipif(poison._mallopt() is None, reason="large is glibc's way")


@pytest.fixture(scope="module")
def pool(pool: Pool) -> Iterator[Pool]:
    """Worlds in which nothing else has run."""
    with Pool(beside=pool) as new:
        yield new


def found(pool: Pool, case: FetchCase) -> list[torch.Tensor]:
    """Returns every rank's new memory, of every size."""
    replies = pool.run("tests.programs.memory:finds", case)
    assert [reply.outcome for reply in replies] == ["answered", "answered"], replies[0].detail
    return [placed.local for reply in replies for placed in reply.answers[0].tensors.values()]


@glibc
@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_memory_is_filled_with_the_large_byte_in_fill_mode_large(pool: Pool, dtype: str) -> None:
    for tensor in found(pool, replace(FINDS, dtype=dtype, poison="large")):
        assert bool((tensor.view(torch.uint8) == poison.LARGE_BYTE).all()), tensor.shape


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_memory_is_filled_with_nan_in_fill_mode_nan(pool: Pool, dtype: str) -> None:
    for tensor in found(pool, replace(FINDS, dtype=dtype, poison="nan")):
        assert bool(tensor.isnan().all()), tensor.shape


@pytest.mark.ranks
@pytest.mark.parametrize("before", ["large", "nan"])
def test_memory_is_not_filled_if_the_case_turns_filling_off(pool: Pool, before: str) -> None:
    found(pool, replace(FINDS, poison=before))
    for tensor in found(pool, replace(FINDS, poison="none"))[3:5]:
        assert bool((tensor[100:-100] == 1).all())


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_fill_byte_gives_large_finite_numbers_in_every_dtype(dtype: torch.dtype) -> None:
    number = torch.full((dtype.itemsize,), poison.LARGE_BYTE, dtype=torch.uint8).view(dtype)

    assert bool(number.isfinite()) and float(number) > 6e4


def bits_of(replies: list[Reply]) -> list[torch.Tensor]:
    answers = [answer for reply in replies for answer in reply.answers]
    return [placed.local for answer in answers for placed in answer.tensors.values()]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("subject", "case"),
    [
        ("zero3_fetch_all_gather", FetchCase(world_size=2, parameters=((5,), (4,)), requires_grad=(True, True))),
        ("zero3_fetch_all_reduce", FetchCase(world_size=2, values=(("special", 0), ("wide", 0)), parameters=((6,),))),
        ("rowwise_linear", LinearCase(world_size=2, style="rowwise", in_features=5, out_features=3)),
        ("colwise_linear", LinearCase(world_size=2, style="colwise", in_features=5, out_features=4)),
    ],
)
def test_answers_of_a_subject_do_not_depend_on_the_fill_value_of_new_memory(
    pool: Pool, subject: str, case: FetchCase | LinearCase
) -> None:
    large, nan, none = (bits_of(pool.run(subject, replace(case, poison=each))) for each in POISONS)

    assert large
    assert all(same_bits(a, b) and same_bits(a, c) for a, b, c in zip(large, nan, none, strict=True))


# In this process.


def test_filling_memory_restores_torchs_settings_even_if_the_subject_raises() -> None:
    before = torch.get_deterministic_debug_mode()
    with poison.poisoned("nan"):
        within = torch.is_deterministic_algorithms_warn_only_enabled(), torch.empty(3).isnan().tolist()
    with pytest.raises(ValueError, match="mine"), poison.poisoned("nan"):
        raise ValueError("mine")

    assert within == (True, [True, True, True])
    assert torch.get_deterministic_debug_mode() == before and not torch.are_deterministic_algorithms_enabled()


def test_fill_value_of_malloc_changes_only_when_a_case_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the complement of the byte or 0; at a visit's end other threads may be within calloc and see a change."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(poison, "_mallopt", lambda: lambda *arguments: told.append(arguments))
    seen = []
    for each in ("large", "nan", "none", "large"):
        with poison.poisoned(each):
            seen.append(len(told))

    assert [value for _, value in told] == [0xFF ^ poison.LARGE_BYTE, 0, 0, 0xFF ^ poison.LARGE_BYTE]
    assert seen == [1, 2, 3, 4] and {option for option, _ in told} == {-6}


def test_fill_mode_large_without_glibc_does_nothing_and_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "_mallopt", lambda: None)
    with poison.poisoned("large"):
        pass

    assert "large does nothing" in poison.poison_in_words()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "glibc.malloc.tcache_count=0"),
        ("glibc.malloc.arena_max=1", "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"),
        ("glibc.malloc.tcache_count=0", "glibc.malloc.tcache_count=0"),
    ],
)
def test_glibc_tunables_of_the_user_are_kept(before: str, after: str) -> None:
    assert poison.poison_environment({"GLIBC_TUNABLES": before}) == {"GLIBC_TUNABLES": after}


def test_environment_of_the_parent_process_gets_no_glibc_tunables(pool: Pool) -> None:
    assert "tcache_count" not in os.environ.get("GLIBC_TUNABLES", "")
