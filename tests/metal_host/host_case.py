"""The ops through a given build of the Metal host code: exits with an error where that is wrong.

python -m tests.metal_host.host_case BACKEND.so
"""

from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np

from mlxcel_ext import _ext, add_rms_norm, merge_states, paged_attention, plan_attention, rope_append
from mlxcel_ext.ops import reference
from tests.support.compare import assert_close, to_numpy
from tests.support.paged import PagedCase


def main(backend: str) -> None:
    _ext.load_gpu_backend(backend)
    rng = np.random.default_rng(0)

    x, residual = (mx.array(rng.standard_normal((5, 200)), mx.float32) for _ in range(2))
    weight = mx.array(rng.standard_normal(200), mx.float32)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    mx.eval(normed, total)
    mx.synchronize()  # an error of the stream's last task is raised by the next wait
    want, want_total = reference.add_rms_norm(to_numpy(x), to_numpy(residual), to_numpy(weight), 1e-5)
    assert_close(total, want_total, ulps=1)
    assert_close(normed, want, ulps=4)

    q, k, v = (mx.array(rng.standard_normal((3, h, 64)), mx.float32) for h in (4, 2, 2))
    pools = [mx.zeros((4, 4, 2, 64)) for _ in range(2)]
    mx.eval(pools)
    address = _ext.buffer_address(pools[0])
    slots, positions = mx.array([5, 0, 11], mx.int32), mx.array([100, 2, 7], mx.int32)
    inv_freq = mx.array(10000.0 ** (-np.arange(0, 64, 2) / 64), mx.float32)
    q_rot, k_pages, v_pages = rope_append(q, k, v, *pools, slots, positions, inv_freq=inv_freq)
    mx.eval(q_rot, k_pages, v_pages)
    mx.synchronize()
    assert _ext.buffer_address(k_pages) == address, "the pool was copied"
    for got, given in ((q_rot, q), (k_pages.reshape(16, 2, 64)[slots], k)):
        assert_close(got, reference.rope(to_numpy(given), positions, to_numpy(inv_freq)), ulps=8)
    assert mx.array_equal(v_pages.reshape(16, 2, 64)[slots], v)

    states, lse = mx.array(rng.standard_normal((5, 3, 48)), mx.float32), mx.array(rng.standard_normal((5, 3)))
    merged, merged_lse = merge_states(states, lse.astype(mx.float32), [0, 2, 5])
    want, want_lse = reference.merge_states(to_numpy(states), to_numpy(lse), [0, 2, 5])
    assert_close(merged, want, ulps=8)
    assert_close(merged_lse, want_lse, ulps=8, scale=8.0)

    sinks = mx.array([0.0, 1.0, 2.0, 3.0])
    for options in ({"sinks": sinks}, {"logits_soft_cap": 0.5}, {}):
        for qo_len in (None, [40, 3, 1]):
            case = PagedCase(rng, [700, 9, 300], qo_len=qo_len, hq=4, hkv=1, offsets=[3, 0, 2])
            plan = plan_attention(case.table, case.qo_indptr, **case.heads)
            assert plan.num_partials > 0, "the case must have something to merge"
            out, lse = paged_attention(
                *case.args, qo_indptr=case.qo_indptr, plan=plan, return_lse=True, **options
            )
            mx.eval(out, lse)
            mx.synchronize()
            want, want_lse = case.reference(**options)
            assert_close(out, want, ulps=16, scale=1.0)
            assert_close(lse, want_lse, ulps=16, scale=8.0)


if __name__ == "__main__":
    main(sys.argv[1])
