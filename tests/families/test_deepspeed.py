"""The real DeepSpeed as a subject, and the messages if it is not installed."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator

import pytest
import torch

from equivtest.base.collective import Collective
from equivtest.cases.names import SUBJECTS
from equivtest.families.training.deepspeed.case import EVERYTHING, EngineCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.verdicts.judging import judge
from properties import test_deepspeed as suite
from properties import test_deepspeed_training as training

installed = pytest.mark.skipif(
    not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed: make deepspeed runs these too"
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


def test_property_whose_package_is_absent_says_how_to_install_the_package() -> None:
    absent = dataclasses.replace(suite.deepspeed_fetch_all_reduce, requires="no_such_package")

    assert absent.absent == "no_such_package is not installed: pip install no_such_package"


def test_property_that_requires_no_package_is_never_skipped() -> None:
    assert dataclasses.replace(suite.deepspeed_fetch_all_reduce, requires="").absent == ""


def test_property_whose_package_is_absent_is_skipped_with_a_reason(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from equivtest.options import pytest_addoption")
    pytester.makepyfile(
        """
        import dataclasses
        from properties import test_deepspeed as suite
        prop = dataclasses.replace(suite.deepspeed_fetch_all_reduce, requires="no_such_package")
        """
    )
    result = pytester.runpytest("-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no_such_package is not installed: pip install*"])


def test_known_failures_of_deepspeed_are_inactive_if_deepspeed_is_absent() -> None:
    """Entries about DeepSpeed count only for the releases that they name."""
    entries = KnownFailures.load(SHIPPED).entries

    assert importlib.util.find_spec("deepspeed") or not [e for e in entries if e.subject.startswith("deepspeed")]


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("subject", [name for name in SUBJECTS if name.startswith("deepspeed_fetch")])
def test_deepspeed_fetches_two_padded_parameters_correctly(subject: str, pool: Pool) -> None:
    """The smallest case of DeepSpeed PR 8158; releases before 0.19.4 fail it."""
    case = FetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, True))
    verdicts = judge(subject, case, pool, suite.CLAIMS)

    assert {verdict.kind for verdict in verdicts} == {"holds"}


@installed
@pytest.mark.ranks
def test_case_in_a_dtype_that_zero_init_refuses_is_declined(pool: Pool) -> None:
    """DeepSpeed looks at the dtype only on a CPU that has kernels for float16."""
    verdicts = judge("deepspeed_fetch_all_gather", FetchCase(world_size=1, dtype="float64"), pool, suite.CLAIMS)

    refuses = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert ({verdict.kind for verdict in verdicts} == {"declined"}) is refuses


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("subject", ["deepspeed_mlp_all_gather", "deepspeed_mlp_all_reduce"])
@pytest.mark.parametrize("persistence_numel", [0, EVERYTHING])
def test_deepspeed_trains_a_layer_of_two_padded_parameters_correctly(
    subject: str, persistence_numel: int, pool: Pool
) -> None:
    """Up to the step that prefetches; releases before 0.19.4 fail it by all_reduce."""
    case = EngineCase(
        world_size=2, biases=("out_proj",), requires_grad=("in_proj.weight", "out_proj.bias"),
        micro_batches=2, optimizer="sgd", steps=3, momentum=0.5, persistence_numel=persistence_numel,
        values=(("dense", 0), ("real", 1)),
    )  # fmt: skip
    verdicts = judge(subject, case, pool, training.CLAIMS)

    assert {verdict.kind for verdict in verdicts} <= {"holds", "inconclusive"}
    assert any((v.claim, v.kind) == ("trains_like_unsharded", "holds") for v in verdicts)


CLIPPED = EngineCase(
    world_size=2, biases=("in_proj", "out_proj"), leading=(2,), in_features=3, hidden_features=5, out_features=3,
    requires_grad=("in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"), optimizer="sgd", steps=3,
    gradient_clipping=0.25, values=(("real", 1), ("real", 2)),
)  # fmt: skip
"""Limits for a norm around ten."""


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_right_deepspeed_training_with_clipped_gradients_passes(stage: int, pool: Pool) -> None:
    subject = "deepspeed_mlp_all_gather" if stage == 3 else "deepspeed_mlp_stages_1_and_2"
    verdicts = judge(subject, dataclasses.replace(CLIPPED, stage=stage), pool, training.CLAIMS)

    assert {verdict.kind for verdict in verdicts} == {"holds"}


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("program", ["by_the_norm_of_a_rank", "by_the_largest_element", "not_at_all"])
def test_wrongly_clipped_gradients_are_rejected(program: str, stage: int, pool: Pool) -> None:
    subject = f"tests.programs.deepspeed:{program}"
    verdicts = judge(subject, dataclasses.replace(CLIPPED, stage=stage), pool, training.CLAIMS)

    failed = [verdict for verdict in verdicts if verdict.failed]
    assert {(verdict.claim, verdict.kind) for verdict in failed} >= {("trains_like_unsharded", "value")}
    assert {verdict.claim for verdict in failed} <= {"trains_like_unsharded", "agrees_on_all_ranks"}
    assert all(verdict.judgement.mismatches[0].tensor.startswith("step1.") for verdict in failed)


TIED = EngineCase(
    world_size=2, biases=("in_proj", "out_proj"), leading=(2,), in_features=3, hidden_features=5, out_features=3,
    tied="transposed", requires_grad=("in_proj.weight", "in_proj.bias", "out_proj.bias"), micro_batches=2,
    optimizer="sgd", steps=3, momentum=0.5, values=(("dense", 1), ("real", 2)),
)  # fmt: skip
"""One weight of 15 elements in two layers."""


def kinds_in_training(case: EngineCase, pool: Pool) -> set[str]:
    """Returns the kinds of verdicts under the engine of the case's stage."""
    subject = "deepspeed_mlp_all_gather" if case.stage == 3 else "deepspeed_mlp_stages_1_and_2"
    return {verdict.kind for verdict in judge(subject, case, pool, training.CLAIMS)}


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tied", ["same", "transposed"])
def test_right_deepspeed_training_with_a_shared_weight_passes(tied: str, stage: int, pool: Pool) -> None:
    case = dataclasses.replace(TIED, tied=tied, hidden_features=3 if tied == "same" else 5, stage=stage)

    assert kinds_in_training(case, pool) == {"holds"}


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("program", "claim"),
    [("with_one_use_of_a_tied_weight", "gradients_equal_unsharded"), ("with_a_weight_untied", "equals_unsharded")],
)
def test_untied_copies_of_a_shared_weight_are_rejected(program: str, claim: str, stage: int, pool: Pool) -> None:
    subject = f"tests.programs.deepspeed:{program}"
    verdicts = judge(subject, dataclasses.replace(TIED, stage=stage), pool, training.CLAIMS)

    failed = {(verdict.claim, verdict.kind) for verdict in verdicts if verdict.failed}
    assert {(claim, "value"), ("trains_like_unsharded", "value")} <= failed


