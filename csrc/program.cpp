// A step: the nodes of a program, one after the other, each by all workers.
//
//     embed | linear | attention | linear | linear | linear | attention | ... | check | head
//           ^ a barrier between any two
//
// The ranks of a group run the same nodes, each its part of their outputs. Where a node's outputs are
// read as a whole, they lie in shared memory, and the barrier behind it spans the group.
//
// Nodes have files of their own; here are the loop over them, ops that are too small for a file, and
// the end of a step, where tokens are sampled from rows of logits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "counter.h"
#include "group.h"
#include "kernels.h"
#include "latent.h"
#include "lora.h"
#include "own_rows.h"
#include "recurrence.h"
#include "rows.h"
#include "shared_prefix.h"

namespace octavo {
namespace {

constexpr int32_t kMaxMultiSteps = 1024;
constexpr float kGreedyTemperature = 1e-5f;  // a lower temperature is treated as 0
constexpr int kUnchangedSlot = 5;            // of scratch: a row of logits as the model gave it

bool wants_logprobs(const oct_batch& batch, size_t r) {
  return !batch.logits[r] && batch.logprobs && batch.logprobs[r].num_top >= 0;
}

// Whether row r is sampled from its logits, since their maximum is not enough.
bool is_sampled(const oct_batch& batch, size_t r) {
  const oct_sample& s = batch.samples[r];
  return !batch.logits[r] && (s.temperature >= kGreedyTemperature || changes_logits(s) ||
                              wants_logprobs(batch, r));
}

bool needs_logits(const oct_batch& batch, size_t r) {
  return batch.samples ? batch.logits[r] || is_sampled(batch, r) : batch.needs_logits[r] != 0;
}

size_t padded_vocab(const oct_program& program) {
  return (static_cast<size_t>(program.vocab) + 15) / 16 * 16;
}

// Worker w's memory for the whole head: row pointers and maxima of R rows, and the logits of those
// that are sampled. It has the same layout in all workers.
struct HeadMemory {
  float** logits;
  float* best_logit;
  int32_t* best_id;

