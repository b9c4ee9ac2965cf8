// What a library says about itself, and how it reports errors.
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
const char* oct_isa(void) { return OCT_QUOTE(OCT_ISA_NAME); }
const char* oct_last_error(void) { return octavo::last_error; }
