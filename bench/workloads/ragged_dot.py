"""A mixture-of-experts layer: `moe_experts` of moe-experts or ragged-dot, and what Transformers offers for the module.

All implementations share one `Qwen3MoeExperts` module with random weights, the same tokens and the same routing. The
Transformers rows go through the module's own dispatch, as they do in a model.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pallas_hub.bench.case import Case, Implementation, without_gradients
from pallas_hub.bench.checks import tolerance_for
from pallas_hub.bench.machine import available_memory_bytes
from pallas_hub.bench.workloads.streams import streaming_read

KERNEL = "ragged-dot"
TOKENS = (1, 8, 64)
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class ExpertsSize:
    """A routed feed-forward layer: g experts of (hidden -> 2 * intermediate -> hidden), top_k of them per token."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int


DEFAULT_WORKLOAD = "qwen3-30b-a3b"
SMALL = ExpertsSize(experts=16, hidden=256, intermediate=128, top_k=4)

_TOKAMAX = "tokamax-ragged-dot"
_SLOW = ("torch.compile of grouped_mm", "jitted JAX, no Pallas", _TOKAMAX)

# The operator that shows which product ran: torch's grouped product, or the loop Transformers falls back to.
_GROUPED_OPS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


def workloads(kernel: Any) -> dict[str, ExpertsSize]:
    """The models in the kernel's own cases.py whose experts are laid out as Qwen3's, and a small one to try it with."""
    try:
        models = importlib.import_module(f"{kernel.__name__}.cases").MODELS
    except (ImportError, AttributeError):
        models = ()
    sizes = {
        m.name: ExpertsSize(m.experts, m.hidden, m.intermediate, m.top_k)
        for m in models
        if not getattr(m, "transposed", False)
    }
    return sizes | {"small": SMALL}


def cases(
    kernel: Any, workload: str, dtypes: Sequence[str], tokens: Sequence[int], everything: bool = False
) -> Iterator[Case]:
    """One case per dtype and number of tokens. The weights are drawn once per dtype.

    `everything` adds the rivals that need seconds per call or half a minute of compilation.
    """
    import torch

    size = workloads(kernel)[workload]
    for dtype_name in dtypes:
        dtype = getattr(torch, dtype_name)
        module = experts_module(size, dtype)
        for count in tokens:
            yield make_case(kernel, workload, size, module, dtype, count, everything)


def experts_module(size: ExpertsSize, dtype: Any) -> Any:
    """Transformers' own experts module with random weights of the size a trained model has."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=size.experts,
        hidden_size=size.hidden,
        moe_intermediate_size=size.intermediate,
        num_experts_per_tok=size.top_k,
    )
    return with_random_weights(Qwen3MoeExperts, config, size, dtype)


def with_random_weights(cls: Any, config: Any, size: ExpertsSize, dtype: Any) -> Any:
    """An experts module of this class. Raises   MemoryError: it takes more than there is."""
    import torch

    need, available = 3 * size.experts * size.hidden * size.intermediate * dtype.itemsize, available_memory_bytes()
    if available is not None and need > 0.8 * available:
        raise MemoryError(
            f"the experts take {need / 2**30:.1f} GiB in {dtype}; {available / 2**30:.1f} GiB of memory are free. "
            "Choose a smaller --workload or --dtype bfloat16."
        )
    with torch.device("meta"):
        module = cls(config).to(dtype)
    module = module.to_empty(device="cpu").requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        for expert in weight:  # one expert at a time: normal_ on a 16-bit tensor goes through a float32 copy
            expert.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    return module


def routed_inputs(size: ExpertsSize, dtype: Any, tokens: int) -> tuple[Any, Any, Any]:
    """Hidden states, and for each token its experts (all different, equally likely) and their weights."""
    import torch

    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, size.hidden, generator=generator).to(dtype)
    scores = torch.rand(tokens, size.experts, generator=generator)
    index = scores.topk(size.top_k, dim=-1).indices
    weights = torch.softmax(torch.rand(tokens, size.top_k, generator=generator), dim=-1).to(dtype)
    return hidden, index, weights


def make_case(
    kernel: Any, workload: str, size: ExpertsSize, module: Any, dtype: Any, tokens: int, everything: bool
) -> Case:

    hidden, index, weights = arguments = routed_inputs(size, dtype, tokens)
    active = index.unique()
    used = [module.gate_up_proj[e] for e in active] + [module.down_proj[e] for e in active]
    moved = (*used, hidden, index, weights)
    return Case(
        workload=f"mixture of experts, {workload}",
        sizes={"tokens": tokens, **vars(size), "active": len(active)},
        dtype=str(dtype).removeprefix("torch."),
        exact=lambda: exact_experts(module, *arguments),
        tolerance=tolerance_for(dtype, size.hidden),
        least_bytes=sum(t.nbytes for t in moved) + hidden.nbytes,  # the result is as large as `hidden`
        stream=streaming_read(moved),
        stream_name="streaming read of the active weights",
        implementations=[
            *_implementations(kernel, size, module, arguments),
            *(_slow_rivals(module, arguments) if everything else ()),
        ],
        unavailable=_unavailable(everything),
    )


def _unavailable(everything: bool) -> dict[str, str]:
    left_out = {} if everything else dict.fromkeys(_SLOW, "slow to start or to run; --all measures it")
    if importlib.util.find_spec("tokamax") is None:
        left_out[_TOKAMAX] = "needs tokamax: pip install tokamax"
    return left_out


def _implementations(kernel: Any, size: ExpertsSize, module: Any, arguments: tuple) -> list[Implementation]:
    hidden, index, weights = arguments
    pairs = index.numel()
    gathered = 3 * pairs * size.hidden * size.intermediate * hidden.element_size()

    def ours() -> Any:
        return kernel.moe_experts(hidden, module.gate_up_proj, module.down_proj, index, weights)

    rows = [
        Implementation("moe_experts", ours, ours=True),
        Implementation("Transformers eager", _through_transformers(module, "eager", arguments), path="expert loop"),
        Implementation(
            "Transformers batched_mm",
            _through_transformers(module, "batched_mm", arguments),
            memory_bytes=gathered,
            telling_ops=("aten::bmm",),
        ),
        Implementation(
            "Transformers grouped_mm", _through_transformers(module, "grouped_mm", arguments), telling_ops=_GROUPED_OPS
        ),
        Implementation("torch loop", lambda: torch_loop(module, *arguments), path="sorted loop"),
    ]
    return [without_gradients(row) for row in rows]


def _through_transformers(module: Any, name: str, arguments: tuple) -> Callable[[], Any]:
    """The module's forward with this experts implementation, chosen on its config as a model does."""

    def call() -> Any:
        module.config._experts_implementation = name
        return module(*arguments)

    return call


