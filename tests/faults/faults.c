/* faults.c -- an LD_PRELOAD library that makes file I/O fail, or kills the process during it, on command.
 *
 * The file named by CSD_FAULTS holds kRules rules and is mapped here and by the test (tests/test_faults.py,
 * tests/crash), which switches them on and off while the process runs. Calls that no active rule picks go through
 * untouched. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kRules = 4, kPage = 4096 };

/* Kinds of calls. A tile's transfer is aligned in memory and file and longer than a page; all other reads and writes
 * are metadata (superblock, manifest, table), or the trial of direct I/O. */
enum {
  kTileRead = 1,
  kTileWrite = 2,
  kMetaRead = 4,
  kMetaWrite = 8,
  kAllocate = 16,
  kSync = 32,
  kDirectIo = 64,
  kDirectOpen = 128,
  kTruncate = 256,
  kRename = 512
};

/* The last three kill the process: before the call, in the middle of its transfer, or after it. */
enum { kError = 0, kShort = 1, kEof = 2, kKillBefore = 3, kKillMiddle = 4, kKillAfter = 5 };

struct rule { /* the numpy dtype RULE in __init__.py */
  uint32_t active;
  uint32_t calls;  /* kTileRead | ... */
  uint32_t effect; /* fail with `error`, move at most a page, end of file, or kill */
  int32_t error;
  uint64_t skip;  /* number of matching calls to let through first */
  uint64_t times; /* number of calls to strike then */
  uint64_t hold;  /* while nonzero, calls to be struck wait */
  uint64_t seen;
  uint64_t struck;
  char path[192]; /* only files whose path contains this */
};

static struct rule *rules;

__attribute__((constructor)) static void map_rules(void) {
  const char *name = getenv("CSD_FAULTS");
  const int fd = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
  void *at = fd < 0 ? MAP_FAILED : mmap(NULL, kRules * sizeof *rules, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at != MAP_FAILED) rules = at;
  if (fd >= 0) close(fd);
}

/* The rule that strikes this call, or NULL. */
static const struct rule *struck(uint32_t calls, int fd, const char *path) {
  if (!rules) return NULL;
  char link[64], name[4096];
  for (struct rule *r = rules; r < rules + kRules; r++) {
    if (!__atomic_load_n(&r->active, __ATOMIC_ACQUIRE) || !(r->calls & calls)) continue;
    if (!path) {
      snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
      const ssize_t n = readlink(link, name, sizeof name - 1);
      if (n < 0) continue;
      name[n] = 0;
      path = name;
    }
    if (!strstr(path, r->path)) continue;
    const uint64_t at = __atomic_fetch_add(&r->seen, 1, __ATOMIC_ACQ_REL);
    if (at < r->skip || at - r->skip >= r->times) continue;
    __atomic_fetch_add(&r->struck, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&r->hold, __ATOMIC_ACQUIRE)) usleep(1000);
    return r;
  }
  return NULL;
}

static uint32_t kind(int fd, int writes, const void *buffer, size_t n, off64_t at) {
  const int tile = ((uintptr_t)buffer | n | (uint64_t)at) % kPage == 0 && n > kPage;
  const uint32_t direct = fcntl(fd, F_GETFL) & O_DIRECT ? kDirectIo : 0;
  return direct | (writes ? (tile ? kTileWrite : kMetaWrite) : (tile ? kTileRead : kMetaRead));
}

/* The length of a short transfer: direct I/O stops at a page boundary, other transfers anywhere. */
static size_t cut(size_t n, uint32_t calls) {
  if (n > kPage) return kPage;
  return calls & kDirectIo || n == 1 ? n : n / 2;
}

/* Likewise, but half of the transfer if it is longer than a page. */
static size_t half(size_t n, uint32_t calls) { return n > kPage ? n / 2 / kPage * kPage : cut(n, calls); }

