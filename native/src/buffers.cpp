// The tile buffers of each device: their number, their assignment to tiles, and the tiles that they keep between steps.
#include <errno.h>
#include <string.h>

#include <algorithm>
#include <utility>

#include "engine.h"

namespace csd {

constexpr uint64_t kMostBytes = uint64_t{1} << 47;  // for all buffers of a device: the size of an address space

// Makes buffers for tiles of up to `bytes` with sections of up to `section`; `tiles` has the number of tiles per
// device. On failure a device may be left without buffers; begin() and extend() call this again.
void Engine::grow_buffers(uint64_t bytes, uint64_t section, const std::vector<uint64_t> &tiles) {
  if (bytes == 0) return;  // there are no extents yet
  for (Lane &lane : lanes_) {
    const auto device = static_cast<size_t>(&lane - lanes_.data());
    uint64_t n = lane.depth;
    if (lane.device->keeps_buffers() && lane.cache_bytes > 0)
      n = std::max(n, std::min(n + static_cast<uint64_t>(lane.cache_bytes) / bytes, tiles[device]));
    if (bytes <= lane.buffer_bytes && section <= lane.section_bytes && n <= lane.n_buffers) continue;
    if (n > kMostBytes / bytes)
      throw Failure{CSD_ENOMEM, std::to_string(n) + " buffers of " + std::to_string(bytes) + " bytes are too much",
                    ENOMEM, static_cast<int32_t>(device)};
    for (const Buffer &buffer : lane.free)
      if (buffer.tile) buffer.tile->cached_buffer = nullptr;
    lane.free.clear();
    lane.n_buffers = 0;
    lane.buffer_bytes = lane.section_bytes = lane.counts.buffer_bytes = 0;
    try {
      for (float *at : lane.device->allocate(static_cast<uint32_t>(n), bytes, section))
        lane.free.insert({at, nullptr, needed_in(lane, nullptr), lane.freed++});
    } catch (Failure &failure) {
      failure.device = static_cast<int32_t>(device);
      throw;
    }
    lane.buffer_bytes = bytes;
    lane.section_bytes = section;
    lane.n_buffers = static_cast<uint32_t>(n);
    lane.counts.buffer_bytes = lane.device->memory_bytes();
    lane.counts.huge_bytes = lane.device->huge_bytes();
    lane.counts.numa = lane.device->numa();
  }
}

std::vector<uint64_t> Engine::tiles_per_device() const {
  std::vector<uint64_t> n(lanes_.size());
  for (const Tile &t : tiles_) n[t.device]++;
  return n;
}

// Takes a buffer for the job: the one that keeps its tile, else one that keeps none or the tile needed last. If the job
// `overtakes` others, a buffer is not taken if it keeps a tile that this step, or the beginning of the next, needs:
// that would only cost another read. Returns whether a buffer was taken.
bool Engine::take_buffer(Lane &l, Job &job, bool overtakes) {
  Tile &t = *job.tile;
  const auto found = t.cached_buffer ? l.free.find(*t.cached_buffer) : l.free.begin();
  if (found == l.free.end() || (overtakes && found->needed_in < l.jobs.size() + l.n_buffers)) return false;
  job.needs_read = job.must_read();
  // Without a cached buffer, a tile with an open window cannot be verified: the user may have written to it.
  job.work.verify =
      !job.work.from_windows && !job.work.is_new && t.slots[t.slot].summed && (t.cached_buffer || !t.open);
  // Skip reading the parameters if host memory has them. That needs checksums, which tell whether they are the right
  // ones, and a device that can do without: a card can only use what it reads from the drive.
  job.work.param_at_host = job.needs_read && job.work.verify && t.layout.coded() && job.pass != 1 &&
                           l.device->skips_params() &&
                           std::all_of(t.pieces, t.pieces + t.n_pieces, [&job](const csd_piece &p) {
                             const csd_param &param = job.work.params[p.param];
                             return param.param || param.in_image;
                           });
  if (job.first_to_read() == job.last_byte()) job.needs_read = false;  // the half of a second pass, if masters are fp32
  job.buffer = l.free.extract(found);
  if (Tile *evicted = std::exchange(job.buffer.value().tile, nullptr)) {
    evicted->cached_buffer = nullptr;
    if (const Job *other = job_of(*evicted); other && other->stage == Stage::queued)
      l.to_read[other->place] = other->may_overtake();
  }
  l.in_flight++;
  l.in_flight_read += job.needs_read;
  return true;
}

Engine::Job *Engine::first_to_read(const Lane &l) {
  const void *at = memchr(&l.to_read[l.next], true, l.to_read.size() - l.next);
  return at ? l.jobs[static_cast<size_t>(static_cast<const char *>(at) - l.to_read.data())] : nullptr;
}

Engine::Job *Engine::job_of(const Tile &t) const {
  return t.index < job_of_tile_.size() ? job_of_tile_[t.index] : nullptr;
}

// The number of tiles that the device processes before `tile`, which a buffer keeps.
uint64_t Engine::needed_in(const Lane &l, const Tile *tile) const {
  if (!tile) return UINT64_MAX;
  const Job *job = job_of(*tile);
  if (!job) return UINT64_MAX - 1;  // not in this step: unknown
  if (job->stage == Stage::queued) return job->place;
  return order_ == CSD_TO_AND_FRO ? 2 * l.jobs.size() - job->place : l.jobs.size() + job->place;
}

// Sorts the free buffers by when this step needs their tiles. A tile in a free buffer cannot begin before the buffer is
// taken, so the order stays valid until the next step or a release with a new order.
void Engine::reorder_buffers() {
  for (Lane &l : lanes_) {
    FreeBuffers before = std::exchange(l.free, {});
    while (!before.empty()) {
      auto buffer = before.extract(before.begin());
      buffer.value().needed_in = needed_in(l, buffer.value().tile);
      l.free.insert(std::move(buffer));
    }
  }
}

void Engine::release_buffer(Job &job, bool keep) {
  Lane &l = lane(job);
  Tile *const tile = keep ? job.tile : nullptr;
  job.buffer.value() = {job.buffer.value().at, tile, needed_in(l, tile), l.freed++};
  const Buffer &free = *l.free.insert(std::move(job.buffer)).position;
  job.tile->cached_buffer = keep ? &free : nullptr;
  l.in_flight--;
  l.in_flight_read -= job.needs_read;
}

void Engine::drop_cached(Tile &t) {
  if (!t.cached_buffer) return;
  FreeBuffers &all = lanes_[t.device].free;
  auto buffer = all.extract(all.find(*std::exchange(t.cached_buffer, nullptr)));
  buffer.value().tile = nullptr;
  buffer.value().needed_in = needed_in(lanes_[t.device], nullptr);
  all.insert(std::move(buffer));
}

}  // namespace csd
