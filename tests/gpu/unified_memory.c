// SPDX-License-Identifier: Apache-2.0

/* A library that makes a GPU look like one without memory of its own, for tests/gpu/unified.rs. The
 * test preloads it into all processes of a fleet. It replaces dlsym, through which a process finds
 * functions of libcuda, and changes one answer of cuDeviceGetAttribute. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef void *(*find_function)(void *, const char *);
typedef int (*attribute_function)(int *, int, int);

/* CU_DEVICE_ATTRIBUTE_INTEGRATED */
enum { INTEGRATED = 18 };

static find_function find;
static attribute_function attribute;

static int changed_attribute(int *value, int which, int device) {
    int status = attribute(value, which, device);
    if (status == 0 && which == INTEGRATED)
        *value = 1;
    return status;
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
    if (found == NULL || strcmp(name, "cuDeviceGetAttribute") != 0)
        return found;
    attribute = (attribute_function)found;
    return (void *)changed_attribute;
}
