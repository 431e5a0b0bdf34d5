"""Judges a language model on ids and targets, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from equivtest import ids, module_property, targets
from equivtest.property import Property
from tests.clients.sizes import VOCABULARY


def judged(build: str, parallelize: str, sizes: Mapping[str, tuple[int, ...]], **how: Any) -> Property:
    """Claims logits, loss and every gradient; each submodule from the ranks' values at its beginning.

    Args:
        sizes: Sizes of 'batch' and 'seq'.
        how: Further arguments of `module_property`.
    """
    shape = ("batch", "seq")
    inputs = {"input_ids": ids(VOCABULARY, shape), "labels": targets(VOCABULARY, shape)}
    found = module_property(
        build, parallelize, inputs=inputs, sizes=sizes, outputs=("loss", "logits"), by_parts=True, **how
    )
    return replace(found, requires="transformers")
