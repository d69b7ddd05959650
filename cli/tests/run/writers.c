// Four processes write to one file through shared mappings: a counter under a lock, records of their own
// in pages that they share, and what others write by pwrite(2). Prints what is in the file in the end.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WRITERS = 4, RECORDS = 100, SIZE = 64 << 10 };
struct head { unsigned count; };
struct record { unsigned writer, number; };

static void append(int me, int executed) {
    int fd = open("db", O_RDWR), lock = open("lock", O_RDWR | O_CREAT, 0644);
    struct stat st;
    // Not a word of a file that cannot be mapped: that is an error, and no loss.
    char *at = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) printf("%s\n", strerror(errno)), exit(1);
    struct head *head = (void *)at;
    struct record *records = (void *)(at + 4096);
    for (int i = 0; i < RECORDS; i++) {
        flock(lock, LOCK_EX);
        records[head->count] = (struct record){me, i};
        head->count++;
        flock(lock, LOCK_UN);
        // And a row of its own, in a page that all of them write to.
        at[32768 + i * WRITERS + me] = 'a' + me;
        if (i % 25 == me) {
            char byte = 'A' + me;
            pwrite(fd, &byte, 1, 40960 + i * WRITERS + me);
            if (at[40960 + i * WRITERS + me] != byte) printf("a write is not seen in a mapping\n");
            at[45056 + i * WRITERS + me] = byte;
            char seen = 0;
            pread(fd, &seen, 1, 45056 + i * WRITERS + me);
            if (seen != byte) printf("a mapping is not seen by a read\n");
        }
    }
    _exit(0);
}

int main(int argc, char **argv) {
    static char self[4096];
    self[readlink("/proc/self/exe", self, sizeof self - 1)] = 0;
    if (argc == 2) append(atoi(argv[1]), 1);
    int fd = open("db", O_RDWR | O_CREAT | O_TRUNC, 0644);
    ftruncate(fd, SIZE);
    for (int i = 0; i < WRITERS; i++) {
        if (fork() == 0) {
            char number[8];
            snprintf(number, sizeof number, "%d", i);
            // Half of them are other programs.
            if (i % 2) execl(self, self, number, (char *)0);
            append(i, 0);
        }
    }
    int status, failed = 0;
    while (wait(&status) > 0) failed += status != 0;
    static char bytes[SIZE];
    printf("%d failed, read %d\n", failed, (int)pread(fd, bytes, SIZE, 0));
    struct head *head = (void *)bytes;
    struct record *records = (void *)(bytes + 4096);
    unsigned next[WRITERS] = {0}, wrong = 0, rows = 0;
    for (unsigned i = 0; i < head->count && i < WRITERS * RECORDS; i++) {
        unsigned writer = records[i].writer % WRITERS;
        wrong += records[i].number != next[writer]++;
    }
    for (int i = 0; i < RECORDS * WRITERS; i++) rows += bytes[32768 + i] == 'a' + i % WRITERS;
    printf("%u records, %u out of order, %u rows\n", head->count, wrong, rows);
    // What was made for reading may be made writable, where the file is open for it.
    char *late = mmap(0, 4096, PROT_READ, MAP_SHARED, fd, 0);
    int done = late == MAP_FAILED ? errno : mprotect(late, 4096, PROT_READ | PROT_WRITE);
    if (!done) late[100] = 'x';
    char byte = 0;
    pread(fd, &byte, 1, 100);
    printf("%d %c\n", done, byte);
    munmap(late, 4096);
    late = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    late[101] = 'y';
    pread(fd, &byte, 1, 101);
    printf("private: %c %d\n", late[100], byte);
    int reads = open("db", O_RDONLY);
    void *none = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, reads, 0);
    printf("%d\n", none == MAP_FAILED ? errno : 0);
    none = mmap(0, 4096, PROT_READ, MAP_SHARED, fd, 100);
    printf("%d\n", none == MAP_FAILED ? errno : 0);
    // The order of the records is not the same twice.
    unlink("db");
    return 0;
}
