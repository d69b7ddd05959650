/* Files in memory by the interface of inodes, for libfuse 3, or with -DTWO for libfuse 2. The declarations are written from the ABI.
 *
 * The environment chooses: LOOP, one of `one`, `many` and `own`; LATE, to answer reads from another thread; SIZE, the bytes of the
 * structure of operations; BUFFERS, to take written data as a list. Extended attributes are commands: see `set`. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#ifdef TWO
struct info { int flags; unsigned long fh_old; int writepage; unsigned bits; uint64_t fh, lock_owner; };
#else
struct info { int flags; unsigned bits, padding; uint64_t fh, lock_owner; uint32_t events; };
#endif
struct args { int argc; char **argv; int allocated; };
struct entry { uint64_t ino, generation; struct stat attr; double attr_timeout, entry_timeout; };
struct buf { size_t size; int flags; void *mem; int fd; off_t pos; };
struct bufs { size_t count, idx, off; struct buf buf[1]; };
struct ctx { uid_t uid; gid_t gid; pid_t pid; mode_t umask; };
struct forgotten { uint64_t ino, nlookup; };
typedef void *req_t;

int fuse_reply_err(req_t, int);
void fuse_reply_none(req_t);
int fuse_reply_entry(req_t, const struct entry *);
int fuse_reply_create(req_t, const struct entry *, const struct info *);
int fuse_reply_attr(req_t, const struct stat *, double);
int fuse_reply_open(req_t, const struct info *);
int fuse_reply_write(req_t, size_t);
int fuse_reply_buf(req_t, const char *, size_t);
int fuse_reply_data(req_t, struct bufs *, int);
int fuse_reply_xattr(req_t, size_t);
size_t fuse_add_direntry(req_t, char *, size_t, const char *, const struct stat *, off_t);
size_t fuse_buf_size(const struct bufs *);
ssize_t fuse_buf_copy(struct bufs *, struct bufs *, int);
void *fuse_req_userdata(req_t);
const struct ctx *fuse_req_ctx(req_t);
void fuse_req_interrupt_func(req_t, void (*)(req_t, void *), void *);
int fuse_req_interrupted(req_t);
int fuse_set_signal_handlers(void *);
void fuse_remove_signal_handlers(void *);
int fuse_session_loop(void *);
int fuse_session_exited(void *);
void fuse_session_destroy(void *);
/* The first argument is a session, or with libfuse 2 a channel. */
int fuse_lowlevel_notify_inval_inode(void *, uint64_t, off_t, off_t);
int fuse_lowlevel_notify_store(void *, uint64_t, off_t, struct bufs *, int);
int fuse_lowlevel_notify_retrieve(void *, uint64_t, size_t, off_t, void *);
#ifdef TWO
void *fuse_mount(const char *, struct args *);
void fuse_unmount(const char *, void *);
void *fuse_lowlevel_new(struct args *, const void *, size_t, void *);
void fuse_session_add_chan(void *, void *);
void fuse_session_remove_chan(void *);
int fuse_session_loop_mt(void *);
int fuse_chan_recv(void **, char *, size_t);
size_t fuse_chan_bufsize(void *);
void fuse_session_process(void *, const char *, size_t, void *);
#else
void *fuse_session_new(struct args *, const void *, size_t, void *);
int fuse_session_mount(void *, const char *);
void fuse_session_unmount(void *);
int fuse_session_loop_mt_31(void *, int);
int fuse_session_receive_buf(void *, struct buf *);
void fuse_session_process_buf(void *, const struct buf *);
#endif

