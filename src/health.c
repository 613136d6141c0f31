/*-------------------------------------------------------------------------
 *
 * health.c
 *	  Is there anything an administrator should see to?
 *
 * One item for each thing that goes wrong slowly.  An item compares a value
 * with its threshold, a setting; above it, it warns.  What is looked at is
 * bounded, so that the worker can look after each of its sweeps: some pages of
 * the table, the entries of the index on due_at up to about the threshold, and
 * the counters of stats.c.  Without these, the items that need them say so.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "access/multixact.h"
#include "access/relation.h"
#include "access/table.h"
#include "access/transam.h"
#include "commands/dbcommands.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "postmaster/autovacuum.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/float.h"
#include "utils/guc.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "batch.h"
#include "health.h"
#include "settings.h"
#include "stats.h"
#include "survey.h"
#include "window.h"

/* So few reused keys tell nothing. */
#define REUSED_AT_LEAST 10
/* Held rows are counted up to the threshold, and to this. */
#define HELD_AT_LEAST 10000
/* How long a visit's look may take, in milliseconds. */
#define QUICK_LOOK 1000

typedef enum Level
{
	LEVEL_OK,
	LEVEL_WARNING,
	LEVEL_UNKNOWN,				/* it can't be told */
	LEVEL_OFF
} Level;

static const char *const level_names[] = {"ok", "warning", "unknown", "off"};

/* What the items are judged by. */
typedef struct Facts
{
	IdemStore	store;
	IdemSurvey	sample;
	IdemDueRows expired;
	IdemDueRows held;
	double		backlog;		/* rows that wait for a sweep */
	bool		exact;			/* or about so many */
	bool		counted;		/* are there counters? */
	IdemStats	stats;
	TimestampTz now;
} Facts;

typedef struct Finding
{
	Level		level;
	double		value;			/* NaN: none */
	double		threshold;		/* NaN: none */
	const char *message;
	IdemEvidence sampled;		/* all zero: the value is no estimate */
} Finding;

static double
seconds(int64 microseconds)
{
	return Max(microseconds, 0) / (double) USECS_PER_SEC;
}

static const char *
about(bool exactly)
{
	return exactly ? "" : "about ";
}

static Finding
judge(double value, double threshold, const char *message)
{
	Finding		item = {LEVEL_OK, value, threshold, message};

	if (threshold < 0)
	{
		item.level = LEVEL_OFF;
		item.threshold = get_float8_nan();
	}
	else if (value > threshold)
		item.level = LEVEL_WARNING;
	return item;
}

static Finding
cannot_tell(const char *message)
{
	Finding		item = {LEVEL_UNKNOWN, get_float8_nan(), get_float8_nan(), message};

	return item;
}

static Finding
no_counters(void)
{
	return cannot_tell("needs the counters: add 'idempotency' to shared_preload_libraries");
}

/* The length of idempotency.sweep_window in seconds, 0 if there is none. */
static double
window_length(void)
{
	return idem_window_minutes() * 60.0;
}

static Finding
check_backlog(const Facts *f)
{
	return judge(f->backlog, idem_health_backlog,
				 psprintf("expired rows that wait for a sweep: %s%.0f", about(f->exact), f->backlog));
}

/* When a sweep got on, or the counting of it began, last; not by a clock that was ahead. */
static TimestampTz
last_progress(const Facts *f)
{
	TimestampTz instants[] = {f->stats.last_sweep.end, f->stats.last_batch, f->stats.reset_at};
	TimestampTz last = DT_NOBEGIN;

	for (int i = 0; i < lengthof(instants); i++)
		if (instants[i] <= f->now)
			last = Max(last, instants[i]);
	return last;
}

/* For how long there has been something to sweep that nobody has swept. */
static Finding
check_sweep_overdue(const Facts *f)
{
	double		threshold = idem_health_sweep_overdue;
	TimestampTz since;
	double		waited;

	if (f->backlog == 0)
		return judge(0, threshold, "nothing waits for a sweep");
	/* Outside of the window nobody is late. */
	if (threshold >= 0 && window_length() > 0 && window_length() < 24 * 3600)
		threshold += 24 * 3600;
	since = f->expired.rows > 0 ? f->expired.oldest : f->sample.oldest;
	if (f->counted)
		since = Max(since, last_progress(f));
	waited = rint(seconds(f->now - since));
	return judge(waited, threshold,
				 psprintf("expired rows have waited for a sweep for %.0f s", waited));
}

