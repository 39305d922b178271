/* agentenv-witness hold [MIB] | start [MIB] | ask: a program that knows whether a checkpoint has
 * kept everything.
 *
 * `hold` makes one of each kind of thing that a checkpoint must carry: memory, a deleted file, a
 * pipe, a terminal and a TCP connection to itself with bytes in them that nobody has read, a child
 * behind a pair of sockets, a listener, a lock, a timer, directory, umask and limits.  It then
 * answers on the listener: each connection makes it look at all of them, by content, say "ok N",
 * and change them, so that N tells one point in time from another.  `ask` is the other end.
 *
 * The daemon asks it at its start whether CRIU can be offered (daemon/selftest.c), tests ask it
 * after each kind of restore.  Static, to run in any image. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <termios.h>
#include <unistd.h>

enum { IN, OUT, ENDS };
enum { TEXT = 64, ANSWER_MS = 10000, FILES = 77, MASK = 027, TIMER_S = 100000 };

static const char home[] = "/tmp", address[] = "/tmp/witness.socket", file_name[] = "witness.file";

static struct {
    unsigned count;
    uint64_t *words;
    size_t n_words;
    int file, lock, pipe[ENDS], terminal[ENDS], tcp[ENDS], child, listener;
} w;

static void die(const char *what)
{
    fprintf(stderr, "witness: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int must(int r, const char *what)
{
    if (r < 0)
        die(what);
    return r;
}

/* ---- what is held: content by count -------------------------------------------------------- */

enum { STEP = 64 << 10 }; /* words: one in so many changes with the count, each in another page */

static uint64_t word_of(size_t i, unsigned count)
{
    return (i + 1) * 0x9e3779b97f4a7c15u ^ (i % STEP ? 0 : count) * 0xd1342543de82ef95u;
}

static void fill_memory(void)
{
    for (size_t i = 0; i < w.n_words; i++)
        w.words[i] = word_of(i, w.count);
}

static void change_memory(void)
{
    for (size_t i = 0; i < w.n_words; i += STEP)
        w.words[i] = word_of(i, w.count);
}

static int memory_is_right(void)
{
    for (size_t i = 0; i < w.n_words; i++)
        if (w.words[i] != word_of(i, w.count))
            return 0;
    return 1;
}

static void text_of(const char *kind, unsigned count, char text[TEXT])
{
    memset(text, 0, TEXT);
    snprintf(text, TEXT - 1, "%s of %u", kind, count);
    text[TEXT - 1] = '\n'; /* a terminal hands over lines */
    for (int i = 0; i < TEXT - 1; i++)
        if (!text[i])
            text[i] = '.';
}

static int put(int fd, const char *kind)
{
    char text[TEXT];

    text_of(kind, w.count, text);
    return write(fd, text, TEXT) == TEXT;
}

static int get(int fd, const char *kind)
{
    char want[TEXT], text[TEXT];
    struct pollfd p = {fd, POLLIN, 0};

    text_of(kind, w.count, want);
    for (size_t n = 0; n < TEXT;) {
        ssize_t got = poll(&p, 1, ANSWER_MS) == 1 ? read(fd, text + n, TEXT - n) : -1;
        if (got <= 0)
            return 0;
        n += (size_t)got;
    }
    return !memcmp(text, want, TEXT);
}

static int put_file(void)
{
    return lseek(w.file, 0, SEEK_SET) == 0 && put(w.file, "file");
}

static int get_file(void)
{
    struct stat st;

    return lseek(w.file, 0, SEEK_CUR) == TEXT && lseek(w.file, 0, SEEK_SET) == 0 &&
           get(w.file, "file") && fstat(w.file, &st) == 0 && st.st_nlink == 0;
}

static int put_pipe(void)
{
    return put(w.pipe[OUT], "pipe");
}

static int get_pipe(void)
{
    return get(w.pipe[IN], "pipe");
}

static int put_terminal(void)
{
    return put(w.terminal[OUT], "terminal");
}

