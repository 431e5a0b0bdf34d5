"""A third-party backend, registered by a module: judged like gloo, and rejected if it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from equivtest.cases.case import Case
from equivtest.families.linear.case import LinearCase
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.ranks.backend import Backend, choose_device, use_full_precision
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import check
from equivtest.verdicts.verdict import ValueMismatch
from tests.programs.backend import OFF_BY_ONE

pytestmark = pytest.mark.ranks
BACKEND = Backend("wrapper", imports=("tests.programs.backend",))
LINEAR = LinearCase(world_size=2, style="rowwise", in_features=4, out_features=3, records=True)
FETCH = FetchCase(world_size=2, parameters=((5,),), requires_grad=(True,), collective="all_gather", records=True)


@pytest.fixture(scope="module")
def wrapper(pool: Pool) -> Iterator[Pool]:
    with Pool(BACKEND, beside=pool) as wrapped:
        yield wrapped


def test_ranks_on_cuda_switch_off_sums_in_16_bits_and_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.testing forbids to set the attribute of TF32 for the rest of the process."""
    namespace = torch.backends.disable_global_flags.__globals__  # torch.backends itself is a wrapper of the module
    monkeypatch.setitem(namespace, "__allow_nonbracketed_mutation_flag", value=False)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    tf32 = cudnn.allow_tf32
    try:
        use_full_precision()
        after = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
        assert (before, tf32) == ((True, True), True)
        assert (after, cudnn.allow_tf32) == ((False, False), False)
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before
        torch._C._set_cudnn_allow_tf32(tf32)


@pytest.mark.parametrize(("device", "num_calls"), [("cuda", 1), ("xpu", 0)])
def test_only_ranks_on_cuda_use_full_precision(monkeypatch: pytest.MonkeyPatch, device: str, num_calls: int) -> None:
    module = SimpleNamespace(device_count=lambda: 1, set_device=lambda index: None)
    called: list[None] = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr("equivtest.ranks.backend.use_full_precision", lambda: called.append(None))

    assert choose_device(Backend("nccl", device=device), 0).type == device
    assert len(called) == num_calls


@pytest.mark.parametrize(
    ("subject", "case"),
    [
        ("rowwise_linear", LINEAR),
        ("zero3_fetch_all_reduce", replace(FETCH, world_size=3, collective="all_reduce")),
        ("zero3_fetch_all_gather", FETCH),
        ("ddp_mlp", DataParallelCase(world_size=2, optimizer="sgd", steps=2)),
    ],
)
def test_python_process_group_passes_the_cases_that_gloo_passes(subject: str, case: Case, wrapper: Pool) -> None:
    judged = {verdict.claim for verdict in check(subject, case, wrapper)}
    assert "equals_unsharded" in judged and "uses_only_collectives" not in judged


def test_message_names_the_element_that_a_wrong_all_reduce_computed(pool: Pool) -> None:
    with Pool(BACKEND, environment={OFF_BY_ONE: "1"}, beside=pool) as wrong, pytest.raises(ValueMismatch) as caught:
        check("rowwise_linear", LINEAR, wrong)
    assert "global (0, 2)" in str(caught.value) and "actual - expected = 1 at every wrong element" in str(caught.value)
