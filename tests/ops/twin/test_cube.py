"""The twin's Cube and cores that run at once: products are right, and what the device would not do is refused."""

import pytest
import torch

from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import run_source

BOTH = (2201, 3510)

# A Cube kernel has x and y of 64 x 64 floats in global memory, and these at hand.
CUBE = """
#include "kernel_operator.h"
using namespace AscendC;
struct Case {
    TPipe pipe;
    TBuf<TPosition::A1> a1;
    TBuf<TPosition::B1> b1;
    TBuf<TPosition::A2> a2;
    TBuf<TPosition::B2> b2;
    TBuf<TPosition::CO1> co1;
    TBuf<TPosition::VECCALC> calc;
    GlobalTensor<float> x, y;
    LocalTensor<float> a, b, c, l1;
    Case(GM_ADDR p, GM_ADDR q) {
        x.SetGlobalBuffer((float*)p); y.SetGlobalBuffer((float*)q);
        SetHF32Mode(HF32Mode::DISABLE);
        pipe.InitBuffer(a1, 16384); pipe.InitBuffer(a2, 16384); pipe.InitBuffer(b2, 16384); pipe.InitBuffer(co1, 16384);
        l1 = a1.Get<float>(); a = a2.Get<float>(); b = b2.Get<float>(); c = co1.Get<float>();
    }
    Nd2NzParams Rows(int rows) { return Nd2NzParams(1, rows, 64, 0, 64, 64, 1, 0); }
    void Load(int rows = 64) {
        DataCopy(l1, x, Rows(rows)); PipeBarrier<PIPE_ALL>();
        LoadData(a, l1, LoadData2DParams(0, 32, 1, 0, 0, false, 0));
        LoadData(b, l1, LoadData2DParams(0, 32, 1, 0, 0, false, 0));
        PipeBarrier<PIPE_ALL>();
    }
    MmadParams Of(int m, int n, int k, bool fresh = true) { return MmadParams(m, n, k, 0, false, fresh); }
    LoadData2DParams Fractals(int from, int count) { return LoadData2DParams(from, count, 1, 0, 0, false, 0); }
    FixpipeParamsV220 Out(int n = 64, int m = 64) { return FixpipeParamsV220(n, m, 64, 64, false); }
"""

