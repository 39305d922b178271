/* Where the daemon of an ordinary user keeps its state and its socket, by the XDG base directory
 * specification; root names both. */
#ifndef AGENTENV_SANDBOX_PLACES_H
#define AGENTENV_SANDBOX_PLACES_H

/* Freed by the caller; NULL for root, or when the environment says nothing. */
char *box_default_state(void);  /* $XDG_DATA_HOME/agentenv, or ~/.local/share/agentenv */
char *box_default_socket(void); /* $XDG_RUNTIME_DIR/agentenv.sock, or `socket` beside the state */

#endif
