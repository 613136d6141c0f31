/*-------------------------------------------------------------------------
 *
 * sweeper.c
 *	  The process that sweeps one database for a moment, and how the launcher
 *	  starts it and hears from it.
 *
 * A connection stands in the way of DROP, RENAME and CREATE DATABASE ...
 * TEMPLATE, which wait five seconds at most for it to go away.  So a sweeper
 * leaves after a second, whatever is left to do, and the launcher lets some
 * time pass before it starts the next one.
 *
 * A database can be dropped between the look into pg_database and the
 * connection, which would then be a FATAL error.  So the launcher takes the
 * lock that a connection takes, if nobody stands in its way, looks again, and
 * keeps it until the sweeper is connected.  A DROP that queues behind it would
 * in turn have the sweeper queue behind the DROP: all three would wait for
 * ever.  As members of one lock group, like a parallel query's processes,
 * launcher and sweeper are one to the lock manager, and the sweeper gets in.
 *
 * The two talk through a segment of dynamic shared memory, which is there
 * without preload too.  It is the launcher's, made once; the sweeper finds its
 * handle in bgw_extra.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "catalog/pg_extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "port/atomics.h"
#include "postmaster/interrupt.h"
#include "storage/dsm.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/guc.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "databases.h"
#include "extension.h"
#include "health.h"
#include "settings.h"
#include "stats.h"
#include "sweeper.h"
#include "ticks.h"
#include "worker.h"

#define VISIT_LASTS 1000		/* milliseconds, at most */
#define GIVEN_UP_AFTER 60000	/* the same, for one that does not come to an end */
#define LONGEST_WAIT "5ms"		/* for a lock, of which a sweeper should wait for none */

typedef enum Progress
{
	STARTED,
	CONNECTED,
	TERMINATED,
	FAILED,
	FINISHED
} Progress;

/* Each side writes the visit only while it is its turn; progress hands it over. */
typedef struct Desk
{
	PGPROC	   *launcher;		/* in shared memory, the same address everywhere */
	int			launcher_pid;
	pg_atomic_uint32 progress;
	IdemVisit	visit;
	IdemEntry	trying;			/* the row that the sweeper is at, if it may end it */
} Desk;

static Desk *desk = NULL;

/*
 * How the sweeper finds the desk.  A launcher that isn't preloaded may run an
 * older library than the sweeper, whose desk looks otherwise.
 */
typedef struct Invitation
{
	dsm_handle	segment;
	Size		desk_size;
} Invitation;

StaticAssertDecl(sizeof(Invitation) <= BGW_EXTRALEN, "an invitation must fit into bgw_extra");

/*
 * The launcher's side
 */

static dsm_segment *
own_segment(void)
{
	static dsm_segment *segment = NULL;

	if (segment == NULL)
	{
		dsm_segment *new = dsm_create(sizeof(Desk), 0);

		dsm_pin_mapping(new);
		desk = dsm_segment_address(new);
		pg_atomic_init_u32(&desk->progress, STARTED);
		desk->launcher = MyProc;
		desk->launcher_pid = MyProcPid;
		BecomeLockGroupLeader();
		segment = new;
	}
	return segment;
}

static BackgroundWorkerHandle *
start(void)
{
	Invitation	invitation = {dsm_segment_handle(own_segment()), sizeof(Desk)};
	BackgroundWorker worker;
	BackgroundWorkerHandle *handle = NULL;

	idem_worker_describe(&worker, "idempotency sweeper", "idem_sweeper_main");
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_notify_pid = MyProcPid;
	worker.bgw_main_arg = ObjectIdGetDatum(desk->visit.database);
	memcpy(worker.bgw_extra, &invitation, sizeof(invitation));
	return RegisterDynamicBackgroundWorker(&worker, &handle) ? handle : NULL;
}

