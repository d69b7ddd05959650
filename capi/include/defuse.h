/* libdefuse: user-space file systems inside of the application's own process.
 *
 * The functions are those of POSIX with a prefix: -1 (or NULL) and errno where they fail. Descriptors
 * are numbers of a table of their own, and mean nothing to the functions without the prefix. A path
 * outside of all mounts gives EXDEV. All of them may be called from any thread. The manual page
 * defuse(3) is an overview.
 *
 * Made of capi/src/calls/ by capi/tests/header.rs, which says when it is out of date. */

#ifndef DEFUSE_H
#define DEFUSE_H

#include <dirent.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of <time.h> and <sys/stat.h>, where a feature test macro asks for them, and <linux/openat2.h>. */
struct timespec;
struct statx;
struct open_how;

/* ---- mount file systems into this process: defuse_mount(3) ---- */

/**
 * Mounts `source` on `target`. 0, or -1 with `errno`: EINVAL for a source or target that means
 * nothing, EBUSY where a mount is there already, EIO where the file system could not be made;
 * defuse_last_error() says more.
 */
int defuse_mount(const char *target, const char *source);

/**
 * Takes the mount on `target` away. EBUSY while files of it are open or working directories in it,
 * unless it is to be detached `lazily`; EINVAL where nothing is mounted there.
 */
int defuse_unmount(const char *target, int lazily);

/**
 * What was measured on the mount on `target`, as JSON with a NUL at its end: for each operation how
 * often it ran, how often it failed, how many bytes it moved, and a histogram of its latency in
 * nanoseconds. Returns the length without the NUL; ERANGE where the buffer is too small, EINVAL
 * where nothing is mounted there.
 */
ssize_t defuse_statistics(const char *target, char *buf, size_t size);

/**
 * Why the last mounting, unmounting, opening or question for statistics of this thread failed: a
 * text that names the object and says what to do next. It is never NULL, empty before the first
 * failure, and stays until the next one; `errno` has the number.
 */
const char *defuse_last_error(void);

/**
 * The version of the library that runs, such as "0.1.0".
 */
const char *defuse_version(void);

/* ---- open, duplicate and close files: defuse_open(3) ---- */

/**
 * Opens a file, open(2). `mode` counts with O_CREAT and O_TMPFILE.
 */
int defuse_open(const char *path, int flags, ...);

/**
 * Opens a file, openat(2): `dir` is a descriptor of the library, or AT_FDCWD.
 */
int defuse_openat(int dir, const char *path, int flags, ...);

/**
 * Makes a file and opens it for writing, creat(2).
 */
int defuse_creat(const char *path, mode_t mode);

/**
 * Opens a file with restrictions of the walk, openat2(2): `how` is a `struct open_how` of
 * <linux/openat2.h>, `size` its size. EINVAL for bits that it does not know and for another size,
 * EXDEV, ELOOP and EAGAIN as its manual page has them.
 */
int defuse_openat2(int dir, const char *path, const struct open_how *how, size_t size);

/**
 * Closes a descriptor, close(2).
 */
int defuse_close(int fd);

/**
 * Another descriptor of the same open file, dup(2).
 */
int defuse_dup(int fd);

/**
 * The descriptor `to` of the same open file, dup2(2): what it was before, is closed.
 */
int defuse_dup2(int fd, int to);

/**
 * As defuse_dup2(), with O_CLOEXEC where `flags` have it; EINVAL where both are the same, dup3(2).
 */
int defuse_dup3(int fd, int to, int flags);

/**
 * Flags and record locks of an open file, fcntl(2): F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_SETFD,
 * F_GETFL, F_SETFL with a number, F_GETLK, F_SETLK, F_SETLKW, F_OFD_GETLK, F_OFD_SETLK,
 * F_OFD_SETLKW with a pointer to a `struct flock`. EINVAL for anything else. A signal ends the wait
 * for a lock with EINTR, whether or not its handler was installed with SA_RESTART.
 */
int defuse_fcntl(int fd, int command, ...);

/**
 * Device control, ioctl(2), where the file system knows the request: ENOTTY otherwise. As many bytes go
 * in and come out as the request's number says (see `_IOC` in <linux/ioctl.h>). FIOCLEX and FIONCLEX
 * are fcntl's F_SETFD.
 */
