/* Open files go from one program to the next, also those without a name: with their position, flags
 * and locks. Each step is a program of its own, which the one before executes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static char self[4096];

static int run(const char *step, const char *rest) {
    char *argv[] = {self, (char *)step, (char *)rest, NULL};
    pid_t child;
    if (posix_spawn(&child, self, NULL, NULL, argv, environ) != 0) return -1;
    int status;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
}

static const char *record_lock(int fd) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 4};
    if (fcntl(fd, F_GETLK, &lock) != 0) return strerrorname_np(errno);
    return lock.l_type == F_UNLCK ? "free" : lock.l_pid == getppid() ? "held by its parent" : "held";
}

/* What another program sees of the locks on files that it opens by itself. */
static int look(void) {
    int a = open("locked", O_RDWR), b = open("flocked", O_RDWR), c = open("dropped", O_RDWR);
    printf("record lock %s, flock %d, lock of a file that was closed %s\n", record_lock(a),
           flock(b, LOCK_EX | LOCK_NB) == 0 ? 0 : errno, record_lock(c));
    return 0;
}

static int nameless(const char *name, int flags) {
    int fd = open(name, flags | O_RDWR | O_CREAT | O_EXCL, 0600);
    unlink(name);
    return fd;
}

static int first(void) {
    int file = nameless("a", 0), appends = nameless("b", O_APPEND), closed = nameless("c", O_CLOEXEC);
    write(file, "0123456789", 10), write(appends, "end", 3), lseek(file, 4, SEEK_SET);
    int again = dup2(file, 20), dir, path;
    mkdir("gone", 0700), dir = open("gone", O_DIRECTORY), chdir("gone"), rmdir("../gone");
    fchdir(dir), path = open("/proc/self/fd/3", O_PATH);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 4};
    chdir(getenv("HERE"));
    int locked = open("locked", O_RDWR | O_CREAT, 0600), flocked = open("flocked", O_RDWR | O_CREAT, 0600);
    int dropped = open("dropped", O_RDWR | O_CREAT, 0600), other = open("dropped", O_RDWR | O_CLOEXEC);
    fcntl(locked, F_SETLK, &lock), fcntl(dropped, F_SETLK, &lock), flock(flocked, LOCK_EX);
    fchdir(dir);
    char numbers[99];
    sprintf(numbers, "%d %d %d %d %d %d %d", file, appends, closed, again, dir, locked, flocked);
    setenv("STEP", "1", 1);
    /* One that fails changes nothing. */
    execl("/no/such/program", "x", NULL);
    printf("a program that is not there: %s\n", strerrorname_np(errno));
    fflush(stdout);
    execl(self, self, "second", numbers, NULL);
    return 1;
}

static int second(const char *numbers) {
    int file, appends, closed, again, dir, locked, flocked;
    sscanf(numbers, "%d %d %d %d %d %d %d", &file, &appends, &closed, &again, &dir, &locked, &flocked);
    char text[32] = "";
    struct stat st, here;
    fstat(file, &st), stat(".", &here);
    printf("%d links, %ld bytes, position %ld, directory with %d links\n", (int)st.st_nlink, (long)st.st_size,
           (long)lseek(file, 0, SEEK_CUR), (int)here.st_nlink);
    read(file, text, 3);
    printf("read %s, then at %ld; the other descriptor at %ld\n", text, (long)lseek(file, 0, SEEK_CUR),
           (long)lseek(again, 0, SEEK_CUR));
    lseek(appends, 0, SEEK_SET), write(appends, "more", 4);
    memset(text, 0, sizeof text), pread(appends, text, 20, 0);
    printf("%s, flags %x; closed %s\n", text, fcntl(appends, F_GETFL) & O_APPEND,
           fcntl(closed, F_GETFD) < 0 ? strerrorname_np(errno) : "not");
    printf("a name in a directory that is gone: %s\n", openat(dir, "x", O_CREAT | O_RDWR, 0600) < 0 ? strerrorname_np(errno) : "made");
    chdir(getenv("HERE"));
    fflush(stdout), run("look", "");
    /* The lock goes with any descriptor of the file. */
    close(open("locked", O_RDONLY)), close(flocked);
    fflush(stdout), run("look", "");
    sprintf(text, "%d", file);
    fflush(stdout);
    printf("a third program says %d\n", run("third", text));
    read(file, text, 1);
    printf("and has moved the position to %ld\n", (long)lseek(file, 0, SEEK_CUR));
    fflush(stdout);
    /* A shell, with a file that has no name as its input. */
    lseek(file, 2, SEEK_SET), dup2(file, 0);
    return system("bash -c 'cat; echo; cat <<< here; exec 5<>made; rm made; echo through >&5; exec 6</proc/self/fd/5; cat <&6'");
}

static int third(const char *number) {
    char text[2] = "";
    lseek(atoi(number), 8, SEEK_SET), read(atoi(number), text, 1);
    return text[0];
}

/* A program that executes itself over and over with the same file, and others that it leaves. */
static int over(const char *rest) {
    int round = 0, fd = -1;
    sscanf(rest, "%d %d", &round, &fd);
    if (fd < 0) fd = nameless("kept", 0), ftruncate(fd, 65536);
    char text[32], byte[2] = "";
    sprintf(text, "left%d", round);
    if (round % 2) nameless(text, O_CLOEXEC), stat("nothing", &(struct stat){0});
    pwrite(fd, "x", 1, round), lseek(fd, 1, SEEK_CUR);
    sprintf(text, "%d %d", round + 1, fd);
    if (round < 150) execl(self, self, "over", text, NULL);
    pread(fd, byte, 1, 100);
    printf("%s at %ld\n", byte, (long)lseek(fd, 0, SEEK_CUR));
    return 0;
}

/* Files in use: the file system says how many. It takes a moment to hear of a process that was killed. */
static long inodes(void) {
    struct statvfs st;
    statvfs(".", &st);
    return st.f_files - st.f_ffree;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    readlink("/proc/self/exe", self, sizeof self - 1);
    const char *step = argc > 1 ? argv[1] : "", *rest = argc > 2 ? argv[2] : "";
    if (!strcmp(step, "look")) return look();
    if (!strcmp(step, "first")) return first();
    if (!strcmp(step, "second")) return second(rest);
    if (!strcmp(step, "third")) return third(rest);
    if (!strcmp(step, "over")) return over(rest);
    if (!strcmp(step, "sleep")) return write(1, "", 1), pause();
    char here[4096];
    setenv("HERE", getcwd(here, sizeof here), 1), setenv("TMPDIR", here, 1);
    printf("steps: %d\n", run("first", ""));
    long before = inodes();
    int leaks = getenv("COUNTS") != NULL;
    printf("over: %d\n", run("over", "0 -1"));
    /* Killed, with a file that it took over. */
    for (int round = 0; round < 20; round++) {
        int ends[2];
        pipe(ends);
        pid_t child = fork();
        if (child == 0) {
            nameless("killed", 0), dup2(ends[1], 1);
            execl(self, self, "sleep", NULL);
        }
        char byte;
        close(ends[1]), read(ends[0], &byte, 1), close(ends[0]);
        kill(child, SIGKILL), waitpid(child, NULL, 0);
    }
    for (int wait = 0; wait < 500 && leaks && inodes() > before; wait++) usleep(10000);
    if (leaks && inodes() > before) printf("%ld files are left\n", inodes() - before);
    return 0;
}
