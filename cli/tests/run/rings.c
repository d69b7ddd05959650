// Rings of io_uring in a run: what takes a path is refused, whatever the ring was set up with, and what
// acts on descriptors works. Prints a line for everything that is not so.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#ifndef IORING_SETUP_NO_MMAP
#define IORING_SETUP_NO_MMAP (1U << 14)
#endif
#ifndef IORING_SETUP_REGISTERED_FD_ONLY
#define IORING_SETUP_REGISTERED_FD_ONLY (1U << 15)
#endif
#define USE_REGISTERED (1U << 31)

struct ring {
    int fd, indexed;
    struct io_uring_params p;
    unsigned *head, *tail, *mask, *array, *cqhead, *cqtail, *cqmask, *sqflags;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
};

static int reg(struct ring *r, unsigned op, void *arg, unsigned n) {
    return syscall(SYS_io_uring_register, r->fd, op | (r->indexed ? USE_REGISTERED : 0), arg, n);
}

static int set_up(struct ring *r, unsigned flags) {
    memset(r, 0, sizeof *r);
    r->p.flags = flags;
    r->p.sq_thread_idle = 50;
    r->indexed = !!(flags & IORING_SETUP_REGISTERED_FD_ONLY);
    char *ring, *sqes;
    if (flags & IORING_SETUP_NO_MMAP) {
        ring = aligned_alloc(4096, 4096), sqes = aligned_alloc(4096, 4096);
        memset(ring, 0, 4096), memset(sqes, 0, 4096);
        memcpy((char *)&r->p.cq_off + 32, &ring, 8);
        memcpy((char *)&r->p.sq_off + 32, &sqes, 8);
    }
    r->fd = syscall(SYS_io_uring_setup, 8, &r->p);
    if (r->fd < 0) return -errno;
    if (r->p.flags != flags) printf("flags %x became %x\n", flags, r->p.flags);
    if (!(flags & IORING_SETUP_NO_MMAP)) {
        ring = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, r->fd, IORING_OFF_SQ_RING);
        sqes = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, r->fd, IORING_OFF_SQES);
        if (ring == MAP_FAILED || sqes == MAP_FAILED) return perror("mmap"), -1;
    }
    r->head = (void *)(ring + r->p.sq_off.head), r->tail = (void *)(ring + r->p.sq_off.tail);
    r->mask = (void *)(ring + r->p.sq_off.ring_mask), r->array = (void *)(ring + r->p.sq_off.array);
    r->sqflags = (void *)(ring + r->p.sq_off.flags);
    r->cqhead = (void *)(ring + r->p.cq_off.head), r->cqtail = (void *)(ring + r->p.cq_off.tail);
    r->cqmask = (void *)(ring + r->p.cq_off.ring_mask), r->cqes = (void *)(ring + r->p.cq_off.cqes);
    r->sqes = (void *)sqes;
    return 0;
}

static int enter(struct ring *r, unsigned submit, unsigned wait, unsigned flags) {
    flags |= IORING_ENTER_GETEVENTS | (r->indexed ? 1U << 4 : 0);
    if (r->p.flags & IORING_SETUP_SQPOLL) flags |= IORING_ENTER_SQ_WAKEUP;
    return syscall(SYS_io_uring_enter, r->fd, submit, wait, flags, 0, 0);
}

// Submits one operation and waits for it.
static int run(struct ring *r, struct io_uring_sqe sqe) {
    unsigned tail = *r->tail, at = tail & *r->mask;
    r->sqes[at] = sqe;
    r->array[at] = at;
    __atomic_store_n(r->tail, tail + 1, __ATOMIC_RELEASE);
    if (enter(r, 1, 1, 0) < 0) return -errno;
    unsigned head = *r->cqhead;
    if (head == __atomic_load_n(r->cqtail, __ATOMIC_ACQUIRE)) return -ENODATA;
    int result = r->cqes[head & *r->cqmask].res;
    __atomic_store_n(r->cqhead, head + 1, __ATOMIC_RELEASE);
    return result;
}

#define SQE(OP, FD, ...) (struct io_uring_sqe){.opcode = OP, .fd = FD, __VA_ARGS__}
#define ADDR(P) .addr = (unsigned long)(P)

