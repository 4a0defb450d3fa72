"""The twin refuses what the device would not do: for each refusal a kernel that provokes it."""

import pytest
import torch

from kimi_graph import ops
from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import Kernel, run_source

# Every kernel has x and y of 64 floats in global memory, and these at hand.
PRELUDE = """
#include "kernel_operator_list_tensor_intf.h"
using namespace AscendC;
struct Case {
    TPipe pipe;
    TQue<TPosition::VECIN, 2> in;
    TQue<TPosition::VECOUT, 2> out;
    TBuf<TPosition::VECCALC> calc;
    TBuf<TPosition::VECIN> landing;
    TBuf<TPosition::VECOUT> leaving;
    TBuf<TPosition::A1> l1;
    TBuf<TPosition::A2> l0a;
    GlobalTensor<float> x, y;
    Case(GM_ADDR a, GM_ADDR b) { x.SetGlobalBuffer((float*)a); y.SetGlobalBuffer((float*)b, 64); }
    void Cube() { KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY); }
    void Queues() { pipe.InitBuffer(in, 2, 256); pipe.InitBuffer(out, 2, 256); }
    LocalTensor<float> Calc(uint32_t n = 64) { pipe.InitBuffer(calc, n * 4); return calc.Get<float>(); }
    LocalTensor<float> Filled() { auto c = Calc(256); Duplicate(c, 1.0f, 128); return c; }
    LocalTensor<float> Ready() {
        pipe.InitBuffer(leaving, 256);
        auto t = leaving.Get<float>();
        Duplicate(t, 1.0f, 64);
        return t;
    }
    LocalTensor<float> Read() {
        Queues();
        auto t = in.AllocTensor<float>();
        DataCopy(t, x, 64);
        in.EnQue(t);
        return in.DeQue<float>();
    }
    void Write(LocalTensor<float>& from) {
        auto t = out.AllocTensor<float>();
        Muls(t, from, 1.0f, 64);
        out.EnQue(t);
        auto u = out.DeQue<float>();
        DataCopy(y, u, 64);
        out.FreeTensor(u);
    }
"""

