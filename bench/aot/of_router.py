"""Programs of the router of moe-experts: weights and index of each token's experts, from its logits.

    forward     logits (t, e), in groups a bias (e,)  ->  weights (t, k), index (t, k)

The peer is XLA: the kernel's own reference, with jax.lax.top_k.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from pallas_hub.bench.aot.programs import Program, Workload
from pallas_hub.bench.aot.shapes import is_shape, parse_shape
from pallas_hub.bench.kernel_source import load_jax_module

OPS = ("forward",)
PEERS = ("xla",)
_EXAMPLE = {"t": 64, "e": 128, "k": 8}


@dataclass(frozen=True)
class Case:
    """Logits (t, e) of one dtype, and what router_topk is asked for."""

    name: str
    t: int
    e: int
    k: int
    dtype: str = "bfloat16"
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)


_RENORMALIZED = {"renormalize": True}
_DEEPSEEK = {"score": "sigmoid", "renormalize": True, "scale": 2.5, "groups": 8, "top_groups": 4}
_LISTED = [
    case
    for t in (64, 4096)
    for case in (
        Case(f"qwen3-30b-a3b-t{t}", t, 128, 8, options=_RENORMALIZED),  # and, but for rounding, Gemma 4
        Case(f"gpt-oss-20b-t{t}", t, 32, 4, options={"score": "topk_softmax"}),
        Case(f"deepseek-v3-t{t}", t, 256, 8, "float32", bias=True, options=_DEEPSEEK),
    )
]


def cases() -> list[Workload]:
    return [Workload(op, case.name) for case in _LISTED for op in OPS]


def build(op: str, case_name: str, impl: str, blocks: dict[str, int] | None) -> Program:
    """The kernel has no blocks to choose: `blocks` say what it takes."""
    import jax
    import jax.numpy as jnp

    case = find_case(case_name)
    args = [jax.ShapeDtypeStruct((case.t, case.e), case.dtype)]
    args += [jax.ShapeDtypeStruct((case.e,), jnp.float32)] * case.bias
    if impl == "ours":
        function = load_jax_module("moe-experts", "router_kernel").router_topk_forward
    else:
        function = load_jax_module("moe-experts", "router_reference").router_topk
    results = case.t * case.k * (args[0].dtype.itemsize + 4)
    least = sum(array.size * array.dtype.itemsize for array in args) + results
    return Program(functools.partial(function, top_k=case.k, **case.options), tuple(args), least)


def own_blocks(op: str, case_name: str, target: str) -> dict[str, int]:
    """Tokens of a step, whatever the TPU."""
    case = find_case(case_name)
    return {"block_t": load_jax_module("moe-experts", "router_kernel").block_of(case.t, case.e)}


def peer_blocks(op: str, case_name: str, target: str, impl: str) -> list[dict[str, int] | None]:
    return [None]


def find_case(name: str) -> Case:
    """The case of that name, or of that shape.

    Raises   ValueError: there is none.
    """
    if is_shape(name):
        return shape_case(name)
    found = next((case for case in _LISTED if case.name == name), None)
    if found is None:
        raise ValueError(f"router has no workload {name!r}; there are: {', '.join(case.name for case in _LISTED)}.")
    return found


def shape_case(text: str) -> Case:
    """A softmax in bfloat16, renormalised. Raises   ValueError: not in the letters of this kernel."""
    shape, _ = parse_shape("router", text, _EXAMPLE)
    if shape["k"] > shape["e"]:
        raise ValueError(f"router: --shape needs k at most e = {shape['e']}, the experts; got k={shape['k']}.")
    return Case(text, shape["t"], shape["e"], shape["k"], options=_RENORMALIZED)
