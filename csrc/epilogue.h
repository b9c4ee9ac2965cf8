// The work of a linear on its products: bias, gate, residual, soft cap, maximum.
#pragma once

#include "octavo.h"
#include "pool.h"

namespace octavo {

// Whether an epilogue multiplies two segments, of which the first is activated.
constexpr bool gates(int epilogue) {
  return epilogue == OCT_EPI_SILU_MUL || epilogue == OCT_EPI_GELU_TANH_MUL ||
         epilogue == OCT_EPI_GELU_ERF_MUL || epilogue == OCT_EPI_CLAMPED_SWIGLU;
}

// Whether an epilogue activates the products of one segment.
constexpr bool activates(int epilogue) {
  return epilogue >= OCT_EPI_SILU && epilogue <= OCT_EPI_RELU;
}

// Products of `rows` rows from row `row`, and `tiles` tiles from tile `tile` of a segment.
struct Products {
  int segment, tile, tiles, row, rows;
  const float* values;  // [rows][tiles][16]
  const float* gated;   // the same of segment 1, where the epilogue multiplies the two
};

// The maxima of a worker's part of the vocabulary; of all of it after merge().
class HeadMaxima {
 public:
  HeadMaxima(const oct_linear_args& args, const Worker& worker);
  // Sixteen logits of a row from id `first` on; lanes beyond the vocabulary are -inf.
  void see(int row, int first, const float* logits);
  // Meets all workers, and writes best_logit and best_id.
  void merge(const oct_head& head) const;

 private:
  struct Best {
    float logit;
    int32_t id;
  };
  Best best_of(int row) const;

  const Worker& worker_;
  const int rows_;
  float* logits_;  // [rows, 16]: of ids that are equal modulo 16
  int32_t* ids_;
  Best* shared_;   // [workers, rows]
};

// Biases, gates, residuals, soft caps; into memory. `maxima` for the epilogue HEAD only.
void finish(const oct_linear_args& args, const Products& products, HeadMaxima* maxima);

}  // namespace octavo
