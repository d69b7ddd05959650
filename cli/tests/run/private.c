/* Private mappings are of the file: what was not stored to is what the file has, also after MADV_DONTNEED. No mapping goes
 * beyond the end of its file, however long it is and whoever fills it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096

static sigjmp_buf back;
static void on_bus(int number) { siglongjmp(back, 1); }

/* The byte at `at`, or 'B' for a SIGBUS. */
static char look(volatile char *at) { return sigsetjmp(back, 1) ? 'B' : *at ? *at : '0'; }

int main(int count, char **arguments) {
    signal(SIGBUS, on_bus);
    static char bytes[4 * PAGE];
    memset(bytes, 'f', sizeof bytes);
    int fd = open("f", O_RDWR | O_CREAT, 0600), reader = open("f", O_RDONLY);
    write(fd, bytes, sizeof bytes - 100);
    char *own = mmap(0, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, reader, 0), text[2] = "";
    own[0] = 'o', own[PAGE] = 'o';
    pread(fd, text, 1, 0);
    printf("stored %c, in the file %c, end %c, beyond %c\n", own[0], text[0], look(own + 4 * PAGE - 1), look(own + 4 * PAGE));
    madvise(own, PAGE, MADV_DONTNEED);
    printf("dropped %c, kept %c\n", own[0], own[PAGE]);
    if (count == 1 && fork() == 0) {
        own[2 * PAGE] = 'c';
        madvise(own + PAGE, PAGE, MADV_DONTNEED);
        printf("child: dropped %c, stored %c\n", own[PAGE], own[2 * PAGE]), fflush(stdout), _exit(0);
    }
    wait(0);
    printf("parent: %c %c\n", own[PAGE], own[2 * PAGE]);
    if (count == 1) {
        pwrite(fd, "w", 1, 3 * PAGE), pwrite(fd, "w", 1, PAGE);
        printf("written %c, stored before %c\n", own[3 * PAGE], own[PAGE]);
        char *shared = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 2 * PAGE);
        shared[0] = 's';
        printf("stored by a shared one %c\n", own[2 * PAGE]);
        munmap(shared, PAGE);
        pwrite(fd, "g", 1, 5 * PAGE);
        printf("grown %c %c %c\n", look(own + 5 * PAGE), look(own + 4 * PAGE), look(own + 6 * PAGE));
        ftruncate(fd, 7 * PAGE);
        printf("longer %c %c\n", look(own + 6 * PAGE), look(own + 7 * PAGE));
    }
    munmap(own, 8 * PAGE);
    /* Far beyond the end, filled as far as there is something. */
    char *far = mmap(0, 64L << 30, PROT_READ, MAP_PRIVATE | MAP_POPULATE, reader, 0);
    printf("%c %c\n", look(far), look(far + (32L << 30)));
    mlock(far, 64L << 30);
    munmap(far, 64L << 30);
    if (count == 1) {
        far = mmap(0, 64L << 30, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
        printf("%c %c\n", look(far), look(far + (32L << 30)));
        madvise(far, 64L << 30, MADV_POPULATE_WRITE);
        munmap(far, 64L << 30);
    }
    return 0;
}
