"""Modules judged part by part, from the ranks' values at the beginning of each part."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from equivtest.errors import Misuse
from equivtest.layout import UNTOLD, Layout, Partial, Replicate, Shard
from equivtest.module import module_property
from equivtest.oracle import expect
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.expected import Expected, ExpectedTensor, resolution_of
from equivtest.oracle.rounding import Bounded
from equivtest.oracle.running import RunningError
from equivtest.programs.boundaries import Capture, copied, copied_of, is_boundary
from equivtest.programs.case import ModuleCase
from equivtest.programs.oracle.forced import Forced, boundaries
from equivtest.programs.oracle.held import Whole, held_by_ranks
from equivtest.programs.run.recording import PartsMet
from equivtest.property import Space
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Answer, Reply
from equivtest.tensors import Placed
from equivtest.verdicts.elements import is_too_wide
from equivtest.verdicts.judging import check, judge, judge_replies
from equivtest.verdicts.message import write_message
from equivtest.verdicts.values import judge_tensors
from equivtest.verdicts.verdict import Judgement, Mismatch, Verdict
from tests.programs import parts as parts_programs

HERE = "tests.programs.parts:"
DEEP = "tests.programs.deep_steps:"
DECODER = "equivtest.programs.examples.decoder_plan:"


def case_of(build: str, parallelize: str, **fields: object) -> ModuleCase:
    where = [name if ":" in name else HERE + name for name in (build, parallelize)]
    made = {"world_size": 2, "x_shape": (1, 3, 24), "values": (("real", 0),), "by_parts": True, **fields}
    return ModuleCase(build=where[0], parallelize=where[1], **made)  # type: ignore[arg-type]


def failed(case: ModuleCase, pool: Pool) -> list[Verdict]:
    return [verdict for verdict in judge("module", case, pool) if verdict.failed]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "world_size", "dtype", "batch"),
    [
        ("heads_and_hidden_divided", 2, "bfloat16", "whole"),
        ("heads_and_hidden_divided", 3, "float16", "whole"),
        ("heads_and_hidden_divided", 2, "float32", "whole"),
        ("layers_sharded", 2, "bfloat16", "mean of parts"),
        ("layers_sharded", 2, "float64", "mean of parts"),
    ],
)
def test_right_deep_module_passes_in_every_dtype(
    pool: Pool, parallelize: str, world_size: int, dtype: str, batch: str
) -> None:
    rows = 1 if batch == "whole" else world_size
    case = case_of(
        "deep", DECODER + parallelize, world_size=world_size, dtype=dtype, batch=batch, x_shape=(rows, 3, 24)
    )
    verdicts = check("module", case, pool)

    judged = {name for verdict in verdicts for name in verdict.judgement.agreeing}
    assert {verdict.kind for verdict in verdicts} == {"holds"}
    assert set(filter(is_boundary, case.answer_names())) <= judged


def test_tensors_recorded_for_the_reference_are_freed() -> None:
    """A tensor's hooks keep references that no garbage collector sees."""
    case = case_of("twice", "twice_divided", x_shape=(2, 6))
    expect(case, 0)
    gc.collect()
    before = num_tensors()
    expect(replace(case, values=(("real", 1),)), 0)
    gc.collect()

    assert num_tensors() == before


def num_tensors() -> int:
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_deep_module_has_a_too_wide_bound_if_by_parts_is_false() -> None:
    case = replace(case_of("deep", DECODER + "heads_and_hidden_divided", dtype="float64"), by_parts=False)

    assert is_too_wide(expect(case, 0).tensors["grad.x"])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "first", "dtype"),
    [
        ("halved", "boundary.layers.1", "bfloat16"),
        ("zeros_of_one", "boundary.layers.1.mlp.gate", "float32"),
        ("swapped", "boundary.layers.1.mlp.gate", "bfloat16"),
        ("more", "boundary.layers.2.attention.out", "bfloat16"),
        ("zeros_of_one", "boundary.layers.1.mlp.gate", "float64"),
        ("doubled", "grad.boundary.layers.1.attention.key", "float64"),
    ],
)
def test_message_names_the_first_wrong_submodule_of_a_deep_module(
    pool: Pool, parallelize: str, first: str, dtype: str
) -> None:
    """Half of the right value on two ranks looks like operands of a sum, until it is added to a whole tensor.

    So do zeros on one rank beside the right value on the other, until they are multiplied.
    """
    verdict, *_ = failed(case_of("deep", parallelize, dtype=dtype), pool)

    assert (verdict.kind, verdict.judgement.mismatches[0].tensor) == ("value", first)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("build", "parallelize", "dtype"),
    [
        ("twice", "twice_divided", "float64"),
        ("merged", "merged_divided", "bfloat16"),
        ("merged", "merged_divided", "float64"),
        ("partly_used", "partly_summed", "bfloat16"),
    ],
)
def test_judge_rejects_an_error_in_any_recorded_tensor(pool: Pool, build: str, parallelize: str, dtype: str) -> None:
    case = case_of(build, parallelize, x_shape=(2, 6), dtype=dtype)
    replies = pool.run("module", case)
    names = list(replies[0].answers[0].tensors)

    unseen = [
        (name, ranks)
        for name in names
        for ranks in ((0, 1), (1,))
        if not any(verdict.failed for verdict in judge_replies("module", case, spoilt(replies, name, ranks)))
    ]
    assert len(names) >= 12 and not unseen


