"""bench/predict.py: its arithmetic by hand, its constants against the sources, what holds of any prediction."""

import copy
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import predict
from bench.predict import CARDS, Card, Launch, binds, blocks_per_sm, limit, seconds, times, tokens_per_s, total
from bench.random_checkpoint import config_of
from bench.run import work_of
from bench.sass import ARCHS, Step, count, functions, in_flight, kernel_name, resources, shortest_way

ROOT = Path(__file__).resolve().parent.parent
COUNTS = predict.read_counts()
H100 = CARDS["h100"]
QWEN = config_of("qwen3-8b")
# 10 SMs at 1 GHz: a cycle is a nanosecond. 4 blocks of 4 warps at a time, by their registers.
CARD = Card("round", "sm_0", 10, 1e9, 1e12, 4.096e13, 0.5, 500, 200, 2e12, 64, 32, 100 << 10)
ROWS = {"k": {"registers": 128, "shared": 0}}


def test_a_launch_by_hand():
    x = Launch("k", 50, 4, dram=9.2e6, l2=4e6, instructions=600, mma=16, rounds=3, near=2, alone=5,
               alone_instructions=50)  # fmt: skip
    parts = {name: 1e6 * value for name, value in times(CARD, ROWS, x).items()}
    assert parts == pytest.approx({
        "start": 1.3,
        "memory": 10,  # 9.2 MB at 0.92 TB/s
        "L2": 2,
        "instructions": 3,  # the busiest SM has 5 blocks: 5 * 4 * 600 / 4 cycles
        "tensor": 0.64,  # 5 * 4 * 16 * 4,096 FLOP at 2.048 TFLOP/s
        "wait": 6.2,  # 50 blocks on 40 places, two turns: 2 * (3 * 500 + 2 * 200 + 600 * 2) cycles
        "finish": 1.1,  # 5 * 200 + 50 * 2 cycles
    })  # fmt: skip
    assert total(times(CARD, ROWS, x)) == pytest.approx((1.3 + 10 + 1.1) * 1e-6)
    assert binds(times(CARD, ROWS, x)) == "memory"
    assert binds(times(CARD, ROWS, replace(x, dram=0))) == "wait"
    assert times(CARD, ROWS, x, graph=False)["start"] > times(CARD, ROWS, x)["start"]


def test_an_early_launch_hides_its_start_and_its_first_loads():
    """On sm_90; not cuBLAS's, and without a graph the host takes longer than what is hidden."""
    hopper = replace(CARD, arch="sm_90")
    x = Launch("k", 50, 4, dram=0, rounds=3, near=2, early=1)
    before, now = times(CARD, ROWS, x), times(hopper, ROWS, x)
    assert 1e6 * (before["start"] - now["start"]) == pytest.approx(0.8)
    assert 1e6 * (before["wait"] - now["wait"]) == pytest.approx(1.0)  # two turns of 500 cycles
    assert times(hopper, ROWS, replace(x, kernel="cuBLAS")) == times(CARD, ROWS, replace(x, kernel="cuBLAS"))
    assert times(hopper, ROWS, x, graph=False)["start"] == times(CARD, ROWS, x, graph=False)["start"]


def test_blocks_of_an_sm():
    assert blocks_per_sm(H100, 165, 0, 4) == 3  # 5,376 registers a warp, 12 warps
    assert blocks_per_sm(H100, 81, 0, 4) == 5  # 2,816, as for 88
    assert blocks_per_sm(H100, 32, 0, 1) == 32
    assert blocks_per_sm(H100, 32, 0, 8) == 8  # 64 warps
    assert blocks_per_sm(CARDS["a100"], 128, 76288, 4) == 2  # of 164 KiB


def changed(**values) -> dict:
    """The counts with other values in every main loop."""
    counts = copy.deepcopy(COUNTS)
    for kernels in counts.values():
        for row in kernels.values():
            row.get("main", {}).update(values)
    return counts


def test_more_loads_in_flight_wait_less():
    """fp16_gemv's; other kernels begin all loads of a step before they wait."""
    waits = []
    for n in (1, 2, 4, 8):
        kernels = changed(in_flight=n)["sm_90"]
        waits.append(times(H100, kernels, next(predict.classifier(kernels, QWEN)))["wait"])
    assert waits == sorted(set(waits), reverse=True)


