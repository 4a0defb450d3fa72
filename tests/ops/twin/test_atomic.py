"""Atomics of the scalar unit: the 950 has them, order among cores that add is not needed, any other use is refused."""

import pytest
import torch

from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import FOLDER, run_source

HEAD = """
#include "kernel_operator.h"
using namespace AscendC;
extern "C" __global__ void provoke(GM_ADDR place, GM_ADDR y)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    uint32_t* counter = (uint32_t*)place;
    GlobalTensor<uint32_t> seen;
    seen.SetGlobalBuffer(counter);
    TPipe pipe;
    TBuf<TPosition::VECOUT> buf;
    pipe.InitBuffer(buf, 256);
    LocalTensor<uint32_t> t = buf.Get<uint32_t>();
    GlobalTensor<uint32_t> out;
    out.SetGlobalBuffer((uint32_t*)y);
    const int me = GetBlockIdx();
    const auto Set = [] {
        SetFlag<HardEvent::S_MTE3>(EVENT_ID0);
        WaitFlag<HardEvent::S_MTE3>(EVENT_ID0);
        CrossCoreSetFlag<0, PIPE_MTE3>(1);
    };
"""
REFUSED = {
    "a cached read of what cores add to": (
        "cores add to: the scalar unit's cache may hold another value",
        "AtomicAdd(counter, uint32_t(1)); seen.GetValue(0);",
    ),
    "a write that nothing orders": (
        "AtomicAdd on pipe S: core 1 meets bytes 0 to 32 of place that core 0 wrote|"
        "AtomicExch on pipe S: core 0 meets bytes 0 to 32 of place that core 1 adds to",
        "if (me == 0) AtomicExch(counter, uint32_t(5)); else AtomicAdd(counter, uint32_t(1));",
    ),
    "an address between two": (
        "AtomicAdd: an address that is no multiple of 4",
        "AtomicAdd((uint32_t*)(place + 2), uint32_t(1));",
    ),
    "an address elsewhere": (
        "AtomicAdd: an address in no tensor",
        "uint32_t own = 0; AtomicAdd(&own, uint32_t(1));",
    ),
    "a number past the end": ("AtomicAdd: an address in no tensor", "AtomicAdd(counter + 16, uint32_t(1));"),
}


def run(body, arch, cache, cores=2, filled=True, start=0):
    place, y = torch.full((16,), start, dtype=torch.int32), torch.zeros(64 * 8, dtype=torch.int32)
    tensors = [("place", place.data_ptr(), place.nbytes, filled), ("y", y.data_ptr(), y.nbytes, True)]
    run_source(f"{HEAD}\n{body}\n}}", "provoke", arch, tensors, cache, cores=cores)
    return place, y


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_950_would_not_do_right_is_refused(name, twin_cache):
    message, body = REFUSED[name]
    with pytest.raises(KernelError, match=message):
        run(body, 3510, twin_cache)


def test_a3_has_none(twin_cache):
    for body in ("AtomicAdd(counter, uint32_t(1));", "AtomicExch(counter, uint32_t(1));"):
        with pytest.raises(KernelError, match="2201 has no atomics of the scalar unit"):
            run(body, 2201, twin_cache)


def test_a_counter_that_nobody_set_is_refused(twin_cache):
    with pytest.raises(KernelError, match="AtomicAdd reads byte 0 of place, which nothing wrote"):
        run("AtomicAdd(counter, uint32_t(1));", 3510, twin_cache, filled=False)


TAKES = """
    if (me == 0) AtomicExch(counter, uint32_t(100));
    Set();
    CrossCoreWaitFlag(1);
    uint32_t place_of[4];
    for (int i = 0; i < 4; i++) place_of[i] = AtomicAdd(counter, uint32_t(1));
    for (int i = 0; i < 8; i++) t.SetValue(i, i < 4 ? place_of[i] : 0);
    SetFlag<HardEvent::S_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::S_MTE3>(EVENT_ID0);
    DataCopyPad(out[me * 64], t, DataCopyExtParams(1, 32, 0, 0, 0));
"""


def test_every_number_is_given_once_and_the_one_after_the_last_is_left(twin_cache):
    place, y = run(TAKES, 3510, twin_cache, cores=8, start=-7)
    taken = sorted(y.view(8, 64)[:, :4].flatten().tolist())
    assert taken == list(range(100, 132)) and place[0] == 132


STEALING = """
extern "C" __global__ void stealing(GM_ADDR place, GM_ADDR y)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    TPipe pipe;
    TBuf<TPosition::VECCALC> buf;
    pipe.InitBuffer(buf, 4096);
    AscendC::LocalTensor<float> t = buf.Get<float>();
    balance::Counter counter(place, GetBlockNum());
    for (uint32_t mine = GetBlockIdx(); mine < 40; mine = counter.Take())
        for (uint32_t i = 0; i < (mine == 0 ? 200 : 10); i++) Duplicate(t, 1.0f, 1024);
}
"""


def test_a_core_with_a_long_task_takes_fewer(twin_cache):
    """Four cores, forty tasks, one of them twenty times as long: the other cores share the rest evenly."""
    place, y = torch.zeros(16, dtype=torch.int32), torch.zeros(8)
    tensors = [("place", place.data_ptr(), place.nbytes, True), ("y", y.data_ptr(), y.nbytes, True)]
    text = f'#include "{FOLDER / "common/op_kernel/counter.h"}"\nusing namespace AscendC;\n{STEALING}'
    cores = run_source(text, "stealing", 3510, tensors, twin_cache, cores=4)
    assert [c.repeats for c in cores] == [200 * 16, 130 * 16, 130 * 16, 130 * 16]
