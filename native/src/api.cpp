// The C API. C++ exceptions are turned into a csd_status here and nowhere else. A function that does not use guarded()
// calls only noexcept functions. The API functions themselves cannot be noexcept, because csd.h is a C header.
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "card.h"
#include "changes.h"
#include "crc32c.h"
#include "csd.h"
#include "engine.h"
#include "float_mode.h"
#include "pool.h"
#include "topk.h"
#include "updater.h"

struct csd_engine {
  csd::Engine engine;
};

namespace {

int report(csd_error *error, const csd::Failure &f) noexcept {
  if (error) {
    error->status = f.status;
    error->os_errno = f.os_errno;
    error->device = f.device;
    error->tile = f.tile;
    strncpy(error->text, f.text.c_str(), sizeof error->text - 1);
    error->text[sizeof error->text - 1] = 0;
  }
  return f.status;
}

template <typename Call>
int guarded(csd_error *error, Call call) noexcept {
  try {
    call();
    return CSD_OK;
  } catch (...) {
    return report(error, csd::caught());
  }
}

void require_isa(int32_t isa) {
  if (isa < 0 || isa > csd::best_isa()) throw csd::Failure{CSD_EINVAL, "this CPU does not have that instruction set"};
}

csd::Codes codes_of(int32_t isa, uint32_t codec, int32_t param_dtype, uint32_t sections, void *const *codes) {
  require_isa(isa);
  const auto layout_with = [&](uint32_t states) {
    return csd::Layout(codec, states, static_cast<uint32_t>(param_dtype), 0);
  };
  if (codec < CSD_8BIT || codec > CSD_LINEAR || param_dtype < CSD_F32 || param_dtype > CSD_BF16)
    throw csd::Failure{CSD_EINVAL, "no codec " + std::to_string(codec) + " for dtype " + std::to_string(param_dtype)};
  const uint32_t least = codec == CSD_8BIT ? 3 : 2;
  csd::Layout layout = layout_with(least);
  if (codec == CSD_8BIT && sections > layout.n()) layout = layout_with(least + 1);
  if (sections != layout.n())
    throw csd::Failure{CSD_EINVAL, "no such codes: " + std::to_string(sections) + " sections"};
  char *at[csd::kMostSections] = {};
  std::copy_n(reinterpret_cast<char *const *>(codes), sections, at);
  return csd::codes_at(layout, at, 0);
}

void check_parts(const csd_topk_part *parts, uint32_t n_parts, uint64_t elems) {
  uint64_t next = 0;
  for (const csd_topk_part *p = parts; p != parts + n_parts; p++) {
    if (p->grad_dtype > CSD_BF16 || (p->dtype != CSD_F16 && p->dtype != CSD_BF16) || p->k == 0 || p->k > p->n ||
        p->n > UINT32_MAX)
      throw csd::Failure{CSD_EINVAL, "no such dtype, or more elements to select than there are"};
    if (p->tile_first < next) throw csd::Failure{CSD_EINVAL, "the parts are not in the order of their tile"};
    next = p->tile_first + p->n;
  }
  if (next == 0 || next > elems) throw csd::Failure{CSD_EINVAL, "there are no parts, or some are beyond their tile"};
}

static_assert(noexcept(std::declval<const csd::Card &>().has_p2p()) && noexcept(csd::best_isa()) &&
                  noexcept(csd::topk_count(0, 0)) && noexcept(csd::crc32c(0, nullptr, 0)) &&
                  noexcept(std::declval<const csd::Engine &>().undone(nullptr, nullptr, 0)) &&
                  noexcept(std::declval<csd::Engine &>().events(nullptr, 0)) &&
                  noexcept(std::declval<csd::Engine &>().hold_bytes(0)) &&
                  noexcept(std::declval<const csd::Engine &>().would_pull()),
              "called without guarded(), so these must not throw");

}  // namespace

int csd_card_open(const char *name, const char *xclbin, const char *kernels, uint32_t timeout_ms, csd_card **out,
                  csd_error *error) {
  return guarded(error, [&] {
    *out = new csd_card{csd::Card::open(name, xclbin, kernels, std::chrono::milliseconds(timeout_ms))};
  });
}

