// Sequences of a step with a common prefix in their block tables: shared keys are read once for all
// of their queries, by what is here called a *run* (as in cascade attention: Ye et al. 2024, "Cascade
// Inference"; Juravsky et al. 2024, "Hydragen", arXiv 2402.05099).
//
//     place  sequence  blocks
//       0       4      a a a a b b c ..       run 0: places 0 to 2, the keys of a
//       1       0      a a a a b b d ..       run 1: places 0 to 1, the keys of b, after those of a
//       2       5      a a a a e ..
//       3       2      f ..                   no run
//
// Places are an order of the sequences in which those that share blocks are next to each other,
// wherever they are in the step. The queries of a run are those of its places, one after the other.
//
// Runs end where tiles of keys do, and begin where splits do (attention.h); so a run's sums over a
// split are those that each of its queries would have alone, to the bit. What a run shares is older
// than all new tokens, so that its queries see all of it.
#pragma once

#include <cstdint>
#include <memory>

#include "octavo.h"

namespace octavo {

struct PrefixRun {
  int first_place, num_places;
  int first_row, num_rows;   // new tokens, in the order of places
  int first_key, end_key;
  int before;  // the run of the keys before the first, -1 if there are none
};

class SharedPrefixes {
 public:
  // Look through the tables of a group of layers. False if there is no memory.
  bool find(const oct_sequences& seqs, int group);

  int num_runs() const { return num_runs_; }
  const PrefixRun& run(int index) const { return runs_[index]; }
  // A sequence of a run, for its table.
  int sequence_of(const PrefixRun& run) const { return order_[run.first_place]; }
  // The last run of a sequence, -1 for none.
  int last_run(int seq) const { return num_runs_ > 0 ? last_runs_[seq] : -1; }
  // Keys that a sequence sees in runs.
  int end_key(int seq) const {
    const int run = last_run(seq);
    return run < 0 ? 0 : runs_[run].end_key;
  }
  // Of each sequence, its first new token in the order of places.
  const int32_t* first_rows() const { return first_rows_; }

 private:
  struct Stretch;

  bool allocate(int num_seqs);
  void sort(const oct_sequences& seqs, int group);
  void make_runs(const Stretch& places);
  template <class Use>
  void for_each_stretch(const Stretch& places, int end_key, const Use& use) const;
  int shared_by_all(const Stretch& places) const;
  void number_rows(const oct_sequences& seqs);

  std::unique_ptr<int32_t[]> memory_;
  std::unique_ptr<PrefixRun[]> runs_;
  int num_candidates_ = 0, num_runs_ = 0;
  int32_t* order_ = nullptr;       // [S] by place
  int32_t* shared_keys_ = nullptr; // [S] by place, of candidates: in common with the place before
  int32_t* last_runs_ = nullptr;   // [S] by sequence
  int32_t* first_rows_ = nullptr;  // [S] by sequence
};

}  // namespace octavo
