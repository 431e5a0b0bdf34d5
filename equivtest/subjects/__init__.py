"""What is judged, one module per family.  A subject runs on every rank and is known by name.

    subject(case, mesh, given) -> {name: DTensor | Placed | None}

`given` holds the harness's own local tensors by the names of `case.given_names()`; the answer
has the names of `case.answer_names()`, None standing for a tensor that did not come about.
"""

from __future__ import annotations

from equivtest.subjects.names import SUBJECTS, Subject, resolve

__all__ = ["SUBJECTS", "Subject", "resolve"]
