"""Blocks from tuning files: the nearest tuned shape or the default, never a failure, never over the VMEM limit."""

from __future__ import annotations

import importlib
import json
import logging
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged_dot import tuned
from ragged_dot._bridge import tuning
from ragged_dot.config import (
    DEFAULT_VMEM_LIMIT_BYTES,
    LANES,
    MIB,
    Config,
    forward_vmem_bytes,
    weight_gradient_vmem_bytes,
)

KIND = "TPU v6 lite"
SHAPE = {"op": "forward", "dtype": "bfloat16", "m": 512, "k": 2048, "n": 1536, "g": 128}
USE = {"block_m": 64, "block_k": 2048, "block_n": 768, "vmem_limit_bytes": DEFAULT_VMEM_LIMIT_BYTES, "chunk": 256}

sizes = st.integers(1, 70_000) | st.sampled_from([1, 127, 128, 129, 1025, 14336, 2**20])
numbers = st.integers(-2, 100_000) | st.sampled_from([128, 256, 512, 2048, 10**9, 10**400])
anything = st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuning.read_entries.cache_clear()
    yield tmp_path
    tuning.read_entries.cache_clear()


def write(folder, *entries, **changes):
    body = {"kernel": "ragged-dot", "device": KIND, "entries": list(entries), **changes}
    (folder / "tpu_v6e.json").write_text(json.dumps(body))
    tuning.read_entries.cache_clear()


def choose(device_kind=KIND, dtype_bytes=2, **changes):
    shape = SHAPE | changes
    op, dtype = shape.pop("op"), shape.pop("dtype")
    return (
        tuned.tuned_config(op, **shape, dtype=dtype, dtype_bytes=dtype_bytes, device_kind=device_kind),
        tuned.default_config(op, **shape, dtype_bytes=dtype_bytes, device_kind=device_kind),
    )


def test_the_tuned_shape_gets_its_blocks(folder):
    write(folder, {"when": SHAPE, "use": USE})
    assert choose()[0] == Config(**USE)


@pytest.mark.parametrize(
    "changes",
    [
        {"m": 1025},  # more than a factor of 2 away
        {"n": 767},
        {"g": 32},
        {"op": "forward-transposed"},
        {"op": "weight-gradient"},
        {"dtype": "float32"},
        {"device_kind": "TPU7x"},
        {"device_kind": None},
    ],
)
def test_a_far_shape_another_op_or_device_gets_the_default(folder, changes):
    write(folder, {"when": SHAPE, "use": USE})
    found, default = choose(**changes)
    assert found == default


def test_the_nearest_of_two_shapes_counts(folder):
    write(
        folder,
        {"when": SHAPE | {"m": 1024}, "use": USE | {"block_m": 32}},
        {"when": SHAPE | {"m": 600}, "use": USE | {"block_m": 16}},
    )
    assert choose()[0].block_m == 16
    assert choose(m=800)[0].block_m == 32


def test_what_spanned_an_axis_spans_it_at_another_size(folder):
    write(folder, {"when": SHAPE, "use": USE | {"block_n": 1536}})
    found, _ = choose(k=2304, n=1100, m=256)
    assert (found.block_m, found.block_k, found.block_n) == (64, 2304, 1100)
    assert choose(m=257, k=1030)[0].block_k == 1030


def test_blocks_that_do_not_fit_give_way_to_the_next_nearest(folder):
    write(
        folder,
        {"when": SHAPE, "use": USE | {"block_m": 8192, "block_n": 1536}},  # 512 rows of it would fit
        {"when": SHAPE, "use": USE | {"vmem_limit_bytes": 4 * MIB}},
        {"when": SHAPE, "use": USE | {"vmem_limit_bytes": 200 * MIB}},
        {"when": SHAPE, "use": USE | {"block_m": 24}},
        {"when": SHAPE, "use": USE | {"block_n": 700}},
        {"when": SHAPE | {"m": 500}, "use": USE | {"block_m": 48}},
    )
    assert choose()[0].block_m == 512
    write(folder, *json.loads((folder / "tpu_v6e.json").read_text())["entries"][1:])
    assert choose()[0].block_m == 48


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '"entries"',
        "[" * 100_000,
        '{"kernel": "rms-norm", "device": "TPU v6 lite", "entries": []}',
        '{"kernel": "ragged-dot", "entries": []}',
        '{"kernel": "ragged-dot", "device": "TPU v6 lite", "entries": {"when": 1}}',
        '{"kernel": "ragged-dot", "device": "TPU v6 lite", "entries": [{"when": {}}]}',
        '{"kernel": "ragged-dot", "device": "TPU v6 lite", "entries": [7]}',
        b"\xff\xfe\x00",
    ],
)
def test_a_broken_or_foreign_file_gives_the_default_and_is_told_once(folder, text, caplog):
    (folder / "tpu_v6e.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for _ in range(3):
        found, default = choose()
        assert found == default
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "ragged-dot: tuned blocks in" in record.message
    assert "tpu_v6e.json are not used: " in record.message


def test_a_broken_file_leaves_the_others_alone(folder):
    write(folder, {"when": SHAPE, "use": USE})
    (folder / "a.json").write_text("{")
    assert choose()[0] == Config(**USE)


def test_two_files_of_one_device_count_together(folder):
    write(folder, {"when": SHAPE, "use": USE})
    other = {"when": SHAPE | {"m": 4096}, "use": USE | {"block_m": 32}}
    body = {"kernel": "ragged-dot", "device": KIND, "entries": [other]}
    (folder / "z.json").write_text(json.dumps(body))
    assert choose()[0] == Config(**USE)
    assert choose(m=4096)[0].block_m == 32


def make_folder(path):
    path.mkdir()


def make_large(path):
    path.touch()
    os.truncate(path, tuning.LARGEST_FILE + 1)


def make_link_to_itself(path):
    path.symlink_to(path)


def make_link_without_end(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, make_folder, make_large, make_link_to_itself, make_link_without_end])
def test_what_can_not_be_read_to_its_end_is_not_used(folder, make, caplog):
    write(folder, {"when": SHAPE, "use": USE})
    make(folder / "a.json")
    assert choose()[0] == Config(**USE)
    assert "a.json are not used: " in caplog.text


