"""Many tokens: rows go to their experts and back inside VMEM, so that no copy of them passes through HBM.

    for each expert in use, for up to block_m of the slots it serves at a time:
        rows = x[token of slot]
        gated = gate(gate_up[expert] @ rows)
        sums[token of slot] += weight of slot * (down[expert] @ gated)

All tokens of a call and their sums stay in VMEM, and an expert's weights come in once, while the expert before is
computed. Slots are sorted by expert. Where tokens and sums do not fit together, but each of them does, one kernel makes
`gated` of all visits and another the sums: then `gated` passes through HBM, but weights still do so once.

Shapes   x (t, h), gate_up (e, w, h), down (e, h, i), index and weights (t, top_k) -> (t, h); w is 2 * i, or i without a
         gate; transposed weights are (e, h, w) and (e, i, h)
Grid     (visits,), as many as there are at run time: a visit is up to block_m slots of one expert (routing.py)
Edge     rows past the visit's last slot are those of the next expert, or anything; their results go to a row of sums
         past the last token. A token comes to an expert once (kernel.py), so a visit's rows add in any order
Memory   x, sums, 2 * the weights of an expert, and block_m rows in several forms: config.py
Limits   bound by reading the weights up to some thousand tokens, by the matrix units above
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .config import LANES, PrefillConfig, Sizes
from .gates import Gating
from .prefill_steps import Steps, to_words
from .quantized_blocks import spread_scratch
from .routing import Visits, visits_of_experts


def prefill(
    x, gate_up, down, index, weights, biases, scales, *, sizes: Sizes, gating: Gating, config: PrefillConfig, interpret
):
    """Arguments as in kernel.py, index int32 and weights float32; biases (e, 1, w) and (e, 1, h), or empty."""
    t, h, w, i, block_m = sizes.t, sizes.h, sizes.w, sizes.i, config.block_m
    words = to_words(x)  # (t, g, 128)
    visits = visits_of_experts(index, weights, sizes.e, block_m)
    steps = Steps(sizes, gating, config, has_bias=bool(biases))

    sums = jax.ShapeDtypeStruct((t + 1, h // LANES, LANES), jnp.float32)
    gated = jax.ShapeDtypeStruct((visits.expert.shape[0], block_m, i), x.dtype)
    taken = pltpu.VMEM((block_m, *words.shape[1:]), words.dtype)
    rows = pltpu.VMEM((block_m, h), x.dtype)
    results = pltpu.VMEM((block_m, *sums.shape[1:]), jnp.float32)
    of_visit = pl.BlockSpec((None, block_m, i), lambda v, *_: (v, 0, 0))

    def run(name, body, source, source_spec, of_expert, out_shape, out_spec, scratch):
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(Visits._fields) - 1,
                grid=(jnp.maximum(visits.count, 1),),
                in_specs=[source_spec, *map(_of_expert, of_expert)],
                out_specs=out_spec,
                scratch_shapes=scratch,
            ),
            out_shape=out_shape,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",),
                vmem_limit_bytes=config.vmem_limit_bytes,
                disable_bounds_checks=True,  # routing.py keeps every index in bounds
            ),
            interpret=interpret,
            name=name,
        )(*visits[:-1], source, *of_expert)

    if config.split:
        first, second = (gate_up, *biases[:1], *scales[:1]), (down, *biases[1:], *scales[1:])
        scratch = [taken, rows, *spread_scratch(scales[:1], sizes.stored[:1], (w,))]
        made = run("moe_experts_prefill_gated", steps.first, words, _whole(words), first, gated, of_visit, scratch)
        scratch = [results, *spread_scratch(scales[1:], sizes.stored[1:], (h,))]
        out = run("moe_experts_prefill_sums", steps.second, made, of_visit, second, sums, _whole(sums), scratch)
    else:
        of_expert = (gate_up, down, *biases, *scales)
        scratch = [taken, rows, pltpu.VMEM((block_m, i), x.dtype), results]
        scratch += spread_scratch(scales, sizes.stored, (w, h))
        out = run("moe_experts_prefill", steps.both, words, _whole(words), of_expert, sums, _whole(sums), scratch)
    return out[:t].reshape(t, h).astype(x.dtype)


def _of_expert(array) -> pl.BlockSpec:
    return pl.BlockSpec((None, *array.shape[1:]), lambda v, expert, *_: (expert[v], 0, 0))


def _whole(array) -> pl.BlockSpec:
    """In one buffer: it never changes."""
    return pl.BlockSpec(array.shape, lambda v, *_: (0, 0, 0), pipeline_mode=pl.Buffered(1))