  HeadMemory(const oct_program& program, const oct_batch& batch, const Worker& worker) {
    const size_t rows = static_cast<size_t>(batch.num_out), padded = padded_vocab(program);
    best_logit = static_cast<float*>(worker.shared(2, rows * 8));
    best_id = reinterpret_cast<int32_t*>(best_logit + rows);
    logits = static_cast<float**>(worker.scratch(7, rows * sizeof(float*)));
    if (program.group) {
      for (size_t r = 0; r < rows; r++) {  // each rank writes the logits of its ids
        logits[r] = needs_logits(batch, r) ? program.shared_head.logits + r * padded : nullptr;
      }
      return;
    }
    size_t sampled = 0;
    for (size_t r = 0; r < rows; r++) sampled += is_sampled(batch, r);
    float* free_row = static_cast<float*>(worker.shared(3, sampled * padded * sizeof(float)));
    for (size_t r = 0; r < rows; r++) {
      logits[r] = batch.logits[r];
      if (!is_sampled(batch, r)) continue;
      logits[r] = free_row;
      free_row += padded;
    }
  }
};

// The maxima of a group's ranks in rank 0, after all have met: ids ascend with ranks, and of equal
// logits the lowest id counts. NaN stays.
void merge_maxima(const oct_program& program, int32_t r, const HeadMemory& memory) {
  const oct_shared_head& shared = program.shared_head;
  float best = shared.best_logits[r];
  int32_t id = shared.best_ids[r];
  for (int32_t rank = 1; rank < group_size(program.group); rank++) {
    const int64_t at = int64_t{rank} * program.max_tokens + r;
    if (!(shared.best_logits[at] > best) && !std::isnan(shared.best_logits[at])) continue;
    best = shared.best_logits[at];
    id = shared.best_ids[at];
    if (std::isnan(best)) break;
  }
  memory.best_logit[r] = best;
  memory.best_id[r] = id;
}

// Meet the other ranks once all of them have written their part. False in those that do not sample.
bool meet_for_samples(const oct_program& program, const oct_batch& batch, const HeadMemory& memory,
                      int32_t first_id, const Worker& worker) {
  if (!worker.barrier()) return false;
  const int32_t rank = group_rank(program.group);
  if (worker.rank == 0) {
    const int64_t at = int64_t{rank} * program.max_tokens;
    for (int32_t r = 0; r < batch.num_out; r++) {
      program.shared_head.best_logits[at + r] = memory.best_logit[r];
      program.shared_head.best_ids[at + r] = memory.best_id[r] + first_id;
    }
  }
  return worker.barrier(program.group) && rank == 0;
}

// Sampling overwrites logits, so that log-probabilities need a copy of them.
void sample(float* logits, int32_t r, const oct_program& program, const oct_batch& batch,
            const Worker& worker) {
  const size_t bytes = static_cast<size_t>(program.vocab) * sizeof(float);
  float* before = nullptr;
  if (wants_logprobs(batch, r)) {
    before = static_cast<float*>(worker.scratch(kUnchangedSlot, bytes));
    std::memcpy(before, logits, bytes);
  }
  if (batch.samples[r].mask_turn)
    wait_for(batch.masks_made, static_cast<uint32_t>(batch.samples[r].mask_turn));
  batch.status[r] = sample_row(logits, program.vocab, batch.samples[r], worker, &batch.tokens[r],
                               batch.probabilities ? batch.probabilities[r] : nullptr);
  if (before && batch.status[r] == OCT_TOKEN_OK)
    logprobs_of_row(before, program.vocab, batch.tokens[r], batch.logprobs[r], worker);
}

void run_linear(const oct_node& node, const oct_linear_args& args, const StepLoras& loras,
                const LoraRows& rows, const Worker& worker) {
  LoraSums sums;
  if (!loras.change(node)) return linear(args, worker);
  if (sums.compute(loras, rows, node.lora_site, args, worker)) linear(args, worker, &sums);
}

void run_head(const oct_node& node, const oct_program& program, const oct_batch& batch,
              const StepLoras& loras, const Worker& worker) {
  if (batch.num_out == 0) return;
  oct_linear_args args = *static_cast<const oct_linear_args*>(node.args);
  const HeadMemory memory(program, batch, worker);
  oct_head head = {memory.logits, memory.best_logit, memory.best_id,
                   args.head ? args.head->softcap : 0.0f, args.head ? args.head->first_id : 0};
  args.rows = batch.num_out;
  args.row_index = batch.out_rows;
  args.head = &head;
  run_linear(node, args, loras, loras.head_rows(), worker);
  if (program.group) {
    if (!meet_for_samples(program, batch, memory, head.first_id, worker)) return;
  } else if (!worker.barrier()) {
    return;
  }

  for (int32_t r = worker.ticket(); r < batch.num_out; r = worker.ticket()) {
    if (program.group) merge_maxima(program, r, memory);
    if (program.group && batch.logits[r])
      std::copy_n(memory.logits[r], program.vocab, batch.logits[r]);
    if (is_sampled(batch, r)) {
      sample(memory.logits[r], r, program, batch, worker);
    } else {
      batch.tokens[r] = memory.best_id[r];
      batch.status[r] =
          std::isfinite(memory.best_logit[r]) ? OCT_TOKEN_OK : OCT_TOKEN_BAD_LOGITS;
    }
  }
}

// Shared prefixes of a step's sequences, in each group of layers.
class StepPrefixes {
 public:
  // False if there is no memory.
  bool find(const oct_program& program, const oct_batch& batch) {
    int32_t num_groups = 0;
    for (int32_t i = 0; i < program.num_nodes; i++) {
      if (program.nodes[i].op != OCT_OP_ATTENTION) continue;
      const auto& args = *static_cast<const oct_attention_args*>(program.nodes[i].args);
      num_groups = std::max(num_groups, args.group + 1);
    }
    groups_.reset(new (std::nothrow) SharedPrefixes[num_groups]);
    if (!groups_) return false;
    for (int32_t g = 0; g < num_groups && !batch.head_only; g++) {
      if (!groups_[g].find(batch.seqs, g)) return false;
    }
    return true;
  }
  const SharedPrefixes& of(const oct_attention_args& args) const { return groups_[args.group]; }

