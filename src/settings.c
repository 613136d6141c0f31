/*-------------------------------------------------------------------------
 *
 * settings.c
 *	  The settings idempotency.*
 *
 * All but the size of shared memory can be changed without a restart, and none
 * is needed: the library is loaded by the first call of a session, or preloaded.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/memutils.h"

#include "args.h"
#include "compat.h"
#include "databases.h"
#include "settings.h"
#include "window.h"

int			idem_default_ttl = 24 * 3600;
int			idem_default_lease = 5 * 60 * 1000;
int			idem_max_response_size = 1024 * 1024;
bool		idem_durable = true;
int			idem_sweep_batch_size = 1000;
int			idem_sweep_pause = 0;
int			idem_stats_databases = 256;
int			idem_health_backlog = 100000;
int			idem_health_sweep_overdue = 2 * 3600;
int			idem_health_growth = 400;
int			idem_health_growth_from = 256;
int			idem_health_stuck_after = 600;
int			idem_health_stuck_claims = 10;
int			idem_health_held_unknown = 0;
int			idem_health_wraparound = 150;
double		idem_health_ttl_too_short = 1.0;
bool		idem_worker = true;
char	   *idem_database_names = NULL;
int			idem_naptime = 60;
static char *sweep_window = NULL;
char	   *idem_scope = NULL;
bool		idem_scope_forged = false;

#define SCOPE_SETTING "idempotency.scope"

/* A scope that no call would accept must not become anybody's only one. */
static bool
check_scope(char **newval, void **extra, GucSource source)
{
	/* It may come from a database with another encoding. */
	if (!pg_verifymbstr(*newval, strlen(*newval), true))
	{
		GUC_check_errdetail("It is not valid in the database's encoding.");
		return false;
	}
	if (pg_mbstrlen(*newval) <= IDEM_MAX_NAME)
		return true;
	GUC_check_errdetail("A scope has at most %d characters.", IDEM_MAX_NAME);
	return false;
}

static GucSource
scope_source(void)
{
	struct config_generic *setting = idem_find_setting(SCOPE_SETTING);

	return setting != NULL ? setting->source : PGC_S_DEFAULT;
}

/*
 * Without preload a session can give the setting a value before the library
 * says who may do so.  The server discards that value then, with a warning;
 * but one from the connection's options has kept it from ever taking in the
 * role's own, and the role would go unconfined.  So such a session gets
 * nothing (args.c), as its connection would be refused with preload.
 */
static void
define_scope(void)
{
	bool		set_by_client = scope_source() >= PGC_S_CLIENT;

	DefineCustomStringVariable(SCOPE_SETTING,
							   "The only scope the role may use; empty for all.",
							   "Set it with ALTER ROLE. The default scope then means this one.",
							   &idem_scope,
							   "",
							   PGC_SUSET, 0,
							   check_scope, NULL, NULL);

	idem_scope_forged = set_by_client && scope_source() < PGC_S_CLIENT;
}

/* A threshold of idem_health(); -1 turns the item off. */
static void
define_threshold(const char *name, const char *short_desc, int *variable, int flags)
{
	DefineCustomIntVariable(name, short_desc,
							"idem_health() warns above it. -1 turns the item off.",
							variable,
							*variable, -1, INT_MAX,
							PGC_USERSET, flags,
							NULL, NULL, NULL);
}