static void want(const char *setup, const char *what, int got, int wanted) {
    if (got != wanted) printf("%s: %s: %d (%s) and not %d\n", setup, what, got, strerror(got < 0 ? -got : 0), wanted);
}

// Opens, makes and removes by path, in the working directory.
static void paths(const char *setup, struct ring *r) {
    static char statx[256], value[16];
    struct { unsigned long long flags, mode, resolve; } how = {O_CREAT | O_RDWR, 0644, 0};
    struct sockaddr_un address = {AF_UNIX, "socket"};
    int s = socket(AF_UNIX, SOCK_STREAM, 0), here = AT_FDCWD;
    struct { const char *name; struct io_uring_sqe sqe; } all[] = {
        {"openat", SQE(IORING_OP_OPENAT, here, ADDR("escaped1"), .len = 0644, .open_flags = O_CREAT | O_RDWR)},
        {"openat into a slot", SQE(IORING_OP_OPENAT, here, ADDR("escaped2"), .len = 0644, .open_flags = O_CREAT | O_RDWR, .file_index = 1)},
        {"openat2", SQE(IORING_OP_OPENAT2, here, ADDR("escaped3"), .len = sizeof how, .off = (unsigned long)&how)},
        {"openat2 into a slot", SQE(IORING_OP_OPENAT2, here, ADDR("escaped4"), .len = sizeof how, .off = (unsigned long)&how, .file_index = 1)},
        {"statx", SQE(IORING_OP_STATX, here, ADDR("inside"), .len = 0x7ff, .off = (unsigned long)statx)},
        {"mkdirat", SQE(IORING_OP_MKDIRAT, here, ADDR("escaped5"), .len = 0755)},
        {"unlinkat", SQE(IORING_OP_UNLINKAT, here, ADDR("victim"))},
        {"renameat", SQE(IORING_OP_RENAMEAT, here, ADDR("victim"), .len = here, .off = (unsigned long)"escaped6")},
        {"linkat", SQE(IORING_OP_LINKAT, here, ADDR("victim"), .len = here, .off = (unsigned long)"escaped7")},
        {"symlinkat", SQE(IORING_OP_SYMLINKAT, here, ADDR("victim"), .off = (unsigned long)"escaped8")},
        {"setxattr", SQE(IORING_OP_SETXATTR, 0, ADDR("user.a"), .len = 1, .off = (unsigned long)"v", .addr3 = (unsigned long)"victim")},
        {"getxattr", SQE(IORING_OP_GETXATTR, 0, ADDR("user.a"), .len = 1, .off = (unsigned long)value, .addr3 = (unsigned long)"victim")},
        {"connect", SQE(IORING_OP_CONNECT, s, ADDR(&address), .off = sizeof address)},
    };
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) want(setup, all[i].name, run(r, all[i].sqe), -EACCES);
    // BIND, which older headers do not have.
    int result = run(r, (struct io_uring_sqe){.opcode = 56, .fd = s, ADDR(&address), .off = sizeof address});
    if (result != -EINVAL) want(setup, "bind", result, -EACCES);
    close(s);
}

static void descriptors(const char *setup, struct ring *r) {
    int fd = open("inside", O_RDWR | O_CREAT | O_TRUNC, 0644);
    char room[8] = "";
    want(setup, "write", run(r, SQE(IORING_OP_WRITE, fd, ADDR("text"), .len = 4)), 4);
    want(setup, "read", run(r, SQE(IORING_OP_READ, fd, ADDR(room), .len = 8)), 4);
    want(setup, "fsync", run(r, SQE(IORING_OP_FSYNC, fd)), 0);
    want(setup, "contents", strcmp(room, "text"), 0);
    struct stat st;
    want(setup, "size", stat("inside", &st) ? -errno : st.st_size, 4);
    // A number that the ring gives up may belong to another object.
    want(setup, "close", run(r, SQE(IORING_OP_CLOSE, fd)), 0);
    want(setup, "closed", fstat(fd, &st) ? -errno : 0, -EBADF);
    int ends[2];
    want(setup, "pipe", pipe(ends), 0);
    want(setup, "another file", fstat(ends[0], &st) ? -errno : S_ISFIFO(st.st_mode), 1);
    close(ends[0]), close(ends[1]);
}

