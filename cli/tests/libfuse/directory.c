/* A directory as a file system, for libfuse 3, or with -DTWO for libfuse 2. The declarations are written from the ABI.
 *
 * The environment chooses: DIRECTORY, the directory; WAIT, a file that the program creates when `destroy` was called; HARD, to
 * remove open files at once; ALONE, to fail on other threads than the first one. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

struct context { void *fuse; uid_t uid; gid_t gid; pid_t pid; void *data; mode_t umask; };
#ifdef TWO
struct info { int flags; unsigned long fh_old; int writepage; unsigned bits; uint64_t fh, lock_owner; };
typedef int (*filler)(void *, const char *, const struct stat *, off_t);
#define FILL(fill, to, name, attr) fill(to, name, attr, 0)
#define INFO
#define FLAGS
struct conn { unsigned major, minor, async_read, max_write, rest[28]; };
#else
struct info { int flags; unsigned bits, padding; uint64_t fh, lock_owner; uint32_t events; };
typedef int (*filler)(void *, const char *, const struct stat *, off_t, int);
#define FILL(fill, to, name, attr) fill(to, name, attr, 0, 0)
#define INFO , struct info *info
#define FLAGS , int flags
struct conn { unsigned major, minor, max_write, rest[29]; };
struct config { int set_gid; unsigned gid; int set_uid; unsigned uid; int set_mode; unsigned umask;
	double entry, negative, attr; int intr, intr_signal, remember, hard_remove, use_ino; };
#endif

struct operations {
	int (*getattr)(const char *, struct stat * INFO);
	int (*readlink)(const char *, char *, size_t);
#ifdef TWO
	void *getdir;
#endif
	int (*mknod)(const char *, mode_t, dev_t);
	int (*mkdir)(const char *, mode_t);
	int (*unlink)(const char *);
	int (*rmdir)(const char *);
	int (*symlink)(const char *, const char *);
#ifdef TWO
	int (*rename)(const char *, const char *);
#else
	int (*rename)(const char *, const char *, unsigned);
#endif
	int (*link)(const char *, const char *);
	int (*chmod)(const char *, mode_t INFO);
	int (*chown)(const char *, uid_t, gid_t INFO);
	int (*truncate)(const char *, off_t INFO);
#ifdef TWO
	void *utime;
#endif
	int (*open)(const char *, struct info *);
	int (*read)(const char *, char *, size_t, off_t, struct info *);
	int (*write)(const char *, const char *, size_t, off_t, struct info *);
	int (*statfs)(const char *, struct statvfs *);
	int (*flush)(const char *, struct info *);
	int (*release)(const char *, struct info *);
	int (*fsync)(const char *, int, struct info *);
	int (*setxattr)(const char *, const char *, const char *, size_t, int);
	int (*getxattr)(const char *, const char *, char *, size_t);
	int (*listxattr)(const char *, char *, size_t);
	int (*removexattr)(const char *, const char *);
	void *opendir;
	int (*readdir)(const char *, void *, filler, off_t, struct info * FLAGS);
	void *releasedir, *fsyncdir;
#ifdef TWO
	void *(*init)(struct conn *);
#else
	void *(*init)(struct conn *, struct config *);
#endif
	void (*destroy)(void *);
	int (*access)(const char *, int);
	int (*create)(const char *, mode_t, struct info *);
#ifdef TWO
	int (*ftruncate)(const char *, off_t, struct info *);
	int (*fgetattr)(const char *, struct stat *, struct info *);
#endif
	void *lock;
	int (*utimens)(const char *, const struct timespec * INFO);
	void *bmap;
#ifdef TWO
	unsigned bits;
#endif
};

int fuse_main_real(int, char **, const struct operations *, size_t, void *);
struct context *fuse_get_context(void);

static const char *root;
static char *full(char *to, const char *path)
{
	snprintf(to, PATH_MAX, "%s%s", root, path);
	return to;
}
#define FULL char buf[PATH_MAX]; const char *at = full(buf, path)
#define DONE(call) return (call) == -1 ? -errno : 0

/* The new file belongs to the caller. */
static int give(const char *at)
{
	struct context *context = fuse_get_context();
	if (context->data != (void *)&root)
		return -EPROTO;
	DONE(lchown(at, context->uid, context->gid));
}

