// Mixtures of experts: each token is routed to a few experts, and their outputs are summed.
//
//     route      a token's logits -> its experts, best first, and their weights; of few tokens, every
//                worker for itself, so that none waits
//     sort       every worker for itself: the rows of each expert that has any, one after the other,
//                and those of them that this rank of a group computes
//     gate, up   a linear for each of these experts, of its rows: gathered as they are encoded
//     down       likewise
//     combine    a token's rows, by weight and the best expert first, and the residual
//
// A linear computes a row in the same way for any number of rows, so that which tokens happen to share
// an expert does not change the result. With few rows, workers divide the weights of each expert
// and go on to the next without a barrier: only the weights of chosen experts are read. Many
// rows are encoded together, which takes a barrier.
//
// The ranks of a group share experts in one of two ways. Where each has some outputs of every matrix, they
// exchange the rows between the matrices. Where each has whole experts, they exchange what these make
// of their rows, and sum that as one rank does. All route alike, so all know who computes what, also
// of an expert that several ranks have: its rows are cut into pieces, which go to different ranks.
//
// Steps of many tokens are cut into chunks, so that a step needs the memory of one chunk only:
// large enough that reading the weights of an expert again for its rows is worth it.
#include <algorithm>
#include <cstring>
#include <limits>

#include "epilogue.h"
#include "kernels.h"
#include "linear.h"
#include "pack.h"
#include "simd.h"

namespace octavo {
namespace {

using simd::F32;

// Slots of scratch and shared memory, besides those of linear.cpp.
constexpr int kScoresSlot = 3, kSortedSlot = 4, kLinearsSlot = 6;
constexpr int kRowsSlot = 2;

constexpr int kMostRanks = 256;
constexpr int64_t kMostBytes = 32 << 20;  // of the rows of a chunk
constexpr float kLeastSum = 1e-20f;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Of a row that goes to an expert, at most: between the linears, with its weight and expert; and
// encoded, which takes most in floats. K formats pad to whole blocks.
int64_t row_bytes(int32_t hidden, int32_t inner) {
  const int64_t wider = std::max(hidden, inner);
  return 4 * (int64_t{hidden} + inner + 2) + 4 * ((wider + kBlock - 1) / kBlock * kBlock);
}

int chunk_tokens(int32_t hidden, int32_t inner, int32_t top_k) {
  return static_cast<int>(std::max<int64_t>(kMostBytes / (row_bytes(hidden, inner) * top_k), kFewRows));
}

// The experts of one token.
class Router {
 public:
  Router(const oct_routing& routing, const Worker& worker) : routing_(routing) {
    const size_t experts = static_cast<size_t>(routing.num_experts);
    const size_t padded = (experts + 15) / 16 * 16;
    scores_ = static_cast<float*>(worker.scratch(kScoresSlot, 2 * padded * sizeof(float)));
    choice_ = scores_ + padded;
  }

  void choose(const float* logits, int32_t* ids, float* weights) {
    score(logits);
    for (int e = 0; e < routing_.num_experts; e++) {
      choice_[e] = scores_[e] + (routing_.correction ? routing_.correction[e] : 0.0f);
    }
    if (routing_.num_groups > 1) keep_best_groups();
    float sum = 0.0f;
    for (int rank = 0; rank < routing_.top_k; rank++) {
      ids[rank] = take_best(0, routing_.num_experts);
      weights[rank] = scores_[ids[rank]];
      sum += weights[rank];
    }
    const float divisor = routing_.normalize ? sum + kLeastSum : 1.0f;
    for (int rank = 0; rank < routing_.top_k; rank++) {
      weights[rank] = weights[rank] / divisor * routing_.scale;
    }
  }