enum { MOST = 32, ROOM = 4 << 20 };
static struct file { char name[64]; char *data; size_t len; mode_t mode; } files[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *notified;
static req_t kept;
static char retrieved[64], answer[64];
static int destroyed, late;
static pthread_t looping;

static struct file *of(uint64_t ino) { return ino >= 2 && ino < 2 + MOST && files[ino - 2].data ? &files[ino - 2] : NULL; }

static int attr(uint64_t ino, struct stat *st)
{
	struct file *file = of(ino);
	memset(st, 0, sizeof *st);
	st->st_ino = ino;
	st->st_nlink = 1;
	st->st_mode = ino == 1 ? S_IFDIR | 0755 : file ? S_IFREG | file->mode : 0;
	st->st_size = file ? file->len : 0;
	return st->st_mode != 0;
}

static uint64_t find(const char *name)
{
	for (int i = 0; i < MOST; i++)
		if (files[i].data && !strcmp(files[i].name, name))
			return i + 2;
	return 0;
}

static void enter(uint64_t ino, struct entry *entry)
{
	memset(entry, 0, sizeof *entry);
	entry->ino = ino;
	entry->attr_timeout = entry->entry_timeout = 10;
	attr(ino, &entry->attr);
}

static void lookup(req_t req, uint64_t parent, const char *name)
{
	struct entry entry;
	uint64_t ino = find(name);
	if (fuse_req_userdata(req) != files || fuse_req_ctx(req)->uid != getuid() || parent != 1)
		fuse_reply_err(req, EIO);
	else if (!ino)
		fuse_reply_err(req, ENOENT);
	else {
		enter(ino, &entry);
		fuse_reply_entry(req, &entry);
	}
}

static void forget(req_t req, uint64_t ino, uint64_t count) { fuse_reply_none(req); }
static void forget_multi(req_t req, size_t count, struct forgotten *all) { fuse_reply_none(req); }

static void getattr(req_t req, uint64_t ino, struct info *info)
{
	struct stat st;
	attr(ino, &st) ? fuse_reply_attr(req, &st, 10) : fuse_reply_err(req, ENOENT);
}

static void setattr(req_t req, uint64_t ino, struct stat *to, int fields, struct info *info)
{
	struct file *file = of(ino);
	struct stat st;
	if (!file || (fields & 8 && to->st_size > ROOM)) {
		fuse_reply_err(req, EINVAL);
		return;
	}
	if (fields & 8) {
		if (to->st_size > file->len)
			memset(file->data + file->len, 0, to->st_size - file->len);
		file->len = to->st_size;
	}
	if (fields & 1)
		file->mode = to->st_mode & 07777;
	attr(ino, &st);
	fuse_reply_attr(req, &st, 10);
}

static uint64_t make(const char *name, mode_t mode)
{
	uint64_t ino = 0;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < MOST && !ino; i++)
		if (!files[i].data && (files[i].data = malloc(ROOM))) {
			snprintf(files[i].name, sizeof files[i].name, "%s", name);
			files[i].len = 0;
			files[i].mode = mode & 07777;
			ino = i + 2;
		}
	pthread_mutex_unlock(&lock);
	return ino;
}

static void mknod_(req_t req, uint64_t parent, const char *name, mode_t mode, dev_t dev)
{
	struct entry entry;
	uint64_t ino = S_ISREG(mode) ? make(name, mode) : 0;
	enter(ino, &entry);
	ino ? fuse_reply_entry(req, &entry) : fuse_reply_err(req, ENOSPC);
}

static void create(req_t req, uint64_t parent, const char *name, mode_t mode, struct info *info)
{
	struct entry entry;
	uint64_t ino = make(name, mode);
	enter(ino, &entry);
	info->fh = ino;
	ino ? fuse_reply_create(req, &entry, info) : fuse_reply_err(req, ENOSPC);
}

static void unlink_(req_t req, uint64_t parent, const char *name)
{
	struct file *file = of(find(name));
	if (!file) {
		fuse_reply_err(req, ENOENT);
		return;
	}
	free(file->data);
	file->data = NULL;
	fuse_reply_err(req, 0);
}

static void open_(req_t req, uint64_t ino, struct info *info)
{
	struct file *file = of(ino);
	if (file && info->flags & O_TRUNC)
		file->len = 0;
	info->fh = ino;
#ifdef TWO
	info->bits |= 2;
#else
	info->bits |= 4;
#endif
	file ? fuse_reply_open(req, info) : fuse_reply_err(req, ENOENT);
}

struct reading { req_t req; struct file *file; size_t size; off_t off; };

