// Adapters of low rank (LoRA, Hu et al. 2021, arXiv 2106.09685) in a step whose sequences have several of
// them, or none:
//
//     y = W x + B (scales * (A x))          of the rows that have an adapter; others are not touched
//
//     before a linear    sums = scales * (A x), for blocks of up to 4 rows of one adapter: its A is read
//                        once for a block (as BGMV and SGMV of Punica, arXiv 2310.18547)
//     in the linear      B sums is added to the products of a panel, while these are in the L1 cache, and
//                        before bias, gate and residual
//
// A sum is one chain from the first input to the last, and so is a product with B, in two halves. So
// neither the other rows of a step nor the worker that computes it changes the result of a row.
#pragma once

#include <cstdint>
#include <memory>

#include "octavo.h"
#include "pool.h"

namespace octavo {

constexpr int kMaxLoraRank = 256;

// Rows of a step, or of its head, by their adapters.
class LoraRows {
 public:
  // Sort `num_rows` rows, of which row r has the adapter lora_of(r), or -1. False if there is no memory.
  template <class LoraOf>
  bool sort(int num_rows, int num_loras, LoraOf&& lora_of);

  // `count` rows with one adapter, from place `begin` on.
  struct Block {
    int32_t begin, count, lora;
  };
  int num_blocks() const { return num_blocks_; }
  const Block& block(int i) const { return blocks_[i]; }
  int size() const { return num_rows_; }
  int count() const { return count_; }                           // rows that have an adapter
  int row_at(int place) const { return numbers_[place]; }        // they are sorted by adapter
  int place_of(int row) const { return numbers_[num_rows_ + row]; }  // -1: it has none
  int lora_of(int row) const { return numbers_[2 * num_rows_ + row]; }

 private:
  int num_rows_ = 0, count_ = 0, num_blocks_ = 0;
  std::unique_ptr<int32_t[]> numbers_;  // [3, num_rows]
  std::unique_ptr<Block[]> blocks_;
};

// The adapters of one step.
class StepLoras {
 public:
  // Find the rows of a batch, whose adapters have been checked. False if there is no memory.
  bool find(const oct_batch& batch);
  // Whether any adapter of the step changes a node.
  bool change(const oct_node& node) const;
  const oct_lora& lora(int i) const { return *loras_[i]; }
  const LoraRows& rows() const { return rows_; }
  const LoraRows& head_rows() const { return head_rows_; }

 private:
  const oct_lora* const* loras_ = nullptr;
  int num_loras_ = 0;
  LoraRows rows_, head_rows_;
};

// What adapters add to the products of one linear.
class LoraSums {
 public:
  // Compute scales * (A x) of all rows with an adapter, by all workers, and meet. `rows` are those of the
  // linear. False once the call is aborted.
  bool compute(const StepLoras& loras, const LoraRows& rows, int site, const oct_linear_args& args,
               const Worker& worker);
  // Fetch what `add` reads next of B, a part of it at a time: of some adapters.
  void fetch(int segment, int tile, int tiles, int part, int parts) const;
  // Fetch one of `slices` parts of the matrices A of the next site, for which memory would be waited
  // for: nothing else is computed there.
  void fetch_next(int64_t slice, int64_t slices) const;
  // Add to products [rows][tiles][16] of rows from `first` on, and of tiles from `tile` on.
  void add(int segment, int tile, int tiles, int first, int count, float* products) const;

 private:
  void add_block(int segment, int tile, int tiles, const LoraRows::Block& block, int first,
                 float* products) const;
  const oct_lora_segment& segment_of(int lora, int segment) const {
    return loras_->lora(lora).sites[site_].segments[segment];
  }

  const StepLoras* loras_ = nullptr;
  const LoraRows* rows_ = nullptr;
  int site_ = 0;
  int64_t stride_ = 0;     // floats of a row
  float* sums_ = nullptr;  // [rows with an adapter][stride], by place
};

// Add to x, an embedding of `width` values times `scale`, what an adapter makes of a token.
void add_embedding(const oct_lora& lora, int site, int token, float scale, int width, float* x);

// Whether the adapters of a batch are such that kernels read nothing out of bounds.
int32_t check_loras(const oct_program& program, const oct_batch& batch);

}  // namespace octavo
