"""torch.compile, export, vmap and checkpointing."""

import pytest
import torch
from flash_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attention.op import attention_op
from flash_attention_truth import assert_close, qkv, random
from torch.utils.checkpoint import checkpoint

OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (2, 0)},
    {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.2])},
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _with_gradients(function, q, k, v, *others, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, *others, **options)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def _assert_all_close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, terms=20)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_compiled_is_one_graph_with_the_same_gradients(options):
    tensors = qkv(2, 5, 9, 4, 2, 8)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    _assert_all_close(
        _with_gradients(compiled, *tensors, **options), _with_gradients(flash_attn_func, *tensors, **options)
    )


@pytest.mark.parametrize("options", OPTIONS[1:3], ids=lambda options: "-".join(options))
def test_lengths_may_change_without_compiling_again(options):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(flash_attn_func, fullgraph=True, dynamic=True, backend=count)
    for lq, lk in ((5, 9), (6, 11), (20, 30), (7, 8)):
        tensors = qkv(2, lq, lk, 4, 2, 8)
        assert_close(compiled(*tensors, **options), flash_attn_func(*tensors, **options), terms=lk)
    assert len(graphs) == 1


def test_packed_sequences_compile_with_dynamic_lengths():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    def attend(q, k, v, ends):
        return flash_attn_varlen_func(q, k, v, ends, ends, 9, 9, causal=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=count)
    for ends in ([0, 3, 9], [0, 4, 4, 11], [0, 2, 12, 15]):
        q, k, v = (x[0] for x in qkv(1, ends[-1], ends[-1], 4, 2, 8))
        ends = torch.tensor(ends, dtype=torch.int32)
        assert_close(compiled(q, k, v, ends), attend(q, k, v, ends), terms=12)
    assert len(graphs) == 1


def test_a_step_of_decoding_compiles_and_writes_the_cache():
    def step(q, k_cache, v_cache, k, v, lengths):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    q, k, v = qkv(2, 1, 1, 4, 2, 8)
    caches = [random(2, 12, 2, 8, seed=i) for i in (4, 5)]
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    plain = [cache.clone() for cache in caches]
    wanted = step(q, *plain, k, v, lengths)
    assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(q, *caches, k, v, lengths), wanted)
    for one, other in zip(caches, plain, strict=True):
        assert torch.equal(one, other)


class _Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return flash_attn_func(q, k, v, causal=True, window_size=(3, 0))


def test_export_with_any_length():
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(_Attention(), qkv(1, 6, 6, 4, 2, 8), dynamic_shapes=({1: length},) * 3)
    for size in (2, 45):
        tensors = qkv(1, size, size, 4, 2, 8)
        assert_close(program.module()(*tensors), _Attention()(*tensors), terms=size)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (0, 2, 1)], ids=str)
def test_vmap_equals_a_loop(options, in_dims):
    q, k, v = (random(3, *x.shape, seed=i) for i, x in enumerate(qkv(2, 5, 7, 4, 2, 8)))
    given = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip((q, k, v), in_dims, strict=True)]
    got = torch.func.vmap(lambda q, k, v: flash_attn_func(q, k, v, **options), in_dims)(*given)
    ones = [[x[0 if dim is None else i] for x, dim in zip((q, k, v), in_dims, strict=True)] for i in range(3)]
    assert_close(got, torch.stack([flash_attn_func(*one, **options) for one in ones]), terms=9)


@pytest.mark.parametrize("sinks", [False, True])
def test_vmap_of_a_gradient_equals_a_loop(sinks):
    q, k, v = (random(3, *x.shape, seed=i) for i, x in enumerate(qkv(2, 5, 7, 4, 2, 8)))
    sinks = random(4) if sinks else None

    def loss(q, k, v):
        return flash_attn_func(q, k, v, causal=True, s_aux=sinks).square().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    got = torch.func.vmap(gradient)(q, k, v)
    for i, part in enumerate(got):
        assert_close(part, torch.stack([gradient(*one)[i] for one in zip(q, k, v, strict=True)]), terms=9)


def test_a_vmapped_call_runs_the_op_once():
    from flash_attention._bridge import record_paths

    q, k, v = (random(3, *x.shape) for x in qkv(2, 5, 7, 4, 2, 8))
    with record_paths() as ran:
        torch.func.vmap(lambda q, k, v: flash_attn_func(q, k, v, causal=True))(q, k, v)
    assert ran == [(attention_op.qualname, "torch")]


def test_checkpointing_changes_nothing():
    tensors = qkv(2, 5, 9, 4, 2, 8)

    def attend(q, k, v):
        return flash_attn_func(q, k, v, causal=True, softcap=3.0)

    _assert_all_close(
        _with_gradients(lambda *a: checkpoint(attend, *a, use_reentrant=False), *tensors),
        _with_gradients(attend, *tensors),
    )