static void *answer_read(void *argument)
{
	struct reading *r = argument;
	struct bufs bufs = { 1, 0, 0, { { 0, 0, NULL, -1, 0 } } };
	if (late)
		usleep(2000);
	if (r->off < r->file->len) {
		size_t left = r->file->len - r->off;
		bufs.buf[0].size = left < r->size ? left : r->size;
		bufs.buf[0].mem = r->file->data + r->off;
	}
	fuse_reply_data(r->req, &bufs, 0);
	free(r);
	return NULL;
}

static void read_(req_t req, uint64_t ino, size_t size, off_t off, struct info *info)
{
	struct reading *r = malloc(sizeof *r);
	pthread_t thread;
	if (getenv("LOOP") && !strcmp(getenv("LOOP"), "one") && !pthread_equal(pthread_self(), looping))
		abort();
	if (!of(ino) || info->fh != ino) {
		fuse_reply_err(req, EBADF);
		return;
	}
	*r = (struct reading){ req, of(ino), size, off };
	if (!late)
		answer_read(r);
	else if (pthread_create(&thread, NULL, answer_read, r) == 0)
		pthread_detach(thread);
}

static void write_(req_t req, uint64_t ino, const char *data, size_t size, off_t off, struct info *info)
{
	struct file *file = of(ino);
	if (!file || off + size > ROOM) {
		fuse_reply_err(req, EFBIG);
		return;
	}
	if (off > file->len)
		memset(file->data + file->len, 0, off - file->len);
	memcpy(file->data + off, data, size);
	if (off + size > file->len)
		file->len = off + size;
	fuse_reply_write(req, size);
}

static void write_buf(req_t req, uint64_t ino, struct bufs *from, off_t off, struct info *info)
{
	size_t size = fuse_buf_size(from);
	char *data = malloc(size);
	struct bufs to = { 1, 0, 0, { { size, 0, data, -1, 0 } } };
	if (fuse_buf_copy(&to, from, 0) == (ssize_t)size)
		write_(req, ino, data, size, off, info);
	else
		fuse_reply_err(req, EIO);
	free(data);
}

static void readdir_(req_t req, uint64_t ino, size_t size, off_t off, struct info *info)
{
	char room[65536];
	size_t used = 0, len;
	struct stat st;
	if (size > sizeof room)
		size = sizeof room;
	for (off_t i = off; i < MOST; i++) {
		if (!attr(i + 2, &st))
			continue;
		len = fuse_add_direntry(req, room + used, size - used, files[i].name, &st, i + 1);
		if (len > size - used)
			break;
		used += len;
	}
	fuse_reply_buf(req, room, used);
}

static void interrupted(req_t req, void *data) { fuse_reply_err(req, EINTR); }

static void set(req_t req, uint64_t ino, const char *name, const char *value, size_t size, int flags)
{
	struct file *file = of(ino);
	struct bufs bufs = { 1, 0, 0, { { size, 0, (void *)value, -1, 0 } } };
	int code = 0;
	if (!strcmp(name, "user.hidden") && file) /* The kernel does not learn of the change. */
		memcpy(file->data, value, size);
	else if (!strcmp(name, "user.inval"))
		code = -fuse_lowlevel_notify_inval_inode(notified, ino, 0, 0);
	else if (!strcmp(name, "user.store"))
		code = -fuse_lowlevel_notify_store(notified, ino, 0, &bufs, 0);
	else if (!strcmp(name, "user.retrieve"))
		code = -fuse_lowlevel_notify_retrieve(notified, ino, 16, 0, answer);
	else if (!strcmp(name, "user.slow")) {
		fuse_req_interrupt_func(req, interrupted, NULL);
		return;
	} else if (!strcmp(name, "user.never")) {
		kept = req;
		return;
	} else if (!strcmp(name, "user.twice")) {
		fuse_reply_err(req, 0);
		snprintf(answer, sizeof answer, "%d %d %d", fuse_reply_err(req, EIO), fuse_reply_write(req, 3),
			 fuse_req_ctx(req) == NULL && fuse_req_userdata(req) == NULL && !fuse_req_interrupted(req));
		return;
	} else
		code = EOPNOTSUPP;
	fuse_reply_err(req, code);
}

