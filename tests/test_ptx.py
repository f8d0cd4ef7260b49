"""The interpreter of PTX on small kernels, and, where nvcc is, some launches of what it makes of ours: docs/ptx.md."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from ptx.check import difference
from ptx.instructions import implement
from ptx.launches import read_launches
from ptx.machine import run
from ptx.parse import PtxError, kernels_of

ROOT = Path(__file__).resolve().parent.parent
IN, OUT = 1 << 40, 1 << 41
needs_nvcc = pytest.mark.skipif(
    not all((ROOT / f"build/ptx/{name}.sm_90.ptx").exists() for name in ("runq_awq", "backend")),
    reason="needs nvcc: make ptx",
)
AWQ_TEST = ROOT / "build" / "runq_awq_test"


def launch(body, grid=1, block=64, dynamic=0, values=None, fresh=None):
    """Runs `body` with %rd1 and %rd2, the addresses of this thread's words of IN and OUT; returns OUT's words."""
    text = f"""
.version 9.0
.target sm_80
.address_size 64
.extern .shared .align 128 .b8 dynamic_shared_memory[];
.visible .entry _Z4testPjS_(
	.param .u64 _Z4testPjS__param_0,
	.param .u64 _Z4testPjS__param_1
)
{{
	.reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %rd<9>;
	.shared .align 4 .b8 words[256];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	mov.u32 %r3, %ntid.x;
	mad.lo.s32 %r4, %r2, %r3, %r1;
	ld.param.u64 %rd1, [_Z4testPjS__param_0];
	ld.param.u64 %rd2, [_Z4testPjS__param_1];
	mul.wide.u32 %rd3, %r4, 4;
	add.s64 %rd1, %rd1, %rd3;
	add.s64 %rd2, %rd2, %rd3;
	ld.global.u32 %r5, [%rd1];
	shl.b32 %r6, %r1, 2;
	mov.u32 %r7, words;
	add.s32 %r7, %r7, %r6;
	{body}
	ret;
}}
"""
    n = grid * block
    values = np.arange(n, dtype="u4") + 100 if values is None else np.asarray(values).view("u4")
    kernel = kernels_of(text, implement)["test"]
    buffers = {IN: values.view("u1"), OUT: np.zeros(4 * n, "u1")}
    arguments = np.array([IN, OUT], "u8").tobytes()
    return run(kernel, (grid, 1, 1), (block, 1, 1), dynamic, arguments, buffers, fresh=fresh)[OUT].view("u4")


REVERSE = """
	st.shared.u32 [%r7], %r5;
	{barrier}
	mov.u32 %r8, words;
	sub.s32 %r9, 252, %r6;
	add.s32 %r9, %r9, %r8;
	ld.shared.u32 %r10, [%r9];
	st.global.u32 [%rd2], %r10;
"""


def test_threads_exchange_values_over_a_barrier_and_race_without():
    got = launch(REVERSE.format(barrier="bar.sync 0;"), grid=2)
    np.testing.assert_array_equal(got.reshape(2, 64), (np.arange(128) + 100).reshape(2, 64)[:, ::-1])
    for barrier in ("", "mov.u32 %r20, -1; bar.warp.sync %r20;"):  # the other value is another warp's
        with pytest.raises(PtxError, match=r"race: thread \d+ of block 0 reads .* another thread wrote"):
            launch(REVERSE.format(barrier=barrier))


def test_a_write_after_a_read_needs_a_barrier():
    again = "{barrier}\n\tst.shared.u32 [%r7], %r10;"
    reverse = REVERSE.format(barrier="bar.sync 0;")
    launch(reverse + again.format(barrier="bar.sync 0;"))
    with pytest.raises(PtxError, match=r"writes byte \d+ of shared memory that another thread read"):
        launch(reverse + again.format(barrier=""))


def test_branches_meet_again():
    got = launch("""
	mov.u32 %r8, 0;
	and.b32 %r9, %r1, 3;
$again:
	setp.ge.u32 %p1, %r8, %r9;
	@%p1 bra $done;
	add.s32 %r8, %r8, 1;
	bra.uni $again;
$done:
	mov.u32 %r10, 1;
	mov.u32 %r11, -1;
	shfl.sync.bfly.b32 %r12|%p2, %r8, %r10, 31, %r11;
	st.global.u32 [%rd2], %r12;
""")
    np.testing.assert_array_equal(got, (np.arange(64) ^ 1) % 4)


# PTX ISA, shfl.sync: 0x1f has the whole warp as one segment, 0x181f segments of 8, 0x5 ends a segment at lane 5.
@pytest.mark.parametrize(("c", "source"), [("31", [9] * 32), ("6175", [8 * (i // 8) + 1 for i in range(32)]),
                                           ("5", list(range(32)))])  # fmt: skip
def test_a_lane_by_its_number(c, source):
    got = launch(f"""
	mov.u32 %r10, 9;
	mov.u32 %r11, -1;
	shfl.sync.idx.b32 %r12|%p2, %r1, %r10, {c}, %r11;
	st.global.u32 [%rd2], %r12;
""")
    lanes = launch("st.global.u32 [%rd2], %r1;")
    np.testing.assert_array_equal(got, lanes.reshape(-1, 32)[:, source].ravel())


COPY = """
	mov.u32 %r8, dynamic_shared_memory;
	add.s32 %r8, %r8, %r6;
	cp.async.ca.shared.global [%r8], [%rd1], 4, 4;
	cp.async.commit_group;
	{wait}
	ld.shared.u32 %r9, [%r8];
	st.global.u32 [%rd2], %r9;
