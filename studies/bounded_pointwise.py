"""Compares pointwise functions with their bounds on every number of a 16-bit dtype, for `studies.bounded_ops`.

`ROWS` calls each pointwise backward kernel of torch directly, with operands whose bits are known.  Two requirements
hold for a bound.  First, it admits torch's own results for tensors that are contiguous, strided, shorter and longer
than a vector, and the result of an exact program that rounds once.  Second, it is narrow: an exact program that also
makes the SPARE roundings of float32 that a kernel may make nearly reaches it.  NaN is left out, because the vectors and
the rest of one kernel disagree on it (elu_backward, hardtanh_backward; torch 2.13.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from equivtest.oracle.rounding import TORCH_CPU, Bounded
from equivtest.oracle.running import RunningError
from equivtest.oracle.running_roundings import SPARE

NARROW = ("float16", "bfloat16")
LEAST = 0.05
"""The largest error must be at least this fraction of the bound, unless `REASONS` has a reason."""

SLOPE = 129 / 256
"""A factor whose products often lie in the middle between two numbers.  Programs round them up or down."""

SIZES = (1, 7, 15, 17, 31, 33, 63, 65)
"""Sizes of tensors around the vector lengths: 16 numbers of 16 bits in 256 bits of memory, 32 in 512."""


class Call(NamedTuple):
    args: tuple[Any, ...]
    named: dict[str, Any]


class Numbers:
    """All numbers of a 16-bit dtype except NaN, and random numbers of any size.

    Args:
        step: Takes every `step`-th number.
    """

    def __init__(self, dtype: str, seed: int, step: int = 1) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.source = torch.Generator().manual_seed(seed)
        every = torch.arange(-(2**15) + seed % step, 2**15, step).to(torch.int16).view(self.dtype)
        every = every[~every.isnan()]
        self.all = every[torch.randperm(len(every), generator=self.source)]

    def of_size(self, like: torch.Tensor, powers: int = 12) -> torch.Tensor:
        """Returns numbers of either sign, with random significands, from 2**-powers to 2**powers."""
        exponents = torch.randint(-powers, powers + 1, like.shape, generator=self.source)
        signs = 2 * torch.randint(2, like.shape, generator=self.source) - 1
        significands = 1 + torch.rand(like.shape, generator=self.source, dtype=torch.float64)
        return (signs * significands * 2.0**exponents).to(self.dtype)

    def near(self, x: torch.Tensor) -> torch.Tensor:
        """Returns targets for a loss: half of them near x, half of any size."""
        away = 1 + 0.3 * torch.randn(x.shape, generator=self.source)
        is_near = torch.rand(x.shape, generator=self.source) < 0.5
        return torch.where(is_near, (x * away).to(self.dtype), self.of_size(x, 4))

    def probabilities(self, like: torch.Tensor) -> torch.Tensor:
        return torch.rand(like.shape, generator=self.source).to(self.dtype)


Builder = Callable[[Numbers], Call]
Domain = Callable[[torch.Tensor], torch.Tensor]


def _everywhere(x: torch.Tensor) -> torch.Tensor:
    return x


def _positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def _probable(x: torch.Tensor) -> torch.Tensor:
    return x[(x >= 0) & (x <= 1)]


def _sine(x: torch.Tensor) -> torch.Tensor:
    return x[x.abs() <= 1]


def _of(*more: Any, within: Domain = _everywhere, **named: Any) -> Builder:
    """Returns a builder of a backward's operands: the gradient, the forward's input or output, and then `more`."""

    def build(numbers: Numbers) -> Call:
        x = within(numbers.all)
        return Call((numbers.of_size(x), x, *more), named)

    return build


def _elu(alpha: float, scale: float, inner: float, *, of_result: bool) -> Builder:
    def build(numbers: Numbers) -> Call:
        x = numbers.all[numbers.all >= -alpha * scale] if of_result else numbers.all
        return Call((numbers.of_size(x), alpha, scale, inner, of_result, x), {})

    return build


def _gradient_of(numbers: Numbers, x: torch.Tensor, *, is_mean: bool) -> torch.Tensor:
    """Returns the gradient of a loss.  The gradient of a mean is one number, about as large as the mean has terms."""
    return 2**14 * numbers.of_size(x[:1], 1).reshape(()) if is_mean else numbers.of_size(x)


def _loss(*more: Any, is_mean: bool = False) -> Builder:
    def build(numbers: Numbers) -> Call:
        x = numbers.all
        return Call((_gradient_of(numbers, x, is_mean=is_mean), x, numbers.near(x), int(is_mean), *more), {})

    return build


def _log_sigmoid(numbers: Numbers) -> Call:
    x = numbers.all
    return Call((numbers.of_size(x), x, torch.ops.aten.log_sigmoid_forward(x)[1]), {})


def _glu(numbers: Numbers) -> Call:
    x = numbers.all
    return Call((numbers.of_size(x)[:, None], torch.stack([numbers.of_size(x, 4), x], -1), -1), {})


def _with_another(*more: Any) -> Builder:
    """Returns a builder whose third operand has values like the weights of prelu, or the noise of rrelu."""

    def build(numbers: Numbers) -> Call:
        x = numbers.all
        return Call((numbers.of_size(x), x, numbers.of_size(x, 4), *more), {})

    return build


def _binary_cross_entropy(*, is_mean: bool, is_weighted: bool = False) -> Builder:
    def build(numbers: Numbers) -> Call:
        x = _probable(numbers.all)
        weight = numbers.of_size(x, 2) if is_weighted else None
        return Call((_gradient_of(numbers, x, is_mean=is_mean), x, numbers.probabilities(x), weight, int(is_mean)), {})

    return build


def _soft_margin(*, is_mean: bool) -> Builder:
    def build(numbers: Numbers) -> Call:
        x = numbers.all
        return Call((_gradient_of(numbers, x, is_mean=is_mean), x, numbers.of_size(x).sign(), int(is_mean)), {})

    return build


def _masked(*more: Any) -> Builder:
    def build(numbers: Numbers) -> Call:
        return Call((numbers.all, torch.rand(numbers.all.shape, generator=numbers.source) < 0.7, *more), {})

    return build


ROWS: dict[str, Builder] = {
    "_prelu_kernel_backward": _with_another(),
    "binary_cross_entropy_backward": _binary_cross_entropy(is_mean=False),
    "binary_cross_entropy_backward, weighted mean": _binary_cross_entropy(is_mean=True, is_weighted=True),
    "elu_backward": _elu(1.3, 1.1, 0.7, of_result=False),
    "elu_backward of the result": _elu(1.0, 1.0, 1.0, of_result=True),
    "elu_backward of selu's result": _elu(1.6732632423543772, 1.0507009873554805, 1.0, of_result=True),
    "fake_quantize_per_channel_affine_cachemask_backward": _masked(),
    "fake_quantize_per_tensor_affine_cachemask_backward": _masked(),
    "gelu_backward": _of(),
    "gelu_backward by tanh": _of(approximate="tanh"),
    "glu_backward": _glu,
    "hardshrink_backward": _of(0.3),
    "hardsigmoid_backward": _of(),
    "hardswish_backward": _of(),
    "hardtanh_backward": _of(-1.1, 0.9),
    "huber_loss_backward": _loss(0.7),
    "huber_loss_backward, mean": _loss(0.7, is_mean=True),
    "infinitely_differentiable_gelu_backward": _of(),
    "leaky_relu_backward": _of(SLOPE, False),  # noqa: FBT003
    "log_sigmoid_backward": _log_sigmoid,
    "logit_backward": _of(within=_probable),
    "logit_backward with eps": _of(0.01),
    "mish_backward": _of(),
    "mse_loss_backward": _loss(),
    "mse_loss_backward, mean": _loss(is_mean=True),
    "native_dropout_backward": _masked(1 / 0.7),
    "rrelu_with_noise_backward": _with_another(0.1, 0.3, True, False),  # noqa: FBT003
    "rrelu_with_noise_backward, eval": _with_another(SLOPE / 2, 3 * SLOPE / 2, False, False),  # noqa: FBT003
    "sigmoid_backward": _of(within=_probable),
    "silu_backward": _of(),
    "smooth_l1_loss_backward": _loss(0.7),
    "smooth_l1_loss_backward, mean": _loss(0.7, is_mean=True),
    "soft_margin_loss_backward": _soft_margin(is_mean=False),
    "soft_margin_loss_backward, mean": _soft_margin(is_mean=True),
    "softplus_backward": _of(1.3, 20.0),
    "softplus_backward at its threshold": _of(1.0, 3.0),
    "softshrink_backward": _of(0.3),
    "tanh_backward": _of(within=_sine),
    "threshold_backward": _of(0.3),
    "threshold_backward of relu": _of(0),
}
"""Name of a kernel, and what is special about the call -> function that builds the call's operands."""