 private:
  void score(const float* logits) {
    const int experts = routing_.num_experts;
    float highest = kLowest;
    for (int e = 0; e < experts; e++) highest = logits[e] <= highest ? highest : logits[e];
    const bool is_softmax = routing_.scoring == OCT_SCORE_SOFTMAX;
    F32 sums = simd::zero();
    for (int e = 0; e < experts; e += kTile) {
      const int n = std::min(kTile, experts - e);
      F32 value = simd::load_first(logits + e, n);
      if (is_softmax) {
        value = simd::exp(simd::sub(value, simd::set1(highest)));
      } else {
        const F32 power = simd::exp(simd::sub(simd::zero(), value));
        value = simd::div(simd::set1(1.0f), simd::add(simd::set1(1.0f), power));
      }
      simd::store_first(scores_ + e, value, n);
      if (is_softmax) sums = simd::add(sums, simd::load_first(scores_ + e, n));
    }
    if (!is_softmax) return;
    const float total = simd::sum(sums);
    for (int e = 0; e < experts; e++) scores_[e] /= total;
  }

  // The expert with the greatest choice, of equals the first, which is not chosen again. One
  // is found in any case; NaN is visible in the result.
  int take_best(int begin, int end) {
    int best = begin;
    for (int e = begin + 1; e < end; e++) {
      if (choice_[e] > choice_[best] || is_taken(best)) best = e;
    }
    choice_[best] = kTaken;
    return best;
  }
  // Lower than any choice: scores are not negative, and corrections come from a model's file.
  static constexpr float kTaken = std::numeric_limits<float>::lowest();
  bool is_taken(int e) const { return choice_[e] == kTaken; }

  // Experts of other groups cannot be chosen.
  void keep_best_groups() {
    const int size = routing_.num_experts / routing_.num_groups;
    float worth[kMostGroups];
    bool is_kept[kMostGroups] = {};
    for (int g = 0; g < routing_.num_groups; g++) worth[g] = worth_of(choice_ + g * size, size);
    for (int kept = 0; kept < routing_.top_groups; kept++) {
      int best = -1;
      for (int g = 0; g < routing_.num_groups; g++) {
        if (!is_kept[g] && (best < 0 || worth[g] > worth[best])) best = g;
      }
      is_kept[best] = true;
    }
    for (int g = 0; g < routing_.num_groups; g++) {
      if (!is_kept[g]) std::fill_n(choice_ + g * size, size, kTaken);
    }
  }
  float worth_of(const float* choice, int size) const {
    float best[2] = {kLowest, kLowest};
    for (int e = 0; e < size; e++) {
      if (choice[e] > best[0]) {
        best[1] = best[0];
        best[0] = choice[e];
      } else if (choice[e] > best[1]) {
        best[1] = choice[e];
      }
    }
    return routing_.group_top == 1 ? best[0] : best[0] + best[1];
  }

 public:
  static constexpr int kMostGroups = 64;

 private:
  const oct_routing& routing_;
  float* scores_;
  float* choice_;
};

// Experts of which a group's ranks have copies, one or more of each.
class Copies {
 public:
  Copies(const oct_expert_places& places, int num_experts)
      : places_(places), num_experts_(num_experts) {}

  // Find the rows of each expert that this rank computes, as all ranks do. Experts of one copy come
  // first, so that the others can go where there is less to do.
  void share_rows(const int32_t* begin_of, int32_t* own_begin, int32_t* own_end) {
    for (const bool are_alone : {true, false}) {
      for (int e = 0; e < num_experts_; e++) {
        if ((count(e) == 1) != are_alone) continue;
        const Range own = deal(e, begin_of[e + 1] - begin_of[e]);
        own_begin[e] = begin_of[e] + own.begin;
        own_end[e] = begin_of[e] + own.end;
      }
    }
  }

  // Add the rows that each rank computes to `counts`, and behind them those of the one that has most.
  void count_rows(int64_t* counts) const {
    for (int rank = 0; rank < places_.num_ranks; rank++) counts[rank] += rows_[rank];
    counts[places_.num_ranks] += *std::max_element(rows_, rows_ + places_.num_ranks);
  }

 private:
  int count(int e) const { return places_.begin[e + 1] - places_.begin[e]; }

