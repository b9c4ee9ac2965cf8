#include "lora.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "activations.h"
#include "pack.h"
#include "simd.h"

namespace octavo {
namespace {

using simd::F32;

constexpr int kRowsSlot = 0;   // of scratch: linears encode their rows there, later
constexpr int kSumsSlot = 4;   // of shared memory
constexpr int kBlockRows = 4;
// Tiles of A that a block of rows is multiplied with at once.
constexpr int kPanel = simd::kNumRegisters >= 32 ? 4 : 1;
constexpr int kMostFetched = 32;  // lines of B of one adapter
constexpr int64_t kAhead = 2048;   // bytes of A

constexpr int64_t value_bytes(int format) { return format == OCT_BF16 ? 2 : 4; }

template <int kFormat>
OCT_INLINE F32 load_at(const void* values, int64_t i) {
  if constexpr (kFormat == OCT_BF16) {
    return simd::load_bf16(static_cast<const uint16_t*>(values) + i);
  } else {
    return simd::load(static_cast<const float*>(values) + i);
  }
}

template <int kFormat>
float value_at(const void* values, int64_t i) {
  if constexpr (kFormat == OCT_BF16) {
    const uint32_t bits = uint32_t{static_cast<const uint16_t*>(values)[i]} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  } else {
    return static_cast<const float*>(values)[i];
  }
}

// Fetch what is read some steps later: the hardware prefetcher stops at the end of each page.
template <int kFormat>
OCT_INLINE void fetch_ahead(const void* values, int64_t at) {
  const int64_t byte = at * value_bytes(kFormat);
  if (byte % 64 == 0) simd::prefetch(static_cast<const uint8_t*>(values) + byte + kAhead);
}

// Products of kRows rows x [kRows][ldx] with kTiles tiles of A from `tile` on, scaled.
template <int kFormat, int kRows, int kTiles>
void multiply(const oct_lora_site& site, int k, int tile, const float* x, int64_t ldx,
              float* const* out) {
  F32 acc[kTiles][kRows];
  for (int t = 0; t < kTiles; t++) {
    for (int r = 0; r < kRows; r++) acc[t][r] = simd::zero();
  }
  for (int i = 0; i < k; i++) {
    F32 a[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      const int64_t at = (int64_t{tile + t} * k + i) * kTile;
      a[t] = load_at<kFormat>(site.a, at);
      fetch_ahead<kFormat>(site.a, at);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const F32 value = simd::set1(x[r * ldx + i]);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) acc[t][r] = simd::fma(a[t], value, acc[t][r]);
    }
  }
  for (int t = 0; t < kTiles; t++) {
    const F32 scales = simd::load(site.scales + (tile + t) * kTile);
    for (int r = 0; r < kRows; r++) {
      simd::store(out[r] + (tile + t) * kTile, simd::mul(acc[t][r], scales));
    }
  }
}

using Multiply = void (*)(const oct_lora_site&, int, int, const float*, int64_t, float* const*);

template <int kFormat, int kTiles, int kRows = kBlockRows>
Multiply with_rows(int rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kFormat, kTiles, kRows - 1>(rows);
  }
  return multiply<kFormat, kRows, kTiles>;
}

template <int kFormat, int kTiles = kPanel>
Multiply with_tiles(int rows, int tiles) {
  if constexpr (kTiles > 1) {
    if (tiles < kTiles) return with_tiles<kFormat, kTiles - 1>(rows, tiles);
  }
  return with_rows<kFormat, kTiles>(rows);
}

// The sum over j of sums[r][j] * B[tile][j] of kRows rows, in two chains: even and odd j.
template <int kFormat, int kRows>
OCT_INLINE void expand(const oct_lora_segment& segment, int tile, const float* const* sums,
                       F32* out) {
  const int64_t at = int64_t{tile} * segment.rank * kTile;
  F32 even[kRows], odd[kRows];
  for (int r = 0; r < kRows; r++) even[r] = odd[r] = simd::zero();
  int j = 0;
  for (; j + 2 <= segment.rank; j += 2) {
    const F32 b = load_at<kFormat>(segment.b, at + j * kTile);
    const F32 next = load_at<kFormat>(segment.b, at + (j + 1) * kTile);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      even[r] = simd::fma(b, simd::set1(sums[r][j]), even[r]);
      odd[r] = simd::fma(next, simd::set1(sums[r][j + 1]), odd[r]);
    }
  }
  if (j < segment.rank) {
    const F32 b = load_at<kFormat>(segment.b, at + j * kTile);
    for (int r = 0; r < kRows; r++) even[r] = simd::fma(b, simd::set1(sums[r][j]), even[r]);
  }
  for (int r = 0; r < kRows; r++) out[r] = simd::add(even[r], odd[r]);
}