static int get_terminal(void)
{
    struct winsize size;

    return get(w.terminal[IN], "terminal") && ioctl(w.terminal[IN], TIOCGWINSZ, &size) == 0 &&
           size.ws_row == 33 && size.ws_col == 99;
}

static int put_tcp(void)
{
    return w.tcp[OUT] < 0 || put(w.tcp[OUT], "tcp");
}

static int get_tcp(void)
{
    return w.tcp[IN] < 0 || get(w.tcp[IN], "tcp");
}

/* The child sends back what it gets, so its answer to the last one waits here. */
static int put_child(void)
{
    return put(w.child, "child");
}

static int get_child(void)
{
    return get(w.child, "child");
}

static int surroundings_are_right(void)
{
    char dir[64];
    struct rlimit files;
    struct itimerval timer;
    mode_t mask = umask(MASK);

    return mask == MASK && getcwd(dir, sizeof dir) && !strcmp(dir, home) &&
           getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur == FILES &&
           getitimer(ITIMER_REAL, &timer) == 0 && timer.it_value.tv_sec > 0 &&
           timer.it_value.tv_sec <= TIMER_S;
}

/* Somebody else must not get it. */
static int lock_is_held(void)
{
    int fd = open(file_name, O_RDWR | O_CLOEXEC);
    int held = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK;

    close(fd);
    return held;
}

static const struct {
    const char *name;
    int (*check)(void);
} checks[] = {
    {"memory", memory_is_right},
    {"deleted file", get_file},
    {"pipe", get_pipe},
    {"terminal", get_terminal},
    {"tcp", get_tcp},
    {"child", get_child},
    {"lock", lock_is_held},
    {"directory, umask, limits, timer", surroundings_are_right},
};

static const char *wrong(void)
{
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        if (!checks[i].check())
            return checks[i].name;
    return NULL;
}

static int put_all(void)
{
    change_memory();
    return put_file() && put_pipe() && put_terminal() && put_tcp() && put_child();
}

/* ---- making -------------------------------------------------------------------------------- */

static void make_file(void)
{
    w.file = must(open("witness.deleted", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), "file");
    must(unlink("witness.deleted"), "unlink");
    w.lock = must(open(file_name, O_RDWR | O_CREAT | O_CLOEXEC, 0600), file_name);
    must(flock(w.lock, LOCK_EX | LOCK_NB), "flock: another witness holds here");
}

static void make_terminal(void)
{
    struct winsize size = {.ws_row = 33, .ws_col = 99};
    struct termios t;
    int unlock = 0;

    w.terminal[IN] = must(open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC), "/dev/ptmx");
    must(ioctl(w.terminal[IN], TIOCSPTLCK, &unlock), "TIOCSPTLCK");
    w.terminal[OUT] =
        must(ioctl(w.terminal[IN], TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC), "TIOCGPTPEER");
    must(tcgetattr(w.terminal[OUT], &t), "tcgetattr");
    cfmakeraw(&t);
    must(tcsetattr(w.terminal[OUT], TCSANOW, &t), "tcsetattr");
    must(ioctl(w.terminal[IN], TIOCSWINSZ, &size), "TIOCSWINSZ");
}

/* Where the loopback interface is down there is no connection, and none is asked for. */
static void make_tcp(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int listener = must(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "tcp socket");

    w.tcp[IN] = w.tcp[OUT] = -1;
    must(bind(listener, (void *)&a, sizeof a), "bind");
    must(listen(listener, 1), "listen");
    must(getsockname(listener, (void *)&a, &len), "getsockname");
    w.tcp[OUT] = must(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "tcp socket");
    if (connect(w.tcp[OUT], (void *)&a, sizeof a) == 0) {
        w.tcp[IN] = must(accept4(listener, NULL, NULL, SOCK_CLOEXEC), "accept");
    } else {
        close(w.tcp[OUT]);
        w.tcp[OUT] = -1;
    }
}

