"""How a language model is judged: on ids and targets, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from equivtest import ids, module_property, targets
from equivtest.property import Property
from tests.clients.sizes import VOCABULARY


def judged(build: str, parallelize: str, sizes: Mapping[str, tuple[int, ...]], **how: Any) -> Property:
    """Both the logits and the loss, and every gradient; each submodule from what the ranks held where it begins.

    Args:
        sizes: Of 'batch' and 'seq'.
        how: What else `module_property` is told.
    """
    shape = ("batch", "seq")
    inputs = {"input_ids": ids(VOCABULARY, shape), "labels": targets(VOCABULARY, shape)}
    found = module_property(
        build, parallelize, inputs=inputs, sizes=sizes, outputs=("loss", "logits"), by_parts=True, **how
    )
    return replace(found, requires="transformers")
