/* Programs that have nothing in common but a file map it, and see each other; read(2) and write(2) are
 * of the same bytes. One that is killed loses nothing. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEN (5 * 65536)
#define ROUNDS 2000

extern char **environ;
static char self[4096];

struct page {
    _Atomic int turn, ready, count;
    char text[64];
};

static pid_t start(const char *step) {
    char *argv[] = {self, (char *)step, NULL};
    pid_t child = -1;
    posix_spawn(&child, self, NULL, NULL, argv, environ);
    return child;
}

static void *map(int fd, int protection, off_t at, size_t len) {
    void *got = mmap(0, len, protection, MAP_SHARED, fd, at);
    if (got == MAP_FAILED) perror("mmap"), exit(1);
    return got;
}

/* Counts in turns with another program. */
static int turns(int own) {
    int fd = open("f", O_RDWR);
    struct page *page = map(fd, PROT_READ | PROT_WRITE, 65536, 4096);
    close(fd);
    page->ready++;
    for (int i = 0; i < ROUNDS; i++) {
        while (page->turn != own) sched_yield();
        page->count++, page->turn = !own;
    }
    return 0;
}

static int stores(void) {
    int fd = open("f", O_RDWR);
    struct page *page = map(fd, PROT_READ | PROT_WRITE, 0, LEN);
    strcpy(page->text, "of one that is killed");
    page->ready++;
    for (;;) pause();
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    readlink("/proc/self/exe", self, sizeof self - 1);
    if (argc > 1) return argv[1][0] == 's' ? stores() : turns(argv[1][0] == '1');
    char text[64] = "";
    int fd = open("f", O_RDWR | O_CREAT, 0600), reader = open("f", O_RDONLY), status;
    ftruncate(fd, LEN);
    pid_t one = start("0"), other = start("1");
    waitpid(one, &status, 0), printf("%d ", status), waitpid(other, &status, 0), printf("%d\n", status);
    struct page *page = map(fd, PROT_READ | PROT_WRITE, 65536, 4096), *all = map(reader, PROT_READ, 0, LEN);
    printf("counted %d %d\n", page->count, ((struct page *)((char *)all + 65536))->count);
    munmap(page, 4096);
    pwrite(fd, "written", 8, 100);
    printf("%s, ", (char *)all + 100);
    /* Killed with what it has stored; nobody else has it mapped for writing. */
    pid_t killed = start("s");
    while (!*(volatile int *)&all->ready) usleep(1000);
    pread(reader, text, sizeof text, offsetof(struct page, text));
    printf("%s, ", text);
    kill(killed, SIGKILL), waitpid(killed, NULL, 0);
    printf("%s\n", all->text);
    printf("%d %d\n", mprotect(all, LEN, PROT_READ | PROT_WRITE), mmap(0, 4096, PROT_WRITE, MAP_SHARED, reader, 0) == MAP_FAILED);
    munmap(all, LEN);
    memset(text, 0, sizeof text), pread(reader, text, sizeof text, offsetof(struct page, text));
    printf("%s\n", text);
    /* What is cut off is gone, also where it is mapped; what comes after it is zeros. */
    char *bytes = map(fd, PROT_READ | PROT_WRITE, 0, LEN);
    memset(bytes, 'x', LEN);
    truncate("f", 70000), truncate("f", LEN);
    printf("%d %d %d\n", bytes[69999], bytes[70000], bytes[LEN - 1]);
    int again = open("f", O_RDWR | O_APPEND);
    write(again, "appended", 8);
    struct stat st;
    fstat(fd, &st);
    printf("%ld %d\n", (long)st.st_size, bytes[0]);
    /* Beyond the mapping, in one that grows. */
    bytes = mremap(bytes, LEN, LEN + 65536, MREMAP_MAYMOVE);
    printf("%.8s\n", bytes + LEN);
    memcpy(bytes + LEN, "grown", 5);
    munmap(bytes, LEN + 65536);
    memset(text, 0, sizeof text), pread(fd, text, 20, LEN);
    printf("%s\n", text);
    /* A file without a name keeps what is mapped; the last to go takes it along. */
    bytes = map(fd, PROT_READ | PROT_WRITE, 0, 4096);
    unlink("f");
    strcpy(bytes, "nameless");
    if (fork() == 0) strcpy(bytes + 100, "child"), _exit(0);
    wait(NULL);
    memset(text, 0, sizeof text), pread(fd, text, 9, 0), printf("%s ", text);
    pread(fd, text, 9, 100), printf("%s\n", text);
    return 0;
}
