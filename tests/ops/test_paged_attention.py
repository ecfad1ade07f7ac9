"""paged_attention against the float64 reference, over every option, with NaN wherever nothing may read."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import (
    PageTable,
    merge_states,
    paged_attention,
    paged_attention_partial,
    plan_attention,
    rope_append,
)
from mlxcel_ext.ops import PlanTarget
from tests.conftest import METAL_EMULATED
from tests.support.compare import assert_close, to_numpy
from tests.support.paged import Q_LEN, PagedCase, each_kv_dtype

# Outputs are sums of values weighted by 1 in total: their errors are relative to the values' size, 1. f32 rounds in
# scores of size 10 as well, and in every step of the online softmax.
ULPS = {mx.float32: 16, mx.float16: 1, mx.bfloat16: 1}
LSE_ULPS = 16


def check(
    case: PagedCase, stream, *, options: dict | None = None, scores: float = 10.0, **run
) -> tuple[mx.array, mx.array]:
    """`scores`: the size of the scores, which f32 rounds before they are exponents."""
    options = options or {}
    out, lse = paged_attention(
        *case.args,
        qo_indptr=case.qo_indptr,
        kv_layout=case.layout,
        return_lse=True,
        stream=stream,
        **options,
        **run,
    )
    want, want_lse = case.reference(**options)
    coarser = scores / 10.0 if out.dtype == mx.float32 else 1.0
    assert_close(out, want, ulps=ULPS[out.dtype] * coarser, scale=1.0)
    assert_close(lse, want_lse, ulps=LSE_ULPS, scale=8.0)
    return out, lse


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
@each_kv_dtype
def test_decode_of_every_head_dim(stream, dtype, kv_dtype, rng, dim, layout):
    check(PagedCase(rng, [1, 70, 33], dtype=dtype, kv_dtype=kv_dtype, dim=dim, layout=layout), stream)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 32])
@pytest.mark.parametrize("hkv", [1, 3])
def test_groups(stream, rng, hkv, group):
    check(PagedCase(rng, [90, 5], hq=hkv * group, hkv=hkv), stream)
    check(PagedCase(rng, [90, 5], qo_len=[7, 3], hq=hkv * group, hkv=hkv), stream)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
@each_kv_dtype
def test_page_sizes_and_ragged_lengths(stream, dtype, kv_dtype, rng, page_size):
    n = page_size
    kv_len = [0, 1, max(n - 1, 1), n, n + 1, 3 * n + 2, 130]
    check(PagedCase(rng, kv_len, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size), stream)
    qo_len = [0, 1, 0, min(n, 3), n, 2, 100]
    check(PagedCase(rng, kv_len, qo_len=qo_len, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size), stream)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 0, 1, 30, 100])
@each_kv_dtype
def test_mixed_steps(stream, dtype, kv_dtype, rng, window_left, causal, layout):
    case = PagedCase(
        rng,
        [200, 64, 17, 1, 0, 96],
        qo_len=[1, 64, 5, 1, 0, 33],
        dtype=dtype,
        kv_dtype=kv_dtype,
        layout=layout,
        offsets=[3, 0, 15, 0, 0, 7],
    )
    check(case, stream, options={"window_left": window_left, "causal": causal})


@pytest.mark.parametrize("qo_len", [None, [3, 40, 2]])
@pytest.mark.parametrize("cap", [0.0, 0.5, 50.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("sm_scale", [None, 0.3])
@each_kv_dtype
def test_soft_cap_sinks_and_scale(stream, dtype, kv_dtype, rng, sm_scale, with_sinks, cap, qo_len):
    case = PagedCase(rng, [70, 40, 2], qo_len=qo_len, dtype=dtype, kv_dtype=kv_dtype)
    sinks = mx.array([0.0, 2.5, -float("inf"), -40.0]) if with_sinks else None
    check(case, stream, options={"logits_soft_cap": cap, "sinks": sinks, "sm_scale": sm_scale})


def test_rows_that_see_nothing(stream, rng):
    # Without sinks 0 and -inf; with them 0 and the sink.
    case = PagedCase(rng, [0, 2, 0], qo_len=[2, 4, 0])
    out, lse = check(case, stream)
    assert (to_numpy(out)[:4] == 0).all()
    assert (to_numpy(lse)[:4] == -np.inf).all()
    check(case, stream, options={"sinks": mx.array([0.0, 1.0, 2.0, 3.0])})


@each_kv_dtype
def test_empty_batch(stream, dtype, kv_dtype):
    pool = mx.zeros((2, 16, 2, 64), kv_dtype)
    table = PageTable([0], [], [], 16)
    out, lse = paged_attention(mx.zeros((0, 4, 64), dtype), pool, pool, table, return_lse=True, stream=stream)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)
    mx.eval(out, lse)


@each_kv_dtype
def test_long_and_skewed_batch_is_split_and_merged(stream, dtype, kv_dtype, rng):
    case = PagedCase(rng, [3000, 20, 700], dtype=dtype, kv_dtype=kv_dtype, hq=4, hkv=1)
    plan = plan_attention(case.table, **case.heads)
    assert plan.num_partials > 3  # the longest is in several chunks
    check(case, stream, plan=plan, options={"sinks": mx.array([0.0, 1.0, 2.0, 3.0])})
    check(case, stream, plan=plan, options={"window_left": 100})


def test_partials_merge_to_the_whole(stream, rng):
    case = PagedCase(rng, [3000, 20, 0], qo_len=[9, 20, 1], hq=4, hkv=1)
    plan = plan_attention(case.table, case.qo_indptr, partial=True, **case.heads)
    v, lse = paged_attention_partial(*case.args, qo_indptr=case.qo_indptr, plan=plan, stream=stream)
    assert v.shape == (plan.num_partials, 4, 64)
    whole, whole_lse = merge_states(v, lse, plan.merge_indptr, stream=stream)
    want, want_lse = case.reference()
    assert_close(whole, want, ulps=ULPS[mx.float32], scale=1.0)
    assert_close(whole_lse, want_lse, ulps=LSE_ULPS, scale=8.0)


@each_kv_dtype
def test_logits_of_hundreds_do_not_overflow(stream, dtype, kv_dtype, rng):
    # Where the two highest scores are close, correctly rounded f32 scores of 2,000 alone are 35 ulps off.
    check(
        PagedCase(rng, [300], dtype=dtype, kv_dtype=kv_dtype, scale=8.0),
        stream,
        options={"sm_scale": 1.0},
        scores=2000.0,
    )


@pytest.mark.parametrize(("group", "tokens"), [(1, 64), (8, 64), (4, 3), (8, 4)])
@pytest.mark.parametrize("which", ["k", "v"])
@each_kv_dtype
def test_a_nan_token_stays_with_the_queries_that_see_it(stream, dtype, kv_dtype, rng, group, tokens, which):
    case = PagedCase(rng, [64], qo_len=[tokens], hq=2 * group, hkv=2, dtype=dtype, kv_dtype=kv_dtype)
    first = tokens // 2  # query token that sees it first, its own
    slot = int(case.table.slots(case.qo_indptr)[first])
    pools = {"k": case.k_pages, "v": case.v_pages}
    a = to_numpy(pools[which])
    a[slot // 16, slot % 16, :, 3] = np.nan
    pools[which] = mx.array(a, kv_dtype)

    def run(k_pages, v_pages):
        out = paged_attention(case.q, k_pages, v_pages, case.table, qo_indptr=case.qo_indptr, stream=stream)
        return to_numpy(out)

    clean, out = run(case.k_pages, case.v_pages), run(pools["k"], pools["v"])
    np.testing.assert_array_equal(out[:first], clean[:first])
    reached = np.zeros(clean.shape, bool)
    reached[first:, :, slice(None) if which == "k" else 3] = True
    np.testing.assert_array_equal(np.isnan(out), reached)
    np.testing.assert_array_equal(out[~reached], clean[~reached])


@each_kv_dtype
def test_strided_queries(stream, dtype, kv_dtype, rng):
    case = PagedCase(rng, [30, 9], dtype=dtype, kv_dtype=kv_dtype)
    wide = mx.concatenate([case.q, case.q], axis=-1)[:, :, :64]
    turned = mx.swapaxes(mx.contiguous(mx.swapaxes(case.q, 0, 1)), 0, 1)
    want = paged_attention(*case.args, stream=stream)
    for q in (wide, turned):
        assert mx.array_equal(paged_attention(q, *case.args[1:], stream=stream), want)


def test_a_pool_is_never_copied(rng):
    case = PagedCase(rng, [30])
    turned = mx.swapaxes(mx.contiguous(mx.swapaxes(case.k_pages, 1, 2)), 1, 2)
    mx.eval(turned)
    out = paged_attention(case.q, turned, case.v_pages, case.table, stream=mx.cpu)
    with pytest.raises(ValueError, match=r"\[paged_attention\] k_pages must be row-contiguous"):
        mx.eval(out)


@each_kv_dtype
def test_runs_are_bitwise_equal(stream, dtype, kv_dtype, rng):
    case = PagedCase(rng, [700, 20, 64], qo_len=[3, 1, 64], dtype=dtype, kv_dtype=kv_dtype)
    first = paged_attention(*case.args, qo_indptr=case.qo_indptr, stream=stream)
    for _ in range(3):
        again = paged_attention(*case.args, qo_indptr=case.qo_indptr, stream=stream)
        assert mx.array_equal(first, again)


@pytest.mark.skipif(METAL_EMULATED, reason="emulated kernels are called on a CPU stream")
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("options", [{}, {"window_left": 20}, {"logits_soft_cap": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_tile(dtype, rng, dim, options):
    # Tiles of 4 rows read K and V in the pool; of more, with AVX-512, whole vectors lie as lanes and the rest does not.
    case = PagedCase(rng, [150, 97], qo_len=[30, 97], dtype=dtype, hq=4, hkv=1, dim=dim)
    run = {"qo_indptr": case.qo_indptr, "return_lse": True, "stream": mx.cpu, **options}
    first = None
    for tile_rows in (4, 12, 16, 28, 32, 64):
        target = PlanTarget(1, tile_rows, 4, 1 << 20, 0, 1, 1 << 20)
        plan = plan_attention(case.table, case.qo_indptr, target=target, **case.heads)
        assert plan.num_partials == 0
        assert plan.tiles[:, Q_LEN].max() * 4 == tile_rows
        outs = paged_attention(*case.args, plan=plan, **run)
        first = first or outs
        for got, want in zip(outs, first, strict=True):
            assert mx.array_equal(got, want)


def test_compile_merges_equal_nodes_only(stream, rng):
    case = PagedCase(rng, [40, 3])
    variants = [{}, {"sm_scale": 0.5}, {"window_left": 5}, {"logits_soft_cap": 1.0}]

    @mx.compile
    def run(q, k_pages, v_pages):
        return [paged_attention(q, k_pages, v_pages, case.table, stream=stream, **o) for o in variants]

    outs = run(*case.args[:3])
    for out, options in zip(outs, variants, strict=True):
        assert mx.array_equal(out, paged_attention(*case.args, stream=stream, **options))
    for out in outs[1:]:
        assert not mx.array_equal(out, outs[0])


def _good() -> dict:
    pool = mx.zeros((4, 16, 2, 64))
    return {
        "q": mx.zeros((2, 4, 64)),
        "k_pages": pool,
        "v_pages": pool,
        "table": PageTable([0, 1, 2], [0, 1], [3, 4], 16),
        "stream": mx.cpu,
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": mx.zeros((2, 64))}, r"\[paged_attention\] q must have 3 dimensions"),
        ({"q": mx.zeros((2, 4, 64), mx.int32)}, r"q must be float32, float16 or bfloat16, got int32"),
        ({"q": mx.zeros((2, 4, 64), mx.float16)}, r"\] k_pages must be float16, got float32"),
        (
            {name: mx.zeros((4, 16, 2, 64), mx.int8) for name in ("k_pages", "v_pages")},
            r"\] k_pages must be float32, float16 or bfloat16, got int8",
        ),
        ({"v_pages": mx.zeros((4, 16, 2, 64), mx.float16)}, r"\] v_pages must be float32, got float16"),
        ({"q": mx.zeros((2, 4, 80))}, r"q must have the pool's head_dim 64, got shape \(2,4,80\)"),
        ({"q": mx.zeros((2, 3, 64))}, r"num_qo_heads must be a multiple of num_kv_heads, got 3 and 2"),
        ({"q": mx.zeros((2, 66, 64))}, r"1 to 32 times num_kv_heads 2, got 66"),
        ({"q": mx.zeros((3, 4, 64))}, r"q must have one token for each of the 2 requests"),
        ({"k_pages": mx.zeros((4, 16, 128))}, r"k_pages must have 4 dimensions"),
        ({"v_pages": mx.zeros((4, 16, 2, 80))}, r"v_pages must have shape \(4,16,2,64\), got \(4,16,2,80\)"),
        ({"kv_layout": "HND"}, r"table must have the pool's page size 2, got 16"),
        ({"kv_layout": "DHN"}, r"kv_layout must be 'NHD' or 'HND', got 'DHN'"),
        ({"qo_indptr": [0, 1]}, r"qo_indptr must have batch \+ 1 = 3 elements, got 2"),
        ({"qo_indptr": [0, 1, 3]}, r"qo_indptr must end at q's 2 tokens, got 3"),
        ({"qo_indptr": [0, 3, 2]}, r"qo_indptr must not fall, got 3 then 2 at request 1"),
        ({"sm_scale": float("nan")}, r"sm_scale must be finite"),
        ({"window_left": -2}, r"window_left must be -1 or more, got -2"),
        ({"window_left": 2**40}, r"\] window_left must be an int of 32 bits, got 1099511627776"),
        ({"window_left": 1.5}, r"\] window_left must be int, got 1\.5"),
        (
            {"sinks": np.zeros(4, np.float32)},
            r"\[paged_attention\] sinks must be mx\.array \| None, got ndarray",
        ),
        ({"q": np.zeros((2, 4, 64))}, r"\[paged_attention\] q must be mx\.array, got ndarray"),
        ({"table": [0, 1]}, r"\[paged_attention\] table must be PageTable, got list"),
        ({"sm_scale": "1"}, r"\[paged_attention\] sm_scale must be float \| None, got '1'"),
        ({"plan": 3}, r"\[paged_attention\] plan must be AttentionPlan \| None, got 3"),
        (
            {"stream": "cpu"},
            r"\[paged_attention\] stream must be mx\.Stream \| mx\.Device \| None, got 'cpu'",
        ),
        ({"logits_soft_cap": -1.0}, r"logits_soft_cap must be 0 or more, got -1"),
        ({"sinks": mx.zeros((2,))}, r"sinks must have shape \(4\), got \(2\)"),
        (
            {"table": PageTable([0, 1, 2], [0, 4], [3, 4], 16)},
            r"kv_indices of request 1 must be page ids in 0\.\.3, got 4",
        ),
        ({"table": PageTable([0, 1, 2], [0, 1], [3, 17], 16)}, r"kv_last_page_len of request 1"),
    ],
)
def test_bad_input_is_a_value_error(change, text):
    with pytest.raises(ValueError, match=text):
        paged_attention(**(_good() | change))


@pytest.mark.skipif(METAL_EMULATED, reason="emulated kernels are called on a CPU stream")
@pytest.mark.parametrize("kv_dtype", [mx.float16, mx.bfloat16])
def test_16_bit_pages_beside_float32_queries_are_the_cpu_s(stream, rng, kv_dtype):
    case = PagedCase(rng, [40, 3], kv_dtype=kv_dtype)
    if stream == mx.cpu:
        check(case, stream)
        return
    name = str(kv_dtype).removeprefix("mlx.core.")
    with pytest.raises(ValueError, match=rf"\[paged_attention\] k_pages must be float32, got {name}"):
        paged_attention(*case.args, stream=stream)
    new = case.k_pages.reshape(-1, 2, 64)[:2].astype(mx.float32)
    with pytest.raises(ValueError, match=rf"\[rope_append\] k_pages must be float32, got {name}"):
        rope_append(
            case.q,
            new,
            new,
            case.k_pages,
            case.v_pages,
            case.table,
            mx.array([0, 1], mx.int32),
            inv_freq=mx.zeros((0,)),
            stream=stream,
        )


def test_unsupported_head_dim():
    pool = mx.zeros((4, 16, 2, 72))
    with pytest.raises(ValueError, match=r"head_dim must be 64, 80, 96, 112, 128, 192 or 256, got 72"):
        paged_attention(**(_good() | {"q": mx.zeros((2, 4, 72)), "k_pages": pool, "v_pages": pool}))


def test_plans_of_other_launches_are_refused():
    good = _good()
    heads = {"num_qo_heads": 4, "num_kv_heads": 2}
    other = PageTable([0, 2, 3], [0, 1, 2], [3, 4], 16)
    with pytest.raises(ValueError, match="plan was made for other page counts"):
        paged_attention(**good, plan=plan_attention(other, **heads))
    table = good["table"]
    with pytest.raises(ValueError, match="plan is for 8 query heads and 2 KV heads, got 4 and 2"):
        paged_attention(**good, plan=plan_attention(table, num_qo_heads=8, num_kv_heads=2))
    with pytest.raises(ValueError, match="plan is for causal attention, got causal=False"):
        paged_attention(**good, plan=plan_attention(table, **heads), causal=False)
    with pytest.raises(ValueError, match="plan covers window_left up to 3, got window_left=-1"):
        paged_attention(**good, plan=plan_attention(table, window_left=3, **heads))
    with pytest.raises(ValueError, match=r"plan must come from plan_attention\(\.\.\., partial=True\)"):
        paged_attention_partial(**good, plan=plan_attention(table, **heads))


def test_gradients_are_refused():
    good = _good()
    q = good.pop("q")
    with pytest.raises(ValueError, match=r"\[paged_attention\] is for inference"):
        mx.grad(lambda q: paged_attention(q, **good).sum())(q)