static void get(req_t req, uint64_t ino, const char *name, size_t size)
{
	const char *value = !strcmp(name, "user.answer") ? answer : !strcmp(name, "user.retrieved") ? retrieved : NULL;
	if (!value)
		fuse_reply_err(req, ENODATA);
	else if (!size)
		fuse_reply_xattr(req, strlen(value));
	else
		fuse_reply_buf(req, value, strlen(value));
}

static void retrieve_reply(req_t req, void *cookie, uint64_t ino, off_t off, struct bufs *from)
{
	char data[17] = "";
	struct bufs to = { 1, 0, 0, { { 16, 0, data, -1, 0 } } };
	fuse_buf_copy(&to, from, 0);
	snprintf(retrieved, sizeof retrieved, "%d %s", cookie == answer, data);
	fuse_reply_none(req);
}

static void destroy(void *data) { destroyed += data == files; }

#ifdef TWO
static int own_loop(void *session)
{
	size_t size = fuse_chan_bufsize(notified);
	char *room = malloc(size);
	while (!fuse_session_exited(session)) {
		void *chan = notified;
		int len = fuse_chan_recv(&chan, room, size);
		if (len == -EINTR)
			continue;
		if (len <= 0)
			return len;
		fuse_session_process(session, room, len, chan);
	}
	return 0;
}
#else
static int own_loop(void *session)
{
	struct buf buf = { 0 };
	while (!fuse_session_exited(session)) {
		int len = fuse_session_receive_buf(session, &buf);
		if (len == -EINTR)
			continue;
		if (len <= 0)
			return len;
		fuse_session_process_buf(session, &buf);
	}
	free(buf.mem);
	return 0;
}
#endif

int main(int argc, char **argv)
{
	void *ops[64] = { 0 };
	ops[1] = destroy; ops[2] = lookup; ops[3] = forget; ops[4] = getattr; ops[5] = setattr; ops[7] = mknod_;
	ops[9] = unlink_; ops[14] = open_; ops[15] = read_; ops[16] = write_; ops[21] = readdir_; ops[25] = set;
	ops[26] = get; ops[30] = create; ops[37] = retrieve_reply; ops[38] = forget_multi;
	if (getenv("BUFFERS"))
		ops[36] = write_buf;
	const char *loop = getenv("LOOP") ? getenv("LOOP") : "many", *size = getenv("SIZE");
	struct args args = { argc - 1, argv, 0 };
	char *mountpoint = realpath(argv[argc - 1], NULL);
	int code;
	late = getenv("LATE") != NULL;
	looping = pthread_self();
	size_t bytes = size ? strtoul(size, NULL, 10) : 39 * sizeof(void *);
#ifdef TWO
	void *chan = fuse_mount(mountpoint, &args);
	void *session = chan ? fuse_lowlevel_new(&args, ops, bytes, files) : NULL;
	if (!session)
		return 1;
	fuse_session_add_chan(session, notified = chan);
#else
	void *session = notified = fuse_session_new(&args, ops, bytes, files);
	if (!session || fuse_session_mount(session, mountpoint))
		return 1;
#endif
	fuse_set_signal_handlers(session);
#ifdef TWO
	code = !strcmp(loop, "one") ? fuse_session_loop(session) : !strcmp(loop, "own") ? own_loop(session) : fuse_session_loop_mt(session);
	fuse_remove_signal_handlers(session);
	fuse_session_remove_chan(chan);
	fuse_session_destroy(session);
	fuse_unmount(mountpoint, chan);
#else
	code = !strcmp(loop, "one") ? fuse_session_loop(session) : !strcmp(loop, "own") ? own_loop(session) : fuse_session_loop_mt_31(session, 1);
	fuse_remove_signal_handlers(session);
	fuse_session_unmount(session);
	if (kept)
		printf("unmounted %d\n", fuse_reply_err(kept, 0) != 0);
	fuse_session_destroy(session);
#endif
	printf("%d %d %d\n", code, destroyed, kept ? fuse_reply_err(kept, 0) : 0);
	return 0;
}
