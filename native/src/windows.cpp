// Extents, and the windows through which a program reads and writes their states between steps.
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "engine.h"
#include "float_mode.h"
#include "memory.h"
#include "updater.h"

namespace csd {

constexpr uint64_t kStagger = 272;  // elements: 17 cache lines; three times this is less than a page
static_assert(4 * 3 * kStagger < 4096);

// Larger than any machine needs, and small enough that no product below overflows: with 16 bytes and two slots per
// element these are 2^61 bytes.
constexpr uint64_t kMostTileElems = uint64_t{1} << 31, kMostElems = uint64_t{1} << 56;
constexpr uint64_t kMostFileOffset = uint64_t{1} << 61;

// Throws Failure if the extent is not valid, or a step is under way. Returns the device of each of its tiles.
std::vector<uint32_t> Engine::check_extent(const csd_extent &e) const {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (e.tile_elems == 0 || e.tile_elems % CSD_MIN_GRAIN || 4 * e.tile_elems % page || e.sections < 1 || e.sections > 4)
    throw Failure{CSD_EINVAL, "a tile has a multiple of " + std::to_string(CSD_MIN_GRAIN) +
                                  " elements (and of a page), in 1 to 4 sections"};
  const bool has_states = e.codec == CSD_8BIT ? e.sections >= 3 : e.sections == 2;
  if (e.codec > CSD_LINEAR || (e.codec != CSD_FP32 && (e.tile_elems % 4096 || !has_states || e.param_dtype > CSD_BF16)))
    throw Failure{CSD_EINVAL,
                  "a tile of codes has a multiple of 4096 elements, as many states as its codec, and parameters of a "
                  "known dtype"};
  if (e.sum_elems == 0 || e.sum_elems % CSD_MIN_GRAIN)
    throw Failure{CSD_EINVAL,
                  "a checksum covers a multiple of " + std::to_string(CSD_MIN_GRAIN) + " elements of a section"};
  if (e.tile_elems > kMostTileElems || e.n_tiles > kMostElems / e.tile_elems)
    throw Failure{CSD_EINVAL, std::to_string(e.n_tiles) + " tiles of " + std::to_string(e.tile_elems) +
                                  " elements are too much: at most 2^31 in a tile and 2^56 in an extent"};
  for (size_t d = 0; d < lanes_.size(); d++)
    if (e.file_offset[d] % page || e.file_offset[d] > kMostFileOffset)
      throw Failure{CSD_EINVAL,
                    "file_offset " + std::to_string(e.file_offset[d]) + " is not a multiple of a page, up to 2^61", 0,
                    static_cast<int32_t>(d)};
  if (phase_ != Phase::idle) throw Failure{CSD_ESTATE, "a step is under way"};
  if (e.n_tiles > INT32_MAX - tiles_.size()) throw Failure{CSD_EINVAL, "more than 2^31 tiles"};
  if (e.slots < 1 || e.slots > 2) throw Failure{CSD_EINVAL, "a tile has 1 or 2 slots"};
  if (e.states && !e.sums) throw Failure{CSD_EINVAL, "tiles of a store come with their checksums"};
  for (uint32_t i = 0; e.states && i < e.n_tiles; i++)
    if (e.states[i].slot >= e.slots)
      throw Failure{CSD_EINVAL, "tile " + std::to_string(i) + " names a slot that does not exist"};
  for (uint64_t i = 0; i < e.n_pieces; i++) {
    const csd_piece &p = e.pieces[i];
    const bool in_order =
        i == 0 || e.pieces[i - 1].tile < p.tile ||
        (e.pieces[i - 1].tile == p.tile && e.pieces[i - 1].tile_first + e.pieces[i - 1].elems <= p.tile_first);
    const bool whole_groups = e.codec == CSD_FP32 || (p.tile_first % 64 == 0 && p.param_first % 64 == 0);
    if (p.tile >= e.n_tiles || p.tile_first > e.tile_elems || p.elems > e.tile_elems - p.tile_first || !in_order ||
        !whole_groups)
      throw Failure{CSD_EINVAL, "piece " + std::to_string(i) +
                                    " is not within its tile, out of order, or does not begin with a group"};
  }
  std::vector<uint32_t> device(e.n_tiles);
  for (uint32_t i = 0; i < e.n_tiles; i++) {
    device[i] = e.devices ? e.devices[i] : i % static_cast<uint32_t>(lanes_.size());
    if (device[i] >= lanes_.size())
      throw Failure{CSD_EINVAL, "tile " + std::to_string(i) + " names a device that does not exist"};
    const Device &on = *lanes_[device[i]].device;
    if (!on.has_codec(e.codec, std::min(e.sum_elems, e.tile_elems)))
      throw Failure{CSD_EINVAL,
                    on.has_codec(e.codec, e.tile_elems) ? "a checksum of codes covers a multiple of 4096 elements"
                    : e.codec == CSD_FP32
                        ? "states can be kept as codes only, because its xclbin lacks the kernel for fp32,"
                        : "states can be kept as fp32 only, because its xclbin lacks the kernel for codes,",
                    0, static_cast<int32_t>(device[i])};
  }
  return device;
}

void Engine::extend(const csd_extent &e, float **windows) {
  Lock lock(mutex_);
  const std::vector<uint32_t> device = check_extent(e);
  wait_writes(lock);  // because buffers may be replaced by larger ones

  // Windows over which nothing will be mapped start at different cache lines of a page. Streams whose distance in
  // memory is a multiple of a page compete for the same cache sets and memory banks, which was measured to cost 2 to 10
  // % of the bandwidth.
  const bool resident = std::all_of(lanes_.begin(), lanes_.end(), [](const Lane &l) { return l.device->resident(); });
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  HugeMemory memory[4];
  float *window[4] = {};
  const Layout layout(e.codec, e.sections, e.param_dtype, e.tile_elems);
  for (uint32_t s = 0; s < e.sections && !layout.coded(); s++) {
    memory[s] = HugeMemory(4 * e.tile_elems * e.n_tiles + page, !resident);
    window[s] = memory[s].floats() + (resident ? s * kStagger : 0);
  }
  ResidentCodes codes;
  if (layout.coded()) {
    const auto on_resident = [this](uint32_t d) { return lanes_[d].device->resident(); };
    const auto n = static_cast<uint64_t>(std::count_if(device.begin(), device.end(), on_resident));
    codes.codes = HugeMemory((layout.bytes() - layout.bytes(0)) * n);
    codes.first_sections = HugeMemory(layout.bytes(0) * n);
    if (layout.has_correction()) codes.checks = HugeMemory(4 * (e.tile_elems / 64) * n);
  }
  const uint64_t largest = std::max(largest_tile_, layout.bytes());
  const uint64_t largest_section = std::max(largest_section_, 4 * e.tile_elems);
  std::vector<uint64_t> on_device = tiles_per_device();
  for (const uint32_t d : device) on_device[d]++;
  grow_buffers(largest, largest_section, on_device);

  const size_t first_tile = tiles_.size(), extents = pieces_.size();
  try {
    pieces_.emplace_back(e.pieces, e.pieces + e.n_pieces);
    resident_codes_.push_back(std::move(codes));
    add_tiles(e, layout, device, window);
    for (size_t i = first_tile; !resident && !layout.coded() && i < tiles_.size(); i++)
      if (const Tile &t = tiles_[i]; lanes_[t.device].device->resident())  // files are mapped over the other tiles
        for (uint32_t s = 0; s < e.sections; s++) make_accessible(t.window[s], t.layout.bytes(s));
  } catch (...) {
    tiles_.resize(first_tile);
    pieces_.resize(extents);
    resident_codes_.resize(extents);
    throw;
  }
  for (uint32_t s = 0; s < e.sections; s++) {
    windows[s] = window[s];
    memory[s].release();
  }
  largest_tile_ = largest;
  largest_section_ = largest_section;
}

void Engine::add_tiles(const csd_extent &e, const Layout &layout, const std::vector<uint32_t> &device,
                       float *const *window) {
  const ResidentCodes &memory = resident_codes_.back();
  auto *codes = reinterpret_cast<char *>(memory.codes.floats());
  auto *first_section = reinterpret_cast<char *>(memory.first_sections.floats());
  auto *checks = reinterpret_cast<uint32_t *>(memory.checks.floats());
  const auto first_tile = static_cast<uint32_t>(tiles_.size());
  std::vector<uint64_t> end_of_file(e.file_offset, e.file_offset + lanes_.size());
  const csd_piece *piece = pieces_.back().data(), *const end = piece + e.n_pieces;
  for (uint32_t i = 0; i < e.n_tiles; i++) {
    Tile &t = tiles_.emplace_back();
    t.index = first_tile + i;
    t.device = device[i];
    t.extent = static_cast<uint32_t>(pieces_.size() - 1);
    t.states = e.sections;
    t.layout = layout;
    t.param_dtype = e.param_dtype;
    if (layout.coded() && lanes_[device[i]].device->resident()) {
      t.codes = std::exchange(codes, codes + (layout.bytes() - layout.bytes(0)));
      t.first_section = std::exchange(first_section, first_section + layout.bytes(0));
      if (checks) t.checks = std::exchange(checks, checks + e.tile_elems / 64);
    }
    t.elems = e.tile_elems;
    t.sum_elems = std::min(e.sum_elems, e.tile_elems);
    t.n_slots = e.slots;
    t.file_offset = std::exchange(end_of_file[t.device], end_of_file[t.device] + e.slots * layout.bytes());
    if (e.states) {
      t.slot = e.states[i].slot;
      t.slots[t.slot].summed = e.states[i].summed;
      t.slots[t.slot].sums.assign(e.sums + i * t.n_sums(), e.sums + (i + 1) * t.n_sums());
    }
    t.pieces = piece;
    while (piece != end && piece->tile == i) piece++;
    t.n_pieces = static_cast<uint64_t>(piece - t.pieces);
    for (uint32_t s = 0; s < e.sections && !layout.coded(); s++) t.window[s] = window[s] + i * e.tile_elems;
    map_windows(t, !e.states);
  }
}

void Engine::map_windows(Tile &t, bool open) {
  if (open) drop_cached(t);  // a cached buffer would miss writes to the windows
  const uint32_t before = std::exchange(t.mapped_slot, t.slot);
  const bool was_open = std::exchange(t.open, open && !t.layout.coded());
  const int error = lanes_[t.device].device->map(t);
  if (error == 0) return;
  t.mapped_slot = before;
  t.open = was_open;
  const int32_t device = static_cast<int32_t>(t.device);
  if (error == ENOMEM)
    throw Failure{CSD_ENOMEM,
                  "cannot map tile " + std::to_string(t.index) + " of " + std::to_string(tiles_.size()) +
                      ": each takes " + std::to_string(t.states) +
                      " mappings and vm.max_map_count is used up; raise it with sysctl, or choose a larger tile_size,",
                  error, device};
  throw Failure{CSD_EIO, "mapping tile " + std::to_string(t.index), error, device};
}

void Engine::remap(bool open) {
  Lock lock(mutex_);
  if (phase_ == Phase::stepping) throw Failure{CSD_ESTATE, "a step is under way"};
  wait_writes(lock);
  if (!open) {
    std::list<Pool::Task> sums = sum_tasks();
    const size_t n = sums.size();
    Pool::updates().submit(std::move(sums));
    ops_in_flight_ += n;
    wait_ops(lock);
  }
  for (Tile &t : tiles_)
    if (!t.freed && (t.mapped_slot != t.slot || t.open != open)) map_windows(t, open);
}

void Engine::free_tiles(const uint32_t *tiles, uint32_t n) {
  Lock lock(mutex_);
  if (phase_ != Phase::idle) throw Failure{CSD_ESTATE, "a step is under way"};
  for (uint32_t i = 0; i < n; i++)
    if (tiles[i] >= tiles_.size()) throw Failure{CSD_EINVAL, "no tile " + std::to_string(tiles[i])};
  wait_ops(lock);
  decoded_ = {};
  std::set<uint32_t> changed;
  for (uint32_t i = 0; i < n; i++) {
    Tile &t = tiles_[tiles[i]];
    if (std::exchange(t.freed, true)) continue;
    const auto unwritten =
        std::find_if(unwritten_.begin(), unwritten_.end(), [&t](const Job *job) { return job->tile == &t; });
    if (unwritten != unwritten_.end()) {
      release_buffer(**unwritten, false);
      unwritten_.erase(unwritten);
    }
    drop_cached(t);
    t.open = t.edited = false;
    t.mapped_slot = t.slot;
    for (Slot &slot : t.slots) slot = {};
    changed.insert(t.extent);
  }
  for (const uint32_t extent : changed) discard_freed(extent);
}

// Frees the memory of an extent's freed tiles. Neighbours are freed together, since they share pages.
void Engine::discard_freed(uint32_t extent) {
  const auto is_before = [](const Tile &t, uint32_t e) { return t.extent < e; };
  const auto first = std::lower_bound(tiles_.begin(), tiles_.end(), extent, is_before);
  const auto end = std::lower_bound(first, tiles_.end(), extent + 1, is_before);
  if (first->layout.coded() && std::all_of(first, end, [](const Tile &t) { return t.freed; })) {
    resident_codes_[extent] = {};
    return;
  }
  for (auto t = first; t != end;) {
    const bool resident = lanes_[t->device].device->resident();
    auto next = t + 1;
    while (next != end && t->freed && next->freed && lanes_[next->device].device->resident() == resident) next++;
    const auto n = static_cast<uint64_t>(next - t);
    for (uint32_t s = 0; t->freed && s < t->layout.n() && !t->layout.coded(); s++) {
      if (resident) discard_pages(t->window[s], n * t->layout.bytes(s));
      else map_nothing(t->window[s], n * t->layout.bytes(s));
    }
    if (t->freed && t->codes) {
      discard_pages(t->codes, n * (t->layout.bytes() - t->layout.bytes(0)));
      discard_pages(t->first_section, n * t->layout.bytes(0));
    }
    t = next;
  }
}

// The tasks that compute the checksums of tiles that are open and not summed. Nothing was stored since the user wrote
// to them, so their windows show the current slot (see edited()). After a model was loaded, this may read all of it
// from its file, which takes long; hence the tasks run on all update threads, without the lock.
std::list<Pool::Task> Engine::sum_tasks() {
  std::list<Pool::Task> tasks;
  for (Tile &t : tiles_) {
    if (!t.open || t.slots[t.slot].summed) continue;
    const auto sum = std::make_shared<Slot>(Slot{true, std::vector<uint32_t>(t.n_sums())});
    tasks.push_back([this, &t, sum, writes = t.writes] {
      const char *sections[4] = {};
      for (uint32_t s = 0; s < t.layout.n(); s++) sections[s] = reinterpret_cast<const char *>(t.window[s]);
      sum_tile(t, sections, sum->sums.data());
      std::lock_guard lock(mutex_);
      if (t.writes == writes) t.slots[t.slot] = std::move(*sum);
      if (--ops_in_flight_ == 0) ops_done_.notify_all();
    });
  }
  return tasks;
}

void Engine::edited(const uint32_t *tiles, uint32_t n) {
  Lock lock(mutex_);
  for (uint32_t i = 0; i < n; i++) {
    if (tiles[i] >= tiles_.size() || tiles_[tiles[i]].layout.coded())
      throw Failure{CSD_EINVAL, "no tile " + std::to_string(tiles[i]) + ", or it has no windows"};
    Tile &t = tiles_[tiles[i]];
    // A window that was not remapped since the last step shows an outdated slot, so edits to it do not count. But an
    // open window of a tile with one slot always shows the current state.
    const bool current = t.mapped_slot == t.slot;
    if (t.open && (current || t.n_slots == 1)) {
      t.slots[t.slot].summed = false;
      t.writes++;
    } else if (!t.open && current) {
      t.edited = true;
    }
  }
}

// Does the tile's window show states with which a step would begin, while its slot may not have them?
bool Engine::shown_in_window(const Tile &t) const {
  return lanes_[t.device].device->resident() || (t.mapped_slot == t.slot && (t.open || t.edited));
}

// Reads the states with which a step would begin.
void Engine::read(uint32_t tile, uint32_t sections, uint64_t elems, char *states) {
  Lock lock(mutex_);
  if (phase_ != Phase::idle) throw Failure{CSD_ESTATE, "a step is under way"};
  if (tile >= tiles_.size() || tiles_[tile].codes || sections > tiles_[tile].layout.n() || elems > tiles_[tile].elems ||
      tiles_[tile].freed)
    throw Failure{CSD_EINVAL,
                  "no tile " + std::to_string(tile) + ", or it has resident codes, is smaller, or was given back"};
  wait_writes(lock);
  const Tile &t = tiles_[tile];
  Device &device = *lanes_[t.device].device;
  try {
    if (shown_in_window(t)) {
      for (uint32_t s = 0; s < sections; s++) read_window(t, s, 0, t.elems, states + t.layout.first(s));
      return;
    }
    const uint64_t bytes = sections < t.layout.n() ? t.layout.first(sections) : t.layout.bytes();
    if (t.cached_buffer) {
      memcpy(states, t.cached_buffer->at, bytes);
    } else {
      const HugeMemory slot(bytes);  // aligned for direct I/O
      auto *const to = reinterpret_cast<char *>(slot.floats());
      if (const int error = bytes < t.layout.bytes() ? device.read_first(t, bytes, to) : load_now(device, t, to))
        throw Failure{CSD_EIO, "reading tile " + std::to_string(tile), error};
      memcpy(states, to, bytes);
    }
    check_slot(t, states, sections, 0, elems);
  } catch (Failure &failure) {
    failure.device = static_cast<int32_t>(t.device);
    throw;
  }
}

// ---- States that are read without windows ---------------------------------------------------

// Returns the tile's current slot, from the buffer that keeps it or read from the device and not verified; null if it
// has codes and is resident.
const char *Engine::slot_of(Tile &t) {
  if (t.codes) return nullptr;
  if (t.cached_buffer) return reinterpret_cast<const char *>(t.cached_buffer->at);
  auto *const at = reinterpret_cast<char *>(decoded_.slot.floats());
  if (decoded_.tile == &t) return at;
  decoded_ = {nullptr, HugeMemory(t.layout.bytes())};
  auto *const slot = reinterpret_cast<char *>(decoded_.slot.floats());
  if (const int error = load_now(*lanes_[t.device].device, t, slot))
    throw Failure{CSD_EIO, "reading tile " + std::to_string(t.index), error, static_cast<int32_t>(t.device)};
  decoded_.tile = &t;
  return slot;
}

void Engine::decode(uint32_t tile, uint64_t first, uint64_t n, const void *param, float *const *states) {
  Lock lock(mutex_);
  if (phase_ != Phase::idle) throw Failure{CSD_ESTATE, "a step is under way"};
  if (tile >= tiles_.size() || (tiles_[tile].layout.coded() && first % 64) || first > tiles_[tile].elems ||
      n > tiles_[tile].elems - first || (param && !tiles_[tile].codes) || tiles_[tile].freed)
    throw Failure{CSD_EINVAL, "tile " + std::to_string(tile) + " has no such states"};
  wait_writes(lock);
  Tile &t = tiles_[tile];
  if (!t.layout.coded()) return read_states(t, first, n, states);
  auto *const slot = const_cast<char *>(slot_of(t));  // decode() only reads it
  if (slot) check_slot(t, slot, t.layout.n(), first, n);
  char *sections[kMostSections] = {};
  t.find_sections(slot, sections);
  const FloatMode mode(Subnormals::zero);
  if (param) return decode_in_param(t, sections, first, n, static_cast<const char *>(param), states);
  csd::decode(codes_at(t.layout, sections, first), n, t.param_dtype, states, current_isa.load());
}

// Copies elements [first, first + n) of fp32 states, except those whose address is null.
void Engine::read_states(Tile &t, uint64_t first, uint64_t n, float *const *states) {
  const char *const slot = shown_in_window(t) ? nullptr : slot_of(t);
  if (slot) check_slot(t, slot, t.layout.n(), first, n);
  for (uint32_t s = 0; s < t.layout.n(); s++) {
    if (!states[s]) continue;
    if (slot) memcpy(states[s], slot + t.layout.first(s) + 4 * first, 4 * n);
    else read_window(t, s, first, n, reinterpret_cast<char *>(states[s]));
  }
}

// Decodes a parameter that is its own section, with the value that the next step will find, and without reading beyond
// its end.
void Engine::decode_in_param(const Tile &t, char *const *sections, uint64_t first, uint64_t n, const char *param,
                             float *const *states) {
  constexpr uint64_t kBlock = 4096;
  alignas(64) char params[4 * kBlock];
  alignas(64) uint8_t corrections[kBlock];
  const uint64_t bytes = t.param_dtype == CSD_F32 ? 4 : 2;
  for (uint64_t i = 0; i < n; i += kBlock) {
    const uint64_t some = std::min(kBlock, n - i), group = (first + i) / 64;
    Codes codes = codes_at(t.layout, sections, first + i);
    memset(params, 0, sizeof params);
    memcpy(params, param + bytes * i, bytes * some);
    codes.param = params;
    if (codes.correction) {
      memset(corrections, 0, sizeof corrections);
      memcpy(corrections, codes.correction, some);
      drop_stale_corrections(reinterpret_cast<const uint16_t *>(params), some, t.checks + group, corrections);
      codes.correction = corrections;
    }
    float *wanted[4] = {};
    for (uint32_t s = 0; s < 4; s++) wanted[s] = states[s] ? states[s] + i : nullptr;
    csd::decode(codes, some, t.param_dtype, wanted, current_isa.load());
  }
}

void Engine::tiles(uint32_t first, uint32_t n, csd_tile_state *states, uint32_t *sums) {
  Lock lock(mutex_);
  if (first + static_cast<uint64_t>(n) > tiles_.size()) throw Failure{CSD_EINVAL, "no such tiles"};
  for (uint32_t i = 0; i < n; i++) {
    const Tile &t = tiles_[first + i];
    const Slot &slot = t.slots[t.slot];
    states[i] = {t.slot, slot.summed};
    if (slot.summed) std::copy(slot.sums.begin(), slot.sums.end(), sums);
    else std::fill_n(sums, t.n_sums(), 0);
    sums += t.n_sums();
  }
}

}  // namespace csd
