// The sections of a tile and their sizes: the only place where the engine defines them. csd_optim/store/sections.py is
// the counterpart in Python.
#pragma once
#include <cstdint>

#include "csd.h"

namespace csd {

constexpr uint32_t kMostSections = 7;
constexpr uint64_t kSectionAlign = 4096;  // for direct I/O

// Sections [begin, end) of a tile.
struct Sections {
  uint32_t begin = 0, end = 0;
  uint32_t n() const { return end - begin; }
};

class Layout {
 public:
  Layout() = default;
  // `states`: the number of states that the rule has. `elems`: elements of a tile, a multiple of 64.
  Layout(uint32_t codec, uint32_t states, uint32_t param_dtype, uint64_t elems) : n_(0), codec_(codec) {
    if (!coded()) {
      for (uint32_t s = 0; s < states; s++) add(256, elems);
      return;
    }
    has_correction_ = param_dtype != CSD_F32;
    add(has_correction_ ? 128 : 256, elems);
    if (has_correction_) add(64, elems);
    const bool has_ratio = codec == CSD_8BIT;  // exp_avg's
    if (has_ratio) add(64, elems);
    for (uint32_t state = has_ratio ? 2 : 1; state < states; state++) {  // the code of each, and its exponents
      add(64, elems);
      add(1, elems);
    }
  }

  uint32_t n() const { return n_; }
  uint32_t codec() const { return codec_; }
  bool coded() const { return codec_ != CSD_FP32; }
  bool has_correction() const { return has_correction_; }
  uint64_t bytes() const { return at_[n_]; }  // of a slot
  uint64_t first(uint32_t section) const {
    return at_[section];
  }  // its byte offset in the slot; of n(): the slot's end
  Sections all() const { return {0, n_}; }
  // What each of two passes updates (CSD_PASS_2): the first one all states but the master, the second one the master.
  Sections half(uint32_t pass) const {
    const uint32_t of_master = has_correction_ ? 2 : 1;
    return pass == 1 ? Sections{of_master, n_} : Sections{0, of_master};
  }
  uint64_t bytes(uint32_t section) const { return at_[section + 1] - at_[section]; }
  uint64_t bytes_of(uint32_t section, uint64_t elems) const { return elems / 64 * per_64_[section]; }

 private:
  void add(uint32_t per_64, uint64_t elems) {
    per_64_[n_] = per_64;
    at_[n_ + 1] = at_[n_] + (elems / 64 * per_64 + kSectionAlign - 1) / kSectionAlign * kSectionAlign;
    n_++;
  }

  uint32_t n_ = 0, codec_ = CSD_FP32;
  bool has_correction_ = false;
  uint32_t per_64_[kMostSections] = {};
  uint64_t at_[kMostSections + 1] = {};
};

}  // namespace csd
