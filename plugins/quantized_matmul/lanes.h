// What all AVX512 kernels share.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <utility>

#define INLINE inline __attribute__((always_inline))

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

}  // namespace forgeline
