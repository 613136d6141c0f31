/*-------------------------------------------------------------------------
 *
 * sweep_row.c
 *	  Deleting one row of a sweep.
 *
 * Where somebody's triggers or foreign keys come into it, that is code that
 * isn't ours: it may fail, wait, take its time, or do away with what we have
 * open.  Whatever it does, it costs its own row and not the sweep.  It may even
 * end the process (with exit_on_error, say), which is the worker's to survive:
 * the row is written down before it is tried.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/htup_details.h"
#include "access/xact.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "storage/latch.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timeout.h"

#include "sweep_row.h"
#include "worker.h"

/*
 * How long code that isn't ours may take for one row of a batch that is to end,
 * how long to heed a cancel, and how many of them it may catch; milliseconds.
 */
#define ROW_LASTS 1000
#define CANCEL_LASTS 100
#define MOST_CANCELS 5
#define SHORTEST_LOCK_TIMEOUT "1ms"

static volatile sig_atomic_t cancels = 0;	/* because the row took too long */

/* Deletes the version in the slot, unless somebody else is at the row. */
bool
idem_sweep_row(IdemStore *store, TupleTableSlot *slot)
{
	HeapTuple	tuple = ((BufferHeapTupleTableSlot *) slot)->base.tuple;

	store->current.exists = true;
	store->current.slot = slot;
	store->current.row_locked = !(tuple->t_data->t_infomask & HEAP_XMAX_INVALID);
	return idem_delete(store) == TM_Ok;
}

/* Of an interrupt, such as a cancel or a timeout: not a trigger's that says so. */
static bool
is_interrupt(const ErrorData *error, int sqlerrcode)
{
	return error->sqlerrcode == sqlerrcode &&
		error->funcname != NULL && strcmp(error->funcname, "ProcessInterrupts") == 0;
}

/*
 * A foreign key may be checked when the transaction ends, and would undo the
 * whole batch then.  In a transaction that does nothing else it need not be.
 */
static void
check_constraints_at_once(void)
{
	ConstraintsSetStmt *all = makeNode(ConstraintsSetStmt);

	all->deferred = false;
	AfterTriggerSetState(all);
}

void
idem_sweep_row_failed(IdemSweep *sweep, const char *why)
{
	idem_copy_error(sweep->error, why);
	sweep->failed++;
}

static TimeoutId row_timeout(void);

/* Code that catches cancels ends the process. */
static void
cancel_row(void)
{
	if (cancels++ < MOST_CANCELS)
	{
		QueryCancelPending = true;
		enable_timeout_after(row_timeout(), CANCEL_LASTS);
	}
	else
		ProcDiePending = true;
	InterruptPending = true;
	SetLatch(MyLatch);
}

static TimeoutId
row_timeout(void)
{
	static TimeoutId id = MAX_TIMEOUTS;

	if (id == MAX_TIMEOUTS)
		id = RegisterTimeout(USER_TIMEOUT, cancel_row);
	return id;
}

static void
start_row(const IdemSweep *sweep)
{
	if (sweep->trying != NULL)
		*sweep->trying = sweep->position;
	if (sweep->until != 0)
	{
		cancels = 0;
		enable_timeout_after(row_timeout(), ROW_LASTS);
	}
}

/*
 * Returns whether the row took too long.  A cancel that comes too late for it is
 * none for the sweep, and no end of the process either.
 */
static bool
finish_row(const IdemSweep *sweep)
{
	bool		took_too_long = false;

	if (sweep->until != 0)
	{
		disable_timeout(row_timeout(), false);
		took_too_long = cancels > 0;
		if (took_too_long)
			QueryCancelPending = false;
		if (cancels > MOST_CANCELS)
		{
			ProcDiePending = false;
			if (idem_worker_was_terminated())	/* by others, or just now */
				ProcDiePending = InterruptPending = true;
		}
	}
	if (sweep->trying != NULL)
		sweep->trying->valid = false;
	return took_too_long;
}

/*
 * After an error: what foreign code has done to the table is undone, and we
 * have it open.
 */
static void
refresh_relation(Relation rel)
{
	RelationClose(RelationIdGetRelation(RelationGetRelid(rel)));
}

/*
 * The same where that runs code that isn't ours, such as the check of a
 * foreign key that somebody made: its error costs this row only, and where it
 * would wait for a lock, the row is left for the next sweep.
 *
 * What the write needs is made and given back within the subtransaction, whose
 * resources end with it; what is left of an error goes with the context.
 */
bool
idem_sweep_row_carefully(IdemStore *store, TupleTableSlot *slot, Relation index,
						 IdemSweep *sweep, IdemForeignCode *code)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	volatile bool deleted = false;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(code->context);
	PG_TRY();
	{
		int			nestlevel = NewGUCNestLevel();

		start_row(sweep);
		if (sweep->own_transaction)
			check_constraints_at_once();
		(void) set_config_option("lock_timeout", SHORTEST_LOCK_TIMEOUT,
								 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
		deleted = idem_sweep_row(store, slot);
		if (store->writer != NULL)
			idem_writer_end(store);
		AtEOXact_GUC(false, nestlevel);
		(void) finish_row(sweep);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		bool		took_too_long = finish_row(sweep);
		ErrorData  *error;

		MemoryContextSwitchTo(code->context);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(code->context);
		CurrentResourceOwner = owner;
		store->writer = NULL;
		deleted = false;
		refresh_relation(store->rel);
		refresh_relation(index);
		if (is_interrupt(error, ERRCODE_LOCK_NOT_AVAILABLE))
			code->timeouts++;
		else if (!is_interrupt(error, ERRCODE_QUERY_CANCELED))
			idem_sweep_row_failed(sweep, error->message);
		else if (took_too_long)
			idem_sweep_row_failed(sweep, "foreign keys and triggers took longer than a second");
		else
			ReThrowError(error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	MemoryContextReset(code->context);
	CurrentResourceOwner = owner;
	return deleted;
}