// Add to the products of kRows rows with one adapter, wherever these rows are.
template <int kFormat, int kRows>
void add_rows(const oct_lora_segment& segment, int tile, int tiles, const float* const* sums,
              float* const* products) {
  for (int t = 0; t < tiles; t++) {
    F32 changes[kRows];
    expand<kFormat, kRows>(segment, tile + t, sums, changes);
    for (int r = 0; r < kRows; r++) {
      float* at = products[r] + t * kTile;
      simd::store(at, simd::add(simd::load(at), changes[r]));
    }
  }
}

using AddRows = void (*)(const oct_lora_segment&, int, int, const float* const*, float* const*);

template <int kFormat, int kRows = kBlockRows>
AddRows adder(int rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return adder<kFormat, kRows - 1>(rows);
  }
  return add_rows<kFormat, kRows>;
}

template <int kFormat>
void add_embedding_of(const oct_lora_site& site, int token, float scale, int width, float* x) {
  const oct_lora_segment& segment = site.segments[0];
  alignas(64) float sums[kMaxLoraRank];
  for (int j = 0; j < segment.rank; j++) {
    sums[j] = value_at<kFormat>(site.a, int64_t{token} * site.rows + j) * site.scales[j];
  }
  const float* const of_row = sums;
  for (int i = 0; i < width; i += kTile) {
    F32 change;
    expand<kFormat, 1>(segment, i / kTile, &of_row, &change);
    change = simd::mul(change, simd::set1(scale));
    const int n = std::min(kTile, width - i);
    simd::store_first(x + i, simd::add(simd::load_first(x + i, n), change), n);
  }
}

int32_t check_site(const oct_lora_site& site, int format, const oct_node& node, int number) {
  if (format != OCT_F32 && format != OCT_BF16) {
    return fail(OCT_ERR_ARGUMENT, "an adapter has the format %d: BF16 and F32 are possible", format);
  }
  if (site.a == nullptr) return OCT_OK;
  const bool is_embedding = node.op == OCT_OP_EMBED;
  if (site.scales == nullptr || site.rows < 1 || (!is_embedding && site.rows % kTile != 0)) {
    return fail(OCT_ERR_ARGUMENT, "site %d of an adapter has no scales, or %d rows of A", number,
                site.rows);
  }
  for (const oct_lora_segment& segment : site.segments) {
    if (segment.b == nullptr) continue;
    const bool is_part = segment.first >= 0 && segment.rank <= site.rows - segment.first;
    if (segment.rank < 1 || segment.rank > kMaxLoraRank || !is_part) {
      return fail(OCT_ERR_ARGUMENT, "site %d of an adapter has the rank %d from %d on, of %d rows",
                  number, segment.rank, segment.first, site.rows);
    }
  }
  return OCT_OK;
}

}  // namespace

template <class LoraOf>
bool LoraRows::sort(int num_rows, int num_loras, LoraOf&& lora_of) {
  num_rows_ = num_rows;
  numbers_.reset(new (std::nothrow) int32_t[3 * static_cast<size_t>(num_rows) + num_loras + 1]);
  if (!numbers_) return false;
  int32_t* places = numbers_.get() + num_rows;
  int32_t* loras = places + num_rows;
  int32_t* begins = loras + num_rows;  // where the rows of each adapter go
  std::fill_n(begins, num_loras + 1, 0);
  for (int r = 0; r < num_rows; r++) {
    loras[r] = lora_of(r);
    if (loras[r] >= 0) begins[loras[r] + 1]++;
  }
  num_blocks_ = 0;
  for (int i = 0; i < num_loras; i++) {
    num_blocks_ += (begins[i + 1] + kBlockRows - 1) / kBlockRows;
    begins[i + 1] += begins[i];
  }
  count_ = begins[num_loras];
  blocks_.reset(new (std::nothrow) Block[num_blocks_ > 0 ? num_blocks_ : 1]);
  if (!blocks_) return false;
  Block* block = blocks_.get();
  for (int i = 0; i < num_loras; i++) {
    for (int at = begins[i]; at < begins[i + 1]; at += kBlockRows) {
      *block++ = {at, std::min(kBlockRows, begins[i + 1] - at), i};
    }
  }
  for (int r = 0; r < num_rows; r++) {
    places[r] = loras[r] < 0 ? -1 : begins[loras[r]]++;
    if (places[r] >= 0) numbers_[places[r]] = r;
  }
  return true;
}

