"""Wrong rules of training, planted in torch: each can be planted, and has properties that a gate judges it by."""

from __future__ import annotations

import inspect

import pytest

from equivtest.pytest_plugin.suite import shipped
from tests.planted.training import PROPERTIES, WRONG, _found, planted


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.distributed.optim
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_of_training_is_planted_in_torch_and_removed(name: str) -> None:
    rule = WRONG[name]
    function = inspect.unwrap(_found(rule.function))
    right = function.__code__
    with planted(rule):
        assert function.__code__ is not right

    assert function.__code__ is right


def test_properties_of_each_part_of_torch_are_shipped() -> None:
    assert {rule.part for rule in WRONG.values()} <= set(PROPERTIES)
    assert {name for names in PROPERTIES.values() for name in names} <= set(shipped())
