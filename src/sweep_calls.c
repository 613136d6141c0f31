/*-------------------------------------------------------------------------
 *
 * sweep_calls.c
 *	  idem_sweep and idem_sweep_all: sweeping by hand, or by any scheduler.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "executor/spi.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "pgstat.h"
#include "utils/backend_status.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "args.h"
#include "settings.h"
#include "stats.h"
#include "sweep.h"
#include "ticks.h"

#define NOTICE_EVERY 5000		/* milliseconds */
/* VACUUM locks the table for a moment to give space back to the system. */
#define LOCKED_TRIES	10
#define LOCKED_PAUSE	(USECS_PER_SEC / 10)

static int
arg_count(FunctionCallInfo fcinfo, int arg, const char *what, int otherwise)
{
	int			value;

	if (PG_ARGISNULL(arg))
		return otherwise;
	value = PG_GETARG_INT32(arg);
	if (value < 1)
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("%s must be greater than zero", what),
				 errhint("Leave it out for the default.")));
	return value;
}

static void
report_errors(const IdemSweep *sweep)
{
	if (sweep->failed > 0)
		ereport(WARNING,
				(errmsg_plural("could not delete " INT64_FORMAT " expired idempotency key",
							   "could not delete " INT64_FORMAT " expired idempotency keys",
							   (unsigned long) sweep->failed, sweep->failed),
				 errdetail("The last error was: %s", sweep->error),
				 sweep->own_transaction ?
				 errhint("Look for foreign keys and triggers on table \"%s\".", IDEM_TABLE) :
				 errhint("Look for foreign keys and triggers on table \"%s\". Where one is deferred, run SET CONSTRAINTS ALL IMMEDIATE before.",
						 IDEM_TABLE)));
	if (sweep->rows_locked && !sweep->own_transaction)
		ereport(WARNING,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("skipped expired idempotency keys because of locks on what refers to them"),
				 errhint("CALL idem_sweep_all() sees to those behind them now, the next sweep to these.")));
	if (sweep->locked_out)
		ereport(WARNING,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("skipped sweeping table \"%s\" because it is locked", IDEM_TABLE),
				 errhint("The next sweep will see to it.")));
}

/* What went wrong, though no error was raised. */
static const char *
last_error(const IdemSweep *sweep)
{
	return sweep->locked_out ? "the table is locked" : sweep->error;
}

static int64
count_errors(const IdemSweep *sweep)
{
	return sweep->failed + (sweep->locked_out ? 1 : 0);
}

/*
 * idem_sweep(batch_size int) -> bigint
 *
 * Deletes one batch of expired rows (default: idempotency.sweep_batch_size) in
 * the caller's transaction, and returns how many.  Waits for no lock: a row
 * that somebody is changing, or has locked, is left for the next sweep.
 *
 * Errors: IK400, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_sweep);
Datum
idem_sweep(PG_FUNCTION_ARGS)
{
	IdemSweep	sweep = {0};
	int			batch_size = arg_count(fcinfo, 0, "batch_size", idem_sweep_batch_size);
	TimestampTz start = GetCurrentTimestamp();

	idem_require_writable("idem_sweep()");
	idem_sweep_batch(&sweep, batch_size);
	idem_count_sweep(sweep.deleted, sweep.failed, count_errors(&sweep), last_error(&sweep), start, GetCurrentTimestamp());
	report_errors(&sweep);
	PG_RETURN_INT64(sweep.deleted);
}

static void
next_transaction(void)
{
	SPI_commit();
	SPI_start_transaction();
}

/*
 * One batch in a transaction of its own; the next one begins at once.  What the
 * sweep says stays true if the transaction fails.
 */
static void
sweep_and_commit(IdemSweep *sweep, int batch_size)
{
	IdemSweep	further = *sweep;

	PushActiveSnapshot(GetTransactionSnapshot());
	idem_count_batch(idem_sweep_batch(&further, batch_size));
	PopActiveSnapshot();
	next_transaction();
	*sweep = further;
}

/*
 * Sleeps in a transaction that has no snapshot and no lock; the batch gets a new
 * one, which is as old as the batch.
 */
static void
rest(int64 pause)
{
	if (pause == 0)
		return;
	idem_sleep_between_batches(pause);
	next_transaction();
}

