/* Shared mappings of one file see each other, also across a fork; what grows keeps what was written. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEN 65536

int main(void) {
    int protection = PROT_READ | PROT_WRITE;
    char text[32] = {0};
    int fd = open("f", O_RDWR | O_CREAT, 0600);
    if (ftruncate(fd, LEN) != 0)
        return 1;
    char *one = mmap(0, LEN, protection, MAP_SHARED, fd, 0);
    strcpy(one + 4096, "one");
    int again = open("f", O_RDWR);
    char *two = mmap(0, LEN, protection, MAP_SHARED, again, 0);
    char *part = mmap(0, 8192, PROT_READ, MAP_SHARED, again, 4096);
    char *place = mmap(0, LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *fixed = mmap(place, LEN, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    printf("%s %s %s %d\n", two + 4096, part, fixed + 4096, fixed == place);
    strcpy(two + 8192, "two");
    printf("%s %s\n", one + 8192, part + 4096);
    if (fork() == 0) {
        strcpy(one + 12288, "child");
        _exit(0);
    }
    wait(0);
    printf("%s %s\n", one + 12288, two + 12288);
    strcpy(fixed, "fixed");
    msync(one, LEN, MS_SYNC);
    pread(again, text, 6, 0);
    puts(text);
    if (ftruncate(fd, 4 * LEN) != 0)
        return 2;
    char *large = mremap(one, LEN, 4 * LEN, MREMAP_MAYMOVE);
    strcpy(large + 3 * LEN, "far");
    printf("%s %s\n", large + 4096, large);
    munmap(large, 4 * LEN);
    pread(fd, text, 4, 3 * LEN);
    puts(text);
    /* Replaced by memory of nothing: it is the file's no more. */
    mmap(fixed, LEN, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    strcpy(fixed, "none");
    munmap(two, LEN);
    munmap(part, 8192);
    pread(fd, text, 6, 0);
    puts(text);
    munmap(fixed, LEN);
    pread(fd, text, 6, 0);
    puts(text);
    return 0;
}
