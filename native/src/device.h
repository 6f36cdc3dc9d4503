// What a back end is: one file that implements Device, and one line in make_device.
#pragma once
#include <errno.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csd.h"
#include "failure.h"
#include "layout.h"
#include "pool.h"

namespace csd {

struct Slot {
  bool summed = false;
  std::vector<uint32_t> sums;  // CRC-32C of what the engine wrote: chunk by chunk, one per section
};

struct Codes;

constexpr uint32_t kNowhere = UINT32_MAX;

struct Tile {
  uint32_t index = 0, device = 0;
  uint32_t states = 3;             // of each element
  Layout layout;                   // how they are kept
  uint32_t param_dtype = CSD_F32;  // of codes
  uint64_t elems = 0;
  uint64_t sum_elems = 0;    // of a chunk, which has checksums of its own; the last one may have fewer
  uint64_t file_offset = 0;  // of slot 0; slot 1 follows it
  const csd_piece *pieces = nullptr;
  uint64_t n_pieces = 0;
  float *window[4] = {};  // the tile's part of each window; codes have none
  // On a resident device, of codes: a slot as it would be in a file, the first section apart from the others. Its pages
  // are touched only where a parameter is not its own section (CSD_IN_PARAM).
  char *first_section = nullptr, *codes = nullptr;
  uint32_t *checks = nullptr;  // of 16-bit parameters there: of each group, see check_of() in codec_loop.h
  bool first_is_used = false;  // steps write to the first section
  uint32_t n_slots = 2;
  uint32_t slot = 0;                    // the one that holds the state
  uint32_t shown = 0;                   // the one that the windows show as it is, or kNowhere
  bool open = false;                    // what is written to the windows goes to the device
  bool edited = false;                  // the windows hold what somebody wrote to them, and the device does not
  uint32_t writes = 0;                  // somebody told of, to open windows
  const struct Buffer *kept = nullptr;  // the free buffer that has what the current slot has
  Slot slots[2];

  uint64_t n_chunks() const { return (elems + sum_elems - 1) / sum_elems; }
  uint64_t n_sums() const { return n_chunks() * layout.n(); }
  // Of a slot at `buffer`; of codes that have none, where they lie.
  void find_sections(char *buffer, char **sections) const {
    for (uint32_t s = 0; s < layout.n(); s++)
      sections[s] = buffer  ? buffer + layout.first(s)
                    : codes ? (s == 0 ? first_section : codes + (layout.first(s) - layout.bytes(0)))
                            : reinterpret_cast<char *>(window[s]);
  }
  uint64_t slot_offset(uint32_t s) const { return file_offset + s * layout.bytes(); }
  uint32_t next_slot() const { return slot ^ (n_slots - 1); }  // where a step writes
};

// What a step does with one tile, and what came of it.
struct Work {
  const csd_param *params = nullptr;
  const csd_hyper *hypers = nullptr;
  const void *const *grads = nullptr;  // of each piece, in place of what the params say; null: they do
  const void *grad_image = nullptr;    // null: read and write where the params say
  void *param_image = nullptr;
  uint64_t grad_bytes = 4, param_bytes = 4;  // of an element of these images
  bool holds_params = false;  // the parameters that the update reads are in the image, and not where the params say
  const uint32_t *entries =
      nullptr;                     // of the sparse gradients (csd_kernel.h): came with an image, or provide_entries()
  uint64_t n_entries = 0;          // words of 32 bits
  std::vector<uint32_t> selected;  // those that were selected here
  bool from_windows = false;       // it begins with what the windows show, and not with what was loaded
  bool is_new = false;             // it begins with the parameters (CSD_NEW), and not with what was loaded
  const char *states = nullptr;    // of the parameters that are CSD_GIVEN, in sections as a slot has them
  bool all_given = false;          // there are no others, and nothing was loaded
  bool verify = false;             // what was loaded must have the checksums of the tile's slot
  bool param_at_host = false;      // of codes: the first section was not loaded, because the host should have it
  // What Device::update fills in: bytes, bytes, parameters, gradients that are inf or nan, and the new state's sums.
  uint64_t pushed = 0, pulled = 0, updated = 0, nonfinite = 0;
  uint64_t read_late = 0;  // bytes that had to be read after all
  uint64_t given = 0;      // elements from the first on whose parameters were handed out, also where it then failed
  Slot sum{};
};

inline uint64_t dtype_bytes(uint32_t dtype) { return dtype == CSD_F32 ? 4 : 2; }

// Do the states of the parameter come as they are after the step?
inline bool is_given(const csd_piece &piece, const Work &work) { return work.params[piece.param].master == CSD_GIVEN; }

// Where the gradient of the parameter begins that `piece` of `tile` is of; null: it has none.
inline const void *grad_of(const csd_piece &piece, const Tile &tile, const Work &work) {
  return work.grads ? work.grads[&piece - tile.pieces] : work.params[piece.param].grad;
}

// Where the gradient and the parameter of a piece's element `i` lie.
inline const void *grad_at(const csd_piece &p, const Tile &tile, const Work &work, uint64_t i) {
  const uint64_t bytes = dtype_bytes(work.params[p.param].grad_dtype);
  return work.grad_image ? static_cast<const char *>(work.grad_image) + work.grad_bytes * p.tile_first + bytes * i
                         : static_cast<const char *>(grad_of(p, tile, work)) + bytes * (p.param_first + i);
}

inline void *param_at(const csd_piece &p, const Work &work, uint64_t i) {
  const csd_param &param = work.params[p.param];
  const uint64_t bytes = dtype_bytes(param.param_dtype);
  return work.grad_image ? static_cast<char *>(work.param_image) + work.param_bytes * p.tile_first + bytes * i
                         : static_cast<char *>(param.param) + bytes * (p.param_first + i);
}

// These throw nothing.
using Done = std::function<void(int os_errno)>;
using Updated = std::function<void(Failure)>;  // with status CSD_OK: none

class Device {
 public:
  virtual ~Device() = default;

