// The interface between host and FPGA: the memory that one run of a kernel reads and writes. Shared by the back end
// (native/src/device_xrt.cpp), the kernels (hls_kernels/) and their tests. Everything is little-endian and in units of
// one *word*: 512 bits, which a port of the FPGA moves per cycle.
//
// There is one kernel for each type of rules.h, an update rule with its variants, and a second one for rules whose
// states can be stored as codes (csd_codec). This file describes all of them. All segments of a run must use a rule of
// its kernel; Adam's kernels take AdamW's rules as well.
//
// One run updates one tile with all its segments. Each argument is one linear array, so that the FPGA reads and writes
// in long bursts:
//
//   tile      the state: `sections` sections of `n_words` words of 16 fp32 values, one after another; or codes, as
//             described below
//   segments  one word for each part of a parameter that has a gradient, in the order of the tile. Elements in no
//             segment keep every bit
//   grad      the gradients of the dense segments in the same order, each beginning with a new word: 16 fp32 values per
//             word, or 32 values of 16 bits
//   param     the rounded masters of all segments, laid out likewise, in the dtype of the parameter
//   entries   the gradients of the sparse segments (Top-K), see below
//   report    the kernel's result: a header, which it writes last, followed by its checksums
#pragma once
#include <stdint.h>

#include "csd.h"

constexpr uint32_t kKernelVersion = 3;  // version of this interface; each kernel reports the one it was built with
constexpr uint32_t kLanes = 16;         // fp32 values in a word
constexpr uint32_t kWordBytes = 4 * kLanes;

struct csd_segment {
  uint32_t first_word;  // where it begins in each section, in words of fp32; segments neither overlap nor share a word
  uint32_t elems;       // at least 1
  uint32_t grad_dtype;  // csd_dtype
  uint32_t param_dtype;
  csd_hyper hyper;
  uint32_t sparse;  // 1: its gradients are among the entries, 16 bits each
  uint32_t key;     // codes: random key of its first element, for stochastic rounding (hash.h); otherwise 0
};
static_assert(sizeof(csd_segment) == kWordBytes, "a segment is one word");

// Entries come in blocks, one for each kBlockElems elements of the tile, even if it is empty. A block is a count
// (uint32) followed by that many entries (uint32 each), padded to whole words. The lower half of an entry is an index
// into the block, in ascending order; the upper half is the 16-bit gradient, in the dtype of the segment. Elements of
// sparse segments without an entry have gradient zero. An entry that is out of order or beyond the tile is counted in
// `bad_entries` and has no effect. A count that exceeds the remaining words, or a missing block, is counted once, and
// everything from there on is ignored; words after the last block are also counted once and ignored. If there are no
// words at all, there are no entries: all gradients of sparse segments are zero.
constexpr uint32_t kBlockElems = 1 << 16;
constexpr uint32_t kBlockWords = kBlockElems / kLanes;

// The first word of the report.
struct csd_report {
  uint32_t version;    // kKernelVersion
  uint32_t n_words;    // the argument, repeated: the run has finished, and everything it wrote is in memory
  uint32_t nonfinite;  // gradients that are inf or nan, before scaling; their elements were updated all the same
  uint32_t bad_entries;
  uint32_t crc_param;  // CRC-32C of all words written to `param`
  uint32_t reserved[11];
};
static_assert(sizeof(csd_report) == kWordBytes, "a report begins with one word");

// Each following word of the report has the CRC-32C of one chunk of each section: the next `sum_words` words, or the
// rest of the section; 0 for a section that the tile does not have. Each chunk's sum starts afresh.
struct csd_sums {
  uint32_t in[4];   // of the words read
  uint32_t out[4];  // of the words written
  uint32_t reserved[8];
};
static_assert(sizeof(csd_sums) == kWordBytes, "the sums of a chunk are one word");

constexpr uint32_t kLeastSumWords = CSD_MIN_GRAIN / kLanes;  // the least `sum_words`: 4 KiB

// The kernels for fp32. `tile_in` and `tile_out` may be the same memory: a word is read before it is written. Each is
// passed several times, once per section that the rule's tiles may have, because every section has a port of its own
// and the ports work in parallel; all of them are the address of the tile's first byte. Ports of missing sections are
// idle.
//
//   csd_adamw_update, csd_adam_update, csd_rmsprop_update
//       (tile_in_0 .. tile_in_3, grad, entries, segments, tile_out_0 .. tile_out_3, param, report,
//        n_words, sections, n_segments, grad_words, entry_words, param_words, sum_words)
//   csd_sgd_update, csd_adagrad_update, csd_lion_update
//       (tile_in_0 .. tile_in_1, grad, entries, segments, tile_out_0 .. tile_out_1, param, report, and so on)

// ---- Codes --------------------------------------------------------------------------------
//
// For a tile of codes (csd_codec, codec.h), `n_words` also counts words of 16 elements. It is a multiple of kPageWords,
// the number whose elements take a page of 4 KiB in a section of bytes. A word of such a section is one group of 64
// elements. A section of exponents has one word per page of elements and is padded to whole pages; the padding is never
// read or written. The sections, one after another:
//
//   parameter | correction (16-bit parameters only) | ratio | root | exponent | peak | peak's exponent (AMSGrad only)
//
// so `sections` determines the layout: 4 or 6 with fp32 parameters, 5 or 7 with 16-bit parameters. A segment begins
// with a group, and its `param_dtype` has the tile's width; groups in no segment keep every bit. Elements of a
// segment's last group that lie beyond the segment are unused and zero. `param` receives the segments' part of the
// parameter section, padded with zeros to whole words.
constexpr uint32_t kPageElems = 4096, kPageWords = kPageElems / kLanes;

// The sums of a chunk of `sum_words` words of 16 elements, a multiple of kPageWords, in the order of a tile that has
// all sections; 0 for a section that the tile does not have.
struct csd_coded_sums {
  uint32_t in[8];   // of what was read; the last one is 0
  uint32_t out[8];  // of what was written
};
static_assert(sizeof(csd_coded_sums) == kWordBytes, "the sums of a chunk are one word");

// The kernels for codes. Again `tile_in` and `tile_out` may be the same memory, and each is passed once per port, as
// the address of the tile's first byte. The ports are for the parameters, for corrections and ratios, and for the
// others.
//
//   csd_adamw_8bit_update, csd_adam_8bit_update
//       (tile_in_0 .. tile_in_2, grad, entries, segments, tile_out_0 .. tile_out_2, param, report, and so on)
