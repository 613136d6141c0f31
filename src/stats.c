/*-------------------------------------------------------------------------
 *
 * stats.c
 *	  Counters of what the extension does in each database.
 *
 * Each database has an entry in shared memory.  A session counts into a struct
 * of its own, and adds it to its database's entry when the transaction has
 * committed, so what was rolled back is not counted.  PREPARE TRANSACTION
 * counts as a commit: whoever commits it later may be in another session,
 * after a restart.  Only a lost claim is counted at once, since the error that
 * tells of it is about to abort the transaction.
 *
 * What a subtransaction counts is taken back if it rolls back (levels.c).
 * Outside of one, counting neither allocates nor locks anything.
 *
 * A sweep with transactions of its own counts its rows, and the time that they
 * took, with each of its batches, and itself as a run at its end: what it has
 * deleted is counted whatever becomes of it.
 *
 * The lock guards which entry is whose, and all that is about sweeps, which is
 * written once a batch; the counters are atomic and need none.  An entry stays
 * where it is as long as its database exists, so that a session has to look
 * for it but once.  When there is no room, the entries of databases that are
 * gone are given away; the databases that still have none share one.
 *
 * There is shared memory only if the library was preloaded.  After a crash it
 * is new, and the counters begin anew.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "fmgr.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/lwlock.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "args.h"
#include "levels.h"
#include "settings.h"
#include "shared.h"
#include "stats.h"

typedef struct Entry
{
	Oid			database;		/* InvalidOid: free */
	uint32		bad_items;		/* of idem_health(), as last reported */
	TimestampTz reset_at;
	int64		sweeping;
	TimestampTz last_batch;
	IdemSweepRun last_sweep;
	char		last_error[IDEM_ERROR_SIZE];
	pg_atomic_uint64 counts[IDEM_NCOUNTERS];
} Entry;

typedef struct Shared
{
	LWLock		lock;
	int			databases;		/* that have an entry of their own at most */
	Entry		common;			/* for those that have none */
	Entry		entries[FLEXIBLE_ARRAY_MEMBER];
} Shared;

static Shared *shared = NULL;
static Entry *own_entry = NULL; /* this database's */

/* The columns of view idempotency_stats. */
typedef enum OutColumn
{
	OUT_CLAIMS,
	OUT_TAKEOVERS,
	OUT_REPLAYS,
	OUT_PROCESSING,
	OUT_MISMATCHES,
	OUT_COMPLETIONS,
	OUT_FAILURES,
	OUT_LOST,
	OUT_ONCE_FIRST,
	OUT_ONCE_AGAIN,
	OUT_SWEPT_ROWS,
	OUT_SWEEP_RUNS,
	OUT_LAST_SWEEP_AT,
	OUT_LAST_SWEEP_DURATION,
	OUT_LAST_SWEEP_ROWS,
	OUT_SWEEP_ERRORS,
	OUT_LAST_SWEEP_ERROR,
	OUT_STATS_RESET,
	OUT_REUSED_AFTER_EXPIRY,
	NOUT
} OutColumn;

static const OutColumn counter_columns[IDEM_NCOUNTERS] = {
	[IDEM_COUNT_CLAIMS] = OUT_CLAIMS,
	[IDEM_COUNT_TAKEOVERS] = OUT_TAKEOVERS,
	[IDEM_COUNT_REPLAYS] = OUT_REPLAYS,
	[IDEM_COUNT_PROCESSING] = OUT_PROCESSING,
	[IDEM_COUNT_MISMATCHES] = OUT_MISMATCHES,
	[IDEM_COUNT_COMPLETIONS] = OUT_COMPLETIONS,
	[IDEM_COUNT_FAILURES] = OUT_FAILURES,
	[IDEM_COUNT_LOST] = OUT_LOST,
	[IDEM_COUNT_ONCE_FIRST] = OUT_ONCE_FIRST,
	[IDEM_COUNT_ONCE_AGAIN] = OUT_ONCE_AGAIN,
	[IDEM_COUNT_SWEPT_ROWS] = OUT_SWEPT_ROWS,
	[IDEM_COUNT_SWEEP_RUNS] = OUT_SWEEP_RUNS,
	[IDEM_COUNT_SWEEP_ERRORS] = OUT_SWEEP_ERRORS,
	[IDEM_COUNT_REUSED] = OUT_REUSED_AFTER_EXPIRY,
};

