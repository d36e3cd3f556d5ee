/* A process that holds stand-in GPU device nodes, for tests to find and to end.
 *
 *   --gpus 0,1   nodes to open, besides nvidiactl and nvidia-uvm
 *   --mib N      memory charged for each of them
 *   --map-only   map the nodes, then close every descriptor
 *   --ignore-term     only KILL ends it
 *   --catch FILE      append "TERM" to FILE when that signal comes, then end (or not: see above)
 *   --title TEXT      overwrite the command line and the short name
 *   --orphan          a child holds, the parent ends
 *   --unreaped        a child holds, the parent stays and never waits for it
 *   --leader-exits    a thread holds, the main thread ends
 *
 * Called nvidia-persistenced it is one: it holds nvidiactl and all GPUs, and says nothing.
 * Prints "ready PID" once it holds. GPU_LAB_DEV and GPU_LAB_STATE as for the nvidia-smi stand-in.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <libgen.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

static const char *gpus = "", *mib, *title, *catch_file;
static int map_only, ignore_term, orphan, unreaped, leader_exits, quiet;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static const char *setting(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static void hold(const char *node)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", setting("GPU_LAB_DEV", "/dev"), node);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        die(path);
    if (!map_only)
        return;
    if (mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED)
        die("mmap");
    close(fd);
}

static void on_term(int number)
{
    (void)number;
    int fd = catch_file ? open(catch_file, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
    if (fd >= 0 && write(fd, "TERM\n", 5) == 5)
        close(fd);
    if (!ignore_term)
        _exit(0);
}

static void charge(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/mem/%d", setting("GPU_LAB_STATE", "/run/gpu-lab"), getpid());
    FILE *file = fopen(path, "w");
    if (!file || fprintf(file, "%s\n", mib) < 0 || fclose(file) != 0)
        die(path);
}

static void rename_to(char **argv, int argc)
{
    size_t area = (size_t)(argv[argc - 1] + strlen(argv[argc - 1]) - argv[0]);
    char *text = strdup(title);
    memset(argv[0], 0, area);
    strncpy(argv[0], text, area);
    prctl(PR_SET_NAME, text);
}

static void parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i], *value = argv[i + 1] ? argv[i + 1] : "";
        if (!strcmp(word, "--map-only")) map_only = 1;
        else if (!strcmp(word, "--ignore-term")) ignore_term = 1;
        else if (!strcmp(word, "--orphan")) orphan = 1;
        else if (!strcmp(word, "--unreaped")) unreaped = 1;
        else if (!strcmp(word, "--leader-exits")) leader_exits = 1;
        else if (!strcmp(word, "--gpus")) gpus = strdup(value), i++;
        else if (!strcmp(word, "--mib")) mib = strdup(value), i++;
        else if (!strcmp(word, "--title")) title = strdup(value), i++;
        else if (!strcmp(word, "--catch")) catch_file = strdup(value), i++;
        else fprintf(stderr, "unknown option %s\n", word), exit(2);
    }
}

static void *wait_for_ever(void *unused)
{
    for (;;)
        pause();
    return unused;
}

static void hold_all(void)
{
    char node[32], *list = strdup(gpus);
    hold("nvidiactl");
    if (!quiet)
        hold("nvidia-uvm");
    for (char *gpu = strtok(list, ","); gpu; gpu = strtok(NULL, ",")) {
        snprintf(node, sizeof node, "nvidia%s", gpu);
        hold(node);
    }
}

int main(int argc, char **argv)
{
    pthread_t thread;
    quiet = !strcmp(basename(strdup(argv[0])), "nvidia-persistenced");
    if (quiet)
        gpus = "0,1,2,3";
    else
        parse(argc, argv);
    if ((orphan || unreaped) && fork() > 0) {
        if (orphan)
            _exit(0);
        wait_for_ever(NULL);
    }
    if (title)
        rename_to(argv, argc);
    if (catch_file || ignore_term)
        signal(SIGTERM, on_term);
    if (mib)
        charge();
    hold_all();
    if (!quiet)
        printf("ready %d\n", getpid()), fclose(stdout);
    if (leader_exits && pthread_create(&thread, NULL, wait_for_ever, NULL) == 0)
        pthread_exit(NULL);
    wait_for_ever(NULL);
}
