// The top function of a kernel for codes: declares ports and connects stages. Its interface is
// native/include/csd_kernel.h.
//
// As with update.h, the file of a kernel includes this header after defining Rule, which must support codes,
// CSD_KERNEL, and CSD_OPERATORS for `update_codes`.
#pragma once
#include "codes.h"
#include "kernel.h"

// Seven sections share three bundles. The longest burst is a page of 64 words, so a port that serves several sections
// page by page has bursts as long as a port with a single section. A word of bytes lasts for four words of numbers,
// eight cycles of `update_codes`, so there is enough time. A bank takes 15 bundles of all kernels together (UG1393):
// AdamW's kernel for fp32 has seven, this one six. As in update.h, a bundle has one reader and one writer. Two readers
// on one channel would wait for each other's bursts, and would deadlock if one of them depended on the other. update.h
// explains the burst lengths.
void CSD_KERNEL(const Word *tile_in_0, const Word *tile_in_1, const Word *tile_in_2, const Word *grad,
                const Word *entries, const Word *segments, Word *tile_out_0, Word *tile_out_1, Word *tile_out_2,
                Word *param, Word *report, uint32_t n_words, uint32_t sections, uint32_t n_segments,
                uint32_t grad_words, uint32_t entry_words, uint32_t param_words, uint32_t sum_words) {
#pragma HLS INTERFACE m_axi port = tile_in_0 bundle = gmem0 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_in_1 bundle = gmem1 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_in_2 bundle = gmem2 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = grad bundle = gmem3 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = entries bundle = gmem4 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_0 bundle = gmem0 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_1 bundle = gmem1 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_2 bundle = gmem2 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = param bundle = gmem3 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = segments bundle = gmem5 max_read_burst_length = 16 num_read_outstanding = 2
#pragma HLS INTERFACE m_axi port = report bundle = gmem5 max_write_burst_length = 2 num_write_outstanding = 1
#pragma HLS INTERFACE s_axilite port = tile_in_0 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_in_1 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_in_2 bundle = control
#pragma HLS INTERFACE s_axilite port = grad bundle = control
#pragma HLS INTERFACE s_axilite port = entries bundle = control
#pragma HLS INTERFACE s_axilite port = segments bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_0 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_1 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_2 bundle = control
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
  hls::stream<Word, kFifoWords> params_in("params_in"), params_out("params_out");
  hls::stream<Word, kFifoPages> corrections_in("corrections_in"), ratios_in("ratios_in"), roots_in("roots_in"),
      peaks_in("peaks_in");
  hls::stream<Word, kFifoPages> corrections_out("corrections_out"), ratios_out("ratios_out"), roots_out("roots_out"),
      peaks_out("peaks_out");
  Words exponents_in("exponents_in"), peak_exponents_in("peak_exponents_in"), exponents_out("exponents_out"),
      peak_exponents_out("peak_exponents_out");
  hls::stream<Word, kFifoWords> grads("grads"), params("params"), dense_grads("dense_grads"),
      entry_blocks("entry_blocks");
  Words segment_words("segment_words"), segments_seen("segments_seen");
  hls::stream<Entry, kFifoWords> entries_checked("entries_checked");
  hls::stream<Word, kFifoGroups> masters("masters"), exp_avgs("exp_avgs"), roots("roots"), peaks("peaks");
  Groups groups("groups");
  hls::stream<uint32_t, kFifoSums> crc_in_0("crc_in_0"), crc_in_1("crc_in_1"), crc_in_2("crc_in_2"),
      crc_in_3("crc_in_3"), crc_in_4("crc_in_4"), crc_in_5("crc_in_5"), crc_in_6("crc_in_6"), crc_param("crc_param");
  hls::stream<uint32_t, kFifoSums> crc_out_0("crc_out_0"), crc_out_1("crc_out_1"), crc_out_2("crc_out_2"),
      crc_out_3("crc_out_3"), crc_out_4("crc_out_4"), crc_out_5("crc_out_5"), crc_out_6("crc_out_6");
  Numbers nonfinite("nonfinite"), bad_entries("bad_entries");
  CSD_DATAFLOW
  CSD_STAGE(read_param_section, tile_in_0, n_words, sections, sum_words, params_in, crc_in_0)
  CSD_STAGE(read_ratios, tile_in_1, n_words, sections, sum_words, corrections_in, ratios_in, crc_in_1, crc_in_2)
  CSD_STAGE(read_roots, tile_in_2, n_words, sections, sum_words, roots_in, exponents_in, peaks_in, peak_exponents_in,
            crc_in_3, crc_in_4, crc_in_5, crc_in_6)
  CSD_STAGE(read_words, segments, n_segments, segment_words)
  CSD_STAGE(read_words, grad, grad_words, dense_grads)
  CSD_STAGE(read_words, entries, entry_words, entry_blocks)
  CSD_STAGE(check_entries, entry_blocks, entries_checked, bad_entries, n_words, entry_words)
  CSD_STAGE(scatter, segment_words, dense_grads, entries_checked, segments_seen, grads, n_segments)
  CSD_STAGE(update_codes, segments_seen, grads, params_in, corrections_in, ratios_in, roots_in, exponents_in, peaks_in,
            peak_exponents_in, masters, exp_avgs, roots, peaks, groups, nonfinite, n_words, sections, n_segments)
  CSD_STAGE(encode, masters, exp_avgs, roots, peaks, groups, params_out, corrections_out, ratios_out, roots_out,
            exponents_out, peaks_out, peak_exponents_out, params, n_words, sections)
  CSD_STAGE(write_param_section, tile_out_0, n_words, sections, sum_words, params_out, crc_out_0)
  CSD_STAGE(write_ratios, tile_out_1, n_words, sections, sum_words, corrections_out, ratios_out, crc_out_1, crc_out_2)
  CSD_STAGE(write_roots, tile_out_2, n_words, sections, sum_words, roots_out, exponents_out, peaks_out,
            peak_exponents_out, crc_out_3, crc_out_4, crc_out_5, crc_out_6)
  CSD_STAGE(write_params, param, param_words, params, crc_param)
  CSD_STAGE(write_coded_report, report, n_words, sections, sum_words, crc_in_0, crc_in_1, crc_in_2, crc_in_3, crc_in_4,
            crc_in_5, crc_in_6, crc_out_0, crc_out_1, crc_out_2, crc_out_3, crc_out_4, crc_out_5, crc_out_6, crc_param,
            nonfinite, bad_entries)
}
