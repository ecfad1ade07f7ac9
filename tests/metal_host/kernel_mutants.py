"""Seeded bugs in our kernels, and what must find each.

`found_by` is "compile" (clang or the transform), "lint" (missing address spaces), "numbers" (the case's comparison),
or the kind of the run-time check that reports first. "nothing": not found, and why it cannot be is in docs/metal.md.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

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


def _sample(name: str, old: str, new: str, found_by: str) -> Mutant:
    return Mutant("sample", name, old, new, found_by)


def _chain(name: str, old: str, new: str, found_by: str) -> Mutant:
    return Mutant("sample_chain", name, old, new, found_by)


def _edit(name: str, old: str, new: str, found_by: str) -> Mutant:
    return Mutant("sample_edit", name, old, new, found_by)


def _logprobs(name: str, old: str, new: str, found_by: str) -> Mutant:
    return Mutant("sample_logprobs", name, old, new, found_by)


def _renorm(name: str, old: str, new: str, found_by: str) -> Mutant:
    return Mutant("sample_renorm", name, old, new, found_by)


def in_this_run(mutants: Sequence[T]) -> Sequence[T]:
    """All where METAL_HOST_ALL is set, else every third: a run of all takes minutes."""
    return mutants if os.environ.get("METAL_HOST_ALL") else mutants[::3]


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
    _vector("partial rows of the wrong chunk", "merge_indptr[view.token(r)]", "merge_indptr[view.token(0)]", "numbers"),
    _vector("tokens of one simdgroup left out", "& (kSimdgroups - 1));", "& (kSimdgroups - 1)) + 1;", "numbers"),
    _matrix("columns of K swapped", "keys[j * kStride + b * 8]", "keys[(1 - j) * kStride + b * 8]", "numbers"),
    _matrix("row sum over half the lanes", "return x + simd_shuffle_xor(x, 8);", "return x;", "numbers"),
    _matrix("weights not masked", "score = token >= from && token < to ? score : -INFINITY;", "", "numbers"),
    # Shared tiles
    _vector("tokens of a shared tile in order", "shared ? order[r / group_size] : q_begin", "q_begin", "out-of-bounds"),
    _vector("shared tile reads its order from the start of a request", "view.shared ? tile.q_begin : 0", "view.shared ? qo_begin : 0", "out-of-bounds"),
    _vector("shared tile masked", "!view.shared && params.causal != 0", "params.causal != 0", "numbers"),
    _matrix("tokens of a shared tile in order", "shared ? order[r / group_size] : q_begin", "q_begin", "out-of-bounds"),
    _matrix("shared tile masked", "!view.shared && params.causal != 0", "params.causal != 0", "numbers"),
    # Sampling: the noise
    _sample("nine rounds", "round < 10", "round < 9", "numbers"),
    _sample("rounds without a new key", "k += uint2(0x9e3779b9u, 0xbb67ae85u);", "", "numbers"),
    _sample("words of the counter swapped", "key.draw.x, key.draw.y)", "key.draw.y, key.draw.x)", "numbers"),
    _sample("words of the seed swapped", "uint2(row.seed[0], row.seed[1])", "uint2(row.seed[1], row.seed[0])", "numbers"),
    _sample("counter by token", "philox(key, uint(first) / 4, RngStream::gumbel)", "philox(key, uint(first), RngStream::gumbel)", "numbers"),
    _sample("counter of the part", "philox(key, uint(first) / 4,", "philox(key, uint(first - begin) / 4,", "numbers"),
    _sample("one word for four tokens", "gumbel_of(bits[i])", "gumbel_of(bits[0])", "numbers"),
    _sample("the wrong word", "bits[index % 4]", "bits[index & 1]", "numbers"),
    _sample("the wrong stream", "uint(index) / 4, RngStream::gumbel", "uint(index) / 4, RngStream::accept", "numbers"),
    _sample("uniforms of half the range", "(bits >> 9) | 0x3f800000u", "(bits >> 10) | 0x3f800000u", "numbers"),
    _sample("series of another logarithm", "(1.44269504f + v *", "(1.4f + v *", "numbers"),
    # Sampling: ties, cuts, sums
    _sample("ties to the higher index", "score == leader.score && index < leader.index", "score == leader.score && index > leader.index", "numbers"),
    _sample("ties between lanes to the higher index", "simd_min(mine.score == best ? mine.index : INT_MAX)", "simd_max(mine.score == best ? mine.index : -1)", "numbers"),
    _sample("cut before the token", "v == value && i <= index", "v == value && i < index", "numbers"),
    _sample("ties ranked by the higher index", "ulong(kLastIndex - index)", "ulong(index)", "numbers"),
    _renorm("negative values out of order", "bits >> 31 ? ~bits : bits | 0x80000000u", "bits | 0x80000000u", "numbers"),
    _renorm("-0 below +0", "v == 0.0f ? 0u : as_type<uint>(v)", "as_type<uint>(v)", "numbers"),
    _renorm("carry lost", "(before + low < before ? 1 : 0)", "0", "numbers"),
    _renorm("upper half lost", "if (high != 0) atomic_fetch_add", "if (high > 1000000) atomic_fetch_add", "numbers"),
    _renorm("sums of lanes overflow", "simd_sum(uint(x >> 24) & 0xffffffu)", "simd_sum(uint(x >> 24))", "numbers"),
    _sample("bins above forgotten", "target -= shared.above;", "", "numbers"),
    _sample("search in the lane after", "above + run < target) return;", "above + run <= target) return;", "numbers"),
    _sample("ties beyond the cut", "{value, value == within.value ? within.index : kLastIndex}", "{value, kLastIndex}", "numbers"),
    _sample("all ties kept", "target + weight.of(value) > shared.here", "target + weight.of(value) > 0", "numbers"),
    _sample("digit not masked", "known |= 0xfful << shift;", "", "numbers"),
    _sample("share of the whole row", "total_of(tokens, filter.joint ? finite : cut, filter.weight", "total_of(tokens, filter.joint ? cut : finite, filter.weight", "numbers"),
    _sample("top-p takes all", "if (target == 0 || total_of(", "if (target != 0 || total_of(", "numbers"),
    _sample("min-p at the wrong temperature", "precise::log(min(row.min_p, 1.0f)) * temperature", "precise::log2(min(row.min_p, 1.0f)) * temperature", "numbers"),
    _sample("NaN not seen", "if (isnan(v)) mine.has_nan = 1;", "", "numbers"),
    _sample("a row of -inf is valid", "all.top.index != kNoToken && all.has_nan == 0;", "all.has_nan == 0;", "numbers"),
    _sample("id of no token", "ids[row] = max(id, 0);", "ids[row] = id;", "numbers"),
    _renorm("threads' maxima of one thread less", "near_top(thread_max, value.k", "near_top(at.index == 0 ? 99.0f : thread_max, value.k", "numbers"),
    _sample("64-bit sum between lanes", "const uint low = simd_sum(uint(x) & 0xffffffu);", "const ulong low = simd_sum(x);", "compile"),
    # Sampling: synchronisation and bounds
    _sample("summaries read too early", f"slots[simdgroup] = mine;\n  {BARRIER}", "slots[simdgroup] = mine;", "uninitialised"),
    _sample("sums overwritten", f"{BARRIER}  // the last sums have been read", "", "race"),
    _sample("sums read too early", f"shared.sums[at.simdgroup] = mine;\n  {BARRIER}", "shared.sums[at.simdgroup] = mine;", "uninitialised"),
    _sample("histogram cleared too early", f"{BARRIER}  // the last search has been read", "", "race"),
    _sample("histogram filled too early", f"if (at.index == 0) shared.bin = -1;\n    {BARRIER}", "if (at.index == 0) shared.bin = -1;", "numbers"),
    _sample("histogram read too early", f"{BARRIER}\n    if (at.simdgroup == 0) find_bin", "if (at.simdgroup == 0) find_bin", "numbers"),
    _sample("search read too early", f"find_bin(target, shared, at.lane);\n    {BARRIER}", "find_bin(target, shared, at.lane);", "race"),
    _sample("list filled before its counter is cleared", f"0u, memory_order_relaxed);\n  {BARRIER}\n  for", "0u, memory_order_relaxed);\n  for", "race"),
    _sample("list read too early", f"{BARRIER}\n  return int(atomic_load", "return int(atomic_load", "race"),
    _sample("list overrun", "if (slot >= uint(kListed)) continue;", "", "undefined"),
    _sample("list too long", "if (num_listed <= kListed)", "if (num_listed <= 2 * kListed)", "uninitialised"),
    _sample("part past its end", "if (first + i >= end) continue;", "", "out-of-bounds"),
    _sample("rows of another size", "size_t(group.y) * size_t(params.vocab)", "size_t(group.y) * size_t(params.vocab + 4)", "out-of-bounds"),
    _sample("part's summary at another place", "parts[size_t(group.y) * groups.x + group.x] = mine", "parts[size_t(group.y) + group.x] = mine", "race"),
    _sample("one simdgroup ends early", "if (!draws || !is_filtered(row, vocab)) {", "if (!draws || !is_filtered(row, vocab) || simdgroup == 1) {", "barrier-divergence"),
    # Chains
    _chain("draw index of the row's first position", "row.draw[0]) + ulong(position)", "row.draw[0])", "numbers"),
    _chain("carry of the draw index lost", "uint(draw >> 32))}", "row.draw[1])}", "numbers"),
    _chain("acceptance by the noise's stream", "0, RngStream::accept", "0, RngStream::gumbel", "numbers"),
    _chain("accepted the other way", "u * draft[at] < target[at]", "u * target[at] < draft[at]", "numbers"),
    _chain("ids out of range", "accepted = id >= 0 && id < params.vocab;", "accepted = true;", "numbers"),
    _chain("32 positions only", "if (first_refused < params.num_draft) return first_refused;", "return min(first_refused, params.num_draft);", "numbers"),
    _chain("target instead of residual", "p - draft[first + i]", "p", "numbers"),
    _chain("draft of the last position", "has_draft ? p - draft", "true ? p - draft", "out-of-bounds"),
    _chain("tail not marked", "i == position ? last : -1", "last", "numbers"),
    _chain("tokens without mass", "if (residual > 0.0f) offer", "offer", "numbers"),
    # Edits
    _edit("bias read too early", f"{BARRIER}\n  }}\n  for", "}\n  for", "race"),
    _edit("bias cleared too late", f"bias[i] = 0.0f;\n    {BARRIER}", "bias[i] = 0.0f;", "race"),
    _edit("bias of another tile", "id >= begin && id < begin + kEditTile", "id < begin + kEditTile", "undefined"),
    _edit("tokens past the row", "if (token >= params.vocab) return;", "", "out-of-bounds"),
    _edit("mask past its words", "if (word < params.mask_words)", "if (true)", "out-of-bounds"),
    _edit("bit of another token", "allowed >> (token % 32)", "allowed >> (31 - token % 32)", "numbers"),
    _edit("prompt counted as output", "count & ~kInPrompt", "count", "numbers"),
    _edit("repetition of negative logits", "x / row.repetition : x * row.repetition", "x / row.repetition : x / row.repetition", "numbers"),
    _edit("counts by plain additions", "atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);", "*reinterpret_cast<device uint*>(count) += 1;", "race"),
    _edit("rows out of range", "row < 0 || row >= params.num_rows || id < 0", "row < 0 || id < 0", "out-of-bounds"),
    _edit("ids out of range", "id < 0 || id >= params.vocab) return", "false) return", "numbers"),
    _edit("another row cleared", "counts[size_t(row) * size_t(params.vocab) + token] = 0;", "counts[token] = 0;", "numbers"),
    _edit("masks past the last", "row.mask_row < params.num_masks", "true", "out-of-bounds"),
    _edit("bias past the last", "min(row.bias_end, params.num_bias)", "row.bias_end", "out-of-bounds"),
    _edit("counts past the last", "row.counts_row < params.num_counts", "true", "out-of-bounds"),
    # Log-probabilities
    _logprobs("id out of range", "id >= 0 && id < vocab ?", "id >= 0 ?", "numbers"),
    _logprobs("rank without the token itself", "Cut at_least = {drawn, kLastIndex};", "Cut at_least = {drawn, -1};", "numbers"),
    _logprobs("mass of a NaN", "v > value || (v == value && i <= index)", "!(v < value)", "undefined"),
    _logprobs("ranks from the other end", "indices[j]) > key ? 1 : 0", "indices[j]) < key ? 1 : 0", "numbers"),
    _logprobs("top beyond what is asked for", "if (rank >= num_top) continue;", "", "race"),
    _logprobs("short rows not filled", "for (int i = num_listed + at.index; i < num_top;", "for (int i = num_top; i < num_top;", "unwritten"),
    _logprobs("too many ties listed", "if (num_listed > kListed) {", "if (num_listed > 99999) {", "undefined"),
    _logprobs("units of the masses", "float(total) * kFixedUnit", "float(total)", "numbers"),
    # Renormalisation
    _renorm("cut raised with the old index", "return {top.value, kLastIndex};", "return {top.value, within.index};", "numbers"),
    _renorm("share of one", "if (value.p >= 1.0f) return cut;", "if (value.p >= 0.5f) return cut;", "numbers"),
    _renorm("k of the whole row", "value.k <= 0 || value.k >= tokens.size", "value.k <= 0 || value.k >= tokens.size - 1", "numbers"),
    _renorm("kept mass of all", "total_of(tokens, cut, mass, shared, at)) * kFixedUnit", "total_of(tokens, Cut{0.0f, -1}, mass, shared, at)) * kFixedUnit", "numbers"),
    _renorm("masked with 0", "keep ? v : -INFINITY", "keep ? v : 0.0f", "numbers"),
    _renorm("last token not written", "i < params.vocab; i += at.count) {\n    const float v = tokens.value(i);\n    const bool keep", "i < params.vocab - 1; i += at.count) {\n    const float v = tokens.value(i);\n    const bool keep", "unwritten"),
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
