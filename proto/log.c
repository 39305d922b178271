#include "proto/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 4096 };

static const char *const level_names[] = {"debug", "info", "warn", "error"};
static const char *spec;
static bool json;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void read_environment(void)
{
    const char *format = getenv("LONGHAUL_LOG_FORMAT");

    spec = getenv("LONGHAUL_LOG");
    if (!spec)
        spec = "info";
    json = format && !strcmp(format, "json");
}

static int level_of(const char *word, size_t n, int otherwise)
{
    for (int i = 0; i <= LH_ERROR; i++)
        if (strlen(level_names[i]) == n && !strncmp(level_names[i], word, n))
            return i;
    return otherwise;
}

/* Words of the spec in order: a bare level is the default, component=level overrides it. */
bool lh_log_enabled(const char *component, enum lh_level level)
{
    pthread_once(&once, read_environment);
    size_t clen = strlen(component);
    int general = LH_INFO, own = -1;

    for (const char *w = spec; *w;) {
        size_t n = strcspn(w, ",");
        const char *eq = memchr(w, '=', n);
        if (!eq)
            general = level_of(w, n, general);
        else if ((size_t)(eq - w) == clen && !strncmp(w, component, clen))
            own = level_of(eq + 1, n - clen - 1, own);
        w += n + (w[n] == ',');
    }
    return (int)level >= (own >= 0 ? own : general);
}

/* Escapes what would break a line or a JSON string; cuts at the end of the buffer. */
static size_t append_escaped(char *to, size_t room, const char *from)
{
    size_t n = 0;

    for (; *from && n + 7 < room; from++) {
        unsigned char c = (unsigned char)*from;
        if (c == '"' || c == '\\')
            to[n++] = '\\', to[n++] = (char)c;
        else if (c < 0x20)
            n += (size_t)snprintf(to + n, room - n, "\\u%04x", c);
        else
            to[n++] = (char)c;
    }
    to[n] = 0;
    return n;
}

static size_t format_line(char *line, const char *component, enum lh_level level, const char *event,
                          const char *message)
{
    char when[40], text[LINE - 400];
    struct timespec t;
    struct tm tm;

    clock_gettime(CLOCK_REALTIME, &t);
    gmtime_r(&t.tv_sec, &tm);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S", &tm);
    append_escaped(text, sizeof text, message);
    int n = json ? snprintf(line, LINE,
                            "{\"time\":\"%s.%03ldZ\",\"level\":\"%s\",\"component\":\"%s\","
                            "\"pid\":%d,\"event\":\"%s\",\"message\":\"%s\"}\n",
                            when, t.tv_nsec / 1000000, level_names[level], component, getpid(),
                            event, text)
                 : snprintf(line, LINE, "%s.%03ldZ %-5s %s: %s%s%s\n", when, t.tv_nsec / 1000000,
                            level_names[level], component, event, *text ? " " : "", text);
    return n < 0 ? 0 : n < LINE ? (size_t)n : LINE - 1;
}

void lh_log(const char *component, enum lh_level level, const char *event, const char *fmt, ...)
{
    char message[LINE - 600], line[LINE];
    va_list ap;

    pthread_once(&once, read_environment);
    va_start(ap, fmt);
    vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    size_t n = format_line(line, component, level, event, message);
    if (write(STDERR_FILENO, line, n) < 0) {
        /* Nowhere left to say so. */
    }
}
