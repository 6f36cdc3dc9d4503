// xrt: a SmartSSD. Tiles move between its drive and its FPGA's memory; gradients and parameters are transferred by DMA;
// the kernel does the update (csd_kernel.h describes its interface).
//
//   load    drive → P2P buffer         pread with O_DIRECT into the card's memory, bypassing host memory
//   update  gradients → card, kernel, parameters ← card
//   store   P2P buffer → drive
//
// Without P2P, tile buffers are normal ones, and the state bounces through host memory.
#include <string.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "card.h"
#include "crc32c.h"
#include "csd_kernel.h"
#include "device_file.h"
#include "topk.h"
#include "updater.h"

namespace csd {
namespace {

// Number of tiles being updated at once: one being sent to the card, one in the kernel, one being received.
constexpr uint32_t kFrames = 3;

// Size of a report with the sums of this many chunks.
constexpr uint64_t report_bytes(uint64_t chunks) { return sizeof(csd_report) + chunks * sizeof(csd_sums); }

constexpr uint64_t kLeastChunkBytes = kLeastSumWords * kWordBytes;  // of a section; only its last chunk may be smaller

// The buffers, besides the tile itself, for the update of one tile by a kernel.
struct Frame {
  CardBuffer grad, param, segments, report;
  // Allocated when first needed. `windows` has the state with which a tile begins instead of what was loaded, because
  // the user has written to its windows or edited its states; `entries` has room for `n_entries`.
  std::unique_ptr<CardBuffer> windows, entries;
  uint64_t n_entries = 0;
  const std::shared_ptr<Card> card;
  std::unordered_map<const Kernel *, Xrt::Handle> runs;  // opened with the first tile for that kernel

  Frame(const std::shared_ptr<Card> &c, uint64_t bytes)
      : grad(c, bytes, KernelArg::grad),
        param(c, bytes, KernelArg::param),
        segments(c, bytes, KernelArg::segments),
        report(c, report_bytes(bytes / kLeastChunkBytes + 1), KernelArg::report),
        card(c) {}
  ~Frame() {
    for (const auto &[kernel, run] : runs) card->close_run(run);
  }
  Frame(const Frame &) = delete;

  Xrt::Handle run(const Kernel &kernel) {
    const auto found = runs.find(&kernel);
    return found != runs.end() ? found->second : runs[&kernel] = card->open_run(kernel);
  }
};

// The input that gather() has prepared for a kernel: number of segments, and sizes in words.
struct KernelInput {
  uint32_t segments = 0, grad_words = 0, entry_words = 0, param_words = 0;
};

uint32_t words(uint64_t elems, uint32_t dtype) {
  return static_cast<uint32_t>((elems * dtype_bytes(dtype) + kWordBytes - 1) / kWordBytes);
}

void set_args(Frame &frame, const Kernel &kernel, const CardBuffer &in, const CardBuffer &out, const KernelInput &input,
              uint32_t n_words, uint32_t sections, uint32_t sum_words) {
  int arg = 0;
  const Xrt::Handle run = frame.run(kernel);
  const auto set = [&](auto value) { frame.card->set_arg(run, arg++, value); };
  for (int port = 0; port < kernel.ports; port++) set(in.handle());
  set(frame.grad.handle());
  set((input.entry_words ? *frame.entries : frame.grad).handle());  // unused, but a port needs a valid buffer
  set(frame.segments.handle());
  for (int port = 0; port < kernel.ports; port++) set(out.handle());
  set(frame.param.handle());
  set(frame.report.handle());
  for (const uint32_t scalar :
       {n_words, sections, input.segments, input.grad_words, input.entry_words, input.param_words, sum_words})
    set(scalar);
}

// Copies the checksums of a chunk from the kernel's report to `sums`, one per section of the tile: of what was written
// (`out`) or of what was read.
void copy_sums(const Tile &tile, const csd_report &report, uint64_t chunk, bool out, uint32_t *sums) {
  if (!tile.layout.coded()) {
    const csd_sums &reported = reinterpret_cast<const csd_sums *>(&report + 1)[chunk];
    std::copy_n(out ? reported.out : reported.in, tile.layout.n(), sums);
    return;
  }
  const csd_coded_sums &reported = reinterpret_cast<const csd_coded_sums *>(&report + 1)[chunk];
  const uint32_t *from = out ? reported.out : reported.in;
  for (uint32_t s = 0; s < tile.layout.n(); s++) {
    sums[s] = *from++;
    if (s == 0 && !tile.layout.has_correction()) from++;
  }
}

class XrtDevice : public FileDevice {
 public:
  XrtDevice(const csd_device &d, Pool &io, std::shared_ptr<Card> card)
      : FileDevice(d, io), card_(std::move(card)), p2p_(d.p2p != CSD_P2P_OFF && card_->has_p2p()), workers_(kFrames) {
    workers_.start();
  }