  // A resident device updates the state where it lies, in the windows: no buffers, no load, no store.
  virtual bool resident() const = 0;

  // Can it reach a parameter that is its own master (csd_master), or does every master lie in the tile?
  virtual bool reaches_params() const { return true; }

  // Does it leave out of a read the parameters among a tile's codes, where they are in host memory?
  virtual bool leaves_params() const { return reaches_params(); }

  // The kernel that it lacks for a rule of rules.h on states that are kept so (csd_codec), by its name; "": none. Cards
  // have those of their xclbin.
  virtual std::string lacking_kernel(uint32_t rule, uint32_t codec) const {
    return static_cast<void>(rule), static_cast<void>(codec), std::string();
  }

  // Can it keep states by that codec (csd_codec), with checksums of so many elements each? Again a card has its kernels.
  virtual bool has_codec(uint32_t codec, uint64_t sum_elems) const {
    return static_cast<void>(codec), static_cast<void>(sum_elems), true;
  }

  // Makes `n` tile buffers, for tiles of up to `tile` bytes and sections of up to `section`, and returns their
  // addresses; those from before are gone.
  virtual std::vector<float *> allocate(uint32_t n, uint64_t tile, uint64_t section) {
    return static_cast<void>(n), static_cast<void>(tile), static_cast<void>(section), std::vector<float *>{};
  }

  // Where a tile's next slot lies, if a step can make it there: then that stands for a buffer. Null: it needs one.
  // Throws Failure.
  virtual float *next_slot_in_memory(const Tile &) { return nullptr; }

  // Is what was stored from a buffer there to be updated again, until another tile is loaded?
  virtual bool keeps_buffers() const { return false; }
  virtual uint64_t memory_bytes() const { return 0; }  // of these and whatever else is fixed
  virtual uint64_t huge_bytes() const { return 0; }    // of them, on huge pages
  virtual uint32_t numa() const { return 0; }          // of which node they are, see csd_device

  // Makes the windows show the tile's slot `shown`; if it is `open`, what is written there goes to the device.
  // Returns 0 or an errno.
  virtual int map(const Tile &) { return 0; }

