// The stages of the kernels: labelled loops, joined by streams. csd_adamw_update.cpp and csd_adamw_topk_update.cpp
// connect them; README.md beside this file draws the picture and counts the cycles.
#pragma once
#include "adamw.h"
#include "float16.h"
#include "word.h"

#ifndef CSD_DATAFLOW  // csim/hls_stream.h makes each stage a thread; here a stage is a call in a DATAFLOW region
#define CSD_DATAFLOW
#define CSD_STAGE(stage, ...) stage(__VA_ARGS__);
#endif

// As deep as a burst is long, so that a stage can wait for one while its neighbours go on. Any depth would do without a
// deadlock: where streams part and join again, they are written and read in the same order, or carry a single number.
constexpr int kFifoWords = 64;
using Words = hls::stream<Word>;
using Number = hls::stream<uint32_t>;  // carries a single one, at the end of a stage

inline Word zero_word() {
#pragma HLS INLINE
  Word word;
ZERO:
  for (uint32_t lane = 0; lane < kLanes; lane++) {
#pragma HLS UNROLL
    word[lane] = 0;
  }
  return word;
}

// ---- Segments ---------------------------------------------------------------

inline csd_segment segment_of(const Word &word) {
#pragma HLS INLINE
  return {word[0],
          word[1],
          word[2],
          word[3],
          {bits_float(word[4]), bits_float(word[5]), bits_float(word[6]), bits_float(word[7]), bits_float(word[8]),
           bits_float(word[9]), bits_float(word[10]), bits_float(word[11]), bits_float(word[12]), word[13]},
          word[14],
          word[15]};
}

inline uint32_t words_of(uint32_t elems, uint32_t dtype) {
#pragma HLS INLINE
  // Divided by constants, which are powers of two: shifts.
  return dtype == CSD_F32 ? elems / kLanes + (elems % kLanes != 0) : elems / (2 * kLanes) + (elems % (2 * kLanes) != 0);
}

// The word after its last one, in each section.
inline uint32_t end_of(const csd_segment &s) {
#pragma HLS INLINE
  return s.first_word + words_of(s.elems, CSD_F32);
}

// ---- Memory to streams --------------------------------------------------------

// Linear, and nothing else in the loop: that is what becomes bursts.
inline void read_words(const Word *from, uint32_t n, Words &words) {
READ:
  for (uint32_t i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    words.write(from[i]);
  }
}

// A word every other cycle, as the update takes them: that leaves the checksum two cycles from word to word.
inline void read_section(const Word *tile, uint32_t section, uint32_t n_words, uint32_t sections, Words &words,
                         Number &crc_out) {
  const size_t first = (size_t)section * n_words;
  const uint32_t n = section < sections ? n_words : 0;
  uint32_t crc = kCrcBegin;
READ_SECTION:
  for (uint32_t i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 2
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    const Word word = tile[first + i];
    crc = crc_of(crc, word);
    words.write(word);
  }
  crc_out.write(~crc);
}

// ---- Streams to memory --------------------------------------------------------

// Not inlined: a function that writes to memory returns after the memory's last response, so that whoever uses its
// result knows that everything has arrived. Without a sum the result is something else that comes from the last word.
template <bool summed>
uint32_t store(Word *to, size_t first, uint32_t n, Words &words) {
#pragma HLS INLINE off
  uint32_t result = kCrcBegin;
STORE:
  for (uint32_t i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 2
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    const Word word = words.read();
    result = summed ? crc_of(result, word) : word[0];
    to[first + i] = word;
  }
  return ~result;
}

inline void write_section(Word *tile, uint32_t section, uint32_t n_words, uint32_t sections, Words &words,
                          Number &crc_out) {
  crc_out.write(store<true>(tile, (size_t)section * n_words, section < sections ? n_words : 0, words));
}

inline void write_params(Word *param, uint32_t n, Words &words, Number &written) {
  written.write(store<false>(param, 0, n, words));
}

// Sums of what was written and `params_written` come after the writing, hence the report after all of it.
inline void write_report(Word *report, uint32_t n_words, Number &crc_in_0, Number &crc_in_1, Number &crc_in_2,
                         Number &crc_in_3, Number &crc_out_0, Number &crc_out_1, Number &crc_out_2, Number &crc_out_3,
                         Number &params_written, Number &nonfinite, Number &bad_entries) {
  params_written.read();
  Word word = zero_word();  // a csd_report
  word[0] = kKernelVersion;
  word[1] = n_words;
  word[2] = nonfinite.read();
  word[3] = bad_entries.read();
  word[4] = crc_in_0.read();
  word[5] = crc_in_1.read();
  word[6] = crc_in_2.read();
  word[7] = crc_in_3.read();
  word[8] = crc_out_0.read();
  word[9] = crc_out_1.read();
  word[10] = crc_out_2.read();
  word[11] = crc_out_3.read();
  *report = word;
}