/* What this transaction has counted. */
typedef struct Pending
{
	uint64		counts[IDEM_NCOUNTERS];
	bool		any;
	bool		swept;
	IdemSweepRun sweep;			/* the last one */
	int64		sweeping;		/* in all of them */
	TimestampTz batch_end;		/* of a run's batch; 0: none */
} Pending;

static Pending pending;
static IdemLevels levels = {&pending, sizeof(pending)};

/* Up to when the time that this session's run takes is counted. */
static TimestampTz run_counted = 0;

/* All but whose it is, and what was reported. */
static void
begin_counts(Entry *entry)
{
	entry->reset_at = GetCurrentTimestamp();
	entry->sweeping = 0;
	entry->last_batch = 0;
	memset(&entry->last_sweep, 0, sizeof(entry->last_sweep));
	entry->last_error[0] = '\0';
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
		pg_atomic_write_u64(&entry->counts[i], 0);
}

static void
begin_entry(Entry *entry, Oid database)
{
	entry->database = database;
	entry->bad_items = 0;
	begin_counts(entry);
}

static void
set_up_entry(Entry *entry)
{
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
		pg_atomic_init_u64(&entry->counts[i], 0);
	begin_entry(entry, InvalidOid);
}

static void
set_up(void *part)
{
	Shared	   *new = part;
	int			tranche = LWLockNewTrancheId();

	LWLockRegisterTranche(tranche, "IdempotencyStats");
	LWLockInitialize(&new->lock, tranche);
	set_up_entry(&new->common);
	new->databases = idem_stats_databases;
	for (int i = 0; i < new->databases; i++)
		set_up_entry(&new->entries[i]);
}

/* The database's entry, or a free one that becomes it, or NULL; locked. */
static Entry *
find_entry(Oid database)
{
	Entry	   *vacant = NULL;

	for (int i = 0; i < shared->databases; i++)
	{
		Entry	   *entry = &shared->entries[i];

		if (entry->database == database)
			return entry;
		if (vacant == NULL && !OidIsValid(entry->database))
			vacant = entry;
	}
	if (vacant != NULL)
		begin_entry(vacant, database);
	return vacant;
}

/*
 * Frees the entries of databases that are gone.  Which ones have entries is
 * read before the catalog is: whoever has one was there by then.
 */
static void
drop_entries_of_dropped(void)
{
	Oid		   *databases = palloc(shared->databases * sizeof(Oid));

	LWLockAcquire(&shared->lock, LW_SHARED);
	for (int i = 0; i < shared->databases; i++)
		databases[i] = shared->entries[i].database;
	LWLockRelease(&shared->lock);

	AcceptInvalidationMessages();
	for (int i = 0; i < shared->databases; i++)
	{
		if (!OidIsValid(databases[i]) ||
			SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(databases[i])))
			continue;
		LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
		if (shared->entries[i].database == databases[i])
			shared->entries[i].database = InvalidOid;
		LWLockRelease(&shared->lock);
	}
	pfree(databases);
}

static Entry *
entry_of(Oid database)
{
	Entry	   *entry;

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	entry = find_entry(database);
	LWLockRelease(&shared->lock);

	if (entry == NULL && IsTransactionState())
	{
		drop_entries_of_dropped();
		LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
		entry = find_entry(database);
		LWLockRelease(&shared->lock);
	}
	return entry != NULL ? entry : &shared->common;
}

/* To be called within the transaction, as it may read catalogs. */
static void
find_own_entry(void)
{
	if (own_entry == NULL)
		own_entry = entry_of(MyDatabaseId);
}

static Pending *
begin_counting(void)
{
	find_own_entry();
	idem_levels_save(&levels);
	pending.any = true;
	return &pending;
}

/* Before a transaction may fail whose end has to be counted all the same. */
void
idem_stats_prepare(void)
{
	if (shared != NULL)
		find_own_entry();
}

/* Counts at commit. */
void
idem_count(IdemCounter counter)
{
	if (shared != NULL)
		begin_counting()->counts[counter]++;
}

/* Counts now, for an error that is about to be raised. */
void
idem_count_lost(void)
{
	if (shared == NULL)
		return;
	find_own_entry();
	pg_atomic_fetch_add_u64(&own_entry->counts[IDEM_COUNT_LOST], 1);
}

