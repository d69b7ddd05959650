/* A child of fork(2) of a program with a mount: `fork SOURCE served|private|refused|cached`.
 *
 * served: the child changes the files, and its parent sees that. private: it changes its own copy. refused: each of its calls fails with
 * ENOTCONN, and nothing is lost or harmed. cached: so do those that do not only ask for names and attributes, which shared memory tells. Whatever the child does, the parent goes on. */
#include "check.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void put(const char *path, const char *text) {
    int fd;
    CHECK((fd = defuse_open(path, O_RDWR | O_CREAT | O_TRUNC, 0644)) >= 0);
    CHECK(defuse_write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    CHECK(defuse_fsync(fd) == 0 && defuse_close(fd) == 0);
}

static void has(const char *path, const char *expected) {
    char text[64] = {0};
    int fd;
    CHECK((fd = defuse_open(path, O_RDONLY, 0)) >= 0);
    CHECK(defuse_read(fd, text, sizeof text - 1) == (ssize_t)strlen(expected));
    CHECK(strcmp(text, expected) == 0 && defuse_close(fd) == 0);
}

/* All kinds of calls, on what the parent has opened and on names. */
static void is_refused(int fd, int asks) {
    char text[64];
    struct stat st;
    FAILS(defuse_read(fd, text, 1), ENOTCONN);
    FAILS(defuse_pwrite(fd, "x", 1, 0), ENOTCONN);
    FAILS(defuse_fsync(fd), ENOTCONN);
    FAILS(defuse_ftruncate(fd, 1), ENOTCONN);
    FAILS(defuse_open("m:/kept", O_RDONLY, 0), ENOTCONN);
    FAILS(defuse_open("m:/new", O_RDWR | O_CREAT, 0644), ENOTCONN);
    if (asks) {
        FAILS(defuse_fstat(fd, &st), ENOTCONN);
        FAILS(defuse_stat("m:/kept", &st), ENOTCONN);
        FAILS(defuse_stat("m:/missing", &st), ENOTCONN);
        FAILS(defuse_stat("m:/d/inner", &st), ENOTCONN);
    }
    FAILS(defuse_mkdir("m:/new", 0755), ENOTCONN);
    FAILS(defuse_unlink("m:/kept"), ENOTCONN);
    FAILS(defuse_rename("m:/kept", "m:/other"), ENOTCONN);
    CHECK(defuse_opendir("m:/") == NULL && errno == ENOTCONN);
    CHECK(defuse_close(fd) == 0);
    CHECK(defuse_unmount("m:", 0) == 0);
}

static int child(int fd, const char *rights) {
    alarm(60);
    if (strcmp(rights, "refused") == 0 || strcmp(rights, "cached") == 0) {
        is_refused(fd, strcmp(rights, "refused") == 0);
    } else {
        put("m:/child", "of the child");
        CHECK(defuse_pwrite(fd, "K", 1, 0) == 1 && defuse_fsync(fd) == 0 && defuse_close(fd) == 0);
        has("m:/kept", "Kept");
        has("m:/child", "of the child");
    }
    /* What it mounts itself is its own. */
    CHECK(defuse_mount("own:", "memory:") == 0);
    put("own:/file", "own");
    has("own:/file", "own");
    return 0;
}

int main(int argc, char **argv) {
    struct stat st;
    int fd, status, round;
    CHECK(argc == 3);
    CHECK(defuse_mount("m:", argv[1]) == 0);
    CHECK(defuse_mkdir("m:/d", 0755) == 0);
    put("m:/d/inner", "inner");
    put("m:/kept", "kept");
    for (round = 0; round < 3; round++) {
        put("m:/kept", "kept");
        CHECK((fd = defuse_open("m:/kept", O_RDWR, 0)) >= 0);
        CHECK(defuse_stat("m:/kept", &st) == 0 && defuse_stat("m:/d/inner", &st) == 0);
        FAILS(defuse_stat("m:/missing", &st), ENOENT);
        fflush(NULL);
        pid_t pid = fork();
        if (pid == 0)
            /* With the exit handlers of the library. */
            exit(child(fd, argv[2]));
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        if (strcmp(argv[2], "served") == 0) {
            has("m:/kept", "Kept");
            has("m:/child", "of the child");
            CHECK(defuse_unlink("m:/child") == 0);
        } else {
            has("m:/kept", "kept");
            FAILS(defuse_stat("m:/child", &st), ENOENT);
            FAILS(defuse_stat("m:/new", &st), ENOENT);
        }
        CHECK(defuse_pwrite(fd, "later", 5, 0) == 5 && defuse_fsync(fd) == 0);
        has("m:/kept", "later");
        CHECK(defuse_close(fd) == 0);
    }
    CHECK(defuse_unmount("m:", 0) == 0);
    puts("passed");
    return 0;
}
