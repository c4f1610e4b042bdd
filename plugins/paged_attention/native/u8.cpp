// Keys and values of 8 and 4 bits. Queries and weights are rounded to 16 bits, as two digits of 8 signed bits, for which the CPU
// sums four products at a time; integer sums are exact. Rounding moves a query's values by at most 2^-16 of its largest, and a
// weight by at most 2^-16 of the largest in its block of 32 keys.

#include "tile.h"

namespace forgeline {
namespace {

constexpr int SCORE_ROWS = 6;  // 24 registers of sums, 2 of keys, 2 of digits
constexpr int VALUE_ROWS = 3;  // 24 registers of sums for 64 columns, 4 of values, 2 of digits

INLINE __m512 whole(__m512i high, __m512i low) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
}

template <int ROWS>
__attribute__((noinline)) void scores_of(Tile& tile, const uint8_t* keys, int row) {
    constexpr int SETS = ROWS <= 2 ? 2 : 1;  // of sums, so that enough of them are under way
    const int64_t dim = tile.shape.head_dim;
    const int8_t* digits = tile.digits + row * dim * 2;
    const float* scales = reinterpret_cast<const float*>(keys + dim * BLOCK);
    __m512i sums[SETS * ROWS * 4];
    each<SETS * ROWS * 4>([&](auto i) INLINE_LAMBDA { sums[i] = _mm512_setzero_si512(); });
#pragma GCC unroll 1
    for (int64_t at = 0; at < dim; at += 8, keys += 8 * BLOCK) {
        each<2>([&](auto step) INLINE_LAMBDA {
            const __m512i k0 = _mm512_load_si512(keys + step * 4 * BLOCK), k1 = _mm512_load_si512(keys + step * 4 * BLOCK + 64);
            each<ROWS * 2>([&](auto i) INLINE_LAMBDA {  // high and low digit of each row
                const __m512i x = four_bytes(digits + (i / 2) * dim * 2 + (i % 2) * dim + at + step * 4);
                constexpr int set = step % SETS * ROWS * 4;
                dot(sums[set + i * 2], k0, x);
                dot(sums[set + i * 2 + 1], k1, x);
            });
        });
    }
    if constexpr (SETS == 2)
        each<ROWS * 4>([&](auto i) INLINE_LAMBDA { sums[i] = _mm512_add_epi32(sums[i], sums[ROWS * 4 + i]); });
    each<2>([&](auto b) INLINE_LAMBDA {
        const __m512 scale = _mm512_load_ps(scales + b * LANES), zero = _mm512_load_ps(scales + BLOCK + b * LANES);
        each<ROWS>([&](auto m) INLINE_LAMBDA {
            __m512 x = whole(sums[m * 4 + b], sums[m * 4 + 2 + b]);
            x = _mm512_fnmadd_ps(zero, _mm512_set1_ps(tile.digit_sum[row + m]), x);
            x = _mm512_mul_ps(_mm512_mul_ps(x, scale), _mm512_set1_ps(tile.unit[row + m]));
            _mm512_store_ps(tile.scores + (row + m) * BLOCK + b * LANES, x);
        });
    });
}

// Probabilities times scales of values, as digits.
__attribute__((noinline)) void round_weights(Tile& tile, const float* scales, int group) {
    const __m512 scale0 = _mm512_load_ps(scales), scale1 = _mm512_load_ps(scales + LANES);
    const __m512 zero0 = _mm512_load_ps(scales + BLOCK), zero1 = _mm512_load_ps(scales + BLOCK + LANES);
    const __m512 none = _mm512_setzero_ps();
    for (int row = 0; row < tile.rows; ++row) {
        const __m512 p0 = _mm512_load_ps(tile.scores + row * BLOCK), p1 = _mm512_load_ps(tile.scores + row * BLOCK + LANES);
        // Scales of keys that nobody wrote may be anything.
        const __mmask16 some0 = _mm512_cmp_ps_mask(p0, none, _CMP_NEQ_UQ), some1 = _mm512_cmp_ps_mask(p1, none, _CMP_NEQ_UQ);
        const __m512 w0 = _mm512_maskz_mul_ps(some0, p0, scale0), w1 = _mm512_maskz_mul_ps(some1, p1, scale1);
        constexpr float MOST = 127 * 256 + 127;
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(w0, w1));
        const __m512 per_unit = _mm512_set1_ps(most > 0.0f ? MOST / most : 0.0f);
        const float unit = most * (1.0f / MOST);
        const __m512i n0 = _mm512_cvtps_epi32(_mm512_mul_ps(w0, per_unit)), n1 = _mm512_cvtps_epi32(_mm512_mul_ps(w1, per_unit));
        const __m512i half = _mm512_set1_epi32(128);
        __m128i* to = reinterpret_cast<__m128i*>(tile.weights + row * BLOCK * 2);
        _mm_store_si128(to, _mm512_cvtepi32_epi8(_mm512_srli_epi32(_mm512_add_epi32(n0, half), 8)));
        _mm_store_si128(to + 1, _mm512_cvtepi32_epi8(_mm512_srli_epi32(_mm512_add_epi32(n1, half), 8)));
        _mm_store_si128(to + 2, _mm512_cvtepi32_epi8(n0));
        _mm_store_si128(to + 3, _mm512_cvtepi32_epi8(n1));
        tile.weight_unit[row] = unit;
        float* offset = tile.offsets + (row * tile.groups + group) * LANES;
        __m512 sum = _mm512_maskz_mul_ps(some0, _mm512_cvtepi32_ps(n0), zero0);
        sum = _mm512_mask3_fmadd_ps(_mm512_cvtepi32_ps(n1), zero1, sum, some1);
        _mm512_store_ps(offset, _mm512_fmadd_ps(sum, _mm512_set1_ps(unit), _mm512_load_ps(offset)));
    }
}

