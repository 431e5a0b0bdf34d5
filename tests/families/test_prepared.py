"""Prepared modules: the case, the layouts it passes through, and the collectives that these are documented to take."""

from __future__ import annotations

from typing import Any

import torch

from equivtest.base.collective import Collective
from equivtest.cases.values import draw
from equivtest.families.redistribute.prepared.case import PreparedCase
from equivtest.layout import Layout, Replicate, Shard
from equivtest.oracle import expect
from equivtest.oracle.collectives import expected_collectives
from tests.families.refusing import refuses


def case_of(**fields: Any) -> PreparedCase:
    """Four by three, rows divided among two ranks, to be whole."""
    base = {"world_size": 2, "shape": (4, 3), "source": ("shard(0)",), "target": ("replicate",)}
    return PreparedCase(**{**base, **fields})


test_error_for_an_invalid_prepared_module_names_the_invalid_field = refuses(
    case_of,
    ({"mesh": (2, 1), "source": ("replicate",) * 2, "target": ("replicate",) * 2}, "needs a mesh of one axis, got"),
    ({"road": "local"}, "road and cotangent follow from the module: omit them"),
    ({"source": ("partial(sum)",), "target": ("partial(sum)",)}, "target and middle must be replicate or shard"),
    ({"source": ("partial(avg)",)}, r"source must be replicate, shard\(DIM\) or partial\(sum\), got 'partial\(avg"),
    ({"style": "output", "as_kwarg": True}, "as_kwarg needs a style that prepares inputs"),
    ({"middle": "shard(1)"}, "middle and use_local_input are for style 'input_output'"),
    ({"source": ("shard(1)",)}, r"\(4, 3\) is uneven: set x_is_dtensor=True"),
    (
        {"style": "input_output", "middle": "shard(1)", "use_local_input": True},
        r"\(4, 3\) is uneven under shard\(1\): set use_local_input=False",
    ),
)


def test_prepared_module_returns_output_in_target_layout_and_gradient_in_source_layout() -> None:
    case = case_of(values=(("special", 3),))
    given, expected = draw(case, 0), expect(case, 0).tensors

    assert torch.equal(expected["output"].bits.nan_to_num(), given["x"].nan_to_num())  # type: ignore[union-attr]
    assert expected["output"].layout == Layout((Replicate(),)) and expected["output"].allowed is None
    assert expected["grad.x"].layout == Layout((Shard(0),)) and expected["grad.x"].bits is not None


def test_gradient_of_a_partial_sum_is_replicated() -> None:
    assert case_of(source=("partial(sum)",)).layouts()["grad.x"] == Layout((Replicate(),))


def test_prepared_module_documents_one_collective_per_redistribution() -> None:
    case = case_of(style="input_output", target=("shard(0)",))
    gathered, reduced = Collective("all_gather", 24, "forward"), Collective("all_reduce", 48, "forward")

    assert expected_collectives(case, 0) == (gathered, Collective("all_gather", 24, "backward"))
    assert expected_collectives(case_of(source=("partial(sum)",), requires_grad=()), 1) == (reduced,)
