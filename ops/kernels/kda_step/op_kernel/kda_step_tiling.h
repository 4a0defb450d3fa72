// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct KdaStepTiling {
    uint32_t heads, key, value;  // of one sequence; the state of a head is [value, key]
    uint32_t unit;               // rows of a state that are handed out together
    uint32_t units;              // of all sequences and heads
    uint32_t tile;               // most rows of a state in UB at once
    uint32_t has_gate;           // decay is raw: bias and log_rate make it
    uint32_t beta_logits;        // beta is before its sigmoid
    float scale, norm_eps, lower_bound;
};