  // Deal out an expert's rows to its copies in turn, from the one whose rank has least to do, and
  // return this rank's. So few rows as encode by themselves stay together, since each piece reads
  // the weights.
  Range deal(int e, int rows) {
    const int32_t* ranks = places_.ranks + places_.begin[e];
    const int copies = count(e), pieces = std::min(copies, (rows + kFewRows - 1) / kFewRows);
    int first = 0;
    for (int i = 1; i < copies; i++) {
      if (work_[ranks[i]] < work_[ranks[first]]) first = i;
    }
    Range own = {0, 0};
    for (int piece = 0; piece < pieces; piece++) {
      const int rank = ranks[(first + piece) % copies];
      const Range dealt = share(rows, piece, pieces);
      rows_[rank] += dealt.end - dealt.begin;
      work_[rank] += std::max(dealt.end - dealt.begin, kFewRows);
      if (rank == places_.rank) own = dealt;
    }
    return own;
  }

  const oct_expert_places& places_;
  const int num_experts_;
  // Of each rank, the rows that it computes, and how long these take: so long as that many would.
  int64_t rows_[kMostRanks] = {}, work_[kMostRanks] = {};
};

// Some tokens of a step, seen by one worker.
class Chunk {
 public:
  Chunk(const oct_experts_args& args, int first, int tokens, const Worker& worker, Group* group)
      : args_(args), worker_(worker), group_(group), first_(first), tokens_(tokens),
        top_k_(args.routing.top_k), num_experts_(args.routing.num_experts) {
    const size_t rows = static_cast<size_t>(tokens) * static_cast<size_t>(top_k_);
    const size_t inner = args.inner_rows ? 0 : rows * static_cast<size_t>(args.inner);
    const size_t made = args.output_rows ? 0 : rows * static_cast<size_t>(args.hidden);
    auto* own = static_cast<float*>(worker.shared(kRowsSlot, (made + 2 * rows + inner) * 4));
    made_ = args.output_rows ? args.output_rows : own;
    inner_ = args.inner_rows ? args.inner_rows : own + made + 2 * rows;
    const size_t experts = static_cast<size_t>(num_experts_);
    const size_t sorted = 4 * rows + experts + 1 + (args.places.begin ? 2 * experts : 0);
    token_of_ = static_cast<int32_t*>(worker.scratch(kSortedSlot, sorted * sizeof(int32_t)));
    row_of_ = token_of_ + rows;
    weights_ = is_alone() ? reinterpret_cast<float*>(row_of_ + rows) : own + made;
    ids_ = reinterpret_cast<int32_t*>(weights_ + rows);
    begin_of_ = row_of_ + 3 * rows;
    own_begin_ = args.places.begin ? begin_of_ + experts + 1 : begin_of_;
    own_end_ = args.places.begin ? own_begin_ + experts : begin_of_ + 1;
  }

  // False once the call is aborted.
  bool run() {
    route();
    if (!is_alone() && !worker_.barrier()) return false;
    sort();
    run_experts(&Chunk::gate_up);
    if (!worker_.barrier(args_.inner_rows ? group_ : nullptr)) return false;
    run_experts(&Chunk::down);
    if (!worker_.barrier(args_.output_rows ? group_ : nullptr)) return false;
    combine();
    return true;
  }

 private:
  // Whether each worker routes all tokens, into memory of its own.
  bool is_alone() const { return tokens_ <= kFewRows; }

  void route() {
    Router router(args_.routing, worker_);
    const Range mine = is_alone() ? Range{0, tokens_} : share(tokens_, worker_.rank, worker_.size);
    for (int t = mine.begin; t < mine.end; t++) {
      const float* logits = args_.logits + int64_t{first_ + t} * num_experts_;
      router.choose(logits, ids_ + t * top_k_, weights_ + t * top_k_);
    }
  }

