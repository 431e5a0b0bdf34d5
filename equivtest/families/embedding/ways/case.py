"""One embedding, computed both by rows and by columns: the two must give the same.

Letters: V num_embeddings, D embedding_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

from equivtest.families.embedding.case import STYLES, EmbeddingCase
from equivtest.kit.case import Shape
from equivtest.layout import Layout

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingWaysCase(EmbeddingCase):
    """output[t] = weight[ids[t]], forward and backward, twice: the weight sharded on V, and on D.

    The fields are those of an EmbeddingCase, and the same for both; what is answered carries the
    style: `output.rowwise`, `param.colwise.weight`.

    Attributes:
        style: The one that runs first.
    """

    style: str = "rowwise"

    @property
    def styles(self) -> tuple[str, ...]:
        """Both, in the order in which they run."""
        return (self.style, *(style for style in STYLES if style != self.style))

    def of_style(self, style: str) -> EmbeddingCase:
        """The case of one style alone; its draws hold the same values."""
        shared = {field.name: getattr(self, field.name) for field in fields(EmbeddingCase)}
        return EmbeddingCase(**{**shared, "style": style})

    def shapes(self) -> dict[str, Shape]:
        return self._of_both({style: self.of_style(style).shapes() for style in STYLES})

    def layouts(self) -> dict[str, Layout]:
        return self._of_both({style: self.of_style(style).layouts() for style in STYLES})

    def _of_both(self, found: dict[str, dict[str, T]]) -> dict[str, T]:
        """What is given, once, and what is answered, by style."""
        given = {name: found[self.style][name] for name in self.given_names()}
        answered = super().answer_names()
        return given | {of_style(name, style): found[style][name] for style in STYLES for name in answered}

    @property
    def sharded_size(self) -> int:
        """Size of the vocabulary, which the ranks share by rows: torch refuses empty parts of that alone."""
        return self.num_embeddings

    def answer_names(self) -> tuple[str, ...]:
        answered = super().answer_names()
        return tuple(of_style(name, style) for style in self.styles for name in answered)


def of_style(name: str, style: str) -> str:
    """What an answer is called that one style gave: 'grad.rowwise.weight' for 'grad.weight'."""
    head, *rest = name.split(".")
    return ".".join((head, style, *rest))