  ~XrtDevice() override {
    workers_.stop();
    try {
      release();
    } catch (...) {  // the card is lost, and its buffers with it
    }
  }

  bool p2p() const { return p2p_; }
  bool reaches_params() const override { return false; }
  std::string missing_kernel(uint32_t rule, uint32_t codec) const override {
    const auto is_for = [rule, codec](const Kernel &k) { return k.has_rule(rule) && k.codec == codec; };
    const std::vector<Kernel> &all = all_kernels();
    if (std::any_of(all.begin(), all.end(), [&](const Kernel &k) { return is_for(k) && card_->has_kernel(k); }))
      return "";
    return std::find_if(all.begin(), all.end(), is_for)->name;  // the engine checks that one exists
  }
  std::string lacks_for_passes() const override { return "kernels for CSD_MUON_MOMENTUM and CSD_MUON_APPLY"; }
  bool has_codec(uint32_t codec, uint64_t sum_elems) const override {
    const std::vector<Kernel> &all = all_kernels();
    return std::any_of(all.begin(), all.end(),
                       [&](const Kernel &k) { return k.codec == codec && card_->has_kernel(k); }) &&
           (codec == CSD_FP32 || sum_elems % kPageElems == 0);
  }

  std::vector<float *> allocate(uint32_t n, uint64_t bytes, uint64_t section_bytes) override {
    release();
    tile_bytes_ = bytes;
    section_bytes_ = section_bytes;
    auto made =
        std::make_shared<std::pair<std::vector<std::shared_ptr<CardBuffer>>, std::vector<std::shared_ptr<Frame>>>>();
    card_->call_with_timeout("making buffers", [card = card_, made, bytes, section_bytes, p2p = p2p_, n] {
      auto own = decltype(made)::element_type();  // so that after a failure buffers are freed here, too
      for (uint32_t i = 0; i < n; i++)
        own.first.push_back(std::make_shared<CardBuffer>(card, bytes, KernelArg::tile_in, p2p));
      for (uint32_t i = 0; i < kFrames; i++) own.second.push_back(std::make_shared<Frame>(card, section_bytes));
      *made = std::move(own);
    });
    frames_ = std::move(made->second);
    std::vector<float *> addresses;
    for (auto &buffer : made->first) {
      addresses.push_back(reinterpret_cast<float *>(buffer->bytes()));
      tiles_[addresses.back()] = std::move(buffer);
    }
    return addresses;
  }

  uint64_t memory_bytes() const override { return tiles_.size() * tile_bytes_ + kFrames * 3 * section_bytes_; }

  void update(const Tile &tile, float *buffer, Work &work, Updated done) override {
    const auto update = [this, &tile, buffer, &work] {
      update_now(tile, buffer, work);
      return Failure{};
    };
    submit_update(update, std::move(done), workers_);
  }

 private:
  void release() {
    auto all = std::make_shared<std::pair<decltype(tiles_), decltype(frames_)>>(std::move(tiles_), std::move(frames_));
    tiles_.clear(), frames_.clear();
    if (all->first.empty() && all->second.empty()) return;
    card_->call_with_timeout("freeing buffers", [all = std::move(all)]() mutable { all.reset(); });
  }

