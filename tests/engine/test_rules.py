"""Rules of fields: what each refuses, in which words, and how a subclass inherits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from equivtest.cases.rules import Dims, OneOf, Rule, SomeOf, Within, broken_rules


@pytest.mark.parametrize(
    ("rule", "right", "wrong", "message"),
    [
        (OneOf(("a", "b")), "b", "c", "must be one of a, b"),
        (OneOf(("", "b")), "", "c", "must be one of '', 'b'"),
        (OneOf((2, -3)), -3, 3, "must be one of 2, -3"),
        (Within(1, 4), 4, 5, "must be in 1..4"),
        (Within(1), 10**9, 0, "must be at least 1"),
        (Within(0, 1), 0.5, -0.5, "must be in 0..1"),
        (Within(0, 4), (0, 4), (0, 5), "must be in 0..4"),
        (Dims(1, 2), (3, 1), (3, 0), "must have 1 to 2 dims of at least 1"),
        (Dims(0, 2), (), (1, 1, 1), "must have at most 2 dims of at least 1"),
        (Dims(2, 2, smallest=0), (0, 0), (1,), "must have 2 dims of at least 0"),
        (SomeOf(("x", "w")), ("x",), ("w", "x"), "must list some of x, w in this order"),
        (SomeOf(("x", "w")), (), ("x", "x"), "must list some of x, w in this order"),
    ],
)
def test_message_of_a_broken_rule_names_the_limit(rule: Rule, right: Any, wrong: Any, message: str) -> None:
    assert (rule.broken(right), rule.broken(wrong)) == ("", message)


@dataclass
class Base:
    size: Annotated[int, Within(1, 4)] = 1
    free: int = -1


@dataclass
class Derived(Base):
    size: int = 5
    free: Annotated[int, Within(0)] = 0


def test_subclass_that_declares_a_field_again_keeps_its_rules_and_may_add_others() -> None:
    assert list(broken_rules(Base(size=5))) == ["size must be in 1..4, got 5"]
    assert list(broken_rules(Derived(free=-1))) == ["size must be in 1..4, got 5", "free must be at least 0, got -1"]
