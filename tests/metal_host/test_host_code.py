"""The host code in metal/: Apple's own headers accept it, and seeded bugs in it are found.

The emulated build must lie in build/metal-emulated (scripts/build_metal_emulated.sh).
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import mlx.core as mx
import pytest

from tests.metal_host.host_case import CASES
from tests.metal_host.kernel_mutants import in_this_run

ROOT = pathlib.Path(__file__).parents[2]
BUILD = ROOT / "build" / "metal-emulated"
OBJECTS = BUILD / "CMakeFiles" / "_ext.dir"
MLX = pathlib.Path(mx.__file__).parent
INCLUDES = [f"-I{ROOT}/{d}" for d in ("csrc", "metal", "tests/metal_host/fake")] + [f"-isystem{MLX}/include"]
EXPORT = """
extern "C" __attribute__((visibility("default"))) const mlxcel::GpuBackend* mlxcel_gpu_backend() {
  return &mlxcel::kMetalBackend;
}
"""

# file, what, old, new, text that the failure must have
HOST_MUTANTS = [
    ("add_rms_norm.cpp", "outputs swapped", "outputs[0], 3", "outputs[1], 3", "overlaps buffer(4)"),
    ("add_rms_norm.cpp", "output bound as an input", "encoder.set_output_array(outputs[0], 3);", "encoder.set_input_array(outputs[0], 3);", "read-only"),
    ("add_rms_norm.cpp", "params not bound", "encoder.set_bytes(params, 5);", "", "buffer(5) is not bound"),
    ("add_rms_norm.cpp", "a field for the struct", "set_bytes(params, 5)", "set_bytes(params.rows, 5)", "buffer(5)"),
    ("add_rms_norm.cpp", "grid too large", "MTL::Size(params.rows, 1, 1)", "MTL::Size(params.rows + 1, 1, 1)", "out-of-bounds"),
    ("add_rms_norm.cpp", "grid too small", "MTL::Size(params.rows, 1, 1)", "MTL::Size(params.rows - 1, 1, 1)", "AssertionError"),
    ("add_rms_norm.cpp", "threadgroup too large", "MTL::Size(threads, 1, 1)", "MTL::Size(2048, 1, 1)", "a threadgroup of 2048 threads"),
    ("add_rms_norm.cpp", "no such kernel", '"add_rms_norm", {params', '"add_rms", {params', "instantiates add_rms"),
    ("library.cpp", "outputs allocated too small", "out.nbytes()", "out.nbytes() / 2", "write "),
    ("library.cpp", "flags not in the pipeline's name", "specialised += flags[i] ? '1' : '0';", "", "AssertionError"),
    ("rope_append.cpp", "pool not shared", "outputs[1].copy_shared_buffer(inputs[3]);", "allocate(outputs[1]);", "AssertionError"),
    ("rope_append.cpp", "pool bound twice", "encoder.set_input_array(inputs[i], i);", "encoder.set_input_array(inputs[i == 2 ? 4 : i], i);", "overlaps buffer"),
    ("rope_append.cpp", "slots and positions swapped", "inputs[i + 2], i", "inputs[i == 5 ? 7 : 9 - i], i", ""),
    ("merge_states.cpp", "heads and groups swapped", "MTL::Size(params.head_dim, params.num_heads, params.num_out)", "MTL::Size(params.head_dim, params.num_out, params.num_heads)", ""),
    ("paged_attention.cpp", "partials too few", "{params.num_partials, params.num_qo_heads, params.head_dim}", "{params.num_partials - 1, params.num_qo_heads, params.head_dim}", "out-of-bounds"),
    ("paged_attention.cpp", "flags in another order", "p.has_first_page_offset != 0, p.has_sinks != 0", "p.has_sinks != 0, p.has_first_page_offset != 0", ""),
    ("paged_attention.cpp", "merge left out", "if (params.num_partials > 0) merge(params, in, out, stream);", "", "AssertionError"),
    ("paged_attention.cpp", "blocks rounded down", "ceil_div(rows, rows_per_group)", "std::max(1, rows / rows_per_group)", "AssertionError"),
    ("paged_attention.cpp", "vector kernel left out", "if (one_kernel || group_size < kMatrixRows) {", "if (one_kernel || most_rows < kMatrixRows) {", "AssertionError"),
    ("sample_parts.h", "parts too small", "count = static_cast<int>(ceil_div(vocab, size));", "count = static_cast<int>(vocab / size);", "AssertionError"),
    ("sample_parts.h", "summaries too short", "kSummaryWords = 5", "kSummaryWords = 4", "out-of-bounds"),
    ("sample.cpp", "filters left out", "if (params.work == SampleWork::top_k || params.work == SampleWork::filters) {", "if (false) {", "AssertionError"),
    ("sample_parts.h", "one input for all", "encoder.set_input_array(input, index++);", "encoder.set_input_array(inputs[0], index++);", "AssertionError"),
    ("sample_parts.h", "outputs in another order", "for (mx::array& out : outputs) encoder.set_output_array(out, next++);", "for (size_t i = outputs.size(); i-- > 0;) encoder.set_output_array(outputs[i], next++);", ""),
    ("sample_chain.cpp", "draft and target swapped", "Arrays bound = inputs;", "Arrays bound{inputs[0], inputs[2], inputs[1], inputs[3]};", ""),
    ("sample_edit.cpp", "counts copied", "outputs[0].copy_shared_buffer(inputs[0]);", "allocate(outputs[0]);", ""),
    ("sample_edit.cpp", "row not cleared", "if (params.reset != 0) {", "if (false) {", "AssertionError"),
    ("sample_edit.cpp", "tiles rounded down", "ceil_div(params.vocab, 4 * kThreads)", "params.vocab / (4 * kThreads)", "AssertionError"),
    ("sample_logprobs.cpp", "a row too few", "MTL::Size(params.batch, 1, 1)", "MTL::Size(params.batch - 1, 1, 1)", "AssertionError"),
    ("sample_renorm.cpp", "shares of another row", "encoder.set_input_array(inputs[i], i);", "encoder.set_input_array(inputs[0], i);", ""),
    ("library.cpp", "threadgroups beyond the kernel's arrays", "kMostRowThreads = 512", "kMostRowThreads = 1024", "outside the array"),
]  # fmt: skip


def build_backend(folder: pathlib.Path, mutated: str | None, text: str) -> pathlib.Path:
    """The Metal backend as a library of its own, one file replaced: the seam loads it like the CUDA library."""
    sources = {"backend.cpp": (ROOT / "metal" / "backend.cpp").read_text()}
    if mutated and mutated.endswith(".h"):
        (folder / mutated).write_text(text)
        for path in sorted((ROOT / "metal").glob("*.cpp")):
            if f'"{mutated}"' in path.read_text():
                sources[path.name] = path.read_text()
    elif mutated:
        sources[mutated] = text
    # A loaded backend exports its table and does not register itself.
    kept = [x for x in sources["backend.cpp"].splitlines() if "kRegistered" not in x]
    sources["backend.cpp"] = "\n".join(kept) + EXPORT
    objects = [
        str(p) for p in sorted((OBJECTS / "metal").rglob("*.o")) if p.name.removesuffix(".o") not in sources
    ]
    objects.append(str(OBJECTS / "tests/metal_host/fake/device.cpp.o"))
    for name, source in sources.items():
        (folder / name).write_text(source)
        target = str(folder / f"{name}.o")
        command = [
            "g++",
            "-std=c++20",
            "-O0",
            "-fPIC",
            "-fvisibility=hidden",
            *INCLUDES,
            "-c",
            str(folder / name),
            "-o",
            target,
        ]
        subprocess.run(command, check=True)
        objects.append(target)
    library = folder / "backend.so"
    link = [
        "g++",
        "-shared",
        *objects,
        f"-L{MLX}/lib",
        "-lmlx",
        f"-Wl,-rpath,{MLX}/lib",
        "-ldl",
        "-o",
        str(library),
    ]
    subprocess.run(link, check=True)
    return library


def run_case(library: pathlib.Path, *cases: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.metal_host.host_case", str(library), *cases]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ, timeout=300
    )


def test_unchanged_host_code_passes(tmp_path):
    done = run_case(build_backend(tmp_path, None, ""))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mutant", in_this_run(HOST_MUTANTS), ids=lambda m: f"{m[0]}: {m[1]}")
def test_mutant_is_found(mutant, tmp_path):
    file, _, old, new, text = mutant
    source = (ROOT / "metal" / file).read_text()
    assert old in source, "the mutant's text is gone from the host code"
    case = next((name for name in CASES if file.startswith(name)), None)
    done = run_case(build_backend(tmp_path, file, source.replace(old, new)), *([case] if case else []))
    assert done.returncode != 0, "not found"
    assert text in done.stderr, done.stderr
