// A card for XRT's software emulation (sw_emu): the process that XRT starts in place of each card. It runs the HLS
// kernels as compiled by g++. XRT's driver library `libxrt_swemu` listens on a Unix socket and sends requests:
//
//   request  {0x09, uint64 size, 0x15, uint32 number}, then a protobuf message of that size
//   answer   {0x09, uint64 size}, then a message
//
// The request numbers are those of xcl_macros.h; each function below documents the fields of its message.
//
// Device memory is one anonymous file, which both sides map: what the host sees in a buffer *is* device memory, as with
// P2P. (XRT keeps a separate copy of buffers that it calls cacheable, and syncs it through the socket.) Each run of a
// kernel is a child process: a kernel that accesses memory out of bounds cannot harm the others, and its run hangs.
//
// CSD_OPTIM_EMULATOR_FAULT makes a card fail: the first card, or with @N card N. Runs are counted from 1:
//
//   hang:5     the 5th run does nothing and never ends
//   lost:5     from the 5th run on the card is gone: runs end at once and do nothing, and all reads return ones
//   garble:5   one bit of what the 5th run wrote to the tile is flipped
//   params:5   one bit of the parameters that the 5th run wrote is flipped
//   kill:5     instead of the 5th run, this process is killed
//   nop2p      the host cannot map buffers, as if P2P were off
//
// XRT does not handle these faults well. While a run hangs, its scheduler cannot be stopped: closing the run ends in a
// crash, and so does a regular exit. If this process is gone, XRT waits for its answer forever, even at exit. And while
// XRT's SIGCHLD handler is installed, killing a child of the host ends the host's process group.
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "emulator.h"
#include "registers.h"
#include "wire.h"

namespace csd::emulator {
namespace {

constexpr uint64_t kMemoryBytes = uint64_t(1) << 31;  // what the driver library maps; same value in emulation.py
constexpr uint64_t kGuardBytes = uint64_t(1) << 30;   // before and after a buffer, to catch out-of-bounds accesses
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kUnitBytes = 0x10000;  // of control registers
constexpr long kPollNanoseconds = 200000;

void log_line(const char *format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  dprintf(STDERR_FILENO, "csd_optim emulator: %s\n", text);
}

// For violations of the protocol and failures that cannot be handled.
template <typename... Arguments>
[[noreturn]] void die(const char *format, Arguments... arguments) {
  log_line(format, arguments...);
  kill(getpid(), SIGKILL);  // XRT does not notice a process that merely exits
  _exit(1);                 // never reached
}

// SIGCHLD, as a set for sigtimedwait.
sigset_t child_signal() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGCHLD);
  return signals;
}

// ---- Faults ------------------------------------------------------------------------

struct Fault {
  std::string kind;
  uint64_t run = 0;
  bool valid = true;

  bool is(std::string_view what, uint64_t at = 0) const { return kind == what && run == at; }
};

Fault fault_of_this_card(unsigned card) {
  const char *set = getenv("CSD_OPTIM_EMULATOR_FAULT");
  if (!set || !*set) return {};
  char kind[16] = "";
  unsigned long long run = 0;
  unsigned at = 0;
  const bool counted = sscanf(set, "%15[a-z0-9]:%llu@%u", kind, &run, &at) >= 2;
  if (!counted) sscanf(set, "%15[a-z0-9]@%u", kind, &at);
  const std::string_view name = kind;
  const bool counts_runs = name == "hang" || name == "lost" || name == "garble" || name == "params" || name == "kill";
  const bool valid = counts_runs ? counted && run : name == "nop2p" && !counted;
  if (!valid)
    log_line("CSD_OPTIM_EMULATOR_FAULT is hang:N, lost:N, garble:N, params:N, kill:N or nop2p, then @CARD; got '%s'",
             set);
  return at == card || !valid ? Fault{kind, run, valid} : Fault{};
}

// ---- Device memory ------------------------------------------------------------------

class Memory {
 public:
  struct Buffer {
    uint64_t bytes;
    char *data;  // with inaccessible guard areas on both sides
  };