 private:
  std::unique_ptr<SharedPrefixes[]> groups_;
};

void run_own_rows(const oct_node& node, const oct_batch& batch, const OwnRows& own,
                  const Worker& worker) {
  if (own.count() == 0) return;
  if (node.op == OCT_OP_LINEAR)
    return linear(own.of(*static_cast<const oct_linear_args*>(node.args)), worker);
  latent(own.of(*static_cast<const oct_latent_args*>(node.args)), own.sequences(batch), worker);
}

void run_node(const oct_node& node, const oct_program& program, const oct_batch& batch,
              const StepPrefixes& prefixes, const OwnRows& own, const StepLoras& loras,
              const Worker& worker) {
  if (node.own_rows) return run_own_rows(node, batch, own, worker);
  switch (node.op) {
    case OCT_OP_EMBED:
      return embed(*static_cast<const oct_embed_args*>(node.args), batch,
                   loras.change(node) ? &loras : nullptr, node.lora_site, worker);
    case OCT_OP_LINEAR: {
      oct_linear_args args = *static_cast<const oct_linear_args*>(node.args);
      args.rows = batch.seqs.num_tokens;
      return run_linear(node, args, loras, loras.rows(), worker);
    }
    case OCT_OP_ATTENTION: {
      const auto& args = *static_cast<const oct_attention_args*>(node.args);
      return attention(args, batch.seqs, prefixes.of(args), worker);
    }
    case OCT_OP_ROWS:
      return rows(*static_cast<const oct_rows_args*>(node.args), batch, worker);
    case OCT_OP_CHECK:
      return check(*static_cast<const oct_check_args*>(node.args), batch, worker);
    case OCT_OP_HEAD:
      return run_head(node, program, batch, loras, worker);
    case OCT_OP_LATENT:
      return latent(*static_cast<const oct_latent_args*>(node.args), batch.seqs, worker);
    case OCT_OP_EXPERTS:
      return experts(*static_cast<const oct_experts_args*>(node.args), batch.seqs.num_tokens, worker,
                     program.group);
    case OCT_OP_CONV:
      return short_conv(*static_cast<const oct_conv_args*>(node.args), batch.seqs, worker);
    case OCT_OP_SCAN:
      return selective_scan(*static_cast<const oct_scan_args*>(node.args), batch.seqs, worker);
    case OCT_OP_DELTA:
      return delta_rule(*static_cast<const oct_delta_args*>(node.args), batch.seqs, worker);
    case OCT_OP_GATED_NORM:
      return gated_norm(*static_cast<const oct_gated_norm_args*>(node.args), batch.seqs, worker);
  }
}

// The decode steps of one call: the batch of each, as sequences continue from their tokens.
class MultiStep {
 public:
  MultiStep(const oct_program& program, const oct_batch& first)
      : program_(program), batch_(first), left_(first.num_multi_steps - 1) {
    if (left_ == 0) return;
    const int32_t seqs = first.seqs.num_seqs;
    kv_len_.reset(new (std::nothrow) int32_t[2 * seqs]);
    if (samples()) samples_.reset(new (std::nothrow) oct_sample[seqs]);
    if (!has_memory()) return;
    std::copy_n(first.seqs.kv_len, seqs, kv_len_.get());
    batch_.seqs.kv_len = kv_len_.get();
    if (!samples()) return;
    std::copy_n(first.samples, seqs, samples_.get());
    batch_.samples = samples_.get();
    std::fill_n(first.status, int64_t{first.num_multi_steps} * seqs, OCT_TOKEN_NONE);
  }

  bool has_memory() const { return left_ == 0 || (kv_len_ && (samples_ || !samples())); }
  const oct_batch& current() const { return batch_; }

  // Go on to the next step, if there is one: by all workers, after a barrier.
  bool next(const Worker& worker) {
    if (left_ == 0) return false;
    if (!worker.barrier()) return false;  // all have seen `left_`
    if (worker.rank == 0 && samples()) draw();
    if (program_.group && !worker.barrier(program_.group)) return false;
    if (worker.rank == 0) advance();
    return worker.barrier() && !failed_;
  }

 private:
  // Whether this rank samples.
  bool samples() const { return batch_.samples != nullptr; }

