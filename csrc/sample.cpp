// Samples a token from a row of logits, without sorting the vocabulary.
//
//   logits -- mask, biases, penalties -- maximum ----> greedy: the lowest id that has it
//                                 .-----------'
//        distance = (maximum - logit) / temperature        0 is the most likely token
//                                 |          +inf what top_n_sigma, min_p and typical_p cut
//        weight   = 2^44 exp(-distance), an integer
//                                 |
//        neither top_k, top_p nor xtc: the token at u * total, counted in the order of ids
//        else                          the token at u * total, counted in the order of ranks
//
// Ranks run from the nearest token to the farthest, of equals the lowest id first. All questions
// about ranks have one form: *at which token does the running sum exceed a limit?* A sum of ones
// finds where top_k cuts, a sum of weights where top_p does and what is drawn. find() answers it
// without ranking: it adds up the weights of 1024 intervals of distance, walks to the interval in
// which the limit is exceeded, and divides that one in the same way, until few tokens are left:
//
//   distance  0                                                        farthest
//             |  12 | 31 |  7 |  4 | ... |     sums of weights, limit 45
//                         \                     is exceeded in here: 3 tokens, say
//                          | 2 | 4 | 1 |        sorted: the second of them
//
// Weights are integers, hence their sums the same in any order; and a row depends on itself alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "sampling.h"

namespace octavo {
namespace {

using namespace sampling;

constexpr float kGreedyTemperature = 1e-5f;  // lower ones are treated as 0
constexpr float kEqual = 1e-30f;  // distances that differ by less are taken for equal

constexpr int kBuckets = 1024;  // intervals of distance
constexpr int kFew = 64;        // so many tokens are sorted

// Uses of random numbers at one position (octavo/runtime/random.py).
constexpr uint32_t kTokenStream = 0, kXtcStream = 1;
constexpr double kMaxXtcThreshold = 0.5;  // no two tokens are likelier than this

// ---- Random numbers --------------------------------------------------------------------------

// Philox4x32-10 (Salmon et al. 2011): the top 53 bits of the first two words, over 2^53.
double uniform(uint64_t seed, uint32_t sample_index, uint64_t position, uint32_t stream) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32);
  uint32_t c2 = sample_index, c3 = stream;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = uint64_t{c0} * 0xD2511F53u, product1 = uint64_t{c2} * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<double>((uint64_t{c0} << 32 | c1) >> 11) * 0x1p-53;
}

// ---- Logits ----------------------------------------------------------------------------------

// The lowest id with this logit, which is the maximum.
int32_t first_with(const float* x, int n, float peak) {
  const F32 below = simd::set1(std::nextafter(peak, -kInfinity));
  int i = 0;
  while (i + 16 <= n && !simd::any(simd::less(below, simd::load(x + i)))) i += 16;
  while (i < n - 1 && x[i] != peak) i++;
  return i;
}

// -inf for every token whose bit is 0.
void apply_mask(float* x, int n, const uint32_t* mask) {
  for (int start = 0; start < n; start += 32) {
    const uint32_t word = mask[start / 32];
    if (word == UINT32_MAX) continue;
    const int end = std::min(n - start, 32);
    if (word == 0) {
      std::fill_n(x + start, end, -kInfinity);
    } else {
      for (int i = 0; i < end; i++)
        if (!(word >> i & 1)) x[start + i] = -kInfinity;
    }
  }
}

void add_biases(float* x, int n, const oct_sample& s) {
  for (int64_t i = 0; i < s.num_biases; i++) {
    const int32_t id = s.bias_ids[i];
    if (id >= 0 && id < n) x[id] += s.biases[i];
  }
}

