// SPDX-License-Identifier: Apache-2.0

/* A library that moves the time of day, for tests/clock_jumps.rs. It adds the 8 bytes in the file
 * $BALLAST_TEST_CLOCK_OFFSET, seconds as a little-endian integer, to CLOCK_REALTIME. The file is
 * mapped, so that the test moves the clock of running processes. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef int (*clock_function)(clockid_t, struct timespec *);

static clock_function clock_of_system;
static const volatile int64_t *offset;

__attribute__((constructor)) static void start(void) {
    clock_of_system = (clock_function)dlsym(RTLD_NEXT, "clock_gettime");
    const char *name = getenv("BALLAST_TEST_CLOCK_OFFSET");
    int file = name == NULL ? -1 : open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED)
        offset = page;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = clock_of_system(clock, time);
    if (result == 0 && offset != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        time->tv_sec += *offset;
        if (time->tv_sec < 0)
            time->tv_sec = 0;
    }
    return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL)
        *out = now.tv_sec;
    return now.tv_sec;
}