bool StepLoras::find(const oct_batch& batch) {
  if (!batch.lora_of_seq) return true;
  loras_ = batch.loras;
  num_loras_ = batch.num_loras;
  const oct_sequences& seqs = batch.seqs;
  int s = 0;
  const auto of_token = [&](int row) {
    while (row >= seqs.q_start[s + 1]) s++;
    return batch.lora_of_seq[s];
  };
  if (!rows_.sort(seqs.num_tokens, num_loras_, of_token)) return false;
  return head_rows_.sort(batch.num_out, num_loras_,
                         [&](int r) { return rows_.lora_of(batch.out_rows[r]); });
}

bool StepLoras::change(const oct_node& node) const {
  if (node.lora_site < 0) return false;
  for (int i = 0; i < num_loras_; i++) {
    if (loras_[i]->sites[node.lora_site].a != nullptr) return true;
  }
  return false;
}

bool LoraSums::compute(const StepLoras& loras, const LoraRows& rows, int site,
                       const oct_linear_args& args, const Worker& worker) {
  loras_ = &loras;
  rows_ = &rows;
  site_ = site;
  for (int b = 0; b < rows.num_blocks(); b++) {
    const int64_t here = loras.lora(rows.block(b).lora).sites[site].rows;
    stride_ = std::max(stride_, here);
  }
  const int64_t padded = (int64_t{args.k} + 127) / 128 * 128;
  sums_ = static_cast<float*>(
      worker.shared(kSumsSlot, static_cast<size_t>(rows.count() * stride_) * sizeof(float)));
  float* x = static_cast<float*>(
      worker.scratch(kRowsSlot, static_cast<size_t>(kBlockRows * padded) * sizeof(float)));
  // Units are panels of tiles of blocks. A worker that has several of one block prepares its rows once.
  int ticket = worker.ticket(), first = 0;
  for (int b = 0; b < rows.num_blocks(); b++) {
    const LoraRows::Block& block = rows.block(b);
    const oct_lora& lora = loras.lora(block.lora);
    const oct_lora_site& here = lora.sites[site];
    if (here.a == nullptr) continue;
    const int tiles = here.rows / kTile, panels = (tiles + kPanel - 1) / kPanel;
    bool is_prepared = false;
    for (; ticket < first + panels; ticket = worker.ticket()) {
      float* out[kBlockRows];
      for (int r = 0; r < block.count; r++) {
        out[r] = sums_ + (block.begin + r) * stride_;
        if (!is_prepared) prepare_row(args, rows.row_at(block.begin + r), false, x + r * padded);
      }
      is_prepared = true;
      const int tile = (ticket - first) * kPanel, count = std::min(kPanel, tiles - tile);
      const Multiply multiply = lora.format == OCT_BF16
                                    ? with_tiles<OCT_BF16>(block.count, count)
                                    : with_tiles<OCT_F32>(block.count, count);
      multiply(here, args.k, tile, x, padded, out);
    }
    first += panels;
  }
  return worker.barrier();
}

void LoraSums::fetch(int segment, int tile, int tiles, int part, int parts) const {
  for (int b = 0, last = -1, number = 0; b < rows_->num_blocks(); b++) {
    const int lora = rows_->block(b).lora;
    if (lora == last) continue;
    last = lora;
    if (number++ % parts != part) continue;
    const oct_lora_segment& here = segment_of(lora, segment);
    if (here.b == nullptr) continue;
    const int64_t tile_bytes = here.rank * kTile * value_bytes(loras_->lora(lora).format);
    const uint8_t* at = static_cast<const uint8_t*>(here.b) + tile * tile_bytes;
    const int64_t lines = std::min<int64_t>(tiles * tile_bytes / 64, kMostFetched);
    for (int64_t i = 0; i < lines; i++) simd::prefetch(at + i * 64);
  }
}

