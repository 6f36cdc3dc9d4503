// The stages of kernels for codes that are not in stages.h: sections of bytes are read and written page by page, and
// the update has two stages. A group's codes are relative to its largest root, so the whole group must be updated
// before any of it can be encoded. `update_codes` sends the four words of a group and then a Group that describes them;
// `encode` reads the Group first. Between the two stages, states are fp32 values, except that groups that do not change
// remain codes.
#pragma once
#include "codec.h"
#include "stages.h"

constexpr uint32_t kGroupWords = kGroup / kLanes;      // of fp32 values
constexpr uint32_t kPageGroups = kPageElems / kGroup;  // words per page of a section of bytes: AXI's longest burst

// FIFOs hold two pages: one is transferred through the port while the other is used. They must hold at least one,
// because a port serves its sections in turns while its consumer takes one word of each.
constexpr int kFifoPages = 2 * kPageGroups;

// FIFOs between the two stages of the update hold four groups. They must hold at least one, because its Group comes
// last.
constexpr int kFifoGroups = 4 * kGroupWords;

// ---- Layout of the sections ----------------------------------------------------

struct CodedTile {
  uint32_t pages;
  bool narrow;  // its parameters have 16 bits, and it has corrections
  bool has_peak;
  size_t correction, ratio, root, exponent, peak, peak_exponent;  // the sections' first words, as in layout.h
};

inline CodedTile coded_tile(uint32_t n_words, uint32_t sections) {
#pragma HLS INLINE
  CodedTile t;
  t.pages = n_words / kPageWords;
  t.narrow = sections % 2 != 0;
  t.has_peak = sections > 5;
  const size_t bytes = n_words / kGroupWords;  // number of words in a section of bytes
  const size_t exponents = (t.pages + kPageGroups - 1) / kPageGroups * kPageGroups;
  t.correction = t.narrow ? n_words / 2 : n_words;
  t.ratio = t.correction + (t.narrow ? bytes : 0);
  t.root = t.ratio + bytes;
  t.exponent = t.root + bytes;
  t.peak = t.exponent + exponents;
  t.peak_exponent = t.peak + bytes;
  return t;
}

// ---- Memory to streams ----------------------------------------------------------

inline void read_param_section(const Word *tile, uint32_t n_words, uint32_t sections, uint32_t sum_words, Words &words,
                               Numbers &sums) {
#pragma HLS INLINE off
  const uint32_t halved = sections % 2;  // 1 for 16-bit parameters, which take half as many words
  read_section(tile, 0, n_words >> halved, 1, sum_words >> halved, words, sums);
}

inline void read_page(const Word *tile, size_t first, RunningSum &running, uint32_t sum_words, Words &words,
                      Numbers &sums) {
#pragma HLS INLINE
READ_PAGE:
  for (uint32_t i = 0; i < kPageGroups; i++) {
#pragma HLS PIPELINE II = 2
    const Word word = tile[first + i];
    sum(running, word, sum_words, sums);
    words.write(word);
  }
}

inline void read_exponents(const Word *tile, size_t at, RunningSum &running, uint32_t sum_words, Words &words,
                           Numbers &sums) {
#pragma HLS INLINE
  const Word word = tile[at];
  sum(running, word, sum_words, sums);
  words.write(word);
}

inline void read_ratios(const Word *tile, uint32_t n_words, uint32_t sections, uint32_t sum_words, Words &corrections,
                        Words &ratios, Numbers &correction_sums, Numbers &ratio_sums) {
#pragma HLS INLINE off
  const CodedTile t = coded_tile(n_words, sections);
  const uint32_t byte_sum_words = sum_words / kGroupWords;
  RunningSum correction = {kCrcBegin, byte_sum_words}, ratio = {kCrcBegin, byte_sum_words};
PAGES:
  for (uint32_t page = 0; page < t.pages; page++) {
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 1024
    const size_t at = page * (size_t)kPageGroups;
    if (t.narrow) read_page(tile, t.correction + at, correction, byte_sum_words, corrections, correction_sums);
    read_page(tile, t.ratio + at, ratio, byte_sum_words, ratios, ratio_sums);
  }
  if (t.pages != 0 && t.narrow) correction_sums.write(~correction.crc);
  if (t.pages != 0) ratio_sums.write(~ratio.crc);
}

