// Scheduling of a linear: which worker encodes which rows and computes which tiles, in what order.
//
// A unit of work is a panel of 1 or 2 tiles of a segment (of both segments, if one gates the
// other), for some blocks of rows.
//
//     few rows    Up to 8. Each worker encodes all rows for itself, so that none has to wait,
//                 and streams a fixed, contiguous part of the weights: reading memory takes
//                 the time. One block is read tile by tile, as a single sequential stream, which
//                 is prefetched a little ahead, because the hardware prefetcher stops at the end
//                 of each page of 4 KB.
//     many rows   Workers divide the encoding, meet, and then take units by ticket. The panel
//                 stays in the cache while all blocks of a chunk of rows pass by, and the next panel
//                 is prefetched meanwhile. A chunk is as many rows as leave room in the L2 cache.
//
// Several independent linears, as those of experts, are scheduled as if they were
// one: parts and tickets continue from each to the next. Few rows are
// encoded by the workers with a part of their linear, and once if linears have the same rows.
//
// If int8 activations have remainders, the products of ten blocks wait in the L1 cache for those
// of the remainders, before the epilogue.
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "activations.h"
#include "epilogue.h"
#include "kernels.h"
#include "lora.h"

namespace octavo {
namespace {

// Slots of scratch and shared memory. epilogue.cpp has others; the head of a step has the rest.
constexpr int kRowSlot = 0, kBlocksSlot = 1, kLinearsSlot = 5;
constexpr int kListsSlot = kRowSlot;  // once the last row is encoded
constexpr int kSharedBlocksSlot = 0;

constexpr int kAhead = 2048;               // bytes fetched before they are read, of a single stream
constexpr size_t kChunkBytes = 256 << 10;  // of encoded rows: half of a small L2 cache
constexpr int kLoneRun = 8;                // units that a linear of few rows, among others, streams
constexpr int kMinUnits = 4;               // per worker, so that all end at about the same time
constexpr int kTogether = kMostListedRows / kMaxRows;  // blocks whose remainders are one list
constexpr int kMostLists = 8;                          // of a chunk

TileKernel kernel_of(const Layout& layout, int rows, int tiles) {
  if (is_quantized(layout.format)) return int8_kernel(layout, rows, tiles);
  if (is_coded(layout.format)) return coded_kernel(layout, rows, tiles);
  return float_kernel(layout, rows, tiles);
}

bool is_gated(const oct_linear_args& args) { return gates(args.epilogue); }

// The weights that are read next, of both segments if one gates the other: whole lines.
struct Ahead {
  const uint8_t* data[2] = {};
  int64_t lines[2] = {};
};

// A linear, as one worker sees it.
class Linear {
 public:
  Linear(const oct_linear_args& args, const Worker& worker, HeadMaxima* maxima = nullptr,
         const LoraSums* loras = nullptr)
      : args_(args), worker_(worker), maxima_(maxima), loras_(loras) {
    for (int s = 0; s < args.num_segments; s++) {
      segments_[s].layout = layout_of(args.segments[s].weight);
      segments_[s].encoded = encoded_for(segments_[s].layout, args.segments[s].weight.columns);
    }
    num_blocks_ = args.rows <= most_lone_rows() ? 1 : (args.rows + kMaxRows - 1) / kMaxRows;
    panel_tiles_ = num_blocks_ == 1 ? 1 : kMaxTiles;
    // A gated segment is scheduled together with the one that gates it.
    walked_ = is_gated(args) ? 1 : args.num_segments;
    for (int s = 0; s < walked_; s++) num_units_ += units_of(s);
  }

