"""Seeded bugs in our kernels, and what must find each.

`found_by` is "compile" (clang or the transform), "lint" (missing address spaces), "numbers" (the case's comparison),
or the kind of the run-time check that reports first. "nothing": not found, and why it cannot be is in docs/metal.md.
"""

from __future__ import annotations

import dataclasses

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclasses.dataclass(frozen=True)
class Mutant:
    kernel: str
    name: str
    old: str
    new: str
    found_by: str


def _norm(name: str, old: str, new: str, found_by: str) -> Mutant:
    return Mutant("add_rms_norm", name, old, new, found_by)


def _rope(name: str, old: str, new: str, found_by: str) -> Mutant:
    return Mutant("rope_append", name, old, new, found_by)


def _merge(name: str, old: str, new: str, found_by: str) -> Mutant:
    return Mutant("merge_states", name, old, new, found_by)


def _vector(name: str, old: str, new: str, found_by: str) -> Mutant:
    return Mutant("paged_attention", name, old, new, found_by)


def _matrix(name: str, old: str, new: str, found_by: str) -> Mutant:
    return Mutant("paged_attention_matrix", name, old, new, found_by)


MUTANTS = [
    # Synchronisation
    _norm("no barrier", BARRIER, "", "uninitialised"),
    _norm("barrier without memory", BARRIER, BARRIER.replace("mem_threadgroup", "mem_none"), "race"),
    _norm("barrier for device memory", BARRIER, BARRIER.replace("mem_threadgroup", "mem_device"), "race"),
    _norm("simdgroup barrier", BARRIER, BARRIER.replace("threadgroup_barrier", "simdgroup_barrier"), "race"),
    _norm("barrier in one simdgroup", BARRIER, f"if (simdgroup == 0) {BARRIER}", "race"),
    _norm("return before the barrier", BARRIER, f"if (lane == 31) return x; {BARRIER}", "barrier-divergence"),
    _norm("reduction by half the lanes", "x = simd_sum(x);", "if (lane < 16) x = simd_sum(x);", "simd-divergence"),
    _norm("partial of one lane unwritten", "if (lane == 0) partial", "if (lane == 0 && simdgroup > 0) partial", "uninitialised"),
    _vector("states overwritten too early", f"{BARRIER}\n  }}\n}}", "}\n}", "race"),
    _vector("states read too early", f"{BARRIER}\n    const int elements", "const int elements", "uninitialised"),
    _matrix("K read too early", f"{BARRIER}\n\n    Matrix scores", "Matrix scores", "uninitialised"),
    _matrix("V staged over K", f"{BARRIER}  // all have read K", "", "race"),
    _matrix("V read too early", f"{BARRIER}\n\n    bool any_special", "bool any_special", "uninitialised"),
    _matrix("K staged over V", f"{BARRIER}  // all have read V", "", "race"),
    _matrix("barrier skipped by idle rows", "const int end = view.highest(last_row);", "if (!exists) return; const int end = view.highest(last_row);", "simd-divergence"),
    # Bounds and memory
    _norm("row overrun", "const int end = min(begin + kElements, params.hidden);", "const int end = begin + kElements;", "out-of-bounds"),
    _norm("one partial too few", "threadgroup float partial[kSimdWidth];", "threadgroup float partial[1];", "out-of-bounds"),
    _norm("too much threadgroup memory", "threadgroup float partial[kSimdWidth];", "threadgroup float partial[8300];", "threadgroup-memory"),
    _norm("write to an input", "new_residual[at + i] = sum;", "new_residual[at + i] = sum; ((device T*)x)[at + i] = sum;", "read-only"),
    _norm("elements left out", "i < end; ++i) {\n      const float w", "i < end - 1; ++i) {\n      const float w", "unwritten"),
    _norm("row offset without the row", "size_t(row) * size_t(params.hidden)", "size_t(params.hidden)", "race"),
    _rope("slot -1 written", "slot >= 0 && page", "page", "out-of-bounds"),
    _rope("page by the wrong stride", "page * params.stride_page", "page * params.stride_page * 4", "out-of-bounds"),
    _rope("pair past the head", "return {pair, pair + half_dim, true};", "return {pair, pair + 6, true};", "race"),
    _rope("heads past the end", "const int end = min(begin + kHeads, params.num_qo_heads + params.num_kv_heads);", "const int end = begin + kHeads;", "out-of-bounds"),
    _merge("group end off by one", "row < end; ++row) {\n    const size_t state", "row <= end; ++row) {\n    const size_t state", "out-of-bounds"),
    _merge("lse of all threads", "if (at.x == 0) lse_out", "lse_out", "race"),
    _merge("lse unwritten", "if (at.x == 0) lse_out[out] = merged.lse;", "", "unwritten"),
    _vector("token past the end", "view.end = min(tile.page_end * params.page_size, kv_end);", "view.end = tile.page_end * params.page_size + 1;", "numbers"),
    _vector("page table by the wrong row", "view.pages = kv_indices + first_page;", "view.pages = kv_indices + first_page + 9;", "out-of-bounds"),
    _vector("private array overrun", "for (int i = 0; i < E::kCount; ++i) score +=", "for (int i = 0; i <= E::kCount; ++i) score +=", "undefined"),
    _vector("states of too few rows", "[kRowsPerPass][D];", "[kRowsPerPass / 2][D];", "undefined"),
    _matrix("stage overruns the block", "row < Tokens; row +=", "row <= Tokens; row +=", "out-of-bounds"),
    _matrix("misaligned vector", "(from + d)", "(from + d + 1)", "undefined"),
    _matrix("no padding in the size", "block[kTokens * kStride]", "block[kTokens * D]", "out-of-bounds"),
    _matrix("rows past the tile", "const bool exists = row < view.rows;", "const bool exists = true;", "out-of-bounds"),
    # Arithmetic
    _norm("mean over the threads", "squares / float(params.hidden)", "squares / float(num_threads)", "numbers"),
    _norm("weight bias forgotten", "float(weight[i]) + params.weight_bias", "float(weight[i])", "numbers"),
    _norm("unrounded sum squared", "squares += float(sum) * float(sum);", "squares += 1.02f * float(sum) * float(sum);", "numbers"),
    _rope("f32 angles", "float(long(turns - (ulong(quadrant) << 62))) * 1.0842022e-19f;", "float(position) * inv_freq * 0.318309886f - 0.5f * float(quadrant);", "numbers"),
    _rope("rotation the other way", "return float2(s, -c);", "return float2(-s, c);", "numbers"),
    _rope("tail not copied", "to[at.first] = from[at.first];\n    if", "to[at.first] = T(0.0f);\n    if", "numbers"),
    _merge("natural exponent", "precise::exp2(state_lse - highest)", "precise::exp(state_lse - highest)", "numbers"),
    _merge("empty states counted", "if (state_lse == -INFINITY) continue;", "", "numbers"),
    _vector("accumulator not rescaled", "sum[r][i] * scale + weight", "sum[r][i] + weight", "numbers"),
    _vector("causal limit off by one", "own + r / group_size + 1)", "own + r / group_size)", "numbers"),
    _vector("window off by one", "own + r / group_size - window_left", "own + r / group_size - window_left + 1", "numbers"),
    _vector("partial rows of the wrong chunk", "merge_indptr[tile.q_begin + r / group_size]", "merge_indptr[tile.q_begin]", "numbers"),
    _vector("tokens of one simdgroup left out", "+ simdgroup; t <", "+ simdgroup + 1; t <", "numbers"),
    _matrix("columns of K swapped", "keys[j * kStride + b * 8]", "keys[(1 - j) * kStride + b * 8]", "numbers"),
    _matrix("row sum over half the lanes", "return x + simd_shuffle_xor(x, 8);", "return x;", "numbers"),
    _matrix("weights not masked", "score = token >= from && token < to ? score : -INFINITY;", "", "numbers"),
    # The language
    _norm("pointer without an address space", "const device T* x [[buffer(0)]]", "const T* x [[buffer(0)]]", "compile"),
    _norm("helper without an address space", "threadgroup float* partial, uint", "float* partial, uint", "lint"),
    _norm("wrong address space", "threadgroup float* partial, uint", "device float* partial, uint", "compile"),
    _norm("implicit float to bfloat", "normed[at + i] = T(float(new_residual[at + i]) * scale * w);", "normed[at + i] = float(new_residual[at + i]) * scale * w;", "compile"),
    _norm("assignment to a constant", "float squares = 0.0f;", "float squares = 0.0f; params.eps = 0.0f;", "compile"),
    _norm("standard library", "precise::rsqrt", "std::rsqrt", "compile"),
    _norm("unknown attribute", "[[threads_per_threadgroup]]", "[[threads_in_threadgroup]]", "compile"),
    _norm("static local", "float squares = 0.0f;", "static int calls = 0; float squares = 0.0f;", "compile"),
    _norm("array of variable length", "float squares = 0.0f;", "float row_copy[params.hidden]; float squares = 0.0f;", "compile"),
    _norm("ambiguous min", "min(begin + kElements, params.hidden)", "min(begin + kElements, 1.0f)", "compile"),
    _norm("allocation", "float squares = 0.0f;", "float* all = new float[4]; float squares = 0.0f;", "compile"),
    _norm("recursion", "METAL_FUNC float threadgroup_sum", "METAL_FUNC int depth(int n) { return n > 0 ? depth(n - 1) : 0; }\nMETAL_FUNC float threadgroup_sum", "nothing"),
    _matrix("vector of the wrong width", "using Vector = vec<T, 4>;", "using Vector = vec<T, 2>;", "undefined"),
]  # fmt: skip
