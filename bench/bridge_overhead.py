"""What it costs to call a jitted JAX function from torch: host time per call, on CPU.

Three ways to run the same function on the same values, interleaved in one loop:
    direct   JAX arrays in, wait for the result: what a JAX user pays
    bridge   torch tensors through an op made by `jax_op`
    dlpack   torch tensors through `jax.dlpack.from_dlpack` and `torch.from_dlpack`: what one writes by hand
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

SHAPES = ((8, 8), (256, 256), (1024, 1024))
TURN = 10
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Row:
    shape: tuple[int, ...]
    dtype: str
    way: str
    median_us: float
    iqr_us: float  # distance between the quartiles: the spread
    times_direct: float
    calls: int
    checked: str  # how the result was compared before timing


def measure(
    shapes: tuple[tuple[int, ...], ...] = SHAPES, dtypes: tuple[str, ...] = DTYPES, calls: int = 2000
) -> list[Row]:
    """Check that the three ways agree bit for bit, then time them. `calls` is for the smallest shape."""
    return [row for dtype in dtypes for shape in shapes for row in _measure(shape, dtype, _calls(shape, calls))]


def _calls(shape: tuple[int, ...], calls: int) -> int:
    n = functools.reduce(int.__mul__, shape, 1)
    return max(50, min(calls, calls * 4096 // n))


def _measure(shape: tuple[int, ...], dtype: str, calls: int) -> list[Row]:
    ways = _ways(shape, dtype)
    _check(ways)
    times = _interleaved(ways, calls)
    direct = statistics.median(times["direct"])
    return [
        Row(
            shape=shape,
            dtype=dtype,
            way=way,
            median_us=statistics.median(t) / 1e3,
            iqr_us=_iqr(t) / 1e3,
            times_direct=statistics.median(t) / direct,
            calls=calls,
            checked="equal bits",
        )
        for way, t in times.items()
    ]


def _ways(shape: tuple[int, ...], dtype: str) -> dict[str, Callable]:
    import jax
    import jax.numpy as jnp
    import torch

    function = jax.jit(lambda x: x + 1)
    x = torch.arange(functools.reduce(int.__mul__, shape, 1)).reshape(shape).to(getattr(torch, dtype))
    array = jnp.asarray(x.float().numpy(), dtype=dtype)
    op = _add_one()

    def direct():
        return function(array).block_until_ready()

    def bridge():
        return op(x)

    def dlpack():
        return torch.from_dlpack(function(jax.dlpack.from_dlpack(x)).block_until_ready())

    return {"direct": direct, "bridge": bridge, "dlpack": dlpack}


@functools.cache
def _add_one():
    import jax

    from pallas_hub.torch_bridge import jax_op

    def add_one(x: jax.Array) -> jax.Array:
        return x + 1

    return jax_op("add_one", namespace="pallas_hub_bench", fn=add_one)


def _check(ways: dict[str, Callable]) -> None:
    import torch

    results = {way: torch.from_dlpack(call()) if way == "direct" else call() for way, call in ways.items()}
    for way, result in results.items():
        if not torch.equal(result, results["direct"]):
            raise AssertionError(f"bridge overhead: {way} differs from direct; nothing was timed.")


def _interleaved(ways: dict[str, Callable], calls: int) -> dict[str, list[int]]:
    """Nanoseconds per call. The ways take turns of ten calls, so that each runs as warm as in a loop of its
    own and still all see the same disturbances. The first tenth of the turns warms up."""
    times: dict[str, list[int]] = {way: [] for way in ways}
    turns = -(-calls // TURN)
    for turn in range(-(turns // 10 + 1), turns):
        for way, call in ways.items():
            spent = []
            for _ in range(TURN):
                start = time.perf_counter_ns()
                result = call()
                spent.append(time.perf_counter_ns() - start)
                del result
            if turn >= 0:
                times[way] += spent
    return times


def _iqr(times: list[int]) -> float:
    low, _, high = statistics.quantiles(times, n=4)
    return high - low
