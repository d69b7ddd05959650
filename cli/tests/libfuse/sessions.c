/* Functions without their objects, and a character device: what the library does not serve. */
#include <stddef.h>
#include <stdio.h>

struct args { int argc; char **argv; int allocated; };
void *fuse_session_new(struct args *, const void *, size_t, void *);
int fuse_session_mount(void *, const char *);
int fuse_session_loop(void *);
int fuse_session_fd(void *);
void fuse_session_destroy(void *);
int cuse_lowlevel_main(int, char **, const void *, const void *, void *);
long fuse_fs_open(void *, const char *, void *);
long fuse_reply_err(void *, int);

int main(int argc, char **argv)
{
	void *none[60] = { 0 };
	struct args empty = { 0, argv, 0 };
	void *session = fuse_session_new(&empty, none, sizeof none, NULL);
	printf("%d %d %d %d\n", session == NULL, fuse_session_mount(session, "/"), fuse_session_loop(session),
	       fuse_session_fd(session));
	fuse_session_destroy(session);
	printf("%d %d %d\n", cuse_lowlevel_main(argc, argv, none, none, NULL) != 0, (int)fuse_fs_open(NULL, "/", NULL),
	       (int)fuse_reply_err(NULL, 5));
	return 0;
}
