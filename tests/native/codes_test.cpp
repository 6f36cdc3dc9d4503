// Drives tiles of codes through csd.h alone, for the sanitizers. On files, in memory and on paced devices, the result
// must equal that of csd_update_codes on a single array, whatever is read, cached, set or undone in between.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "csd.h"
#include "push.h"

namespace {

constexpr uint64_t kTile = 4096, kSumElems = 1024, kTiles = 4, kPage = 4096;
constexpr uint64_t kParams[] = {6000, 70, 64, 5000};  // elements; the last one begins at a multiple of 64
constexpr uint32_t kN = 4;

uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// The reference: each section of a parameter as one array, updated by csd_update_codes.
struct Reference {
  uint32_t dtype, n_states;
  uint64_t n;
  std::vector<std::vector<uint8_t>> sections;
  std::vector<uint8_t> param;

  uint32_t codec() const { return n_states == 2 ? CSD_ROOT : CSD_8BIT; }

  Reference(uint32_t of_dtype, uint32_t states, uint64_t elems) : dtype(of_dtype), n_states(states), n(elems) {
    const uint64_t padded = round_up(n, 64);
    sections.emplace_back(padded * (dtype == CSD_F32 ? 4 : 2));
    if (dtype != CSD_F32) sections.emplace_back(padded);
    if (codec() == CSD_8BIT) sections.emplace_back(padded);  // the ratio
    for (uint32_t s = codec() == CSD_8BIT ? 2 : 1; s < states; s++) {
      sections.emplace_back(padded);
      sections.emplace_back(padded / 64);
    }
  }

  std::vector<void *> addresses() {
    std::vector<void *> all;
    for (auto &section : sections) all.push_back(section.data());
    return all;
  }

  // The parameter becomes the master.
  void begin(const std::vector<uint8_t> &with) {
    param = with;
    memcpy(sections[0].data(), with.data(), with.size());
  }

  void set(uint64_t at, const uint8_t *value) {
    const uint64_t bytes = dtype == CSD_F32 ? 4 : 2;
    memcpy(sections[0].data() + bytes * at, value, bytes);
    if (dtype != CSD_F32) sections[1][at] = 0;
  }

  void step(const csd_hyper &hyper, const void *grad, uint32_t key) {
    csd_error error;
    OK(csd_update_codes(&hyper, csd_isa_best(), n, grad, static_cast<int32_t>(dtype), addresses().data(),
                        static_cast<uint32_t>(sections.size()), param.data(), static_cast<int32_t>(dtype), key,
                        &error));
  }

  std::vector<float> states(uint32_t state) {
    std::vector<float> found(n);
    float *wanted[4] = {};
    wanted[state] = found.data();
    OK(csd_decode(0, n, addresses().data(), codec(), static_cast<int32_t>(dtype), wanted,
                  static_cast<uint32_t>(sections.size()), nullptr));
    return found;
  }
};

struct File {
  int fd;
  File() {
    char name[] = "codes-XXXXXX";
    fd = mkstemp(name);
    CHECK(fd >= 0 && ftruncate(fd, 2 * 4 * 4 * kTile * kTiles) == 0);
    unlink(name);
  }
  ~File() { close(fd); }
  File(const File &) = delete;
};

struct Model {
  csd_engine *engine = nullptr;
  csd_error error{};
  uint32_t dtype, states, steps = 0;
  std::vector<csd_piece> pieces;
  std::vector<std::vector<uint8_t>> params, grads;
  std::vector<csd_param> table;
  std::vector<uint32_t> tiles;
  csd_hyper hyper{CSD_ADAMW, {0.999f, 0.9f, 0.1f, 0.999f, 0.001f, 0.01f, 1.0f, 1e-8f, 1.0f}};
  uint64_t bytes() const { return dtype == CSD_F32 ? 4 : 2; }