// Makes tokens that have been seen less likely; `marks` is room for n integers.
void penalize(float* x, int n, const oct_sample& s, int32_t* marks) {
  // A mark is 0, or 1 + 2 * occurrences in the output for a token that is yet to be changed.
  std::memset(marks, 0, static_cast<size_t>(n) * sizeof(int32_t));
  const int num_prompt_ids = s.repetition_penalty == 1.0f ? 0 : s.num_prompt_ids;
  const auto is_known = [n](int32_t id) { return id >= 0 && id < n; };
  for (int i = 0; i < num_prompt_ids; i++)
    if (is_known(s.prompt_ids[i])) marks[s.prompt_ids[i]] = 1;
  for (int i = 0; i < s.num_output_ids; i++)
    if (is_known(s.output_ids[i])) marks[s.output_ids[i]] = (marks[s.output_ids[i]] | 1) + 2;

  const auto change = [&](int32_t id) {
    if (!is_known(id) || marks[id] == 0) return;
    const int32_t count = marks[id] >> 1;
    marks[id] = 0;
    float logit = x[id];
    logit = logit > 0.0f ? logit / s.repetition_penalty : logit * s.repetition_penalty;
    logit = logit - s.frequency_penalty * static_cast<float>(count);
    x[id] = logit - s.presence_penalty * (count > 0 ? 1.0f : 0.0f);
  };
  for (int i = 0; i < num_prompt_ids; i++) change(s.prompt_ids[i]);
  for (int i = 0; i < s.num_output_ids; i++) change(s.output_ids[i]);
}

// ---- Distances -------------------------------------------------------------------------------

// Tokens in the order of their ids, each with its distance from the most likely one.
struct Tokens {
  const float* distance;
  const int32_t* id;  // NULL: entry i is token i
  int count;

  int32_t id_of(int i) const { return id ? id[i] : i; }
};

// How far below the greatest logit top_n_sigma cuts: so many standard deviations of the logits that
// are not -inf. Distances count in units of 1/4096, up to 512, so that their sums are exact.
float sigma_limit(const float* x, int n, float peak, double num_sigmas) {
  constexpr float kUnit = 4096.0f, kMost = 512.0f;
  int64_t count = 0, sum = 0, squares = 0;
  for (int i = 0; i < n; i++) {
    if (x[i] == -kInfinity) continue;
    const int64_t off = static_cast<int64_t>(std::min(peak - x[i], kMost) * kUnit);
    count++;
    sum += off;
    squares += off * off;
  }
  const double mean = static_cast<double>(sum) / static_cast<double>(count);
  const double variance = static_cast<double>(squares) / static_cast<double>(count) - mean * mean;
  return static_cast<float>(num_sigmas * (std::sqrt(std::max(variance, 0.0)) / kUnit));
}

// Logits to distances, in place; the greatest has 0. Those of more than `reach` below it are cut.
void to_distances(float* x, int n, float peak, float reach, float temperature, double min_p) {
  // A peak of -0.0 would make some distances -0.0, whose bits are not those of the nearest.
  const F32 top = simd::set1(peak + 0.0f), divisor = simd::set1(temperature);
  const F32 inf = simd::set1(kInfinity);
  const float limit = min_p > 0.0 ? -static_cast<float>(std::log(min_p)) : kInfinity;
  const F32 farthest = simd::set1(limit), beyond = simd::set1(reach);
  by_sixteen(x, n, 0.0f, [&](int i, F32 v, int some) {
    const F32 below = simd::sub(top, v);
    v = simd::div(below, divisor);
    v = simd::select(simd::less(farthest, v), inf, v);
    v = simd::select(simd::less(beyond, below), inf, v);
    simd::store_first(x + i, v, some);
  });
}

// All tokens that can be drawn weigh the same: a sum of weights is a number of tokens.
struct One {
  static OCT_INLINE F32 of(F32 distance) {
    return simd::select(simd::less(distance, simd::set1(kFarthest)), simd::set1(1.0f),
                        simd::zero());
  }
};

// The greatest sum that is less than `mass`: in doubles, as the oracle compares. At the last token
// with less than `mass` before it, the running sum exceeds this.
int64_t last_before(double mass) {
  int64_t enough = static_cast<int64_t>(std::ceil(mass));
  while (enough > 0 && static_cast<double>(enough - 1) >= mass) enough--;
  return enough - 1;
}

// A worker's memory for keep_typical: of each token.
struct TypicalMemory {
  float* weight;
  uint32_t* off;  // from the mean: the bits of a float, which are in the order of such floats
  int32_t* id;    // of those among which the last one that stays is looked for
};

