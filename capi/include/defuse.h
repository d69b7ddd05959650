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
 * Mounts `source` on `target`. Returns 0, or -1 with `errno`: EINVAL for an invalid source or
 * target, EBUSY if the target is a mount already or another process
 * uses the source, EIO if the file system could not be created.
 * defuse_last_error() returns the details.
 */
int defuse_mount(const char *target, const char *source);

/**
 * Unmounts the file system on `target`. Unless it is detached `lazily`, fails with EBUSY while it
 * has open files or working directories. Fails with EINVAL if nothing is mounted there. Another
 * error, such as EIO or ENOSPC, says that it is unmounted but not everything could be made
 * durable.
 */
int defuse_unmount(const char *target, int lazily);

/**
 * Returns the statistics of the mount on `target`, as JSON with a final NUL: for each operation
 * the number of calls, errors and bytes, and a histogram of its latency in nanoseconds. Returns
 * the length without the NUL. Fails with ERANGE if the buffer is too small, and with EINVAL if
 * nothing is mounted there.
 */
ssize_t defuse_statistics(const char *target, char *buf, size_t size);

/**
 * Describes the last failure of this thread to mount, unmount, open or read statistics: a text
 * that names the object and the next step. It is never NULL, empty before the first failure, and
 * valid until the next one. `errno` has the error number.
 */
const char *defuse_last_error(void);

/**
 * The version of the running library, such as "0.1.0".
 */
const char *defuse_version(void);

/* ---- open, duplicate and close files: defuse_open(3) ---- */

/**
 * Opens a file, open(2). `mode` is used with O_CREAT and O_TMPFILE.
 */
int defuse_open(const char *path, int flags, ...);

/**
 * Opens a file, openat(2). `dir` is a descriptor of the library, or AT_FDCWD.
 */
int defuse_openat(int dir, const char *path, int flags, ...);

/**
 * Creates a file and opens it for writing, creat(2).
 */
int defuse_creat(const char *path, mode_t mode);

/**
 * Creates a file of the `size` bytes at `data`, and closes it: as open(2) with O_CREAT, O_EXCL and
 * O_WRONLY, write(2) and close(2), and one request to a server of defuse does all three, up to 96
 * KiB. Fails with EEXIST if the path exists, and with EFBIG beyond RLIMIT_FSIZE. After another
 * failure the file may be there, with a part of the data.
 */
int defuse_create_with(const char *path, const void *data, size_t size, mode_t mode);

/**
 * Opens a file with restrictions on path resolution, openat2(2). `how` is a `struct open_how` of
 * <linux/openat2.h>, and `size` its size. Fails with EINVAL for unknown bits and for another size,
 * and with EXDEV, ELOOP and EAGAIN as described in its manual page.
 */
int defuse_openat2(int dir, const char *path, const struct open_how *how, size_t size);

/**
 * Closes a descriptor, close(2).
 */
int defuse_close(int fd);

/**
 * Returns another descriptor of the same open file, dup(2).
 */
int defuse_dup(int fd);

/**
 * Makes `to` a descriptor of the same open file, dup2(2). If it was open before, it is closed.
 */
int defuse_dup2(int fd, int to);

/**
 * Like defuse_dup2(), with O_CLOEXEC if `flags` contain it, dup3(2). Fails with EINVAL if both
 * descriptors are the same.
 */
int defuse_dup3(int fd, int to, int flags);

/**
 * Controls flags and record locks of an open file, fcntl(2). Supports F_DUPFD, F_DUPFD_CLOEXEC,
 * F_GETFD, F_SETFD, F_GETFL and F_SETFL with a number, and F_GETLK, F_SETLK, F_SETLKW,
 * F_OFD_GETLK, F_OFD_SETLK and F_OFD_SETLKW with a pointer to a `struct flock`. Fails with EINVAL
 * for other commands. A signal ends the wait for a lock with EINTR, even if its handler was
 * installed with SA_RESTART.
 */
int defuse_fcntl(int fd, int command, ...);

/**
 * Controls a device, ioctl(2). Fails with ENOTTY if the file system does not know the request. The
 * request number defines how many bytes are read and written (see `_IOC` in <linux/ioctl.h>).
 * FIOCLEX and FIONCLEX work like F_SETFD of fcntl.
 */
int defuse_ioctl(int fd, unsigned long request, ...);

/* ---- read and write: defuse_data(3) ---- */

/**
 * Reads at the file position and advances it, read(2).
 */
ssize_t defuse_read(int fd, void *buf, size_t size);

