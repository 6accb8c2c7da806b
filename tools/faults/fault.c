/* Faults on demand: preloaded before libc, this fails chosen system calls on paths below one directory.

   cc -shared -fPIC -O2 fault.c -o fault.so -ldl;  LD_PRELOAD=./fault.so python ...

   Nothing happens before fault_arm(plan). From then on every call of a counted kind that touches a path below
   plan->root (by name, or by descriptor) is counted; at the plan->nth of those whose kind is in plan->kinds the
   plan's action is done. The plan is in memory that the parent process shares, so that what was counted, and where
   the fault was, is known even of a process that was killed. `shim.py` has the same structure.

   A process that has FAULT_PLAN in its environment is armed from the start, with the plan in the file of this name; so
   are the processes that it starts. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN, CREATE, READ, WRITE, SYNC, RENAME, LINK, UNLINK, MKDIR, LOCK, TRUNCATE, STATVFS, MMAP, STAT, LIST,
            TIMES, NUM_KINDS };
enum action { PASS, FAIL, FAIL_ON, SHORT, KILL, KILL_AFTER, SIGNAL };

struct plan {
    char root[256];
    unsigned kinds;               /* bits of `enum kind` */
    int action, number, nth;      /* number: errno, or of a signal */
    int total;                    /* results: calls of these kinds, ... */
    int counts[NUM_KINDS];        /* ... calls of every kind, ... */
    char hit[512];                /* ... and the first call that was acted on */
};

static struct plan *plan;

void fault_arm(struct plan *armed) { plan = armed; }

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })

static int is_below(const char *path) {
    size_t length = strlen(plan->root);
    return !strncmp(path, plan->root, length) && (path[length] == '/' || !path[length]);
}

/* The path of a descriptor; "" if it has none. */
static const char *path_of(int fd, char *buffer) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    buffer[length < 0 ? 0 : length] = 0;
    return buffer;
}

/* The absolute form of a path that is relative to a directory's descriptor, not normalised. */
static const char *path_at(int directory, const char *path, char *buffer) {
    if (!path || path[0] == '/') return path ? path : "";
    if (directory != AT_FDCWD) path_of(directory, buffer);
    else if (!getcwd(buffer, PATH_MAX)) return "";
    size_t length = strlen(buffer);
    if (*path) snprintf(buffer + length, PATH_MAX - length, "/%s", path);
    return buffer;
}

/* Count a call; what to do with it. FAIL sets errno. KILL does not return. */
static enum action count(enum kind kind, const char *name, const char *path) {
    if (!plan || !is_below(path)) return PASS;
    __atomic_add_fetch(&plan->counts[kind], 1, __ATOMIC_SEQ_CST);
    if (!(plan->kinds >> kind & 1)) return PASS;
    int nth = __atomic_add_fetch(&plan->total, 1, __ATOMIC_SEQ_CST);
    if (nth != plan->nth && !(plan->action == FAIL_ON && nth > plan->nth)) return PASS;
    if (nth == plan->nth) snprintf(plan->hit, sizeof plan->hit, "%s %s", name, path);
    if (plan->action == KILL) kill(getpid(), SIGKILL), pause();
    if (plan->action == SIGNAL) kill(getpid(), plan->number);
    if (plan->action == FAIL || plan->action == FAIL_ON) errno = plan->number;
    return plan->action == FAIL_ON ? FAIL : plan->action;
}

static enum action on_path(enum kind kind, const char *name, int directory, const char *path) {
    char buffer[PATH_MAX];
    return plan ? count(kind, name, path_at(directory, path, buffer)) : PASS;
}

static enum action on_fd(enum kind kind, const char *name, int fd) {
    char buffer[PATH_MAX];
    return plan ? count(kind, name, path_of(fd, buffer)) : PASS;
}

/* A result that a process which is to be killed after the call does not see. */
#define AFTER(action, result) ({ __auto_type value = (result); \
    if ((action) == KILL_AFTER) { kill(getpid(), SIGKILL), pause(); } \
    value; })

#define ON(counted, failed, call) do { enum action action = counted; \
    if (action == FAIL) { return failed; } \
    return AFTER(action, call); } while (0)

/* Opening */

static enum kind opening(int flags) { return flags & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC) ? CREATE : OPEN; }

#define MODE(flags) ({ int mode = 0; if ((flags) & (O_CREAT | __O_TMPFILE)) { \
    va_list more; va_start(more, flags); mode = va_arg(more, int); va_end(more); } mode; })

