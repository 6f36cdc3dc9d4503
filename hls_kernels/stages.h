// The stages that all kernels share: labelled loops, joined by streams. update.h connects them, and coded_update.h some of
// them, beside those of codes.h. README.md draws the picture, bench/cycles.py counts the cycles.
// None of them is inlined: a stage is a module of its own. What depends on a kernel's rule is `static`, because several
// kernels are linked to one program where a CPU runs them.
#pragma once
#include "float16.h"
#include "word.h"

#ifndef CSD_DATAFLOW  // csim/hls_stream.h makes each stage a thread; here a stage is a call in a DATAFLOW region
#define CSD_DATAFLOW
#define CSD_STAGE(stage, ...) stage(__VA_ARGS__);
#endif

// At most `n` operators of a kind in a function.
#define CSD_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define CSD_LIMIT(kind, n) CSD_PRAGMA(HLS ALLOCATION operation instances = kind limit = n)

// As deep as a burst is long, so that a stage can wait for one while its neighbours go on. Any depth would do without a
// deadlock if stages kept nothing back: where streams part and join again, they are written and read in the same order,
// or carry a single number. But a pipeline that waits for its next word keeps those that it has begun, `update` about
// 60: this many words have to be on their way before a sum of what was written follows that of what was read.
constexpr int kFifoWords = 64, kFifoSums = 16;  // 16 sums are of 1024 words at least
using Words = hls::stream<Word>;
using Numbers = hls::stream<uint32_t>;

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
          {word[4],
           {bits_float(word[5]), bits_float(word[6]), bits_float(word[7]), bits_float(word[8]), bits_float(word[9]),
            bits_float(word[10]), bits_float(word[11]), bits_float(word[12]), bits_float(word[13])}},
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
#pragma HLS INLINE off
READ:
  for (uint32_t i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    words.write(from[i]);
  }
}

// Sums of a section, one for every `sum_words` words of it. Each is sent when the next begins; the last one by who calls.
struct Summing {
  uint32_t crc, left;
};

inline void sum(Summing &now, const Word &word, uint32_t sum_words, Numbers &sums) {
#pragma HLS INLINE
  if (now.left == 0) {
    sums.write(~now.crc);
    now.crc = kCrcBegin;
    now.left = sum_words;
  }
  now.crc = crc_of(now.crc, word);
  now.left--;
}

// A word every other cycle, as the update takes them: that leaves the checksum two cycles from word to word.
inline void read_section(const Word *tile, uint32_t section, uint32_t n_words, uint32_t sections, uint32_t sum_words,
                         Words &words, Numbers &sums) {
#pragma HLS INLINE off
  const size_t first = (size_t)section * n_words;
  const uint32_t n = section < sections ? n_words : 0;
  Summing now = {kCrcBegin, sum_words};
READ_SECTION:
  for (uint32_t i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 2
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    const Word word = tile[first + i];
    sum(now, word, sum_words, sums);
    words.write(word);
  }
  if (n != 0) sums.write(~now.crc);
}

// ---- Streams to memory --------------------------------------------------------

// A function that writes to memory returns after the memory's last response, if it is not inlined: whoever has its
// result, the last sum, knows that everything has arrived.
inline uint32_t store(Word *to, size_t first, uint32_t n, uint32_t sum_words, Words &words, Numbers &sums) {
#pragma HLS INLINE off
  Summing now = {kCrcBegin, sum_words};
STORE:
  for (uint32_t i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 2
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    const Word word = words.read();
    sum(now, word, sum_words, sums);
    to[first + i] = word;
  }
  return ~now.crc;
}

inline void write_section(Word *tile, uint32_t section, uint32_t n_words, uint32_t sections, uint32_t sum_words,
                          Words &words, Numbers &sums) {
#pragma HLS INLINE off
  const uint32_t n = section < sections ? n_words : 0;
  const uint32_t last = store(tile, (size_t)section * n_words, n, sum_words, words, sums);
  if (n != 0) sums.write(last);
}

// With a single sum of all.
inline void write_params(Word *param, uint32_t n, Words &words, Numbers &sums) {
#pragma HLS INLINE off
  sums.write(store(param, 0, n, n, words, sums));
}

// A csd_report.
inline Word head_of_report(uint32_t n_words, Numbers &crc_param, Numbers &nonfinite, Numbers &bad_entries) {
#pragma HLS INLINE
  Word word = zero_word();
  word[0] = kKernelVersion;
  word[1] = n_words;
  word[2] = nonfinite.read();
  word[3] = bad_entries.read();
  word[4] = crc_param.read();
  return word;
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

// ---- Top-K: from entries to gradients -------------------------------------------

struct Entry {
  uint32_t element;  // of the tile
  uint32_t value;    // 16 bits
};
constexpr uint32_t kNoElement = 0xffffffffu;  // of the entry after the last one

// One entry a cycle out of the blocks, each of them checked, so that whatever memory holds, elements ascend. Without a
// word there is no entry, and none is missed.
inline void check_entries(Words &words, hls::stream<Entry> &entries, Numbers &bad_out, uint32_t n_words,
                          uint32_t entry_words) {
#pragma HLS INLINE off
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
  bad_out.write(bad + (entry_words != 0 && (lost || left != 0)));
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
#pragma HLS INLINE off
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
