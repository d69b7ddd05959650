/* Children that share open files with their parent are killed at any moment: in the middle of a read,
 * which holds the position that both share. What the parent has stays as it was. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

static char bytes[4096];

static void check(int good, const char *what, int round) {
    if (!good) printf("%s in round %d: %s\n", what, round, strerror(errno));
}

static void work(int fd, int dir) {
    for (;;) {
        lseek(fd, 0, SEEK_SET);
        read(fd, bytes, sizeof bytes);
        char name[32];
        sprintf(name, "own%d", getpid());
        int own = openat(dir, name, O_RDWR | O_CREAT, 0600);
        write(own, "x", 1);
        close(own);
        unlinkat(dir, name, 0);
    }
}

int main(void) {
    setvbuf(stdout, NULL, _IONBF, 0);
    int fd = open("shared", O_RDWR | O_CREAT, 0600), dir = open(".", O_DIRECTORY);
    int unnamed = open("unnamed", O_RDWR | O_CREAT, 0600);
    check(write(fd, bytes, sizeof bytes) == sizeof bytes && write(unnamed, "kept", 4) == 4, "write", -1);
    check(unlink("unnamed") == 0 && flock(fd, LOCK_EX) == 0, "unlink and flock", -1);
    for (int round = 0; round < 40; round++) {
        pid_t child = fork();
        if (child == 0) {
            if (round % 3 == 0) close(unnamed);
            work(fd, dir);
        }
        usleep(500 + round * 137 % 3000);
        kill(child, SIGKILL);
        /* The child has not been waited for yet in half of the rounds. */
        if (round % 2) waitpid(child, NULL, 0);
        check(lseek(fd, 0, SEEK_SET) == 0 && read(fd, bytes, 64) == 64, "read", round);
        check(pwrite(fd, "y", 1, 0) == 1, "write", round);
        char kept[5] = "";
        check(pread(unnamed, kept, 4, 0) == 4 && strcmp(kept, "kept") == 0, "unnamed", round);
        int other = open("shared", O_RDWR);
        check(flock(other, LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK, "lock", round);
        close(other);
        if (round % 2 == 0) waitpid(child, NULL, 0);
    }
    system("rm -f own*");
    puts("done");
    return 0;
}