ONLY = {
    "the 950's parameters on A3": 2201,
    "squares to L0A on the 950": 3510,
    "32-bit squares on the 950": 3510,
    "a gap on the 950": 3510,
    "too many steps of a load": 3510,
    "half a square": 3510,
    "k rounded up to 16 on the 950": 3510,
}
CASES = {
    "a vector instruction on a Cube core": (
        "a Cube core has no pipe V",
        "pipe.InitBuffer(calc, 256); Duplicate(calc.Get<float>(), 1.0f, 8);",
    ),
    "more of L0C than there is": (
        "InitBuffer: 300000 bytes of L0C wanted",
        "TBuf<TPosition::CO1> d; pipe.InitBuffer(d, 300000);",
    ),
    "a copy to UB on a Cube core": (
        "no way from GM to VECIN for a Cube core",
        "TBuf<TPosition::VECIN> u; pipe.InitBuffer(u, 256); DataCopy(u.Get<float>(), x, 64);",
    ),
    "rows past a tensor's end": ("reads bytes 16384 to 16640|reaches byte 16640 of x", "DataCopy(l1, x, Rows(65));"),
    "no rows": ("1 matrices of 0 x 64", "DataCopy(l1, x, Rows(0));"),
    "a stride out of range": ("a stride of Nd2NzParams", "DataCopy(l1, x, Nd2NzParams(1, 8, 8, 0, 64, 20000, 1, 0));"),
    "a field that wraps": ("70000 does not fit a field of 16 bits", "Nd2NzParams p; p.nValue = 70000;"),
    "L0A before its copy ended": (
        "LoadData on pipe MTE1 meets L1 that pipe MTE2 wrote, with no queue, event or barrier",
        "DataCopy(l1, x, Rows(64)); LoadData(a, l1, Fractals(0, 1));",
    ),
    "a product before its load ended": (
        "Mmad on pipe M meets L0A that pipe MTE1 wrote",
        "DataCopy(l1, x, Rows(64)); PipeBarrier<PIPE_ALL>(); LoadData(a, l1, Fractals(0, 8));"
        "Mmad(c, a, b, Of(16, 16, 8));",
    ),
    "a result before it is there": (
        "Fixpipe on pipe FIX meets L0C that pipe M wrote",
        "Load(); Mmad(c, a, b, Of(64, 64, 64)); Fixpipe(y, c, Out());",
    ),
    "a product of rows nothing wrote": (
        "Mmad reads byte .* of L0., which nothing wrote",
        "Load(30); Mmad(c, a, b, Of(32, 16, 8));",
    ),
    "a sum onto what nothing wrote": (
        "Mmad reads byte 0 of L0C, which nothing wrote",
        "Load(); Mmad(c, a, b, Of(64, 64, 64, false));",
    ),
    "a short sum with no barrier": (
        "added to what the product before wrote: PipeBarrier<PIPE_M> first",
        "Load(); Mmad(c, a, b, Of(16, 16, 8)); Mmad(c, a, b, Of(16, 16, 8, false));",
    ),
    "a product of one row": (
        "one row is read as a vector",
        "Load(); Mmad(c, a, b, Of(1, 16, 8));",
    ),
    "float32 that is rounded first": (
        "SetHF32Mode: the twin multiplies float32 as it is",
        "SetHF32Mode(HF32Mode::ENABLE);",
    ),
    "a product of nothing": ("Mmad: 16 x 16 x 0", "Load(); Mmad(c, a, b, Of(16, 16, 0));"),
    "the unit flag": ("no bias and no unit flag", "Load(); Mmad(c, a, b, MmadParams(16, 16, 8, 3, false, true));"),
    "factors the wrong way round": (
        "Mmad: L0B where L0A has to be",
        "Mmad(c, b, a, Of(16, 16, 8));",
    ),
    "a fractal that is not aligned": (
        "address 32 is not a multiple of 512",
        "LoadData(a[8], l1, Fractals(0, 1));",
    ),
    "a load into L1": (
        "LoadData: L1 where L0A has to be",
        "LoadData(l1, l1, Fractals(0, 1));",
    ),
    "a load past a buffer": (
        "LoadData reaches byte 16896 of a buffer of 16384",
        "LoadData(a, l1, Fractals(32, 1));",
    ),
    "a fill of L0A": ("Fill: L0A where L1 has to be", "Fill(a, InitConstValueParams<float>(1, 1, 0, 0.0f));"),
    "a fill past a buffer": (
        "Fill reaches byte 16416 of a buffer of 16384",
        "Fill(l1, InitConstValueParams<float>(2, 1, 511, 0)); Fill(l1, InitConstValueParams<float>(1, 513, 0, 0));",
    ),
    "a fill of too many": ("40000 times 1 blocks", "Fill(l1, InitConstValueParams<float>(40000, 1, 0, 0.0f));"),
    "32-bit fractals transposed": (
        "fractals of 16-bit elements alone are transposed",
        "LoadData(a, l1, LoadData2DParams(0, 1, 1, 0, 0, true, 0));",
    ),
    "the 950's parameters on A3": (
        "2201 does not take LoadData2DParamsV2",
        "LoadData(a, l1, LoadData2DParamsV2(0, 0, 4, 8, 4, 4, false, 0));",
    ),
    "a gap on the 950": ("the 950 ignores dstGap", "LoadData(a, l1, LoadData2DParams(0, 2, 1, 0, 1, false, 0));"),
    "squares to L0A on the 950": (
        "of 16-bit elements to L0B alone",
        "LoadDataWithTranspose(a, l1, LoadData2dTransposeParams(0, 1, 1, 0, 0));",
    ),
    "32-bit squares on the 950": (
        "of 16-bit elements to L0B alone",
        "LoadDataWithTranspose(b, l1, LoadData2dTransposeParams(0, 1, 1, 0, 0));",
    ),
    "k rounded up to 16 on the 950": (
        "has no kDirectionAlign",
        "MmadParams p = Of(16, 16, 8); p.kDirectionAlign = true; Load(); Mmad(c, a, b, p);",
    ),
    "a load that goes down": (
        "from L1 addresses go up",
        "auto p = Fractals(0, 1); p.addrMode = 1; LoadData(a, l1, p);",
    ),
    "squares that go down": (
        "LoadDataWithTranspose: the twin's addresses go up",
        "LoadDataWithTranspose(b, l1, LoadData2dTransposeParams(0, 1, 1, 0, 0, 1));",
    ),
    "too many steps of a load": (
        "LoadData: 256 x 1 steps; 0 to 255",
        "LoadData(a, l1, LoadData2DParamsV2(0, 0, 256, 1, 4, 4, false, 0));",
    ),
    "half a square": (
        "LoadData: 3 steps; 32-bit squares take two",
        "LoadData(a, l1, LoadData2DParamsV2(0, 0, 4, 3, 4, 4, true, 0));",
    ),
    "several matrices out": ("copies one matrix", "auto p = Out(); p.ndNum = 2; Fixpipe(y, c, p);"),
    "an odd number of columns out": ("a multiple of 16", "Fixpipe(y, c, Out(24));"),
    "a result of another type": (
        "quantPre does not fit float",
        "auto p = Out(); p.quantPre = F322BF16; Fixpipe(y, c, p);",
    ),
    "columns past a tensor's end": (
        "Fixpipe reaches byte 16640 of y|Fixpipe writes bytes 16384 to 16640 of y",
        "Load(); Mmad(c, a, b, Of(64, 64, 64)); PipeBarrier<PIPE_ALL>(); Fixpipe(y[64], c, Out());",
    ),
}


