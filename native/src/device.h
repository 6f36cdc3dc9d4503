// What a back end is: one file that implements Device, and one line in make_device.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "csd.h"
#include "updater.h"

namespace csd {

struct Slot {
  bool summed = false;
  uint32_t crc[4] = {};  // of each section, as the engine wrote it
};

constexpr uint32_t kNowhere = UINT32_MAX;

struct Tile {
  uint32_t index = 0, device = 0, sections = 3;
  uint64_t elems = 0;          // per section
  uint64_t file_offset = 0;    // of slot 0; slot 1 follows it
  const csd_piece *pieces = nullptr;
  uint64_t n_pieces = 0;
  float *window[4] = {};       // the tile's part of each window
  uint32_t n_slots = 2;
  uint32_t slot = 0;           // the one that holds the state
  uint32_t shown = 0;          // the one that the windows show as it is, or kNowhere
  bool open = false;           // what is written to the windows goes to the device
  bool edited = false;         // the windows hold what somebody wrote to them, and the device does not
  Slot slots[2];

  uint64_t section_bytes() const { return 4 * elems; }
  uint64_t bytes() const { return section_bytes() * sections; }
  uint64_t slot_offset(uint32_t s) const { return file_offset + s * bytes(); }
  uint32_t next_slot() const { return slot ^ (n_slots - 1); }  // where a step writes
};

// The gradients and parameters of one tile in one step.
struct Work {
  const csd_param *params;
  const csd_adamw *hypers;
  const void *grad_image;  // null: read and write where the params say
  void *param_image;
  uint64_t pushed = 0, pulled = 0, updated = 0;  // bytes, bytes, parameters: counted by Device::update
};

using Done = std::function<void(int os_errno)>;

class Device {
 public:
  virtual ~Device() = default;

  // A resident device updates the state where it lies, in the windows: no buffers, no load, no store.
  virtual bool resident() const = 0;
  virtual uint32_t buffers() const { return 0; }

  // Makes the windows show the tile's slot `shown`; if it is `open`, what is written there goes to the device.
  // Returns 0 or an errno.
  virtual int map(const Tile &) { return 0; }

  // Start to read the current slot into `buffer`, to write `buffer` to the next slot, and return; another thread
  // calls `done` once. `buffer` holds the sections one after another. Never called on a resident device.
  virtual void load(const Tile &, float *, Done) {}
  virtual void store(const Tile &, const float *, Done) {}

  // Applies the rule to the tile, on an update thread, and sums the new state into `crc` where it is not null.
  virtual void update(const Tile &tile, float *const *sections, Work &work, uint32_t *crc) = 0;
};

// The updater of every device whose update runs on the CPU.
void update_on_cpu(const Tile &tile, float *const *sections, Work &work, uint32_t *crc);

std::unique_ptr<Device> make_file_device(const csd_device &);
std::unique_ptr<Device> make_ram_device(const csd_device &);
std::unique_ptr<Device> make_null_device(const csd_device &);

// The registry. Returns null for a name that nobody has.
inline std::unique_ptr<Device> make_device(const csd_device &d) {
  const std::string name = d.backend ? d.backend : "";
  if (name == "file") return make_file_device(d);
  if (name == "ram") return make_ram_device(d);
  if (name == "null") return make_null_device(d);
  return nullptr;
}

}  // namespace csd
