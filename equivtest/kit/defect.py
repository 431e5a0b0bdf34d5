"""Defects: subjects that are wrong in one way each.  A property counts only once it has rejected them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from equivtest.kit.case import Case
from equivtest.kit.parts import modules_of
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


@functools.cache
def defects() -> tuple[Defect, ...]:
    """Every defect of every family; the audit in tests/test_defects.py runs each one."""
    return tuple(itertools.chain.from_iterable(module.DEFECTS for module in modules_of("records")))