/* Until the sweeper is that far, or gone; returns false if it had to be ended. */
static bool
await(BackgroundWorkerHandle *handle, Progress progress)
{
	bool		in_time = true;
	static uint32 wait_event = 0;
	IdemTicks	patience = idem_ticks_after(idem_ticks(), GIVEN_UP_AFTER);
	pid_t		pid;

	if (wait_event == 0)
		wait_event = idem_wait_event_new("IdempotencySweeper");
	for (;;)
	{
		if (pg_atomic_read_u32(&desk->progress) >= progress ||
			GetBackgroundWorkerPid(handle, &pid) == BGWH_STOPPED)
			break;
		if (idem_ticks() >= patience)
			in_time = false;
		if (idem_launcher_must_stop() || !in_time)
			TerminateBackgroundWorker(handle);
		idem_sleep_once(1000, wait_event);
	}
	pg_read_barrier();
	return in_time;
}

/* Starts a sweeper if the database is to be had. */
static IdemVisitEnd
send_sweeper(Oid database, BackgroundWorkerHandle **handle)
{
	IdemVisitEnd end = IDEM_VISIT_NOT_NOW;
	MemoryContext context = CurrentMemoryContext;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	MemoryContextSwitchTo(context);
	if (idem_try_lock_object(InvalidOid, DatabaseRelationId, database, RowExclusiveLock) &&
		idem_database_is_open(database))
	{
		*handle = start();
		end = *handle != NULL ? IDEM_VISIT_DONE : IDEM_VISIT_NO_SLOT;
		if (*handle != NULL)
			(void) await(*handle, CONNECTED);
	}
	CommitTransactionCommand();
	MemoryContextSwitchTo(context);
	return end;
}

/*
 * Has a database swept for a moment.  The memory that this takes in the
 * current context is the caller's to free.
 */
IdemVisitEnd
idem_visit(IdemVisit *visit)
{
	BackgroundWorkerHandle *handle = NULL;
	IdemVisitEnd end;
	bool		in_time;

	(void) own_segment();
	visit->error[0] = '\0';
	desk->visit = *visit;
	desk->trying.valid = false;
	pg_atomic_write_u32(&desk->progress, STARTED);
	pg_memory_barrier();

	end = send_sweeper(visit->database, &handle);
	if (end != IDEM_VISIT_DONE)
		return end;

	/* To its very end: its connection has to be gone, and its slot free. */
	in_time = await(handle, FINISHED + 1);
	*visit = desk->visit;
	switch ((Progress) pg_atomic_read_u32(&desk->progress))
	{
		case FINISHED:
			return IDEM_VISIT_DONE;
		case FAILED:
			return IDEM_VISIT_FAILED;
		case TERMINATED:
			if (in_time)
				return IDEM_VISIT_ENDED;
			break;
		default:
			/* Before it could say that it was terminated: by us, above. */
			if (idem_launcher_must_stop())
				return IDEM_VISIT_ENDED;
			break;
	}
	strlcpy(visit->error, in_time ? "The sweeper ended before it had a result." :
			"The sweeper came to no end, and was terminated.", sizeof(visit->error));
	if (!desk->trying.valid)
		return IDEM_VISIT_LOST;
	visit->sweep.deadly = desk->trying;
	return IDEM_VISIT_LOST_AT_ROW;
}

/*
 * The sweeper's side
 */

static void
tell(Progress progress)
{
	PGPROC	   *launcher;

	pg_write_barrier();
	pg_atomic_write_u32(&desk->progress, progress);
	launcher = BackendPidGetProc(desk->launcher_pid);
	if (launcher != NULL)
		SetLatch(&launcher->procLatch);
}

/* While the segment is still attached: before_shmem_exit. */
static void
tell_termination(int code, Datum arg)
{
	if (idem_worker_was_terminated() && pg_atomic_read_u32(&desk->progress) < TERMINATED)
		tell(TERMINATED);
}

static void
join_launcher(void)
{
	Invitation	invitation;
	dsm_segment *segment;

	memcpy(&invitation, MyBgworkerEntry->bgw_extra, sizeof(invitation));
	if (invitation.desk_size != sizeof(Desk))
		ereport(FATAL,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the idempotency launcher runs another version of the library"),
				 errhint("Restart it: call idem_stop_worker() and idem_start_worker().")));

	/* The launcher has gone: nobody wants to know, and it will be back. */
	segment = dsm_attach(invitation.segment);
	if (segment == NULL)
		proc_exit(0);
	dsm_pin_mapping(segment);
	desk = dsm_segment_address(segment);
	if (!BecomeLockGroupMember(desk->launcher, desk->launcher_pid))
		proc_exit(0);
	before_shmem_exit(tell_termination, 0);
}