// Reads a page's exponents before its roots, because the first root needs them.
inline void read_roots(const Word *tile, uint32_t n_words, uint32_t sections, uint32_t sum_words, Words &roots,
                       Words &exponents, Words &peaks, Words &peak_exponents, Numbers &root_sums,
                       Numbers &exponent_sums, Numbers &peak_sums, Numbers &peak_exponent_sums) {
#pragma HLS INLINE off
  const CodedTile t = coded_tile(n_words, sections);
  const uint32_t byte_sum_words = sum_words / kGroupWords, exponent_sum_words = sum_words / kPageWords;
  RunningSum root = {kCrcBegin, byte_sum_words}, peak = {kCrcBegin, byte_sum_words};
  RunningSum exponent = {kCrcBegin, exponent_sum_words}, peak_exponent = {kCrcBegin, exponent_sum_words};
PAGES:
  for (uint32_t page = 0; page < t.pages; page++) {
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 1024
    const size_t at = page * (size_t)kPageGroups;
    read_exponents(tile, t.exponent + page, exponent, exponent_sum_words, exponents, exponent_sums);
    if (t.has_peak)
      read_exponents(tile, t.peak_exponent + page, peak_exponent, exponent_sum_words, peak_exponents,
                     peak_exponent_sums);
    read_page(tile, t.root + at, root, byte_sum_words, roots, root_sums);
    if (t.has_peak) read_page(tile, t.peak + at, peak, byte_sum_words, peaks, peak_sums);
  }
  if (t.pages != 0) {
    root_sums.write(~root.crc);
    exponent_sums.write(~exponent.crc);
  }
  if (t.pages != 0 && t.has_peak) {
    peak_sums.write(~peak.crc);
    peak_exponent_sums.write(~peak_exponent.crc);
  }
}

// ---- Streams to memory -----------------------------------------------------------

inline void write_param_section(Word *tile, uint32_t n_words, uint32_t sections, uint32_t sum_words, Words &words,
                                Numbers &sums) {
#pragma HLS INLINE off
  const uint32_t halved = sections % 2;
  write_section(tile, 0, n_words >> halved, 1, sum_words >> halved, words, sums);
}

inline void store_page(Word *tile, size_t first, RunningSum &running, uint32_t sum_words, Words &words, Numbers &sums) {
#pragma HLS INLINE
STORE_PAGE:
  for (uint32_t i = 0; i < kPageGroups; i++) {
#pragma HLS PIPELINE II = 2
    const Word word = words.read();
    sum(running, word, sum_words, sums);
    tile[first + i] = word;
  }
}

inline void store_exponents(Word *tile, size_t at, RunningSum &running, uint32_t sum_words, Words &words,
                            Numbers &sums) {
#pragma HLS INLINE
  const Word word = words.read();
  sum(running, word, sum_words, sums);
  tile[at] = word;
}

// The last sums of the sections that a port writes. As in store() (stages.h), they show that all writes have arrived.
struct LastSums {
  uint32_t of[4];
};

inline LastSums store_ratios(Word *tile, const CodedTile &t, uint32_t sum_words, Words &corrections, Words &ratios,
                             Numbers &correction_sums, Numbers &ratio_sums) {
#pragma HLS INLINE off
  const uint32_t byte_sum_words = sum_words / kGroupWords;
  RunningSum correction = {kCrcBegin, byte_sum_words}, ratio = {kCrcBegin, byte_sum_words};
PAGES:
  for (uint32_t page = 0; page < t.pages; page++) {
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 1024
    const size_t at = page * (size_t)kPageGroups;
    if (t.narrow) store_page(tile, t.correction + at, correction, byte_sum_words, corrections, correction_sums);
    store_page(tile, t.ratio + at, ratio, byte_sum_words, ratios, ratio_sums);
  }
  return {{~correction.crc, ~ratio.crc, 0, 0}};
}

inline void write_ratios(Word *tile, uint32_t n_words, uint32_t sections, uint32_t sum_words, Words &corrections,
                         Words &ratios, Numbers &correction_sums, Numbers &ratio_sums) {
#pragma HLS INLINE off
  const CodedTile t = coded_tile(n_words, sections);
  const LastSums last = store_ratios(tile, t, sum_words, corrections, ratios, correction_sums, ratio_sums);
  if (t.pages != 0 && t.narrow) correction_sums.write(last.of[0]);
  if (t.pages != 0) ratio_sums.write(last.of[1]);
}

