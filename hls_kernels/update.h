// A kernel for fp32 states, for any rule: the stages that depend on the number of sections, and the top function, which
// declares ports and connects stages. Its interface is native/include/csd_kernel.h.
//
// The file of a kernel defines the following and includes this header (see csd_lion_update.cpp):
//
//   Rule           its rule, a type of native/include/rules.h; a kernel has one rule with all its variants
//   CSD_KERNEL     its name
//   CSD_SECTIONS   2 or 4: most sections that the rule's tiles may have. Further sections have no ports and streams
//   CSD_OPERATORS  limits on the operators of `update`: those of 16 lanes in two cycles, so each serves two lanes
#pragma once
#include <type_traits>

#include "kernel.h"
#include "rules.h"
#include "stages.h"

static_assert(CSD_SECTIONS == 2 || CSD_SECTIONS == 4, "a kernel has two ports for a tile, or four");
#define CSD_FIT(number, type, updated, most, codec) \
  static_assert(!std::is_same<type, Rule>::value || most <= CSD_SECTIONS, "a tile has more sections than the kernel");
CSD_RULES(CSD_FIT)

#if CSD_SECTIONS > 2
#define CSD_MORE(...) __VA_ARGS__  // code for the third and fourth section only
#else
#define CSD_MORE(...)
#endif

// Writes the header last, after everything else has arrived: it contains the sum of the parameters, and it follows the
// last sums of all sections through the same port.
static void write_report(Word *report, uint32_t n_words, uint32_t sections, uint32_t sum_words, Numbers &crc_param,
                         Numbers &nonfinite, Numbers &bad_entries, Numbers &crc_in_0, Numbers &crc_out_0,
                         Numbers &crc_in_1,
                         Numbers &crc_out_1 CSD_MORE(, Numbers &crc_in_2, Numbers &crc_out_2, Numbers &crc_in_3,
                                                     Numbers &crc_out_3)) {
#pragma HLS INLINE off
  uint32_t left = n_words;
SUMS:
  for (uint32_t chunk = 1; left != 0; chunk++) {
#pragma HLS PIPELINE II = 2
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 4096
    Word word = zero_word();  // a csd_sums
    word[0] = crc_in_0.read();
    if (sections > 1) word[1] = crc_in_1.read();
    CSD_MORE(if (sections > 2) word[2] = crc_in_2.read();)
    CSD_MORE(if (sections > 3) word[3] = crc_in_3.read();)
    word[4] = crc_out_0.read();
    if (sections > 1) word[5] = crc_out_1.read();
    CSD_MORE(if (sections > 2) word[6] = crc_out_2.read();)
    CSD_MORE(if (sections > 3) word[7] = crc_out_3.read();)
    report[chunk] = word;
    left -= left < sum_words ? left : sum_words;
  }
  report[0] = head_of_report(n_words, crc_param, nonfinite, bad_entries);
}

