/* libdefuse: user-space file systems inside of the application's own process.
 *
 * The functions are those of POSIX with a prefix: -1 and errno where they fail. Descriptors are
 * numbers of a table of their own, and mean nothing to the functions without the prefix. A path
 * outside of all mounts gives EXDEV. All of them may be called from any thread.
 *
 * Made of capi/src/calls.rs by capi/tests/header.rs, which says when it is out of date. */

#ifndef DEFUSE_H
#define DEFUSE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Mounts `source`, such as "memory:" or "passthrough:/srv,exclusive", on `target`: an absolute
 * path, or a name with a colon ("mem:"). 0, or -1: EINVAL, EBUSY, and what making the file system
 * gives.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_mount(const char *target, const char *source);

/**
 * Takes a mount away. EBUSY while it is in use, unless it is to be detached `lazily`.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_unmount(const char *target, int lazily);

/**
 * What was measured on a mount, as JSON with a NUL at its end. The length without it; ERANGE where
 * the buffer is too small.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
ptrdiff_t defuse_statistics(const char *target, char *buf, size_t size);

/**
 * open(2). `mode` is always given; it counts with O_CREAT and O_TMPFILE.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_open(const char *path, int flags, unsigned int mode);

/**
 * openat(2), with `dir` from defuse_open or AT_FDCWD.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_openat(int dir, const char *path, int flags, unsigned int mode);

/**
 * close(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_close(int fd);

/**
 * dup(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_dup(int fd);

/**
 * dup2(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_dup2(int fd, int to);

/**
 * read(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
ptrdiff_t defuse_read(int fd, void *buf, size_t size);

/**
 * write(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
ptrdiff_t defuse_write(int fd, const void *buf, size_t size);

/**
 * pread(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
ptrdiff_t defuse_pread(int fd, void *buf, size_t size, int64_t offset);

/**
 * pwrite(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
ptrdiff_t defuse_pwrite(int fd, const void *buf, size_t size, int64_t offset);

/**
 * preadv2(2): an `offset` of -1 is the position.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
ptrdiff_t defuse_preadv2(int fd, const struct iovec *iov, int count, int64_t offset, int flags);

/**
 * pwritev2(2): an `offset` of -1 is the position.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
ptrdiff_t defuse_pwritev2(int fd, const struct iovec *iov, int count, int64_t offset, int flags);

/**
 * lseek(2), with SEEK_DATA and SEEK_HOLE.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int64_t defuse_lseek(int fd, int64_t offset, int whence);

/**
 * ftruncate(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_ftruncate(int fd, int64_t length);

/**
 * fallocate(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_fallocate(int fd, int mode, int64_t offset, int64_t length);

/**
 * fsync(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_fsync(int fd);

/**
 * fdatasync(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_fdatasync(int fd);

/**
 * copy_file_range(2) at the positions of both, also between mounts.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
ptrdiff_t defuse_copy_file_range(int from, int to, size_t size);

/**
 * stat(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_stat(const char *path, struct stat *out);

/**
 * lstat(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_lstat(const char *path, struct stat *out);

/**
 * fstat(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_fstat(int fd, struct stat *out);

/**
 * access(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_access(const char *path, int mode);

/**
 * chmod(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_chmod(const char *path, unsigned int mode);

/**
 * truncate(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_truncate(const char *path, int64_t length);

/**
 * mkdir(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_mkdir(const char *path, unsigned int mode);

/**
 * rmdir(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_rmdir(const char *path);

/**
 * unlink(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_unlink(const char *path);

/**
 * rename(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_rename(const char *from, const char *to);

/**
 * link(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_link(const char *from, const char *to);

/**
 * symlink(2).
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_symlink(const char *from, const char *to);

/**
 * readlink(2): no NUL at the end.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
ptrdiff_t defuse_readlink(const char *path, char *buf, size_t size);

/**
 * chdir(2), for the defuse_ calls alone.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
int defuse_chdir(const char *path);

/**
 * The working directory, with a NUL at its end. The length without it; ERANGE where the buffer is
 * too small.
 *
 * # Safety
 *
 * Pointers are to memory as the call of that name has it.
 */
ptrdiff_t defuse_getcwd(char *buf, size_t size);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DEFUSE_H */