  int rows() const { return args_.rows; }
  int64_t weight_bytes() const {
    int64_t bytes = 0;
    for (int s = 0; s < walked_; s++) bytes += units_of(s) * unit_bytes(s);
    return bytes;
  }
  // The unit that begins at or behind a byte of the weights.
  int first_unit_from(int64_t byte) const {
    int units = 0;
    for (int s = 0; s < walked_ && byte > 0; s++) {
      const int64_t size = unit_bytes(s);
      if (byte < units_of(s) * size) return units + static_cast<int>((byte + size - 1) / size);
      byte -= units_of(s) * size;
      units += units_of(s);
    }
    return units;
  }
  // Few rows: all of some units. `last`: the linear that this worker did last, or NULL.
  void run_part(Range units, const Linear* last) {
    place_encoded(worker_.scratch(kBlocksSlot, encoded_bytes()));
    fetch_beginning(unit(units.begin));
    if (last == nullptr || !encodes_as(*last)) encode_rows(0, args_.rows, units.begin == 0);
    run_units(units, Ahead(), 0, num_blocks_);
  }

  // Many rows: where they are encoded to, and their pieces, at least `least` if possible.
  size_t encoded_bytes() const {
    size_t bytes = 0;
    for (int e = 0; e < num_encoded_; e++) {
      const size_t blocks = encoded_[e].encoding.block_bytes(args_.rows);
      bytes += lines(blocks);  // and as many for entries, which are blocks of a row and a group
      if (!encoded_[e].has_remainders) continue;
      bytes += lines(blocks) + lines(flags_bytes(encoded_[e].encoding));
    }
    return bytes;
  }
  void place_encoded(void* memory) {
    uint8_t* at = static_cast<uint8_t*>(memory);
    for (int e = 0; e < num_encoded_; e++) {
      Encoded& encoded = encoded_[e];
      const size_t blocks = encoded.encoding.block_bytes(args_.rows);
      encoded.blocks = at;
      at += lines(blocks);
      if (!encoded.has_remainders) continue;
      encoded.remainders = {at, at + lines(blocks), args_.rows, encoded.encoding.group + 12};
      at += lines(blocks) + lines(flags_bytes(encoded.encoding));
    }
  }
  void cut(int least) {
    size_t bytes = 0;
    for (int e = 0; e < num_encoded_; e++) {
      bytes = std::max(bytes, encoded_[e].encoding.block_bytes(kMaxRows));
    }
    chunk_ = static_cast<int>(std::max<size_t>(kChunkBytes / bytes, 4));
    chunk_ = std::min(chunk_, any_remainders_ ? kMostLists * kTogether : num_blocks_);
    chunk_ = std::min(chunk_, num_blocks_);
    while (chunk_ > 1 && num_pieces() < least) chunk_ = (chunk_ + 1) / 2;
  }
  int num_pieces() const { return num_runs() * ((num_blocks_ + chunk_ - 1) / chunk_); }

  void encode_rows(int begin, int end, bool store_sum) {
    const size_t padded = (static_cast<size_t>(args_.k) + 127) / 128 * 128;
    const size_t rows_kept = any_columns_ ? 2 : 1;
    float* x = static_cast<float*>(worker_.scratch(kRowSlot, rows_kept * padded * sizeof(float)));
    float* gathered = x + padded;
    for (int r = begin; r < end; r++) {
      prepare_row(args_, r, store_sum, x);
      const int b = block_of(r);
      const float limit =
          any_remainders_ ? remainder_limit(x, args_.k, args_.remainder_above) : 0.0f;
      for (int e = 0; e < num_encoded_; e++) {
        const Encoded& encoded = encoded_[e];
        uint8_t* to = block(encoded, b);
        const int at = r - first_row(b), rows = block_rows(b);
        const float* from = x;
        if (encoded.columns != nullptr) {
          gather_inputs(x, encoded.columns, args_.k, gathered);
          from = gathered;
        }
        if (encoded.has_remainders) {
          encode_row(encoded.encoding, from, at, rows, to, limit, encoded.remainders, r);
        } else {
          encode_row(encoded.encoding, from, at, rows, to);
        }
      }
    }
  }

  // A piece; `ahead` is what comes after it.
  void run_piece(int piece, const Ahead& ahead) {
    const int first = piece / num_runs() * chunk_;
    run_units(units_of_piece(piece), ahead, first, std::min(first + chunk_, num_blocks_));
  }
  Ahead ahead_of_piece(int piece) const { return ahead_of(units_of_piece(piece).begin); }

