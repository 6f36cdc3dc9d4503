// A device whose tiles are in a file, read and written past the page cache if the file system allows it. Derived
// classes implement the update of tiles in their buffers.
#pragma once
#include <atomic>

#include "device.h"
#include "pool.h"

namespace csd {

class FileDevice : public Device {
 public:
  FileDevice(const csd_device &d, Pool &io) : fd_(d.fd), io_(io), block_(d.block_bytes) {}

  bool resident() const override { return false; }
  int map(const Tile &) override;
  void load(const Tile &, float *buffer, uint64_t first, uint64_t last, Done) override;
  int read_first(const Tile &, uint64_t bytes, void *) override;
  void store(const Tile &, const float *buffer, uint64_t first, uint64_t last, Done) override;
  void seed(const Tile &, float *buffer, const Work &, Done) override;

  // The I/O threads of the file system with the device's file; null if the device's options are wrong.
  static Pool *io_of(const csd_device &);

 protected:
  const int fd_;
  Pool &io_;

 private:
  template <typename Io>
  void in_blocks(uint64_t bytes, Done, Io);

  const uint64_t block_;
};

}  // namespace csd
