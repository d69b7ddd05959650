/* Threads share mounts, descriptors and a context. */
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>

enum { THREADS = 16, ROUNDS = 200, RECORD = 64 };

static int shared, aio;

struct end {
    sem_t told;
    int64_t result;
};

static void tell(const defuse_aio_event *event) {
    struct end *end = (struct end *)(uintptr_t)event->data;
    end->result = event->result;
    sem_post(&end->told);
}

/* Creates, fills, checks, renames and removes its own files, and appends to the shared one. */
static void *work(void *argument) {
    int self = (int)(intptr_t)argument;
    char name[64], other[64], record[RECORD], back[RECORD], text[64];
    const char *mount = self % 2 ? "mem:" : "/below";
    struct stat st;
    defuse_dir *dir;
    struct end end;
    CHECK(sem_init(&end.told, 0, 0) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        int fd, copy;
        snprintf(name, sizeof name, "%s/%d-%d", mount, self, round);
        snprintf(other, sizeof other, "%s/%d-moved", mount, self);
        memset(record, 'A' + self, sizeof record);
        CHECK((fd = defuse_open(name, O_RDWR | O_CREAT | O_EXCL, 0600)) >= 0);
        CHECK(defuse_write(fd, record, sizeof record) == sizeof record);
        CHECK((copy = defuse_dup(fd)) >= 0 && defuse_lseek(copy, 0, SEEK_SET) == 0);
        CHECK(defuse_read(fd, back, sizeof back) == sizeof back && memcmp(back, record, RECORD) == 0);
        CHECK(defuse_close(fd) == 0 && defuse_fstat(copy, &st) == 0 && st.st_size == RECORD);
        CHECK(defuse_close(copy) == 0 && defuse_rename(name, other) == 0 && defuse_unlink(other) == 0);
        CHECK(defuse_write(shared, record, RECORD) == RECORD);
        /* errno and the text of the last error belong to this thread. */
        snprintf(text, sizeof text, "%s/none-%d", mount, self);
        FAILS(defuse_open(text, O_RDONLY), ENOENT);
        CHECK(strstr(defuse_last_error(), text) != NULL);
        if (round % 50 == 0) {
            CHECK((dir = defuse_opendir(mount[0] == 'm' ? "mem:/" : mount)) != NULL);
            while (defuse_readdir(dir) != NULL) {
            }
            CHECK(defuse_closedir(dir) == 0);
            snprintf(text, sizeof text, "own%d:", self);
            CHECK(defuse_mount(text, "memory:") == 0 && defuse_unmount(text, 0) == 0);
        }
        defuse_aio_op op = {DEFUSE_AIO_READ, shared, back, RECORD, 0, (uint64_t)(uintptr_t)&end, tell};
        while (defuse_aio_submit(aio, &op, 1) != 1) {
            if (errno != EAGAIN)
                exit(2);
            sched_yield();
        }
        CHECK(sem_wait(&end.told) == 0 && end.result == RECORD && back[0] == 'z' && back[RECORD - 1] == 'z');
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS];
    char source[4096], record[RECORD];
    struct stat st;
    CHECK(argc == 2 && defuse_mount("mem:", "memory:") == 0);
    snprintf(source, sizeof source, "passthrough:%s", argv[1]);
    CHECK(defuse_mount("/below", source) == 0 && (aio = defuse_aio_create(THREADS / 2, 0)) >= 0);
    CHECK((shared = defuse_open("mem:/shared", O_RDWR | O_CREAT | O_APPEND, 0600)) >= 0);
    CHECK(defuse_write(shared, memset(record, 'z', RECORD), RECORD) == RECORD);
    for (intptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    /* No appended data is lost or torn. */
    CHECK(defuse_fstat(shared, &st) == 0 && st.st_size == (off_t)RECORD * (THREADS * ROUNDS + 1));
    for (off_t at = 0; at < st.st_size; at += RECORD) {
        CHECK(defuse_pread(shared, record, RECORD, at) == RECORD);
        for (int i = 1; i < RECORD; i++)
            CHECK(record[i] == record[0]);
    }
    CHECK(defuse_aio_destroy(aio) == 0 && defuse_close(shared) == 0);
    CHECK(defuse_unmount("mem:", 0) == 0 && defuse_unmount("/below", 0) == 0);
    puts("passed");
    return 0;
}
