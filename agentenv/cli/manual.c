/* The manual page and bash's completion, both from the tables of verbs: what a verb is called, what
 * it takes and what it does is written down once. */
#include <stdio.h>
#include <string.h>

#include "agentenv/cli/verbs.h"
#include "proto/parse.h"

static const char page_head[] =
    ".TH AGENTENV 1\n.SH NAME\nagentenv \\- sandboxes of agentenvd\n.SH SYNOPSIS\n"
    ".B agentenv\n.RI [ OPTION ...]\n.I VERB\n.RI [ ARGUMENT ...]\n.SH VERBS\n"
    "Each says more with\n.BR --help .\n";

static const char page_tail[] =
    ".SH OPTIONS\n.TP\n.BI --socket= PATH\nSocket of agentenvd; default: $AGENTENV_SOCKET.\n"
    ".TP\n.BI --address= HOST:PORT\nOf an agentenvd elsewhere, asked by TLS, with\n.BI "
    "--token-file= "
    "FILE\nand, where the machine does not know who signed its certificate,\n.BI --ca= FILE\n"
    "(defaults: $AGENTENV_ADDRESS, $AGENTENV_TOKEN_FILE, $AGENTENV_CA).\n"
    ".TP\n.BI --output= FORMAT\ntable or json; default: a table on a terminal, JSON in a pipe.\n"
    ".SH EXIT STATUS\n0 done, 1 refused or failed, 2 usage, 75 the daemon is not there. exec and\n"
    "shell end as their command does; exec with 124 after its timeout and with 125 when it could\n"
    "not be run.\n.SH SEE ALSO\ndocs/SANDBOXES.md\n";

static int man(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {
        NULL, cli_parse_words, "", "Prints the manual page, for man -l.", NULL, NULL, NULL};
    struct cli_words w = {0};

    (void)cli;
    (void)err;
    cli_parse(&argp, argc, argv, &w);
    fputs(page_head, stdout);
    for (size_t t = 0; cli_tables[t]; t++)
        for (const struct cli_verb *v = cli_tables[t]; v->name; v++)
            printf(".TP\n.B %s\n.I %s\n.br\n%s\n", v->name, v->args, v->doc);
    fputs(page_tail, stdout);
    return 0;
}

static size_t first_word(const char *name)
{
    return strcspn(name, " ");
}

/* Names of one word, first words of two ("snapshot ls") once. */
static void print_first_words(void)
{
    const char *last = "";

    for (size_t t = 0; cli_tables[t]; t++)
        for (const struct cli_verb *v = cli_tables[t]; v->name; v++) {
            size_t len = first_word(v->name);
            if (strncmp(last, v->name, len) || first_word(last) != len)
                printf("%.*s ", (int)len, v->name);
            last = v->name;
        }
}

static void print_second_words(const char *first, size_t len)
{
    printf("    %.*s) words=\"", (int)len, first);
    for (size_t t = 0; cli_tables[t]; t++)
        for (const struct cli_verb *v = cli_tables[t]; v->name; v++)
            if (!strncmp(v->name, first, len) && v->name[len] == ' ')
                printf("%s ", v->name + len + 1);
    puts("\" ;;");
}

static void print_cases(void)
{
    const char *last = "";

    for (size_t t = 0; cli_tables[t]; t++)
        for (const struct cli_verb *v = cli_tables[t]; v->name; v++) {
            size_t len = first_word(v->name);
            if (!v->name[len] || (first_word(last) == len && !strncmp(last, v->name, len)))
                continue;
            print_second_words(v->name, len);
            last = v->name;
        }
}

static int completion(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {NULL, cli_parse_words,
                              "",   "Prints completion for bash: eval \"$(agentenv completion)\".",
                              NULL, NULL,
                              NULL};
    struct cli_words w = {0};

    (void)cli;
    (void)err;
    cli_parse(&argp, argc, argv, &w);
    fputs("_agentenv() {\n"
          "  local current=${COMP_WORDS[COMP_CWORD]} words=\n"
          "  if [ \"$COMP_CWORD\" = 1 ]; then words=\"",
          stdout);
    print_first_words();
    puts("\"\n  else case ${COMP_WORDS[1]} in");
    print_cases();
    puts("    *) words=$(agentenv ls -o json 2>/dev/null |\n"
         "         sed -n 's/^ *\"\\(id\\|name\\)\": \"\\(.\\+\\)\",*$/\\2/p') ;;\n"
         "  esac fi\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
         "  [ ${#COMPREPLY[@]} -gt 0 ] || COMPREPLY=($(compgen -f -- \"$current\"))\n"
         "}\n"
         "complete -F _agentenv agentenv");
    return 0;
}

const struct cli_verb manual_verbs[] = {
    {"man", "", "print the manual page", man},
    {"completion", "", "print completion for bash", completion},
    {0},
};