  Model(const std::vector<csd_device> &devices, uint32_t of_dtype, uint32_t n_states,
        const csd_tile_state *initial_states = nullptr, const uint32_t *sums = nullptr)
      : dtype(of_dtype), states(n_states) {
    if (states == 4) hyper.rule = CSD_AMSGRAD;
    if (states == 2) hyper = {CSD_RMSPROP, {0.01f, 0.1f, 0.99f, 0.01f, 0.0f, 1e-8f, 0.0f, 0.0f, 1.0f}};
    uint64_t at = 0;
    for (uint32_t p = 0; p < kN; p++) {
      for (uint64_t first = 0; first < kParams[p];) {
        const uint64_t n = std::min(kParams[p] - first, kTile - at % kTile);
        pieces.push_back({p, static_cast<uint32_t>(at / kTile), first, at % kTile, n});
        first += n, at += n;
      }
      at = round_up(at, 64);
      params.emplace_back(bytes() * kParams[p]);
      grads.emplace_back(bytes() * kParams[p]);
      for (uint64_t i = 0; i < kParams[p]; i++) number(params[p], i, static_cast<uint32_t>(i + p) % 64);
    }
    for (uint32_t t = 0; t < kTiles; t++) tiles.push_back(t);
    OK(csd_engine_create(devices.data(), static_cast<uint32_t>(devices.size()), &engine, &error));
    const std::vector<uint64_t> offsets(devices.size());
    csd_extent extent{kTile,          static_cast<uint32_t>(kTiles),
                      states,         2,
                      initial_states, kSumElems,
                      sums,           offsets.data(),
                      pieces.data(),  pieces.size(),
                      nullptr,        states == 2 ? CSD_ROOT : CSD_8BIT,
                      dtype};
    float *windows[4] = {};
    OK(csd_engine_extend(engine, &extent, windows, &error));
    for (const float *window : windows) CHECK(!window);
    for (uint32_t p = 0; p < kN; p++) {
      csd_param row{};
      row.grad = grads[p].data(), row.param = params[p].data();
      row.grad_dtype = row.param_dtype = dtype;
      row.first = 1000 * p;
      table.push_back(row);
    }
  }

  ~Model() { csd_engine_close(engine, &error); }

  // A value of about 1 in the dtype.
  void number(std::vector<uint8_t> &array, uint64_t i, uint32_t n) const {
    const uint32_t one = dtype == CSD_F32 ? 0x3f800000 + (n << 15) : dtype == CSD_F16 ? 0x3c00 + n : 0x3f80 + n;
    memcpy(array.data() + bytes() * i, &one, bytes());
  }

  void new_grads() {
    steps++;
    for (uint32_t p = 0; p < kN; p++) {
      table[p].seed = steps;
      for (uint64_t i = 0; i < kParams[p]; i++) number(grads[p], i, static_cast<uint32_t>(i * steps + p) % 127);
    }
  }

  // A step with images of gradients and parameters. If `far`, the old parameters are only in the images; otherwise they
  // are at csd_param.param too.
  int step_by_images(bool far) {
    std::vector<std::vector<uint8_t>> images(2 * kTiles, std::vector<uint8_t>(4 * kTile, 0xa5));
    std::vector<csd_param> rows = table;
    for (csd_param &row : rows)
      if (far) row.param = nullptr, row.in_image = 1;
    OK(csd_engine_begin(engine, rows.data(), rows.size(), &hyper, 1, tiles.data(), kTiles, 0, &error));
    for (const csd_piece &p : pieces) {
      const uint64_t from = bytes() * p.param_first, n = bytes() * p.elems;
      memcpy(&images[2 * p.tile][4 * p.tile_first], &grads[p.param][from], n);
      if (far) memcpy(&images[2 * p.tile + 1][4 * p.tile_first], &params[p.param][from], n);
    }
    if (far) CHECK(csd_engine_push(engine, 0, nullptr, &error) == CSD_EINVAL);
    for (const uint32_t t : tiles) OK(push_images(engine, t, images[2 * t].data(), images[2 * t + 1].data(), &error));
    for (uint32_t n = 0, t = 0; n < kTiles; n++) OK(csd_engine_pull(engine, &t, &error));
    OK(csd_engine_finish(engine, 1, &error));
    for (const csd_piece &p : pieces)
      if (table[p.param].grad)
        memcpy(&params[p.param][bytes() * p.param_first], &images[2 * p.tile + 1][4 * p.tile_first], bytes() * p.elems);
    return CSD_OK;
  }

