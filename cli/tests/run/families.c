/* One call of every family, with what it answers. Inode and device numbers and times are left out:
 * they differ from one file system to the next. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

extern char **environ;
#define SAY(call) do { errno = 0; long r = (long)(call); \
    printf("%s = %ld %s\n", #call, r, r < 0 ? strerrorname_np(errno) : ""); } while (0)

static int walked;

static int each(const char *path, const struct stat *st, int kind, struct FTW *at) {
    /* The order is the file system's own. */
    walked += kind * 10 + at->level;
    return 0;
}

static int by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

int main(void) {
    setvbuf(stdout, NULL, _IONBF, 0);
    char buf[64] = "", *text = "0123456789";
    struct stat st;
    int fd = open("f", O_RDWR | O_CREAT | O_EXCL, 0644);
    printf("lowest %d\n", fd);
    SAY(open("f", O_RDWR | O_CREAT | O_EXCL, 0644));
    SAY(open("f/x", O_RDONLY));
    SAY(open("none", O_RDONLY));
    SAY(open(".", O_WRONLY));
    SAY(write(fd, text, 10));
    SAY(lseek(fd, 2, SEEK_SET));
    SAY(read(fd, buf, 3));
    SAY(pread(fd, buf, 4, 6));
    SAY(pwrite(fd, "xy", 2, 20));
    struct iovec v[2] = {{buf, 2}, {buf + 2, 3}};
    SAY(readv(fd, v, 2)); SAY(writev(fd, v, 2)); SAY(preadv(fd, v, 2, 1)); SAY(pwritev2(fd, v, 2, -1, 0));
    SAY(lseek(fd, 0, SEEK_END)); SAY(lseek(fd, 100, SEEK_DATA)); SAY(lseek(fd, -1, SEEK_SET));
    SAY(ftruncate(fd, 7)); SAY(truncate("f", 9)); SAY(fallocate(fd, 0, 0, 12)); SAY(fsync(fd)); SAY(fdatasync(fd));
    SAY(posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL)); SAY(isatty(fd)); SAY(read(fd, NULL, 0));
    fstat(fd, &st); printf("fstat %ld %o %ld\n", (long)st.st_size, st.st_mode, (long)st.st_nlink);
    struct stat by; stat("f", &by); printf("same file %d\n", by.st_ino == st.st_ino && by.st_dev == st.st_dev);
    int d2 = dup(fd); printf("dup %d\n", d2); lseek(d2, 3, SEEK_SET); SAY(lseek(fd, 0, SEEK_CUR));
    SAY(dup2(fd, 20)); SAY(fcntl(20, F_GETFD)); SAY(fcntl(fd, F_DUPFD_CLOEXEC, 10)); SAY(fcntl(10, F_GETFD));
    SAY(fcntl(fd, F_GETFL) & (O_ACCMODE | O_APPEND)); SAY(fcntl(fd, F_SETFL, O_APPEND)); SAY(write(fd, "end", 3));
    SAY(close(20)); SAY(close(20)); SAY(close_range(10, 12, 0)); SAY(fcntl(10, F_GETFD));
    struct flock lock = {.l_type = F_WRLCK, .l_len = 5};
    SAY(fcntl(fd, F_SETLK, &lock)); SAY(fcntl(fd, F_GETLK, &lock)); printf("lock %d\n", lock.l_type);
    SAY(flock(fd, LOCK_EX | LOCK_NB));
    SAY(mkdir("d", 0755)); SAY(mkdir("d", 0755)); SAY(symlink("../f", "d/l")); SAY(link("f", "h")); SAY(rename("h", "d/h"));
    SAY(rename("d", "d/x")); SAY(rmdir("d")); SAY(unlink("d")); SAY(readlink("d/l", buf, sizeof buf));
    SAY(mkfifo("p", 0600)); SAY(mknod("s", S_IFSOCK | 0600, 0)); SAY(unlink("s")); SAY(renameat2(AT_FDCWD, "f", AT_FDCWD, "d/h", RENAME_NOREPLACE));
    SAY(access("f", W_OK)); SAY(access("f", X_OK)); SAY(faccessat(AT_FDCWD, "none", F_OK, 0)); SAY(chmod("f", 0600)); SAY(fchmod(fd, 0640));
    SAY(chown("f", -1, -1)); SAY(lchown("d/l", -1, -1)); struct timespec ts[2] = {{1, 2}, {3, 4}}; SAY(utimensat(AT_FDCWD, "f", ts, 0));
    stat("f", &st); printf("times %ld %ld\n", (long)st.st_atime, (long)st.st_mtim.tv_nsec);
    SAY(setxattr("f", "user.a", "v", 1, 0)); SAY(fgetxattr(fd, "user.a", buf, 8)); SAY(getxattr("f", "user.b", buf, 8)); SAY(removexattr("f", "user.a"));
    struct statfs sf; SAY(statfs("f", &sf)); SAY(fstatfs(fd, &sf)); struct statx sx; SAY(statx(AT_FDCWD, "d/l", AT_SYMLINK_NOFOLLOW, STATX_ALL, &sx)); printf("%o\n", sx.stx_mode);
    SAY(chdir("d")); SAY(access("../f", F_OK)); SAY(chdir("..")); int dir = open("d", O_RDONLY | O_DIRECTORY);
    SAY(fchdir(dir)); SAY(access("h", F_OK)); SAY(fchdir(fd)); SAY(chdir("..")); SAY(openat(dir, "../f", O_PATH)); SAY(unlinkat(dir, "none", 0)); SAY(read(dir, buf, 4));
    struct dirent **names; int n = scandir("d", &names, NULL, by_name); for (int i = 0; i < n; i++) puts(names[i]->d_name);
    DIR *stream = fdopendir(dir); int count = 0; while (readdir(stream)) count++; long where = telldir(stream); rewinddir(stream); readdir(stream); closedir(stream); printf("dir %d %d\n", count, where != 0);
    SAY(nftw("d", each, 5, FTW_PHYS)); printf("walked %d\n", walked); glob_t g; SAY(glob("[df]*", 0, NULL, &g)); for (size_t i = 0; i < g.gl_pathc; i++) puts(g.gl_pathv[i]);
    char *roots[] = {"d", NULL}; FTS *fts = fts_open(roots, FTS_PHYSICAL, NULL); count = 0; while (fts_read(fts)) count++; fts_close(fts); printf("fts %d\n", count);
    FILE *file = fopen("io", "w+"); fprintf(file, "line %d\n", 1); fseek(file, 0, SEEK_SET); fgets(buf, sizeof buf, file); printf("stdio %s", buf); fclose(file);
    char name[] = "tmp-XXXXXX"; int t = mkstemp(name); SAY(t >= 0); SAY(unlink(name)); SAY(write(t, "x", 1)); fstat(t, &st); printf("unlinked %ld\n", (long)st.st_nlink); close(t);
    char *real = realpath("d/l", NULL); printf("real %s\n", strrchr(real, '/'));
    FILE *out = popen("cat f | wc -c", "r"); fgets(buf, sizeof buf, out); pclose(out); printf("popen %s", buf); SAY(system("test -f f"));
    pid_t pid; char *argv[] = {"sh", "-c", "cat >&5", NULL}; posix_spawn_file_actions_t a; posix_spawn_file_actions_init(&a);
    posix_spawn_file_actions_addopen(&a, 0, "io", O_RDONLY, 0); posix_spawn_file_actions_addopen(&a, 5, "spawned", O_WRONLY | O_CREAT, 0644);
    SAY(posix_spawnp(&pid, "no-such-program", NULL, NULL, argv, environ)); SAY(posix_spawn(&pid, "spawned", NULL, NULL, argv, environ));
    SAY(posix_spawnp(&pid, "sh", &a, NULL, argv, environ)); int status; waitpid(pid, &status, 0); printf("spawn %d\n", status); stat("spawned", &st); printf("spawned %ld\n", (long)st.st_size);
    SAY(fcntl(5, F_GETFD) < 0 ? 0 : 0);
    int big = open("big", O_RDWR | O_CREAT, 0644); ftruncate(big, 10000); char *m = mmap(NULL, 10000, PROT_READ | PROT_WRITE, MAP_SHARED, big, 0); memcpy(m + 5000, "mapped", 6);
    SAY(msync(m, 10000, MS_SYNC)); SAY(pread(big, buf, 6, 5000)); buf[6] = 0; puts(buf); SAY(munmap(m, 10000)); char *pm = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, big, 4096); printf("%.6s\n", pm + 904);
    SAY((long)mmap(NULL, 4096, PROT_READ, MAP_SHARED, open("big", O_WRONLY), 0));
    int pipefd[2]; pipe(pipefd); off_t off = 5000; SAY(sendfile(pipefd[1], big, &off, 6)); SAY(read(pipefd[0], buf, 64)); printf("%ld\n", (long)off);
    int to = open("copy", O_RDWR | O_CREAT, 0644); loff_t in = 5000; SAY(copy_file_range(big, &in, to, NULL, 6, 0)); SAY(pread(to, buf, 9, 0));
    write(pipefd[1], "spliced", 7); SAY(splice(pipefd[0], NULL, to, NULL, 7, 0)); loff_t o = 0; SAY(splice(to, &o, pipefd[1], NULL, 5, 0)); SAY(read(pipefd[0], buf, 5));
    struct pollfd pf[2] = {{to, POLLIN | POLLOUT, 0}, {pipefd[0], POLLIN, 0}}; SAY(poll(pf, 2, 1000)); printf("%x %x\n", pf[0].revents, pf[1].revents);
    fd_set rs, ws; FD_ZERO(&rs); FD_ZERO(&ws); FD_SET(to, &rs); FD_SET(to, &ws); struct timeval tv = {1, 0}; SAY(select(to + 1, &rs, &ws, NULL, &tv));
    int ep = epoll_create1(0); struct epoll_event ev = {EPOLLIN}; SAY(epoll_ctl(ep, EPOLL_CTL_ADD, to, &ev));
    SAY(syscall(SYS_openat, AT_FDCWD, "none", O_RDONLY)); SAY(syscall(SYS_access, "f", 0));
    char link_[32], target[4096]; sprintf(link_, "/proc/self/fd/%d", to); ssize_t len = readlink(link_, target, sizeof target); target[len > 0 ? len : 0] = 0; printf("fd link %s\n", strrchr(target, '/'));
    int again = open(link_, O_RDONLY); SAY(read(again, buf, 3)); SAY(umask(027)); mkdir("masked", 0777); stat("masked", &st); printf("%o\n", st.st_mode);
    int tmpf = open(".", O_TMPFILE | O_RDWR, 0600); SAY(tmpf >= 0); sprintf(link_, "/proc/self/fd/%d", tmpf); SAY(linkat(AT_FDCWD, link_, AT_FDCWD, "named", AT_SYMLINK_FOLLOW));
    struct rlimit rl = {40, 40}; struct rlimit before; getrlimit(RLIMIT_NOFILE, &before); rl.rlim_max = before.rlim_max; SAY(setrlimit(RLIMIT_NOFILE, &rl)); count = 0; while (open("f", O_RDONLY) >= 0) count++; printf("exhausted %s %d\n", strerrorname_np(errno), count > 5 && count < 40);
    return 0;
}
