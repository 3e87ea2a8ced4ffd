"""Blocks from tuning files: the nearest tuned shape or the default, never a failure, never over the VMEM limit."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MIB = 1 << 20
KIND = "TPU7x"
SHAPE = {"op": "backward", "residual": False, "dtype": "bfloat16", "m": 4096, "n": 4096}
USE = {"block_m": 64, "block_n": 4096, "tile_m": 16, "vmem_limit_bytes": 32 * MIB}

numbers = st.integers(-2, 10_000) | st.sampled_from([8, 16, 64, 128, 4096, 16 * MIB, 48 * MIB, 10**400])
anything = st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=3)


@pytest.fixture
def folder(part, tmp_path, monkeypatch):
    monkeypatch.setattr(part("tuned"), "FOLDER", tmp_path)
    part("_bridge.tuning").read_entries.cache_clear()
    yield tmp_path
    part("_bridge.tuning").read_entries.cache_clear()


@pytest.fixture
def choose(part):
    """(tuned, default) for SHAPE with changes."""

    def choose(device_kind=KIND, items=(2, 2), **changes):
        shape = SHAPE | changes
        config = part("config")
        streams = getattr(config, f"{shape['op']}_streams")(*items, residual=shape["residual"])
        default = config.choose(shape["m"], shape["n"], streams)
        return part("tuned").tuned_config(streams=streams, device_kind=device_kind, **shape), default

    return choose


@pytest.fixture
def write(part, folder):
    def write(*entries, **changes):
        body = {"kernel": "rms-norm", "device": KIND, "entries": list(entries), **changes}
        (folder / "tpu_tpu7x.json").write_text(json.dumps(body))
        part("_bridge.tuning").read_entries.cache_clear()

    return write


def test_the_tuned_shape_gets_its_blocks(part, write, choose):
    write({"when": SHAPE, "use": USE})
    assert choose()[0] == part("config").Config(**USE)


@pytest.mark.parametrize(
    "changes",
    [
        {"m": 2047},  # more than a factor of 2 away
        {"n": 8193},
        {"op": "forward"},
        {"residual": True},
        {"dtype": "float32"},
        {"device_kind": "TPU v5"},
        {"device_kind": None},
    ],
)
def test_a_far_shape_another_op_or_device_gets_the_default(write, choose, changes):
    write({"when": SHAPE, "use": USE})
    found, default = choose(**changes)
    assert found == default


def test_rows_stay_whole_at_another_width(write, choose):
    write({"when": SHAPE, "use": USE})
    found, _ = choose(m=3000, n=5376)
    assert (found.block_m, found.block_n, found.tile_m) == (64, 5376, 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_m": 24},  # does not divide block_m
        {"block_m": 60, "tile_m": 20},  # no whole registers
        {"tile_m": 256, "block_m": 256},
        {"block_n": 2048},  # cut rows
        {"vmem_limit_bytes": MIB},
        {"vmem_limit_bytes": 64 * MIB},
        {"block_m": 2048},
        {"block_m": 0},
        {"block_m": "64"},
        {"rows": 3},
    ],
)
def test_blocks_that_do_not_fit_are_passed_over(write, choose, changes):
    write({"when": SHAPE, "use": USE | changes})
    found, default = choose()
    assert found == default
    write({"when": SHAPE, "use": USE | changes}, {"when": SHAPE | {"n": 4000}, "use": USE | {"block_n": 4000}})
    assert choose()[0].block_m == 64


def test_a_file_of_another_kernel_is_not_used(write, choose, caplog):
    write({"when": SHAPE, "use": USE}, kernel="ragged-dot")
    found, default = choose()
    assert found == default
    assert "it is for 'ragged-dot', not for 'rms-norm'" in caplog.text


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    m=st.integers(1, 100_000),
    n=st.integers(1, 300) | st.integers(1, 70_000),
    factors=st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)),
    items=st.sampled_from([(2, 2), (2, 4), (4, 4)]),
    op=st.sampled_from(["forward", "backward"]),
    residual=st.booleans(),
    likely=st.fixed_dictionaries(
        {
            "block_m": st.sampled_from([1, 8, 64, 512, 4096]),
            "block_n": st.sampled_from([512, 200_000]),
            "tile_m": st.sampled_from([1, 8, 16, 32, 64]),
            "vmem_limit_bytes": st.sampled_from([16 * MIB, 48 * MIB, 49 * MIB]),
        }
    ),
    others=st.lists(
        st.fixed_dictionaries(dict.fromkeys(USE, numbers | anything)) | st.dictionaries(st.text(max_size=3), anything),
        max_size=2,
    ),
)
def test_whatever_a_file_holds_blocks_fit_and_are_launchable(
    part, write, choose, m, n, factors, items, op, residual, likely, others
):
    shape = SHAPE | {"op": op, "residual": residual, "m": m, "n": n}
    near = shape | {"m": max(1, int(m * factors[0])), "n": max(1, int(n * factors[1]))}
    write(*({"when": near, "use": use} for use in (*others, likely)))
    chosen, _ = choose(items=items, **shape)
    assert 1 <= chosen.block_m <= m
    assert chosen.block_m % chosen.tile_m == 0
    assert chosen.block_m % 8 == 0 or chosen.block_m == m
    assert chosen.block_n == n or chosen.block_n % 128 == 0
    config = part("config")
    streams = getattr(config, f"{op}_streams")(*items, residual=residual)
    assert config.vmem_bytes(chosen, n, streams) <= chosen.vmem_limit_bytes * 7 // 8 <= 42 * MIB


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_the_kernel_launches_with_them(part, write, op, monkeypatch, caplog):
    jax = pytest.importorskip("jax")
    caplog.set_level("DEBUG")
    kernel, m, n = part("kernel"), 44, 256
    monkeypatch.setattr(kernel, "device_kind", lambda: KIND)
    write(
        {"when": SHAPE | {"op": op, "dtype": "float32", "m": m, "n": 200}, "use": USE | {"block_m": 24, "tile_m": 8}},
    )
    x, dy = jax.random.normal(jax.random.key(0), (2, m, n))
    args = (x, jax.numpy.ones(n)) + ((dy,) if op == "backward" else ())
    run = getattr(kernel, f"rms_norm_{op}")
    tuned = run(*args, eps=1e-6, interpret=True)
    assert f"tuned at {{'op': '{op}'" in caplog.text
    assert "block_m=24, block_n=256, tile_m=8" in caplog.text
    given = part("config").Config(**USE | {"block_n": n, "block_m": 16, "tile_m": 16})
    other = run(*args, eps=1e-6, interpret=True, config=given)
    jax.tree.map(lambda a, b: jax.numpy.allclose(a, b, rtol=1e-5, atol=1e-5) or pytest.fail(op), tuned, other)