def another(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1.5 + 0.5 * tensor.abs().max()


def spoilt(
    replies: list[Reply],
    name: str,
    ranks: tuple[int, ...],
    change: Callable[[torch.Tensor], torch.Tensor] = another,
) -> list[Reply]:
    """Returns the same replies, except for one tensor that is changed on these ranks."""
    found = []
    for reply in replies:
        answer = reply.answers[0]
        placed = answer.tensors[name]
        tensors = {**answer.tensors, name: replace(placed, local=change(placed.local))}
        found.append(replace(reply, answers=(replace(answer, tensors=tensors),)) if reply.rank in ranks else reply)
    return found


@pytest.mark.ranks
def test_in_place_addition_to_a_submodules_output_is_followed(pool: Pool) -> None:
    case = case_of("adds_in_place", "nothing_divided", x_shape=(2, 24))

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}


def test_copy_of_a_submodules_output_keeps_requires_grad() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        copy = copied_of((x, 1), {id(x)})

    assert isinstance(copy, tuple) and copy[0] is not x and copy[0].requires_grad and copy[1] == 1


@pytest.mark.ranks
@pytest.mark.parametrize("build", ["hands_on", "hands_on_by_name"])
def test_bound_of_a_submodule_includes_the_rounding_of_partial_sums(pool: Pool, build: str) -> None:
    """A third in bfloat16 is off by more than the products that follow in float32."""
    case = case_of(build, "shares_handed_on", world_size=3, dtype="bfloat16", x_shape=(2, 24))
    verdicts = check("module", case, pool)
    verdict, *_ = failed(replace(case, parallelize=HERE + "whole_rows_handed_on"), pool)

    assert {verdict.kind for verdict in verdicts} == {"holds"}
    assert {"boundary.same", "grad.boundary.number"} <= {
        name for verdict in verdicts for name in verdict.judgement.agreeing
    }
    assert verdict.judgement.mismatches[0].tensor in ("boundary.same", "output")


@pytest.mark.ranks
def test_right_program_with_activation_checkpointing_passes(pool: Pool) -> None:
    case = case_of("checkpointed", "hidden_divided", dtype="float32")

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}


