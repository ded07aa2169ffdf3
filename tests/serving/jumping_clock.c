// A wall clock that a test sets: LD_PRELOAD it with a file of one `long` in CLOCK_OFFSET, which are
// seconds to add. Only the wall clock jumps, as it does when an administrator or NTP sets it.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset;

__attribute__((constructor)) static void open_offset(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    void *page = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) abort();
    offset = page;
    close(file);
}

static long jump(void) { return offset ? *offset : 0; }  // other constructors may come first

int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = syscall(SYS_clock_gettime, clock, at);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        at->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    int result = syscall(SYS_gettimeofday, at, zone);
    if (result == 0 && at) at->tv_sec += jump();
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