static void probe(const char *setup, struct ring *r) {
    static char room[16 + 256 * 8];
    struct io_uring_probe *p = (void *)room;
    memset(room, 0, sizeof room);
    want(setup, "probe", reg(r, IORING_REGISTER_PROBE, p, 256), 0);
    int wanted[] = {IORING_OP_READV, IORING_OP_WRITE, IORING_OP_CLOSE, IORING_OP_ACCEPT};
    int hidden[] = {IORING_OP_OPENAT, IORING_OP_STATX, IORING_OP_UNLINKAT, IORING_OP_CONNECT};
    for (int i = 0; i < 4; i++) {
        want(setup, "supported", p->ops[wanted[i]].flags & IO_URING_OP_SUPPORTED, 1);
        want(setup, "hidden", p->ops[hidden[i]].flags & IO_URING_OP_SUPPORTED, 0);
    }
}

static void use(const char *setup, unsigned flags, int expect) {
    struct ring r;
    int made = set_up(&r, flags);
    if (made < 0) {
        if (made != -EINVAL || !expect) want(setup, "set up", made, 0);
        return;
    }
    if (flags & IORING_SETUP_R_DISABLED) want(setup, "enable", reg(&r, IORING_REGISTER_ENABLE_RINGS, 0, 0), 0);
    if (flags & IORING_SETUP_R_DISABLED) want(setup, "once more", reg(&r, IORING_REGISTER_ENABLE_RINGS, 0, 0) ? -errno : 0, -EBADFD);
    int slots[4] = {-1, -1, -1, -1};
    want(setup, "files", reg(&r, IORING_REGISTER_FILES, slots, 4), 0);
    int personality = reg(&r, IORING_REGISTER_PERSONALITY, 0, 0);
    want(setup, "personality", personality > 0, 1);
    probe(setup, &r);
    paths(setup, &r);
    descriptors(setup, &r);
}

// A program with restrictions of its own, among them what is not to be had.
static void own_restrictions(void) {
    const char *setup = "own restrictions";
    struct ring r;
    want(setup, "set up", set_up(&r, IORING_SETUP_R_DISABLED), 0);
    struct io_uring_restriction all[] = {
        {.opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_OPENAT},
        {.opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_WRITE},
        {.opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = IORING_REGISTER_ENABLE_RINGS},
    };
    want(setup, "register", reg(&r, IORING_REGISTER_RESTRICTIONS, all, 3), 0);
    want(setup, "register again", reg(&r, IORING_REGISTER_RESTRICTIONS, all, 3) ? -errno : 0, -EBUSY);
    want(setup, "enable", reg(&r, IORING_REGISTER_ENABLE_RINGS, 0, 0), 0);
    int fd = open("inside", O_RDWR | O_CREAT | O_TRUNC, 0644);
    want(setup, "write", run(&r, SQE(IORING_OP_WRITE, fd, ADDR("text"), .len = 4)), 4);
    want(setup, "read", run(&r, SQE(IORING_OP_READ, fd, ADDR(all), .len = 4)), -EACCES);
    want(setup, "openat", run(&r, SQE(IORING_OP_OPENAT, AT_FDCWD, ADDR("escaped"), .len = 0644, .open_flags = O_CREAT | O_RDWR)), -EACCES);
    close(fd);
}

int main(void) {
    close(open("victim", O_CREAT | O_WRONLY, 0644));
    use("plain", 0, 0);
    use("disabled", IORING_SETUP_R_DISABLED, 0);
    use("polled", IORING_SETUP_SQPOLL, 0);
    use("polled and disabled", IORING_SETUP_SQPOLL | IORING_SETUP_R_DISABLED, 0);
    use("single issuer", IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 1);
    use("without a descriptor", IORING_SETUP_NO_MMAP | IORING_SETUP_REGISTERED_FD_ONLY, 1);
    own_restrictions();
    struct io_uring_params p = {.flags = 1U << 31};
    want("unknown flags", "set up", syscall(SYS_io_uring_setup, 8, &p) < 0 ? -errno : 0, -EINVAL);
    puts("done");
    return 0;
}
