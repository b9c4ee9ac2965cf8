// The rows of a step that one rank of a group computes where attention is shared by sequences, and not
// by heads: those of its own sequences, which are next to each other.
//
//     rows of the step    A A A | B | C C | D       sequences A and B are of rank 0, C and D of rank 1
//     own rows of rank 1              0 0   1
//
// A node of own rows runs as if these were all of the step: its addresses are those of the first own
// row. There may be none.
#pragma once

#include <memory>
#include <new>

#include "octavo.h"

namespace octavo {

class OwnRows {
 public:
  // Number the rows of a batch's own sequences from 0 on. False if there is no memory. They lie within
  // the step: see check_own_rows.
  bool find(const oct_batch& batch) {
    const oct_sequences& seqs = batch.seqs;
    first_seq_ = batch.first_own_seq;
    num_seqs_ = batch.num_own_seqs;
    first_row_ = num_seqs_ ? seqs.q_start[first_seq_] : 0;
    num_rows_ = num_seqs_ ? seqs.q_start[first_seq_ + num_seqs_] - first_row_ : 0;
    if (num_seqs_ == 0) return true;
    numbers_.reset(new (std::nothrow) int32_t[num_seqs_ + 1 + num_rows_]);
    if (!numbers_) return false;
    const int32_t first = static_cast<int32_t>(first_row_);
    int32_t* to = numbers_.get();
    for (int32_t s = 0; s <= num_seqs_; s++) *to++ = seqs.q_start[first_seq_ + s] - first;
    for (int32_t r = 0; seqs.parents && r < num_rows_; r++) {
      const int32_t parent = seqs.parents[first + r];
      *to++ = parent < 0 ? parent : parent >= first ? parent - first : kNoRow;
    }
    return true;
  }

  int32_t count() const { return num_rows_; }

  // The own sequences of a batch, or of a decode step that follows it.
  oct_sequences sequences(const oct_batch& batch) const {
    oct_sequences own = batch.seqs;
    own.num_seqs = num_seqs_;
    own.num_tokens = num_rows_;
    own.q_start = num_seqs_ ? numbers_.get() : &kNothing;
    own.kv_len += first_seq_;
    own.block_table += first_seq_ * int64_t{own.table_stride};
    if (own.parents) own.parents = own.q_start + num_seqs_ + 1;
    if (own.sink_windows) own.sink_windows += first_seq_;
    if (own.state_source) own.state_source += first_seq_;
    if (own.state_target) own.state_target += first_seq_;
    return own;
  }

  oct_linear_args of(const oct_linear_args& args) const {
    oct_linear_args own = args;
    own.rows = num_rows_;
    own.in += first_row_ * own.ldin;
    if (own.add) own.add += first_row_ * own.ldin;
    if (own.x_out) own.x_out += first_row_ * own.ldin;
    if (own.residual) own.residual += first_row_ * own.segments[0].ldy;
    for (int32_t i = 0; i < own.num_segments; i++) {
      if (own.segments[i].y) own.segments[i].y += first_row_ * own.segments[i].ldy;
    }
    return own;
  }

  oct_latent_args of(const oct_latent_args& args) const {
    oct_latent_args own = args;
    own.q += first_row_ * own.ldq;
    own.ckv += first_row_ * own.ldckv;
    own.out += first_row_ * own.ldo;
    return own;
  }

 private:
  static constexpr int32_t kNoRow = -2;  // of a row that follows one of another sequence: refused
  static constexpr int32_t kNothing = 0;

  int32_t first_seq_ = 0, num_seqs_ = 0, num_rows_ = 0;
  int64_t first_row_ = 0;
  std::unique_ptr<int32_t[]> numbers_;  // q_start [S + 1], parents [T]
};

}  // namespace octavo
