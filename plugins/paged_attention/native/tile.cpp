#include "tile.h"

#include <algorithm>

namespace forgeline {
namespace {

constexpr float LOG2_E = 1.44269504f;
constexpr float SLACK = 8.0f;  // powers of two that a score may lie above the reference before that moves

INLINE __mmask16 lanes(int64_t begin, int64_t end) {
    const auto below = [](int64_t n) { return (1u << std::clamp<int64_t>(n, 0, LANES)) - 1; };
    return __mmask16(below(end) & ~below(begin));
}

// Out of the loop over rows: it happens in a span's first block and seldom later.
__attribute__((noinline)) void move_reference(Tile& tile, int row, float largest) {
    const float before = tile.reference[row];
    tile.reference[row] = largest;
    if (before == NEVER) return;  // all sums are 0
    const __m512 f = _mm512_set1_ps(exp2_of(before - largest));
    const auto scale = [&](float* p, int64_t count) {
        for (int64_t i = 0; i < count; i += LANES) _mm512_store_ps(p + i, _mm512_mul_ps(_mm512_load_ps(p + i), f));
    };
    scale(tile.sums + row * LANES, LANES);
    scale(tile.offsets + row * tile.groups * LANES, tile.groups * LANES);
    scale(tile.values + row * tile.shape.head_dim, tile.shape.head_dim);
}

__attribute__((noinline)) void softmax(Tile& tile, int64_t position) {
    for (int row = 0; row < tile.rows; ++row) {
        float* at = tile.scores + row * BLOCK;
        const int64_t begin = tile.first[row] - position, end = tile.last[row] - position;
        __mmask16 seen[2] = {0xFFFF, 0xFFFF};
        if (begin > 0 || end < BLOCK) {
            seen[0] = lanes(begin, end);
            seen[1] = lanes(begin - LANES, end - LANES);
        }
        const __m512 x[2] = {_mm512_load_ps(at), _mm512_load_ps(at + LANES)};
        const __m512 limit = _mm512_set1_ps(tile.reference[row] + SLACK);
        if (_mm512_mask_cmp_ps_mask(seen[0], x[0], limit, _CMP_GT_OQ) | _mm512_mask_cmp_ps_mask(seen[1], x[1], limit, _CMP_GT_OQ))
            [[unlikely]] {
            const __m512 never = _mm512_set1_ps(NEVER);
            const __m512 both = _mm512_max_ps(_mm512_mask_mov_ps(never, seen[0], x[0]), _mm512_mask_mov_ps(never, seen[1], x[1]));
            move_reference(tile, row, _mm512_reduce_max_ps(both));
        }
        const __m512 reference = _mm512_set1_ps(tile.reference[row]);
        const __m512 p0 = _mm512_maskz_mov_ps(seen[0], exp2_of(_mm512_sub_ps(x[0], reference)));
        const __m512 p1 = _mm512_maskz_mov_ps(seen[1], exp2_of(_mm512_sub_ps(x[1], reference)));
        _mm512_store_ps(at, p0);
        _mm512_store_ps(at + LANES, p1);
        float* sum = tile.sums + row * LANES;
        _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(p0, p1)));
    }
}

}  // namespace

void Tile::start(const AttentionShape& for_shape, int num_rows) {
    shape = for_shape;
    groups = shape.values == Element::U4 ? int(shape.head_dim / 32) : 1;
    rows = num_rows;
}