static Finding
check_sweep_failing(const Facts *f)
{
	const IdemSweepRun *run = &f->stats.last_sweep;

	if (!f->counted)
		return no_counters();
	if (run->error[0] == '\0')
		return judge(0, 0, run->end == 0 ? "no sweep has run yet" : "the last sweep had no error");
	return judge(Max(run->failed, 1), 0, psprintf("the last sweep failed: %s", run->error));
}

/* Heap and indexes, without TOAST, against what the rows take up. */
static Finding
check_growth(const Facts *f)
{
	Relation	rel = f->store.rel;
	double		size = (double) RelationGetNumberOfBlocks(rel) * BLCKSZ +
		DatumGetInt64(DirectFunctionCall1(pg_indexes_size, ObjectIdGetDatum(RelationGetRelid(rel))));
	double		bytes = Max(f->sample.bytes * f->sample.scale, BLCKSZ);
	double		percent = rint(100 * size / bytes);

	/* One that is smaller may be as empty as it likes. */
	if (size < idem_health_growth_from * 1024.0 * 1024.0)
		percent = 100;
	return judge(percent, idem_health_growth,
				 psprintf("table and indexes take up %.0f MB, the rows in them %s%.0f MB",
						  size / (1024 * 1024), about(f->sample.scale == 1.0),
						  f->sample.bytes * f->sample.scale / (1024 * 1024)));
}

/*
 * What is counted above the threshold is above it.  An estimate above it may be
 * chance: if that can't be excluded, nobody knows.
 */
static Finding
check_stuck_claims(const Facts *f)
{
	double		scale = f->sample.scale;
	double		stuck = rint(f->sample.stuck * scale);
	double		threshold = idem_health_stuck_claims;
	Finding		item = judge(stuck, threshold,
							 psprintf("open claims whose lease ended more than %d s ago: %s%.0f",
									  idem_health_stuck_after, about(scale == 1.0), stuck));

	if (scale == 1.0 || threshold < 0)
		return item;
	item.message = psprintf("%s (" INT64_FORMAT " in a sample of the table)", item.message,
							f->sample.stuck);
	item.sampled.expected = (threshold + 0.5) / scale;
	item.sampled.found = f->sample.stuck;
	item.sampled.clump = Max(f->sample.stuck_clump, 1);
	if (f->sample.stuck > threshold || idem_surely_more(item.sampled))
		item.level = LEVEL_WARNING;
	else if (item.level == LEVEL_WARNING)
		item.level = LEVEL_UNKNOWN;
	return item;
}

static Finding
check_held_unknown(const Facts *f)
{
	if (!f->held.all && f->held.rows <= Max(idem_health_held_unknown, 0))
		return cannot_tell("the index on column \"due_at\" is missing, or full of entries of deleted rows");
	return judge(f->held.rows, idem_health_held_unknown,
				 psprintf("keys held until idem_resolve() settles them: %s" INT64_FORMAT,
						  f->held.all ? "" : "at least ", f->held.rows));
}

/* How long the backlog takes at the rate of the sweeps so far. */
static Finding
check_window(const Facts *f)
{
	double		window = window_length();
	double		swept = f->stats.counts[IDEM_COUNT_SWEPT_ROWS];
	double		needed = 0;

	if (window == 0)
	{
		Finding		item = {LEVEL_OK, get_float8_nan(), get_float8_nan(), "sweeps may run at any time"};

		return item;
	}
	if (!f->counted)
		return no_counters();
	if (f->backlog > 0)
	{
		if (swept == 0 || f->stats.sweeping <= 0)
			return cannot_tell("no sweep has deleted anything yet, so nobody knows how fast they are");
		needed = rint(f->backlog * seconds(f->stats.sweeping) / swept);
	}
	return judge(needed, window,
				 psprintf("the backlog takes about %.0f s to sweep, and the window is %.0f s long",
						  needed, window));
}

/* Age in transactions or multixacts, and at what age autovacuum is to step in. */
typedef struct Age
{
	double		age;
	double		max_age;
} Age;

static double
transaction_age(Relation rel)
{
	TransactionId frozen = rel->rd_rel->relfrozenxid;

	return TransactionIdIsNormal(frozen) ? (int32) (ReadNextTransactionId() - frozen) : 0;
}

/* Row locks make them; a TOAST table has none. */
static double
multixact_age(Relation rel)
{
	MultiXactId oldest = rel->rd_rel->relminmxid;

	return MultiXactIdIsValid(oldest) ? (int32) (ReadNextMultiXactId() - oldest) : 0;
}