BOTH = (2201, 3510)
ONLY = {
    "the unified buffer of a 950 on A3": 2201,
    "a copy from memory to VECCALC": 2201,
    "a copy from L1 to memory": 3510,
    "a copy from UB to L1": 2201,
}  # one chip alone refuses these
# message, body
CASES = {
    "a buffer larger than UB": ("InitBuffer: 300000 bytes of UB wanted", "pipe.InitBuffer(calc, 300000);"),
    "the unified buffer of a 950 on A3": ("InitBuffer: 253952 bytes of UB wanted", "pipe.InitBuffer(calc, 253952);"),
    "queues that fill UB together": ("bytes of UB wanted", "pipe.InitBuffer(in, 2, 90000); Calc(20000);"),
    "a buffer larger than L1": ("InitBuffer: 600000 bytes of L1 wanted", "pipe.InitBuffer(l1, 600000);"),
    "a buffer larger than L0A": ("InitBuffer: 70016 bytes of L0A wanted", "pipe.InitBuffer(l0a, 70000);"),
    "more buffers than a pipe has": ("more than 64 buffers", "for (int i = 0; i < 65; i++) Calc(8);"),
    "a copy from memory to VECCALC": ("no way from GM to VECCALC", "DataCopyPad(Calc(), x, {1, 256, 0, 0, 0}, {});"),
    "a copy of whole blocks to VECCALC": ("no way from GM to VECCALC", "DataCopy(Calc(), x, 64);"),
    "a copy of whole blocks to VECOUT": (
        "no way from GM to VECOUT",
        "Queues(); DataCopy(out.AllocTensor<float>(), x, 64);",
    ),
    "a copy from VECCALC to memory": ("no way from VECCALC to GM", "DataCopyPad(y, Filled(), {1, 256, 0, 0, 0});"),
    "a copy of whole blocks from VECIN": ("no way from VECIN to GM", "DataCopy(y, Read(), 64);"),
    "a copy from VECCALC to itself": ("no way from VECCALC to VECCALC", "auto c = Filled(); DataCopy(Calc(), c, 64);"),
    "a copy from memory to L0A": (
        "no way from GM to L0A",
        "Cube(); pipe.InitBuffer(l0a, 256); DataCopy(l0a.Get<float>(), x, 64);",
    ),
    "a copy from L1 to memory": (
        "no way from L1 to GM",
        (
            "Cube(); pipe.InitBuffer(l1, 256); auto t = l1.Get<float>(); DataCopy(t, x, 64); "
            "SetFlag<HardEvent::MTE2_MTE3>(0); WaitFlag<HardEvent::MTE2_MTE3>(0); DataCopy(y, t, 64);"
        ),
    ),
    "a copy from UB to L1": (
        "no way from VECCALC to L1",
        (
            "auto c = Filled(); pipe.InitBuffer(l1, 256); SetFlag<HardEvent::V_MTE3>(0); "
            "WaitFlag<HardEvent::V_MTE3>(0); DataCopy(l1.Get<float>(), c, 64);"
        ),
    ),
    "a vector instruction on L1": (
        "the vector unit reaches UB, not L1",
        "pipe.InitBuffer(l1, 256); Duplicate(l1.Get<float>(), 1.0f, 8);",
    ),
    "an address that is not aligned": ("address 4 is not a multiple of 32", "auto c = Filled(); Exp(c[1], c, 8);"),
    "a copy of odd length": (
        "no multiple of 32: use DataCopyPad",
        "Queues(); DataCopy(in.AllocTensor<float>(), x, 7);",
    ),
    "too many blocks of a copy": (
        "5000 blocks; 1 to 4095",
        ("Queues(); DataCopyPad(in.AllocTensor<float>(), x, {5000, 4, 0, 0, 0}, {});"),
    ),
    "blocks that cut an element": (
        "blocks of 6 bytes; a multiple of 4",
        ("Queues(); DataCopyPad(in.AllocTensor<float>(), x, {1, 6, 0, 0, 0}, {});"),
    ),
    "padding that has no value": (
        "the twin pads on the right, with a value",
        "Queues(); DataCopyPad(in.AllocTensor<float>(), x, {1, 12, 0, 0, 0}, {false, 0, 1, 0.0f});",
    ),
    "more padding than a block": (
        "36 bytes of padding; at most 32",
        "Queues(); DataCopyPad(in.AllocTensor<float>(), x, {1, 12, 0, 0, 0}, {true, 0, 9, 0.0f});",
    ),
    "local memory nothing wrote": ("Exp reads byte 0 of UB, which nothing wrote", "auto c = Calc(); Exp(c, c, 8);"),
    "what a padded copy left open": (
        "Exp reads byte 12 of UB, which nothing wrote",
        (
            "Queues(); auto t = in.AllocTensor<float>(); "
            "DataCopyPad(t, x, {1, 12, 0, 0, 0}, {}); "
            "in.EnQue(t); t = in.DeQue<float>(); Exp(t, t, 4);"
        ),
    ),
    "an output nothing wrote": (
        "DataCopy reads byte 0 of y, which nothing wrote",
        "Queues(); DataCopy(in.AllocTensor<float>(), y, 8);",
    ),
    "memory past its end": (
        "reads bytes 128 to 384 of x|reaches byte 384 of x",
        "Queues(); DataCopy(in.AllocTensor<float>(), x[32], 64);",
    ),
    "memory past a tensor's end": (
        "reaches byte 96 of x, whose tensor ends at 64",
        "Queues(); x.SetGlobalBuffer(x.GetPhyAddr(), 16); DataCopy(in.AllocTensor<float>(), x[8], 16);",
    ),
    "a tensor larger than its memory": ("SetGlobalBuffer: 65 elements", "x.SetGlobalBuffer(x.GetPhyAddr(), 65);"),
    "an input that is not there": ("SetGlobalBuffer: a null address", "x.SetGlobalBuffer(nullptr);"),
    "an address of no tensor": ("an address in no tensor", "static float own[8]; x.SetGlobalBuffer(own);"),
    "the end of a local buffer": (
        "Duplicate reaches byte 288 of a buffer of 256",
        "auto c = Calc(); Calc(); Duplicate(c, 1.0f, 72);",
    ),
    "a tensor in its queue": (
        "is in its queue: DeQue it first",
        "Queues(); auto t = in.AllocTensor<float>(); DataCopy(t, x, 64); in.EnQue(t); Exp(t, t, 8);",
    ),
    "the tensor from before the queue": (
        "use the tensor that DeQue gave",
        (
            "Queues(); auto t = in.AllocTensor<float>(); DataCopy(t, x, 64); in.EnQue(t); "
            "in.DeQue<float>(); Exp(t, t, 8);"
        ),
    ),
    "a tensor given back": ("the tensor was given back", "auto t = Read(); in.FreeTensor(t); Exp(t, t, 8);"),
    "more tensors than a queue has": (
        "all 2 buffers of the queue are in use",
        "Queues(); for (int i = 0; i < 3; i++) in.AllocTensor<float>();",
    ),
    "a tensor out of an empty queue": ("DeQue: the queue is empty", "Queues(); in.DeQue<float>();"),
    "a tensor of no queue put in one": ("was not allocated from a queue", "Queues(); in.EnQue(Calc());"),
    "a tensor of no queue given back": ("is of no queue", "Queues(); auto c = Calc(); in.FreeTensor(c);"),
    "a tensor left in its queue": ("a tensor of a queue that was not freed", "Read();"),
    "vector work before its copy ended": (
        "Exp on pipe V meets UB that pipe MTE2 wrote",
        ("pipe.InitBuffer(landing, 256); auto t = landing.Get<float>(); DataCopy(t, x, 64); Exp(t, t, 64);"),
    ),
    "a copy over what is still read": (
        "DataCopy on pipe MTE2 meets UB that pipe V reads",
        (
            "pipe.InitBuffer(landing, 256); auto t = landing.Get<float>(), c = Calc(); DataCopy(t, x, 64); "
            "SetFlag<HardEvent::MTE2_V>(0); WaitFlag<HardEvent::MTE2_V>(0); Exp(c, t, 64); "
            "DataCopy(t, x, 64);"
        ),
    ),
    "a copy before vector work ended": (
        "DataCopy on pipe MTE3 meets UB that pipe V wrote",
        "DataCopy(y, Ready(), 64);",
    ),
    "a scalar before vector work ended": ("GetValue on pipe S meets UB that pipe V wrote", "Filled().GetValue(0);"),
    "vector work before a scalar ended": (
        "Exp on pipe V meets UB that pipe S wrote",
        "auto c = Calc(); c.SetValue(0, 1.0f); Exp(c, c, 1);",
    ),
    "memory read back before it was written": (
        "DataCopy on pipe MTE2 meets y that pipe MTE3 wrote",
        (
            "auto c = Ready(); SetFlag<HardEvent::V_MTE3>(0); WaitFlag<HardEvent::V_MTE3>(0); "
            "DataCopy(y, c, 64); Queues(); DataCopy(in.AllocTensor<float>(), y, 64);"
        ),
    ),
    "an event nobody set": ("nobody set event 3 from V to MTE3", "WaitFlag<HardEvent::V_MTE3>(3);"),
    "an event set twice": (
        "event 0 from V to S is set already",
        "SetFlag<HardEvent::V_S>(0); SetFlag<HardEvent::V_S>(0);",
    ),
    "an event left set": ("event 1 from V to S set and not waited for", "SetFlag<HardEvent::V_S>(1);"),
    "an event that does not exist": ("event 8; there are 0 to 7", "SetFlag<HardEvent::V_S>(8);"),
    "arithmetic of bfloat16": (
        "Add does not take bfloat16_t",
        "auto c = Filled().ReinterpretCast<bfloat16_t>(); Add(c, c, c, 16);",
    ),
    "a function of integers": (
        "Exp does not take int32_t",
        "auto c = Filled().ReinterpretCast<int32_t>(); Exp(c, c, 16);",
    ),
    "a cast that does not exist": (
        "no way from float to int8_t",
        "auto c = Filled(); Cast(c.ReinterpretCast<int8_t>(), c, RoundMode::CAST_RINT, 32);",
    ),
    "a cast that would not round": (
        "makes bfloat16_t of float with CAST_RINT",
        "auto c = Filled(); Cast(c.ReinterpretCast<bfloat16_t>(), c, RoundMode::CAST_NONE, 32);",
    ),
    "more lanes than a repeat has": (
        "a mask of 65; 1 to 64 lanes",
        "auto c = Filled(); Add(c, c, c, 65, 1, BinaryRepeatParams());",
    ),
    "more repeats than eight bits hold": (
        "256 repeats; 1 to 255",
        "auto c = Filled(); Add(c, c, c, 8, 256, BinaryRepeatParams(1, 1, 1, 0, 0, 0));",
    ),
    "a stride that eight bits do not hold": ("a stride of 256 blocks", "BinaryRepeatParams(1, 1, 1, 256, 0, 0);"),
    "no repeats": ("0 repeats; 1 to 255", "auto c = Filled(); Add(c, c, c, 8, 0, BinaryRepeatParams());"),
    "a result over part of its source": (
        "a source and the result overlap in part",
        "auto c = Filled(); Exp(c[8], c, 32);",
    ),
    "a repeat that reads an earlier one's result": (
        "reads what an earlier part of the same instruction wrote",
        "auto c = Filled(); Add(c[8], c, c[64], 8, 4, BinaryRepeatParams(1, 1, 1, 1, 1, 0));",
    ),
    "elements gathered over their source": (
        "the source and the result overlap",
        "auto c = Filled(); auto a = Calc().ReinterpretCast<uint32_t>(); Duplicate(a, 4u, 8); Gather(c, c, a, 0, 8);",
    ),
    "integers to floats without a rounding": (
        "both chips make float of int32_t with CAST_RINT",
        "auto c = Filled(); Cast(c, c.ReinterpretCast<int32_t>(), RoundMode::CAST_NONE, 8);",
    ),
    "a maximum and its place": (
        "the twin gives values alone",
        "auto c = Filled(); WholeReduceMax<float>(c, c[64], 64, 1, 1, 1, 8);",
    ),
    "nothing to compute": ("Exp: 0 elements", "auto c = Filled(); Exp(c, c, 0);"),
    "an offset inside an element": (
        "byte 2 is inside an element",
        (
            "auto c = Filled(); auto at = Calc().ReinterpretCast<uint32_t>(); Duplicate(at, 2u, 8); "
            "Gather(c, c, at, 0, 8);"
        ),
    ),
    "an offset past the buffer": (
        "Gather reaches byte 1028 of a buffer of 1024",
        (
            "auto c = Filled(); auto at = Calc().ReinterpretCast<uint32_t>(); Duplicate(at, 1024u, 8); "
            "Gather(c, c, at, 0, 8);"
        ),
    ),
    "a result that was not written": ("byte 0 of y was never written", ""),
    "cores that write the same": (
        "core 0 and core 1 race for byte 0 of y",
        "auto t = Read(); Write(t); in.FreeTensor(t);",
    ),
    "cores that read what another writes": (
        "core 0 and core 1 race for byte 0 of y",
        "auto t = Read(); if (GetBlockIdx() == 0) Write(t); else y.GetValue(0); in.FreeTensor(t);",
    ),
    "a core that writes what another read": (
        "core 1 writes byte 0 of x, which another core reads",
        (
            "auto t = Read(); if (GetBlockIdx() == 0) { Write(t); in.FreeTensor(t); return; } "
            "SetFlag<HardEvent::MTE2_MTE3>(0); WaitFlag<HardEvent::MTE2_MTE3>(0); DataCopyPad(x, t, {1, 256, 0, 0, 0});"
        ),
    ),
    "an element of a list that is not there": (
        "tensor 1 of a list of 1",
        "static uint64_t list[2] = {1, 0}; ListTensorDesc(list).GetDataPtr<float>(1);",
    ),
}