def cube_source():
    methods = "\n".join(f"    void Run{i}() {{ {body} }}" for i, (_, body) in enumerate(CASES.values()))
    calls = "\n".join(f"        case {i}: return c.Run{i}();" for i in range(len(CASES)))
    return f"""{CUBE}
{methods}
}};
extern "C" void provoke(GM_ADDR which, GM_ADDR x, GM_ADDR y) {{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
    Case c(x, y);
    switch (*reinterpret_cast<int32_t*>(which)) {{
{calls}
    }}
}}"""


@pytest.mark.parametrize(
    "arch, case", [(arch, case) for case in CASES for arch in BOTH if ONLY.get(case, arch) == arch]
)
def test_what_the_cube_would_not_do_is_refused(case, arch, twin_cache):
    which = torch.tensor([[*CASES].index(case)], dtype=torch.int32)
    x, y = torch.randn(64, 64), torch.zeros(64, 64)
    tensors = [("which", which, True), ("x", x, True), ("y", y, False)]
    with pytest.raises(KernelError, match=CASES[case][0]) as caught:
        run_source(cube_source(), "provoke", arch, [(n, t.data_ptr(), t.nbytes, f) for n, t, f in tensors], twin_cache)
    assert str(caught.value).startswith("core 0: ")


# y = 2 a b, a [m, k], b [n, k] or [k, n] in memory; summed in float, rounded to T.
PRODUCT = """
void Product{NAME}(GM_ADDR pa, GM_ADDR pb, GM_ADDR py) {{
    constexpr int C0 = 32 / sizeof({T}), M = 40, N = 48, K = 2 * 16, MB = 3, NB = 3, KB = K / C0;
    TPipe pipe;
    SetHF32Mode(HF32Mode::DISABLE);
    GlobalTensor<{T}> ga, gb;
    GlobalTensor<{T}> gy;
    ga.SetGlobalBuffer(({T}*)pa); gb.SetGlobalBuffer(({T}*)pb); gy.SetGlobalBuffer(({T}*)py);
    TQue<TPosition::A1, 1> a1; TQue<TPosition::B1, 1> b1; TQue<TPosition::A2, 1> a2; TQue<TPosition::B2, 1> b2;
    TQue<TPosition::CO1, 1> co1;
    pipe.InitBuffer(a1, 1, 48 * K * sizeof({T})); pipe.InitBuffer(b1, 1, N * K * sizeof({T}));
    pipe.InitBuffer(a2, 1, 48 * K * sizeof({T})); pipe.InitBuffer(b2, 1, N * K * sizeof({T}));
    pipe.InitBuffer(co1, 1, 48 * N * 4);
    auto a = a1.AllocTensor<{T}>(); DataCopy(a, ga, Nd2NzParams(1, M, K, 0, K, 48, 1, 0)); a1.EnQue(a);
    auto b = b1.AllocTensor<{T}>(); DataCopy(b, gb, {NZ}); b1.EnQue(b);
    a = a1.DeQue<{T}>(); b = b1.DeQue<{T}>();
    auto l = a2.AllocTensor<{T}>(), r = b2.AllocTensor<{T}>();
#if __NPU_ARCH__ == 3510
    LoadData(l, a, LoadData2DParamsV2(0, 0, MB, KB, MB, MB, false, 0));
#else
    const LoadData2DParams row(0, KB, MB, 0, 0, false, 0);
    for (int i = 0; i < MB; i++) LoadData(l[i * KB * 16 * C0], a[i * 16 * C0], row);
#endif
    {LOAD}
    a2.EnQue(l); b2.EnQue(r); a1.FreeTensor(a); b1.FreeTensor(b);
    l = a2.DeQue<{T}>(); r = b2.DeQue<{T}>();
    auto c = co1.AllocTensor<float>();
    Mmad(c, l, r, MmadParams(M, N, K, 0, false, true));
    PipeBarrier<PIPE_M>();
    Mmad(c, l, r, MmadParams(M, N, K, 0, false, false));
    co1.EnQue(c); a2.FreeTensor(l); b2.FreeTensor(r);
    c = co1.DeQue<float>();
    FixpipeParamsV220 p(N, M, 48, N, false);
    p.quantPre = {MODE};
    Fixpipe(gy, c, p);
    co1.FreeTensor(c);
}}
"""
NZ = "Nd2NzParams(1, K, N, 0, N, K, 1, 0)"
ROWS_OF_B = ("Nd2NzParams(1, N, K, 0, K, N, 1, 0)", "LoadData(r, b, LoadData2DParams(0, NB * KB, 1, 0, 0, false, 0));")
COLUMNS_OF_B = {
    (3510, 2): (
        NZ,
        "LoadData(r, b, LoadData2DParamsV2(0, 0, 2, 3, 2, 3, true, 0));",
    ),
    (3510, 4): (
        NZ,
        "LoadData(r, b, LoadData2DParamsV2(0, 0, 2, 6, 2, 3, true, 0));",
    ),
    (2201, 2): (
        NZ,
        "for (int i = 0; i < 2; i++) LoadData(r[i * 3 * 256], b[i * 256], LoadData2DParams(0, 3, 2, 0, 0, true, 0));",
    ),
    (2201, 4): (
        "Nd2NzParams(2, 16, N, 16 * N, N, 16, 1, 16 * N)",
        "for (int i = 0; i < 2; i++) LoadDataWithTranspose(r[i * 6 * 128], b[i * 6 * 128], "
        "LoadData2dTransposeParams(0, 3, 1, 0, 2));",
    ),
}


