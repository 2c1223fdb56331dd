# ruff: noqa: E501  # lines of a program are as long as they are
"""Test the counts in a handwritten GPU program, and the command that compiles such programs."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "benchmarks"
sys.path.insert(0, str(FOLDER))

from gpu_counts import BANDWIDTH, PEAK, count  # noqa: E402

PROGRAM = """HloModule jit_step

%fused (a: bf16[64,32], b: bf16[32,16]) -> f32[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%part (p: f32[100,64], i: s32[]) -> f32[1,64] {
  %p = f32[100,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = f32[1,64]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,64}
}

%exact (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %dot.2 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, operand_precision={highest,highest}
}

%body (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %t = (s32[], f32[8,8]{1,0}) parameter(0)
  %k = s32[] get-tuple-element(%t), index=0
  %y = f32[8,8]{1,0} get-tuple-element(%t), index=1
  %z = f32[8,8]{1,0} fusion(%y), kind=kCustom, calls=%exact
  ROOT %r = (s32[], f32[8,8]{1,0}) tuple(%k, %z)
}

%turns (t.1: (s32[], f32[8,8])) -> pred[] {
  %t.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

%same (q: f32[8,8]) -> f32[8,8] {
  ROOT %q = f32[8,8]{1,0} parameter(0)
}

%other (u: f32[8,8]) -> f32[8,8] {
  %u = f32[8,8]{1,0} parameter(0)
  ROOT %v = f32[8,8]{1,0} copy(%u)
}

ENTRY %main (m: bf16[64,32], w: bf16[32,16], s: f32[100,64], n: s32[], f: f32[8,8], flag: pred[]) -> f32[8,8] {
  %m = bf16[64,32]{1,0} parameter(0)
  %w = bf16[32,16]{1,0} parameter(1)
  %s = f32[100,64]{1,0} parameter(2)
  %n = s32[] parameter(3)
  %f = f32[8,8]{1,0} parameter(4)
  %flag = pred[] parameter(5)
  %product = f32[64,16]{1,0} fusion(%m, %w), kind=kCustom, calls=%fused, backend_config={"kind":"__triton_gemm"}
  %row = f32[1,64]{1,0} fusion(%s, %n), kind=kLoop, calls=%part
  %start = (s32[], f32[8,8]{1,0}) tuple(%n, %f)
  %loop = (s32[], f32[8,8]{1,0}) while(%start), condition=%turns, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %last = f32[8,8]{1,0} get-tuple-element(%loop), index=1
  %choice = f32[8,8]{1,0} conditional(%flag, %last, %last), true_computation=%same, false_computation=%other, metadata={op_name="jit(step)/cond"}
  %sum = f32[8,8]{1,0} all-reduce(%choice), replica_groups={}
  ROOT %gram = f32[8,8]{1,0} custom-call(%m), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="sums_flops_1000_bf16/pallas_call"}
}
"""


def test_a_program():
    counts = count(PROGRAM)
    assert counts.launches == 1 + 1 + 5 + 1 + 1  # product, row, five loop iterations, message, our kernel
    assert counts.inside == 1  # the copy in a branch
    assert counts.waits == ["conditional jit(step)/cond"]
    assert counts.flops == {"bf16": 2 * 64 * 32 * 16 + 1000, "f32": 5 * 2 * 8**3}
    assert counts.messages == {"all-reduce": 4 * 64}
    row = 4 * (64 + 64 + 1)  # only a row of the stack is read
    moved = [2 * 64 * 32 + 2 * 32 * 16 + 4 * 64 * 16, row, 2 * 4 * 64, 2 * 64 * 32 + 4 * 64]
    times = [max(moved[0] / BANDWIDTH, 2 * 64 * 32 * 16 / PEAK["bf16"]), moved[1] / BANDWIDTH, moved[2] / BANDWIDTH]
    turn = max(2 * 4 * 64 / BANDWIDTH, 2 * 8**3 / PEAK["f32"])
    assert counts.bound == pytest.approx(sum(times) + 5 * turn + max(moved[3] / BANDWIDTH, 1000 / PEAK["bf16"]))


def test_a_factorisation():
    call = 'custom-call(%f), custom_call_target="cusolver_geqrf_ffi"'
    qr = count(PROGRAM.replace("all-reduce(%choice), replica_groups={}", call))
    assert qr.flops["f32"] == pytest.approx(count(PROGRAM).flops["f32"] + 4 / 3 * 8**3)


def test_branches_that_are_taken():
    counts, without = count(PROGRAM, taken=True), count(PROGRAM)
    assert (counts.launches, counts.inside, counts.waits) == (without.launches + 1, 0, without.waits)
    assert counts.bound == pytest.approx(without.bound + 2 * 4 * 64 / BANDWIDTH)  # the branch that copies
    unknown = count(PROGRAM.replace('"known_trip_count":{"n":"5"}', ""), taken=True)
    assert (unknown.launches, len(unknown.waits)) == (counts.launches - 4, 2)  # a single iteration of the loop


def test_a_branch_in_a_loop_is_a_wait_each_turn():
    inner = "%z = f32[8,8]{1,0} conditional(%k, %y, %y), branch_computations={%same, %other}"
    counts = count(PROGRAM.replace("%z = f32[8,8]{1,0} fusion(%y), kind=kCustom, calls=%exact", inner))
    assert (len(counts.waits), counts.inside, counts.launches) == (6, 6, 4)


def test_of_an_array_only_the_parts_are_read_that_something_comes_of():
    fused = """HloModule jit_step

%fused (p: bf16[8,64]) -> f32[64] {
  %p = bf16[8,64]{1,0} parameter(0)
  %wide = f32[8,64]{1,0} convert(%p)
  %twice = f32[8,64]{1,0} add(%wide, %wide)
  %one = f32[2,64]{1,0} slice(%twice), slice={[0:8:4], [0:64:1]}
  %other = f32[2,64]{1,0} slice(%wide), slice={[0:8:4], [0:64:1]}
  %product = f32[2,64]{1,0} multiply(%one, %other)
  %zero = f32[] constant(0)
  ROOT %sums = f32[64]{0} reduce(%product, %zero), dimensions={0}
}

ENTRY %main (x: bf16[8,64]) -> f32[64] {
  %x = bf16[8,64]{1,0} parameter(0)
  ROOT %r = f32[64]{0} fusion(%x), kind=kInput, calls=%fused
}
"""
    assert count(fused).bound == pytest.approx((2 * 2 * 64 + 4 * 64) / BANDWIDTH)
    whole = fused.replace("f32[2,64]{1,0} slice(%wide), slice={[0:8:4], [0:64:1]}", "f32[2,64]{1,0} reverse(%wide)")
    assert count(whole).bound == pytest.approx((2 * 8 * 64 + 4 * 64) / BANDWIDTH)


def test_a_loop_of_unknown_length_is_a_wait():
    counts = count(PROGRAM.replace('"known_trip_count":{"n":"5"}', ""))
    assert [wait.split()[0] for wait in counts.waits] == ["while", "conditional"]
    assert counts.launches == 4


@pytest.mark.slow
def test_the_command():
    """Check that the command prints the tables with JAX for CUDA, and otherwise asks to install it."""
    command = [sys.executable, str(FOLDER / "h100_program.py"), "--small", "--rows", "sgd", "statistics"]
    done = subprocess.run([*command, "--models", "resnet50"], capture_output=True, text=True, check=False)
    if importlib.util.find_spec("jax_cuda12_plugin"):
        assert done.returncode == 0, done.stderr
        assert "| statistics |" in done.stdout
    else:
        assert done.returncode
        assert 'pip install "jax[cuda12]"' in done.stderr
