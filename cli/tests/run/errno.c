/* Calls that succeed leave errno alone: those of a lock that is waited for, too. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(const char *what, int is_done) {
    if (!is_done)
        printf("%s failed\n", what), exit(1);
    if (errno != 77)
        printf("%s changed errno to %d\n", what, errno);
    errno = 77;
}

int main(void) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    struct stat seen;
    char text[8];
    if (errno != 0)
        printf("errno is %d at the beginning\n", errno);
    errno = 77;
    int fd = open("f", O_RDWR | O_CREAT, 0644);
    check("open", fd >= 0);
    check("write", write(fd, "text", 4) == 4);
    check("pread", pread(fd, text, 4, 0) == 4);
    check("fstat", fstat(fd, &seen) == 0);
    check("mkdir", mkdir("d", 0755) == 0);
    check("rename", rename("d", "e") == 0);
    check("rmdir", rmdir("e") == 0);
    check("mmap", mmap(0, 4096, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED);
    int ready[2], told;
    check("pipe", pipe(ready) == 0);
    pid_t child = fork();
    if (child == 0) {
        if (fcntl(fd, F_SETLKW, &lock) != 0)
            _exit(1);
        write(ready[1], "x", 1);
        usleep(300000);
        _exit(0);
    }
    check("fork", child > 0);
    check("read", read(ready[0], text, 1) == 1);
    check("fcntl", fcntl(fd, F_SETLKW, &lock) == 0);
    check("wait", waitpid(child, &told, 0) == child && told == 0);
    int other = open("f", O_RDWR);
    check("flock", flock(fd, LOCK_EX) == 0);
    child = fork();
    if (child == 0) {
        errno = 77;
        int own = open("f", O_RDWR);
        check("flock of a child", flock(own, LOCK_EX) == 0);
        fflush(stdout);
        _exit(0);
    }
    usleep(300000);
    check("unlock", flock(fd, LOCK_UN) == 0);
    check("wait", waitpid(child, &told, 0) == child && told == 0);
    check("close", close(other) == 0 && close(fd) == 0);
    puts("done");
    return 0;
}