void Tile::set_query(int row, const float* q) {
    const int64_t dim = shape.head_dim;
    const float scale = shape.scale * LOG2_E;
    if (shape.keys != Element::U8) {
        for (int64_t i = 0; i < dim; i += LANES)
            _mm512_store_ps(query + row * dim + i, _mm512_mul_ps(_mm512_loadu_ps(q + i), _mm512_set1_ps(scale)));
        return;
    }
    __m512 largest = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += LANES) largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_loadu_ps(q + i)));
    constexpr float MOST = 127 * 256 + 127;  // a digit has 8 bits, signed
    const float most = _mm512_reduce_max_ps(largest);
    const __m512 per_unit = _mm512_set1_ps(most > 0.0f ? MOST / most : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    int8_t* high = digits + row * dim * 2;
    for (int64_t i = 0; i < dim; i += LANES) {
        const __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(q + i), per_unit));
        sum = _mm512_add_epi32(sum, n);
        _mm_store_si128(reinterpret_cast<__m128i*>(high + dim + i), _mm512_cvtepi32_epi8(n));
        const __m512i rest = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
        _mm_store_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(rest));
    }
    unit[row] = most / MOST * scale;
    digit_sum[row] = float(_mm512_reduce_add_epi32(sum));
}

void Tile::start_span() {
    std::fill_n(reference, rows, NEVER);
    std::fill_n(sums, rows * LANES, 0.0f);
    std::fill_n(offsets, rows * groups * LANES, 0.0f);
    std::fill_n(values, rows * shape.head_dim, 0.0f);
}

void Tile::add_block(const uint8_t* keys, const uint8_t* stored_values, int64_t position) {
    switch (shape.keys) {
        case Element::U8: scores_u8(*this, keys); break;
        case Element::F16: scores_float<Element::F16>(*this, keys); break;
        case Element::BF16: scores_float<Element::BF16>(*this, keys); break;
        default: scores_float<Element::F32>(*this, keys);
    }
    softmax(*this, position);
    const int count = int(std::min<int64_t>(BLOCK, *std::max_element(last, last + rows) - position));  // keys anyone sees
    switch (shape.values) {
        case Element::U8: values_u8(*this, stored_values); break;
        case Element::U4: values_u4(*this, stored_values); break;
        case Element::F16: values_float<Element::F16>(*this, stored_values, count); break;
        case Element::BF16: values_float<Element::BF16>(*this, stored_values, count); break;
        default: values_float<Element::F32>(*this, stored_values, count);
    }
}

void Tile::end_span(const Partial& to) const {
    const int64_t dim = shape.head_dim, group = dim / groups;
    for (int row = 0; row < rows; ++row) {
        to.reference[row] = reference[row];
        to.sum[row] = _mm512_reduce_add_ps(_mm512_load_ps(sums + row * LANES));
        const float* from = values + row * dim;
        float* end = to.values + row * dim;
        for (int g = 0; g < groups; ++g) {
            const __m512 offset = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(offsets + (row * groups + g) * LANES)));
            for (int64_t i = 0; i < group; i += LANES, from += LANES, end += LANES)
                _mm512_storeu_ps(end, _mm512_sub_ps(_mm512_load_ps(from), offset));
        }
    }
}

void Partial::add(const Partial& later, int rows, int64_t dim) const {
    for (int row = 0; row < rows; ++row) {
        if (later.reference[row] == NEVER && later.sum[row] == 0.0f) continue;  // NaN scores leave no reference, but a sum
        float mine = 0.0f, theirs = 1.0f;  // factors
        if (reference[row] >= later.reference[row]) {
            mine = 1.0f;
            theirs = exp2_of(later.reference[row] - reference[row]);
        } else {
            if (reference[row] != NEVER) mine = exp2_of(reference[row] - later.reference[row]);
            reference[row] = later.reference[row];
        }
        const __m512 a = _mm512_set1_ps(mine), b = _mm512_set1_ps(theirs);
        const auto added = [&](__m512 x, __m512 y) { return _mm512_fmadd_ps(y, b, _mm512_mul_ps(x, a)); };
        sum[row] = _mm512_cvtss_f32(added(_mm512_set1_ps(sum[row]), _mm512_set1_ps(later.sum[row])));
        for (int64_t i = row * dim; i < (row + 1) * dim; i += LANES)
            _mm512_storeu_ps(values + i, added(_mm512_loadu_ps(values + i), _mm512_loadu_ps(later.values + i)));
    }
}

}  // namespace forgeline
