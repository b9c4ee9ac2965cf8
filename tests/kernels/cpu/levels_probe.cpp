// Calls the kernels of one library on inputs that are the same everywhere, and prints a hash of
// each result: test_levels.py compares those of all instruction sets.
//
//   levels_probe LIBRARY        "name hash" and the first numbers of the result, line by line
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "octavo.h"

namespace {

void* library;
oct_pool* pool;

template <class F>
F* function(const char* name) {
  void* found = dlsym(library, name);
  if (!found) {
    std::printf("no function %s\n", name);
    std::exit(1);
  }
  return reinterpret_cast<F*>(found);
}
#define CALL(name) function<decltype(name)>(#name)

void check(int64_t code, const char* what) {
  if (code >= 0) return;
  std::printf("%s: %s\n", what, CALL(oct_last_error)());
  std::exit(1);
}

uint64_t state = 1;
uint32_t random_bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33);
}
// Exact, and so the same with any compiler: multiples of 2^-10 in -2..2.
float random_float() { return static_cast<float>(static_cast<int>(random_bits() % 4096) - 2048) / 1024; }
std::vector<float> random_floats(size_t n) {
  std::vector<float> x(n);
  for (float& v : x) v = random_float();
  return x;
}
uint16_t half(int exponent) { return static_cast<uint16_t>((15 + exponent) << 10 | (random_bits() % 1024)); }