void LoraSums::fetch_next(int64_t slice, int64_t slices) const {
  const int site = site_ + 1;
  for (int b = 0, last = -1; b < rows_->num_blocks(); b++) {
    const int lora = rows_->block(b).lora;
    if (lora == last) continue;
    last = lora;
    if (site >= loras_->lora(lora).num_sites) return;
    const oct_lora_site& next = loras_->lora(lora).sites[site];
    if (next.a == nullptr) continue;
    const int64_t lines = next.a_bytes / 64;
    const uint8_t* at = static_cast<const uint8_t*>(next.a);
    for (int64_t i = lines * slice / slices; i < lines * (slice + 1) / slices; i++) {
      __builtin_prefetch(at + i * 64, 0, 2);  // to the L2 cache: the L1 cache has other things
    }
  }
}

void LoraSums::add(int segment, int tile, int tiles, int first, int count, float* products) const {
  // Where all rows are here, they are taken adapter by adapter; else most have another one each.
  if (first == 0 && count == rows_->size()) {
    for (int b = 0; b < rows_->num_blocks(); b++) {
      add_block(segment, tile, tiles, rows_->block(b), 0, products);
    }
    return;
  }
  for (int r = first; r < first + count; r++) {
    const int place = rows_->place_of(r);
    if (place < 0) continue;
    add_block(segment, tile, tiles, {place, 1, rows_->lora_of(r)}, first, products);
  }
}

void LoraSums::add_block(int segment, int tile, int tiles, const LoraRows::Block& block, int first,
                         float* products) const {
  const oct_lora_segment& here = segment_of(block.lora, segment);
  if (here.b == nullptr || loras_->lora(block.lora).sites[site_].a == nullptr) return;
  const float* sums[kBlockRows];
  float* at[kBlockRows];
  for (int r = 0; r < block.count; r++) {
    const int place = block.begin + r;
    sums[r] = sums_ + place * stride_ + here.first;
    at[r] = products + int64_t{rows_->row_at(place) - first} * tiles * kTile;
  }
  const bool is_bf16 = loras_->lora(block.lora).format == OCT_BF16;
  const AddRows add = is_bf16 ? adder<OCT_BF16>(block.count) : adder<OCT_F32>(block.count);
  add(here, tile, tiles, sums, at);
}

void add_embedding(const oct_lora& lora, int site, int token, float scale, int width, float* x) {
  const oct_lora_site& here = lora.sites[site];
  if (here.a == nullptr) return;
  if (lora.format == OCT_BF16) {
    add_embedding_of<OCT_BF16>(here, token, scale, width, x);
  } else {
    add_embedding_of<OCT_F32>(here, token, scale, width, x);
  }
}

int32_t check_loras(const oct_program& program, const oct_batch& batch) {
  if (!batch.lora_of_seq) return OCT_OK;
  for (int32_t s = 0; s < batch.seqs.num_seqs; s++) {
    if (batch.lora_of_seq[s] < -1 || batch.lora_of_seq[s] >= batch.num_loras) {
      return fail(OCT_ERR_ARGUMENT, "sequence %d has adapter %d of %d in the step", s,
                  batch.lora_of_seq[s], batch.num_loras);
    }
  }
  for (int32_t i = 0; i < program.num_nodes; i++) {
    const oct_node& node = program.nodes[i];
    if (node.lora_site < 0) continue;
    if (node.own_rows) return fail(OCT_ERR_ARGUMENT, "adapters cannot change a node of own rows");
    for (int32_t a = 0; a < batch.num_loras; a++) {
      const oct_lora& lora = *batch.loras[a];
      if (node.lora_site >= lora.num_sites) {
        return fail(OCT_ERR_ARGUMENT, "an adapter has %d sites, and a node asks for number %d",
                    lora.num_sites, node.lora_site);
      }
      const int32_t code = check_site(lora.sites[node.lora_site], lora.format, node, node.lora_site);
      if (code != OCT_OK) return code;
    }
  }
  return OCT_OK;
}

}  // namespace octavo