  // Take the tokens of the step, and pass them on to the other ranks.
  void draw() {
    const int32_t seqs = batch_.seqs.num_seqs;
    for (int32_t s = 0; s < seqs; s++) {
      failed_ |= batch_.status[s] != OCT_TOKEN_OK || !batch_.row_finite[s];
      samples_[s].position++;
    }
    batch_.token_ids = batch_.tokens;
    if (program_.group) {
      program_.shared_head.drawn[0] = failed_;
      std::copy_n(batch_.tokens, seqs, program_.shared_head.drawn + 1);
    }
    batch_.tokens += seqs;
    batch_.status += seqs;
    if (batch_.logprobs) batch_.logprobs += seqs;
  }

  void advance() {
    const int32_t seqs = batch_.seqs.num_seqs;
    left_--;
    for (int32_t s = 0; s < seqs; s++) kv_len_[s]++;
    batch_.seqs.state_source = batch_.seqs.state_target;
    batch_.row_finite += seqs;
    if (samples()) return;
    const int32_t* drawn = program_.shared_head.drawn;
    failed_ = drawn[0] != 0;
    int32_t* tokens = kv_len_.get() + seqs;
    // What another process wrote is a row of the table only if this one sees to it.
    for (int32_t s = 0; s < seqs; s++) tokens[s] = std::clamp(drawn[1 + s], 0, program_.vocab - 1);
    batch_.token_ids = tokens;
  }