/**
 * Writes at the file position and advances it, write(2); with O_APPEND, at the end.
 */
ssize_t defuse_write(int fd, const void *buf, size_t size);

/**
 * Reads at `at`, pread(2).
 */
ssize_t defuse_pread(int fd, void *buf, size_t size, off_t at);

/**
 * Writes at `at`, pwrite(2). As on Linux, a file with O_APPEND is written at its end.
 */
ssize_t defuse_pwrite(int fd, const void *buf, size_t size, off_t at);

/**
 * Reads into several buffers at the file position, readv(2).
 */
ssize_t defuse_readv(int fd, const struct iovec *iov, int length);

/**
 * Writes several buffers at the file position, writev(2).
 */
ssize_t defuse_writev(int fd, const struct iovec *iov, int length);

/**
 * Reads into several buffers at `at`, preadv(2).
 */
ssize_t defuse_preadv(int fd, const struct iovec *iov, int length, off_t at);

/**
 * Writes several buffers at `at`, pwritev(2).
 */
ssize_t defuse_pwritev(int fd, const struct iovec *iov, int length, off_t at);

/**
 * Like defuse_preadv(), with flags (such as RWF_NOWAIT), preadv2(2). An offset of -1 means the
 * file position.
 */
ssize_t defuse_preadv2(int fd, const struct iovec *iov, int length, off_t at, int flags);

/**
 * Like defuse_pwritev(), with flags (such as RWF_APPEND and RWF_DSYNC), pwritev2(2). An offset of
 * -1 means the file position.
 */
ssize_t defuse_pwritev2(int fd, const struct iovec *iov, int length, off_t at, int flags);

/**
 * Sets the file position, lseek(2). `whence` is SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA or
 * SEEK_HOLE.
 */
off_t defuse_lseek(int fd, off_t by, int whence);

/**
 * Copies up to `size` bytes from one open file to another, copy_file_range(2), also between mounts
 * of different types. An offset that is given is advanced in place of the file position. `flags`
 * must be 0.
 */
ssize_t defuse_copy_file_range(int from,
                               off_t *from_at,
                               int to,
                               off_t *to_at,
                               size_t size,
                               unsigned int flags);

/* ---- map files into memory: defuse_mapping(3) ---- */

/**
 * Maps `length` bytes of an open file from `at` on, mmap(2). `address` is a hint. Returns
 * MAP_FAILED with `errno` on failure: EACCES, EBADF, EINVAL (also for MAP_ANONYMOUS and MAP_FIXED,
 * for which mmap(2) itself can be used), ENODEV or ENOMEM. The descriptor may be closed
 * afterwards.
 */
void *defuse_mmap(void *address, size_t length, int protection, int flags, int fd, off_t at);

/**
 * Unmaps memory, munmap(2). A shared mapping is written back first; if that fails, it stays
 * mapped.
 */
int defuse_munmap(void *address, size_t length);

/**
 * Writes a shared mapping back, msync(2). With MS_SYNC the data is durable afterwards.
 */
int defuse_msync(void *address, size_t length, int flags);

/* ---- set sizes, allocate space, and make data durable: defuse_storage(3) ---- */

/**
 * Sets the size of a file, truncate(2).
 */
int defuse_truncate(const char *path, off_t length);

/**
 * Sets the size of an open file, ftruncate(2).
 */
int defuse_ftruncate(int fd, off_t length);

/**
 * Allocates space, punches holes and so on, fallocate(2). Fails with EOPNOTSUPP if the file system
 * does not support it.
 */
int defuse_fallocate(int fd, int mode, off_t at, off_t length);

/**
 * Allocates space, posix_fallocate(3). Returns 0 or the error number, and leaves `errno`
 * unchanged. If the file system does not support it (EOPNOTSUPP), no zeros are written instead.
 */
int defuse_posix_fallocate(int fd, off_t at, off_t length);

/**
 * Announces the use of data, posix_fadvise(2). Returns 0, EBADF or EINVAL, and leaves `errno`
 * unchanged. It has no effect, because nothing is cached.
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
 * Makes all changes to the file system of an open file durable, syncfs(2).
 */
int defuse_syncfs(int fd);

/**
 * Makes all changes to all mounts of this process durable, sync(2).
 */
void defuse_sync(void);

/* ---- attributes, permissions and space: defuse_status(3) ---- */

/**
 * Returns the attributes of a file, stat(2). Follows symbolic links.
 */
int defuse_stat(const char *path, struct stat *out);

/**
 * Returns the attributes of a file or symbolic link, lstat(2).
 */
int defuse_lstat(const char *path, struct stat *out);

