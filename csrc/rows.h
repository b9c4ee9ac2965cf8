// Small ops on whole rows of activations, divided by token.
#pragma once

#include "octavo.h"
#include "pool.h"

namespace octavo {

class StepLoras;  // lora.h

// `loras`: adapters that change it, by their `site`; NULL: none does.
void embed(const oct_embed_args& args, const oct_batch& batch, const StepLoras* loras, int site,
           const Worker& worker);
void rows(const oct_rows_args& args, const oct_batch& batch, const Worker& worker);
void check(const oct_check_args& args, const oct_batch& batch, const Worker& worker);

// out = x / sqrt(mean(x^2) + eps) * weight, of one row.
void norm_row(const float* x, const float* weight, float eps, int width, float* out);

}  // namespace octavo