@pytest.mark.ranks
def test_submodule_that_runs_twice_is_judged_twice(pool: Pool) -> None:
    case = case_of("twice", "twice_divided", x_shape=(2, 6))
    held, *_ = check("module", case, pool)
    verdict, *_ = failed(replace(case, parallelize=HERE + "twice_wrong"), pool)

    assert {"boundary.inner[0]", "boundary.inner[1]", "boundary.inner.down#2"} <= set(held.judgement.agreeing)
    assert verdict.judgement.mismatches[0].tensor == "boundary.inner.down#2"


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_right_program_with_reordered_columns_of_a_merged_projection_passes(pool: Pool, world_size: int) -> None:
    case = case_of("merged", "merged_divided", x_shape=(2, 6), world_size=world_size)
    verdicts = check("module", case, pool)

    assert {verdict.kind for verdict in verdicts} == {"holds"}
    assert "boundary.down" in verdicts[0].judgement.agreeing
    assert "boundary.both" not in verdicts[0].judgement.agreeing


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "kind"), [("partly_summed", "holds"), ("partly_unsummed", "value")], ids=["right", "not summed"]
)
def test_gradient_may_be_replicated_in_one_feature_and_partial_in_another(
    pool: Pool, parallelize: str, kind: str
) -> None:
    """In the other features each rank uses its part; a gradient that is never summed shows in the weight's gradient."""
    verdicts = judge("module", case_of("partly_used", parallelize, x_shape=(2, 6)), pool)

    assert {verdict.kind for verdict in verdicts if verdict.claim == "gradients_equal_unsharded"} == {kind}
    assert "grad.boundary.both" not in verdicts[1].judgement.agreeing


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("build", "parts"),
    [
        ("two_users", ["a:input", "b:input"]),
        ("one_user_twice", ["a:input", "a#2:input"]),
        ("user_and_residual", ["norm:input"]),
        ("three_users", ["a:input", "b:input"]),
    ],
)
def test_gradient_of_a_tensor_is_judged_separately_for_each_submodule_using_it(
    pool: Pool, build: str, parts: list[str], dtype: str
) -> None:
    case = case_of(build, "users_parallel", x_shape=(2, 4, 6), dtype=dtype)
    verdicts = check("module", case, pool)

    agreeing = {name for verdict in verdicts for name in verdict.judgement.agreeing}
    assert {verdict.kind for verdict in verdicts} == {"holds"}
    assert {f"grad.boundary.{part}" for part in parts} <= agreeing


@pytest.mark.ranks
@pytest.mark.parametrize("build", ["two_users", "in_place"])
def test_right_program_passes_if_several_submodules_use_one_tensor(pool: Pool, build: str) -> None:
    verdicts = check("module", case_of(build, "nothing_divided", x_shape=(2, 4, 6)), pool)

    assert {verdict.kind for verdict in verdicts} == {"holds"}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_wrong_gradient_of_one_use_of_a_tensor_is_rejected(pool: Pool, dtype: str) -> None:
    verdict, *_ = failed(case_of("two_users", "one_path_doubled", x_shape=(2, 4, 6), dtype=dtype), pool)

    assert verdict.judgement.mismatches[0].tensor == "grad.boundary.first"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "dtype", "factor"),
    [("factor_of_4", "float64", 4), ("factor_of_4", "bfloat16", 4), ("factor_of_3", "bfloat16", 3)],
)
def test_loss_scale_that_the_program_later_divides_out_is_reported(
    pool: Pool, parallelize: str, dtype: str, factor: float
) -> None:
    verdicts = check("module", case_of("three_users", parallelize, x_shape=(2, 4, 6), dtype=dtype), pool)

    factors = {name: each for verdict in verdicts for name, each in verdict.judgement.factors.items()}
    assert {verdict.kind for verdict in verdicts} == {"holds"}
    assert factors == dict.fromkeys(
        (f"grad.boundary.{part}" for part in ("a", "a:input", "b", "b:input", "first")), factor
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("build", "parallelize", "dtype", "seed"),
    [
        ("deep", "loss_times_2", "float16", 2),
        ("deep", "loss_times_3", "bfloat16", 3),
        ("attending", "loss_times_256", "bfloat16", 0),
        ("attending", "loss_times_3", "float16", 2),
        ("deep", "loss_divided_by_256", "float16", 0),
    ],
    ids=["gradients that underflow", "factor of rounded norms", "wide bound", "wide bound, rounded", "factor below 1"],
)
def test_loss_scale_that_a_deep_model_in_16_bits_divides_out_is_reported(
    pool: Pool, build: str, parallelize: str, dtype: str, seed: int
) -> None:
    inputs = (("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq")))
    fields: dict[str, Any] = {"inputs": inputs, "sizes": (("batch", 4), ("seq", 3))} if build == "deep" else {}
    case = ModuleCase(
        world_size=1, build=f"{DEEP}{build}", parallelize=f"{DEEP}{parallelize}", dtype=dtype, by_parts=True,
        values=(("real", seed),), **{"x_shape": (2, 3, 8)} | fields,
    )  # fmt: skip
    verdicts = check("module", case, pool)

    factors = {each for verdict in verdicts for each in verdict.judgement.factors.values()}
    assert {verdict.kind for verdict in verdicts} <= {"holds", "inconclusive"}
    number = float(parallelize.rpartition("_")[2])
    assert factors == {1 / number if "divided" in parallelize else number}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("parallelize", "build"),
    [
        ("factor_left_in", "three_users"),
        ("factor_left_in_one_parameter", "three_users"),
        ("factor_on_one_rank", "three_users"),
        ("factor_taken_out_on_one_rank", "three_users"),
        ("factor_on_one_path", "three_users"),
        ("factor_near_1", "three_users"),
        ("factor_on_a_small_path", "small_path"),
    ],
)
def test_factor_left_in_a_parameters_gradient_is_rejected(pool: Pool, parallelize: str, build: str, dtype: str) -> None:
    verdicts = failed(case_of(build, parallelize, x_shape=(2, 4, 6), dtype=dtype), pool)

    assert ("gradients_equal_unsharded", "value") in [(verdict.claim, verdict.kind) for verdict in verdicts]


