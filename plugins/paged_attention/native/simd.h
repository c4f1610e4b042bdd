// What the attention kernels share.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "../../quantized_matmul/lanes.h"
#include "attention.h"

#define INLINE_LAMBDA __attribute__((always_inline))

namespace forgeline {

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
