/*-------------------------------------------------------------------------
 *
 * launcher.c
 *	  The process that knows which database is to be swept next.
 *
 * A loop around a list: whichever database is due first is visited by a
 * sweeper (sweeper.c), one at a time, and gets a new time by what came of it:
 *
 *	there is more to sweep		after the pause, so that whoever waits for the
 *								database to be free can have it
 *	nothing more to sweep		a naptime after the visit began
 *	no extension				when CREATE EXTENSION gives notice (notice.c),
 *								or much later
 *	an error					later and later, an hour at most
 *	a row that ends sweepers	soon, behind that row
 *	locked or gone				soon; a look that costs next to nothing
 *
 * Outside of idempotency.sweep_window the same sweeper looks at health only,
 * once a naptime; what is due stays due until the window opens.
 *
 * The list is read anew every naptime, and whenever there is notice.  Nothing
 * of it survives the process, and nothing needs to: who restarts begins with a
 * visit to each database.
 *
 * The launcher is registered with the server's start if the library is
 * preloaded, or by idem_start_worker().  Whichever holds the launcher's lock is
 * the one; others leave.  It is an advisory lock of no database, which no user
 * can take.
 *
 * Its exit codes: 0 means gone for good, which it is when somebody asked for
 * that (SIGUSR2, from idem_stop_worker()), or has done so before it was
 * restarted, or when there is another launcher.  Any other end, by a signal or
 * an error, is followed by a restart.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/xact.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "databases.h"
#include "idempotency.h"
#include "notice.h"
#include "settings.h"
#include "sweeper.h"
#include "ticks.h"
#include "window.h"
#include "worker.h"

#define RESTART_AFTER 5			/* seconds */

/* Milliseconds. */
#define SECOND INT64CONST(1000)
#define HOUR (3600 * SECOND)
#define GAP 250					/* between two visits: DROP DATABASE looks every 100 */
#define LONGEST_SLEEP HOUR

static volatile sig_atomic_t must_stop = false;

static IdemTicks next_reading = 0;	/* of pg_database */

/* Sweepers that could not be started, one after the other. */
static int	refusals = 0;
static IdemTicks refused_until = 0;

static void
request_stop(SIGNAL_ARGS)
{
	int			save_errno = errno;

	must_stop = true;
	SetLatch(MyLatch);
	errno = save_errno;
}

bool
idem_launcher_must_stop(void)
{
	return must_stop;
}

void
idem_launcher_describe(BackgroundWorker *worker)
{
	idem_worker_describe(worker, "idempotency launcher", "idem_launcher_main");
	worker->bgw_restart_time = RESTART_AFTER;
}

static void
launcher_tag(LOCKTAG *tag)
{
	SET_LOCKTAG_ADVISORY(*tag, InvalidOid, 0x6964656d, 0, 1);
}

/* The launcher's process id, 0 if there is none. */
int
idem_launcher_pid(void)
{
	LockData   *locks = GetLockStatusData();
	LOCKTAG		tag;
	int			pid = 0;

	launcher_tag(&tag);
	for (int i = 0; i < locks->nelements && pid == 0; i++)
		if (memcmp(&locks->locks[i].locktag, &tag, sizeof(tag)) == 0 &&
			locks->locks[i].holdMask != 0)
			pid = locks->locks[i].pid;
	pfree(locks->locks);
	pfree(locks);
	return pid;
}

static void
become_the_launcher(void)
{
	LOCKTAG		tag;

	launcher_tag(&tag);
	if (LockAcquire(&tag, ExclusiveLock, true, true) == LOCKACQUIRE_NOT_AVAIL)
		proc_exit(0);

	/* Who stops the worker says so, and then looks who has the lock. */
	if (idem_worker_is_stopped())
		proc_exit(0);
}

static int64
naptime(void)
{
	return idem_naptime * SECOND;
}

/* Twice as long with each failure, an hour at most. */
static int64
backed_off(int64 first, int failures, int64 longest)
{
	int64		delay = first;

	while (--failures > 0 && delay < longest)
		delay *= 2;
	return Max(Min(delay, longest), first);
}

/*
 * When to visit a database without the extension that gives no notice.  Spread
 * by OID, so that a server with many of them doesn't start so many sweepers in
 * a row.
 */
static int64
until_next_look(Oid database)
{
	int64		base = idem_notice_is_given() ? HOUR : Min(10 * naptime(), HOUR);
	uint32		spread = hash_uint32(database) % 512;

	return Max(base * (768 + spread) / 1024, naptime());
}

#define SWEEP_ALL "delete all expired idempotency keys"
#define LOOK_FOR_CODE "Look for foreign keys and triggers on table \"" IDEM_TABLE "\"."

/*
 * One WARNING where things turn bad, one line where they are well again.
 */
