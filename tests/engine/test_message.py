"""Messages: what a failure says, line by line."""

from __future__ import annotations

from dataclasses import replace

import torch

from equivtest.cases.case import Case, from_code
from equivtest.oracle import expect
from equivtest.oracle.expected import Expected
from equivtest.ranks.reply import Reply
from equivtest.ranks.support import Finding, ended_by
from equivtest.verdicts.claims import equals_unsharded
from equivtest.verdicts.compare import compare
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.message import write_message
from equivtest.verdicts.verdict import Verdict
from tests.replies import FETCH, LINEAR, change_answer, on_all_ranks, raised, right_replies, set_element, set_tensor


def failure(replies: list[Reply], case: Case = LINEAR, subject: str = "colwise_linear") -> Verdict:
    return next(verdict for verdict in judge_replies(subject, case, replies) if verdict.failed)


def rows(verdict: Verdict, **kwargs: str) -> dict[str, str]:
    """The message's labelled lines, the headline under ''."""
    first, *others = write_message(verdict, **kwargs).splitlines()
    return {"": first} | {line[2:11].strip(): line[12:] for line in others}


WRONG = failure(set_element(right_replies(LINEAR), 2, "param.weight", (0, 1), 0.5))
VALUE = expect(LINEAR, 0).tensors["param.weight"].value[4, 1].item()


def test_headline_names_class_subject_and_tensor() -> None:
    assert rows(WRONG)[""] == "ValueMismatch: colwise_linear: param.weight differs from the oracle"


def test_where_line_has_local_and_global_index() -> None:
    """Global row 4 is local row 0 of the uneven last shard."""
    assert rows(WRONG)["where"] == "rank 2 of 3, local (0, 1), global (4, 1) of (5, 3), shard(0)"


def test_where_line_has_the_parameters_index_for_an_element_of_a_flat_partition() -> None:
    verdict = failure(set_element(right_replies(FETCH), 1, "partition.0", (3,), 0.5), FETCH)

    assert rows(verdict)["where"] == "rank 1 of 2, local (3,), global (3, 2) of (5, 3), flat(16)"


def test_message_shows_expected_and_actual_value_in_full() -> None:
    assert rows(WRONG)["expected"] == f"{VALUE:.9e}   one process, exact"
    assert rows(WRONG)["actual"] == "5.000000000e-01   float32"


def test_error_line_shows_the_allowed_error_with_its_derivation() -> None:
    expected = f"{abs(VALUE - 0.5):.2g}, allowed 0: equal: integers times a power of two, at most "

    assert rows(WRONG)["error"].startswith(expected) and rows(WRONG)["error"].endswith(" of 24 bits")


def test_error_line_shows_how_many_times_the_error_exceeds_its_bound() -> None:
    tensors = dict(expect(LINEAR, 0).tensors)
    value = tensors["output"].value
    tensors["output"] = replace(tensors["output"], allowed=torch.full_like(value, 0.25), derivation="4 roundings")
    local = right_replies(LINEAR)[0].answers[0].tensors["output"].local
    replies = set_element(right_replies(LINEAR), 0, "output", (0, 0), float(local[0, 0]) + 1)
    [verdict] = compare("mine", LINEAR, 0, [Expected(tensors, {})], replies, [equals_unsharded])

    assert rows(verdict)["error"] == "1, allowed 0.25 (4.0 times): 4 roundings"
    assert "one process" not in rows(verdict)["expected"]


def test_error_line_shows_a_huge_ratio_as_a_power_of_ten() -> None:
    tensors = dict(expect(LINEAR, 0).tensors)
    tensors["output"] = replace(
        tensors["output"], allowed=torch.full_like(tensors["output"].value, 1e-40), derivation="4 roundings"
    )
    local = right_replies(LINEAR)[0].answers[0].tensors["output"].local
    replies = set_element(right_replies(LINEAR), 0, "output", (0, 0), float(local[0, 0]) + 1)
    [verdict] = compare("mine", LINEAR, 0, [Expected(tensors, {})], replies, [equals_unsharded])

    assert rows(verdict)["error"] == "1, allowed 1e-40 (1.0e+40 times): 4 roundings"


def test_extent_line_lists_tensors_that_agree() -> None:
    extent = "1 of 3 local elements; rank 2 only; output, param.bias agree"

    assert rows(WRONG)["extent"] == extent


def test_extent_line_lists_further_wrong_tensors() -> None:
    replies = set_element(right_replies(LINEAR), 0, "param.bias", (0,), 0.5)
    verdict = failure(set_element(replies, 2, "param.weight", (0, 1), 0.5))

    assert rows(verdict)["extent"].endswith("; param.bias differ too; output agree")


