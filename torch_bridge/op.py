"""`jax_op`: declare a torch op whose code is a JAX function."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import autograd, direct, lazy, paths, vmap
from .autograd import without_autocast
from .cpu import CpuRunner
from .dtypes import jax_name
from .lazy import Lazy
from .schema import Schema, schema_of
from .shapes import Shapes
from .state import state

TAGS = (torch.Tag.pt2_compliant_tag,)


def jax_op(
    name: str,
    *,
    namespace: str | None,
    fn: Callable | Lazy,
    torch_fn: Callable | None = None,
    shape_fn: Callable | Lazy | None = None,
    vjp: Callable | Lazy | None = None,
    signature: Callable | None = None,
) -> JaxOp:
    """Make torch.ops.<namespace>.<name> out of the JAX function `fn`.

    fn          takes arrays first, then attributes by keyword, and `interpret` if it is a Pallas kernel
    torch_fn    the same in torch, for cpu and cuda
    shape_fn    a JAX function that traces with symbolic sizes, if `fn` does not: the reference
    vjp         JAX function (*inputs, *output_grads, **attributes) -> gradient of each tensor input
                (None for one that has none); becomes the op <name>_backward. It takes `interpret` if it is a
                Pallas kernel; such a one has no torch path, so an op with torch_fn rather calls set_backward
    signature   function whose annotations give the schema; default torch_fn, then fn
    """
    if not namespace:
        raise TypeError(f"{name}: namespace must be a name, such as __package__ inside a package; got {namespace!r}.")
    declared = signature or torch_fn or fn
    if isinstance(declared, Lazy):
        raise TypeError(f"{name}: fn is Lazy, so the schema must come from torch_fn or signature; got neither.")
    op = JaxOp(name, namespace, schema_of(declared, name), fn, torch_fn, shape_fn)
    if vjp is not None:
        from .vjp import set_vjp

        set_vjp(op, vjp)
    return op


class JaxOp:
    """A torch op with a JAX function behind it. Call it like a function."""

    def __init__(
        self,
        name: str,
        namespace: str,
        schema: Schema,
        fn: Callable | Lazy,
        torch_fn: Callable | None = None,
        shape_fn: Callable | Lazy | None = None,
    ):
        self.name, self.schema = name, schema
        self.fn: Callable | Lazy = fn
        self.torch_fn: Any = torch_fn
        self.rule: autograd.Rule | None = None
        self.backward_op: JaxOp | None = None  # the op made of `vjp`
        self.namespace = _claim(namespace, name)
        self.qualname = f"{self.namespace}::{name}"
        self.__doc__ = inspect.getdoc(torch_fn or fn)
        self._n_tensors, self._n_arguments = len(schema.tensors), len(schema.arguments)
        self._has_lists = any(argument.type.endswith("[]") for argument in schema.attributes)
        self._defaults = tuple(argument.default for argument in schema.arguments)
        self._shapes = Shapes(name, schema, shape_fn or fn, wide=torch_fn is not None)
        self._is_plain = direct.plain_call(schema)
        self._choices: dict[tuple[str, str], str] = {}
        self._cpu = CpuRunner(name, schema, self.load)
        self._pallas: bool | None = None
        self._tpu_op: Any = None
        self._vmap: Callable | None = None
        self._register()

    def _register(self) -> None:
        # torch.library.custom_op does the same at twice the cost per call.
        self._library = torch.library.Library(self.namespace, "FRAGMENT")
        self._library.define(self.name + str(self.schema), tags=TAGS)
        self.overload = getattr(getattr(torch.ops, self.namespace), self.name).default
        self._library.impl(self.name, self.run, "CompositeExplicitAutograd")
        self._library.impl(self.name, autograd.make_kernel(self), "Autograd")
        torch.library.register_fake(self.qualname, self._fake, lib=self._library)
        torch.library.register_vmap(self.qualname, self._batched, lib=self._library)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and self._is_plain(args):
            return self.run(*args)
        return self.overload(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<jax_op {self.qualname}{self.schema}>"

    def __deepcopy__(self, memo: dict) -> JaxOp:
        return self  # an op is registered once per process

    def set_backward(self, fn: Callable, save: Iterable[str] | Callable | None = None) -> None:
        """Go back through this op by `fn(saved, needs, *grads)`: plain torch code built of other ops.

        fn      returns one entry per tensor input, a Tensor or None. needs.<input> tells whether its gradient
                is asked for; an entry that is not asked for is dropped, so don't compute it
        save    names of tensor inputs to keep, "outputs[1]" for one output, "outputs" for all; or a function
                needs -> names; default all tensor inputs. They are saved.x, saved.outputs[1]; attributes,
                such as saved.eps, are always there
        """
        self.rule = autograd.Rule(fn, save, self.schema, self.name)

    def set_vmap(self, fn: Callable) -> None:
        """Batch this op by `fn(info, in_dims, *args) -> (outputs, out_dims)`, as torch.library.register_vmap."""
        self._vmap = fn

    def path_for(self, tensor: torch.Tensor) -> str:
        """The path that a call with `tensor` would take here and now."""
        return paths.choose(self, tensor.device.type, paths.requested()[0])

    @property
    def traces(self) -> int:
        """How often JAX traced this op for the CPU: once per attributes, shapes and dtypes."""
        return self._cpu.traces

    @property
    def tpu_op(self) -> Any:
        """The torch_tpu op that runs the kernel compiled."""
        if self._tpu_op is None:
            from .tpu import make_tpu_op

            self._tpu_op = make_tpu_op(self)
        return self._tpu_op

    def is_pallas(self) -> bool:
        """Whether the JAX function hands `interpret` to a pallas_call."""
        if self._pallas is None:
            self._pallas = "interpret" in inspect.signature(self.load()).parameters
        return self._pallas

    def load(self) -> Callable:
        return lazy.load(self.fn, self.name)

    def fill_defaults(self, args: tuple) -> tuple:
        """The dispatcher leaves out trailing arguments that equal their default."""
        return args + self._defaults[len(args) :]

    def run(self, *args: Any) -> Any:
        """Below autograd and everything else: choose the path and take it."""
        if len(args) != self._n_arguments:
            args = self.fill_defaults(args)
        tensors, attributes = args[: self._n_tensors], args[self._n_tensors :]
        device = self._one_device(tensors)
        wanted, interpret = paths.requested()
        path = self._choices.get((device, wanted))
        if path is None:
            path = self._choices[device, wanted] = paths.choose(self, device, wanted)
        for ran in state.recorders:
            ran.append((self.qualname, path))
        if path == "torch":
            with without_autocast(device):
                return _row_major(self.torch_fn(*args), tensors)
        if self._has_lists:
            attributes = _hashable(attributes)
        if path == "pallas":
            return self._run_on_tpu(tensors, attributes)
        return self._cpu(tensors, attributes, interpret if path == "interpret" else None)

    def _run_on_tpu(self, tensors: tuple, attributes: tuple) -> Any:
        for tensor, argument in zip(tensors, self.schema.tensors, strict=True):
            if tensor is not None:
                jax_name(tensor.dtype, self.name, argument.name)  # refuses what a TPU lacks
        # A TPU has no 64-bit integers. Looking at the values would wait for the device, so it isn't done.
        tensors = tuple(t.to(torch.int32) if t is not None and t.dtype is torch.int64 else t for t in tensors)
        return self.tpu_op(*tensors, *attributes)

    def _fake(self, *args: Any) -> Any:
        args = self.fill_defaults(args)
        tensors = args[: self._n_tensors]
        self._one_device(tensors)
        outputs = self._shapes(tensors, _hashable(args[self._n_tensors :]))
        results = [torch.empty(shape, dtype=dtype, device=tensors[0].device) for shape, dtype in outputs]
        return tuple(results) if self.schema.returns_tuple else results[0]

    def _batched(self, info: Any, in_dims: tuple, *args: Any) -> Any:
        if self._vmap is not None:
            return self._vmap(info, in_dims, *args)
        return vmap.loop(self, info, in_dims, *args)

    def _one_device(self, tensors: tuple) -> str:
        for tensor in tensors:
            if tensor is not None and not tensor.is_cpu:  # a third of the cost of tensor.device
                break
        else:
            return "cpu"
        given = {a.name: t.device for a, t in zip(self.schema.tensors, tensors, strict=True) if t is not None}
        if len(set(given.values())) > 1:
            each = ", ".join(f"{name} on {device}" for name, device in given.items())
            raise ValueError(f"{self.name}: all tensors must be on one device; got {each}.")
        return tensors[0].device.type


def _claim(namespace: str, name: str) -> str:
    """A torch namespace for this op that no other loaded copy of a kernel uses."""
    base = re.sub(r"\W", "_", namespace)
    owner = (__name__, __file__)  # each vendored copy of this package has its own
    for candidate in itertools.chain([base], (f"{base}_{i}" for i in itertools.count(2))):
        if state.owners.setdefault(candidate, owner) == owner and not hasattr(getattr(torch.ops, candidate), name):
            return candidate
    raise AssertionError("unreachable")


def _hashable(attributes: tuple) -> tuple:
    return tuple(tuple(a) if isinstance(a, list) else a for a in attributes)


def _row_major(result: Any, inputs: tuple) -> Any:
    """Keep the promises of the fake for a torch path: row-major, and no memory of an input or another output."""
    if not isinstance(result, tuple | list):
        return _row_major((result,), inputs)[0]
    taken = [tensor for tensor in inputs if tensor is not None]
    outputs = []
    for tensor in result:
        if any(torch._C._is_alias_of(tensor, other) for other in taken):  # type: ignore[attr-defined]
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        taken.append(tensor)
        outputs.append(tensor.contiguous())
    return tuple(outputs)
