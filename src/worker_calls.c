/*-------------------------------------------------------------------------
 *
 * worker_calls.c
 *	  idem_start_worker and idem_stop_worker: the background worker by hand.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/xlog.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "pgstat.h"

#include "compat.h"
#include "settings.h"
#include "ticks.h"
#include "worker.h"

static void
rest(void)
{
	static uint32 wait_event = 0;

	if (wait_event == 0)
		wait_event = idem_wait_event_new("IdempotencyWorkerChange");
	idem_sleep_once(10, wait_event);
}

static BackgroundWorkerHandle *
register_launcher(void)
{
	BackgroundWorker launcher;
	BackgroundWorkerHandle *handle;

	idem_launcher_describe(&launcher);
	launcher.bgw_notify_pid = MyProcPid;
	if (!RegisterDynamicBackgroundWorker(&launcher, &handle))
		ereport(ERROR,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("could not start the idempotency worker: no free background worker slot"),
				 errhint("Raise \"max_worker_processes\": the worker takes two.")));
	return handle;
}

static void
require_workers(void)
{
	if (RecoveryInProgress())
		ereport(ERROR,
				(errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				 errmsg("cannot execute %s during recovery", "idem_start_worker()"),
				 errhint("There is nothing to sweep on a standby. A worker that is preloaded starts when it is promoted.")));
	if (!IsUnderPostmaster || IsBinaryUpgrade)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("there are no background workers in this mode of the server"),
				 errhint("Use CALL idem_sweep_all().")));
}

/*
 * idem_start_worker() -> int
 *
 * Starts the background worker until the server's next restart, where it
 * doesn't run, and returns its process id.
 *
 * Errors: 25006 on a standby; 53400 without a free background worker slot;
 * 55000 where there can't be one, or if it doesn't start.
 */
PG_FUNCTION_INFO_V1(idem_start_worker);
Datum
idem_start_worker(PG_FUNCTION_ARGS)
{
	int			launcher;
	BackgroundWorkerHandle *handle;

	idem_worker_set_stopped(false);
	launcher = idem_launcher_pid();
	if (launcher != 0)
		PG_RETURN_INT32(launcher);
	require_workers();
	handle = register_launcher();

	/* It need not be ours: somebody else may have had the same idea. */
	for (;;)
	{
		pid_t		pid;
		bool		stopped = GetBackgroundWorkerPid(handle, &pid) == BGWH_STOPPED;

		launcher = idem_launcher_pid();
		if (launcher != 0)
			break;
		if (stopped)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("could not start the idempotency worker"),
					 errhint("The server's log may tell why.")));
		rest();
	}
	if (!idem_worker)
		ereport(NOTICE,
				(errmsg("the idempotency worker does nothing while \"%s\" is off",
						"idempotency.worker")));
	PG_RETURN_INT32(launcher);
}

/*
 * idem_stop_worker() -> boolean
 *
 * Stops the background worker until idem_start_worker() or the server's next
 * restart, and waits for its end; false if none runs.  One that has just ended
 * by other means, and would be restarted, stays away as well.
 */
PG_FUNCTION_INFO_V1(idem_stop_worker);
Datum
idem_stop_worker(PG_FUNCTION_ARGS)
{
	int			launcher;

	/* A standby's promotion starts the worker, and nothing else can. */
	if (!RecoveryInProgress())
		idem_worker_set_stopped(true);
	launcher = idem_launcher_pid();
	if (launcher == 0)
		PG_RETURN_BOOL(false);
	if (kill(launcher, SIGUSR2) != 0 && errno != ESRCH)
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not send signal to process %d: %m", launcher)));
	while (idem_launcher_pid() == launcher)
		rest();
	PG_RETURN_BOOL(true);
}