static double
toast_age(Oid toast)
{
	Relation	rel;
	double		age;

	if (!OidIsValid(toast))
		return 0;
	rel = relation_open(toast, AccessShareLock);
	age = transaction_age(rel);
	relation_close(rel, AccessShareLock);
	return age;
}

static Age
make_age(double age, int max_age, const int *tables_own)
{
	Age			made = {age, max_age};

	if (tables_own != NULL && *tables_own >= 0)
		made.max_age = Min(max_age, *tables_own);
	return made;
}

static Finding
check_wraparound(const Facts *f)
{
	Relation	rel = f->store.rel;
	StdRdOptions *options = (StdRdOptions *) rel->rd_options;
	Age			xid = make_age(Max(transaction_age(rel), toast_age(rel->rd_rel->reltoastrelid)),
							   autovacuum_freeze_max_age,
							   options != NULL ? &options->autovacuum.freeze_max_age : NULL);
	Age			multixact = make_age(multixact_age(rel), autovacuum_multixact_freeze_max_age,
									 options != NULL ? &options->autovacuum.multixact_freeze_max_age : NULL);
	bool		by_multixact = multixact.age * xid.max_age > xid.age * multixact.max_age;
	Age			worse = by_multixact ? multixact : xid;

	return judge(worse.age, idem_health_wraparound < 0 ? -1 : worse.max_age * idem_health_wraparound / 100,
				 psprintf(by_multixact ?
						  "the table's oldest multixact is %.0f multixacts old; autovacuum is to freeze it at %.0f" :
						  "the table's oldest transaction is %.0f transactions old; autovacuum is to freeze it at %.0f",
						  worse.age, worse.max_age));
}

static Finding
check_ttl_too_short(const Facts *f)
{
	const uint64 *counts = f->stats.counts;
	double		reused = counts[IDEM_COUNT_REUSED];
	double		claims = counts[IDEM_COUNT_CLAIMS] + counts[IDEM_COUNT_ONCE_FIRST];
	double		percent = claims > 0 ? rint(10000 * reused / claims) / 100 : 0;

	if (!f->counted)
		return no_counters();
	return judge(reused < REUSED_AT_LEAST ? 0 : percent, idem_health_ttl_too_short,
				 psprintf("claims of keys that had expired less than their ttl ago: %.0f of %.0f",
						  reused, claims));
}

static const struct
{
	const char *name;
	Finding		(*check) (const Facts *facts);
}			items[] =
{
	{"backlog", check_backlog},
	{"sweep_overdue", check_sweep_overdue},
	{"sweep_failing", check_sweep_failing},
	{"growth", check_growth},
	{"stuck_claims", check_stuck_claims},
	{"held_unknown", check_held_unknown},
	{"window", check_window},
	{"wraparound", check_wraparound},
	{"ttl_too_short", check_ttl_too_short},
};

#define NITEMS lengthof(items)

/*
 * Looks at the table in the store, which stays open.  The worker's look is one
 * of a second, shared out: what is not in memory is not read to the end.
 */
static void
gather(Facts *f, bool quickly)
{
	IdemTicks	begin = idem_ticks();
	IdemTicks	until[3] = {0};

	if (quickly)
		for (int i = 0; i < lengthof(until); i++)
			until[i] = idem_ticks_after(begin, (i + 1) * QUICK_LOOK / lengthof(until));
	f->sample.until = until[0];
	f->sample.stuck_since = GetCurrentTimestamp() - idem_health_stuck_after * USECS_PER_SEC;
	idem_survey_sample(&f->store, &f->sample);
	f->expired = idem_expired_rows(&f->store, Max(idem_health_backlog, 0) + INT64CONST(1), until[1]);
	f->held = idem_held_rows(&f->store, Max(idem_health_held_unknown, HELD_AT_LEAST) + INT64CONST(1),
							 until[2]);
	f->backlog = f->expired.rows;
	f->exact = f->expired.all || f->sample.scale == 1.0;
	if (!f->expired.all)
		f->backlog = Max(f->backlog, rint(f->sample.expired * f->sample.scale));
	f->counted = idem_stats_read(&f->stats);
	f->now = GetCurrentTimestamp(); /* after all that is counted */
}

static Datum
make_numeric(double value)
{
	return DirectFunctionCall1(float8_numeric, Float8GetDatum(value));
}

