// Decoder layers, one after the other, on the kernels of quantized_matmul and paged_attention:
//
//   x = x + output(attention(rotary(qkv(norm(x)))))
//   x = x + down(silu(gate(norm(x))) * up(norm(x)))
//
// Threads stay awake from the first layer to the last (threads.h): between two kernels of a small batch there is less than a
// microsecond, where nodes of OpenVINO's graph cost 3 to 24.
#pragma once

#include <cstdint>
#include <vector>

#include "../paged_attention/native/attention.h"
#include "../quantized_matmul/kernels.h"

namespace forgeline {

struct Matrix {
    Shape shape;
    const uint8_t* packed;
    const float* norm;  // of its inputs; or null
};

struct DecoderLayer {
    Matrix qkv, output, gate_up, down;
    const float* bias;      // of q, k and v, or null
    const float* q_norm;    // of each head, [D], before it turns; or null
    const float* k_norm;
    float head_epsilon;     // of both
    AttentionShape attention;
    uint8_t* key_pool;
    uint8_t* value_pool;
};

struct LayersStep {
    const float* x;    // [T, hidden]
    const float* cos;  // [T, D / 2]: a head's first half turns with its second
    const float* sin;
    int64_t num_tokens;
    Sequences sequences;
    const int32_t* rows;  // whose result is wanted, or null: all; others end with the last attention
    int64_t num_rows;
    float* y;  // [T or num_rows, hidden]
};

void run_layers(const std::vector<DecoderLayer>& layers, const LayersStep& step, Threads& threads);

}  // namespace forgeline