int defuse_ioctl(int fd,
                 unsigned long request,
                 ...);

/* ---- read and write: defuse_data(3) ---- */

/**
 * Reads at the position, and moves it, read(2).
 */
ssize_t defuse_read(int fd, void *buf, size_t size);

/**
 * Writes at the position, and moves it, write(2); with O_APPEND at the end.
 */
ssize_t defuse_write(int fd, const void *buf, size_t size);

/**
 * Reads at `at`, pread(2).
 */
ssize_t defuse_pread(int fd, void *buf, size_t size, off_t at);

/**
 * Writes at `at`, pwrite(2); with O_APPEND at the end all the same, as on Linux.
 */
ssize_t defuse_pwrite(int fd, const void *buf, size_t size, off_t at);

/**
 * Reads into several pieces of memory at the position, readv(2).
 */
ssize_t defuse_readv(int fd, const struct iovec *iov, int length);

/**
 * Writes several pieces of memory at the position, writev(2).
 */
ssize_t defuse_writev(int fd, const struct iovec *iov, int length);

/**
 * Reads into several pieces of memory at `at`, preadv(2).
 */
ssize_t defuse_preadv(int fd, const struct iovec *iov, int length, off_t at);

/**
 * Writes several pieces of memory at `at`, pwritev(2).
 */
ssize_t defuse_pwritev(int fd, const struct iovec *iov, int length, off_t at);

/**
 * As defuse_preadv(), with flags (RWF_NOWAIT and so on), preadv2(2): an offset of -1 is the
 * position.
 */
ssize_t defuse_preadv2(int fd, const struct iovec *iov, int length, off_t at, int flags);

/**
 * As defuse_pwritev(), with flags (RWF_APPEND, RWF_DSYNC and so on), pwritev2(2): an offset of -1 is
 * the position.
 */
ssize_t defuse_pwritev2(int fd,
                        const struct iovec *iov,
                        int length,
                        off_t at,
                        int flags);

/**
 * Moves the position, lseek(2): `whence` is SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA or SEEK_HOLE.
 */
off_t defuse_lseek(int fd, off_t by, int whence);

/**
 * Copies up to `size` bytes from one open file to another one, copy_file_range(2), also between
 * mounts of different types. Where an offset is given, it moves and the position does not. `flags`
 * has to be 0.
 */
ssize_t defuse_copy_file_range(int from,
                               off_t *from_at,
                               int to,
                               off_t *to_at,
                               size_t size,
                               unsigned int flags);

/* ---- map files into memory: defuse_mapping(3) ---- */

/**
 * Maps `length` bytes of an open file from `at` on, mmap(2); `address` is a wish. MAP_FAILED with
 * `errno`: EACCES, EBADF, EINVAL (also for MAP_ANONYMOUS and MAP_FIXED, which are for mmap(2)
 * itself), ENODEV, ENOMEM. The descriptor may be closed afterwards.
 */
void *defuse_mmap(void *address, size_t length, int protection, int flags, int fd, off_t at);

/**
 * Unmaps, munmap(2); what is shared is written back first, and stays where it is when that fails.
 */
int defuse_munmap(void *address, size_t length);

/**
 * Writes a shared mapping back, msync(2); with MS_SYNC the data is durable then.
 */
int defuse_msync(void *address, size_t length, int flags);

/* ---- set lengths, allocate space, and make data durable: defuse_storage(3) ---- */

/**
 * Sets the length of a file, truncate(2).
 */
int defuse_truncate(const char *path, off_t length);

/**
 * Sets the length of an open file, ftruncate(2).
 */
int defuse_ftruncate(int fd, off_t length);

/**
 * Allocates, punches holes and so on, fallocate(2): EOPNOTSUPP where the file system cannot.
 */
int defuse_fallocate(int fd, int mode, off_t at, off_t length);

/**
 * Allocates space, posix_fallocate(3): returns 0 or the number of the error, and leaves `errno`
 * alone. What the file system cannot allocate (EOPNOTSUPP) is not written as zeros instead.
 */
int defuse_posix_fallocate(int fd, off_t at, off_t length);