/*
 * idem_health() -> setof (item text, level text, value numeric,
 *						   threshold numeric, message text)
 *
 * What an administrator should see to, and what is well.
 *
 * Errors: 42501.
 */
PG_FUNCTION_INFO_V1(idem_health);
Datum
idem_health(PG_FUNCTION_ARGS)
{
	Facts		facts = {0};
	TupleDesc	desc;
	Tuplestorestate *set = idem_begin_set(fcinfo, &desc);

	if (desc->natts != 5)
		elog(ERROR, "idem_health() returns %d columns", desc->natts);
	facts.store.table = idem_open_table(AccessShareLock, true, &facts.store.rel);
	gather(&facts, false);
	for (int i = 0; i < NITEMS; i++)
	{
		Finding		item = items[i].check(&facts);
		Datum		values[5] = {0};
		bool		nulls[5] = {0};

		values[0] = CStringGetTextDatum(items[i].name);
		values[1] = CStringGetTextDatum(level_names[item.level]);
		nulls[2] = isnan(item.value);
		if (!nulls[2])
			values[2] = make_numeric(item.value);
		nulls[3] = isnan(item.threshold);
		if (!nulls[3])
			values[3] = make_numeric(item.threshold);
		values[4] = CStringGetTextDatum(item.message);
		tuplestore_putvalues(set, desc, values, nulls);
	}
	table_close(facts.store.rel, AccessShareLock);
	return (Datum) 0;
}

static void
report_turn(const char *database, const char *name, const Finding *item)
{
	if (item->level == LEVEL_WARNING)
		ereport(WARNING,
				(errmsg("idempotency keys in database \"%s\" need attention: %s", database, item->message),
				 errdetail("Item \"%s\" of idem_health() is at %.15g, its threshold at %.15g.",
						   name, item->value, item->threshold)));
	else
		ereport(LOG,
				(errmsg("item \"%s\" of idem_health() in database \"%s\" is well again: %s",
						name, database, item->message)));
}

/*
 * Estimates are judged by all that there were since the item was last counted, or
 * had another threshold.
 */
static Level
level_of_stuck_claims(const Finding *item, IdemHealthMemory *memory)
{
	static const Level levels[] = {
		[IDEM_UNDECIDED] = LEVEL_UNKNOWN, [IDEM_MORE] = LEVEL_WARNING, [IDEM_LESS] = LEVEL_OK
	};
	bool		sampled = item->sampled.expected > 0;

	if (!sampled || item->threshold != memory->threshold)
		memset(&memory->stuck_claims, 0, sizeof(memory->stuck_claims));
	memory->threshold = item->threshold;
	if (!sampled)
		return item->level;
	return levels[idem_weigh(&memory->stuck_claims, item->sampled, item->level == LEVEL_WARNING)];
}

/*
 * Tells the log of the items that have turned since the last report in this
 * database, one line each; of one that was turned off it says nothing.  Needs
 * a transaction with an active snapshot; does nothing while somebody has the
 * table locked.
 */
void
idem_health_report(IdemHealthMemory *memory)
{
	Facts		facts = {0};
	Finding		checked[NITEMS];
	uint32		bad = 0;
	uint32		well = 0;
	uint32		turned;

	facts.store.table = idem_open_table(AccessShareLock, false, &facts.store.rel);
	if (facts.store.table == NULL)
		return;
	gather(&facts, true);
	for (int i = 0; i < NITEMS; i++)
	{
		checked[i] = items[i].check(&facts);
		if (items[i].check == check_stuck_claims)
			checked[i].level = level_of_stuck_claims(&checked[i], memory);
		if (checked[i].level == LEVEL_WARNING)
			bad |= 1U << i;
		else if (checked[i].level != LEVEL_UNKNOWN)
			well |= 1U << i;
	}
	table_close(facts.store.rel, AccessShareLock);

	turned = idem_stats_turn(bad, well, &memory->bad_items);
	for (int i = 0; i < NITEMS; i++)
		if ((turned & (1U << i)) && checked[i].level != LEVEL_OFF)
			report_turn(get_database_name(MyDatabaseId), items[i].name, &checked[i]);
}

/* The same from SQL, for tests: the extension makes no function of it. */
PG_FUNCTION_INFO_V1(idem_health_report_now);
Datum
idem_health_report_now(PG_FUNCTION_ARGS)
{
	static IdemHealthMemory memory = {0};

	idem_health_report(&memory);
	PG_RETURN_VOID();
}
