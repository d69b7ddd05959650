/* Ends with stores in a mapping for which the file system has no space. */
#include "check.h"

#include <sys/mman.h>

enum { LEN = 8 << 20 };

int main(void) {
    int fd;
    char *at;
    CHECK(defuse_mount("mem:", "memory:,size=4M") == 0);
    CHECK((fd = defuse_open("mem:/holes", O_RDWR | O_CREAT, 0600)) >= 0);
    CHECK(defuse_ftruncate(fd, LEN) == 0);
    at = defuse_mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(at != MAP_FAILED);
    memset(at, 'd', LEN);
    FAILS(defuse_msync(at, LEN, MS_SYNC), ENOSPC);
    FAILS(defuse_msync(at, LEN, MS_SYNC), ENOSPC);
    return 0;
}
