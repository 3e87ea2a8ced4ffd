"""The Pallas kernel over pages, interpreted, against each sequence by itself.

Memory that was not written reads as NaN and races are detected. The pages hold NaN wherever no token is, and page
numbers past a sequence's end are wrong ones, so a key that does not count shows.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from paged_checks import Pages, in_pages

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from flash_attention import paged_reference  # noqa: E402
from flash_attention.paged import paged_attention  # noqa: E402
from flash_attention.paged_config import PagedConfig  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

STRICT = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
SCALE = 0.1


@pytest.fixture(autouse=True)
def no_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found


# Compiled once per shape and rule; lengths and starts are data.
run = jax.jit(
    functools.partial(paged_attention, scale=SCALE, interpret=STRICT),
    static_argnames=("causal", "window", "softcap", "config"),
)


def check(pages: Pages, dtype: str, sinks=None, config: PagedConfig | None = None, **rule) -> np.ndarray:
    """Against the reference on the same rounded numbers. bfloat16 rounds weights and result once each."""
    floats, tables = arrays(pages, dtype)
    got = np.asarray(run(*floats, *tables, sinks, config=config, **rule), np.float32)
    wide = (x.astype(jnp.float32) for x in floats)
    wanted = np.asarray(paged_reference.paged_attention(*wide, *tables, sinks, scale=SCALE, **rule))
    tolerance = {"float32": 1e-5, "bfloat16": 2.0**-7}[dtype]
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    return got


def arrays(pages: Pages, dtype: str) -> tuple[list, list]:
    floats = [jnp.asarray(x, dtype) for x in (pages.q, pages.k, pages.v)]
    return floats, [jnp.asarray(x) for x in (pages.lengths, pages.table, pages.q_starts)]


def test_decode_of_two_heads_in_a_word():
    """Blocks of two pages; a chunk has to divide their 32 columns of a set."""
    for seed, lengths in enumerate([(32, 1, 16), (0, 31, 17)]):
        check(in_pages(lengths, (1, 1, 1), hq=8, hk=4, seed=seed), "bfloat16", config=PagedConfig(1, 2, 32))


def test_odd_heads_and_sizes_that_all_rows_see_whole():
    """The context ends within a word of two rows. One tile per query, and a sequence has two."""
    sizes = {"hq": 6, "hk": 3, "d": 64, "dv": 32, "page": 16}
    check(in_pages((64, 9, 33), (2, 0, 1), **sizes), "bfloat16", config=PagedConfig(1, 2, 96), causal=False)


@pytest.mark.parametrize("q_sizes", [(1, 1, 1, 0), (3, 0, 0, 0), (0, 0, 2, 1)], ids=str)
def test_any_sequence_may_own_the_queries(q_sizes):
    """One tile per query, blocks of the kernel's own choice; the rows past the last sequence are 0."""
    got = check(in_pages((20, 9, 31, 4), q_sizes, hq=4, hk=2, total_q=4), "float32")
    assert (got[sum(q_sizes) :] == 0).all()


def test_prefill_and_decode_in_one_call():
    """Sequences of one query go through tiles of one, the others through tiles of four, with heads taken apart.

    A page before the window is not read: NaN in it would show.
    """
    pages = in_pages((21, 17, 3, 0, 12), (6, 1, 5, 0, 12), hq=4, hk=2, total_q=26)  # some have fewer keys
    rule = {"config": PagedConfig(4, 2, 8), "window": 3, "softcap": 2.0}
    sinks = jnp.asarray([-2.0, 0.5, 3.0, -np.inf])
    wanted = check(pages, "bfloat16", sinks, **rule)
    assert (wanted[24:] == 0).all()
    assert np.isfinite(wanted).all()
    for row in pages.table[:2]:
        pages.k[row[0]] = pages.v[row[0]] = np.nan
    floats, tables = arrays(pages, "bfloat16")
    np.testing.assert_array_equal(run(*floats, *tables, sinks, **rule), wanted)


def test_nan_of_one_sequence_stays_there():
    pages = in_pages((30, 25, 9, 4), (1, 1, 1, 1), hq=4, hk=2)
    pages.v[pages.table[1, 0]] = np.nan
    floats, tables = arrays(pages, "float32")
    finite = np.isfinite(np.asarray(run(*floats, *tables, None, config=None))).all((1, 2))
    assert finite.tolist() == [True, False, True, True]


def test_lengths_beyond_the_table_are_cut_to_it():
    pages = in_pages((32, 32, 1, 9), (1, 1, 1, 1), hq=4, hk=2)
    floats, (_, table, starts) = arrays(pages, "float32")
    long, right = (jnp.asarray(lengths, jnp.int32) for lengths in ([50, 32, 1, 9], [32, 32, 1, 9]))
    got, wanted = (run(*floats, x, table, starts, None, config=None) for x in (long, right))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("s", "total_q", "num_pages", "most"), [(0, 0, 3, 2), (2, 0, 3, 2), (2, 2, 0, 2), (2, 2, 3, 0)]
)
def test_nothing_to_do_is_zeros(s, total_q, num_pages, most):
    pages = jnp.zeros((num_pages, 8, 2, 128))
    tables = jnp.zeros(s, jnp.int32), jnp.zeros((s, most), jnp.int32), jnp.zeros(s + 1, jnp.int32)
    got = run(jnp.ones((total_q, 4, 128)), pages, pages, *tables)
    np.testing.assert_array_equal(got, np.zeros((total_q, 4, 128)))


def test_tables_have_to_fit_scalar_memory():
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pages = jax.ShapeDtypeStruct((8, 8, 2, 128), jnp.float32)
    q = jax.ShapeDtypeStruct((64, 4, 128), jnp.float32)
    with pytest.raises(ValueError, match=r"must fit in 524288 bytes .*Use pages of more than 8 tokens"):
        jax.eval_shape(paged_attention, q, pages, pages, shape((64,)), shape((64, 4096)), shape((65,)))