  void update_now(const Tile &tile, float *buffer, Work &work) {
    const Lease lease(*this);
    const std::shared_ptr<Frame> &frame = lease.frame;
    const std::shared_ptr<CardBuffer> state = tiles_.at(buffer);
    provide_entries(tile, work);
    const KernelInput input = gather(tile, work, *frame);
    const bool bounce = !p2p_;
    if (work.n_entries > frame->n_entries) {
      card_->call_with_timeout("making a buffer", [frame, n = work.n_entries] {
        frame->n_entries = 0;
        frame->entries.reset();
        frame->entries = std::make_unique<CardBuffer>(frame->card, 4 * n, KernelArg::entries);
        frame->n_entries = n;
      });
    }
    if (work.n_entries) memcpy(frame->entries->bytes(), work.entries, 4 * work.n_entries);
    const bool edited = any_edited(tile, work), from_host = work.from_windows || edited;
    if (from_host) {  // the host supplies the state; through a normal buffer, as the CPU is slow to write P2P memory
      char *to = reinterpret_cast<char *>(buffer);
      if (p2p_) {
        if (!frame->windows)
          card_->call_with_timeout("making a buffer", [frame, bytes = tile_bytes_] {
            frame->windows = std::make_unique<CardBuffer>(frame->card, bytes, KernelArg::tile_in);
          });
        to = frame->windows->bytes();
      }
      if (work.from_windows)
        for (uint32_t s = 0; s < tile.layout.n(); s++) read_window(tile, s, 0, tile.elems, to + tile.layout.first(s));
      if (edited) enter_edits(tile, work, to);
    }
    memset(frame->report.bytes(), 0, report_bytes(tile.n_chunks()));

    const CardBuffer *const from = from_host && p2p_ ? frame->windows.get() : state.get();
    card_->call_with_timeout(
        "updating a tile",
        [frame, state, from, bounce, input, kernel = &kernel_for(tile, work), bytes = tile.layout.bytes(),
         n_words = static_cast<uint32_t>(tile.elems / kLanes), sections = tile.layout.n(),
         sum_words = static_cast<uint32_t>(tile.sum_elems / kLanes), report = report_bytes(tile.n_chunks())] {
          Card &card = *frame->card;
          frame->grad.to_device(uint64_t{kWordBytes} * input.grad_words);
          if (input.entry_words) frame->entries->to_device(uint64_t{kWordBytes} * input.entry_words);
          frame->segments.to_device(uint64_t{kWordBytes} * input.segments);
          frame->report.to_device(report);
          if (bounce || from != state.get()) from->to_device(bytes);
          set_args(*frame, *kernel, *from, *state, input, n_words, sections, sum_words);
          card.execute(frame->run(*kernel));
          frame->param.from_device(uint64_t{kWordBytes} * input.param_words);
          if (bounce) state->from_device(bytes);
          frame->report.from_device(report);  // last, so that it shows whether the card was lost meanwhile
        },
        card_->run_limit());

    check(tile, work, *frame, input, from_host);
    scatter(tile, work, *frame);
  }

  // Returns a kernel that has the rules of all parameters in the tile: with Adam, some may use AdamW's rules.
  const Kernel &kernel_for(const Tile &tile, const Work &work) const {
    const auto has_rules = [&](const Kernel &kernel) {
      return std::all_of(tile.pieces, tile.pieces + tile.n_pieces, [&](const csd_piece &p) {
        return !grad_of(p, tile, work) || kernel.has_rule(work.hypers[work.params[p.param].hyper].rule);
      });
    };
    for (const Kernel &kernel : all_kernels())
      if (card_->has_kernel(kernel) && kernel.takes(tile.layout.codec(), tile.layout.n()) && has_rules(kernel))
        return kernel;
    Card::fail("its xclbin has no kernel for all rules of tile " + std::to_string(tile.index), EPROTO);
  }

  static bool any_edited(const Tile &tile, const Work &work) {
    return std::any_of(tile.pieces, tile.pieces + tile.n_pieces,
                       [&work](const csd_piece &p) { return is_edited(work.params[p.param]); });
  }

  // Brings the tile into host memory at `slot`, without the card and unless it is there from its windows, and enters the
  // edited states.
  void enter_edits(const Tile &tile, Work &work, char *slot) {
    if (p2p_ && !work.from_windows) {
      if (const int error = load_now(*this, tile, slot))
        throw Failure{CSD_EIO, "reading tile " + std::to_string(tile.index), error};
      work.read_late = tile.layout.bytes();
    }
    char *sections[kMostSections];
    for (uint32_t s = 0; s < tile.layout.n(); s++) sections[s] = slot + tile.layout.first(s);
    if (work.verify && !work.from_windows) check_slot(tile, slot, tile.layout.n(), 0, tile.elems);
    for (const csd_piece *p = tile.pieces; p != tile.pieces + tile.n_pieces; p++)
      if (const csd_param &param = work.params[p->param]; !tile.layout.coded())
        copy_edited(param, p->param_first, p->elems, tile.layout.all(), sections, p->tile_first);
      else if (is_edited(param))
        encode_edited(param, p->param_first, p->elems, tile.param_dtype,
                      codes_at(tile.layout, sections, p->tile_first));
  }