  Memory() {
    fd_ = memfd_create("csd_optim_card", MFD_CLOEXEC);
    if (fd_ < 0 || ftruncate(fd_, kMemoryBytes)) die("no memory for the card: %s", strerror(errno));
    path_ = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd_);
  }

  const std::string &path() const { return path_; }  // the file that the host maps

  void allocate(uint64_t address, uint64_t bytes) {
    bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    if (!bytes || address % kPageBytes || address > kMemoryBytes || bytes > kMemoryBytes - address)
      die("a buffer of %" PRIu64 " bytes at 0x%" PRIx64 ", which is beyond the card's memory", bytes, address);
    if (find(address) != buffers_.end()) die("two buffers at 0x%" PRIx64, address);
    constexpr int kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *guarded = mmap(nullptr, bytes + 2 * kGuardBytes, PROT_NONE, kNothing, -1, 0);
    if (guarded == MAP_FAILED) die("cannot map a buffer: %s", strerror(errno));
    char *data = static_cast<char *>(guarded) + kGuardBytes;
    if (mmap(data, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, off_t(address)) == MAP_FAILED)
      die("cannot map a buffer: %s", strerror(errno));
    buffers_[address] = {bytes, data};
  }

  // Frees a buffer, and its pages even if the host has not unmapped them.
  void release(uint64_t address) {
    const auto found = buffers_.find(address);
    if (found == buffers_.end()) return;  // already freed by release_all()
    const Buffer &buffer = found->second;
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(address), off_t(buffer.bytes));
    munmap(buffer.data - kGuardBytes, buffer.bytes + 2 * kGuardBytes);
    buffers_.erase(found);
  }

  void release_all() {
    while (!buffers_.empty()) release(buffers_.begin()->first);
  }

  // Returns `bytes` bytes of memory at an address; nullptr if they are not within a single buffer.
  char *at(uint64_t address, uint64_t bytes) const {
    const auto found = find(address);
    if (found == buffers_.end()) return nullptr;
    const uint64_t offset = address - found->first;
    return bytes <= found->second.bytes - offset ? found->second.data + offset : nullptr;
  }

  // Describes, for messages, which buffer is at or next to an address of this process.
  void describe(const void *ours, char *text, size_t size) const {
    const char *place = static_cast<const char *>(ours);
    for (const auto &[address, buffer] : buffers_) {
      if (place < buffer.data - kGuardBytes || place >= buffer.data + buffer.bytes + kGuardBytes) continue;
      const bool before = place < buffer.data;
      snprintf(text, size, "%td bytes %s the buffer of %" PRIu64 " bytes at 0x%" PRIx64,
               before ? buffer.data - place : place - buffer.data, before ? "before" : "from the beginning of",
               buffer.bytes, address);
      return;
    }
    snprintf(text, size, "%p, which is near no buffer", ours);
  }

 private:
  std::map<uint64_t, Buffer>::const_iterator find(uint64_t address) const {
    auto found = buffers_.upper_bound(address);
    if (found == buffers_.begin()) return buffers_.end();
    --found;
    return address - found->first < found->second.bytes ? found : buffers_.end();
  }

  std::map<uint64_t, Buffer> buffers_;  // by address
  std::string path_;
  int fd_;
};

// ---- The kernels ----------------------------------------------------------------------

// Runs a kernel with the arguments in its registers. Returns nullptr, or the reason why the run cannot finish.
const char *run_kernel(const Kernel &kernel, const uint8_t *registers, const Memory &memory) {
  void *buffers[kMostBuffers];
  uint32_t numbers[kNumbers];
  for (uint32_t i = 0; i < kernel.buffers(); i++) {
    uint64_t address;
    memcpy(&address, registers + register_of_buffer(i), sizeof address);
    buffers[i] = memory.at(address, 1);
    if (!buffers[i]) {
      log_line("%s was given the address 0x%" PRIx64 ", which is in no buffer", kernel.name, address);
      _exit(1);
    }
  }
  for (uint32_t i = 0; i < kNumbers; i++)
    memcpy(&numbers[i], registers + register_of_number(kernel, i), sizeof numbers[i]);
  return csd_csim_run(kernel.name, buffers, numbers);
}

const Kernel *kernel_of_run;  // set in the child process of a run, for the signal handler below
const Memory *memory_of_run;

void on_bad_access(int, siginfo_t *info, void *) {
  char where[200];
  memory_of_run->describe(info->si_addr, where, sizeof where);
  log_line("%s went out of bounds: it accessed memory at %s", kernel_of_run->name, where);
  _exit(1);
}

// ---- A compute unit -------------------------------------------------------------------

// A kernel's registers and its current run, which is a child process.
class Unit {
 public:
  Unit(const Kernel &kernel, const Memory &memory) : kernel_(kernel), memory_(memory), registers_(kUnitBytes) {}
  Unit(const Unit &) = delete;

