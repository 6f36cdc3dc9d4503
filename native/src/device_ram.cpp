// ram: tiles in host memory, updated in place by the CPU. Nothing can fail in mid-step, so one slot is enough.
#include "device.h"

namespace csd {
namespace {

class RamDevice : public Device {
 public:
  bool resident() const override { return true; }
  void update(const Tile &tile, float *buffer, Work &work, Updated done) override {
    update_on_cpu(*this, tile, buffer, work, std::move(done));
  }
};

}  // namespace

std::unique_ptr<Device> make_ram_device(const csd_device &) { return std::make_unique<RamDevice>(); }

}  // namespace csd
