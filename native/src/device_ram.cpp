// ram: tiles in host memory, updated by the CPU, either in place or from one slot to the other.
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <vector>

#include "device.h"
#include "device_file.h"
#include "memory.h"

namespace csd {
namespace {

// Updates in place. Nothing can fail in the middle of a step, so one slot is enough.
class RamDevice : public Device {
 public:
  bool resident() const override { return true; }
  bool can_run_here() const override { return true; }
  // Between the passes of a step the caller computes something, and that can fail.
  std::string lacks_for_passes() const override { return "a second slot, as its states are updated in place"; }
  void update(const Tile &tile, float *buffer, Work &work, Updated done) override {
    update_on_cpu(*this, tile, buffer, work, std::move(done));
  }
};

// For use beside devices that can fail: steps can be undone. The slots are in an in-memory file, and windows are
// mappings of it, as of any file. But there is no I/O: a step copies a tile to its next slot and updates it there.
class SlotsInMemory : public FileDevice {
 public:
  SlotsInMemory(const csd_device &d, Pool &io) : FileDevice(d, io) {}
  SlotsInMemory(const SlotsInMemory &) = delete;
  SlotsInMemory &operator=(const SlotsInMemory &) = delete;
  ~SlotsInMemory() override {
    for (const auto &[at, bytes] : mappings_) munmap(at, bytes);
  }

  bool can_run_here() const override { return true; }

  // A tile with a single slot would be left half updated if the step failed, so it goes through a buffer.
  float *next_slot_in_memory(const Tile &tile) override {
    return tile.n_slots == 1 ? nullptr : reinterpret_cast<float *>(slot(tile, tile.next_slot()));
  }

  std::vector<float *> allocate(uint32_t n, uint64_t bytes, uint64_t) override {
    memory_ = {};
    memory_ = HugeMemory(bytes * n);  // its pages are used only for tiles with a single slot
    std::vector<float *> all;
    for (uint32_t i = 0; i < n; i++) all.push_back(memory_.floats() + i * bytes / sizeof(float));
    return all;
  }

  void load(const Tile &tile, float *buffer, uint64_t first, uint64_t last, Done done) override {
    const char *const from = slot(tile, tile.slot) + first;
    submit_here(io_,
                [from, to = reinterpret_cast<char *>(buffer) + first, bytes = last - first, done = std::move(done)] {
                  memcpy(to, from, bytes);
                  done(0);
                });
  }

  void store(const Tile &tile, const float *buffer, uint64_t first, uint64_t last, Done done) override {
    char *const to = slot(tile, tile.next_slot()) + first;
    submit_here(
        io_, [to, from = reinterpret_cast<const char *>(buffer) + first, bytes = last - first, done = std::move(done)] {
          if (to != from) memcpy(to, from, bytes);
          done(0);
        });
  }

  void update(const Tile &tile, float *buffer, Work &work, Updated done) override {
    // Let the tiles of drives go first: a drive may be idle until its tile is updated, while memory loses nothing by
    // waiting.
    update_on_cpu(*this, tile, buffer, work, std::move(done), Pool::updates(), true);
  }

 private:
  char *slot(const Tile &tile, uint32_t s) {
    const uint64_t at = tile.slot_offset(s);
    if (mappings_.empty() || mappings_.back().bytes < at + tile.layout.bytes()) map_all();
    return static_cast<char *>(mappings_.back().at) + at;
  }

  // Maps the whole file, which grows when parameters are added. Earlier mappings stay, because they may be in use.
  void map_all() {
    struct stat st{};
    if (fstat(fd_, &st) != 0) throw Failure{CSD_EIO, "states in memory", errno};
    const auto bytes = static_cast<uint64_t>(st.st_size);
    mappings_.reserve(mappings_.size() + 1);
    void *const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (at == MAP_FAILED) throw Failure{CSD_ENOMEM, "states in memory cannot be mapped", errno};
    madvise(at, bytes, MADV_HUGEPAGE);
    mappings_.push_back({at, bytes});
  }

  struct Mapping {
    void *at;
    uint64_t bytes;
  };
  std::vector<Mapping> mappings_;  // the last one covers the whole file
  HugeMemory memory_;
};

}  // namespace

std::unique_ptr<Device> make_ram_device(const csd_device &d) {
  if (d.buffers == 0) return std::make_unique<RamDevice>();
  Pool *const io = FileDevice::io_of(d);
  return io ? std::make_unique<SlotsInMemory>(d, *io) : nullptr;
}

}  // namespace csd
