#include "kernels.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "lanes.h"
#include "scratch.h"
#include "threads.h"

namespace forgeline {
namespace {

constexpr int PANEL = 2 * LANES;         // outputs of a panel, as two registers
constexpr int ZEROS_BYTES = 64;          // of a panel's zero points, padded: weights begin on a cache line
constexpr int MAX_ROWS = 12;             // of a tile: 24 registers of sums, 2 of weights, 2 of inputs
constexpr int IN_REGISTERS = 4;          // rows up to which a tile keeps its float sums, and two integer sums, in registers
constexpr int PREFETCH = 4096;           // bytes ahead; the hardware's prefetcher stops at pages
constexpr int64_t SMALL_ROWS = 4;        // whose inputs one thread rounds: less work than waking another
constexpr int64_t BLOCK_BYTES = 384 << 10;  // of rounded inputs that stay in the second-level cache while panels pass
constexpr int64_t SHARES_AWAKE = 2;       // of a small batch per thread, where grabbing one is cheap
constexpr int64_t TASKS_PER_THREAD = 8;   // where there are rows enough: the last to end waits for little

struct Rounded {  // inputs, by group, then by row
    const int8_t* values;
    const float* scales;
    const int32_t* sums;  // of the values of a group; where weights are stored larger by an offset, times its negative
    int64_t rows;
};

struct Target {
    float* y;
    const float* residual;  // or null
    int64_t stride;         // outputs of a row
};

INLINE __m512 exp_of(__m512 x) {
    // 2^n * p(r) with x = (n + r) ln 2; Cephes' polynomial, relative error below 2e-7
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.3f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

INLINE __m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp_of(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// *sum += x * y. Left to the compiler, loads of all sums move up and push others out of their registers: a quarter of a large step.
INLINE void add_product(float* sum, __m512 x, __m512 y) {
    asm volatile("vfmadd213ps %1, %2, %0\n\tvmovaps %0, %1" : "+v"(x), "+m"(*reinterpret_cast<__m512*>(sum)) : "v"(y));
}

INLINE __mmask16 first_lanes(int64_t count) { return __mmask16((1u << std::clamp<int64_t>(count, 0, LANES)) - 1); }

// Out of line, or their constants would take the registers of the tile's sums.
__attribute__((noinline)) void write(const float* kept, int rows, const Target& to, int64_t row, int64_t column) {
    const __mmask16 masks[2] = {first_lanes(to.stride - column), first_lanes(to.stride - column - LANES)};
    for (int m = 0; m < rows; ++m, kept += PANEL) {
        const int64_t at = (row + m) * to.stride + column;
        for (int b = 0; b < 2; ++b) {
            __m512 sum = _mm512_load_ps(kept + b * LANES);
            if (to.residual) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(masks[b], to.residual + at + b * LANES), sum);
            _mm512_mask_storeu_ps(to.y + at + b * LANES, masks[b], sum);
        }
    }
}

__attribute__((noinline)) void write_gated(const float* kept, int rows, const Target& to, int64_t row, int64_t column) {
    const __mmask16 mask = first_lanes(to.stride - column);
    for (int m = 0; m < rows; ++m, kept += PANEL) {
        const int64_t at = (row + m) * to.stride + column;
        __m512 product = _mm512_mul_ps(silu(_mm512_load_ps(kept)), _mm512_load_ps(kept + LANES));
        if (to.residual) product = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to.residual + at), product);
        _mm512_mask_storeu_ps(to.y + at, mask, product);
    }
}

// One panel of 32 outputs, from `column` on, for ROWS rows, from `row` on.
template <int BITS, bool ZEROS, int GROUP, int ROWS>
__attribute__((noinline)) void tile(const Shape& shape, const uint8_t* panel, const Rounded& in, int64_t row, const Target& to,
                                    int64_t column) {
    constexpr bool SMALL = ROWS <= IN_REGISTERS;
    constexpr int STEP = BITS == 4 ? 128 : 256;  // bytes of eight columns
    const __m512i low = _mm512_set1_epi8(15);
    const int64_t groups = shape.groups();
    const float* row_scales = reinterpret_cast<const float*>(panel);  // with 8 bits
    if constexpr (BITS == 8) panel += PANEL * sizeof(float);
    alignas(64) float kept[ROWS * PANEL];
    __m512 sums[SMALL ? ROWS * 2 : 1];
    each<ROWS * 2>([&](auto i) __attribute__((always_inline)) {
        if constexpr (SMALL) sums[i] = _mm512_setzero_ps();
        else _mm512_store_ps(kept + i * LANES, _mm512_setzero_ps());
    });
    for (int64_t g = 0; g < groups; ++g) {
        const float* scales = reinterpret_cast<const float*>(panel);
        const uint8_t* zero_points = panel + PANEL * sizeof(float);
        const uint8_t* weights = BITS == 4 ? zero_points + ZEROS * ZEROS_BYTES : panel;
        const int columns_here = int(std::min<int64_t>(GROUP, shape.width - g * GROUP));
        panel = weights + size_t(columns_here) * PANEL * BITS / 8;
        const int64_t at = g * in.rows + row;
        const int8_t* values = in.values + at * GROUP;
        __m512i acc[ROWS * 2], second[SMALL ? ROWS * 2 : 1];
        each<ROWS>([&](auto m) __attribute__((always_inline)) {
            acc[m * 2] = acc[m * 2 + 1] = ZEROS ? _mm512_setzero_si512() : _mm512_set1_epi32(in.sums[at + m]);
            if constexpr (SMALL) second[m * 2] = second[m * 2 + 1] = _mm512_setzero_si512();
        });
#pragma GCC unroll 1
        for (int k = 0; k < columns_here; k += 8, weights += STEP) {
            __m512i both[2], w[2];
            each<2>([&](auto b) __attribute__((always_inline)) {
                _mm_prefetch(reinterpret_cast<const char*>(weights + b * 64 + PREFETCH), _MM_HINT_T0);
                if constexpr (BITS == 4) {
                    both[b] = _mm512_loadu_si512(weights + b * 64);
                    w[b] = _mm512_and_si512(both[b], low);
                } else {
                    _mm_prefetch(reinterpret_cast<const char*>(weights + b * 64 + 128 + PREFETCH), _MM_HINT_T0);
                    w[b] = _mm512_loadu_si512(weights + b * 64);
                }
            });
            each<ROWS>([&](auto m) __attribute__((always_inline)) {
                const __m512i x = four_bytes(values + m * GROUP + k);
                dot(acc[m * 2], w[0], x);
                dot(acc[m * 2 + 1], w[1], x);
            });
            each<2>([&](auto b) __attribute__((always_inline)) {
                if constexpr (BITS == 4) w[b] = _mm512_and_si512(_mm512_srli_epi16(both[b], 4), low);
                else w[b] = _mm512_loadu_si512(weights + b * 64 + 128);
            });
            each<ROWS>([&](auto m) __attribute__((always_inline)) {
                const __m512i x = four_bytes(values + m * GROUP + k + 4);
                each<2>([&](auto b) __attribute__((always_inline)) {
                    if constexpr (SMALL) dot(second[m * 2 + b], w[b], x);
                    else dot(acc[m * 2 + b], w[b], x);
                });
            });
        }
        each<2>([&](auto b) __attribute__((always_inline)) {
            __m512 scale, zero;
            if constexpr (BITS == 4) scale = _mm512_loadu_ps(scales + b * LANES);
            if constexpr (ZEROS) {
                const void* from = zero_points + b * LANES;
                zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
            }
            each<ROWS>([&](auto m) __attribute__((always_inline)) {
                constexpr int i = m * 2 + b;
                __m512 both_scales = _mm512_set1_ps(in.scales[at + m]);
                if constexpr (BITS == 4) both_scales = _mm512_mul_ps(scale, both_scales);
                __m512i sum = acc[i];
                if constexpr (SMALL) sum = _mm512_add_epi32(sum, second[i]);
                __m512 total = _mm512_cvtepi32_ps(sum);
                if constexpr (ZEROS) total = _mm512_fnmadd_ps(zero, _mm512_set1_ps(float(in.sums[at + m])), total);  // exact: < 2^24
                if constexpr (SMALL) {
                    sums[i] = _mm512_fmadd_ps(total, both_scales, sums[i]);
                } else {
                    add_product(kept + i * LANES, total, both_scales);
                }
            });
        });
    }
    each<ROWS * 2>([&](auto i) __attribute__((always_inline)) {
        __m512 sum;
        if constexpr (SMALL) sum = sums[i];
        else if constexpr (BITS == 8) sum = _mm512_load_ps(kept + i * LANES);
        if constexpr (BITS == 8) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(row_scales + i % 2 * LANES));
        if constexpr (SMALL || BITS == 8) _mm512_store_ps(kept + i * LANES, sum);
    });
    if (shape.gated) write_gated(kept, ROWS, to, row, column);
    else write(kept, ROWS, to, row, column);
}

