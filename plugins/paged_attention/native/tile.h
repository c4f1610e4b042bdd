// Attention of a few rows over the keys of one span, a block after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "attention.h"
#include "simd.h"

namespace forgeline {

constexpr int MAX_ROWS = 24;
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int MAX_GROUPS = MAX_HEAD_DIM / 32;  // of values under one scale

// What rows sum up to over some keys: sum of 2^(score - reference), and of that times values.
struct Partial {
    float* reference;  // [rows]; NEVER where a row sees none of the keys
    float* sum;        // [rows]
    float* values;     // [rows][D]

    static size_t floats(int rows, int64_t dim) { return (size_t(rows) * (2 + dim) + 3 * LANES) / LANES * LANES; }
    Partial(float* memory, int rows)
        : reference(memory), sum(memory + rows), values(memory + (2 * rows + LANES - 1) / LANES * LANES) {}

    void add(const Partial& later, int rows, int64_t dim) const;
};

struct alignas(64) Tile {  // of one thread
    AttentionShape shape;
    int groups;  // of values of a head, each under one scale
    int rows;
    int64_t first[MAX_ROWS];  // keys that a row sees: [first, last)
    int64_t last[MAX_ROWS];

    // Queries. Floats carry the scale and log2(e); digits are 256 * high + low = q / unit, high ones before low ones.
    float unit[MAX_ROWS];  // times the scale and log2(e)
    float digit_sum[MAX_ROWS];
    alignas(64) float query[MAX_ROWS * MAX_HEAD_DIM];
    alignas(64) int8_t digits[MAX_ROWS * MAX_HEAD_DIM * 2];

    // Of the block at hand: scores in powers of two, then exp(score - reference); as digits, times each key's scale of values.
    alignas(64) float scores[MAX_ROWS * BLOCK];
    alignas(64) int8_t weights[MAX_ROWS * BLOCK * 2];
    float weight_unit[MAX_ROWS];

    // Of the span so far.
    float reference[MAX_ROWS];  // near the largest score
    alignas(64) float sums[MAX_ROWS * LANES];
    alignas(64) float offsets[MAX_ROWS * MAX_GROUPS * LANES];  // to take off, from zero points
    alignas(64) float values[MAX_ROWS * MAX_HEAD_DIM];

    struct Stored {  // keys and values of a block, or nulls
        const uint8_t* keys = nullptr;
        const uint8_t* values = nullptr;
    };
    Stored next;  // the block to come
    Stored far;   // one behind it, if memory is what few rows wait for: as far as the second level cache, which takes more misses

    void start(const AttentionShape& for_shape, int num_rows);
    void set_query(int row, const float* q);
    void start_span();
    // Keys from `position` on.
    void add_block(const uint8_t* keys, const uint8_t* stored_values, int64_t position);
    void end_span(const Partial& to) const;

    // A part of the block to come, while rows are summed over this one: all at once would fill the queue of misses, and stall.
    void fetch_keys(int part, int parts) const {
        fetch<_MM_HINT_T0>(next.keys, shape.key_bytes(), part, parts);
        fetch<_MM_HINT_T1>(far.keys, shape.key_bytes(), part, parts);
    }
    void fetch_values(int part, int parts) const {
        fetch<_MM_HINT_T0>(next.values, shape.value_bytes(), part, parts);
        fetch<_MM_HINT_T1>(far.values, shape.value_bytes(), part, parts);
    }

private:
    template <decltype(_MM_HINT_T0) HINT>
    static void fetch(const uint8_t* from, size_t bytes, int part, int parts) {
        constexpr size_t LINE = 64;
        const size_t lines = from ? (bytes + LINE - 1) / LINE : 0;
        for (size_t i = lines * part / parts; i < lines * (part + 1) / parts; ++i)
            _mm_prefetch(reinterpret_cast<const char*>(from + i * LINE), HINT);
    }
};

// The parts of add_block, by what is stored: u8.cpp, floats.cpp.
void scores_u8(Tile& tile, const uint8_t* keys);
void values_u8(Tile& tile, const uint8_t* stored);
void values_u4(Tile& tile, const uint8_t* stored);
template <Element E>
void scores_float(Tile& tile, const uint8_t* keys);
template <Element E>
void values_float(Tile& tile, const uint8_t* stored, int count);

}  // namespace forgeline
