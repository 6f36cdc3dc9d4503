// Top-K on a GPU, by the same rules as on the CPU (native/src/topk.h) and with the same bits. Five launches select the
// entries of any number of tiles, and one updates the residuals. The k-th largest magnitude is found exactly, by
// counting: first the upper 11 of its 15 bits, then the lower 4.
//
//   count_high    a block per chunk     histogram of the upper bits, per part
//   find_high     a block per part      the bin with the k-th largest magnitude
//   count_low     a block per chunk     histogram of the lower bits within that bin, per part and per chunk
//   place         a block per tile      per chunk: what is sent, and where its entries begin; the counts of the blocks
//   emit          a block per chunk     the entries
//   spread        a block per chunk     if entries do not travel: their values, dense
//   feed_back     a block per chunk     the residuals, when the step is complete
//
// A *part* is one parameter's elements in one tile. It is cut into *chunks*, none of which crosses a block of entries
// (csd_kernel.h). Each pass computes the 16-bit values anew, so that there is no temporary memory per element.
// Subnormal numbers count (native/src/float_mode.h): compile this with --ftz=false and --fmad=false.
#pragma once
#include "csd_kernel.h"
#include "hash.h"
#include "values.h"

/* cdef */
enum { kHighBins = 1 << 11, kLowBins = 1 << 4 };

/* What is known of a part, besides csd_topk_part. */
typedef struct TopKPlace {
  uint64_t first; /* in the parameter */
  uint32_t tile;
  uint32_t chunks_begin, chunks_end;
  uint32_t feeds_back; /* 1: the step changes its residual */
} TopKPlace;

typedef struct TopKChunk {
  uint32_t part;
  uint32_t first, n; /* elements of the part */
  uint32_t block;    /* of the tile */
} TopKChunk;

typedef struct TopKTile {
  uint64_t row;       /* where its row of entries begins, in words */
  uint32_t row_words; /* the last word of the row receives the number of words used */
  uint32_t blocks;
  uint32_t parts_begin, parts_end, chunks_begin, chunks_end;
} TopKTile;

/* `rest` of a part's values in this bin are among the k largest. */
typedef struct TopKBin {
  uint32_t bin, rest;
} TopKBin;

/* The number of a chunk's values above that bin, and of each magnitude within it. */
typedef struct TopKCounts {
  uint32_t above, low[kLowBins];
} TopKCounts;

/* What a chunk sends. */
typedef struct TopKSent {
  uint32_t bound;    /* larger magnitudes, */
  uint32_t equal;    /* and the first so many that are equal; kAll: all of them */
  uint32_t n;        /* how many together */
  uint32_t position; /* of the first one, in words of the row */
} TopKSent;

typedef struct TopKArgs {
  const struct csd_topk_part *parts;
  const TopKPlace *places; /* per part */
  const TopKChunk *chunks;
  const TopKTile *tiles;
  uint32_t *high;     /* kHighBins per part, all 0 at the beginning */
  uint32_t *low;      /* kLowBins per part, all 0 at the beginning */
  TopKBin *bins;      /* per part */
  TopKCounts *counts; /* per chunk */
  TopKSent *sent;     /* per chunk; needed until feed_back() */
  uint32_t *entries;
  uint16_t *dense; /* of spread(): one parameter, which all parts belong to */
} TopKArgs;
/* end of cdef */

constexpr uint32_t kAll = 0xffffffffu;  // more than there are

// A chunk and the part that it belongs to.
struct TopKWork {
  TopKChunk chunk;
  csd_topk_part part;
  float inverse;  // 1 / scale; 0: the residual is neither used nor changed
};

// kFour neighbouring elements of a part, and what is owed for them.
struct TopKFour {
  float owed[kFour];
  uint16_t values[kFour];  // as they would be sent; zero beyond the end of the chunk
};

inline bool is_finite(float f) { return (float_bits(f) & 0x7f800000u) != 0x7f800000u; }

inline TopKWork work_of_block(const TopKArgs &a) {
  TopKWork work;
  work.chunk = a.chunks[blockIdx.x];
  work.part = a.parts[work.chunk.part];
  work.part.grad = reach(work.part.grad);
  work.part.residual = reach(work.part.residual);
  const float scale = work.part.scale, inverse = 1.0f / scale;
  work.inverse = work.part.residual && scale != 0 && is_finite(scale) && is_finite(inverse) ? inverse : 0.0f;
  return work;
}

