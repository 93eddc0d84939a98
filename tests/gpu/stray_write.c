// SPDX-License-Identifier: Apache-2.0

/* A library that makes one worker write into the weights, for tests/gpu/stray_write.rs. The test
 * preloads it into all processes of a fleet. In a worker, the library waits until the file
 * $BALLAST_TEST_STRAY_WRITE holds the id of this process. Then it launches a kernel that writes to
 * the first address that this process has mapped read-only for the device. That address belongs to
 * the weights.
 *
 * To learn the address, the library replaces dlsym, through which the process finds functions of
 * libcuda. So it sees each call of cuMemSetAccess. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *(*find_function)(void *, const char *);
typedef int (*set_access_function)(uint64_t, size_t, const void *, size_t);

/* CUmemAccessDesc: a location, and the access that it gets. */
struct access {
    int location_type, location_id, flags;
};
enum { PROT_READ_ONLY = 1, POLL_MICROSECONDS = 5000 };

static find_function find;
static set_access_function set_access;
static void *volatile driver;
static volatile uint64_t weights;

static int watched_set_access(uint64_t address, size_t bytes, const void *accesses, size_t count) {
    const struct access *access = accesses;
    if (count > 0 && access->flags == PROT_READ_ONLY && weights == 0)
        weights = address;
    return set_access(address, bytes, accesses, count);
}

static void real_dlsym(void) {
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    for (size_t i = 0; find == NULL && i < sizeof versions / sizeof *versions; i++)
        find = (find_function)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    if (find == NULL)
        abort();
}

void *dlsym(void *library, const char *name) {
    if (find == NULL)
        real_dlsym();
    void *found = find(library, name);
    if (found == NULL || strcmp(name, "cuMemSetAccess") != 0)
        return found;
    driver = library;
    set_access = (set_access_function)found;
    return (void *)watched_set_access;
}

static const char stray[] = ".version 7.0\n"
                            ".target sm_70\n"
                            ".address_size 64\n"
                            ".visible .entry stray(.param .u64 where) {\n"
                            "    .reg .b64 %rd<2>;\n"
                            "    .reg .b32 %r<2>;\n"
                            "    ld.param.u64 %rd1, [where];\n"
                            "    mov.u32 %r1, 255;\n"
                            "    st.global.u32 [%rd1], %r1;\n"
                            "    ret;\n"
                            "}\n";

/* Launches the kernel in the primary context, which the worker uses. So a fault in the context ends
 * the worker. */
static int write_stray(void) {
    void *context, *module, *kernel;
    uint64_t address = weights;
    void *arguments[] = {&address};
    int error;
#define CALL(name, types, ...)                                                                                         \
    if ((error = ((int (*) types)find(driver, name))(__VA_ARGS__)) != 0)                                               \
        return error
    CALL("cuDevicePrimaryCtxRetain", (void **, int), &context, 0);
    CALL("cuCtxSetCurrent", (void *), context);
    CALL("cuModuleLoadData", (void **, const void *), &module, stray);
    CALL("cuModuleGetFunction", (void **, void *, const char *), &kernel, module, "stray");
    CALL("cuLaunchKernel",
         (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **),
         kernel, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL);
    CALL("cuCtxSynchronize", (void));
#undef CALL
    return 0;
}

static void *wait_for_order(void *path) {
    for (;; usleep(POLL_MICROSECONDS)) {
        FILE *order = fopen(path, "r");
        if (order == NULL)
            continue;
        long pid = 0;
        int numbers = fscanf(order, "%ld", &pid);
        fclose(order);
        if (numbers == 1 && pid == (long)getpid() && weights != 0)
            break;
    }
    int error = write_stray();
    fprintf(stderr, "stray write of process %ld to %#lx: CUDA error %d\n", (long)getpid(), (unsigned long)weights, error);
    return NULL;
}

/* Whether the command line is "ballast worker --config ...". */
static int is_worker(void) {
    char line[64] = {0};
    FILE *file = fopen("/proc/self/cmdline", "r");
    if (file == NULL)
        return 0;
    size_t length = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    size_t first = strlen(line) + 1;
    return first < length && strcmp(line + first, "worker") == 0;
}

__attribute__((constructor)) static void start(void) {
    pthread_t thread;
    char *path = getenv("BALLAST_TEST_STRAY_WRITE");
    if (path != NULL && is_worker() && pthread_create(&thread, NULL, wait_for_order, path) == 0)
        pthread_detach(thread);
}