 private:
  // A single block is multiplied with several consecutive units, so that they are a stream.
  int run_length() const { return num_blocks_ == 1 ? kLoneRun : 1; }
  int num_runs() const { return (num_units_ + run_length() - 1) / run_length(); }
  Range units_of_piece(int piece) const {
    const int begin = piece % num_runs() * run_length();
    return {begin, std::min(begin + run_length(), num_units_)};
  }
  void run_units(Range units, const Ahead& ahead, int first, int last) {
    for (int u = units.begin; u < units.end; u++) {
      const bool is_stream = num_blocks_ == 1;  // which fetches itself
      const Ahead next = u + 1 == units.end ? ahead : is_stream ? Ahead() : ahead_of(u + 1);
      compute(u, next, first, last);
    }
  }
  Ahead ahead_of(int u) const {
    const Unit next = unit(u);
    Ahead ahead;
    for (int s = 0; s < (is_gated(args_) ? 2 : 1); s++) {
      const int segment = next.segment + s;
      ahead.data[s] = tile_at(segment, next.tile);
      ahead.lines[s] = next.tiles * segments_[segment].layout.tile_bytes / kLine;
    }
    return ahead;
  }

  struct Encoded {
    Encoding encoding;
    const int32_t* columns;  // the inputs in their order; NULL: as they are
    bool has_remainders;
    uint8_t* blocks;  // one after the other
    Remainders remainders;
    RemainderList lists[kMostLists];  // of the chunk of rows that begins with block listed_
  };
  struct Segment {
    Layout layout;
    int encoded;  // index of its encoding
  };
  struct Unit {
    int segment, tile, tiles;
  };

  int most_lone_rows() const {
    for (int s = 0; s < args_.num_segments; s++) {
      if (!is_quantized(segments_[s].layout.format)) return kMaxLoneFloats;
    }
    return kMaxLoneRows;
  }
  // Blocks differ by one row at most: the first ones have one more.
  int block_rows(int b) const { return args_.rows / num_blocks_ + (b < args_.rows % num_blocks_); }
  int first_row(int b) const {
    return b * (args_.rows / num_blocks_) + std::min(b, args_.rows % num_blocks_);
  }
  int block_of(int row) const {
    int b = row / (args_.rows / num_blocks_ + 1);  // as if all were of the larger kind
    while (row >= first_row(b) + block_rows(b)) b++;
    return b;
  }
  uint8_t* block(const Encoded& encoded, int b) const {
    return encoded.blocks + encoded.encoding.block_bytes(first_row(b));
  }

  int encoded_for(const Layout& layout, const int32_t* columns) {
    const Encoding wanted = encoding_for(layout);
    for (int e = 0; e < num_encoded_; e++) {
      if (encoded_[e].encoding == wanted && same_order(encoded_[e].columns, columns)) return e;
    }
    const bool splits = wanted.kind == Encoding::kInt8 && std::isfinite(args_.remainder_above);
    encoded_[num_encoded_] = {wanted, columns, splits, nullptr, {}, {}};
    any_columns_ |= columns != nullptr;
    any_remainders_ |= splits;
    return num_encoded_++;
  }

  // Weights that were quantized by the same inputs have the same order, each in its own memory.
  bool same_order(const int32_t* a, const int32_t* b) const {
    if (a == nullptr || b == nullptr || a == b) return a == b;
    return std::memcmp(a, b, static_cast<size_t>(args_.k) * sizeof *a) == 0;
  }

  static size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
  size_t flags_bytes(const Encoding& encoding) const {
    return static_cast<size_t>(encoding.num_groups()) * static_cast<size_t>(args_.rows) + 8;
  }
  // Whether `other` encodes the same rows into the same memory.
  bool encodes_as(const Linear& other) const {
    const oct_linear_args &a = args_, &b = other.args_;
    if (a.rows != b.rows || a.k != b.k || a.in != b.in || a.norm != b.norm || a.add || b.add ||
        !a.row_index || !b.row_index || num_encoded_ != other.num_encoded_ ||
        !std::equal(a.row_index, a.row_index + a.rows, b.row_index)) {
      return false;
    }
    for (int e = 0; e < num_encoded_; e++) {
      const Encoded &mine = encoded_[e], &its = other.encoded_[e];
      if (!(mine.encoding == its.encoding) || !same_order(mine.columns, its.columns)) return false;
    }
    return true;
  }