// Columns [column, column + 16 * REGISTERS) of ROWS rows; `stored` at its first column, `stride` bytes for four keys.
template <int ROWS, int REGISTERS, bool NIBBLES>
__attribute__((noinline)) void values_of(Tile& tile, const uint8_t* stored, int64_t stride, int row, int64_t column) {
    const int8_t* weights = tile.weights + row * BLOCK * 2;
    __m512i sums[ROWS * REGISTERS * 2];
    each<ROWS * REGISTERS * 2>([&](auto i) INLINE_LAMBDA { sums[i] = _mm512_setzero_si512(); });
#pragma GCC unroll 1
    for (int key = 0; key < BLOCK; key += 4, stored += stride) {
        __m512i v[REGISTERS];
        each<REGISTERS>([&](auto c) INLINE_LAMBDA {
            if constexpr (!NIBBLES) v[c] = _mm512_load_si512(stored + c * 64);
            else if constexpr (c % 2 == 0) v[c] = _mm512_and_si512(_mm512_load_si512(stored), _mm512_set1_epi8(15));
            else v[c] = _mm512_and_si512(_mm512_srli_epi16(_mm512_load_si512(stored), 4), _mm512_set1_epi8(15));
        });
        each<ROWS * 2>([&](auto i) INLINE_LAMBDA {
            const __m512i x = four_bytes(weights + i * BLOCK + key);
            each<REGISTERS>([&](auto c) INLINE_LAMBDA { dot(sums[i * REGISTERS + c], v[c], x); });
        });
    }
    const int64_t dim = tile.shape.head_dim;
    each<ROWS>([&](auto m) INLINE_LAMBDA {
        const __m512 unit = _mm512_set1_ps(tile.weight_unit[row + m]);
        float* to = tile.values + (row + m) * dim + column;
        each<REGISTERS>([&](auto c) INLINE_LAMBDA {
            const __m512 x = whole(sums[m * 2 * REGISTERS + c], sums[(m * 2 + 1) * REGISTERS + c]);
            _mm512_store_ps(to + c * LANES, _mm512_fmadd_ps(x, unit, _mm512_load_ps(to + c * LANES)));
        });
    });
}

template <int ROWS>
void values_of_rows(Tile& tile, const uint8_t* stored, int row) {
    const int64_t dim = tile.shape.head_dim, stride = dim * 4;
    int64_t column = 0;
    for (; column + 64 <= dim; column += 64) values_of<ROWS, 4, false>(tile, stored + column * 4, stride, row, column);
    switch ((dim - column) / LANES) {
        case 1: return values_of<ROWS, 1, false>(tile, stored + column * 4, stride, row, column);
        case 2: return values_of<ROWS, 2, false>(tile, stored + column * 4, stride, row, column);
        case 3: return values_of<ROWS, 3, false>(tile, stored + column * 4, stride, row, column);
    }
}

}  // namespace

void scores_u8(Tile& tile, const uint8_t* keys) {
    using Function = void (*)(Tile&, const uint8_t*, int);
    static constexpr Function BY_ROWS[SCORE_ROWS] = {scores_of<1>, scores_of<2>, scores_of<3>,
                                                     scores_of<4>, scores_of<5>, scores_of<6>};
    const int parts = (tile.rows + SCORE_ROWS - 1) / SCORE_ROWS;
    for (int i = 0; i < parts; ++i) {
        const int begin = tile.rows * i / parts, end = tile.rows * (i + 1) / parts;
        tile.fetch_keys(i, parts);
        BY_ROWS[end - begin - 1](tile, keys, begin);
    }
}

void values_u8(Tile& tile, const uint8_t* stored) {
    using Function = void (*)(Tile&, const uint8_t*, int);
    static constexpr Function BY_ROWS[VALUE_ROWS] = {values_of_rows<1>, values_of_rows<2>, values_of_rows<3>};
    round_weights(tile, reinterpret_cast<const float*>(stored + tile.shape.head_dim * BLOCK), 0);
    const int parts = (tile.rows + VALUE_ROWS - 1) / VALUE_ROWS;
    for (int i = 0; i < parts; ++i) {
        const int begin = tile.rows * i / parts, end = tile.rows * (i + 1) / parts;
        tile.fetch_values(i, parts);
        BY_ROWS[end - begin - 1](tile, stored, begin);
    }
}

void values_u4(Tile& tile, const uint8_t* stored) {
    using Function = void (*)(Tile&, const uint8_t*, int64_t, int, int64_t);
    static constexpr Function BY_ROWS[VALUE_ROWS] = {values_of<1, 2, true>, values_of<2, 2, true>, values_of<3, 2, true>};
    const int parts = (tile.rows + VALUE_ROWS - 1) / VALUE_ROWS;
    constexpr int CODES = 32 * BLOCK / 2;  // bytes of one group
    for (int64_t column = 0; column < tile.shape.head_dim; column += 32, stored += CODES + 2 * BLOCK * sizeof(float)) {
        tile.fetch_values(int(column / 32), tile.groups);
        round_weights(tile, reinterpret_cast<const float*>(stored + CODES), int(column / 32));
        for (int i = 0; i < parts; ++i) {
            const int begin = tile.rows * i / parts, end = tile.rows * (i + 1) / parts;
            BY_ROWS[end - begin - 1](tile, stored, 64, begin, column);
        }
    }
}

}  // namespace forgeline
