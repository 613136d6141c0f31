/*-------------------------------------------------------------------------
 *
 * wait.c
 *	  Waiting until a key may have changed.
 *
 * A waiter holds nothing meanwhile but what any statement holds, so it stands
 * in nobody's way and leaves nothing behind when it is cancelled.  How long it
 * has waited is told by a clock that nobody sets.
 *
 * It sleeps until whoever has changed the key wakes it (waiters.c), or the
 * lease ends.  Some changes nobody announces: the commit of a prepared
 * transaction, which any session may do, a change to the table by hand, and
 * everything where the library isn't preloaded.  For the first and the last
 * it looks again after a millisecond, doubling up to 32; a look each second
 * makes good for the rest.
 *
 * Who waits without limit for an open transaction waits in the lock manager,
 * as a row lock does, so that a deadlock is found.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/subtrans.h"
#include "access/xlog.h"
#include "storage/lmgr.h"
#include "storage/procarray.h"
#include "utils/timestamp.h"

#include "args.h"
#include "compat.h"
#include "wait.h"
#include "waiters.h"

#define FIRST_PAUSE		INT64CONST(1000)
#define LONGEST_PAUSE	INT64CONST(32000)
#define LONGEST_SLEEP	USECS_PER_SEC

/* How long a claim looks again for a row that is just being swept. */
#define BRIEFLY			INT64CONST(30000)

/*
 * A standby is no place to wait in: the statement's snapshot holds up the
 * replay that would bring what we wait for, and a recovery conflict ends it.
 */
void
idem_wait_begin(IdemWait *wait, int64 duration)
{
	INSTR_TIME_SET_CURRENT(wait->start);
	wait->duration = RecoveryInProgress() ? 0 : duration;
	wait->pause = FIRST_PAUSE;
}

static int64
elapsed(const IdemWait *wait)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	INSTR_TIME_SUBTRACT(now, wait->start);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}

static int64
limit(const IdemWait *wait, bool briefly)
{
	return briefly ? Max(wait->duration, BRIEFLY) : wait->duration;
}

/* May no more time be spent, or with briefly: not even the little there is? */
bool
idem_wait_is_over(const IdemWait *wait, bool briefly)
{
	int64		may_last = limit(wait, briefly);

	return may_last == 0 || elapsed(wait) >= may_last;
}

/* Will somebody wake us when the obstacle goes? */
static bool
is_announced(const IdemObstacle *obstacle)
{
	if (!idem_waiters_are_woken() || obstacle->brief)
		return false;
	if (!TransactionIdIsValid(obstacle->xid))
		return true;
	/* A prepared transaction has no process. */
	return BackendXidGetPid(SubTransGetTopmostTransaction(obstacle->xid)) != 0;
}

static void
sleep_for(int64 pause, uint64 key)
{
	static uint32 wait_event = 0;

	if (wait_event == 0)
		wait_event = idem_wait_event_new("IdempotencyKey");

	/* Rounded up, so that the instant waited for has come when we wake. */
	idem_waiters_sleep(key, (long) ((pause + 999) / 1000), wait_event);
}

/* Waits a while, or for as long as the obstacle is there; look again then. */
void
idem_wait_pause(IdemWait *wait, const IdemObstacle *obstacle)
{
	TimestampTz now;
	int64		pause = LONGEST_SLEEP;
	int64		left;

	if (wait->duration == IDEM_FOREVER && TransactionIdIsValid(obstacle->xid))
	{
		XactLockTableWait(obstacle->xid, NULL, NULL, XLTW_None);
		return;
	}
	if (!is_announced(obstacle))
	{
		pause = wait->pause;
		wait->pause = Min(wait->pause * 2, LONGEST_PAUSE);
	}
	left = limit(wait, obstacle->brief) - elapsed(wait);
	if (left > 0)
		pause = Min(pause, left);
	now = GetCurrentTimestamp();
	if (obstacle->lease_until > now)
		pause = Min(pause, obstacle->lease_until - now);
	sleep_for(pause, obstacle->key);
}

/* To be called where no error has ended the wait. */
void
idem_wait_end(void)
{
	if (idem_waiters_are_woken())
		idem_waiters_leave();
}