REASONS: dict[str, str] = {
    "hardsigmoid_backward": "no significand of 16 bits times a sixth lies near the middle between two numbers",
    "threshold_backward": "nothing is rounded; only beside the stored threshold either may pass",
}
"""Name of a row -> why its largest error is less than LEAST of the bound."""

NOT_POINTWISE = {
    "sums, products, norms and softmaxes": """
        _batch_norm_impl_index_backward _cdist_backward _convolution_double_backward _ctc_loss_backward
        _fused_rms_norm_backward _log_softmax_backward_data _masked_softmax_backward _pdist_backward
        _segment_reduce_backward _slow_conv2d_backward _softmax_backward_data _weight_norm_differentiable_backward
        _weight_norm_interface_backward batch_norm_backward batch_norm_backward_elemt batch_norm_backward_reduce
        conv_tbc_backward convolution_backward convolution_backward_overrideable cumprod_backward linear_backward
        matmul_backward matrix_exp_backward multi_margin_loss_backward multilabel_margin_loss_backward
        native_batch_norm_backward native_group_norm_backward native_layer_norm_backward nll_loss2d_backward
        nll_loss_backward _fake_quantize_learnable_per_channel_affine_backward
        _fake_quantize_learnable_per_tensor_affine_backward
    """,
    "attention": """
        _efficient_attention_backward _flash_attention_backward _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_fused_attention_overrideable_backward
    """,
    "pooling, sampling and embeddings": """
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _embedding_bag_backward
        _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward _embedding_bag_sparse_backward
        _grid_sampler_2d_cpu_fallback_backward _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward
        _upsample_lanczos2d_aa_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
        _upsample_nearest_exact3d_backward adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
        adaptive_max_pool3d_backward affine_grid_generator_backward avg_pool2d_backward avg_pool3d_backward
        embedding_backward embedding_dense_backward embedding_sparse_backward fractional_max_pool2d_backward
        fractional_max_pool3d_backward grid_sampler_2d_backward grid_sampler_3d_backward max_pool2d_backward
        max_pool2d_with_indices_backward max_pool3d_with_indices_backward reflection_pad1d_backward
        reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
        replication_pad3d_backward upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        upsample_trilinear3d_backward
    """,
    "moves numbers": """
        _backward cummaxmin_backward diagonal_backward gather_backward index_select_backward masked_scatter_backward
        masked_select_backward select_backward slice_backward to_dense_backward to_mkldnn_backward trace_backward
        unfold_backward value_selecting_reduction_backward
    """,
    "sparse and nested tensors": """
        _gather_sparse_backward _nested_select_backward _nested_sum_backward _sparse_log_softmax_backward_data
        _sparse_mm_reduce_impl_backward _sparse_softmax_backward_data _sparse_sum_backward
    """,
    "of another device, of a whole layer, or of the forward mode": """
        _cudnn_attention_backward _cudnn_rnn_backward _pack_padded_sequence_backward
        _scaled_dot_product_cudnn_attention_backward _thnn_differentiable_gru_cell_backward
        _thnn_differentiable_lstm_cell_backward _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell_backward
        _thnn_fused_lstm_cell_backward_impl cudnn_affine_grid_generator_backward cudnn_batch_norm_backward
        cudnn_grid_sampler_backward glu_backward_jvp lstm_mps_backward miopen_batch_norm_backward miopen_rnn_backward
        mkldnn_adaptive_avg_pool2d_backward mkldnn_linear_backward mkldnn_linear_backward_input
        mkldnn_linear_backward_weights mkldnn_max_pool2d_backward mkldnn_max_pool3d_backward mkldnn_rnn_layer_backward
        mps_convolution_backward mps_convolution_transpose_backward
    """,
}
"""Reason why `ROWS` need not judge backward operators of torch 2.13.0 -> names of these operators."""


