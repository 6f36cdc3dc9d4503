// file: an emulated CSD. Tiles lie in a file, read and written past the page cache where the file system allows it;
// the CPU updates them in a buffer.
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>

#include "device.h"
#include "pool.h"
#include "transfer.h"

namespace csd {
namespace {

class FileDevice : public Device {
 public:
  FileDevice(const csd_device &d, Pool &io) : fd_(d.fd), buffers_(d.buffers), block_(d.block_bytes), io_(io) {}

  bool resident() const override { return false; }
  uint32_t buffers() const override { return buffers_; }

  int map(const Tile &tile) override {
    for (uint32_t s = 0; s < tile.sections; s++) {
      const uint64_t at = tile.slot_offset(tile.shown) + s * tile.section_bytes();
      if (mmap(tile.window[s], tile.section_bytes(), PROT_READ | PROT_WRITE, (tile.open ? MAP_SHARED : MAP_PRIVATE | MAP_NORESERVE) | MAP_FIXED, fd_,
               static_cast<off_t>(at)) == MAP_FAILED)
        return errno;
    }
    return 0;
  }

  void load(const Tile &tile, float *buffer, Done done) override {
    in_blocks(tile.bytes(), std::move(done), [fd = fd_, at = tile.slot_offset(tile.slot), buffer](uint64_t first, uint64_t n) {
      return read_fully(fd, reinterpret_cast<char *>(buffer) + first, n, at + first);
    });
  }

  void store(const Tile &tile, const float *buffer, Done done) override {
    in_blocks(tile.bytes(), std::move(done), [fd = fd_, at = tile.slot_offset(tile.next_slot()), buffer](uint64_t first, uint64_t n) {
      return write_fully(fd, reinterpret_cast<const char *>(buffer) + first, n, at + first);
    });
  }

  void update(const Tile &tile, float *const *sections, Work &work, uint32_t *crc) override {
    update_on_cpu(tile, sections, work, crc);
  }

 private:
  // Several requests of one tile are in flight at once; the last one to return reports the first error.
  template <typename Io>
  void in_blocks(uint64_t bytes, Done done, Io io) {
    struct Join {
      std::atomic<uint64_t> left;
      std::atomic<int> error{0};
      Done done;
      Join(uint64_t n, Done d) : left(n), done(std::move(d)) {}
    };
    auto join = std::make_shared<Join>((bytes + block_ - 1) / block_, std::move(done));
    for (uint64_t first = 0; first < bytes; first += block_) {
      io_.submit([join, io, first, n = std::min(block_, bytes - first)] {
        if (const int error = io(first, n)) {
          int none = 0;
          join->error.compare_exchange_strong(none, error);
        }
        if (join->left.fetch_sub(1) == 1) join->done(join->error);
      });
    }
  }

  const int fd_;
  const uint32_t buffers_;
  const uint64_t block_;
  Pool &io_;
};

}  // namespace

std::unique_ptr<Device> make_file_device(const csd_device &d) {
  struct stat st {};
  if (d.buffers < 3 || d.block_bytes == 0 || d.block_bytes % 4096 || fstat(d.fd, &st) != 0) return nullptr;
  Pool &io = Pool::io(st.st_dev);
  io.start();
  return std::make_unique<FileDevice>(d, io);
}

}  // namespace csd
