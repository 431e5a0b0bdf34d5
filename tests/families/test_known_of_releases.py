"""Predicates of known failures of older releases, and what subjects do there that they need not do in newer ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from equivtest.cases import subject
from equivtest.cases.case import Case
from equivtest.errors import Unsupported
from equivtest.families.collectives.case import CollectivesCase
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.chains.case import ChainCase
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.redistribute.case_refused import RefusedRedistributeCase
from equivtest.families.redistribute.prepared.case import PreparedCase
from equivtest.families.redistribute.subject import NO_PARTIAL, move_by_torch
from equivtest.families.training.sequence.case import MlpCase
from equivtest.module import module_property
from equivtest.property import Space, resolved
from equivtest.ranks.pool import Pool
from equivtest.search.known import asked


def says(case: Case, name: str) -> bool:
    """What a predicate says of a case."""
    predicate = asked(case, name)
    assert predicate
    return bool(predicate(case))


def prepared(size: int, **fields: object) -> PreparedCase:
    """A square DTensor on two ranks whose rows are prepared."""
    given: dict[str, object] = {"world_size": 2, "source": ("shard(0)",), "target": ("shard(0)",), **fields}
    return PreparedCase(shape=(size, size), x_is_dtensor=True, **given)  # type: ignore[arg-type]


def test_a_cotangent_that_is_handed_on_is_copied_where_shards_are_uneven() -> None:
    assert says(prepared(3), "copies_uneven_gradient")
    assert not says(prepared(4), "copies_uneven_gradient")
    assert not says(prepared(3, target=("replicate",)), "copies_uneven_gradient")


def test_a_gradient_of_other_strides_is_copied() -> None:
    assert says(prepared(3, target=("shard(1)",), cotangent_contiguous=False), "copies_uneven_gradient")
    assert says(prepared(3, target=("shard(1)",), use_local_output=True), "copies_uneven_gradient")
    assert not says(prepared(3, target=("replicate",), use_local_output=True), "copies_uneven_gradient")


def test_a_redistributed_gradient_is_copied_where_only_one_of_both_is_strided() -> None:
    uneven = {"world_size": 2, "shape": (3, 2), "source": ("shard(0)",)}
    assert says(RedistributeCase(**uneven, x_contiguous=False), "copies_uneven_gradient")  # type: ignore[arg-type]
    for same in ({}, {"x_contiguous": False, "cotangent_contiguous": False}, {"shape": (3, 1), "x_contiguous": False}):
        assert not says(RedistributeCase(**(uneven | same)), "copies_uneven_gradient")  # type: ignore[arg-type]


def test_a_partial_gradient_is_copied_likewise() -> None:
    partial = {"world_size": 1, "shape": (2, 2), "source": ("partial(sum)",), "cotangent": ("partial(sum)",)}
    assert says(RedistributeCase(**partial, x_contiguous=False), "copies_partial_gradient")  # type: ignore[arg-type]
    for same in ({}, {"cotangent": ("replicate",), "x_contiguous": False}):
        assert not says(RedistributeCase(**(partial | same)), "copies_partial_gradient")  # type: ignore[arg-type]


def test_shares_of_a_gradient_need_several_ranks() -> None:
    of = {"source": ("partial(sum)",), "cotangent": ("partial(sum)",)}
    for world_size, has_shares in ((1, False), (2, True)):
        case = RedistributeCase(world_size=world_size, **of)
        assert says(case, "gradient_is_partial")
        assert says(case, "gradient_has_shares") is has_shares
    assert not says(RedistributeCase(world_size=2, source=("partial(sum)",)), "gradient_is_partial")


def test_a_cotangent_is_scattered_by_its_own_reduction() -> None:
    for op, is_other in (("max", True), ("sum", False)):
        case = RedistributeCase(world_size=2, source=("shard(0)",), cotangent=(f"partial({op})",))
        assert says(case, "gradient_scatters_no_sum") is is_other


def test_a_sequence_is_merged_where_dims_before_it_have_elements() -> None:
    for leading, x_contiguous, is_merged in (
        ((2, 3), True, True), ((1, 3), True, False), ((2, 4), True, False), ((2, 3), False, False),
    ):  # fmt: skip
        case = MlpCase(
            world_size=2, leading=leading, in_features=2, sequence_dim=1, x_is_dtensor=True, x_contiguous=x_contiguous
        )
        assert says(case, "uneven_sequence_is_merged") is is_merged


def test_what_is_partial_beside_a_shard_is_scattered() -> None:
    for op, beside, is_scattered in (
        ("avg", "shard(0)", True),
        ("sum", "shard(0)", False),
        ("avg", "replicate", False),
    ):
        case = OperatorCase(
            world_size=2, operator="ldexp", operands=((1,), (1,)), placements=((f"partial({op})",), (beside,))
        )
        assert says(case, "scatters_no_sum") is is_scattered


def test_only_a_scaled_sum_is_another_sum_on_one_rank() -> None:
    for name, is_scaled in (
        ("reduce_scatter_tensor_premul", True),
        ("reduce_scatter_tensor_avg", False),
        ("reduce_premul", False),
    ):
        case = CollectivesCase(world_size=1, collectives=(name,))
        assert says(case, "scatters_scaled_sum") is is_scaled


def test_a_module_or_a_move_scatters_what_it_divides() -> None:
    moves = (("distribute_module", (("factor", 2.0),)), ("redistribute", ()))
    for op, to, is_scattered in (("avg", "shard(0)", True), ("sum", "shard(0)", False), ("avg", "replicate", False)):
        for name, more in moves:
            step = (name, ("x0",), (("placements", to), *more))
            case = ChainCase(world_size=2, placements=((f"partial({op})",),), steps=(step,))
            assert says(case, "scatters_no_sum") is is_scattered


def test_a_stack_gives_a_gradient_to_what_needs_one() -> None:
    steps = (("stack", ("x0", "x0"), (("dim", 0),)), ("neg", ("y0",), ()))
    assert says(ChainCase(world_size=2, requires_grad=(0,), steps=steps), "stacks_for_gradient")
    assert not says(ChainCase(world_size=2, steps=steps), "stacks_for_gradient")


def test_a_stack_along_a_dim_from_the_end_matters_where_something_is_divided() -> None:
    for dim, placement, matters in ((-1, "shard(0)", True), (0, "shard(0)", False), (-1, "replicate", False)):
        steps = (("stack", ("x0", "x0"), (("dim", dim),)),)
        case = ChainCase(world_size=2, placements=((placement,),), steps=steps)
        assert says(case, "stacks_from_the_end") is matters


class Refusing:
    """In the place of a DTensor: one of torch 2.8.0."""

    def redistribute(self, **_: object) -> DTensor:
        raise RuntimeError(f"Can not redistribute to Partial, {NO_PARTIAL}!")


STAYS = {
    "world_size": 4,
    "mesh": (2, 2),
    "source": ("partial(sum)", "shard(0)"),
    "target": ("partial(sum)", "replicate"),
}


def test_an_older_release_lacks_what_stays_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    case, x = RedistributeCase(**STAYS), cast("DTensor", Refusing())  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    with pytest.raises(Unsupported, match=r"torch 2\.8\.0\+cpu redistributes to nothing that stays partial"):
        move_by_torch(case, x)

    monkeypatch.setattr(torch, "__version__", "2.13.0")
    with pytest.raises(RuntimeError, match=NO_PARTIAL) as raised:
        move_by_torch(case, x)
    assert not isinstance(raised.value, Unsupported)


def test_what_must_be_refused_is_not_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    with pytest.raises(RuntimeError, match=NO_PARTIAL) as raised:
        move_by_torch(RefusedRedistributeCase(world_size=2, misfit="to_partial"), cast("DTensor", Refusing()))
    assert not isinstance(raised.value, Unsupported)


@pytest.fixture
def parameter() -> Iterator[DTensor]:
    """Three rows on two ranks, whose gradient came back whole."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        made = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False, shape=torch.Size((3,)), stride=(1,))
        made.requires_grad_()
        made.grad = DTensor.from_local(torch.arange(3.0), mesh, [Replicate()], run_check=False)
        yield made
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(("release", "held"), [("2.11.0", [0.0, 1.0]), ("2.13.0", [0.0, 1.0, 2.0])])
def test_an_older_release_has_gradients_divided_again(
    parameter: DTensor, monkeypatch: pytest.MonkeyPatch, release: str, held: list[float]
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    subject.divide_gradients([parameter, torch.ones(1)])
    assert isinstance(parameter.grad, DTensor)
    assert parameter.grad.to_local().tolist() == held


def test_fsdp2_is_lacking_where_the_streams_of_the_cpu_record_no_event(
    parameter: DTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of torch 2.6.0."""
    subject.require_fsdp2(parameter.device_mesh)
    monkeypatch.delattr(torch.cpu.Stream, "record_event")
    with pytest.raises(Unsupported, match=r"runs no FSDP2 on the CPU: torch\.cpu\.Stream has no record_event"):
        subject.require_fsdp2(parameter.device_mesh)


@pytest.mark.ranks
def test_steps_are_asked_of_in_the_dtypes_that_they_have(pool: Pool) -> None:
    """Where a release lacks what is asked for, no dtype answers."""
    prop = module_property(
        "tests.programs.batch:mlp",
        "tests.programs.batch:lacking",
        [(2, 3)],
        optimizer="equivtest.programs.examples.mixture:sgd",
    )
    assert resolved(prop, pool, Space((2,), ("bfloat16", "float32"))).resolve is None
