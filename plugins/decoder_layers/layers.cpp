#include "layers.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "../quantized_matmul/lanes.h"
#include "../quantized_matmul/scratch.h"
#include "../quantized_matmul/threads.h"

namespace forgeline {
namespace {

constexpr int64_t ROWS_PER_TASK = 16;  // of rotary embedding, about 5 µs

class Run {
public:
    Run(const std::vector<DecoderLayer>& layers, const LayersStep& step, Threads& threads)
        : m_layers(layers), m_step(step), m_threads(threads) {}

    void operator()() {
        int64_t qkv = 0, heads = 0, gated = 0;
        for (const DecoderLayer& layer : m_layers) {
            qkv = std::max(qkv, layer.qkv.shape.outputs);
            heads = std::max(heads, layer.output.shape.width);
            gated = std::max(gated, layer.down.shape.width);
        }
        const int64_t hidden = m_layers[0].qkv.shape.width, tokens = m_step.num_tokens, most = std::max(tokens, m_step.num_rows);
        thread_local Scratch scratch;
        float* stream = reinterpret_cast<float*>(scratch.at_least(most * (hidden + qkv + heads + gated) * sizeof(float)));
        float* projected = stream + most * hidden;
        float* attended = projected + most * qkv;
        float* product = attended + most * heads;

        const float* x = m_step.x;
        int64_t rows = tokens;
        for (const DecoderLayer& layer : m_layers) {
            const bool last = &layer == &m_layers.back();
            apply(layer.qkv, x, nullptr, tokens, projected);
            rotate(layer, projected);
            attend(layer, projected, attended);
            float* to = last ? m_step.y : stream;
            if (last && m_step.rows) {
                rows = m_step.num_rows;
                pick(attended, layer.output.shape.width, projected);
                pick(x, hidden, to);
                apply(layer.output, projected, to, rows, to);
            } else {
                apply(layer.output, attended, x, rows, to);
            }
            apply(layer.gate_up, to, nullptr, rows, product);
            apply(layer.down, product, to, rows, to);
            x = stream;
        }
    }

private:
    void apply(const Matrix& matrix, const float* x, const float* residual, int64_t rows, float* y) {
        multiply(matrix.shape, matrix.packed, x, matrix.norm, residual, rows, y, m_threads);
    }

    // q and k of each token, in place; v is left as it is, but for its bias.
    void rotate(const DecoderLayer& layer, float* projected) {
        const int64_t width = layer.qkv.shape.outputs, half = layer.attention.head_dim / 2;
        const int64_t heads = layer.attention.num_heads, turning = heads + layer.attention.num_kv_heads;
        const int64_t tokens = m_step.num_tokens, tasks = (tokens + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
        m_threads.run(tasks, [&](int64_t task) {
            for (int64_t t = tokens * task / tasks; t < tokens * (task + 1) / tasks; ++t) {
                float* row = projected + t * width;
                for (int64_t i = 0; layer.bias && i < width; i += LANES)
                    _mm512_storeu_ps(row + i, _mm512_add_ps(_mm512_loadu_ps(row + i), _mm512_loadu_ps(layer.bias + i)));
                for (int64_t head = 0; head < turning; ++head, row += 2 * half) {
                    if (const float* norm = head < heads ? layer.q_norm : layer.k_norm)
                        normalize(row, norm, layer.head_epsilon, 2 * half);
                    turn(row, m_step.cos + t * half, m_step.sin + t * half, half);
                }
            }
        });
    }

    static void normalize(float* head, const float* norm, float epsilon, int64_t dim) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < dim; i += LANES) squares = _mm512_fmadd_ps(_mm512_loadu_ps(head + i), _mm512_loadu_ps(head + i), squares);
        const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(dim) + epsilon));
        for (int64_t i = 0; i < dim; i += LANES)
            _mm512_storeu_ps(head + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(head + i), factor), _mm512_loadu_ps(norm + i)));
    }

    static void turn(float* head, const float* cosines, const float* sines, int64_t half) {
        for (int64_t i = 0; i < half; i += LANES) {
            const __mmask16 mask = half - i < LANES ? __mmask16((1u << (half - i)) - 1) : __mmask16(0xFFFF);
            const __m512 cos = _mm512_maskz_loadu_ps(mask, cosines + i), sin = _mm512_maskz_loadu_ps(mask, sines + i);
            const __m512 a = _mm512_maskz_loadu_ps(mask, head + i), b = _mm512_maskz_loadu_ps(mask, head + half + i);
            _mm512_mask_storeu_ps(head + i, mask, _mm512_fmsub_ps(a, cos, _mm512_mul_ps(b, sin)));
            _mm512_mask_storeu_ps(head + half + i, mask, _mm512_fmadd_ps(b, cos, _mm512_mul_ps(a, sin)));
        }
    }

    void attend(const DecoderLayer& layer, const float* projected, float* out) {
        const AttentionShape& shape = layer.attention;
        if (!m_attention || !(m_shape == shape)) {
            m_attention = std::make_unique<Attention>(shape, m_step.sequences, m_threads);
            m_shape = shape;
        }
        const float* k = projected + shape.num_heads * shape.head_dim;
        const int64_t width = layer.qkv.shape.outputs;
        m_attention->run({projected, k, k + shape.num_kv_heads * shape.head_dim, width, width, layer.key_pool, layer.value_pool, out});
    }

    void pick(const float* from, int64_t width, float* to) const {
        for (int64_t i = 0; i < m_step.num_rows; ++i)
            std::memcpy(to + i * width, from + m_step.rows[i] * width, width * sizeof(float));
    }

    const std::vector<DecoderLayer>& m_layers;
    const LayersStep& m_step;
    Threads& m_threads;
    std::unique_ptr<Attention> m_attention;  // of the last layer's shape
    AttentionShape m_shape{};
};

}  // namespace

void run_layers(const std::vector<DecoderLayer>& layers, const LayersStep& step, Threads& threads) {
    if (step.num_tokens) Run(layers, step, threads)();
}

}  // namespace forgeline
