// The position of a row of a step in its own sequence.
#pragma once

#include "octavo.h"

namespace octavo {

int position_of_row(const oct_sequences& seqs, int row);

}  // namespace octavo