@pytest.mark.ranks
def test_factor_in_the_gradient_of_one_rank_alone_is_rejected(pool: Pool) -> None:
    """The same factor on all ranks is divided out at once, so it is not red."""
    case = case_of("three_users", "users_parallel", x_shape=(2, 4, 6))
    replies, name = pool.run("module", case), "grad.boundary.first"
    kinds = {
        ranks: {verdict.kind for verdict in judge_replies("module", case, spoilt(replies, name, ranks, twice))}
        for ranks in ((0, 1), (1,))
    }

    assert kinds[0, 1] == {"holds"} and "value" in kinds[1,]


@pytest.mark.ranks
def test_zero_gradient_in_place_of_a_nonzero_gradient_is_rejected(pool: Pool) -> None:
    case = case_of("three_users", "users_parallel", x_shape=(2, 4, 6))
    replies = spoilt(pool.run("module", case), "grad.boundary.first", (0, 1), torch.zeros_like)

    assert "value" in {verdict.kind for verdict in judge_replies("module", case, replies)}


def twice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def test_capture_keeps_the_gradients_of_a_submodule_that_writes_to_its_input() -> None:
    module = parts_programs.in_place()
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    module(x).sum().backward()
    right = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad()
    with Capture(module):
        module(x).sum().backward()

    torch.testing.assert_close({name: module.get_parameter(name).grad for name in right}, right, rtol=0, atol=0)


def test_captured_submodules_have_the_names_of_the_unsharded_module() -> None:
    captured: dict[str, torch.Tensor] = {}
    for module in (parts_programs.three_users(), parts_programs.one_user_twice()):
        x = torch.linspace(-1, 1, 24).reshape(4, 6)
        with Capture(module) as capture:
            module(x).sum().backward()
        captured.clear()
        whole = Mock(at=lambda name: name, is_given=lambda tensor: False)
        with PartsMet(module, ("*",), lambda name, tensor: captured.update({name: copied(tensor)}), whole):
            module(x).sum().backward()

        torch.testing.assert_close(captured, capture.named(), rtol=0, atol=0)


VALUE = torch.arange(12, dtype=torch.float64).reshape(2, 6)
COLUMN = torch.arange(6)


@pytest.mark.parametrize(
    ("locals_", "layout"),
    [
        ([VALUE, VALUE], Layout((Replicate(),))),
        ([VALUE[:1], VALUE[1:]], Layout((Shard(0),))),
        ([VALUE[:, :3], VALUE[:, 3:]], Layout((Shard(1),))),
        ([VALUE - 1, torch.ones(2, 6, dtype=torch.float64)], Layout((Partial("sum"),))),
        ([VALUE, torch.zeros(2, 6, dtype=torch.float64)], Layout((Partial("sum"),))),
        ([VALUE[:, [0, 5]], VALUE[:, [1, 4, 2, 3]]], None),
        ([VALUE * (COLUMN < 4) + 3 * (COLUMN > 3), VALUE - 3 * (COLUMN > 3)], None),
    ],
)
def test_layout_of_plain_tensors_is_inferred(locals_: list[torch.Tensor], layout: Layout | None) -> None:
    placed = {rank: {"name": Placed(local, UNTOLD)} for rank, local in enumerate(locals_)}
    right = Bounded(VALUE, torch.full_like(VALUE, 0.25))
    whole = held_by_ranks(case_of("deep", "halved"), placed, 0)("name", right)

    assert whole is not None and whole.layout == layout
    torch.testing.assert_close(whole.value, VALUE)


