/* Calls by the functions that a program imports, and nothing that the C library does inside of
 * itself: what is served where that library is not known. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define SAY(call) do { errno = 0; long got = (call); printf("%s: %ld %s\n", #call, got, got < 0 ? strerrorname_np(errno) : ""); } while (0)

static int look(const char *path) {
    struct stat st;
    return stat(path, &st) ? -1 : (int)(st.st_size * 10 + st.st_nlink);
}

static int fd;

static void *work(void *at) {
    char byte = 'A' + (long)at;
    pwrite(fd, &byte, 1, 100 + (long)at);
    return NULL;
}

int main(int count, char **arguments) {
    char text[64] = "";
    if (count > 1) {
        /* After exec: the descriptor, its position, the working directory. */
        ssize_t len = read(3, text, 5);
        dprintf(1, "executed: %zd %.5s %d\n", len, text, look("d/h") > 0);
        return 0;
    }
    SAY(mkdir("d", 0755));
    SAY(mkdir("d", 0755));
    fd = open("d/f", O_RDWR | O_CREAT | O_EXCL, 0640);
    printf("lowest %d\n", fd);
    SAY(write(fd, "hello world", 11));
    SAY(open("d/f", O_CREAT | O_EXCL, 0640));
    SAY(lseek(fd, 6, SEEK_SET));
    SAY(read(fd, text, 60));
    printf("%s\n", text);
    SAY(pread(fd, text, 5, 0));
    struct iovec parts[2] = {{"ab", 2}, {"cd", 2}};
    SAY(writev(fd, parts, 2));
    SAY(ftruncate(fd, 20));
    SAY(look("d/f"));
    SAY(link("d/f", "d/h"));
    SAY(symlink("f", "d/l"));
    SAY(readlink("d/l", text, 60));
    SAY(rename("d/f", "d/g"));
    SAY(look("d/f"));
    SAY(look("d/h"));
    SAY(access("d/g", X_OK));
    SAY(chmod("d/g", 0700));
    SAY(access("d/g", R_OK | W_OK));
    int dir = open("d", O_RDONLY | O_DIRECTORY);
    SAY(unlinkat(dir, "l", 0));
    SAY(faccessat(dir, "g", F_OK, 0));
    SAY(rmdir("d"));
    SAY(chdir("d"));
    SAY(look("g"));
    SAY(chdir(".."));
    SAY(fchdir(dir));
    SAY(look("g"));
    SAY(chdir(".."));
    close(dir);
    int copy = dup(fd);
    SAY(lseek(copy, 3, SEEK_SET));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(fcntl(copy, F_GETFL) & O_ACCMODE);
    SAY(flock(fd, LOCK_EX | LOCK_NB));
    SAY(close(copy));
    SAY(close(copy));
    char *at = mmap(NULL, 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    printf("mapped %.5s\n", at);
    at[0] = 'J';
    SAY(msync(at, 20, MS_SYNC));
    SAY(munmap(at, 20));
    SAY(pread(fd, text, 5, 0));
    printf("%.5s\n", text);
    struct pollfd ready = {fd, POLLIN | POLLOUT, 0};
    SAY(poll(&ready, 1, 0));
    SAY(syscall(SYS_truncate, "d/g", 15L));
    SAY(look("d/g"));
    SAY(fsync(fd));
    pthread_t threads[8];
    for (long i = 0; i < 8; i++) pthread_create(&threads[i], NULL, work, (void *)i);
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
    SAY(pread(fd, text, 8, 100));
    printf("%.8s\n", text);
    for (int i = 0; i < 20; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            char line[8];
            sprintf(line, "%02d\n", i);
            _exit(write(fd, line, 3) != 3);
        }
        int status;
        waitpid(pid, &status, 0);
        if (status) printf("child %d: %x\n", i, status);
    }
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(lseek(fd, 0, SEEK_SET));
    /* It has another name by now; what is executed finds an open file by that which it was opened by. */
    close(fd);
    fd = open("d/g", O_RDWR);
    if (dup2(fd, 3) != 3) return 1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        char *again[] = {"again", "x", NULL};
        execv(arguments[0], again);
        _exit(9);
    }
    int status;
    waitpid(pid, &status, 0);
    printf("ended %x, position %ld\n", status, (long)lseek(fd, 0, SEEK_CUR));
    SAY(unlink("d/h"));
    SAY(unlink("d/g"));
    SAY(rmdir("d"));
    return 0;
}
