// The tile buffers of each device: how many there are, which tile takes which, and what they keep between steps.
#include <errno.h>

#include <algorithm>
#include <utility>

#include "engine.h"

namespace csd {

constexpr uint64_t kMostBytes = uint64_t{1} << 47;  // of the buffers of a device: an address space

// For tiles of up to `bytes`, and so many on each device. If that fails, a device may be left without any; whoever needs
// them asks again.
void Engine::grow_buffers(uint64_t bytes, const std::vector<uint64_t> &tiles) {
  if (bytes == 0) return;  // there are no extents yet
  for (Lane &lane : lanes_) {
    const auto device = static_cast<size_t>(&lane - lanes_.data());
    uint64_t n = lane.depth;
    if (lane.device->keeps_buffers() && lane.cache_bytes > 0)
      n = std::max(n, std::min(n + static_cast<uint64_t>(lane.cache_bytes) / bytes, tiles[device]));
    if (bytes <= lane.buffer_bytes && n <= lane.n_buffers) continue;
    if (n > kMostBytes / bytes)
      throw Failure{CSD_ENOMEM, std::to_string(n) + " buffers of " + std::to_string(bytes) + " bytes are too much",
                    ENOMEM, static_cast<int32_t>(device)};
    for (const Buffer &buffer : lane.free)
      if (buffer.tile) buffer.tile->kept = false;
    lane.free = {};
    lane.n_buffers = 0;
    lane.buffer_bytes = lane.counts.buffer_bytes = 0;
    try {
      for (float *at : lane.device->allocate(static_cast<uint32_t>(n), bytes)) lane.free.push_back({at, nullptr});
    } catch (Failure &failure) {
      failure.device = static_cast<int32_t>(device);
      throw;
    }
    lane.buffer_bytes = bytes;
    lane.n_buffers = static_cast<uint32_t>(n);
    lane.counts.buffer_bytes = lane.device->memory_bytes();
  }
}

std::vector<uint64_t> Engine::tiles_on_device() const {
  std::vector<uint64_t> n(lanes_.size());
  for (const Tile &t : tiles_) n[t.device]++;
  return n;
}

// The one that has the tile; else one that has nothing, or what is needed last. `ahead` of others: then it is not worth
// what this step or the beginning of the next could do without a read.
bool Engine::take_buffer(Lane &l, Job &job, bool ahead) {
  Tile &t = *job.tile;
  const auto later = [this, &l](const Buffer &a, const Buffer &b) { return needed_in(l, a) < needed_in(l, b); };
  const auto found = t.kept ? std::find_if(l.free.begin(), l.free.end(), [&t](const Buffer &b) { return b.tile == &t; })
                            : std::max_element(l.free.begin(), l.free.end(), later);
  if (found == l.free.end() || (ahead && needed_in(l, *found) < l.in_step + l.n_buffers)) return false;
  job.read = job.must_read();
  // Who holds an open window may write there.
  job.work.verify = !job.work.from_windows && t.slots[t.slot].summed && (t.kept || !t.open);
  if (found->tile) found->tile->kept = false;
  job.buffer = found->at;
  l.free.erase(found);
  l.on_way++;
  l.read += job.read;
  return true;
}

// How many tiles of its device flow before the one that a buffer has, if the next step flows the other way round.
uint64_t Engine::needed_in(const Lane &l, const Buffer &buffer) const {
  if (!buffer.tile) return UINT64_MAX;
  const Job *job = buffer.tile->index < job_of_tile_.size() ? job_of_tile_[buffer.tile->index] : nullptr;
  if (!job) return UINT64_MAX - 1;  // nobody knows
  return job->begun ? 2 * l.in_step - job->place : job->place;
}

void Engine::release_buffer(Job &job, bool keep) {
  Lane &l = lane(job);
  job.tile->kept = keep;
  l.free.push_back({std::exchange(job.buffer, nullptr), keep ? job.tile : nullptr});
  l.on_way--;
  l.read -= job.read;
}

void Engine::forget(Tile &t) {
  if (!std::exchange(t.kept, false)) return;
  for (Buffer &buffer : lanes_[t.device].free)
    if (buffer.tile == &t) buffer.tile = nullptr;
}

}  // namespace csd
