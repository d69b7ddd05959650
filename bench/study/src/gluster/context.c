/* storage/posix keeps lists in the context of its process, which the programs of GlusterFS initialise, but libgfapi does
 * not: without this, it crashes there. Loaded before libgfapi, for the benchmark only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <glusterfs/glusterfs.h>

glusterfs_ctx_t *glusterfs_ctx_new(void)
{
    glusterfs_ctx_t *(*make)(void) = dlsym(RTLD_NEXT, "glusterfs_ctx_new");
    glusterfs_ctx_t *ctx = make ? make() : NULL;
    if (!ctx)
        return NULL;
    /* The library initialises this neighbour of the lists: it shows that the headers are those of the library. */
    if (ctx->volfile_list.next != &ctx->volfile_list) {
        fputs("the headers of libglusterfs-dev do not fit the library\n", stderr);
        exit(1);
    }
    pthread_mutex_init(&ctx->fd_lock, NULL);
    pthread_cond_init(&ctx->fd_cond, NULL);
    INIT_LIST_HEAD(&ctx->janitor_fds);
    pthread_mutex_init(&ctx->xl_lock, NULL);
    pthread_cond_init(&ctx->xl_cond, NULL);
    INIT_LIST_HEAD(&ctx->diskth_xl);
    return ctx;
}