SCALED = EngineCase(
    world_size=2, leading=(2,), in_features=3, hidden_features=5, out_features=2, micro_batches=2, optimizer="sgd",
    steps=2, reduce_scatter=False, predivide_factor=3.0, values=(("dense", 0), ("real", 1)),
)  # fmt: skip


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("fields", [{}, {"predivide_factor": 0.5}, {"predivide_factor": 2.0, "prescales": True}])
def test_right_deepspeed_training_with_prescaled_gradients_passes(
    fields: dict[str, float], stage: int, pool: Pool
) -> None:
    subject = "deepspeed_mlp_all_gather" if stage == 3 else "deepspeed_mlp_stages_1_and_2"
    verdicts = judge(subject, dataclasses.replace(SCALED, stage=stage, **fields), pool, training.CLAIMS)

    assert {verdict.kind for verdict in verdicts} == {"holds"}


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_stay_scaled_after_the_reduction_are_rejected(stage: int, pool: Pool) -> None:
    subject = "tests.programs.deepspeed:scaled_before_alone"
    verdicts = judge(subject, dataclasses.replace(SCALED, stage=stage), pool, training.CLAIMS)

    assert ("gradients_equal_unsharded", "value") in {(v.claim, v.kind) for v in verdicts if v.failed}


SAVED = EngineCase(
    world_size=2, biases=("in_proj", "out_proj"), leading=(2,), in_features=3, hidden_features=5, out_features=3,
    requires_grad=("in_proj.weight", "out_proj.weight", "out_proj.bias"), micro_batches=2, optimizer="sgd", steps=3,
    momentum=0.5, saved_after=2, values=(("dense", 1), ("real", 2)),
)  # fmt: skip
"""One bias is frozen: a fresh engine has it from what was saved alone."""


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("fields", [{}, {"optimizer": "adamw", "momentum": 0.0, "saved_after": 1}])
def test_right_deepspeed_training_from_a_loaded_checkpoint_passes(
    fields: dict[str, object], stage: int, pool: Pool
) -> None:
    case = dataclasses.replace(SAVED, stage=stage, **fields)  # type: ignore[arg-type]

    assert kinds_in_training(case, pool) == {"holds"}


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("program", ["loading_nothing", "loading_no_states"])
def test_training_that_does_not_continue_from_the_checkpoint_is_rejected(program: str, stage: int, pool: Pool) -> None:
    subject = f"tests.programs.deepspeed:{program}"
    verdicts = judge(subject, dataclasses.replace(SAVED, stage=stage), pool, training.CLAIMS)

    failed = [verdict for verdict in verdicts if verdict.failed]
    assert {(verdict.claim, verdict.kind) for verdict in failed} == {("trains_like_unsharded", "value")}
    assert all(verdict.judgement.mismatches[0].tensor.startswith("step3.") for verdict in failed)


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
def test_deepspeed_fetches_two_parameters_by_the_named_collective(collective: str, pool: Pool) -> None:
    case = FetchCase(
        world_size=2, parameters=((3,), (5,)), requires_grad=(True, True), collective=collective, records=True
    )
    replies = pool.run(f"deepspeed_fetch_{collective}", case)

    assert [[seen.kind for seen in found_of(reply) if seen.kind != "broadcast"] for reply in replies] == [
        [collective]
    ] * 2


