// Keys and values of 16 and 32 bits.

#include "tile.h"

namespace forgeline {
namespace {

constexpr int ROWS_AT_ONCE = 6;  // 24 registers of sums, 4 of keys or values, 1 of queries or weights

// A score is the sum over even columns plus that over odd ones.
template <Element E, int ROWS>
__attribute__((noinline)) void scores_of(Tile& tile, const uint8_t* keys, int row) {
    constexpr int BYTES = LANES * size_of(E);
    const int64_t dim = tile.shape.head_dim;
    const float* query = tile.query + row * dim;
    __m512 sums[ROWS * 4];
    each<ROWS * 4>([&](auto i) INLINE_LAMBDA { sums[i] = _mm512_setzero_ps(); });
#pragma GCC unroll 1
    for (int64_t at = 0; at < dim; at += 2, keys += BYTES * 4) {
        each<2>([&](auto odd) INLINE_LAMBDA {
            const __m512 k0 = load<E>(keys + odd * 2 * BYTES), k1 = load<E>(keys + odd * 2 * BYTES + BYTES);
            each<ROWS>([&](auto m) INLINE_LAMBDA {
                const __m512 x = _mm512_set1_ps(query[m * dim + at + odd]);
                sums[m * 4 + odd * 2] = _mm512_fmadd_ps(k0, x, sums[m * 4 + odd * 2]);
                sums[m * 4 + odd * 2 + 1] = _mm512_fmadd_ps(k1, x, sums[m * 4 + odd * 2 + 1]);
            });
        });
    }
    each<ROWS * 2>([&](auto i) INLINE_LAMBDA {
        constexpr int m = i / 2, b = i % 2;
        _mm512_store_ps(tile.scores + (row + m) * BLOCK + b * LANES, _mm512_add_ps(sums[m * 4 + b], sums[m * 4 + 2 + b]));
    });
}

template <Element E, int ROWS, int REGISTERS>
__attribute__((noinline)) void values_of(Tile& tile, const uint8_t* stored, int count, int row, int64_t column) {
    const int64_t dim = tile.shape.head_dim, stride = dim * size_of(E);
    const float* weights = tile.scores + row * BLOCK;
    float* to = tile.values + row * dim + column;
    stored += column * size_of(E);
    __m512 sums[ROWS * REGISTERS];
    const auto place = [&](int i) INLINE_LAMBDA { return to + i / REGISTERS * dim + i % REGISTERS * LANES; };
    each<ROWS * REGISTERS>([&](auto i) INLINE_LAMBDA { sums[i] = _mm512_load_ps(place(i)); });
#pragma GCC unroll 1
    for (int key = 0; key < count; ++key, stored += stride) {
        __m512 v[REGISTERS];
        each<REGISTERS>([&](auto c) INLINE_LAMBDA { v[c] = load<E>(stored + c * LANES * size_of(E)); });
        each<ROWS>([&](auto m) INLINE_LAMBDA {
            const __m512 w = _mm512_set1_ps(weights[m * BLOCK + key]);
            each<REGISTERS>([&](auto c) INLINE_LAMBDA {
                sums[m * REGISTERS + c] = _mm512_fmadd_ps(v[c], w, sums[m * REGISTERS + c]);
            });
        });
    }
    each<ROWS * REGISTERS>([&](auto i) INLINE_LAMBDA { _mm512_store_ps(place(i), sums[i]); });
}

template <Element E, int ROWS>
void values_of_rows(Tile& tile, const uint8_t* stored, int count, int row) {
    const int64_t dim = tile.shape.head_dim;
    int64_t column = 0;
    for (; column + 64 <= dim; column += 64) values_of<E, ROWS, 4>(tile, stored, count, row, column);
    switch ((dim - column) / LANES) {
        case 1: return values_of<E, ROWS, 1>(tile, stored, count, row, column);
        case 2: return values_of<E, ROWS, 2>(tile, stored, count, row, column);
        case 3: return values_of<E, ROWS, 3>(tile, stored, count, row, column);
    }
}

template <Element E, int... I>
void scores_by_rows(Tile& tile, const uint8_t* keys, int row, int rows, std::integer_sequence<int, I...>) {
    static constexpr void (*BY_ROWS[])(Tile&, const uint8_t*, int) = {scores_of<E, I + 1>...};
    BY_ROWS[rows - 1](tile, keys, row);
}

template <Element E, int... I>
void values_by_rows(Tile& tile, const uint8_t* stored, int count, int row, int rows, std::integer_sequence<int, I...>) {
    static constexpr void (*BY_ROWS[])(Tile&, const uint8_t*, int, int) = {values_of_rows<E, I + 1>...};
    BY_ROWS[rows - 1](tile, stored, count, row);
}

using Rows = std::make_integer_sequence<int, ROWS_AT_ONCE>;

}  // namespace

template <Element E>
void scores_float(Tile& tile, const uint8_t* keys) {
    const int parts = (tile.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int i = 0; i < parts; ++i) {
        const int begin = tile.rows * i / parts, end = tile.rows * (i + 1) / parts;
        tile.fetch_keys(i, parts);
        scores_by_rows<E>(tile, keys, begin, end - begin, Rows{});
    }
}

template <Element E>
void values_float(Tile& tile, const uint8_t* stored, int count) {
    const int parts = (tile.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int i = 0; i < parts; ++i) {
        const int begin = tile.rows * i / parts, end = tile.rows * (i + 1) / parts;
        tile.fetch_values(i, parts);
        values_by_rows<E>(tile, stored, count, begin, end - begin, Rows{});
    }
}

template void scores_float<Element::F32>(Tile&, const uint8_t*);
template void scores_float<Element::F16>(Tile&, const uint8_t*);
template void scores_float<Element::BF16>(Tile&, const uint8_t*);
template void values_float<Element::F32>(Tile&, const uint8_t*, int);
template void values_float<Element::F16>(Tile&, const uint8_t*, int);
template void values_float<Element::BF16>(Tile&, const uint8_t*, int);

}  // namespace forgeline