int open(const char *path, int flags, ...) {
    int mode = MODE(flags);
    ON(on_path(opening(flags), "open", AT_FDCWD, path), -1, REAL(open)(path, flags, mode));
}
int open64(const char *path, int flags, ...) {
    int mode = MODE(flags);
    ON(on_path(opening(flags), "open", AT_FDCWD, path), -1, REAL(open64)(path, flags, mode));
}
int openat(int directory, const char *path, int flags, ...) {
    int mode = MODE(flags);
    ON(on_path(opening(flags), "openat", directory, path), -1, REAL(openat)(directory, path, flags, mode));
}
int openat64(int directory, const char *path, int flags, ...) {
    int mode = MODE(flags);
    ON(on_path(opening(flags), "openat", directory, path), -1, REAL(openat64)(directory, path, flags, mode));
}
FILE *fopen(const char *path, const char *mode) {
    ON(on_path(*mode == 'r' ? OPEN : CREATE, "fopen", AT_FDCWD, path), NULL, REAL(fopen)(path, mode));
}
FILE *fopen64(const char *path, const char *mode) {
    ON(on_path(*mode == 'r' ? OPEN : CREATE, "fopen", AT_FDCWD, path), NULL, REAL(fopen64)(path, mode));
}
DIR *opendir(const char *path) { ON(on_path(LIST, "opendir", AT_FDCWD, path), NULL, REAL(opendir)(path)); }
DIR *fdopendir(int fd) { ON(on_fd(LIST, "fdopendir", fd), NULL, REAL(fdopendir)(fd)); }

/* Reading and writing: a short one does half; a process that is killed after a write has written half. */

static size_t half(size_t size) { return size > 1 ? size / 2 : size; }

#define TRANSFER(kind, name, fd, size, call) do { enum action action = on_fd(kind, name, fd); \
    if (action == FAIL) return -1; \
    size_t part = action == SHORT || action == KILL_AFTER ? half(size) : size; (void)part; \
    return AFTER(action, call); } while (0)

ssize_t read(int fd, void *data, size_t size) { TRANSFER(READ, "read", fd, size, REAL(read)(fd, data, part)); }
ssize_t write(int fd, const void *data, size_t size) { TRANSFER(WRITE, "write", fd, size, REAL(write)(fd, data, part)); }
ssize_t pread(int fd, void *data, size_t size, off_t at) {
    TRANSFER(READ, "pread", fd, size, REAL(pread)(fd, data, part, at));
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    TRANSFER(READ, "pread", fd, size, REAL(pread64)(fd, data, part, at));
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    TRANSFER(WRITE, "pwrite", fd, size, REAL(pwrite)(fd, data, part, at));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    TRANSFER(WRITE, "pwrite", fd, size, REAL(pwrite64)(fd, data, part, at));
}
ssize_t sendfile64(int out, int in, off64_t *at, size_t size) {
    TRANSFER(WRITE, "sendfile", out, size, REAL(sendfile64)(out, in, at, part));
}
ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t size, unsigned flags) {
    TRANSFER(WRITE, "copy_file_range", out, size, REAL(copy_file_range)(in, in_at, out, out_at, part, flags));
}

/* Of several buffers a short call transfers half of the first. */
#define VECTOR(kind, name, fd, parts, num, call) do { enum action action = on_fd(kind, name, fd); \
    if (action == FAIL) return -1; \
    struct iovec first = parts[0]; first.iov_len = half(first.iov_len); \
    int is_short = action == SHORT || action == KILL_AFTER; \
    const struct iovec *given = is_short ? &first : parts; int some = is_short ? 1 : num; \
    return AFTER(action, call); } while (0)

ssize_t readv(int fd, const struct iovec *parts, int num) { VECTOR(READ, "readv", fd, parts, num, REAL(readv)(fd, given, some)); }
ssize_t writev(int fd, const struct iovec *parts, int num) {
    VECTOR(WRITE, "writev", fd, parts, num, REAL(writev)(fd, given, some));
}
ssize_t preadv(int fd, const struct iovec *parts, int num, off_t at) {
    VECTOR(READ, "preadv", fd, parts, num, REAL(preadv)(fd, given, some, at));
}
ssize_t preadv64(int fd, const struct iovec *parts, int num, off64_t at) {
    VECTOR(READ, "preadv", fd, parts, num, REAL(preadv64)(fd, given, some, at));
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int num, off64_t at, int flags) {
    VECTOR(READ, "preadv", fd, parts, num, REAL(preadv64v2)(fd, given, some, at, flags));
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int num, off64_t at, int flags) {
    VECTOR(WRITE, "pwritev", fd, parts, num, REAL(pwritev64v2)(fd, given, some, at, flags));
}
void *mmap(void *at, size_t size, int access, int flags, int fd, off_t offset) {
    ON(fd < 0 ? PASS : on_fd(MMAP, "mmap", fd), MAP_FAILED, REAL(mmap)(at, size, access, flags, fd, offset));
}
void *mmap64(void *at, size_t size, int access, int flags, int fd, off64_t offset) {
    ON(fd < 0 ? PASS : on_fd(MMAP, "mmap", fd), MAP_FAILED, REAL(mmap64)(at, size, access, flags, fd, offset));
}