  int step(bool keep = true) {
    if (const int status = csd_engine_begin(engine, table.data(), table.size(), &hyper, 1, tiles.data(),
                                            static_cast<uint32_t>(tiles.size()), 0, &error))
      return status;
    for (const uint32_t tile : tiles)
      if (const int status = csd_engine_push(engine, tile, nullptr, &error)) {
        csd_engine_finish(engine, 0, nullptr);
        return status;
      }
    int32_t given = 0;
    if (!keep) OK(csd_engine_params_ready(engine, tiles.data(), kTiles, 1, &given, &error));
    return csd_engine_finish(engine, keep, &error);
  }

  // A step as a guess in which the tiles whose bit is set in `early` are pushed early. A first guess with wrong
  // gradients is undone.
  int step_as_guess(uint32_t early) {
    const auto before = params;
    for (const bool right : {false, true}) {
      std::vector<csd_param> rows = table;
      for (csd_param &row : rows) row.grad = row.grad ? this : nullptr;
      OK(csd_engine_begin(engine, rows.data(), rows.size(), &hyper, 1, tiles.data(), kTiles, 1, &error));
      std::vector<std::vector<uint8_t>> holds;
      for (const uint32_t tile : tiles) {
        holds.emplace_back(csd_engine_hold_bytes(engine, tile), 0xa5);
        CHECK(!holds.back().empty() && holds.back().size() <= 2 * bytes() * kTile);
        std::vector<const void *> from;
        for (const csd_piece &p : pieces)
          if (p.tile == tile)
            from.push_back(table[p.param].grad && !right ? params[p.param].data() : table[p.param].grad);
        if (early >> tile & 1) OK(push_at(engine, tile, from.data(), &error, holds.back().data()));
      }
      int32_t unchanged = 0;
      OK(csd_engine_unchanged(engine, table.data(), kN, &unchanged, &error));
      CHECK(unchanged == (right || !early));
      if (right && early & 1) {
        params[0][5] ^= 1;
        OK(csd_engine_unchanged(engine, table.data(), kN, &unchanged, &error));
        CHECK(!unchanged);
        params[0][5] ^= 1;
      }
      CHECK(params == before);
      if (!right) {
        OK(csd_engine_finish(engine, 0, &error));
        CHECK(csd_engine_undone(engine, nullptr, nullptr, 0) == 0);
        continue;
      }
      const uint32_t last = kTiles - 1;
      OK(csd_engine_release(engine, table.data(), kN, &last, 1, &error));
      for (const uint32_t tile : tiles)
        if (!(early >> tile & 1)) OK(csd_engine_push(engine, tile, nullptr, &error));
      OK(csd_engine_finish(engine, 1, &error));
    }
    return CSD_OK;
  }

  std::vector<float> decoded(uint32_t param, uint32_t state) {
    std::vector<float> found(kParams[param]);
    for (const csd_piece &piece : pieces)
      if (piece.param == param) {
        float *wanted[4] = {};
        wanted[state] = found.data() + piece.param_first;
        const bool in_param = table[param].master == CSD_IN_PARAM;
        const void *own = in_param ? params[param].data() + bytes() * piece.param_first : nullptr;
        OK(csd_engine_decode(engine, piece.tile, piece.tile_first, piece.elems, own, wanted, &error));
      }
    return found;
  }