FLOATS = {
    torch.float32: ("float", "NoQuant", 1e-5),
    torch.bfloat16: ("bfloat16_t", "F322BF16", 2**-8),  # summed in float32, rounded once
    torch.float16: ("half", "F322F16", 2**-11),
}
PRODUCTS = [(dtype, columns) for dtype in FLOATS for columns in (False, True)]


def product_source(arch):
    """Every product in one library: the first argument says which."""
    text, calls = '#include "kernel_operator.h"\nusing namespace AscendC;', ""
    for i, (dtype, columns) in enumerate(PRODUCTS):
        nz, load = COLUMNS_OF_B[arch, dtype.itemsize] if columns else ROWS_OF_B
        text += PRODUCT.format(NAME=i, T=FLOATS[dtype][0], MODE=FLOATS[dtype][1], NZ=nz, LOAD=load)
        calls += f"case {i}: return Product{i}(a, b, y);"
    return f"""{text}
extern "C" void product(GM_ADDR which, GM_ADDR a, GM_ADDR b, GM_ADDR y) {{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
    switch (*reinterpret_cast<int32_t*>(which)) {{ {calls} }}
}}"""


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("dtype, columns", PRODUCTS, ids=str)
def test_a_product_is_the_matrices(dtype, columns, arch, twin_cache):
    which = torch.tensor([PRODUCTS.index((dtype, columns))], dtype=torch.int32)
    a, b = torch.randn(40, 32).to(dtype), torch.randn(32, 48).to(dtype)
    given, y = b if columns else b.T.contiguous(), torch.zeros(40, 48, dtype=dtype)
    tensors = [("which", which, True), ("a", a, True), ("b", given, True), ("y", y, False)]
    listed = [(n, t.data_ptr(), t.nbytes, f) for n, t, f in tensors]
    (core,) = run_source(product_source(arch), "product", arch, listed, twin_cache)
    torch.testing.assert_close(y.double(), 2 * (a.double() @ b.double()), rtol=FLOATS[dtype][2], atol=1e-5)
    assert (core.gm_read, core.gm_written) == ((40 + 48) * 32 * dtype.itemsize, 40 * 48 * dtype.itemsize)
    assert core.products == 2 * 3 * 3 * 32 * dtype.itemsize // 32 and core.cube == 1