// Keeps the tokens whose distance is nearest to the mean one, which stands for the entropy: as few
// as hold typical_p of the mass. The others become infinitely far, and distances count from the
// nearest that is left.
void keep_typical(float* distance, int n, double typical_p, const TypicalMemory& of) {
  by_sixteen(distance, n, kInfinity,
             [&](int i, F32 d, int) { simd::store(of.weight + i, Likelihood::of(d)); });
  int64_t total = 0, moment = 0;
  for (int i = 0; i < n; i++) {
    const int64_t weight = static_cast<int64_t>(of.weight[i]);
    const double own = distance[i] < kFarthest ? distance[i] : 0.0;
    total += weight;
    moment += static_cast<int64_t>(static_cast<double>(weight) * own);
  }
  const double mean = static_cast<double>(moment) / static_cast<double>(total);
  for (int i = 0; i < n; i++) {
    const float off = static_cast<float>(std::abs(mean - distance[i]));
    std::memcpy(&of.off[i], &off, 4);
    of.id[i] = i;
  }

  // The last token that stays, by one digit of `off` after the other, and of equals by id.
  int64_t left = last_before(typical_p * static_cast<double>(total));
  int count = n;
  for (const int shift : {21, 10, 0}) {
    constexpr uint32_t kDigits = 1 << 11;
    const auto digit_of = [&](int32_t id) { return of.off[id] >> shift & (kDigits - 1); };
    int64_t sums[kDigits] = {};
    for (int i = 0; i < count; i++)
      sums[digit_of(of.id[i])] += static_cast<int64_t>(of.weight[of.id[i]]);
    uint32_t digit = 0;
    while (sums[digit] <= left) left -= sums[digit++];
    const int num = count;
    count = 0;
    for (int i = 0; i < num; i++) {
      of.id[count] = of.id[i];
      count += digit_of(of.id[i]) == digit;
    }
  }
  int32_t last = 0;
  while (static_cast<int64_t>(of.weight[of.id[last]]) <= left)
    left -= static_cast<int64_t>(of.weight[of.id[last++]]);
  const int32_t last_id = of.id[last];
  const uint32_t last_off = of.off[last_id];

  float nearest = kInfinity;
  for (int i = 0; i < n; i++) {
    const bool stays = of.off[i] < last_off || (of.off[i] == last_off && i <= last_id);
    distance[i] = stays ? distance[i] : kInfinity;
    nearest = std::min(nearest, distance[i]);
  }
  const F32 origin = simd::set1(nearest);
  by_sixteen(distance, n, 0.0f, [&](int i, F32 d, int some) {
    simd::store_first(distance + i, simd::sub(d, origin), some);
  });
}

// A token in the order of ranks.
struct Place {
  float distance;
  int32_t id;
  int64_t sum;  // of the weights up to here, this token's included

  // Beyond all of the tokens, whose weights have this sum.
  static Place end(int64_t total) { return {kInfinity, INT32_MAX, total}; }

  // Whether a token is this one, or of a later, or of an earlier rank.
  bool is_before(float own, int32_t own_id) const {
    return distance < own || (distance == own && id <= own_id);
  }
  bool is_after(float own, int32_t own_id) const {
    return own < distance || (own == distance && own_id <= id);
  }
};

// A token, and the last one that might have been drawn in its place; and where xtc cuts, the first
// one, with the sum of the weights before it.
struct Drawn {
  int32_t id;
  Place last;
  Place first = {-1.0f, -1, 0};
};

// The probability of each token of a vocabulary, where one of `tokens` is drawn.
void write_probabilities(const Tokens& tokens, const Drawn& drawn, int vocab, float* out) {
  const Place &first = drawn.first, &last = drawn.last;
  const double total = static_cast<double>(last.sum - first.sum);
  std::fill_n(out, vocab, 0.0f);
  by_sixteen(tokens.distance, tokens.count, kInfinity, [&](int i, F32 d, int some) {
    float weight[16];
    simd::store(weight, Likelihood::of(d));
    for (int j = 0; j < some; j++) {
      const float own = tokens.distance[i + j];
      const int32_t id = tokens.id_of(i + j);
      if (first.is_before(own, id) && last.is_after(own, id))
        out[id] = static_cast<float>(static_cast<double>(static_cast<int64_t>(weight[j])) / total);
    }
  });
}

