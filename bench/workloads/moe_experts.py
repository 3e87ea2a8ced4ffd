"""A whole experts layer, called as a model calls it: `experts_forward` beside Transformers' implementations.

The module is the model's own class, so that its layout and its activation are what is measured; all else is as in the
workload of ragged-dot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from pallas_hub.bench.case import Case
from pallas_hub.bench.workloads import ragged_dot
from pallas_hub.bench.workloads.ragged_dot import SMALL, ExpertsSize, with_random_weights

KERNEL = "moe-experts"
TOKENS = (1, 8, 64, 512)
DTYPES = ("bfloat16", "float32")
DEFAULT_WORKLOAD = "qwen3-30b-a3b"
_GEMMA = "gemma4-26b-a4b"


def workloads(kernel: Any) -> dict[str, ExpertsSize]:
    """Models of the kernel's cases.py whose classes are known here, and a small one to try it with."""
    sizes = ragged_dot.workloads(kernel)
    return {name: sizes[name] for name in (DEFAULT_WORKLOAD, _GEMMA) if name in sizes} | {"small": SMALL}


def cases(
    kernel: Any, workload: str, dtypes: Sequence[str], tokens: Sequence[int], everything: bool = False
) -> Iterator[Case]:
    """One case per dtype and number of tokens. The weights are drawn once per dtype."""
    import torch

    size = workloads(kernel)[workload]
    for dtype_name in dtypes:
        dtype = getattr(torch, dtype_name)
        module = _gemma_module(size, dtype) if workload == _GEMMA else ragged_dot.experts_module(size, dtype)
        called = SimpleNamespace(moe_experts=_as_in_a_model(kernel, module))
        for count in tokens:
            own = everything and workload != _GEMMA
            case = ragged_dot.make_case(called, workload, size, module, dtype, count, own)
            if workload == _GEMMA:
                case.unavailable = dict.fromkeys(
                    case.unavailable, "is written for silu, which this model does not take"
                )
            yield case


def _as_in_a_model(kernel: Any, module: Any) -> Any:
    def moe_experts(hidden: Any, gate_up: Any, down: Any, index: Any, weights: Any) -> Any:
        return kernel.experts_forward(module, hidden, index, weights)

    return moe_experts


def _gemma_module(size: ExpertsSize, dtype: Any) -> Any:
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

    config = Gemma4TextConfig(
        enable_moe_block=True,
        num_experts=size.experts,
        hidden_size=size.hidden,
        moe_intermediate_size=size.intermediate,
        top_k_experts=size.top_k,
    )
    return with_random_weights(Gemma4TextExperts, config, size, dtype)