# A mixed kernel has x and y of 3 x 64 floats, and a workspace of as many; AIC 0, AIV 0 and AIV 1 of each group.
MIXED = """
#include "kernel_operator.h"
using namespace AscendC;
struct Case {
    TPipe pipe;
    TBuf<TPosition::VECIN> in;
    TBuf<TPosition::VECOUT> out;
    TBuf<TPosition::A1> l1;
    GlobalTensor<float> x, y, w;
    LocalTensor<float> t, u;
    Case(GM_ADDR p, GM_ADDR q, GM_ADDR s) {
        x.SetGlobalBuffer((float*)p); y.SetGlobalBuffer((float*)q); w.SetGlobalBuffer((float*)s);
        pipe.InitBuffer(in, 256); pipe.InitBuffer(out, 256); pipe.InitBuffer(l1, 256);
        t = in.Get<float>(); u = out.Get<float>();
    }
    void Get(GlobalTensor<float> from) { PipeBarrier<PIPE_ALL>(); DataCopy(t, from, 64); PipeBarrier<PIPE_ALL>(); }
    void Put(GlobalTensor<float> to, float by) {
        PipeBarrier<PIPE_ALL>(); Muls(u, t, by, 64); PipeBarrier<PIPE_ALL>(); DataCopy(to, u, 64);
    }
    void Part(int at, int n) {
        PipeBarrier<PIPE_ALL>();
        DataCopyPad(t, x[at], DataCopyExtParams(1, n * 4, 0, 0, 0), DataCopyPadExtParams<float>());
        PipeBarrier<PIPE_ALL>(); Muls(u, t, 6.0f, n);
        PipeBarrier<PIPE_ALL>(); DataCopyPad(y[at], u, DataCopyExtParams(1, n * 4, 0, 0, 0));
    }
    int Me() { return GetBlockIdx(); }
"""
REFUSED = {
    "a workspace with no flag": (
        "core AIV 1 meets bytes 0 to 32 of workspace that core AIV 0 wrote on pipe MTE3, with no flag between them",
        "if ASCEND_IS_AIV { if (Me() == 0) { Get(x); Put(w, 2); } else Get(w); }",
    ),
    "a write over what another reads": (
        "core AIV 1 meets bytes 0 to 32 of x that core AIV 0 reads on pipe MTE2",
        "if ASCEND_IS_AIV { Get(x); if (Me() == 1) Put(x, 2); }",
    ),
    "an element that two write": (
        "core AIV 1 meets bytes 224 to 256 of y that core AIV 0 wrote on pipe MTE3",
        "if ASCEND_IS_AIV { if (Me() == 0) Part(0, 60); else Part(59, 60); }",
    ),
    "a flag of another pipe": (
        "meets bytes 0 to 32 of workspace that core AIV 0 wrote on pipe MTE3",
        "if ASCEND_IS_AIV { if (Me() == 0) { Get(x); Put(w, 2); } CrossCoreSetFlag<1, PIPE_MTE2>(3); "
        "CrossCoreWaitFlag(3); if (Me() == 1) Get(w); }",
    ),
    "a workspace nothing wrote": ("reads byte 0 of workspace, which nothing wrote", "if ASCEND_IS_AIV Get(w);"),
    "cores that all wait": (
        "deadlock: cores wait .* nobody is left to set: AIC 0 for flag 2, AIV 0 for flag 1, AIV 1 for flag 1",
        "CrossCoreWaitFlag(ASCEND_IS_AIC ? 2 : 1); CrossCoreSetFlag<2, PIPE_MTE2>(1);",
    ),
    "a flag that only one of two sets": (
        "deadlock: .*: AIC 0 for flag 4",
        "if ASCEND_IS_AIC CrossCoreWaitFlag(4); else if (Me() == 0) CrossCoreSetFlag<2, PIPE_MTE2>(4);",
    ),
    "a flag nobody waits for": (
        "core AIV 0: the kernel ended with flag 5 set for it and not waited for",
        "if ASCEND_IS_AIC CrossCoreSetFlag<2, PIPE_FIX>(5);",
    ),
    "a flag that one sets and nobody waits for": (
        "core AIV 1: the kernel ended with flag 5 set, which not every core set",
        "if ASCEND_IS_AIV if (Me() == 1) CrossCoreSetFlag<2, PIPE_MTE3>(5);",
    ),
    "a flag set again and again": (
        "flag 6 of core AIV 0 is set 15 times already",
        "if ASCEND_IS_AIC for (int i = 0; i < 16; i++) CrossCoreSetFlag<2, PIPE_FIX>(6);",
    ),
    "a flag there is not": ("no flag 16 in mode 2", "CrossCoreSetFlag<2, PIPE_MTE2>(16);"),
    "a Cube core in mode 1": ("mode 1 is between vector cores", "if ASCEND_IS_AIC CrossCoreSetFlag<1, PIPE_FIX>(0);"),
    "mode 4 on A3": ("2201 has no mode 4", "CrossCoreSetFlag<4, PIPE_MTE2>(0);"),
    "a product on a vector core": (
        "a vector core has no pipe M$",
        "if ASCEND_IS_AIV { TBuf<TPosition::A2> a; TBuf<TPosition::B2> b; TBuf<TPosition::CO1> c; "
        "pipe.InitBuffer(a, 512); pipe.InitBuffer(b, 512); pipe.InitBuffer(c, 1024); "
        "Mmad(c.Get<float>(), a.Get<float>(), b.Get<float>(), "
        "MmadParams(16, 16, 8, 0, false, true)); }",
    ),
    "L1 on a vector core": (
        "no way from GM to L1 for a vector core",
        "if ASCEND_IS_AIV DataCopy(l1.Get<float>(), x, 64);",
    ),
    "another kind on another core": (
        "KERNEL_TYPE_MIX_AIC_1_1 here, KERNEL_TYPE_MIX_AIC_1_2 on another core",
        "if ASCEND_IS_AIV { KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_1); }",
    ),
}
REFUSED_ON = {"mode 4 on A3": 2201}
RUNS = {
    "flags each way": """
        if ASCEND_IS_AIV {
            Get(x[Me() * 64]); Put(w[Me() * 64], 2); CrossCoreSetFlag<2, PIPE_MTE3>(1); CrossCoreWaitFlag(2);
            Get(w[64 - Me() * 64]); Put(y[64 - Me() * 64], 3);
        } else { CrossCoreWaitFlag(1); CrossCoreSetFlag<2, PIPE_MTE2>(2); }""",
    "vector cores alone": """
        if ASCEND_IS_AIV {
            Get(x[Me() * 64]); Put(w[Me() * 64], 2); CrossCoreSetFlag<1, PIPE_MTE3>(1); CrossCoreWaitFlag(1);
            Get(w[64 - Me() * 64]); Put(y[64 - Me() * 64], 3);
        }""",
    "all cores of a kind": """
        if ASCEND_IS_AIV {
            Get(x[Me() * 64]); Put(w[Me() * 64], 2); CrossCoreSetFlag<0, PIPE_MTE3>(1); CrossCoreWaitFlag(1);
            Get(w[64 - Me() * 64]); Put(y[64 - Me() * 64], 3);
        }""",
    "a workspace in turns": """
        if ASCEND_IS_AIV for (int i = 0; i < 3; i++) {
            if (Me() == i % 2) { Get(x[i % 2 * 64]); Put(w, 2); }
            CrossCoreSetFlag<1, PIPE_MTE3>(1); CrossCoreWaitFlag(1);
            if (Me() != i % 2) { Get(w); Put(y[i % 2 * 64], 3); PipeBarrier<PIPE_ALL>(); }
            CrossCoreSetFlag<1, PIPE_MTE2>(1); CrossCoreWaitFlag(1);
        }""",
}


