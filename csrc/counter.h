// Waiting for what another thread makes while a step runs.
#pragma once

#include <cstdint>

#include "octavo.h"

namespace octavo {

// Return once the counter has come to a number. The thread that counts needs a core, maybe this one:
// so this spins for a moment, yields, and soon sleeps.
void wait_for(oct_counter* counter, uint32_t number);

}  // namespace octavo
