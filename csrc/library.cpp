// Version and struct sizes of a library, and its error reports.
#include <cstdarg>
#include <cstdio>

#include "octavo.h"
#include "pool.h"

#if !defined(OCT_ISA_NAME)
#error "OCT_ISA_NAME is not defined: build with csrc/build.py"
#endif

namespace octavo {
namespace {

thread_local char last_error[512] = "";

}  // namespace

int32_t fail(int32_t code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return code;
}

}  // namespace octavo

#define OCT_QUOTE_(x) #x
#define OCT_QUOTE(x) OCT_QUOTE_(x)

int32_t oct_abi_version(void) { return OCT_ABI_VERSION; }

int32_t oct_struct_sizes(const int32_t** sizes) {
  static const int32_t kSizes[] = {
      sizeof(oct_weight),    sizeof(oct_segment),        sizeof(oct_head),   sizeof(oct_linear_args),
      sizeof(oct_sink_window), sizeof(oct_sequences), sizeof(oct_attention_args), sizeof(oct_kv_memory),
      sizeof(oct_latent_args), sizeof(oct_sample), sizeof(oct_logprobs), sizeof(oct_embed_args),
      sizeof(oct_rows_args), sizeof(oct_states), sizeof(oct_conv_args), sizeof(oct_scan_args),
      sizeof(oct_delta_args), sizeof(oct_gated_norm_args), sizeof(oct_check_args),
      sizeof(oct_routing), sizeof(oct_expert), sizeof(oct_expert_places), sizeof(oct_experts_args),
      sizeof(oct_lora_segment), sizeof(oct_lora_site),
      sizeof(oct_lora), sizeof(oct_node), sizeof(oct_shared_head), sizeof(oct_program), sizeof(oct_batch),
  };
  *sizes = kSizes;
  return static_cast<int32_t>(sizeof kSizes / sizeof *kSizes);
}

const char* oct_isa(void) { return OCT_QUOTE(OCT_ISA_NAME); }
const char* oct_last_error(void) { return octavo::last_error; }
