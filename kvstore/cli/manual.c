/* Help, the manual page and bash's completion, all from the table of commands. */
#include <stdio.h>
#include <string.h>

#include "kvstore/cli/cli.h"

char *cli_help(void)
{
    char *text = NULL;
    size_t len;
    FILE *f = open_memstream(&text, &len);

    if (!f)
        return NULL;
    fputs("Looks into the external KV store of a job.\v", f);
    for (const struct cli_verb *v = cli_verbs; v->name; v++)
        fprintf(f, "%s%s%-*s  %s\n", v->name, *v->args ? " " : "",
                20 - (int)(strlen(v->name) + (*v->args != 0)), v->args, v->doc);
    return fclose(f) == 0 ? text : NULL;
}

int cli_man(struct cli *c, struct lh_error *err)
{
    (void)c;
    (void)err;
    fputs(".TH KVSTORE 1\n.SH NAME\nkvstore \\- looks into the external KV store of a job\n"
          ".SH SYNOPSIS\n.B kvstore\n.I JOBDIR COMMAND\n.RI [ ARGUMENT ]\n.br\n.B kvstore\n"
          ".BI --socket= PATH\n.I COMMAND\n.RI [ ARGUMENT ]\n.SH COMMANDS\n",
          stdout);
    for (const struct cli_verb *v = cli_verbs; v->name; v++)
        printf(".TP\n.B %s\n.I %s\n.br\n%s\n", v->name, v->args, v->doc);
    fputs(".SH OPTIONS\n.TP\n.BI --socket= PATH\nkvstored's socket, instead of a job directory.\n"
          ".TP\n.BI --output= FORMAT\ntable or json; default: a table on a terminal, JSON in a "
          "pipe.\n"
          ".SH EXIT STATUS\n0 done, 1 failed (also: verify found something), 2 usage, 75 kvstored "
          "is not there.\n.SH SEE ALSO\ndocs/KVSTORE.md\n",
          stdout);
    return 0;
}

int cli_completion(struct cli *c, struct lh_error *err)
{
    (void)c;
    (void)err;
    fputs("_kvstore() {\n"
          "  local current=${COMP_WORDS[COMP_CWORD]} words=\"",
          stdout);
    for (const struct cli_verb *v = cli_verbs; v->name; v++)
        printf("%s ", v->name);
    puts("\"\n"
         "  [ \"$COMP_CWORD\" = 2 ] || words=\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
         "  [ ${#COMPREPLY[@]} -gt 0 ] || COMPREPLY=($(compgen -f -- \"$current\"))\n"
         "}\n"
         "complete -F _kvstore kvstore");
    return 0;
}