int csd_card_close(csd_card *card, csd_error *error) {
  const std::unique_ptr<csd_card> owner(card);
  return guarded(error, [&] { csd::Card::close(std::move(card->card)); });
}

int32_t csd_card_has_p2p(const csd_card *card) { return card->card->has_p2p(); }

int csd_card_try_p2p(csd_card *card, int32_t fd, uint64_t offset, csd_error *error) {
  return guarded(error, [&] { card->card->try_p2p(fd, offset); });
}

int csd_card_measure(const csd_device *device, uint64_t offset, uint64_t bytes, csd_card_rates *out, csd_error *error) {
  return guarded(error, [&] { *out = csd::measure_card(*device, offset, bytes); });
}

int csd_engine_create(const csd_device *devices, uint32_t n_devices, csd_engine **out, csd_error *error) {
  return guarded(error, [&] { *out = new csd_engine{csd::Engine(devices, n_devices)}; });
}

int csd_engine_close(csd_engine *engine, csd_error *error) {
  const std::unique_ptr<csd_engine> owner(engine);
  return guarded(error, [&] { engine->engine.close(); });
}

int csd_engine_extend(csd_engine *engine, const csd_extent *extent, float **windows, csd_error *error) {
  return guarded(error, [&] { engine->engine.extend(*extent, windows); });
}

void csd_window_release(float *window, uint64_t elems) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)),
                  begin = reinterpret_cast<uintptr_t>(window) / page * page;
  munmap(reinterpret_cast<void *>(begin), 4 * elems + page);
}

int csd_engine_begin(csd_engine *engine, const csd_param *params, uint64_t n_params, const csd_hyper *hypers,
                     uint32_t n_hypers, const uint32_t *tiles, uint32_t n_tiles, int32_t order, csd_error *error) {
  return guarded(error, [&] { engine->engine.begin(params, n_params, hypers, n_hypers, tiles, n_tiles, order); });
}

int csd_engine_push(csd_engine *engine, uint32_t tile, const csd_push *how, csd_error *error) {
  return guarded(error, [&] { engine->engine.push(tile, how ? *how : csd_push{}); });
}

int csd_engine_drop_grads(csd_engine *engine, const uint32_t *params, uint32_t n, csd_error *error) {
  return guarded(error, [&] { engine->engine.drop_grads(params, n); });
}

int csd_engine_pull(csd_engine *engine, uint32_t *tile, csd_error *error) {
  return guarded(error, [&] { *tile = engine->engine.pull(); });
}

int csd_engine_would_pull(csd_engine *engine) { return engine->engine.would_pull(); }

int csd_engine_params_ready(csd_engine *engine, const uint32_t *tiles, uint32_t n, int32_t wait, int32_t *given,
                            csd_error *error) {
  return guarded(error, [&] { *given = engine->engine.params_ready(tiles, n, wait != 0); });
}

int csd_engine_finish(csd_engine *engine, int32_t keep, csd_error *error) {
  return guarded(error, [&] { engine->engine.finish(keep != 0); });
}

int csd_engine_take_back(csd_engine *engine, csd_error *error) {
  return guarded(error, [&] { engine->engine.take_back(); });
}

int csd_engine_go_back(csd_engine *engine, const uint32_t *tiles, uint32_t n, csd_error *error) {
  return guarded(error, [&] { engine->engine.go_back(tiles, n); });
}

int csd_engine_free_tiles(csd_engine *engine, const uint32_t *tiles, uint32_t n, csd_error *error) {
  return guarded(error, [&] { engine->engine.free_tiles(tiles, n); });
}

void csd_trim_memory(void) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

int csd_punch_hole(int fd, uint64_t offset, uint64_t bytes) {
  const auto from = static_cast<off_t>(offset), n = static_cast<off_t>(bytes);
  return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, n) == 0 ? 0 : errno;
}

uint32_t csd_engine_undone(csd_engine *engine, uint32_t *tiles, uint64_t *elems, uint32_t n) {
  return engine->engine.undone(tiles, elems, n);
}

uint32_t csd_engine_events(csd_engine *engine, csd_event *events, uint32_t n) {
  return engine->engine.events(events, n);
}

uint64_t csd_engine_hold_bytes(csd_engine *engine, uint32_t tile) { return engine->engine.hold_bytes(tile); }