  // Rows by expert, and of one expert by token.
  void sort() {
    const int rows = tokens_ * top_k_;
    std::fill_n(begin_of_, num_experts_ + 1, 0);
    for (int i = 0; i < rows; i++) begin_of_[ids_[i] + 1]++;
    for (int e = 0; e < num_experts_; e++) begin_of_[e + 1] += begin_of_[e];
    for (int i = 0; i < rows; i++) {
      const int row = begin_of_[ids_[i]]++;  // each begins where the next one did, in the end
      row_of_[i] = row;
      token_of_[row] = first_ + i / top_k_;
    }
    for (int e = num_experts_; e > 0; e--) begin_of_[e] = begin_of_[e - 1];
    begin_of_[0] = 0;
    if (args_.places.begin) share_rows();
    if (args_.loads == nullptr || worker_.rank != 0) return;
    for (int e = 0; e < num_experts_; e++) args_.loads[e] += rows_of(e);
  }
  void share_rows() {
    Copies copies(args_.places, num_experts_);
    copies.share_rows(begin_of_, own_begin_, own_end_);
    if (args_.places.rows != nullptr && worker_.rank == 0) copies.count_rows(args_.places.rows);
  }
  int rows_of(int e) const { return begin_of_[e + 1] - begin_of_[e]; }
  // Those of this rank.
  int own_rows(int e) const { return own_end_[e] - own_begin_[e]; }

  // A linear for each expert that has rows here, all between two barriers.
  void run_experts(oct_linear_args (Chunk::*of)(int) const) const {
    const size_t most = static_cast<size_t>(std::min(num_experts_, tokens_ * top_k_));
    auto* args = static_cast<oct_linear_args*>(
        worker_.scratch(kLinearsSlot, most * sizeof(oct_linear_args)));
    int count = 0;
    for (int e = 0; e < num_experts_; e++) {
      if (own_rows(e) > 0) args[count++] = (this->*of)(e);
    }
    linears(args, count, worker_);
  }

  oct_linear_args gate_up(int e) const {
    const oct_expert& expert = args_.experts[e];
    float* y = inner_ + int64_t{own_begin_[e]} * args_.inner + args_.first_inner;
    oct_linear_args linear = {};
    linear.rows = own_rows(e);
    linear.k = args_.hidden;
    linear.in = args_.in;
    linear.ldin = args_.hidden;
    linear.row_index = token_of_ + own_begin_[e];
    linear.norm = args_.norm;
    linear.eps = args_.eps;
    linear.remainder_above = args_.remainder_above;
    linear.epilogue = args_.epilogue;
    linear.num_segments = 2;
    linear.segments[0] = {expert.gate, expert.gate_bias, y, args_.inner};
    linear.segments[1] = {expert.up, expert.up_bias, nullptr, args_.inner};
    return linear;
  }

  oct_linear_args down(int e) const {
    const oct_expert& expert = args_.experts[e];
    // Of a whole expert all outputs; else those from first_hidden on, which are num_hidden.
    const int first_output = args_.places.begin ? 0 : args_.first_hidden;
    oct_linear_args linear = {};
    linear.rows = own_rows(e);
    linear.k = args_.inner;
    linear.in = inner_ + int64_t{own_begin_[e]} * args_.inner;
    linear.ldin = args_.inner;
    linear.remainder_above = args_.inner_remainder_above;
    linear.epilogue = OCT_EPI_NONE;
    linear.num_segments = 1;
    linear.segments[0] = {expert.down, expert.down_bias,
                          made_ + int64_t{own_begin_[e]} * args_.hidden + first_output,
                          args_.hidden};
    return linear;
  }

  // Sixteen values at a time, divided over all tokens: one token has work for all workers.
  void combine() const {
    const int end = args_.first_hidden + args_.num_hidden;
    const int lines = (args_.num_hidden + kTile - 1) / kTile;
    const Range mine = share(tokens_ * lines, worker_.rank, worker_.size);
    for (int i = mine.begin; i < mine.end; i++) {
      const int t = i / lines, column = args_.first_hidden + i % lines * kTile;
      const int n = std::min(kTile, end - column);
      F32 sum = simd::zero();
      for (int rank = 0; rank < top_k_; rank++) {
        const int at = t * top_k_ + rank;
        const float* made = made_ + int64_t{row_of_[at]} * args_.hidden + column;
        sum = simd::fma(simd::load_first(made, n), simd::set1(weights_[at]), sum);
      }
      const int64_t to = int64_t{first_ + t} * args_.hidden + column;
      if (args_.residual) sum = simd::add(simd::load_first(args_.residual + to, n), sum);
      simd::store_first(args_.out + to, sum, n);
    }
  }

