"""Our kernels under the harness: every instance compiles and is well-typed, cases pass on several schedules, and
seeded bugs are found. Emulated: none of it has run on Apple hardware."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.metal_host.build import CompiledSource
from tests.metal_host.kernel_cases import (
    CASES,
    KERNELS,
    AttentionProblem,
    flat_metal,
    flat_source,
    instantiate,
)
from tests.metal_host.kernel_mutants import MUTANTS, Mutant, in_this_run
from tests.metal_host.transform import MetalError

# The attention kernels have 84 and 21 instances, all of one text: the cases and the op tests compile those they run.
FULLY_COMPILED = sorted(
    p.stem for p in KERNELS.glob("*.metal") if p.stem not in ("paged_attention", "paged_attention_matrix")
)


@pytest.mark.parametrize("stem", FULLY_COMPILED)
def test_every_instance_compiles_and_names_its_address_spaces(stem):
    kernels = CompiledSource(flat_metal(stem)).kernels
    instances = re.findall(r"^INSTANTIATE\((\w+)", (KERNELS / f"{stem}.metal").read_text(), re.M)
    of_templates = {name.rsplit("_", 1)[-1] for name, kernel in kernels.items() if "<" in kernel.expression}
    assert of_templates == set(instances)
    assert kernels


@pytest.mark.parametrize("instance", ["paged_attention<bfloat, 80, 8>", "paged_attention_matrix<half, 256>"])
def test_attention_names_its_address_spaces(instance):
    stem = instance.split("<")[0]
    assert list(CompiledSource(instantiate(flat_source(stem), instance)).kernels) == [stem]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kernel", CASES)
def test_case_passes_on_every_schedule(kernel, seed):
    CASES[kernel](flat_source(kernel), seed=seed)


@pytest.mark.parametrize("window", [-1, 21])
def test_rows_of_invariant_plans_have_the_same_bits_beside_any_others(window):
    """36 rows of one request in blocks of eight, four and one; a tile of them would go to the matrix kernel else."""
    problem = AttentionProblem([75], [18], chunk_pages=99, dim=64)
    source = flat_source("paged_attention")
    outs = [
        problem.run(source, f"paged_attention<float, 64, {r}>", r, 256, 1, window, invariant=True)
        for r in (8, 4, 1)
    ]
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


def what_finds(mutant: Mutant) -> str:
    """Category of the first thing that finds the mutant."""
    source = flat_source(mutant.kernel)
    assert mutant.old in source, "the mutant's text is gone from the kernel"
    mutated = source.replace(mutant.old, mutant.new, 1)
    try:
        CASES[mutant.kernel](mutated)
    except AssertionError:
        return "numbers"
    except MetalError as error:
        first = str(error).split("\n")
        return first[1].split(":")[0].strip() if re.fullmatch(r"\w+:", first[0]) else "compile"
    try:
        lines = (KERNELS / f"{mutant.kernel}.metal").read_text().splitlines()
        CompiledSource(mutated + "\n".join(x for x in lines if not x.startswith("#include")) + "\n")
    except MetalError:
        return "lint"
    return "nothing"


@pytest.mark.parametrize("mutant", in_this_run(MUTANTS), ids=lambda m: f"{m.kernel}: {m.name}")
def test_mutant_is_found(mutant):
    assert what_finds(mutant) == mutant.found_by
