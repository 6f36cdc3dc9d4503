// The stages that the kernels share: labelled loops, joined by streams. update.h connects all of them; coded_update.h
// connects some of them with the stages of codes.h. README.md has a diagram, and bench/cycles.py counts the cycles.
// No stage is inlined: each is a module of its own. Stages that depend on a kernel's rule are `static`, because in
// simulation several kernels are linked into one program.
#pragma once
#include "float16.h"
#include "word.h"

#ifndef CSD_DATAFLOW  // csim/hls_stream.h makes each stage a thread; for Vitis a stage is a call in a DATAFLOW region
#define CSD_DATAFLOW
#define CSD_STAGE(stage, ...) stage(__VA_ARGS__);
#endif

// At most `n` operators of a kind in a function.
#define CSD_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define CSD_LIMIT(kind, n) CSD_PRAGMA(HLS ALLOCATION operation instances = kind limit = n)

// Streams of words are as deep as a burst is long, so that a stage can wait for a burst while its neighbours continue.
// If stages held nothing back, any depth would be free of deadlocks, because streams that fork and join again are
// written and read in the same order or carry a single number. But a stalled pipeline holds the words that it has
// begun, about 60 in `update`. A sum of written words therefore comes this many words later than the sum of the same
// words when read, and streams of sums must hold the sums in between.
constexpr int kFifoWords = 64, kFifoSums = 16;  // 16 sums cover at least 1024 words
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
  // Divisions by constant powers of two, which become shifts.
  return dtype == CSD_F32 ? elems / kLanes + (elems % kLanes != 0) : elems / (2 * kLanes) + (elems % (2 * kLanes) != 0);
}

// The index of the word after the segment's last one, in each section.
inline uint32_t end_of(const csd_segment &s) {
#pragma HLS INLINE
  return s.first_word + words_of(s.elems, CSD_F32);
}

// ---- Memory to streams --------------------------------------------------------

// Reads linearly with nothing else in the loop, so that Vitis infers bursts.
inline void read_words(const Word *from, uint32_t n, Words &words) {
#pragma HLS INLINE off
READ:
  for (uint32_t i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    words.write(from[i]);
  }
}

// Checksums of a section, one for every `sum_words` words. sum() sends each one when the next begins; the caller sends
// the last one.
struct RunningSum {
  uint32_t crc, left;
};

inline void sum(RunningSum &running, const Word &word, uint32_t sum_words, Numbers &sums) {
#pragma HLS INLINE
  if (running.left == 0) {
    sums.write(~running.crc);
    running.crc = kCrcBegin;
    running.left = sum_words;
  }
  running.crc = crc_of(running.crc, word);
  running.left--;
}

// Reads a word every other cycle, the rate of the update; this gives the checksum two cycles per word.
inline void read_section(const Word *tile, uint32_t section, uint32_t n_words, uint32_t sections, uint32_t sum_words,
                         Words &words, Numbers &sums) {
#pragma HLS INLINE off
  const size_t first = (size_t)section * n_words;
  const uint32_t n = section < sections ? n_words : 0;
  RunningSum running = {kCrcBegin, sum_words};
READ_SECTION:
  for (uint32_t i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 2
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    const Word word = tile[first + i];
    sum(running, word, sum_words, sums);
    words.write(word);
  }
  if (n != 0) sums.write(~running.crc);
}

// ---- Streams to memory --------------------------------------------------------

// A function that is not inlined and writes to memory returns after the memory's last response. The result of this one,
// the last sum, therefore shows that all writes have arrived.
inline uint32_t store(Word *to, size_t first, uint32_t n, uint32_t sum_words, Words &words, Numbers &sums) {
#pragma HLS INLINE off
  RunningSum running = {kCrcBegin, sum_words};
STORE:
  for (uint32_t i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 2
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    const Word word = words.read();
    sum(running, word, sum_words, sums);
    to[first + i] = word;
  }
  return ~running.crc;
}

inline void write_section(Word *tile, uint32_t section, uint32_t n_words, uint32_t sections, uint32_t sum_words,
                          Words &words, Numbers &sums) {
#pragma HLS INLINE off
  const uint32_t n = section < sections ? n_words : 0;
  const uint32_t last = store(tile, (size_t)section * n_words, n, sum_words, words, sums);
  if (n != 0) sums.write(last);
}

// Writes the parameters, with a single checksum for all.
inline void write_params(Word *param, uint32_t n, Words &words, Numbers &sums) {
#pragma HLS INLINE off
  sums.write(store(param, 0, n, n, words, sums));
}

// The first word of the report, a csd_report.
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

constexpr uint32_t kPairs = kLanes / 2;  // number of lanes that 16 values of 16 bits fill: half a word

// The gradient for lane `lane` of a tile's word. With 16 bits, these are in the `upper` or lower half of a gradient
// word.
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
constexpr uint32_t kNoElement = 0xffffffffu;  // marks the end of the entries

// Unpacks the blocks, one entry per cycle, and checks each entry, so that elements ascend whatever the memory contains.
// With no words at all, there are no entries, which is not an error.
inline void check_entries(Words &words, hls::stream<Entry> &entries, Numbers &bad_out, uint32_t n_words,
                          uint32_t entry_words) {
#pragma HLS INLINE off
  uint32_t left = entry_words, bad = 0;
  bool lost = false;  // a count is impossible or missing, so the beginning of the next block is unknown
BLOCKS:
  for (uint32_t first = 0; first < n_words; first += kBlockWords) {
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 64
    const uint32_t block_words = n_words - first < kBlockWords ? n_words - first : kBlockWords;
    uint32_t count = 0, next = 0;  // next: the smallest index that would be in order
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

// Makes the gradients of sparse segments dense, so that the update need not distinguish them. As entries ascend, a
// single word is enough to scatter them into: it takes one entry per cycle, and is sent when the next entry lies beyond
// it.
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
    uint32_t first = s.first_word * kLanes;  // the tile's element at the beginning of `grad`
    Word grad = zero_word();
  SPARSE:
    for (uint32_t i = 0; s.sparse && i < words;) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 131072
      const uint32_t half = entry.element - first;  // its half lane in `grad`; not used if it is in no segment
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