// ---- In the order of ids ---------------------------------------------------------------------

// The token at which the running sum of weights exceeds u times their sum.
Drawn draw_by_id(const float* distance, int n, double u) {
  float weight[kBlock];
  const auto weigh = [&](int start) {
    const int num = std::min(n - start, kBlock);
    by_sixteen(distance + start, num, kInfinity,
               [&](int i, F32 d, int) { simd::store(weight + i, Likelihood::of(d)); });
    return num;
  };

  int64_t sums[kMaxVocab / kBlock + 1], total = 0;
  for (int start = 0; start < n; start += kBlock) {
    const int num = weigh(start);
    int64_t sum = 0;
    for (int i = 0; i < num; i++) sum += static_cast<int64_t>(weight[i]);
    total += sums[start / kBlock] = sum;
  }
  int64_t left = static_cast<int64_t>(u * static_cast<double>(total));
  int block = 0;
  while (sums[block] <= left) left -= sums[block++];
  weigh(block * kBlock);
  int i = 0;
  while (static_cast<int64_t>(weight[i]) <= left) left -= static_cast<int64_t>(weight[i++]);
  return {block * kBlock + i, Place::end(total)};
}

// ---- In the order of ranks -------------------------------------------------------------------

// Sums of weights by distance: bucket b has the tokens whose distance, from `nearest` on and in
// units of the bucket width, rounds to b. Tokens beyond `farthest` may be missing in the buckets,
// but not in the total.
struct Histogram {
  float nearest, farthest, per_bucket;  // 1 / width
  int64_t total;
  int64_t sums[kBuckets];

  OCT_INLINE F32 scaled(F32 distance) const {
    const F32 bounded = simd::min(simd::set1(farthest), distance);
    return simd::mul(simd::sub(bounded, simd::set1(nearest)), simd::set1(per_bucket));
  }
};

// Tokens at a distance of `farthest` or more are known to be cut.
template <class Weight>
void add_up(const Tokens& tokens, float farthest, Histogram& h) {
  F32 low = simd::set1(farthest), high = simd::zero();
  by_sixteen(tokens.distance, tokens.count, tokens.distance[0], [&](int, F32 d, int) {
    low = simd::min(low, d);
    high = simd::max(high, d);
  });
  h.nearest = -simd::max_of(simd::sub(simd::zero(), low));
  h.farthest = std::min(simd::max_of(high), farthest);
  const float range = h.farthest - h.nearest;
  h.per_bucket = range > kEqual ? (kBuckets - 1) / range : 0.0f;

  // Four tables, so that equal neighbours need not wait for each other.
  int64_t sums[4][kBuckets] = {}, total = 0;
  const F32 end = simd::set1(farthest), end_of_all = simd::set1(kFarthest);
  float weight[kBlock];
  int32_t bucket[kBlock];
  for (int start = 0; start < tokens.count; start += kBlock) {
    const int num = std::min(tokens.count - start, kBlock);
    int near = 0, far = kBlock;  // from the front, and from the back
    by_sixteen(tokens.distance + start, num, kInfinity, [&](int, F32 d, int) {
      if (simd::any(simd::less(d, end))) {
        simd::store(weight + near, Weight::of(d));
        simd::store(bucket + near, simd::to_int(h.scaled(d)));
        near += 16;
      } else if (simd::any(simd::less(d, end_of_all))) {
        simd::store(weight + (far -= 16), Weight::of(d));
      }
    });
    for (int i = 0; i < near; i += 4)
      for (int j = 0; j < 4; j++) sums[j][bucket[i + j]] += static_cast<int64_t>(weight[i + j]);
    for (int i = far; i < kBlock; i++) total += static_cast<int64_t>(weight[i]);
  }
  for (int b = 0; b < kBuckets; b++)
    total += h.sums[b] = sums[0][b] + sums[1][b] + sums[2][b] + sums[3][b];
  h.total = total;
}

// Memory for tokens that were picked from others.
struct List {
  float* distance;
  int32_t* id;