def _slow_rivals(module: Any, arguments: tuple) -> list[Implementation]:
    """torch.compile of the one form that traces as one graph, XLA's own ragged product, and Tokamax's."""
    import torch

    compiled = torch.compile(_through_transformers(module, "grouped_mm", arguments), fullgraph=True)
    calls = (compiled, _jitted_jax(module, arguments), _tokamax(module, arguments))
    paths = ("inductor", "XLA CPU, jax.lax.ragged_dot", "XLA CPU, Tokamax's xla implementation")
    rows = [
        Implementation(name, call, path=path)
        for name, call, path in zip(_SLOW, calls, paths, strict=True)
        if call is not None
    ]
    return [without_gradients(row) for row in rows]


def _tokamax(module: Any, arguments: tuple) -> Callable[[], Any] | None:
    """The kernel repo made of Tokamax's op, where tokamax is installed."""
    if importlib.util.find_spec("tokamax") is None:
        return None
    from pallas_hub.registry import load_source

    kernel, (hidden, index, weights) = load_source(_TOKAMAX), arguments
    return lambda: kernel.moe_experts(hidden, module.gate_up_proj, module.down_proj, index, weights)


def _jitted_jax(module: Any, arguments: tuple) -> Callable[[], Any]:
    """The layer in jax.numpy and jax.lax.ragged_dot, on the same weights (shared, not copied)."""
    import jax
    import jax.numpy as jnp

    weights = (module.gate_up_proj.detach(), module.down_proj.detach())
    gate_up, down, hidden, index, scale = (jax.dlpack.from_dlpack(t) for t in (*weights, *_int32(arguments)))
    experts, top_k = gate_up.shape[0], index.shape[1]

    @jax.jit
    def layer(gate_up, down, hidden, index, scale):
        order = jnp.argsort(index.reshape(-1), stable=True)
        sizes = jnp.bincount(index.reshape(-1), length=experts).astype(jnp.int32)
        rows = hidden[order // top_k]
        gates, ups = jnp.split(jax.lax.ragged_dot(rows, gate_up.swapaxes(1, 2), sizes), 2, axis=-1)
        product = jax.lax.ragged_dot(jax.nn.silu(gates) * ups, down.swapaxes(1, 2), sizes)
        weighted = product.astype(jnp.float32) * scale.reshape(-1)[order, None]
        return jnp.zeros(hidden.shape, jnp.float32).at[order // top_k].add(weighted).astype(hidden.dtype)

    return lambda: layer(gate_up, down, hidden, index, scale)


def _int32(arguments: tuple) -> tuple:
    """JAX has no int64 by default."""
    hidden, index, scale = arguments
    return hidden, index.int(), scale


def torch_loop(module: Any, hidden: Any, index: Any, weights: Any) -> Any:
    """What a careful user writes by hand: sort the pairs by expert once, then one slice per active expert."""
    import torch
    from torch.nn import functional

    activation = getattr(module, "act_fn", functional.silu)
    order = index.flatten().argsort(stable=True)
    rows = order // index.shape[1]
    scale = weights.flatten()[order, None]
    result = torch.zeros(hidden.shape, dtype=torch.float32)
    counts = index.flatten().bincount(minlength=module.gate_up_proj.shape[0]).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        here = slice(start, start + count)
        start += count
        gate, up = functional.linear(hidden[rows[here]], module.gate_up_proj[expert]).chunk(2, dim=-1)
        product = functional.linear(activation(gate) * up, module.down_proj[expert])
        result.index_add_(0, rows[here], (product * scale[here]).float())
    return result.to(hidden.dtype)


def exact_experts(module: Any, hidden: Any, index: Any, weights: Any) -> Any:
    """The layer in float64, straight from its definition; one expert's weights are widened at a time."""
    import torch

    activation = getattr(module, "act_fn", torch.nn.functional.silu)
    result = torch.zeros(hidden.shape, dtype=torch.float64)
    wide, scale = hidden.double(), weights.double()
    for expert in index.unique().tolist():
        token, slot = torch.where(index == expert)
        gate, up = (wide[token] @ module.gate_up_proj[expert].double().T).chunk(2, dim=-1)
        product = (activation(gate) * up) @ module.down_proj[expert].double().T
        result.index_add_(0, token, product * scale[token, slot, None])
    return result