// Rounds to 16 bits. Finite values stay finite, and all nans become the same one.
inline uint16_t round_owed(float owed, uint32_t dtype) {
  const bool is_f16 = dtype == CSD_F16;
  const uint32_t largest = is_f16 ? 0x477fe000u : 0x7f7f0000u;  // 65504, 0x1.fep127
  uint32_t bits = float_bits(owed);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return is_f16 ? 0x7e00 : 0x7fc0;
  if (is_finite(owed) && (bits & 0x7fffffffu) > largest) bits = (bits & 0x80000000u) | largest;
  return is_f16 ? f32_to_f16(bits_float(bits)) : f32_to_bf16(bits_float(bits));
}

inline TopKFour four_of(const TopKWork &work, uint64_t i, uint64_t end) {
  TopKFour four;
  const csd_topk_part &part = work.part;
  const uint64_t bytes = bytes_of(part.grad_dtype);
  load_values(part.grad, part.grad_dtype, i, end, is_multiple((const char *)part.grad + i * bytes, kFour * bytes),
              four.owed);
  if (work.inverse != 0) {
    uint16_t residual[kFour];
    load(part.residual + i, residual, end - i, is_multiple(part.residual + i, kFour * 2));
    for (int j = 0; j < kFour; j++) four.owed[j] = four.owed[j] + bf16_to_f32(residual[j]) * work.inverse;
  }
  for (int j = 0; j < kFour; j++) four.values[j] = round_owed(four.owed[j], part.dtype);
  return four;
}

inline uint32_t magnitude_of(uint16_t value) { return value & 0x7fffu; }

KERNEL count_high(const TopKArgs a) {
  SHARED uint32_t bins[kHighBins];
  const TopKWork work = work_of_block(a);
  for (uint32_t b = threadIdx.x; b < kHighBins; b += kThreads) bins[b] = 0;
  __syncthreads();
  const uint64_t end = work.chunk.first + work.chunk.n;
  for (uint64_t i = work.chunk.first + threadIdx.x * kFour; i < end; i += kThreads * kFour) {
    const TopKFour four = four_of(work, i, end);
    for (int j = 0; j < kFour; j++)
      if (magnitude_of(four.values[j])) atomicAdd(&bins[magnitude_of(four.values[j]) / kLowBins], 1u);
  }
  __syncthreads();
  uint32_t *const high = a.high + (uint64_t)work.chunk.part * kHighBins;
  for (uint32_t b = threadIdx.x; b < kHighBins; b += kThreads)
    if (bins[b]) atomicAdd(&high[b], bins[b]);
}

// Adds up the numbers of all threads before this one. `sums`: kSums words; the last one then has the total.
constexpr uint32_t kRow = 16, kSums = kThreads / kRow + 1;
inline uint32_t sum_before(uint32_t own, uint32_t *sums) {
  const uint32_t lane = threadIdx.x % kRow, row = threadIdx.x / kRow;
  uint32_t to_here = own;
  for (uint32_t step = 1; step < kRow; step *= 2) {
    const uint32_t before = from_lane(to_here, (int)((lane - step) % kRow));
    if (lane >= step) to_here += before;
  }
  if (lane == kRow - 1) sums[row] = to_here;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t total = 0;
    for (uint32_t r = 0; r < kSums; r++) {
      const uint32_t of_row = r + 1 < kSums ? sums[r] : 0;
      sums[r] = total;
      total += of_row;
    }
  }
  __syncthreads();
  return sums[row] + to_here - own;
}

KERNEL find_high(const TopKArgs a) {
  SHARED uint32_t sums[kSums];
  constexpr uint32_t kOwn = kHighBins / kThreads;
  const uint32_t *const high = a.high + (uint64_t)blockIdx.x * kHighBins;
  const uint64_t k = a.parts[blockIdx.x].k;
  const uint32_t top = kHighBins - 1 - threadIdx.x * kOwn;  // thread 0 has the largest
  uint32_t own = 0;
  for (uint32_t b = 0; b < kOwn; b++) own += high[top - b];
  uint32_t above = sum_before(own, sums);
  if (sums[kSums - 1] <= k) {  // nothing but zeros is left over
    if (threadIdx.x == 0) a.bins[blockIdx.x] = {0, kAll};
    return;
  }
  if (above >= k) return;
  for (uint32_t b = 0; b < kOwn; b++) {
    const uint32_t here = high[top - b];
    if (above + here >= k) {
      a.bins[blockIdx.x] = {top - b, (uint32_t)k - above};
      return;
    }
    above += here;
  }
}