static void
note_failure(IdemDatabase *database, const char *what, const char *error, const char *hint)
{
	if (!database->failing)
		ereport(WARNING,
				(errmsg("could not %s in database \"%s\"", what, NameStr(database->name)),
				 errdetail_internal("%s", error),
				 errhint("%s There is no further message until it succeeds.", hint)));
	database->failing = true;
}

static void
note_success(IdemDatabase *database)
{
	if (database->failing)
		ereport(LOG,
				(errmsg("expired idempotency keys in database \"%s\" are swept again",
						NameStr(database->name))));
	database->failing = false;
}

static void
note_refusal(IdemTicks now)
{
	if (refusals++ == 0)
		ereport(WARNING,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("could not start an idempotency sweeper: no free background worker slot"),
				 errhint("Raise \"max_worker_processes\". There is no further message until one could be started.")));
	refused_until = idem_ticks_after(now, backed_off(SECOND, refusals, 60 * SECOND));
}

static void
note_start(void)
{
	if (refusals > 0)
		ereport(LOG, (errmsg("idempotency sweepers can be started again")));
	refusals = 0;
}

static void
forget_sweep(IdemDatabase *database)
{
	memset(&database->sweep, 0, sizeof(database->sweep));
	database->estimate = 0;
}

/* A naptime after the visit began, if it did not take longer than that. */
static IdemTicks
next_turn(IdemTicks begin, IdemTicks end)
{
	return Max(idem_ticks_after(begin, naptime()), idem_ticks_after(end, GAP));
}

/*
 * A visit has come to its end.  Rows that can't be deleted are reported, but
 * don't keep the others from being swept.
 */
static void
take_result(IdemDatabase *database, const IdemVisit *visit, IdemTicks begin, IdemTicks end)
{
	bool		moved = visit->deleted > 0 ||
		idem_compare_entries(&visit->sweep.position, &database->sweep.position) != 0;

	database->has_extension = visit->has_extension;
	if (visit->only_health && visit->has_extension)
		return;
	database->failures = 0;
	if (visit->sweep.failed > 0)
		note_failure(database, SWEEP_ALL, visit->sweep.error, LOOK_FOR_CODE);
	else if (!visit->has_extension)
		database->failing = false;
	else if (!visit->sweep.more && !visit->sweep.locked_out)
		note_success(database);

	if (!visit->has_extension && !visit->sweep.locked_out)
	{
		forget_sweep(database);
		database->due = idem_ticks_after(end, until_next_look(database->oid));
	}
	else if (visit->sweep.more && moved)
	{
		database->sweep = visit->sweep;
		database->estimate = visit->estimate;
		database->due = idem_ticks_after(end, Max(visit->pause, GAP));
	}
	else
	{
		forget_sweep(database);
		database->due = next_turn(begin, end);
	}
}

static void
take_failure(IdemDatabase *database, const IdemVisit *visit, IdemTicks end)
{
	if (!visit->only_health)
		forget_sweep(database);
	database->has_extension = visit->has_extension;
	database->failures++;
	database->due = idem_ticks_after(end, backed_off(naptime(), database->failures, HOUR));
	note_failure(database, "sweep expired idempotency keys", visit->error,
				 "It is tried again, after longer and longer pauses.");
}

/*
 * Code that a deletion runs has ended the sweeper: the next one goes on behind
 * the row.  Health has had no look, and gets one of its own before, since that
 * sweeper may be lost, too.
 */
static void
take_loss(IdemDatabase *database, const IdemVisit *visit, IdemTicks end)
{
	database->sweep = visit->sweep;
	database->estimate = visit->estimate;
	database->has_extension = true;
	database->failures = 1;
	if (visit->health)
		database->health_due = idem_ticks_after(end, GAP);
	database->due = idem_ticks_after(end, 2 * GAP);
	note_failure(database, SWEEP_ALL, visit->error, LOOK_FOR_CODE);
}

static void
call_on(IdemDatabase *database, bool only_health)
{
	IdemTicks	begin = idem_ticks();
	IdemTicks	end;
	IdemVisit	visit = {0};
	IdemVisitEnd how;

	visit.database = database->oid;
	visit.sweep = database->sweep;
	visit.estimate = database->estimate;
	visit.has_extension = database->has_extension;
	visit.memory = database->memory;
	visit.only_health = only_health;
	visit.health = only_health || begin >= database->health_due;
	how = idem_visit(&visit);
	end = idem_ticks();
	database->memory = visit.memory;

	if (how != IDEM_VISIT_NO_SLOT && how != IDEM_VISIT_NOT_NOW)
	{
		note_start();
		if (visit.health)
			database->health_due = next_turn(begin, end);
	}
	switch (how)
	{
		case IDEM_VISIT_DONE:
			take_result(database, &visit, begin, end);
			break;
		case IDEM_VISIT_FAILED:
			take_failure(database, &visit, end);
			break;
		case IDEM_VISIT_LOST:
			take_failure(database, &visit, end);
			database->health_due = database->due;	/* nothing can be looked at either */
			break;
		case IDEM_VISIT_LOST_AT_ROW:
			take_loss(database, &visit, end);
			break;
		case IDEM_VISIT_ENDED:
			forget_sweep(database);
			database->due = idem_ticks_after(end, naptime());
			break;
		case IDEM_VISIT_NOT_NOW:
			database->health_due = idem_ticks_after(end, SECOND);
			if (!only_health || !database->has_extension)
				database->due = database->health_due;
			break;
		case IDEM_VISIT_NO_SLOT:
			note_refusal(end);
			break;
	}
}