NAMED = {  # on the 950 a wait may name its pipe, and a flag reach one vector core
    "parts of a block": "if ASCEND_IS_AIV { if (Me() == 0) { Part(0, 60); Part(124, 4); } else Part(60, 64); }",
    "a pipe that did not wait": """
        if ASCEND_IS_AIV {
            if (Me() == 0) { Get(x); Put(w, 2); }
            CrossCoreSetFlag<1, PIPE_MTE3>(1);
            if (Me() == 0) return CrossCoreWaitFlag(1);
            CrossCoreWaitFlag<1, PIPE_MTE3>(1); DataCopy(t, w, 64);
        }""",
    "a pipe that waited": """
        if ASCEND_IS_AIV {
            if (Me() == 0) { Get(x); Put(w, 2); }
            CrossCoreSetFlag<1, PIPE_MTE3>(1);
            if (Me() == 0) return CrossCoreWaitFlag(1);
            CrossCoreWaitFlag<1, PIPE_MTE2>(1); DataCopy(t, w, 64);
        }""",
    "mode 4": """
        if ASCEND_IS_AIV {
            Get(x[Me() * 64]); Put(y[Me() * 64], 6);
            CrossCoreSetFlag<4, PIPE_MTE3>(1); CrossCoreWaitFlag<4, PIPE_S>(2);
        } else {
            CrossCoreWaitFlag<4>(1 + 16); CrossCoreWaitFlag<4>(1);
            CrossCoreSetFlag<4, PIPE_FIX>(2); CrossCoreSetFlag<4, PIPE_FIX>(2 + 16);
        }""",
}