struct Aligned {
  explicit Aligned(size_t bytes) : memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {
    std::memset(memory, 0, (bytes + 63) / 64 * 64);
  }
  ~Aligned() { std::free(memory); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  void* memory;
};

void report(const std::string& name, const void* data, size_t bytes) {
  uint64_t hash = 14695981039346656037u;
  for (size_t i = 0; i < bytes; i++) {
    hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  }
  std::printf("%s %016llx", name.c_str(), static_cast<unsigned long long>(hash));
  for (size_t i = 0; i < bytes / 4 && i < 6; i++) std::printf(" %.9g", static_cast<const float*>(data)[i]);
  std::printf("\n");
}

struct Case {
  const char* name;
  int format, group;
  // Of K formats: the GGUF type, its bytes for 256 values, and where in these float16 scales are.
  int type = 0, bytes = 0, d = 0, m = 0;
  bool reordered = false;
};

struct Matrix {
  Matrix(const Case& c, int n, int k)
      : packed(CALL(oct_packed_bytes)(c.format, n, k, c.group)),
        weight{c.format, n, k, c.group, nullptr, nullptr} {
    for (int i = 0; c.reordered && i < k; i++) columns.push_back((i * 5 + 3) % k);
    if (c.reordered) weight.columns = columns.data();
    if (c.type != 0) {
      pack_blocks(c, n * k / 256);
    } else {
      pack_values(c.format, n, k, c.group);
    }
    weight.data = packed.memory;
  }
  void pack_blocks(const Case& c, int blocks) {
    std::vector<uint8_t> rows(static_cast<size_t>(blocks) * c.bytes);
    for (uint8_t& byte : rows) byte = static_cast<uint8_t>(random_bits());
    for (size_t at = 0; at < rows.size(); at += c.bytes) {
      const uint16_t d = half(-9), m = half(-9);
      std::memcpy(rows.data() + at + c.m, &m, 2);
      std::memcpy(rows.data() + at + c.d, &d, 2);
    }
    check(CALL(oct_pack_gguf)(pool, &weight, c.type, rows.data(), packed.memory), "oct_pack_gguf");
  }
  void pack_values(int format, int n, int k, int group) {
    const bool coded = format >= OCT_NF4 && format <= OCT_E4M3;
    const bool quantized = format < OCT_BF16 || coded;
    const bool asymmetric = format == OCT_W2A || format == OCT_W3A || format == OCT_W4A ||
                            format == OCT_W8A || format == OCT_W5A;
    const int size = format == OCT_F32 ? 4 : quantized ? 1 : 2;
    std::vector<uint8_t> q(static_cast<size_t>(n) * k * size);
    if (format == OCT_F32) {
      const std::vector<float> x = random_floats(static_cast<size_t>(n) * k);
      std::memcpy(q.data(), x.data(), q.size());
    } else if (format == OCT_F16) {
      for (size_t i = 0; i < q.size(); i += 2) {
        const uint16_t x = static_cast<uint16_t>(half(-2) | (random_bits() % 2) << 15);
        std::memcpy(q.data() + i, &x, 2);
      }
    } else if (format == OCT_BF16) {
      for (size_t i = 0; i < q.size(); i += 2) {  // the upper halves of floats
        const float x = random_float();
        std::memcpy(q.data() + i, reinterpret_cast<const char*>(&x) + 2, 2);
      }
    } else {
      const uint32_t levels = format == OCT_W8S || format == OCT_W8A   ? 256
                              : format == OCT_E4M3                     ? 127  // and no NaN
                              : format == OCT_W5S || format == OCT_W5A ? 32
                              : format == OCT_W3S || format == OCT_W3A ? 8
                              : format == OCT_W2S || format == OCT_W2A ? 4
                                                                       : 16;
      for (uint8_t& v : q) v = static_cast<uint8_t>(random_bits() % levels);
    }
    std::vector<uint16_t> scales(quantized ? static_cast<size_t>(n) * ((k + group - 1) / group) : 0), mins(scales);
    for (uint16_t& d : scales) d = half(-6);
    for (uint16_t& m : mins) m = half(-3) | 0x8000;
    std::vector<float> factors(scales.size());
    for (float& d : factors) d = 0.01f * random_float();
    const void* of_groups = coded ? static_cast<const void*>(factors.data()) : scales.data();
    check(CALL(oct_pack)(pool, &weight, q.data(), of_groups, asymmetric ? mins.data() : nullptr,
                         packed.memory),
          "oct_pack");
  }
  Aligned packed;
  oct_weight weight;
  std::vector<int32_t> columns;
};

// Rows in one call, and one by one.
void companies(const Case& c, const Matrix& matrix) {
  const int rows = 5, n = matrix.weight.n, k = matrix.weight.k;
  const std::vector<float> x = random_floats(static_cast<size_t>(rows) * k);
  for (int step : {rows, 1}) {
    std::vector<float> y(static_cast<size_t>(rows) * n);
    for (int row = 0; row < rows; row += step) {
      oct_linear_args args{};
      args.rows = step;
      args.k = k;
      args.in = x.data() + row * k;
      args.ldin = k;
      args.remainder_above = 2.5f;
      args.epilogue = OCT_EPI_NONE;
      args.num_segments = 1;
      args.segments[0] = {matrix.weight, nullptr, y.data() + row * n, n};
      check(CALL(oct_linear)(pool, &args), "oct_linear");
    }
    report((step == 1 ? "alone." : "together.") + std::string(c.name), y.data(), y.size() * 4);
  }
}

void linears() {
  const Case cases[] = {{"w4s.32", OCT_W4S, 32},
                        {"w4a.32", OCT_W4A, 32},
                        {"w4a.64", OCT_W4A, 64},
                        {"w4s.128", OCT_W4S, 128},
                        {"w8s.32", OCT_W8S, 32},
                        {"w8a.32", OCT_W8A, 32},
                        {"w8a.128", OCT_W8A, 128},
                        {"w5s", OCT_W5S, 32},
                        {"w5a", OCT_W5A, 32},
                        {"w4n", OCT_W4N, 32},
                        {"w4f.16", OCT_W4F, 16},
                        {"w4f.32", OCT_W4F, 32},
                        {"w2s.64", OCT_W2S, 64},
                        {"w2a.32", OCT_W2A, 32},
                        {"w3s.32", OCT_W3S, 32},
                        {"w3a.128", OCT_W3A, 128},
                        {"w4s.32.reordered", OCT_W4S, 32, 0, 0, 0, 0, true},
                        {"k2a", OCT_K2A, 16, 10, 84, 80, 82},
                        {"k3s", OCT_K3S, 16, 11, 110, 108, 108},
                        {"k4a", OCT_K4A, 32, 12, 144, 0, 2},
                        {"k5a", OCT_K5A, 32, 13, 176, 0, 2},
                        {"k6s", OCT_K6S, 16, 14, 210, 208, 208},
                        {"k4n", OCT_K4N, 32, 23, 136, 0, 0},
                        {"f32", OCT_F32, 0},
                        {"f16", OCT_F16, 0},
                        {"nf4", OCT_NF4, 64},
                        {"fp4", OCT_FP4, 64},
                        {"e4m3", OCT_E4M3, 128},
                        {"bf16", OCT_BF16, 0}};
  const int n = 72, k = 256;
  const float eps = 1e-5f;
  for (const Case& c : cases) {
    const Matrix first(c, n, k), second(c, n, k);
    companies(c, first);
    for (int rows : {1, 4, 7, 19}) {
      for (float above : {INFINITY, 2.5f}) {
        for (int epilogue : {OCT_EPI_NONE, OCT_EPI_RESIDUAL, OCT_EPI_SILU_MUL, OCT_EPI_GELU_TANH_MUL}) {
          const std::vector<float> x = random_floats(static_cast<size_t>(rows) * k), norm = random_floats(k);
          const std::vector<float> bias = random_floats(n);
          const std::vector<float> residual = random_floats(static_cast<size_t>(rows) * n);
          std::vector<float> y(static_cast<size_t>(rows) * n), y2(y);
          oct_linear_args args{};
          args.rows = rows;
          args.k = k;
          args.in = x.data();
          args.ldin = k;
          args.norm = norm.data();
          args.eps = eps;
          args.remainder_above = above;
          args.epilogue = epilogue;
          args.num_segments = epilogue == OCT_EPI_RESIDUAL ? 1 : 2;
          args.segments[0] = {first.weight, bias.data(), y.data(), n};
          args.segments[1] = {second.weight, nullptr, y2.data(), n};
          if (epilogue >= OCT_EPI_SILU_MUL) args.segments[0].bias = nullptr;
          args.residual = residual.data();
          check(CALL(oct_linear)(pool, &args), "oct_linear");
          y.insert(y.end(), y2.begin(), y2.end());
          report("linear." + std::string(c.name) + "." + std::to_string(rows) + "." + std::to_string(epilogue) + "." + std::to_string(above),
                 y.data(), y.size() * 4);
        }
      }
    }
  }
}

void move_tokens(int format, int dim, int kv_heads, int block, void* kv, int64_t bytes) {
  oct_kv_memory memory{};
  memory.kv_format = format;
  memory.num_kv_heads = kv_heads;
  memory.head_dim = dim;
  memory.num_layers = 1;
  memory.num_blocks = 4;
  memory.block_size = block;
  memory.layer_bytes = memory.block_bytes = bytes / 4;
  memory.kv = kv;
  const int32_t table[] = {1, 0}, sources[] = {42, 44, 45};
  check(CALL(oct_kv_move)(&memory, table, 2, sources, 3, 41), "oct_kv_move");
  report("kv.moved." + std::to_string(format), kv, bytes);
}

void attentions() {
  const int heads = 6, kv_heads = 2, dim = 64, block = 32, positions = 128;
  const int32_t q_start[] = {0, 40, 41, 44}, kv_len[] = {40, 1, 3}, table[] = {1, 0, 2, 0, 3, 0};
  std::vector<float> cos_sin(static_cast<size_t>(positions) * dim);
  for (float& x : cos_sin) x = random_float() / 2;
  const std::vector<float> norm = random_floats(dim);
  const char* names[] = {"attention.f32", "attention.bf16", "attention.int8",
                         "attention.fp8", "attention.int4", "attention.k8v4"};
  for (int format = OCT_KV_F32; format <= OCT_KV_K8V4; format++) {
    const int64_t chunk = CALL(oct_kv_chunk_bytes)(format, dim);
    if (chunk < 0) continue;
    Aligned kv(4 * kv_heads * (block / 16) * chunk);
    // Prompts, then one token of each, then a token and a tree, and one token of the others.
    for (int step = 0; step < 3; step++) {
      const int32_t later_start[] = {0, 1, 2, 3}, later_len[] = {41, 2, 4};
      const int32_t tree_start[] = {0, 5, 6, 7}, tree_len[] = {46, 3, 5};
      const int32_t parents[] = {-1, 0, 0, 1, 3, -1, -1};
      const oct_sequences steps[] = {{3, 44, q_start, kv_len, table, 2, block, nullptr},
                                     {3, 3, later_start, later_len, table, 2, block, nullptr},
                                     {3, 7, tree_start, tree_len, table, 2, block, parents}};
      const oct_sequences& seqs = steps[step];
      const int tokens = seqs.num_tokens;
      const std::vector<float> q = random_floats(static_cast<size_t>(tokens) * heads * dim);
      const std::vector<float> k = random_floats(static_cast<size_t>(tokens) * kv_heads * dim);
      const std::vector<float> v = random_floats(k.size());
      std::vector<float> out(q.size());
      oct_attention_args args{};
      args.num_heads = heads;
      args.num_kv_heads = kv_heads;
      args.head_dim = args.head_size = dim;
      args.kv_format = format;
      args.rotary_dim = dim;
      args.scale = 0.125f;
      args.softcap = step ? 20.0f : 0.0f;
      args.qk_norm_eps = 1e-6f;
      args.q_norm = args.k_norm = norm.data();
      args.cos_sin = cos_sin.data();
      args.q = q.data();
      args.k = k.data();
      args.v = v.data();
      args.ldq = args.ldo = heads * dim;
      args.ldk = args.ldv = kv_heads * dim;
      args.kv = kv.memory;
      args.kv_block_bytes = kv_heads * (block / 16) * chunk;
      args.out = out.data();
      args.num_blocks = 4;
      const int32_t code = CALL(oct_attention)(pool, &args, &seqs);
      check(code, names[format]);
      const char* kinds[] = {".prompt", ".decode", ".tree"};
      report(names[format] + std::string(kinds[step]), out.data(), out.size() * 4);
    }
    move_tokens(format, dim, kv_heads, block, kv.memory, 4 * kv_heads * (block / 16) * chunk);
  }
}

void samples() {
  const int rows = 40, vocab = 1000;
  std::vector<float> logits = random_floats(static_cast<size_t>(rows) * vocab);
  for (float& x : logits) x *= 4;
  std::vector<float*> row;
  std::vector<oct_sample> params(rows);
  std::vector<int32_t> history(50), tokens(rows), status(rows);
  std::vector<uint32_t> mask((vocab + 31) / 32);
  for (uint32_t& word : mask) word = static_cast<uint32_t>(random_bits());
  const float bias = 2.5f;
  for (int32_t& id : history) id = static_cast<int32_t>(random_bits() % vocab);
  for (int r = 0; r < rows; r++) {
    row.push_back(logits.data() + static_cast<size_t>(r) * vocab);
    oct_sample& p = params[r];
    p.temperature = r % 5 ? 0.7f + r / 32.0f : 0.0f;
    p.repetition_penalty = r % 3 ? 1.0f : 1.25f;
    p.top_p = r % 2 ? 1.0 : 0.875;
    p.min_p = r % 7 ? 0.0 : 0.0625;
    p.typical_p = r % 9 ? 1.0 : 0.75;
    p.top_k = r % 4 ? 0 : 20;
    p.num_prompt_ids = 50;
    p.prompt_ids = history.data();
    p.seed = 42;
    p.mask = r % 6 ? nullptr : mask.data();
    p.num_biases = r % 8 == 1;
    p.bias_ids = history.data();
    p.biases = &bias;
    p.position = r;
  }
  std::vector<int32_t> top_ids(rows * 8);
  std::vector<double> top(rows * 8);
  std::vector<oct_logprobs> logprobs(rows);
  for (int r = 0; r < rows; r++)
    logprobs[r] = {r % 9, 0, 0.0, top_ids.data() + r * 8, top.data() + r * 8};
  check(CALL(oct_logprob_rows)(pool, rows, vocab, row.data(), history.data(), logprobs.data()),
        "oct_logprob_rows");
  std::vector<int32_t> ranks;
  for (const oct_logprobs& found : logprobs) ranks.push_back(found.rank);
  const std::vector<float> rounded(top.begin(), top.end());  // log() is the system's own
  report("logprobs.ranks", ranks.data(), ranks.size() * 4);
  report("logprobs.ids", top_ids.data(), top_ids.size() * 4);
  report("logprobs.top", rounded.data(), rounded.size() * 4);
  std::vector<float> probabilities(static_cast<size_t>(rows) * vocab);
  std::vector<float*> probability(rows);
  for (int r = 0; r < rows; r++) probability[r] = probabilities.data() + static_cast<size_t>(r) * vocab;
  check(CALL(oct_sample_rows)(pool, rows, vocab, row.data(), params.data(), tokens.data(), status.data(),
                              probability.data()),
        "oct_sample_rows");
  report("sample.probabilities", probabilities.data(), probabilities.size() * 4);
  report("sample.tokens", tokens.data(), tokens.size() * 4);
  report("sample.status", status.data(), status.size() * 4);
}

}  // namespace

int main(int, char** arguments) {
  library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    std::printf("%s\n", dlerror());
    return 1;
  }
  pool = CALL(oct_pool_new)(2, 0);
  linears();
  attentions();
  samples();
  CALL(oct_pool_free)(pool);
}
