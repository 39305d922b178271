/* The words of TOML, for toml.c alone.  A refusal is INVALID_ARGUMENT "NAME:LINE: ..." in p->err.
 */
#ifndef AGENTENV_TASK_TOML_WORDS_H
#define AGENTENV_TASK_TOML_WORDS_H

#include <jansson.h>
#include <stdbool.h>

#include "agentenv/task/toml.h"

enum { TOML_PATH_SIZE = 512, TOML_KEYS_MAX = 16 };

struct toml_parser {
    const char *name;
    const char *at, *end;
    int line, depth;
    struct toml *out;
    json_t *table;             /* that keys go to */
    char path[TOML_PATH_SIZE]; /* of it */
    struct lh_error *err;
};

/* a."b c".d, without its quotes. */
struct toml_key {
    char *parts[TOML_KEYS_MAX];
    int n;
};

int toml_refuse(struct toml_parser *p, const char *what);

/* The character the parser stands at; -1 at the end. */
int toml_peek(const struct toml_parser *p);
bool toml_starts(const struct toml_parser *p, const char *text);

void toml_skip_blanks(struct toml_parser *p);
/* Blanks, comments and line ends. */
void toml_skip_space(struct toml_parser *p);
/* Past the end of the line, or of the file; refused when anything but a comment is before it. */
int toml_end_line(struct toml_parser *p);

/* A text in quotes of any kind; the caller frees. */
char *toml_read_text(struct toml_parser *p);
/* Number, truth value or time. */
json_t *toml_read_plain(struct toml_parser *p);

/* Up to what follows the key.  To be freed when it was refused, too. */
int toml_read_key(struct toml_parser *p, struct toml_key *k);
void toml_free_key(struct toml_key *k);

#endif
