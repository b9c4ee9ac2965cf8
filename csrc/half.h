// float16 by hand: for packing, where speed matters little and every machine must give the same.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

inline float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u, fraction = half & 1023u;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (fraction << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else {  // denormal: fraction * 2^-24, exactly
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// To the nearest, ties to even; infinity from 65520 on; NaN stays NaN.
inline uint16_t to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, which the addition rounds to
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;  // 0.5 has steps of 2^-24
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  const uint32_t odd = (bits >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((bits + 0xfffu + odd - 0x38000000u) >> 13));
}

}  // namespace octavo
