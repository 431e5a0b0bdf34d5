"""What test files share: ranks, since starting their server takes as long as all that most files do with them."""

from __future__ import annotations

import pytest

from equivtest.pools import pool_of
from equivtest.ranks.pool import Pool


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Pool:
    """The pool of this process, which the properties use too; its worlds may have run anything."""
    return pool_of(pytestconfig)