using Tile = void (*)(const Shape&, const uint8_t*, const Rounded&, int64_t, const Target&, int64_t);

template <int BITS, bool ZEROS, int GROUP, int... I>
const Tile* tiles_of(std::integer_sequence<int, I...>) {
    static const Tile table[] = {tile<BITS, ZEROS, GROUP, I + 1>...};
    return table;
}

template <int BITS, bool ZEROS>
const Tile* tiles_of(int group) {
    constexpr std::make_integer_sequence<int, MAX_ROWS> rows;
    return group == 128 ? tiles_of<BITS, ZEROS, 128>(rows) : group == 64 ? tiles_of<BITS, ZEROS, 64>(rows) : tiles_of<BITS, ZEROS, 32>(rows);
}

const Tile* tiles_of(const Shape& shape) {
    if (shape.bits == 8) return tiles_of<8, false>(shape.group);
    return shape.zero_points ? tiles_of<4, true>(shape.group) : tiles_of<4, false>(shape.group);
}

// Row `m` to integers: round(x / (largest / 127)), ties to even.
void round_row(const Shape& shape, const float* x, int64_t m, int64_t rows, int8_t* values, float* scales, int32_t* sums) {
    const int per_scale = shape.input_group / shape.group, factor = shape.zero_points ? 1 : -shape.offset();
    for (int64_t begin = 0; begin < shape.groups(); begin += per_scale) {
        const float* from = x + begin * shape.group;
        const float* end = x + std::min(shape.width, (begin + per_scale) * shape.group);
        __m512 largest = _mm512_setzero_ps();
        __mmask16 not_numbers = 0;  // a NaN makes its group's scale one, and so the row; a maximum would lose it
        for (const float* p = from; p < end; p += LANES) {
            const __m512 value = _mm512_loadu_ps(p);
            largest = _mm512_max_ps(largest, _mm512_abs_ps(value));
            not_numbers |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        }
        const float scale = not_numbers ? NAN : _mm512_reduce_max_ps(largest) / 127.0f;
        const __m512 divisor = _mm512_set1_ps(scale > 0.0f ? scale : 1.0f);
        for (int64_t g = begin; from < end; ++g) {
            int8_t* to = values + (g * rows + m) * shape.group;
            const float* stop = std::min(end, from + shape.group);
            __m512i sum = _mm512_setzero_si512();
            for (; from < stop; from += LANES, to += LANES) {
                const __m512i q = _mm512_cvtps_epi32(_mm512_div_ps(_mm512_loadu_ps(from), divisor));
                sum = _mm512_add_epi32(sum, q);
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(q));
            }
            scales[g * rows + m] = scale;
            sums[g * rows + m] = _mm512_reduce_add_epi32(sum) * factor;
        }
    }
}