# What is right: these run.
SOUND = {
    "a queue in, vector work, a queue out": "auto t = Read(); Exp(t, t, 64); Write(t); in.FreeTensor(t);",
    "events in place of queues": """
        pipe.InitBuffer(landing, 256); auto t = landing.Get<float>();
        DataCopy(t, x, 64); SetFlag<HardEvent::MTE2_V>(0); WaitFlag<HardEvent::MTE2_V>(0);
        Exp(t, t, 64); SetFlag<HardEvent::V_MTE3>(0); WaitFlag<HardEvent::V_MTE3>(0);
        DataCopyPad(y, t, {1, 256, 0, 0, 0});""",
    "a barrier of all pipes": """
        pipe.InitBuffer(landing, 256); auto t = landing.Get<float>();
        DataCopy(t, x, 64); PipeBarrier<PIPE_ALL>(); Exp(t, t, 64); PipeBarrier<PIPE_ALL>();
        DataCopyPad(y, t, {1, 256, 0, 0, 0});""",
    "padding beside elements that come one by one": """
        Queues(); TBuf<TPosition::VECIN> wide; pipe.InitBuffer(wide, 64 * 32); auto t = wide.Get<float>();
        DataCopyPad(t, x, {64, 4, 0, 0, 0}, {true, 0, 7, 0.0f}); PipeBarrier<PIPE_ALL>();
        auto u = out.AllocTensor<float>(); WholeReduceSum<float>(u, t, 8, 64, 1, 1, 1); Exp(u, u, 64);
        out.EnQue(u); u = out.DeQue<float>(); DataCopy(y, u, 64); out.FreeTensor(u);""",
    "a queue from memory to memory": """
        TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through; pipe.InitBuffer(through, 1, 256);
        auto t = through.AllocTensor<float>(); DataCopy(t, x, 64); through.EnQue(t);
        auto u = through.DeQue<float>(); DataCopy(y, u, 64); through.FreeTensor(u);""",
}


