"""One bundle of real verdicts for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivtest.property import Property
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.search.audit import audit
from equivtest.search.chunks import Chunk
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.search.search import search
from tests.bundle.made import DTYPES, SIZES, Payload, Searched, bundle_of


@pytest.fixture(scope="session")
def honest(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Payload:
    """The files of a bundle whose verdicts come from ranks."""
    known, folder = KnownFailures.load(SHIPPED), tmp_path_factory.mktemp("failures")

    def search_of(prop: Property, chunk: Chunk) -> Searched:
        found = search(prop, chunk, pool, known, folder)
        return found.records, found.coverage, found.failures

    audited = audit(shipped()["scale"], pool, known, SIZES, DTYPES).as_data("scale")
    return bundle_of(search_of, audited)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return tmp_path / "bundle.zip"
