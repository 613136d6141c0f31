/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  What the processes of the background worker have in common.
 *
 * There are two kinds.  The launcher (launcher.c) lives as long as the server
 * and is connected to no database, so that it stands in nobody's way; it knows
 * which database is due.  A sweeper (sweeper.c) connects to one database,
 * deletes expired rows for a second at most, and is gone.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "miscadmin.h"
#include "port/atomics.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lock.h"
#include "tcop/tcopprot.h"
#include "utils/elog.h"
#include "utils/guc.h"
#include "utils/inval.h"

#include "compat.h"
#include "idempotency.h"
#include "notice.h"
#include "shared.h"
#include "worker.h"

static emit_log_hook_type next_log_hook = NULL;
static volatile sig_atomic_t terminated = false;

/*
 * Has somebody stopped the worker?  In shared memory, for a launcher that the
 * postmaster is about to restart.  Without preload that one is not known of.
 */
static pg_atomic_uint32 *stopped = NULL;

/* All but when it starts, when it is restarted, and who hears of it. */
void
idem_worker_describe(BackgroundWorker *worker, const char *type, const char *function)
{
	memset(worker, 0, sizeof(*worker));
	worker->bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker->bgw_start_time = BgWorkerStart_RecoveryFinished;
	strlcpy(worker->bgw_library_name, IDEM_EXTENSION, sizeof(worker->bgw_library_name));
	strlcpy(worker->bgw_function_name, function, sizeof(worker->bgw_function_name));
	strlcpy(worker->bgw_name, type, sizeof(worker->bgw_name));
	strlcpy(worker->bgw_type, type, sizeof(worker->bgw_type));
}

/*
 * The server ends a background worker with a FATAL error.  That is how each
 * shutdown and each DROP DATABASE ... WITH (FORCE) goes, so it is none to show
 * in the log; the postmaster notes the exit, as that of its own launchers.
 */
static void
hide_termination(ErrorData *edata)
{
	if (edata->elevel == FATAL && edata->sqlerrcode == ERRCODE_ADMIN_SHUTDOWN)
		edata->output_to_server = false;
	else if (next_log_hook != NULL)
		next_log_hook(edata);
}

/* Does what die() does, or it would not end a wait for a lock. */
static void
note_termination(SIGNAL_ARGS)
{
	terminated = true;
	die(postgres_signal_arg);
}

bool
idem_worker_was_terminated(void)
{
	return terminated;
}

static bool
make_zero(int *newval, void **extra, GucSource source)
{
	*newval = 0;
	return true;
}

/*
 * A sweeper is a member of the launcher's lock group, so it can't lead one of its
 * own.  Code that a deletion runs may have its own settings, which count for
 * nothing here.
 */
static void
forbid_parallel_workers(void)
{
	static const char *const settings[] = {
		"max_parallel_workers_per_gather", "max_parallel_maintenance_workers"
	};

	for (int i = 0; i < lengthof(settings); i++)
	{
		struct config_generic *setting = idem_find_setting(settings[i]);

		if (setting == NULL || setting->vartype != PGC_INT)
			elog(ERROR, "there is no setting \"%s\"", settings[i]);
		((struct config_int *) setting)->check_hook = make_zero;
		SetConfigOption(settings[i], "0", PGC_SUSET, PGC_S_OVERRIDE);
	}
}

/* Settings of the server, a database or a role that would be in the way. */
static void
override_settings(void)
{
	static const char *const settings[][2] = {
		{"search_path", "pg_catalog, pg_temp"},
		{"role", "none"},
		{"default_transaction_read_only", "off"},
		{"default_transaction_isolation", "read committed"},
		{"default_transaction_deferrable", "off"},
		{"statement_timeout", "0"},
		{"lock_timeout", "0"},
		{"idle_in_transaction_session_timeout", "0"},
		{"transaction_timeout", "0"},	/* from 17 on */
		{"exit_on_error", "off"},

		/*
		 * A deletion that a crash undoes is done again, and what was claimed
		 * since is behind it in the WAL.  No commit waits for a standby either.
		 */
		{"synchronous_commit", "off"},
	};

	for (int i = 0; i < lengthof(settings); i++)
		if (idem_find_setting(settings[i][0]) != NULL)
			SetConfigOption(settings[i][0], settings[i][1], PGC_SUSET, PGC_S_OVERRIDE);
}

/* The beginning of a worker's process, before it connects. */
void
idem_worker_begin(void)
{
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, note_termination);
	next_log_hook = emit_log_hook;
	emit_log_hook = hide_termination;
	override_settings();
	forbid_parallel_workers();
	BackgroundWorkerUnblockSignals();
}

/*
 * Locks an object for this transaction, as LockSharedObject() and
 * LockDatabaseObject() do, unless that would mean to wait.
 */
bool
idem_try_lock_object(Oid database, Oid class, Oid object, LOCKMODE mode)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, database, class, object, 0);
	if (LockAcquire(&tag, mode, false, true) == LOCKACQUIRE_NOT_AVAIL)
		return false;
	AcceptInvalidationMessages();
	return true;
}

/* With a full barrier: whoever looks for a launcher afterwards misses none. */
void
idem_worker_set_stopped(bool value)
{
	if (stopped != NULL)
		(void) pg_atomic_exchange_u32(stopped, value);
}

bool
idem_worker_is_stopped(void)
{
	return stopped != NULL && pg_atomic_read_u32(stopped) != 0;
}

static void
set_up(void *part)
{
	pg_atomic_init_u32(part, false);
}

/*
 * To be called when the library is loaded.  pg_upgrade's servers have no
 * worker: nothing may change there but what it changes itself.
 */
void
idem_worker_init(void)
{
	BackgroundWorker launcher;

	if (!process_shared_preload_libraries_in_progress)
		return;
	idem_notice_init();
	idem_shared_add("idempotency worker", sizeof(*stopped), set_up, (void **) &stopped);
	if (IsBinaryUpgrade)
		return;
	idem_launcher_describe(&launcher);
	RegisterBackgroundWorker(&launcher);
}