def test_layout_is_not_inferred_if_two_slices_are_equal_within_the_bound() -> None:
    """Later values may depend on either, for example the gradient of a product with one of two close columns."""
    right = VALUE.clone()
    right[:, 4] = right[:, 1] + 0.125
    placed = {rank: {"name": Placed(right[:, places], UNTOLD)} for rank, places in enumerate(([5, 4], [1, 0, 2, 3]))}
    whole = held_by_ranks(case_of("deep", "halved"), placed, 0)("name", Bounded(right, torch.full_like(VALUE, 0.25)))

    assert whole is not None and whole.layout is None and whole.spread is not None
    torch.testing.assert_close(whole.value, right)
    torch.testing.assert_close(whole.spread, 0.125 * ((COLUMN == 1) | (COLUMN == 4)).double().expand(2, 6))


def test_nearest_layout_is_inferred_if_the_bound_allows_several() -> None:
    placed = {rank: {"name": Placed(VALUE * share, UNTOLD)} for rank, share in enumerate((0.75, 0.25))}
    right = Bounded(VALUE, torch.full_like(VALUE, 10.0))
    whole = held_by_ranks(case_of("deep", "halved"), placed, 0)("name", right)

    assert whole is not None and whole.layout == Layout((Partial("sum"),))


ROWS = torch.arange(24, dtype=torch.float64).reshape(2, 12)
OTHERS = ROWS + 100
DIVIDED = {"batch": "mean of parts", "x_shape": (2, 3, 24)}


def held_of_first(locals_: list[torch.Tensor], value: torch.Tensor) -> Whole | None:
    """Returns the whole that the ranks of a divided batch hold, if `value` is right for the first one's rows."""
    placed = {rank: {"name": Placed(local[None], UNTOLD)} for rank, local in enumerate(locals_)}
    case = case_of("deep", DECODER + "layers_sharded", **DIVIDED)
    return held_by_ranks(case, placed, 0)("name", Bounded(value, torch.full_like(value, 0.25)))


@pytest.mark.parametrize(
    "locals_",
    [
        [torch.stack([OTHERS[1], ROWS[1]]), torch.stack([OTHERS[0], ROWS[0]])],
        [torch.stack([OTHERS[1], ROWS[1], ROWS[0]]), OTHERS[:1]],
        [ROWS, OTHERS[:1]],
    ],
    ids=["rows exchanged", "more rows on the first rank", "as many rows by chance"],
)
def test_oracle_matches_rows_that_moved_to_other_ranks(locals_: list[torch.Tensor]) -> None:
    """Tokens go to the ranks of their experts in this way; the returned rows are judged on the ranks that have them."""
    whole = held_of_first(locals_, ROWS)

    assert whole is not None and whole.layout is None and whole.spread is None
    torch.testing.assert_close(whole.value, ROWS)


@pytest.mark.parametrize(
    "own",
    [ROWS, ROWS + 1, ROWS.flip(0), ROWS.roll(1, dims=1), ROWS.roll(1, dims=0)],
    ids=["right", "wrong", "rows in another order", "features in another order", "rows rolled"],
)
def test_rows_that_only_one_rank_computed_are_not_matched_as_moved_rows(own: torch.Tensor) -> None:
    whole = held_of_first([own, OTHERS], ROWS)

    assert whole is not None and whole.layout is not None and torch.equal(whole.value, own)


def test_columns_on_other_ranks_are_never_matched_as_moved_rows() -> None:
    own = torch.stack([OTHERS[0], ROWS[1]], dim=1)
    whole = held_of_first([own, torch.stack([ROWS[0], OTHERS[1]], dim=1)], ROWS.T)

    assert whole is not None and whole.layout is not None and torch.equal(whole.value, own)


def test_reference_continues_from_a_copy_of_the_recorded_value() -> None:
    forced = Forced(nn.Identity(), RunningError(arithmetic_of("float64"), ranks=2), lambda *_: None)
    taken = forced._parts(Whole(VALUE, None, None, None), VALUE.dtype)

    assert torch.equal(taken.value, VALUE) and taken.value.data_ptr() != VALUE.data_ptr()


@pytest.mark.parametrize("shape", [(6,), (6, 1)], ids=str)
def test_rows_of_one_number_are_not_matched_as_moved_rows(shape: tuple[int, ...]) -> None:
    """One or a few agree by chance."""
    numbers = torch.arange(6, dtype=torch.float64).reshape(shape)
    whole = held_of_first([numbers + 1, numbers], numbers)

    assert whole is not None and whole.layout is not None