/**
 * Returns the attributes of an open file, fstat(2).
 */
int defuse_fstat(int fd, struct stat *out);

/**
 * Returns attributes, fstatat(2), with AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
 */
int defuse_fstatat(int dir, const char *path, struct stat *out, int flags);

/**
 * Returns attributes, statx(2). All known attributes are returned, whatever `mask` requests.
 * AT_STATX_FORCE_SYNC and AT_STATX_DONT_SYNC have no effect.
 */
int defuse_statx(int dir, const char *path, int flags, unsigned int mask, struct statx *out);

/**
 * Checks whether the real user has the access `mode` to a file (R_OK, W_OK, X_OK, F_OK),
 * access(2).
 */
int defuse_access(const char *path, int mode);

/**
 * Checks access to a file, faccessat(2), with AT_EACCESS (for the effective user),
 * AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
 */
int defuse_faccessat(int dir, const char *path, int mode, int flags);

/**
 * Returns space and inodes of the file system of `path`, statvfs(3).
 */
int defuse_statvfs(const char *path, struct statvfs *out);

/**
 * Returns space and inodes of the file system of an open file, fstatvfs(3).
 */
int defuse_fstatvfs(int fd, struct statvfs *out);

/**
 * Like defuse_statvfs(), in the format of statfs(2). The type is the type of FUSE, 0x65735546.
 */
int defuse_statfs(const char *path, struct statfs *out);

/**
 * Like defuse_fstatvfs(), in the format of fstatfs(2).
 */
int defuse_fstatfs(int fd, struct statfs *out);

/* ---- change modes, owners and times: defuse_attributes(3) ---- */

/**
 * Changes the permission bits, chmod(2).
 */
int defuse_chmod(const char *path, mode_t mode);

/**
 * Changes the permission bits of an open file, fchmod(2).
 */
int defuse_fchmod(int fd, mode_t mode);

/**
 * Changes the permission bits, fchmodat(2), with AT_SYMLINK_NOFOLLOW (EOPNOTSUPP for a symbolic
 * link) and AT_EMPTY_PATH.
 */
int defuse_fchmodat(int dir, const char *path, mode_t mode, int flags);

/**
 * Changes owner and group, chown(2); -1 leaves an id unchanged.
 */
int defuse_chown(const char *path, uid_t uid, gid_t gid);

/**
 * Changes owner and group of a symbolic link, lchown(2).
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
 * Changes timestamps, utimensat(2). `times` has two values, access and modification, which may be
 * UTIME_NOW or UTIME_OMIT; NULL sets both to the current time. A NULL `path` means the open file
 * `dir`. Supports AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
 */
int defuse_utimensat(int dir, const char *path, const struct timespec *values, int flags);

/**
 * Changes the timestamps of an open file, futimens(3).
 */
int defuse_futimens(int fd, const struct timespec *values);

/**
 * Sets the file mode creation mask and returns the previous one, umask(2). It applies to the calls
 * of the library only, and is initially the mask of the process.
 */
mode_t defuse_umask(mode_t mask);

/* ---- create, rename and remove names: defuse_names(3) ---- */

/**
 * Creates a directory, mkdir(2).
 */
int defuse_mkdir(const char *path, mode_t mode);

/**
 * Creates a directory, mkdirat(2).
 */
int defuse_mkdirat(int dir, const char *path, mode_t mode);

/**
 * Creates a file, fifo, socket or device, mknod(2).
 */
int defuse_mknod(const char *path, mode_t mode, dev_t device);

/**
 * Creates a file, fifo, socket or device, mknodat(2).
 */
int defuse_mknodat(int dir, const char *path, mode_t mode, dev_t device);

/**
 * Creates a fifo, mkfifo(3). It can be listed and removed, but not opened (ENXIO).
 */
int defuse_mkfifo(const char *path, mode_t mode);

/**
 * Creates a fifo, mkfifoat(3).
 */
int defuse_mkfifoat(int dir, const char *path, mode_t mode);

/**
 * Removes the name of a file that is no directory, unlink(2).
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
 * Removes a file or an empty directory, remove(3).
 */
int defuse_remove(const char *path);

/**
 * Renames a file, rename(2).
 */
int defuse_rename(const char *from, const char *to);

/**
 * Renames a file, renameat(2).
 */
int defuse_renameat(int from_dir, const char *from, int to_dir, const char *to);

/**
 * Renames a file, renameat2(2), with RENAME_NOREPLACE, RENAME_EXCHANGE and RENAME_WHITEOUT.
 */