/* As much of it as there is room for, in whole characters. */
void
idem_copy_error(char *to, const char *error)
{
	int			len = Min(strlen(error), IDEM_ERROR_SIZE - 1);

	strlcpy(to, error, pg_mbcliplen(error, len, len) + 1);
}

static void
describe_run(IdemSweepRun *run, int64 rows, int64 failed, const char *error,
			 TimestampTz start, TimestampTz end)
{
	run->rows = rows;
	run->failed = failed;
	run->start = start;
	run->end = end;
	idem_copy_error(run->error, error != NULL ? error : "");
}

/* A sweep that is part of the caller's transaction. */
void
idem_count_sweep(int64 rows, int64 failed, int64 errors, const char *error,
				 TimestampTz start, TimestampTz end)
{
	Pending    *p;

	if (shared == NULL)
		return;
	p = begin_counting();
	describe_run(&p->sweep, rows, failed, error, start, end);
	p->swept = true;
	p->sweeping += Max(end - start, 0);
	p->counts[IDEM_COUNT_SWEPT_ROWS] += rows;
	p->counts[IDEM_COUNT_SWEEP_RUNS]++;
	p->counts[IDEM_COUNT_SWEEP_ERRORS] += errors;
}

/*
 * Is this the last one to have ended?  Earlier ones may be counted later; but
 * somebody may have set the clock back since.
 */
static bool
is_last(TimestampTz end, TimestampTz last)
{
	return end >= last || last > GetCurrentTimestamp();
}

static void
note_run(Entry *entry, const IdemSweepRun *run, int64 sweeping)
{
	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	entry->sweeping += Max(sweeping, 0);
	if (is_last(run->end, entry->last_sweep.end))
		entry->last_sweep = *run;
	if (run->error[0] != '\0')
		strlcpy(entry->last_error, run->error, sizeof(entry->last_error));
	LWLockRelease(&shared->lock);
}

/* A sweep with transactions of its own begins.  Needs no transaction. */
void
idem_stats_sweep_begin(TimestampTz start)
{
	run_counted = start;
}

/* One of its batches, counted at commit: only rows that are gone are progress. */
void
idem_count_batch(int64 rows)
{
	Pending    *p;

	if (shared == NULL || rows == 0)
		return;
	p = begin_counting();
	p->counts[IDEM_COUNT_SWEPT_ROWS] += rows;
	p->batch_end = GetCurrentTimestamp();
}

static void
note_batch(TimestampTz end)
{
	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	own_entry->sweeping += Max(end - run_counted, 0);
	if (is_last(end, own_entry->last_batch))
		own_entry->last_batch = end;
	LWLockRelease(&shared->lock);
	run_counted = end;
}

/*
 * Its end.  rows: deleted, and counted already; failed: rows that could not be
 * deleted; errors: what is to be counted, less than that if another run has
 * met with some of them; error: the last message, or NULL.  Needs no
 * transaction.
 */
void
idem_stats_sweep_run(int64 rows, int64 failed, int64 errors, const char *error,
					 TimestampTz start, TimestampTz end)
{
	IdemSweepRun run;

	if (shared == NULL)
		return;
	find_own_entry();
	describe_run(&run, rows, failed, error, start, end);
	pg_atomic_fetch_add_u64(&own_entry->counts[IDEM_COUNT_SWEEP_RUNS], 1);
	pg_atomic_fetch_add_u64(&own_entry->counts[IDEM_COUNT_SWEEP_ERRORS], errors);
	note_run(own_entry, &run, end - run_counted);
}

static void
flush(void)
{
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
		if (pending.counts[i] != 0)
			pg_atomic_fetch_add_u64(&own_entry->counts[i], pending.counts[i]);
	if (pending.swept)
		note_run(own_entry, &pending.sweep, pending.sweeping);
	if (pending.batch_end != 0)
		note_batch(pending.batch_end);
}

static void
at_transaction(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
			if (pending.any)
				flush();
			/* FALLTHROUGH */
		case XACT_EVENT_ABORT:
			if (pending.any || levels.saved != NULL)
				idem_levels_end(&levels);
			break;
		default:
			break;
	}
}

static void
at_subtransaction(SubXactEvent event, SubTransactionId mySubid,
				  SubTransactionId parentSubid, void *arg)
{
	idem_levels_leave(&levels, event);
}

void
idem_stats_init(void)
{
	idem_shared_add("idempotency stats",
					offsetof(Shared, entries) + idem_stats_databases * sizeof(Entry),
					set_up, (void **) &shared);
	RegisterXactCallback(at_transaction, NULL);
	RegisterSubXactCallback(at_subtransaction, NULL);
}