  ~Unit() {
    if (state_ != State::kRunning) return;
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }

  // Sets `starts` if this write starts a run; the caller must then call start() or hang(). Returns false for an access
  // beyond the registers.
  bool write(uint64_t offset, std::string_view data, bool &starts) {
    if (offset % 4 || data.size() % 4 || offset > kUnitBytes || data.size() > kUnitBytes - offset) return false;
    memcpy(registers_.data() + offset, data.data(), data.size());
    uint32_t control = 0;
    if (offset == 0 && !data.empty()) memcpy(&control, data.data(), sizeof control);
    starts = control & kStart;
    if (control & kContinue && state_ == State::kDone) state_ = State::kIdle;
    return true;
  }

  bool read(uint64_t offset, uint64_t bytes, std::string &data) {
    if (offset > kUnitBytes || bytes > kUnitBytes - offset) return false;
    data.assign(reinterpret_cast<const char *>(registers_.data()) + offset, bytes);
    if (offset == 0 && bytes >= sizeof(uint32_t)) {
      poll_child();
      const bool busy = state_ == State::kRunning || state_ == State::kHung;
      const uint32_t control = busy ? kStart : state_ == State::kDone ? kDone | kIdle : kIdle;
      memcpy(data.data(), &control, sizeof control);
    }
    return true;
  }

  // `corrupted_register`: 0, or the register of the argument whose memory is corrupted after the run.
  void start(uint32_t corrupted_register) {
    if (state_ == State::kRunning || state_ == State::kHung) die("%s was started while it runs", kernel_.name);
    state_ = State::kRunning;
    corrupted_register_ = corrupted_register;
    child_ = fork();
    if (child_ < 0) die("cannot start a run: %s", strerror(errno));
    if (child_ == 0) run();
  }

  void hang() { state_ = State::kHung; }
  const Kernel &kernel() const { return kernel_; }

 private:
  enum class State { kIdle, kRunning, kHung, kDone };

  [[noreturn]] void run() {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    kernel_of_run = &kernel_;
    memory_of_run = &memory_;
    struct sigaction action = {};
    action.sa_sigaction = on_bad_access;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    const char *why_not = run_kernel(kernel_, registers_.data(), memory_);
    if (why_not) log_line("%s", why_not);
    _exit(why_not ? 1 : 0);
  }

  // Checks whether the run has ended. XRT polls continuously; waiting a little here saves both sides most of the work.
  void poll_child() {
    if (state_ != State::kRunning) return;
    int status = 0;
    pid_t ended = waitpid(child_, &status, WNOHANG);
    if (!ended) {
      const sigset_t signals = child_signal();
      const timespec wait = {0, kPollNanoseconds};
      sigtimedwait(&signals, nullptr, &wait);
      ended = waitpid(child_, &status, WNOHANG);
    }
    if (!ended) return;
    if (ended < 0 || !WIFEXITED(status) || WEXITSTATUS(status)) {
      log_line("this run of %s hangs", kernel_.name);
      state_ = State::kHung;
      return;
    }
    state_ = State::kDone;
    if (!corrupted_register_) return;
    uint64_t address;
    memcpy(&address, registers_.data() + corrupted_register_, sizeof address);
    *memory_.at(address, 1) ^= 1;
  }

  const Kernel &kernel_;
  const Memory &memory_;
  std::vector<uint8_t> registers_;
  State state_ = State::kIdle;
  pid_t child_ = 0;  // while it runs
  uint32_t corrupted_register_ = 0;
};

// ---- The card -------------------------------------------------------------------------

class Card {
 public:
  Card(int socket, pid_t host, const Fault &fault) : socket_(socket), host_(host), fault_(fault) {}

  [[noreturn]] void serve();

 private:
  struct Request {
    const char *name;
    Answer (Card::*answer)(const Fields &);
  };
  static const std::map<uint32_t, Request> kRequests;

  // {3: final?} -> {1: done}
  Answer close(const Fields &fields) {
    units_.clear();
    memory_.release_all();
    closing_ = fields.number(3);
    return Answer().number(1, 1);
  }

  // {1: file with the metadata, 2: file with the bitstream, ...} -> {1: done}. Our bitstream is text, with a line for
  // each compute unit: kernel and address. The files are missing if a buffer is requested before an xclbin is loaded.
  Answer load(const Fields &fields) {
    if (!fault_.valid) return Answer().number(1, 0);
    units_.clear();
    if (const std::string path(fields.bytes(2)); !path.empty()) {
      std::ifstream lines(path);
      std::string kernel;
      uint64_t address;
      while (lines >> kernel >> std::hex >> address)
        if (const Kernel *const ours = kernel_named(kernel))  // ignore other kernels
          units_.try_emplace(address, *ours, memory_);
      if (!lines.eof()) {
        log_line("the xclbin was not made for this emulator");
        return Answer().number(1, 0);
      }
    }
    return Answer().number(1, 1);
  }

