/* Makes every call, on memory and on a passthrough of the directory given. */
#include "check.h"

#include <limits.h>
#include <linux/fs.h>
#include <linux/openat2.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/xattr.h>
#include <unistd.h>

static char path_room[4][256];

/* A path in the mount under test. */
static const char *at(const char *mount, const char *name, int number) {
    snprintf(path_room[number], sizeof path_room[number], "%s%s", mount, name);
    return path_room[number];
}
#define P(name) at(mount, name, 0)
#define Q(name) at(mount, name, 1)

static void descriptors(const char *mount) {
    char buf[32] = {0};
    struct stat st;
    int a, b, fd = defuse_open(P("/f"), O_RDWR | O_CREAT | O_EXCL, 0640);
    CHECK(fd >= 0);
    FAILS(defuse_open(P("/f"), O_RDWR | O_CREAT | O_EXCL, 0640), EEXIST);
    FAILS(defuse_open(P("/none"), O_RDONLY), ENOENT);
    CHECK(strstr(defuse_last_error(), "/none") != NULL && strstr(defuse_last_error(), "; ") != NULL);
    CHECK(defuse_fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (st.st_mode & 0777) == 0640);
    CHECK(defuse_write(fd, "0123456789", 10) == 10);
    CHECK((a = defuse_dup(fd)) >= 0 && a != fd);
    CHECK(defuse_lseek(a, 2, SEEK_SET) == 2 && defuse_lseek(fd, 0, SEEK_CUR) == 2);
    CHECK(defuse_read(fd, buf, 3) == 3 && memcmp(buf, "234", 3) == 0);
    CHECK(defuse_dup2(fd, 100) == 100 && defuse_dup2(100, 100) == 100);
    CHECK(defuse_dup3(fd, 101, O_CLOEXEC) == 101 && defuse_fcntl(101, F_GETFD) == FD_CLOEXEC);
    FAILS(defuse_dup3(fd, fd, 0), EINVAL);
    CHECK(defuse_fcntl(101, F_SETFD, 0) == 0 && defuse_fcntl(101, F_GETFD) == 0);
    CHECK((b = defuse_fcntl(fd, F_DUPFD, 200)) == 200);
    CHECK(defuse_fcntl(fd, F_DUPFD_CLOEXEC, 200) == 201 && defuse_fcntl(201, F_GETFD) == FD_CLOEXEC);
    CHECK((defuse_fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR);
    CHECK(defuse_fcntl(fd, F_SETFL, O_APPEND) == 0 && defuse_fcntl(a, F_GETFL) & O_APPEND);
    CHECK(defuse_write(fd, "ab", 2) == 2 && defuse_lseek(fd, 0, SEEK_CUR) == 12);
    CHECK(defuse_fcntl(fd, F_SETFL, 0) == 0);
    FAILS(defuse_fcntl(fd, 12345, 0), EINVAL);
    CHECK(defuse_close(a) == 0 && defuse_close(b) == 0 && defuse_close(201) == 0);
    CHECK(defuse_close(100) == 0 && defuse_close(101) == 0 && defuse_close(fd) == 0);
    FAILS(defuse_close(fd), EBADF);
    CHECK((fd = defuse_creat(P("/f"), 0600)) >= 0);
    FAILS(defuse_read(fd, buf, 1), EBADF);
    FAILS(defuse_write(fd, NULL, 1), EFAULT);
    CHECK(defuse_fstat(fd, &st) == 0 && st.st_size == 0 && defuse_close(fd) == 0);
}

static void data(const char *mount) {
    char x[4] = "abc", y[5] = "defg", back[8] = {0};
    struct iovec out[2] = {{x, 3}, {y, 4}}, in[2] = {{back, 2}, {back + 2, 5}};
    struct stat st;
    off_t from = 1, to = 4;
    int fd = defuse_open(P("/d"), O_RDWR | O_CREAT | O_TRUNC, 0600), fd2;
    CHECK(fd >= 0 && defuse_writev(fd, out, 2) == 7);
    CHECK(defuse_lseek(fd, 0, SEEK_SET) == 0 && defuse_readv(fd, in, 2) == 7);
    CHECK(memcmp(back, "abcdefg", 7) == 0);
    CHECK(defuse_pwritev(fd, out, 2, 7) == 7 && defuse_preadv(fd, in, 2, 6) == 7);
    CHECK(memcmp(back, "gabcdef", 7) == 0);
    CHECK(defuse_pwritev2(fd, out, 1, -1, 0) == 3 && defuse_lseek(fd, 0, SEEK_CUR) == 10);
    CHECK(defuse_preadv2(fd, in, 1, -1, 0) == 2 && defuse_lseek(fd, 0, SEEK_CUR) == 12);
    FAILS(defuse_preadv2(fd, in, 1, -2, 0), EINVAL);
    FAILS(defuse_readv(fd, in, 1025), EINVAL);
    CHECK(defuse_pwrite(fd, "Z", 1, 0) == 1 && defuse_pread(fd, back, 1, 0) == 1 && back[0] == 'Z');
    FAILS(defuse_pread(fd, back, 1, -1), EINVAL);
    CHECK((fd2 = defuse_openat(AT_FDCWD, Q("/d2"), O_RDWR | O_CREAT, 0600)) >= 0);
    CHECK(defuse_copy_file_range(fd, &from, fd2, &to, 5, 0) == 5 && from == 6 && to == 9);
    CHECK(defuse_fstat(fd2, &st) == 0 && st.st_size == 9);
    FAILS(defuse_copy_file_range(fd, &from, fd2, &to, 5, 1), EINVAL);
    CHECK(defuse_ftruncate(fd2, 100) == 0 && defuse_truncate(Q("/d2"), 1 << 20) == 0);
    CHECK(defuse_stat(Q("/d2"), &st) == 0 && st.st_size == 1 << 20);
    CHECK(defuse_lseek(fd2, 0, SEEK_HOLE) > 0 && defuse_lseek(fd2, 0, SEEK_DATA) >= 0);
    CHECK(defuse_fallocate(fd2, FALLOC_FL_KEEP_SIZE, 0, 4096) == 0);
    CHECK(defuse_posix_fallocate(fd2, 0, 2 << 20) == 0 && defuse_posix_fallocate(fd2, 0, 0) == EINVAL);
    CHECK(defuse_fstat(fd2, &st) == 0 && st.st_size == 2 << 20);
    CHECK(defuse_posix_fadvise(fd2, 0, 0, POSIX_FADV_DONTNEED) == 0);
    CHECK(defuse_posix_fadvise(fd2, 0, 0, 99) == EINVAL && defuse_posix_fadvise(9999, 0, 0, 0) == EBADF);
    CHECK(defuse_fsync(fd2) == 0 && defuse_fdatasync(fd2) == 0 && defuse_syncfs(fd2) == 0);
    defuse_sync();
    CHECK(defuse_close(fd) == 0 && defuse_close(fd2) == 0);
    CHECK(defuse_create_with(P("/d3"), "whole", 5, 0640) == 0);
    CHECK(defuse_stat(P("/d3"), &st) == 0 && st.st_size == 5 && (st.st_mode & 07777) == 0640);
    CHECK((fd = defuse_open(P("/d3"), O_RDONLY)) >= 0 && defuse_read(fd, back, 7) == 5);
    CHECK(memcmp(back, "whole", 5) == 0 && defuse_close(fd) == 0);
    FAILS(defuse_create_with(P("/d3"), "again", 5, 0600), EEXIST);
    FAILS(defuse_create_with(P("/none/d3"), "x", 1, 0600), ENOENT);
    FAILS(defuse_create_with(P("/d4"), NULL, 1, 0600), EFAULT);
    CHECK(defuse_create_with(P("/d4"), NULL, 0, 0600) == 0 && defuse_stat(P("/d4"), &st) == 0 && st.st_size == 0);
}

static void attributes(const char *mount) {
    struct stat st;
    struct statx stx;
    struct statvfs vfs;
    struct statfs fs;
    struct timespec times[2] = {{1000, 5}, {2000, 7}}, omit[2] = {{0, UTIME_OMIT}, {3000, 0}};
    mode_t mask = defuse_umask(027);
    int dir, fd;
    CHECK(defuse_umask(027) == 027);
    CHECK(defuse_mkdir(P("/at"), 0777) == 0 && defuse_stat(P("/at"), &st) == 0);
    CHECK((st.st_mode & 07777) == 0750);
    defuse_umask(mask);
    CHECK((dir = defuse_open(P("/at"), O_RDONLY | O_DIRECTORY)) >= 0);
    CHECK((fd = defuse_openat(dir, "f", O_RDWR | O_CREAT, 0600)) >= 0);
    CHECK(defuse_symlink("f", P("/at/l")) == 0);
    CHECK(defuse_lstat(P("/at/l"), &st) == 0 && S_ISLNK(st.st_mode) && st.st_size == 1);
    CHECK(defuse_fstatat(dir, "l", &st, 0) == 0 && S_ISREG(st.st_mode));
    CHECK(defuse_fstatat(dir, "l", &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(st.st_mode));
    CHECK(defuse_fstatat(fd, "", &st, AT_EMPTY_PATH) == 0 && S_ISREG(st.st_mode));
    FAILS(defuse_fstatat(fd, "", &st, 0), ENOENT);
    FAILS(defuse_fstatat(dir, "f", &st, 1 << 30), EINVAL);
    FAILS(defuse_fstatat(fd, "f", &st, 0), ENOTDIR);
    FAILS(defuse_stat(NULL, &st), EFAULT);
    FAILS(defuse_stat(P("/at"), NULL), EFAULT);
    CHECK(defuse_chmod(P("/at/f"), 0644) == 0 && defuse_fchmod(fd, 0604) == 0);
    CHECK(defuse_fchmodat(dir, "f", 0606, 0) == 0 && defuse_fstat(fd, &st) == 0);
    CHECK((st.st_mode & 0777) == 0606);
    FAILS(defuse_fchmodat(dir, "l", 0600, AT_SYMLINK_NOFOLLOW), EOPNOTSUPP);
    CHECK(defuse_chown(P("/at/f"), -1, getgid()) == 0 && defuse_lchown(P("/at/l"), getuid(), -1) == 0);
    CHECK(defuse_fchown(fd, getuid(), getgid()) == 0 && defuse_fchownat(dir, "f", -1, -1, 0) == 0);
    CHECK(defuse_fchownat(fd, "", getuid(), -1, AT_EMPTY_PATH) == 0);
    CHECK(defuse_utimensat(dir, "f", times, 0) == 0 && defuse_statx(dir, "f", 0, STATX_ALL, &stx) == 0);
    CHECK(stx.stx_atime.tv_sec == 1000 && stx.stx_mtime.tv_nsec == 7 && (stx.stx_mode & 0777) == 0606);
    CHECK(defuse_futimens(fd, omit) == 0 && defuse_fstat(fd, &st) == 0);
    CHECK(st.st_atim.tv_sec == 1000 && st.st_mtim.tv_sec == 3000);
    CHECK(defuse_utimensat(fd, NULL, NULL, 0) == 0 && defuse_fstat(fd, &st) == 0 && st.st_mtime > 3000);
    CHECK(defuse_statx(fd, "", AT_EMPTY_PATH, STATX_ALL, &stx) == 0 && stx.stx_ino == st.st_ino);
    CHECK(defuse_access(P("/at/f"), R_OK | W_OK) == 0 && defuse_faccessat(dir, "f", F_OK, AT_EACCESS) == 0);
    FAILS(defuse_access(P("/at/none"), F_OK), ENOENT);
    FAILS(defuse_access(P("/at/f"), 8), EINVAL);
    CHECK(defuse_statvfs(P("/at"), &vfs) == 0 && vfs.f_namemax == 255 && vfs.f_blocks > 0);
    CHECK(defuse_fstatvfs(fd, &vfs) == 0 && !(vfs.f_flag & ST_RDONLY));
    CHECK(defuse_statfs(P("/at"), &fs) == 0 && fs.f_namelen == 255 && fs.f_type == 0x65735546);
    CHECK(defuse_fstatfs(fd, &fs) == 0 && fs.f_blocks == vfs.f_blocks);
    CHECK(defuse_close(fd) == 0 && defuse_close(dir) == 0);
}

static void names(const char *mount) {
    char text[PATH_MAX], *full;
    struct open_how how = {.flags = O_RDONLY, .resolve = RESOLVE_BENEATH};
    struct stat st;
    int dir, fd;
    CHECK(defuse_mkdir(P("/n"), 0700) == 0 && (dir = defuse_open(P("/n"), O_RDONLY)) >= 0);
    CHECK(defuse_mkdirat(dir, "sub", 0700) == 0 && defuse_mknod(P("/n/file"), S_IFREG | 0600, 0) == 0);
    CHECK(defuse_mknodat(dir, "file2", 0600, 0) == 0 && defuse_mkfifo(P("/n/fifo"), 0600) == 0);
    CHECK(defuse_mkfifoat(dir, "fifo2", 0600) == 0 && defuse_fstatat(dir, "fifo2", &st, 0) == 0);
    CHECK(S_ISFIFO(st.st_mode));
    FAILS(defuse_open(P("/n/fifo"), O_RDONLY), ENXIO);
    CHECK(strstr(defuse_last_error(), "O_PATH") != NULL);
    CHECK(defuse_link(P("/n/file"), Q("/n/hard")) == 0 && defuse_linkat(dir, "file", dir, "hard2", 0) == 0);
    CHECK(defuse_stat(P("/n/file"), &st) == 0 && st.st_nlink == 3);
    CHECK((fd = defuse_open(P("/n"), O_TMPFILE | O_RDWR, 0600)) >= 0);
    CHECK(defuse_linkat(fd, "", dir, "named", AT_EMPTY_PATH) == 0 && defuse_close(fd) == 0);
    CHECK(defuse_symlinkat("sub/../file", dir, "link") == 0);
    CHECK(defuse_readlink(P("/n/link"), text, sizeof text) == 11 && memcmp(text, "sub/../file", 11) == 0);
    CHECK(defuse_readlinkat(dir, "link", text, 3) == 3);
    FAILS(defuse_readlinkat(dir, "file", text, 3), EINVAL);
    FAILS(defuse_readlinkat(dir, "link", text, 0), EINVAL);
    CHECK(defuse_realpath(P("/n/sub/./../link"), text) == text && strcmp(text, Q("/n/file")) == 0);
    CHECK((full = defuse_realpath(P("/n/sub/.."), NULL)) != NULL && strcmp(full, Q("/n")) == 0);
    free(full);
    CHECK(defuse_realpath(P("/n/none"), text) == NULL && errno == ENOENT);
    CHECK(defuse_rename(P("/n/hard"), Q("/n/moved")) == 0 && defuse_renameat(dir, "moved", dir, "hard") == 0);
    FAILS(defuse_renameat2(dir, "hard", dir, "file2", RENAME_NOREPLACE), EEXIST);
    CHECK(defuse_renameat2(dir, "sub", dir, "file2", RENAME_EXCHANGE) == 0);
    CHECK(defuse_fstatat(dir, "file2", &st, 0) == 0 && S_ISDIR(st.st_mode));
    CHECK(defuse_symlinkat("/", dir, "out") == 0 && how.resolve == RESOLVE_BENEATH);
    CHECK((fd = defuse_openat2(dir, "file", &how, sizeof how)) >= 0 && defuse_close(fd) == 0);
    FAILS(defuse_openat2(dir, "out", &how, sizeof how), EXDEV);
    FAILS(defuse_openat2(dir, "file", &how, 8), EINVAL);
    how.mode = 0600;
    FAILS(defuse_openat2(dir, "file", &how, sizeof how), EINVAL);
    FAILS(defuse_unlink(P("/n/file2")), EISDIR);
    FAILS(defuse_rmdir(P("/n")), ENOTEMPTY);
    CHECK(defuse_unlink(P("/n/sub")) == 0 && defuse_rmdir(P("/n/file2")) == 0);
    CHECK(defuse_unlinkat(dir, "hard", 0) == 0 && defuse_mkdirat(dir, "sub", 0700) == 0);
    CHECK(defuse_unlinkat(dir, "sub", AT_REMOVEDIR) == 0);
    FAILS(defuse_unlinkat(dir, "file", 1 << 20), EINVAL);
    CHECK(defuse_mkdirat(dir, "sub", 0700) == 0 && defuse_remove(P("/n/sub")) == 0);
    CHECK(defuse_remove(P("/n/hard2")) == 0);
    FAILS(defuse_mkdirat(9999, "x", 0700), EBADF);
    /* The directory is ignored for an absolute path. */
    CHECK(defuse_mkdirat(9999, P("/n/abs"), 0700) == 0);
    CHECK(defuse_close(dir) == 0);
}

static void directories(const char *mount) {
    enum { COUNT = 600 };
    char name[300];
    static char seen[COUNT];
    struct dirent *entry;
    defuse_dir *dir;
    long place = -1;
    char after[256] = "";
    int fd, count = 0, i;
    memset(seen, 0, sizeof seen);
    CHECK(defuse_mkdir(P("/many"), 0700) == 0);
    for (i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "%s/many/%d", mount, i);
        CHECK((fd = defuse_creat(name, 0600)) >= 0 && defuse_close(fd) == 0);
    }
    CHECK((dir = defuse_opendir(P("/many"))) != NULL && defuse_dirfd(dir) >= 0);
    for (errno = 0; (entry = defuse_readdir(dir)) != NULL; count++) {
        if (place != -1 && !after[0])
            strcpy(after, entry->d_name);
        if (count == 300)
            place = defuse_telldir(dir);
        if (entry->d_name[0] == '.') {
            CHECK(entry->d_type == DT_DIR);
            continue;
        }
        CHECK(entry->d_type == DT_REG && entry->d_ino != 0);
        CHECK((i = atoi(entry->d_name)) < COUNT && !seen[i]);
        seen[i] = 1;
    }
    CHECK(count == COUNT + 2 && errno == 0);
    defuse_seekdir(dir, place);
    CHECK((entry = defuse_readdir(dir)) != NULL && strcmp(entry->d_name, after) == 0);
    defuse_rewinddir(dir);
    for (count = 0; defuse_readdir(dir) != NULL; count++) {
    }
    CHECK(count == COUNT + 2 && defuse_closedir(dir) == 0);
    CHECK((fd = defuse_open(P("/many"), O_RDONLY | O_DIRECTORY)) >= 0);
    CHECK((dir = defuse_fdopendir(fd)) != NULL && defuse_dirfd(dir) == fd && defuse_closedir(dir) == 0);
    FAILS(defuse_close(fd), EBADF);
    CHECK((fd = defuse_open(P("/many/1"), O_RDONLY)) >= 0);
    CHECK(defuse_fdopendir(fd) == NULL && errno == ENOTDIR && defuse_close(fd) == 0);
    CHECK(defuse_opendir(P("/many/1")) == NULL && errno == ENOTDIR);
    CHECK(defuse_readdir(NULL) == NULL && errno == EBADF);
}

static void working_directory(const char *mount) {
    char text[PATH_MAX], *made;
    struct stat st;
    int fd;
    CHECK(defuse_mkdir(P("/w"), 0700) == 0 && defuse_chdir(P("/w")) == 0);
    CHECK(defuse_getcwd(text, sizeof text) == text && strcmp(text, P("/w")) == 0);
    CHECK((made = defuse_getcwd(NULL, 0)) != NULL && strcmp(made, text) == 0);
    free(made);
    CHECK(defuse_getcwd(text, 3) == NULL && errno == ERANGE);
    CHECK(defuse_mkdir("sub", 0700) == 0 && defuse_stat(P("/w/sub"), &st) == 0);
    CHECK((fd = defuse_open("sub", O_RDONLY | O_DIRECTORY)) >= 0 && defuse_fchdir(fd) == 0);
    CHECK(defuse_getcwd(text, sizeof text) != NULL && strcmp(text, P("/w/sub")) == 0);
    FAILS(defuse_unmount(mount, 0), EBUSY);
    CHECK(strstr(defuse_last_error(), "lazily") != NULL && defuse_close(fd) == 0);
}

static void extended_attributes(const char *mount) {
    char value[64], list[256];
    int fd = defuse_open(P("/x"), O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0);
    if (defuse_setxattr(P("/x"), "user.one", "first", 5, 0) == -1 && errno == EOPNOTSUPP) {
        /* The directory below has none (tmpfs before Linux 6.6). */
        CHECK(defuse_close(fd) == 0);
        return;
    }
    CHECK(defuse_getxattr(P("/x"), "user.one", NULL, 0) == 5);
    CHECK(defuse_getxattr(P("/x"), "user.one", value, sizeof value) == 5 && memcmp(value, "first", 5) == 0);
    FAILS(defuse_getxattr(P("/x"), "user.one", value, 2), ERANGE);
    FAILS(defuse_setxattr(P("/x"), "user.one", "again", 5, XATTR_CREATE), EEXIST);
    FAILS(defuse_setxattr(P("/x"), "user.none", "again", 5, XATTR_REPLACE), ENODATA);
    FAILS(defuse_setxattr(P("/x"), "user.none", "again", 5, 64), EINVAL);
    CHECK(defuse_fsetxattr(fd, "user.two", "2", 1, XATTR_CREATE) == 0);
    CHECK(defuse_fgetxattr(fd, "user.two", value, sizeof value) == 1 && value[0] == '2');
    CHECK(defuse_lsetxattr(P("/x"), "user.three", "", 0, 0) == 0);
    CHECK(defuse_lgetxattr(P("/x"), "user.three", value, sizeof value) == 0);
    CHECK(defuse_listxattr(P("/x"), NULL, 0) > 0);
    CHECK(defuse_listxattr(P("/x"), list, sizeof list) == defuse_llistxattr(P("/x"), NULL, 0));
    CHECK(defuse_flistxattr(fd, list, sizeof list) > 0 && memmem(list, sizeof list, "user.two", 9) != NULL);
    CHECK(defuse_removexattr(P("/x"), "user.one") == 0 && defuse_lremovexattr(P("/x"), "user.three") == 0);
    CHECK(defuse_fremovexattr(fd, "user.two") == 0);
    FAILS(defuse_fgetxattr(fd, "user.two", value, sizeof value), ENODATA);
    CHECK(defuse_close(fd) == 0);
}

static void nothing(int signal) {
    (void)signal;
}

struct waiter {
    int fd;
    int result;
    int error;
};

static void *wait_for_lock(void *argument) {
    struct waiter *waiter = argument;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    waiter->result = defuse_fcntl(waiter->fd, F_OFD_SETLKW, &lock);
    waiter->error = errno;
    return NULL;
}

static void locks(const char *mount) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 10, .l_len = 10};
    struct waiter waiter;
    pthread_t thread;
    int ended = 0, a = defuse_open(P("/lock"), O_RDWR | O_CREAT, 0600), b = defuse_open(P("/lock"), O_RDWR);
    CHECK(a >= 0 && b >= 0 && defuse_flock(a, LOCK_EX) == 0);
    FAILS(defuse_flock(b, LOCK_SH | LOCK_NB), EWOULDBLOCK);
    CHECK(defuse_flock(a, LOCK_UN) == 0 && defuse_flock(b, LOCK_SH | LOCK_NB) == 0);
    FAILS(defuse_flock(a, 99), EINVAL);
    CHECK(defuse_flock(b, LOCK_UN) == 0);
    CHECK(defuse_fcntl(a, F_OFD_SETLK, &lock) == 0);
    FAILS(defuse_fcntl(b, F_OFD_SETLK, &lock), EAGAIN);
    lock.l_start = 15, lock.l_len = 0;
    CHECK(defuse_fcntl(b, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_WRLCK);
    CHECK(lock.l_start == 10 && lock.l_len == 10 && lock.l_pid == -1);
    lock = (struct flock){.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = 30};
    CHECK(defuse_fcntl(b, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK);
    lock = (struct flock){.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = -1};
    FAILS(defuse_fcntl(b, F_SETLK, &lock), EINVAL);
    lock = (struct flock){.l_type = 99};
    FAILS(defuse_fcntl(b, F_SETLK, &lock), EINVAL);
    FAILS(defuse_fcntl(b, F_SETLK, NULL), EFAULT);
    /* A signal ends a wait, and a wait ends when the lock is free. */
    waiter.fd = b;
    sigaction(SIGUSR1, &(struct sigaction){.sa_handler = nothing, .sa_flags = SA_RESTART}, NULL);
    CHECK(pthread_create(&thread, NULL, wait_for_lock, &waiter) == 0);
    while (!ended) {
        pthread_kill(thread, SIGUSR1);
        usleep(1000);
        ended = pthread_tryjoin_np(thread, NULL) == 0;
    }
    CHECK(waiter.result == -1 && waiter.error == EINTR);
    CHECK(pthread_create(&thread, NULL, wait_for_lock, &waiter) == 0);
    lock = (struct flock){.l_type = F_UNLCK, .l_whence = SEEK_SET};
    CHECK(defuse_fcntl(a, F_OFD_SETLK, &lock) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(waiter.result == 0 && defuse_close(b) == 0);
    /* Locks of the process. */
    lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 5};
    CHECK(defuse_fcntl(a, F_SETLKW, &lock) == 0 && defuse_fcntl(a, F_GETLK, &lock) == 0);
    CHECK(lock.l_type == F_UNLCK && defuse_lockf(a, F_LOCK, 3) == 0 && defuse_lockf(a, F_TEST, 3) == 0);
    CHECK(defuse_lockf(a, F_TLOCK, 0) == 0 && defuse_lockf(a, F_ULOCK, 0) == 0);
    FAILS(defuse_lockf(a, 99, 0), EINVAL);
    CHECK(defuse_close(a) == 0);
}

/* Bytes of a mapping, of reads and of the file agree where they must, whether the kernel maps (passthrough) or
 * the library. */
static void mappings(const char *mount) {
    long page = sysconf(_SC_PAGESIZE);
    char *all, *same, *part, *private, buf[16] = {0};
    int flags, reader, fd = defuse_open(P("/m"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && defuse_ftruncate(fd, 2 * page + 100) == 0 && defuse_pwrite(fd, "begin", 5, 0) == 5);
    CHECK(defuse_pwrite(fd, "second", 6, page) == 6);
    CHECK((all = defuse_mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) != MAP_FAILED);
    CHECK(memcmp(all, "begin", 5) == 0 && memcmp(all + page, "second", 6) == 0 && all[2 * page + 99] == 0);
    /* Another mapping of a part of it is the same memory. */
    CHECK((same = defuse_mmap(NULL, page, PROT_READ, MAP_SHARED, fd, page)) != MAP_FAILED);
    memcpy(all + page, "SECOND", 6);
    CHECK(memcmp(same, "SECOND", 6) == 0);
    CHECK(defuse_msync(all, 3 * page, MS_SYNC) == 0);
    CHECK(defuse_pread(fd, buf, 6, page) == 6 && memcmp(buf, "SECOND", 6) == 0);
    /* A private mapping is a copy from its first write on. */
    CHECK((private = defuse_mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0)) != MAP_FAILED);
    memcpy(private, "PRIVATE", 7);
    CHECK(defuse_msync(private, page, MS_SYNC) == 0 && defuse_munmap(private, page) == 0);
    CHECK(defuse_pread(fd, buf, 5, 0) == 5 && memcmp(buf, "begin", 5) == 0);
    /* Unmapping a part writes it back; the file keeps its size. */
    memcpy(all + 2 * page, "third", 5);
    CHECK(defuse_munmap(all + 2 * page, page) == 0 && defuse_munmap(same, page) == 0);
    CHECK(defuse_pread(fd, buf, 5, 2 * page) == 5 && memcmp(buf, "third", 5) == 0);
    CHECK(defuse_lseek(fd, 0, SEEK_END) == 2 * page + 100);
    memcpy(all, "again", 5);
    /* Also when the descriptor is closed, and where another mapping needs what is not written back yet. */
    CHECK(defuse_close(fd) == 0 && (reader = defuse_open(P("/m"), O_RDONLY)) >= 0);
    CHECK((part = defuse_mmap(NULL, 3 * page, PROT_READ, MAP_SHARED, reader, 0)) != MAP_FAILED);
    CHECK(memcmp(part, "again", 5) == 0 && memcmp(part + 2 * page, "third", 5) == 0);
    CHECK(defuse_munmap(part, 3 * page) == 0);
    CHECK(defuse_munmap(all, 2 * page) == 0);
    CHECK(defuse_pread(reader, buf, 5, 0) == 5 && memcmp(buf, "again", 5) == 0);
#define NOT_MAPPED(prot, how, fd, at, number) CHECK(defuse_mmap(NULL, page, prot, how, fd, at) == MAP_FAILED && errno == (number))
    NOT_MAPPED(PROT_READ | PROT_WRITE, MAP_SHARED, reader, 0, EACCES);
    NOT_MAPPED(PROT_READ, MAP_SHARED, reader, 1, EINVAL);
    NOT_MAPPED(PROT_READ, 0, reader, 0, EINVAL);
    NOT_MAPPED(PROT_READ, MAP_SHARED | MAP_FIXED, reader, 0, EINVAL);
    NOT_MAPPED(PROT_READ, MAP_SHARED, 4321, 0, EBADF);
    CHECK(defuse_mmap(NULL, 0, PROT_READ, MAP_SHARED, reader, 0) == MAP_FAILED && errno == EINVAL);
    CHECK(defuse_close(reader) == 0 && (fd = defuse_open(mount, O_RDONLY | O_DIRECTORY)) >= 0);
    NOT_MAPPED(PROT_READ, MAP_SHARED, fd, 0, ENODEV);
    CHECK(defuse_close(fd) == 0 && (fd = defuse_open(P("/m"), O_WRONLY)) >= 0);
    NOT_MAPPED(PROT_READ, MAP_PRIVATE, fd, 0, EACCES);
    /* A request that no file system here knows, one that needs none, and one of ext2 where there is one. */
    FAILS(defuse_ioctl(fd, _IOR('D', 1, int), &flags), ENOTTY);
    CHECK(defuse_ioctl(fd, FIOCLEX) == 0 && defuse_fcntl(fd, F_GETFD) == FD_CLOEXEC);
    CHECK(defuse_ioctl(fd, FIONCLEX) == 0 && defuse_fcntl(fd, F_GETFD) == 0);
    CHECK(defuse_ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0 || errno == ENOTTY || errno == EOPNOTSUPP);
    CHECK(defuse_close(fd) == 0 && defuse_unlink(P("/m")) == 0);
}

static void all(const char *mount) {
    char json[65536];
    descriptors(mount);
    data(mount);
    attributes(mount);
    names(mount);
    directories(mount);
    working_directory(mount);
    extended_attributes(mount);
    locks(mount);
    mappings(mount);
    CHECK(defuse_statistics(mount, json, sizeof json) > 0 && json[0] == '{');
    FAILS(defuse_statistics(mount, json, 5), ERANGE);
    FAILS(defuse_statistics("none:", json, 5), EINVAL);
}

int main(int argc, char **argv) {
    char source[PATH_MAX], outside[PATH_MAX], *left;
    int fd;
    CHECK(argc == 2 && defuse_version()[0] != 0 && defuse_last_error()[0] == 0);
    CHECK(defuse_getcwd(outside, sizeof outside) != NULL && outside[0] == '/');
    FAILS(defuse_mount("mem:", "memory:,size=x"), EINVAL);
    CHECK(strstr(defuse_last_error(), "size") != NULL);
    FAILS(defuse_mount("mem:", "nothing:"), EINVAL);
    CHECK(strstr(defuse_last_error(), "passthrough") != NULL);
    FAILS(defuse_mount("mem:", "passthrough:/no/such/directory"), EIO);
    FAILS(defuse_mount("relative", "memory:"), EINVAL);
    FAILS(defuse_open("/etc/passwd", O_RDONLY), EXDEV);
    CHECK(strstr(defuse_last_error(), "defuse_mount") != NULL);
    CHECK(defuse_mount("mem:", "memory:,size=64M") == 0);
    FAILS(defuse_mount("mem:", "memory:"), EBUSY);
    snprintf(source, sizeof source, "passthrough:%s", argv[1]);
    CHECK(defuse_mount("/mounted/here", source) == 0);
    CHECK(defuse_mkdir("/mounted/here/served", 0700) == 0);
    snprintf(source, sizeof source, "passthrough:%s/served,backing=off", argv[1]);
    CHECK(defuse_mount("served:", source) == 0);
    all("mem:");
    all("/mounted/here");
    all("served:");
    /* The exit of the program writes this one back. */
    CHECK((fd = defuse_open("served:/left", O_RDWR | O_CREAT, 0600)) >= 0 && defuse_write(fd, "----", 4) == 4);
    CHECK((left = defuse_mmap(NULL, 4, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) != MAP_FAILED);
    memcpy(left, "left", 4);
    CHECK(defuse_unmount("mem:", 0) == 0);
    FAILS(defuse_unmount("mem:", 0), EINVAL);
    /* The working directory is in it. */
    CHECK(defuse_unmount("/mounted/here", 1) == 0);
    puts("passed");
    return 0;
}
