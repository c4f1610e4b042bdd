// What the attention kernels share.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "attention.h"

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace forgeline {

constexpr int LANES = 16;  // floats in a register

template <class F, int... I>
INLINE void each_of(F&& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}

// A loop whose index is a constant: an array indexed by it stays in registers.
template <int N, class F>
INLINE void each(F&& f) {
    each_of(f, std::make_integer_sequence<int, N>{});
}

// Intrinsics of these two let GCC 12 move sums through memory.
INLINE void dot(__m512i& sum, __m512i bytes, __m512i digits) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(digits));
}

INLINE __m512i four_bytes(const int8_t* p) {
    __m512i x;
    asm("vpbroadcastd %1, %0" : "=v"(x) : "m"(*reinterpret_cast<const int32_t*>(p)));
    return x;
}

// 2^x, relative error below 2e-7; 0 far below.
INLINE __m512 exp2_of(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.535336188e-4f);  // Cephes' polynomial
    for (float c : {1.339887440e-3f, 9.618437357e-3f, 5.550332471e-2f, 2.402264791e-1f, 6.931472028e-1f, 1.0f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, n);
}

INLINE float exp2_of(float x) { return _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(x))); }

// Sixteen stored floats.
template <Element E>
INLINE __m512 load(const uint8_t* p) {
    if constexpr (E == Element::F32) return _mm512_loadu_ps(p);
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (E == Element::F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

constexpr int size_of(Element e) { return e == Element::F32 ? 4 : 2; }  // of the floats

}  // namespace forgeline
