#include "epilogue.h"

#include <cmath>
#include <cstddef>
#include <limits>

#include "pack.h"
#include "simd.h"

namespace octavo {
namespace {

using simd::F32;
using simd::I32;

constexpr int kMaximaSlot = 2;  // of scratch
constexpr int kBestSlot = 1;    // of shared memory
constexpr float kLowest = -std::numeric_limits<float>::infinity();

alignas(64) constexpr int32_t kLaneIds[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                              8, 9, 10, 11, 12, 13, 14, 15};

// The variable is the second operand of minima and maxima, which keeps a NaN.
OCT_INLINE F32 clamped_swiglu(F32 gate, F32 up) {
  const F32 limit = simd::set1(7.0f), one = simd::set1(1.0f);
  gate = simd::min(limit, gate);
  up = simd::min(limit, simd::max(simd::sub(simd::zero(), limit), up));
  const F32 power = simd::exp(simd::mul(simd::set1(-1.702f), gate));
  return simd::mul(simd::div(gate, simd::add(one, power)), simd::add(up, one));
}

OCT_INLINE F32 gated(int epilogue, F32 gate, F32 up) {
  switch (epilogue) {
    case OCT_EPI_SILU_MUL: return simd::mul(simd::silu(gate), up);
    case OCT_EPI_GELU_TANH_MUL: return simd::mul(simd::gelu_tanh(gate), up);
    case OCT_EPI_GELU_ERF_MUL: return simd::mul(simd::gelu_erf(gate), up);
    default: return clamped_swiglu(gate, up);
  }
}

// A NaN is not less, and stays.
OCT_INLINE F32 activated(int epilogue, F32 x) {
  switch (epilogue) {
    case OCT_EPI_SILU: return simd::silu(x);
    case OCT_EPI_GELU_TANH: return simd::gelu_tanh(x);
    case OCT_EPI_GELU_ERF: return simd::gelu_erf(x);
    default: return simd::select(simd::less(x, simd::zero()), simd::zero(), x);
  }
}

template <int kEpilogue>
void finish_tiles(const oct_linear_args& args, const Products& p, HeadMaxima* maxima) {
  const oct_segment& segment = args.segments[p.segment];
  constexpr bool kScales = kEpilogue == OCT_EPI_RESIDUAL || kEpilogue == OCT_EPI_HEAD;
  const bool scales = kScales && args.scale != 0;
  for (int t = 0; t < p.tiles; t++) {
    const int column = (p.tile + t) * kTile;
    const int n = segment.weight.n - column < kTile ? segment.weight.n - column : kTile;
    const F32 bias = segment.bias ? simd::load_first(segment.bias + column, n) : simd::zero();
    const float* gate_bias = gates(kEpilogue) ? args.segments[1].bias : nullptr;
    const F32 second_bias = gate_bias ? simd::load_first(gate_bias + column, n) : simd::zero();
    for (int r = 0; r < p.rows; r++) {
      const int at = (r * p.tiles + t) * kTile, row = p.row + r;
      F32 value = simd::load(p.values + at);
      if (segment.bias) value = simd::add(value, bias);
      if (scales) value = simd::mul(value, simd::set1(args.scale));
      if constexpr (kEpilogue == OCT_EPI_HEAD) {
        const float cap = args.head->softcap;
        if (cap > 0) {
          value = simd::mul(simd::tanh(simd::div(value, simd::set1(cap))), simd::set1(cap));
        }
        if (args.head->logits && args.head->logits[row]) {
          simd::store_first(args.head->logits[row] + args.head->first_id + column, value, n);
        }
        alignas(64) float logits[kTile];
        simd::store(logits, value);
        for (int i = n; i < kTile; i++) logits[i] = kLowest;
        maxima->see(row, column, logits);
        continue;
      }
      if constexpr (gates(kEpilogue)) {
        F32 second = simd::load(p.gated + at);
        if (gate_bias) second = simd::add(second, second_bias);
        value = gated(kEpilogue, value, second);
      }
      if constexpr (activates(kEpilogue)) value = activated(kEpilogue, value);
      const int64_t offset = row * segment.ldy + column;
      if constexpr (kEpilogue == OCT_EPI_RESIDUAL) {
        value = simd::add(simd::load_first(args.residual + offset, n), value);
      }
      simd::store_first(segment.y + offset, value, n);
    }
  }
}

}  // namespace

HeadMaxima::HeadMaxima(const oct_linear_args& args, const Worker& worker)
    : worker_(worker), rows_(args.rows) {
  const size_t rows = static_cast<size_t>(args.rows);
  logits_ = static_cast<float*>(worker.scratch(kMaximaSlot, rows * kTile * 8));
  ids_ = reinterpret_cast<int32_t*>(logits_ + rows * kTile);
  shared_ = static_cast<Best*>(
      worker.shared(kBestSlot, rows * static_cast<size_t>(worker.size) * sizeof(Best)));
  for (size_t i = 0; i < rows * kTile; i++) {
    logits_[i] = kLowest;
    ids_[i] = std::numeric_limits<int32_t>::max();
  }
}

void HeadMaxima::see(int row, int first, const float* logits) {
  float* best = logits_ + row * kTile;
  int32_t* ids = ids_ + row * kTile;
  const F32 value = simd::load(logits), before = simd::load(best);
  // A NaN is never less, so once it is the best it stays.
  const simd::Mask more = simd::less(before, value), nan = simd::is_nan(value);
  if (!simd::any(more) && !simd::any(nan)) return;
  const I32 here = simd::add(simd::load(kLaneIds), simd::set1(first));
  simd::store(ids, simd::select(more, here, simd::load(ids)));
  simd::store(best, simd::select(nan, value, simd::select(more, value, before)));
}

HeadMaxima::Best HeadMaxima::best_of(int row) const {
  Best best = {kLowest, std::numeric_limits<int32_t>::max()};
  for (int i = row * kTile; i < (row + 1) * kTile; i++) {
    if (std::isnan(best.logit)) break;
    const bool more = !(logits_[i] <= best.logit);
    if (more || (logits_[i] == best.logit && ids_[i] < best.id)) best = {logits_[i], ids_[i]};
  }
  return best;
}

void HeadMaxima::merge(const oct_head& head) const {
  Best* mine = shared_ + static_cast<int64_t>(worker_.rank) * rows_;
  for (int r = 0; r < rows_; r++) mine[r] = best_of(r);
  if (!worker_.barrier()) return;
  const Range range = share(rows_, worker_.rank, worker_.size);
  for (int r = range.begin; r < range.end; r++) {
    Best best = shared_[r];
    for (int w = 1; w < worker_.size; w++) {
      const Best other = shared_[static_cast<int64_t>(w) * rows_ + r];
      if (std::isnan(best.logit)) break;
      const bool more = !(other.logit <= best.logit);
      if (more || (other.logit == best.logit && other.id < best.id)) best = other;
    }
    // Nothing is more than -inf, so if that is the best, all are equal; and NaN has no id.
    const bool has_id = best.logit > kLowest;
    head.best_logit[r] = best.logit;
    head.best_id[r] = has_id ? best.id : 0;
  }
}

void finish(const oct_linear_args& args, const Products& products, HeadMaxima* maxima) {
  switch (args.epilogue) {
    case OCT_EPI_NONE:
      return finish_tiles<OCT_EPI_NONE>(args, products, maxima);
    case OCT_EPI_RESIDUAL:
      return finish_tiles<OCT_EPI_RESIDUAL>(args, products, maxima);
    case OCT_EPI_SILU_MUL:
      return finish_tiles<OCT_EPI_SILU_MUL>(args, products, maxima);
    case OCT_EPI_GELU_TANH_MUL:
      return finish_tiles<OCT_EPI_GELU_TANH_MUL>(args, products, maxima);
    case OCT_EPI_GELU_ERF_MUL:
      return finish_tiles<OCT_EPI_GELU_ERF_MUL>(args, products, maxima);
    case OCT_EPI_HEAD:
      return finish_tiles<OCT_EPI_HEAD>(args, products, maxima);
    case OCT_EPI_CLAMPED_SWIGLU:
      return finish_tiles<OCT_EPI_CLAMPED_SWIGLU>(args, products, maxima);
    case OCT_EPI_SILU:
      return finish_tiles<OCT_EPI_SILU>(args, products, maxima);
    case OCT_EPI_GELU_TANH:
      return finish_tiles<OCT_EPI_GELU_TANH>(args, products, maxima);
    case OCT_EPI_GELU_ERF:
      return finish_tiles<OCT_EPI_GELU_ERF>(args, products, maxima);
    case OCT_EPI_RELU:
      return finish_tiles<OCT_EPI_RELU>(args, products, maxima);
  }
}

}  // namespace octavo
