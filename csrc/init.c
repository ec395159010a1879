/* The only program of ours inside an environment: its pid 1, and the wrapper around each command run in it.
 *
 *   weenv-init init FD           pid 1. FD is one end of a stream socket.
 *   weenv-init run FD DIR -- CMD…   wrapper of one command. FD is one end of a stream socket, or "-" for none.
 *
 * As pid 1 it reads the initialisation commands from FD (each ended by a NUL, the whole by end of file), runs them
 * one after the other with `/bin/sh -c`, and reports each on FD. Commands come by descriptor and not as arguments so
 * that a process in the environment cannot read them later in /proc/1/cmdline: they often hold the fault that a
 * harness has to find. For the same reason the memory that held them is wiped before pid 1 idles. Running them here
 * saves one start of the OCI runtime for each.
 *
 *   pid 1 to daemon:   "command INDEX WAIT_STATUS MICROSECONDS TAIL_BYTES\n" and the last bytes that the command wrote,
 *                      then "ready\n"; or "failed REASON\n". The first command that fails is the last one reported.
 *
 * Nothing inside ends pid 1: it handles SIGTERM, and only one from outside its PID namespace.
 *
 * As wrapper it is the child subreaper of the command, so that a process that daemonises becomes its child and not
 * pid 1's. End of file on FD, SIGTERM or SIGHUP kill every descendant; the wrapper leaves when none is left. When the
 * command ends by itself, what it left running in the background goes on under pid 1.
 *
 *   wrapper to daemon: "exit N\n", "signal N\n", "exec ERRNO\n" (could not be executed), "chdir ERRNO\n".
 *   Its own exit status: that of the command, 128 + signal, 127 (not found) or 126 (cannot be executed).
 *
 * Static, no allocation after start in `run`, no configuration, no output of its own on standard descriptors.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TAIL_BYTES = 16384, COMMANDS_MAX_BYTES = 16 << 20, KILL_PASS_MS = 20 };

/* ---- shared ---- */

/* Writes all of it; a peer that is gone is not an error of ours: nobody is left to tell. */
static void write_all(int fd, const char *data, size_t len)
{
        while (len > 0) {
                ssize_t n = write(fd, data, len);
                if (n < 0 && errno == EINTR)
                        continue;
                if (n <= 0)
                        return;
                data += n;
                len -= (size_t)n;
        }
}