  int units_of(int s) const {
    return (segments_[s].layout.num_tiles + panel_tiles_ - 1) / panel_tiles_;
  }
  int64_t unit_bytes(int s) const {
    int64_t bytes = segments_[s].layout.tile_bytes;
    if (is_gated(args_)) bytes += segments_[1].layout.tile_bytes;
    return bytes * panel_tiles_;
  }

  Unit unit(int u) const {
    int s = 0;
    for (; u >= units_of(s); s++) u -= units_of(s);
    const int tile = u * panel_tiles_;
    return {s, tile, std::min(panel_tiles_, segments_[s].layout.num_tiles - tile)};
  }

  const uint8_t* tile_at(int s, int tile) const {
    return static_cast<const uint8_t*>(args_.segments[s].weight.data) +
           tile * segments_[s].layout.tile_bytes;
  }

  // Weights do not depend on activations: prefetch the first ones.
  void fetch_beginning(const Unit& u) const {
    constexpr int kLines = 64;
    const int64_t lines = segments_[u.segment].layout.tile_bytes / kLine;
    for (int64_t i = 0; i < std::min<int64_t>(lines, kLines); i++) {
      simd::prefetch(tile_at(u.segment, u.tile) + i * kLine);
    }
  }

  // Rows of the residual are far apart, and would be loaded one by one.
  void fetch_residual(const Unit& u, int first, int count) const {
    if (args_.epilogue != OCT_EPI_RESIDUAL) return;
    const int end = std::min((u.tile + u.tiles) * kTile, segments_[0].layout.n);
    for (int r = first; r < first + count; r++) {
      const float* row = args_.residual + r * args_.segments[0].ldy;
      for (int column = u.tile * kTile; column < end; column += kTile) {
        simd::prefetch(row + column);
      }
    }
  }

  // Unit `number`, for the blocks from `first` up to `last`.
  void compute(int number, const Ahead& ahead, int first, int last) {
    const Unit u = unit(number);
    alignas(kLine) float values[2][kMaxTiles * kMostListedRows * kTile];
    const int blocks = last - first;
    if (any_remainders_ && listed_ != first) list_remainders(first, last);
    // Remainders are few: it takes many rows to make a group's weights worth unpacking.
    const int together = any_remainders_ ? kTogether : 1;
    for (int from = first; from < last; from += together) {
      const int to = std::min(from + together, last);
      const int row = first_row(from), rows = first_row(to) - row;
      for (int b = from; b < to; b++) {
        const int64_t at = int64_t{first_row(b) - row} * u.tiles * kTile;
        fetch_residual(u, first_row(b), block_rows(b));
        if (loras_) loras_->fetch(u.segment, u.tile, u.tiles, b - first, blocks);
        if (loras_ && is_gated(args_)) loras_->fetch(1, u.tile, u.tiles, b - first, blocks);
        if (loras_) loras_->fetch_next(int64_t{number} * num_blocks_ + b, slices());
        multiply(u.segment, u, b, ahead, 0, b - first, blocks, values[0] + at);
        if (is_gated(args_)) multiply(1, u, b, ahead, 1, b - first, blocks, values[1] + at);
      }
      const int list = (from - first) / kTogether;
      add_remainders(u.segment, u, list, values[0]);
      if (is_gated(args_)) add_remainders(1, u, list, values[1]);
      if (loras_) loras_->add(u.segment, u.tile, u.tiles, row, rows, values[0]);
      if (loras_ && is_gated(args_)) loras_->add(1, u.tile, u.tiles, row, rows, values[1]);
      const Products products = {u.segment, u.tile, u.tiles, row, rows, values[0], values[1]};
      finish(args_, products, maxima_);
    }
  }

