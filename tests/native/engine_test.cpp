// Drives the engine through csd.h alone, for the sanitizers; tests/sanitize.py builds and runs it in an empty
// directory. pytest checks the computed values; this program checks only what must hold for any values.
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "csd.h"
#include "push.h"
#include "rules.h"

// Allocations fail on command, in all threads.
namespace {
std::atomic<int64_t> left_until_failure{0};  // in allocations; 0: none fails
std::atomic<bool> fail_for_good{false}, has_failed{false};

// Makes the n-th allocation from now on fail, and with `for_good` all later ones. Returns whether any allocation has
// failed since the last call.
bool fail_at(int64_t n, bool for_good) {
  fail_for_good = for_good;
  left_until_failure = n;
  return has_failed.exchange(false);
}

void *allocate(size_t bytes, size_t alignment) {
  if (left_until_failure.load() > 0 && left_until_failure.fetch_sub(1) == 1) {
    if (fail_for_good) left_until_failure = 1;
    has_failed = true;
    throw std::bad_alloc();
  }
  void *p = nullptr;
  if (posix_memalign(&p, alignment, bytes ? bytes : 1) != 0) throw std::bad_alloc();
  return p;
}
}  // namespace

// Not inlined, because the compiler would not recognise that these operators belong together.
#define NOINLINE __attribute__((noinline))
NOINLINE void *operator new(size_t bytes) { return allocate(bytes, 16); }
NOINLINE void *operator new[](size_t bytes) { return allocate(bytes, 16); }
NOINLINE void operator delete(void *p) noexcept { free(p); }
NOINLINE void operator delete[](void *p) noexcept { free(p); }
NOINLINE void operator delete(void *p, size_t) noexcept { free(p); }
NOINLINE void operator delete[](void *p, size_t) noexcept { free(p); }

namespace {

constexpr uint64_t kTile = 3072;
constexpr uint64_t kSumElems = 2048;          // a section of a tile has two checksums; the second covers fewer elements
constexpr uint32_t kTiles = 12;               // per extent
constexpr uint64_t kParam = 2 * kTile - 100;  // elements: every parameter ends within a tile

// An unnamed store file, large enough for `extents` extents of any number of devices.
struct File {
  int fd;
  explicit File(int flags = O_RDWR) {
    char name[] = "store-XXXXXX";
    const int made = mkstemp(name);
    CHECK(made >= 0 && ftruncate(made, kBytes) == 0);
    fd = open(name, flags);
    CHECK(fd >= 0);
    close(made);
    unlink(name);
  }
  ~File() { close(fd); }
  File(const File &) = delete;
  static constexpr off_t kExtent = 2 * 4 * 4 * kTile * kTiles, kBytes = 2 * kExtent;
};

struct Model {
  std::vector<csd_device> devices;
  uint32_t sections, dtype, slots, n_tiles;  // per extent
  const csd_tile_state *states;              // of an existing store, else null
  const uint32_t *sums;
  csd_engine *engine = nullptr;
  csd_error error{};
  int32_t same_order = 0;
  std::vector<float *> windows;
  std::vector<csd_piece> pieces;
  std::vector<uint64_t> offsets;
  float *got[4] = {};
  std::vector<std::vector<char>> params, grads;
  std::vector<std::vector<char>> holds;
  std::vector<csd_param> table;
  std::vector<uint32_t> tiles;
  csd_hyper hyper{CSD_ADAMW, {0.999f, 0.9f, 0.1f, 0.999f, 0.001f, 0.01f, 1.0f, 1e-8f, 1.0f}};

  Model(std::vector<csd_device> d, uint32_t n_sections = 3, uint32_t of_dtype = CSD_F32, uint32_t n_slots = 2,
        const csd_tile_state *initial_states = nullptr, const uint32_t *initial_sums = nullptr,
        uint32_t of_tiles = kTiles)
      : devices(std::move(d)),
        sections(n_sections),
        dtype(of_dtype),
        slots(n_slots),
        n_tiles(of_tiles),
        states(initial_states),
        sums(initial_sums) {
    if (sections == 4) hyper.rule = CSD_AMSGRAD;
    if (sections < 3) hyper.rule = sections == 2 ? kHeavy : kPlain, hyper.c[0] = 0.01f, hyper.c[1] = 0.9f;
    OK(csd_engine_create(devices.data(), static_cast<uint32_t>(devices.size()), &engine, &error));
    extend();
  }

  Model(const Model &) = delete;

  ~Model() {
    if (engine) csd_engine_close(engine, &error);
    for (float *window : windows) csd_window_release(window, kTile * n_tiles);
  }

  // Adds an extent. Each parameter has two tiles of its own, which it does not fill.
  void extend() {
    prepare();
    OK(try_extend());
    after_extend();
  }

  void prepare() {
    const auto first = static_cast<uint32_t>(params.size()), first_tile = static_cast<uint32_t>(tiles.size());
    pieces.clear();
    for (uint32_t i = 0; i < n_tiles / 2; i++) {
      pieces.push_back({first + i, 2 * i, 0, 0, kTile});
      pieces.push_back({first + i, 2 * i + 1, kTile, 0, kParam - kTile});
      params.emplace_back(4 * kParam);
      grads.emplace_back(4 * kParam);
      fill(grads.back(), i);
    }
    for (uint32_t i = 0; i < n_tiles; i++) tiles.push_back(first_tile + i);
    offsets.assign(devices.size(), first ? static_cast<uint64_t>(File::kExtent) : 0);
  }

  int try_extend() {
    const csd_extent extent{kTile,     n_tiles, sections,       slots,         states,
                            kSumElems, sums,    offsets.data(), pieces.data(), pieces.size()};
    return csd_engine_extend(engine, &extent, got, &error);
  }

  void after_extend() {
    windows.insert(windows.end(), got, got + sections);
    table.clear();
    for (size_t i = 0; i < params.size(); i++)
      table.push_back({grads[i].data(), params[i].data(), dtype, dtype, 0, 0, 0, nullptr, 0, 0});
  }

  void fill(std::vector<char> &grad, uint32_t seed) const {
    for (uint64_t i = 0; i < kParam; i++) {
      if (dtype == CSD_F32) {
        reinterpret_cast<float *>(grad.data())[i] = static_cast<float>(i % 7) - 3 + static_cast<float>(seed);
      } else {
        reinterpret_cast<uint16_t *>(grad.data())[i] = static_cast<uint16_t>(0x3c00 + i % 512);  // about one
      }
    }
  }

  int begin() {
    return csd_engine_begin(engine, table.data(), table.size(), &hyper, 1, tiles.data(),
                            static_cast<uint32_t>(tiles.size()), same_order, &error);
  }

  int push(size_t from, size_t to) {
    for (size_t i = from; i < to; i++)
      if (const int status = csd_engine_push(engine, tiles[i], nullptr, &error)) return status;
    return CSD_OK;
  }

  // Begins a step as a guess, in which the gradients' addresses are not known yet.
  int begin_guess() {
    std::vector<csd_param> rows = table;
    for (csd_param &row : rows) row.grad = row.grad ? &rows : nullptr;
    return csd_engine_begin(engine, rows.data(), rows.size(), &hyper, 1, tiles.data(),
                            static_cast<uint32_t>(tiles.size()), same_order, &error);
  }

  // Pushes tiles early, one by one; each tile has one piece.
  int push_early(size_t from, size_t to, size_t every = 1) {
    holds.resize(tiles.size());
    for (size_t i = from; i < to; i += every) {
      const uint32_t tile = tiles[i];
      holds[tile].assign(csd_engine_hold_bytes(engine, tile), 0x5a);
      CHECK(!holds[tile].empty());
      const void *const grad = table[tile / 2].grad;
      if (const int status = push_at(engine, tile, &grad, &error, holds[tile].data())) return status;
    }
    return CSD_OK;
  }

  int unchanged() {
    int32_t same = 0;
    OK(csd_engine_unchanged(engine, table.data(), table.size(), &same, &error));
    return same;
  }

  int release(const std::vector<uint32_t> &order) {
    return csd_engine_release(engine, table.data(), table.size(), order.data(), static_cast<uint32_t>(order.size()),
                              &error);
  }

  int step() {
    if (const int status = begin()) return status;
    OK(push(0, tiles.size()));
    return csd_engine_finish(engine, 1, &error);
  }

  int step_by_images() {
    std::vector<std::vector<char>> images(2 * tiles.size(), std::vector<char>(4 * kTile, 0));
    if (const int status = begin()) return status;
    for (size_t i = tiles.size(); i-- > 0;)
      OK(push_images(engine, tiles[i], images[2 * i].data(), images[2 * i + 1].data(), &error));
    for (size_t i = 0; i < tiles.size(); i++) {
      uint32_t tile = 0;
      if (csd_engine_pull(engine, &tile, &error)) return csd_engine_finish(engine, 0, &error);
      CHECK(tile < tiles.size());
    }
    return csd_engine_finish(engine, 1, &error);
  }

  std::vector<float> state() {
    OK(csd_engine_remap(engine, 1, &error));
    std::vector<float> all;
    for (const float *window : windows) all.insert(all.end(), window, window + kTile * n_tiles);
    return all;
  }