def source():
    bodies = [body for _, body in CASES.values()] + list(SOUND.values())
    methods = "\n".join(f"    void Run{i}() {{ {body} }}" for i, body in enumerate(bodies))
    calls = "\n".join(f"        case {i}: return c.Run{i}();" for i in range(len(bodies)))
    return f"""{PRELUDE}
{methods}
}};
extern "C" void provoke(GM_ADDR which, GM_ADDR x, GM_ADDR y) {{
    Case c(x, y);
    switch (*reinterpret_cast<int32_t*>(which)) {{
{calls}
    }}
}}"""


def provoke(case, arch, cache, cores=1):
    which = torch.tensor([[*CASES, *SOUND].index(case)], dtype=torch.int32)
    x, y = torch.linspace(-1, 1, 64), torch.zeros(64)
    tensors = [("which", which, True), ("x", x, True), ("y", y, False)]
    listed = [(name, t.data_ptr(), t.nbytes, filled) for name, t, filled in tensors]
    return x, y, run_source(source(), "provoke", arch, listed, cache, cores)


@pytest.mark.parametrize(
    "arch, case", [(arch, case) for case in CASES for arch in BOTH if ONLY.get(case, arch) == arch]
)
def test_what_the_device_would_not_do_is_refused(case, arch, twin_cache):
    with pytest.raises(KernelError, match=CASES[case][0]) as caught:
        provoke(case, arch, twin_cache, cores=2 if "core" in case else 1)
    assert str(caught.value).startswith(("core ", "after all cores: "))


