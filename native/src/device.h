// The interface of a back end. A back end is one file that implements Device, plus one line in make_device.
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
  bool summed = false;         // the checksums are valid
  std::vector<uint32_t> sums;  // CRC-32C of what the engine wrote: by chunk, one per section
};

struct Codes;

constexpr uint32_t kNoSlot = UINT32_MAX;

struct Tile {
  uint32_t index = 0, device = 0, extent = 0;
  uint32_t states = 3;             // number of states per element
  Layout layout;                   // how the states are stored
  uint32_t param_dtype = CSD_F32;  // for codes
  uint64_t elems = 0;
  uint64_t sum_elems = 0;    // elements per chunk, the unit of checksums; the last chunk may have fewer
  uint64_t file_offset = 0;  // of slot 0; slot 1 follows it
  const csd_piece *pieces = nullptr;
  uint64_t n_pieces = 0;
  float *window[4] = {};  // the tile's part of each window; codes have none
  // For codes on a resident device: a slot laid out as in a file, with the first section in memory of its own. The
  // first section's pages are touched only if some parameter is not its own section (CSD_IN_PARAM).
  char *first_section = nullptr, *codes = nullptr;
  uint32_t *checks = nullptr;  // for 16-bit parameters there: one check per group, see check_of() in codec_loop.h
  bool first_is_used = false;  // steps write to the first section
  uint32_t n_slots = 2;
  uint32_t slot = 0;                             // the slot that holds the current state
  uint32_t mapped_slot = 0;                      // the slot that the windows are mapped to, or kNoSlot
  bool open = false;                             // writes to the windows go to the device
  bool freed = false;                            // see csd_engine_free_tiles
  bool edited = false;                           // the windows hold edits by the user that the device does not have
  uint32_t writes = 0;                           // number of reported writes to open windows
  const struct Buffer *cached_buffer = nullptr;  // the free buffer with the content of the current slot
  Slot slots[2];

  uint64_t n_chunks() const { return (elems + sum_elems - 1) / sum_elems; }
  uint64_t n_sums() const { return n_chunks() * layout.n(); }
  // Sets the section addresses: in the slot at `buffer`, or if that is null, where the resident codes or windows are.
  void find_sections(char *buffer, char **sections) const {
    for (uint32_t s = 0; s < layout.n(); s++)
      sections[s] = buffer  ? buffer + layout.first(s)
                    : codes ? (s == 0 ? first_section : codes + (layout.first(s) - layout.bytes(0)))
                            : reinterpret_cast<char *>(window[s]);
  }
  uint64_t slot_offset(uint32_t s) const { return file_offset + s * layout.bytes(); }
  uint32_t next_slot() const { return slot ^ (n_slots - 1); }  // the slot that a step writes
};

// What an update counts: bytes pushed and pulled, parameter elements updated, gradients that are inf or nan.
struct Counts {
  uint64_t pushed = 0, pulled = 0, updated = 0, nonfinite = 0;
};

// One tile's part of a step, or of one of its passes: its input and its results.
struct Work : Counts {
  Sections sections;  // what it updates: all, or those of its pass. Nothing else in the buffer is read or written
  const csd_param *params = nullptr;
  const csd_hyper *hypers = nullptr;
  const void *const *grads = nullptr;  // gradient addresses by piece; null: those in `params`
  const void *grad_image = nullptr;    // null: gradients and parameters are at the addresses in `params`
  void *param_image = nullptr;
  uint64_t grad_bytes = 4, param_bytes = 4;  // per element of these images
  bool holds_params = false;  // the update reads parameters from the image instead of the addresses in `params`
  const uint32_t *entries =
      nullptr;                     // sparse gradients (csd_kernel.h): pushed with an image, or from provide_entries()
  uint64_t n_entries = 0;          // words of 32 bits
  std::vector<uint32_t> selected;  // storage for entries that were selected here
  bool from_windows = false;       // the update begins with what the windows show instead of what was loaded
  bool is_new = false;             // the update begins with the parameters (CSD_NEW) instead of what was loaded
  const char *states = nullptr;    // states of the CSD_SUPPLIED parameters, in sections like a slot
  bool all_supplied = false;       // all parameters are CSD_SUPPLIED, and nothing was loaded
  bool verify = false;             // check what was loaded against the checksums of the tile's slot
  bool param_at_host = false;      // codes: the first section was not loaded, because host memory should have it
  // Results of Device::update: its counts, and (below) the checksums of the new state.
  uint64_t read_late = 0;  // bytes that the update still had to read itself
  // Number of leading elements whose parameters were written, even if the update then failed.
  uint64_t n_params_written = 0;
  Slot sum{};
};