def not_judged() -> list[str]:
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "aten::" in name}
    judged = {name.split()[0].rstrip(",") for name in ROWS}
    others = {name for listed in NOT_POINTWISE.values() for name in listed.split()}
    return sorted({name for name in names if "backward" in name} - judged - others)


Found = Iterator[tuple[str, torch.Tensor, Bounded]]


def backward_kernels(dtype: str, seed: int = 0, *, step: int = 1, rows: Iterable[str] = ROWS) -> Found:
    for name in rows:
        kernel = getattr(torch.ops.aten, name.split()[0].rstrip(","))
        call = ROWS[name](Numbers(dtype, seed, step))
        bounds = _bounds(kernel, call, dtype)
        for results in _programs(kernel, call):
            for result, bound in zip(results, bounds, strict=True):
                yield f"dense: {name}", result, bound


def _bounds(kernel: Any, call: Call, dtype: str) -> list[Bounded]:
    counted = RunningError(TORCH_CPU[dtype], 1)
    args = [counted.exactly(each) if _is_floating(each) else each for each in call.args]
    with counted:
        found = _several(kernel(*args, **call.named))
    return [counted.bounded(each) for each in found]


def _programs(kernel: Any, call: Call) -> Iterator[tuple[torch.Tensor, ...]]:
    plain = _several(kernel(*call.args, **call.named))
    yield plain
    yield _several(kernel(*map(_strided, call.args), **call.named))
    if all(each.dim() for each in call.args if isinstance(each, torch.Tensor)):  # else there is a number of elements
        yield _in_pieces(kernel, call, plain)
    dtype = plain[0].dtype
    exact = _several(kernel(*[each.double() if _is_floating(each) else each for each in call.args], **call.named))
    for off in (0, SPARE * 2.0**-24, -SPARE * 2.0**-24):
        yield tuple((each * (1 + off)).to(dtype) for each in exact)