def test_adding_up_splits_takes_less_time_with_more_loads_in_flight():
    slow, fast = copy.deepcopy(COUNTS), copy.deepcopy(COUNTS)
    slow["sm_90"]["awq_gemv<4, 8>"]["last"]["in_flight"] = 2
    fast["sm_90"]["awq_gemv<4, 8>"]["last"]["in_flight"] = 16
    assert seconds(H100, fast, QWEN, "decode", 8192) < seconds(H100, slow, QWEN, "decode", 8192)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", predict.PREDICTED)
def test_no_prediction_is_above_its_limit(card, model):
    c = config_of(model)
    for cell in predict.CELLS:
        assert 0 < tokens_per_s(CARDS[card], COUNTS, c, *cell) < limit(CARDS[card], c, *cell), cell
    decode = [tokens_per_s(CARDS[card], COUNTS, c, "decode", n) for n in predict.DECODE]
    assert decode == sorted(decode, reverse=True)


def test_decode_reads_each_weight_once():
    (launches,) = predict.launches_of(H100, COUNTS["sm_90"], QWEN, "decode", 1024)
    work = work_of(QWEN, "awq")
    assert sum(x.dram for x in launches if "gemv<" in x.kernel) == pytest.approx(work.layer_bytes)
    assert sum(x.dram for x in launches if x.kernel == "fp16_gemv") == work.classifier_bytes
    assert sum(x.dram for x in launches if "attention" in x.kernel) == work.kv_bytes * 1024
    assert len(launches) == 36 * 9 + 4


def test_a_prompt_goes_through_in_chunks():
    steps = predict.launches_of(H100, COUNTS["sm_90"], QWEN, "prefill", 1100)
    assert [step[0].blocks // 8 for step in steps] == [512, 512, 76]  # blocks of embed_kernel, 8 a token
    assert [step[-1].kernel == "arg_max_kernel" for step in steps] == [False, False, True]
    assert ["cuBLAS" in {x.kernel for x in step} for step in steps] == [True, True, False]


def test_grids_are_those_of_the_program():
    """Qwen3-8B on 132 SMs."""
    kernels = COUNTS["sm_90"]
    o_proj, gate_up, narrow = (predict.gemv(H100, kernels, 4096, outs) for outs in ([4096], [12288] * 2, [4104]))
    assert (o_proj.kernel, o_proj.blocks) == ("awq_gemv<4, 8>", 16 * 16)  # two steps of 16 inputs a warp
    assert (gate_up.kernel, gate_up.blocks) == ("awq_gemv<4, 4>", 96 * 5)  # 13 steps a warp; by eight warps, 16
    assert (narrow.kernel, narrow.blocks) == ("awq_gemv<1, 8>", 65 * 4)  # rows begin at no multiple of 16 bytes
    assert predict.gemv_shape(H100, 4096, 50, 2816) == (8, 4, 8)  # of 5, which gives warps 7 steps, but some fewer
    assert predict.gemv_shape(CARDS["a100"], 4096, 50, 2816)[0] == 4  # two blocks of eight do not fit
    few, many = (predict.gemm(H100, kernels, 4096, [3072], n) for n in (16, 600))
    assert (few.kernel, few.blocks) == ("awq_gemm<16>", 192)  # 24 tiles of 16 stages, 264 blocks at most: two each
    assert (many.kernel, many.blocks) == ("awq_gemm<64>", 256)  # 240 tiles of 32, 264 blocks at most: 30 each
    token = predict.attention(H100, kernels, QWEN, 1, 1023, 4096)
    assert (token.kernel, token.blocks, token.rounds) == ("token_attention<4>", 8 * 16, 1)
    assert predict.attention(H100, kernels, QWEN, 1, 127, 4096).blocks == 8


def test_constants_are_those_of_the_sources():
    text = "".join(
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("runq_awq.cu", "engine/gpu/attention.cuh", "engine/gpu/program.cuh")
    )
    for name in (
        "max_splits", "dequantize_from", "gemv_warps", "gemv_inputs", "gemv_steps", "gemm_inputs", "gemm_stages",
        "attention_warps", "attention_keys", "token_warps", "token_keys", "token_steps",
    ):  # fmt: skip
        assert f"constexpr int {name} = {getattr(predict, name.upper())};" in text
    assert f"max_chunk = is_gpu ? {predict.MAX_CHUNK} :" in text
    assert f"arg_max_threads = {predict.ARG_MAX_THREADS}, arg_max_blocks = {predict.ARG_MAX_BLOCKS};" in text
    assert "max_partials = 1 << 23;" in text and predict.MAX_PARTIALS == 1 << 23


def test_every_kernel_of_a_step_was_counted():
    for arch in ARCHS:
        for name, row in COUNTS[arch].items():
            assert row["registers"] <= 255, name
    for card in CARDS.values():
        for phase, n in predict.CELLS:
            for step in predict.launches_of(card, COUNTS[card.arch], QWEN, phase, n):
                assert {x.kernel for x in step} <= {*COUNTS[card.arch], "cuBLAS"}


def test_what_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["predict", "--cards", "h100", "--models", "qwen3-8b", "--kernels", "decode:1024"])
    assert predict.main() == 0
    out = capsys.readouterr().out
    assert re.search(r"^decode 1024 +\d+ \(\d+ %\)$", out, re.M)
    assert re.search(r"^fp16_gemv +1 +18992 .* memory$", out, re.M)


