/* record.c -- an LD_PRELOAD library that records what a process does to files: tests/crash/power.py replays it.
 *
 * The file named by CSD_RECORD is mapped here and by the test. It has a head, followed by entries in a single order for
 * all threads, and for all recording processes, which run one after the other. An entry is valid once `end` is behind
 * it, so a process may be killed at any instant. Each call has an entry before it and one after it. The entry before a
 * flush contains the whole file as seen through the page cache, because writes through mappings show nowhere else.
 * Reads are recorded without their data. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
  kWrite = 1,
  kAllocate = 2,
  kTruncate = 3,
  kSync = 4,
  kSyncDirectory = 5,
  kRename = 6,
  kMark = 7,
  kDone = 8,
  kOther = 9,
  kCreate = 10,
  kSeen = 11,
  kRead = 12,       /* through the page cache */
  kReadDirect = 13, /* bypassing it */
  kDrop = 14        /* clean pages are dropped from the page cache */
};

struct head {      /* the numpy dtype HEAD in power.py */
  uint64_t active; /* record? */
  uint64_t end;    /* offset of the end of the last entry, in bytes */
  uint64_t room;   /* size of the file */
  char root[232];  /* record only files below this directory */
};

struct entry {    /* the numpy dtype ENTRY */
  uint64_t bytes; /* size of this entry with its data, padded to 8 */
  uint64_t what;  /* kWrite ...; kDone: a call has returned */
  uint64_t process;
  uint64_t call;  /* identifies the call in both of its entries: the offset of the first */
  uint64_t at, n; /* offset and size; for kDone, n is the return value; for kMark, its number */
  uint64_t data;  /* number of bytes that follow */
  char path[136]; /* below root */
};

static struct head *head;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void map_log(void) {
  const char *name = getenv("CSD_RECORD");
  const int fd = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
  struct stat st;
  void *at = fd < 0 || fstat(fd, &st) != 0
                 ? MAP_FAILED
                 : mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at != MAP_FAILED) head = at;
  if (fd >= 0) close(fd);
}

/* Returns whether the file is to be recorded, and if so, stores its path below the root in `path`. */
static int concerns(int fd, const char *name, char path[136]) {
  if (!head || !__atomic_load_n(&head->active, __ATOMIC_ACQUIRE)) return 0;
  char link[64], target[4096];
  if (!name) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, target, sizeof target - 1);
    if (n < 0) return 0;
    target[n] = 0;
    name = target;
  }
  const size_t n = strlen(head->root);
  if (strncmp(name, head->root, n) != 0) return 0;
  snprintf(path, 136, "%s", name + n);
  return 1;
}

/* Fills in a new entry, with the lock held; publish() makes it valid. */
static struct entry *add(uint64_t what, uint64_t at, uint64_t n, uint64_t data, const char *path) {
  struct entry *e = (struct entry *)((char *)head + head->end);
  const uint64_t bytes = (sizeof *e + data + 7) / 8 * 8;
  if (head->end + bytes > head->room) abort(); /* better than an incomplete record */
  *e = (struct entry){
      .bytes = bytes, .what = what, .process = (uint64_t)getpid(), .call = head->end, .at = at, .n = n, .data = data};
  snprintf(e->path, sizeof e->path, "%s", path);
  return e;
}

static uint64_t publish(const struct entry *e) {
  const uint64_t call = e->call;
  __atomic_fetch_add(&head->end, e->bytes, __ATOMIC_RELEASE);
  return call;
}

static uint64_t before(uint64_t what, uint64_t at, uint64_t n, const struct iovec *v, int count, const char *path) {
  pthread_mutex_lock(&lock);
  uint64_t data = 0;
  for (int i = 0; i < count; i++) data += v[i].iov_len;
  struct entry *e = add(what, at, n, data, path);
  char *to = (char *)(e + 1);
  for (int i = 0; i < count; to += v[i++].iov_len) memcpy(to, v[i].iov_base, v[i].iov_len);
  const uint64_t call = publish(e);
  pthread_mutex_unlock(&lock);
  return call;
}

/* Adds an entry with the current content of the whole file. */
static uint64_t before_with_content(uint64_t what, int fd, const char *path) {
  struct stat st;
  pthread_mutex_lock(&lock); /* so that no other recorded call begins meanwhile */
  fstat(fd, &st);
  struct entry *e = add(what, 0, 0, (uint64_t)st.st_size, path);
  for (uint64_t n = 0; n < e->data;) {
    const ssize_t more = REAL(pread)(fd, (char *)(e + 1) + n, e->data - n, (off_t)n);
    if (more <= 0) abort();
    n += (uint64_t)more;
  }
  const uint64_t call = publish(e);
  pthread_mutex_unlock(&lock);
  return call;
}

static uint64_t before_sync(int fd, const char *path) {
  struct stat st;
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) return before(kSyncDirectory, 0, 0, NULL, 0, path);
  return before_with_content(kSync, fd, path);
}

static void after(uint64_t call, int64_t result, const char *path) {
  pthread_mutex_lock(&lock);
  struct entry *e = add(kDone, 0, (uint64_t)result, 0, path);
  e->call = call;
  publish(e);
  pthread_mutex_unlock(&lock);
}

/* Lets the process mark its progress in the record. */
void csd_record_mark(uint64_t number) {
  if (head && head->active) before(kMark, 0, number, NULL, 0, "");
}

/* For the test to call after the process was killed: records the content of a file, which shows which of the
 * interrupted calls took effect. */
