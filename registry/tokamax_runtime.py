"""Call an op of Tokamax: what every kernel repo made from a tokamax.toml ships as `_tokamax.py`.

It knows JAX and Tokamax; the repo's op.py, which is made from the manifest, hands its functions to the torch bridge.
Neither package is imported before the first call that needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

DTYPES = {
    "float": ("float32", "bfloat16", "float16"),
    "int": ("int32", "int64"),
    "bool": ("bool",),
}


@dataclass(frozen=True)
class Rule:
    """What a tensor must be: a size per letter, "..." for any leading ones, numbers for themselves."""

    name: str
    sizes: tuple[str, ...]
    dtypes: str = "float"
    optional: bool = False

    def __str__(self) -> str:
        return _tuple_text(self.sizes)


class TokamaxCall:
    """A JAX function that calls one op of Tokamax, for one kind of device.

    op, kernel        for messages
    fn                `fn(tokamax, *arrays, implementation, **options)`, in the module `home`; where that has a function
                      <name of fn>_vjp too, (tokamax, *arrays, *gradients, implementation, **options) -> a gradient
                      per array, it is the gradient, else Tokamax's own is
    implementations   of Tokamax, best first: the first that takes the call runs
    """

    def __init__(
        self, op: str, kernel: str, home: str, package: Any, device: str, implementations: Sequence[str], arrays: int
    ):
        self.op, self.kernel, self.home, self.package = op, kernel, home, package
        self.device, self.implementations, self.arrays = device, tuple(implementations), arrays

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        return self._first_that_takes(self._function(self.op), arrays, options)

    def vjp(self, *arrays: Any, **options: Any) -> tuple:
        """The gradient of each array, None where there is none, from the arrays and the gradient of each result."""
        import jax
        import jax.numpy as jnp

        if any(not isinstance(size, int) for array in arrays if array is not None for size in array.shape):
            # Sizes are symbols where the bridge asks for shapes only.
            return tuple(None if x is None else jnp.zeros(x.shape, x.dtype) for x in arrays[: self.arrays])
        own = getattr(self._module(), f"{self.op}_vjp", None)
        if own is not None:
            return self._first_that_takes(own, arrays, options)
        inputs, gradients = list(arrays[: self.arrays]), arrays[self.arrays :]
        at = [i for i, x in enumerate(inputs) if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)]

        def call(*chosen: Any) -> Any:
            for i, value in zip(at, chosen, strict=True):
                inputs[i] = value
            return self(*inputs, **options)

        _, back = jax.vjp(call, *(inputs[i] for i in at))
        found = dict(zip(at, back(gradients if len(gradients) > 1 else gradients[0]), strict=True))
        return tuple(found.get(i) for i in range(self.arrays))

    def _first_that_takes(self, function: Callable, arrays: tuple, options: dict[str, Any]) -> Any:
        tokamax = load_tokamax(self.op, self.kernel)
        refusals = []
        with _as_if_on_tpu() if self.device == "tpu" else contextlib.nullcontext():
            for implementation in self.implementations:
                try:
                    result = function(tokamax, *arrays, implementation=implementation, **options)
                except NotImplementedError as refusal:
                    refusals.append(f"{implementation}: {refusal}")
                    continue
                if refusals:  # told, since it may be much slower
                    log.warning("%s: Tokamax runs %s, since %s", self.op, implementation, "; ".join(refusals))
                else:
                    log.info("%s: Tokamax runs %s", self.op, implementation)
                return result
        raise NotImplementedError(f"{self.op}: Tokamax takes no such call on {self.device}: {'; '.join(refusals)}")

    def _module(self) -> Any:
        return importlib.import_module(self.home, self.package)

    def _function(self, name: str) -> Callable:
        return getattr(self._module(), name)

    def __repr__(self) -> str:
        return f"<{self.op} of Tokamax on {self.device}>"


class ResultShapes:
    """A JAX function whose results have the sizes that the manifest says, for sizes that are symbols."""

    def __init__(self, rules: Sequence[Rule], results: Sequence[Rule]):
        self.rules, self.results = rules, results

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        import jax.numpy as jnp

        known: dict[str, tuple] = {}
        dtypes = {}
        for rule, array in zip(self.rules, arrays, strict=True):
            if array is not None:
                dtypes[rule.name] = array.dtype
                leading = len(array.shape) - len(rule.sizes) + 1 if rule.sizes[:1] == ("...",) else 0
                known |= {"...": array.shape[:leading]} if leading else {}
                named = [size for size in rule.sizes if size != "..."]
                known |= {letter: (size,) for letter, size in zip(named, array.shape[leading:], strict=True)}

        def zeros(result: Rule) -> Any:
            sizes = [(int(size),) if size.isdigit() else known[size] for size in result.sizes]
            return jnp.zeros([size for part in sizes for size in part], dtypes[result.name])

        results = tuple(map(zeros, self.results))
        return results if len(results) > 1 else results[0]


def load_tokamax(op: str, kernel: str) -> Any:
    """Raises   ImportError: it is not installed, or does not fit the rest that is."""
    try:
        tokamax = importlib.import_module("tokamax")
    except ImportError as error:
        raise ImportError(
            f"{op}: {kernel} runs code of the package tokamax, which can't be imported ({error}). "
            f"Install it: pip install tokamax",
            name=error.name,
        ) from error
    flags = sys.modules["absl.flags"].FLAGS
    if not flags.is_parsed():  # else Tokamax parses the command line of the program around us, and ends it if it can't
        flags(sys.argv[:1])
    return tokamax


def check(op: str, rules: Sequence[Rule], tensors: Sequence[Any]) -> None:
    """Raises   TypeError, ValueError: a tensor is not what its rule says, or sizes of one letter differ."""
    known: dict[str, tuple[Any, Rule, tuple]] = {}  # letter -> (size, the rule and the shape that it came from)
    for rule, tensor in zip(rules, tensors, strict=True):
        if tensor is None and rule.optional:
            continue
        if not hasattr(tensor, "dtype"):
            raise TypeError(f"{op}: {rule.name} must be a tensor {rule}; got {type(tensor).__name__}.")
        dtype, supported = str(tensor.dtype).removeprefix("torch."), DTYPES[rule.dtypes]
        if dtype not in supported:
            raise TypeError(
                f"{op}: {rule.name} is {dtype}; supported: {', '.join(supported)}. "
                f"Try {rule.name}.to(torch.{supported[0]})."
            )
        shape = tuple(tensor.shape)
        sizes = _sizes(op, rule, shape)
        for letter, size in sizes.items():
            wanted = int(letter) if letter.isdigit() else known[letter][0] if letter in known else size
            if size != wanted:
                raise _mismatch(op, rule, shape, known, letter)
        for letter, size in sizes.items():
            known.setdefault(letter, (size, rule, shape))


def _sizes(op: str, rule: Rule, shape: tuple) -> dict[str, Any]:
    """Letter -> size; "..." -> the leading sizes."""
    leading = rule.sizes[:1] == ("...",)
    letters = rule.sizes[1:] if leading else rule.sizes
    cut = len(shape) - len(letters)
    if cut < 0 or (cut > 0 and not leading):
        raise ValueError(f"{op}: {rule.name} must be {rule}; got {_tuple_text(shape)}.")
    return {**({"...": shape[:cut]} if leading else {}), **dict(zip(letters, shape[cut:], strict=True))}


def _mismatch(op: str, rule: Rule, shape: tuple, known: dict[str, tuple[Any, Rule, tuple]], at: str) -> ValueError:
    numbers: list[Any] = []
    for letter in rule.sizes:
        value = known[letter][0] if letter in known else letter
        numbers += value if isinstance(value, tuple) else [value]
    origin = ""
    if at in known:
        _, other, its_shape = known[at]
        origin = f" to match {other.name} {other} = {_tuple_text(its_shape)}"
    return ValueError(f"{op}: {rule.name} must be {rule} = {_tuple_text(numbers)}{origin}; got {_tuple_text(shape)}.")


def _tuple_text(items: Sequence[Any]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(map(str, items))})"


class TpuDevice:
    """Stands for the TPU while code is traced for it; JAX takes any default device whose type is called so."""

    platform, num_cores, id, process_index = "tpu", 1, 0, 0

    def __init__(self, device_kind: str):
        self.device_kind = device_kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TpuDevice) and other.device_kind == self.device_kind

    def __hash__(self) -> int:
        return hash(self.device_kind)


def _as_if_on_tpu() -> Any:
    """Tokamax looks at JAX's default device to choose code and tiles. Under torch_tpu that is the CPU."""
    import jax

    chosen = jax.config.jax_default_device  # pyrefly: ignore (made at run time)
    if getattr(chosen, "platform", None) == "tpu" or (chosen is None and jax.default_backend() == "tpu"):
        return contextlib.nullcontext()
    return jax.default_device(TpuDevice(_kind_of_tpu()))


def _kind_of_tpu() -> str:
    """As torch_tpu names it. Without hardware it says "TPU"; then only shapes are asked for, and any kind will do."""
    torch = sys.modules.get("torch")
    with warnings.catch_warnings(), contextlib.suppress(AttributeError, RuntimeError):
        warnings.simplefilter("ignore")  # experimental and subject to change
        name = str(torch.tpu.get_device_name())  # type: ignore[union-attr]
        if name != "TPU":
            return name
    return "TPU v6 lite"