@pytest.mark.parametrize(
    "bad", ["decode", "decode:", "decode:0", "decode:-1", "prefill:1x", "chat:1", "decode:9999999"]
)
def test_a_phase_that_is_none(monkeypatch, capsys, bad):
    monkeypatch.setattr(sys, "argv", ["predict", "--kernels", bad])
    with pytest.raises(SystemExit) as error:
        predict.main()
    assert error.value.code == 2
    assert f"argument --kernels: '{bad}' is not decode:KEYS" in capsys.readouterr().err


# ---- counting in SASS

LISTING = """
.text._Z8awq_gemvILi4ELi8EEvPK6__half:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/               @P0 EXIT ;
.L_x_1:
        /*0020*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0030*/                   LDG.E R8, [R2.64+0x100] ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
        /*0050*/                   IADD3 R9, R9, 0x1, RZ ;
        /*0060*/                   IADD3 R9, R9, 0x2, RZ ;
.L_x_2:
        /*0070*/                   LDG.E R10, [R2.64+0x200] ;
        /*0080*/                   HMMA.16816.F32 R12, R16, R6, R12 ;
        /*0090*/                   LDG.E R11, [R2.64+0x300] ;
        /*00a0*/                   FADD R11, R11, R8 ;
        /*00b0*/               @P2 BRA `(.L_x_1) ;
        /*00c0*/                   STG.E [R2.64], R11 ;
        /*00d0*/                   EXIT ;
"""


def test_a_loop_of_sass_is_counted():
    (code,) = functions(LISTING).values()
    assert list(functions(LISTING)) == ["awq_gemv<4, 8>"]
    loop = {
        "instructions": 8,
        "loads": 4,
        "mma": 1,
        "in_flight": 3,
    }  # HMMA waits for R6 of the first; FADD for the last
    assert count(code) == {"straight": 2, "first": loop, "main": loop}
    assert shortest_way(code, 0, 13) == 11  # without the two instructions that a branch leaps over
    assert in_flight([Step("", False, "LDG.E", "R4, [R2.64]"), Step("", False, "FADD", "R5, R4, R4")]) == 1


def test_what_ptxas_says_is_read():
    log = """ptxas info    : Compiling entry function '_Z14rmsnorm_kernelP6__halfPKfPKS_if' for 'sm_90'
ptxas info    : Used 22 registers, used 1 barriers, 128 bytes smem, 384 bytes cmem[0]
ptxas info    : Compiling entry function '_ZL14awq_dequantize9AwqMatrixP6__half' for 'sm_80'
ptxas info    : Used 20 registers, 384 bytes cmem[0]
"""
    assert resources(log) == {
        "sm_90": {"rmsnorm_kernel": {"registers": 22, "shared": 128}},
        "sm_80": {"awq_dequantize": {"registers": 20, "shared": 0}},
    }
    assert kernel_name("_Z8awq_gemmILi64EEvPK6__halfi11AwqProducts12SplitScratch") == "awq_gemm<64>"