typedef enum Presence
{
	ABSENT,
	BUSY,						/* somebody drops or alters it */
	PRESENT
} Presence;

/*
 * Finds the extension, if the database is to be visited, and keeps it as it is
 * until the transaction's end.
 */
static Presence
lock_extension(void)
{
	Oid			extension;
	Oid			again;
	Oid			schema;

	if (!idem_database_is_open(MyDatabaseId) || !idem_find_extension(&extension, &schema))
		return ABSENT;
	if (!idem_try_lock_object(MyDatabaseId, ExtensionRelationId, extension, AccessShareLock))
		return BUSY;

	/* Dropped while we looked, and perhaps created anew: that is next time's. */
	if (!idem_find_extension(&again, &schema))
		return ABSENT;
	return again == extension ? PRESENT : BUSY;
}

static void
begin_transaction(void)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
}

/* Autovacuum has to hear of what was deleted. */
static void
commit_transaction(void)
{
	PopActiveSnapshot();
	CommitTransactionCommand();
	(void) pgstat_report_stat(true);
}

/*
 * A batch in a transaction of its own; returns whether there is another one.
 * What the visit says stays true if the transaction fails.
 */
static bool
sweep_batch(IdemVisit *visit)
{
	IdemSweep	sweep = visit->sweep;
	Presence	presence;

	begin_transaction();
	presence = lock_extension();
	visit->has_extension = presence != ABSENT;
	sweep.more = false;
	sweep.locked_out = presence == BUSY;
	if (presence == PRESENT)
	{
		idem_stats_prepare();
		idem_count_batch(idem_sweep_batch(&sweep, idem_sweep_batch_size));
	}
	commit_transaction();

	visit->deleted += sweep.deleted - visit->sweep.deleted;
	visit->sweep = sweep;
	return sweep.more;
}

/* What a sweep has before it that takes more than one batch. */
static void
estimate(IdemVisit *visit)
{
	begin_transaction();
	if (lock_extension() == PRESENT)
		visit->estimate = Min(visit->sweep.deleted + idem_sweep_estimate(IDEM_ESTIMATE_UP_TO, visit->sweep.until),
							  IDEM_ESTIMATE_UP_TO);
	commit_transaction();
}

static void
show_progress(const IdemVisit *visit)
{
	char	   *text = idem_sweep_progress(&visit->sweep, visit->estimate);
	char	   *activity = psprintf("idempotency sweeper: %s", text);

	pgstat_report_activity(STATE_RUNNING, activity);
	pfree(activity);
	pfree(text);
}

/*
 * Returns false if the pause is too long to stay connected.  What a loss has
 * cost is made good for without pauses.
 */
static bool
rest(IdemVisit *visit)
{
	if (ConfigReloadPending)
	{
		ConfigReloadPending = false;
		ProcessConfigFile(PGC_SIGHUP);
	}
	visit->pause = visit->sweep.deadly.valid ? 0 : idem_sweep_pause;
	if (idem_ticks_after(idem_ticks(), visit->pause) >= visit->sweep.until ||
		!idem_worker)
		return false;
	idem_sleep_between_batches(visit->pause * INT64CONST(1000));
	CHECK_FOR_INTERRUPTS();
	return true;
}

static void
sweep(IdemVisit *visit)
{
	visit->sweep.own_transaction = true;
	visit->sweep.until = idem_ticks_after(idem_ticks(), VISIT_LASTS);
	visit->sweep.trying = &desk->trying;
	while (sweep_batch(visit))
	{
		desk->visit = *visit;	/* what is done, should the next one be lost */
		if (visit->estimate == 0)
			estimate(visit);
		show_progress(visit);
		if (!rest(visit))
			break;
	}
}