  int64_t slices() const { return int64_t{num_units_} * num_blocks_; }

  // Tiles of segment s from `tile` on, with nothing to fetch.
  Panel panel_at(int s, int tile) const {
    const Layout& layout = segments_[s].layout;
    int steps = layout.num_groups();
    if (!has_units(layout.format)) {
      steps = static_cast<int>(encoded_[segments_[s].encoded].encoding.block_bytes(1) / 32);
    } else if (traits_of(layout.format).nested) {
      steps = layout.padded_k / kUnit;
    }
    return {tile_at(s, tile), layout.tile_bytes, steps, layout.group / kUnit, nullptr, 0};
  }

  // Products of segment s and block b. Meanwhile, prefetch share `share` of `shares` of the next piece;
  // for a single block, without a next piece, a little more of the stream.
  void multiply(int s, const Unit& u, int b, const Ahead& ahead, int part, int share, int shares,
                float* out) const {
    const Layout& layout = segments_[s].layout;
    Panel panel = panel_at(s, u.tile);
    const int64_t steps = static_cast<int64_t>(panel.steps) * shares;
    panel.next_lines = static_cast<int>((ahead.lines[part] + steps - 1) / steps);
    const int64_t skipped = static_cast<int64_t>(share) * panel.steps * panel.next_lines;
    panel.next = ahead.data[part] + skipped * kLine;
    if (skipped >= ahead.lines[part]) panel.next_lines = 0;
    if (num_blocks_ == 1 && ahead.lines[part] == 0) {
      const int64_t lines = layout.tile_bytes / kLine;
      panel.next = panel.tiles + kAhead;
      panel.next_lines = static_cast<int>((lines + panel.steps - 1) / panel.steps);
    }
    const int rows = block_rows(b);
    kernel_of(layout, rows, u.tiles)(panel, block(encoded_[segments_[s].encoded], b), out);
  }

  void add_remainders(int s, const Unit& u, int list, float* out) const {
    const Encoded& encoded = encoded_[segments_[s].encoded];
    if (!encoded.has_remainders || encoded.lists[list].count == 0) return;
    remainder_kernel(segments_[s].layout, u.tiles)(panel_at(s, u.tile), encoded.lists[list], out);
  }

  // Computes once what all units of a chunk of rows need.
  void list_remainders(int first, int last) {
    const int lists = (last - first + kTogether - 1) / kTogether;
    int groups = 0;
    for (int e = 0; e < num_encoded_; e++) {
      if (encoded_[e].has_remainders) groups += encoded_[e].encoding.num_groups();
    }
    const size_t most = static_cast<size_t>(groups) * static_cast<size_t>(lists);
    auto* at =
        static_cast<ListedGroup*>(worker_.scratch(kListsSlot, most * sizeof(ListedGroup)));
    for (int e = 0; e < num_encoded_; e++) {
      Encoded& encoded = encoded_[e];
      if (!encoded.has_remainders) continue;
      for (int i = 0; i < lists; i++) {
        const int from = first + i * kTogether;
        const int row = first_row(from), end = first_row(std::min(from + kTogether, last));
        RemainderList& list = encoded.lists[i];
        list = {&encoded.remainders, row, 0, at};
        for (int g = 0; g < encoded.encoding.num_groups(); g++) {
          const uint64_t rows = encoded.remainders.flagged(g, row, end - row);
          if (rows != 0) at[list.count++] = {rows, g};
        }
        at += list.count;
      }
    }
    listed_ = first;
  }

  const oct_linear_args& args_;
  const Worker& worker_;
  HeadMaxima* const maxima_;
  const LoraSums* const loras_;
  int num_blocks_, panel_tiles_, walked_;
  int num_units_ = 0, chunk_ = 1;
  bool any_remainders_ = false, any_columns_ = false;
  int listed_ = -1;
  Segment segments_[OCT_MAX_SEGMENTS];
  Encoded encoded_[OCT_MAX_SEGMENTS];
  int num_encoded_ = 0;
};

// Independent linears, as one worker processes them.
class Walk {
 public:
  Walk(Linear* linears, int count, const Worker& worker)
      : linears_(linears), count_(count), worker_(worker) {}

