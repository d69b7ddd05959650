// What a program has from the one before it, and what it opens once more: the same files, that can do
// all that they could. The program runs itself, once under each of several limits.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

static void say(const char *what, int result) {
    printf("%s: %s\n", what, result < 0 ? strerror(errno) : "done");
    fflush(stdout);
}

static void same(const char *what, int fd, const char *path) {
    struct stat by_fd, by_path;
    if (fd < 0 || fstat(fd, &by_fd) || stat(path, &by_path)) {
        say(what, -1);
        return;
    }
    int one = by_fd.st_dev == by_path.st_dev && by_fd.st_ino == by_path.st_ino;
    printf("%s: %s file, %o\n", what, one ? "the same" : "another", by_fd.st_mode);
    fflush(stdout);
}

// The descriptor 5 was opened by the program before.
static void inherited(void) {
    same("inherited", 5, "f");
    say("ftruncate", ftruncate(5, 3));
    say("fallocate", posix_fallocate(5, 0, 10) ? -1 : 0);
    say("fsync", fsync(5));
    say("fdatasync", fdatasync(5));
    say("syncfs", syncfs(5));
    say("fchmod", fchmod(5, 0640));
    say("fchown", fchown(5, getuid(), getgid()));
    struct timespec times[2] = {{1, 0}, {2, 0}};
    say("futimens", futimens(5, times));
    say("fsetxattr", fsetxattr(5, "user.a", "b", 1, 0) < 0 && errno != EOPNOTSUPP ? -1 : 0);
    struct stat now;
    fstat(5, &now);
    printf("%ld bytes, %o, of %ld\n", (long)now.st_size, now.st_mode, (long)now.st_mtime);
    same("by /dev/fd", open("/dev/fd/5", O_RDONLY), "f");
    same("by /proc", open("/proc/self/fd/5", O_RDWR), "f");
    int again = open("/proc/self/fd/5", O_RDWR);
    say("ftruncate of that", ftruncate(again, 4));
    lseek(5, 0, SEEK_SET);
    say("clone", ioctl(5, FICLONE, 0) < 0 && errno == EFAULT ? -1 : 0);
    int left = 0, block = 0, on = 1;
    say("FIONREAD", ioctl(again, FIONREAD, &left));
    say("FIGETBSZ", ioctl(again, FIGETBSZ, &block));
    say("FIONBIO", ioctl(again, FIONBIO, &on));
    printf("%d left, %d, %d\n", left, block > 0, fcntl(again, F_GETFL) & O_NONBLOCK);
    fflush(stdout);
}

static void fifo(void) {
    mkfifo("p", 0600);
    if (fork() == 0) {
        int to = open("p", O_WRONLY);
        same("writing end", to, "p");
        _exit(write(to, "x", 1) != 1);
    }
    int from = open("p", O_RDONLY);
    char byte;
    wait(NULL);
    same("reading end", from, "p");
    printf("%ld\n", (long)read(from, &byte, 1));
    say("fifo cut", ftruncate(from, 0));
    say("fifo changed", fchmod(from, 0644));
    same("changed", from, "p");
    close(from);
}

// Runs this program once more, with `how` as its argument.
static void run(char *self, char *how, void (*first)(void)) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (first)
            first();
        execl(self, self, how, NULL);
        say("execl", -1);
        _exit(1);
    }
    int status;
    waitpid(child, &status, 0);
    printf("%s ended with %d\n", how, status);
}

static void small_files(void) {
    struct rlimit limit = {3, 3};
    setrlimit(RLIMIT_FSIZE, &limit);
}

static void few_descriptors(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 20;
    setrlimit(RLIMIT_NOFILE, &limit);
    errno = 0;
    printf("beyond: %d\n", dup2(1, 20) < 0 && errno == EBADF);
    fflush(stdout);
}

// A filter that knows no memfd_create, as filters that are older than it.
static void filtered(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {4, code};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

int main(int argc, char **argv) {
    // The names of this program and its files are the names in the first one's directory.
    if (argc > 1) {
        if (strcmp(argv[1], "inherited") == 0)
            inherited();
        else if (strcmp(argv[1], "few") == 0) {
            // All but ours is closed, and one more program is run.
            syscall(SYS_close_range, 3, ~0U, 0);
            execl(argv[0], argv[0], "last", NULL);
        }
        same("here", open("f", O_RDWR), "f");
        return 0;
    }
    int fd = open("f", O_RDWR | O_CREAT | O_TRUNC, 0600);
    write(fd, "hello", 5);
    if (fd != 5) {
        dup2(fd, 5);
        close(fd);
    }
    run(argv[0], "inherited", NULL);
    fifo();
    run(argv[0], "small", small_files);
    run(argv[0], "few", few_descriptors);
    run(argv[0], "filtered", filtered);
    int fds = open("script", O_RDWR | O_CREAT, 0600);
    write(fds, "#!/bin/sh\necho run\n", 19);
    close(fds);
    char *args[] = {"script", NULL}, *none[] = {NULL};
    say("a file that may not be run", fexecve(open("script", O_PATH), args, none));
    return 0;
}