  // Start to read the current slot into `buffer`, from byte `first` of it on, to write `buffer` to the next slot, and
  // return; another thread calls `done` once; or throw, and then nothing was started and nobody calls it. `buffer`
  // holds the sections one after another, as the slot does. Never called on a resident device.
  virtual void load(const Tile &, float *, uint64_t first, Done) { static_cast<void>(first); }
  virtual void store(const Tile &, const float *, Done) {}

  // The first section of a tile of codes, now. Returns 0 or an errno.
  virtual int read_params(const Tile &, void *) { return EIO; }

  // Likewise: fills `buffer` with the first state of a new tile (CSD_NEW), and writes its masters to the current slot.
  virtual void seed(const Tile &, float *, const Work &, Done) {}

  // Starts to apply the rule to the tile in `buffer` (null on a resident device: in the windows), and returns; another
  // thread calls `done` once, or throws, likewise. `tile` and `work` live until then.
  virtual void update(const Tile &tile, float *buffer, Work &work, Updated done) = 0;
};

// Runs `update` on one of these threads, and calls `done` with what it returns or throws.
void submit_update(std::function<Failure()> update, Updated done, Pool &threads = Pool::updates(),
                   bool can_wait = false);

// The updater of every device whose update runs on the CPU. `can_wait`: until nothing else is there to be updated.
void update_on_cpu(Device &, const Tile &tile, float *buffer, Work &work, Updated done, Pool &threads = Pool::updates(),
                   bool can_wait = false);

// Did somebody write states of a parameter that has codes (csd_param.edited)? Encodes those of elements
// [first, first + n) of it; where there are none, `codes` stay.
bool is_edited(const csd_param &);
void encode_edited(const csd_param &, uint64_t first, uint64_t n, uint32_t param_dtype, const Codes &codes);

// Fills elements [first, first + n) of a tile's buffer with its first state: the parameters, and zeros. Both are
// multiples of 64.
void first_state(const Tile &tile, const Work &work, char *buffer, uint64_t first, uint64_t n);

// What to report when a section is not what was stored there.
Failure damaged(const Tile &tile, uint32_t section);

// The section of a chunk that is not what was stored in the tile's slot, by its sums; `tile.layout.n()` if there is none.
uint32_t differing_section(const Tile &tile, uint64_t chunk, const uint32_t *sums);

// Loads a tile and waits for that. Returns 0 or an errno.
int load_now(Device &, const Tile &, char *buffer);

// Throws damaged() where a slot, at `slot`, is not what was stored there. Nothing is known of one that is not summed.
void check_slot(const Tile &, const char *slot);

// Of the chance of element `i` of a parameter that has codes, in this step.
inline uint32_t key_of(const csd_param &p, uint64_t i) {
  return p.seed * 0x9e3779b9u + p.first + static_cast<uint32_t>(i);
}

// The sums of what lies in `sections`, all of it.
void sum_tile(const Tile &, const char *const *sections, uint32_t *sums);

std::unique_ptr<Device> make_file_device(const csd_device &);
std::unique_ptr<Device> make_ram_device(const csd_device &);
std::unique_ptr<Device> make_null_device(const csd_device &);
std::unique_ptr<Device> make_xrt_device(const csd_device &);

// The device, kept to `d.pace`; itself, if it has none, and null if that is no pace for it. The paced devices of an
// engine share `pacer`, which the first of them makes.
class Pacer;
std::unique_ptr<Device> paced(std::unique_ptr<Device>, const csd_device &d, std::shared_ptr<Pacer> &pacer);

csd_card_rates measure_card(const csd_device &, uint64_t offset, uint64_t bytes);

// The registry. Returns null for a name that nobody has.
inline std::unique_ptr<Device> make_device(const csd_device &d) {
  const std::string name = d.backend ? d.backend : "";
  if (name == "file") return make_file_device(d);
  if (name == "xrt") return make_xrt_device(d);
  if (name == "ram") return make_ram_device(d);
  if (name == "null") return make_null_device(d);
  return nullptr;
}

}  // namespace csd