def mixed(case, arch, cache, groups=1):
    bodies = [body for _, body in REFUSED.values()] + [*RUNS.values(), *NAMED.values()]
    methods = "\n".join(f"    void Run{i}() {{ {body} }}" for i, body in enumerate(bodies))
    calls = "\n".join(f"        case {i}: return c.Run{i}();" for i in range(len(bodies)))
    text = f"""{MIXED}
{methods}
}};
extern "C" void mixed(GM_ADDR which, GM_ADDR x, GM_ADDR y, GM_ADDR w) {{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    Case c(x, y, w);
    switch (*reinterpret_cast<int32_t*>(which)) {{
{calls}
    }}
}}"""
    which = torch.tensor([[*REFUSED, *RUNS, *NAMED].index(case)], dtype=torch.int32)
    x, y, w = torch.randn(2, 64), torch.zeros(2, 64), torch.zeros(2, 64)
    tensors = [("which", which, True), ("x", x, True), ("y", y, False), ("workspace", w, False)]
    listed = [(n, t.data_ptr(), t.nbytes, f) for n, t, f in tensors]
    return x, y, run_source(text, "mixed", arch, listed, cache, groups, ["workspace"])


@pytest.mark.parametrize("case", REFUSED)
def test_cores_that_do_not_wait_are_refused(case, twin_cache):
    with pytest.raises(KernelError, match=REFUSED[case][0]):
        mixed(case, REFUSED_ON.get(case, 3510), twin_cache)


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("arch", BOTH)
def test_cores_that_wait_run_and_are_counted(case, arch, twin_cache):
    x, y, cores = mixed(case, arch, twin_cache)
    assert torch.equal(y, 6 * x)
    assert [c.cube for c in cores] == [1, 0, 0]
    assert sum(c.gm_read + c.gm_written for c in cores) in (1024, 1536)  # the last case goes round three times
    assert sum(c.scratch_read for c in cores) == sum(c.scratch_written for c in cores) in (512, 768)


