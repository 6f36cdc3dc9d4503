// file: an emulated CSD. Its tiles are in a file; the CPU updates them in buffers in host memory.
#include "device_file.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>

#include "memory.h"
#include "numa.h"
#include "transfer.h"

namespace csd {

constexpr uint64_t kMostBlock = uint64_t{1} << 30;  // Linux transfers less than 2 GiB per call

int FileDevice::map(const Tile &tile) {
  if (tile.layout.coded()) return 0;
  const int flags = (tile.open ? MAP_SHARED : MAP_PRIVATE | MAP_NORESERVE) | MAP_FIXED;
  for (uint32_t s = 0; s < tile.layout.n(); s++) {
    const auto at = static_cast<off_t>(tile.slot_offset(tile.mapped_slot) + tile.layout.first(s));
    if (mmap(tile.window[s], tile.layout.bytes(s), PROT_READ | PROT_WRITE, flags, fd_, at) == MAP_FAILED) return errno;
  }
  return 0;
}

void FileDevice::load(const Tile &tile, float *buffer, uint64_t first, uint64_t last, Done done) {
  in_blocks(last - first, std::move(done),
            [fd = fd_, from = tile.slot_offset(tile.slot) + first, to = reinterpret_cast<char *>(buffer) + first](
                uint64_t at, uint64_t n) { return read_fully(fd, to + at, n, from + at); });
}

int FileDevice::read_first(const Tile &tile, uint64_t bytes, void *to) {
  return read_fully(fd_, to, bytes, tile.slot_offset(tile.slot));
}

void FileDevice::store(const Tile &tile, const float *buffer, uint64_t first, uint64_t last, Done done) {
  in_blocks(last - first, std::move(done),
            [fd = fd_, to = tile.slot_offset(tile.next_slot()) + first,
             from = reinterpret_cast<const char *>(buffer) + first](uint64_t at, uint64_t n) {
              return write_fully(fd, from + at, n, to + at);
            });
}

void FileDevice::seed(const Tile &tile, float *buffer, const Work &work, Done done) {
  const uint64_t bytes = tile.layout.bytes(0), each = bytes / tile.elems;
  in_blocks(bytes, std::move(done), [fd = fd_, &tile, &work, buffer, each](uint64_t first, uint64_t n) {
    char *const sections = reinterpret_cast<char *>(buffer);
    first_state(tile, work, sections, first / each, n / each);
    return write_fully(fd, sections + first, n, tile.slot_offset(tile.slot) + first);
  });
}

// Splits a transfer into requests that may be in flight at the same time; the last one to finish reports the first
// error.
template <typename Io>
void FileDevice::in_blocks(uint64_t bytes, Done done, Io io) {
  struct Join {
    std::atomic<uint64_t> left;
    std::atomic<int> error{0};
    Done done;
    Join(uint64_t n, Done d) : left(n), done(std::move(d)) {}
  };
  auto join = std::make_shared<Join>((bytes + block_ - 1) / block_, std::move(done));
  std::list<Pool::Task> blocks;
  for (uint64_t first = 0; first < bytes; first += block_) {
    blocks.push_back([join, io, first, n = std::min(block_, bytes - first)] {
      if (const int error = io(first, n)) {
        int none = 0;
        join->error.compare_exchange_strong(none, error);
      }
      if (join->left.fetch_sub(1) == 1) join->done(join->error);
    });
  }
  io_.submit(std::move(blocks));
}

Pool *FileDevice::io_of(const csd_device &d) {
  struct stat st{};
  if (d.buffers == 0 || d.block_bytes == 0 || d.block_bytes % 4096 || d.block_bytes > kMostBlock ||
      fstat(d.fd, &st) != 0)
    return nullptr;
  Pool &io = Pool::io(st.st_dev);
  io.grow(d.depth);
  io.start();
  return &io;
}

namespace {

class EmulatedDevice : public FileDevice {
 public:
  EmulatedDevice(const csd_device &d, Pool &io) : FileDevice(d, io), numa_(d.numa), threads_(Pool::updates(d.numa)) {
    threads_.start();
  }

  bool can_run_here() const override { return true; }
  bool keeps_buffers() const override { return true; }

  std::vector<float *> allocate(uint32_t n, uint64_t bytes, uint64_t) override {
    memory_ = {};  // free the old buffers first: there may not be room for both
    memory_ = HugeMemory(bytes * n);
    // After a fork, copy-on-write would split the parent's huge pages for good.
    madvise(memory_.floats(), memory_.bytes(), MADV_DONTFORK);
    prefers_node_ = numa_ != 0 && prefer_node(memory_.floats(), memory_.bytes(), numa_);
    memset(memory_.floats(), 0, memory_.bytes());  // allocate all pages now, not in the first step
    huge_bytes_ = memory_.huge_bytes();
    std::vector<float *> all;
    for (uint32_t i = 0; i < n; i++) all.push_back(memory_.floats() + i * bytes / sizeof(float));
    return all;
  }

  uint64_t memory_bytes() const override { return memory_.bytes(); }
  uint64_t huge_bytes() const override { return huge_bytes_; }
  uint32_t numa() const override { return prefers_node_ ? numa_ : 0; }

  void update(const Tile &tile, float *buffer, Work &work, Updated done) override {
    update_on_cpu(*this, tile, buffer, work, std::move(done), threads_);
  }

 private:
  const uint32_t numa_;
  Pool &threads_;
  HugeMemory memory_;
  uint64_t huge_bytes_ = 0;
  bool prefers_node_ = false;
};

}  // namespace

std::unique_ptr<Device> make_file_device(const csd_device &d) {
  Pool *io = FileDevice::io_of(d);
  return io ? std::make_unique<EmulatedDevice>(d, *io) : nullptr;
}

}  // namespace csd
