// Runs the kernels and their C-simulation, for compilers and sanitizers. tests/sanitize.py builds and runs this, and so
// does tests/smartssd/test_kernels.py, which also runs it with streams between sequential stages (SEQUENTIAL), as Vitis
// simulates them. pytest checks the results at length; this program only checks a few of them.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "adamw.h"
#include "check.h"
#include "codec.h"
#include "float16.h"
#include "kernel.h"
#include "lion.h"

namespace {

constexpr uint32_t kWords = 700, kElems = 16 * 300 + 5, kEvery = 7;  // one gradient in seven is not zero
const csd_hyper kAdamW{CSD_ADAMW, {0.999f, 0.9f, 0.1f, 0.999f, 0.001f, 0.01f, 1.0f, 1e-8f, 1.0f}};
const csd_hyper kLion{CSD_LION, {0.999f, 0.01f, 0.9f, 0.1f, 0.99f, 0.01f, 0.0f, 0.0f, 1.0f}};

// The arguments of a kernel that do not belong to the tile.
struct OtherArguments {
  Word *grad, *entries, *segments, *param, *report;
  uint32_t grad_words, entry_words, param_words;
};

void run(const csd_hyper &hyper, Word *t, const OtherArguments &r) {
  if (hyper.rule == CSD_LION)
    csd_lion_update(t, t, r.grad, r.entries, r.segments, t, t, r.param, r.report, kWords, 2, 1, r.grad_words,
                    r.entry_words, r.param_words, kLeastSumWords);
  else
    csd_adamw_update(t, t, t, nullptr, r.grad, r.entries, r.segments, t, t, t, nullptr, r.param, r.report, kWords, 3, 1,
                     r.grad_words, r.entry_words, r.param_words, kLeastSumWords);
}

// Checks a kernel on one bf16 segment in the middle of a tile, with dense or sparse gradients.
template <typename Rule, uint32_t sections>
void check_kernel(const csd_hyper &hyper, bool sparse) {
  constexpr uint32_t kFirst = 20, kHalves = (kElems + 31) / 32, kSection = 16 * kWords;
  alignas(64) static float tile[sections * kSection], expected[sections * kSection];
  alignas(64) static uint16_t grad[32 * kHalves], param[32 * kHalves];
  alignas(64) static uint32_t entries[kElems];
  alignas(64) csd_segment segment{kFirst, kElems, CSD_BF16, CSD_BF16, hyper, sparse, 0};
  alignas(64) struct {
    csd_report head;
    csd_sums sums[(kWords + kLeastSumWords - 1) / kLeastSumWords];
  } report;
  for (size_t i = 0; i < sections * kSection; i++) tile[i] = expected[i] = (float)(i % 1013) / 512;
  uint32_t count = 0;
  for (uint32_t i = 0; i < kElems; i++) {
    const uint32_t e = 16 * kFirst + i;
    const float g = i % kEvery ? 0 : (float)(i % 11) - 5;
    grad[i] = f32_to_bf16(g);
    if (g != 0) entries[++count] = e | (uint32_t)grad[i] << 16;
    float state[4] = {};
    for (uint32_t section = 0; section < sections; section++) state[section] = expected[section * kSection + e];
    Rule(hyper).update(state, g);
    for (uint32_t section = 0; section < sections; section++) expected[section * kSection + e] = state[section];
  }
  entries[0] = count;

  auto words = [](void *memory) { return static_cast<Word *>(memory); };
  run(hyper, words(tile),
      {sparse ? nullptr : words(grad), sparse ? words(entries) : nullptr, words(&segment), words(param), words(&report),
       sparse ? 0 : kHalves, sparse ? count / 16 + 1 : 0, kHalves});
  CHECK(memcmp(tile, expected, sizeof tile) == 0);
  for (uint32_t i = 0; i < kElems; i++) CHECK(param[i] == f32_to_bf16(expected[16 * kFirst + i]));
  CHECK(report.head.version == kKernelVersion && report.head.n_words == kWords && report.head.nonfinite == 0);
  CHECK(report.head.bad_entries == 0);
  const csd_sums &untouched = report.sums[9];  // chunks of 64 words; the segment ends in word 321
  for (uint32_t section = 0; section < 4; section++) {
    CHECK(untouched.in[section] == untouched.out[section]);
    CHECK((untouched.in[section] != 0) == (section < sections));
  }
}

// A tile of codes with `pages` pages of elements and with peaks, laid out for the kernel: sections of whole pages.
template <uint32_t pages>
struct Codes {
  static constexpr uint32_t kAll = pages * kPageElems, kGroups = kAll / kGroup;
  alignas(64) uint16_t param[kAll];
  uint8_t correction[kAll], ratio[kAll], root[kAll], exponent[kPageElems];
  uint8_t peak[kAll], peak_exponent[kPageElems];
};

float finite(float f) { return (float_bits(f) & 0x7f800000u) == 0x7f800000u ? 0 : f; }

// Compares one bf16 segment of AMSGrad that ends within a group with the formulas of codec.h, element by element.
void check_coded_kernel() {
  constexpr uint32_t kPages = 4, kFirst = 640, kSome = 2 * kPageElems + 100, kHalves = (kSome + 31) / 32, kKey = 12345;
  using Tile = Codes<kPages>;
  static Tile tile, expected;
  alignas(64) static uint16_t grad[32 * kHalves], param[32 * kHalves];
  const csd_hyper hyper{CSD_AMSGRAD, {0.999f, 0.9f, 0.1f, 0.999f, 0.001f, 0.01f, 1.0f, 1e-8f, 1.0f}};
  alignas(64) csd_segment segment{kFirst / kLanes, kSome, CSD_BF16, CSD_BF16, hyper, 0, kKey};
  alignas(64) struct {
    csd_report head;
    csd_coded_sums sums[kPages];
  } report;
  for (uint32_t i = 0; i < Tile::kAll; i++) {
    const bool nobodys = i >= kFirst + kSome && i < kFirst + (kSome + kGroup - 1) / kGroup * kGroup;
    tile.param[i] = (uint16_t)(nobodys ? 0 : 0x3f00 + i % 200);
    tile.correction[i] = (uint8_t)(nobodys ? 0 : i % 127);
    tile.ratio[i] = (uint8_t)(nobodys ? 0 : i * 7);
    tile.root[i] = (uint8_t)(nobodys ? 0 : i % 250);
    tile.peak[i] = (uint8_t)(nobodys ? 0 : i % 251);
  }
  for (uint32_t g = 0; g < Tile::kGroups; g++) tile.exponent[g] = tile.peak_exponent[g] = (uint8_t)(110 + g % 10);
  expected = tile;
  for (uint32_t i = 0; i < kSome; i++) grad[i] = f32_to_bf16((float)(i % 11) - 5);
  for (uint32_t first = 0; first < kSome; first += kGroup) {
    const uint32_t group = (kFirst + first) / kGroup;
    float states[kGroup][4] = {};
    uint32_t largest = 0, largest_peak = 0;
    for (uint32_t i = 0; i < kGroup && first + i < kSome; i++) {
      const uint32_t e = kFirst + first + i;
      const float u = decode_root(tile.root[e], tile.exponent[group]);
      const float p = decode_root(tile.peak[e], tile.peak_exponent[group]);
      float state[4] = {decode_master(tile.param[e], signed_8(tile.correction[e]), false),
                        decode_exp_avg(signed_8(tile.ratio[e]), u, tile.root[e]), u * u, p * p};
      AdamW(hyper).update(state, bf16_to_f32(grad[first + i]));
      memcpy(states[i], state, sizeof state);
      const uint32_t b = float_bits(finite(sqrtf(state[2]))), b_peak = float_bits(finite(sqrtf(state[3])));
      largest = b > largest ? b : largest;
      largest_peak = b_peak > largest_peak ? b_peak : largest_peak;
    }
    const uint32_t exponent = exponent_of(largest), peak_exponent = exponent_of(largest_peak);
    expected.exponent[group] = (uint8_t)exponent;
    expected.peak_exponent[group] = (uint8_t)peak_exponent;
    for (uint32_t i = 0; i < kGroup; i++) {
      const uint32_t e = kFirst + first + i;
      const RoundingBits rounding = stochastic_rounding_bits(mix_bits(kKey + first + i));
      const SplitMaster split = encode_master(states[i][0], rounding, false);
      const uint32_t root = encode_root(sqrtf(states[i][2]), exponent, rounding.root);
      expected.param[e] = (uint16_t)split.param;
      expected.correction[e] = (uint8_t)split.correction;
      expected.root[e] = (uint8_t)root;
      expected.ratio[e] = (uint8_t)encode_ratio(states[i][1], decode_root(root, exponent), root, rounding.ratio);
      expected.peak[e] = (uint8_t)encode_root(sqrtf(states[i][3]), peak_exponent, round_to_nearest_bits().root);
    }
  }

  auto words = [](void *memory) { return static_cast<Word *>(memory); };
  Word *const t = words(&tile);
  csd_adamw_8bit_update(t, t, t, words(grad), nullptr, words(&segment), t, t, t, words(param), words(&report),
                        Tile::kAll / kLanes, 7, 1, kHalves, 0, kHalves, kPageWords);
  CHECK(memcmp(&tile, &expected, sizeof tile) == 0);
  CHECK(memcmp(param, expected.param + kFirst, 2 * kSome) == 0);
  CHECK(report.head.version == kKernelVersion && report.head.n_words == Tile::kAll / kLanes);
  CHECK(report.head.nonfinite == 0 && report.head.bad_entries == 0);
  const csd_coded_sums &untouched = report.sums[kPages - 1];
  for (uint32_t section = 0; section < 8; section++) {
    CHECK(untouched.in[section] == untouched.out[section]);
    CHECK((untouched.in[section] == 0) == (section == 7));
  }
}

#ifndef SEQUENTIAL
// Streams that fork and join again: `gather` reads eight numbers before it passes on the first, and then holds them in
// its pipeline for a while. Until they come out, the numbers on the short path have to wait in their stream.
constexpr uint32_t kGathered = 8, kNumbers = 64 * kGathered;
using Numbers = hls::stream<uint32_t>;

void fork_numbers(Numbers &to_gather, Numbers &past_it) {
  for (uint32_t i = 0; i < kNumbers; i++) to_gather.write(i), past_it.write(i);
}
void gather(Numbers &in, Numbers &out) {
  for (uint32_t i = 0; i < kNumbers; i += kGathered) {
    uint32_t gathered[kGathered];
    for (uint32_t &value : gathered) value = in.read();
    for (uint32_t value : gathered) out.write(value);
  }
}
void join(Numbers &gathered, Numbers &past_it, uint32_t *sum) {
  for (uint32_t i = 0; i < kNumbers; i++) *sum += gathered.read() == past_it.read();
}

template <int depth>
std::string diamond() {
  uint32_t same = 0;
  try {
    Numbers to_gather("to_gather"), gathered("gathered");
    hls::stream<uint32_t, depth> past_it("past_it");
    CSD_DATAFLOW
    CSD_STAGE(fork_numbers, to_gather, past_it)
    CSD_STAGE(gather, to_gather, gathered)
    CSD_STAGE(join, gathered, past_it, &same)
  } catch (const std::runtime_error &e) {
    return e.what();
  }
  CHECK(same == kNumbers);
  return "";
}

bool stands(const std::string &why, const char *what) { return why.find(what) != std::string::npos; }

void check_streams() {
  for (int i = 0; i < 100; i++) {
    // Too shallow even without pipelines, because `gather` needs the eighth number.
    for (const std::string &why : {diamond<2>(), diamond<kGathered - 2>()}) {
      CHECK(stands(why, "deadlock: fork_numbers waits for room in past_it"));
      CHECK(stands(why, "join waits for gathered."));
    }
    // Deep enough for stages that hold nothing back, but not for what `gather` holds in its pipeline.
    const std::string failure = diamond<kGathered - 1>();
    if (CSD_IN_FLIGHT < kGathered) CHECK(failure == "");
    else CHECK(stands(failure, "in its pipeline; join waits for gathered."));
    CHECK(diamond<2 * kGathered + 2 * CSD_IN_FLIGHT>() == "");
  }
}

// In a stage, subnormal numbers are zero as on the FPGA, whatever the mode of the calling thread is.
void multiply(const volatile float *x, volatile float *product) { *product = x[0] * x[1]; }

void check_subnormals() {
  const float results[2] = {1e-30f, 1e-10f}, operands[2] = {1e-40f, 1e10f};
  for (const float *pair : {results, operands}) {
    float product = 1;
    {CSD_DATAFLOW CSD_STAGE(multiply, pair, &product)} CHECK(product == 0);
    multiply(pair, &product);
    CHECK(product != 0);
  }
}
#endif

}  // namespace

int main() {
  for (const bool sparse : {false, true}) {
    check_kernel<AdamW, 3>(kAdamW, sparse);
    check_kernel<Lion, 2>(kLion, sparse);
  }
  check_coded_kernel();
#ifndef SEQUENTIAL
  check_streams();
  check_subnormals();
#endif
  puts("kernels: done");
}
