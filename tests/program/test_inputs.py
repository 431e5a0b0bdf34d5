"""Modules with inputs of any kind and outputs of any form: right ones pass, wrong ones are named with their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import equivtest
from equivtest import ids, mask, module_property, positions, real, targets
from equivtest.cases.case import from_code, from_data, to_data
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.oracle import expect
from equivtest.programs.case import ModuleCase
from equivtest.programs.inputs import kind_of, make_whole_numbers
from equivtest.property import Property, Space
from equivtest.ranks.pool import Pool
from equivtest.search.audit import audit
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.search import Findings, search
from equivtest.verdicts.judging import check, judge
from equivtest.verdicts.verdict import ValueMismatch
from tests.drawing import drawn

HERE = "tests.programs.inputs:"
LOOKED = {"ids": ids(11, ("batch", "seq")), "mask": mask(("batch", "seq")), "x": real(("batch", "seq", 4))}
MODEL = {
    "ids": ids(11, ("batch", "seq")),
    "mask": mask(("batch", "seq"), dtype="int64"),
    "positions": positions(("seq",), below=8),
    "labels": targets(11, ("batch", "seq")),
}
REAL = (("real", 0),)
SIZES = {"batch": (2, 3), "seq": (2,)}
"""Few, because the unsharded module runs for each size before anything is drawn."""
DTYPES = ("float32", "bfloat16")
"""In bfloat16 a module that rounds is judged by parts."""


def case_of(build: str, parallelize: str, inputs: dict[str, Any] | None = None, **fields: Any) -> ModuleCase:
    """Two ranks, three rows of two, unless said otherwise."""
    written = tuple((name, each.kind, each.shape) for name, each in (inputs or {}).items())
    fields = {"world_size": 2, "inputs": written, "sizes": (("batch", 3), ("seq", 2))} | fields
    return ModuleCase(build=HERE + build, parallelize=HERE + parallelize, **fields)


def model_case(parallelize: str, **fields: Any) -> ModuleCase:
    fields = {"dtype": "float64", "values": REAL, "outputs": ("loss", "logits"), "batch": "mean of parts"} | fields
    fields = {"state": "own rows"} | fields
    return case_of("model", parallelize, MODEL, **fields)


def searched(prop: Property, pool: Pool, directory: Path) -> Findings:
    return search(prop, Chunk(2, DTYPES, 0, 6), pool, KnownFailures(), directory)


def failing(found: Findings) -> set[tuple[str, str]]:
    assert not found.misuse and len(found.records) >= 6, found.misuse
    return {(failure.claim, failure.kind) for failure in found.failures}


@pytest.mark.ranks
@pytest.mark.parametrize("parallelize", ["rows_of_the_table", "ddp", "fsdp2"])
def test_right_program_with_named_inputs_and_a_dict_of_outputs_passes(
    pool: Pool, tmp_path: Path, parallelize: str
) -> None:
    prop = module_property(HERE + "looked", HERE + parallelize, inputs=LOOKED, sizes=SIZES, positional=("ids",))
    found = searched(prop, pool, tmp_path)

    assert failing(found) == set()
    fields = [record.case["fields"] for record in found.records]
    assert {each["values"][0][0] for each in fields} == {"dense"}
    assert {each["batch"] for each in fields} == {"whole" if parallelize == "rows_of_the_table" else "mean of parts"}


@pytest.mark.ranks
def test_unreduced_gradients_of_a_model_with_named_inputs_are_rejected(pool: Pool, tmp_path: Path) -> None:
    prop = module_property(HERE + "looked", HERE + "unsynchronized", inputs=LOOKED, sizes=SIZES)

    assert ("gradients_equal_unsharded", "value") in failing(searched(prop, pool, tmp_path))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "batch", "seed"), [("searching", "mean of parts", 0), ("model_tensor_parallel", "whole", 11)]
)
def test_right_model_that_returns_a_loss_passes(pool: Pool, parallelize: str, batch: str, seed: int) -> None:
    """Tied, frozen, unused and whole-number parameters, buffers that change, a norm in float32, a mask of finfo.min."""
    case = model_case(parallelize, batch=batch, values=(("real", seed),))

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}
    assert {"output.loss", "output.logits", "buffer.counter", "buffer.mean"} < set(case.answer_names())
    assert not any(name.startswith("cotangent") for name in case.given_names())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelize", "error", "message"),
    [
        ("thawed", ValueMismatch, r"grad\.places\.weight differs"),
        ("untied", ValueMismatch, r"grad\.table\.weight differs"),
        ("stale", ValueMismatch, r"buffer\.mean differs"),
        ("unsynchronized", ValueMismatch, r"grad\.\S+ differs"),
    ],
)
def test_message_names_the_wrong_parameter_or_buffer_of_a_model(
    pool: Pool, parallelize: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check("module", model_case(parallelize), pool)


def test_reference_computes_a_loss_and_buffers_for_each_part_of_the_batch() -> None:
    case = model_case("searching")
    found, given = expect(case, 0).tensors, draw(case, 0)

    assert found["output.loss"].value.shape == (2,) and found["output.logits"].value.shape == (3, 2, 11)
    assert found["buffer.counter"].value.tolist() == [1, 1] and found["buffer.counter"].dtype == "int64"
    assert found["buffer.mean"].value.shape == (2, 6)
    assert found["grad.places.weight"].may_be_none and found["grad.spare.weight"].may_be_none
    assert found["param.places.weight"].requires_grad is False and found["param.table.weight"].requires_grad
    assert set(given) == {
        *MODEL, "table.weight", "places.weight", "scale", "query.weight", "query.bias", "spare.weight", "spare.bias"
    }  # fmt: skip


@pytest.mark.parametrize("batch", ["whole", "mean of parts"])
def test_frozen_parameter_has_no_gradient(batch: str) -> None:
    case = model_case("searching", batch=batch)

    assert case.given_flags()["table.weight"] and not case.given_flags()["places.weight"]
    assert not expect(case, 0).tensors["grad.places.weight"].value.any()


@pytest.mark.ranks
@pytest.mark.parametrize("build", ["batch_norm", "batch_norm_in_eval"])
def test_batch_norm_is_judged_with_its_running_statistics(pool: Pool, build: str) -> None:
    fields: dict[str, Any] = {"x_shape": (5, 3), "inputs": (), "sizes": (), "dtype": "float64", "values": REAL}
    case = case_of(build, "ddp", batch="mean of parts", **fields)
    changed = {name for name in case.answer_names() if name.startswith("buffer.")}

    assert {verdict.kind for verdict in check("module", case, pool)} == {"holds"}
    names = {"buffer.norm.running_mean", "buffer.norm.running_var", "buffer.norm.num_batches_tracked"}
    assert changed == (names if build == "batch_norm" else set())


@pytest.mark.ranks
def test_router_that_reads_the_number_of_rows_has_a_narrow_bound(pool: Pool) -> None:
    case = case_of("router", "ddp", x_shape=(5, 6), inputs=(), sizes=(), dtype="float64", values=REAL, batch="whole")

    assert expect(case, 0).tensors["output"].allowed is not None
    assert float(expect(case, 0).tensors["output"].allowed.max()) < 1e-10  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            "decides",
            r"no bound is known for item\(\), in inner, at .*inputs.py:\d+, `return x \* .*item\(\).*`: "
            "decide by torch.where",
        ),
        (
            "squeezed",
            r"no bound is known for hardsigmoid_backward.*, in the backward of the forward in inner, at .*"
            r"tests/programs/inputs.py:\d+, `return functional.hardsigmoid\(x\)`: judge a module without it",
        ),
        (
            "ties",
            r"in float64, .*: undecided: argmax depends on values that may .*, in inner, at .*inputs.py:\d+, ",
        ),
    ],
)
def test_refusal_of_an_operation_names_operation_line_and_remedy(build: str, message: str) -> None:
    prop = module_property(HERE + build, HERE + "whole", ((2, 3),), batch="whole")
    with pytest.raises(Misuse, match=message):
        prop.cases(Space((1,), ("float64",)))


def test_attention_forced_to_the_flash_kernel_has_a_bound() -> None:
    case = case_of("flash", "whole", x_shape=(1, 1, 3, 4), inputs=(), sizes=(), dtype="float64", values=REAL)

    assert float(expect(case, 0).tensors["output"].allowed.max()) < 1e-12  # type: ignore[union-attr]


TORCHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "encoder_layer": (
        {"src": real(("batch", "seq", 6)), "src_key_padding_mask": mask(("batch", "seq"), hides=True)},
        {"positional": ("src",)},
    ),
    "heads": (
        {name: real(("batch", "seq", 6)) for name in ("query", "key", "value")}
        | {"key_padding_mask": mask(("batch", "seq"), hides=True)},
        {},
    ),
    "cell": ({"input": real(("batch", 3)), "hx": real(("batch", 4))}, {}),
    "lstm": ({"input": real(("batch", "seq", 3))}, {"outputs": ("0",)}),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("build", "parallelize"),
    [("encoder_layer", "fsdp2"), ("heads", "average_over_ranks"), ("cell", "ddp"), ("lstm", "average_over_ranks")],
)
def test_right_programs_of_torchs_own_modules_pass(pool: Pool, tmp_path: Path, build: str, parallelize: str) -> None:
    inputs, named = TORCHS[build]
    sizes = {name: sizes for name, sizes in SIZES.items() if build != "cell" or name == "batch"}
    batch = "whole" if parallelize == "average_over_ranks" else None
    prop = module_property(HERE + build, HERE + parallelize, inputs=inputs, sizes=sizes, batch=batch, **named)

    assert failing(searched(prop, pool, tmp_path)) == set()


@pytest.mark.ranks
def test_audit_spoils_collectives_of_programs_with_named_inputs(pool: Pool) -> None:
    """Rows of ids, of masks and of x are each rank's own, so that a sum that is missing shows."""
    prop = module_property(HERE + "looked", HERE + "ddp", inputs=LOOKED, sizes=SIZES)
    found = audit(prop, pool, KnownFailures(), [2], ("float32",))

    unseen = [site.phase for site in found.unseen]
    assert found.cases and not found.problem and {site.phase for site in found.sites} == {"forward", "backward"}
    assert "backward" not in unseen, unseen


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "describe the inputs by x_shapes=, .*, or by inputs=.*, got neither"),
        ({"inputs": LOOKED, "x_shapes": ((2, 3),)}, "got both"),
        ({"inputs": {"ids": (2, 3)}}, r"input ids must be made by real, ids, mask, .*, got \(2, 3\)"),
        ({"inputs": {}}, "inputs must name at least one input"),
        (
            {"inputs": LOOKED, "sizes": {"sec": (1,)}},
            r"sizes= may name only sizes in the shapes of inputs, got sec: did you mean 'seq'\?",
        ),
        ({"inputs": LOOKED, "sizes": {"seq": ()}}, r"sizes of seq must list at least one number, .*, got \(\)"),
        ({"inputs": LOOKED, "sizes": {"seq": 2}}, r"sizes of seq must list .*, such as sizes={'seq': \(2, 3\)}, got 2"),
        ({"x_shapes": ((2, 3),), "sizes": {"seq": (1,)}}, "sizes= and positional= need inputs with names"),
        (
            {"x_shapes": (2, 3)},
            r"x_shapes must hold at least one shape, .*, got \(2, 3\): write \[\(2, 3\)\] for one shape",
        ),
        ({"x_shapes": "ab"}, "x_shapes must hold at least one shape, .* got 'ab'"),
        ({"x_shapes": [("batch", 3)]}, r"must hold numbers, got \('batch', 3\): names of sizes go with inputs="),
        (
            {"inputs": LOOKED, "outputs": "logits"},
            r"outputs must hold names, such as outputs=\('logits',\), got 'logits'",
        ),
        ({"inputs": LOOKED, "positional": "ids"}, r"positional must hold names, such as positional=\('ids',\), got"),
        ({"inputs": LOOKED, "axes": "dp"}, r"axes must hold names, such as axes=\('dp',\), got 'dp'"),
    ],
)
def test_invalid_property_with_named_inputs_raises_misuse(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        module_property(HERE + "looked", HERE + "ddp", **given)


@pytest.mark.parametrize(
    ("inputs", "fields", "message"),
    [
        (LOOKED, {"sizes": (("batch", 2),)}, r"sizes must say how large seq are, got"),
        (LOOKED, {"positional": ("id",)}, "positional must name inputs, got id; the inputs are ids, mask, x"),
        (
            LOOKED,
            {"outputs": ("logit",)},
            "returns output.logits, output.pair.0, output.pair.1, but has no output at logit: did you",
        ),
        (LOOKED, {"outputs": ("absent",)}, "no output at absent: outputs may hold 'logits', 'pair.0', 'pair.1'"),
        (
            LOOKED,
            {"loss": "logits"},
            "loss must be an output that is one number .*, got 'logits'; such outputs are none",
        ),
        (
            LOOKED | {"x": real((4,))},
            {"sizes": (("batch", 1), ("seq", 2)), "batch": "mean of parts"},
            "torch.chunk cannot divide batch of 1 among",
        ),
        (
            {"x": real((3, "batch"))},
            {"batch": "mean of parts"},
            r"only along the first dim, but input x has the shape \(3, 'batch'\)",
        ),
        ({"x": real((3, 4))}, {"batch": "mean of parts"}, "no input has 'batch' as its first dim"),
        ({"ids": ids(11, ("batch",)), "linear.weight": real((3,))}, {}, "must not be called linear.weight"),
        ({"ids": ids(11, ("batch",))}, {}, "the unsharded module does not take ids of shape .*: TypeError: .*mask"),
        (
            {"idz": ids(11, ("batch",))},
            {},
            "keyword argument 'idz'; equivtest passes idz by name: give the input the name of the forward's argument, "
            "or list it in positional=",
        ),
    ],
)
def test_invalid_case_with_named_inputs_raises_misuse(
    inputs: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(Misuse, match=message):
        case_of("looked", "ddp", inputs, **fields)


def test_output_with_a_shape_that_depends_on_values_raises_misuse() -> None:
    inputs = {"x": real((9,)), "mask": mask((9,))}
    with pytest.raises(
        Misuse, match=r"output\.1 has shape .* for some values of the inputs, and .* for others: .*outputs="
    ):
        case_of("shaped_by_values", "whole", inputs)
    assert list(case_of("shaped_by_values", "whole", inputs, outputs=("0",)).facts.outputs) == ["output.0"]


@pytest.mark.ranks
def test_parallel_module_must_return_the_unsharded_modules_outputs(pool: Pool) -> None:
    with pytest.raises(Misuse, match=r"output\.cache must be a tensor, got object: name the outputs to"):
        judge("module", model_case("searching", outputs=()), pool)


def test_case_with_named_inputs_survives_a_round_trip_through_json_and_code() -> None:
    case = model_case("searching")

    assert from_code(repr(case)) == case == from_data(to_data(case))


def test_sizes_of_inputs_are_drawn_in_every_combination() -> None:
    sizes = {"batch": (1, 2), "seq": (1, 3)}
    prop = module_property(HERE + "looked", HERE + "rows_of_the_table", inputs=LOOKED, sizes=sizes, batch="whole")
    found = {case.arguments.sizes for case in drawn(prop.cases(Space((2,), ("float32",))), 60)}

    assert {tuple(dict(each).values()) for each in found} == {(1, 1), (2, 1), (1, 3), (2, 3)}


@pytest.mark.parametrize("seed", range(5))
def test_drawn_ids_include_the_smallest_and_largest_and_masks_keep_every_row(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    found = {
        kind: make_whole_numbers(kind, (3, 4), 1, source)
        for kind in ("ids(5)", "mask", "mask(hides, int64)", "targets(5, -1)", "positions", "positions(9)")
    }

    counts = found["ids(5)"].flatten().bincount()
    assert len(counts) == 5 and int(counts.max() - counts.min()) <= 1
    assert found["mask"][:, 0].all() and not found["mask"].all() and not found["mask(hides, int64)"][:, 0].any()
    assert (found["targets(5, -1)"][:, -1] >= 0).all()
    assert found["positions"].tolist() == [[0, 1, 2, 3]] * 3
    assert (found["positions(9)"].diff() == 1).all() and int(found["positions(9)"].max()) < 9


def test_drawn_targets_include_an_unignored_target_on_each_rank() -> None:
    source = torch.Generator().manual_seed(0)
    found = [make_whole_numbers("targets(5, -100)", (9,), 3, source) for _ in range(20)]

    assert all((each[::3] >= 0).all() for each in found) and any((each < 0).any() for each in found)


@pytest.mark.parametrize("kind", ["targets(5, -100)", "mask", "mask(hides)"])
@pytest.mark.parametrize(("shape", "rows_per_rank"), [((4, 3), 2), ((2, 4), 2), ((4,), 2), ((4, 2), 0), ((4,), 0)])
def test_drawn_targets_and_masks_keep_unequal_numbers_of_elements_per_rank(
    kind: str, shape: tuple[int, ...], rows_per_rank: int
) -> None:
    """Neither halves of the rows nor halves of the last dim have equal numbers; equal numbers hide a mean of means."""
    source = torch.Generator().manual_seed(0)
    for _ in range(40):
        drawn = make_whole_numbers(kind, shape, rows_per_rank, source, num_ranks=2)
        counts = drawn >= 0 if kind.startswith("targets") else drawn ^ ("hides" in kind)
        assert all(len({int(half.sum()) for half in counts.chunk(2, dim)}) == 2 for dim in (0, -1))


@pytest.mark.parametrize("kind", ["id(3)", "ids", "ids(0)", "ids(3, hides)", "mask(hide)", "targets(3)", "real(2)", ""])
def test_invalid_kind_of_input_raises_misuse(kind: str) -> None:
    with pytest.raises(Misuse, match="unknown kind of input"):
        kind_of(kind)


def test_equivtest_exports_the_functions_that_describe_inputs() -> None:
    for name in ("ids", "mask", "module_property", "positions", "real", "targets"):
        assert callable(getattr(equivtest, name))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = equivtest.no_such_name  # type: ignore[attr-defined]