def test_message_names_a_tensor_that_is_wrong_on_two_ranks_once() -> None:
    replies = right_replies(LINEAR)
    for rank in (0, 1):
        replies = change_answer(replies, rank, lambda answer: replace(answer, touched=("x: values have changed",)))

    assert "extent" not in rows(failure(replies))


def test_message_has_a_pattern_line_only_if_wrong_elements_have_a_pattern() -> None:
    verdict = failure(on_all_ranks(LINEAR, "output", lambda local: 3 * local))

    assert rows(verdict)["pattern"] == "actual / expected = 3.000 at every wrong element"
    assert "pattern" not in rows(WRONG)


def test_message_names_claim_mode_seed_and_draw() -> None:
    case = replace(LINEAR, values=(("dense", 3), ("wide-x", 7)))
    verdict = replace(failure(on_all_ranks(case, "output", torch.zeros_like), case), draw=1)

    assert (rows(verdict)["claim"], rows(verdict)["values"]) == ("equals_unsharded", "wide-x, seed 7 (draw 1)")


def test_case_line_is_code_that_makes_an_equal_case() -> None:
    assert from_code(rows(WRONG)["case"]) == LINEAR


def test_last_line_has_the_command_that_replays_the_failure() -> None:
    assert write_message(WRONG, replay="a/b.json").splitlines()[-1] == "  again     equivtest replay a/b.json"
    assert "again" not in rows(WRONG)


def test_message_of_a_layout_mismatch_shows_expected_and_actual_layout() -> None:
    replicated = right_replies(LINEAR)[0].answers[0].tensors["grad.x"].layout
    whole = expect(LINEAR, 0).tensors["grad.weight"].value.float()
    verdict = failure(set_tensor(right_replies(LINEAR), 1, "grad.weight", local=whole, layout=replicated))
    told = rows(verdict)

    assert told[""] == "LayoutMismatch: colwise_linear: grad.weight has another layout than its contract"
    assert told["where"] == "rank 1 of 3, global shape (5, 3)"
    assert (told["expected"], told["actual"]) == ("shard(0)", "replicate") and "error" not in told


def test_message_of_a_shape_mismatch_shows_expected_and_actual_shape() -> None:
    told = rows(failure(set_tensor(right_replies(LINEAR), 0, "output", local=torch.zeros(2, 1))))

    assert (told["expected"], told["actual"]) == ("local (2, 2) float32", "local (2, 1) float32")
    assert told["where"] == "rank 0 of 3, global shape (2, 5), shard(1)"


def test_message_has_a_way_out_line_only_if_a_remedy_is_known() -> None:
    tensors = {name: each for name, each in right_replies(LINEAR)[1].answers[0].tensors.items() if name != "grad.x"}
    replies = change_answer(right_replies(LINEAR), 1, lambda answer: replace(answer, tensors=tensors))

    assert rows(failure(replies))["way out"].startswith("the unsharded computation has a gradient: use")
    assert "way out" not in rows(WRONG)


def test_message_of_a_replica_mismatch_shows_the_bits_of_two_ranks() -> None:
    replies = set_element(on_all_ranks(LINEAR, "grad.x", torch.zeros_like), 2, "grad.x", (0, 1), -0.0)
    verdict = next(v for v in judge_replies("s", LINEAR, replies) if v.kind == "replica")
    told = rows(verdict)

    assert told["expected"] == "0.000000000e+00 (bits 0x00000000) as on rank 0"
    assert told["actual"] == "-0.000000000e+00 (bits 0x80000000)"
    assert told["extent"].startswith("ranks 0 and 2; ")


def test_message_on_an_exception_shows_the_rank_and_its_traceback() -> None:
    message = write_message(failure([raised(0), *right_replies(LINEAR)[1:]]))

    assert message.splitlines()[:4] == [
        "RankRaised: colwise_linear: a rank raised",
        "  claim     equals_unsharded",
        "  rank 0 of 3 raised ValueError: no",
        "  Traceback of rank 0",
    ]


def test_message_suggests_a_longer_time_limit_only_if_the_case_timed_out() -> None:
    hung = Finding("all_reduce", "float32", 3, "hung", "rank 0: no answer within 15 s")
    alone = [Reply(rank=rank, outcome="timed_out", detail="no answer within 60 s") for rank in range(3)]

    assert "limit" in rows(failure(alone)) and "limit" not in rows(failure(ended_by(hung, 3)))
