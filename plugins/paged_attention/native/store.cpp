#include "store.h"

#include <cstring>

#include "simd.h"

namespace forgeline {
namespace {

struct Scale {
    __m512 per_unit, zero;
};

// Of `count` values in `levels` + 1 steps, written for key `slot`; a constant head gets a small scale, as OpenVINO does.
Scale store_scale(const float* x, int64_t count, float levels, float* scales, int slot) {
    __m512 least = _mm512_loadu_ps(x), largest = least;
    for (int64_t i = LANES; i < count; i += LANES) {
        least = _mm512_min_ps(least, _mm512_loadu_ps(x + i));
        largest = _mm512_max_ps(largest, _mm512_loadu_ps(x + i));
    }
    const float low = _mm512_reduce_min_ps(least);
    float scale = (_mm512_reduce_max_ps(largest) - low) / levels;
    if (scale == 0.0f) scale = 0.0001f;
    const float zero = -low / scale;
    scales[slot] = scale;
    scales[BLOCK + slot] = zero;
    return {_mm512_set1_ps(scale), _mm512_set1_ps(zero)};
}

INLINE __m512i codes_of(const float* x, const Scale& scale, int most) {
    const __m512i n = _mm512_cvtps_epi32(_mm512_add_ps(_mm512_div_ps(_mm512_loadu_ps(x), scale.per_unit), scale.zero));
    return _mm512_min_epi32(_mm512_max_epi32(n, _mm512_setzero_si512()), _mm512_set1_epi32(most));
}

INLINE __m256i bf16_of(__m512 x) {  // to the nearest, ties to even; NaN stays one
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000)), 16));
}

// As the 16-bit or 32-bit floats of a pool.
void narrow(Element to, const float* x, int64_t count, uint8_t* out) {
    for (int64_t i = 0; i < count; i += LANES) {
        const __m512 v = _mm512_loadu_ps(x + i);
        __m256i* half = reinterpret_cast<__m256i*>(out + i * 2);
        if (to == Element::F32) _mm512_storeu_ps(out + i * 4, v);
        else _mm256_storeu_si256(half, to == Element::F16 ? _mm512_cvtps_ph(v, 0) : bf16_of(v));
    }
}

template <class T>
void scatter(const uint8_t* from, int64_t count, uint8_t* block, int slot) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(block + (i * BLOCK + slot) * sizeof(T), from + i * sizeof(T), sizeof(T));
}

// The lowest byte of each lane to byte `byte` of each lane of `to`; the other bytes belong to other tokens.
INLINE void put_bytes(__m512i codes, uint8_t* to, int byte) {
    const __m512i moved = _mm512_sll_epi32(codes, _mm_cvtsi32_si128(byte * 8));
    _mm512_mask_storeu_epi8(to, 0x1111111111111111ull << byte, moved);
}

// 32 values of a token: the first 16 in low halves of bytes, the others in high ones.
void store_nibbles(const float* x, uint8_t* group, int slot) {
    constexpr int CODES = 32 * BLOCK / 2;
    const Scale scale = store_scale(x, 32, 15.0f, reinterpret_cast<float*>(group + CODES), slot);
    const __m512i first = codes_of(x, scale, 15), second = codes_of(x + LANES, scale, 15);
    put_bytes(_mm512_or_si512(first, _mm512_slli_epi32(second, 4)), group + slot / 4 * 64, slot % 4);
}

}  // namespace

void store_key(const AttentionShape& shape, const float* key, uint8_t* block, int slot) {
    const int64_t dim = shape.head_dim;
    alignas(64) uint8_t row[MAX_HEAD_DIM * 4];
    if (shape.keys == Element::U8) {
        const Scale scale = store_scale(key, dim, 255.0f, reinterpret_cast<float*>(block + dim * BLOCK), slot);
        for (int64_t i = 0; i < dim; i += LANES)
            _mm_store_si128(reinterpret_cast<__m128i*>(row + i), _mm512_cvtepi32_epi8(codes_of(key + i, scale, 255)));
        return scatter<uint32_t>(row, dim / 4, block, slot);
    }
    narrow(shape.keys, key, dim, row);
    if (shape.keys == Element::F32) scatter<uint32_t>(row, dim, block, slot);
    else scatter<uint16_t>(row, dim, block, slot);
}

void store_value(const AttentionShape& shape, const float* value, uint8_t* block, int slot) {
    const int64_t dim = shape.head_dim;
    if (shape.values == Element::U8) {
        const Scale scale = store_scale(value, dim, 255.0f, reinterpret_cast<float*>(block + dim * BLOCK), slot);
        for (int64_t i = 0; i < dim; i += LANES)
            put_bytes(codes_of(value + i, scale, 255), block + (slot / 4 * dim + i) * 4, slot % 4);
    } else if (shape.values == Element::U4) {
        const int64_t group_bytes = shape.value_bytes() / (dim / 32);
        for (int64_t i = 0; i < dim; i += 32) store_nibbles(value + i, block + i / 32 * group_bytes, slot);
    } else {
        narrow(shape.values, value, dim, block + slot * dim * size_of(shape.values));
    }
}

}  // namespace forgeline