/* Everything else. A sync that passes is not done: nothing here tests a power failure, and it is slow. */

int fsync(int fd) { ON(on_fd(SYNC, "fsync", fd), -1, plan ? 0 : REAL(fsync)(fd)); }
int fdatasync(int fd) { ON(on_fd(SYNC, "fdatasync", fd), -1, plan ? 0 : REAL(fdatasync)(fd)); }
int rename(const char *from, const char *to) { ON(on_path(RENAME, "rename", AT_FDCWD, to), -1, REAL(rename)(from, to)); }
int renameat(int from_at, const char *from, int to_at, const char *to) {
    ON(on_path(RENAME, "renameat", to_at, to), -1, REAL(renameat)(from_at, from, to_at, to));
}
int link(const char *from, const char *to) { ON(on_path(LINK, "link", AT_FDCWD, to), -1, REAL(link)(from, to)); }
int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    ON(on_path(LINK, "linkat", to_at, to), -1, REAL(linkat)(from_at, from, to_at, to, flags));
}
int symlink(const char *from, const char *to) { ON(on_path(LINK, "symlink", AT_FDCWD, to), -1, REAL(symlink)(from, to)); }
int unlink(const char *path) { ON(on_path(UNLINK, "unlink", AT_FDCWD, path), -1, REAL(unlink)(path)); }
int unlinkat(int directory, const char *path, int flags) {
    ON(on_path(UNLINK, "unlinkat", directory, path), -1, REAL(unlinkat)(directory, path, flags));
}
int rmdir(const char *path) { ON(on_path(UNLINK, "rmdir", AT_FDCWD, path), -1, REAL(rmdir)(path)); }
int mkdir(const char *path, mode_t mode) { ON(on_path(MKDIR, "mkdir", AT_FDCWD, path), -1, REAL(mkdir)(path, mode)); }
int mkdirat(int directory, const char *path, mode_t mode) {
    ON(on_path(MKDIR, "mkdirat", directory, path), -1, REAL(mkdirat)(directory, path, mode));
}
int flock(int fd, int operation) { ON(on_fd(LOCK, "flock", fd), -1, REAL(flock)(fd, operation)); }
int ftruncate(int fd, off_t size) { ON(on_fd(TRUNCATE, "ftruncate", fd), -1, REAL(ftruncate)(fd, size)); }
int ftruncate64(int fd, off64_t size) { ON(on_fd(TRUNCATE, "ftruncate", fd), -1, REAL(ftruncate64)(fd, size)); }
int statvfs64(const char *path, struct statvfs64 *status) {
    ON(on_path(STATVFS, "statvfs", AT_FDCWD, path), -1, REAL(statvfs64)(path, status));
}
int fstatvfs64(int fd, struct statvfs64 *status) { ON(on_fd(STATVFS, "fstatvfs", fd), -1, REAL(fstatvfs64)(fd, status)); }
int stat64(const char *path, struct stat64 *status) { ON(on_path(STAT, "stat", AT_FDCWD, path), -1, REAL(stat64)(path, status)); }
int lstat64(const char *path, struct stat64 *status) {
    ON(on_path(STAT, "lstat", AT_FDCWD, path), -1, REAL(lstat64)(path, status));
}
int fstat64(int fd, struct stat64 *status) { ON(on_fd(STAT, "fstat", fd), -1, REAL(fstat64)(fd, status)); }
int fstatat64(int directory, const char *path, struct stat64 *status, int flags) {
    ON(on_path(STAT, "fstatat", directory, path), -1, REAL(fstatat64)(directory, path, status, flags));
}
int utimensat(int directory, const char *path, const struct timespec times[2], int flags) {
    ON(on_path(TIMES, "utimensat", directory, path), -1, REAL(utimensat)(directory, path, times, flags));
}
int futimens(int fd, const struct timespec times[2]) { ON(on_fd(TIMES, "futimens", fd), -1, REAL(futimens)(fd, times)); }

/* The locks of sqlite. */
static int is_lock(int command) {
    return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
}
#define CONTROL(real) do { va_list more; va_start(more, command); void *argument = va_arg(more, void *); va_end(more); \
    ON(is_lock(command) ? on_fd(LOCK, "fcntl", fd) : PASS, -1, real(fd, command, argument)); } while (0)
int fcntl(int fd, int command, ...) { CONTROL(REAL(fcntl)); }
int fcntl64(int fd, int command, ...) { CONTROL(REAL(fcntl64)); }

__attribute__((constructor)) static void arm_from_file(void) {
    const char *name = getenv("FAULT_PLAN");
    int fd = name ? REAL(open64)(name, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *shared = REAL(mmap64)(NULL, sizeof(struct plan), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared != MAP_FAILED) fault_arm(shared);
}