  // {1: address, 2: bytes, 3: to be mapped by the host?} -> {1: done, 2: file to be mapped}
  Answer allocate(const Fields &fields) {
    memory_.allocate(fields.number(1), fields.number(2));
    Answer answer = Answer().number(1, 1);
    // The protocol has no way to refuse, but XRT treats a missing file as a refusal. Command buffers have the size of a
    // page and must always be mapped.
    const bool refused = fault_.is("nop2p") && fields.number(2) > kPageBytes;
    if (fields.number(3)) answer.bytes(2, refused ? "/nonexistent/P2P is off" : memory_.path());
    return answer;
  }

  // {1: address} -> {1: done}
  Answer release(const Fields &fields) {
    memory_.release(fields.number(1));
    return Answer().number(1, 1);
  }

  // {3: address, 4: data, 5: bytes} -> {1: bytes}
  Answer write_memory(const Fields &fields) {
    const std::string_view data = fields.bytes(4);
    if (lost_) return Answer().number(1, data.size());
    char *place = memory_.at(fields.number(3), data.size());
    if (!place) die("the host writes to 0x%" PRIx64 ", where it has no buffer", fields.number(3));
    memcpy(place, data.data(), data.size());
    return Answer().number(1, data.size());
  }

  // {4: address, 5: bytes} -> {1: bytes, 2: data}
  Answer read_memory(const Fields &fields) {
    const uint64_t bytes = fields.number(5);
    if (lost_) return Answer().number(1, bytes).bytes(2, std::string(bytes, '\xff'));
    const char *place = memory_.at(fields.number(4), bytes);
    if (!place) die("the host reads from 0x%" PRIx64 ", where it has no buffer", fields.number(4));
    return Answer().number(1, bytes).bytes(2, {place, bytes});
  }

  // {2: address, 4: data} -> {1: done}
  Answer write_registers(const Fields &fields) { return write_at(fields.number(2), fields.bytes(4)); }

  // {2: address, 3: bytes} -> {1: done, 2: data}
  Answer read_registers(const Fields &fields) { return read_at(fields.number(2), fields.number(3)); }

  // {1: address of a unit, 2: register, 3: data} -> {1: done}
  Answer write_register(const Fields &fields) { return write_at(fields.number(1) + fields.number(2), fields.bytes(3)); }

  // {1: address of a unit, 2: register, 3: bytes} -> {1: done, 2: data}
  Answer read_register(const Fields &fields) { return read_at(fields.number(1) + fields.number(2), fields.number(3)); }

  // {...} -> {1: done}. Sets up streams between kernels; we have none.
  Answer connect(const Fields &) { return Answer().number(1, 1); }

  Answer write_at(uint64_t address, std::string_view data) {
    const auto [base, unit] = unit_at(address);
    bool starts = false;
    const bool written = unit && unit->write(address - base, data, starts);
    if (starts) start(*unit);
    return Answer().number(1, written);
  }

  void start(Unit &unit) {
    const uint64_t run = ++runs_;
    if (fault_.is("kill", run)) kill(getpid(), SIGKILL);
    if (fault_.is("lost", run)) lost_ = true;
    if (fault_.is("hang", run)) return unit.hang();
    const Kernel &kernel = unit.kernel();
    if (!lost_)
      unit.start(fault_.is("garble", run)   ? register_of_buffer(kernel.tile_out())
                 : fault_.is("params", run) ? register_of_buffer(kernel.param())
                                            : 0);
  }

  Answer read_at(uint64_t address, uint64_t bytes) {
    const auto [base, unit] = unit_at(address);
    std::string data;
    if (!unit || !unit->read(address - base, bytes, data)) return Answer().number(1, 0);
    return Answer().number(1, 1).bytes(2, data);
  }

  std::pair<uint64_t, Unit *> unit_at(uint64_t address) {
    auto found = units_.upper_bound(address);
    if (found == units_.begin()) return {};
    --found;
    return {found->first, &found->second};
  }

  void receive(void *to, uint64_t bytes);
  void send(const void *from, uint64_t bytes);