/* In pg_stat_activity at each batch, to the client every few seconds. */
static void
show_progress(const IdemSweep *sweep, int64 estimate, IdemTicks *next_notice)
{
	char	   *text = idem_sweep_progress(sweep, estimate);
	char	   *activity = psprintf("CALL idem_sweep_all(): %s", text);

	pgstat_report_activity(STATE_RUNNING, activity);
	if (idem_ticks() >= *next_notice)
	{
		ereport(NOTICE, (errmsg("%s", text)));
		*next_notice = idem_ticks_after(idem_ticks(), NOTICE_EVERY);
	}
	pfree(activity);
	pfree(text);
}

static void
require_own_transactions(FunctionCallInfo fcinfo)
{
	if (fcinfo->context == NULL || !IsA(fcinfo->context, CallContext) ||
		castNode(CallContext, fcinfo->context)->atomic)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_TRANSACTION_TERMINATION),
				 errmsg("idem_sweep_all() cannot run inside a transaction block"),
				 errhint("Call it by itself, or use idem_sweep() for one batch in this transaction.")));
}

/* Until no row is left, or so many batches are done. */
static void
sweep_in_batches(IdemSweep *sweep, int batch_size, int max_batches, int64 pause)
{
	IdemTicks	next_notice = idem_ticks_after(idem_ticks(), NOTICE_EVERY);
	int64		estimate;

	PushActiveSnapshot(GetTransactionSnapshot());
	estimate = idem_sweep_estimate(IDEM_ESTIMATE_UP_TO, 0);
	PopActiveSnapshot();
	for (int batch = 1;; batch++)
	{
		sweep_and_commit(sweep, batch_size);
		for (int tries = 1; sweep->locked_out && tries < LOCKED_TRIES; tries++)
		{
			rest(LOCKED_PAUSE);
			sweep_and_commit(sweep, batch_size);
		}
		show_progress(sweep, estimate, &next_notice);
		if (!sweep->more || batch == max_batches)
			break;
		rest(pause);
	}
}

/* The same, and it counts as a run even if an error or a cancel ends it. */
static void
sweep_and_count(IdemSweep *sweep, int batch_size, int max_batches, int64 pause)
{
	MemoryContext context = CurrentMemoryContext;
	TimestampTz start = GetCurrentTimestamp();

	idem_stats_prepare();
	idem_stats_sweep_begin(start);
	PG_TRY();
	{
		sweep_in_batches(sweep, batch_size, max_batches, pause);
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		idem_stats_sweep_run(sweep->deleted, sweep->failed, sweep->failed + 1, error->message,
							 start, GetCurrentTimestamp());
		FreeErrorData(error);
		PG_RE_THROW();
	}
	PG_END_TRY();
	idem_stats_sweep_run(sweep->deleted, sweep->failed, count_errors(sweep), last_error(sweep),
						 start, GetCurrentTimestamp());
}

/*
 * CALL idem_sweep_all(batch_size int, max_batches int, pause interval)
 *
 * Deletes expired rows, each batch in its own transaction, until none is left
 * or max_batches are done, with a pause between them (default:
 * idempotency.sweep_pause).
 *
 * Errors: IK400, 25006, 42501; 2D000 in a transaction block.
 */
PG_FUNCTION_INFO_V1(idem_sweep_all);
Datum
idem_sweep_all(PG_FUNCTION_ARGS)
{
	IdemSweep	sweep = {0};
	int			batch_size = arg_count(fcinfo, 0, "batch_size", idem_sweep_batch_size);
	int			max_batches = arg_count(fcinfo, 1, "max_batches", INT_MAX);
	int64		pause = PG_ARGISNULL(2) ? idem_sweep_pause * INT64CONST(1000) :
		idem_arg_duration(fcinfo, 2, "pause", true);

	require_own_transactions(fcinfo);
	idem_require_writable("idem_sweep_all()");
	sweep.own_transaction = true;

	SPI_connect_ext(SPI_OPT_NONATOMIC);

	/*
	 * Where nobody may commit, as in a loop over a cursor that writes, the caller
	 * hears of it here: that is no run, and no error of one.
	 */
	next_transaction();
	sweep_and_count(&sweep, batch_size, max_batches, pause);
	SPI_finish();
	report_errors(&sweep);
	PG_RETURN_VOID();
}
