/*-------------------------------------------------------------------------
 *
 * sweep_row.c
 *	  Deleting one row of a sweep.
 *
 * Where somebody's triggers or foreign keys come into it, that is code that
 * isn't ours: it may fail, wait, take its time, or do away with what we have
 * open.  Whatever it does, it costs its own row and not the sweep.
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

/* How long code that isn't ours may take for one row of a batch that is to end. */
#define ROW_LASTS 1000			/* milliseconds */
#define SHORTEST_LOCK_TIMEOUT "1ms"

static volatile sig_atomic_t took_too_long = false;

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

/* Somebody's cancel, or a statement's timeout: not the trigger's that says so. */
static bool
is_cancel(const ErrorData *error)
{
	return error->sqlerrcode == ERRCODE_QUERY_CANCELED &&
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

static void
note_error(IdemSweep *sweep, const char *message)
{
	idem_copy_error(sweep->error, message);
	sweep->failed++;
}

static void
cancel_row(void)
{
	took_too_long = true;
	InterruptPending = true;
	QueryCancelPending = true;
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
	took_too_long = false;
	if (sweep->until != 0)
		enable_timeout_after(row_timeout(), ROW_LASTS);
}

/* A cancel that comes too late for the row is none for the sweep. */
static void
finish_row(const IdemSweep *sweep)
{
	if (sweep->until != 0)
		disable_timeout(row_timeout(), false);
	if (took_too_long)
		QueryCancelPending = false;
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
		finish_row(sweep);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		ErrorData  *error;

		finish_row(sweep);
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
		if (error->sqlerrcode == ERRCODE_LOCK_NOT_AVAILABLE)
			code->timeouts++;
		else if (!is_cancel(error))
			note_error(sweep, error->message);
		else if (took_too_long)
			note_error(sweep, "foreign keys and triggers took longer than a second");
		else
			ReThrowError(error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	MemoryContextReset(code->context);
	CurrentResourceOwner = owner;
	return deleted;
}