// Writes a page's exponents after its roots, because the last exponent is known only with the last root.
inline LastSums store_roots(Word *tile, const CodedTile &t, uint32_t sum_words, Words &roots, Words &exponents,
                            Words &peaks, Words &peak_exponents, Numbers &root_sums, Numbers &exponent_sums,
                            Numbers &peak_sums, Numbers &peak_exponent_sums) {
#pragma HLS INLINE off
  const uint32_t byte_sum_words = sum_words / kGroupWords, exponent_sum_words = sum_words / kPageWords;
  RunningSum root = {kCrcBegin, byte_sum_words}, peak = {kCrcBegin, byte_sum_words};
  RunningSum exponent = {kCrcBegin, exponent_sum_words}, peak_exponent = {kCrcBegin, exponent_sum_words};
PAGES:
  for (uint32_t page = 0; page < t.pages; page++) {
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 1024
    const size_t at = page * (size_t)kPageGroups;
    store_page(tile, t.root + at, root, byte_sum_words, roots, root_sums);
    if (t.has_peak) store_page(tile, t.peak + at, peak, byte_sum_words, peaks, peak_sums);
    store_exponents(tile, t.exponent + page, exponent, exponent_sum_words, exponents, exponent_sums);
    if (t.has_peak)
      store_exponents(tile, t.peak_exponent + page, peak_exponent, exponent_sum_words, peak_exponents,
                      peak_exponent_sums);
  }
  return {{~root.crc, ~exponent.crc, ~peak.crc, ~peak_exponent.crc}};
}

inline void write_roots(Word *tile, uint32_t n_words, uint32_t sections, uint32_t sum_words, Words &roots,
                        Words &exponents, Words &peaks, Words &peak_exponents, Numbers &root_sums,
                        Numbers &exponent_sums, Numbers &peak_sums, Numbers &peak_exponent_sums) {
#pragma HLS INLINE off
  const CodedTile t = coded_tile(n_words, sections);
  const LastSums last = store_roots(tile, t, sum_words, roots, exponents, peaks, peak_exponents, root_sums,
                                    exponent_sums, peak_sums, peak_exponent_sums);
  if (t.pages != 0) {
    root_sums.write(last.of[0]);
    exponent_sums.write(last.of[1]);
  }
  if (t.pages != 0 && t.has_peak) {
    peak_sums.write(last.of[2]);
    peak_exponent_sums.write(last.of[3]);
  }
}

// Like write_report in update.h.
inline void write_coded_report(Word *report, uint32_t n_words, uint32_t sections, uint32_t sum_words, Numbers &crc_in_0,
                               Numbers &crc_in_1, Numbers &crc_in_2, Numbers &crc_in_3, Numbers &crc_in_4,
                               Numbers &crc_in_5, Numbers &crc_in_6, Numbers &crc_out_0, Numbers &crc_out_1,
                               Numbers &crc_out_2, Numbers &crc_out_3, Numbers &crc_out_4, Numbers &crc_out_5,
                               Numbers &crc_out_6, Numbers &crc_param, Numbers &nonfinite, Numbers &bad_entries) {
#pragma HLS INLINE off
  const bool narrow = sections % 2 != 0, has_peak = sections > 5;
  uint32_t left = n_words;
CODED_SUMS:
  for (uint32_t chunk = 1; left != 0; chunk++) {
#pragma HLS PIPELINE II = 2
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 1024
    Word word = zero_word();  // a csd_coded_sums
    word[0] = crc_in_0.read();
    if (narrow) word[1] = crc_in_1.read();
    word[2] = crc_in_2.read();
    word[3] = crc_in_3.read();
    word[4] = crc_in_4.read();
    if (has_peak) word[5] = crc_in_5.read();
    if (has_peak) word[6] = crc_in_6.read();
    word[8] = crc_out_0.read();
    if (narrow) word[9] = crc_out_1.read();
    word[10] = crc_out_2.read();
    word[11] = crc_out_3.read();
    word[12] = crc_out_4.read();
    if (has_peak) word[13] = crc_out_5.read();
    if (has_peak) word[14] = crc_out_6.read();
    report[chunk] = word;
    left -= left < sum_words ? left : sum_words;
  }
  report[0] = head_of_report(n_words, crc_param, nonfinite, bad_entries);
}