  void run() {
    const bool are_few = std::all_of(linears_, linears_ + count_, [](const Linear& linear) {
      return linear.rows() <= kFewRows;
    });
    if (are_few) return few_rows();
    place();
    encode();
    if (worker_.barrier()) compute();
  }

 private:
  struct Piece {
    Linear* linear;  // NULL: there are no more
    int number;
  };

  // Parts have about equally many bytes of weights.
  void few_rows() {
    int64_t bytes = 0;
    for (int i = 0; i < count_; i++) bytes += linears_[i].weight_bytes();
    int64_t begin = bytes / worker_.size * worker_.rank;
    int64_t end = worker_.rank + 1 < worker_.size ? begin + bytes / worker_.size : bytes;
    const Linear* last = nullptr;
    for (int i = 0; i < count_; i++) {
      Linear& linear = linears_[i];
      const Range units = {linear.first_unit_from(begin), linear.first_unit_from(end)};
      begin -= linear.weight_bytes();
      end -= linear.weight_bytes();
      if (units.begin == units.end) continue;
      linear.run_part(units, last);
      last = &linear;
    }
  }

  void place() {
    size_t bytes = 0;
    for (int i = 0; i < count_; i++) bytes += linears_[i].encoded_bytes();
    uint8_t* at = static_cast<uint8_t*>(worker_.shared(kSharedBlocksSlot, bytes));
    for (int i = 0; i < count_; i++) {
      linears_[i].place_encoded(at);
      linears_[i].cut((kMinUnits * worker_.size + count_ - 1) / count_);
      at += linears_[i].encoded_bytes();
    }
  }

  void encode() {
    int rows = 0;
    for (int i = 0; i < count_; i++) rows += linears_[i].rows();
    auto [begin, end] = share(rows, worker_.rank, worker_.size);
    for (int i = 0; i < count_ && end > 0; i++) {
      const int its = linears_[i].rows();
      linears_[i].encode_rows(std::max(begin, 0), std::min(end, its), true);
      begin -= its;
      end -= its;
    }
  }

  void compute() {
    for (Piece piece = take(), next; piece.linear != nullptr; piece = next) {
      next = take();  // known early, so that its weights can be fetched meanwhile
      piece.linear->run_piece(
          piece.number, next.linear != nullptr ? next.linear->ahead_of_piece(next.number) : Ahead());
    }
  }
  Piece take() {
    const int ticket = worker_.ticket();
    while (at_ < count_ && ticket - first_ >= linears_[at_].num_pieces()) {
      first_ += linears_[at_++].num_pieces();
    }
    if (at_ == count_) return {nullptr, 0};
    return {linears_ + at_, ticket - first_};
  }

