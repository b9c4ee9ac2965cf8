// Positions of the rows of a step, for code that does not loop over its sequences.
#include "positions.h"

#include <algorithm>

#include "attention.h"

namespace octavo {

int position_of_row(const oct_sequences& seqs, int row) {
  const int32_t* next = std::upper_bound(seqs.q_start, seqs.q_start + seqs.num_seqs, row);
  return position_of(seqs, static_cast<int>(next - seqs.q_start) - 1, row);
}

}  // namespace octavo