  // Lays out gradients and segments for the kernel.
  static KernelInput gather(const Tile &tile, const Work &work, Frame &frame) {
    const bool coded = tile.layout.coded();
    KernelInput input;
    input.entry_words = static_cast<uint32_t>(work.n_entries / kLanes);
    auto *segments = reinterpret_cast<csd_segment *>(frame.segments.bytes());
    for (const csd_piece *p = tile.pieces; p != tile.pieces + tile.n_pieces; p++) {
      const csd_param &param = work.params[p->param];
      if (!grad_of(*p, tile, work) || !p->elems) continue;
      if (p->tile_first % kLanes)
        throw Failure{CSD_EINVAL,
                      "parameter " + std::to_string(p->param) + " does not begin with a word of the kernel's"};
      const bool sparse = is_sparse(param);
      segments[input.segments++] = {static_cast<uint32_t>(p->tile_first / kLanes),
                                    static_cast<uint32_t>(p->elems),
                                    sparse ? param.topk_dtype : param.grad_dtype,
                                    param.param_dtype,
                                    work.hypers[param.hyper],
                                    sparse,
                                    coded ? key_of(param, p->param_first) : 0};
      if (!sparse) {
        char *const to = frame.grad.bytes() + uint64_t{kWordBytes} * input.grad_words;
        memcpy(to, grad_at(*p, tile, work, 0), p->elems * dtype_bytes(param.grad_dtype));
        input.grad_words += words(p->elems, param.grad_dtype);
      }
      input.param_words += words(p->elems, param.param_dtype);
    }
    return input;
  }

  // Copies the new parameters to their addresses.
  static void scatter(const Tile &tile, Work &work, const Frame &frame) {
    const char *from = frame.param.bytes();
    for (const csd_piece *p = tile.pieces; p != tile.pieces + tile.n_pieces; p++) {
      const csd_param &param = work.params[p->param];
      if (!grad_of(*p, tile, work) || !p->elems) continue;
      memcpy(param_at(*p, work, 0), from, p->elems * dtype_bytes(param.param_dtype));
      from += uint64_t{kWordBytes} * words(p->elems, param.param_dtype);
      if (!is_sparse(param)) work.pushed += p->elems * dtype_bytes(param.grad_dtype);
      work.pulled += p->elems * dtype_bytes(param.param_dtype);
      work.updated += p->elems;
    }
  }

  // Checks the kernel's report. Call this before scatter(): parameters of a damaged tile must not be used.
  static void check(const Tile &tile, Work &work, const Frame &frame, const KernelInput &input, bool from_host) {
    const auto &report = *reinterpret_cast<const csd_report *>(frame.report.bytes());
    if (report.version == UINT32_MAX) Card::fail("it reads as all ones: it has dropped off the bus", ENODEV);
    if (report.version != kKernelVersion)
      Card::fail("its kernel speaks version " + std::to_string(report.version) + ", and we " +
                     std::to_string(kKernelVersion) + ": build both from the same source",
                 EPROTO);
    if (report.n_words != tile.elems / kLanes || report.bad_entries)
      Card::fail("its kernel has not completed the update as requested", EIO);
    for (uint64_t chunk = 0; work.verify && !from_host && chunk < tile.n_chunks(); chunk++) {
      uint32_t sums[kMostSections];
      copy_sums(tile, report, chunk, false, sums);
      const uint32_t section = differing_section(tile, tile.layout.all(), chunk, sums);
      if (section < tile.layout.n()) throw damaged(tile, section);
    }
    if (crc32c(0, frame.param.bytes(), uint64_t{kWordBytes} * input.param_words) != report.crc_param)
      Card::fail("the parameters that came from it are not those that its kernel wrote", EIO);
    work.nonfinite = report.nonfinite;
    work.sum.summed = true;
    work.sum.sums.resize(tile.n_sums());
    for (uint64_t chunk = 0; chunk < tile.n_chunks(); chunk++)
      copy_sums(tile, report, chunk, true, &work.sum.sums[chunk * tile.layout.n()]);
  }

  // Holds a frame during an update. There are as many frames as workers, so one is always free.
  struct Lease {
    XrtDevice &device;
    std::shared_ptr<Frame> frame;

    explicit Lease(XrtDevice &d) : device(d) {
      std::lock_guard lock(device.mutex_);
      frame = std::move(device.frames_.back());
      device.frames_.pop_back();
    }
    ~Lease() {
      std::lock_guard lock(device.mutex_);
      device.frames_.push_back(std::move(frame));
    }
    Lease(const Lease &) = delete;
  };

