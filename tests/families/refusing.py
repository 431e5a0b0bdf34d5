"""Tests that a family's cases refuse invalid fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from equivtest.errors import Misuse


def refuses(make: Callable[..., object], *rows: tuple[dict[str, Any], str]) -> Callable[..., None]:
    """Returns a test, one per (fields, message): `make` of the fields raises Misuse with what the message matches."""

    @pytest.mark.parametrize(("fields", "message"), rows)
    def test(fields: dict[str, Any], message: str) -> None:
        with pytest.raises(Misuse, match=message):
            make(**fields)

    return test