inline uint64_t dtype_bytes(uint32_t dtype) { return dtype == CSD_F32 ? 4 : 2; }

// Does the caller supply the parameter's states as they are after the step?
inline bool is_supplied(const csd_piece &piece, const Work &work) {
  return work.params[piece.param].master == CSD_SUPPLIED;
}

// The address of the whole gradient of the parameter that `piece` belongs to; null if it has no gradient.
inline const void *grad_of(const csd_piece &piece, const Tile &tile, const Work &work) {
  return work.grads ? work.grads[&piece - tile.pieces] : work.params[piece.param].grad;
}

// The addresses of the gradient and of the parameter for element `i` of a piece.
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

// Callbacks; they must not throw.
using Done = std::function<void(int os_errno)>;
using Updated = std::function<void(Failure)>;  // status CSD_OK means success

class Device {
 public:
  virtual ~Device() = default;

  // A resident device updates the state in place, in the windows: no buffers, no load, no store.
  virtual bool resident() const = 0;

  // Can updates run on the thread that pushes (TasksHere)? Only if all that they wait for is the CPU.
  virtual bool can_run_here() const { return false; }

  // Can it access parameters in host memory (csd_master), or must every master be in the tile?
  virtual bool reaches_params() const { return true; }

  // Does it skip reading the parameter section of codes if the parameters are in host memory?
  virtual bool skips_params() const { return reaches_params(); }

  // The name of the kernel that is missing for this rule (rules.h) and codec (csd_codec); "" if none is. A card has
  // only the kernels in its xclbin.
  virtual std::string missing_kernel(uint32_t rule, uint32_t codec) const {
    return static_cast<void>(rule), static_cast<void>(codec), std::string();
  }

  // Why it cannot update a tile in two passes (CSD_PASS_2); "" if it can.
  virtual std::string lacks_for_passes() const { return ""; }

  // Can it store states with this codec (csd_codec), with one checksum per `sum_elems` elements? A card needs a kernel.
  virtual bool has_codec(uint32_t codec, uint64_t sum_elems) const {
    return static_cast<void>(codec), static_cast<void>(sum_elems), true;
  }

  // Allocates `n` tile buffers, for tiles of up to `tile` bytes with sections of up to `section` bytes, and returns
  // their addresses. Frees all earlier buffers.
  virtual std::vector<float *> allocate(uint32_t n, uint64_t tile, uint64_t section) {
    return static_cast<void>(n), static_cast<void>(tile), static_cast<void>(section), std::vector<float *>{};
  }

  // The address of the tile's next slot, if a step can build the new state there instead of in a buffer; null if it
  // needs a buffer. Throws Failure.
  virtual float *next_slot_in_memory(const Tile &) { return nullptr; }

  // Does a buffer keep the state that was stored from it, ready for the next update, until another tile is loaded?
  virtual bool keeps_buffers() const { return false; }
  virtual uint64_t memory_bytes() const { return 0; }  // fixed memory: the buffers and anything else
  virtual uint64_t huge_bytes() const { return 0; }    // part of the buffers that is on huge pages
  virtual uint32_t numa() const { return 0; }          // NUMA node of the buffers, as in csd_device

  // Makes the windows show the tile's slot `mapped_slot`; if the tile is `open`, writes to them go to the device.
  // Returns 0 or an errno.
  virtual int map(const Tile &) { return 0; }

  // load() starts to read bytes [first, last) of the current slot into the same place in `buffer`; store() starts to
  // write those of `buffer` to the next slot. Both return at once; another thread, or TasksHere, calls `done` once. If
  // they throw, nothing was started and `done` is never called. `buffer` holds the sections one after another, like the slot. Never
  // called on a resident device.
  virtual void load(const Tile &, float *, uint64_t first, uint64_t last, Done) {
    static_cast<void>(first), static_cast<void>(last);
  }
  virtual void store(const Tile &, const float *, uint64_t first, uint64_t last, Done) {
    static_cast<void>(first), static_cast<void>(last);
  }

  // Reads the first `bytes` bytes of a tile's current slot synchronously. Returns 0 or an errno.
  virtual int read_first(const Tile &, uint64_t bytes, void *) { return static_cast<void>(bytes), EIO; }

