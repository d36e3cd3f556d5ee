/* A stand-in for libcuda.so.1: what cuda_holder.py calls, for the stand-in nvidia-smi.
 *
 * Like the real library it opens the control node at cuInit and the GPU's own node with its
 * context, and keeps them open. What is allocated is written to STATE/mem/PID, from where the
 * stand-in nvidia-smi charges it (tests/lab/guest/gpu_charges.py).
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };

static int initialized, current = -1;
static unsigned long long allocated;

static int node(const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("GPU_LAB_DEV"), name);
    return open(path, O_RDWR);
}

int cuInit(unsigned flags)
{
    initialized = flags == 0 && node("nvidiactl") >= 0;
    return initialized ? SUCCESS : INVALID_DEVICE;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return initialized ? SUCCESS : NOT_INITIALIZED;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    char name[32];
    snprintf(name, sizeof name, "nvidia%d", device);
    if (node(name) < 0)
        return INVALID_DEVICE;
    *context = (void *)(long)(device + 1);
    return SUCCESS;
}

int cuCtxSetCurrent(void *context)
{
    current = (int)(long)context - 1;
    return SUCCESS;
}

int cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
    char path[4096];
    if (current < 0)
        return INVALID_CONTEXT;
    allocated += bytes;
    snprintf(path, sizeof path, "%s/mem/%d", getenv("GPU_LAB_STATE"), getpid());
    FILE *file = fopen(path, "w");
    fprintf(file, "%d %llu\n", current, allocated >> 20);
    fclose(file);
    *address = 1;
    return SUCCESS;
}
