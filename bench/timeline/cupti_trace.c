// SPDX-License-Identifier: Apache-2.0

// Writes one line for each kernel that a process runs: name, start and end in nanoseconds, grid and
// block. The file's name ends with the number of the process. The CUDA driver loads this library if
// CUDA_INJECTION64_PATH names it. README.md has the commands.

#include <cupti.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define BUFFER_BYTES (4 << 20)
// A process that is killed loses at most the kernels of this time.
#define FLUSH_MILLISECONDS 200

static FILE *lines;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *size, size_t *records_max) {
    *buffer = aligned_alloc(8, BUFFER_BYTES);
    *size = *buffer == NULL ? 0 : BUFFER_BYTES;
    *records_max = 0;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context, (void)stream, (void)size;
    CUpti_Activity *record = NULL;
    pthread_mutex_lock(&lock);
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
        const CUpti_ActivityKernel10 *kernel = (const CUpti_ActivityKernel10 *)record;
        fprintf(lines, "%s,%llu,%llu,%d,%d\n", kernel->name, (unsigned long long)kernel->start,
                (unsigned long long)kernel->end, kernel->gridX, kernel->blockX);
    }
    fflush(lines);
    pthread_mutex_unlock(&lock);
    free(buffer);
}

static void flush_at_exit(void) { cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED); }

// The name that the driver calls.
int InitializeInjection(void) {
    const char *given = getenv("KERNEL_TRACE");
    // The processes of a fleet inherit the name, and each has a file.
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", given == NULL ? "kernel-trace.csv" : given, (int)getpid());
    lines = fopen(path, "w");
    if (lines == NULL) {
        perror("kernel trace");
        return 0;
    }
    CUptiResult result = cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
    if (result == CUPTI_SUCCESS) result = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    if (result == CUPTI_SUCCESS) result = cuptiActivityFlushPeriod(FLUSH_MILLISECONDS);
    if (result != CUPTI_SUCCESS) {
        const char *text = NULL;
        cuptiGetResultString(result, &text);
        fprintf(stderr, "kernel trace: %s\n", text == NULL ? "unknown error of CUPTI" : text);
        return 0;
    }
    atexit(flush_at_exit);
    return 1;
}