  // Starts, like store(), to fill `buffer` with the first state of a new tile (CSD_NEW) and to write its masters to the
  // current slot.
  virtual void seed(const Tile &, float *, const Work &, Done) {}

  // Starts to apply the rule to the tile in `buffer` (null on a resident device: in the windows). Like load(), it
  // returns at once, and `done` is called once later; or it throws. `tile` and `work` live until `done` is called.
  virtual void update(const Tile &tile, float *buffer, Work &work, Updated done) = 0;
};

// Runs `update` on one of `threads`, or on this thread (submit_here()), and calls `done` with the failure that it returns or throws.
void submit_update(std::function<Failure()> update, Updated done, Pool &threads = Pool::updates(),
                   bool low_priority = false);

// Device::update for all devices that update on the CPU. Threads that have nothing else to do share the update of a tile.
// With `low_priority`, updates of other devices go first (Pool::submit).
void update_on_cpu(Device &, const Tile &tile, float *buffer, Work &work, Updated done, Pool &threads = Pool::updates(),
                   bool low_priority = false);

// Has the user edited states of a parameter (csd_param.edited)? copy_edited() copies the edited fp32 states of its
// elements [first, first + n) to these sections `of` its tile, from their element `at` on. encode_edited() encodes them
// where they are stored as codes. States that were not edited stay as they are.
bool is_edited(const csd_param &);
void copy_edited(const csd_param &, uint64_t first, uint64_t n, Sections of, char *const *sections, uint64_t at);
void encode_edited(const csd_param &, uint64_t first, uint64_t n, uint32_t param_dtype, const Codes &codes);

// Fills elements [first, first + n) of the work's sections in a tile's buffer with their initial state: the parameters,
// then zeros. `first` and `n` are multiples of 64.
void first_state(const Tile &tile, const Work &work, char *buffer, uint64_t first, uint64_t n);

// The failure to report for a section whose content is not what was stored.
Failure damaged(const Tile &tile, uint32_t section);

// The first one `of` these sections of a chunk whose checksum in `sums` differs from that of the tile's slot;
// `tile.layout.n()` if none does.
uint32_t differing_section(const Tile &tile, Sections of, uint64_t chunk, const uint32_t *sums);

// Loads a tile and waits until it is loaded. Returns 0 or an errno.
int load_now(Device &, const Tile &, char *buffer);

// Throws damaged() if elements [first, first + n) of the first `n_sections` sections at `slot` lie in a chunk that does
// not have the checksum of the tile's slot. Does nothing if that slot is not summed.
void check_slot(const Tile &, const char *slot, uint32_t n_sections, uint64_t first, uint64_t n);

// Copies elements [first, first + n) of a section from a tile's window. Throws Failure if the device fails: reading
// the mapping itself would end the process with SIGBUS.
void read_window(const Tile &, uint32_t section, uint64_t first, uint64_t n, char *to);

// The random key of element `i` of a parameter in this step, for the stochastic rounding of its codes.
inline uint32_t key_of(const csd_param &p, uint64_t i) {
  return p.seed * 0x9e3779b9u + p.first + static_cast<uint32_t>(i);
}

// Computes the checksums of a whole tile whose sections are at `sections`.
void sum_tile(const Tile &, const char *const *sections, uint32_t *sums);

std::unique_ptr<Device> make_file_device(const csd_device &);
std::unique_ptr<Device> make_ram_device(const csd_device &);
std::unique_ptr<Device> make_null_device(const csd_device &);
std::unique_ptr<Device> make_xrt_device(const csd_device &);

// Wraps the device so that it keeps to `d.pace`. Returns the device itself if there is no pace, and null if the pace is
// not valid for it. The paced devices of an engine share `pacer`, which the first of them creates.
class Pacer;
std::unique_ptr<Device> paced(std::unique_ptr<Device>, const csd_device &d, std::shared_ptr<Pacer> &pacer);

csd_card_rates measure_card(const csd_device &, uint64_t offset, uint64_t bytes);

// The registry of back ends. Returns null for an unknown name.
inline std::unique_ptr<Device> make_device(const csd_device &d) {
  const std::string name = d.backend ? d.backend : "";
  if (name == "file") return make_file_device(d);
  if (name == "xrt") return make_xrt_device(d);
  if (name == "ram") return make_ram_device(d);
  if (name == "null") return make_null_device(d);
  return nullptr;
}

}  // namespace csd
