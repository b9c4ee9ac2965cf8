// Selects the type that implements a KV format, by the format's number.
#pragma once

#include "kv_formats.h"
#include "kv_scaled.h"

namespace octavo {

// Calls `use` with an object of the format's type; false if there is no such format.
template <class Use>
bool with_kv_format(int32_t format, const Use& use) {
  switch (format) {
    case OCT_KV_F32: return use(F32Kv()), true;
    case OCT_KV_BF16: return use(Bf16Kv()), true;
    case OCT_KV_INT8: return use(Int8Kv()), true;
    case OCT_KV_FP8: return use(Fp8Kv()), true;
    case OCT_KV_INT4: return use(Int4Kv()), true;
    case OCT_KV_K8V4: return use(K8V4Kv()), true;
  }
  return false;
}

}  // namespace octavo
