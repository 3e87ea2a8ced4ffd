"""Programs of flash-attention: causal self-attention and its gradient, and the same from jax and tokamax.

    forward     q (1, l, hq, d), k and v (1, l, hk, d) -> out and its log-sum-exp
    backward    from these, out, the log-sum-exp and the gradient of out -> the gradients of q, k and v

The peers are jax's splash attention, its older flash attention (jax-flash, which has no grouped heads: k and v
are repeated for it) and tokamax's splash attention. All take and give arrays in the layout above; what has to be
transposed for that is in the columns about XLA. A peer's backward is what its gradient runs after the forward kernel.
bfloat16 throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pallas_hub.bench.aot.programs import Program, Workload
from pallas_hub.bench.aot.shapes import is_shape, parse_shape
from pallas_hub.bench.kernel_source import load_jax_module

OPS = ("forward", "backward")
PEERS = ("jax-splash", "jax-flash", "tokamax")
ITEM = 2  # bytes of a bfloat16
_EXAMPLE = {"l": 4096, "hq": 32, "hk": 4, "d": 128}
# Neither peer asks for VMEM itself, and the default limit is too small for their larger blocks.
_PEER_VMEM: dict[str, str | bool] = {"xla_tpu_scoped_vmem_limit_kib": str(56 * 1024)}
_PEER_BLOCKS = ((1024, 1024, 512), (1024, 1024, 1024), (512, 512, 512))  # rows, keys, keys at once
_PEER_NOTE = "blocks above the diagonal have a step too, which does next to nothing and is counted as the others"


def cases() -> list[Workload]:
    return [Workload(op, case.name) for case in _kernel("cases").MODEL_CASES for op in OPS]


def build(op: str, case_name: str, impl: str, blocks: dict[str, int] | None) -> Program:
    """`blocks` are the fields of our Config; of a peer block_q, block_k and block_k_compute."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    case = find_case(case_name)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    q, k = array(1, case.lq, case.hq, case.d), array(1, case.lk, case.hk, case.d)
    rows = np.array([case.interval(row) for row in range(case.lq)], np.int32)
    intervals = tuple(np.ascontiguousarray(x[None]) for x in rows.T)
    # Of each pair of a row and a key: two products forward, five backward, two of them the forward's again.
    flops = 2 * case.d * case.pairs() * case.hq * (2 if op == "forward" else 5)
    least = (q.size + k.size) * 2 if op == "forward" else 4 * (q.size + k.size)
    if impl == "ours":
        fn = functools.partial(_ours, op, case.d**-0.5, blocks)
        args = (q, k, k, *intervals)
        if op == "backward":
            args = (*args, q, array(1, case.hq, case.lq, dtype=jnp.float32), q)
        return Program(fn, args, least * ITEM, flops)
    peer = functools.partial(_PEER[impl], case, blocks or _as_blocks(_PEER_BLOCKS[0]))
    if op == "forward":
        return Program(peer, (q, k, k), least * ITEM, flops, _PEER_VMEM.copy(), None, _PEER_NOTE)
    _, gradient = jax.eval_shape(lambda q, k, v: jax.vjp(peer, q, k, v), q, k, k)
    residuals, tree = jax.tree.flatten(gradient)

    def backward(dout: Any, *residuals: Any) -> Any:
        return jax.tree.unflatten(tree, residuals)(dout)

    return Program(backward, (q, *residuals), least * ITEM, flops, _PEER_VMEM.copy(), None, _PEER_NOTE)


