#pragma once

#include "twin_host.h"

#define TWIN_JOIN2(a, b) a##b
#define TWIN_JOIN(a, b) TWIN_JOIN2(a, b)
#define IMPL_OP_INFERSHAPE(type) static auto& TWIN_JOIN(twin_registered_, __COUNTER__) = twin::implementation
#define IMPL_OP_OPTILING(type) static auto& TWIN_JOIN(twin_registered_, __COUNTER__) = twin::implementation