  Linear* const linears_;
  const int count_;
  const Worker& worker_;
  int at_ = 0, first_ = 0;  // the linear of the last ticket, and the first ticket of that
};

int32_t check_segment(const oct_linear_args& args, int s) {
  const oct_segment& segment = args.segments[s];
  Layout layout = {};
  const oct_weight& w = segment.weight;
  const int32_t code = make_layout(w.format, w.n, w.k, w.group, &layout);
  if (code != OCT_OK) return code;
  if (layout.is_stored()) {
    return fail(OCT_ERR_ARGUMENT, "the weight of segment %d is stored, and has to be packed", s);
  }
  if (w.k != args.k) {
    return fail(OCT_ERR_ARGUMENT, "segment %d of a linear has %d inputs, its activations have %d",
                s, w.k, args.k);
  }
  if (w.data == nullptr || reinterpret_cast<uintptr_t>(w.data) % kLine != 0) {
    return fail(OCT_ERR_ARGUMENT, "the weight of segment %d is not at a multiple of %d bytes", s,
                kLine);
  }
  const bool written = args.epilogue != OCT_EPI_HEAD && (s == 0 || !is_gated(args));
  if (written && (segment.y == nullptr || segment.ldy < w.n)) {
    return fail(OCT_ERR_ARGUMENT,
                "segment %d of a linear has no y, or rows of %lld floats for %d outputs", s,
                static_cast<long long>(segment.ldy), w.n);
  }
  return OCT_OK;
}

}  // namespace

int32_t check_linear(const oct_linear_args& args) {
  if (args.rows < 0 || args.k < 1) {
    return fail(OCT_ERR_ARGUMENT, "a linear of %d rows and %d inputs", args.rows, args.k);
  }
  if (args.epilogue < OCT_EPI_NONE || args.epilogue > OCT_EPI_RELU) {
    return fail(OCT_ERR_ARGUMENT, "a linear has the unknown epilogue %d", args.epilogue);
  }
  const bool gated = is_gated(args), several = args.epilogue == OCT_EPI_NONE;
  const int most = several ? OCT_MAX_SEGMENTS : gated ? 2 : 1;
  if (args.num_segments < (gated ? 2 : 1) || args.num_segments > most) {
    return fail(OCT_ERR_ARGUMENT, "a linear with epilogue %d has %d segments; %d %s possible",
                args.epilogue, args.num_segments, most, several ? "at most are" : "is what is");
  }
  if (!(args.remainder_above >= 0)) {
    return fail(OCT_ERR_ARGUMENT, "a linear has remainder_above %g: it must not be negative",
                static_cast<double>(args.remainder_above));
  }
  if (args.in == nullptr || args.ldin < args.k) {
    return fail(OCT_ERR_ARGUMENT, "a linear has no input, or rows of %lld floats for %d inputs",
                static_cast<long long>(args.ldin), args.k);
  }
  if (args.add && (args.x_out == nullptr || args.x_out == args.in || args.x_out == args.add)) {
    return fail(OCT_ERR_ARGUMENT,
                "a linear with add needs an x_out for the sum, which is neither in nor add");
  }
  if (args.add_norm && !args.add) {
    return fail(OCT_ERR_ARGUMENT, "a linear has add_norm, but add is NULL");
  }
  for (int s = 0; s < args.num_segments; s++) {
    const int32_t code = check_segment(args, s);
    if (code != OCT_OK) return code;
  }
  if (gated && args.segments[0].weight.n != args.segments[1].weight.n) {
    return fail(OCT_ERR_ARGUMENT, "%d outputs cannot gate %d", args.segments[0].weight.n,
                args.segments[1].weight.n);
  }
  if (args.epilogue == OCT_EPI_RESIDUAL && args.residual == nullptr) {
    return fail(OCT_ERR_ARGUMENT, "a linear with a residual epilogue has no residual");
  }
  if (args.epilogue == OCT_EPI_HEAD &&
      (args.head == nullptr || args.head->best_logit == nullptr || args.head->best_id == nullptr)) {
    return fail(OCT_ERR_ARGUMENT, "a head has no best_logit or best_id");
  }
  return OCT_OK;
}

void linear(const oct_linear_args& args, const Worker& worker, const LoraSums* loras) {
  if (args.rows == 0) return;
  if (args.epilogue != OCT_EPI_HEAD) {
    Linear call(args, worker, nullptr, loras);
    return Walk(&call, 1, worker).run();
  }
  HeadMaxima maxima(args, worker);
  // Rows of logits and maxima may be memory of the pool that was just allocated.
  if (!worker.barrier()) return;
  Linear call(args, worker, &maxima, loras);
  Walk(&call, 1, worker).run();
  maxima.merge(*args.head);
}

void linears(const oct_linear_args* args, int count, const Worker& worker) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(Linear);
  Linear* calls = static_cast<Linear*>(worker.scratch(kLinearsSlot, bytes));
  for (int i = 0; i < count; i++) new (calls + i) Linear(args[i], worker);
  Walk(calls, count, worker).run();
}

}  // namespace octavo

int32_t oct_linear(oct_pool* pool, const oct_linear_args* args) {
  using namespace octavo;
  const int32_t code = check_linear(*args);
  if (code != OCT_OK) return code;
  return run(pool, [&](const Worker& worker) { linear(*args, worker); });
}