static void make_child(void)
{
    int p[2];
    char text[TEXT];

    must(socketpair(AF_UNIX, SOCK_STREAM, 0, p), "socketpair");
    if (must(fork(), "fork") == 0) {
        close(p[0]);
        for (ssize_t n; (n = read(p[1], text, sizeof text)) > 0;)
            if (write(p[1], text, (size_t)n) != n)
                break;
        _exit(0);
    }
    close(p[1]);
    w.child = p[0];
}

static int unix_socket(struct sockaddr_un *a)
{
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(a->sun_path, sizeof a->sun_path, "%s", address);
    return must(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), "unix socket");
}

static void make_listener(void)
{
    struct sockaddr_un a;

    w.listener = unix_socket(&a);
    unlink(address);
    must(bind(w.listener, (void *)&a, sizeof a), address);
    must(listen(w.listener, 16), "listen");
}

static void make_surroundings(void)
{
    struct rlimit files = {FILES, FILES};
    struct itimerval timer = {.it_value.tv_sec = TIMER_S};

    must(chdir(home), home);
    umask(MASK);
    must(setrlimit(RLIMIT_NOFILE, &files), "RLIMIT_NOFILE");
    must(setitimer(ITIMER_REAL, &timer, NULL), "setitimer");
}

_Noreturn static void hold(size_t mib)
{
    make_surroundings();
    make_file();
    make_terminal();
    make_tcp();
    make_child();
    must(pipe2(w.pipe, O_CLOEXEC), "pipe");
    w.n_words = mib * (1 << 20) / sizeof *w.words;
    w.words = malloc(w.n_words * sizeof *w.words);
    if (!w.words)
        die("memory");
    fill_memory();
    if (!put_all())
        die("filling");
    make_listener();
    printf("holding\n");
    fflush(stdout);
    close(1); /* whoever waited for it may go, and a pipe to it with him */
    for (;;) {
        int fd = accept4(w.listener, NULL, NULL, SOCK_CLOEXEC);
        const char *what = fd < 0 ? NULL : wrong();
        if (fd < 0)
            continue;
        if (what) {
            dprintf(fd, "wrong: %s\n", what);
        } else {
            w.count++;
            dprintf(fd, put_all() ? "ok %u\n" : "wrong: cannot go on\n", w.count);
        }
        close(fd);
    }
}

/* For a sandbox without a shell: holds in the background, and returns when it does. */
static int start(size_t mib)
{
    int p[ENDS];
    char text[64];

    must(pipe(p), "pipe");
    if (must(fork(), "fork") == 0) {
        int null = must(open("/dev/null", O_RDWR), "/dev/null");
        must(dup2(null, 0), "stdin");
        must(dup2(p[OUT], 1), "stdout");
        must(dup2(null, 2), "stderr");
        close(p[IN]);
        close(p[OUT]);
        close(null);
        hold(mib);
    }
    close(p[OUT]);
    return read(p[IN], text, sizeof text) > 0 ? 0 : 1;
}

static int ask(void)
{
    struct sockaddr_un a;
    char answer[128];
    int fd = unix_socket(&a);
    struct pollfd p = {fd, POLLIN, 0};

    must(connect(fd, (void *)&a, sizeof a), address);
    ssize_t n = poll(&p, 1, 3 * ANSWER_MS) == 1 ? read(fd, answer, sizeof answer - 1) : -1;
    if (n <= 0)
        die("no answer");
    answer[n] = 0;
    fputs(answer, stdout);
    return strncmp(answer, "ok ", 3) != 0;
}

int main(int argc, char **argv)
{
    if (argc >= 2 && !strcmp(argv[1], "hold"))
        hold(argc > 2 ? strtoul(argv[2], NULL, 10) : 1);
    if (argc >= 2 && !strcmp(argv[1], "start"))
        return start(argc > 2 ? strtoul(argv[2], NULL, 10) : 1);
    if (argc == 2 && !strcmp(argv[1], "ask"))
        return ask();
    fprintf(stderr, "usage: agentenv-witness hold [MIB] | start [MIB] | ask\n");
    return 2;
}