  int close_engine() {
    const int status = csd_engine_close(engine, &error);
    engine = nullptr;
    return status;
  }
};

csd_device file(const File &f, uint32_t buffers = 3, int64_t cache_bytes = 0) {
  return {"file", f.fd, buffers, 4096, nullptr, 0, nullptr, 0, cache_bytes};
}
csd_device ram() { return {"ram", -1, 0, 0}; }
csd_device in_slots(const File &f, uint32_t buffers) { return {"ram", f.fd, buffers, 4096}; }
csd_device null() { return {"null", -1, 0, 0}; }

// Makes a device take about a millisecond per tile for each read, update, write and transfer.
csd_device paced(csd_device d) {
  const uint32_t serial = d.buffers == 1;
  static const csd_pace kPaces[] = {{2e7, 1e7, 2.5e7, 0.0005, 1e6, 5e6, 0, 0},
                                    {2e7, 1e7, 2.5e7, 0.0005, 1e6, 5e6, 1, 1}};
  d.pace = &kPaces[serial];
  return d;
}

bool finite(const std::vector<float> &values) {
  for (const float v : values)
    if (v != v || v - v != 0) return false;
  return true;
}

void many_steps() {
  const File a, b, c, d, e;
  Model files({file(a), file(b, 8), file(c, 4)}), mixed({ram(), file(d), in_slots(e, 3)}), memory({ram(), ram()}),
      nothing({null()});
  for (int step = 0; step < 40; step++) {
    if (step == 20)
      for (Model *m : {&files, &mixed, &memory, &nothing}) m->extend();
    for (Model *m : {&files, &mixed, &memory, &nothing}) OK(step % 3 ? m->step() : m->step_by_images());
    if (step % 5 == 0) files.state();
  }
  const std::vector<float> state = files.state();
  CHECK(finite(state) && state == mixed.state() && state == memory.state());
  CHECK(state[kTile * kTiles] != 0);
  csd_tile_state tiles[2 * kTiles];
  std::vector<uint32_t> sums(2 * kTiles * 2 * 3);
  OK(csd_engine_tiles(files.engine, 0, 2 * kTiles, tiles, sums.data(), &files.error));
  for (uint32_t i = 0; i < 2 * kTiles; i++) {
    const float *master = files.windows[i < kTiles ? 0 : 3] + i % kTiles * kTile;
    CHECK(tiles[i].summed);
    for (uint64_t chunk = 0; chunk < 2; chunk++)
      CHECK(sums[(2 * i + chunk) * 3] ==
            csd_crc32c(0, master + chunk * kSumElems, 4 * (chunk ? kTile - kSumElems : kSumElems)));
  }
  csd_stats stats;
  for (uint32_t i = 0; i < 3; i++) OK(csd_engine_stats(files.engine, i, &stats, &files.error));
  CHECK(csd_engine_stats(files.engine, 3, &stats, &files.error) == CSD_EINVAL);
}

// CSD_SUPPLIED for every other parameter. Here, another engine computes the states that are given.
void supplied_states() {
  const File a, b, c, d;
  Model all({file(a), file(b)}), some({file(c, 3, -1), in_slots(d, 3)});
  const auto is_supplied = [](uint32_t tile) { return tile / 2 % 2 == 0; };
  std::vector<std::vector<float>> images(kTiles,
                                         std::vector<float>(3 * kTile, NAN));  // what is in no piece is not read
  std::vector<float> got(3 * kTile);
  const auto give = [&](bool keep) {
    for (uint32_t i = 0; i < some.params.size(); i += 2) some.table[i].master = CSD_SUPPLIED;
    OK(some.begin());
    CHECK(csd_engine_read(some.engine, 0, 3, kTile, got.data(), &some.error) == CSD_ESTATE);
    for (const uint32_t tile : some.tiles) {
      const uint64_t n = tile % 2 ? kParam - kTile : kTile;
      for (uint32_t s = 0; s < 3; s++) std::copy_n(all.windows[s] + tile * kTile, n, &images[tile][s * kTile]);
      csd_push wrong{}, right{};
      (is_supplied(tile) ? right : wrong).states = images[tile].data();
      CHECK(csd_engine_push(some.engine, tile, &wrong, &some.error) == CSD_EINVAL);
      OK(csd_engine_push(some.engine, tile, &right, &some.error));
    }
    OK(csd_engine_finish(some.engine, keep, &some.error));
  };
  for (int step = 0; step < 4; step++) {
    const std::vector<float> before = some.state();
    OK(all.step());
    const std::vector<float> after = all.state();
    give(false);
    CHECK(some.state() == before);
    give(true);
    OK(csd_engine_wait_writes(some.engine, &some.error));
    csd_stats stats;
    OK(csd_engine_stats(some.engine, 0, &stats, &some.error));
    CHECK(stats.read_bytes == 12 * kTile * kTiles / 4 && stats.write_bytes == 12 * kTile * kTiles / 2);
    for (const uint32_t tile : some.tiles) {
      OK(csd_engine_read(some.engine, tile, 3, kTile, got.data(), &some.error));
      for (uint32_t s = 0; s < 3; s++)
        CHECK(std::equal(&got[s * kTile], &got[s * kTile] + kTile, &after[(s * kTiles + tile) * kTile]));
    }
    CHECK(some.state() == after);
  }
  // csd_engine_read includes edits to a window, and detects damage.
  OK(csd_engine_remap(some.engine, 0, &some.error));
  const uint32_t edited = 0, rotten = 2;
  some.windows[0][5] = 7;
  OK(csd_engine_edited(some.engine, &edited, 1, &some.error));
  OK(csd_engine_read(some.engine, edited, 3, kTile, got.data(), &some.error));
  CHECK(got[5] == 7);
  csd_tile_state at;
  std::vector<uint32_t> sums(2 * 3);
  OK(csd_engine_tiles(some.engine, rotten, 1, &at, sums.data(), &some.error));
  const float other = 8;
  CHECK(pwrite(c.fd, &other, 4, static_cast<off_t>((2 * (rotten / 2) + at.slot) * 12 * kTile)) == 4);
  CHECK(csd_engine_read(some.engine, rotten, 3, kTile, got.data(), &some.error) == CSD_EDAMAGED &&
        some.error.tile == rotten);
  CHECK(csd_engine_read(some.engine, kTiles, 3, kTile, got.data(), &some.error) == CSD_EINVAL);
  Model memory({ram()});
  memory.table[0].master = CSD_SUPPLIED;
  CHECK(memory.begin() == CSD_EINVAL);
}

// For every dtype and number of sections, all instruction sets compute the same state.
void all_updaters() {
  const int32_t best = csd_isa_best();
  for (const uint32_t dtype : {CSD_F32, CSD_F16, CSD_BF16})
    for (const uint32_t sections : {1u, 2u, 3u, 4u}) {
      std::vector<float> first;
      for (int32_t isa = 0; isa <= best; isa++) {
        OK(csd_isa_use(isa, nullptr));
        const File a;
        Model m({file(a), ram()}, sections, dtype);
        for (int step = 0; step < 3; step++) OK(m.step());
        const std::vector<float> state = m.state();
        if (first.empty()) first = state;
        CHECK(finite(state) && state == first);

        std::vector<float> s(4 * 37);  // odd lengths, unaligned starts, at the end of the allocation
        std::vector<char> grad(4 * 37), param(4 * 37);
        for (uint64_t n = 0; n <= 37; n++) {
          const size_t bytes = dtype == CSD_F32 ? 4 : 2;
          float *const at[] = {s.data() + 37 - n, s.data() + 74 - n, s.data() + 111 - n, s.data() + 148 - n};
          OK(csd_update(&m.hyper, isa, n, grad.data() + bytes * (37 - n), static_cast<int32_t>(dtype), at, sections,
                        param.data() + bytes * (37 - n), static_cast<int32_t>(dtype), nullptr));
        }
      }
    }
  CHECK(csd_isa_use(best + 1, nullptr) == CSD_EINVAL);
}

// Rules with one and two sections, which tests/native/rules/rules.h adds: on devices, in windows and checksums, and
// when a store is opened again.
void rules_of_few_sections() {
  for (const uint32_t sections : {1u, 2u}) {
    const File a, b;
    Model m({file(a), file(b)}, sections), same({ram(), ram()}, sections);
    std::vector<csd_tile_state> states(kTiles);
    std::vector<uint32_t> sums(2 * sections * kTiles);
    for (int step = 0; step < 3; step++) {
      OK(m.step());
      OK(same.step());
    }
    CHECK(m.state() == same.state());
    float master = 0, momentum = 0;  // of the first element, whose gradient is -3
    for (int step = 0; step < 3; step++) {
      momentum = sections == 2 ? momentum * 0.9f - 3 : -3;
      master = master - 0.01f * momentum;
    }
    CHECK(m.windows[0][0] == master && reinterpret_cast<const float *>(m.params[0].data())[0] == master);
    if (sections == 2) CHECK(m.windows[1][0] == momentum);

    m.windows[sections - 1][5] = same.windows[sections - 1][5] = 7;
    OK(csd_engine_edited(m.engine, m.tiles.data(), 1, &m.error));
    OK(m.step());
    OK(same.step());
    OK(csd_engine_remap(m.engine, 0, &m.error));
    OK(csd_engine_tiles(m.engine, 0, kTiles, states.data(), sums.data(), &m.error));
    OK(m.close_engine());
    Model again({file(a), file(b)}, sections, CSD_F32, 2, states.data(), sums.data());
    for (Model *model : {&again, &same}) OK(model->step());  // their gradients are the same
    CHECK(again.state() == same.state());

    csd_hyper &hyper = again.hyper;
    for (const uint32_t rule : {sections == 2 ? kPlain : kHeavy, uint32_t{CSD_ADAMW}, uint32_t{CSD_AMSGRAD}}) {
      hyper.rule = rule;
      CHECK(again.begin() == CSD_EINVAL && strstr(again.error.text, "which update rule"));
    }
    hyper.rule = 7;
    CHECK(again.begin() == CSD_EINVAL && strcmp(again.error.text, "no update rule 7") == 0);
    CHECK(again.state() == same.state());  // nothing has changed
  }
}

// Each step begins with the tiles that the previous one has left in buffers.
void to_and_fro() {
  File a, b, c;
  Model m({file(a, 3, 12 * kTile), file(b, 2, 1 << 30), file(c, 1, -1)}), same({ram(), ram(), ram()});
  uint64_t read[3] = {};
  for (int i = 0; i < 12; i++) {
    if (i == 3) m.extend(), same.extend();
    std::reverse(m.tiles.begin(), m.tiles.end());
    if (i == 5) {
      const std::vector<std::vector<char>> before = m.params;
      OK(m.begin());
      OK(m.push(0, m.tiles.size() / 2));
      OK(csd_engine_finish(m.engine, 0, &m.error));
      m.params = before;
      for (size_t p = 0; p < before.size(); p++) m.table[p].param = m.params[p].data();
    }
    OK(m.step());
    OK(same.step());
    if (i == 8) CHECK(m.state() == same.state());
    OK(csd_engine_wait_writes(m.engine, &m.error));
    for (uint32_t d = 0; d < 3; d++) {
      csd_stats stats;
      OK(csd_engine_stats(m.engine, d, &stats, &m.error));
      read[d] = stats.read_bytes;
    }
  }
  const uint64_t all = 2 * kTiles / 3 * 12 * kTile;
  CHECK(0 < read[0] && read[0] < all && read[1] == 0 && read[2] == all);
  CHECK(m.state() == same.state());
}

// A step that is given up leaves the state as it was, at whatever point this happens.
void undo() {
  const File a, b;
  Model m({file(a), file(b, 4)});
  OK(m.step());
  const std::vector<float> before = m.state();
  for (size_t pushed = 0; pushed <= m.tiles.size(); pushed++) {
    OK(m.begin());
    OK(m.push(0, pushed));
    if (pushed % 2) {
      OK(csd_engine_finish(m.engine, 0, &m.error));
    } else if (pushed < m.tiles.size()) {
      CHECK(csd_engine_finish(m.engine, 1, &m.error) == CSD_ESTATE);
    } else {
      OK(csd_engine_finish(m.engine, 0, &m.error));
    }
    uint32_t undone[kTiles];
    uint64_t elems[kTiles];
    const uint32_t n_undone = csd_engine_undone(m.engine, undone, elems, kTiles);
    CHECK(n_undone <= pushed);
    for (uint32_t i = 0; i < n_undone; i++) CHECK(undone[i] < pushed && elems[i] == kTile);
    CHECK(m.state() == before);
  }
  OK(m.step());
  CHECK(m.state() != before);
}

// A complete step can be taken back, even if its states are still being written, or were read or edited.
void taken_back() {
  const File a, b, c;
  Model m({file(a), paced(file(b, 4)), file(c, 3, 12 * kTile)}), same({ram()}), in_place({file(a)}, 3, CSD_F32, 1);
  CHECK(csd_engine_take_back(m.engine, &m.error) == CSD_ESTATE);
  OK(m.step());
  OK(same.step());
  for (int i = 0; i < 12; i++) {
    const std::vector<float> before = m.state();
    const std::vector<std::vector<char>> params = m.params;
    OK(m.step());
    if (i % 3 == 1) CHECK(m.state() != before);
    if (i % 3 == 2) {
      const uint32_t edited[] = {1, 4};
      OK(csd_engine_remap(m.engine, 0, &m.error));
      for (const uint32_t tile : edited) m.windows[1][tile * kTile] = 1e9f;
      OK(csd_engine_edited(m.engine, edited, 2, &m.error));
    }
    OK(csd_engine_take_back(m.engine, &m.error));
    CHECK(csd_engine_take_back(m.engine, &m.error) == CSD_ESTATE);
    uint32_t undone[kTiles];
    uint64_t elems[kTiles];
    CHECK(csd_engine_undone(m.engine, undone, elems, kTiles) == kTiles);
    CHECK(m.state() == before);
    m.params = params;
    for (size_t p = 0; p < params.size(); p++) m.table[p].param = m.params[p].data();
    if (i % 2) continue;
    OK(m.step());
    OK(same.step());
    CHECK(m.params == same.params && m.state() == same.state());
  }
  for (Model *model : {&same, &in_place}) {
    OK(model->step());
    CHECK(csd_engine_take_back(model->engine, &model->error) == CSD_EINVAL);
  }
}

// Tiles go back to the slots from which a step has moved them, whatever was written to their windows since.
void gone_back() {
  const File a, b;
  Model m({file(a), paced(file(b, 4))}), resident({ram()}), in_place({file(a)}, 3, CSD_F32, 1);
  OK(m.step());
  for (int i = 0; i < 4; i++) {
    const std::vector<float> before = m.state();
    const std::vector<std::vector<char>> params = m.params;
    OK(m.step());
    const uint32_t tiles[] = {0, 1, 4};
    if (i % 2) {
      OK(csd_engine_remap(m.engine, i == 3, &m.error));
      for (const uint32_t tile : tiles) m.windows[1][tile * kTile] = 1e9f;
      OK(csd_engine_edited(m.engine, tiles, 3, &m.error));
    }
    const std::vector<float> after = m.state();
    OK(csd_engine_go_back(m.engine, tiles, 3, &m.error));
    CHECK(csd_engine_take_back(m.engine, &m.error) == CSD_ESTATE);
    const std::vector<float> mixed = m.state();
    CHECK(mixed != after && mixed != before);
    OK(csd_engine_go_back(m.engine, tiles, 3, &m.error));  // there and back again
    std::vector<uint32_t> others;
    for (uint32_t tile = 0; tile < kTiles; tile++) others.push_back(tile);
    OK(csd_engine_go_back(m.engine, others.data(), kTiles, &m.error));
    CHECK(m.state() == before);
    m.params = params;
    for (size_t p = 0; p < params.size(); p++) m.table[p].param = m.params[p].data();
  }
  const uint32_t beyond[] = {0, kTiles};
  CHECK(csd_engine_go_back(m.engine, beyond, 2, &m.error) == CSD_EINVAL);
  for (Model *model : {&resident, &in_place}) {
    OK(model->step());
    CHECK(csd_engine_go_back(model->engine, beyond, 1, &model->error) == CSD_EINVAL);
  }
}

// Steps begun as guesses give the same bits as others, and change nothing visible until they are released.
void guesses() {
  for (const uint32_t dtype : {CSD_F32, CSD_F16, CSD_BF16})
    for (const uint32_t sections : {3u, 4u}) {
      const File a, b, c, d;
      const csd_device slow = paced(file(c, 3));
      Model m({file(a, 3), file(b, 4, 12 * kTile), slow, in_slots(d, 3)}, sections, dtype),
          same({ram()}, sections, dtype);
      for (Model *model : {&m, &same}) OK(model->step());
      for (uint32_t i = 0; i < 16; i++) {
        m.same_order = i % 5 != 0;
        for (Model *model : {&m, &same})
          for (uint32_t p = 0; p < model->table.size(); p++) {
            model->fill(model->grads[p], i + p);
            csd_param &row = model->table[p];
            row.grad = (i + p) % 5 ? model->grads[p].data() : nullptr;
            row.master = i % 3 ? CSD_IN_SECTION : dtype == CSD_F32 ? CSD_FROM_PARAM : CSD_UNLESS_SET;
            if (i % 3 == 0) model->params[p][8 * i + 1] ^= 1;  // as if the user had set a parameter
          }
        const std::vector<std::vector<char>> before = m.params;
        const std::vector<float> state = m.state();
        OK(m.begin_guess());
        OK(m.push_early(i % 3, m.tiles.size(), 1 + i % 4));
        if (i % 2) usleep(1000);
        CHECK(m.unchanged());
        const bool reads = i % 3 == 0;
        // Parameter 3 has tiles 6 and 7. Was one of them pushed?
        const bool pushed = !m.holds[6].empty() || !m.holds[7].empty();
        if (pushed && m.table[3].grad) {
          char &grad = m.grads[3][m.holds[6].empty() ? m.grads[3].size() / 4 * (dtype == CSD_F32 ? 4 : 2) - 401 : 0];
          char &param = m.params[3][m.holds[6].empty() ? m.params[3].size() / 4 * (dtype == CSD_F32 ? 4 : 2) - 401 : 0];
          grad ^= 1;
          CHECK(!m.unchanged());
          grad ^= 1;
          param ^= 1;
          CHECK(m.unchanged() == !reads);
          param ^= 1;
          CHECK(m.unchanged());
        }
        CHECK(m.params == before);
        if (i % 4 == 2) {  // the guess was wrong
          OK(csd_engine_finish(m.engine, 0, &m.error));
          CHECK(csd_engine_undone(m.engine, nullptr, nullptr, 0) == 0 && m.params == before && m.state() == state);
          for (auto &hold : m.holds) hold.clear();
          OK(m.step());
        } else {
          std::vector<uint32_t> order(m.tiles.rbegin(), m.tiles.rend());
          if (i % 2) order.resize(order.size() / 2);
          OK(m.release(order));
          int32_t given;
          for (const uint32_t tile : m.tiles)
            if (!m.holds[tile].empty()) OK(csd_engine_params_ready(m.engine, &tile, 1, 1, &given, &m.error));
            else OK(csd_engine_push(m.engine, tile, nullptr, &m.error));
          OK(csd_engine_finish(m.engine, 1, &m.error));
          for (auto &hold : m.holds) hold.clear();
          if (i % 4 == 3) std::reverse(m.tiles.begin(), m.tiles.end());
        }
        OK(same.step());
        CHECK(m.params == same.params);
        if (i % 3 == 0) CHECK(m.state() == same.state());
      }
      CHECK(m.state() == same.state());
    }
}

// After a release, tiles that have not begun are processed in its order. The next step finds in buffers the tiles with
// which it begins.
void order_of_a_release() {
  const File a;
  Model m({file(a, 1, -1)}), kept({file(a, 2, 8 * 12 * kTile)});
  csd_event events[3 * kTiles];
  csd_engine_events(m.engine, events, 0);
  const std::vector<uint32_t> order = {7, 3, 11}, flow = {0, 7, 3, 11, 1, 2, 4, 5, 6, 8, 9, 10};
  for (const bool early : {false, true}) {
    OK(m.begin_guess());
    if (early) OK(m.push_early(3, 9));
    OK(m.release(order));
    for (size_t i = 0; i < m.tiles.size(); i++)
      if (!early || i < 3 || i >= 9) OK(m.push(i, i + 1));
    OK(csd_engine_finish(m.engine, 1, &m.error));
    OK(csd_engine_wait_writes(m.engine, &m.error));
    const uint32_t n = csd_engine_events(m.engine, events, 3 * kTiles);
    CHECK(n == 3 * kTiles);
    for (const uint32_t kind : {CSD_READ, CSD_UPDATE, CSD_WRITE}) {
      std::vector<uint32_t> found;
      for (const csd_event &event : events)
        if (event.kind == kind) found.push_back(event.tile);
      CHECK(found == flow);
    }
  }
  OK(m.close_engine());

  // With buffers for ten of the twelve tiles, fewer are read if the engine is told the order of the next step.
  uint64_t read[2] = {};
  for (const int32_t same_order : {0, 1})
    for (int i = 0; i < 12; i++) {
      kept.same_order = same_order;
      OK(kept.begin_guess());
      OK(kept.release(kept.tiles));
      OK(kept.push(0, kTiles));
      OK(csd_engine_finish(kept.engine, 1, &kept.error));
      OK(csd_engine_wait_writes(kept.engine, &kept.error));
      csd_stats stats;
      OK(csd_engine_stats(kept.engine, 0, &stats, &kept.error));
      if (i > 1) read[same_order] += stats.read_bytes;
    }
  CHECK(0 < read[1] && read[1] < read[0]);
}

// CSD_AS_PUSHED, with gradients whose addresses are known only when a tile is pushed, gives the bits of an ordinary
// step. Even with a single buffer, each tile can be waited for before the next one is pushed.
void as_pushed() {
  for (const uint32_t dtype : {CSD_F32, CSD_BF16})
    for (const uint32_t buffers : {1u, 4u}) {
      const File a, b, c;
      Model m({file(a, buffers), file(b, buffers, 3 * 12 * kTile), in_slots(c, buffers)}, 3, dtype),
          same({ram()}, 3, dtype);
      csd_event events[3 * kTiles];
      csd_engine_events(m.engine, events, 0);
      for (uint32_t i = 0; i < 8; i++) {
        for (Model *model : {&m, &same})
          for (uint32_t p = 0; p < model->table.size(); p++) {
            model->fill(model->grads[p], i + p);
            model->table[p].grad = (i + p) % 5 ? model->grads[p].data() : nullptr;
          }
        const std::vector<std::vector<char>> before = m.params;
        const std::vector<float> state = i % 4 == 2 ? m.state() : std::vector<float>();
        std::vector<csd_param> rows = m.table;
        for (csd_param &row : rows) row.grad = &rows;  // any address, even if there turns out to be no gradient
        OK(csd_engine_begin(m.engine, rows.data(), rows.size(), &m.hyper, 1, m.tiles.data(), kTiles, CSD_AS_PUSHED,
                            &m.error));
        std::vector<uint32_t> flow;
        for (uint32_t t = 0; t < kTiles; t++) flow.push_back((7 * t + i) % kTiles);
        if (i % 4 == 2) flow.resize(5);
        int32_t given;
        for (const uint32_t tile : flow) {
          const void *const grad = m.table[tile / 2].grad;
          OK(push_at(m.engine, tile, &grad, &m.error));
          if (i % 2 == 0) OK(csd_engine_params_ready(m.engine, &tile, 1, 1, &given, &m.error));
          CHECK(push_at(m.engine, tile, &grad, &m.error) == CSD_EINVAL);
        }
        if (i % 4 == 2) {  // given up
          OK(csd_engine_finish(m.engine, 0, &m.error));
          CHECK(csd_engine_undone(m.engine, nullptr, nullptr, 0) == 5 && m.state() == state);
          m.params = before;
          for (size_t p = 0; p < before.size(); p++) m.table[p].param = m.params[p].data();
          OK(m.step());
        } else {
          OK(csd_engine_finish(m.engine, 1, &m.error));
          OK(csd_engine_wait_writes(m.engine, &m.error));
          const uint32_t n = csd_engine_events(m.engine, events, 3 * kTiles);  // tiles kept in buffers are not read
          std::vector<uint32_t> updated;
          for (uint32_t e = 0; e < n; e++)
            if (events[e].kind == CSD_UPDATE) updated.push_back(events[e].tile);
          if (i % 2 == 0) CHECK(updated == flow);
        }
        OK(same.step());
        CHECK(m.params == same.params);
      }
      CHECK(m.state() == same.state());
      // Calls outside of a step.
      const void *const grad = m.grads[0].data();
      const uint32_t none = 0, beyond = 99;
      int32_t ready;
      CHECK(push_at(m.engine, 0, &grad, &m.error) == CSD_ESTATE);
      CHECK(csd_engine_drop_grads(m.engine, &none, 1, &m.error) == CSD_ESTATE);
      // A gradient can be dropped before its tiles are pushed, but not afterwards.
      OK(m.begin());
      OK(csd_engine_drop_grads(m.engine, &none, 1, &m.error));
      OK(m.push(0, m.tiles.size()));
      CHECK(csd_engine_drop_grads(m.engine, &none, 1, &m.error) == CSD_EINVAL);
      CHECK(csd_engine_drop_grads(m.engine, &beyond, 1, &m.error) == CSD_EINVAL);
      OK(csd_engine_params_ready(m.engine, m.tiles.data(), kTiles, 1, &ready, &m.error));
      CHECK(m.params[0] == same.params[0] && m.params[1] != same.params[1]);
      OK(csd_engine_finish(m.engine, 0, &m.error));
      m.params = same.params;
      for (size_t p = 0; p < m.params.size(); p++) m.table[p].param = m.params[p].data();
      CHECK(csd_engine_begin(m.engine, m.table.data(), m.table.size(), &m.hyper, 1, m.tiles.data(), kTiles, 3,
                             &m.error) == CSD_EINVAL);
      m.table[0].grad = nullptr;
      m.table[1].grad = grad;
      m.table[1].topk = 0.5;
      m.table[1].topk_dtype = CSD_BF16;
      OK(m.begin());
      CHECK(push_at(m.engine, 0, &grad, &m.error) == CSD_EINVAL);
      CHECK(push_at(m.engine, 2, &grad, &m.error) == CSD_EINVAL);
      OK(csd_engine_finish(m.engine, 0, &m.error));
      CHECK(m.params == same.params);
    }
}

// Makes the file descriptor that the engine uses read-only during the lifetime of this object.
struct ReadOnly {
  const int fd, writable;
  explicit ReadOnly(int of) : fd(of), writable(dup(of)) {
    const int readable = open(("/proc/self/fd/" + std::to_string(writable)).c_str(), O_RDONLY);
    CHECK(readable >= 0 && dup2(readable, fd) == fd);
    close(readable);
  }
  ~ReadOnly() {
    CHECK(dup2(writable, fd) == fd);
    close(writable);
  }
};

// Guesses: calls out of order, tiles that cannot be pushed early, and failures.
void guesses_gone_wrong() {
  const File a, b, c;
  Model m({file(a), file(b)}), in_memory({ram()}), torn({file(c)}, 3, CSD_F32, 1);
  for (Model *model : {&in_memory, &torn}) {
    OK(model->begin());
    CHECK(model->push_early(0, 1) == CSD_EINVAL && strstr(model->error.text, "could not be undone"));
    OK(csd_engine_finish(model->engine, 0, &model->error));
  }
  OK(m.step());
  const std::vector<float> state = m.state();
  const std::vector<std::vector<char>> before = m.params;
  const auto nothing_changed = [&] {
    CHECK(m.params == before && m.state() == state);
    CHECK(csd_engine_undone(m.engine, nullptr, nullptr, 0) == 0);
  };
  int32_t answer;
  const void *grad = m.table[0].grad;
  std::vector<char> hold(8 * kTile);
  const auto early = [&](uint32_t tile, const void *from, void *at) {
    return push_at(m.engine, tile, &from, &m.error, at);
  };
  CHECK(csd_engine_hold_bytes(m.engine, 0) == 0 && early(0, grad, hold.data()) == CSD_ESTATE);
  CHECK(csd_engine_unchanged(m.engine, m.table.data(), m.table.size(), &answer, &m.error) == CSD_ESTATE);
  CHECK(m.release(m.tiles) == CSD_ESTATE);

  OK(m.begin_guess());
  CHECK(csd_engine_hold_bytes(m.engine, 0) == hold.size() && csd_engine_hold_bytes(m.engine, 999) == 0);
  CHECK(early(0, nullptr, hold.data()) == CSD_EINVAL);
  const csd_push without{nullptr, nullptr, nullptr, 0, nullptr, hold.data(), nullptr},
      twice{hold.data(), hold.data(), nullptr, 0, &grad, nullptr, nullptr};
  for (const csd_push *how : {&without, &twice}) CHECK(csd_engine_push(m.engine, 0, how, &m.error) == CSD_EINVAL);
  OK(m.push_early(0, 3));
  CHECK(early(0, grad, hold.data()) == CSD_EINVAL && m.push(0, 1) == CSD_EINVAL && m.push(5, 6) == CSD_ESTATE);
  OK(csd_engine_params_ready(m.engine, m.tiles.data(), 1, 0, &answer, &m.error));
  CHECK(!answer && csd_engine_params_ready(m.engine, m.tiles.data(), 1, 1, &answer, &m.error) == CSD_ESTATE);
  uint32_t tile;
  CHECK(csd_engine_pull(m.engine, &tile, &m.error) == CSD_ESTATE);
  CHECK(csd_engine_finish(m.engine, 1, &m.error) == CSD_ESTATE);
  nothing_changed();

  OK(m.begin_guess());
  OK(m.push_early(0, m.tiles.size()));
  CHECK(csd_engine_finish(m.engine, 1, &m.error) == CSD_ESTATE && strstr(m.error.text, "never released"));
  nothing_changed();

  // The caller owns images, so a tile pushed with one can be pulled even before the release.
  OK(m.begin_guess());
  OK(m.push_early(0, 2));
  OK(push_images(m.engine, 3, hold.data(), hold.data() + 4 * kTile, &m.error));
  OK(csd_engine_pull(m.engine, &tile, &m.error));
  CHECK(tile == 3 && m.params == before);
  OK(csd_engine_finish(m.engine, 0, &m.error));
  CHECK(m.params == before && m.state() == state);

  OK(m.begin_guess());
  OK(m.push_early(0, 2));
  CHECK(csd_engine_release(m.engine, m.table.data(), 1, nullptr, 0, &m.error) == CSD_EINVAL);
  CHECK(m.release({0, 1, 0}) == CSD_EINVAL && m.release({999}) == CSD_EINVAL);
  for (auto change : {+[](csd_param &row) { row.seed++; }, +[](csd_param &row) { row.grad = nullptr; },
                      +[](csd_param &row) { row.param = nullptr; }}) {
    const csd_param row = m.table[1];
    change(m.table[1]);
    CHECK(m.release(m.tiles) == CSD_EINVAL);
    m.table[1] = row;
  }
  CHECK(m.params == before);
  OK(m.release(m.tiles));
  CHECK(m.release(m.tiles) == CSD_ESTATE && m.push_early(2, 3) == CSD_ESTATE);
  CHECK(csd_engine_unchanged(m.engine, m.table.data(), m.table.size(), &answer, &m.error) == CSD_ESTATE);
  OK(csd_engine_params_ready(m.engine, m.tiles.data(), 2, 1, &answer, &m.error));
  CHECK(answer && m.params != before);
  OK(csd_engine_finish(m.engine, 0, &m.error));  // undone after the release: lists tiles with new parameters
  CHECK(csd_engine_undone(m.engine, nullptr, nullptr, 0) == 2);
  m.params = before;
  for (size_t p = 0; p < before.size(); p++) m.table[p].param = m.params[p].data();
  CHECK(m.state() == state);

  for (int i = 0; i < 10; i++) {  // a drive that cannot be written to
    OK(m.begin_guess());
    int status;
    {
      const ReadOnly now(b.fd);
      OK(m.push_early(0, m.tiles.size()));
      do {  // the write may not have failed yet
        status = csd_engine_unchanged(m.engine, m.table.data(), m.table.size(), &answer, &m.error);
        CHECK(status == CSD_OK ? answer : status == CSD_EIO && m.error.device == 1);
      } while (i % 2 && status == CSD_OK);
      if (i % 2) CHECK(m.release(m.tiles) == CSD_EIO && m.error.os_errno == EBADF);
      status = csd_engine_finish(m.engine, 0, &m.error);
    }
    CHECK(status == CSD_EIO || (i % 2 == 0 && status == CSD_OK));
    nothing_changed();
  }
  OK(m.begin_guess());
  OK(m.push_early(0, m.tiles.size()));
  OK(m.close_engine());
  CHECK(m.params == before);
}

// A thread that waits for parameters while the step ends and the next one begins learns how the step ended.
void who_waits() {
  const File a;
  Model m({paced(file(a))});
  for (int i = 0; i < 12; i++) {
    OK(m.begin());
    OK(m.push(0, m.tiles.size()));
    std::vector<std::thread> waiting;
    std::atomic<int> there{0};
    for (int t = 0; t < 3; t++)
      waiting.emplace_back([&m, &there] {
        const std::vector<uint32_t> tiles = m.tiles;
        csd_error error;
        int32_t given = 0;
        there++;
        const int status =
            csd_engine_params_ready(m.engine, tiles.data(), static_cast<uint32_t>(tiles.size()), 1, &given, &error);
        // CSD_EINVAL: the thread was so late that it asked for tiles of the next step, which are not pushed.
        CHECK(status == CSD_OK ? given : status == CSD_ESTATE || status == CSD_EINVAL);
      });
    while (there < 3) usleep(100);
    usleep(2000);
    const bool keep = i % 2;
    OK(csd_engine_finish(m.engine, keep, &m.error));
    OK(m.begin());
    OK(csd_engine_finish(m.engine, 0, &m.error));
    for (std::thread &thread : waiting) thread.join();
  }
}

// Edits to windows that are not open reach the device with the next step, and not before.
void edits() {
  const File a;
  std::vector<csd_tile_state> stored(kTiles);
  std::vector<uint32_t> sums(kTiles * 2 * 3);
  std::vector<float> last;
  {
    Model m({file(a)}), same({ram()});
    for (Model *model : {&m, &same}) OK(model->step());
    OK(csd_engine_remap(m.engine, 0, &m.error));
    const uint32_t edited[] = {0, 3};
    for (int step = 0; step < 4; step++) {
      for (Model *model : {&m, &same})
        for (const uint32_t tile : edited)
          for (uint64_t i = 0; i < kTile; i += 5) model->windows[1][tile * kTile + i] += 0.5f;
      OK(csd_engine_edited(m.engine, edited, 2, &m.error));
      if (step == 1) {  // the edit survives a step that is undone
        OK(m.begin());
        OK(m.push(0, 5));
        OK(csd_engine_finish(m.engine, 0, &m.error));
      }
      for (Model *model : {&m, &same}) OK(model->step());
      if (step % 2) OK(m.step());  // a second step writes to the edited slot, where nothing of the edit may remain
      if (step % 2) OK(same.step());
      OK(csd_engine_remap(m.engine, 0, &m.error));
      CHECK(memcmp(m.windows[1], same.windows[1], 4 * kTile * kTiles) == 0);
    }
    // An edit to a window that was not remapped since the last step has no effect.
    OK(m.step());
    OK(same.step());
    OK(csd_engine_wait_writes(m.engine, &m.error));
    m.windows[1][0] = 1e9f;
    OK(csd_engine_edited(m.engine, edited, 2, &m.error));
    OK(m.step());
    OK(same.step());
    // Nor has an edit to such a window that is open: the checksums of the current slot stay valid.
    OK(csd_engine_remap(m.engine, 1, &m.error));
    OK(m.step());
    OK(same.step());
    OK(csd_engine_wait_writes(m.engine, &m.error));
    m.windows[1][0] = 1e9f;
    OK(csd_engine_edited(m.engine, edited, 2, &m.error));
    OK(csd_engine_remap(m.engine, 0, &m.error));
    OK(m.step());
    OK(same.step());
    OK(csd_engine_wait_writes(m.engine, &m.error));
    OK(csd_engine_tiles(m.engine, 0, kTiles, stored.data(), sums.data(), &m.error));
    for (const csd_tile_state &tile : stored) CHECK(tile.summed);
    last = same.state();
  }
  // Another engine opens the store and finds the same state.
  Model again({file(a)}, 3, CSD_F32, 2, stored.data(), sums.data());
  OK(csd_engine_remap(again.engine, 0, &again.error));
  for (uint32_t s = 0; s < 3; s++)
    CHECK(memcmp(again.windows[s], last.data() + s * kTile * kTiles, 4 * kTile * kTiles) == 0);
  again.windows[2][7] = 5;  // never reported, so it does not reach the device
  OK(again.step());
  // A tile is damaged in its second chunk: the step is undone, after the parameters of the first chunk were written.
  OK(csd_engine_remap(again.engine, 0, &again.error));
  const std::vector<float> before(again.windows[1], again.windows[1] + kTile * kTiles);
  OK(csd_engine_tiles(again.engine, 0, kTiles, stored.data(), sums.data(), &again.error));
  const off_t at = static_cast<off_t>((2 * 5 + stored[5].slot) * 3 * 4 * kTile + 4 * kTile + 4 * kSumElems + 400);
  char byte;
  CHECK(pread(a.fd, &byte, 1, at) == 1);
  byte ^= 1;
  CHECK(pwrite(a.fd, &byte, 1, at) == 1);
  CHECK(again.step() == CSD_EDAMAGED && again.error.tile == 5 && again.error.device == 0 &&
        strstr(again.error.text, "section 1 of tile 5"));
  uint32_t undone[kTiles];
  uint64_t elems[kTiles];
  const uint32_t n = csd_engine_undone(again.engine, undone, elems, kTiles);
  for (uint32_t i = 0; i < n; i++) CHECK(elems[i] == (undone[i] == 5 ? kSumElems : kTile));
  CHECK(std::find(undone, undone + n, 5u) != undone + n);
  byte ^= 1;
  CHECK(pwrite(a.fd, &byte, 1, at) == 1);
  OK(csd_engine_remap(again.engine, 0, &again.error));
  CHECK(memcmp(again.windows[1], before.data(), 4 * kTile * kTiles) == 0);
  OK(again.step());
}

// Top-K with residuals: files and memory agree, an undone step keeps residuals, malformed entries change nothing.
void sparse_steps() {
  for (const uint32_t dtype : {CSD_F32, CSD_F16, CSD_BF16}) {
    const File a, b;
    Model files({file(a), file(b, 4)}, 3, dtype), memory({ram(), ram()}, 3, dtype);
    std::vector<std::vector<uint16_t>> owed[2];
    Model *const models[] = {&files, &memory};
    for (int i = 0; i < 2; i++) {
      owed[i].assign(models[i]->params.size(), std::vector<uint16_t>(kParam));
      for (size_t p = 0; p < models[i]->table.size(); p++) {
        csd_param &param = models[i]->table[p];
        param.topk = p % 3 ? 0.05 * static_cast<double>(p) : 0;  // some are dense
        param.topk_dtype = dtype == CSD_F16 ? CSD_F16 : CSD_BF16;
        param.residual = p % 2 ? owed[i][p].data() : nullptr;
      }
    }
    for (uint32_t step = 1; step <= 4; step++) {
      for (Model *m : models) {
        for (csd_param &param : m->table) param.seed = step;
        OK(m->step());
      }
      CHECK(files.state() == memory.state() && owed[0] == owed[1]);
    }
    const std::vector<std::vector<uint16_t>> before = owed[0];
    for (size_t pushed = 0; pushed <= files.tiles.size(); pushed += 3) {
      OK(files.begin());
      OK(files.push(0, pushed));
      OK(csd_engine_finish(files.engine, 0, &files.error));
      CHECK(owed[0] == before && files.state() == memory.state());
    }

    std::vector<char> grad(4 * kTile), param(4 * kTile);
    for (size_t words = 0; words < 64; words += 16)
      for (const uint32_t count : {0u, 1u, 15u, 16u, 31u, 0xffffffffu}) {
        std::vector<uint32_t> entries(words + 1);  // one more, so that there is an address; the memory ends here
        for (size_t i = 0; i < words; i++) entries[1 + i] = static_cast<uint32_t>(i == 0 ? count : 7 * i);
        OK(files.begin());
        OK(push_images(files.engine, 2, grad.data(), param.data(), &files.error, entries.data() + 1, words));
        uint32_t tile;
        const bool well = words == (uint64_t{count} + 16) / 16 * 16;
        CHECK(csd_engine_pull(files.engine, &tile, &files.error) == (well ? CSD_OK : CSD_EINVAL));
        CHECK(well || strstr(files.error.text, "malformed"));
        csd_engine_finish(files.engine, 0, &files.error);
        CHECK(files.state() == memory.state());
      }
  }
}

// Threads that have nothing else to do share the update of a tile with many chunks: the same numbers and counts.
void shared_updates() {
  constexpr uint64_t kElems = 16 * 1024, kChunk = 1024,
                     kParts[] = {1, 5000, kElems - 5101};  // a gap behind the last one
  const uint32_t threads = csd_threads_used();
  const auto run = [&](uint32_t n_threads, bool in_slots_) {
    OK(csd_threads_use(n_threads, nullptr));
    const File a;
    const csd_device device = in_slots_ ? in_slots(a, 3) : ram();
    csd_error error{};
    csd_engine *engine = nullptr;
    OK(csd_engine_create(&device, 1, &engine, &error));
    std::vector<csd_piece> pieces;
    std::vector<std::vector<float>> params, grads;
    std::vector<uint16_t> owed(kElems);
    std::vector<csd_param> table;
    csd_hyper hyper{CSD_ADAMW, {0.999f, 0.9f, 0.1f, 0.999f, 0.001f, 0.01f, 1.0f, 1e-8f, 1.0f}};
    uint64_t at = 0;
    for (const uint64_t n : kParts) {
      pieces.push_back({static_cast<uint32_t>(pieces.size()), 0, 0, at, n});
      at += n;
      params.emplace_back(n, 1.0f);
      grads.emplace_back(n);
      for (uint64_t i = 0; i < n; i++) grads.back()[i] = i % 1000 ? static_cast<float>(i % 97) - 48 : INFINITY;
    }
    for (size_t i = 0; i < params.size(); i++)
      table.push_back({grads[i].data(), params[i].data(), CSD_F32, CSD_F32, 0, 0, 0, nullptr, 0, 0});
    table[1].topk = 0.05, table[1].topk_dtype = CSD_BF16, table[1].residual = owed.data();
    const uint64_t offset = 0;
    const csd_extent extent{kElems, 1, 3, 2, nullptr, kChunk, nullptr, &offset, pieces.data(), pieces.size()};
    float *windows[4] = {};
    OK(csd_engine_extend(engine, &extent, windows, &error));
    std::vector<float> found;
    for (int step = 0; step < 20; step++) {
      const uint32_t tile = 0;
      OK(csd_engine_begin(engine, table.data(), table.size(), &hyper, 1, &tile, 1, 0, &error));
      OK(csd_engine_push(engine, tile, nullptr, &error));
      OK(csd_engine_finish(engine, 1, &error));
      csd_stats stats;
      OK(csd_engine_stats(engine, 0, &stats, &error));
      CHECK(stats.updated == kElems - 100 && stats.pull_bytes == 4 * stats.updated && stats.nonfinite > 0);
      found.push_back(static_cast<float>(stats.nonfinite + stats.push_bytes));
    }
    OK(csd_engine_remap(engine, 1, &error));
    for (uint32_t s = 0; s < 3; s++) found.insert(found.end(), windows[s], windows[s] + kElems);
    for (const std::vector<float> &param : params) found.insert(found.end(), param.begin(), param.end());
    found.insert(found.end(), owed.begin(), owed.end());
    OK(csd_engine_close(engine, &error));
    for (uint32_t s = 0; s < 3; s++) csd_window_release(windows[s], kElems);
    return found;
  };
  const std::vector<float> alone = run(1, false);
  for (const bool in_slots_ : {false, true}) {
    const std::vector<float> together = run(4, in_slots_);
    CHECK(together.size() == alone.size() && memcmp(together.data(), alone.data(), 4 * alone.size()) == 0);
  }
  OK(csd_threads_use(threads, nullptr));
}

// One slot gives the same numbers in half the space, but a step that is interrupted cannot be undone.
void in_place() {
  const File a;
  Model m({file(a)}, 3, CSD_F32, 1), same({ram()});
  for (int step = 0; step < 3; step++) {
    OK(m.step());
    OK(same.step());
    if (step == 1) CHECK(m.state() == same.state());
  }
  OK(m.begin());
  OK(csd_engine_finish(m.engine, 0, &m.error));  // nothing was written yet
  CHECK(m.state() == same.state());
  OK(m.begin());
  OK(m.push(0, 5));
  usleep(2000);
  const int status = csd_engine_finish(m.engine, 0, &m.error);
  CHECK(status == CSD_ETORN || (status == CSD_OK && m.state() == same.state()));
}

void wrong_calls() {
  const File a;
  csd_engine *none = nullptr;
  csd_error error;
  const csd_device bad[] = {{"tape", -1, 8, 4096},   {nullptr, -1, 8, 4096}, {"file", -1, 8, 4096},
                            {"file", a.fd, 0, 4096}, {"file", a.fd, 8, 100}, {"file", a.fd, 8, uint64_t{1} << 63}};
  for (const csd_device &d : bad) CHECK(csd_engine_create(&d, 1, &none, &error) == CSD_EINVAL && error.text[0]);
  CHECK(csd_engine_create(bad, 0, &none, nullptr) == CSD_EINVAL);

  Model m({file(a)});
  uint32_t tile;
  CHECK(csd_engine_push(m.engine, 0, nullptr, &error) == CSD_ESTATE);
  CHECK(csd_engine_pull(m.engine, &tile, &error) == CSD_ESTATE);
  CHECK(csd_engine_finish(m.engine, 1, &error) == CSD_ESTATE);
  OK(m.begin());
  CHECK(m.begin() == CSD_ESTATE);
  CHECK(csd_engine_remap(m.engine, 1, &error) == CSD_ESTATE);
  CHECK(csd_engine_push(m.engine, 9999, nullptr, &error) == CSD_EINVAL);
  OK(m.push(0, 1));
  CHECK(m.push(0, 1) == CSD_EINVAL);
  OK(m.push(1, m.tiles.size()));
  OK(csd_engine_finish(m.engine, 1, &error));
  const csd_piece over{0, 0, 0, UINT64_MAX - 3, 8};
  const uint64_t offset = 0;
  const csd_extent extent{kTile, 1, 3, 2, nullptr, kSumElems, nullptr, &offset, &over, 1};
  float *windows[4];
  CHECK(csd_engine_extend(m.engine, &extent, windows, &error) == CSD_EINVAL);

  // Sizes for which a product or a sum overflows: the engine would allocate too little and write beyond it.
  const csd_piece long_one{0, 0, 0, 0, 100'000};
  const uint64_t far = UINT64_MAX - 4095, odd = 512;
  const csd_extent wrapping[] = {
      {(uint64_t{1} << 62) + kTile, 1, 3, 2, nullptr, kSumElems, nullptr, &offset, &long_one, 1},
      {uint64_t{1} << 31, UINT32_MAX, 3, 2, nullptr, kSumElems, nullptr, &offset, &long_one, 1},
      {kTile, UINT32_MAX, 3, 2, nullptr, kSumElems, nullptr, &offset, nullptr, 0},
      {kTile, 1, 3, 2, nullptr, kSumElems, nullptr, &far, nullptr, 0},
      {kTile, 1, 3, 2, nullptr, kSumElems, nullptr, &odd, nullptr, 0}};
  for (const csd_extent &e : wrapping) CHECK(csd_engine_extend(m.engine, &e, windows, &error) == CSD_EINVAL);
  OK(m.step());

  // An empty step, before there are any tiles.
  csd_engine *empty = nullptr;
  const csd_device cached = file(a, 3, 1 << 20);
  OK(csd_engine_create(&cached, 1, &empty, &error));
  OK(csd_engine_begin(empty, nullptr, 0, nullptr, 0, nullptr, 0, 0, &error));
  OK(csd_engine_finish(empty, 1, &error));
  OK(csd_engine_close(empty, &error));

  // More buffers than fit into the address space.
  const csd_device many[] = {file(a, UINT32_MAX)};
  const csd_extent large{uint64_t{1} << 31, 1, 4, 2, nullptr, kSumElems, nullptr, &offset, nullptr, 0};
  OK(csd_engine_create(many, 1, &empty, &error));
  CHECK(csd_engine_extend(empty, &large, windows, &error) == CSD_ENOMEM);
  OK(csd_engine_close(empty, &error));
}

// Private writable memory of this process in bytes, including untouched pages.
uint64_t private_and_writable() {
  FILE *status = fopen("/proc/self/status", "r");
  CHECK(status);
  char line[256];
  unsigned long kib = 0;
  while (fgets(line, sizeof line, status))
    if (sscanf(line, "VmData: %lu kB", &kib) == 1) break;
  fclose(status);
  return uint64_t{kib} << 10;
}

// Windows over files only reserve addresses; windows of resident tiles are usable at once, even beside those.
void windows_take_no_memory() {
  constexpr uint64_t kElems = 1 << 20, kN = 64;
  const File a;
  CHECK(ftruncate(a.fd, 2 * 12 * kElems * kN) == 0);
  for (const bool mixed : {false, true}) {
    const csd_device devices[] = {file(a, 1), mixed ? ram() : file(a, 1), mixed ? null() : file(a, 1)};
    csd_engine *engine = nullptr;
    csd_error error;
    OK(csd_engine_create(devices, 3, &engine, &error));
    const uint64_t offsets[3] = {};
    const csd_extent extent{kElems, kN, 3, 2, nullptr, kElems, nullptr, offsets, nullptr, 0};
    float *windows[4] = {};
    const uint64_t before = private_and_writable();
    OK(csd_engine_extend(engine, &extent, windows, &error));
    const uint64_t buffers = (mixed ? 1 : 3) * 12 * kElems, all = kN * 12 * kElems;
    const uint64_t in_memory = mixed ? kN * 2 / 3 * 12 * kElems : 0, grown = private_and_writable() - before;
    CHECK(grown < buffers + in_memory + all / 16);
    for (float *window : {windows[0], windows[1], windows[2]}) {
      for (uint64_t tile = 0; tile < kN; tile++) {
        float &at = window[tile * kElems + tile];
        CHECK(at == 0);
        if (tile % 3) at = 1;
        CHECK(tile % 3 == 0 || at == 1);
      }
    }
    OK(csd_engine_close(engine, &error));
    for (float *window : {windows[0], windows[1], windows[2]}) csd_window_release(window, kElems * kN);
    CHECK(ftruncate(a.fd, 0) == 0 && ftruncate(a.fd, 2 * 12 * kElems * kN) == 0);
  }
}

// One device fails, because its file is too short or gone. The step fails, but nothing else does.
void failing_io() {
  const File good, short_file, closed;
  Model m({file(good), file(short_file), file(closed, 4)});
  for (int step = 0; step < 3; step++) OK(m.step());
  const std::vector<float> before = m.state();

  CHECK(ftruncate(short_file.fd, 0) == 0);
  for (int i = 0; i < 10; i++) CHECK(m.step() == CSD_EIO && m.error.device == 1 && m.error.os_errno == EIO);
  CHECK(m.step_by_images() == CSD_EIO);
  CHECK(ftruncate(short_file.fd, File::kBytes) == 0);  // its content is zeros now, which this test ignores
  OK(m.step());
  OK(csd_engine_remap(m.engine, 1, &m.error));

  const int kept = dup(closed.fd), nothing = open("/dev/null", O_RDONLY);
  CHECK(dup2(nothing, closed.fd) == closed.fd);  // reads: end of file; writes: EBADF
  for (int i = 0; i < 10; i++) CHECK(m.step() == CSD_EIO && m.error.device == 2);
  CHECK(dup2(kept, closed.fd) == closed.fd);
  OK(m.step());
  CHECK(finite(m.state()));
  close(kept);
  close(nothing);
}

// Writes that fail, either during the step or after it; then the data waits in its buffer for a retry that succeeds.
void failing_writes() {
  const File a;
  Model few({file(a)});
  OK(few.step());
  const std::vector<float> before = few.state();
  {
    const ReadOnly now(a.fd);
    CHECK(few.step() == CSD_EIO && few.error.os_errno == EBADF);
  }
  CHECK(few.state() == before);
  OK(few.close_engine());

  for (int i = 0; i < 60; i++) {  // a race determines which of the two it is
    const File b;
    Model m({file(b, kTiles)}), same({ram()});
    OK(m.step());
    OK(same.step());
    OK(csd_engine_remap(m.engine, 1, &m.error));
    OK(m.begin());
    OK(m.push(0, kTiles - 1));
    usleep(500);  // most of them are written
    int status;
    {
      const ReadOnly now(b.fd);
      OK(m.push(kTiles - 1, kTiles));
      status = csd_engine_finish(m.engine, 1, &m.error);
      if (status == CSD_OK) CHECK(csd_engine_remap(m.engine, 1, &m.error) == CSD_EIO && m.begin() == CSD_EIO);
    }
    if (status == CSD_OK) OK(same.step());
    CHECK(m.state() == same.state());
  }

  for (int i = 0; i < 20; i++) {  // once all parameters are given, no write makes a step fail
    const File b;
    Model m({file(b, kTiles)}), same({ram()});
    OK(m.step());
    OK(same.step());
    OK(csd_engine_remap(m.engine, 1, &m.error));
    OK(m.begin());
    OK(m.push(0, kTiles - 1));
    usleep(2000);  // most often they are written
    int status, ready_status;
    {
      const ReadOnly now(b.fd);
      int32_t given = 0;
      OK(m.push(kTiles - 1, kTiles));
      ready_status =
          csd_engine_params_ready(m.engine, m.tiles.data(), static_cast<uint32_t>(m.tiles.size()), 1, &given, &m.error);
      usleep(1000);  // the last write has failed
      status = csd_engine_finish(m.engine, i % 2, &m.error);
      CHECK(ready_status != CSD_OK || status == CSD_OK);
    }
    if (i % 2 && status == CSD_OK) OK(same.step());
    CHECK(m.state() == same.state());
  }
}

// Closes engines while reads, updates and writes are in flight, and with writes that never succeed.
void close_in_flight() {
  for (int i = 0; i < 40; i++) {
    const File a, b;
    Model m({file(a), file(b, kTiles), ram()});
    OK(m.step());
    if (i % 4 == 0) OK(m.close_engine());  // lazy writes
    if (i % 4 == 1) OK(m.begin());         // reads ahead
    if (i % 4 == 2) {                      // a step under way
      OK(m.begin());
      OK(m.push(0, 7));
    }
    if (i % 4 == 3) {
      const int nothing = open("/dev/null", O_RDONLY);
      dup2(nothing, b.fd);
      m.step();
      close(nothing);
    }
  }
}

// Paced devices give the same results, only later, even if a step fails or is undone or the engine is closed meanwhile.
void paced_devices() {
  for (int i = 0; i < 8; i++) {
    const File a, b, c;
    Model m({paced(file(a)), paced(ram()), paced(file(b, 1)), paced(null()), paced(file(c, kTiles))});
    Model same({ram(), ram(), ram(), null(), ram()});
    for (Model *model : {&m, &same}) OK(i % 2 ? model->step() : model->step_by_images());
    CHECK(m.state() == same.state());
    if (i % 4 == 0) OK(m.step());   // writes are in flight
    if (i % 4 == 1) OK(m.begin());  // reads are
    if (i % 4 == 2) {               // both are
      OK(m.begin());
      OK(m.push(0, 7));
      usleep(3000);
    }
    if (i % 4 == 3) {
      CHECK(ftruncate(a.fd, 0) == 0);
      CHECK(m.step() == CSD_EIO && m.error.device == 0);
      CHECK(m.step_by_images() == CSD_EIO);
      CHECK(ftruncate(a.fd, File::kBytes) == 0);
    }
    OK(m.close_engine());
  }

  const File a, b;
  Model m({paced(file(a)), paced(file(b))});
  OK(m.step());
  const std::vector<float> before = m.state();
  for (size_t pushed = 0; pushed <= m.tiles.size(); pushed += 4) {
    OK(m.begin());
    OK(m.push(0, pushed));
    usleep(1000);
    OK(csd_engine_finish(m.engine, 0, &m.error));
    CHECK(m.state() == before);
  }

  csd_engine *none = nullptr;
  csd_device wrong[] = {paced(ram()), paced(ram())};
  csd_pace other = *wrong[1].pace;
  other.link++;
  wrong[1].pace = &other;
  CHECK(csd_engine_create(wrong, 2, &none, &m.error) == CSD_EINVAL && m.error.device == 1);
  for (const csd_pace &pace : {csd_pace{-1, 0, 0, 0, 0, 0, 0, 0},
                               {0, 10, 0, 0, 0, 0, 0, 0},
                               {0, 0, 10, 0, 0, 0, 0, 0},
                               {0, 0, 0, -1, 0, 0, 0, 0},
                               {0, 0, 0, 1e9, 0, 0, 0, 0},
                               {0, 0, 0, 0, HUGE_VAL, 0, 0, 0},
                               {0, 0, 0, 0, 0, NAN, 0, 0}}) {
    wrong[0].pace = &pace;
    CHECK(csd_engine_create(wrong, 1, &none, nullptr) == CSD_EINVAL);
  }
}

#ifdef __SANITIZE_THREAD__  // slow, and only looks for races: test one allocation in sixteen
constexpr int64_t kNext = 16;
#else
constexpr int64_t kNext = 1;
#endif
// All tiles and drives allocate in the same way, so a few tiles suffice: more than there are buffers or than are kept.
constexpr uint32_t kFew = 6;

// Fails every single allocation, in any thread, once or together with all later ones. The call or the step fails,
// nothing else does, and the next one succeeds.
void out_of_memory() {
  constexpr int kSteps = 3;
  const auto device = [](const File &f, uint32_t buffers) { return file(f, buffers, 12 * kTile); };
  const auto model = [](std::vector<csd_device> d) { return Model(d, 3, CSD_F32, 2, nullptr, nullptr, kFew); };
  for (const bool for_good : {false, true}) {
    int64_t n = 1;
    for (bool failed = true; failed; n += kNext) {
      const File a, b;
      csd_device slow = device(b, 1);
      const csd_pace pace{0, 0, 0, 0, 1e9, 0, 0, 0};
      slow.pace = &pace;
      Model m = model({device(a, 2), slow}), same = model({ram(), ram()});
      std::vector<std::vector<uint16_t>> owed[2];
      Model *const models[] = {&m, &same};
      csd_engine_events(m.engine, nullptr, 0);
      const auto sparse = [&](int i) {
        owed[i].resize(models[i]->params.size(), std::vector<uint16_t>(kParam));
        for (size_t p = 0; p < models[i]->table.size(); p += 2) {
          models[i]->table[p].topk = 0.1;
          models[i]->table[p].topk_dtype = CSD_BF16;
          models[i]->table[p].residual = owed[i][p].data();
        }
      };
      for (int i = 0; i < 2; i++) sparse(i);
      OK(m.step());
      OK(same.step());
      failed = false;
      const auto armed = [&](auto &&call) {
        fail_at(n, for_good);
        const int status = call();
        const bool hit = fail_at(0, false);
        CHECK(status == CSD_OK || (hit && status == CSD_ENOMEM && m.error.text[0]));
        failed |= hit;
        return status;
      };
      for (int i = 0; i < kSteps; i++) {
        const std::vector<std::vector<char>> before = m.params;
        const bool images = i == 1;
        std::vector<std::vector<char>> image(2 * m.tiles.size(), std::vector<char>(4 * kTile, 1));
        for (csd_param &param : m.table)
          if (images) param.topk = 0;
        const int status = armed([&] {
          int result = m.begin();
          for (size_t t = 0; result == CSD_OK && t < m.tiles.size(); t++)
            result = images ? push_images(m.engine, m.tiles[t], image[2 * t].data(), image[2 * t + 1].data(), &m.error)
                            : csd_engine_push(m.engine, m.tiles[t], nullptr, &m.error);
          uint32_t tile;
          for (size_t t = 0; images && result == CSD_OK && t < m.tiles.size(); t++)
            result = csd_engine_pull(m.engine, &tile, &m.error);
          const int end = csd_engine_finish(m.engine, result == CSD_OK && !images, &m.error);
          CHECK(images || result == CSD_OK || end != CSD_OK);
          if (result == CSD_OK) result = end;
          const int late = csd_engine_wait_writes(m.engine, &m.error);  // writes may still be in flight
          CHECK(late == CSD_OK || late == CSD_ENOMEM);
          return result;
        });
        if (status != CSD_OK || images) {
          std::vector<uint32_t> undone(m.tiles.size());
          std::vector<uint64_t> elems(m.tiles.size());
          CHECK(csd_engine_undone(m.engine, undone.data(), elems.data(), static_cast<uint32_t>(undone.size())) <=
                undone.size());
          m.params = before;
          for (size_t p = 0; p < before.size(); p++) m.table[p].param = m.params[p].data();
        } else {
          OK(same.step());
        }
        sparse(0);
        CHECK(owed[0] == owed[1]);
        const uint32_t edited[] = {1, 4};
        OK(csd_engine_remap(m.engine, 1, &m.error));
        OK(csd_engine_edited(m.engine, edited, 2, &m.error));
        armed([&] { return csd_engine_remap(m.engine, 0, &m.error); });
        CHECK(m.state() == same.state());
      }
      m.prepare();
      if (armed([&] { return m.try_extend(); }) != CSD_OK) OK(m.try_extend());
      m.after_extend();
      same.extend();
      OK(m.step());
      OK(same.step());
      CHECK(m.state() == same.state());
      OK(m.begin());
      OK(m.push(0, 5));
      armed([&] { return m.close_engine(); });
      csd_engine *engine = nullptr;
      if (armed([&] { return csd_engine_create(m.devices.data(), 2, &engine, &m.error); }) == CSD_OK)
        OK(csd_engine_close(engine, &m.error));
    }
    CHECK(n > 100);
  }
}

// The same for steps begun as guesses that turn out right.
void out_of_memory_in_guesses() {
  for (const bool for_good : {false, true}) {
    int64_t n = 1;
    for (bool failed = true; failed; n += kNext) {
      const File a;
      Model m({file(a)}, 3, CSD_F32, 2, nullptr, nullptr, kFew), same({ram()}, 3, CSD_F32, 2, nullptr, nullptr, kFew);
      for (Model *model : {&m, &same}) OK(model->step());
      const std::vector<std::vector<char>> before = m.params;
      m.holds.assign(m.tiles.size(), std::vector<char>(8 * kTile));
      const std::vector<csd_param> rows = m.table;
      const std::vector<uint32_t> order(m.tiles.rbegin(), m.tiles.rend());
      int32_t unchanged = 1, given = 0;
      const auto all = static_cast<uint32_t>(order.size());
      fail_at(n, for_good);
      int status = m.begin();
      for (uint32_t tile = 0; status == CSD_OK && tile < all; tile += 2)
        status = push_at(m.engine, tile, &rows[tile / 2].grad, &m.error, m.holds[tile].data());
      if (status == CSD_OK) status = csd_engine_unchanged(m.engine, rows.data(), rows.size(), &unchanged, &m.error);
      if (status == CSD_OK) status = m.release(order);
      for (uint32_t tile = 1; status == CSD_OK && tile < all; tile += 2) status = m.push(tile, tile + 1);
      if (status == CSD_OK) status = csd_engine_params_ready(m.engine, order.data(), all, 1, &given, &m.error);
      const int end = csd_engine_finish(m.engine, status == CSD_OK, &m.error);
      if (status == CSD_OK) status = end;
      const int late = csd_engine_wait_writes(m.engine, &m.error);
      CHECK(late == CSD_OK || late == CSD_ENOMEM);
      failed = fail_at(0, false);
      CHECK(unchanged && (status == CSD_OK ? given : failed && (status == CSD_ENOMEM || status == CSD_ESTATE)));
      if (status == CSD_OK) {
        OK(same.step());
        CHECK(m.params == same.params);
      } else {
        if (csd_engine_undone(m.engine, nullptr, nullptr, 0) == 0) CHECK(m.params == before);
        std::vector<std::vector<char>> written = before;
        m.params.swap(written);
        for (size_t p = 0; p < before.size(); p++) m.table[p].param = m.params[p].data();
      }
      CHECK(m.state() == same.state());
    }
    CHECK(n > 30);
  }
}

// Steps of two passes over each tile. Instead of orthogonalizing X, the caller reverses it, which needs all of it too.
struct TwoPasses {
  Model m;
  std::vector<std::vector<uint16_t>> x, o;
  std::vector<csd_param> rows;
  uint32_t masters = CSD_IN_SECTION;
  std::vector<uint32_t> order;  // pass 1 of a parameter's tiles before pass 2 of the previous parameter's
  std::vector<csd_hyper> hypers{{CSD_MUON_MOMENTUM, {0.05f, 0.95f, 1, 0, 0, 0, 0, 0, 0.5f}},
                                {CSD_MUON_APPLY, {0.998f, 0.02f}}};

  explicit TwoPasses(const std::vector<csd_device> &devices, uint32_t n_tiles = kTiles)
      : m(devices, 2, CSD_F32, 2, nullptr, nullptr, n_tiles) {
    const size_t n = m.params.size();
    x.assign(n, std::vector<uint16_t>(kParam));
    o = x;
    rows.resize(2 * n);
    for (uint32_t p = 0; p <= n; p++) {
      if (p < n) order.insert(order.end(), {2 * p, 2 * p + 1});
      if (p > 0) order.insert(order.end(), {(2 * p - 2) | CSD_PASS_2, (2 * p - 1) | CSD_PASS_2});
    }
  }

  // Nothing from here on to restore() allocates, so that only the engine's own allocations can fail.
  int begin(int32_t in_order = CSD_SAME_ORDER) {
    for (size_t p = 0; p < x.size(); p++) {
      csd_param &first = rows[p], &second = rows[x.size() + p];
      first = second = m.table[p];
      first.param = x[p].data();
      first.param_dtype = CSD_BF16;
      first.hyper = 0;
      second.grad = o[p].data();
      second.grad_dtype = CSD_BF16;
      second.hyper = 1;
      second.master = masters;
    }
    return csd_engine_begin(m.engine, rows.data(), rows.size(), hypers.data(), 2, order.data(),
                            static_cast<uint32_t>(order.size()), in_order, &m.error);
  }

  // Waits until X of a parameter is there, which has this tile and the next one, and computes O.
  int compute(uint32_t tile) {
    const uint32_t tiles[] = {tile, tile + 1};
    int32_t ready = 0;
    const int status = csd_engine_params_ready(m.engine, tiles, 2, 1, &ready, &m.error);
    if (status == CSD_OK) std::reverse_copy(x[tile / 2].begin(), x[tile / 2].end(), o[tile / 2].begin());
    return status;
  }

  // Pushes that many passes, the first ones first, and waits for X of each parameter before its second passes.
  int push(size_t n) {
    const auto tiles = static_cast<uint32_t>(m.tiles.size());
    for (uint32_t i = 0; i < n; i++) {
      const uint32_t tile = i < tiles ? i : i - tiles;
      if (i >= tiles && tile % 2 == 0)
        if (const int status = compute(tile)) return status;
      const uint32_t name = i < tiles ? tile : tile | CSD_PASS_2;
      if (const int status = csd_engine_push(m.engine, name, nullptr, &m.error)) return status;
    }
    return CSD_OK;
  }

  int step(int32_t in_order = CSD_SAME_ORDER) {
    if (const int status = begin(in_order)) return status;
    const int pushed = push(2 * m.tiles.size());
    const int ended = csd_engine_finish(m.engine, pushed == CSD_OK, &m.error);
    return pushed ? pushed : ended;
  }

  // Parameters that an undone step has written get their values from before.
  void restore(const std::vector<std::vector<char>> &before) {
    std::vector<uint32_t> undone(m.tiles.size());
    std::vector<uint64_t> elems(m.tiles.size());
    const uint32_t n = csd_engine_undone(m.engine, undone.data(), elems.data(), static_cast<uint32_t>(undone.size()));
    CHECK(n <= undone.size());
    for (uint32_t i = 0; i < n; i++)
      for (uint32_t p = 0; p < before.size(); p++)
        if (undone[i] / 2 == p) std::copy(before[p].begin(), before[p].end(), m.params[p].begin());
    CHECK(m.params == before);
  }

  uint64_t bytes(bool read) {
    OK(csd_engine_wait_writes(m.engine, &m.error));
    uint64_t sum = 0;
    for (uint32_t d = 0; d < m.devices.size(); d++) {
      csd_stats stats;
      OK(csd_engine_stats(m.engine, d, &stats, &m.error));
      sum += read ? stats.read_bytes : stats.write_bytes;
    }
    return sum;
  }
};

// On all devices, with few buffers and in every order, the bits are the same, and each half moves once.
void two_passes() {
  const File a, b, c, d, e, f;
  TwoPasses one({file(a, 1)}), files({file(b, 2, 1 << 30), paced(file(c, 3))}), memory({in_slots(d, 1)}),
      mixed({in_slots(e, 3), file(f, 8)});
  TwoPasses nothing({null()});
  // The first step of new tiles: their masters are the parameters, and nothing is read.
  for (TwoPasses *t : {&one, &files, &memory, &mixed}) {
    t->masters = CSD_NEW;
    for (std::vector<char> &param : t->m.params) t->m.fill(param, 3);
    OK(t->begin());
    OK(t->push(kTiles + 4));
    OK(csd_engine_finish(t->m.engine, 0, &t->m.error));
    for (std::vector<char> &param : t->m.params) t->m.fill(param, 3);
    OK(t->step());
    CHECK(t->bytes(true) == 0);
    t->masters = CSD_IN_SECTION;
  }
  for (int step = 0; step < 12; step++) {
    for (TwoPasses *t : {&one, &files, &memory, &mixed, &nothing})
      OK(t->step(step % 2 ? CSD_AS_PUSHED : CSD_SAME_ORDER));
    for (TwoPasses *t : {&one, &files, &memory, &mixed})
      CHECK(t->bytes(true) == 8 * kTile * kTiles && t->bytes(false) == 8 * kTile * kTiles);
    CHECK(one.m.params == files.m.params && one.m.params == memory.m.params && one.m.params == mixed.m.params);
    if (step % 3) continue;  // otherwise windows are open, and what is read is not verified
    const std::vector<float> state = one.m.state();
    CHECK(finite(state) && state == files.m.state() && state == memory.m.state() && state == mixed.m.state());
    for (TwoPasses *t : {&one, &files, &memory, &mixed}) OK(csd_engine_remap(t->m.engine, 0, &t->m.error));
  }
  TwoPasses in_place({ram()});
  CHECK(in_place.begin() == CSD_EINVAL && strstr(in_place.m.error.text, "two passes"));
}

// Whatever has been done of both passes, an undone step leaves the states as they were.
void undo_between_passes() {
  const File a, b, c, d;
  TwoPasses t({file(a, 2), file(b), in_slots(c, 2)}), same({file(d)});
  for (TwoPasses *it : {&t, &same}) OK(it->step());
  for (size_t pushed = 0; pushed <= 2 * kTiles; pushed++) {
    const std::vector<float> before = t.m.state();
    const std::vector<std::vector<char>> params = t.m.params;
    if (pushed % 3) OK(csd_engine_remap(t.m.engine, 0, &t.m.error));
    OK(t.begin(pushed % 2 ? CSD_AS_PUSHED : CSD_SAME_ORDER));
    OK(t.push(pushed));
    if (pushed % 4 == 0) usleep(2000);
    if (pushed % 2 && pushed < 2 * kTiles) CHECK(csd_engine_finish(t.m.engine, 1, &t.m.error) == CSD_ESTATE);
    else OK(csd_engine_finish(t.m.engine, 0, &t.m.error));
    t.restore(params);
    CHECK(t.m.state() == before);
    if (pushed % 5) continue;
    for (TwoPasses *it : {&t, &same}) OK(it->step());
    CHECK(t.m.state() == same.m.state() && t.m.params == same.m.params);
    if (pushed % 2) continue;
    const std::vector<float> after = t.m.state();  // and a finished step can be taken back
    const std::vector<std::vector<char>> now = t.m.params;
    OK(t.step());
    OK(csd_engine_take_back(t.m.engine, &t.m.error));
    t.restore(now);
    CHECK(t.m.state() == after);
  }
}

// Reads and writes of either pass fail, within the step or after it.
void failing_passes() {
  for (int i = 0; i < 40; i++) {
    const File a, b, c;
    TwoPasses t({file(a, i % 3 ? kTiles : 2), in_slots(b, 3)}), same({file(c)});
    for (TwoPasses *it : {&t, &same}) OK(it->step());
    const std::vector<float> before = t.m.state();
    const std::vector<std::vector<char>> params = t.m.params;
    OK(csd_engine_remap(t.m.engine, 1, &t.m.error));
    OK(t.begin());
    const size_t n = 2 * kTiles;
    int status = CSD_OK;
    {
      if (i % 2) status = t.push(kTiles + 2);  // pass 1 of all, pass 2 of the first parameter
      usleep(500);
      const ReadOnly now(a.fd);
      if (status == CSD_OK && i % 2 == 0) status = t.push(n);
      for (uint32_t tile = 2; status == CSD_OK && i % 2 && tile < kTiles; tile++) {
        if (tile % 2 == 0) status = t.compute(tile);
        if (status == CSD_OK) status = csd_engine_push(t.m.engine, tile | CSD_PASS_2, nullptr, &t.m.error);
      }
      const int ended = csd_engine_finish(t.m.engine, status == CSD_OK, &t.m.error);
      if (status == CSD_OK) status = ended;
      if (status == CSD_OK) CHECK(csd_engine_wait_writes(t.m.engine, &t.m.error) == CSD_EIO && t.begin() == CSD_EIO);
    }
    if (status != CSD_OK) {
      CHECK(status == CSD_EIO);
      t.restore(params);
      CHECK(t.m.state() == before);
      OK(t.step());
    }
    OK(same.step());
    CHECK(t.m.state() == same.m.state() && t.m.params == same.m.params);
  }
}

void no_memory_for_passes() {
  for (const bool for_good : {false, true}) {
    int64_t n = 1;
    for (bool failed = true; failed; n += kNext) {
      const File a, b, c;
      TwoPasses t({file(a, 2), in_slots(b, 1)}, kFew), same({file(c)}, kFew);
      csd_engine_events(t.m.engine, nullptr, 0);
      for (TwoPasses *it : {&t, &same}) OK(it->step());
      const std::vector<float> before = t.m.state();
      const std::vector<std::vector<char>> params = t.m.params;
      fail_at(n, for_good);
      int status = t.step();
      const int late = csd_engine_wait_writes(t.m.engine, &t.m.error);
      failed = fail_at(0, false);
      CHECK(status == CSD_OK || (failed && (status == CSD_ENOMEM || status == CSD_ESTATE)));
      CHECK(late == CSD_OK || (failed && late == CSD_ENOMEM));
      if (status != CSD_OK) {
        t.restore(params);
        CHECK(t.m.state() == before);
        OK(t.step());
      }
      OK(same.step());
      CHECK(t.m.state() == same.m.state() && t.m.params == same.m.params);
    }
  }
}

void many_engines_and_threads() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++)
    threads.emplace_back([] {
      for (int i = 0; i < 5; i++) {
        const File a;
        Model m({file(a), ram()});
        for (int step = 0; step < 5; step++) OK(m.step());
        CHECK(finite(m.state()));
      }
    });
  for (const uint32_t n : {1u, 4u, 2u}) {
    OK(csd_threads_use(n, nullptr));
    CHECK(csd_threads_used() == n);
    usleep(20000);
  }
  CHECK(csd_threads_use(0, nullptr) == CSD_EINVAL);
  for (std::thread &thread : threads) thread.join();
}

}  // namespace

