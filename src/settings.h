/*-------------------------------------------------------------------------
 *
 * settings.h
 *	  The settings idempotency.*
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SETTINGS_H
#define IDEM_SETTINGS_H

#include "postgres.h"

extern int	idem_default_ttl;	/* seconds */
extern int	idem_default_lease; /* milliseconds */
extern int	idem_max_response_size; /* bytes */
extern bool idem_durable;
extern int	idem_sweep_batch_size;
extern int	idem_sweep_pause;
extern char *idem_scope;
extern bool idem_scope_forged;

extern void idem_define_settings(void);

#endif							/* IDEM_SETTINGS_H */
