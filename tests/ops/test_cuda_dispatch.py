"""Which CUDA kernel serves which launch: read from the trace of a process of its own. And kernels that only some GPUs take."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import paged_attention, plan_attention
from tests.support.compare import assert_close
from tests.support.paged import PagedCase

#: What each case's kernel must be on Hopper, and elsewhere.
CASES = {
    "decode": ({"kv_len": [300, 5]}, "decode_sm90", "decode"),
    "decode-clusters": ({"kv_len": [3000, 5, 700]}, "decode_sm90", "decode"),
    "decode-many": ({"kv_len": [3000, 700] * 20}, "decode_sm90", "decode"),
    "decode-page8": ({"kv_len": [301, 5], "page_size": 8}, "decode_sm90", "decode"),
    "decode-page4": ({"kv_len": [300, 5], "page_size": 4}, "decode", "decode"),
    "verify": ({"kv_len": [300, 9], "qo_len": [4, 4]}, "decode_sm90", "decode"),
    "verify-most": ({"kv_len": [300, 21], "qo_len": [12, 9]}, "decode_sm90", "decode"),
    "verify-long": ({"kv_len": [300, 21], "qo_len": [20, 9]}, "ragged_sm90", "ragged"),
    "prefill": ({"kv_len": [300], "qo_len": [90]}, "mixed_sm90", "ragged"),
    "prefill-dim80": ({"kv_len": [300], "qo_len": [90], "dim": 80}, "ragged", "ragged"),
    "prefill-page4": ({"kv_len": [300], "qo_len": [90], "page_size": 4}, "ragged", "ragged"),
    "mixed": ({"kv_len": [300, 5], "qo_len": [90, 1]}, "mixed_sm90", "ragged"),
    # Several large tiles a block: the next one's rows are there before all warps are done with this one's.
    "mixed-many": ({"kv_len": [2048, 700], "qo_len": [2048, 1], "hq": 32, "hkv": 8}, "mixed_sm90", "ragged"),
    "invariant": ({"kv_len": [300, 5]}, "ragged_sm90", "ragged"),
    "f32": ({"kv_len": [300, 5], "dtype": mx.float32}, "simple", "simple"),
}


def run(name: str) -> None:
    """One launch on the GPU, checked against the reference."""
    case = PagedCase(np.random.default_rng(0), **({"dtype": mx.bfloat16} | CASES[name][0]))
    plan = plan_attention(case.table, case.qo_indptr, batch_invariant=name == "invariant", **case.heads)
    out = paged_attention(*case.args, qo_indptr=case.qo_indptr, plan=plan, stream=mx.gpu)
    assert_close(out, case.reference()[0], ulps=16 if out.dtype == mx.float32 else 1, scale=1.0)


def kernels(names: list[str], force: str = "") -> list[str]:
    """The kernels that served the cases, in order: each launch of a process is a line of its trace."""
    script = f"from tests.ops.test_cuda_dispatch import run\nfor name in {names!r}:\n    run(name)\n"
    environment = os.environ | {"MLXCEL_EXT_TRACE": "1", "MLXCEL_EXT_FORCE": force}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"^\[mlxcel\] paged_attention .* -> (\w+)", done.stderr, re.MULTILINE)


if mx.cuda.is_available():

    @pytest.mark.parametrize("name", CASES)
    def test_each_launch_takes_its_kernel(name):
        hopper = re.search("H100|H200|H800|H20", mx.device_info()["device_name"])
        assert kernels([name]) == [CASES[name][1 if hopper else 2]]

    def test_queues_are_empty_for_the_next_launch():
        """Each launch of the process is checked; the trace names each kind of launch once."""
        assert len(set(kernels(["mixed-many", "mixed", "prefill", "mixed-many"]))) == 1

    @pytest.mark.parametrize("kernel", ["ragged", "simple"])
    def test_a_kernel_can_be_forced(kernel):
        assert kernels(["decode", "prefill"], f"paged_attention:{kernel}") == [kernel, kernel]

    @pytest.mark.parametrize("file", ["sample", "sampling_chain", "sampling_logits", "sampling_renorm"])
    def test_sampling_without_clusters(file):
        """One block a row, as before Hopper: the ops' own tests hold."""
        command = [sys.executable, "-m", "pytest", "-q", "-k", "gpu", f"tests/ops/test_{file}.py"]
        environment = os.environ | {"MLXCEL_EXT_FORCE": "sample:block"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:]