// ---- Bytes in words ------------------------------------------------------------------
//
// 16 elements take a quarter of a word of bytes, and a group has one byte in a word of exponents. Words are shifted by
// this much each time, which needs only wires; indexing would need multiplexers.

constexpr uint32_t kQuarter = kLanes / kGroupWords;  // number of lanes that 16 bytes fill

inline uint32_t first_byte(const Word &word, uint32_t i) {
#pragma HLS INLINE
  return word[i / 4] >> i % 4 * 8 & 0xffu;
}

inline void drop_lanes(Word &word, uint32_t n) {
#pragma HLS INLINE
DROP:
  for (uint32_t lane = 0; lane + n < kLanes; lane++) {
#pragma HLS UNROLL
    word[lane] = word[lane + n];
  }
}

// Shifts 16 bytes in at the end; after four calls, the first of them are at the beginning of the word.
inline void append_bytes(Word &word, const uint32_t bytes[kLanes]) {
#pragma HLS INLINE
  drop_lanes(word, kQuarter);
APPEND:
  for (uint32_t i = 0; i < kQuarter; i++) {
#pragma HLS UNROLL
    word[kLanes - kQuarter + i] =
        bytes[4 * i] | bytes[4 * i + 1] << 8 | bytes[4 * i + 2] << 16 | bytes[4 * i + 3] << 24;
  }
}

// Shifts one byte in at the end and drops the first one.
inline void append_byte(Word &word, uint32_t byte) {
#pragma HLS INLINE
APPEND_BYTE:
  for (uint32_t lane = 0; lane < kLanes; lane++) {
#pragma HLS UNROLL
    word[lane] = word[lane] >> 8 | (lane + 1 < kLanes ? word[lane + 1] : byte) << 24;
  }
}

// ---- The update ------------------------------------------------------------------------

// Description of a group after its update.
struct Group {
  uint32_t elems;  // elements of the segment from the group on. 0: the group keeps every bit; its four words are codes
  uint32_t is_f16;
  uint32_t key;   // random key of its first element
  uint32_t root;  // bits of its largest finite root; if it keeps every bit, its exponent
  uint32_t has_new_peak;
  uint32_t peak;  // bits of its largest finite peak; without a new peak, its exponent
};
using Groups = hls::stream<Group>;

// The bits of a root for exponent_of; 0 if it is inf, nan or negative.
inline uint32_t finite_bits(float root) {
#pragma HLS INLINE
  const uint32_t b = float_bits(root);
  return b < 0x7f800000u ? b : 0;
}

// Maximum of the lanes, as a tree, so that only one comparison is on the path from word to word.
inline uint32_t largest_of(uint32_t lanes[kLanes]) {
#pragma HLS INLINE
TREE:
  for (uint32_t n = kLanes / 2; n > 0; n /= 2) {
#pragma HLS UNROLL
  BRANCHES:
    for (uint32_t i = 0; i < n; i++) {
#pragma HLS UNROLL
      lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
    }
  }
  return lanes[0];
}

