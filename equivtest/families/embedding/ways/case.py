"""One embedding, computed both by rows and by columns: the two must give the same.

Letters: V num_embeddings, D embedding_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.cases.case import fields_of
from equivtest.cases.case_tensor import CaseTensor
from equivtest.families.embedding.case import STYLES, EmbeddingCase


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
        return EmbeddingCase(**{**fields_of(self), "style": style})

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """What is given, once, and what is answered, by style."""
        by_style = {style: self.of_style(style).tensors for style in self.styles}
        tensors = {name: tensor for name, tensor in by_style[self.style].items() if tensor.is_given}
        for style, answers in by_style.items():
            tensors |= {of_style(name, style): answer for name, answer in answers.items() if answer.is_answered}
        return tensors

    @property
    def sharded_size(self) -> int:
        """Size of the vocabulary, which the ranks share by rows: torch refuses empty parts of that alone."""
        return self.num_embeddings


def of_style(name: str, style: str) -> str:
    """What an answer is called that one style gave: 'grad.rowwise.weight' for 'grad.weight'."""
    head, *rest = name.split(".")
    return ".".join((head, style, *rest))