def _in_pieces(kernel: Any, call: Call, whole: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Computes some of the results again, in tensors a little shorter or longer than a vector."""
    found, start = tuple(each.clone() for each in whole), 0
    for size in 8 * SIZES:
        some = slice(start, start + size)
        args = [each[some] if isinstance(each, torch.Tensor) else each for each in call.args]
        for each, part in zip(found, _several(kernel(*args, **call.named)), strict=True):
            each[some] = part
        start += size
    return found


def _strided(value: Any) -> Any:
    return torch.stack([value, value], -1)[..., 0] if isinstance(value, torch.Tensor) else value


def _several(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class Function(NamedTuple):
    call: Callable[[torch.Tensor], torch.Tensor]
    within: Domain = _everywhere


FUNCTIONS: dict[str, Function] = {
    "0.3 ** x": Function(lambda x: 0.3**x),
    "1 / (1 + x ** 2)": Function(lambda x: 1 / (1 + x**2)),
    "3 / x": Function(lambda x: 3.0 / x),
    "abs": Function(torch.abs),
    "acos": Function(torch.acos, _sine),
    "addcdiv": Function(lambda x: torch.addcdiv(x, x, x.flip(0), value=0.3)),
    "addcmul": Function(lambda x: torch.addcmul(x, x, x.flip(0), value=0.3)),
    "asin": Function(torch.asin, _sine),
    "asinh": Function(torch.asinh),
    "atan": Function(torch.atan),
    "atanh": Function(torch.atanh, _sine),
    "celu": Function(lambda x: F.celu(x, 0.7)),
    "clamp": Function(lambda x: x.clamp(-0.3, 0.7)),
    "cos": Function(torch.cos),
    "cosh": Function(torch.cosh),
    "digamma": Function(torch.digamma, _positive),
    "elu": Function(F.elu),
    "erf": Function(torch.erf),
    "erfc": Function(torch.erfc),
    "erfinv": Function(torch.erfinv, _sine),
    "exp": Function(torch.exp),
    "exp2": Function(torch.exp2),
    "expm1": Function(torch.expm1),
    "gate": Function(lambda x: x * torch.sigmoid(x)),
    "gelu": Function(F.gelu),
    "gelu by tanh": Function(lambda x: F.gelu(x, approximate="tanh")),
    "glu": Function(lambda x: F.glu(torch.stack([x, x.flip(0)], -1))[:, 0]),
    "hardshrink": Function(lambda x: F.hardshrink(x, 0.3)),
    "hardsigmoid": Function(F.hardsigmoid),
    "hardswish": Function(F.hardswish),
    "hardtanh": Function(lambda x: F.hardtanh(x, -1.1, 0.9)),
    "huber_loss": Function(lambda x: F.huber_loss(x, x.flip(0).detach(), reduction="none", delta=0.7)),
    "hypot": Function(lambda x: torch.hypot(x, x.flip(0).detach())),
    "leaky_relu": Function(F.leaky_relu),
    "lerp": Function(lambda x: torch.lerp(x, x.flip(0), 0.3)),
    "lgamma": Function(torch.lgamma, _positive),
    "log": Function(torch.log, _positive),
    "log10": Function(torch.log10, _positive),
    "log1p": Function(torch.log1p, _positive),
    "log2": Function(torch.log2, _positive),
    "logaddexp": Function(lambda x: torch.logaddexp(x, x.flip(0).detach())),
    "logit": Function(torch.logit, _probable),
    "logsigmoid": Function(F.logsigmoid),
    "maximum": Function(lambda x: torch.maximum(x, x.flip(0))),
    "mish": Function(F.mish),
    "mse_loss": Function(lambda x: F.mse_loss(x, x.flip(0).detach(), reduction="none")),
    "prelu": Function(lambda x: F.prelu(x[:, None], torch.full((1,), 0.3, dtype=x.dtype))[:, 0]),
    "reciprocal": Function(torch.reciprocal),
    "relu": Function(F.relu),
    "relu6": Function(F.relu6),
    "rsqrt": Function(torch.rsqrt, _positive),
    "selu": Function(F.selu),
    "sigmoid": Function(torch.sigmoid),
    "silu": Function(F.silu),
    "sin": Function(torch.sin),
    "sinh": Function(torch.sinh),
    "smooth_l1_loss": Function(lambda x: F.smooth_l1_loss(x, x.flip(0).detach(), reduction="none", beta=0.7)),
    "softplus": Function(F.softplus),
    "softshrink": Function(lambda x: F.softshrink(x, 0.3)),
    "softsign": Function(F.softsign),
    "sqrt": Function(torch.sqrt, _positive),
    "square": Function(torch.square),
    "tan": Function(torch.tan),
    "tanh": Function(torch.tanh),
    "tanhshrink": Function(F.tanhshrink),
    "threshold": Function(lambda x: F.threshold(x, 0.3, 0.7)),
    "x ** -0.5": Function(lambda x: x**-0.5, _positive),
    "x ** -0.7": Function(lambda x: x**-0.7, _positive),
    "x ** -1": Function(lambda x: x**-1),
    "x ** -2": Function(lambda x: x**-2),
    "x ** 0.3": Function(lambda x: x**0.3, _positive),
    "x ** 2": Function(lambda x: x**2),
    "x ** 2.5": Function(lambda x: x**2.5, _positive),
    "x ** 3": Function(lambda x: x**3),
    "xlogy": Function(lambda x: torch.xlogy(x, x.flip(0).detach().abs())),
}
"""Name -> function whose gradient autograd composes, or that one kernel computes."""


def functions(dtype: str, seed: int = 0, *, step: int = 1, names: Iterable[str] = FUNCTIONS) -> Found:
    for name in names:
        numbers = Numbers(dtype, seed, step)
        function, x = FUNCTIONS[name].call, FUNCTIONS[name].within(numbers.all)
        gradient, counted = numbers.of_size(x, 6), RunningError(TORCH_CPU[dtype], 1)
        ranged = counted.exactly(x), counted.exactly(gradient)
        with counted:
            right = _both(function, *ranged)
        bounds = [counted.bounded(each) for each in right]
        for given in (x.clone(), _strided(x)):
            for what, result, bound in zip(
                ("output", "gradient"), _both(function, given, gradient), bounds, strict=True
            ):
                yield f"dense: {name}, {what}", result, bound


def _both(function: Any, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output = function(x.requires_grad_())
    output.backward(gradient)
    assert x.grad is not None
    return output.detach(), x.grad