// Processes tile and segments like `update`. For elements of segments it sends the master, exp_avg and the roots of
// both second moments; for all others it sends their codes instead.
static void update_codes(Words &segments, Words &grads, Words &params_in, Words &corrections_in, Words &ratios_in,
                         Words &roots_in, Words &exponents_in, Words &peaks_in, Words &peak_exponents_in,
                         Words &masters, Words &exp_avgs, Words &roots, Words &peaks, Groups &groups,
                         Numbers &nonfinite_out, uint32_t n_words, uint32_t sections, uint32_t n_segments) {
#pragma HLS INLINE off
  CSD_OPERATORS
  const bool narrow = sections % 2 != 0, has_peak = sections > 5;
  csd_segment s = segment_of(zero_word());
  Rule rule(s.hyper);
  uint32_t end = 0, segments_left = n_segments, nonfinite = 0;
  uint32_t largest = 0, largest_peak = 0;
  Word grad = zero_word(), param = zero_word(), correction = zero_word(), ratio = zero_word(), root = zero_word();
  Word peak = zero_word(), exponents = zero_word(), peak_exponents = zero_word();
UPDATE_CODES:
  for (uint32_t at = 0; at < n_words; at++) {
#pragma HLS PIPELINE II = 2 style = stp
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    if (at == end && segments_left != 0) {
      s = segment_of(segments.read());
      rule = Rule(s.hyper);
      end = s.first_word + (s.elems / kGroup + (s.elems % kGroup != 0)) * kGroupWords;
      segments_left--;
    }
    const bool inside = at >= s.first_word && at < end;
    const uint32_t first = (at - s.first_word) * kLanes;                     // index of lane 0 in the segment
    const uint32_t elems = inside && first < s.elems ? s.elems - first : 0;  // lanes from this one on are unused
    const bool upper = first / kLanes % 2 != 0;                              // which half of a word of 16-bit values
    const uint32_t word = at % kGroupWords;                                  // index within the group
    if (elems != 0 && (s.grad_dtype == CSD_F32 || !upper)) grad = grads.read();
    if (!narrow || word % 2 == 0) param = params_in.read();
    else drop_lanes(param, kPairs);
    if (word == 0) {
      if (narrow) correction = corrections_in.read();
      ratio = ratios_in.read();
      root = roots_in.read();
      if (has_peak) peak = peaks_in.read();
      if (at % kPageWords == 0) {
        exponents = exponents_in.read();
        if (has_peak) peak_exponents = peak_exponents_in.read();
      } else {
        append_byte(exponents, 0);
        append_byte(peak_exponents, 0);
      }
    } else {
      drop_lanes(correction, kQuarter);
      drop_lanes(ratio, kQuarter);
      drop_lanes(root, kQuarter);
      drop_lanes(peak, kQuarter);
    }
    const uint32_t exponent = first_byte(exponents, 0), peak_exponent = first_byte(peak_exponents, 0);
    const bool is_f16 = s.param_dtype == CSD_F16;
    const bool has_new_peak = inside && (s.hyper.rule == CSD_AMSGRAD || s.hyper.rule == CSD_ADAM_AMSGRAD);

    Word master_out, exp_avg_out, root_out, peak_out;
    uint32_t word_nonfinite = 0, lane_roots[kLanes], lane_peaks[kLanes];
  LANES:
    for (uint32_t i = 0; i < kLanes; i++) {
#pragma HLS UNROLL
      const float g = widen(grad, s.grad_dtype, upper, i);
      const bool in_use = i < elems;
      word_nonfinite += in_use && !is_finite(g);
      const uint32_t half = param[i / 2] >> i % 2 * 16 & 0xffffu, correction_code = first_byte(correction, i);
      const uint32_t r = first_byte(ratio, i), u = first_byte(root, i), p = first_byte(peak, i);
      const float old_root = decode_root(u, exponent), old_peak = decode_root(p, peak_exponent);
      float e[4] = {narrow ? decode_master(half, signed_8(correction_code), is_f16) : bits_float(param[i]),
                    decode_exp_avg(signed_8(r), old_root, u), old_root * old_root, old_peak * old_peak};
      rule.update(e, g);
      const float new_root = in_use ? sqrtf(e[2]) : 0, new_peak = in_use ? sqrtf(e[3]) : 0;
      lane_roots[i] = finite_bits(new_root);
      lane_peaks[i] = finite_bits(new_peak);
      master_out[i] = !inside ? (narrow ? half | correction_code << 16 : param[i]) : in_use ? float_bits(e[0]) : 0;
      exp_avg_out[i] = !inside ? r : in_use ? float_bits(e[1]) : 0;
      root_out[i] = !inside ? u : float_bits(new_root);
      peak_out[i] = !has_new_peak ? p : float_bits(new_peak);
    }
    nonfinite += word_nonfinite;
    const uint32_t word_largest = largest_of(lane_roots), word_largest_peak = largest_of(lane_peaks);
    largest = word != 0 && largest > word_largest ? largest : word_largest;
    largest_peak = word != 0 && largest_peak > word_largest_peak ? largest_peak : word_largest_peak;
    masters.write(master_out);
    exp_avgs.write(exp_avg_out);
    roots.write(root_out);
    if (has_peak) peaks.write(peak_out);
    if (word == kGroupWords - 1) {
      const uint32_t before = first - word * kLanes;  // number of the segment's elements before the group
      groups.write({inside ? s.elems - before : 0, is_f16, s.key + before, inside ? largest : exponent, has_new_peak,
                    has_new_peak ? largest_peak : peak_exponent});
    }
  }
  nonfinite_out.write(nonfinite);
}