static void
define_thresholds(void)
{
	define_threshold("idempotency.health_backlog",
					 "How many expired rows may wait for a sweep.",
					 &idem_health_backlog, 0);
	define_threshold("idempotency.health_sweep_overdue",
					 "How long expired rows may wait for a sweep.",
					 &idem_health_sweep_overdue, GUC_UNIT_S);
	define_threshold("idempotency.health_growth",
					 "How large table and indexes may be, in percent of the rows' bytes.",
					 &idem_health_growth, 0);
	define_threshold("idempotency.health_stuck_claims",
					 "How many claims may be left open after their lease has ended.",
					 &idem_health_stuck_claims, 0);
	define_threshold("idempotency.health_held_unknown",
					 "How many keys may be held with an unknown outcome.",
					 &idem_health_held_unknown, 0);
	define_threshold("idempotency.health_wraparound",
					 "How old the table may be, in percent of autovacuum_freeze_max_age.",
					 &idem_health_wraparound, 0);

	DefineCustomIntVariable("idempotency.health_growth_from",
							"How large table and indexes may be whatever is in them.",
							NULL,
							&idem_health_growth_from,
							256, 0, INT_MAX,
							PGC_USERSET, GUC_UNIT_MB,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.health_stuck_after",
							"How long after its lease's end an open claim counts as stuck.",
							NULL,
							&idem_health_stuck_after,
							600, 0, INT_MAX,
							PGC_USERSET, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomRealVariable("idempotency.health_ttl_too_short",
							 "How many claims may be of keys that expired just before, in percent.",
							 "idem_health() warns above it. -1 turns the item off.",
							 &idem_health_ttl_too_short,
							 1.0, -1.0, 100.0,
							 PGC_USERSET, 0,
							 NULL, NULL, NULL);
}

/* Those of the background worker, which is the server's, not a session's. */
static void
define_worker(void)
{
	DefineCustomBoolVariable("idempotency.worker",
							 "Whether the background worker sweeps.",
							 NULL,
							 &idem_worker,
							 true,
							 PGC_SIGHUP, 0,
							 NULL, NULL, NULL);

	DefineCustomStringVariable("idempotency.databases",
							   "The databases that the background worker sweeps.",
							   "A list of names, or * for all that have the extension.",
							   &idem_database_names,
							   "*",
							   PGC_SIGHUP, GUC_LIST_INPUT,
							   idem_check_databases, NULL, NULL);

	DefineCustomIntVariable("idempotency.naptime",
							"How long the background worker rests between two sweeps of a database.",
							NULL,
							&idem_naptime,
							60, 1, 7 * 24 * 3600,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomStringVariable("idempotency.sweep_window",
							   "The time of day in which the background worker may sweep; empty for always.",
							   "As in 01:00-05:00 or 22:30-06:00, in the time zone of the server's TimeZone.",
							   &sweep_window,
							   "",
							   PGC_SIGHUP, 0,
							   idem_check_window, idem_assign_window, NULL);
}

/* Shared memory is had by preloading, or never. */
static void
define_shared(void)
{
	if (!process_shared_preload_libraries_in_progress)
		return;
	DefineCustomIntVariable("idempotency.stats_databases",
							"How many databases have counters of their own.",
							"Any further ones share their counters.",
							&idem_stats_databases,
							256, 1, 100000,
							PGC_POSTMASTER, 0,
							NULL, NULL, NULL);
}

void
idem_define_settings(void)
{
	DefineCustomIntVariable("idempotency.default_ttl",
							"How long a key is kept when the call gives no ttl.",
							"Counted from the claim, and again from the completion.",
							&idem_default_ttl,
							24 * 3600, 1, INT_MAX,
							PGC_USERSET, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.default_lease",
							"How long a claim belongs to its owner when the call gives no lease.",
							NULL,
							&idem_default_lease,
							5 * 60 * 1000, 1, INT_MAX,
							PGC_USERSET, GUC_UNIT_MS,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.max_response_size",
							"The largest result that is stored: response, headers and body together.",
							"Also the largest state of a checkpoint. A larger one raises IK413.",
							&idem_max_response_size,
							1024 * 1024, 0, MaxAllocSize,
							PGC_SUSET, GUC_UNIT_BYTE,
							NULL, NULL, NULL);

	DefineCustomBoolVariable("idempotency.durable",
							 "Flushes claims and results that outlive their transaction at its commit.",
							 "Also where synchronous_commit is off.",
							 &idem_durable,
							 true,
							 PGC_USERSET, 0,
							 NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.sweep_batch_size",
							"How many rows a sweep deletes in one transaction.",
							NULL,
							&idem_sweep_batch_size,
							1000, 1, 1000000,
							PGC_USERSET, 0,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.sweep_pause",
							"How long a sweep rests between two batches.",
							NULL,
							&idem_sweep_pause,
							0, 0, 3600 * 1000,
							PGC_USERSET, GUC_UNIT_MS,
							NULL, NULL, NULL);

	define_shared();
	define_thresholds();
	define_worker();
	define_scope();
	idem_reserve_prefix("idempotency");
}