@pytest.mark.parametrize("case", ONLY)
def test_what_one_chip_refuses_the_other_does(case, twin_cache):
    (other,) = {*BOTH} - {ONLY[case]}
    reason = ""
    try:
        provoke(case, other, twin_cache)
    except KernelError as error:
        reason = str(error)
    assert not reason or "byte 0 of y was never written" in reason  # it went all the way


@pytest.mark.parametrize("case", SOUND)
@pytest.mark.parametrize("arch", BOTH)
def test_what_is_right_runs_and_is_counted(case, arch, twin_cache):
    x, y, (core,) = provoke(case, arch, twin_cache)
    torch.testing.assert_close(y, x if "memory" in case else x.exp())
    assert (core.gm_read, core.gm_written) == (256, 256)
    assert core.instructions[2] == core.instructions[3] == 1


@pytest.mark.parametrize(
    "body",
    ["DataCopy(y, x, 64);", "auto c = Filled(); Add(c, c, c.ReinterpretCast<half>(), 8);"],
    ids=["a copy from memory to memory", "two dtypes in one sum"],
)
def test_what_has_no_overload_does_not_compile(body, twin_cache):
    text = f'{PRELUDE} void Run() {{ {body} }} }};\nextern "C" void k(GM_ADDR x, GM_ADDR y) {{ Case(x, y).Run(); }}'
    with pytest.raises(KernelError, match="the kernel does not compile"):
        run_source(text, "k", 2201, [("x", 0, 0, True), ("y", 0, 0, False)], twin_cache)