def test_a_pipe_that_did_not_wait_is_refused(twin_cache):
    with pytest.raises(KernelError, match="DataCopy on pipe MTE2: core AIV 1 meets bytes 0 to 32 of workspace"):
        mixed("a pipe that did not wait", 3510, twin_cache)
    with pytest.raises(KernelError, match="byte 0 of y was never written"):  # it goes all the way
        mixed("a pipe that waited", 3510, twin_cache)


def test_mode_4_reaches_one_vector_core(twin_cache):
    x, y, _ = mixed("mode 4", 3510, twin_cache)
    assert torch.equal(y, 6 * x)


def test_cores_may_write_side_by_side_in_a_block(twin_cache):
    x, y, _ = mixed("parts of a block", 3510, twin_cache)
    assert torch.equal(y, 6 * x)


def test_products_of_float32_say_how_they_are_rounded(twin_cache):
    """The mode is a register of the core, which another kernel may have set."""
    text = """
#include "kernel_operator.h"
using namespace AscendC;
extern "C" void k(GM_ADDR x) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
    TPipe pipe; TBuf<TPosition::A2> a; TBuf<TPosition::B2> b; TBuf<TPosition::CO1> c;
    pipe.InitBuffer(a, 512); pipe.InitBuffer(b, 512); pipe.InitBuffer(c, 1024);
    Mmad(c.Get<float>(), a.Get<float>(), b.Get<float>(), MmadParams(16, 16, 8, 0, false, true));
}"""
    with pytest.raises(KernelError, match="depends on SetHF32Mode, which nothing called"):
        run_source(text, "k", 2201, [("x", 0, 0, True)], twin_cache)


def test_vector_kernels_have_no_flags(twin_cache):
    text = """
#include "kernel_operator.h"
using namespace AscendC;
extern "C" void k(GM_ADDR x) { CrossCoreWaitFlag(1); }"""
    with pytest.raises(KernelError, match="cores of KERNEL_TYPE_AIV_ONLY cannot wait for each other"):
        run_source(text, "k", 2201, [("x", 0, 0, True)], twin_cache)


def test_more_cores_than_the_twin_tells_apart_are_refused(twin_cache):
    with pytest.raises(KernelError, match="255 cores; 1 to 254 are possible"):
        mixed("vector cores alone", 3510, twin_cache, groups=85)


def test_the_kind_of_a_kernel_comes_first(twin_cache):
    text = """
#include "kernel_operator.h"
using namespace AscendC;
extern "C" void k(GM_ADDR x) { PipeBarrier<PIPE_ALL>(); GlobalTensor<int> g; g.SetGlobalBuffer((int*)x); g.GetValue(0);
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_1); }"""
    x = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelError, match="KERNEL_TASK_TYPE comes first in a kernel"):
        run_source(text, "k", 2201, [("x", x.data_ptr(), 4, True)], twin_cache)