__attribute__((format(printf, 2, 3))) static void report(int fd, const char *format, ...)
{
        char line[256];
        va_list args;

        if (fd < 0)
                return;
        va_start(args, format);
        int n = vsnprintf(line, sizeof line, format, args);
        va_end(args);
        if (n > 0)
                write_all(fd, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

/* A descriptor number from the command line; -1 for "-"; exits where it is neither. */
static int descriptor_argument(const char *text)
{
        char *end;

        if (strcmp(text, "-") == 0)
                return -1;
        long fd = strtol(text, &end, 10);
        if (*end || end == text || fd < 0 || fd > INT32_MAX || fcntl((int)fd, F_SETFD, FD_CLOEXEC) < 0)
                exit(125);
        return (int)fd;
}

static void restore_signals(void)
{
        sigset_t none;

        for (int sig = 1; sig < NSIG; sig++)
                signal(sig, SIG_DFL);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
}

static int64_t now_us(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* ---- pid 1 ---- */

/* Whether kill(2) was called by a process that this PID namespace does not have: its pid reads as 0 here. The kernel keeps
 * SI_USER to itself, so a process inside cannot pretend to be outside; what it sends does not end its environment. */
static bool is_from_outside(int32_t code, uint32_t pid)
{
        return code == SI_USER && pid == 0;
}

/* The last TAIL_BYTES that were put in. */
struct tail {
        char bytes[TAIL_BYTES];
        uint64_t total;
};

static void tail_put(struct tail *tail, const char *data, size_t len)
{
        for (size_t i = 0; i < len; i++)
                tail->bytes[(tail->total + i) % TAIL_BYTES] = data[i];
        tail->total += len;
}

static size_t tail_len(const struct tail *tail)
{
        return tail->total < TAIL_BYTES ? (size_t)tail->total : TAIL_BYTES;
}

static void tail_send(const struct tail *tail, int fd)
{
        size_t start = tail->total > TAIL_BYTES ? tail->total % TAIL_BYTES : 0;

        write_all(fd, tail->bytes + start, tail_len(tail) - start);
        write_all(fd, tail->bytes, start);
}

/* Takes what the pipe holds now; false at end of file. The pipe is non-blocking. */
static bool tail_fill(struct tail *tail, int pipe_fd)
{
        char buffer[4096];

        for (;;) {
                ssize_t n = read(pipe_fd, buffer, sizeof buffer);
                if (n == 0)
                        return false;
                if (n < 0)
                        return errno == EAGAIN || errno == EINTR;
                tail_put(tail, buffer, (size_t)n);
        }
}

/* Reaps all that has ended; true and its status if `awaited` was among them. */
static bool reap(pid_t awaited, int *ret_status)
{
        bool found = false;
        int status;
        pid_t pid;

        while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
                if (pid == awaited) {
                        *ret_status = status;
                        found = true;
                }
        return found;
}

static pid_t start_shell(const char *command, int output)
{
        pid_t pid = fork();

        if (pid != 0)
                return pid;
        restore_signals();
        setsid();
        dup2(output, STDOUT_FILENO);
        dup2(output, STDERR_FILENO);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        dprintf(STDERR_FILENO, "/bin/sh: %s\n", strerror(errno));
        _exit(127);
}

/* Runs one command to its end and reports it; true if it exited with 0. Background processes that keep the pipe open are
 * not waited for: the end of the command is the end of the shell. */
static bool run_command(int index, const char *command, int control, int signal_fd)
{
        static struct tail tail;
        int output[2], status = 0;
        int64_t begin = now_us();

        tail.total = 0;
        if (pipe2(output, O_CLOEXEC) < 0) {
                report(control, "failed pipe: %s\n", strerror(errno));
                return false;
        }
        fcntl(output[0], F_SETFL, O_NONBLOCK);
        pid_t pid = start_shell(command, output[1]);
        close(output[1]);
        if (pid < 0) {
                report(control, "failed fork: %s\n", strerror(errno));
                close(output[0]);
                return false;
        }
        struct pollfd polled[] = {{.fd = signal_fd, .events = POLLIN}, {.fd = output[0], .events = POLLIN}};
        for (;;) {
                if (poll(polled, 2, -1) < 0 && errno != EINTR)
                        _exit(125);
                if (polled[1].revents && !tail_fill(&tail, output[0]))
                        polled[1].fd = -1;
                if (polled[0].revents) {
                        struct signalfd_siginfo info;
                        while (read(signal_fd, &info, sizeof info) == sizeof info)
                                if (info.ssi_signo == SIGTERM && is_from_outside(info.ssi_code, info.ssi_pid))
                                        _exit(0);
                }
                if (reap(pid, &status))
                        break;
        }
        tail_fill(&tail, output[0]);
        close(output[0]);
        report(control, "command %d %d %lld %zu\n", index, status, (long long)(now_us() - begin), tail_len(&tail));
        tail_send(&tail, control);
        explicit_bzero(&tail, sizeof tail);
        return status == 0;
}

/* Reads to end of file into one buffer, ended by a NUL. NULL if it is too large or the descriptor fails. */
static char *read_commands(int fd, size_t *ret_len)
{
        size_t room = 65536, len = 0;
        char *buffer = malloc(room + 1);

        while (buffer) {
                ssize_t n = read(fd, buffer + len, room - len);
                if (n < 0 && errno == EINTR)
                        continue;
                if (n < 0)
                        break;
                if (n == 0) {
                        buffer[len] = '\0';
                        *ret_len = len;
                        return buffer;
                }
                len += (size_t)n;
                if (len < room)
                        continue;
                if (room >= COMMANDS_MAX_BYTES)
                        break;
                char *larger = malloc(2 * room + 1);
                if (larger)
                        memcpy(larger, buffer, len);
                explicit_bzero(buffer, len);
                free(buffer);
                buffer = larger;
                room *= 2;
        }
        free(buffer);
        return NULL;
}

static bool run_commands(int control, int signal_fd)
{
        size_t len = 0;
        bool good = true;
        int index = 0;
        char *commands = read_commands(control, &len);

        if (!commands) {
                report(control, "failed reading the init commands: %s\n", strerror(errno));
                return false;
        }
        for (char *command = commands; good && command < commands + len; command += strlen(command) + 1)
                good = run_command(index++, command, control, signal_fd);
        explicit_bzero(commands, len);
        free(commands);
        if (good)
                report(control, "ready\n");
        return good;
}

static int main_init(int control)
{
        sigset_t handled;

        sigemptyset(&handled);
        sigaddset(&handled, SIGCHLD);
        sigaddset(&handled, SIGTERM);
        sigprocmask(SIG_SETMASK, &handled, NULL);
        signal(SIGPIPE, SIG_IGN);
        if (control >= 0) {
                int signal_fd = signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK);
                if (signal_fd < 0 || !run_commands(control, signal_fd))
                        return 1;
                close(signal_fd);
                close(control);
        }
        if (chdir("/") < 0)
                return 1;
        for (;;) {
                int status;
                siginfo_t info;
                reap(0, &status);
                if (sigwaitinfo(&handled, &info) == SIGTERM && is_from_outside(info.si_code, (uint32_t)info.si_pid))
                        return 0;
        }
}

/* ---- wrapper ---- */

/* The parent of a process, from /proc/PID/stat; 0 if it is gone. The name in it may hold anything, so the last ')' counts. */
static pid_t parent_of(pid_t pid)
{
        char path[64], text[1024];
        int parent = 0;

        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return 0;
        ssize_t n = read(fd, text, sizeof text - 1);
        close(fd);
        if (n <= 0)
                return 0;
        text[n] = '\0';
        char *after_name = strrchr(text, ')');
        if (!after_name || sscanf(after_name, ") %*c %d", &parent) != 1)
                return 0;
        return parent;
}

static bool is_descendant(pid_t pid, pid_t ancestor)
{
        for (int depth = 0; depth < 100000 && pid > 1; depth++) {
                pid = parent_of(pid);
                if (pid == ancestor)
                        return true;
        }
        return false;
}

/* One pass: SIGKILL to every descendant that /proc shows. What is born meanwhile is met by the next pass. */
static void kill_descendants(void)
{
        pid_t self = getpid();
        DIR *proc = opendir("/proc");
        struct dirent *entry;

        if (!proc)
                return;
        while ((entry = readdir(proc))) {
                pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
                if (pid > 1 && pid != self && is_descendant(pid, self))
                        kill(pid, SIGKILL);
        }
        closedir(proc);
}

/* Kills and reaps until no child is left. As subreaper, having no child means having no descendant. */
static void kill_all(void)
{
        sigset_t child;
        const struct timespec pass = {.tv_nsec = KILL_PASS_MS * 1000000L};

        sigemptyset(&child);
        sigaddset(&child, SIGCHLD);
        for (;;) {
                pid_t pid;
                kill_descendants();
                while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
                        ;
                if (pid < 0)
                        return;
                sigtimedwait(&child, NULL, &pass);
        }
}

/* In the child: a process group of its own, in the foreground if there is a terminal, then the command. */
static void exec_command(char **argv, int error_fd, const char *directory)
{
        int failure[2] = {0, 0};

        setpgid(0, 0);
        if (isatty(STDIN_FILENO))
                tcsetpgrp(STDIN_FILENO, getpid()); /* SIGTTOU is still blocked */
        restore_signals();
        if (chdir(directory) < 0) {
                failure[0] = 1;
        } else {
                execvp(argv[0], argv);
        }
        failure[1] = errno;
        write_all(error_fd, (const char *)failure, sizeof failure);
        _exit(127);
}

/* Starts the command; its pid, or -1 with the failure (as the line to report) told and *ret_code set. */
static pid_t start_command(char **argv, const char *directory, int control, int *ret_code)
{
        int error_pipe[2], failure[2];

        if (pipe2(error_pipe, O_CLOEXEC) < 0) {
                report(control, "exec %d\n", errno);
                return -1;
        }
        pid_t pid = fork();
        if (pid == 0)
                exec_command(argv, error_pipe[1], directory);
        int fork_errno = errno;
        close(error_pipe[1]);
        if (pid < 0) {
                report(control, "exec %d\n", fork_errno);
        } else if (read(error_pipe[0], failure, sizeof failure) == (ssize_t)sizeof failure) {
                waitpid(pid, NULL, 0);
                report(control, "%s %d\n", failure[0] ? "chdir" : "exec", failure[1]);
                *ret_code = !failure[0] && failure[1] == ENOENT ? 127 : 126;
                pid = -1;
        }
        close(error_pipe[0]);
        return pid;
}

/* Waits for the end of the command, or for the order to end it. */
static int supervise(pid_t command, int control, int signal_fd)
{
        struct pollfd polled[] = {{.fd = signal_fd, .events = POLLIN}, {.fd = control, .events = POLLIN}};

        for (;;) {
                struct signalfd_siginfo info;
                int status;
                bool end = false;
                if (poll(polled, 2, -1) < 0 && errno != EINTR)
                        end = true;
                if (polled[1].revents)
                        end = true; /* the daemon writes nothing: this is end of file */
                while (read(signal_fd, &info, sizeof info) == sizeof info) {
                        if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGHUP)
                                end = true;
                        else if (info.ssi_signo != SIGCHLD && info.ssi_signo < 32)
                                kill(command, (int)info.ssi_signo);
                }
                if (reap(command, &status)) {
                        bool killed = WIFSIGNALED(status);
                        int value = killed ? WTERMSIG(status) : WEXITSTATUS(status);
                        report(control, "%s %d\n", killed ? "signal" : "exit", value);
                        return killed ? 128 + value : value;
                }
                if (end) {
                        kill_all();
                        report(control, "signal %d\n", SIGKILL);
                        return 128 + SIGKILL;
                }
        }
}

static int main_run(int control, const char *directory, char **argv)
{
        sigset_t handled;
        int code = 126;

        if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
                return 125;
        sigfillset(&handled);
        sigprocmask(SIG_SETMASK, &handled, NULL);
        sigdelset(&handled, SIGTTOU);
        sigdelset(&handled, SIGTTIN);
        sigdelset(&handled, SIGTSTP);
        sigdelset(&handled, SIGPIPE);
        int signal_fd = signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK);
        if (signal_fd < 0)
                return 125;
        pid_t command = start_command(argv, directory, control, &code);
        return command < 0 ? code : supervise(command, control, signal_fd);
}

int main(int argc, char **argv)
{
        if (argc == 3 && strcmp(argv[1], "init") == 0)
                return main_init(descriptor_argument(argv[2]));
        if (argc >= 6 && strcmp(argv[1], "run") == 0 && strcmp(argv[4], "--") == 0)
                return main_run(descriptor_argument(argv[2]), argv[3], argv + 5);
        dprintf(STDERR_FILENO, "usage: weenv-init init FD | weenv-init run FD|- DIR -- COMMAND...\n");
        return 125;
}