"""


def test_a_copy_arrives_when_it_is_waited_for():
    np.testing.assert_array_equal(launch(COPY.format(wait="cp.async.wait_group 0;"), dynamic=256), np.arange(64) + 100)
    for wait in ("", "cp.async.wait_group 1;"):
        with pytest.raises(PtxError, match=r"where a cp\.async is not yet waited for"):
            launch(COPY.format(wait=wait), dynamic=256)
    with pytest.raises(PtxError, match="outside: 4 bytes at 384 of 384 of shared memory"):
        launch(COPY.format(wait="cp.async.wait_group 0;"), dynamic=128)


def test_an_early_kernel_waits_before_it_writes_or_reads_what_was_just_written():
    store, wait = "st.global.u32 [%rd2], %r5;", "griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;"
    np.testing.assert_array_equal(launch(f"{wait}\n\t{store}"), np.arange(64) + 100)
    launch(f"{wait}\n\tld.global.u32 %r5, [%rd2];", fresh={OUT: np.arange(64)})
    for body in (f"{store}\n\t{wait}", f"griddepcontrol.launch_dependents;\n\t{store}"):
        with pytest.raises(PtxError, match=r"writes global memory, before griddepcontrol\.wait"):
            launch(body)
    with pytest.raises(PtxError, match=r"reads what a kernel before it wrote, before griddepcontrol\.wait"):
        launch(wait, fresh={IN: np.arange(3, 4)})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.u32 %r8, [%rd1+256];", "outside: 4 bytes of global memory"),
        ("ld.global.u32 %r8, [%rd1+2];", "misaligned: 4 bytes of global memory"),
        ("ld.shared.u32 %r8, [%r7];", "that nobody has written"),
        ("add.s32 %r8, %r30, 1;", "reads %r30, which nothing has written"),
        ("setp.lt.u32 %p1, %r1, 40;\n\t@%p1 bra $skip;\n\tbar.sync 0;\n$skip:", "not reached by all lanes"),
        ("setp.lt.u32 %p1, %r1, 32;\n\t@%p1 bra $skip;\n\tbar.sync 0;\n$skip:", "never reached by all threads"),
        ("mov.u32 %r8, words;\n\tst.shared.u32 [%r8], %r1;", "another thread writes at the same time"),
        ("brev.b32 %r8, %r1;", "unknown instruction: brev.b32 %r8, %r1"),
        ("add.sat.s32 %r8, %r1, 1;", "unknown instruction: add.sat.s32"),
    ],
)
def test_what_a_gpu_does_not_allow_is_named(body, message):
    with pytest.raises(PtxError, match=message):
        launch(body)


def test_fma_rounds_once():
    rng = np.random.default_rng(1)
    a = np.concatenate([rng.standard_normal(62).astype("f4"), np.array([1 + 2**-12, 3e38], "f4")])
    got = launch("mov.u32 %r8, 0f3F800800;\n\tfma.rn.f32 %r9, %r5, %r5, %r8;\n\tst.global.u32 [%rd2], %r9;", values=a)
    c = Fraction(float(np.float32(1 + 2**-12)))
    for x, y in zip(a[:-1], got.view("f4")[:-1], strict=True):
        exact = Fraction(float(x)) ** 2 + c
        below, above = (Fraction(float(np.nextafter(y, np.float32(to)))) for to in (-np.inf, np.inf))
        assert abs(Fraction(float(y)) - exact) <= min(abs(below - exact), abs(above - exact))
    assert np.isinf(got.view("f4")[-1])


@pytest.mark.skipif(not AWQ_TEST.exists(), reason="needs build/runq_awq_test")
def test_the_emulator_writes_its_launches(tmp_path):
    path = tmp_path / "launches"
    environment = os.environ | {"SIMT_LAUNCHES": str(path)}
    subprocess.run([AWQ_TEST, "-tc=kernel: swiglu*"], cwd=ROOT, env=environment, capture_output=True, check=True)
    launches = list(read_launches(path))
    assert {x.kernel for x in launches} == {"swiglu_kernel", "embed_kernel", "add_kernel"}
    for x in launches:
        if x.kernel == "swiglu_kernel":
            out, gate, up, n = (int(v) for v in np.frombuffer(x.arguments, "u8"))
            z, y = (x.before[p].view("f4")[:n].astype("f8") for p in (gate, up))
            want = (z / (1 + np.exp(-z)) * y).astype("f2")
            np.testing.assert_allclose(x.after[out].view("f2")[:n], want, rtol=2**-10)
            assert difference(x, x.after) == ""
            wrong = x.after[out].copy()
            wrong.view("u2")[n // 2] ^= 4
            assert f"f2 {n // 2} is " in difference(x, x.after | {out: wrong})


def run_module(*args):
    done = subprocess.run([sys.executable, "-m", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    if "is it built for a GPU?" in done.stderr:
        pytest.skip("needs runq_awq with the emulator: it is built for a GPU")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_nvcc
def test_what_nvcc_makes_of_the_kernels_does_what_the_emulator_does():
    run_module("ptx.suite", "--quick")


@needs_nvcc
def test_planted_mistakes_are_found():
    run_module("ptx.mutants", "--quick")
