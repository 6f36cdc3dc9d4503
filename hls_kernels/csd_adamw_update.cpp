// The kernel. Its contract is native/include/csd_kernel.h; here ports are declared and stages connected.
#include "adamw.h"
#include "kernel.h"

using Rule = AdamW;
#include "stages.h"

// One bundle, that is one AXI master, for each stream of data. Reads and writes of a bundle have channels of their
// own, so that what is read and what is written in its place share one and still overlap. 64 words, 4 KiB, are
// AXI's longest burst; eight bursts on their way are 512 words, as many as a block RAM holds at its full width.
// Segments and the report are few: a bundle for themselves so that they interrupt nobody's bursts.
void csd_adamw_update(const Word *tile_in_0, const Word *tile_in_1, const Word *tile_in_2, const Word *tile_in_3,
                      const Word *grad, const Word *entries, const Word *segments, Word *tile_out_0, Word *tile_out_1,
                      Word *tile_out_2, Word *tile_out_3, Word *param, Word *report, uint32_t n_words,
                      uint32_t sections, uint32_t n_segments, uint32_t grad_words, uint32_t entry_words,
                      uint32_t param_words, uint32_t sum_words) {
#pragma HLS INTERFACE m_axi port = tile_in_0 bundle = gmem0 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_in_1 bundle = gmem1 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_in_2 bundle = gmem2 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_in_3 bundle = gmem3 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = grad bundle = gmem4 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = entries bundle = gmem6 max_read_burst_length = 64 num_read_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_0 bundle = gmem0 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_1 bundle = gmem1 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_2 bundle = gmem2 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = tile_out_3 bundle = gmem3 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = param bundle = gmem4 max_write_burst_length = 64 num_write_outstanding = 8
#pragma HLS INTERFACE m_axi port = segments bundle = gmem5 max_read_burst_length = 16 num_read_outstanding = 2
#pragma HLS INTERFACE m_axi port = report bundle = gmem5 max_write_burst_length = 2 num_write_outstanding = 1
#pragma HLS INTERFACE s_axilite port = tile_in_0 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_in_1 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_in_2 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_in_3 bundle = control
#pragma HLS INTERFACE s_axilite port = grad bundle = control
#pragma HLS INTERFACE s_axilite port = entries bundle = control
#pragma HLS INTERFACE s_axilite port = segments bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_0 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_1 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_2 bundle = control
#pragma HLS INTERFACE s_axilite port = tile_out_3 bundle = control
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
  hls::stream<Word, kFifoWords> master_in("master_in"), state_in_1("state_in_1"), state_in_2("state_in_2"),
      state_in_3("state_in_3");
  hls::stream<Word, kFifoWords> master_out("master_out"), state_out_1("state_out_1"), state_out_2("state_out_2"),
      state_out_3("state_out_3");
  hls::stream<Word, kFifoWords> grads("grads"), params("params"), dense_grads("dense_grads"),
      entry_blocks("entry_blocks");
  Words segment_words("segment_words"), segments_seen("segments_seen");
  hls::stream<Entry, kFifoWords> entries_checked("entries_checked");
  hls::stream<uint32_t, kFifoSums> crc_in_0("crc_in_0"), crc_in_1("crc_in_1"), crc_in_2("crc_in_2"),
      crc_in_3("crc_in_3"), crc_out_0("crc_out_0"), crc_out_1("crc_out_1"), crc_out_2("crc_out_2"),
      crc_out_3("crc_out_3"), crc_param("crc_param");
  Numbers nonfinite("nonfinite"), bad_entries("bad_entries");
  CSD_DATAFLOW
  CSD_STAGE(read_section, tile_in_0, 0, n_words, sections, sum_words, master_in, crc_in_0)
  CSD_STAGE(read_section, tile_in_1, 1, n_words, sections, sum_words, state_in_1, crc_in_1)
  CSD_STAGE(read_section, tile_in_2, 2, n_words, sections, sum_words, state_in_2, crc_in_2)
  CSD_STAGE(read_section, tile_in_3, 3, n_words, sections, sum_words, state_in_3, crc_in_3)
  CSD_STAGE(read_words, segments, n_segments, segment_words)
  CSD_STAGE(read_words, grad, grad_words, dense_grads)
  CSD_STAGE(read_words, entries, entry_words, entry_blocks)
  CSD_STAGE(check_entries, entry_blocks, entries_checked, bad_entries, n_words, entry_words)
  CSD_STAGE(scatter, segment_words, dense_grads, entries_checked, segments_seen, grads, n_segments)
  CSD_STAGE(update, segments_seen, grads, master_in, state_in_1, state_in_2, state_in_3, master_out, state_out_1,
            state_out_2, state_out_3, params, nonfinite, n_words, sections, n_segments)
  CSD_STAGE(write_section, tile_out_0, 0, n_words, sections, sum_words, master_out, crc_out_0)
  CSD_STAGE(write_section, tile_out_1, 1, n_words, sections, sum_words, state_out_1, crc_out_1)
  CSD_STAGE(write_section, tile_out_2, 2, n_words, sections, sum_words, state_out_2, crc_out_2)
  CSD_STAGE(write_section, tile_out_3, 3, n_words, sections, sum_words, state_out_3, crc_out_3)
  CSD_STAGE(write_params, param, param_words, params, crc_param)
  CSD_STAGE(write_report, report, n_words, sections, sum_words, crc_in_0, crc_in_1, crc_in_2, crc_in_3, crc_out_0,
            crc_out_1, crc_out_2, crc_out_3, crc_param, nonfinite, bad_entries)
}