  const int socket_;
  const pid_t host_;
  const Fault fault_;
  Memory memory_;
  std::map<uint64_t, Unit> units_;  // by the address of their registers
  uint64_t runs_ = 0;
  bool lost_ = false;
  bool closing_ = false;
};

const std::map<uint32_t, Card::Request> Card::kRequests = {
    {1, {"Close", &Card::close}},
    {3, {"LoadBitstream", &Card::load}},
    {4, {"AllocDeviceBuffer", &Card::allocate}},
    {5, {"FreeDeviceBuffer", &Card::release}},
    {6, {"CopyBufferHost2Device", &Card::write_memory}},
    {7, {"CopyBufferDevice2Host", &Card::read_memory}},
    {9, {"WriteAddrKernelCtrl", &Card::write_registers}},
    {11, {"ReadAddrKernelCtrl", &Card::read_registers}},
    {28, {"SetupInstance", &Card::connect}},
    {51, {"RegWrite", &Card::write_register}},
    {52, {"RegRead", &Card::read_register}},
};

void Card::receive(void *to, uint64_t bytes) {
  for (char *at = static_cast<char *>(to); bytes;) {
    // Also check whether the host is alive: processes that it forked may keep its end of the socket open.
    pollfd ready = {socket_, POLLIN, 0};
    if (poll(&ready, 1, 1000) == 0) {
      if (getppid() != host_) _exit(0);
      continue;
    }
    const ssize_t n = read(socket_, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) _exit(0);  // the host is gone
    at += n;
    bytes -= uint64_t(n);
  }
}

void Card::send(const void *from, uint64_t bytes) {
  for (const char *at = static_cast<const char *>(from); bytes;) {
    const ssize_t n = ::send(socket_, at, bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) _exit(0);
    at += n;
    bytes -= uint64_t(n);
  }
}

void Card::serve() {
  std::string message;
  for (;;) {
    uint8_t head[14];
    receive(head, sizeof head);
    uint64_t size;
    uint32_t number;
    memcpy(&size, head + 1, sizeof size);
    memcpy(&number, head + 10, sizeof number);
    if (head[0] != 0x09 || head[9] != 0x15) die("XRT does not use the protocol of version 2.13");
    message.resize(size);
    receive(message.data(), size);
    const auto request = kRequests.find(number);
    if (request == kRequests.end()) die("XRT asks for request %" PRIu32 ", which this card does not know", number);
    Answer answer;
    try {
      answer = (this->*request->second.answer)(Fields(message));
    } catch (const std::exception &e) {
      die("%s: %s", request->second.name, e.what());
    }
    uint8_t answer_head[9] = {0x09};
    size = answer.message().size();
    memcpy(answer_head + 1, &size, sizeof size);
    send(answer_head, sizeof answer_head);
    send(answer.message().data(), size);
    if (closing_) _exit(0);
  }
}

int connect_to_host(const std::string &path, pid_t host) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) die("the socket's name is too long: %s", path.c_str());
  path.copy(address.sun_path, path.size());
  while (getppid() == host) {  // retry, because the host may not be listening yet
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) die("no socket: %s", strerror(errno));
    if (!connect(fd, reinterpret_cast<const sockaddr *>(&address), sizeof address)) {
      unlink(path.c_str());  // no other process should connect, and it must not remain if the host dies
      return fd;
    }
    if (errno != ENOENT && errno != ECONNREFUSED && errno != EINTR) die("%s: %s", path.c_str(), strerror(errno));
    ::close(fd);
    usleep(1000);
  }
  _exit(0);
}

}  // namespace
}  // namespace csd::emulator

extern "C" __attribute__((visibility("default"))) int csd_emulator_main(void) {
  using namespace csd::emulator;
  const char *user = getenv("USER");
  const char *id = getenv("EMULATION_SOCKETID");
  unsigned number;
  pid_t host;
  if (!user || !id || sscanf(id, "device%u_%*u_%d", &number, &host) != 2) {
    log_line("only XRT can start this program, with USER set");
    return 1;
  }
  // Ctrl-C and the like signal the whole process group, but the host still needs its card for an orderly exit.
  for (const int signal_number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) signal(signal_number, SIG_IGN);
  const sigset_t signals = child_signal();
  sigprocmask(SIG_BLOCK, &signals, nullptr);  // for sigtimedwait
  const int socket = connect_to_host(std::string("/tmp/") + user + "/" + id, host);
  Card(socket, host, fault_of_this_card(number)).serve();
}