def own_blocks(op: str, case_name: str, target: str) -> dict[str, int]:
    """What the kernel chooses by itself on that TPU."""
    case, config = find_case(case_name), _kernel("config")
    choose = config.choose_config if op == "forward" else config.choose_backward_config
    return vars(choose(case.lq, case.lk, case.hq // case.hk, case.d, case.value_dim, ITEM)).copy()


def peer_blocks(op: str, case_name: str, target: str, impl: str) -> list[dict[str, int] | None]:
    """Blocks of our size and larger ones, as far as there are so many rows."""
    case = find_case(case_name)
    fitting = [blocks for blocks in _PEER_BLOCKS if max(blocks) <= case.lq and case.lq % blocks[0] == 0]
    return [_as_blocks(blocks) for blocks in fitting or [(128, 128, 128)]]


def _as_blocks(blocks: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("block_q", "block_k", "block_k_compute"), blocks, strict=True))


def find_case(name: str) -> Any:
    """The case of that name, or of that shape.

    Raises   ValueError: there is none.
    """
    if is_shape(name):
        return shape_case(name)
    cases = _kernel("cases").MODEL_CASES
    found = next((case for case in cases if case.name == name), None)
    if found is None:
        there_are = ", ".join(case.name for case in cases)
        raise ValueError(f"flash-attention has no workload {name!r}; there are: {there_are}.")
    return found


def shape_case(text: str) -> Any:
    """A case of the user's own. Raises   ValueError: not in the letters of this kernel."""
    shape, _ = parse_shape("flash-attention", text, _EXAMPLE)
    if shape["hq"] % shape["hk"]:
        raise ValueError(
            f"flash-attention: --shape needs hq to be a multiple of hk = {shape['hk']}; got {shape['hq']}."
        )
    return _kernel("cases").Case(shape["l"], shape["l"], shape["hq"], shape["hk"], shape["d"], name=text)


def _kernel(module: str) -> Any:
    return load_jax_module("flash-attention", module)


def _ours(op: str, scale: float, blocks: dict[str, int] | None, q: Any, k: Any, v: Any, lo: Any, hi: Any, *rest: Any):
    kernel = _kernel("kernel")
    config = None if blocks is None else _kernel("config").Config(**blocks)
    if op == "forward":
        return kernel.attention_forward(q, k, v, lo, hi, None, None, None, scale, 0.0, config=config)
    out, lse, dout = rest
    return kernel.attention_backward(
        q, k, v, lo, hi, None, None, None, out, lse, dout, None, scale, 0.0, config=config
    )[:3]


def _heads_first(run: Callable, case: Any, q: Any, k: Any, v: Any) -> Any:
    """`run` takes (heads, l, d) and no scale."""
    q, k, v = (x[0].transpose(1, 0, 2) for x in (q * case.d**-0.5, k, v))
    return run(q, k, v).transpose(1, 0, 2)[None]


def _jax_splash(case: Any, blocks: dict[str, int], q: Any, k: Any, v: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((case.lq, case.lk))] * case.hq)
    sizes = splash_attention_kernel.BlockSizes(**_splash_sizes(blocks), use_fused_bwd_kernel=True)
    run = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    return _heads_first(run, case, q, k, v)


def _tokamax_splash(case: Any, blocks: dict[str, int], q: Any, k: Any, v: Any) -> Any:
    # The kernels under tokamax's splash attention, which choose no blocks by themselves.
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    mask = splash_attention_mask.CausalMask((case.lq, case.lk))
    config = splash_attention_kernel.SplashConfig(**_splash_sizes(blocks), use_base2_exp=True, fuse_reciprocal=True)
    return _heads_first(splash_attention_kernel.make_splash_mha(mask, config=config, q_seq_shards=1), case, q, k, v)


def _splash_sizes(blocks: dict[str, int]) -> dict[str, Any]:
    rows, keys, at_once = blocks["block_q"], blocks["block_k"], blocks["block_k_compute"]
    return {
        "block_q": rows,
        "block_kv": keys,
        "block_kv_compute": at_once,
        "block_q_dkv": rows,
        "block_kv_dkv": keys,
        "block_kv_dkv_compute": at_once,
    }


def _jax_flash(case: Any, blocks: dict[str, int], q: Any, k: Any, v: Any) -> Any:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import flash_attention as peer

    rows, keys, at_once = blocks["block_q"], blocks["block_k"], blocks["block_k_compute"]
    sizes = peer.BlockSizes(
        block_q=rows,
        block_k_major=keys,
        block_k=at_once,
        block_b=1,
        block_q_major_dkv=rows,
        block_k_major_dkv=keys,
        block_k_dkv=at_once,
        block_q_dkv=rows,
        block_k_major_dq=keys,
        block_k_dq=at_once,
        block_q_dq=rows,
    )
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    k, v = (jnp.repeat(x, case.hq // case.hk, axis=1) for x in (k, v))
    out = peer.flash_attention(q, k, v, causal=True, sm_scale=case.d**-0.5, block_sizes=sizes)
    return out.transpose(0, 2, 1, 3)


_PEER = {"jax-splash": _jax_splash, "jax-flash": _jax_flash, "tokamax": _tokamax_splash}