/* Tells the log what has turned bad or well in the database. */
static void
look_at_health(IdemVisit *visit)
{
	Presence	presence;

	begin_transaction();
	presence = lock_extension();
	visit->has_extension = presence != ABSENT;
	if (presence == PRESENT)
		idem_health_report(&visit->memory);
	commit_transaction();
}

/*
 * Does a part of the visit; an error ends that part only, and leaves its
 * message and no transaction.  Returns false where it ends for want of a lock,
 * which is no error: somebody has locked more than the table.
 */
static bool
carefully(void (*part) (IdemVisit *visit), IdemVisit *visit, char *message)
{
	MemoryContext context = CurrentMemoryContext;
	volatile bool locked_out = false;

	message[0] = '\0';
	PG_TRY();
	{
		part(visit);
	}
	PG_CATCH();
	{
		ErrorData  *error;

		HOLD_INTERRUPTS();
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		AbortCurrentTransaction();
		locked_out = error->sqlerrcode == ERRCODE_LOCK_NOT_AVAILABLE;
		if (!locked_out)
			idem_copy_error(message, error->message);
		RESUME_INTERRUPTS();
	}
	PG_END_TRY();
	return !locked_out;
}

/*
 * A visit is a run, unless nobody let it begin.  One that goes on behind rows
 * that can't be deleted has failed to delete them all the same, and one whose
 * sweeper is lost at a row leaves those it met to be counted by the next.
 */
static void
count_run(IdemVisit *visit, TimestampTz begin)
{
	const char *error = visit->error[0] != '\0' ? visit->error :
		visit->sweep.failed > 0 ? visit->sweep.error : NULL;

	if (!visit->has_extension || (visit->sweep.locked_out && visit->deleted == 0))
		return;
	idem_stats_sweep_run(visit->deleted, visit->sweep.failed,
						 visit->sweep.failed - visit->sweep.failed_counted + (visit->error[0] != '\0'),
						 error, begin, GetCurrentTimestamp());
	visit->sweep.failed_counted = visit->sweep.failed;
}

/* Somebody has locked more than the table: next time. */
static void
give_up(IdemVisit *visit)
{
	visit->sweep.more = false;
	visit->sweep.locked_out = true;
}

static void
sweep_and_count(IdemVisit *visit)
{
	TimestampTz begin = GetCurrentTimestamp();

	idem_stats_sweep_begin(begin);
	if (!carefully(sweep, visit, visit->error))
		give_up(visit);
	count_run(visit, begin);
}

/*
 * False if somebody has locked a catalog: what is half done of the connection
 * goes with the process.  That connections are forbidden is no error here: we
 * see, and go.
 */
static bool
connect_to(Oid database)
{
	volatile bool connected = true;

	PG_TRY();
	{
		BackgroundWorkerInitializeConnectionByOid(database, InvalidOid, BGWORKER_BYPASS_ALLOWCONN);
	}
	PG_CATCH();
	{
		if (geterrcode() != ERRCODE_LOCK_NOT_AVAILABLE)
			PG_RE_THROW();
		FlushErrorState();
		connected = false;
	}
	PG_END_TRY();
	return connected;
}

/*
 * The process.  It is never restarted, so its exit code means nothing.
 *
 * Health is looked at last, since the run is a part of it, and whatever the
 * run's end: an error of the sweep is the launcher's to report, and one of the
 * look is that of idem_health(), where it is to be seen.
 */
void
idem_sweeper_main(Datum arg)
{
	IdemVisit	visit;
	char		unheard[sizeof(visit.error)];

	idem_worker_begin();
	join_launcher();
	visit = desk->visit;

	SetConfigOption("lock_timeout", LONGEST_WAIT, PGC_SUSET, PGC_S_OVERRIDE);
	if (connect_to(DatumGetObjectId(arg)))
	{
		tell(CONNECTED);
		pgstat_report_activity(STATE_RUNNING, "idempotency sweeper");
		if (!visit.only_health)
			sweep_and_count(&visit);
		if (visit.health && !carefully(look_at_health, &visit, unheard) && visit.only_health)
			give_up(&visit);
	}
	else
		give_up(&visit);
	desk->visit = visit;
	tell(visit.error[0] == '\0' ? FINISHED : FAILED);
	proc_exit(0);
}