int main(int argc, char **argv) {
  const struct {
    const char *name;
    void (*run)();
  } tests[] = {{"many steps", many_steps},
               {"supplied states", supplied_states},
               {"all updaters", all_updaters},
               {"rules of few sections", rules_of_few_sections},
               {"to and fro", to_and_fro},
               {"undo", undo},
               {"taken back", taken_back},
               {"gone back", gone_back},
               {"guesses", guesses},
               {"guesses gone wrong", guesses_gone_wrong},
               {"who waits", who_waits},
               {"order of a release", order_of_a_release},
               {"as pushed", as_pushed},
               {"edits", edits},
               {"in place", in_place},
               {"sparse steps", sparse_steps},
               {"shared updates", shared_updates},
               {"wrong calls", wrong_calls},
               {"windows take no memory", windows_take_no_memory},
               {"failing I/O", failing_io},
               {"failing writes", failing_writes},
               {"close in flight", close_in_flight},
               {"paced devices", paced_devices},
               {"out of memory", out_of_memory},
               {"no memory for guesses", out_of_memory_in_guesses},
               {"two passes", two_passes},
               {"undone between passes", undo_between_passes},
               {"failing passes", failing_passes},
               {"no memory for passes", no_memory_for_passes},
               {"many engines and threads", many_engines_and_threads}};
  const uint64_t small_step = csd_small_step_used();
  for (const auto &test : tests) {
    if (argc > 1 && !strstr(test.name, argv[1])) continue;
    for (const uint64_t elems : {uint64_t{0}, small_step}) {  // updates by the update threads; where they are pushed
      csd_small_step_use(elems);
      test.run();
    }
    printf("%s, ", test.name);
    fflush(stdout);
  }
  puts("done");
}