  const oct_experts_args& args_;
  const Worker& worker_;
  Group* const group_;  // NULL where ranks exchange no rows
  const int first_, tokens_, top_k_, num_experts_;
  // [rows, inner], [rows, hidden]; of tokens and ranks, the weights and the experts.
  float *inner_, *made_, *weights_;
  int32_t* ids_;
  // Of sorted rows, the token of each; of tokens and ranks, the row; of experts, the first row.
  int32_t *token_of_, *row_of_, *begin_of_;
  int32_t *own_begin_, *own_end_;  // of experts, the rows that this rank computes
};

int32_t check_routing(const oct_routing& r) {
  const bool has_groups = r.num_groups >= 1 && r.num_groups <= Router::kMostGroups &&
                          r.num_experts % r.num_groups == 0;
  const int size = has_groups ? r.num_experts / r.num_groups : 0;
  if (r.num_experts < 1 || r.top_k < 1 || !has_groups || r.top_groups < 1 ||
      r.top_groups > r.num_groups || int64_t{r.top_groups} * size < r.top_k || r.group_top < 1 ||
      r.group_top > std::min(size, 2)) {
    return fail(OCT_ERR_ARGUMENT, "%d of %d experts, from %d of %d groups by their best %d", r.top_k,
                r.num_experts, r.top_groups, r.num_groups, r.group_top);
  }
  if (r.scoring != OCT_SCORE_SOFTMAX && r.scoring != OCT_SCORE_SIGMOID) {
    return fail(OCT_ERR_ARGUMENT, "experts have the unknown scoring %d", r.scoring);
  }
  return OCT_OK;
}

// `most`: outputs, of which a rank may have fewer.
int32_t check_matrix(const oct_weight& weight, int most, int k, int e) {
  Layout layout = {};
  const int32_t code = make_layout(weight.format, weight.n, weight.k, weight.group, &layout);
  if (code != OCT_OK) return code;
  if (layout.is_stored() || weight.n > most || weight.k != k || weight.data == nullptr ||
      reinterpret_cast<uintptr_t>(weight.data) % kLine != 0) {
    return fail(OCT_ERR_ARGUMENT, "expert %d has a matrix of %d to %d that is not packed, not at a "
                "multiple of %d bytes, or not of %d to %d", e, weight.k, weight.n, kLine, k, most);
  }
  return OCT_OK;
}

// Whether this rank computes an expert.
bool is_here(const oct_expert_places& places, int e) {
  if (!places.begin) return true;
  return std::find(places.ranks + places.begin[e], places.ranks + places.begin[e + 1], places.rank) !=
         places.ranks + places.begin[e + 1];
}

int32_t check_places(const oct_experts_args& args) {
  const oct_expert_places& places = args.places;
  if (!places.begin) return OCT_OK;
  if (!places.ranks || places.num_ranks < 1 || places.num_ranks > kMostRanks || places.rank < 0 ||
      places.rank >= places.num_ranks || places.begin[0] != 0) {
    return fail(OCT_ERR_ARGUMENT, "experts of rank %d of %d: 1 to %d ranks can share them", places.rank,
                places.num_ranks, kMostRanks);
  }
  if (!args.output_rows || args.inner_rows || args.first_inner != 0) {
    return fail(OCT_ERR_ARGUMENT, "ranks that have whole experts share output_rows, and nothing else");
  }
  for (int e = 0; e < args.routing.num_experts; e++) {
    const int32_t begin = places.begin[e], end = places.begin[e + 1];
    bool is_right = begin < end && end - begin <= places.num_ranks;
    for (int32_t i = begin; i < end && is_right; i++) {
      is_right = places.ranks[i] < places.num_ranks &&
                 places.ranks[i] > (i > begin ? places.ranks[i - 1] : -1);
    }
    if (!is_right) return fail(OCT_ERR_ARGUMENT, "expert %d is with no ranks, or not with ranks of %d that "
                               "ascend", e, places.num_ranks);
  }
  return OCT_OK;
}

int32_t check_expert(const oct_experts_args& args, int e) {
  const oct_expert& expert = args.experts[e];
  const int num_inner = args.places.begin ? args.inner : args.experts[0].gate.n;
  const int num_outputs = args.places.begin ? args.hidden : args.num_hidden;
  if (expert.gate.n != expert.up.n || expert.gate.n != num_inner || expert.down.n != num_outputs) {
    return fail(OCT_ERR_ARGUMENT, "expert %d has %d and %d inner values and %d outputs, and not %d "
                "and %d", e, expert.gate.n, expert.up.n, expert.down.n, num_inner, num_outputs);
  }
  const int inner = args.inner - args.first_inner;
  int32_t code = check_matrix(expert.gate, inner, args.hidden, e);
  if (code == OCT_OK) code = check_matrix(expert.up, inner, args.hidden, e);
  return code == OCT_OK ? check_matrix(expert.down, num_outputs, args.inner, e) : code;
}

}  // namespace

void experts(const oct_experts_args& args, int32_t tokens, const Worker& worker, Group* group) {
  if (!args.inner_rows && !args.output_rows) group = nullptr;
  const int most = chunk_tokens(args.hidden, args.inner, args.routing.top_k);
  for (int first = 0; first < tokens; first += most) {
    if (first > 0 && !worker.barrier(group)) return;
    if (!Chunk(args, first, std::min(most, tokens - first), worker, group).run()) return;
  }
}

}  // namespace octavo