// Processes the tile and its segments in parallel, a word of 16 elements every other cycle: memory delivers one every
// sixth cycle at best (README.md), and with two cycles per word each operator serves two lanes. The compiler might
// prefer speed to sharing, so CSD_OPERATORS limits the number of each operator to what 16 lanes need in two cycles, and
// the pipeline is told to stall as a whole (style = stp). Elements in no segment, and lanes beyond its end, pass
// through.
static void update(Words &segments, Words &grads, Words &params, Numbers &nonfinite_out, uint32_t n_words,
                   uint32_t sections, uint32_t n_segments, Words &master_in, Words &master_out, Words &state_in_1,
                   Words &state_out_1 CSD_MORE(, Words &state_in_2, Words &state_out_2, Words &state_in_3,
                                               Words &state_out_3)) {
#pragma HLS INLINE off
  CSD_OPERATORS
  csd_segment s = segment_of(zero_word());
  Rule rule(s.hyper);
  uint32_t end = 0, segments_left = n_segments, nonfinite = 0;
  Word grad = zero_word(), param = zero_word();
UPDATE:
  for (uint32_t at = 0; at < n_words; at++) {
#pragma HLS PIPELINE II = 2 style = stp
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
    if (at == end && segments_left != 0) {
      s = segment_of(segments.read());
      rule = Rule(s.hyper);
      end = end_of(s);
      segments_left--;
    }
    const bool inside = at >= s.first_word && at < end;
    const uint32_t word = at - s.first_word;                      // index within the segment
    const uint32_t elems = inside ? s.elems - word * kLanes : 0;  // lanes from this one on pass through
    const bool upper = word % 2 != 0;                             // which half of a word of 16-bit values
    if (inside && (s.grad_dtype == CSD_F32 || !upper)) grad = grads.read();
    Word master = master_in.read();
    Word state_1 = sections > 1 ? state_in_1.read() : zero_word();
    Word state_2 = zero_word(), state_3 = zero_word();
    CSD_MORE(if (sections > 2) state_2 = state_in_2.read();)
    CSD_MORE(if (sections > 3) state_3 = state_in_3.read();)

    float g[kLanes];
    uint32_t word_nonfinite = 0;
  WIDEN:
    for (uint32_t i = 0; i < kLanes; i++) {
#pragma HLS UNROLL
      g[i] = widen(grad, s.grad_dtype, upper, i);
      word_nonfinite += i < elems && !is_finite(g[i]);
    }
    nonfinite += word_nonfinite;
  LANES:
    for (uint32_t i = 0; i < kLanes; i++) {
#pragma HLS UNROLL
      float e[4] = {bits_float(master[i]), bits_float(state_1[i]), bits_float(state_2[i]), bits_float(state_3[i])};
      rule.update(e, g[i]);
      master[i] = i < elems ? float_bits(e[0]) : master[i];
      state_1[i] = i < elems ? float_bits(e[1]) : state_1[i];
      state_2[i] = i < elems ? float_bits(e[2]) : state_2[i];
      state_3[i] = i < elems ? float_bits(e[3]) : state_3[i];
    }
    master_out.write(master);
    if (sections > 1) state_out_1.write(state_1);
    CSD_MORE(if (sections > 2) state_out_2.write(state_2);)
    CSD_MORE(if (sections > 3) state_out_3.write(state_3);)

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

// The top function. There is one bundle, that is one AXI master, for each stream of data. A bundle has separate
// channels for reads and writes, so that an array that is read and the one written in its place share a bundle and
// still overlap. AXI's longest burst is 64 words, 4 KiB; eight outstanding bursts are 512 words, as many as a block RAM
// holds at its full width. Segments and the report are small: they share a bundle of their own so that they do not
// interrupt other bursts.
void CSD_KERNEL(const Word *tile_in_0, const Word *tile_in_1,
                CSD_MORE(const Word *tile_in_2, const Word *tile_in_3, ) const Word *grad, const Word *entries,
                const Word *segments, Word *tile_out_0, Word *tile_out_1,
                CSD_MORE(Word *tile_out_2, Word *tile_out_3, ) Word *param, Word *report, uint32_t n_words,
                uint32_t sections, uint32_t n_segments, uint32_t grad_words, uint32_t entry_words, uint32_t param_words,
                uint32_t sum_words) {
#pragma HLS INTERFACE m_axi port = tile_in_0 bundle = gmem0 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_in_1 bundle = gmem1 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = grad bundle = gmem4 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = entries bundle = gmem6 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_0 bundle = gmem0 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_1 bundle = gmem1 max_write_burst_length = 64 num_write_outstanding = 8
#if CSD_SECTIONS > 2
#pragma HLS INTERFACE m_axi port = tile_in_2 bundle = gmem2 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_in_3 bundle = gmem3 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_2 bundle = gmem2 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_3 bundle = gmem3 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE s_axilite port = tile_in_2 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_in_3 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_2 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_3 bundle = control
#endif
#pragma HLS INTERFACE m_axi port = param bundle = gmem4 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = segments bundle = gmem5 max_read_burst_length = 16 num_read_outstanding = 2
#pragma HLS INTERFACE m_axi port = report bundle = gmem5 max_write_burst_length = 2 num_write_outstanding = 1
#pragma HLS INTERFACE s_axilite port = tile_in_0 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_in_1 bundle = control
#pragma HLS INTERFACE s_axilite port = grad bundle = control
#pragma HLS INTERFACE s_axilite port = entries bundle = control
#pragma HLS INTERFACE s_axilite port = segments bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_0 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_1 bundle = control
#pragma HLS INTERFACE s_axilite port = param bundle = control
#pragma HLS INTERFACE s_axilite port = report bundle = control
#pragma HLS INTERFACE s_axilite port = n_words bundle = control
#pragma HLS INTERFACE s_axilite port = sections bundle = control
#pragma HLS INTERFACE s_axilite port = n_segments bundle = control
#pragma HLS INTERFACE s_axilite port = grad_words bundle = control
#pragma HLS INTERFACE s_axilite port = entry_words bundle = control
#pragma HLS INTERFACE s_axilite port = param_words bundle = control
#pragma HLS INTERFACE s_axilite port = sum_words bundle = control
#pragma HLS INTERFACE s_axilite port = return bundle = control
#pragma HLS INTERFACE ap_ctrl_chain port = return bundle = control
#pragma HLS DATAFLOW
  hls::stream<Word, kFifoWords> master_in("master_in"), state_in_1("state_in_1");
  hls::stream<Word, kFifoWords> master_out("master_out"), state_out_1("state_out_1");
  hls::stream<Word, kFifoWords> grads("grads"), params("params"), dense_grads("dense_grads"),
      entry_blocks("entry_blocks");
  Words segment_words("segment_words"), segments_seen("segments_seen");
  hls::stream<Entry, kFifoWords> entries_checked("entries_checked");
  hls::stream<uint32_t, kFifoSums> crc_in_0("crc_in_0"), crc_in_1("crc_in_1"), crc_out_0("crc_out_0"),
      crc_out_1("crc_out_1"), crc_param("crc_param");
  Numbers nonfinite("nonfinite"), bad_entries("bad_entries");
#if CSD_SECTIONS > 2
  hls::stream<Word, kFifoWords> state_in_2("state_in_2"), state_in_3("state_in_3");
  hls::stream<Word, kFifoWords> state_out_2("state_out_2"), state_out_3("state_out_3");
  hls::stream<uint32_t, kFifoSums> crc_in_2("crc_in_2"), crc_in_3("crc_in_3"), crc_out_2("crc_out_2"),
      crc_out_3("crc_out_3");
#endif
  CSD_DATAFLOW
  CSD_STAGE(read_section, tile_in_0, 0, n_words, sections, sum_words, master_in, crc_in_0)
  CSD_STAGE(read_section, tile_in_1, 1, n_words, sections, sum_words, state_in_1, crc_in_1)
  CSD_MORE(CSD_STAGE(read_section, tile_in_2, 2, n_words, sections, sum_words, state_in_2, crc_in_2))
  CSD_MORE(CSD_STAGE(read_section, tile_in_3, 3, n_words, sections, sum_words, state_in_3, crc_in_3))
  CSD_STAGE(read_words, segments, n_segments, segment_words)
  CSD_STAGE(read_words, grad, grad_words, dense_grads)
  CSD_STAGE(read_words, entries, entry_words, entry_blocks)
  CSD_STAGE(check_entries, entry_blocks, entries_checked, bad_entries, n_words, entry_words)
  CSD_STAGE(scatter, segment_words, dense_grads, entries_checked, segments_seen, grads, n_segments)
  CSD_STAGE(update, segments_seen, grads, params, nonfinite, n_words, sections, n_segments, master_in, master_out,
            state_in_1, state_out_1 CSD_MORE(, state_in_2, state_out_2, state_in_3, state_out_3))
  CSD_STAGE(write_section, tile_out_0, 0, n_words, sections, sum_words, master_out, crc_out_0)
  CSD_STAGE(write_section, tile_out_1, 1, n_words, sections, sum_words, state_out_1, crc_out_1)
  CSD_MORE(CSD_STAGE(write_section, tile_out_2, 2, n_words, sections, sum_words, state_out_2, crc_out_2))
  CSD_MORE(CSD_STAGE(write_section, tile_out_3, 3, n_words, sections, sum_words, state_out_3, crc_out_3))
  CSD_STAGE(write_params, param, param_words, params, crc_param)
  CSD_STAGE(write_report, report, n_words, sections, sum_words, crc_param, nonfinite, bad_entries, crc_in_0, crc_out_0,
            crc_in_1, crc_out_1 CSD_MORE(, crc_in_2, crc_out_2, crc_in_3, crc_out_3))
}
