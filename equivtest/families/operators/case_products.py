"""Lists matrix products and convolutions."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivtest.families.operators.case_arguments import equations, images
from equivtest.families.operators.case_forms import Form, Signature, alike, either, products, with_arguments
from equivtest.families.operators.case_operator import Call, Operator


def _scaled(form: Form) -> Form:
    """Returns the form's signatures, and again with factors for the first operand and for the product."""
    return either(form, with_arguments(form, beta=2, alpha=-3))


def _of_either(of_lines: Call, of_images: Call) -> Call:
    return lambda x, *others, **how: (of_images if x.dim() == 4 else of_lines)(x, *others, **how)


ROWS = (
    Operator("mm", torch.mm, products("mk", "kn"), num_dims=(2,)),
    Operator("bmm", torch.bmm, products("bmk", "bkn"), num_dims=(3,)),
    Operator("mv", torch.mv, products("mk", "k"), num_dims=(2,)),
    Operator("dot", torch.dot, alike(), num_dims=(1,)),
    Operator("outer", torch.outer, lambda shape: (Signature((shape, (3,))), Signature(((2,), shape))), num_dims=(1,)),
    Operator(
        "matmul",
        torch.matmul,
        either(
            *(
                products(*dims)
                for dims in (
                    ("mk", "kn"),
                    ("bmk", "bkn"),
                    ("bmk", "kn"),
                    ("mk", "k"),
                    ("k", "kn"),
                    ("bmk", "k"),
                    ("mk", "bkn"),
                    ("1mk", "bkn"),
                )
            )
        ),
        num_dims=(2, 3),
    ),
    Operator(
        "addmm",
        torch.addmm,
        either(products("n", "mk", "kn"), products("mn", "mk", "kn"), products("1n", "mk", "kn")),
        num_dims=(2,),
    ),
    Operator(
        "addmm scaled",
        lambda a, b, c: torch.addmm(a, b, c, beta=2, alpha=3),
        products("mn", "mk", "kn"),
        num_dims=(2,),
    ),
    Operator("baddbmm", torch.baddbmm, _scaled(products("bmn", "bmk", "bkn")), num_dims=(3,)),
    Operator("addmv", torch.addmv, _scaled(products("m", "mk", "k")), num_dims=(2,)),
    Operator(
        "nn.functional.linear",
        functional.linear,
        either(products("mk", "nk"), products("mk", "nk", "n"), products("bmk", "nk", "n"), products("bmk", "nk")),
        num_dims=(2, 3),
    ),
    Operator("einsum", lambda a, b, equation: torch.einsum(equation, a, b), equations, num_dims=(2, 3)),
    Operator("convolution", _of_either(functional.conv1d, functional.conv2d), images(), num_dims=(3,)),
    Operator(
        "convolution transposed",
        _of_either(functional.conv_transpose1d, functional.conv_transpose2d),
        images(transposed=True),
        num_dims=(3,),
    ),
)
