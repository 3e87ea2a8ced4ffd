"""What both kernels do with blocks in VMEM: multiply them in float32, and read float16, which TPUs do not have.

The TPU compiler has no float16 vectors. float16 arrays therefore enter a kernel as their bits (a bitcast moves nothing)
and become exact float32 values block by block; results leave it as float32 and are rounded to float16 outside.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp


def for_kernel(x: jax.Array) -> jax.Array:
    """The array as a kernel may read it: float16 as int16 bits, anything else unchanged."""
    return jax.lax.bitcast_convert_type(x, jnp.int16) if x.dtype == jnp.float16 else x


def kernel_out_dtype(dtype) -> jnp.dtype:
    """The dtype a kernel writes when the result is to be `dtype`."""
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def item_bytes(*arrays: jax.Array) -> int:
    """Bytes per item to plan VMEM with: float16 blocks also exist as float32."""
    return max(4 if x.dtype == jnp.float16 else x.dtype.itemsize for x in arrays)


def column_chunks(n: int, chunk: int) -> Iterator[slice]:
    """Slices of an axis, for the compiler to multiply one after the other with fewer live registers."""
    for start in range(0, n, chunk):
        yield slice(start, min(start + chunk, n))


def load(ref) -> jax.Array:
    """The block, with float16 bits turned into float32."""
    block = ref[...]
    return _float16_bits_to_float32(block.astype(jnp.int32)) if block.dtype == jnp.int16 else block


def loaded_dtype(dtype) -> jnp.dtype:
    """The dtype of what `load` returns for a block of `dtype`."""
    return jnp.dtype(jnp.float32 if dtype == jnp.int16 else dtype)


def _float16_bits_to_float32(bits):
    exponent, fraction = (bits >> 10) & 31, bits & 1023
    rebias = jnp.where(exponent == 31, 255 - 31, 127 - 15)  # 31 stands for infinity and NaN
    normal = jax.lax.bitcast_convert_type(((exponent + rebias) << 23) | (fraction << 13), jnp.float32)
    magnitude = jnp.where(exponent == 0, fraction.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits < 0, -magnitude, magnitude)


def dot_in_float32(left, right, left_axes: tuple[int, ...], right_axes: tuple[int, ...]):
    """Contract two blocks in their common dtype, summed in float32; float32 blocks are not rounded to bfloat16."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    if right_axes == (1,) and right.shape[0] == 1:
        dtype = jnp.dtype(jnp.float32)  # Pallas lowers this product of narrow types to a broadcast it then rejects
    return jax.lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        ((left_axes, right_axes), ((), ())),
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
