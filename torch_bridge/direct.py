"""Calls that need nothing from torch's dispatcher.

A plain eager call on CPU tensors without a gradient passes through the dispatcher twice, once for autograd
and once for the device, only to arrive at `op.run`. That is about 6 us on a machine where the whole call
costs 20, and a decoding step makes hundreds of them. So such a call goes there at once. Whatever might
want to see the call - gradients, transforms, compilation, modes, subclasses, a profiler - gets it through
the dispatcher as usual.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from .schema import Schema

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_TYPES = {"float": float, "int": int, "bool": bool, "str": str, "int[]": tuple}


def plain_call(schema: Schema) -> Callable[[tuple], bool]:
    """A test for positional arguments: would the dispatcher only pass them on?"""
    n_tensors, n_arguments = len(schema.tensors), len(schema.arguments)
    optional = tuple(argument.optional for argument in schema.arguments)
    types = tuple(_TYPES[argument.type] for argument in schema.attributes)
    is_dynamo_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
    functorch_is_active = torch._C._are_functorch_transforms_active
    dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
    profiler_is_on, tracing_state = torch.autograd._profiler_enabled, torch._C._get_tracing_state

    def is_plain(args: tuple) -> bool:
        if (
            is_dynamo_compiling()  # first, since nothing below is meant to be traced
            or len(args) != n_arguments
            or functorch_is_active()
            or dispatch_modes()
            or function_modes()
            or forward_ad._current_level >= 0
            or profiler_is_on()
            or tracing_state() is not None
        ):
            return False
        grad = is_grad_enabled()
        for i in range(n_tensors):
            tensor = args[i]
            if tensor is None:
                if not optional[i]:
                    return False
            elif type(tensor) not in _PLAIN_TENSORS or not tensor.is_cpu or (grad and tensor.requires_grad):
                return False
        for i in range(n_tensors, n_arguments):
            value = args[i]
            # Another type, an int for a float, is for the dispatcher to convert or to refuse.
            if type(value) is not types[i - n_tensors] and not (value is None and optional[i]):
                return False
        return True

    return is_plain
