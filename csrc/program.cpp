// A step: the nodes of a program, one after the other, each by all workers.
//
//     embed | linear | attention | linear | linear | linear | attention | ... | check | head
//           ^ a barrier between any two
//
// What a node does is in its own file; here is only the walk, what is too small for a file, and the
// end of a step, where rows of logits become tokens.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "rows.h"

namespace octavo {
namespace {

constexpr float kGreedyTemperature = 1e-5f;  // a lower temperature is treated as 0

bool has_penalties(const oct_sample& s) {
  return s.repetition_penalty != 1.0f || s.frequency_penalty != 0.0f || s.presence_penalty != 0.0f;
}

// Whether more than the maximum of a row of logits is needed for its token.
bool needs_logits(const oct_sample& s) {
  return s.temperature >= kGreedyTemperature || has_penalties(s);
}

// Worker w's memory for the whole head: row pointers and maxima of R rows, and the logits of those
// that are sampled. All workers lay it out alike.
struct HeadMemory {
  float** logits;
  float* best_logit;
  int32_t* best_id;

  HeadMemory(const oct_batch& batch, int32_t vocab, const Worker& worker) {
    const size_t rows = static_cast<size_t>(batch.num_out);
    const size_t padded = (static_cast<size_t>(vocab) + 15) / 16 * 16;
    size_t sampled = 0;
    for (size_t r = 0; r < rows; r++) sampled += !batch.logits[r] && needs_logits(batch.samples[r]);
    best_logit = static_cast<float*>(worker.shared(2, rows * 8));
    best_id = reinterpret_cast<int32_t*>(best_logit + rows);
    float* free_row = static_cast<float*>(worker.shared(3, sampled * padded * sizeof(float)));
    logits = static_cast<float**>(worker.scratch(7, rows * sizeof(float*)));
    for (size_t r = 0; r < rows; r++) {
      logits[r] = batch.logits[r];
      if (logits[r] || !needs_logits(batch.samples[r])) continue;
      logits[r] = free_row;
      free_row += padded;
    }
  }
};

void run_head(const oct_linear_args& node, const oct_program& program, const oct_batch& batch,
              const Worker& worker) {
  if (batch.num_out == 0) return;
  const HeadMemory memory(batch, program.vocab, worker);
  oct_head head = {memory.logits, memory.best_logit, memory.best_id,
                   node.head ? node.head->softcap : 0.0f};
  oct_linear_args args = node;
  args.rows = batch.num_out;
  args.row_index = batch.out_rows;
  args.head = &head;
  linear(args, worker);
  if (!worker.barrier()) return;

  for (int32_t r = worker.ticket(); r < batch.num_out; r = worker.ticket()) {
    if (!batch.logits[r] && needs_logits(batch.samples[r])) {
      batch.status[r] = sample_row(memory.logits[r], program.vocab, batch.samples[r], worker,
                                   &batch.tokens[r]);
    } else {
      batch.tokens[r] = memory.best_id[r];
      batch.status[r] =
          std::isfinite(memory.best_logit[r]) ? OCT_TOKEN_OK : OCT_TOKEN_BAD_LOGITS;
    }
  }
}

void run_node(const oct_node& node, const oct_program& program, const oct_batch& batch,
              const Worker& worker) {
  switch (node.op) {
    case OCT_OP_EMBED:
      return embed(*static_cast<const oct_embed_args*>(node.args), batch, worker);
    case OCT_OP_LINEAR: {
      oct_linear_args args = *static_cast<const oct_linear_args*>(node.args);
      args.rows = batch.seqs.num_tokens;
      return linear(args, worker);
    }
    case OCT_OP_ATTENTION:
      return attention(*static_cast<const oct_attention_args*>(node.args), batch.seqs, worker);
    case OCT_OP_ROWS:
      return rows(*static_cast<const oct_rows_args*>(node.args), batch, worker);
    case OCT_OP_CHECK:
      return check(*static_cast<const oct_check_args*>(node.args), batch, worker);
    case OCT_OP_HEAD:
      return run_head(*static_cast<const oct_linear_args*>(node.args), program, batch, worker);
  }
}

// What would make the kernels read or write where they must not, of all that varies by step.
int32_t check_batch(const oct_program& program, const oct_batch& batch) {
  const int32_t tokens = batch.seqs.num_tokens;
  if (tokens < 1 || tokens > program.max_tokens) {
    return fail(OCT_ERR_ARGUMENT, "a step of %d tokens: the program has room for 1 to %d", tokens,
                program.max_tokens);
  }
  for (int32_t r = 0; r < batch.num_out; r++) {
    if (batch.out_rows[r] < 0 || batch.out_rows[r] >= tokens) {
      return fail(OCT_ERR_ARGUMENT, "row %d of the head is token %d of a step of %d tokens", r,
                  batch.out_rows[r], tokens);
    }
  }
  if (batch.head_only) return OCT_OK;
  for (int32_t t = 0; t < tokens; t++) {
    if (batch.token_ids[t] < 0 || batch.token_ids[t] >= program.vocab) {
      return fail(OCT_ERR_ARGUMENT, "token %d of the step has the id %d, outside of a vocabulary of %d",
                  t, batch.token_ids[t], program.vocab);
    }
  }
  return OCT_OK;
}

int32_t check_node(const oct_node& node, const oct_batch& batch) {
  switch (node.op) {
    case OCT_OP_LINEAR: {
      oct_linear_args args = *static_cast<const oct_linear_args*>(node.args);
      args.rows = batch.seqs.num_tokens;
      return check_linear(args);
    }
    case OCT_OP_ATTENTION:
      return check_attention(*static_cast<const oct_attention_args*>(node.args), batch.seqs);
    case OCT_OP_EMBED:
    case OCT_OP_ROWS:
    case OCT_OP_CHECK:
    case OCT_OP_HEAD:
      return OCT_OK;
  }
  return fail(OCT_ERR_ARGUMENT, "a program has the unknown op %d", node.op);
}

}  // namespace
}  // namespace octavo

int32_t oct_step(oct_pool* pool, const oct_program* program, const oct_batch* batch) {
  using namespace octavo;
  int32_t code = check_batch(*program, *batch);
  const int32_t begin = batch->head_only ? program->num_nodes - program->num_head_nodes : 0;
  for (int32_t i = begin; i < program->num_nodes && code == OCT_OK; i++) {
    code = check_node(program->nodes[i], *batch);
  }
  if (code != OCT_OK) return code;
  return run(reinterpret_cast<Pool*>(pool), [&](const Worker& worker) {
    for (int32_t i = begin; i < program->num_nodes; i++) {
      run_node(program->nodes[i], *program, *batch, worker);
      if (!worker.barrier()) return;
    }
  });
}