KERNEL count_low(const TopKArgs a) {
  SHARED uint32_t bins[kLowBins + 1];  // the last one: above
  const TopKWork work = work_of_block(a);
  const uint32_t bin = a.bins[work.chunk.part].bin;
  if (threadIdx.x <= kLowBins) bins[threadIdx.x] = 0;
  __syncthreads();
  const uint64_t end = work.chunk.first + work.chunk.n;
  for (uint64_t i = work.chunk.first + threadIdx.x * kFour; i < end; i += kThreads * kFour) {
    const TopKFour four = four_of(work, i, end);
    for (int j = 0; j < kFour; j++) {
      const uint32_t magnitude = magnitude_of(four.values[j]);
      if (magnitude / kLowBins > bin) atomicAdd(&bins[kLowBins], 1u);
      else if (magnitude / kLowBins == bin && magnitude) atomicAdd(&bins[magnitude % kLowBins], 1u);
    }
  }
  __syncthreads();
  TopKCounts &counts = a.counts[blockIdx.x];
  if (threadIdx.x == kLowBins) counts.above = bins[kLowBins];
  if (threadIdx.x >= kLowBins) return;
  counts.low[threadIdx.x] = bins[threadIdx.x];
  if (bins[threadIdx.x]) atomicAdd(&a.low[work.chunk.part * kLowBins + threadIdx.x], bins[threadIdx.x]);
}

// Finds the k-th largest magnitude of a part, and what each of its chunks sends. Of equal values the first are sent.
inline void divide_part(const TopKArgs &a, uint32_t part) {
  const TopKBin found = a.bins[part];
  uint32_t low = kLowBins - 1, rest = found.rest;
  if (rest == kAll) low = 1;  // everything but zeros
  else
    for (; a.low[part * kLowBins + low] < rest; low--) rest -= a.low[part * kLowBins + low];
  for (uint32_t c = a.places[part].chunks_begin; c < a.places[part].chunks_end; c++) {
    const TopKCounts &counts = a.counts[c];
    const uint32_t here = counts.low[low], equal = here < rest ? here : rest;
    uint32_t sent = counts.above + equal;
    for (uint32_t b = low + 1; b < kLowBins; b++) sent += counts.low[b];
    if (rest != kAll) rest -= equal;
    a.sent[c] = {found.bin * kLowBins + low, equal == here ? kAll : equal, sent, 0};
  }
}

KERNEL place(const TopKArgs a) {
  const TopKTile tile = a.tiles[blockIdx.x];
  for (uint32_t part = tile.parts_begin + threadIdx.x; part < tile.parts_end; part += kThreads) divide_part(a, part);
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t *const row = a.entries + tile.row;
  uint32_t chunk = tile.chunks_begin, at = 0;
  for (uint32_t block = 0; block < tile.blocks; block++) {
    uint32_t next = at + 1;
    for (; chunk < tile.chunks_end && a.chunks[chunk].block == block; chunk++) {
      a.sent[chunk].position = next;
      next += a.sent[chunk].n;
    }
    row[at] = next - at - 1;
    for (at = next; at % kLanes; at++) row[at] = 0;
  }
  row[tile.row_words - 1] = at;
}

// Returns which of four values are sent, as a mask. `equal`: how many that equal the bound came before in the chunk.
inline uint32_t sent_of(const TopKFour &four, const TopKSent &sent, uint32_t equal) {
  uint32_t mask = 0;
  for (int j = 0; j < kFour; j++) {
    const uint32_t magnitude = magnitude_of(four.values[j]);
    if (magnitude > sent.bound || (magnitude == sent.bound && equal < sent.equal)) mask |= 1u << j;
    equal += magnitude == sent.bound;
  }
  return mask;
}

// Returns how many of four values are above the bound, in the upper half, and how many equal it.
inline uint32_t count_of(const TopKFour &four, const TopKSent &sent) {
  uint32_t count = 0;
  for (int j = 0; j < kFour; j++) {
    const uint32_t magnitude = magnitude_of(four.values[j]);
    count += magnitude > sent.bound ? 1u << 16 : magnitude == sent.bound;
  }
  return count;
}