// In memory of this thread, until it is called again.
const float* normalized(const Shape& shape, const float* x, const float* norm) {
    thread_local Scratch scratch;
    float* to = reinterpret_cast<float*>(scratch.at_least(shape.width * sizeof(float)));
    __m512 squares = _mm512_setzero_ps();
    for (int64_t k = 0; k < shape.width; k += LANES) {
        const __m512 value = _mm512_loadu_ps(x + k);
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(shape.width) + shape.epsilon));
    for (int64_t k = 0; k < shape.width; k += LANES)
        _mm512_storeu_ps(to + k, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + k), factor), _mm512_loadu_ps(norm + k)));
    return to;
}

}  // namespace

void pack(const Shape& shape, const uint8_t* weights, const float* scales, const uint8_t* zero_points, int64_t scales_per_row,
          uint8_t* packed) {
    const int sign = shape.zero_points ? 0 : 0x88;  // of two's complement, flipped: the weight plus 8
    const int64_t half = shape.outputs / 2;
    const int64_t columns_per_scale = shape.width / scales_per_row;
    Arena().run(shape.panels(), [&](int64_t panel) {
        uint8_t* to = packed + panel * shape.panel_bytes();
        int64_t rows[PANEL];  // of the matrix; -1 where there is none
        for (int lane = 0; lane < PANEL; ++lane) {
            const int64_t row = shape.gated ? panel * LANES + lane % LANES + (lane < LANES ? 0 : half) : panel * PANEL + lane;
            const bool exists = shape.gated ? panel * LANES + lane % LANES < half : row < shape.outputs;
            rows[lane] = exists ? row : -1;
        }
        for (int64_t g = 0; g < shape.groups(); ++g) {
            if (g < shape.scales()) {
                float* scale = reinterpret_cast<float*>(to);
                to += PANEL * sizeof(float);
                for (int lane = 0; lane < PANEL; ++lane) {
                    const int64_t at = rows[lane] * scales_per_row + g * shape.group / columns_per_scale;
                    scale[lane] = rows[lane] < 0 ? 0.0f : scales[at];
                    if (shape.zero_points) to[lane] = rows[lane] < 0 ? 0 : zero_points[at];
                }
                if (shape.zero_points) to += ZEROS_BYTES;
            }
            for (int64_t column = g * shape.group; column < std::min(shape.width, (g + 1) * shape.group); column += 8) {
                for (int lane = 0; lane < PANEL; ++lane) {
                    uint8_t* place = to + (lane / LANES) * 64 + (lane % LANES) * 4;
                    if (rows[lane] < 0) {
                        for (int i = 0; i < 4; ++i) place[i] = 0;
                        if (shape.bits == 8) std::memset(place + 128, 0, 4);
                    } else if (shape.bits == 8) {
                        const uint8_t* from = weights + rows[lane] * shape.width + column;
                        for (int i = 0; i < 4; ++i) {
                            place[i] = from[i] ^ 0x80;
                            place[128 + i] = from[4 + i] ^ 0x80;
                        }
                    } else {
                        const uint8_t* from = weights + (rows[lane] * shape.width + column) / 2;
                        for (int i = 0; i < 4; ++i) {  // columns 0-3 in the low halves, 4-7 in the high ones
                            const int a = from[i / 2] >> (i % 2 * 4), b = from[2 + i / 2] >> (i % 2 * 4);
                            place[i] = uint8_t(((a & 15) | (b & 15) << 4) ^ sign);
                        }
                    }
                }
                to += shape.bits == 8 ? 256 : 128;
            }
        }
    });
}

