// The subset of the public Ascend C interface that the kernels use, on a CPU. Names, argument orders and enums are those
// of the device's headers; nothing else of them is here.
#pragma once

#include "twin/vector.h"

#define KERNEL_TASK_TYPE_DEFAULT(type)
#define KERNEL_TYPE_AIV_ONLY 0
#define REGISTER_TILING_DEFAULT(type)
#define GET_TILING_DATA_WITH_STRUCT(type, name, address) \
    type name;                                           \
    std::memcpy(&name, address, sizeof(type))