int32_t oct_check_experts(const oct_experts_args* args) {
  using namespace octavo;
  int32_t code = check_routing(args->routing);
  if (code != OCT_OK) return code;
  if (args->first_hidden < 0 || args->num_hidden < 1 || args->first_inner < 0 ||
      args->num_hidden > args->hidden - args->first_hidden) {
    return fail(OCT_ERR_ARGUMENT, "experts: %d outputs of %d from %d on, and inner values from %d on",
                args->num_hidden, args->hidden, args->first_hidden, args->first_inner);
  }
  if (args->experts && !args->places.begin && args->experts[0].gate.n < args->inner &&
      !args->inner_rows) {
    return fail(OCT_ERR_ARGUMENT, "experts: ranks that make parts of the inner values share inner_rows");
  }
  if (args->hidden < 1 || args->inner < 1 || !gates(args->epilogue)) {
    return fail(OCT_ERR_ARGUMENT, "experts of %d values and %d between them, with the epilogue %d",
                args->hidden, args->inner, args->epilogue);
  }
  if (!(args->remainder_above >= 0) || !(args->inner_remainder_above >= 0)) {
    return fail(OCT_ERR_ARGUMENT, "experts: remainder_above must not be negative");
  }
  if (!args->experts || !args->in || !args->logits || !args->out || args->out == args->in) {
    return fail(OCT_ERR_ARGUMENT, "experts: an input or out is NULL, or out is the input");
  }
  code = check_places(*args);
  for (int e = 0; e < args->routing.num_experts && code == OCT_OK; e++) {
    if (is_here(args->places, e)) code = check_expert(*args, e);
  }
  return code;
}

int64_t oct_experts_bytes(int32_t hidden, int32_t inner, int32_t top_k, int32_t rows) {
  using namespace octavo;
  if (hidden < 1 || inner < 1 || top_k < 1 || rows < 0) {
    return fail(OCT_ERR_ARGUMENT, "%d rows, each to %d experts of %d to %d values", rows, top_k,
                hidden, inner);
  }
  return std::min(rows, chunk_tokens(hidden, inner, top_k)) * top_k * row_bytes(hidden, inner);
}

int32_t oct_experts(oct_pool* pool, const oct_experts_args* args, int32_t rows) {
  using namespace octavo;
  const int32_t code = oct_check_experts(args);
  if (code != OCT_OK) return code;
  return run(pool, [&](const Worker& worker) { experts(*args, rows, worker, nullptr); });
}