int csd_engine_unchanged(csd_engine *engine, const csd_param *params, uint64_t n_params, int32_t *unchanged,
                         csd_error *error) {
  return guarded(error, [&] { *unchanged = engine->engine.unchanged(params, n_params); });
}

int csd_engine_release(csd_engine *engine, const csd_param *params, uint64_t n_params, const uint32_t *order,
                       uint32_t n_order, csd_error *error) {
  return guarded(error, [&] { engine->engine.release(params, n_params, order, n_order); });
}

int csd_engine_wait_writes(csd_engine *engine, csd_error *error) {
  return guarded(error, [&] { engine->engine.wait_writes(); });
}

int csd_engine_remap(csd_engine *engine, int32_t open, csd_error *error) {
  return guarded(error, [&] { engine->engine.remap(open != 0); });
}

int csd_engine_edited(csd_engine *engine, const uint32_t *tiles, uint32_t n, csd_error *error) {
  return guarded(error, [&] { engine->engine.edited(tiles, n); });
}

int csd_engine_read(csd_engine *engine, uint32_t tile, uint32_t sections, uint64_t elems, void *states,
                    csd_error *error) {
  return guarded(error, [&] { engine->engine.read(tile, sections, elems, static_cast<char *>(states)); });
}

int csd_engine_decode(csd_engine *engine, uint32_t tile, uint64_t first, uint64_t n, const void *param,
                      float *const *states, csd_error *error) {
  return guarded(error, [&] { engine->engine.decode(tile, first, n, param, states); });
}

int csd_engine_tiles(csd_engine *engine, uint32_t first, uint32_t n, csd_tile_state *states, uint32_t *sums,
                     csd_error *error) {
  return guarded(error, [&] { engine->engine.tiles(first, n, states, sums); });
}

int csd_engine_stats(csd_engine *engine, uint32_t device, csd_stats *out, csd_error *error) {
  return guarded(error, [&] { *out = engine->engine.stats(device); });
}

const csd_rule_row *csd_rules(void) { return csd::kRules; }

int csd_update(const csd_hyper *hyper, int32_t isa, uint64_t n, const void *grad, int32_t grad_dtype,
               float *const *state, uint32_t sections, void *param, int32_t param_dtype, csd_error *error) {
  return guarded(error, [&] {
    require_isa(isa);
    if (!csd::sections_of(hyper->rule).take(sections))
      throw csd::Failure{CSD_EINVAL, "no update rule " + std::to_string(hyper->rule) + " for " +
                                         std::to_string(sections) + " sections"};
    csd::Span span{hyper, n, grad, static_cast<uint32_t>(grad_dtype), {}, param, static_cast<uint32_t>(param_dtype)};
    std::copy_n(state, sections, span.state);
    const csd::FloatMode mode(csd::Subnormals::zero);
    csd::end_updates();
    csd::update(span, isa);
  });
}

int csd_update_codes(const csd_hyper *hyper, int32_t isa, uint64_t n, const void *grad, int32_t grad_dtype,
                     void *const *codes, uint32_t sections, void *param, int32_t param_dtype, uint32_t key,
                     csd_error *error) {
  return guarded(error, [&] {
    const csd::SectionRange of = csd::sections_of(hyper->rule);
    const uint32_t pass = csd::pass_of(hyper->rule);
    // A first pass does not touch the master: 16 bits, or if there are only three sections, fp32.
    const int32_t master_dtype = pass != 1 ? param_dtype : sections == 3 ? CSD_F32 : CSD_BF16;
    if (of.codec == CSD_FP32) throw csd::Failure{CSD_EINVAL, "no codes for update rule " + std::to_string(hyper->rule)};
    csd::Codes at = codes_of(isa, of.codec, master_dtype, sections, codes);
    if (pass == 1) at.param = nullptr, at.correction = nullptr;
    if (pass == 2) at.linear = at.exponent = nullptr;
    if (!of.take(pass != 0 ? 1 : at.peak ? 4 : at.ratio ? 3 : 2))
      throw csd::Failure{CSD_EINVAL, "no codes for update rule " + std::to_string(hyper->rule)};
    const csd::CodedSpan span{hyper, n,     grad, static_cast<uint32_t>(grad_dtype), static_cast<uint32_t>(param_dtype),
                              at,    param, key};
    const csd::FloatMode mode(csd::Subnormals::zero);
    csd::end_updates();
    csd::update(span, isa);
  });
}