  const oct_program& program_;
  oct_batch batch_;
  int32_t left_;
  bool failed_ = false;
  std::unique_ptr<int32_t[]> kv_len_;  // [S], and the tokens of ranks that do not sample: [S]
  std::unique_ptr<oct_sample[]> samples_;
};

// Checks of the arguments that vary by step, which could make kernels read or write out of bounds.
int32_t check_batch(const oct_program& program, const oct_batch& batch) {
  const int32_t tokens = batch.seqs.num_tokens;
  if (tokens < 1 || tokens > program.max_tokens) {
    return fail(OCT_ERR_ARGUMENT, "a step of %d tokens: the program has room for 1 to %d", tokens,
                program.max_tokens);
  }
  if (batch.num_out < 0 || (program.group && batch.num_out > program.max_tokens)) {
    return fail(OCT_ERR_ARGUMENT, "%d rows of the head: the ranks of a group share memory for 0 to %d",
                batch.num_out, program.max_tokens);
  }
  if (!batch.samples && batch.num_out > 0 && (!program.group || !batch.needs_logits)) {
    return fail(OCT_ERR_ARGUMENT, "a step without samples, outside of a group or without needs_logits");
  }
  for (int32_t r = 0; r < batch.num_out; r++) {
    if (batch.out_rows[r] < 0 || batch.out_rows[r] >= tokens) {
      return fail(OCT_ERR_ARGUMENT, "row %d of the head is token %d of a step of %d tokens", r,
                  batch.out_rows[r], tokens);
    }
    const int64_t turn = batch.samples && !batch.logits[r] ? batch.samples[r].mask_turn : 0;
    if (turn < 0 || turn > INT32_MAX || (turn && !batch.masks_made)) {
      return fail(OCT_ERR_ARGUMENT, "the mask of row %d is still being made, and has no turn", r);
    }
  }
  return OCT_OK;
}

// A head's vocabulary may differ from the table's, but must not exceed it if further steps follow.
int32_t check_embed(const oct_embed_args& args, const oct_program& program, const oct_batch& batch) {
  for (int32_t t = 0; t < batch.seqs.num_tokens; t++) {
    if (batch.token_ids[t] < 0 || batch.token_ids[t] >= args.table.n) {
      return fail(OCT_ERR_ARGUMENT, "token %d of the step has the id %d, outside of a vocabulary of %d",
                  t, batch.token_ids[t], args.table.n);
    }
  }
  for (int32_t t = 0; args.types && batch.token_types && t < batch.seqs.num_tokens; t++) {
    if (batch.token_types[t] < 0 || batch.token_types[t] >= args.num_types) {
      return fail(OCT_ERR_ARGUMENT, "token %d of the step has the type %d, of %d", t,
                  batch.token_types[t], args.num_types);
    }
  }
  for (int32_t s = 0; args.positions.data && s < batch.seqs.num_seqs; s++) {
    const int32_t last = batch.seqs.kv_len[s] + batch.num_multi_steps - 2 + args.position_offset;
    if (last >= args.positions.n) {
      return fail(OCT_ERR_ARGUMENT, "sequence %d goes to row %d of a table of %d positions", s, last,
                  args.positions.n);
    }
  }
  if (batch.num_multi_steps > 1 && program.vocab > args.table.n) {
    return fail(OCT_ERR_ARGUMENT, "several steps with a head of %d tokens, and a table of %d", program.vocab,
                args.table.n);
  }
  return OCT_OK;
}

int32_t check_multi_step(const oct_program& program, const oct_batch& batch, const OwnRows& own) {
  if (batch.num_multi_steps == 1) return OCT_OK;
  const int32_t seqs = batch.seqs.num_seqs;
  if (batch.num_multi_steps < 1 || batch.num_multi_steps > kMaxMultiSteps || batch.head_only) {
    return fail(OCT_ERR_ARGUMENT, "%d steps in one call: 1 to %d are possible, and 1 of the head alone",
                batch.num_multi_steps, kMaxMultiSteps);
  }
  if (batch.probabilities)
    return fail(OCT_ERR_ARGUMENT, "probabilities are asked of %d steps: they are those of one",
                batch.num_multi_steps);
  if (batch.seqs.num_tokens != seqs || batch.num_out != seqs) {
    return fail(OCT_ERR_ARGUMENT, "%d steps with %d tokens and %d rows of the head for %d sequences: "
                "each needs one of both", batch.num_multi_steps, batch.seqs.num_tokens, batch.num_out, seqs);
  }
  for (int32_t s = 0; s < seqs; s++) {
    const bool is_plain = !batch.samples || (!batch.logits[s] && !batch.samples[s].mask_turn &&
                                             !batch.samples[s].mask &&
                                             !has_penalties(batch.samples[s]));
    if (batch.seqs.q_start[s] != s || batch.out_rows[s] != s || !is_plain) {
      return fail(OCT_ERR_ARGUMENT, "%d steps, but sequence %d wants logits, a mask or penalties, or "
                  "is not row %d of the head", batch.num_multi_steps, s, s);
    }
  }
  // At their last lengths; those of the first step have been checked with its nodes.
  for (int32_t i = 0; i < program.num_nodes; i++) {
    const oct_node& node = program.nodes[i];
    if (node.op != OCT_OP_ATTENTION && node.op != OCT_OP_LATENT) continue;
    const oct_attention_args args =
        node.op == OCT_OP_LATENT ? as_attention(*static_cast<const oct_latent_args*>(node.args))
                                 : *static_cast<const oct_attention_args*>(node.args);
    const oct_sequences seen = node.own_rows ? own.sequences(batch) : batch.seqs;
    for (int32_t s = 0; s < seen.num_seqs; s++) {
      const int32_t code = check_blocks(args, seen, s, seen.kv_len[s] + batch.num_multi_steps - 1);
      if (code != OCT_OK) return code;
    }
  }
  return OCT_OK;
}

// Check the memory for log-probabilities of all steps, whose number has been checked.
int32_t check_asked(const oct_program& program, const oct_batch& batch) {
  if (!batch.logprobs || batch.head_only) return OCT_OK;
  for (int32_t r = 0; r < batch.num_multi_steps * batch.num_out; r++) {
    const int32_t code = check_logprobs(batch.logprobs[r], program.vocab, r);
    if (code != OCT_OK) return code;
  }
  return OCT_OK;
}

// Whether the own sequences of a rank are sequences of the step, with rows of it.
int32_t check_own_rows(const oct_batch& batch) {
  const int32_t first = batch.first_own_seq, count = batch.num_own_seqs;
  if (first < 0 || count < 0 || first > batch.seqs.num_seqs - count) {
    return fail(OCT_ERR_ARGUMENT, "%d sequences from %d on are the rank's own, of %d in the step", count,
                first, batch.seqs.num_seqs);
  }
  if (count == 0) return OCT_OK;
  const int32_t begin = batch.seqs.q_start[first], end = batch.seqs.q_start[first + count];
  if (begin >= 0 && begin <= end && end <= batch.seqs.num_tokens) return OCT_OK;
  return fail(OCT_ERR_ARGUMENT, "the rank's own rows are %d to %d, of %d in the step", begin, end,
              batch.seqs.num_tokens);
}

int32_t check_node_of_own_rows(const oct_node& node, const oct_batch& batch, const OwnRows& own) {
  switch (node.op) {
    case OCT_OP_LINEAR:
      return check_linear(own.of(*static_cast<const oct_linear_args*>(node.args)));
    case OCT_OP_LATENT:
      return check_latent(own.of(*static_cast<const oct_latent_args*>(node.args)),
                          own.sequences(batch));
  }
  return fail(OCT_ERR_ARGUMENT, "the op %d cannot be of own rows", node.op);
}

int32_t check_node(const oct_node& node, const oct_program& program, const oct_batch& batch,
                   const OwnRows& own) {
  if (node.own_rows) return check_node_of_own_rows(node, batch, own);
  switch (node.op) {
    case OCT_OP_LINEAR: {
      oct_linear_args args = *static_cast<const oct_linear_args*>(node.args);
      args.rows = batch.seqs.num_tokens;
      return check_linear(args);
    }
    case OCT_OP_ATTENTION:
      return check_attention(*static_cast<const oct_attention_args*>(node.args), batch.seqs);
    case OCT_OP_LATENT:
      return check_latent(*static_cast<const oct_latent_args*>(node.args), batch.seqs);
    case OCT_OP_EMBED:
      return check_embed(*static_cast<const oct_embed_args*>(node.args), program, batch);
    case OCT_OP_CONV:
      return check_conv(*static_cast<const oct_conv_args*>(node.args), batch.seqs);
    case OCT_OP_SCAN:
      return check_scan(*static_cast<const oct_scan_args*>(node.args), batch.seqs);
    case OCT_OP_DELTA:
      return check_delta(*static_cast<const oct_delta_args*>(node.args), batch.seqs);
    case OCT_OP_GATED_NORM:
      return check_gated_norm(*static_cast<const oct_gated_norm_args*>(node.args));
    case OCT_OP_ROWS:
    case OCT_OP_CHECK:
    case OCT_OP_HEAD:
    case OCT_OP_EXPERTS:
      return OCT_OK;
  }
  return fail(OCT_ERR_ARGUMENT, "a program has the unknown op %d", node.op);
}

// Check a step from the node `begin` on; `own` rows are found, if there are any.
int32_t check_step(const oct_program& program, const oct_batch& batch, int32_t begin, OwnRows& own) {
  int32_t code = check_batch(program, batch);
  if (code == OCT_OK && batch.num_own_seqs) code = check_own_rows(batch);
  if (code == OCT_OK && !own.find(batch)) code = fail(OCT_ERR_MEMORY, "no memory for the rank's own rows");
  for (int32_t i = begin; i < program.num_nodes && code == OCT_OK; i++) {
    code = check_node(program.nodes[i], program, batch, own);
  }
  if (code == OCT_OK) code = check_loras(program, batch);
  if (code == OCT_OK) code = check_multi_step(program, batch, own);
  return code == OCT_OK ? check_asked(program, batch) : code;
}

}  // namespace
}  // namespace octavo

