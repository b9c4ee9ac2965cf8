// A gate that other threads than those of a pool may open.
#include "counter.h"

#include <new>

#include "gate.h"

struct oct_counter {
  octavo::Gate<octavo::Reach::kProcess> gate;
};

void octavo::wait_for(oct_counter* counter, uint32_t number) {
  uint32_t now = counter->gate.value();
  while (now < number) now = counter->gate.wait(now, kCrowdedSleepNs);
}

oct_counter* oct_counter_new(void) { return new (std::nothrow) oct_counter; }

void oct_counter_free(oct_counter* counter) { delete counter; }

void oct_counter_add(oct_counter* counter, uint32_t amount) { counter->gate.add(amount); }

void oct_counter_reset(oct_counter* counter) { counter->gate.add(0 - counter->gate.value()); }