int defuse_renameat2(int from_dir,
                     const char *from,
                     int to_dir,
                     const char *to,
                     unsigned int flags);

/**
 * Creates a hard link, link(2).
 */
int defuse_link(const char *from, const char *to);

/**
 * Creates a hard link, linkat(2), with AT_SYMLINK_FOLLOW and AT_EMPTY_PATH. The latter gives an
 * unnamed file (O_TMPFILE) a name.
 */
int defuse_linkat(int from_dir, const char *from, int to_dir, const char *to, int flags);

/**
 * Creates a symbolic link with the text `target`, symlink(2).
 */
int defuse_symlink(const char *target, const char *path);

/**
 * Creates a symbolic link with the text `target`, symlinkat(2).
 */
int defuse_symlinkat(const char *target, int dir, const char *path);

/**
 * Reads a symbolic link, without a final NUL, readlink(2).
 */
ssize_t defuse_readlink(const char *path, char *buf, size_t size);

/**
 * Reads a symbolic link, readlinkat(2). With an empty path, reads the link that is open as `dir`.
 */
ssize_t defuse_readlinkat(int dir, const char *path, char *buf, size_t size);

/**
 * Returns the path without links, `.` and `..`, realpath(3): in `resolved`, which has room for
 * PATH_MAX bytes, or if that is NULL, in memory that the caller frees with free(3).
 */
char *defuse_realpath(const char *path, char *resolved);

/* ---- read directories: defuse_directory(3) ---- */

/**
 * A directory stream, like DIR of opendir(3).
 */
typedef struct defuse_dir defuse_dir;

/**
 * Opens a directory stream, opendir(3). Returns NULL on failure.
 */
struct defuse_dir *defuse_opendir(const char *path);

/**
 * Makes a stream of a descriptor, which then belongs to the stream, fdopendir(3). Returns NULL
 * with ENOTDIR if it is no directory.
 */
struct defuse_dir *defuse_fdopendir(int fd);

/**
 * Returns the next entry, including "." and "..", readdir(3). Returns NULL at the end, with
 * `errno` unchanged, and on failure.
 */
struct dirent *defuse_readdir(struct defuse_dir *dir);

/**
 * The position of the stream, telldir(3).
 */
long defuse_telldir(struct defuse_dir *dir);

/**
 * Sets the position to a result of defuse_telldir(), seekdir(3).
 */
void defuse_seekdir(struct defuse_dir *dir, long place);

/**
 * Sets the position to the start and re-reads the directory, rewinddir(3).
 */
void defuse_rewinddir(struct defuse_dir *dir);

/**
 * The descriptor of a stream, dirfd(3). It can be used as a directory argument, and must not be
 * closed.
 */
int defuse_dirfd(struct defuse_dir *dir);

/**
 * Closes a stream and its descriptor, closedir(3).
 */
int defuse_closedir(struct defuse_dir *dir);

/* ---- the working directory: defuse_workdir(3) ---- */

/**
 * Changes the working directory to a directory of a mount, chdir(2).
 */
int defuse_chdir(const char *path);

/**
 * Changes the working directory to an open directory, fchdir(2).
 */
int defuse_fchdir(int fd);

/**
 * Returns the path of the working directory, getcwd(3): in `buf`, or if that is NULL, in memory
 * that the caller frees with free(3). Returns NULL with ERANGE if `size` is too small, and with
 * ENOENT if the directory was removed.
 */
char *defuse_getcwd(char *buf, size_t size);

/* ---- extended attributes: defuse_xattrs(3) ---- */

/**
 * Returns the value of an attribute, getxattr(2).
 */
ssize_t defuse_getxattr(const char *path, const char *name, void *value, size_t size);

/**
 * Returns the value of an attribute of a symbolic link, lgetxattr(2).
 */
ssize_t defuse_lgetxattr(const char *path, const char *name, void *value, size_t size);

/**
 * Returns the value of an attribute of an open file, fgetxattr(2).
 */
ssize_t defuse_fgetxattr(int fd, const char *name, void *value, size_t size);

/**
 * Sets an attribute, setxattr(2), with XATTR_CREATE and XATTR_REPLACE.
 */
int defuse_setxattr(const char *path, const char *name, const void *value, size_t size, int flags);

/**
 * Sets an attribute of a symbolic link, lsetxattr(2).
 */
int defuse_lsetxattr(const char *path, const char *name, const void *value, size_t size, int flags);

/**
 * Sets an attribute of an open file, fsetxattr(2).
 */
int defuse_fsetxattr(int fd, const char *name, const void *value, size_t size, int flags);

