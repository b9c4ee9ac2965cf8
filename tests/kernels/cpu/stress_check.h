// The check of the stress programs: it ends the process, whatever threads are still at work.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::printf("line %d: not so: %s\n", __LINE__, #condition);           \
      std::fflush(stdout);                                                  \
      std::_Exit(1);                                                        \
    }                                                                       \
  } while (0)