  csd_stats stats() {
    csd_stats stats;
    OK(csd_engine_wait_writes(engine, &error));
    OK(csd_engine_stats(engine, 0, &stats, &error));
    return stats;
  }
};

csd_device file(const File &f, int64_t cache_bytes = -1) {
  return {"file", f.fd, 2, 4096, nullptr, 0, nullptr, 0, cache_bytes, 0};
}

csd_device paced(csd_device d) {
  static const csd_pace kPace = {2e7, 1e7, 2.5e7, 0.0005, 1e7, 5e6, 0, 0};
  d.pace = &kPace;
  return d;
}

bool same(const std::vector<float> &a, const std::vector<float> &b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

struct Pair {  // an engine, and references for its states
  Model model;
  std::vector<Reference> references;

  Pair(const std::vector<csd_device> &devices, uint32_t dtype, uint32_t states) : model(devices, dtype, states) {
    for (uint32_t p = 0; p < kN; p++) references.emplace_back(dtype, states, kParams[p]);
  }

  void step(bool by_images = false, uint32_t early = 0, bool far = false) {
    model.new_grads();
    for (uint32_t p = 0; p < kN; p++) {
      Reference &r = references[p];
      if (!model.table[p].grad) continue;
      r.step(model.hyper, model.grads[p].data(), model.table[p].seed * 0x9e3779b9u + model.table[p].first);
    }
    OK(by_images ? model.step_by_images(far) : early ? model.step_as_guess(early) : model.step());
  }

  void first_step(bool resident) {
    for (uint32_t p = 0; p < kN; p++) {
      references[p].begin(model.params[p]);
      model.table[p].master = resident ? static_cast<uint32_t>(model.dtype == CSD_F32 ? CSD_FROM_PARAM : CSD_IN_SECTION)
                                       : static_cast<uint32_t>(CSD_NEW);
    }
    step();
    for (csd_param &row : model.table) row.master = model.dtype == CSD_F32 ? CSD_FROM_PARAM : CSD_IN_SECTION;
  }

  void check() {
    for (uint32_t p = 0; p < kN; p++) {
      if (model.table[p].grad) CHECK(model.params[p] == references[p].param);
      for (uint32_t s = 0; s < model.states; s++) CHECK(same(model.decoded(p, s), references[p].states(s)));
    }
  }
};

// The size of a slot.
uint64_t slot_bytes(uint32_t dtype, uint32_t states) {
  const uint64_t roots = (states == 2 ? 1 : states - 2) * (kTile + kPage), ratio = states == 2 ? 0 : kTile;
  return kTile * (dtype == CSD_F32 ? 4 : 3) + ratio + roots;
}

void like_one_array() {
  for (const uint32_t dtype : {CSD_F32, CSD_F16, CSD_BF16})
    for (const uint32_t states : {2u, 3u, 4u}) {
      const File a, b, c, d;
      Pair files({file(a), file(b)}, dtype, states), kept({file(c, 1 << 20)}, dtype, states);
      Pair slow({paced(file(d))}, dtype, states), memory({{"ram", -1, 0, 0}}, dtype, states);
      for (Pair *pair : {&files, &kept, &slow, &memory}) {
        pair->first_step(pair == &memory);
        for (int i = 0; i < 3; i++) pair->step();
        pair->check();
        for (csd_param &row : pair->model.table) row.master = CSD_IN_SECTION;
        pair->step(true);
        pair->check();
        for (csd_param &row : pair->model.table) row.master = dtype == CSD_F32 ? CSD_FROM_PARAM : CSD_IN_SECTION;
        if (pair == &memory) continue;
        // A parameter without a gradient keeps every bit.
        Model &m = pair->model;
        m.table[1].grad = nullptr;
        for (const uint32_t early : {0u, 15u, 5u}) {
          pair->step(false, early);
          pair->check();
        }
        pair->step(true, 0, true);
        pair->check();
        m.table[1].grad = m.grads[1].data();
        for (const uint32_t early : {1u, 6u, 7u, 0u}) {
          pair->step(false, early);
          pair->check();
        }
      }
      // A device paced like a card reads the parameters, too.
      const csd_stats stats = slow.model.stats();
      CHECK(stats.read_bytes == kTiles * slot_bytes(dtype, states));
      CHECK(stats.write_bytes == kTiles * slot_bytes(dtype, states));
      CHECK(kept.model.stats().read_bytes == 0);
    }
}

// Parameters that are their own sections. The memory after the last element of one must not be touched.
void in_parameters() {
  for (const uint32_t dtype : {CSD_F32, CSD_F16, CSD_BF16})
    for (const uint32_t states : {2u, 3u, 4u}) {
      Pair pair({{"ram", -1, 0, 0}}, dtype, states);
      Model &m = pair.model;
      for (uint32_t p = 0; p < kN; p++) {
        pair.references[p].begin(m.params[p]);
        m.table[p].master = CSD_IN_PARAM;
      }
      for (int i = 0; i < 3; i++) {
        pair.step(i == 2);
        pair.check();
      }
      m.table[1].grad = nullptr;
      pair.step();
      pair.check();
      // Edited states are those with which the next step begins; without a gradient they do not change the parameter.
      const auto before = m.params[1];
      const std::vector<float> edited(kParams[1], 0.25f);
      m.table[1].edited[1] = edited.data();
      OK(m.step());
      m.table[1].edited[1] = nullptr;
      CHECK(m.params[1] == before);
      CHECK(same(m.decoded(1, 0), pair.references[1].states(0)));
      CHECK(!same(m.decoded(1, 1), pair.references[1].states(1)));
      m.table[0].param = nullptr;
      CHECK(m.step() == CSD_EINVAL);
    }
  const File a;
  Pair files({file(a)}, CSD_BF16, 3);
  files.first_step(false);
  files.model.table[0].master = CSD_IN_PARAM;
  CHECK(files.model.step() == CSD_EINVAL);
}

void set_by_somebody() {
  for (const uint32_t dtype : {CSD_F16, CSD_BF16})
    for (const int64_t cache : {int64_t{-1}, int64_t{1} << 20}) {
      const File a;
      Pair pair({file(a, cache)}, dtype, 3);
      pair.first_step(false);
      bool far = false;
      for (const uint64_t at : {uint64_t{5}, uint64_t{2500}, uint64_t{4099}, uint64_t{6}}) {
        pair.model.number(pair.model.params[0], at, 77);
        pair.references[0].set(at, pair.model.params[0].data() + 2 * at);
        pair.step(far, 0, far);
        far = !far;
        pair.check();
        // Of all tiles, only the one with the parameter that was set was read as a whole.
        const uint64_t most = slot_bytes(dtype, 3), least = most - 2 * kTile;
        if (cache < 0) CHECK(pair.model.stats().read_bytes == 3 * least + most);
      }
      for (const uint64_t at : {uint64_t{7}, uint64_t{2600}, uint64_t{4098}}) {
        pair.model.number(pair.model.params[0], at, 78);
        pair.references[0].set(at, pair.model.params[0].data() + 2 * at);
        pair.step(false, 7);
        pair.check();
      }
    }
}

void undone() {
  const File a;
  Pair pair({file(a)}, CSD_BF16, 3);
  pair.first_step(false);
  const auto before = pair.model.params;
  pair.model.new_grads();
  OK(pair.model.step(false));
  CHECK(csd_engine_undone(pair.model.engine, nullptr, nullptr, 0) == kTiles);
  CHECK(pair.model.params != before);
  for (uint32_t p = 0; p < kN; p++) memcpy(pair.model.params[p].data(), before[p].data(), before[p].size());
  pair.check();
  pair.model.steps--;
  pair.step();
  pair.check();
}

// A step begins with edited states, whether or not there is a gradient.
void edited() {
  for (const uint32_t dtype : {CSD_F32, CSD_F16, CSD_BF16})
    for (const bool with_grad : {true, false}) {
      const File a;
      Pair pair({file(a)}, dtype, 3);
      pair.first_step(false);
      std::vector<float> exp_avg(kParams[0], 0.5f), master(kParams[0], 1.25f);
      csd_param &row = pair.model.table[0];
      row.edited[1] = exp_avg.data();
      if (dtype != CSD_F32) row.edited[0] = master.data();
      const float *states[4] = {row.edited[0], exp_avg.data(), nullptr, nullptr};
      OK(csd_encode(0, kParams[0], states, pair.references[0].codec(), static_cast<int32_t>(dtype),
                    pair.references[0].addresses().data(), static_cast<uint32_t>(pair.references[0].sections.size()),
                    nullptr));
      if (!with_grad) row.grad = nullptr;
      pair.step();
      if (!with_grad) CHECK(same(pair.model.decoded(0, 1), pair.references[0].states(1)));
      pair.check();
    }
}

// What is read from the disk is verified; damage to the parameter section, which is not read, goes unnoticed.
void damaged() {
  for (uint32_t section = 0; section < 5; section++) {
    const File a;
    Pair pair({file(a)}, CSD_BF16, 3);
    pair.first_step(false);
    OK(csd_engine_wait_writes(pair.model.engine, nullptr));
    csd_tile_state tiles[kTiles];
    std::vector<uint32_t> sums(kTiles * 4 * 5);
    OK(csd_engine_tiles(pair.model.engine, 0, kTiles, tiles, sums.data(), nullptr));
    const uint64_t starts[] = {0, 2 * kTile, 3 * kTile, 4 * kTile, 5 * kTile}, slot = slot_bytes(CSD_BF16, 3);
    const off_t at = static_cast<off_t>((2 * 1 + tiles[1].slot) * slot + starts[section] + 3);
    uint8_t byte = 0;
    CHECK(pread(a.fd, &byte, 1, at) == 1);
    byte ^= 16;
    CHECK(pwrite(a.fd, &byte, 1, at) == 1);
    pair.model.new_grads();
    const auto before = pair.model.params;
    const int status = pair.model.step();
    CHECK(section == 0 ? status == CSD_OK : status == CSD_EDAMAGED && pair.model.error.tile == 1);
    if (section == 0) continue;
    const std::string named = "section " + std::to_string(section) + " of tile 1";
    CHECK(strstr(pair.model.error.text, named.c_str()));
    float *wanted[4] = {};
    std::vector<float> found(64);
    wanted[1] = found.data();
    CHECK(csd_engine_decode(pair.model.engine, 1, 0, 64, nullptr, wanted, &pair.model.error) == CSD_EDAMAGED);
  }
}

void resumed_store() {
  const File a;
  auto first = std::make_unique<Pair>(std::vector<csd_device>{file(a)}, CSD_BF16, 4);
  first->first_step(false);
  first->step();
  OK(csd_engine_wait_writes(first->model.engine, nullptr));
  csd_tile_state tiles[kTiles];
  std::vector<uint32_t> sums(kTiles * 4 * 7);
  OK(csd_engine_tiles(first->model.engine, 0, kTiles, tiles, sums.data(), nullptr));
  Model second({file(a)}, CSD_BF16, 4, tiles, sums.data());
  for (uint32_t p = 0; p < kN; p++) {
    for (uint32_t s = 0; s < 4; s++) CHECK(same(second.decoded(p, s), first->references[p].states(s)));
    memcpy(second.params[p].data(), first->model.params[p].data(), second.params[p].size());
  }
  second.steps = first->model.steps;
  first->step();
  second.new_grads();
  OK(second.step());
  for (uint32_t p = 0; p < kN; p++) CHECK(second.params[p] == first->model.params[p]);
}

void refused() {
  const File a;
  const csd_device device = file(a);
  csd_engine *engine = nullptr;
  csd_error error;
  OK(csd_engine_create(&device, 1, &engine, &error));
  const uint64_t offset = 0;
  const csd_piece piece{0, 0, 0, 32, 64};
  float *windows[4];
  const csd_extent good{kTile, 1, 3, 2, nullptr, kSumElems, nullptr, &offset, nullptr, 0, nullptr, CSD_8BIT, CSD_BF16};
  const auto refuses = [&](const std::function<void(csd_extent &)> &spoil) {
    csd_extent bad = good;
    spoil(bad);
    return csd_engine_extend(engine, &bad, windows, &error) == CSD_EINVAL;
  };
  CHECK(refuses([](csd_extent &e) { e.codec = 2; }));
  CHECK(refuses([](csd_extent &e) { e.tile_elems = 1024; }));
  CHECK(refuses([](csd_extent &e) { e.sections = 2; }));
  CHECK(refuses([](csd_extent &e) { e.codec = CSD_ROOT; }));
  CHECK(refuses([](csd_extent &e) { e.param_dtype = 3; }));
  CHECK(refuses([&](csd_extent &e) { e.pieces = &piece, e.n_pieces = 1; }));
  OK(csd_engine_extend(engine, &good, windows, &error));
  const uint32_t tile = 0;
  CHECK(csd_engine_edited(engine, &tile, 1, &error) == CSD_EINVAL);
  float *none[4] = {};
  CHECK(csd_engine_decode(engine, 1, 0, 64, nullptr, none, &error) == CSD_EINVAL);
  CHECK(csd_engine_decode(engine, 0, 32, 64, nullptr, none, &error) == CSD_EINVAL);
  CHECK(csd_engine_decode(engine, 0, 0, kTile + 64, nullptr, none, &error) == CSD_EINVAL);
  OK(csd_engine_close(engine, &error));
}

}  // namespace

int main() {
  like_one_array();
  in_parameters();
  set_by_somebody();
  undone();
  edited();
  damaged();
  resumed_store();
  refused();
  puts("tiles of codes are what one array is");
  return 0;
}