/* What there is notice of is due at once, and so is what is new in the list. */
static void
read_databases(IdemTicks now)
{
	Oid			created[IDEM_NOTICES];
	int			n = idem_notice_take(created);
	IdemDatabase *all;
	int			nall;

	idem_databases_read();
	next_reading = idem_ticks_after(now, naptime());
	nall = idem_databases(&all);

	if (n > IDEM_NOTICES)
		for (int i = 0; i < nall; i++)
			all[i].due = 0;
	else
		for (int i = 0; i < n; i++)
		{
			IdemDatabase *database = idem_database_by_oid(created[i]);

			if (database != NULL)
				database->due = 0;
		}
}

/*
 * Outside of the window, where there is health to look at, that is all.  It is
 * looked at as often where sweeps fail, and are tried less and less.
 */
static IdemTicks
due_time(const IdemDatabase *database, bool only_health)
{
	if (!database->has_extension)
		return database->due;
	if (only_health)
		return database->health_due;
	return database->failures > 0 ? Min(database->due, database->health_due) : database->due;
}

static IdemDatabase *
due_first(bool only_health)
{
	IdemDatabase *all;
	int			n = idem_databases(&all);
	IdemDatabase *first = NULL;

	for (int i = 0; i < n; i++)
		if (first == NULL || due_time(&all[i], only_health) < due_time(first, only_health))
			first = &all[i];
	return first;
}

/* Which databases, and when, may have changed. */
static void
reload(IdemTicks now)
{
	IdemDatabase *all;
	int			n = idem_databases(&all);

	ProcessConfigFile(PGC_SIGHUP);
	next_reading = now;
	for (int i = 0; i < n; i++)
	{
		all[i].health_due = Min(all[i].health_due, idem_ticks_after(now, naptime()));
		if (all[i].has_extension && all[i].failures == 0)
			all[i].due = Min(all[i].due, idem_ticks_after(now, naptime()));
	}
}

/* When the window may open, by any time zone and calendar: with a minute. */
static IdemTicks
next_minute(IdemTicks now, TimestampTz clock)
{
	return now + USECS_PER_MINUTE - ((clock % USECS_PER_MINUTE) + USECS_PER_MINUTE) % USECS_PER_MINUTE;
}

/* Does what there is to do, and returns when there will be more. */
static IdemTicks
turn(IdemTicks now)
{
	TimestampTz clock = GetCurrentTimestamp();
	bool		only_health = !idem_window_is_open(clock);
	IdemDatabase *database;
	IdemTicks	due;
	IdemTicks	next;

	if (!idem_worker)
		return idem_ticks_after(now, LONGEST_SLEEP);
	if (now >= next_reading)
		read_databases(now);
	next = only_health ? Min(next_reading, next_minute(now, clock)) : next_reading;
	database = due_first(only_health);
	if (database == NULL)
		return next;
	due = Max(due_time(database, only_health), refused_until);
	if (now < due)
		return Min(next, due);
	call_on(database, only_health || now < database->due);
	return now;
}

static void
sleep_until(IdemTicks until)
{
	static uint32 wait_event = 0;
	IdemTicks	now = idem_ticks();

	if (wait_event == 0)
		wait_event = idem_wait_event_new("IdempotencyLauncherMain");
	if (now < until)
		idem_sleep_once((until - now + 999) / 1000, wait_event);
	else
		ResetLatch(MyLatch);
}

void
idem_launcher_main(Datum arg)
{
	MemoryContext context;

	pqsignal(SIGUSR2, request_stop);
	idem_worker_begin();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	become_the_launcher();
	idem_notice_listen();
	pgstat_report_activity(STATE_IDLE, NULL);

	context = AllocSetContextCreate(TopMemoryContext, "idempotency launcher",
									ALLOCSET_DEFAULT_SIZES);
	for (;;)
	{
		IdemTicks	next;

		CHECK_FOR_INTERRUPTS();
		if (must_stop)
			proc_exit(0);
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			reload(idem_ticks());
		}
		if (idem_notice_is_pending())
			next_reading = 0;

		MemoryContextSwitchTo(context);
		next = turn(idem_ticks());
		MemoryContextReset(context);
		sleep_until(next);
	}
}