@pytest.mark.parametrize("locals_", [[ROWS + 1, OTHERS[:1]], [OTHERS[:1], ROWS + 1]])
def test_oracle_matches_no_rows_if_one_row_is_missing_on_every_rank(locals_: list[torch.Tensor]) -> None:
    assert held_of_first(locals_, ROWS) is None


@pytest.mark.parametrize(("wrong", "judged"), [((), []), ((1,), ["boundary.layers.0"])], ids=["right", "one is wrong"])
def test_output_whose_shape_varies_by_batch_part_is_reported_only_if_wrong(
    wrong: tuple[int, ...], judged: list[str]
) -> None:
    """Each part routes other numbers of tokens to an expert."""
    name, rows = "boundary.layers.0", Layout((Shard(0),))
    runs: Any = [
        Mock(layouts={name: rows}, open=set(), factors={}, wrong={name} if place in wrong else set())
        for place in (0, 1)
    ]
    for run, number in zip(runs, (2, 3), strict=True):
        run.found = {name: Bounded(torch.ones(number, 24), torch.zeros(number, 24))}
    found = boundaries(case_of("deep", DECODER + "layers_sharded", **DIVIDED), runs)

    assert list(found) == judged and all(each.value.shape == (2, 3, 24) for each in found.values())


def test_numbers_that_ranks_hold_in_another_order_are_matched_within_their_bounds() -> None:
    """1.06 is nearest to 1.0, but no other number can be 1.2."""
    right = Bounded(torch.tensor([1.0, 1.2], dtype=torch.float64), torch.tensor([0.15, 0.15], dtype=torch.float64))
    held = (torch.tensor([number], dtype=torch.float64) for number in (1.06, 0.9))
    placed = {rank: {"name": Placed(local, UNTOLD)} for rank, local in enumerate(held)}
    whole = held_by_ranks(case_of("deep", "halved"), placed, 0)("name", right)

    assert whole is not None and whole.layout is None and whole.value.tolist() == [0.9, 1.06]


def test_mask_with_infinities_is_inferred_as_replicated() -> None:
    mask = torch.zeros(2, 6).double().masked_fill(torch.ones(2, 6).triu(1).bool(), -torch.inf)
    placed = {rank: {"name": Placed(mask, UNTOLD)} for rank in range(2)}
    right = Bounded(mask, torch.where(mask.isinf(), torch.inf, 0.0))
    whole = held_by_ranks(case_of("deep", "halved"), placed, 0)("name", right)

    assert whole is not None and whole.layout == Layout((Replicate(),)) and whole.spread is None


def test_nearest_layout_is_inferred_if_no_layout_agrees() -> None:
    placed = {rank: {"name": Placed(VALUE + 1, UNTOLD)} for rank in range(2)}
    whole = held_by_ranks(case_of("deep", "halved"), placed, 0)("name", Bounded(VALUE, torch.full_like(VALUE, 0.25)))

    assert whole is not None and whole.layout == Layout((Replicate(),)) and whole.value.equal(VALUE + 1)


@pytest.mark.parametrize("fields", [{"values": (("dense", 0),)}, {"x_shape": (3, 3, 24), "batch": "mean of parts"}])
def test_judging_by_parts_requires_real_values_and_equal_rows_per_rank(fields: dict[str, object]) -> None:
    with pytest.raises(Misuse, match=r"by_parts (needs real values|needs the same number of rows on every rank), got"):
        case_of("deep", "halved", **fields)


def test_deep_module_is_judged_by_parts_by_default() -> None:
    prop = module_property(HERE + "deep", DECODER + "heads_and_hidden_divided", ((1, 2, 24),), batch="whole")

    assert prop.cases is not None
    assert prop.leaves_out is not None and prop.leaves_out(Space((1,), ("float32", "bfloat16"))) == {}


def test_property_of_a_deep_module_with_by_parts_false_is_refused() -> None:
    prop = module_property(
        HERE + "deep", DECODER + "heads_and_hidden_divided", ((1, 2, 24),), batch="whole", by_parts=False
    )

    with pytest.raises(Misuse, match=r"deep: in float32, with x of shape .*judge (a smaller part|the parts before)"):
        prop.cases(Space((1,), ("float32",)))


def test_difference_between_replicas_widens_the_bounds_of_later_submodules() -> None:
    locals_ = [VALUE, VALUE + 0.125 * (VALUE == 3)]
    placed = {rank: {"name": Placed(local, Layout((Replicate(),)))} for rank, local in enumerate(locals_)}
    whole = held_by_ranks(case_of("deep", "halved"), placed, 0)("name", Bounded(VALUE, torch.full_like(VALUE, 0.25)))

    assert whole is not None and whole.spread is not None
    torch.testing.assert_close(whole.spread, 0.125 * (VALUE == 3).double())