  const std::shared_ptr<Card> card_;
  const bool p2p_;
  uint64_t tile_bytes_ = 0, section_bytes_ = 0;
  std::unordered_map<const float *, std::shared_ptr<CardBuffer>> tiles_;  // by their mapped address
  std::mutex mutex_;                                                      // guards frames_
  std::vector<std::shared_ptr<Frame>> frames_;
  Pool workers_;
};

// ---- Measuring a card -----------------------------------------------------------

// Starts `n` operations by `start(i, done)`, and returns the seconds until the last one has finished.
template <typename Start>
double seconds_of(size_t n, Start start) {
  // Shared with the operations: if one cannot be started, the others finish after this function has returned.
  const auto ends = std::make_shared<std::vector<std::promise<int>>>(n);
  const auto begin = std::chrono::steady_clock::now();
  for (size_t i = 0; i < n; i++) start(i, [ends, i](int os_errno) { (*ends)[i].set_value(os_errno); });
  int error = 0;
  for (std::promise<int> &end : *ends)
    if (const int e = end.get_future().get()) error = e;
  if (error) throw Failure{CSD_EIO, "measuring", error};
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

csd_card_rates measure_card(const csd_device &d, uint64_t offset, uint64_t bytes) {
  constexpr uint64_t kElems = 1 << 20, kRuns = 4;
  Pool *io = FileDevice::io_of(d);
  if (!io || !d.card || bytes < 12 * kElems)
    throw Failure{CSD_EINVAL, "bad options of a device, or too little to measure with"};
  const std::shared_ptr<Card> &card = d.card->card;
  XrtDevice device(d, *io, card);
  const std::vector<float *> buffers = device.allocate(d.buffers, 12 * kElems, 4 * kElems);
  std::deque<Tile> tiles;
  for (uint64_t at = 0; at + 12 * kElems <= bytes; at += 12 * kElems) {
    Tile &tile = tiles.emplace_back();
    tile.elems = kElems;
    tile.layout = Layout(CSD_FP32, 3, CSD_F32, kElems);
    tile.file_offset = offset + at;
    tile.n_slots = 1;
  }
  csd_card_rates rates{};
  const auto moved = static_cast<double>(tiles.size() * 12 * kElems);
  // The file system's threads determine the queue depth. Buffers are used in turns; their content does not matter.
  if (device.p2p()) {
    rates.card_to_drive = moved / seconds_of(tiles.size(), [&](size_t i, Done done) {
                            device.store(tiles[i], buffers[i % buffers.size()], 0, 12 * kElems, done);
                          });
    rates.drive_to_card = moved / seconds_of(tiles.size(), [&](size_t i, Done done) {
                            device.load(tiles[i], buffers[i % buffers.size()], 0, 12 * kElems, done);
                          });
  }
  struct Seconds {
    double in, out, kernel;
  };
  auto seconds = std::make_shared<Seconds>();
  card->call_with_timeout("measuring", [card, seconds] {
    const auto timed = [](auto &&call) {
      const auto begin = std::chrono::steady_clock::now();
      call();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    const Kernel &kernel = card->first_kernel();
    auto frame = std::make_shared<Frame>(card, 4 * kElems);
    const auto state = std::make_shared<CardBuffer>(card, 12 * kElems, KernelArg::tile_in);
    memset(state->bytes(), 0, 12 * kElems);
    state->to_device(12 * kElems);
    memset(frame->grad.bytes(), 0, 4 * kElems);
    seconds->in = timed([&] {
      for (uint64_t i = 0; i < kRuns; i++) frame->grad.to_device(4 * kElems);
    });
    *reinterpret_cast<csd_segment *>(frame->segments.bytes()) = {
        0, kElems, CSD_F16, CSD_F16, {kernel.rules[0], {1, 0.9f, 0.1f, 0.999f, 0.001f, 0.001f, 1, 1e-8f, 1}}, 0, 0};
    frame->segments.to_device(kWordBytes);
    set_args(*frame, kernel, *state, *state, {1, kElems / 2 / kLanes, 0, kElems / 2 / kLanes}, kElems / kLanes,
             kernel.sections, kElems / kLanes);
    seconds->kernel = timed([&] {
      for (uint64_t i = 0; i < kRuns; i++) card->execute(frame->run(kernel));
    });
    seconds->out = timed([&] {
      for (uint64_t i = 0; i < kRuns; i++) frame->param.from_device(4 * kElems);
    });
  });
  rates.to_card = kRuns * 4 * kElems / seconds->in;
  rates.from_card = kRuns * 4 * kElems / seconds->out;
  rates.kernel = kRuns * kElems / seconds->kernel;
  return rates;
}

std::unique_ptr<Device> make_xrt_device(const csd_device &d) {
  Pool *io = FileDevice::io_of(d);
  if (!io || !d.card) return nullptr;
  const std::shared_ptr<Card> &card = d.card->card;
  if (d.p2p == CSD_P2P_ON && !card->has_p2p()) Card::fail("peer-to-peer transfers do not work", EOPNOTSUPP);
  return std::make_unique<XrtDevice>(d, *io, card);
}

}  // namespace csd
