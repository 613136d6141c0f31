/*-------------------------------------------------------------------------
 *
 * survey.c
 *	  What there is in idempotency_keys: rows by state, and bytes.
 *
 * The summary reads the whole table.  What is asked for again and again must
 * not: it reads a sample of pages, at equal distances from a random one, so that
 * each page has the same chance (single pages, since the rows of one incident
 * lie together), and counts what the index on due_at leads to, up to a limit:
 * there lie the rows that have expired, and at infinity those that are held.  A
 * table of no more pages than the sample has is read whole.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/stratnum.h"
#include "access/tableam.h"
#include "executor/tuptable.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "args.h"
#include "compat.h"
#include "settings.h"
#include "state.h"
#include "survey.h"

#define SAMPLE_PAGES 2048		/* 16 MB */

/* Where a sample is cut short, its pages still come from all over the table. */
#define SAMPLE_STEP 1103		/* odd, so that each page has its turn */

/* Entries of dead rows that a count may come across, beyond its limit. */
#define DEAD_ENTRIES INT64CONST(100000)

/*
 * Who looks on must not make others' serializable transactions fail, as a scan
 * with an MVCC snapshot does in one; without it, a row that is written meanwhile
 * may be counted twice, or not at all.
 */
static Snapshot
snapshot(void)
{
	return IsolationIsSerializable() ? SnapshotSelf : GetActiveSnapshot();
}

static void
begin_survey(IdemSurvey *survey)
{
	survey->now = GetCurrentTimestamp();
	memset(survey->rows, 0, sizeof(survey->rows));
	survey->expired = 0;
	survey->oldest = DT_NOEND;
	survey->stuck = survey->stuck_clump = 0;
	survey->bytes = 0;
	survey->scale = 1.0;
}

/* A row that somebody wrote by hand may have expired for ever. */
static TimestampTz
older(TimestampTz oldest, TimestampTz expiry)
{
	return TIMESTAMP_NOT_FINITE(expiry) ? oldest : Min(oldest, expiry);
}

static void
count_row(IdemStore *store, IdemSurvey *survey, TupleTableSlot *slot)
{
	IdemVersion version = {0};
	IdemStatus	status;

	CHECK_FOR_INTERRUPTS();
	slot_getallattrs(slot);
	version.exists = true;
	version.slot = slot;
	survey->bytes += ((BufferHeapTupleTableSlot *) slot)->base.tuple->t_len + sizeof(ItemIdData);
	if (!idem_is_live(&version, survey->now))
	{
		survey->expired++;
		survey->oldest = older(survey->oldest, idem_instant(&version, IDEM_COL_EXPIRES_AT));
		return;
	}
	status = idem_status_at(store, &version, survey->now);
	survey->rows[status]++;
	if (status == IDEM_PROCESSING &&
		idem_instant(&version, IDEM_COL_LEASE_UNTIL) < survey->stuck_since)
		survey->stuck++;
}

/* Reads the whole table. */
void
idem_survey(IdemStore *store, IdemSurvey *survey)
{
	TupleTableSlot *slot = table_slot_create(store->rel, NULL);
	TableScanDesc scan = table_beginscan(store->rel, snapshot(), 0, NULL);

	begin_survey(survey);
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
		count_row(store, survey, slot);
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
}

static void
survey_page(IdemStore *store, IdemSurvey *survey, TupleTableSlot *slot, BlockNumber page)
{
	ItemPointerData from;
	ItemPointerData to;
	TableScanDesc scan;
	int64		stuck = survey->stuck;

	ItemPointerSet(&from, page, FirstOffsetNumber);
	ItemPointerSet(&to, page, MaxOffsetNumber);
	scan = table_beginscan_tidrange(store->rel, snapshot(), &from, &to);
	while (table_scan_getnextslot_tidrange(scan, ForwardScanDirection, slot))
		count_row(store, survey, slot);
	table_endscan(scan);
	survey->stuck_clump = Max(survey->stuck_clump, survey->stuck - stuck);
}

/* Reads some megabytes. */
void
idem_survey_sample(IdemStore *store, IdemSurvey *survey)
{
	BlockNumber pages = RelationGetNumberOfBlocks(store->rel);
	double		distance = (double) pages / SAMPLE_PAGES;
	TupleTableSlot *slot;
	double		first;
	int			read;

	if (pages <= SAMPLE_PAGES)
	{
		idem_survey(store, survey);
		return;
	}
	begin_survey(survey);
	first = distance * idem_random_fraction();
	slot = table_slot_create(store->rel, NULL);
	for (read = 0; read < SAMPLE_PAGES && !idem_ticks_passed(survey->until); read++)
		survey_page(store, survey, slot,
					(BlockNumber) Min(first + (read * SAMPLE_STEP % SAMPLE_PAGES) * distance, pages - 1));
	survey->scale = (double) pages / Max(read, 1);
	ExecDropSingleTupleTableSlot(slot);
}