// ---- The update ---------------------------------------------------------------

constexpr uint32_t kPairs = kLanes / 2;  // lanes that 16 values of 16 bits fill: half a word

// Gradient `lane` of a tile's word; of 16 bits, the `upper` or lower half of a gradient word.
inline float widen(const Word &grad, uint32_t dtype, bool upper, uint32_t lane) {
#pragma HLS INLINE
  const uint32_t pair = grad[(upper ? kPairs : 0) + lane / 2];
  const uint16_t half = (uint16_t)(lane % 2 ? pair >> 16 : pair);
  return dtype == CSD_F32 ? bits_float(grad[lane]) : dtype == CSD_F16 ? f16_to_f32(half) : bf16_to_f32(half);
}

inline uint32_t narrow(float master, uint32_t dtype) {
#pragma HLS INLINE
  return dtype == CSD_F16 ? f32_to_f16(master) : f32_to_bf16(master);
}

inline bool is_finite(float f) { return (float_bits(f) & 0x7f800000u) != 0x7f800000u; }

// Walks through the tile and its segments side by side, a word of 16 elements every other cycle: memory brings one
// every sixth at best (README.md), and with two cycles each multiplier serves two lanes. Elements in no segment, and
// lanes beyond the end of one, pass through.
inline void update(Words &segments, Words &grads, Words &master_in, Words &exp_avg_in, Words &exp_avg_sq_in,
                   Words &max_exp_avg_sq_in, Words &master_out, Words &exp_avg_out, Words &exp_avg_sq_out,
                   Words &max_exp_avg_sq_out, Words &params, Number &nonfinite_out, uint32_t n_words, uint32_t sections,
                   uint32_t n_segments) {
  csd_segment s = segment_of(zero_word());
  uint32_t end = 0, segments_left = n_segments, nonfinite = 0;
  Word grad = zero_word(), param = zero_word();
UPDATE:
  for (uint32_t at = 0; at < n_words; at++) {
#pragma HLS PIPELINE II = 2
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    if (at == end && segments_left != 0) {
      s = segment_of(segments.read());
      end = end_of(s);
      segments_left--;
    }
    const bool inside = at >= s.first_word && at < end;
    const uint32_t word = at - s.first_word;                      // of the segment
    const uint32_t elems = inside ? s.elems - word * kLanes : 0;  // lanes from here on pass through
    const bool upper = word % 2 != 0;                             // half of a word of 16-bit values
    if (inside && (s.grad_dtype == CSD_F32 || !upper)) grad = grads.read();
    Word master = master_in.read(), exp_avg = exp_avg_in.read(), exp_avg_sq = exp_avg_sq_in.read();
    Word max_exp_avg_sq = sections == 4 ? max_exp_avg_sq_in.read() : zero_word();

    float g[kLanes];
    uint32_t found = 0;
  WIDEN:
    for (uint32_t i = 0; i < kLanes; i++) {
#pragma HLS UNROLL
      g[i] = widen(grad, s.grad_dtype, upper, i);
      found += i < elems && !is_finite(g[i]);
    }
    nonfinite += found;
  LANES:
    for (uint32_t i = 0; i < kLanes; i++) {
#pragma HLS UNROLL
      float max = bits_float(max_exp_avg_sq[i]);
      const AdamWElement e = adamw({bits_float(master[i]), bits_float(exp_avg[i]), bits_float(exp_avg_sq[i])}, max,
                                   g[i], s.hyper, s.hyper.amsgrad != 0);
      master[i] = i < elems ? float_bits(e.master) : master[i];
      exp_avg[i] = i < elems ? float_bits(e.exp_avg) : exp_avg[i];
      exp_avg_sq[i] = i < elems ? float_bits(e.exp_avg_sq) : exp_avg_sq[i];
      max_exp_avg_sq[i] = i < elems ? float_bits(max) : max_exp_avg_sq[i];
    }
    master_out.write(master);
    exp_avg_out.write(exp_avg);
    exp_avg_sq_out.write(exp_avg_sq);
    if (sections == 4) max_exp_avg_sq_out.write(max_exp_avg_sq);

    uint32_t rounded[kLanes];
  NARROW:
    for (uint32_t i = 0; i < kLanes; i++) {
#pragma HLS UNROLL
      rounded[i] = i < elems ? narrow(bits_float(master[i]), s.param_dtype) : 0;
    }
  PACK:
    for (uint32_t i = 0; i < kLanes; i++) {
#pragma HLS UNROLL
      const uint32_t first = i % kPairs * 2, pair = rounded[first] | rounded[first + 1] << 16;
      if (s.param_dtype == CSD_F32) param[i] = i < elems ? master[i] : 0;
      else if (!upper) param[i] = i < kPairs ? pair : 0;
      else if (i >= kPairs) param[i] = pair;
    }
    if (inside && (s.param_dtype == CSD_F32 || upper || at + 1 == end)) params.write(param);
  }
  nonfinite_out.write(nonfinite);
}

