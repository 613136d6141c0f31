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
extern int	idem_stats_databases;
extern int	idem_health_backlog;	/* rows */
extern int	idem_health_sweep_overdue;	/* seconds */
extern int	idem_health_growth; /* percent */
extern int	idem_health_growth_from;	/* megabytes */
extern int	idem_health_stuck_after;	/* seconds */
extern int	idem_health_stuck_claims;
extern int	idem_health_held_unknown;	/* rows */
extern int	idem_health_wraparound; /* percent */
extern double idem_health_ttl_too_short;	/* percent */
extern bool idem_worker;
extern char *idem_database_names;
extern int	idem_naptime;		/* seconds */
extern char *idem_scope;
extern bool idem_scope_forged;

extern void idem_define_settings(void);

#endif							/* IDEM_SETTINGS_H */
