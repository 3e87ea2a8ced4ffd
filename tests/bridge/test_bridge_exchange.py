"""Tensors arrive in JAX as they are, results come back as tensors that are nobody else's."""

import gc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from bridge_ops import NAMESPACE

from pallas_hub.torch_bridge import jax_op

CONSTANT = jnp.arange(4.0)


def _identity(x: jax.Array) -> jax.Array:
    return x


def _everything_shared(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    y = x + 1
    return x, y, y, CONSTANT, jax.jit(lambda x: x)(x).reshape(x.shape)


def _info(x: jax.Array) -> jax.Array:
    """The dtype that JAX sees, as a number that depends on it alone, and the count of non-zeros."""
    return jnp.stack([jnp.int32(x.dtype.itemsize), jnp.sum(x != 0).astype(jnp.int32)])


identity = jax_op("identity", namespace=NAMESPACE, fn=_identity)
everything_shared = jax_op("everything_shared", namespace=NAMESPACE, fn=_everything_shared)
info = jax_op("info", namespace=NAMESPACE, fn=_info)

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 1, 1), (5, 7)], ids=str)
def test_values_and_dtype_survive_the_round_trip(dtype, shape):
    x = (torch.arange(int(np.prod(shape))).reshape(shape) % 3).to(dtype)
    y = identity(x)
    assert (y.dtype, y.shape, y.stride()) == (x.dtype, x.shape, torch.empty(shape).stride())
    assert torch.equal(y.view(torch.uint8) if shape else y, x.view(torch.uint8) if shape else x)


def test_every_bit_pattern_of_bfloat16_survives():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    assert torch.equal(identity(bits.view(torch.bfloat16)).view(torch.int16), bits)


def test_bool_mask_stays_bool():
    mask = torch.rand(1, 1, 5, 5) > 0.5
    assert info(mask).tolist() == [1, int(mask.sum())]
    assert torch.equal(~identity(mask), ~mask)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(1, 3).expand(4, 3),
        lambda: torch.randn(4, 8, 16)[:1, :, :],
        lambda: torch.randn(4, 8, 16)[:, :1],
        lambda: torch.randn(9)[1:],  # not aligned to 64 bytes
        lambda: torch.randn(5, 5).flip(0),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, dtype=torch.complex64).conj().imag,  # carries the negative bit
        lambda: torch.nn.Parameter(torch.randn(3)),
        lambda: torch.randn(3, requires_grad=True) * 2,
    ],
    ids=[
        "transposed",
        "expanded",
        "size-1",
        "size-1-inner",
        "unaligned",
        "flipped",
        "conj",
        "neg",
        "parameter",
        "nonleaf",
    ],
)
def test_any_layout_arrives_right_and_leaves_row_major(make):
    x = make()
    with torch.no_grad():
        y = identity(x)
    assert torch.equal(y, x.detach())
    assert y.is_contiguous()


def test_int64_that_fits_is_taken_as_int32():
    x = torch.tensor([2**31 - 1, -(2**31), 0])
    assert identity(x).dtype is torch.int32
    assert identity(x).tolist() == x.tolist()
    assert identity(torch.empty(0, dtype=torch.int64)).dtype is torch.int32


@pytest.mark.parametrize("values", [[2**31 + 7, 1], [2**40 + 5], [-(2**31) - 1]])
def test_int64_that_does_not_fit_is_refused_by_name(values):
    with pytest.raises(OverflowError, match=r"identity: x is int64 .* must lie in \[-2147483648, 2147483647\]; got \["):
        identity(torch.tensor(values))


def test_64_bit_floats_are_refused_in_words():
    with pytest.raises(
        TypeError, match=r"identity: x is float64; JAX code takes float32, .*Try \.to\(torch\.float32\)"
    ):
        identity(torch.randn(2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"identity: x is complex128"):
        identity(torch.randn(2, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"identity: x is uint64"):
        identity(torch.zeros(2, dtype=torch.uint64))


def test_x64_is_never_switched():
    identity(torch.randn(2))
    assert not jax.config.jax_enable_x64
    assert jnp.asarray(np.float64(1)).dtype == jnp.float32


def test_no_two_results_or_inputs_share_memory():
    x = torch.arange(4.0)
    for _ in range(3):  # the first call traces, later ones take jit's fast path
        tensors = [x, *everything_shared(x), *everything_shared(x)]
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


def test_writing_into_a_result_changes_nothing_else():
    x = torch.arange(4.0)
    for result in everything_shared(x):
        result.fill_(-1)
    assert x.tolist() == [0, 1, 2, 3]
    assert CONSTANT.tolist() == [0, 1, 2, 3]
    again = everything_shared(x)
    assert [t.tolist() for t in again] == [[0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("n", [8, 1 << 20])
def test_changing_the_input_afterwards_does_not_change_the_result(n):
    x = torch.ones(n)
    y = identity(x)
    x.fill_(7)
    assert y.eq(1).all()


def test_result_outlives_the_jax_array_and_the_input():
    results = []
    for i in range(50):
        results.append(identity(torch.full((1000,), float(i))))
        torch.full((1000,), -1.0)
    gc.collect()
    [torch.full((1000,), -1.0) for _ in range(50)]
    assert all(r.eq(i).all() for i, r in enumerate(results))


def test_a_result_that_is_constant_is_made_anew_for_every_call():
    def constants(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return jnp.zeros(64), jnp.arange(64.0), CONSTANT * 2

    op = jax_op("constants", namespace=NAMESPACE, fn=constants)
    for _ in range(3):
        results = op(torch.zeros(1))
        assert [r.sum().item() for r in results] == [0, 2016, 12]
        for result in results:
            result.fill_(-1)


def test_large_inputs_are_not_copied():
    def first(x: jax.Array) -> jax.Array:
        return x[:1]

    op = jax_op("first", namespace=NAMESPACE, fn=first)
    x = torch.zeros(64 << 20)  # 256 MB: a copy takes tens of milliseconds
    op(x)
    import time

    spent = []
    for _ in range(20):
        start = time.perf_counter()
        op(x)
        spent.append(time.perf_counter() - start)
    assert min(spent) < 2e-3


def test_results_can_be_views_of_any_size_class():
    for n in (1, 15, 16, 17, 4096, 100_003):
        x = torch.randn(n, dtype=torch.bfloat16)
        assert torch.equal(identity(x), x)


def test_ml_dtypes_agree_on_the_name():
    assert np.dtype(ml_dtypes.bfloat16).name == "bfloat16"
    assert info(torch.ones(3, dtype=torch.bfloat16)).tolist() == [2, 3]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_works_in_every_grad_mode(mode):
    x = torch.nn.Parameter(torch.randn(3))
    with mode():
        assert torch.equal(identity(x.detach()), x.detach())
        assert torch.equal(identity(x).detach(), x.detach())


def test_a_meta_tensor_gives_a_meta_result():
    y = identity(torch.empty(3, 4, device="meta"))
    assert (y.device.type, y.shape) == ("meta", (3, 4))


def test_a_sparse_tensor_is_refused():
    with pytest.raises(TypeError, match=r"identity: x has layout torch\.sparse_coo; give a dense tensor"):
        identity(torch.eye(3).to_sparse())