void csd_record_seen(const char *name) {
  char path[136];
  const int fd = open(name, O_RDONLY | O_CLOEXEC);
  if (fd >= 0 && concerns(fd, NULL, path)) before_with_content(kSeen, fd, path);
  if (fd >= 0) close(fd);
}

#define RECORD(type, name, parameters, arguments, fd, name_of, begun) \
  type name parameters {                                              \
    char path[136];                                                   \
    if (!concerns(fd, name_of, path)) return REAL(name) arguments;    \
    const uint64_t call = begun;                                      \
    const type result = REAL(name) arguments;                         \
    after(call, (int64_t)result, path);                               \
    return result;                                                    \
  }

#define WRITE(name, offset_type)                                                                               \
  RECORD(ssize_t, name, (int fd, const void *buffer, size_t n, offset_type at), (fd, buffer, n, at), fd, NULL, \
         before(kWrite, (uint64_t)at, n, &(struct iovec){(void *)buffer, n}, 1, path))
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)

#define VECTOR(name, parameters, arguments) \
  RECORD(ssize_t, name, parameters, arguments, fd, NULL, before(kWrite, (uint64_t)at, 0, v, n, path))
VECTOR(pwritev, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
VECTOR(pwritev64, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
VECTOR(pwritev2, (int fd, const struct iovec *v, int n, off_t at, int flags), (fd, v, n, at, flags))
VECTOR(pwritev64v2, (int fd, const struct iovec *v, int n, off64_t at, int flags), (fd, v, n, at, flags))

#define CHANGE(name, what, parameters, arguments, at, n) \
  RECORD(int, name, parameters, arguments, fd, NULL, before(what, (uint64_t)(at), (uint64_t)(n), NULL, 0, path))
CHANGE(posix_fallocate, kAllocate, (int fd, off_t at, off_t n), (fd, at, n), at, n)
CHANGE(posix_fallocate64, kAllocate, (int fd, off64_t at, off64_t n), (fd, at, n), at, n)
CHANGE(ftruncate, kTruncate, (int fd, off_t n), (fd, n), 0, n)
CHANGE(ftruncate64, kTruncate, (int fd, off64_t n), (fd, n), 0, n)

/* A hole is recorded as a write of zeros. */
#define PUNCH(name, offset_type)                                                                                 \
  int name(int fd, int mode, offset_type at, offset_type n) {                                                    \
    char path[136];                                                                                              \
    if (!concerns(fd, NULL, path)) return REAL(name)(fd, mode, at, n);                                           \
    char *zeros = calloc(1, (size_t)n);                                                                          \
    const uint64_t call = before(kWrite, (uint64_t)at, (uint64_t)n, &(struct iovec){zeros, (size_t)n}, 1, path); \
    free(zeros);                                                                                                 \
    const int result = REAL(name)(fd, mode, at, n);                                                              \
    after(call, result == 0 ? (int64_t)n : -1, path);                                                            \
    return result;                                                                                               \
  }
PUNCH(fallocate, off_t)
PUNCH(fallocate64, off64_t)

RECORD(int, fsync, (int fd), (fd), fd, NULL, before_sync(fd, path))
RECORD(int, fdatasync, (int fd), (fd), fd, NULL, before_sync(fd, path))

#define READ(name, parameters, arguments, size)          \
  RECORD(ssize_t, name, parameters, arguments, fd, NULL, \
         before(fcntl(fd, F_GETFL) & O_DIRECT ? kReadDirect : kRead, (uint64_t)at, size, NULL, 0, path))
READ(pread, (int fd, void *buffer, size_t n, off_t at), (fd, buffer, n, at), n)
READ(pread64, (int fd, void *buffer, size_t n, off64_t at), (fd, buffer, n, at), n)
READ(preadv, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at), 0)
READ(preadv64, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at), 0)
READ(preadv2, (int fd, const struct iovec *v, int n, off_t at, int flags), (fd, v, n, at, flags), 0)
READ(preadv64v2, (int fd, const struct iovec *v, int n, off64_t at, int flags), (fd, v, n, at, flags), 0)

CHANGE(posix_fadvise, kDrop, (int fd, off_t at, off_t n, int advice), (fd, at, n, advice), 0, advice)
CHANGE(posix_fadvise64, kDrop, (int fd, off64_t at, off64_t n, int advice), (fd, at, n, advice), 0, advice)

#define NAME(name, what, parameters, arguments, of) \
  RECORD(int, name, parameters, arguments, -1, of, before(what, 0, 0, NULL, 0, path))
NAME(rename, kRename, (const char *from, const char *to), (from, to), to)
NAME(unlink, kOther, (const char *name), (name), name)
NAME(link, kOther, (const char *from, const char *to), (from, to), to)

/* An open with O_CREAT that gives an empty file is recorded as a creation, because it may be one. */
#define OPEN(name)                                                                                        \
  int name(const char *file, int flags, ...) {                                                            \
    va_list arguments;                                                                                    \
    va_start(arguments, flags);                                                                           \
    const mode_t mode = va_arg(arguments, mode_t);                                                        \
    va_end(arguments);                                                                                    \
    const int fd = REAL(name)(file, flags, mode);                                                         \
    char path[136];                                                                                       \
    struct stat st;                                                                                       \
    if (fd >= 0 && flags & O_CREAT && concerns(fd, NULL, path) && fstat(fd, &st) == 0 && st.st_size == 0) \
      before(kCreate, 0, 0, NULL, 0, path);                                                               \
    return fd;                                                                                            \
  }
OPEN(open)
OPEN(open64)