/* This database's figures, as of now; false without shared memory. */
bool
idem_stats_read(IdemStats *stats)
{
	if (shared == NULL)
		return false;
	find_own_entry();
	LWLockAcquire(&shared->lock, LW_SHARED);
	stats->last_sweep = own_entry->last_sweep;
	strlcpy(stats->last_error, own_entry->last_error, sizeof(stats->last_error));
	stats->sweeping = own_entry->sweeping;
	stats->last_batch = own_entry->last_batch;
	stats->reset_at = own_entry->reset_at;
	LWLockRelease(&shared->lock);
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
		stats->counts[i] = pg_atomic_read_u64(&own_entry->counts[i]);
	return true;
}

/*
 * Notes which items of idem_health() are bad now and which are well (bits;
 * others stay as they are), and returns those that have turned.  Where the
 * database has no entry of its own, the caller's memory has to do.
 */
uint32
idem_stats_turn(uint32 bad, uint32 well, uint32 *memory)
{
	uint32		before;

	if (shared != NULL)
		find_own_entry();
	if (shared == NULL || own_entry == &shared->common)
	{
		before = *memory;
		*memory = (before | bad) & ~well;
	}
	else
	{
		LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
		before = own_entry->bad_items;
		own_entry->bad_items = *memory = (before | bad) & ~well;
		LWLockRelease(&shared->lock);
	}
	return before ^ *memory;
}

static void
require_shared_memory(void)
{
	if (shared == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the counters of extension \"%s\" need the library to be preloaded",
						IDEM_EXTENSION),
				 errhint("Add '%s' to shared_preload_libraries, and restart the server.",
						 IDEM_EXTENSION)));
}

/* Databases of several encodings may share an entry. */
static char *
readable(char *text)
{
	if (!pg_verifymbstr(text, strlen(text), true))
		for (char *c = text; *c != '\0'; c++)
			if (IS_HIGHBIT_SET(*c))
				*c = '?';
	return text;
}

static void
fill_last_sweep(Datum *values, bool *nulls, IdemStats *stats)
{
	const IdemSweepRun *run = &stats->last_sweep;

	nulls[OUT_LAST_SWEEP_AT] = nulls[OUT_LAST_SWEEP_DURATION] = nulls[OUT_LAST_SWEEP_ROWS] =
		run->end == 0;
	values[OUT_LAST_SWEEP_AT] = TimestampTzGetDatum(run->end);
	values[OUT_LAST_SWEEP_DURATION] = idem_make_interval(Max(run->end - run->start, 0));
	values[OUT_LAST_SWEEP_ROWS] = Int64GetDatum(run->rows);
	nulls[OUT_LAST_SWEEP_ERROR] = stats->last_error[0] == '\0';
	values[OUT_LAST_SWEEP_ERROR] = CStringGetTextDatum(readable(stats->last_error));
}

/*
 * idem_stats() -> one row
 *
 * What view idempotency_stats shows: this database's counters.
 *
 * Errors: 55000 without preload, 42501.
 */
PG_FUNCTION_INFO_V1(idem_stats);
Datum
idem_stats(PG_FUNCTION_ARGS)
{
	IdemStats	stats = {0};
	TupleDesc	desc;
	Datum		values[NOUT];
	bool		nulls[NOUT] = {0};

	require_shared_memory();
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE || desc->natts != NOUT)
		elog(ERROR, "idem_stats() returns another row type");
	(void) idem_stats_read(&stats);
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
		values[counter_columns[i]] = Int64GetDatum((int64) stats.counts[i]);
	fill_last_sweep(values, nulls, &stats);
	values[OUT_STATS_RESET] = TimestampTzGetDatum(stats.reset_at);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls)));
}

/*
 * idem_stats_reset() -> void
 *
 * Sets this database's counters to zero, at once and for good: a rollback
 * doesn't bring them back.
 *
 * Errors: 55000 without preload, 42501.
 */
PG_FUNCTION_INFO_V1(idem_stats_reset);
Datum
idem_stats_reset(PG_FUNCTION_ARGS)
{
	require_shared_memory();
	find_own_entry();
	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	begin_counts(own_entry);
	LWLockRelease(&shared->lock);
	PG_RETURN_VOID();
}
