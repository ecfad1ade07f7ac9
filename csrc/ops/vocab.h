#pragma once

#include "common/check.h"

namespace mlxcel {

constexpr int kMaxVocab = 262144;

/// Throws unless rows of `vocab` tokens are supported.
inline void check_vocab(const char* op, const char* argument, int vocab) {
  if (vocab < 1 || vocab > kMaxVocab) {
    fail(op, argument, " must have 1 to ", kMaxVocab, " tokens a row, got ", vocab, ".");
  }
}

}  // namespace mlxcel