// Encodes the groups. Each element needs two multiplications for its hash, a multiplication by a power of two for each
// of its three minifloats, and a division for its ratio; everything else is shifts and additions.
inline void encode(Words &masters, Words &exp_avgs, Words &roots, Words &peaks, Groups &groups, Words &params_out,
                   Words &corrections_out, Words &ratios_out, Words &roots_out, Words &exponents_out, Words &peaks_out,
                   Words &peak_exponents_out, Words &params, uint32_t n_words, uint32_t sections) {
#pragma HLS INLINE off
#pragma HLS ALLOCATION operation instances = mul limit = 16
#pragma HLS ALLOCATION operation instances = fmul limit = 24
#pragma HLS ALLOCATION operation instances = fsub limit = 8
#pragma HLS ALLOCATION operation instances = fdiv limit = 8
  const bool narrow = sections % 2 != 0, has_peak = sections > 5;
  Group group = {0, 0, 0, 0, 0, 0};
  uint32_t exponent = 0, peak_exponent = 0;
  Word param = zero_word(), correction = zero_word(), ratio = zero_word(), root = zero_word(), peak = zero_word();
  Word exponents = zero_word(), peak_exponents = zero_word();
ENCODE:
  for (uint32_t at = 0; at < n_words; at++) {
#pragma HLS PIPELINE II = 2 style = stp
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    const uint32_t word = at % kGroupWords, first = word * kLanes;  // indices within the group
    if (word == 0) {
      group = groups.read();
      exponent = group.elems != 0 ? exponent_of(group.root) : group.root;
      peak_exponent = group.has_new_peak ? exponent_of(group.peak) : group.peak;
      append_byte(exponents, exponent);
      append_byte(peak_exponents, peak_exponent);
    }
    const bool unchanged = group.elems == 0;
    const Word master_in = masters.read(), exp_avg_in = exp_avgs.read(), root_in = roots.read();
    const Word peak_in = has_peak ? peaks.read() : zero_word();

    uint32_t halves[kLanes], correction_codes[kLanes], ratio_codes[kLanes], root_codes[kLanes], peak_codes[kLanes];
  CODES:
    for (uint32_t i = 0; i < kLanes; i++) {
#pragma HLS UNROLL
      const RoundingBits rounding = stochastic_rounding_bits(mix_bits(group.key + first + i));
      const float exp_avg = bits_float(exp_avg_in[i]);
      const uint32_t code = encode_root(bits_float(root_in[i]), exponent, rounding.root);
      const uint32_t u = is_finite(exp_avg) ? code : kRootInfinite;
      const uint32_t r = encode_ratio(exp_avg, decode_root(u, exponent), u, rounding.ratio);
      const uint32_t p = encode_root(bits_float(peak_in[i]), peak_exponent, round_to_nearest_bits().root);
      const SplitMaster split = encode_master(bits_float(master_in[i]), rounding, group.is_f16 != 0);
      halves[i] = unchanged ? master_in[i] & 0xffffu : split.param;
      correction_codes[i] = unchanged ? master_in[i] >> 16 & 0xffu : split.correction;
      ratio_codes[i] = unchanged ? exp_avg_in[i] : r;
      root_codes[i] = unchanged ? root_in[i] : u;
      peak_codes[i] = group.has_new_peak ? p : peak_in[i];
    }
    append_bytes(correction, correction_codes);
    append_bytes(ratio, ratio_codes);
    append_bytes(root, root_codes);
    append_bytes(peak, peak_codes);
    drop_lanes(param, kPairs);
  PACK:
    for (uint32_t i = 0; i < kLanes; i++) {
#pragma HLS UNROLL
      if (!narrow) param[i] = master_in[i];
      else if (i >= kPairs) param[i] = halves[2 * (i - kPairs)] | halves[2 * (i - kPairs) + 1] << 16;
    }
    if (!narrow || word % 2 != 0) {
      params_out.write(param);
      if (group.elems > (narrow ? first - kLanes : first)) params.write(param);
    }
    if (word == kGroupWords - 1) {
      if (narrow) corrections_out.write(correction);
      ratios_out.write(ratio);
      roots_out.write(root);
      if (has_peak) peaks_out.write(peak);
    }
    if (at % kPageWords == kPageWords - 1) {
      exponents_out.write(exponents);
      if (has_peak) peak_exponents_out.write(peak_exponents);
    }
  }
}
