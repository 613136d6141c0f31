/*-------------------------------------------------------------------------
 *
 * sweep.c
 *	  Deleting expired rows, one batch at a time.
 *
 * The index on due_at leads to the rows that may have expired, in the order in
 * which they do, so no plan and no statistics come into it.  Each is deleted
 * in the very version that was found expired, without waiting: a row that was
 * claimed again meanwhile has a newer version, and one that somebody is
 * changing or has locked answers so; both are left alone.  No key lock is
 * taken, since no version is made.
 *
 * A batch begins where the last one ended.  Entries of rows that are dead to
 * everybody are marked, as by any scan.  Where a transaction that is still open
 * keeps vacuum and us from that, they are stepped over anew by each sweep, which
 * takes time, too: so the place where a batch ends is an entry's, not a row's.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/itup.h"
#include "access/stratnum.h"
#include "access/tableam.h"
#include "catalog/catalog.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "state.h"
#include "store.h"
#include "sweep.h"
#include "sweep_row.h"

typedef struct DueScan
{
	IdemStore	store;
	MemoryContext context;		/* of all that the scan needs */
	MemoryContext old_context;
	Relation	index;
	IndexScanDesc scan;
	TupleTableSlot *slot;
	List	   *locked;			/* besides the table, in this mode */
	LOCKMODE	lockmode;
	TimestampTz now;
	IdemForeignCode code;		/* that deletions run */
	int64		steps;			/* entries passed in this batch */
	int64		tried;			/* rows of theirs that have expired */
} DueScan;

/* So many entries are passed in any case. */
#define LEAST_STEPS 1000

/*
 * So many waits of foreign code end a batch: whoever waits for us must not wait
 * long.  The second number is for a batch that none goes on behind.
 */
#define MOST_LOCK_TIMEOUTS 10
#define MOST_LOCK_TIMEOUTS_ALONE 1000

/* What a deletion locks besides the table, and looks for its rows in. */
static List *
relations_to_lock(DueScan *d, LOCKMODE lockmode)
{
	Relation	rel = d->store.rel;
	Oid			toast = rel->rd_rel->reltoastrelid;
	List	   *oids = list_make1_oid(d->store.table->due_index);

	if (lockmode == AccessShareLock)
		return oids;
	if (RelationIsLogicallyLogged(rel)) /* for the replica identity */
		oids = list_concat_unique_oid(oids, RelationGetIndexList(rel));
	if (OidIsValid(toast))
	{
		Relation	toast_rel = RelationIdGetRelation(toast);

		oids = lappend_oid(oids, toast);
		oids = list_concat(oids, RelationGetIndexList(toast_rel));
		RelationClose(toast_rel);
	}
	return oids;
}

static void
unlock_relations(DueScan *d)
{
	ListCell   *lc;

	foreach(lc, d->locked)
		UnlockRelationOid(lfirst_oid(lc), d->lockmode);
}

/* All of them, or none. */
static bool
try_lock_relations(DueScan *d, LOCKMODE lockmode)
{
	ListCell   *lc;

	d->locked = NIL;
	d->lockmode = lockmode;
	foreach(lc, relations_to_lock(d, lockmode))
	{
		if (!ConditionalLockRelationOid(lfirst_oid(lc), lockmode))
		{
			unlock_relations(d);
			return false;
		}
		d->locked = lappend_oid(d->locked, lfirst_oid(lc));
	}
	return true;
}

/* False if something can't be had without waiting. */
static bool
open_due_index(DueScan *d, LOCKMODE lockmode)
{
	if (!idem_open_to_sweep(&d->store, lockmode))
		return false;
	if (!OidIsValid(d->store.table->due_index))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" has no index on column \"%s\"",
						IDEM_TABLE, "due_at"),
				 errhint("Create it: CREATE INDEX ON %s (due_at).", IDEM_TABLE)));
	if (!try_lock_relations(d, lockmode))
	{
		idem_close(&d->store);
		return false;
	}
	d->index = index_open(d->store.table->due_index, NoLock);
	return true;
}

static void
leave_context(DueScan *d)
{
	MemoryContextSwitchTo(d->old_context);
	MemoryContextDelete(d->context);
}

/* The same; the scan has a memory context of its own, which becomes current. */
static bool
begin_due_scan(DueScan *d, const IdemSweep *sweep, LOCKMODE lockmode)
{
	ScanKeyData keys[2];
	int			nkeys = 1;

	d->context = AllocSetContextCreate(CurrentMemoryContext, "idempotency sweep",
									   ALLOCSET_DEFAULT_SIZES);
	d->old_context = MemoryContextSwitchTo(d->context);
	if (!open_due_index(d, lockmode))
	{
		leave_context(d);
		return false;
	}
	d->now = GetCurrentTimestamp();

	ScanKeyInit(&keys[0], 1, BTLessEqualStrategyNumber, F_TIMESTAMPTZ_LE,
				TimestampTzGetDatum(d->now));
	if (sweep->position.valid)
		ScanKeyInit(&keys[nkeys++], 1, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE,
					TimestampTzGetDatum(sweep->position.due_at));

	/* SnapshotSelf: what is committed now, without predicate locks. */
	d->scan = idem_index_beginscan(d->store.rel, d->index, SnapshotSelf, nkeys);
	d->scan->xs_want_itup = true;
	index_rescan(d->scan, keys, nkeys, NULL, 0);
	d->slot = table_slot_create(d->store.rel, NULL);
	return true;
}