int csd_encode(int32_t isa, uint64_t n, const float *const *states, uint32_t codec, int32_t param_dtype,
               void *const *codes, uint32_t sections, csd_error *error) {
  return guarded(error, [&] {
    const csd::Codes at = codes_of(isa, codec, param_dtype, sections, codes);
    const csd::FloatMode mode(csd::Subnormals::zero);
    csd::encode(states, n, static_cast<uint32_t>(param_dtype), at, isa);
  });
}

int csd_decode(int32_t isa, uint64_t n, void *const *codes, uint32_t codec, int32_t param_dtype, float *const *states,
               uint32_t sections, csd_error *error) {
  return guarded(error, [&] {
    const csd::Codes at = codes_of(isa, codec, param_dtype, sections, codes);
    const csd::FloatMode mode(csd::Subnormals::zero);
    csd::decode(at, n, static_cast<uint32_t>(param_dtype), states, isa);
  });
}

int32_t csd_isa_best(void) { return csd::best_isa(); }

int csd_isa_use(int32_t isa, csd_error *error) {
  return guarded(error, [&] {
    require_isa(isa);
    csd::current_isa = isa;
  });
}

int32_t csd_isa_used(void) { return csd::current_isa; }

int csd_threads_use(uint32_t n, csd_error *error) {
  return guarded(error, [&] {
    if (n == 0) throw csd::Failure{CSD_EINVAL, "at least one update thread is needed"};
    csd::Pool::use_update_threads(n);
  });
}

uint32_t csd_threads_used(void) {
  uint32_t n = 0;
  guarded(nullptr, [&] { n = csd::Pool::updates().size(); });
  return n;
}

void csd_small_step_use(uint64_t elems) { csd::small_step = elems; }

uint64_t csd_small_step_used(void) { return csd::small_step; }

int csd_changes_create(int32_t fd, csd_changes **out, csd_error *error) {
  return guarded(error, [&] { *out = new csd_changes{csd::Recorder(fd)}; });
}

void csd_changes_free(csd_changes *changes) { delete changes; }

uint64_t csd_changes_list(const csd_changes *changes, csd_change *records, uint64_t n, int32_t *os_errno) {
  return changes->recorder.list(records, n, os_errno);
}

void csd_changes_rewind(csd_changes *changes, uint64_t n) { changes->recorder.rewind(n); }

int csd_changes_encode(const csd_changes *changes, const csd_change *records, uint64_t n_records, csd_block *blocks,
                       uint64_t n_blocks, void *payload, uint64_t *bytes, csd_error *error) {
  return guarded(error, [&] {
    *bytes = changes->recorder.encode(records, n_records, blocks, n_blocks, static_cast<char *>(payload));
  });
}

void csd_watch_note(csd_watch *watch, uint32_t tile, const csd_piece *piece, uint32_t dtype, const void *before,
                    const void *after) {
  csd::note_update(*watch, tile, *piece, dtype, before, after);
}

uint32_t csd_changes_sum(const uint16_t *values, uint64_t first, uint64_t n) {
  return csd::weighted_sum(values, first, n);
}

uint64_t csd_topk_count(double ratio, uint64_t n) { return csd::topk_count(ratio, n); }

int csd_topk_entries(const csd_topk_part *parts, uint32_t n_parts, uint64_t elems, uint32_t *words, uint64_t *n_words,
                     csd_error *error) {
  return guarded(error, [&] {
    check_parts(parts, n_parts, elems);
    thread_local std::vector<uint32_t> entries;
    csd::select_entries(parts, n_parts, elems, entries);
    *n_words = entries.size();
    std::copy(entries.begin(), entries.end(), words);
  });
}

int csd_topk_feed_back(const csd_topk_part *parts, uint32_t n_parts, const uint32_t *words, uint64_t n_words,
                       csd_error *error) {
  return guarded(error, [&] {
    check_parts(parts, n_parts, UINT64_MAX);
    csd::Entries entries(words, n_words);
    for (uint32_t i = 0; i < n_parts; i++) csd::feed_back(parts[i], entries);
  });
}

uint32_t csd_crc32c(uint32_t crc, const void *data, uint64_t bytes) { return csd::crc32c(crc, data, bytes); }