static int d_getattr(const char *path, struct stat *attr INFO)
{
	if (getenv("ALONE") && syscall(SYS_gettid) != getpid())
		return -EXDEV;
#ifndef TWO
	if (info && info->fh)
		DONE(fstat(info->fh, attr));
#endif
	FULL;
	DONE(lstat(at, attr));
}
static int d_readlink(const char *path, char *to, size_t size)
{
	FULL;
	ssize_t len = readlink(at, to, size - 1);
	if (len == -1)
		return -errno;
	to[len] = 0;
	return 0;
}
static int d_mknod(const char *path, mode_t mode, dev_t dev)
{
	FULL;
	return mknod(at, mode, dev) == -1 ? -errno : give(at);
}
static int d_mkdir(const char *path, mode_t mode)
{
	FULL;
	return mkdir(at, mode) == -1 ? -errno : give(at);
}
static int d_unlink(const char *path) { FULL; DONE(unlink(at)); }
static int d_rmdir(const char *path) { FULL; DONE(rmdir(at)); }
static int d_symlink(const char *text, const char *path)
{
	FULL;
	return symlink(text, at) == -1 ? -errno : give(at);
}
#ifdef TWO
static int d_rename(const char *path, const char *to)
{
	char other[PATH_MAX];
	FULL;
	DONE(rename(at, full(other, to)));
}
#else
static int d_rename(const char *path, const char *to, unsigned flags)
{
	char other[PATH_MAX];
	FULL;
	DONE(renameat2(AT_FDCWD, at, AT_FDCWD, full(other, to), flags));
}
#endif
static int d_link(const char *path, const char *to)
{
	char other[PATH_MAX];
	FULL;
	DONE(link(at, full(other, to)));
}
static int d_chmod(const char *path, mode_t mode INFO)
{
	FULL;
	/* libfuse passes the type with the permissions. */
	if (!(mode & S_IFMT))
		return -EPROTO;
	DONE(chmod(at, mode & 07777));
}
static int d_chown(const char *path, uid_t uid, gid_t gid INFO) { FULL; DONE(lchown(at, uid, gid)); }
static int d_truncate(const char *path, off_t size INFO)
{
#ifndef TWO
	if (info && info->fh)
		DONE(ftruncate(info->fh, size));
#endif
	FULL;
	DONE(truncate(at, size));
}
static int d_open(const char *path, struct info *info)
{
	FULL;
	int fd = open(at, info->flags & ~O_NOFOLLOW);
	if (fd == -1)
		return -errno;
	info->fh = fd;
	return 0;
}
static int d_create(const char *path, mode_t mode, struct info *info)
{
	FULL;
	int fd = open(at, info->flags, mode);
	if (fd == -1)
		return -errno;
	info->fh = fd;
	return give(at);
}
static int d_read(const char *path, char *to, size_t size, off_t offset, struct info *info)
{
	ssize_t got = pread(info->fh, to, size, offset);
	return got == -1 ? -errno : got;
}
static int d_write(const char *path, const char *from, size_t size, off_t offset, struct info *info)
{
	ssize_t put = pwrite(info->fh, from, size, offset);
	return put == -1 ? -errno : put;
}
static int d_statfs(const char *path, struct statvfs *facts) { FULL; DONE(statvfs(at, facts)); }
static int d_flush(const char *path, struct info *info) { DONE(close(dup(info->fh))); }
static int d_release(const char *path, struct info *info) { DONE(close(info->fh)); }
static int d_fsync(const char *path, int data, struct info *info)
{
	DONE(data ? fdatasync(info->fh) : fsync(info->fh));
}
static int d_setxattr(const char *path, const char *name, const char *value, size_t size, int flags)
{
	FULL;
	DONE(lsetxattr(at, name, value, size, flags));
}
static int d_getxattr(const char *path, const char *name, char *value, size_t size)
{
	FULL;
	ssize_t len = lgetxattr(at, name, value, size);
	return len == -1 ? -errno : len;
}
static int d_listxattr(const char *path, char *list, size_t size)
{
	FULL;
	ssize_t len = llistxattr(at, list, size);
	return len == -1 ? -errno : len;
}
static int d_removexattr(const char *path, const char *name) { FULL; DONE(lremovexattr(at, name)); }
static int d_readdir(const char *path, void *to, filler fill, off_t offset, struct info *info FLAGS)
{
	FULL;
	DIR *dir = opendir(at);
	struct dirent *entry;
	if (!dir)
		return -errno;
	while ((entry = readdir(dir))) {
		struct stat attr = { .st_ino = entry->d_ino, .st_mode = entry->d_type << 12 };
		/* Every other entry without its type. */
		if (FILL(fill, to, entry->d_name, strlen(entry->d_name) % 2 ? &attr : NULL))
			break;
	}
	closedir(dir);
	return 0;
}
#ifdef TWO
static void *d_init(struct conn *conn)
{
	return conn->major == 7 ? &root : NULL;
}
static int d_fgetattr(const char *path, struct stat *attr, struct info *info) { DONE(fstat(info->fh, attr)); }
static int d_ftruncate(const char *path, off_t size, struct info *info) { DONE(ftruncate(info->fh, size)); }
#else
static void *d_init(struct conn *conn, struct config *config)
{
	config->use_ino = 1;
	config->hard_remove = getenv("HARD") != NULL;
	return conn->major == 7 ? &root : NULL;
}
#endif
static void d_destroy(void *data)
{
	char *wait = getenv("WAIT");
	if (wait && data == (void *)&root)
		close(open(wait, O_CREAT | O_WRONLY, 0600));
}
static int d_access(const char *path, int mask) { FULL; DONE(access(at, mask)); }
static int d_utimens(const char *path, const struct timespec *times INFO)
{
	FULL;
	DONE(utimensat(AT_FDCWD, at, times, AT_SYMLINK_NOFOLLOW));
}

static const struct operations operations = {
	.getattr = d_getattr, .readlink = d_readlink, .mknod = d_mknod, .mkdir = d_mkdir, .unlink = d_unlink,
	.rmdir = d_rmdir, .symlink = d_symlink, .rename = d_rename, .link = d_link, .chmod = d_chmod,
	.chown = d_chown, .truncate = d_truncate, .open = d_open, .read = d_read, .write = d_write,
	.statfs = d_statfs, .flush = d_flush, .release = d_release, .fsync = d_fsync, .setxattr = d_setxattr,
	.getxattr = d_getxattr, .listxattr = d_listxattr, .removexattr = d_removexattr, .readdir = d_readdir,
	.init = d_init, .destroy = d_destroy, .access = d_access, .create = d_create, .utimens = d_utimens,
#ifdef TWO
	.ftruncate = d_ftruncate, .fgetattr = d_fgetattr,
#endif
};

int main(int argc, char **argv)
{
	umask(0);
	root = getenv("DIRECTORY");
	return root ? fuse_main_real(argc, argv, &operations, sizeof operations, NULL) : 99;
}
