"""Defines the reply of one rank to one case, with the outcome and the returned tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from equivtest.base.collective import Collective
from equivtest.tensors import Placed

Outcome = Literal["answered", "raised", "misused", "lost", "timed_out", "not_supported", "declined", "not_in_mesh"]
"""The outcome on one rank.

answered: the reply has tensors.  raised: the subject raised.  misused: the subject breaks its contract with the harness
(unknown name, no tensor).  lost: the process ended.  timed_out: no answer within the limit.  not_supported: the backend
refused a collective, as it refused a probe of it, or this torch cannot make the case's mesh.  declined: the program
does not support the case (`NotSupported`). not_in_mesh: this process is in no mesh of the case; it only helped to make
the meshes.
"""


@dataclass(frozen=True)
class Answer:
    """The tensors that the subject returned on one rank, after one draw of input values.

    Attributes:
        tensors: Name -> local tensor with its layout. The tensor is detached and on the CPU, and no collective still
            writes to it.
        requires_grad: Name -> requires_grad of the tensor when the subject returned it.
        touched: One sentence for each change that the subject made to its inputs.
        again: Like `tensors`, from a second run on the same values. Empty if there was no second run.
        collectives: Collectives that the subject called, in order. None if they were not recorded.
    """

    tensors: Mapping[str, Placed]
    requires_grad: Mapping[str, bool] = field(default_factory=dict)
    touched: tuple[str, ...] = ()
    again: Mapping[str, Placed] = field(default_factory=dict)
    collectives: tuple[Collective, ...] | None = None


Answers = Mapping[int, Answer]
"""Rank -> its answer to one draw of values."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One rank's reply to one case, with the outcome, and with the rank's tensors or a description of its failure.

    Attributes:
        rank: Number of the process among all processes. `Case.groups` shows its rank in the case's mesh.
        answers: One `Answer` for each draw of the case's values, in order. Empty unless the outcome is 'answered'.
        error_type, error_text: Type and text of the exception, if the outcome is 'raised' or 'misused'.
        detail: Traceback, stacks or end of the process, for a person.
        at_s: Time of the outcome, as time.monotonic() gives it. The earliest failure is taken for the cause of all
            other failures.
        busy_s: Seconds that the rank spent on the case.
        lacking: 'dtype:function' or 'dtype:function_reduction' of each collective that the backend refused, if the
            outcome is 'not_supported'.
        imported: Path of each of your own files that the rank has imported so far.
        modules: Name of each module of equivtest that the rank has imported since it was forked.
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
    imported: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