void multiply(const Shape& shape, const uint8_t* packed, const float* x, const float* norm, const float* residual, int64_t rows,
              float* y, Threads& threads) {
    if (rows == 0) return;
    thread_local Scratch scratch;
    const size_t num_values = size_t(rows) * shape.groups() * shape.group, num_groups = size_t(rows) * shape.groups();
    char* memory = scratch.at_least(num_values + num_groups * 8);
    float* scales = reinterpret_cast<float*>(memory);
    int32_t* sums = reinterpret_cast<int32_t*>(memory) + num_groups;
    int8_t* values = reinterpret_cast<int8_t*>(memory) + num_groups * 8;
    const auto round = [&](int64_t m) {
        const float* row = x + m * shape.width;
        round_row(shape, norm ? normalized(shape, row, norm) : row, m, rows, values, scales, sums);
    };
    const int64_t parts = rows <= SMALL_ROWS ? 1 : std::min(rows, threads.count() * TASKS_PER_THREAD);
    threads.run(parts, [&](int64_t part) {
        for (int64_t m = rows * part / parts; m < rows * (part + 1) / parts; ++m) round(m);
    });

    const Rounded in{values, scales, sums, rows};
    const Tile* tiles = tiles_of(shape);
    const int64_t per_panel = shape.gated ? LANES : PANEL;
    const Target to{y, residual, shape.gated ? shape.outputs / 2 : shape.outputs};
    const auto run = [&](int64_t first_panel, int64_t last_panel, int64_t first_row, int64_t last_row) {
        const int64_t span = last_row - first_row, count = (span + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t panel = first_panel; panel < last_panel; ++panel) {
            const uint8_t* from = packed + panel * shape.panel_bytes();
            for (int64_t t = 0; t < count; ++t) {
                const int64_t begin = first_row + span * t / count, end = first_row + span * (t + 1) / count;
                tiles[end - begin - 1](shape, from, in, begin, to, panel * per_panel);
            }
        }
    };
    const int64_t panels = shape.panels();
    if (rows <= MAX_ROWS) {
        const int64_t shares = std::min(panels, threads.count() * (threads.awake() ? SHARES_AWAKE : 1));
        threads.run(shares, [&](int64_t i) { run(panels * i / shares, panels * (i + 1) / shares, 0, rows); });
        return;
    }
    const int64_t blocks = std::max<int64_t>(1, (rows * shape.width + BLOCK_BYTES - 1) / BLOCK_BYTES);
    const int64_t per_task = std::max<int64_t>(1, panels / (TASKS_PER_THREAD * threads.count())), chunks = (panels + per_task - 1) / per_task;
    threads.run(blocks * chunks, [&](int64_t task) {
        const int64_t block = task / chunks, first = task % chunks * per_task;
        run(first, std::min(first + per_task, panels), rows * block / blocks, rows * (block + 1) / blocks);
    });
}

}  // namespace forgeline