/**
 * Says how the data will be used, posix_fadvise(2): returns 0, or EBADF or EINVAL, and leaves
 * `errno` alone. As nothing is cached, there is nothing to do for it.
 */
int defuse_posix_fadvise(int fd, off_t at, off_t length, int advice);

/**
 * Makes data and attributes of an open file durable, fsync(2).
 */
int defuse_fsync(int fd);

/**
 * Makes the data of an open file durable, fdatasync(2).
 */
int defuse_fdatasync(int fd);

/**
 * Makes everything durable in the file system of an open file, syncfs(2).
 */
int defuse_syncfs(int fd);

/**
 * Makes everything durable in all mounts of this process, sync(2).
 */
void defuse_sync(void);

/* ---- ask for attributes, permissions and space: defuse_status(3) ---- */

/**
 * Attributes of what `path` leads to, stat(2).
 */
int defuse_stat(const char *path, struct stat *out);

/**
 * Attributes of a link itself, lstat(2).
 */
int defuse_lstat(const char *path, struct stat *out);

/**
 * Attributes of an open file, fstat(2).
 */
int defuse_fstat(int fd, struct stat *out);

/**
 * Attributes, fstatat(2), with AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
 */
int defuse_fstatat(int dir, const char *path, struct stat *out, int flags);

/**
 * Attributes, statx(2). All that are known are given, whatever `mask` asks for; AT_STATX_FORCE_SYNC
 * and AT_STATX_DONT_SYNC change nothing.
 */
int defuse_statx(int dir, const char *path, int flags, unsigned int mask, struct statx *out);

/**
 * Whether the real user may do what `mode` says with a file (R_OK, W_OK, X_OK, F_OK), access(2).
 */
int defuse_access(const char *path, int mode);

/**
 * Whether a file may be used, faccessat(2): with AT_EACCESS by the effective user, and with
 * AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
 */
int defuse_faccessat(int dir, const char *path, int mode, int flags);

/**
 * Space and inodes of the file system of `path`, statvfs(3).
 */
int defuse_statvfs(const char *path, struct statvfs *out);

/**
 * Space and inodes of the file system of an open file, fstatvfs(3).
 */
int defuse_fstatvfs(int fd, struct statvfs *out);

/**
 * As defuse_statvfs(), in the form of statfs(2); the type is that of FUSE, 0x65735546.
 */
int defuse_statfs(const char *path, struct statfs *out);

/**
 * As defuse_fstatvfs(), in the form of fstatfs(2).
 */
int defuse_fstatfs(int fd, struct statfs *out);

/* ---- change modes, owners and times: defuse_attributes(3) ---- */

/**
 * Changes permission bits, chmod(2).
 */
int defuse_chmod(const char *path, mode_t mode);

/**
 * Changes permission bits of an open file, fchmod(2).
 */
int defuse_fchmod(int fd, mode_t mode);

/**
 * Changes permission bits, fchmodat(2), with AT_SYMLINK_NOFOLLOW (EOPNOTSUPP for a link) and
 * AT_EMPTY_PATH.
 */
int defuse_fchmodat(int dir, const char *path, mode_t mode, int flags);

/**
 * Changes owner and group, chown(2); -1 leaves one as it is.
 */
int defuse_chown(const char *path, uid_t uid, gid_t gid);

/**
 * Changes owner and group of a link itself, lchown(2).
 */
int defuse_lchown(const char *path, uid_t uid, gid_t gid);

/**
 * Changes owner and group of an open file, fchown(2).
 */
int defuse_fchown(int fd, uid_t uid, gid_t gid);

/**
 * Changes owner and group, fchownat(2), with AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
 */
int defuse_fchownat(int dir, const char *path, uid_t uid, gid_t gid, int flags);

/**
 * Changes times, utimensat(2): two `times`, that of access and that of modification, with UTIME_NOW
 * and UTIME_OMIT; the present for NULL. A NULL `path` means the open file `dir`. With
 * AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
 */
int defuse_utimensat(int dir, const char *path, const struct timespec *values, int flags);

/**
 * Changes times of an open file, futimens(3).
 */
int defuse_futimens(int fd, const struct timespec *values);