@installed
@pytest.mark.ranks
@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
def test_deepspeed_engine_fetches_layers_by_the_named_collective(collective: str, pool: Pool) -> None:
    case = EngineCase(
        world_size=2, biases=("in_proj", "out_proj"), fetch=collective, records=True,
        requires_grad=("in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"),
    )  # fmt: skip
    replies = pool.run(f"deepspeed_mlp_{collective}", case)

    assert [[seen.kind for seen in found_of(reply) if seen.phase == "backward"] for reply in replies] == [
        [collective] * 2
    ] * 2


@installed
@pytest.mark.ranks
@pytest.mark.parametrize(("numel", "fetches"), [(EVERYTHING, 2), (0, 6)])
def test_deepspeed_engine_without_reuse_fetches_again_for_each_backward(numel: int, fetches: int, pool: Pool) -> None:
    """Otherwise what a later forward fetched is still there: only the first of three backwards fetches."""
    case = EngineCase(
        world_size=2, biases=("in_proj", "out_proj"), fetch="all_gather", records=True, optimizer="sgd", steps=3,
        requires_grad=("in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"),
        prefetch_numel=numel, reuse_numel=numel,
    )  # fmt: skip
    replies = pool.run("deepspeed_mlp_all_gather", case)

    assert [sum(seen.phase == "backward" for seen in found_of(reply)) for reply in replies] == [fetches] * 2


@installed
@pytest.mark.ranks
def test_deepspeed_engine_runs_after_a_case_that_left_out_a_rank(pool: Pool) -> None:
    """Parameters are counted per process, and DeepSpeed compares the counts between ranks."""
    case = EngineCase(world_size=3, optimizer="sgd", steps=3)
    pool.run("deepspeed_fetch_all_gather", FetchCase(world_size=2, members=(1, 2)))
    replies = pool.run("deepspeed_mlp_all_gather", case)

    assert [(reply.outcome, reply.error_text) for reply in replies] == [("answered", "")] * 3


@installed
@pytest.mark.ranks
def test_deepspeed_reduces_gradients_correctly_after_a_case_that_left_out_a_rank(pool: Pool) -> None:
    """zero.Init replaces torch's linear for the whole process, and with it the order of gradients."""
    case = EngineCase(
        world_size=3,
        biases=("in_proj",),
        requires_grad=("in_proj.weight", "in_proj.bias"),
        stage=2,
        reduce_bucket_numel=100,
        reduce_scatter=False,
    )
    pool.run("deepspeed_fetch_all_gather", FetchCase(world_size=2, members=(1, 2)))

    assert kinds_in_training(case, pool) == {"holds"}


def found_of(reply: Reply) -> tuple[Collective, ...]:
    """The collectives of a reply's first draw."""
    found = reply.answers[0].collectives
    assert found is not None
    return found
