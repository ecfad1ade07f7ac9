"""What the harness itself promises: MSL semantics, and that each kind of mistake is reported once, with its line."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import _ext, paged_attention, plan_attention
from mlxcel_ext.ops import metal_target
from tests.metal_host.dispatch import Library
from tests.metal_host.transform import MetalError
from tests.support.compare import assert_close
from tests.support.paged import PagedCase

HEADER = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"

EXCHANGE = """
kernel void exchange(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
                     uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]],
                     uint i [[thread_position_in_grid]]) {
  threadgroup float s[4][32];
  s[sg][lane] = in[i];
  FIRST
  const float x = s[sg][31 - lane];
  SECOND
  s[sg][lane] = x * 2;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[sg][lane ^ 1];
}
"""
GOOD = "simdgroup_barrier(mem_flags::mem_threadgroup);"


def exchange(first: str, second: str, seed: int) -> tuple[np.ndarray, list[tuple[str, str]]]:
    x, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    library = Library(HEADER + EXCHANGE.replace("FIRST", first).replace("SECOND", second), lint=False)
    return out, library.dispatch(
        "exchange", {0: x, 1: out}, groups=(1,), group=(128,), outputs=(1,), seed=seed
    )


@pytest.mark.parametrize("seed", range(4))
def test_barriers_are_judged_on_every_schedule(seed):
    out, issues = exchange(GOOD, GOOD, seed)
    assert issues == []
    want = 2 * np.arange(128, dtype=np.float32).reshape(4, 32)[:, ::-1].reshape(4, 16, 2)[:, :, ::-1].reshape(
        -1
    )
    np.testing.assert_array_equal(out, want)
    assert {kind for kind, _ in exchange(GOOD, "", seed)[1]} == {"race"}
    assert "race" in {
        kind for kind, _ in exchange("simdgroup_barrier(mem_flags::mem_device);", GOOD, seed)[1]
    }


def test_issues_name_the_line():
    _, issues = exchange(GOOD, "", 0)
    line = (HEADER + EXCHANGE).split("\n").index("  s[sg][lane] = x * 2;") + 1
    assert any(f"<stdin>:{line}:" in text for _, text in issues), issues


def test_matrices_atomics_and_votes():
    source = (
        HEADER
        + """
    kernel void multiply(const device half* a [[buffer(0)]], const device half* b [[buffer(1)]],
                         device float* c [[buffer(2)]]) {
      simdgroup_matrix<half, 8, 8> x, y;
      simdgroup_matrix<float, 8, 8> z = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
      simdgroup_load(x, a, 8);
      simdgroup_load(y, b, 8);
      simdgroup_multiply_accumulate(z, x, y, z);
      simdgroup_store(z, c, 8);
    }
    kernel void vote(device atomic_uint* count [[buffer(0)]], const device uint* in [[buffer(1)]],
                     device uint* out [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      const bool odd = (in[i] & 1) != 0;
      atomic_fetch_add_explicit(count, uint(odd), memory_order_relaxed);
      const float4 f = float4(half4(0.5h, 1.5h, 2.5h, 3.5h).wzyx);
      out[i] = popcount(uint((ulong)simd_ballot(odd))) * 1000 + simd_prefix_exclusive_sum(uint(odd)) * 10 + uint(f.x);
    }
    """
    )
    library = Library(source, lint=False)
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((8, 8)).astype(np.float16) for _ in range(2))
    c = np.zeros((8, 8), np.float32)
    library.run("multiply", {0: a, 1: b, 2: c}, groups=(1,), outputs=(2,))
    np.testing.assert_allclose(c, 1 + a.astype(np.float64) @ b.astype(np.float64), atol=1e-5)
    x = rng.integers(0, 100, 96).astype(np.uint32)
    count, out = np.zeros(1, np.uint32), np.zeros(96, np.uint32)
    library.run("vote", {0: count, 1: x, 2: out}, threads=(96,), outputs=(2,), inout=(0,))
    odd = (x & 1).reshape(3, 32)
    assert count[0] == odd.sum()
    want = np.repeat(odd.sum(1), 32) * 1000 + (np.cumsum(odd, 1) - odd).ravel() * 10 + 3
    np.testing.assert_array_equal(out, want)


def test_a_runaway_loop_is_stopped():
    source = "kernel void spin(device int* x [[buffer(0)]]) { while (x[0] >= 0) x[0] = 1; }"
    library = Library(HEADER + source, lint=False)
    x = np.zeros(1, np.int32)
    issues = library.dispatch("spin", {0: x}, threads=(1,), group=(1,), inout=(0,), max_accesses=10_000)
    assert [kind for kind, _ in issues] == ["runaway"]


def test_function_constants_and_fuzz():
    source = """
    constant bool twice [[function_constant(3)]];
    kernel void f(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) { out[i] = fast::exp(in[i]) * (twice ? 2.0f : 1.0f); }
    """
    library = Library(HEADER + source, lint=False)
    x, out = np.linspace(-1, 1, 32, dtype=np.float32), np.zeros(32, np.float32)
    library.run("f", {0: x, 1: out}, threads=(32,), outputs=(1,), constants={"twice": True})
    np.testing.assert_allclose(out, 2 * np.exp(x), rtol=1e-6)
    exact = out.copy()
    library.run("f", {0: x, 1: out}, threads=(32,), outputs=(1,), constants={"twice": True}, fuzz=1e-3)
    assert 0 < np.abs(out / exact - 1).max() < 2e-3


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("kernel void f(const float* x [[buffer(0)]]) {}", "not in address space"),
        ("kernel void f(device int* x [[buffer(0)]], int y) { x[0] = y; }", "without a known attribute"),
        ("kernel void f(device int* x [[buffer(0)]]) { static int n; x[0] = n++; }", "static local"),
        ("kernel void f(device bfloat* x [[buffer(0)]]) { x[0] = 1.5f * float(x[1]); }", "implicit"),
        (
            "int* p(int* x) { return x; }\\nkernel void f(device int* x [[buffer(0)]]) { x[0] = 1; }",
            "address space",
        ),
    ],
)
def test_what_msl_refuses_is_refused(source, text):
    with pytest.raises(MetalError, match=text):
        Library(HEADER + source.replace("\\n", "\n"))


def test_a_violation_reaches_python_as_an_error():
    """Two tokens for one slot: two threads write one element."""
    k_pages, v_pages = mx.zeros((2, 16, 1, 64)), mx.zeros((2, 16, 1, 64))
    q = mx.random.normal((2, 1, 64))
    slots, positions = mx.array([3, 3], mx.int32), mx.array([0, 1], mx.int32)
    out = _ext.rope_append(q, q, q, k_pages, v_pages, slots, positions, mx.ones(32))

    def evaluate() -> None:
        mx.eval(out)
        mx.synchronize(mx.default_stream(mx.cpu))

    with pytest.raises(RuntimeError, match="race"):
        evaluate()


@pytest.mark.parametrize("cores", [10, 64])
def test_plans_for_apple_gpus(cores):
    case = PagedCase(
        np.random.default_rng(2), [1500, 40, 7], qo_len=[1, 40, 7], hq=8, hkv=2, dtype=mx.float16
    )
    plan = plan_attention(case.table, case.qo_indptr, target=metal_target(cores), **case.heads)
    assert plan.num_partials > 0
    out = paged_attention(*case.args, qo_indptr=case.qo_indptr, plan=plan)
    assert_close(out, case.reference()[0], ulps=1, scale=1.0)