static void
end_due_scan(DueScan *d)
{
	index_endscan(d->scan);
	ExecDropSingleTupleTableSlot(d->slot);
	index_close(d->index, NoLock);
	d->store.current.slot = NULL;
	if (!d->store.wrote)
		unlock_relations(d);	/* as idem_close() does with the table's */
	idem_close(&d->store);
	leave_context(d);
}

/* Entries of one due_at lie in the order of the places they point to. */
int
idem_compare_entries(const IdemEntry *a, const IdemEntry *b)
{
	if (a->due_at != b->due_at)
		return a->due_at < b->due_at ? -1 : 1;
	return ItemPointerCompare((ItemPointer) &a->place, (ItemPointer) &b->place);
}

/* Goes on to the next entry; false if an earlier batch has done so. */
static bool
advance(DueScan *d, IdemSweep *sweep, ItemPointer place)
{
	bool		isnull;
	IdemEntry	entry = {0};

	entry.due_at = DatumGetTimestampTz(index_getattr(d->scan->xs_itup, 1,
													 d->scan->xs_itupdesc, &isnull));
	entry.place = *place;
	entry.valid = true;
	if (sweep->position.valid && idem_compare_entries(&entry, &sweep->position) <= 0)
		return false;
	sweep->position = entry;
	return true;
}

/* However long it takes to get to where it is to go on, a batch does something. */
static bool
is_over(const DueScan *d, const IdemSweep *sweep)
{
	return (d->tried > 0 || d->steps >= LEAST_STEPS) && idem_ticks_passed(sweep->until);
}

/* The next row that may have expired, in the slot, while there is time. */
static bool
next_due_row(DueScan *d, IdemSweep *sweep)
{
	ItemPointer entry;

	while ((entry = index_getnext_tid(d->scan, ForwardScanDirection)) != NULL)
	{
		CHECK_FOR_INTERRUPTS();
		if (is_over(d, sweep))
		{
			sweep->more = true;
			return false;
		}
		if (!advance(d, sweep, entry))
			continue;
		d->steps++;
		if (index_fetch_heap(d->scan, d->slot))
		{
			slot_getallattrs(d->slot);
			return true;
		}
	}
	return false;
}

/* Is this the row in whose deletion a process has ended? */
static bool
is_deadly(IdemSweep *sweep)
{
	int			cmp;

	if (!sweep->deadly.valid)
		return false;
	cmp = idem_compare_entries(&sweep->position, &sweep->deadly);
	if (cmp >= 0)
		sweep->deadly.valid = false;
	return cmp == 0;
}

/* Deletes the row in the slot, unless that is not to be. */
static bool
try_row(DueScan *d, IdemSweep *sweep)
{
	bool		deadly = is_deadly(sweep);

	if (!d->store.foreign_code)
		return idem_sweep_row(&d->store, d->slot);
	if (!deadly)
		return idem_sweep_row_carefully(&d->store, d->slot, d->index, sweep, &d->code);
	idem_sweep_row_failed(sweep, "foreign keys or triggers have ended the process that ran them");
	return false;
}

/*
 * Deletes up to batch_size expired rows in the current transaction, which
 * needs an active snapshot, and returns how many.
 *
 * Rows that can't be deleted take up room in a batch only if the next one goes
 * on behind them.  On the way to a row in whose deletion a process has ended, a
 * batch is one row, so that what it loses, should another one end, is that row.
 */
int64
idem_sweep_batch(IdemSweep *sweep, int batch_size)
{
	DueScan		d = {0};
	int64		deleted = 0;
	int			size = sweep->deadly.valid ? 1 : batch_size;
	int			most_timeouts = sweep->own_transaction ? MOST_LOCK_TIMEOUTS : MOST_LOCK_TIMEOUTS_ALONE;

	sweep->more = sweep->rows_locked = false;
	sweep->locked_out = !begin_due_scan(&d, sweep, RowExclusiveLock);
	if (sweep->locked_out)
		return 0;
	if (d.store.foreign_code)
		d.store.context = d.code.context =
			AllocSetContextCreate(d.context, "idempotency sweep row", ALLOCSET_DEFAULT_SIZES);

	while (!sweep->more && next_due_row(&d, sweep))
	{
		if (DatumGetTimestampTz(d.slot->tts_values[IDEM_COL_EXPIRES_AT - 1]) > d.now)
			continue;
		d.tried++;
		if (try_row(&d, sweep))
			deleted++;
		sweep->rows_locked = d.code.timeouts >= most_timeouts;
		sweep->more = (sweep->own_transaction ? d.tried : deleted) >= size || sweep->rows_locked;
	}
	end_due_scan(&d);
	sweep->deleted += deleted;
	return deleted;
}

/*
 * About how many rows a sweep has before it: the entries of the index, counted
 * up to limit, and while there is time (until; 0: for ever).  Some may be dead,
 * or not quite expired.
 */
int64
idem_sweep_estimate(int64 limit, IdemTicks until)
{
	IdemSweep	from_start = {0};
	DueScan		d = {0};
	int64		n = 0;

	if (!begin_due_scan(&d, &from_start, AccessShareLock))
		return 0;
	while (n < limit && index_getnext_tid(d.scan, ForwardScanDirection) != NULL)
	{
		CHECK_FOR_INTERRUPTS();
		n++;
		if (idem_ticks_passed(until))
			break;
	}
	end_due_scan(&d);
	return n;
}

/* How far it has got, for people to read; palloc'd. */
char *
idem_sweep_progress(const IdemSweep *sweep, int64 estimate)
{
	return psprintf(INT64_FORMAT " of about %s" INT64_FORMAT " expired rows deleted",
					sweep->deleted, estimate == IDEM_ESTIMATE_UP_TO ? "more than " : "",
					Max(estimate, sweep->deleted));
}