/**
 * Lists the names of all attributes, each with a final NUL, listxattr(2).
 */
ssize_t defuse_listxattr(const char *path, char *names, size_t size);

/**
 * Lists the names of all attributes of a symbolic link, llistxattr(2).
 */
ssize_t defuse_llistxattr(const char *path, char *names, size_t size);

/**
 * Lists the names of all attributes of an open file, flistxattr(2).
 */
ssize_t defuse_flistxattr(int fd, char *names, size_t size);

/**
 * Removes an attribute, removexattr(2).
 */
int defuse_removexattr(const char *path, const char *name);

/**
 * Removes an attribute of a symbolic link, lremovexattr(2).
 */
int defuse_lremovexattr(const char *path, const char *name);

/**
 * Removes an attribute of an open file, fremovexattr(2).
 */
int defuse_fremovexattr(int fd, const char *name);

/* ---- lock files: defuse_locks(3) ---- */

/**
 * Locks the whole of an open file, flock(2). `operation` is LOCK_SH, LOCK_EX or LOCK_UN. With
 * LOCK_NB it fails with EWOULDBLOCK instead of waiting.
 */
int defuse_flock(int fd, int operation);

/**
 * Locks `length` bytes from the file position on for the process, lockf(3). `command` is F_LOCK,
 * F_TLOCK, F_ULOCK or F_TEST.
 */
int defuse_lockf(int fd, int command, off_t length);

/* ---- asynchronous reads, writes and syncs: defuse_aio(3) ---- */

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
 * Like fsync(2), for operations that have completed before.
 */
#define DEFUSE_AIO_FSYNC 4

/**
 * Like fdatasync(2), for operations that have completed before.
 */
#define DEFUSE_AIO_FDATASYNC 5

/**
 * The result of an operation.
 */
typedef struct defuse_aio_event {
  /**
   * The `data` of the operation.
   */
  uint64_t data;
  /**
   * The number of bytes, or a negative error number such as -EIO, or -ECANCELED.
   */
  int64_t result;
} defuse_aio_event;

/**
 * Called at the end of an operation, on a thread of the context. It should return soon. It must
 * not wait for events or destroy the context (EDEADLK).
 */
typedef void (*defuse_aio_callback)(const struct defuse_aio_event *event);

/**
 * An operation.
 */
typedef struct defuse_aio_op {
  /**
   * DEFUSE_AIO_READ or another of the operations.
   */
  uint32_t opcode;
  /**
   * A descriptor of the library.
   */
  int fd;
  /**
   * A buffer, or an array of `struct iovec`.
   */
  void *buf;
  /**
   * Number of bytes, or of vectors.
   */
  size_t count;
  /**
   * Offset in the file in bytes; -1 for the file position.
   */
  int64_t offset;
  /**
   * Returned in the event.
   */
  uint64_t data;
  /**
   * Called at the end instead of adding an event for defuse_aio_getevents(); or NULL.
   */
  defuse_aio_callback callback;
} defuse_aio_op;

/**
 * Creates a context for `capacity` operations (1 to 65,536), which executes up to `threads` of
 * them at a time (1 to 1024; 0 for twice the number of processors, but at least 4). Threads are
 * started on demand. Returns the number of the context.
 */
int defuse_aio_create(unsigned int capacity, unsigned int threads);

/**
 * Starts `count` operations. Returns the number of operations started. If not even the first could
 * be started, returns -1 with EAGAIN (no room), EBADF, EINVAL or EFAULT. The error of an operation
 * that was started is in its event.
 */
int defuse_aio_submit(int aio, const struct defuse_aio_op *ops, int count);

/**
 * Collects up to `max` events. Waits until there are at least `min`, or until `timeout` is over; a
 * NULL timeout waits without limit. Returns the number of events. Signals do not end the wait.
 */
int defuse_aio_getevents(int aio,
                         int min,
                         int max,
                         struct defuse_aio_event *events,
                         const struct timespec *timeout);

/**
 * A kernel descriptor for poll(2), select(2) and epoll(7), which is readable while there are
 * events to collect. It belongs to the context; callers must neither read nor close it.
 */
int defuse_aio_eventfd(int aio);

/**
 * Cancels an operation with this `data` that has not begun. Its event reports -ECANCELED. Fails
 * with EINPROGRESS if it has begun (its end is reported as usual), and with ENOENT if there is
 * none.
 */
int defuse_aio_cancel(int aio, uint64_t data);

/**
 * Cancels all operations that have not begun, waits for the others, and frees the context with its
 * remaining events. Callbacks are called.
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