/**
 * Sets the mask of permission bits that new files do not get, and returns the one before, umask(2):
 * for the calls of the library alone. At first it is the one of the process.
 */
mode_t defuse_umask(mode_t mask);

/* ---- make, move and remove names: defuse_names(3) ---- */

/**
 * Makes a directory, mkdir(2).
 */
int defuse_mkdir(const char *path, mode_t mode);

/**
 * Makes a directory, mkdirat(2).
 */
int defuse_mkdirat(int dir, const char *path, mode_t mode);

/**
 * Makes a file, fifo, socket or device, mknod(2).
 */
int defuse_mknod(const char *path, mode_t mode, dev_t device);

/**
 * Makes a file, fifo, socket or device, mknodat(2).
 */
int defuse_mknodat(int dir, const char *path, mode_t mode, dev_t device);

/**
 * Makes a fifo, mkfifo(3). It can be listed and removed, but not opened (ENXIO).
 */
int defuse_mkfifo(const char *path, mode_t mode);

/**
 * Makes a fifo, mkfifoat(3).
 */
int defuse_mkfifoat(int dir, const char *path, mode_t mode);

/**
 * Removes a name that is not a directory's, unlink(2).
 */
int defuse_unlink(const char *path);

/**
 * Removes an empty directory, rmdir(2).
 */
int defuse_rmdir(const char *path);

/**
 * Removes a name, or with AT_REMOVEDIR an empty directory, unlinkat(2).
 */
int defuse_unlinkat(int dir, const char *path, int flags);

/**
 * Removes a name, of a file or of an empty directory, remove(3).
 */
int defuse_remove(const char *path);

/**
 * Moves a name, rename(2).
 */
int defuse_rename(const char *from, const char *to);

/**
 * Moves a name, renameat(2).
 */
int defuse_renameat(int from_dir, const char *from, int to_dir, const char *to);

/**
 * Moves a name, renameat2(2), with RENAME_NOREPLACE, RENAME_EXCHANGE and RENAME_WHITEOUT.
 */
int defuse_renameat2(int from_dir,
                     const char *from,
                     int to_dir,
                     const char *to,
                     unsigned int flags);

/**
 * Gives a file another name, link(2).
 */
int defuse_link(const char *from, const char *to);

/**
 * Gives a file another name, linkat(2), with AT_SYMLINK_FOLLOW and AT_EMPTY_PATH, by which a file
 * without a name (O_TMPFILE) gets one.
 */
int defuse_linkat(int from_dir, const char *from, int to_dir, const char *to, int flags);

/**
 * Makes a symbolic link with the text `target`, symlink(2).
 */
int defuse_symlink(const char *target, const char *path);

/**
 * Makes a symbolic link with the text `target`, symlinkat(2).
 */
int defuse_symlinkat(const char *target, int dir, const char *path);

/**
 * The text of a symbolic link, without a NUL at its end, readlink(2).
 */
ssize_t defuse_readlink(const char *path, char *buf, size_t size);

/**
 * The text of a symbolic link, readlinkat(2): with an empty path, of the link that is open as `dir`.
 */
ssize_t defuse_readlinkat(int dir,
                          const char *path,
                          char *buf,
                          size_t size);

/**
 * The path without links, `.` and `..`, realpath(3): in `resolved`, which has room for PATH_MAX
 * bytes, or for NULL in memory that the caller frees with free(3).
 */
char *defuse_realpath(const char *path, char *resolved);

/* ---- read directories: defuse_directory(3) ---- */

/**
 * A directory that is being read: what DIR is for opendir(3).
 */
typedef struct defuse_dir defuse_dir;

/**
 * Opens a directory to be read, opendir(3). NULL where that fails.
 */
struct defuse_dir *defuse_opendir(const char *path);

/**
 * Makes a stream of a descriptor, which belongs to the stream from then on, fdopendir(3). NULL with
 * ENOTDIR where it is no directory.
 */
struct defuse_dir *defuse_fdopendir(int fd);

/**
 * The next entry, "." and ".." among them, readdir(3). NULL at the end, with `errno` as it was, and
 * where reading fails.
 */
struct dirent *defuse_readdir(struct defuse_dir *dir);

/**
 * Where the stream stands, telldir(3).
 */