  // The tokens, in their order, for which keep(distance, entry) holds; only those of a sixteen in
  // which any(distances) does are looked at. `tokens` may be those of this list.
  template <class Any, class Keep>
  OCT_INLINE Tokens pick(const Tokens& tokens, Any&& any, Keep&& keep) {
    int count = 0;
    by_sixteen(tokens.distance, tokens.count, kInfinity, [&](int i, F32 d, int some) {
      if (!any(d)) return;
      for (int j = i; j < i + some; j++) {
        const float own = tokens.distance[j];
        const int32_t own_id = tokens.id_of(j);
        distance[count] = own;
        id[count] = own_id;
        count += keep(own, own_id, j - i);
      }
    });
    return {distance, id, count};
  }

  // Sorts the first entries, a few, from order of ids to order of ranks.
  void rank(int count) {
    uint64_t keys[kFew];
    for (int i = 0; i < count; i++) {
      uint32_t bits;  // in the order of the distances, as these are not negative
      std::memcpy(&bits, &distance[i], 4);
      keys[i] = uint64_t{bits} << 32 | static_cast<uint32_t>(id[i]);
    }
    std::sort(keys, keys + count);
    for (int i = 0; i < count; i++) {
      const uint32_t bits = static_cast<uint32_t>(keys[i] >> 32);
      std::memcpy(&distance[i], &bits, 4);
      id[i] = static_cast<int32_t>(keys[i]);
    }
  }
};

// The token at which the running sum of weights, by rank, exceeds `limit`, which is less than
// their sum. `h` is the histogram of the tokens; `list` is overwritten.
template <class Weight>
Place find(Tokens tokens, const Histogram& of_all, int64_t limit, List list) {
  Histogram of_bucket;
  const Histogram* h = &of_all;
  int64_t before = 0;
  // Each turn takes one bucket for all. Its tokens are in the order of ids, which is that of ranks
  // once all distances are the same; and by then there is nothing to divide.
  while (h->per_bucket > 0.0f) {
    int bucket = 0;
    while (before + h->sums[bucket] <= limit) before += h->sums[bucket++];
    const F32 place = simd::set1(static_cast<float>(bucket));
    float offset[16];
    tokens = list.pick(
        tokens,
        [&](F32 d) {
          const F32 rounded = simd::to_float(simd::to_int(h->scaled(d)));
          const F32 away = simd::abs(simd::sub(rounded, place));
          simd::store(offset, away);
          return simd::any(simd::less(away, simd::set1(0.5f)));
        },
        [&](float, int32_t, int lane) { return offset[lane] < 0.5f; });
    if (tokens.count <= kFew) {
      list.rank(tokens.count);
      break;
    }
    add_up<Weight>(tokens, kFarthest, of_bucket);
    h = &of_bucket;
  }

  Place place = {0.0f, 0, before};
  by_sixteen(tokens.distance, tokens.count, kInfinity, [&](int i, F32 d, int) {
    if (place.sum > limit) return;
    float weight[16];
    simd::store(weight, Weight::of(d));
    int64_t sum = 0;
    for (float w : weight) sum += static_cast<int64_t>(w);
    if (place.sum + sum <= limit) {
      place.sum += sum;
      return;
    }
    int j = 0;
    while ((place.sum += static_cast<int64_t>(weight[j])) <= limit) j++;
    place.distance = tokens.distance[i + j];
    place.id = tokens.id_of(i + j);
  });
  return place;
}

// The k tokens of the first ranks, of those that can be drawn. `list` is overwritten.
Tokens first_k(Tokens tokens, int k, List kept, List list) {
  Histogram h;
  // If each of k groups has a token at a distance, then those of the first ranks are not farther.
  const int group = std::min(tokens.count / 4 / k, 64);  // tokens in one
  if (group >= 4 && tokens.count >= 1024) {
    int num_groups = 0;
    for (int start = 0; start < tokens.count; start += 16 * group) {
      F32 nearest = simd::set1(kInfinity);
      by_sixteen(tokens.distance + start, std::min(tokens.count - start, 16 * group), kInfinity,
                 [&](int, F32 d, int) { nearest = simd::min(nearest, d); });
      simd::store(kept.distance + num_groups, nearest);
      num_groups += 16;
    }
    const Tokens groups = {kept.distance, nullptr, num_groups};
    add_up<One>(groups, kFarthest, h);
    const float bound = h.total < k ? kFarthest : find<One>(groups, h, k - 1, list).distance;
    const F32 beyond = simd::set1(std::nextafter(bound, kInfinity));
    tokens = kept.pick(
        tokens, [&](F32 d) { return simd::any(simd::less(d, beyond)); },
        [&](float d, int32_t, int) { return d <= bound; });
  }

  add_up<One>(tokens, kFarthest, h);
  if (h.total <= k) return tokens;
  const Place last = find<One>(tokens, h, k - 1, list);
  const F32 beyond = simd::set1(std::nextafter(last.distance, kInfinity));
  return kept.pick(
      tokens, [&](F32 d) { return simd::any(simd::less(d, beyond)); },
      [&](float d, int32_t id, int) {
        return d < last.distance || (d == last.distance && id <= last.id);
      });
}

