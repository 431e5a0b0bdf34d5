"""Bounds a parallel module's error: runs the unsharded module once more and counts the roundings of every operation.

An operation without a rule in `equivtest.oracle.running_rules` is decomposed as torch decomposes it. If torch cannot
decompose the operation, no bound is known, and the module is refused. The bounds hold for every program that computes
the same formulas, in any order of summation and divided among the ranks in any way.

Source: torch.utils._python_dispatch.TorchDispatchMode, which sees forward and backward below autograd, and
torch._decomp.decomposition_table (2.13.0).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from equivtest.oracle.exact import InexactData
from equivtest.oracle.lists import PREFIX as LISTS
from equivtest.oracle.lists import each_apart
from equivtest.oracle.modes import Mode
from equivtest.oracle.places import Places
from equivtest.oracle.ranged import Parts, Ranged, constant
from equivtest.oracle.rounding import Arithmetic, Bounded
from equivtest.oracle.running_choices import choice_of, converted
from equivtest.oracle.running_complex import APART as COMPLEX_APART
from equivtest.oracle.running_complex import MAKES, VIEWS, has_complex
from equivtest.oracle.running_factors import FACTORED
from equivtest.oracle.running_kernels import KERNELS
from equivtest.oracle.running_operands import (
    is_floating,
    is_whole,
    joined,
    leaves,
    mapped,
    moved,
    narrowest,
    of_each,
    ones,
    values_of,
    widened,
)
from equivtest.oracle.running_operators import (
    COMPARES,
    FACTORS,
    MADE,
    MOVES,
    PUTS,
    SETS,
    SUMS,
    UNKNOWN,
    UNKNOWN_IN_FLOAT64,
    WORDS,
)
from equivtest.oracle.running_outs import Kernel, Out
from equivtest.oracle.running_parts import APART
from equivtest.oracle.running_roundings import Roundings, partial_sums
from equivtest.oracle.running_rules import RULES, clamp, divided_to_whole, exact_where, power_by, power_of
from equivtest.oracle.running_special import RULES as SPECIAL_RULES
from equivtest.oracle.running_sums import REDUCTIONS
from equivtest.oracle.running_transforms import TRANSFORMS, transform
from equivtest.oracle.running_windows import RULES as WINDOW_RULES
from equivtest.tensors import DTYPES, dtype_name

UNDECIDED = "undecided: "
OTHER_RULES = WINDOW_RULES | SPECIAL_RULES | {"clamp": clamp}  # rules that take any keyword


class RunningError(Mode):
    """Adds to each floating-point result within its context a bound on the error of a correct program: see `Ranged`.

    Attributes:
        undecided: Message that names the first operation whose choice may differ in a correct program, such as an
            argmax of nearly equal elements. With such an operation, no result has a bound. The message is '' if there
            is no such operation.

    Raises:
        InexactData: no bound is known for an operation.
    """

    def __init__(self, arithmetic: Arithmetic, ranks: int, places: Places | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.roundings = Roundings(arithmetic, ranks)
        self.places = places or Places()
        self.undecided = ""
        self.num_operations = 0

    @staticmethod
    def exactly(tensor: torch.Tensor) -> Ranged:
        """Copies a tensor that is the same in every program, with an error of 0. Call it outside of the mode."""
        return Parts.of(tensor.detach().clone()).wrapped()

    def bounded(self, tensor: torch.Tensor) -> Bounded:
        """Returns a float64 copy of a result, with its bound. The bound also allows for an average over the ranks."""
        assert isinstance(tensor, Ranged)
        if tensor.is_complex():
            raise InexactData("no bound is known for complex results: return torch.view_as_real of them")
        assert not bool((tensor.error < 0).any())
        allowed = tensor.error + self.roundings.averaged(Parts.of(tensor))
        allowed = allowed * (1 + 2**-20)  # for the roundings of the errors themselves
        allowed = allowed.nan_to_num(nan=torch.inf, posinf=torch.inf)
        if self.undecided:
            allowed = torch.full_like(allowed, torch.inf)
        derivation = self.undecided or (
            f"running error of {self.num_operations} operations, {self.roundings.words}, with sums divided among "
            f"{self.roundings.ranks} ranks, compared with the unsharded module in the same dtype"
        )
        return Bounded(tensor.value.detach().to(torch.float64, copy=True), allowed, derivation)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.places.note()
        try:
            with torch._C.DisableTorchFunction():  # modes that follow the module's calls must not see these
                return self._counted(func, args, kwargs or {})
        except InexactData:
            self.places.refuse()
            raise

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            raise InexactData(f"{name} draws at random, so two runs differ")
        if name == "_local_scalar_dense" and not _are_off(args):
            return func(*values_of(args))
        outs = [name for name in _names_of_outs(func) if kwargs.get(name) is not None] if kwargs else []
        if any(isinstance(kwargs[name], Ranged) for name in outs):
            return self._put(func, outs, args, kwargs)
        if name.startswith(LISTS):
            with self:
                return each_apart(func, args, kwargs)
        tensors = leaves((args, kwargs))
        is_unknown = name in UNKNOWN or (name in UNKNOWN_IN_FLOAT64 and _has_float64(tensors))
        if is_unknown or outs or (name == "view" and func._overloadname == "dtype"):
            raise _unknown(name)
        if name in MAKES or has_complex(tensors):
            return self._of_pairs(func, name, args, kwargs)
        if name.endswith("_") and not name.endswith("__"):
            return self._write(func, name.rstrip("_"), args, kwargs)
        if name in MADE or not any(map(is_floating, tensors)):
            return self._made(func, name, args, kwargs)
        if name in ("cat", "stack"):
            return joined(func, args, kwargs)
        if name in MOVES:
            return moved(func, args, kwargs)
        if name in ("_to_copy", "to"):
            return self._converted(func, args, kwargs)
        return self._computed(func, name, args, kwargs)

    def _made(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation without floating-point operands, such as `torch.arange`. It adds only its own rounding."""
        result = func(*values_of(args), **values_of(kwargs))
        if not any(map(is_floating, leaves(result))):
            return result
        if name in RULES.keys() - {"where"} or name in REDUCTIONS:  # on integers, such as a mask times a number
            plain = Parts.of(result)
            parts = self.roundings.rounded(result, plain.error, plain.magnitude, self.roundings.of_curve)
            return constant(exact_where(name, args, parts))
        if name not in MADE | MOVES | {"_to_copy", "to", "where", "masked_fill"}:
            raise _unknown(name)
        return mapped(lambda each: constant(Parts.of(each)) if is_floating(each) else each, result)

    def _of_pairs(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation on complex numbers, whose real and imaginary parts have separate bounds."""
        if name in MADE:
            return self._made(func, name, args, kwargs)
        if name in MOVES | VIEWS:
            return moved(func, args, kwargs)
        if name == "_to_copy" and kwargs.get("dtype", args[0].dtype) == args[0].dtype:
            return _cloned(args[0])
        if name in TRANSFORMS:
            self.num_operations += 1
            found = transform(self.roundings, func, *args)
            return constant(found) if _is_constant(args) else found.wrapped()
        apart = COMPLEX_APART.get(name.rstrip("_"))
        is_into_reals = name == "copy_" and not args[0].is_complex()
        if apart is None or is_into_reals or (name.endswith("_") and not isinstance(args[0], Ranged)):
            raise InexactData(f"no bound is known for {name} of complex numbers")
        with self:
            results = apart(*args, **kwargs)
        if name.endswith("_"):
            return self._written(args[0], Parts.of(results), is_constant=_is_constant((args, kwargs)))
        return results

    def _computed(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in COMPARES:
            return self._compared(func, name, args)
        if is_whole(kwargs.get("dtype")) and not _are_off((args, kwargs)):
            return func(*values_of(args), **values_of(kwargs))
        if name in APART:
            with self:
                return APART[name](*args, **kwargs)
        if name in FACTORED:
            return FACTORED[name](*args, **kwargs)
        narrow = narrowest((args, kwargs))
        if narrow is not None and name in KERNELS and func.namespace == "aten" and self.roundings.coarse is None:
            wide = self.roundings.record(narrow).accumulate
            if wide != dtype_name(narrow):
                return self._in_more_bits(func, (narrow, DTYPES[wide]), args, kwargs)
        if (choose := choice_of(name, func._overloadname, args)) is not None:
            chosen, is_certain = choose(*args, **kwargs)
            self._require_certain(name, is_certain=is_certain)
            return chosen
        found = self._by_rule(func, name, args, kwargs) if func.namespace == "aten" else None
        if found is not None:
            self.num_operations += 1
            if isinstance(found, Parts):
                return constant(exact_where(name, args, found)) if _is_constant((args, kwargs)) else found.wrapped()
            return tuple(None if parts is None else parts.wrapped() for parts in found)
        known = decomposition_table.get(func)
        taken_apart: Callable[..., Any] = known or func.decompose  # torch itself runs the latter
        before = self.roundings
        try:
            if narrow is not None and before.coarse is None and known is not None:
                self.roundings = before.where_unknown(narrow)
            with self:
                result = taken_apart(*args, **kwargs)
        except InexactData as error:
            raise InexactData(f"{error} (a part of {name})") from None
        finally:
            self.roundings = before
        if result is NotImplemented:
            raise _unknown(name)
        if any(each.alias_info is not None for each in func._schema.returns):
            return result
        handed = {id(each) for each in leaves(args)}
        results = tuple(result) if isinstance(result, tuple) else result
        return mapped(lambda each: _cloned(each) if id(each) in handed else each, results)

    def _in_more_bits(
        self, func: Any, dtypes: tuple[torch.dtype, torch.dtype], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs an operation as torch's 16-bit kernel does: computes in `dtypes[1]`, and stores in `dtypes[0]`."""
        flat, how = tree_flatten((args, kwargs))
        wider, named = tree_unflatten([widened(each, *dtypes) for each in flat], how)
        with self:
            stored = partial(self._stored_within, dtypes=dtypes)
            kernel = Kernel(func, dtypes[0], partial(stored, is_whole=True), partial(stored, is_whole=False))
            results = KERNELS[func.overloadpacket.__name__](kernel, *wider, **named)
        likes = func(*values_of(args), **values_of(kwargs))
        outs, likes = (results, likes) if isinstance(results, tuple) else ((results,), (likes,))
        held = tuple(self._stored(out, like, (args, kwargs)) for out, like in zip(outs, likes, strict=True))
        return held if isinstance(results, tuple) else held[0]

    def _stored_within(
        self, tensor: torch.Tensor, *, dtypes: tuple[torch.dtype, torch.dtype], is_whole: bool
    ) -> Ranged:
        narrow, wide = dtypes
        with _disable_current_modes():
            parts = Parts.of(tensor)
            parts = parts._replace(magnitude=parts.reach) if is_whole else parts
            parts = self.roundings.stored(parts, narrow, 1)
            return parts._replace(value=parts.value.to(wide)).wrapped()

    def _stored(self, out: Out, like: Any, given: Any) -> Any:
        """Rounds a kernel's result to the dtype in which the kernel stores it. The result has the dtype of `like`."""
        if out.tensor is None:
            return None
        parts = Parts.of(out.tensor)
        if out.is_whole:
            parts = parts._replace(magnitude=parts.reach)
        if out.factors is not None:
            gradient, slope = map(Parts.of, out.factors)
            shares = gradient.magnitude * slope.reach
            parts = parts._replace(magnitude=torch.maximum(shares, parts.reach))
        if parts.value.dtype != (dtype := out.dtype or like.dtype):
            parts = self.roundings.stored(parts, dtype, out.stores, is_sum=out.is_sum, one_by_one=out.one_by_one)
        if out.flushes:
            is_subnormal = parts.size <= torch.finfo(parts.value.dtype).smallest_normal  # now, or before it was rounded
            parts = parts._replace(error=parts.error + torch.where(is_subnormal, parts.size, 0.0))
        parts = parts._replace(value=parts.value.to(like.dtype))
        return constant(parts) if _is_constant(given) else parts.wrapped()

    def _by_rule(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the operation's result with its bound. Returns None if no rule exists for the operation."""
        if name in REDUCTIONS:
            names = [argument.name for argument in func._schema.arguments[1:]]
            return REDUCTIONS[name](self.roundings, args[0], **dict(zip(names, args[1:], strict=False)), **kwargs)
        if name in SUMS:
            sizes = {**kwargs, "alpha": abs(kwargs["alpha"])} if "alpha" in kwargs else kwargs
            value, error, magnitude = of_each(func, args, kwargs, sizes)
            terms = func(*ones(args), **(sizes | {"alpha": 1} if "alpha" in sizes else sizes))
            how = {"num": terms} if name == "cumsum" else {"num": 0, "stores": terms}
            return self.roundings.rounded(value, error, magnitude, added=partial_sums(value, magnitude), **how)
        if name in PUTS and func._overloadname == "value":  # a number, which has no error
            places = zip(Parts.of(args[0]), (args[3], 0.0, abs(args[3])), strict=True)
            return Parts(*(func(part, *args[1:3], number) for part, number in places))
        if name in PUTS:
            return Parts(*of_each(func, args, kwargs, kwargs))
        if name == "masked_fill":
            return RULES["where"](self.roundings, args[1], args[2], args[0])
        if name == "pow" and isinstance(args[1], torch.Tensor):
            if func._overloadname != "Scalar":
                return power_by(self.roundings, *args)
            return power_of(self.roundings, *args) if args[0] > 0 else None
        if kwargs.get("rounding_mode"):
            return divided_to_whole(self.roundings, *args, **kwargs)
        if name in OTHER_RULES:
            return OTHER_RULES[name](self.roundings, *args, **kwargs)
        return RULES[name](self.roundings, *args, **kwargs) if name in RULES and kwargs.keys() <= FACTORS else None

    def _converted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Converts a tensor to another dtype.

        A floating-point result gets the rounding of the conversion as an error.  Integers or bools must be the same in
        every correct program; if they may differ, `undecided` is set.
        """
        parts = Parts.of(args[0])
        value = func(parts.value, *args[1:], **kwargs)
        if not is_floating(value):
            whole, is_certain = converted(args[0], value) if isinstance(args[0], Ranged) else (value, True)
            self._require_certain("a conversion to whole numbers", is_certain=is_certain)
            return whole
        if torch.promote_types(value.dtype, parts.value.dtype) == value.dtype:  # the new dtype holds every value
            found = Parts(value, parts.error.clone(), parts.magnitude.clone())
        else:
            found = self.roundings.rounded(value, parts.error, parts.magnitude)
            is_beyond = value.isinf() & (parts.size - parts.error > torch.finfo(value.dtype).max)  # in every program
            found = found._replace(error=torch.where(is_beyond, 0.0, found.error))
        return constant(exact_where("to", (parts.value,), found)) if _is_constant(args) else found.wrapped()

    def _compared(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        a, b = map(Parts.of, args)
        error = a.error + b.error
        if args[0] is args[1]:  # only a NaN differs from itself
            is_unclear = bool(error.isinf().any())
        else:
            is_unclear = bool((((a.value.double() - b.value.double()).abs() <= error) & (error > 0)).any())
        self._require_certain(name, is_certain=not is_unclear)
        return func(*values_of(args))

    def _require_certain(self, name: str, *, is_certain: bool) -> None:
        """Records the first operation whose outcome may differ in a correct program."""
        if not is_certain and not self.undecided:
            what = f"{UNDECIDED}{WORDS.get(name, name)} depends on values that may differ only by roundings"
            self.undecided = f"{what}{self.places.here()}"

    def _write(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an in-place operation. Computes the result in new memory, then writes the result to the target."""
        target, *others = args
        if not is_floating(target):
            if not isinstance(target, torch.Tensor) or _are_off((others, kwargs)):
                raise _unknown(f"{name}_")
            return func(*values_of(args), **values_of(kwargs))
        if not isinstance(target, Ranged):
            if target.dim() or _are_off((others, kwargs)) or not _is_constant((others, kwargs)):
                raise InexactData(f"{name}_ writes into a tensor that was made before the module ran")
            return func(*values_of(args), **values_of(kwargs))  # a counter, such as the number of steps
        if name in SETS:
            source = Parts.of(others[0] if others else SETS[name])
        else:
            packet, overload = getattr(torch.ops.aten, name, None), func._overloadname
            apart = getattr(packet, f"Tensor_{overload}", getattr(packet, overload, None))  # pow.Scalar has a number
            if apart is None or name in MOVES:
                raise _unknown(f"{name}_")
            with self:
                source = Parts.of(apart(*args, **kwargs))
        return self._written(target, source, is_constant=_is_constant((others, kwargs)))

    def _put(self, func: Any, outs: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes results in new memory, then writes them to the tensors that the call gives by the names `outs`."""
        others = {name: each for name, each in kwargs.items() if name not in outs}
        with self:
            found = func.overloadpacket(*args, **others)
        targets, results = [kwargs[name] for name in outs], found if isinstance(found, tuple) else (found,)
        for target, result in zip(targets, results, strict=True):
            if result.shape != target.shape or (is_floating(target) and not isinstance(target, Ranged)):
                raise _unknown(f"{func.overloadpacket.__name__} with an out= of another shape, or made before")
            if isinstance(target, Ranged):
                self._written(target, Parts.of(result), is_constant=_is_constant((args, others)))
            else:
                target.copy_(result)
        return tuple(targets) if isinstance(found, tuple) else targets[0]

    def _written(self, target: Ranged, found: Parts, *, is_constant: bool) -> Ranged:
        target.origin.is_constant &= is_constant
        if found.value.dtype != target.dtype:
            found = self.roundings.rounded(found.value.to(target.dtype), found.error, found.magnitude)
        for part, written in zip(Parts.of(target), found, strict=True):
            part.copy_(written)
        return target


@cache
def _names_of_outs(func: Any) -> tuple[str, ...]:
    """Returns the names of the arguments to which the operation writes its results, such as 'values' and 'indices'."""
    return tuple(argument.name for argument in func._schema.arguments if argument.is_out)


def _cloned(operand: Any) -> Any:
    """Copies an operand that a decomposition returned as its result, so that later writes do not change the operand."""
    if not isinstance(operand, Ranged):
        return operand
    copy = Parts(*(part.clone() for part in Parts.of(operand))).wrapped()
    copy.origin.is_constant = operand.origin.is_constant
    return copy


def _has_float64(given: list[Any]) -> bool:
    return any(isinstance(each, torch.Tensor) and each.dtype == torch.float64 for each in given)


def _unknown(name: str) -> InexactData:
    return InexactData(f"no bound is known for {WORDS.get(name, name)}")


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a random operation draws numbers in this call. Dropout with p = 0, for example, draws none."""
    named = {each.name: each.default_value for each in func._schema.arguments}
    named |= dict(zip(named, args, strict=False)) | kwargs
    dropped = [named[name] for name in ("dropout_p", "p") if isinstance(named.get(name), int | float)]
    return named.get("train") is not False and 0 not in dropped


def _are_off(tree: Any) -> bool:
    """True if some tensor of the tree has an error, so that a correct program may have other values in the tensor."""
    return any(isinstance(each, Ranged) and bool((each.error != 0).any()) for each in leaves(tree))


def _is_constant(tree: Any) -> bool:
    return all(each.origin.is_constant for each in leaves(tree) if isinstance(each, Ranged))