/* May the row be counted?  Held ones are kept whatever the clock says. */
static bool
is_due(IdemStore *store, const IdemVersion *version, TimestampTz now, bool held)
{
	if (held)
		return idem_status_at(store, version, now) == IDEM_UNKNOWN;
	return !idem_is_live(version, now);
}

static IdemDueRows
due_rows(IdemStore *store, StrategyNumber strategy, TimestampTz bound, bool held, int64 limit,
		 IdemTicks until)
{
	IdemDueRows found = {0, DT_NOEND, false};
	TimestampTz now = GetCurrentTimestamp();
	int64		entries = 0;
	IdemVersion version = {0};
	ScanKeyData key;
	Relation	index;
	IndexScanDesc scan;

	if (!OidIsValid(store->table->due_index))
		return found;
	index = index_open(store->table->due_index, AccessShareLock);
	version.exists = true;
	version.slot = table_slot_create(store->rel, NULL);
	ScanKeyInit(&key, 1, strategy,
				strategy == BTLessEqualStrategyNumber ? F_TIMESTAMPTZ_LE : F_TIMESTAMPTZ_GE,
				TimestampTzGetDatum(bound));
	scan = idem_index_beginscan(store->rel, index, snapshot(), 1);
	index_rescan(scan, &key, 1, NULL, 0);
	while (found.rows < limit && entries < limit + DEAD_ENTRIES && !found.all && !idem_ticks_passed(until))
	{
		ItemPointer tid = index_getnext_tid(scan, ForwardScanDirection);

		CHECK_FOR_INTERRUPTS();
		entries++;
		if (tid == NULL)
			found.all = true;
		else if (index_fetch_heap(scan, version.slot))
		{
			slot_getallattrs(version.slot);
			if (!is_due(store, &version, now, held))
				continue;
			found.rows++;
			found.oldest = older(found.oldest, idem_instant(&version, IDEM_COL_EXPIRES_AT));
		}
	}
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(version.slot);
	index_close(index, AccessShareLock);
	return found;
}

/* The rows that wait for a sweep. */
IdemDueRows
idem_expired_rows(IdemStore *store, int64 limit, IdemTicks until)
{
	return due_rows(store, BTLessEqualStrategyNumber, GetCurrentTimestamp(), false, limit, until);
}

/* The rows of unknown outcome, which wait for idem_resolve(). */
IdemDueRows
idem_held_rows(IdemStore *store, int64 limit, IdemTicks until)
{
	return due_rows(store, BTGreaterEqualStrategyNumber, DT_NOEND, true, limit, until);
}

#define SUMMARY_COLUMNS (IDEM_NSTATUS + 6)

/*
 * idem_summary() -> one row
 *
 * What view idempotency_summary shows: the rows by the status they have now,
 * those that have expired apart, the sizes of it all, and how many of those
 * processing have been left behind (idempotency.health_stuck_after).
 *
 * Errors: 42501.
 */
PG_FUNCTION_INFO_V1(idem_summary);
Datum
idem_summary(PG_FUNCTION_ARGS)
{
	IdemStore	store = {0};
	IdemSurvey	survey = {0};
	TupleDesc	desc;
	Datum		values[SUMMARY_COLUMNS];
	bool		nulls[SUMMARY_COLUMNS] = {0};
	int			i;
	Datum		relid;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE ||
		desc->natts != SUMMARY_COLUMNS)
		elog(ERROR, "idem_summary() returns another row type");
	store.table = idem_open_table(AccessShareLock, true, &store.rel);
	survey.stuck_since = GetCurrentTimestamp() - idem_health_stuck_after * USECS_PER_SEC;
	idem_survey(&store, &survey);
	relid = ObjectIdGetDatum(RelationGetRelid(store.rel));

	for (i = 0; i < IDEM_NSTATUS; i++)
		values[i] = Int64GetDatum(survey.rows[i]);
	values[i++] = Int64GetDatum(survey.expired);
	nulls[i] = survey.oldest == DT_NOEND;
	values[i] = idem_make_interval(nulls[i] ? 0 : survey.now - survey.oldest);
	i++;
	values[i++] = DirectFunctionCall1(pg_table_size, relid);
	values[i++] = DirectFunctionCall1(pg_indexes_size, relid);
	values[i++] = DirectFunctionCall1(pg_total_relation_size, relid);
	values[i++] = Int64GetDatum(survey.stuck);
	table_close(store.rel, AccessShareLock);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls)));
}