// The least likely of the tokens down to `last` that have at least `threshold` of their mass: xtc
// cuts those before it ("exclude top choices"). Nothing where there are less than two.
Place least_top_choice(const Tokens& tokens, const Place& last, double threshold) {
  const double enough = threshold * static_cast<double>(last.sum);
  Place least = {-1.0f, -1, 0};
  int64_t sum = 0, own_weight = 0;
  by_sixteen(tokens.distance, tokens.count, kInfinity, [&](int i, F32 d, int some) {
    if (!simd::any(simd::less(d, simd::set1(kFarthest)))) return;
    float weights[16];
    simd::store(weights, Likelihood::of(d));
    for (int j = 0; j < some; j++) {
      const int64_t weight = static_cast<int64_t>(weights[j]);
      const float own = tokens.distance[i + j];
      const int32_t id = tokens.id_of(i + j);
      if (weight == 0 || static_cast<double>(weight) < enough || !last.is_after(own, id)) continue;
      sum += weight;
      if (least.is_before(own, id)) {
        least = {own, id, 0};
        own_weight = weight;
      }
    }
  });
  least.sum = sum - own_weight;
  return least;
}

// The token at which the running sum of weights exceeds u times the sum of those that top_p leaves,
// and of these xtc, unless its threshold is above any.
Drawn draw_by_rank(const Tokens& tokens, double top_p, double xtc_threshold, double u, List list) {
  Histogram h;
  // Tokens of at most (1 - top_p) / 2V of the mass cannot hold, all together, the 1 - top_p that
  // the cut leaves over: so the cut comes before any of them. The mass is 1 or more.
  const double unlikely = top_p < 1.0 ? (1.0 - top_p) / (2.0 * tokens.count) : 0.0;
  const float farthest = std::min(static_cast<float>(-std::log(unlikely)), kFarthest);
  add_up<Likelihood>(tokens, farthest, h);
  Place last = Place::end(h.total);
  if (top_p < 1.0) {
    const double mass = top_p * static_cast<double>(h.total);
    last = find<Likelihood>(tokens, h, last_before(mass), list);
  }
  Place first = {-1.0f, -1, 0};
  if (xtc_threshold <= kMaxXtcThreshold) first = least_top_choice(tokens, last, xtc_threshold);
  const int64_t left = last.sum - first.sum;
  const int64_t limit = first.sum + static_cast<int64_t>(u * static_cast<double>(left));
  return {find<Likelihood>(tokens, h, limit, list).id, last, first};
}

}  // namespace

bool has_penalties(const oct_sample& s) {
  return s.repetition_penalty != 1.0f || s.frequency_penalty != 0.0f || s.presence_penalty != 0.0f;
}

bool changes_logits(const oct_sample& s) {
  return s.mask_turn > 0 || s.mask || s.num_biases > 0 || has_penalties(s);
}