int32_t oct_step(oct_pool* pool, const oct_program* program, const oct_batch* batch) {
  using namespace octavo;
  const int32_t begin = batch->head_only ? program->num_nodes - program->num_head_nodes : 0;
  OwnRows own;
  const int32_t code = check_step(*program, *batch, begin, own);
  if (code != OCT_OK) return leave(program->group, code);
  MultiStep steps(*program, *batch);
  StepPrefixes prefixes;
  StepLoras loras;
  if (!steps.has_memory() || !prefixes.find(*program, *batch) || !loras.find(*batch)) {
    fail(OCT_ERR_MEMORY, "no memory for the steps of one call, or for what sequences share or have");
    return leave(program->group, OCT_ERR_MEMORY);
  }
  const auto compute = [&](const Worker& worker) {
    do {
      for (int32_t i = begin; i < program->num_nodes; i++) {
        const oct_node& node = program->nodes[i];
        run_node(node, *program, steps.current(), prefixes, own, loras, worker);
        if (!worker.barrier(node.meets ? program->group : nullptr)) return;
      }
    } while (steps.next(worker));
  };
  return run(pool, compute, program->group);
}

void oct_needed_logits(const oct_batch* batch, uint8_t* needed) {
  for (int32_t r = 0; r < batch->num_out; r++) {
    needed[r] = octavo::needs_logits(*batch, static_cast<size_t>(r));
  }
}
