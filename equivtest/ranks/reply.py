"""What one rank answers to one visit of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from equivtest.base.collective import Collective
from equivtest.tensors import Placed

Outcome = Literal["answered", "raised", "misused", "lost", "timed_out", "not_supported", "declined", "not_in_mesh"]
"""answered: its tensors are there.  raised: the subject raised.  misused: the subject breaks its
contract with the harness (unknown name, no tensor).  lost: the process ended.  timed_out: no
answer within the limit.  not_supported: the backend refused a collective, as it refused a probe of it, or
this torch cannot make the case's mesh.  declined: the program says that it does not support the case (`NotSupported`).
not_in_mesh: no mesh of the case has this process; it only helped to make them."""


@dataclass(frozen=True)
class Answer:
    """What a rank holds after one draw of values.

    Attributes:
        tensors: name -> local tensor on the CPU, waited and detached, with its layout.
        requires_grad: name -> flag of the tensor as the subject answered it.
        touched: what the subject changed of the harness's own, one sentence each.
        again: as `tensors`, after the same draw was run once more; empty where it was not.
        collectives: What the subject called, in order; None where they are not recorded.
    """

    tensors: Mapping[str, Placed]
    requires_grad: Mapping[str, bool] = field(default_factory=dict)
    touched: tuple[str, ...] = ()
    again: Mapping[str, Placed] = field(default_factory=dict)
    collectives: tuple[Collective, ...] | None = None


Answers = Mapping[int, Answer]
"""rank -> its answer to one draw."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One rank's reply: an outcome and what goes with it.

    Attributes:
        rank: Number of the process in its world; see Case.groups for its rank in the case's mesh.
        answers: One per draw of the case's values, in order; empty unless 'answered'.
        error_type, error_text: Of the exception, where one was raised or misused.
        detail: Traceback, stacks or end of the process, for a person.
        at_s: time.monotonic() of the outcome: the smallest is the first cause.
        busy_s: Seconds the rank spent on the visit.
        lacking: 'dtype:function' of each collective that the backend refused, or 'dtype:function_reduction'; of
            'not_supported' alone.
    """

    rank: int
    outcome: Outcome
    answers: tuple[Answer, ...] = ()
    error_type: str = ""
    error_text: str = ""
    detail: str = ""
    at_s: float = 0.0
    busy_s: float = 0.0
    lacking: tuple[str, ...] = ()
