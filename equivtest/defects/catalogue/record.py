"""What is written down of a defect."""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.cases.base import Case
from equivtest.verdicts.verdict import Kind


@dataclass(frozen=True)
class Defect:
    """A subject that is wrong in one way.

    Attributes:
        subject: 'package.module:function'.
        replaces: The subject under whose property it must be rejected.
        family: The kind of real bug it stands for.
        claim, kind: What rejects it.
        smallest: The smallest case that shows it, and `why` no smaller one can.
    """

    subject: str
    replaces: str
    family: str
    claim: str
    kind: Kind
    smallest: Case
    why: str

    @property
    def name(self) -> str:
        """The function's name."""
        return self.subject.partition(":")[2]
