// Matrix multiplication with integer weights on AVX512-VNNI.
//
//   y[m, n] = sum over groups g of  scale_x[m, g] * scale_w[n, g] * sum over k in g of  q_x[m, k] * q_w[n, k]
//
// Inputs are rounded to 8 bits here, one scale for `input_group` values of a row. Weights have 4 bits and one scale for `group`
// values of a row, or 8 bits and one scale for a row. Integer sums are exact and floats are added in the order of the groups, so a row's result does not depend on
// the rows beside it, on the number of threads, or on the tile that computed it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forgeline {

class Threads;

struct Shape {
    int64_t outputs;      // rows of the weight matrix; with `gated` twice the outputs
    int64_t width;        // columns: inputs, a multiple of 32
    int32_t bits;         // 4 or 8
    int32_t group;        // columns under one weight scale and in one integer sum: 32, 64 or 128; the last may be shorter
    int32_t input_group;  // input values under one scale: a multiple of `group`; the last may be shorter
    bool zero_points;     // 4 bits, unsigned, with a zero point beside each scale; otherwise weights are signed
    float epsilon;        // of the RMS norm that the inputs go through first; used with `norm` below
    bool gated;           // y = silu(first half) * second half

    int offset() const { return zero_points ? 0 : bits == 4 ? 8 : 128; }  // weights are stored unsigned, larger by this
    int64_t groups() const { return (width + group - 1) / group; }
    int64_t panels() const { return (outputs + 31) / 32; }
    int64_t scales() const { return bits == 4 ? groups() : 1; }  // of a row of weights
    size_t panel_bytes() const { return size_t(scales()) * (32 * sizeof(float) + zero_points * 64) + size_t(width) * 32 * bits / 8; }
    size_t packed_bytes() const { return size_t(panels()) * panel_bytes(); }
};

// Weights as ONNX stores them (int8 [outputs, width]; 4 bits two in a byte, the first in the low half), scales f32 [outputs,
// scales_per_row], which divides the width, and zero points, uint8 like the scales, or null → panels of 32 rows, in the order the kernel reads them.
void pack(const Shape& shape, const uint8_t* weights, const float* scales, const uint8_t* zero_points, int64_t scales_per_row,
          uint8_t* packed);

// x f32 [rows, width] → y f32 [rows, outputs, or half of them when gated].
// norm: f32 [width], multiplies x / sqrt(mean(x * x) + epsilon) before it is rounded; or null, then x is rounded as it is.
// residual: f32, of the shape of y, is added to it; or null. It may be y itself.
void multiply(const Shape& shape, const uint8_t* packed, const float* x, const float* norm, const float* residual, int64_t rows,
              float* y, Threads& threads);

}  // namespace forgeline