@pytest.mark.parametrize(("is_inner", "kind"), [(True, "holds"), (False, "inconclusive")])
def test_claim_is_conclusive_despite_a_too_wide_bound_of_an_inner_submodule(*, is_inner: bool, kind: str) -> None:
    case = case_of("deep", "halved", world_size=1)
    right = ExpectedTensor(VALUE, VALUE + 100, Layout((Replicate(),)), "float64", "", is_inner=is_inner)
    answers = {0: Answer({"boundary.name": Placed(VALUE, UNTOLD)}, {}, ())}

    judgement = judge_tensors(case, Expected({"boundary.name": right}, {}), answers, ["boundary.name"])

    assert judgement.kind == kind and ("boundary.name" in judgement.margins) != is_inner


@pytest.mark.parametrize(
    ("factor", "allowed", "kind"),
    [(1.05, 10.0, "holds"), (1.2, 10.0, "inconclusive"), (1.05, torch.inf, "holds"), (3.0, 10.0, "value")],
)
def test_claim_holds_for_a_nearly_equal_value_despite_a_too_wide_bound(
    factor: float, allowed: float, kind: str
) -> None:
    bound = torch.full_like(VALUE, allowed)
    right = ExpectedTensor(VALUE, bound, Layout((Replicate(),)), "float64", "", resolution=resolution_of(VALUE))
    answers = {0: Answer({"name": Placed(VALUE * factor, UNTOLD)}, {}, ())}

    judgement = judge_tensors(case_of("deep", "halved", world_size=1), Expected({"name": right}, {}), answers, ["name"])

    assert judgement.kind == kind and ("name" in judgement.agreeing) == (kind == "holds")


def test_near_equality_is_undefined_for_infinite_values_and_zero_updates() -> None:
    assert resolution_of(VALUE.clone().fill_(torch.inf)) is None
    assert resolution_of(VALUE, change=torch.zeros_like(VALUE)) is None


def test_values_of_a_checkpoint_recomputation_are_not_recorded() -> None:
    class CheckpointedScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Steps(), nn.Softplus())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result

    class Steps(nn.Module):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return x.sin() + self.runs

    module = CheckpointedScale()
    capture = Capture(module)
    x = torch.zeros(2, requires_grad=True)
    module(x * 1).sum().backward()

    assert module.inner[0].runs == 2 and capture.values["inner.0"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("num", "told"), [(16, "0, 1"), (17, " and 1 others agree")])
def test_message_lists_at_most_sixteen_tensors_that_agree(num: int, told: str) -> None:
    judgement = Judgement("value", (Mismatch("name", 0, "1", "2"),), tuple(map(str, range(num))))
    verdict = Verdict(
        claim="equals_unsharded", subject="module", case=case_of("deep", "halved"), judgement=judgement, draw=0
    )
    text = write_message(verdict)

    assert told in text and ("others agree" in text) == (num > 16)


@pytest.mark.ranks
@pytest.mark.parametrize(("parallelize", "wrong"), [("out_divided", ""), ("query_of_one_rank", "grad.0.query")])
def test_recorded_values_of_an_expanded_operand_are_judged(pool: Pool, parallelize: str, wrong: str) -> None:
    """The ranks' values cannot be written into a tensor whose elements share memory."""
    case = case_of("pooled", parallelize, x_shape=(2, 3, 24))
    found = [each for each in judge("module", case, pool) if each.kind != "skipped"]

    assert any(each.claim == "gradients_equal_unsharded" for each in found)
    assert {each.judgement.mismatches[0].tensor for each in found if each.failed} == ({wrong} if wrong else set())


@pytest.mark.ranks
def test_partial_sum_may_be_whole_on_one_rank_and_zero_on_the_other(pool: Pool) -> None:
    """No rank owes a summand of attention's input: rank 0 has all of it here, and rank 1 zeros."""
    verdicts = judge("module", case_of("pooled", "on_the_first_rank", x_shape=(2, 3, 24)), pool)

    assert [each.claim for each in verdicts if each.failed] == []
    assert {each.kind for each in verdicts if each.claim == "gradients_equal_unsharded"} == {"holds"}