long defuse_telldir(struct defuse_dir *dir);

/**
 * Goes to a place that defuse_telldir() told, seekdir(3).
 */
void defuse_seekdir(struct defuse_dir *dir, long place);

/**
 * Goes back to the start, and sees what has changed since, rewinddir(3).
 */
void defuse_rewinddir(struct defuse_dir *dir);

/**
 * The descriptor of a stream, dirfd(3): for the calls with a directory, not to be closed.
 */
int defuse_dirfd(struct defuse_dir *dir);

/**
 * Closes a stream and its descriptor, closedir(3).
 */
int defuse_closedir(struct defuse_dir *dir);

/* ---- the working directory: defuse_workdir(3) ---- */

/**
 * Goes to a directory of a mount, chdir(2).
 */
int defuse_chdir(const char *path);

/**
 * Goes to an open directory, fchdir(2).
 */
int defuse_fchdir(int fd);

/**
 * The path of the working directory, getcwd(3): `buf`, or for NULL memory that the caller frees with
 * free(3). NULL with ERANGE where `size` is too small, ENOENT where the directory was removed.
 */
char *defuse_getcwd(char *buf,
                    size_t size);

/* ---- extended attributes: defuse_xattrs(3) ---- */

/**
 * The value of an attribute, getxattr(2).
 */
ssize_t defuse_getxattr(const char *path, const char *name, void *value, size_t size);

/**
 * The value of an attribute of a link itself, lgetxattr(2).
 */
ssize_t defuse_lgetxattr(const char *path, const char *name, void *value, size_t size);

/**
 * The value of an attribute of an open file, fgetxattr(2).
 */
ssize_t defuse_fgetxattr(int fd, const char *name, void *value, size_t size);

/**
 * Sets an attribute, setxattr(2), with XATTR_CREATE and XATTR_REPLACE.
 */
int defuse_setxattr(const char *path, const char *name, const void *value, size_t size, int flags);

/**
 * Sets an attribute of a link itself, lsetxattr(2).
 */
int defuse_lsetxattr(const char *path, const char *name, const void *value, size_t size, int flags);

/**
 * Sets an attribute of an open file, fsetxattr(2).
 */
int defuse_fsetxattr(int fd, const char *name, const void *value, size_t size, int flags);

/**
 * The names of all attributes, each with a NUL at its end, listxattr(2).
 */
ssize_t defuse_listxattr(const char *path, char *names, size_t size);

/**
 * The names of all attributes of a link itself, llistxattr(2).
 */
ssize_t defuse_llistxattr(const char *path, char *names, size_t size);

/**
 * The names of all attributes of an open file, flistxattr(2).
 */
ssize_t defuse_flistxattr(int fd, char *names, size_t size);

/**
 * Removes an attribute, removexattr(2).
 */
int defuse_removexattr(const char *path, const char *name);

/**
 * Removes an attribute of a link itself, lremovexattr(2).
 */
int defuse_lremovexattr(const char *path, const char *name);

/**
 * Removes an attribute of an open file, fremovexattr(2).
 */
int defuse_fremovexattr(int fd, const char *name);

/* ---- lock files: defuse_locks(3) ---- */

/**
 * Locks the whole of an open file, flock(2): `operation` is LOCK_SH, LOCK_EX or LOCK_UN, with
 * LOCK_NB to fail with EWOULDBLOCK and not to wait.
 */
int defuse_flock(int fd, int operation);

/**
 * Locks `length` bytes from the position on for the process, lockf(3): `command` is F_LOCK, F_TLOCK,
 * F_ULOCK or F_TEST.
 */
int defuse_lockf(int fd,
                 int command,
                 off_t length);

/* ---- reads, writes and syncs that finish later: defuse_aio(3) ---- */

/**
 * Read `count` bytes into `buf`.
 */
#define DEFUSE_AIO_READ 0

/**
 * Write `count` bytes of `buf`.
 */
#define DEFUSE_AIO_WRITE 1

/**
 * Read into the `count` vectors (`struct iovec`) at `buf`.
 */
#define DEFUSE_AIO_READV 2

/**
 * Write the `count` vectors (`struct iovec`) at `buf`.
 */
#define DEFUSE_AIO_WRITEV 3

