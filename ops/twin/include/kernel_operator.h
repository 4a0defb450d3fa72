// The subset of the public Ascend C interface that the kernels use, on a CPU. Names, argument orders and enums are those
// of the device's headers; nothing else of them is here.
#pragma once

#include "twin/atomic.h"
#include "twin/cube.h"
#include "twin/vector.h"

#define REGISTER_TILING_DEFAULT(type)
#define GET_TILING_DATA_WITH_STRUCT(type, name, address) \
    type name;                                           \
    std::memcpy(&name, address, sizeof(type))