int32_t sample_row(float* logits, int32_t vocab, const oct_sample& s, const Worker& worker,
                   int32_t* token, float* probabilities) {
  *token = 0;
  float peak = maximum(logits, vocab);
  if (!std::isfinite(peak)) return OCT_TOKEN_BAD_LOGITS;
  // One entry more: pick() writes before it knows whether to keep.
  const size_t room = (static_cast<size_t>(vocab) + 1 + 15) / 16 * 16;
  if (changes_logits(s)) {
    if (s.mask) apply_mask(logits, vocab, s.mask);
    add_biases(logits, vocab, s);
    if (has_penalties(s)) {
      penalize(logits, vocab, s,
               static_cast<int32_t*>(worker.scratch(kScratchSlot, room * sizeof(int32_t))));
    }
    peak = maximum(logits, vocab);
    if (peak == -kInfinity) return OCT_TOKEN_NO_CHOICE;
    if (!std::isfinite(peak)) return OCT_TOKEN_OVERFLOW;
  }
  if (s.temperature < kGreedyTemperature) {
    *token = first_with(logits, vocab, peak);
    return OCT_TOKEN_OK;
  }

  const float reach =
      s.top_n_sigma > 0.0 ? sigma_limit(logits, vocab, peak, s.top_n_sigma) : kInfinity;
  to_distances(logits, vocab, peak, reach, s.temperature, s.min_p);
  char* memory = static_cast<char*>(worker.scratch(kScratchSlot, room * 16));
  if (s.typical_p < 1.0) {
    keep_typical(logits, vocab, s.typical_p,
                 {reinterpret_cast<float*>(memory), reinterpret_cast<uint32_t*>(memory + room * 4),
                  reinterpret_cast<int32_t*>(memory + room * 8)});
  }
  const double u = uniform(s.seed, s.sample_index, s.position, kTokenStream);
  const bool has_xtc =
      s.xtc_probability > 0.0 && s.xtc_threshold <= kMaxXtcThreshold &&
      uniform(s.seed, s.sample_index, s.position, kXtcStream) < s.xtc_probability;
  const bool has_top_k = s.top_k > 0 && s.top_k < vocab;
  Tokens tokens = {logits, nullptr, vocab};
  const auto take = [&](const Drawn& drawn) {
    *token = drawn.id;
    if (probabilities) write_probabilities(tokens, drawn, vocab, probabilities);
    return OCT_TOKEN_OK;
  };
  if (!has_top_k && s.top_p >= 1.0 && !has_xtc) return take(draw_by_id(logits, vocab, u));
  const auto list = [&](size_t number) -> List {
    char* start = memory + number * room * 8;
    return {reinterpret_cast<float*>(start), reinterpret_cast<int32_t*>(start + room * 4)};
  };
  if (has_top_k) tokens = first_k(tokens, s.top_k, list(0), list(1));
  return take(draw_by_rank(tokens, s.top_p, has_xtc ? s.xtc_threshold : 1.0, u, list(1)));
}

}  // namespace octavo

int32_t oct_sample_rows(oct_pool* pool, int32_t num_rows, int32_t vocab, float* const* logits,
                        const oct_sample* params, int32_t* tokens, int32_t* status,
                        float* const* probabilities) {
  using namespace octavo;
  if (!pool || num_rows < 0 || (num_rows && (!logits || !params || !tokens || !status)))
    return fail(OCT_ERR_ARGUMENT, "oct_sample_rows: the pool or an array is NULL");
  if (vocab < 1 || vocab > kMaxVocab)
    return fail(OCT_ERR_ARGUMENT, "oct_sample_rows: a vocabulary of %d is not in 1 .. %d", vocab,
                kMaxVocab);
  for (int r = 0; r < num_rows; r++) {
    const oct_sample& s = params[r];
    if (s.num_prompt_ids < 0 || (s.num_prompt_ids && !s.prompt_ids) || s.num_output_ids < 0 ||
        (s.num_output_ids && !s.output_ids))
      return fail(OCT_ERR_ARGUMENT, "oct_sample_rows: the history of row %d is NULL", r);
    if (s.num_biases < 0 || (s.num_biases && (!s.bias_ids || !s.biases)))
      return fail(OCT_ERR_ARGUMENT, "oct_sample_rows: the biases of row %d are NULL", r);
    if (s.mask_turn)
      return fail(OCT_ERR_ARGUMENT, "oct_sample_rows: the mask of row %d is still being made", r);
  }
  return run(pool, [&](const Worker& worker) {
    for (int r = worker.ticket(); r < num_rows; r = worker.ticket())
      status[r] = sample_row(logits[r], vocab, params[r], worker, &tokens[r],
                             probabilities ? probabilities[r] : nullptr);
  });
}
