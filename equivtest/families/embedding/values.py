"""Draws values of embeddings: ids on both sides of every shard boundary, and gradients whose sums are exact.

Letters: T tokens, V num_embeddings, D embedding_dim, p significand bits; n_v how often id v occurs.

The gradient of row v is the sum of n_v rows of the cotangent. In exact modes each of these rows has odd integers up to
2**p / n_v, so that every partial sum, in any order and on any number of ranks, is an integer up to 2**p, which is a
value of the dtype. The oracle checks this of every draw.

Source: derived here; integers up to 2**p are values: IEEE 754-2019 section 3.3.
"""

from __future__ import annotations

import math

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, hash_of, odd_floor, odd_integers, permutation, signs
from equivtest.cases.values.real import nearly_normal, without_subnormals
from equivtest.cases.values.special import draw_special
from equivtest.families.embedding.case import REAL_MODE, EmbeddingCase, RefusedEmbeddingCase
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

_SHARE_ADDED = 16


@draw.register
def draw_embedding(case: EmbeddingCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global ids, weight and cotangent. The ids have the dtype `ids_dtype` of the case.

    Modes:
        index: The weight counts 1, 2, 3, ... row by row, and begins again with 1 after 2**p - 1, so that a wrong value
            shows which row and column was looked up.
        dense: The weight holds odd integers of random sign and up to p bits.
        special: A third of the weight's elements have one special value, a third are -0.0, and the others are odd
            integers. The special value has the number `seed` in `equivtest.cases.values.special`, which has signed
            zeros, infinities, NaN, subnormals and extremes.
        real: Weight and cotangent have nearly normal numbers, and no zeros.

    In the first three modes the cotangent holds odd integers whose sums are exact, unless the gradient is scaled by
    frequency. If the sums are rounded (real numbers, or scaled by frequency), most or all elements of each column of
    the cotangent have one sign, so that terms mostly add up. Of the tokens of one id only the first 2**p / 16 then have
    a nonzero cotangent, since each addition rounds to the storage dtype.
    """
    mode, seed = case.values[index]
    ids = draw_ids(case, mode, seed)
    return {
        "ids": ids.view(case.leading).to(torch.int32 if case.ids_dtype == "int32" else torch.int64),
        "weight": _draw_weight(case, mode, seed),
        "cotangent": _draw_cotangent(case, mode, seed, ids).view(case.shapes()["cotangent"]),
    }


@draw.register
def draw_refused_embedding(case: RefusedEmbeddingCase, index: int) -> dict[str, torch.Tensor]:
    """Draws a valid case, with one id outside of the vocabulary, or float32 ids. For 'max_norm' the ids are valid."""
    given = draw_embedding(case, index)
    if case.misfit == "dtype":
        given["ids"] = given["ids"].to(torch.float32)
    elif case.misfit in ("above", "below"):
        mode, seed = case.values[index]
        place = hash_of(mode, seed, "misfit") % given["ids"].numel()
        given["ids"].view(-1)[place] = case.num_embeddings if case.misfit == "above" else -1
    return given


def draw_ids(case: EmbeddingCase, mode: str, seed: int) -> torch.Tensor:
    """Draws one id per token, as int64 with one dim. Every id of `edge_ids` occurs, at a random token.

    If there are fewer tokens than edge ids, the tokens get edge ids that follow each other in `edge_ids`. Of all other
    tokens, half repeat one edge id and half have random ids.
    """
    source = generator(mode, seed, "ids")
    num_tokens, edges = math.prod(case.leading), case.edge_ids()
    ids = torch.randint(0, case.num_embeddings, (num_tokens,), generator=source, device="cpu")
    first = hash_of(mode, seed, "first edge") % len(edges)
    taken = torch.tensor((edges[first:] + edges[:first])[:num_tokens], device="cpu")
    places = permutation(num_tokens, source)
    ids[places[: len(taken)]] = taken
    ids[places[len(taken) :: 2]] = taken[0]
    return ids


def _draw_weight(case: EmbeddingCase, mode: str, seed: int) -> torch.Tensor:
    shape, source = case.shapes()["weight"], generator(mode, seed, "weight")
    largest = 2 ** SIGNIFICAND_BITS[case.dtype] - 1
    if mode == "special":
        return draw_special(case.dtype, seed, shape, source)
    if mode == "index":
        numbers = torch.arange(math.prod(shape), device="cpu").remainder(largest).add_(1)
        return numbers.to(DTYPES[case.dtype]).view(shape)
    if mode == REAL_MODE:
        return _draw_real(case, shape, source)
    return odd_integers(shape, 1, largest, source).to(DTYPES[case.dtype])


def _draw_cotangent(case: EmbeddingCase, mode: str, seed: int, ids: torch.Tensor) -> torch.Tensor:
    """Draws the cotangent (T, D). Of an id that occurs more than 2**p times, only the first 2**p tokens are nonzero.

    If sums are rounded, fewer tokens are nonzero: see `draw_embedding`.
    """
    shape, source = (len(ids), case.embedding_dim), generator(mode, seed, "cotangent")
    rounds = mode == REAL_MODE or case.scale_grad_by_freq
    limit = 2 ** SIGNIFICAND_BITS[case.dtype]
    sides = signs((case.embedding_dim,), generator(mode, seed, "cotangent sides"))
    occurrences = torch.bincount(ids)[ids]  # n_v of each token's id
    if mode == REAL_MODE:
        cotangent = without_subnormals(nearly_normal(shape, source) + sides)
    else:
        cotangent = torch.zeros(shape, dtype=torch.int64, device="cpu")
        for count in sorted(set(occurrences.tolist())):
            tokens = (occurrences == count).nonzero()[:, 0]
            high = odd_floor(max(1, limit // count))
            cotangent[tokens] = odd_integers((len(tokens), case.embedding_dim), 1, high, source)
        cotangent = cotangent.abs() * sides if rounds else cotangent
    cotangent[_earlier_occurrences(ids) >= (limit // _SHARE_ADDED if rounds else limit)] = 0
    return cotangent.to(DTYPES[case.dtype])


def _earlier_occurrences(ids: torch.Tensor) -> torch.Tensor:
    """Returns for each token how many earlier tokens have the same id."""
    order = torch.argsort(ids, stable=True)
    ranked = ids[order]
    earlier = torch.empty_like(ids)
    earlier[order] = torch.arange(len(ids), device="cpu") - torch.searchsorted(ranked, ranked)
    return earlier


def _draw_real(case: EmbeddingCase, shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    value = nearly_normal(shape, source)
    return without_subnormals(value).to(DTYPES[case.dtype])