// The dense kernel has no entries, hence no bad ones.
inline void no_entries(Number &bad_entries) { bad_entries.write(0); }

// ---- Top-K: from entries to gradients -------------------------------------------

struct Entry {
  uint32_t element;  // of the tile
  uint32_t value;    // 16 bits
};
constexpr uint32_t kNoElement = 0xffffffffu;  // of the entry after the last one

// One entry a cycle out of the blocks, each of them checked, so that whatever memory holds, elements ascend.
inline void check_entries(Words &words, hls::stream<Entry> &entries, Number &bad_out, uint32_t n_words,
                          uint32_t entry_words) {
  uint32_t left = entry_words, bad = 0;
  bool lost = false;  // a count cannot be true: nobody can tell where the next block begins
BLOCKS:
  for (uint32_t first = 0; first < n_words; first += kBlockWords) {
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 64
    const uint32_t block_words = n_words - first < kBlockWords ? n_words - first : kBlockWords;
    uint32_t count = 0, next = 0;  // the least index that is in order
    Word word = zero_word();
    lost = lost || left == 0;
    if (!lost) {
      word = words.read();
      left--;
      lost = word[0] / kLanes > left;
      count = lost ? 0 : word[0];
    }
  ENTRIES:
    for (uint32_t i = 1; i <= count; i++) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 65536
      if (i % kLanes == 0) {
        word = words.read();
        left--;
      }
      const uint32_t entry = word[i % kLanes], index = entry & 0xffffu;
      if (index >= next && index < block_words * kLanes) {
        entries.write({first * kLanes + index, entry >> 16});
        next = index + 1;
      } else {
        bad++;
      }
    }
  }
  bad_out.write(bad + (lost || left != 0));
REST:
  for (; left != 0; left--) {
#pragma HLS PIPELINE II = 1
    words.read();
  }
  entries.write({kNoElement, 0});
}

// Makes the gradients of sparse segments dense, so that the update is the same. Entries ascend, so the memory into
// which they are scattered is one word: it takes an entry a cycle and leaves when no more can fall into it.
inline void scatter(Words &segments_in, Words &dense, hls::stream<Entry> &entries, Words &segments_out, Words &grads,
                    uint32_t n_segments) {
  Entry entry = entries.read();
SEGMENTS:
  for (uint32_t n = 0; n < n_segments; n++) {
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 1024
    const Word segment = segments_in.read();
    segments_out.write(segment);
    const csd_segment s = segment_of(segment);
    const uint32_t words = words_of(s.elems, s.grad_dtype), end = end_of(s) * kLanes;
    uint32_t first = s.first_word * kLanes;  // element of the tile with which `grad` begins
    Word grad = zero_word();
  SPARSE:
    for (uint32_t i = 0; s.sparse && i < words;) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 131072
      const uint32_t half = entry.element - first;  // of `grad`; not one of them if the entry is for nobody
      if (entry.element < end && entry.element < first + 2 * kLanes) {
        if (entry.element >= first) grad[half / 2] |= entry.value << half % 2 * 16;
        entry = entries.read();
      } else {
        grads.write(grad);
        grad = zero_word();
        first += 2 * kLanes;
        i++;
      }
    }
  DENSE:
    for (uint32_t i = 0; !s.sparse && i < words; i++) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
      grads.write(dense.read());
    }
  }
REST:
  while (entry.element != kNoElement) {
#pragma HLS PIPELINE II = 1
    entry = entries.read();
  }
}