static void kill_if(const struct rule *r, uint32_t effect) {
  if (!r || r->effect != effect) return;
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

/* Kills after a call. Calls without a middle treat "middle" like "after". */
static void kill_after(const struct rule *r) {
  kill_if(r, kKillMiddle);
  kill_if(r, kKillAfter);
}

static int fails(const struct rule *r) { return r && r->effect < kKillBefore; }

/* The original of an interposed function. */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define TRANSFER(name, writes, buffer_type, offset_type)               \
  ssize_t name(int fd, buffer_type buffer, size_t n, offset_type at) { \
    const uint32_t calls = kind(fd, writes, buffer, n, at);            \
    const struct rule *r = struck(calls, fd, NULL);                    \
    if (r && r->effect == kError) return errno = r->error, -1;         \
    if (r && r->effect == kEof) return 0;                              \
    kill_if(r, kKillBefore);                                           \
    if (fails(r)) n = cut(n, calls);                                   \
    if (r && r->effect == kKillMiddle) n = half(n, calls);             \
    const ssize_t moved = REAL(name)(fd, buffer, n, at);               \
    kill_after(r);                                                     \
    return moved;                                                      \
  }
TRANSFER(pread, 0, void *, off_t)
TRANSFER(pread64, 0, void *, off64_t)
TRANSFER(pwrite, 1, const void *, off_t)
TRANSFER(pwrite64, 1, const void *, off64_t)

/* Python uses these to try out direct I/O. */
#define VECTOR(name, writes, parameters, arguments)                                         \
  ssize_t name parameters {                                                                 \
    const struct rule *r = struck(kind(fd, writes, v->iov_base, v->iov_len, at), fd, NULL); \
    if (r && r->effect == kError) return errno = r->error, -1;                              \
    kill_if(r, kKillBefore);                                                                \
    const ssize_t moved = REAL(name) arguments;                                             \
    kill_after(r);                                                                          \
    return moved;                                                                           \
  }
VECTOR(preadv, 0, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
VECTOR(preadv64, 0, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
VECTOR(preadv2, 0, (int fd, const struct iovec *v, int n, off_t at, int flags), (fd, v, n, at, flags))
VECTOR(preadv64v2, 0, (int fd, const struct iovec *v, int n, off64_t at, int flags), (fd, v, n, at, flags))
VECTOR(pwritev, 1, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
VECTOR(pwritev64, 1, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
VECTOR(pwritev2, 1, (int fd, const struct iovec *v, int n, off_t at, int flags), (fd, v, n, at, flags))
VECTOR(pwritev64v2, 1, (int fd, const struct iovec *v, int n, off64_t at, int flags), (fd, v, n, at, flags))

#define ALLOCATE(name, offset_type)                         \
  int name(int fd, offset_type at, offset_type n) {         \
    const struct rule *r = struck(kAllocate, fd, NULL);     \
    if (fails(r)) return r->error;                          \
    kill_if(r, kKillBefore);                                \
    if (r && r->effect == kKillMiddle && n > kPage) n /= 2; \
    const int error = REAL(name)(fd, at, n);                \
    kill_after(r);                                          \
    return error;                                           \
  }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

#define CHANGE(name, calls, parameters, arguments, fd, path) \
  int name parameters {                                      \
    const struct rule *r = struck(calls, fd, path);          \
    if (fails(r)) return errno = r->error, -1;               \
    kill_if(r, kKillBefore);                                 \
    const int result = REAL(name) arguments;                 \
    kill_after(r);                                           \
    return result;                                           \
  }
CHANGE(fsync, kSync, (int fd), (fd), fd, NULL)
CHANGE(fdatasync, kSync, (int fd), (fd), fd, NULL)
CHANGE(ftruncate, kTruncate, (int fd, off_t size), (fd, size), fd, NULL)
CHANGE(ftruncate64, kTruncate, (int fd, off64_t size), (fd, size), fd, NULL)
/* csd_optim calls these to punch holes. */
CHANGE(fallocate, kTruncate, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n), fd, NULL)
CHANGE(fallocate64, kTruncate, (int fd, int mode, off64_t at, off64_t n), (fd, mode, at, n), fd, NULL)
CHANGE(rename, kRename, (const char *from, const char *to), (from, to), -1, to)

#define OPEN(name)                                                                                   \
  int name(const char *path, int flags, ...) {                                                       \
    va_list arguments;                                                                               \
    va_start(arguments, flags);                                                                      \
    const mode_t mode = va_arg(arguments, mode_t);                                                   \
    va_end(arguments);                                                                               \
    char target[4096];                                                                               \
    const ssize_t n = flags & O_DIRECT ? readlink(path, target, sizeof target - 1) : -1;             \
    if (n > 0) target[n] = 0;                                                                        \
    const struct rule *r = flags & O_DIRECT ? struck(kDirectOpen, -1, n > 0 ? target : path) : NULL; \
    return r ? (errno = r->error, -1) : REAL(name)(path, flags, mode);                               \
  }
OPEN(open)
OPEN(open64)