KERNEL emit(const TopKArgs a) {
  SHARED uint32_t sums[kSums];
  const TopKWork work = work_of_block(a);
  const TopKSent sent = a.sent[blockIdx.x];
  if (!sent.n) return;
  uint32_t *const to = a.entries + a.tiles[a.places[work.chunk.part].tile].row + sent.position;
  const uint64_t end = work.chunk.first + work.chunk.n;
  uint32_t above = 0, equal = 0;  // of the turns before
  for (uint64_t first = work.chunk.first; first < end; first += kThreads * kFour) {
    const uint64_t i = first + threadIdx.x * kFour;
    TopKFour four = {};
    if (i < end) four = four_of(work, i, end);
    const uint32_t before = sum_before(count_of(four, sent), sums), all = sums[kSums - 1];
    const uint32_t equal_before = equal + (before & 0xffffu), mask = sent_of(four, sent, equal_before);
    uint32_t at = above + (before >> 16) + (equal_before < sent.equal ? equal_before : sent.equal);
    for (uint32_t j = 0; j < kFour; j++)
      if (mask >> j & 1)
        to[at++] = (uint32_t)(work.part.tile_first + i + j) % kBlockElems | (uint32_t)four.values[j] << 16;
    above += all >> 16;
    equal += all & 0xffffu;
    __syncthreads();  // before `sums` is used again
  }
}

// Writes what a chunk sends in 16 bits, and zeros for the rest.
KERNEL spread(const TopKArgs a) {
  const TopKChunk chunk = a.chunks[blockIdx.x];
  const TopKPlace where = a.places[chunk.part];
  const TopKSent sent = a.sent[blockIdx.x];
  uint16_t *const to = a.dense + where.first + chunk.first;
  for (uint32_t i = threadIdx.x; i < chunk.n; i += kThreads) to[i] = 0;
  __syncthreads();
  const uint32_t *const entries = a.entries + a.tiles[where.tile].row + sent.position;
  const uint32_t begin = (a.parts[chunk.part].tile_first + chunk.first) % kBlockElems;
  for (uint32_t e = threadIdx.x; e < sent.n; e += kThreads) to[entries[e] % kBlockElems - begin] = entries[e] >> 16;
}

// Rounds to bf16 at random, except inf and nan: see narrow_residual() in native/src/topk_loop.h.
inline uint16_t round_residual(float f, uint32_t hash) {
  return is_finite(f) ? (uint16_t)((float_bits(f) + (hash & 0xffffu)) >> 16) : f32_to_bf16(f);
}

KERNEL feed_back(const TopKArgs a) {
  SHARED uint32_t sums[kSums];
  const TopKWork work = work_of_block(a);
  const csd_topk_part &part = work.part;
  const TopKSent sent = a.sent[blockIdx.x];
  if (!a.places[work.chunk.part].feeds_back || work.inverse == 0) return;
  const uint64_t end = work.chunk.first + work.chunk.n;
  const bool counts_equal = sent.equal != 0 && sent.equal != kAll;  // at most one chunk of a part has to
  uint32_t equal = 0;
  for (uint64_t first = work.chunk.first; first < end; first += kThreads * kFour) {
    const uint64_t i = first + threadIdx.x * kFour;
    TopKFour four = {};
    if (i < end) four = four_of(work, i, end);
    uint32_t equal_before = 0;
    if (counts_equal) equal_before = equal + (sum_before(count_of(four, sent), sums) & 0xffffu);
    const uint32_t mask = sent_of(four, sent, equal_before);
    if (i < end) {
      uint16_t residual[kFour];
      for (uint32_t j = 0; j < kFour; j++) {
        const float value = part.dtype == CSD_F16 ? f16_to_f32(four.values[j]) : bf16_to_f32(four.values[j]);
        const float unsent = (four.owed[j] - (mask >> j & 1 ? value : 0.0f)) * part.scale;
        residual[j] = round_residual(unsent, mix_bits(part.seed + (uint32_t)i + j));
      }
      store(residual, part.residual + i, end - i, is_multiple(part.residual + i, kFour * 2));
    }
    if (!counts_equal) continue;
    equal += sums[kSums - 1] & 0xffffu;
    __syncthreads();  // before `sums` is used again
  }
}