/**
 * As fsync(2), for what has finished before.
 */
#define DEFUSE_AIO_FSYNC 4

/**
 * As fdatasync(2), for what has finished before.
 */
#define DEFUSE_AIO_FDATASYNC 5

/**
 * How an operation ended.
 */
typedef struct defuse_aio_event {
  /**
   * What the operation had.
   */
  uint64_t data;
  /**
   * The number of bytes, or the number of an error, negative: -EIO, or -ECANCELED.
   */
  int64_t result;
} defuse_aio_event;

/**
 * Is told of the end, on a thread of the context, and should return soon: it must not wait for events
 * nor destroy the context (EDEADLK).
 */
typedef void (*defuse_aio_callback)(const struct defuse_aio_event *event);

/**
 * An operation.
 */
typedef struct defuse_aio_op {
  /**
   * DEFUSE_AIO_READ and so on.
   */
  uint32_t opcode;
  /**
   * A descriptor of the library.
   */
  int fd;
  /**
   * Memory, or an array of `struct iovec`.
   */
  void *buf;
  /**
   * Bytes, or vectors.
   */
  size_t count;
  /**
   * In bytes from the start of the file; -1 for the position.
   */
  int64_t offset;
  /**
   * Comes back in the event.
   */
  uint64_t data;
  /**
   * Is called at the end, and no event kept for defuse_aio_getevents(); or NULL.
   */
  defuse_aio_callback callback;
} defuse_aio_op;

/**
 * Makes a context for `capacity` operations (1 to 65,536), which does up to `threads` of them at a
 * time (1 to 1024; 0 for twice the number of processors, but at least 4). Threads are started when
 * they are needed. Returns its number.
 */
int defuse_aio_create(unsigned int capacity, unsigned int threads);

/**
 * Starts `count` operations. Returns how many were started; -1 where not even the first one was:
 * EAGAIN where there is no room, EBADF, EINVAL, EFAULT. An error of an operation that was started
 * comes with its event.
 */
int defuse_aio_submit(int aio, const struct defuse_aio_op *ops, int count);

/**
 * Collects up to `max` events. Waits until there are at least `min`, or until `timeout` is over, or
 * for as long as it takes where that is NULL. Returns how many there were. Signals do not end the
 * wait.
 */
int defuse_aio_getevents(int aio,
                         int min,
                         int max,
                         struct defuse_aio_event *events,
                         const struct timespec *timeout);

/**
 * A descriptor of the kernel for poll(2), select(2) and epoll(7): it can be read from while there are
 * events to collect. It belongs to the context, and is neither to be read nor closed.
 */
int defuse_aio_eventfd(int aio);

/**
 * Takes an operation with this `data` back that has not begun: its end is told, with -ECANCELED.
 * EINPROGRESS where it has begun (its end will be told as ever), ENOENT where there is none.
 */
int defuse_aio_cancel(int aio, uint64_t data);

/**
 * Takes all operations back that have not begun, waits for the end of the others, and gives the
 * context up with the events that nobody collected. Callbacks are called.
 */
int defuse_aio_destroy(int aio);

/* What the library was built with. */
#if defined(__cplusplus) && __cplusplus >= 201103L
#define DEFUSE_ASSERT(fact) static_assert(fact, #fact)
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define DEFUSE_ASSERT(fact) _Static_assert(fact, #fact)
#endif
#ifdef DEFUSE_ASSERT
DEFUSE_ASSERT(sizeof(off_t) == 8);
DEFUSE_ASSERT(sizeof(((struct stat *)0)->st_size) == 8);
DEFUSE_ASSERT(sizeof(((struct dirent *)0)->d_ino) == 8);
DEFUSE_ASSERT(sizeof(defuse_aio_event) == 16);
DEFUSE_ASSERT(offsetof(defuse_aio_event, result) == 8);
DEFUSE_ASSERT(sizeof(defuse_aio_op) == 48);
DEFUSE_ASSERT(offsetof(defuse_aio_op, offset) == 24);
DEFUSE_ASSERT(offsetof(defuse_aio_op, callback) == 40);
#undef DEFUSE_ASSERT
#endif

#ifdef __cplusplus
}
#endif

#endif /* DEFUSE_H */
