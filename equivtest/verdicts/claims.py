"""Lists the claims. Each claim is a function of a case, its expected values and the tensors that the ranks returned.

(subject, claim) is the conformance key of every record; the changelog has a line for each name that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from equivtest.cases.case import Case
from equivtest.oracle.expected import Expected
from equivtest.ranks.reply import Answers
from equivtest.verdicts.chance import judge_chance
from equivtest.verdicts.communication import judge_collectives
from equivtest.verdicts.exactness import judge_bits, judge_bits_but_for_zeros, judge_repeats
from equivtest.verdicts.structure import judge_parameter_layouts, judge_replicas, judge_touched
from equivtest.verdicts.values import judge_gradients, judge_memory, judge_outputs, judge_training
from equivtest.verdicts.verdict import Judgement


def always(case: Case, draw: int) -> bool:
    return True


@dataclass(frozen=True)
class Claim:
    """A claim, with its name, its meaning, its judge, and the draws to which the claim applies.

    The claim has no verdict on a draw to which it does not apply, nor on a draw in which `judge` finds nothing to
    judge.

    Attributes:
        by_dtype: True if a conformance run needs verdicts of this claim in every dtype. False for refusals, and for
            claims that judge only some of the visits.
        flag: The field of the case that requests this claim; '' if every case requests the claim.
    """

    name: str
    meaning: str
    judge: Callable[[Case, Expected, Answers], Judgement | None]
    applies: Callable[[Case, int], bool] = always
    by_dtype: bool = True
    flag: str = ""


def _judge_refusal(case: Case, expected: Expected, answers: Answers) -> Judgement:
    raise AssertionError("a refusal is judged from the replies' outcomes: see compare")


equals_unsharded = Claim(
    "equals_unsharded",
    "outputs and parameters equal the oracle's on every rank, and outputs have the right layout",
    judge_outputs,
)
gradients_equal_unsharded = Claim(
    "gradients_equal_unsharded",
    "gradients of inputs and parameters equal the oracle's",
    judge_gradients,
    lambda case, draw: case.leaves_gradients,
)
agrees_on_all_ranks = Claim(
    "agrees_on_all_ranks",
    "replicated values have the same bits on every rank",
    judge_replicas,
    lambda case, draw: case.world_size > 1,
)
keeps_layout_of_parameter = Claim(
    "keeps_layout_of_parameter",
    "parameters and their gradients keep the layout of the parameter",
    judge_parameter_layouts,
    lambda case, draw: case.fixes_layouts,
)
trains_like_unsharded = Claim(
    "trains_like_unsharded",
    "each update, and each step after the first, equals the oracle's, which starts from the state that the ranks had "
    "after the step before",
    judge_training,
    lambda case, draw: case.trains,
)
does_not_touch_its_inputs = Claim(
    "does_not_touch_its_inputs",
    "the tensors that equivtest passes in keep their bits and flags; parameters keep requires_grad",
    judge_touched,
)
drops_at_random = Claim(
    "drops_at_random",
    "the number of dropped elements, in all and on each rank, is one that chance allows, and ranks drop different "
    "elements; a right subject fails this claim once in 10**12 draws",
    judge_chance,
    lambda case, draw: case.draws_at_random,
    by_dtype=False,
)
uses_only_collectives = Claim(
    "uses_only_collectives",
    "kinds, numbers and bytes of the collectives are the documented ones on every rank, padding included; judged on "
    "the cases in which the ranks record collectives: one in eight, and the examples",
    judge_collectives,
    lambda case, draw: case.records,
    by_dtype=False,
    flag="records",
)
uses_only_documented_memory = Claim(
    "uses_only_documented_memory",
    "the memory of each rank, counted by storages, is the documented one: its partitions, whole tensors, partitions of "
    "gradients, saved tensors, and nothing else; judged on the cases in which the ranks measure memory: one in two, "
    "and the examples",
    judge_memory,
    lambda case, draw: any(tensor.role == "memory" for tensor in case.tensors.values()),
    by_dtype=False,
    flag="measures",
)
refuses = Claim(
    "refuses",
    "a case that the contract forbids raises the same kind of error on every rank; no rank hangs or ends",
    _judge_refusal,
    by_dtype=False,
)
is_exact_without_reduction = Claim(
    "is_exact_without_reduction",
    "if the ranks add nothing together, every bit equals the unsharded run's, also in zeros and NaN",
    judge_bits,
    lambda case, draw: case.fixes_bits(draw),
)
is_exact_but_for_added_zeros = Claim(
    "is_exact_but_for_added_zeros",
    "every bit equals the unsharded run's; if an all_reduce added zeros, -0.0 may become +0.0, a NaN another NaN, and "
    "a subnormal number a zero if the backend declares that",
    judge_bits_but_for_zeros,
    lambda case, draw: case.fixes_bits(draw),
)
is_the_identity_for_one_rank = Claim(
    "is_the_identity_for_one_rank",
    "on one rank every bit equals the unparallelized module's; for a linear layer only on exact values, and except for "
    "the sign of zero",
    judge_bits,
    lambda case, draw: case.world_size == 1 and not case.values[draw][0].startswith("real"),  # real values are rounded
)
repeats_itself = Claim(
    "repeats_itself",
    "the first draw of a case, run once more in the same processes after all other draws, gives the same bits; if the "
    "backend declares that its order of summation varies, rounded values need only be right again",
    judge_repeats,
    lambda case, draw: case.repeats and draw == 0,
    by_dtype=False,
    flag="repeats",
)

CLAIMS = {
    claim.name: claim
    for claim in (
        equals_unsharded, gradients_equal_unsharded, agrees_on_all_ranks, keeps_layout_of_parameter,
        trains_like_unsharded, does_not_touch_its_inputs, is_exact_without_reduction, is_exact_but_for_added_zeros,
        is_the_identity_for_one_rank, repeats_itself, drops_at_random, uses_only_collectives,
        uses_only_documented_memory, refuses,
    )
}  # fmt: skip
"""Name -> claim, for every claim."""
