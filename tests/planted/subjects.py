"""Shipped subjects with one wrong operator planted in torch during the visit.

`tests.planted.subjects:NAME__SUBJECT` is the shipped subject SUBJECT with the wrong operator NAME.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from equivtest.cases.names import Subject, resolve
from equivtest.cases.subject import Answers, Given
from tests.planted.arithmetic import WRONG_ARITHMETIC
from tests.planted.blind_arithmetic import BLIND_ARITHMETIC
from tests.planted.blind_eighth import BLIND_EIGHTH
from tests.planted.blind_fifth import BLIND_FIFTH
from tests.planted.blind_fourth import BLIND_FOURTH
from tests.planted.blind_ninth import BLIND_NINTH
from tests.planted.blind_others import BLIND_OTHERS
from tests.planted.blind_seventh import BLIND_SEVENTH
from tests.planted.blind_sixth import BLIND_SIXTH
from tests.planted.blind_views import BLIND_VIEWS
from tests.planted.operators import WRONG_OPERATORS, WrongOperator
from tests.planted.views import WRONG_VIEWS

SEEN = (
    WRONG_OPERATORS
    | WRONG_ARITHMETIC
    | WRONG_VIEWS
    | BLIND_ARITHMETIC
    | BLIND_VIEWS
    | BLIND_OTHERS
    | BLIND_FOURTH
    | BLIND_FIFTH
    | BLIND_SIXTH
    | BLIND_SEVENTH
    | BLIND_EIGHTH
    | BLIND_NINTH
)
"""Name -> defect that was known when the gate's cases were last changed."""
BLIND: dict[str, WrongOperator] = {}
"""Name -> defect that was planted after the last change of the gate's cases."""
WRONG = SEEN | BLIND
_STAYING: dict[str, AbstractContextManager[Any]] = {}
"""Defects that stay until their process ends, by name."""


@contextmanager
def wrong_torch(wrong: WrongOperator) -> Iterator[None]:
    """Makes torch wrong for a while; no cached rule outlives it."""
    with wrong.plant():
        _clear_sharding_prop_cache()
        yield
    _clear_sharding_prop_cache()


def __getattr__(attribute: str) -> Subject:
    name, _, shipped = attribute.partition("__")
    if name not in WRONG or not shipped:
        raise AttributeError(attribute)
    wrong, run = WRONG[name], resolve(shipped)

    def subject(case: Any, mesh: DeviceMesh, given: Given) -> Answers:
        if not wrong.stays:
            with wrong_torch(wrong):
                return run(case, mesh, given)
        if name not in _STAYING:
            _STAYING[name] = wrong.plant()
            _STAYING[name].__enter__()
        return run(case, mesh, given)

    return subject