def test_a_kernel_is_given_as_many_addresses_as_it_takes(twin_cache):
    text = 'extern "C" void k(GM_ADDR x, GM_ADDR y) {}'
    with pytest.raises(KernelError, match="takes 2 addresses, 1 were given"):
        run_source(f'#include "kernel_operator.h"\n{text}', "k", 2201, [("x", 0, 0, True)], twin_cache)


@pytest.mark.parametrize("dtype, name", [(torch.float16, "half"), (torch.bfloat16, "bfloat16_t")], ids=str)
def test_small_floats_are_torchs(dtype, name, twin_cache):
    """Every 16-bit pattern to float and back, and floats halfway between, to the nearest and even."""
    text = f"""
#include "kernel_operator.h"
extern "C" void k(GM_ADDR x, GM_ADDR wide, GM_ADDR narrow) {{
    for (int i = 0; i < 65536; i++) {{
        reinterpret_cast<float*>(wide)[i] = twin::Wide(reinterpret_cast<{name}*>(x)[i]);
        reinterpret_cast<{name}*>(narrow)[2 * i] = twin::Store<{name}>(reinterpret_cast<float*>(wide)[i]);
        const float next = reinterpret_cast<float*>(wide)[i] * 1.00048828125f;  // past a half, or not
        reinterpret_cast<{name}*>(narrow)[2 * i + 1] = twin::Store<{name}>(next);
    }}
}}"""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide, narrow = torch.empty(65536), torch.empty(65536, 2, dtype=dtype)
    tensors = [(n, t.data_ptr(), t.nbytes, True) for n, t in (("x", x), ("wide", wide), ("narrow", narrow))]
    run_source(text, "k", 2201, tensors, twin_cache)
    assert torch.equal(wide.nan_to_num(7), x.float().nan_to_num(7))
    want = torch.stack([x, (x.float() * 1.00048828125).to(dtype)], 1)
    nan = want.isnan()  # whatever its sign
    assert torch.equal(narrow.isnan(), nan)
    assert torch.equal(narrow[~nan].view(torch.int16), want[~nan].view(torch.int16))


def test_libraries_of_several_kernels_do_not_meet(twin_cache):
    """One process loads many: definitions, tilings and machines are each library's own."""
    situ, norm = Kernel("situ_mul", twin_cache), Kernel("gated_rms_norm", twin_cache)
    gate = torch.randn(4, 32)
    for _ in range(2):
        y = situ.run({"gate": gate, "up": gate}, {"beta": 4.0, "linear_beta": 25.0}).outputs["y"]
        torch.testing.assert_close(y, ops.situ_mul(gate, gate, 4.0, 25.0), rtol=1e-5, atol=1e-5)
        weight = torch.ones(32)
        y = norm.run({"x": gate, "gate": gate, "weight": weight}, {"eps": 1e-5}).outputs["y"]
        torch.testing.assert_close(y, ops.gated_rms_norm(gate, gate, weight, 1e-5), rtol=1e-5, atol=1e-5)
    assert (situ.definition.type, norm.definition.type) == ("SituMul", "GatedRmsNorm")
