#include "summands.h"

#include <string.h>

#include <algorithm>

#include "csd_kernel.h"
#include "device.h"
#include "failure.h"
#include "float16.h"
#include "float_mode.h"

namespace csd {
namespace {

// Number of elements whose sum stays in the first-level cache while one gradient after another is added.
constexpr uint64_t kChunk = 2048;

const uint32_t *find_block(const uint32_t *run, uint64_t words, uint64_t block) {
  for (uint64_t at = 0;; block--) {
    const uint64_t size = at < words ? (uint64_t{run[at]} + kLanes) / kLanes * kLanes : words + 1;
    if (size > words - at) throw Failure{CSD_EINVAL, "a gradient has more entries than words for them"};
    if (block == 0) return run + at;
    at += size;
  }
}

// Entries may come from a network and are not trusted. Finding them relies on ascending indices, but memory safety does
// not.
void add_entries(const csd_summand &s, uint64_t first, uint64_t n, float *sum) {
  const uint64_t last = first + n;
  for (uint64_t from = first, to; from < last; from = to) {
    const uint64_t run = from / s.run_elems, block = from % s.run_elems / kBlockElems;
    const uint64_t block_first = run * s.run_elems + block * kBlockElems;
    to = std::min({last, block_first + kBlockElems, (run + 1) * s.run_elems});
    const uint32_t *const head =
        find_block(static_cast<const uint32_t *>(s.values) + run * s.run_words, s.run_words, block);
    const auto begins_before = [](uint32_t entry, uint64_t index) { return (entry & 0xffff) < index; };
    const uint32_t *const end = head + 1 + *head;
    for (const uint32_t *entry = std::lower_bound(head + 1, end, from - block_first, begins_before); entry != end;
         entry++) {
      const uint64_t element = block_first + (*entry & 0xffff);
      if (element < from || element >= to) break;
      const auto value = static_cast<uint16_t>(*entry >> 16);
      sum[element - first] += s.dtype == CSD_F16 ? f16_to_f32(value) : bf16_to_f32(value);
    }
  }
}

}  // namespace

void check_summands(const csd_summand *summands, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    const csd_summand &s = summands[i];
    const bool sparse = s.run_words != 0;
    if (!s.values || s.dtype > CSD_BF16 || (sparse && (s.dtype == CSD_F32 || s.run_elems == 0)))
      throw Failure{CSD_EINVAL,
                    "gradient " + std::to_string(i) + " of a sum has no values, or a dtype that cannot be summed"};
  }
}

// Keeps subnormal numbers, as does all other code that adds up gradients.
void sum_up(const csd_summand *summands, uint64_t n_summands, uint64_t first, uint64_t n, float *sum, int32_t isa) {
  const FloatMode mode(Subnormals::kept);
  for (uint64_t i = 0; i < n; i += kChunk) {
    const uint64_t some = std::min(kChunk, n - i);
    for (const csd_summand *s = summands; s != summands + n_summands; s++) {
      const bool is_first = s == summands;
      if (s->run_words) {
        if (is_first) memset(sum + i, 0, 4 * some);
        add_entries(*s, first + i, some, sum + i);
      } else {
        add_dense(static_cast<const char *>(s->values) + dtype_bytes(s->dtype) * (first + i), s->dtype, some, is_first,
                  sum + i, isa);
      }
    }
  }
}

}  // namespace csd
