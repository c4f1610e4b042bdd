// Writes a token's keys and values of one head into its block, in the layout of attention.h.
#pragma once

#include <cstdint>

#include "attention.h"

namespace forgeline {

// `block` is the head's part of a block, `slot` the token's place in it.
void store_key(const AttentionShape& shape, const float* key, uint8_t* block, int slot);
void store_value(const AttentionShape& shape, const float* value, uint8_t* block, int slot);

}  // namespace forgeline
