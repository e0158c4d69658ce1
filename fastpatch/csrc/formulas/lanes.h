// What formulas compute on: vectors of float or double, or, for the reduced-precision types bfloat16 and float16, pairs
// of float32 vectors.
#pragma once

#include <type_traits>

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace fastpatch::CPU_CAPABILITY {

template <class T>
using Vec = at::vec::Vectorized<T>;

template <class T>
constexpr bool is_reduced = std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>;

// When numbers are rounded to a reduced type: after each operation, as at::vec does it, or once, at the end of a
// formula.
enum class Rounding { each, last };

// The numbers of a vector of T, in order. NaNs keep the low half of their payload zero, as every T has it: so rounding
// needs no case for them.
template <class T, Rounding rounding>
struct Pair {
  Vec<float> low;
  Vec<float> high;

  Pair() = default;
  Pair(const Vec<float>& low, const Vec<float>& high) : low(low), high(high) {}
  explicit Pair(float number) : low(number), high(number) {}

  C10_ALWAYS_INLINE friend Pair operator+(const Pair& a, const Pair& b) {
    return Pair(a.low + b.low, a.high + b.high).rounded_if(Rounding::each);
  }
  C10_ALWAYS_INLINE friend Pair operator-(const Pair& a, const Pair& b) {
    return Pair(a.low - b.low, a.high - b.high).rounded_if(Rounding::each);
  }
  C10_ALWAYS_INLINE friend Pair operator*(const Pair& a, const Pair& b) {
    return Pair(a.low * b.low, a.high * b.high).rounded_if(Rounding::each);
  }
  C10_ALWAYS_INLINE friend Pair operator/(const Pair& a, const Pair& b) {
    return Pair(a.low / b.low, a.high / b.high).rounded_if(Rounding::each);
  }
  C10_ALWAYS_INLINE friend Pair operator>(const Pair& a, const Pair& b) {
    return {a.low > b.low, a.high > b.high};
  }
  C10_ALWAYS_INLINE friend Pair operator>=(const Pair& a, const Pair& b) {
    return {a.low >= b.low, a.high >= b.high};
  }
  C10_ALWAYS_INLINE Pair abs() const {
    return {low.abs(), high.abs()};
  }
  C10_ALWAYS_INLINE static Pair blendv(const Pair& a, const Pair& b, const Pair& mask) {
    return {Vec<float>::blendv(a.low, b.low, mask.low), Vec<float>::blendv(a.high, b.high, mask.high)};
  }

  C10_ALWAYS_INLINE Pair rounded_if(Rounding when) const {
    if (rounding != when) {
      return *this;
    }
#if defined(CPU_CAPABILITY_AVX2)
    return {rounded(low), rounded(high)};
#else
    const auto [a, b] = at::vec::convert_to_float<T>(at::vec::convert_from_float<T>(low, high));
    return {a, b};
#endif
  }

#if defined(CPU_CAPABILITY_AVX2)
  C10_ALWAYS_INLINE static Vec<float> rounded(const Vec<float>& numbers) {
    if constexpr (std::is_same_v<T, c10::Half>) {
      return _mm256_cvtph_ps(_mm256_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      // To nearest, ties to even: half a unit is added, less one bit where that would leave an odd number at a tie.
      const __m256i bits = _mm256_castps_si256(numbers);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      return _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
  }
#endif
};

// Loads and stores of what a formula computes on. For element-wise loops it doesn't matter which number comes into
// which lane, as long as all loads and stores agree: the second pair then takes half the instructions, for bfloat16 in
// AVX2.
template <class V>
struct Lanes;

template <class T>
struct Lanes<Vec<T>> {
  using Number = T;

  static Vec<T> load(const T* from) {
    return Vec<T>::loadu(from);
  }
  static void store(const Vec<T>& vector, T* to) {
    vector.store(to);
  }
  static Vec<T> load_elementwise(const T* from) {
    return load(from);
  }
  static void store_elementwise(const Vec<T>& vector, T* to) {
    store(vector, to);
  }
};

template <class T, Rounding rounding>
struct Lanes<Pair<T, rounding>> {
  using Number = float;

  C10_ALWAYS_INLINE static Pair<T, rounding> load(const T* from) {
    const auto [low, high] = at::vec::convert_to_float<T>(Vec<T>::loadu(from));
    return {low, high};
  }
  C10_ALWAYS_INLINE static void store(const Pair<T, rounding>& pair, T* to) {
#if defined(CPU_CAPABILITY_AVX2)
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      const auto [low, high] = pair.rounded_if(Rounding::last);
      const __m256i a = _mm256_srli_epi32(_mm256_castps_si256(low), 16);
      const __m256i b = _mm256_srli_epi32(_mm256_castps_si256(high), 16);
      const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
      return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), both);
    }
#endif
    at::vec::convert_from_float<T>(pair.low, pair.high).store(to);
  }

  C10_ALWAYS_INLINE static Pair<T, rounding> load_elementwise(const T* from) {
#if defined(CPU_CAPABILITY_AVX2)
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      const __m256i zero = _mm256_setzero_si256();
      return {
          _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, numbers)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, numbers))};
    }
#endif
    return load(from);
  }
  C10_ALWAYS_INLINE static void store_elementwise(const Pair<T, rounding>& pair, T* to) {
#if defined(CPU_CAPABILITY_AVX2)
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      const auto [low, high] = pair.rounded_if(Rounding::last);
      const __m256i a = _mm256_srli_epi32(_mm256_castps_si256(low), 16);
      const __m256i b = _mm256_srli_epi32(_mm256_castps_si256(high), 16);
      return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_packus_epi32(a, b));
    }
#endif
    store(pair, to);
  }
};

// What is computed on for T.
template <class T, Rounding rounding>
using LanesOf = std::conditional_t<is_reduced<T>, Pair<T, rounding>, Vec<T>>;

// The type of single numbers: T itself if each operation rounds.
template <class T, Rounding rounding>
using NumberOf = std::conditional_t<is_reduced<T> && rounding == Rounding::last, float, T>;

}  // namespace fastpatch::CPU_CAPABILITY