def test_debug_messages_tell_which_blocks_were_taken(folder, caplog):
    caplog.set_level(logging.DEBUG)
    write(folder, {"when": SHAPE | {"m": 400}, "use": USE})
    choose()
    choose(op="weight-gradient")
    near, none = (record.message for record in caplog.records)
    assert "on TPU v6 lite: tuned at {'op': 'forward', 'dtype': 'bfloat16', 'm': 400," in near
    assert "not tuned: Config(" in none


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.fixed_dictionaries({"m": sizes, "k": sizes, "n": sizes, "g": st.integers(1, 512)}),
    factors=st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4),
    op=st.sampled_from(tuned.OPS),
    dtype_bytes=st.sampled_from([2, 4]),
    likely=st.fixed_dictionaries(
        {
            "block_m": st.sampled_from([16, 64, 128, 512, 16384]),
            "block_k": st.sampled_from([128, 512, 2048, 2**20]),
            "block_n": st.sampled_from([128, 768, 1536, 2**20]),
            "vmem_limit_bytes": st.sampled_from([4 * MIB, 48 * MIB, 49 * MIB]),
            "chunk": st.sampled_from([128, 200, 256, 2**30]),
        }
    ),
    others=st.lists(
        st.fixed_dictionaries(dict.fromkeys(USE, numbers | anything)) | st.dictionaries(st.text(max_size=3), anything),
        max_size=2,
    ),
)
def test_whatever_a_file_holds_blocks_fit_and_are_launchable(folder, shape, factors, op, dtype_bytes, likely, others):
    near = {name: max(1, int(size * factor)) for (name, size), factor in zip(shape.items(), factors, strict=True)}
    write(folder, *({"when": {"op": op, "dtype": "bfloat16", **near}, "use": use} for use in (*others, likely)))
    config = tuned.tuned_config(op, **shape, dtype="bfloat16", dtype_bytes=dtype_bytes, device_kind=KIND)
    needed = weight_gradient_vmem_bytes if op == "weight-gradient" else forward_vmem_bytes
    assert needed(config, dtype_bytes) <= 0.8 * config.vmem_limit_bytes <= 0.8 * DEFAULT_VMEM_LIMIT_BYTES
    assert config.block_m % 16 == 0
    assert 16 <= config.block_m < shape["m"] + 16
    for block, size in ((config.block_k, shape["k"]), (config.block_n, shape["n"])):
        assert block == size or (block % LANES == 0 and 0 < block < size)
    assert config.chunk % LANES == 0


@pytest.mark.parametrize("op", tuned.OPS)
def test_the_kernel_launches_with_them(folder, op, monkeypatch, caplog):
    jax = pytest.importorskip("jax")
    kernel = importlib.import_module("ragged_dot.kernel")
    gradient = importlib.import_module("ragged_dot.weight_gradient")
    caplog.set_level(logging.DEBUG)
    for module in (kernel, gradient):
        monkeypatch.setattr(module, "device_kind", lambda: KIND)
    m, k, n, g = 40, 256, 200, 3
    when = {"op": op, "dtype": "float32", "m": m, "k": k, "n": n, "g": g}
    write(folder, {"when": when, "use": USE | {"block_m": 16, "block_k": 128, "block_n": 256, "chunk": 128}})
    lhs, grad = jax.random.normal(jax.random.key(0), (m, k)), jax.random.normal(jax.random.key(1), (m, n))
    rhs = jax.random.normal(jax.random.key(2), (g, n, k) if op == "forward-transposed" else (g, k, n))
    group_sizes = jax.numpy.array([7, 0, 30], "int32")

    def run(config):
        if op == "weight-gradient":
            return gradient.ragged_dot_weight_gradient(lhs, grad, group_sizes, config=config, interpret=True)
        transposed = op == "forward-transposed"
        return kernel.ragged_dot_forward(lhs, rhs, group_sizes, transposed, config=config, interpret=True)

    found = run(None)
    assert f"tuned at {{'op': '{op}'" in caplog.text
    assert "Config(block_m=16, block_k=128, block_n=200," in caplog.text
    other = run(Config(48, k, n))
    assert jax.numpy.allclose(found, other, rtol=1e-5, atol=1e-4)
