// float16 conversion in software: for packing, where results must be the same on every machine.
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

}  // namespace octavo
